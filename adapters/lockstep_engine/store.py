"""The Engram store's start-up self-check: a rank says ``packed=True`` only after its own shards have proven themselves.

For each layer the rank's shard is mapped and stays mapped for the life of the process, so that what serves can be
looked at from outside (its inode is in /proc). Header, range and size are compared with what the checkpoint's config
and the engine's own split demand, and 64 rows with the checkpoint's. The stock engine instead falls back in silence.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_core import engram
from lockstep_core.errors import LockstepError

from . import engine

if TYPE_CHECKING:
    import logging
    from collections.abc import Mapping

CHECKPOINT = "/engram-checkpoint"
SAMPLE_ROWS = 64

_held: list[mmap.mmap] = []


def check(rank: int, size: int, env: Mapping[str, str], logger: logging.Logger) -> None:
    """Check and hold this rank's shards; log one line a layer, and the reason below it when it is not packed.

    ``env``: DSV41_PACKED_DIR = the shards' directory; LOCKSTEP_ENGRAM_CHECKPOINT = the checkpoint they were packed from
    (default /engram-checkpoint); LOCKSTEP_ENGRAM_SPLIT = how the overlay's label says this engine splits the tables.
    """
    checkpoint = env.get("LOCKSTEP_ENGRAM_CHECKPOINT") or CHECKPOINT
    split, disagreement = _split(env)
    try:
        config = engram.read_config(checkpoint)
        shards = engram.expected_shards(config, size, rank, split)
    except LockstepError as error:
        # One line of a log that is read by machines, not a traceback.
        logger.error("[lockstep] Engram store rank=%d: %s", rank, _one_line(error))  # noqa: TRY400 - a line, no traceback
        return
    for expected in shards:
        why = disagreement
        if why is None:
            try:
                _held.append(_prove(Path(env["DSV41_PACKED_DIR"]), expected, checkpoint))
            except (LockstepError, OSError, ValueError) as error:
                why = _one_line(error)
        first, end = expected["rows"]
        logger.info(
            "Exact nvme Engram layer=%d rank=%d rows=[%d,%d) cache=0.0GiB (0 slots, %s-way, 0.0%% of owned rows) "
            "scales=0.0GiB io_threads=%s packed=%s",
            expected["layer"], rank, first, end, env.get("DSV41_CACHE_WAYS", "4"), env.get("DSV41_IO_THREADS", "96"),
            why is None,
        )  # fmt: skip
        if why is not None:
            logger.error("[lockstep] Engram layer=%d rank=%d is not packed: %s", expected["layer"], rank, why)


def _split(env: Mapping[str, str]) -> tuple[str, str | None]:
    """Return how the tables are split here, and what disagrees about it."""
    label, own = env.get("LOCKSTEP_ENGRAM_SPLIT", ""), engine.split()
    if label and own and label != own:
        return own, f"the overlay's label says split {label}, this engine splits {own}"
    return own or label or "rows", None


def _prove(folder: Path, expected: Mapping[str, Any], checkpoint: str) -> mmap.mmap:
    """Map a shard that is what it should be. Raises LockstepError or OSError with the reason when it is not."""
    path = folder / str(expected["file"])
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = engram.inspect_shard(path, expected)
        if found["state"] == "wrong":
            raise LockstepError(f"{path}: {found['why']}")
        if found["inode"] != os.fstat(handle).st_ino:
            raise LockstepError(f"{path} was replaced while it was being opened")
        held = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)  # keeps a handle of its own open
    finally:
        os.close(handle)
    held.madvise(mmap.MADV_RANDOM)
    first, end = expected["rows"]
    rows = engram.sample_rows(first, end, SAMPLE_ROWS, secrets.randbits(64))
    original = engram.checkpoint_rows(checkpoint, int(expected["layer"]), rows)
    for number, row in enumerate(rows):
        at = engram.HEADER_BYTES + (row - first) * engram.ROW_BYTES
        if held[at : at + engram.ROW_BYTES] != original[number * engram.ROW_BYTES : (number + 1) * engram.ROW_BYTES]:
            held.close()
            raise LockstepError(f"{path}: row {row} is not the checkpoint's")
    return held


def _one_line(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{error.filename}: no such file"
    return "; ".join(part.strip() for part in str(error).splitlines())
