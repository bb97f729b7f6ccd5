"""DSV41_AUTOTUNE_KEEP: tactics survive a boot when, and only when, the same launch tuned them on every rank.

The stock gate compares a digest of each rank's whole file and discards all when they differ. Under expert parallelism
every rank tunes its own shapes, so they always differ and every boot draws new tactics, which moves the numerics. Here
a rank says whether *this launch* tuned its file: a sidecar beside it holds the launch's fingerprint. The files are used
when all ranks say yes and their environments agree; else every rank tunes from scratch, and what lay there goes aside
(the stock gate would let a rank load a stale file as soon as no rank has a matching one: all say "", which agrees).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_core import files, tactics
from lockstep_core.errors import LockstepError

from . import engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

# Bodies this was written against (engine.body_hash).
_DIGEST = {"d3ce3f38b964": "0.5.21 to 0.5.23"}
_DROP = {"6ab549cde729": "0.5.21 to 0.5.23"}
_CONTEXT = {"642a94be8266": "0.5.21", "e6cc03e9fca1": "0.5.22", "b14e4c81f47c": "0.5.23"}


def fingerprint() -> str:
    """Return the launch's fingerprint: the plan's, from the container's environment, or worked out here without one."""
    given = os.environ.get("LOCKSTEP_TACTICS_FINGERPRINT", "").strip()
    return given or tactics.fingerprint(sys.argv, os.environ, {})


def sidecar(cache_path: Path) -> Path:
    """Name the file beside a cache file that holds the fingerprint of the launch that tuned it."""
    return Path(tactics.sidecar_name(str(cache_path)))


def verdict(cache_path: Path, launch: str, env: dict[str, str]) -> tuple[str, str | None]:
    """Judge one rank's cache file for a launch: ``(digest, why not)``.

    The digest is "" when the file must not be used; else it covers the environment alone, so that it is equal on ranks
    that load alike: not the tactics, which differ from rank to rank under expert parallelism, nor the launch, which
    each rank has just compared with its own sidecar.
    """
    try:
        configs = json.loads(cache_path.read_bytes())
    except FileNotFoundError:
        return "", None
    except (OSError, ValueError) as error:
        return "", f"unreadable: {error}"
    seen = tactics.inspect(configs, env)
    if not seen["loadable"]:
        return "", str(seen["reason"])
    try:
        tuned_by = sidecar(cache_path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return "", "no sidecar says which launch tuned it"
    if tuned_by != launch:
        return "", f"tuned by launch {tuned_by[:12]}, this one is {launch[:12]}"
    return hashlib.sha256(json.dumps({"loads": True, "env": env}, sort_keys=True).encode()).hexdigest(), None


def set_aside(cache_path: Path, why: str) -> None:
    """Move a cache file and its sidecar out of the engine's sight, below ``autotune-aside/<UTC>``; none is deleted."""
    root = cache_path.parents[3]
    folder = root.with_name(f"{root.name}-aside") / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for path in (cache_path, sidecar(cache_path)):
        if path.is_file():
            try:
                files.move(path, folder / path.relative_to(root))
            except LockstepError as error:
                # A stale file that stays would be loaded: the engine must not go on with it.
                raise RuntimeError(f"[autotune_keep] {error}") from error
            _say(f"moved aside {path.parent.name}/{path.name}: {why}")


def _say(text: str) -> None:
    sys.stdout.write(f"[autotune_keep] {text}\n")
    sys.stdout.flush()


def install(module: ModuleType) -> None:  # noqa: C901 - three hooks over one state, each of a few lines
    """Replace the gate of ``sglang.srt.model_executor.runner.flashinfer_autotune``. Raises engine.Drifted."""
    mod: Any = module
    engine.known(module, "_autotune_cache_digest", ("cache_path", "env"), _DIGEST)
    engine.known(module, "_drop_diverged_autotune_cache", ("cache_path", "group", "env"), _DROP)
    stock_context = engine.known(module, "flashinfer_autotune_context", ("model_runner", "run_lm_head"), _CONTEXT)
    launch = fingerprint()
    tuned_here: set[Path] = set()

    def digest(cache_path: Path, env: dict[str, str]) -> str:
        return verdict(cache_path, launch, env)[0]

    def drop_diverged(cache_path: Path, group: Any, env: dict[str, str]) -> None:
        mine, why = verdict(cache_path, launch, env)
        digests = [""] * mod.torch.distributed.get_world_size(group)
        mod.torch.distributed.all_gather_object(digests, mine, group=group)
        if mine and len(set(digests)) == 1:
            return
        if len(set(digests)) > 1:
            mod.log_info_on_rank0(
                mod.logger,
                "FlashInfer autotune: per-rank caches disagree, discarding them and "
                "tuning from scratch so all ranks agree on the tactics.",
            )
        set_aside(cache_path, why or "another rank has no matching file")

    @contextlib.contextmanager
    def context(model_runner: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if os.environ.get("SGLANG_FLASHINFER_AUTOTUNE_CACHE", "1").lower() in {"0", "false"}:
            # The engine reuses nothing and writes elsewhere.
            with stock_context(model_runner, *args, **kwargs) as value:
                yield value
            return
        cache_path = Path(mod.flashinfer_autotune_cache_path(model_runner))
        if model_runner.tp_size <= 1:  # the stock code asks no gate when there is nobody to agree with
            mine, why = verdict(cache_path, launch, {})
            if not mine and why:
                set_aside(cache_path, why)
        with stock_context(model_runner, *args, **kwargs) as value:
            # Past the gate and before the tuning: what still lies here is what the engine has loaded.
            reused = cache_path.is_file() and cache_path not in tuned_here
            yield value
        if not cache_path.is_file():  # nothing was tuned: nothing to vouch for
            return
        if not reused:
            tuned_here.add(cache_path)
            files.write_atomic(sidecar(cache_path), f"{launch}\n", 0o644)
        _say(f"{'reused' if reused else 'tuned and saved'} {cache_path.parent.name}/{cache_path.name}")

    mod._autotune_cache_digest = digest
    mod._drop_diverged_autotune_cache = drop_diverged
    mod.flashinfer_autotune_context = context
