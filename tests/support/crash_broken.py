"""Wrong versions of what the product does right: a crash test that does not catch each of them proves nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep_core import archive, files, wire

Blocks = Callable[[int, str | None], Iterable[memoryview]]
_write_blocks, _look = files.write_blocks, files.look
_send_one: Any = archive._send_one


def in_place(path: Path, size: int, blocks: Blocks, **_: Any) -> str:
    """Write under the final name from the first byte on."""
    return _plainly(path, blocks)


def unsynced(path: Path, size: int, blocks: Blocks, **_: Any) -> str:
    """Write aside and rename, and leave it to the kernel when that reaches the disk."""
    aside = Path(f"{path}.partial")
    digest = _plainly(aside, blocks)
    aside.replace(path)
    return digest


def forgetful(path: Path, size: int, blocks: Blocks, **more: Any) -> str:
    """Begin anew each time."""
    files.discard_partial(path)
    return _write_blocks(path, size, blocks, **more)


def untidy(path: Path, size: int, blocks: Blocks, **more: Any) -> str:
    """Leave something lying about."""
    Path(f"{path}.tmp").touch()
    return _write_blocks(path, size, blocks, **more)


def restless(path: Path) -> dict[str, int] | None:
    """Touch what is looked at."""
    if path.suffix == ".bin" and path.exists() and (path.parent / f"{path.name}.manifest.json").exists():
        path.touch()
    return _look(path)


def cached_sha256(path: Path, **_: Any) -> str:
    """Read back what the page cache holds, not the disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256).hexdigest()


def hasty(channel: wire.Channel, path: Path, item: Any, *, target: str, remove: bool, tell: Any) -> Any:
    """Remove a file as soon as it is sent."""

    class Hasty:
        def __getattr__(self, name: str) -> Any:
            return getattr(channel, name)

        def say(self, word: str, **more: Any) -> None:
            channel.say(word, **more)
            if word == "end":
                for gone in (path.with_name(f"{path.name}.manifest.json"), path):
                    gone.unlink()

    return _send_one(Hasty(), path, item, target=target, remove=False, tell=tell)


def _plainly(path: Path, blocks: Blocks) -> str:
    digest = hashlib.sha256()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    offset = 0
    for block in blocks(0, None):
        digest.update(block)
        offset += os.pwrite(fd, block, offset)
    os.close(fd)
    return digest.hexdigest()
