"""The places in real SGLang that the adapters hook on are where, and what, they were written against."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from lockstep_engine import autotune_keep

MANIFEST = json.loads(Path(__file__).with_name("hook_manifest.json").read_text())
VERSION = "0.5.21"


def found(site: list[Path], symbol: str) -> ast.FunctionDef:
    module, name = symbol.split(":")
    (path,) = [
        folder / f"{module.replace('.', '/')}.py"
        for folder in site
        if (folder / f"{module.replace('.', '/')}.py").is_file()
    ]
    (node,) = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    return node


@pytest.mark.parametrize("symbol", sorted(MANIFEST))
def test_a_hooked_function_is_the_one_of_the_manifest(site, symbol):
    """The manifest was made by another program, from the syntax tree without docstrings."""
    node = found(site, symbol)
    expected = MANIFEST[symbol][VERSION]
    assert ast.unparse(node.args) == expected["sig"]
    assert node.lineno == expected["line"]
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    assert hashlib.sha256(ast.dump(node, annotate_fields=False).encode()).hexdigest()[:12] == expected["sha"]


INSPECT = """
import json, sglang.srt.model_executor.runner.flashinfer_autotune as module
import sglang.srt.managers.scheduler as scheduler
from lockstep_engine import autotune_keep, engine, loader
names = ["_autotune_cache_digest", "_drop_diverged_autotune_cache", "flashinfer_autotune_context"]
print(json.dumps({
    "version": engine.version(), "split": engine.split(), "cuda": engine.no_accelerator(), "notes": engine.notes(),
    "bodies": [engine.body_hash(getattr(module, name)) for name in names],
    "owners": [getattr(module, name).__module__ for name in names], "states": loader._states,
    "scheduler": [scheduler.configure_scheduler_process.__module__, scheduler.run_scheduler_process.__module__],
}))
"""


@pytest.fixture(scope="module")
def seen(forks) -> list[dict[str, Any]]:
    """The engine with DSV41_AUTOTUNE_KEEP off, and on."""
    outputs = forks(INSPECT, [{"DSV41_AUTOTUNE_KEEP": "0"}, {"DSV41_AUTOTUNE_KEEP": "1"}])
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_stock_functions_have_the_bodies_that_the_adapter_knows(seen):
    off, _ = seen
    assert off["version"] == VERSION
    known = [autotune_keep._DIGEST, autotune_keep._DROP, autotune_keep._CONTEXT]
    assert [VERSION in bodies[body] for bodies, body in zip(known, off["bodies"], strict=True)] == [True, True, True]
    assert set(off["owners"]) == {"sglang.srt.model_executor.runner.flashinfer_autotune"}
    assert off["split"] == "rows"  # SGLang 0.5.21 and 0.5.22 split by rows
    assert off["cuda"] == "no CUDA device"


def test_the_switch_replaces_them_and_knows_this_version(seen):
    _, on = seen
    assert set(on["owners"]) == {"lockstep_engine.autotune_keep"}
    assert on["states"] == {"DSV41_AUTOTUNE_KEEP": "armed"}
    assert on["notes"] == []


def test_the_scheduler_is_hooked_where_a_process_of_it_starts(seen):
    for one in seen:
        assert one["scheduler"] == ["lockstep_engine.loader", "sglang.srt.managers.scheduler"]


def test_all_modules_that_later_adapters_hook_on_import_here(forks):
    modules = (
        "models.deepseek_v4",
        "models.deepseek_v4_dspark",
        "layers.engram",
        "speculative.dspark_components.dspark_verify",
        "speculative.dspark_components.dspark_draft",
        "speculative.dspark_components.dspark_draft_sampler",
    )
    names = [f"sglang.srt.{name}" for name in modules]
    (output,) = forks(f"import importlib\nfor name in {names}: print(importlib.import_module(name).__name__)", [{}])
    assert output.splitlines() == names
