"""The controller is killed with SIGKILL in a swap, at moments drawn over its steps; the next run repairs.

Half of the kills take ansible-playbook alone, so that what it had under way on the ranks goes on for a while; the
others take its whole process group, as when the controller loses power. Nothing is cleaned up in between.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter

import fleet
import httpx
import pytest
from crash import Histogram
from fleet import ADDRESS, CONTAINER, HEAD, HOSTS, STATE_DIR

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("serving")]

SEED = "2026-11-29"
# Steps of a swap, each by the first task of it, and how many kills are drawn in it: 30 in all.
STEPS = {
    "plan": ("Plan the launch", 1),
    "look": ("Look at every rank", 2),
    "lock": ("Take the fleet's lock", 2),
    "environment": ("Render the environment of every rank", 2),
    "drain": ("Drain", 2),
    "stop": ("Stop what runs", 4),
    "start workers": ("Start the workers", 4),
    "start head": ("Start the head", 3),
    "boot": ("Follow the boot", 3),
    "prove": ("Ask the head for a generation", 2),
    "receipt": ("Write the receipt", 2),
    "journal": ("Record the launch in the journal of every rank", 2),
    "give back": ("Give the fleet's lock back", 1),
}
# In these the launch that serves is not touched.
UNTOUCHED = ("plan", "look", "lock", "environment", "drain")


class Run:
    """One run of serve.yml, followed line by line, in a process group of its own."""

    def __init__(self, arm: str) -> None:
        self.process = fleet.started("serve.yml", "-e", f"arm={arm}", alone=True)
        self.said: list[str] = []
        self.steps: list[str] = []  # those that have begun, in order; to prove, every rank is looked at again
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        tasks = {f"TASK [{task}]": step for step, (task, _) in STEPS.items()}
        with self.process.stdout or io.StringIO() as lines:
            for line in lines:
                self.said.append(line)
                step = tasks.get(line.rstrip("*\n "))
                if step and step not in self.steps:
                    self.steps.append(step)

    def until(self, step: str) -> None:
        """Wait until a step begins."""
        while step not in self.steps:
            assert self.reader.is_alive() or step in self.steps, "".join(self.said)
            time.sleep(0.01)

    def kill(self, *, group: bool) -> str:
        """Kill it, and return the step that it had come to: a less busy machine is further than the drawn moment."""
        if group:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        self.process.wait()
        self.reader.join(0.5)  # longer as long as something that it started lives on
        return self.steps[-1]


def timeline(arm: str) -> dict[str, float]:
    """Seconds of each step of one undisturbed swap."""
    run = Run(arm)
    began = {}
    for step in STEPS:
        run.until(step)
        began[step] = time.monotonic()
    run.reader.join()
    assert run.process.wait() == 0, "".join(run.said)
    ends = [*list(began.values())[1:], time.monotonic()]
    return {step: end - start for (step, start), end in zip(began.items(), ends, strict=True)}


def running() -> dict[str, tuple[str, str]]:
    """(arm, launch) of the engine that runs on each host; empty texts where none does."""
    shown = '\'{{.Label "lockstep.arm"}} {{.Label "lockstep.launch"}}\''
    ask = {host: f"docker ps --filter name={CONTAINER[host]} --format {shown}" for host in HOSTS}
    return {host: tuple([*fleet.on(host, ask[host]).split(), "", ""][:2]) for host in HOSTS}


def answers() -> bool:
    try:
        return httpx.get(f"http://{ADDRESS[HEAD]}:8888/health", timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def left_behind(before: str, arm: str) -> str:
    """What the fleet serves right after a kill. An engine that answers is one whole launch, never a mixture."""
    healthy, now = answers(), running()
    whole = len(set(now.values())) == 1
    if healthy and answers() and running() == now:
        assert whole, now
    if not whole:
        return "between"
    served = now[HEAD][0]
    assert served in (before, arm, ""), now
    return {before: "the old launch", arm: "the new launch"}.get(served, "nothing")


def test_the_next_run_repairs_what_a_killed_controller_left(request):
    now, other = "e8", "e9"
    seconds = timeline(other)
    now, other = other, now
    source = random.Random(SEED)  # noqa: S311 - drawn again the same by the seed
    moments = [
        (step, source.random(), source.random() < 0.5) for step, (_, kills) in STEPS.items() for _ in range(kills)
    ]
    source.shuffle(moments)
    histogram, left = Histogram("controller"), Counter[str]()
    for drawn, part, group in moments:
        run = Run(other)
        run.until(drawn)
        time.sleep(part * seconds[drawn])
        step = run.kill(group=group)
        state = left_behind(now, other)
        left[state] += 1
        histogram.count(f"serve.yml killed, then {state}", step)
        # A run that was killed before it stopped anything left the old launch whole: asked for that, nothing is to do.
        whole = step in UNTOUCHED
        assert not whole or state == "the old launch", (step, state)
        wanted = now if whole else other
        repaired = fleet.serve(wanted)
        assert repaired.rc == 0, f"killed in {step!r} ({part:.2f}, group {group}): {state}\n{repaired.text}"
        receipt = json.loads(repaired.receipt.read_text())
        assert receipt["ok"]
        assert set(running().values()) == {(wanted, receipt["launch"])}
        assert not (whole and repaired.changed), repaired.text
        if not whole:
            now, other = other, now
    histogram.show(request.config)
    assert fleet.serve(other).rc == 0  # takes over the lock that the last one may have left
    # Nothing half-written is left, and no lock.
    for host in HOSTS:
        entries = fleet.on(host, f"ls -A {STATE_DIR}/journal").split()
        assert all(re.fullmatch(r"\S+-[0-9a-f]{6}\.json", name) for name in entries), entries
        assert fleet.on(host, f"find {STATE_DIR} -maxdepth 1 -name '.*' -type f").strip() == ""
    assert json.loads(fleet.on(HEAD, f"cat {STATE_DIR}/fleet-lock.json"))["holder"] is None
    proven = fleet.play("verify.yml")
    assert proven.rc == 0, proven.text
    # Both kinds of repair were seen: a fleet that went on serving, and one that was down.
    assert left["nothing"] + left["between"] > 0
    assert left["the old launch"] > 0
