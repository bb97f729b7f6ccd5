"""Where the lab keeps things: caches that stay, state that ``down`` removes, and what it writes into the checkout."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .say import LabError

ROOT = Path(__file__).resolve().parents[3]
"""The checkout."""

NODE_DIR = ROOT / "tests" / "lab" / "node"
REGISTRY_DIR = ROOT / "tests" / "lab" / "registry"
INVENTORY = ROOT / "inventory" / "lab"
GENERATED = INVENTORY / "generated"
"""Git-ignored: keys, known hosts and digests of the lab that runs now."""

STATE = Path(os.environ.get("LOCKSTEP_LAB_STATE", "/var/lib/lockstep-lab"))
"""Everything a running lab owns on disk; ``down`` removes it."""

CONTROL = Path("/run/lockstep-lab")
"""Sockets of Ansible's SSH connections to the lab (the path must stay short)."""


def cache(*parts: str) -> Path:
    """A directory of the content-addressed cache, created; it survives ``down`` (``purge`` removes it)."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    path = base.joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def only_one() -> Iterator[None]:
    """Hold the lab for one command; a second command says who holds it instead of racing.

    Raises LabError when another process holds it.
    """
    path = cache() / "lab.lock"
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            raise LabError(
                f"another lab command runs (process {handle.read().strip()})", "wait for it to end"
            ) from error
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield
