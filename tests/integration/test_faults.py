"""A launch that fails on the lab: the run says who and why, and the previous launch is served again, whole and proven.

The simulator plays the failures; its fault is for the failing boot only. What happens around it is real.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import fleet
import pytest
from fleet import HEAD, HOSTS, SECOND, STATE_DIR, THIRD
from lockstep_lab import faults

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("serving")]

# The simulator has read its orders when it says this; a request's orders it reads at the request.
STARTED = "server_args="


@contextmanager
def ordered(host: str, order: dict[str, object], *, until: str = STARTED, arm: str = "b1") -> Iterator[None]:
    """The simulator on this host fails as ordered while ``arm`` boots: the order goes when its log says ``until``."""
    path = f"{STATE_DIR}/sim-faults.json"
    mine = f"{path}.{uuid.uuid4().hex}"  # as long as it is there, the order is this one
    fleet.on(host, f"echo '{json.dumps(order)}' >{path}; touch {mine}")
    its = f"docker ps --all --quiet --filter label=lockstep.arm={arm}"
    heard = f"docker logs $({its}) 2>&1 | grep -qF '{until}'"
    watch = f"while [ -e {mine} ]; do if {heard}; then rm -f {path}; break; fi; sleep 0.3; done"
    faults.host(host).exec_run(["timeout", "600", "sh", "-c", watch], detach=True)
    try:
        yield
    finally:
        fleet.on(host, f"rm -f {mine} {path}")


FAILURES = {
    # Known only after boot: the rank's own log says so.
    "packed": (
        SECOND,
        {"packed_false": [1]},
        STARTED,
        [f"{SECOND}: packed", "found: layer 1: packed=False; layer 14: packed=False"],
    ),
    "out of memory": (
        THIRD,
        {"oom": True, "load_s": 2},
        STARTED,
        [f"{THIRD}, rank 2: the boot failed during", "oom", "torch.OutOfMemoryError"],
    ),
    "worker death": (
        SECOND,
        {"die": {"rank": 1, "after_s": 1}, "load_s": 5},
        STARTED,
        [f"{SECOND}, rank 1: the boot failed during", "exit code 137"],
    ),
    "no room for the KV pool": (
        THIRD,
        {"kv": True},
        STARTED,
        [f"{THIRD}, rank 2: the boot failed during", "Loaded weights leave no GPU memory for the KV cache"],
    ),
    # It says nothing any more; what ends the wait is the time limit.
    "head hangs": (
        HEAD,
        {"hang": "warmup"},
        STARTED,
        [f"{HEAD}, rank 0: not ready after", "if the stage still moves, allow more time"],
    ),
    "nan": (
        HEAD,
        {"nan": True},
        "NaN in the logits",
        [f"{HEAD}: faults", "found: Detected errors during sampling! NaN in the logits."],
    ),
}


@pytest.mark.parametrize(("host", "order", "until", "words"), FAILURES.values(), ids=FAILURES)
def test_the_previous_launch_is_served_again(host, order, until, words):
    before, latest = fleet.containers(), (fleet.RESULTS / "latest").readlink()
    journals = [fleet.on(one, f"ls {STATE_DIR}/journal") for one in HOSTS]
    # Whoever hangs is waited for; the others must have the time to die, and the launch before to boot again.
    limit = 45 if "hang" in order else 150
    with ordered(host, order, until=until):
        said = fleet.serve("b1", "-e", f"fleet_boot_timeout_s={limit}")
    assert said.rc != 0
    # The last message has it all; the tasks before it said so too.
    end = said.text.rpartition("was not proven:")[2]
    assert [word for word in words if word not in end] == []
    (failed,) = set(re.findall(r"(\S+-b1-[0-9a-f]{6}) was not proven", said.text)) or [said.text]
    assert f"{latest} is served again, proven." in end
    # A fatal line ends the wait, before the time limit does.
    assert ("not ready after" in said.text) == ("hang" in order)
    now = fleet.containers()
    assert all(now[one].endswith("running") and now[one] != before[one] for one in HOSTS)
    assert fleet.arms() == dict.fromkeys(HOSTS, "e8")
    # What failed left its logs, and neither a receipt nor a way to go back to.
    assert (fleet.RESULTS / "latest").readlink() == latest
    assert {path.name for path in (fleet.RESULTS / failed / "logs").iterdir()} == {f"{one}.log" for one in HOSTS}
    boot = {path.name for path in (fleet.RESULTS / failed / "boot").glob("spark*")}
    assert boot == {f"{one}.{kind}" for one in HOSTS for kind in ("log", "json")}
    assert not (fleet.RESULTS / failed / "receipt.json").exists()
    assert [fleet.on(one, f"ls {STATE_DIR}/journal") for one in HOSTS] == journals
    proven = fleet.play("verify.yml")
    assert proven.rc == 0, proven.text
    assert f"{latest}: proven" in proven.text


@contextmanager
def port_grabbed(host: str, port: int) -> Iterator[None]:
    """Something else listens on the API's port as soon as the old engine has let go of it."""
    grab = f"until python3 -m http.server {port}; do sleep 0.05; done"
    fleet.on(host, f"systemd-run --quiet --unit=grab sh -c '{grab}'")
    try:
        yield
    finally:
        fleet.on(host, "systemctl stop grab")


def test_a_port_that_something_else_takes_in_between():
    """Neither launch can have it: nothing half is left to answer, both reasons are said, and the next run repairs."""
    with port_grabbed(HEAD, 8888):
        said = fleet.serve("b1")
    assert said.rc != 0
    end = said.text.rpartition("was not proven:")[2]
    assert f"{HEAD}, rank 0: the boot failed during" in end
    assert "address already in use" in end.lower()
    assert re.search(r"Serving \S+-e8-[0-9a-f]{6} again failed too:", end)
    assert fleet.serve("e8").rc == 0
    assert fleet.play("verify.yml").rc == 0


def test_left_as_it_is_for_a_person_to_look_at():
    with ordered(SECOND, {"packed_false": [1]}):
        said = fleet.serve("b1", "-e", "on_failure=leave")
    assert said.rc != 0
    assert "The ranks are left as they are (on_failure=leave)." in said.text
    (before,) = set(re.findall(r"rollback.yml -e to=(\S+-e8-[0-9a-f]{6}), or serve.yml", said.text))
    assert fleet.arms() == dict.fromkeys(HOSTS, "b1")
    back = fleet.play("rollback.yml", "-e", f"to={before}")
    assert back.rc == 0, back.text
    assert fleet.arms() == dict.fromkeys(HOSTS, "e8")


@contextmanager
def lost_when(host: str, word: str) -> Iterator[None]:
    """The host's sshd refuses connections from when the head's new engine says a word until the end."""
    with ExitStack() as stack:

        def watch() -> None:
            deadline = time.monotonic() + 120
            its = "docker ps --quiet --filter label=lockstep.arm=b1"
            while time.monotonic() < deadline and not ended.is_set():
                if word in fleet.on(HEAD, f"docker logs $({its}) 2>&1 || true"):
                    stack.enter_context(faults.unreachable(host))
                    return
                time.sleep(0.2)

        ended = threading.Event()
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def test_a_rank_that_is_lost_in_the_middle_of_a_swap():
    """Nothing can be proven without it, nor undone: the run says so, and the next one goes on from what it finds."""
    with lost_when(THIRD, STARTED):
        said = fleet.serve("b1")
    assert said.rc != 0
    end = said.text.rpartition("was not proven:")[2]
    assert "unreachable: " in end
    assert f"{THIRD}: reachable" in end.partition("again failed too:")[2]
    # Whatever runs is of one launch, or it does not answer.
    now = fleet.arms()
    assert len(set(now.values())) == 1, now
    repaired = fleet.serve("b1")
    assert repaired.rc == 0, repaired.text
    assert json.loads(repaired.receipt.read_text())["ok"]
    assert fleet.serve("e8").rc == 0


def test_another_run_that_changes_the_fleet_is_waited_for():
    """Two operators: the second is told who is at work; a dead one's lock can be broken."""
    holder = {
        "owner": "noa@rack",
        "what": "serve.yml",
        "since": "2026-09-24T09:47:00Z",
        "run": "e" * 16,
        "controller": "f" * 16,
        "boot": "b",
        "pid": 4711,
        "started": 1,
    }
    path = f"{STATE_DIR}/fleet-lock.json"
    fleet.on(HEAD, f"echo '{json.dumps({'format': 1, 'holder': holder, 'released': None})}' >{path}")
    before = fleet.containers()
    for entry, *arguments in (["serve.yml", "-e", "arm=b1"], ["rollback.yml"], ["stop.yml"], ["converge_images.yml"]):
        said = fleet.play(entry, *arguments)
        assert said.rc != 0, entry
        assert "found: noa@rack runs serve.yml since 2026-09-24T09:47:00Z (process 4711)" in said.text
        assert "-e break_lock=true" in said.text
        assert fleet.containers() == before
    # Who changes nothing needs no lock.
    assert fleet.play("verify.yml").rc == 0
    assert fleet.serve("e8").rc == 0
    said = fleet.serve("b1", "-e", "break_lock=true")
    assert said.rc == 0, said.text
    assert "broken by break_lock: noa@rack runs serve.yml" in said.text
    assert json.loads(fleet.on(HEAD, f"cat {path}"))["holder"] is None
    assert fleet.serve("e8").rc == 0


def test_page_cache_that_cannot_be_given_back_is_known_before_anything_stops():
    """The lab's hosts are containers: /proc/sys is not theirs to write."""
    before = fleet.containers()
    said = fleet.serve("b1", "-e", "fleet_drop_caches=true")
    assert said.rc != 0
    assert "cannot write /proc/sys/vm/drop_caches" in said.text
    assert fleet.containers() == before


def test_with_nothing_before_it_ends_stopped():
    assert fleet.play("stop.yml").rc == 0
    with ordered(SECOND, {"packed_false": [1]}):
        said = fleet.serve("b1")
    assert said.rc != 0
    assert f"{SECOND}: packed" in said.text
    assert "nothing is served now" in said.text
    # An engine that nobody has proven must not answer anybody.
    assert set(fleet.containers().values()) == {"none"}
    (failed,) = set(re.findall(r"(\S+-b1-[0-9a-f]{6}) was not proven", said.text))
    for host in HOSTS:
        assert "packed=" in fleet.on(host, f"cat {STATE_DIR}/logs/{failed}.log")
