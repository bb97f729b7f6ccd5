"""The fleet's lock: who holds it, who may take it over, and what a run is told that comes too late."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from lockstep_core import fleet_lock
from lockstep_core.errors import LockstepError

NOW = datetime(2026, 9, 24, 9, 47, tzinfo=UTC)


def of(pid: int) -> dict[str, Any]:
    return fleet_lock.me("serve.yml", pid, NOW)


@pytest.fixture
def mine() -> dict[str, Any]:
    return of(os.getpid())


@pytest.fixture
def theirs() -> dict[str, Any]:
    """A run on another controller."""
    return {**of(os.getpid()), "owner": "noa@rack", "controller": "f" * 16, "run": "e" * 16, "pid": 4711}


def said(state: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((state / "fleet-lock.json").read_text())
    return found


def test_it_is_taken_once_and_given_back(tmp_path, mine, theirs):
    assert fleet_lock.take(str(tmp_path), mine) == {}
    assert said(tmp_path) == {"format": 1, "holder": mine, "released": None}
    assert (tmp_path / "fleet-lock.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(LockstepError) as refused:
        fleet_lock.take(str(tmp_path), theirs)
    text = str(refused.value)
    assert f"{mine['owner']} runs serve.yml since 2026-09-24T09:47:00Z (process {os.getpid()})" in text
    assert "-e break_lock=true" in text
    # Who does not hold it gives nothing back; who does may take it again.
    assert not fleet_lock.give_back(str(tmp_path), theirs, 5.0)
    assert fleet_lock.take(str(tmp_path), mine) == {}
    assert fleet_lock.give_back(str(tmp_path), mine, 1790157001.5)
    assert said(tmp_path) == {"format": 1, "holder": None, "released": 1790157001.5}
    assert not fleet_lock.give_back(str(tmp_path), mine, 5.0)
    assert fleet_lock.take(str(tmp_path), theirs) == {}


def test_it_can_be_broken_and_who_lost_it_does_not_give_it_back(tmp_path, mine, theirs):
    fleet_lock.take(str(tmp_path), theirs)
    with pytest.raises(LockstepError, match="another run"):
        fleet_lock.take(str(tmp_path), mine, over="d" * 16)
    assert fleet_lock.take(str(tmp_path), mine, over="any") == theirs
    assert not fleet_lock.give_back(str(tmp_path), theirs, 5.0)
    assert said(tmp_path)["holder"] == mine


def test_what_was_decided_before_another_run_changed_the_fleet_is_void(tmp_path, mine, theirs):
    fleet_lock.take(str(tmp_path), theirs)
    fleet_lock.give_back(str(tmp_path), theirs, 1790157000.0)
    with pytest.raises(LockstepError, match=r"2026-09-23T09:50:00Z, the look was at 2026-09-23T09:49:59Z"):
        fleet_lock.take(str(tmp_path), mine, seen=1790156999.0)
    assert said(tmp_path)["holder"] is None
    assert fleet_lock.take(str(tmp_path), mine, seen=1790157001.0) == {}


def test_a_check_writes_nothing_and_refuses_alike(tmp_path, mine, theirs):
    state = tmp_path / "state"
    assert fleet_lock.take(str(state), mine, check=True) == {}
    assert not fleet_lock.give_back(str(state), mine, 5.0, check=True)
    assert not state.exists()
    fleet_lock.take(str(state), theirs)
    before = said(state)
    with pytest.raises(LockstepError, match="another run"):
        fleet_lock.take(str(state), mine, check=True)
    fleet_lock.take(str(state), mine, over="any", check=True)
    assert fleet_lock.give_back(str(state), theirs, 5.0, check=True)
    assert said(state) == before


def test_only_a_process_of_this_machine_is_known_to_be_gone(mine, theirs):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as ended:
        holder = of(ended.pid)
        assert not fleet_lock.gone(holder, mine)
        ended.kill()
        # A zombie, whose parent has not asked, does no more than a process that is gone.
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert fleet_lock.gone(holder, mine)
    assert fleet_lock.gone(holder, mine)
    assert not fleet_lock.gone(mine, mine)
    # The same number, another process; the same machine before it was booted again.
    assert fleet_lock.gone({**mine, "started": mine["started"] - 1}, mine)
    assert fleet_lock.gone({**mine, "boot": "before"}, mine)
    # A living process of another user is no process that is gone, whether or not /proc shows it.
    assert not fleet_lock.gone({**mine, "pid": 1, "started": fleet_lock.me("x", 1, NOW)["started"]}, mine)
    # Nobody can tell from here.
    assert not fleet_lock.gone({**theirs, "started": 1}, mine)
    assert not fleet_lock.gone({**holder, "controller": "f" * 16}, mine)


@pytest.mark.parametrize("text", ["[]", '{"format": 2}', '{"format": 1, "holder": {"owner": "x"}}', "{"])
def test_a_damaged_lock_is_no_free_one(text, tmp_path, mine):
    (tmp_path / "fleet-lock.json").write_text(text)
    with pytest.raises(LockstepError, match=r"fleet-lock\.json"):
        fleet_lock.take(str(tmp_path), mine)
    assert (tmp_path / "fleet-lock.json").read_text() == text


def test_the_module_names_the_run_and_replaces_one_that_is_gone(tmp_path, play, theirs):
    take: dict[str, Any] = {"lockstep.fleet.fleet_lock": {"state": "held", "state_dir": str(tmp_path / "state")}}
    free: dict[str, Any] = {"lockstep.fleet.fleet_lock": {"state": "free", "state_dir": str(tmp_path / "state")}}
    played = play([take])
    assert (played.rc, played.changed) == (0, 0), played.text
    left = said(tmp_path / "state")["holder"]  # that run has ended without giving it back
    assert left["owner"].count("@") == 1
    played = play([take, free])
    assert played.rc == 0, played.text
    assert f"that run is gone: {left['owner']} runs {left['what']}" in played.text
    assert said(tmp_path / "state")["holder"] is None
    fleet_lock.take(str(tmp_path / "state"), theirs)
    played = play([take])
    assert played.rc != 0
    assert "noa@rack runs serve.yml" in played.text
    take["lockstep.fleet.fleet_lock"]["break_lock"] = True
    played = play([take, free])
    assert played.rc == 0, played.text
    assert "broken by break_lock: noa@rack runs serve.yml" in played.text
