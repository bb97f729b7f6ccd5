"""Processes that outlive the task that starts them: how one begins, what it says, and how the next run finds it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import files
from .errors import LockstepError

# Seconds for a process of an earlier run to see that its other side is gone.
ENDS_S = 15.0


def detach(work: Callable[[Callable[[dict[str, Any]], None]], None]) -> dict[str, Any]:
    """Run ``work(report)`` in a process of its own and return what it reports first. LockstepError when that fails.

    The process has no terminal, no open file and no parent of ours; everything that it needs is imported already, since
    Ansible removes the module's files when the task ends.
    """
    reading, writing = os.pipe()
    if first := os.fork():
        os.close(writing)
        os.waitpid(first, 0)
        with os.fdopen(reading, "rb") as heard:
            said = json.loads(heard.read() or b'{"error": {"message": "the process ended without a word"}}')
        if "error" in said:
            raise LockstepError(**said["error"])
        return dict(said)
    status = 1
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        os.umask(0o022)
        null = files.null()
        for number in range(3):
            os.dup2(null, number)
        for number in map(int, files.names("/proc/self/fd")):
            if number > 2 and number != writing:  # noqa: PLR2004 - standard error
                with contextlib.suppress(OSError):
                    os.close(number)
        with os.fdopen(writing, "wb") as pipe:

            def report(said: dict[str, Any]) -> None:
                pipe.write(json.dumps(said).encode())
                pipe.close()

            try:
                work(report)
                status = 0
            except (LockstepError, OSError) as error:
                if not pipe.closed:
                    report({"error": fields(error)})
    finally:
        os._exit(status)


def fields(error: BaseException) -> dict[str, Any]:
    """An error as JSON, to be raised again elsewhere."""
    if not isinstance(error, LockstepError):
        return {"message": f"{type(error).__name__}: {error}"}
    names = ("message", "host", "rank", "found", "expected", "next_step")
    said = {name: getattr(error, name) for name in names}
    return {name: value if value is None or name == "rank" else str(value) for name, value in said.items()}


class Run:
    """Where one side of a move says what it does: a lock that it holds as long as it lives, and a file. Both 0600.

    ``directory`` is what it works on; ``origin`` tells it from others that work there too.
    """

    def __init__(self, run_dir: str, side: str, directory: str, origin: str = "") -> None:
        name = hashlib.sha256(f"{os.path.realpath(directory)}\0{origin}".encode()).hexdigest()[:16]
        self.path = Path(run_dir) / f"{side}-{name}.json"
        self._lock = Path(run_dir) / f"{side}-{name}.lock"

    def holder(self) -> str | None:
        """Who runs; None when nobody does."""
        return files.holder(self._lock) if self._lock.parent.is_dir() else None

    def said(self) -> dict[str, Any] | None:
        """What was said last; None when nothing was."""
        if not self._lock.parent.is_dir() or not files.look(self.path):
            return None
        said = files.read_json(self.path)
        return said if isinstance(said, dict) else None

    def say(self, **said: object) -> None:
        """Say something, in place of what was said before."""
        files.write_json_atomic(self.path, said, durable=False)

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Hold the lock; an earlier process that is about to end is waited for.

        One that has waited all that time for its other side was left by a run that was cut, and is ended.
        """
        files.make_directory(self._lock.parent, 0o700)
        if self.wait(ENDS_S) and (forgotten := (self.said() or {}).get("waiting")):
            self.end(int(forgotten), 0)
            self.wait(1)
        with files.lock(self._lock, what):
            yield

    def wait(self, seconds: float) -> str | None:
        """Wait at most so long for whoever runs to end; who still does, None when nobody."""
        until = time.monotonic() + seconds
        while (holder := self.holder()) and time.monotonic() < until:
            time.sleep(0.1)
        return holder

    def end(self, pid: int, seconds: float) -> None:
        """See a process end by itself, and end one that has not after so many seconds."""
        if self.wait(seconds):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
