"""Which switches are on, and the hooks in real Python processes around stand-ins of the engine's modules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from lockstep_engine import loader

ROOT = Path(__file__).resolve().parents[3]
SIMULATOR = ROOT / "tests/lab/engines/sim"

SCHEDULER = "def configure_scheduler_process(server_args, gpu_id, display_tp_rank=None):\n    print('configured')\n"
FLASHINFER = """
    def _autotune_cache_digest(cache_path, env): return 'stock'
    def _drop_diverged_autotune_cache(cache_path, group, env): pass
    def flashinfer_autotune_context(model_runner, *, run_lm_head): pass
"""


def test_the_default_arms_values_turn_nothing_on():
    """Adapter switches are 0 unless an arm sets them; a draft temperature of 1 is off."""
    off = dict.fromkeys(loader.SWITCHES, "0") | {"DSV41_PACKED_DIR": "", "DSV41_DRAFT_TAU": "1"}
    assert loader.switched_on(off) == []
    assert loader.switched_on({"DSV41_DRAFT_TAU": "1.0", "DSV41_VERIFY_CAP": "off"}) == []


def test_what_is_on_is_named_and_what_the_engine_reads_itself_is_not():
    env = {
        "DSV41_PACKED_DIR": "/engram",
        "DSV41_VERIFY_CAP": "conf:0.1",
        "DSV41_DRAFT_TAU": "0.8",
        "DSV41_AUTOTUNE_KEEP": "1",
        "DSV41_TP_PAD": "1",  # a value of the engine image
        "DSV41_IO_THREADS": "96",
        "NCCL_NET": "IB",
    }
    assert loader.switched_on(env) == ["DSV41_AUTOTUNE_KEEP", "DSV41_DRAFT_TAU", "DSV41_PACKED_DIR", "DSV41_VERIFY_CAP"]


def test_an_unknown_switch_is_not_passed_over_in_silence():
    assert loader.switched_on({"DSV41_NEXT_BIG_THING": "1"}) == ["DSV41_NEXT_BIG_THING"]
    assert loader.state("DSV41_NEXT_BIG_THING") == "missing: this overlay knows no such switch"
    assert loader.state("DSV41_WO_A_W8") == "missing: this overlay does not carry its adapter"


def test_the_loader_the_label_and_the_switches_data_say_the_same():
    """The plan refuses by the label what the loader would call missing; both must know each switch's adapter."""
    data = yaml.safe_load((ROOT / "group_vars/all/switches.yml").read_text())["fleet_switches"]
    adapters = {key: entry["adapter"] for key, entry in data.items() if "adapter" in entry}
    assert set(loader.SWITCHES) == set(adapters)
    label = re.search(r"lockstep\.adapters=(\S+)", (ROOT / "adapters/Dockerfile").read_text())
    assert label is not None
    assert {key for key, name in adapters.items() if name in label[1].split(",")} == {loader.KEEP, loader.STORE}


@pytest.fixture
def run(tmp_path):
    """A callable: a Python process as in the overlay image (its folder on PYTHONPATH), around given engine modules."""

    def start(code: str, modules: dict[str, str] | None = None, **env: str) -> str:
        for name, text in {
            "sglang.version": "__version__ = '9.9'",
            "sglang.srt.utils": "def is_cuda(): return True",
            **(modules or {}),
        }.items():
            path = tmp_path / (name.replace(".", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'adapters'}:{tmp_path}", **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Error in sitecustomize" not in done.stderr
        return done.stdout + done.stderr

    return start


def test_a_process_without_the_engine_loads_nothing_more(run):
    out = run("import sys; print(sorted(m for m in sys.modules if m.startswith('lockstep')))", DSV41_PACKED_DIR="/x")
    assert out == "['lockstep_engine', 'lockstep_engine.loader']\n"


def test_the_images_own_sitecustomize_still_runs(run):
    assert run("print('main')", {"sitecustomize": "print('the image')"}) == "the image\nmain\n"


START = """
    import logging, sys, types
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    import sglang.srt.managers.scheduler as scheduler
    args = types.SimpleNamespace(node_rank=1, tp_size=3)
"""


def test_adapters_are_said_once_the_log_carries_the_rank(run):
    out = run(
        f"{START}    scheduler.configure_scheduler_process(args, 0)\n",
        {"sglang.srt.managers.scheduler": SCHEDULER},
        DSV41_WO_A_W8="1",
        DSV41_VERIFY_CAP="0",
    )
    assert out.splitlines() == [
        "configured",
        "[lockstep] adapter DSV41_WO_A_W8: missing: this overlay does not carry its adapter",
    ]


def test_an_engine_from_before_that_function_is_hooked_at_its_scheduler(run):
    out = run(
        f"{START}    scheduler.Scheduler(args, None)\n",
        {
            "sglang.srt.managers.scheduler": """
                class Scheduler:
                    def __init__(self, server_args, port_args): print("made")
            """
        },
        DSV41_WO_A_W8="1",
    )
    assert out.splitlines()[0].startswith("[lockstep] adapter DSV41_WO_A_W8: missing")
    assert out.splitlines()[1] == "made"


KEEP = f"{START}    scheduler.configure_scheduler_process(args, 0)\n"


@pytest.mark.parametrize(
    ("flashinfer", "utils", "said"),
    [
        (FLASHINFER, "def is_cuda(): return True", "armed"),
        (FLASHINFER, "def is_cuda(): return False", "not applicable: no CUDA device"),
        (
            FLASHINFER.replace("_autotune_cache_digest", "_renamed"),
            "def is_cuda(): return True",
            (
                "missing: unknown engine version 9.9: "
                "sglang.srt.model_executor.runner.flashinfer_autotune has no _autotune_cache_digest"
            ),
        ),
        (
            FLASHINFER.replace("(cache_path, group, env)", "(cache_path, group)"),
            "def is_cuda(): return True",
            (
                "missing: unknown engine version 9.9: _drop_diverged_autotune_cache takes ('cache_path', 'group'), "
                "not ('cache_path', 'group', 'env')"
            ),
        ),
    ],
)
def test_autotune_keep_is_armed_or_says_why_not(run, flashinfer, utils, said):
    out = run(
        KEEP,
        {
            "sglang.srt.managers.scheduler": SCHEDULER,
            "sglang.srt.utils": utils,
            "sglang.srt.model_executor.runner.flashinfer_autotune": flashinfer,
        },
        DSV41_AUTOTUNE_KEEP="1",
    )
    assert out.splitlines()[1] == f"[lockstep] adapter DSV41_AUTOTUNE_KEEP: {said}"


def test_a_body_that_is_not_the_known_one_is_armed_and_said(run):
    out = run(
        KEEP,
        {
            "sglang.srt.managers.scheduler": SCHEDULER,
            "sglang.srt.model_executor.runner.flashinfer_autotune": FLASHINFER,
        },
        DSV41_AUTOTUNE_KEEP="1",
    )
    notes = [line for line in out.splitlines() if "unknown engine version 9.9" in line]
    assert [line.split(": ")[1].split(" has body ")[0] for line in notes] == [
        "_autotune_cache_digest",
        "_drop_diverged_autotune_cache",
        "flashinfer_autotune_context",
    ]


def test_with_the_switch_off_the_engines_functions_stay(run):
    module = "sglang.srt.model_executor.runner.flashinfer_autotune"
    code = f"import {module} as m; print(m._autotune_cache_digest(None, None))"
    assert run(code, {module: FLASHINFER}, DSV41_AUTOTUNE_KEEP="0") == "stock\n"
