"""Which switch is which adapter, and the hooks that arm them in the engine's processes.

A hook runs when the engine imports the module that it patches, not before: nothing of the engine is imported early. At
the start of each scheduler process every switch that is on is said by name, with what became of it:

    [lockstep] adapter <SWITCH>: armed
    [lockstep] adapter <SWITCH>: not applicable: <why>     the adapter is here, this machine cannot use it
    [lockstep] adapter <SWITCH>: missing: <why>            this overlay does not carry it, or the engine lacks the place
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

_SCHEDULER = "sglang.srt.managers.scheduler"
_AUTOTUNE = "sglang.srt.model_executor.runner.flashinfer_autotune"

KEEP = "DSV41_AUTOTUNE_KEEP"
STORE = "DSV41_PACKED_DIR"

# Every adapter switch, with the value beside "0" and "" that also means off. Source: the adapters' own defaults.
SWITCHES: dict[str, str | None] = {
    STORE: None,
    KEEP: None,
    "DSV41_WO_A_W8": None,
    "DSV41_WO_A_W8_MID": None,
    "DSV41_WO_A_W8_DROP": None,
    "DSV41_WO_A_W8_DRAFT": None,
    "DSV41_DRAFT_HEAD_FP8": None,
    "DSV41_VERIFY_CAP": None,
    "DSV41_BLOCK_VERIFY": None,
    "DSV41_ENGRAM_PREFETCH": None,
    "DSV41_ENGRAM_PREFETCH_CHECK": None,
    "DSV41_DRAFT_TAU": "1",
    "DSV41_FOLDED_FENCE": None,
    "DSV41_SHARED_PAD_K": None,
}

# Values that the engine image reads itself; the receipt answers for them under `keys`, not under `adapters`.
_ENGINE_VALUES = frozenset(
    f"DSV41_{name}"
    for name in (
        "CACHE_GIB", "CACHE_WAYS", "IO_THREADS", "RESIDENT_SCALES", "STATS_SECONDS", "MXFP8_BACKEND", "TP_PAD",
        "PREFILL_EMPTY_CACHE_TOKENS", "MAX_NEW_TOKENS", "LOOP_ABORT", "LOOP_NGRAM", "LOOP_REPEATS", "LOOP_LINE_REPEATS",
    )
)  # fmt: skip

_states: dict[str, str] = {}


def switched_on(env: Mapping[str, str]) -> list[str]:
    """Name the adapter switches that an environment turns on, unknown DSV41_ names among them, sorted."""
    names = set(SWITCHES) | {key for key in env if key.startswith("DSV41_") and key not in _ENGINE_VALUES}
    return sorted(name for name in names if not _off(env.get(name, ""), SWITCHES.get(name)))


def _off(value: str, neutral: str | None) -> bool:
    word = value.strip().lower()
    if neutral is not None and word.replace(".0", "") == neutral:
        return True
    return word in {"", "0", "off", "false"}


def arm() -> None:
    """Wait for the engine's modules. Called once per process, by sitecustomize."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Lets the real finders work and hooks on to the modules named in _HOOKS."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find one of the hooked modules; None for every other, which the finders behind this one then find."""
        hook = _HOOKS.get(name)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this spec's own loader, no other's
        return spec


def _on_autotune(module: ModuleType) -> None:
    if KEEP not in switched_on(os.environ):
        return
    from . import autotune_keep, engine  # noqa: PLC0415 - a process without the engine must not pay for this

    try:
        autotune_keep.install(module)
    except engine.Drifted as error:
        _states[KEEP] = f"missing: {error}"
    else:
        _states[KEEP] = "armed"


def _on_scheduler(module: ModuleType) -> None:
    """Run `at_start` in each scheduler process as soon as its log lines carry the rank."""
    name = "configure_scheduler_process"
    if hasattr(module, name):
        configure: Callable[..., Any] = getattr(module, name)

        def configured(server_args: object, *args: object, **kwargs: object) -> object:
            result = configure(server_args, *args, **kwargs)
            at_start(server_args)
            return result

        setattr(module, name, configured)
        return
    # Engines from before that function configure the log in run_scheduler_process; the scheduler is made next.
    scheduler = module.Scheduler
    init = scheduler.__init__

    def started(self: object, server_args: object, *args: object, **kwargs: object) -> None:
        at_start(server_args)
        init(self, server_args, *args, **kwargs)

    scheduler.__init__ = started


def at_start(server_args: object) -> None:
    """Say what became of every switch that is on, then let the Engram store prove its shards."""
    import logging  # noqa: PLC0415 - a process without the engine must not pay for this

    from . import engine, store  # noqa: PLC0415 - a process without the engine must not pay for this

    logger = logging.getLogger("lockstep")
    on = switched_on(os.environ)
    for switch in on:
        logger.info("[lockstep] adapter %s: %s", switch, state(switch))
    for note in engine.notes():
        logger.warning("[lockstep] %s", note)
    if STORE in on:
        rank, size = engine.place(server_args)
        store.check(rank, size, os.environ, logger)


def state(switch: str) -> str:
    """Tell what became of a switch in this process: ``armed``, ``not applicable: why`` or ``missing: why``."""
    if switch == STORE:
        return "armed"
    if switch != KEEP:
        known = "does not carry its adapter" if switch in SWITCHES else "knows no such switch"
        return f"missing: this overlay {known}"
    from . import engine  # noqa: PLC0415 - a process without the engine must not pay for this

    why = engine.no_accelerator()
    if why is not None:
        return f"not applicable: {why}"
    importlib.import_module(_AUTOTUNE)  # the hook runs at the import, which the engine may not have come to yet
    return _states.get(KEEP, "missing: the engine's module was imported before the hook was in its place")


_HOOKS: dict[str, Callable[[ModuleType], None]] = {_SCHEDULER: _on_scheduler, _AUTOTUNE: _on_autotune}
