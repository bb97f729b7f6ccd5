"""Swaps on the lab while eight clients hold streams open: none is cut, or each gets the end that was ordered."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack

import fleet
import pytest
from fleet import ADDRESS, HEAD, HOSTS
from streams import Streams, streams

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("serving")]

PORT = 8888
COUNT = 8
# Four run at once, for 18 s at the simulator's pace of three tokens in 20 ms; the other four follow them.
TOKENS = 2700
# Streams that begin here are open when the swap begins, also when something has to converge before.
LOCKED = "Take the fleet's lock"
ALL_TIMES = {"PROFILE_TASKS_TASK_OUTPUT_LIMIT": "all"}


def seconds(said: fleet.Said, task: str) -> float:
    """How long a task took, by the table at the end of the run; ``ALL_TIMES`` has it name every task."""
    return max(float(found) for found in re.findall(rf"^{task} -+ ([0-9.]+)s$", said.text, re.MULTILINE))


def named(said: fleet.Said) -> list[int]:
    """How many requests the run's lines named, one after the other."""
    return [int(found) for found in re.findall(rf"^{HEAD}: (\d+) requests? in flight", said.text, re.MULTILINE)]


@pytest.fixture(scope="module")
def undisturbed() -> list[bytes]:
    """What each client reads when nothing happens."""
    with streams(ADDRESS[HEAD], PORT, COUNT, TOKENS) as held:
        held.until_ended(600)
        assert all(stream.whole for stream in held)
        return [stream.same_bytes() for stream in held]


def swap(*arguments: str, when: str = LOCKED) -> tuple[fleet.Said, Streams]:
    """Run an entry; eight streams begin when it comes to a task."""
    with ExitStack() as stack:
        held = Streams()

        def begin(task: str) -> None:
            if task == when and not held:
                held.extend(stack.enter_context(streams(ADDRESS[HEAD], PORT, COUNT, TOKENS)))

        # On a busy machine the simulator's steps take longer too.
        patient = ("-e", "drain_timeout=600", "-e", "fleet_generation_timeout_s=600")
        said = fleet.play(*arguments, *patient, at=begin)
        return said, held.until_ended(300)


@pytest.mark.parametrize(
    ("arguments", "arm"),
    [(("serve.yml", "-e", "arm=e9"), "e9"), (("rollback.yml",), "e8")],
    ids=["e8 to e9", "rollback to e8"],
)
def test_a_swap_cuts_no_stream(undisturbed, arguments, arm):
    before = fleet.containers()
    said, held = swap(*arguments)
    assert said.rc == 0, said.text
    assert fleet.arms() == dict.fromkeys(HOSTS, arm)
    now = fleet.containers()
    assert all(now[host] != before[host] for host in HOSTS)
    assert named(said)[:1] == [COUNT], f"all have to be open when the swap begins\n{said.text}"
    assert [(stream.whole, stream.cut) for stream in held] == [(True, None)] * COUNT
    assert [stream.same_bytes() for stream in held] == undisturbed


def test_what_runs_already_disturbs_nobody(undisturbed):
    before = fleet.containers()
    said, held = swap("serve.yml", "-e", "arm=e8", when="Look at every rank")
    assert said.rc == 0, said.text
    assert fleet.containers() == before
    assert named(said) == [], "there is nothing to wait for"
    assert [stream.same_bytes() for stream in held] == undisturbed


@pytest.fixture(scope="module")
def endless() -> Iterator[Streams]:
    """Streams that do not end by themselves while these tests run."""
    with streams(ADDRESS[HEAD], PORT, COUNT, 1_000_000) as held:
        held.until_answered(4)
        yield held


def untouched() -> dict[str, list[str]]:
    """Every host as it is, but for the environment files of the launch to come, which are rendered before the drain."""
    rendered = f"{fleet.STATE_DIR}/env"
    return {
        host: [line for line in lines if not line.startswith(rendered)] for host, lines in fleet.hosts_now().items()
    }


def test_streams_that_do_not_end_stop_the_run_and_nothing_else(endless):
    before, journal = untouched(), fleet.on(HEAD, f"ls {fleet.STATE_DIR}/journal")
    said = fleet.serve("e9", "-e", "drain_timeout=3")
    assert said.rc != 0
    assert f"{HEAD}, rank 0: {COUNT} request(s) still in flight after" in said.text
    assert all(stream.client in said.text for stream in endless)
    assert "drain_then=abort" in said.text
    assert "was not proven" not in said.text, "nothing has to be taken back"
    assert untouched() == before
    assert fleet.on(HEAD, f"ls {fleet.STATE_DIR}/journal") == journal
    so_far = [len(stream.raw) for stream in endless]
    time.sleep(2)
    assert len(endless.open()) == COUNT
    assert sum(len(stream.raw) for stream in endless) > sum(so_far)


def test_a_check_run_names_them_and_waits_for_nothing(endless):
    said = fleet.serve("e9", "--check", **ALL_TIMES)
    assert said.rc == 0, said.text
    assert named(said) == [COUNT]
    assert seconds(said, "Drain") < 30, "it would wait for two minutes"
    assert len(endless.open()) == COUNT


def test_abort_gives_each_client_an_end_and_the_swap_goes_on(endless):
    said = fleet.serve("e9", "-e", "drain_timeout=1", "-e", "drain_then=abort")
    assert said.rc == 0, said.text
    assert fleet.arms() == dict.fromkeys(HOSTS, "e9")
    endless.until_ended(5)
    assert [(stream.whole, stream.finish_reason) for stream in endless] == [(True, "abort")] * COUNT
    assert ("Drain", HEAD) in said.changed


def test_without_traffic_it_costs_one_short_task():
    said = fleet.play("rollback.yml", **ALL_TIMES)
    assert said.rc == 0, said.text
    assert [(host, status) for task, host, status in said.results if task == "Drain" and status != "skipping"] == [
        (HEAD, "ok")
    ]
    assert seconds(said, "Drain") < 30
