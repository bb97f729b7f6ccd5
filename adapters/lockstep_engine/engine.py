"""What the adapters must know of the engine they are in: its version, its rank, whether its code is the known one."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_notes: list[str] = []


class Drifted(Exception):  # noqa: N818 - it is what happened to the engine
    """The engine lacks the place that an adapter hooks on, or takes other arguments there."""


def known(module: ModuleType, name: str, parameters: tuple[str, ...], bodies: dict[str, str]) -> Callable[..., Any]:
    """Return the engine's function that an adapter is about to replace.

    ``parameters`` are those that the adapter relies on, by name: another list raises Drifted. ``bodies`` maps the body
    hashes (``body_hash``) that the adapter was written against to their versions: another body is only noted, because
    builds between releases differ in what does not matter, and said as an unknown engine version in the boot log.
    """
    function = getattr(module, name, None)
    if function is None:
        raise Drifted(f"unknown engine version {version()}: {module.__name__} has no {name}")
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise Drifted(f"unknown engine version {version()}: {name} takes {found}, not {parameters}")
    body = body_hash(function)
    if body not in bodies:
        versions = ", ".join(sorted(set(bodies.values())))
        _notes.append(f"unknown engine version {version()}: {name} has body {body}, known are those of {versions}")
    return function  # type: ignore[no-any-return]


def body_hash(function: Callable[..., Any]) -> str:
    """Hash a function's source without docstring, blank lines and indentation of its whole: 12 hex digits.

    Of the text and not of the syntax tree, because the tree's dump differs between versions of Python.
    """
    lines = textwrap.dedent(inspect.getsource(inspect.unwrap(function))).splitlines()
    node = ast.parse("\n".join(lines)).body[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise TypeError(f"{function} is no function")
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines[first.lineno - 1 : first.end_lineno] = []
    text = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def notes() -> list[str]:
    """Return what was unknown about the engine so far, each once."""
    return list(dict.fromkeys(_notes))


def version() -> str:
    """Return the engine's version as it says it."""
    return str(importlib.import_module("sglang.version").__version__)


def place(server_args: Any) -> tuple[int, int]:
    """Return this scheduler's tensor-parallel rank and the size of its world."""
    try:
        parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    except ModuleNotFoundError:  # engines before 0.5.21: one rank per node here
        return int(server_args.node_rank), int(server_args.tp_size)
    return int(parallel.tp_rank), int(parallel.tp_size)


def no_accelerator() -> str | None:
    """Say why nothing made for CUDA can work here; None when it can."""
    return None if importlib.import_module("sglang.srt.utils").is_cuda() else "no CUDA device"


def split() -> str | None:
    """Tell how this engine splits the Engram tables, by its own code: ``rows``, ``heads``, or None if it has none.

    Engines up to 0.5.22 divide the rows in place; 0.5.23 asks its ``shard_range``, which keeps hash columns whole.
    """
    spec = importlib.util.find_spec("sglang.srt.layers")
    for folder in spec.submodule_search_locations or [] if spec else []:
        path = Path(folder, "engram.py")
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            if "def shard_range(" in text:
                return "heads"
            return "rows" if "class EngramEmbedding" in text else None
    return None
