"""Since when a container's log is of its present life."""

from __future__ import annotations

import subprocess
import time
from datetime import UTC, datetime

import pytest
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api

NEVER = "0001-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("started", "finished", "since"),
    [
        # Its first life: all of the log, also what was written before the engine noted the start.
        ("2026-09-24T09:47:31.258160697Z", NEVER, 0),
        (NEVER, NEVER, 0),
        # Started again: what came after the life before. 1790243251 is 2026-09-24T09:47:31Z.
        ("2026-09-24T09:47:31.258160697Z", "2026-09-24T09:47:31Z", 1790243251),
        # Ended: a little before its start.
        ("2026-09-24T09:47:31Z", "2026-09-24T09:50:00Z", 1790243246),
    ],
)
def test_where_the_present_life_begins(started, finished, since):
    assert docker_api.began({"started_at": started, "finished_at": finished, "pid": 0}) == since


def test_between_the_life_before_and_the_noted_start_the_process_itself_says_when_it_began():
    # The engine copies the last lines of a life a little after its end: they are not of the next one.
    before = time.time()
    process = subprocess.Popen(["sleep", "60"])
    after = time.time()

    def said(finished: float, started: float) -> float:
        at = {"finished_at": finished, "started_at": started}
        shown = {name: datetime.fromtimestamp(value, UTC).isoformat() for name, value in at.items()}
        return docker_api.began({**shown, "pid": process.pid})

    try:
        # The kernel counts hundredths of a second.
        assert before - 0.05 <= said(before - 5, after + 5) <= after
        # The number of a process that cannot be the container's says nothing.
        assert said(before - 5, before - 2) == pytest.approx(before - 5, abs=1e-5)
    finally:
        process.kill()
        process.wait()
