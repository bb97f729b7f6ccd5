"""The fleet's lock: one run at a time changes a fleet. It lies on the head, so every controller sees the same one.

It is a file, ``<state dir>/fleet-lock.json``: ``{"format": 1, "holder": holder | None, "released": seconds | None}``. A
holder is ``{"owner": "user@host", "what": "serve.yml", "since": ISO 8601 UTC, "run": id, "controller": id, "boot": id,
"pid": int, "started": ticks}``: who, for what, since when, and the process on the controller that works.

No kernel keeps this lock: a run works from another machine, through many connections. A holder whose process is gone is
recognised by the controller that it ran on; from another one a person has to break the lock.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import files
from .errors import LockstepError

NAME = "fleet-lock.json"
FORMAT = 1
# Of /proc/<pid>/stat, counted from its third field.
_STATE = 0
_START = 19
_FIELDS = {
    "owner": str,
    "what": str,
    "since": str,
    "run": str,
    "controller": str,
    "boot": str,
    "pid": int,
    "started": int,
}


class HeldError(LockstepError):
    """Another run holds the lock: ``holder``."""

    def __init__(self, holder: Mapping[str, Any]) -> None:
        super().__init__(
            "another run is changing the fleet",
            found=f"{describe(holder)} (process {holder['pid']})",
            expected="nobody at work",
            next_step="wait for it to end; if you know that it is dead, run again with -e break_lock=true",
        )
        self.holder = dict(holder)


def operator() -> str:
    """Name who runs this on which machine, ``user@host``; behind sudo the person, not root."""
    return f"{os.environ.get('SUDO_USER') or getpass.getuser()}@{socket.gethostname()}"


def me(what: str, pid: int, now: datetime) -> dict[str, Any]:
    """Describe the run that process ``pid`` of this machine is; ``now`` is UTC."""
    boot, started = _boot(), _started(pid)
    # Two containers may have one machine id; what a process number means, they do not have in common.
    controller = _digest(f"{_text('/etc/machine-id')} {socket.gethostname()} {_pid_namespace()}")
    return {
        "owner": operator(),
        "what": what,
        "since": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "run": _digest(f"{controller} {boot} {pid} {started}"),
        "controller": controller,
        "boot": boot,
        "pid": pid,
        "started": started,
    }


def gone(holder: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Tell whether a holder's process is known to be gone: it ran on this machine (``mine``) and runs no more."""
    if holder["controller"] != mine["controller"] or not mine["boot"]:
        return False
    if holder["boot"] != mine["boot"]:
        return True
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's, which /proc may hide
        pass
    # The number may be another process's by now; one that has ended and waits for its parent does no more.
    fields = _stat(holder["pid"])
    return bool(fields) and (fields[_STATE] in "ZX" or int(fields[_START]) != holder["started"])


def read(state_dir: str) -> dict[str, Any]:
    """Return what the lock says: ``{"holder", "released"}``; without a file nobody holds it."""
    path = Path(state_dir, NAME)
    if files.look(path) is None:
        return {"holder": None, "released": None}
    said = files.read_json(path)
    holder = said.get("holder") if isinstance(said, dict) else None
    whole = holder is None or (
        isinstance(holder, dict) and all(isinstance(holder.get(name), kind) for name, kind in _FIELDS.items())
    )
    if not isinstance(said, dict) or said.get("format") != FORMAT or not whole:
        raise LockstepError(
            f"{path} is no fleet lock of this version",
            found=str(said)[:200],
            expected=f"format {FORMAT} with a whole holder, or none",
            next_step="see that nobody changes the fleet, then remove the file",
        )
    return {"holder": holder, "released": said.get("released")}


def take(
    state_dir: str, mine: Mapping[str, Any], *, seen: float | None = None, over: str | None = None, check: bool = False
) -> dict[str, Any]:
    """Take the lock; returns the holder it was taken from, or ``{}``.

    ``over`` is the ``run`` of a holder that may be replaced, ``any`` whoever it is. ``seen`` is when this run looked at
    the head, by the head's clock: what it decided then is void when another run has given the lock back since. Raises
    LockstepError when another run holds it. With ``check`` nothing is written.
    """
    if check and not Path(state_dir).is_dir():
        return {}
    files.make_directory(state_dir)  # the first launch comes before anything else of Lockstep's is there
    with files.lock_directory(state_dir):
        there = read(state_dir)
        holder = there["holder"]
        if holder and holder["run"] != mine["run"] and over not in (holder["run"], "any"):
            raise HeldError(holder)
        if seen is not None and there["released"] is not None and there["released"] > seen:
            raise LockstepError(
                "another run changed the fleet after this one had looked at it",
                found=f"the fleet's lock was given back at {_utc(there['released'])}, the look was at {_utc(seen)}",
                expected="nobody else at work between the look and the change",
                next_step="run again",
            )
        if not check:
            _write(state_dir, dict(mine), there["released"])
    return holder if holder and holder["run"] != mine["run"] else {}


def give_back(state_dir: str, mine: Mapping[str, Any], now: float, *, check: bool = False) -> bool:
    """Give the lock back; whether this run held it. Another run's lock stays. ``now`` is seconds since the epoch."""
    if not Path(state_dir).is_dir():
        return False
    with files.lock_directory(state_dir):
        holder = read(state_dir)["holder"]
        ours = bool(holder and holder["run"] == mine["run"])
        if ours and not check:
            _write(state_dir, None, now)
    return ours


def describe(holder: Mapping[str, Any]) -> str:
    """Name a holder: ``mia@desk runs serve.yml since 2026-09-24T09:47:00Z``."""
    return f"{holder['owner']} runs {holder['what']} since {holder['since']}"


def _write(state_dir: str, holder: dict[str, Any] | None, released: float | None) -> None:
    files.write_json_atomic(Path(state_dir, NAME), {"format": FORMAT, "holder": holder, "released": released})


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _digest(text: str) -> str:
    """A machine's id is not for other machines to read; that it is the same one is."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _boot() -> str:
    return _text("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _started(pid: int) -> int:
    """Return when a process of this machine started, in clock ticks since boot; 0 where that cannot be read."""
    fields = _stat(pid)
    return int(fields[_START]) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields of a process's line in /proc from the third on: the name before them may hold anything."""
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _text(path: str) -> str:
    try:
        return files.read_bytes(path, 4096).decode(errors="replace").strip()
    except LockstepError:
        return ""
