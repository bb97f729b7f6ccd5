"""drain against the simulator in a container on this machine's engine: what it sees, waits for and ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import playbook
import ports
import pytest
from docker.models.containers import Container
from lockstep_lab import engines, outer
from streams import Streams, streams

NAME = "drain-test-head"
ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., Container]


@pytest.fixture(scope="module")
def port() -> int:
    return ports.free()[0]


@pytest.fixture(scope="module")
def start(port: int) -> Iterator[Start]:
    """A callable that starts the simulator anew, one rank, with these arguments more, and waits until it serves."""
    client = outer.engine()
    image = engines.load(client, "sim")["a"]

    def remove() -> None:
        for left in client.containers.list(all=True, filters={"name": f"^{NAME}$"}):
            left.remove(force=True)

    def run(*arguments: str) -> Container:
        remove()
        argv = ["-m", "lockstep_sim", "--model-path", "/model", "--port", str(port), *arguments]
        container = client.containers.run(
            image, argv, entrypoint=["python3"], name=NAME, network_mode="host", detach=True,
            environment={"LOCKSTEP_SIM_FAULTS": "/faults.json"}, labels={"lockstep.test": "drain"},
        )  # fmt: skip
        until_ready(port)
        return container

    yield run
    remove()
    client.close()


def get(port: int, path: str) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as asked:
        asked.request("GET", path)
        answer = asked.getresponse()
        return answer.status, answer.read()


def until_ready(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError):
            if get(port, "/ready")[0] == 200:
                return
        time.sleep(0.1)


@pytest.fixture(scope="module")
def head(start: Start) -> Container:
    """One engine for all tests that leave it as it is."""
    return start()


class Drained:
    """What one run came to."""

    def __init__(self, where: Path, *arguments: str, **options: Any) -> None:
        task = {"name": "Drain", "lockstep.fleet.drain": {"container": NAME, **options}}
        play = {
            "hosts": "all",
            "connection": "local",
            "gather_facts": False,
            "vars": {"ansible_python_interpreter": sys.executable},
            "tasks": [task],
        }
        played = playbook.run_playbook([play], where, *arguments)
        self.rc, self.result = played.rc, played.results["Drain"]
        self.printed = [line for line in played.text.splitlines() if line.startswith("localhost: ")]

    @property
    def clients(self) -> set[str]:
        return {request["client"] for request in self.result["requests"]}


@pytest.fixture
def drain(tmp_path: Path) -> Callable[..., Drained]:
    """A callable: one task of the module."""
    return lambda *arguments, **options: Drained(tmp_path, *arguments, **options)


def clients(held: Streams) -> set[str]:
    return {stream.client for stream in held}


def wait_counted(port: int, count: int) -> None:
    """Until the scheduler's picture has so many requests."""
    deadline = time.monotonic() + 60
    while True:
        (load,) = json.loads(get(port, "/v1/loads")[1])["loads"]
        if load["num_running_reqs"] + load["num_waiting_reqs"] == count:
            return
        assert time.monotonic() < deadline, load
        time.sleep(0.05)


# --- what is there ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("head")
def test_an_idle_engine_is_left_at_once(drain, port):
    got = drain(port=port)
    assert got.rc == 0
    assert (got.result["changed"], got.result["requests"], got.result["aborted"]) == (False, [], [])
    assert got.result["note"] is None
    assert got.result["seconds"] < 30
    assert got.printed == []


@pytest.mark.usefixtures("head")
def test_requests_are_named_in_check_mode_which_waits_for_nothing(drain, port):
    with streams("127.0.0.1", port, 6, 100000) as held:
        held.until_answered(4)
        wait_counted(port, 6)
        got = drain("--check", then="abort")  # the port is the container's own --port
        assert got.rc == 0
        assert not got.result["changed"]
        assert len(held.open()) == 6
    assert got.clients == clients(held)
    states = [request["state"] for request in got.result["requests"]]
    assert states == ["streaming"] * 4 + ["waiting for its answer"] * 2
    first, last = got.result["requests"][0], got.result["requests"][-1]
    assert (first["method"], first["path"]) == ("POST", "/v1/chat/completions")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["since"])
    assert (last["method"], last["path"], last["since"]) == (None, None, None)
    (said,) = got.printed
    shown = re.escape(f"({first['client']} POST /v1/chat/completions)")
    assert re.fullmatch(rf"localhost: 6 requests in flight, oldest since \d\d:\d\d:\d\d {shown} +\d+ s", said)


@pytest.mark.usefixtures("head")
def test_it_waits_for_streams_and_cuts_none(drain, port):
    with streams("127.0.0.1", port, 3, 1500) as held:
        held.until_answered()
        got = drain(timeout=120)
        held.until_ended(10)  # one that was not waited for goes on for longer
    assert got.rc == 0
    assert [(stream.whole, stream.finish_reason) for stream in held] == [(True, "length")] * 3
    assert got.printed[0].startswith("localhost: 3 requests in flight")
    assert got.result["seconds"] > 3


@pytest.mark.usefixtures("head")
def test_a_kept_connection_and_probes_are_no_traffic(drain, port):
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    silent = socket.create_connection(("127.0.0.1", port))  # opened before it asks
    kept.request("POST", "/v1/chat/completions", body)
    kept.getresponse().read()
    got = drain(timeout=0)
    assert (got.rc, got.result["requests"], got.result["state"]) == (0, [], "idle")
    kept.close()
    silent.close()


@pytest.mark.usefixtures("head")
def test_the_modules_example_runs(tmp_path, port):
    tasks = playbook.examples("drain", {"dsv41-head": NAME, "port: 8888": f"port: {port}"})
    play = {"hosts": "all", "connection": "local", "gather_facts": False, "tasks": tasks}
    play["vars"] = {"ansible_python_interpreter": sys.executable}
    assert playbook.run_playbook([play], tmp_path).rc == 0


# --- in time, or not --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("head")
def test_too_late_fails_with_names_and_touches_nothing(drain, port):
    with streams("127.0.0.1", port, 2, 100000) as held:
        held.until_answered()
        got = drain(timeout=2)
        assert got.rc == 2
        assert len(held.open()) == 2
    assert not got.result["changed"]
    assert got.clients == clients(held)
    message = got.result["msg"]
    assert re.match(r"localhost, rank 0: 2 request\(s\) still in flight after \d+ s; nothing was stopped\n", message)
    assert all(f"{stream.client} POST /v1/chat/completions, streaming since " in message for stream in held)
    assert "-e drain_then=abort" in message


@pytest.mark.usefixtures("head")
def test_abort_gives_every_client_a_proper_end(drain, port):
    with streams("127.0.0.1", port, 6, 100000) as held:
        held.until_answered(4)
        wait_counted(port, 6)
        got = drain(timeout=0, then="abort")
        held.until_ended(60)
    assert got.rc == 0
    assert got.result["changed"]
    assert {request["client"] for request in got.result["aborted"]} == clients(held)
    assert [(stream.whole, stream.finish_reason) for stream in held] == [(True, "abort")] * 6
    assert got.result["state"] == "idle"


# --- what cannot be asked ---------------------------------------------------------------------------------------------


def test_no_container(drain):
    got = drain(container="no-such-head", port=1)
    assert (got.rc, got.result["changed"], got.result["requests"]) == (0, False, [])
    assert got.result["note"] == "no-such-head is not there: nothing can be waited for"


def test_a_paused_container(drain, head):
    head.pause()
    try:
        got = drain()
    finally:
        head.unpause()
    assert got.rc == 0
    assert f"{NAME} is paused" in got.result["note"]
    assert got.printed == [f"localhost: {got.result['note']}"]


def test_an_api_that_does_not_answer(drain, head, port):
    with streams("127.0.0.1", port, 1, 100000) as held:
        held.until_answered()
        head.kill("SIGSTOP")
        try:
            got = drain(timeout=120)
        finally:
            head.kill("SIGCONT")
    assert got.rc == 0
    assert f"the API on port {port} does not answer" in got.result["note"]
    assert got.result["seconds"] < 60


def test_a_port_that_nobody_listens_on(drain, head):
    assert head
    got = drain(port=1)
    assert got.rc == 0
    assert "Connection refused" in got.result["note"]


def test_an_engine_with_a_key_is_told_by_log_and_connections(drain, start, port):
    start("--api-key", "sesame")
    got = drain(timeout=0)
    assert (got.rc, got.result["state"]) == (0, "idle")
    with streams("127.0.0.1", port, 2, 100000, headers={"Authorization": "Bearer sesame"}) as held:
        held.until_answered()
        got = drain(timeout=0)
        assert got.rc == 2
        assert got.clients == clients(held)
        assert got.result["note"] == "/v1/loads answered 401 (it wants an API key): told by connections and log alone"
        ended = drain(timeout=0, then="abort")
        assert ended.rc == 0
        assert not ended.result["changed"]
        assert "/abort_request answered 401" in ended.result["note"]
        assert len(held.open()) == 2


def test_a_log_without_access_lines_leaves_the_counts(drain, start, port):
    start("--log-level", "warning")
    with streams("127.0.0.1", port, 2, 100000) as held:
        held.until_answered()
        wait_counted(port, 2)
        got = drain(timeout=0)
    assert got.rc == 2
    assert (got.result["running"], got.result["requests"]) == (2, [])
    assert "2 more that the log and the connections do not name" in got.result["msg"]


def test_only_the_log_of_this_life_counts(drain, start, port):
    container = start()
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        client = "{}:{}".format(*own.getsockname())
        line = f'[2026-01-01 00:00:00] INFO:     {client} - "POST /generate HTTP/1.1" 200 OK'
        container.exec_run(["sh", "-c", f"echo '{line}' >/proc/1/fd/2"])
        deadline = time.monotonic() + 60
        while line not in container.logs().decode():  # it goes through the engine
            assert time.monotonic() < deadline
            time.sleep(0.1)
        container.restart(timeout=5)
        until_ready(port)
        own.connect(("127.0.0.1", port))
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 100000, "ignore_eos": True})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        own.sendall(head.encode() + body.encode())
        wait_counted(port, 1)
        (request,) = drain(timeout=0).result["requests"]
    assert (request["client"], request["state"]) == (client, "waiting for its answer")
