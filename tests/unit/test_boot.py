"""boot: what a container's state and its log say of a boot, and the words for its end."""

from pathlib import Path

import pytest
from lockstep_core import boot

DATA = Path(__file__).parent / "data"
HEAD, WORKER = ((DATA / f"sglang-tp3-{name}.log").read_bytes().decode() for name in ("head", "worker"))
OOM = (
    "[2026-11-29 11:35:40 TP2] Scheduler hit an exception: Traceback (most recent call last):\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    "[2026-11-29 11:35:40] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
)
LOST = "[2026-11-29 11:35:41 TP1] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"


def container(state="running", **facts):
    return {"state": state, "error": "", "exit_code": 0, "oom_killed": False, **facts}


def state(log, now=None, role="head", **options):
    return boot.judge(log, now or container(), role=role, **options)["state"]


@pytest.mark.parametrize(("health", "expected"), [(None, "starting"), (503, "starting"), (200, "ready")])
def test_the_head_needs_its_log_and_its_health(health, expected):
    assert state(HEAD, health=health) == expected
    before = HEAD[: HEAD.index("The server is fired up")]
    assert state(before, health=health) == "starting"


def test_a_worker_is_judged_by_its_log_alone():
    before = WORKER[: WORKER.index("[2026-11-29 11:35:55] Dummy")]
    assert state(before, role="worker", health=200) == "starting"
    assert state(WORKER, role="worker") == "ready"
    assert state(HEAD, role="worker", health=200) == "starting", "a head's log is no worker's"


def test_an_old_builds_worker_by_its_packed_lines_and_its_pool():
    packed = "[2026-09-11 23:34:14 TP1] Exact nvme Engram layer=1 rank=1 rows=[1,2) packed=True\n"
    assert state(packed, role="worker") == "starting"
    assert state(packed + "[2026-09-11 23:46:11 TP1] Memory pool end. avail mem=8.00 GB", role="worker") == "ready"


@pytest.mark.parametrize("now", [container("exited"), container("dead"), container("created", error="no such image")])
def test_a_container_that_does_not_live_is_not_ready(now):
    assert state(HEAD, now, health=200) == "exited"


def test_no_container():
    seen = boot.judge("", None, role="head")
    assert (seen["state"], seen["stage"], seen["exit_code"]) == ("exited", "starting", None)
    assert "there is no container dsv41-head" in str(boot.failure(seen, host="spark1", rank=0, container="dsv41-head"))


def test_fatal_while_it_still_runs():
    seen = boot.judge(WORKER[: WORKER.index("[2026-11-29 11:35:41")] + OOM, container(), role="worker", rank=1)
    assert (seen["state"], seen["stage"], seen["cause"]["fault"]) == ("fatal", "load weights", "oom")
    assert len(seen["log_tail"]) == 29 + 3, "the whole log: it has fewer than 40 lines"
    said = str(boot.failure(seen, host="spark2", rank=1, container="dsv41-worker"))
    assert said.splitlines()[:3] == [
        "spark2, rank 1: the boot failed during 'load weights': oom",
        "  found: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (line 30 of the log)",
        "  expected: a boot without a fatal line",
    ]


def test_a_consequence_points_to_the_other_ranks():
    seen = boot.judge(LOST, container("exited", exit_code=1), role="worker")
    assert (seen["state"], seen["cause"], seen["exit_code"]) == ("exited", None, 1)
    said = str(boot.failure(seen, host="spark2", rank=None, container="dsv41-worker"))
    assert said.startswith("spark2, rank 1: "), "the rank that the log's line names"
    assert "look for the cause in the other ranks' logs" in said


def test_killed_for_memory():
    seen = boot.judge("Loading\n", container("exited", exit_code=137, oom_killed=True), role="head")
    assert "the kernel killed it for memory" in str(boot.failure(seen, host="spark1", rank=0, container="dsv41-head"))


def test_overdue_shows_where_it_stands():
    seen = boot.judge(HEAD[: HEAD.index("[2026-11-29 11:35:41")], container(), role="head")
    said = str(boot.overdue(seen, host="spark1", rank=0, seconds=900.4))
    assert said.startswith(
        "spark1, rank 0: not ready after 900 s\n  found: stage 'load weights 1/1'; the last line: Multi"
    )


def test_events_are_what_a_person_wants_to_see():
    kinds = {event["kind"] for event in boot.judge(HEAD, container(), role="head")["events"]}
    assert {"ready", "kv_allocated", "weights_end"} <= kinds
    assert not kinds & {"decode", "prefill", "http", "progress"}
