"""Progress lines with seconds, and the one error the lab raises on purpose."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_START = time.monotonic()


class LabError(Exception):
    """The lab cannot do what was asked: what happened, and what a person can do about it."""

    def __init__(self, what: str, next_step: str | None = None) -> None:
        self.what = what
        self.next_step = next_step
        super().__init__(what if next_step is None else f"{what}\n  next: {next_step}")


def say(text: str) -> None:
    """Print one progress line, with the seconds since this process began."""
    print(f"[lab {time.monotonic() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Say what begins now, and how long it took once it has ended."""
    say(f"{text} …")
    begun = time.monotonic()
    yield
    say(f"{text}: done in {time.monotonic() - begun:.1f} s")


def sh(argv: Sequence[str | Path], *, stdin: bytes | None = None, timeout: float | None = None) -> str:
    """Run a command, return its standard output; LabError with the end of its output when it fails."""
    done = subprocess.run(
        [str(part) for part in argv],
        input=stdin,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        tail = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-15:]
        raise LabError(f"{' '.join(map(str, argv))} exited {done.returncode}:\n  " + "\n  ".join(tail))
    return done.stdout.decode(errors="replace")
