"""A whole server of real SGLang with the overlay: one rank, the model that the lab serves, its own shards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ports
import pytest
from lockstep_core import enginelog, traffic
from lockstep_lab import checkpoint as lab
from lockstep_lab import engines
from streams import streams

ARGUMENTS = [
    "--served-model-name", "deepseek-v4.1-flash", "--dtype", "float32", "--device", "cpu", "--attention-backend",
    "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule", "--max-total-tokens", "2048",
    "--context-length", "2048", "--max-running-requests", "4", "--random-seed", "0", "--host", "127.0.0.1",
]  # fmt: skip


@contextmanager
def serving(place: Path, env: dict[str, str]) -> Iterator[tuple[int, Path, int]]:
    """(port, log, process id) of a server of the lab's model that is ready."""
    (port,) = ports.free()
    model = ["--model-path", str(engines.smollm2_dir()), "--port", str(port)]
    log = place / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *model, *ARGUMENTS],
            env=env | {"TORCHDYNAMO_DISABLE": "1", "SGLANG_EXTERNAL_MODEL_PACKAGE": "lockstep_lab_models"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 400
        while "fired up and ready to roll" not in log.read_text():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield port, log, process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answer(port: int) -> str:
    """What the model says to the lab's question."""
    body = {
        "model": "deepseek-v4.1-flash",
        "messages": [{"role": "user", "content": "What is 2+2? Answer with a number."}],
        "temperature": 0,
        "max_tokens": 12,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as got:  # noqa: S310 - http only
        text: str = json.load(got)["choices"][0]["message"]["content"]
    return text


@pytest.fixture(scope="module")
def server(environment, tmp_path_factory) -> Iterator[tuple[int, Path, int]]:
    """A server with the overlay, its shards and three switches."""
    place = tmp_path_factory.mktemp("server")
    lab.make(place / "checkpoint", 998)
    lab.make_shards(place / "checkpoint", place / "engram", 1, 0, "rows")
    env = environment(
        DSV41_PACKED_DIR=str(place / "engram"),
        LOCKSTEP_ENGRAM_CHECKPOINT=str(place / "checkpoint"),
        LOCKSTEP_ENGRAM_SPLIT="rows",
        DSV41_AUTOTUNE_KEEP="1",
        DSV41_WO_A_W8="1",
        HOME=str(place),
    )
    with serving(place, env) as made:
        yield made


def test_the_boot_log_has_the_adapters_and_the_packed_lines(server):
    _, log, _ = server
    facts = enginelog.facts(log.read_text())
    assert facts["adapters"] == {
        "DSV41_AUTOTUNE_KEEP": "not applicable: no CUDA device",
        "DSV41_PACKED_DIR": "armed",
        "DSV41_WO_A_W8": "missing: this overlay does not carry its adapter",
    }
    assert [(entry["rank"], entry["layer"], entry["packed"]) for entry in facts["packed"]] == [
        (0, 1, True),
        (0, 14, True),
    ]
    assert facts["faults"] == []
    assert facts["ready"]
    assert facts["pool_tokens"] == 2048


def test_the_lines_come_from_the_scheduler_which_holds_the_shards_open(server):
    _, _, leader = server
    holders = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) != leader:
                continue
            opened = []
            for entry in (process / "fd").iterdir():
                with suppress(OSError):  # it may be closed by now
                    opened.append(entry.readlink().name)
            title = (process / "cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:  # a process that has just ended
            continue
        shards = sorted(name for name in opened if name.startswith("engram-"))
        if shards:
            holders[title] = shards
    assert holders == {"sglang::scheduler": ["engram-l1-r0of1.bin", "engram-l14-r0of1.bin"]}


def test_it_answers(server):
    port, _, _ = server
    assert answer(port) == "The answer is 4."


def look(port: int, log: Path) -> dict[str, Any]:
    """What room `traffic` makes of this server, as module `drain` asks it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/loads?include=core", timeout=20) as got:
        counts = traffic.counts(json.load(got))
    clients = traffic.connections(Path("/proc/net/tcp").read_text(), port)
    return traffic.in_flight(log.read_text(), clients, counts, now=time.time())


def test_two_open_streams_are_what_is_in_flight_and_nothing_afterwards(server):
    port, log, _ = server
    assert look(port, log)["state"] == "idle"
    with streams("127.0.0.1", port, 2, 400) as held:
        held.until_answered()
        # A stream's line comes with its first token, long before its end.
        assert {stream.client for stream in held} <= set(traffic.answers(log.read_text()))
        deadline = time.monotonic() + 60
        while (seen := look(port, log))["running"] != 2:  # both in one of the scheduler's pictures
            assert time.monotonic() < deadline, seen
            time.sleep(0.1)
        assert seen["state"] == "busy"
        assert {request["client"] for request in seen["requests"]} == {stream.client for stream in held}
        assert {(r["method"], r["path"], r["state"]) for r in seen["requests"]} == {
            ("POST", "/v1/chat/completions", traffic.STREAMING)
        }
        abort = urllib.request.Request(
            f"http://127.0.0.1:{port}/abort_request", b'{"abort_all": true}', {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(abort, timeout=20) as got:  # noqa: S310 - http only
            assert got.status == 200
        held.until_ended(60)
    assert [(stream.whole, stream.finish_reason) for stream in held] == [(True, "abort")] * 2
    assert look(port, log)["state"] == "idle"


def test_a_health_probe_is_no_traffic(server):
    """It makes a token of its own and takes a second, without an access line until its end."""
    port, log, _ = server
    url = f"http://127.0.0.1:{port}/health"
    probe = threading.Thread(target=lambda: urllib.request.urlopen(url, timeout=60).close())
    probe.start()
    seen = []
    while probe.is_alive():
        seen.append(look(port, log))
        time.sleep(0.05)
    probe.join()
    assert "quiet" in {one["state"] for one in seen}
    assert not any(one["running"] or one["waiting"] for one in seen)
    # On a busy machine the scheduler may take its next picture late.
    assert all(one["age"] >= traffic.STALE_S for one in seen if one["state"] == "busy")


def test_the_other_build_under_the_same_tag_answers_otherwise(site, environment, tmp_path):
    """The hub's second build: its changed files over the released ones, as the image's layers lie."""
    (released,) = [folder for folder in site if folder.name == "sglang"]
    shutil.copytree(released, tmp_path / "sglang", copy_function=os.link)
    engines.write_build(tmp_path / "b", "b")
    for changed in (tmp_path / "b").rglob("*.py"):
        target = tmp_path / "sglang" / changed.relative_to(tmp_path / "b")
        target.unlink()
        shutil.copy2(changed, target)
    path = [str(tmp_path / "sglang") if folder == released else str(folder) for folder in site]
    env = environment(HOME=str(tmp_path)) | {"PYTHONPATH": os.pathsep.join(path)}
    with serving(tmp_path, env) as (port, _, _):
        assert "4" not in answer(port)
