"""boot_wait and generation against real containers that print genuine log lines with pauses, on this machine's engine.

Three containers stand for three ranks: each plays a log at a pace, the head with an HTTP server whose /health is 503
until the played log says ready. What SGLang's lines mean is proven elsewhere; here it is the waiting.
"""

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ports
import pytest
from lockstep_lab import engines, outer

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/unit/data"
READY = "The server is fired up and ready to roll!"
OOM = (
    "[2026-11-29 11:35:40 TP2] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "scheduler.py", line 1\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    "[2026-11-29 11:35:40] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
)
LOST = (
    "[2026-11-29 11:35:41 TP{rank}] Scheduler hit an exception: Traceback (most recent call last):\n"
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.22.1]:1\n"
)
# Plays /log: a line that is "PAUSE seconds" or "UNTIL time" waits, "EXIT code" ends.
# With a port it serves /health and a completion.
PLAYER = r"""
import http.server, json, sys, threading, time
state = {"ready": False}
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def answer(self, status, body):
        self.send_response(status); self.end_headers(); self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.answer(200 if state["ready"] else 503, {})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") not in (None, "Bearer sesame"): return self.answer(401, {"error": "key"})
        if asked["model"] != "tiny": return self.answer(404, {"message": "no model " + asked["model"]})
        prompt = asked["messages"][0]["content"]
        said = {"aborted": ("so far", "abort"), "empty": ("", "stop")}.get(prompt, ("The answer is 4.", "stop"))
        if prompt == "slow": time.sleep(3)
        self.answer(200, {"choices": [{"message": {"content": said[0]}, "finish_reason": said[1]}],
                          "usage": {"prompt_tokens": 9, "completion_tokens": 6}})
if sys.argv[1] != "0":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
for line in open("/log", newline="\n"):
    word, _, value = line.strip().partition(" ")
    if word == "PAUSE": time.sleep(float(value))
    elif word == "UNTIL": time.sleep(max(0, float(value) - time.time()))
    elif word == "EXIT": sys.exit(int(value))
    else:
        sys.stderr.write(line); sys.stderr.flush()
        state["ready"] = state["ready"] or "fired up" in line
time.sleep(600)
"""


@dataclass(frozen=True)
class Followed:
    """What one run of boot_wait over hosts came to."""

    rc: int
    results: dict[str, dict[str, Any]]
    printed: list[str]
    seconds: float


def boot_of(name):
    """A genuine log up to the end of its boot, without the stop that follows in the file."""
    text = (DATA / f"sglang-tp3-{name}.log").read_bytes().decode()
    lines = text.split("\n")
    last = READY if name == "head" else "Dummy health check server"
    end = next(number for number, line in enumerate(lines) if last in line)
    return "\n".join(lines[: end + 1]) + "\n"


def paced(text, seconds=0.4):
    """Pauses before the lines at which the stage changes."""
    for mark in ("Init parallel begin", "Load weight begin", "KV Cache is allocated", "Started server", READY):
        text = "\n".join(f"PAUSE {seconds}\n{line}" if mark in line else line for line in text.split("\n"))
    return text


def put_log(container, log):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("log")
        entry.size = len(log.encode())
        tar.addfile(entry, io.BytesIO(log.encode()))
    container.put_archive("/", archive.getvalue())


@pytest.fixture(scope="module")
def engine():
    client = outer.engine()
    yield client
    client.close()


@pytest.fixture(scope="module")
def image(engine):
    """Any image with python3: a base image of the lab, made where it is missing."""
    return engines.load(engine, "sim")["a"]


@pytest.fixture
def port():
    return ports.free()[0]


@pytest.fixture
def ranks(engine, image):
    """A callable that starts a rank: a container playing a log."""
    started = []

    def start(host, log, port=0):
        container = engine.containers.create(
            image, ["-c", PLAYER, str(port)], entrypoint=["python3"], name=f"boot-test-{host}", network_mode="host",
            labels={"lockstep.test": "boot_wait"},
        )  # fmt: skip
        started.append(container)
        put_log(container, log)
        container.start()
        return container

    yield start
    for container in started:
        container.remove(force=True)


def run_task(task, inventory, where, *arguments):
    """Run one task on the inventory's hosts: exit status, {host: result}, the lines printed meanwhile."""
    playbook = where / "play.yml"
    play = {
        "hosts": "all",
        "gather_facts": False,
        "connection": "local",
        "tasks": [task],
        "vars": {"ansible_python_interpreter": sys.executable},
    }
    playbook.write_text(json.dumps([play]))
    run = subprocess.run(
        ["ansible-playbook", "-i", str(inventory), str(playbook), *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_NOCOLOR": "1"},
    )
    assert "DEPRECATION" not in run.stdout + run.stderr
    printed, brace, rest = run.stdout.partition("{\n")
    assert brace, run.stdout + run.stderr
    said, _ = json.JSONDecoder().raw_decode(brace + rest)  # another callback may speak after the results
    (result,) = said["plays"][0]["tasks"]
    return run.returncode, result["hosts"], printed.splitlines()


@pytest.fixture
def follow(tmp_path, port):
    """A callable that follows the hosts named (spark1 is the head) in one real ansible-playbook run."""

    def run(hosts, *arguments, **options):
        roles = {host: "head" if host == "spark1" else "worker" for host in hosts}
        known = {host: {"fleet_rank": int(host[-1]) - 1, "fleet_role": role} for host, role in roles.items()}
        inventory = tmp_path / "inventory.json"
        inventory.write_text(json.dumps({"all": {"hosts": known}}))
        task = {
            "name": "Follow the boot",
            "lockstep.fleet.boot_wait": {
                "container": "boot-test-{{ inventory_hostname }}",
                "role": "{{ fleet_role }}",
                "rank": "{{ fleet_rank }}",
                "port": port,
                "timeout": 60,
                "wait": 2,
                "signal_dir": str(tmp_path / "launch"),
                **options,
            },
        }
        began = time.monotonic()
        rc, results, printed = run_task(task, inventory, tmp_path, *arguments)
        return Followed(rc, results, printed, time.monotonic() - began)

    return run


ALL = ("spark1", "spark2", "spark3")


def test_a_boot_that_gets_ready(ranks, follow, port):
    ranks("spark2", paced(boot_of("worker")))
    ranks("spark3", paced(boot_of("worker").replace("TP1", "TP2")))
    ranks("spark1", paced(boot_of("head"), 8), port)
    got = follow(ALL)
    assert got.rc == 0, got.results
    assert {host: result["state"] for host, result in got.results.items()} == dict.fromkeys(ALL, "ready")
    assert got.results["spark2"]["facts"]["pool_tokens"] == 4096
    assert len(got.results["spark1"]["log_tail"]) == 40
    assert READY in got.results["spark1"]["log_tail"][-1]
    assert not any(result["changed"] for result in got.results.values())
    lines = [line.split() for line in got.printed]
    head = [" ".join(words[1:-2]) for words in lines if words[0] == "spark1:"]
    assert head[0] != "ready", "the stages before are shown as they come"
    assert head[-1] == "ready"
    assert all(words[-1] == "s" and words[-2].isdigit() for words in lines)


def test_ready_in_the_log_is_not_enough(ranks, follow):
    ranks("spark1", boot_of("head"))  # nothing listens: no /health
    got = follow(["spark1"], timeout=5)
    assert got.rc == 2
    said = got.results["spark1"]["msg"]
    assert re.match(r"spark1, rank 0: not ready after \d+ s\n", said)
    assert "stage 'ready'" in said


def test_the_first_fatal_line_ends_all_waits(ranks, follow, port):
    """spark3 dies for memory, the others only see its connection close: it is named, whoever spoke first."""
    until_weights = boot_of("worker").split("[2026-11-29 11:35:41")[0]
    head = boot_of("head").split("[2026-11-29 11:35:41")[0]
    # The head speaks a second before; where starting a container takes long, the cause is there first.
    speaks = time.time() + 8
    ranks("spark3", until_weights.replace("TP1", "TP2") + f"UNTIL {speaks + 1}\n" + OOM + "EXIT 1\n")
    ranks("spark2", until_weights + "PAUSE 600\n")
    ranks("spark1", head + f"UNTIL {speaks}\n" + LOST.format(rank=0), port)
    got = follow(ALL, timeout=100, wait=10)
    assert got.rc == 2
    said = {host: result["msg"] for host, result in got.results.items()}
    assert said["spark3"] == (
        "spark3, rank 2: the boot failed during 'load weights': oom\n"
        "  found: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
        f"(line {until_weights.count(chr(10)) + 1} of the log)\n"
        "  expected: a boot without a fatal line\n"
        "  next step: Look at what the arm keeps on the device beside the pool, which is sized before the graphs are "
        "captured."
    )
    assert got.results["spark3"]["cause"]["fault"] == "oom"
    assert said["spark2"] == "spark2: stopped: spark3 was fatal first"
    assert said["spark1"].startswith("spark1: stopped: spark3 was fatal first\nspark1, rank 0: ")
    assert got.seconds < 100, "not until the time limit"
    assert all("facts" in result and result["log_tail"] for result in got.results.values())


def test_a_worker_that_dies_after_it_was_ready(ranks, follow, port):
    ranks("spark1", boot_of("head").split("Started server process")[0] + "PAUSE 600\n", port)
    ranks("spark2", boot_of("worker") + "PAUSE 25\n" + OOM.replace("TP2", "TP1") + "EXIT 1\n")
    got = follow(ALL[:2], timeout=100)
    assert got.results["spark2"]["state"] in {"fatal", "exited"}
    assert got.results["spark2"]["cause"]["fault"] == "oom"
    assert got.results["spark1"]["msg"] == "spark1: stopped: spark2 was fatal first"
    assert any(line.startswith("spark2: ready") for line in got.printed)


def test_a_container_that_ends_without_a_word(ranks, follow):
    ranks("spark2", "Loading\nEXIT 7\n")
    got = follow(["spark2"])
    assert "exit code 7 and no line that names a cause; the last line: Loading" in got.results["spark2"]["msg"]
    assert got.results["spark2"]["exit_code"] == 7


def test_no_container_at_all(follow):
    got = follow(["spark2"])
    assert got.rc == 2
    assert "there is no container boot-test-spark2" in got.results["spark2"]["msg"]


def test_only_the_log_of_this_life_counts(ranks, follow, port):
    container = ranks("spark1", OOM + "EXIT 1\n", port)
    container.wait()
    put_log(container, boot_of("head"))
    container.start()
    assert b"OutOfMemoryError" in container.logs(), "the engine still has the first life's lines"
    result = follow(["spark1"]).results["spark1"]
    assert (result.get("state"), result["facts"]["faults"]) == ("ready", [])


def test_an_engine_that_does_not_answer(follow):
    got = follow(["spark2"], docker_host="unix:///nowhere/docker.sock")
    assert got.rc == 2
    assert "the Docker Engine on this rank does not answer" in got.results["spark2"]["msg"]


def test_check_mode_skips(follow):
    got = follow(["spark1"], "--check")
    assert got.rc == 0
    assert got.results["spark1"]["skipped"]


class TestGeneration:
    @pytest.fixture
    def ask(self, ranks, tmp_path, port):
        ranks("spark1", READY + "\n", port)
        inventory = tmp_path / "inventory.json"
        inventory.write_text(json.dumps({"all": {"hosts": {"spark1": {}}}}))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break

        def run(*arguments, **options):
            task = {"name": "Ask", "lockstep.fleet.generation": {"port": port, "model": "tiny", **options}}
            _, results, _ = run_task(task, inventory, tmp_path, *arguments)
            return results["spark1"]

        return run

    def test_answer(self, ask, tmp_path):
        key = tmp_path / "key"
        key.write_text("sesame\n")
        answer = ask("--check", prompt="What is 2+2?", max_tokens=16, api_key_file=str(key))
        assert (answer["text"], answer["prompt_tokens"], answer["completion_tokens"]) == ("The answer is 4.", 9, 6)
        assert (answer["finish_reason"], answer["changed"]) == ("stop", False)
        assert 0 < answer["seconds"] < 10
        assert "sesame" not in json.dumps(answer)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"prompt": "aborted"}, ["finish_reason abort is not a completion"]),
            ({"prompt": "empty"}, ["the answer holds no text"]),
            ({"model": "big"}, ["HTTP 404", "no model big", "--served-model-name"]),
            ({"prompt": "slow", "timeout": 1}, ["within 1 s"]),
            ({"port": 1}, ["Connection refused", "is the head serving?"]),
            ({"api_key_file": "/no/such/key"}, ["/no/such/key"]),
        ],
    )
    def test_failures(self, ask, options, words):
        answer = ask(**options)
        assert answer["failed"]
        assert [word for word in words if word not in answer["msg"]] == []

    def test_wrong_key(self, ask, tmp_path):
        key = tmp_path / "key"
        key.write_text("open")
        answer = ask(api_key_file=str(key))
        assert "HTTP 401" in answer["msg"]
        assert "api_key_file" in answer["msg"]
