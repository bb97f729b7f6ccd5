"""The simulator: three real processes on this machine, with the overlay's hooks, as on three hosts."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ports
import pytest
from lockstep_core import enginelog, tactics, traffic
from lockstep_lab import checkpoint as lab
from streams import streams

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = f"{ROOT / 'adapters'}:{ROOT / 'tests/lab/engines/sim'}"
SIZE = 3
LAUNCH = "0f" * 32
ARGUMENTS = [
    "--model-path", "/models/DeepSeek-V4.1-Flash", "--served-model-name", "deepseek-v4.1-flash", "--trust-remote-code",
    "--load-format", "safetensors", "--tp", "3", "--attention-backend", "dsv4", "--moe-runner-backend",
    "flashinfer_mxfp4", "--mem-fraction-static", "0.95", "--chunked-prefill-size", "1024", "--context-length", "262144",
    "--max-running-requests", "4", "--cuda-graph-max-bs-decode", "4", "--random-seed", "0",
    "--enable-decoder-swa-bounded-replay", "--tool-call-parser", "deepseekv41", "--reasoning-parser", "deepseek-v41",
    "--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "5", "--max-total-tokens", "750000",
    "--fp8-gemm-backend", "flashinfer_cutlass", "--watchdog-timeout", "1800", "--sleep-on-idle", "--nnodes", "3",
]  # fmt: skip


def command(rank: int, port: int, dist: int, ep: int = 3) -> list[str]:
    """One rank's command line."""
    place = ["--node-rank", str(rank), "--dist-init-addr", f"127.0.0.1:{dist}", "--host", "127.0.0.1"]
    return [sys.executable, "-m", "lockstep_sim", *ARGUMENTS, "--ep-size", str(ep), *place, "--port", str(port)]


def load(fleet: Fleet) -> dict[str, Any]:
    """What /v1/loads says of the one rank that has it."""
    (found,) = json.loads(fleet.get("/v1/loads")[1])["loads"]
    return dict(found)


@pytest.fixture(scope="module")
def engram(tmp_path_factory) -> Path:
    """A small checkpoint and each rank's shards of it."""
    path = tmp_path_factory.mktemp("engram")
    lab.make(path / "checkpoint", 998)
    for rank in range(SIZE):
        lab.make_shards(path / "checkpoint", path / f"shards{rank}", SIZE, rank, "rows")
    return path


class Fleet:
    """Three ranks with their own state and cache directories; booted as often as a test wants."""

    def __init__(self, place: Path, engram: Path) -> None:
        self.place, self.engram = place, engram
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.boots = 0

    def order(self, rank: int, faults: dict[str, Any]) -> None:
        """Write a rank's fault file; the rank may be reading it."""
        aside = self.place / f"faults{rank}.json.new"
        aside.write_text(json.dumps(faults))
        aside.replace(self.place / f"faults{rank}.json")

    def boot(self, *, ranks: tuple[int, ...] = (1, 2, 0), ep: int = 3, **env: str) -> None:
        """Start ranks, workers first."""
        self.boots += 1
        self.port, dist, *self.worker_ports = ports.free(2 + SIZE)
        for rank in ranks:
            with self.log_path(rank).open("wb") as log:
                self.processes[rank] = subprocess.Popen(
                    command(rank, self.worker_ports[rank] if rank else self.port, dist, ep),
                    env={
                        "PATH": os.environ["PATH"],
                        "PYTHONPATH": PYTHONPATH,
                        "LOCKSTEP_SIM_FAULTS": str(self.place / f"faults{rank}.json"),
                        "SGLANG_CACHE_DIR": str(self.place / f"cache{rank}/sglang"),
                        "LOCKSTEP_ENGRAM_CHECKPOINT": str(self.engram / "checkpoint"),
                        "LOCKSTEP_ENGRAM_SPLIT": "rows",
                        "LOCKSTEP_TACTICS_FINGERPRINT": LAUNCH,
                        "DSV41_PACKED_DIR": str(self.engram / f"shards{rank}"),
                        "DSV41_AUTOTUNE_KEEP": "1",
                        **env,
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def log_path(self, rank: int) -> Path:
        return self.place / f"rank{rank}-{self.boots}.log"

    def log(self, rank: int) -> str:
        return self.log_path(rank).read_text()

    def facts(self, rank: int) -> dict[str, Any]:
        return dict(enginelog.facts(self.log(rank)))

    def wait(self, condition: Any, what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.log(0)[-2000:]}"
            time.sleep(0.05)

    def until_ready(self) -> None:
        self.wait(lambda: self.get("/health")[0] == 200, "ready")

    def get(self, path: str, body: dict[str, Any] | None = None, port: int | None = None) -> tuple[int, str]:
        """One request to the head: (status, body); status 0 when nothing answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port or self.port}{path}", data)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310 - http only
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def stop(self) -> list[int]:
        """SIGTERM to the head ends all; exit codes by rank."""
        self.processes[0].send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self, seconds: float = 60) -> list[int]:
        """Exit codes by rank, once all have ended."""
        return [self.processes[rank].wait(seconds) for rank in sorted(self.processes)]

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def fleet(tmp_path, engram) -> Iterator[Fleet]:
    made = Fleet(tmp_path, engram)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def serving(tmp_path_factory, engram) -> Iterator[Fleet]:
    """A fleet that serves, for tests that only ask."""
    made = Fleet(tmp_path_factory.mktemp("serving"), engram)
    made.boot()
    made.until_ready()
    yield made
    made.kill()


def test_the_first_line_says_simulator(serving):
    for rank in range(SIZE):
        assert "simulator, not SGLang" in serving.log(rank).splitlines()[0]


def test_the_lines_come_in_the_targets_order(serving):
    order = [
        "server_args=",
        "[lockstep] adapter DSV41_AUTOTUNE_KEEP: armed",
        "[lockstep] adapter DSV41_PACKED_DIR: armed",
        (
            "Exact nvme Engram layer=1 rank=0 rows=[0,8624) cache=0.0GiB (0 slots, 4-way, 0.0% of owned rows) "
            "scales=0.0GiB io_threads=96 packed=True"
        ),
        "Exact nvme Engram layer=14 rank=0",
        "Init parallel begin.",
        "Init parallel ends.",
        "Load weight begin.",
        "Load weight end.",
        (
            "DSV4 memory calculation: bytes_per_full_token=1670.75, available_bytes=8.84 GB, c128_state_fixed=0.00 GB, "
            "swa_fixed=0.30 GB, full_token="
        ),
        "DSV4 pool sizes: full=749824,",
        "Running FlashInfer autotune with cache: ",
        "FlashInfer autotune completed.",
        "[autotune_keep] tuned and saved ",
        (
            "max_total_num_tokens=749824, chunked_prefill_size=1024, max_prefill_tokens=16384, max_running_requests=4, "
            "context_len=262144,"
        ),
        "INFO:     Started server process",
        "The server is fired up and ready to roll!",
    ]
    log = serving.log(0)
    places = [log.find(text) for text in order]
    assert -1 not in places
    assert places == sorted(places)
    assert re.search(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d TP0 EP0\] Init parallel begin\.$", log, re.MULTILINE)
    assert "max_total_num_tokens" not in serving.log(1)  # the engine says it on rank 0 alone


def test_a_clean_boot_reads_as_one(serving):
    for rank in range(SIZE):
        facts = serving.facts(rank)
        assert [(entry["rank"], entry["layer"], entry["packed"]) for entry in facts["packed"]] == [
            (rank, 1, True),
            (rank, 14, True),
        ]
        assert facts["tactics"]["state"] == "tuned"
        assert facts["faults"] == []
    # 750000 is not a multiple of the 256-token page (handed case A07).
    assert serving.facts(0)["pool_tokens"] == 749824
    assert serving.facts(0)["ready"]


def test_an_answer_and_its_usage(serving):
    body = {"model": "deepseek-v4.1-flash", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    status, text = serving.get("/v1/chat/completions", body)
    answer = json.loads(text)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "The simulator says: 2 + 2 is 4."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(["The", "simulator", "says:", "2", "+", "2", "is", "4."])


def test_a_stream_has_fewer_events_than_tokens(serving):
    """Speculation sends several tokens in one event: who counts events counts wrong."""
    body = {
        "messages": [{"role": "user", "content": "go on"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "max_tokens": 30,
    }
    status, text = serving.get("/v1/chat/completions", body)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    deltas = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("content")]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 30
    assert 0 < len(deltas) < 30
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_the_other_endpoints(serving):
    assert json.loads(serving.get("/v1/models")[1])["data"][0]["id"] == "deepseek-v4.1-flash"
    assert serving.get("/health_generate")[0] == 200
    assert serving.get("/metrics")[0] == 404
    info = json.loads(serving.get("/server_info")[1])
    assert info["simulator"] is True
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 4
    assert json.loads(serving.get("/v1/loads")[1])["loads"][0]["num_running_reqs"] == 0
    assert serving.get("/v1/chat/completions", {"messages": []})[0] == 400
    assert serving.get("/nowhere")[0] == 404
    assert [serving.get("/health", port=serving.worker_ports[rank])[0] for rank in (1, 2)] == [200, 200]


def test_decode_lines_carry_what_a_step_is_worked_out_from(serving):
    body = {"messages": [{"role": "user", "content": "go"}], "ignore_eos": True, "max_tokens": 150}
    assert serving.get("/v1/chat/completions", body)[0] == 200
    decodes = [event for event in enginelog.parse(serving.log(0)) if event["kind"] == "decode"]
    assert decodes
    assert decodes[-1]["running_req"] == 1
    assert 2.5 < decodes[-1]["accept_len"] < 3.5  # 3, 2, 4 tokens a step in turn
    assert decodes[-1]["step_ms"] > 0


def test_abort_ends_a_generation_early(serving):
    got: list[tuple[int, str]] = []
    body = {"messages": [{"role": "user", "content": "go"}], "ignore_eos": True, "max_tokens": 3000, "rid": "long"}
    asking = threading.Thread(target=lambda: got.append(serving.get("/v1/chat/completions", body)))
    asking.start()
    serving.wait(lambda: json.loads(serving.get("/v1/loads")[1])["loads"][0]["num_running_reqs"] == 1, "running")
    assert serving.get("/abort_request", {"rid": "long"})[0] == 200
    asking.join(60)
    answer = json.loads(got[0][1])
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] < 3000


def test_many_streams_are_whole_though_only_four_run_at_once(serving):
    """Each has every byte of an undisturbed run, and its access line at its first token."""
    lines: dict[str, Any] = {}

    def five_wait() -> bool:
        """Before and after the log was read: what it has is of the four that run."""
        nonlocal lines
        before = load(serving)["num_waiting_reqs"]
        lines = traffic.answers(serving.log(0))
        return bool(before == load(serving)["num_waiting_reqs"] == 5)

    with streams("127.0.0.1", serving.port, 1, 300) as alone:
        (undisturbed,) = alone.until_ended()
    with streams("127.0.0.1", serving.port, 9, 300) as held:
        serving.wait(five_wait, "five wait")
        assert sum(stream.client in lines for stream in held) <= 4, "a request that waits has no access line"
        held.until_ended()
    assert all(stream.whole and stream.same_bytes() == undisturbed.same_bytes() for stream in held)
    assert {stream.client for stream in held} <= set(traffic.answers(serving.log(0)))


def test_abort_all_ends_streams_and_those_that_wait(serving):
    with streams("127.0.0.1", serving.port, 6, 100000) as held:
        held.until_answered(4)
        serving.wait(lambda: load(serving)["num_waiting_reqs"] == 2, "two wait")
        assert serving.get("/abort_request", {"abort_all": True})[0] == 200
        held.until_ended(60)
    assert [(stream.whole, stream.finish_reason) for stream in held] == [(True, "abort")] * 6
    assert load(serving)["num_running_reqs"] == 0


def test_a_load_is_a_picture_of_some_steps_ago(tmp_path):
    """As in the engine: a request's first steps are in no count, and what shows is that the picture grows old."""
    program = (
        "from types import SimpleNamespace\n"
        "from lockstep_sim.generation import Generator\n"
        "args = SimpleNamespace(speculative_algorithm=None, max_running_requests=4, decode_log_interval=40)\n"
        "made = Generator(args, 4096)\n"
        "steps = made.run(made.request('x', 'go', 100, ignore_eos=True))\n"
        "print([made.load()['num_running_reqs'] for _ in zip(range(20), steps)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": PYTHONPATH, "LOCKSTEP_SIM_FAULTS": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stderr, done.stdout) == ("", f"{[0] * 14 + [1] * 6}\n")


def test_a_load_is_fresh_while_nothing_runs_and_counts_what_does(serving):
    asked = time.time()
    assert load(serving)["timestamp"] >= asked
    with streams("127.0.0.1", serving.port, 1, 100000) as held:
        held.until_answered()
        serving.wait(lambda: load(serving)["num_running_reqs"] == 1, "counted")
    serving.wait(lambda: load(serving)["num_running_reqs"] == 0, "the client hung up")


def test_a_connection_with_its_answer_is_kept_for_five_seconds(serving):
    kept = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=20)
    for _ in range(2):
        begun = time.monotonic()
        kept.request("GET", "/v1/models")
        assert kept.getresponse().read()
    assert kept.sock.recv(1) == b""
    assert 5 <= time.monotonic() - begun < 20
    kept.close()


def test_a_scheduler_that_hangs_while_the_api_answers(fleet):
    fleet.boot()
    fleet.until_ready()
    with streams("127.0.0.1", fleet.port, 2, 100000) as held:
        held.until_answered()
        fleet.order(0, {"hang": "serve"})
        fleet.wait(lambda: time.time() - load(fleet)["timestamp"] > 1.5, "the picture grows old")
        said = [len(stream.raw) for stream in held]
        assert fleet.get("/abort_request", {"abort_all": True})[0] == 200
        time.sleep(0.5)
        assert [len(stream.raw) for stream in held] == said
        assert fleet.get("/v1/models")[0] == 200
        fleet.order(0, {})
        held.until_ended(60)
    assert [stream.finish_reason for stream in held] == ["abort"] * 2


def test_tactics_are_reused_by_the_same_launch_and_move_aside_for_another(fleet):
    states, contents = [], []
    for launch in (LAUNCH, LAUNCH, "1e" * 32):
        fleet.boot(LOCKSTEP_TACTICS_FINGERPRINT=launch)
        fleet.until_ready()
        assert fleet.stop() == [0, 0, 0]
        states.append({fleet.facts(rank)["tactics"]["state"] for rank in range(SIZE)})
        contents.append(
            {item["file"]: (fleet.place / "cache0" / tactics.CACHE_SUBDIR / item["file"]).read_bytes()
             for item in tactics.scan(str(fleet.place / "cache0"))}
        )  # fmt: skip
    assert states == [{"tuned"}, {"reused"}, {"tuned"}]
    assert len(contents[0]) == 2  # target and draft
    assert contents[0] == contents[1]
    assert all(contents[2][name] != contents[0][name] for name in contents[0])
    aside = fleet.place / "cache0" / f"{tactics.CACHE_SUBDIR}-aside"
    assert {path.read_bytes() for path in aside.rglob("*.json")} == set(contents[0].values())


def test_one_rank_without_matching_tactics_makes_all_ranks_tune(fleet):
    fleet.boot()
    fleet.until_ready()
    fleet.stop()
    for sidecar in (fleet.place / "cache1").rglob("*.launch"):
        sidecar.unlink()
    fleet.boot()
    fleet.until_ready()
    fleet.stop()
    assert [fleet.facts(rank)["tactics"]["state"] for rank in range(SIZE)] == ["tuned"] * 3
    assert "per-rank caches disagree" in fleet.log(0)
    assert "per-rank caches disagree" not in fleet.log(1)  # said on rank 0 alone, as in the engine (case A09)
    assert "no sidecar says which launch tuned it" in fleet.log(1)
    assert "another rank has no matching file" in fleet.log(2)


def test_without_the_keep_adapter_expert_parallel_tactics_never_survive(fleet):
    for _ in range(2):
        fleet.boot(DSV41_AUTOTUNE_KEEP="0")
        fleet.until_ready()
        fleet.stop()
    assert "per-rank caches disagree" in fleet.log(0)
    assert "[autotune_keep]" not in fleet.log(0)


def test_diverged_tactics_on_command(fleet):
    fleet.order(2, {"tactics_diverge": True})
    for _ in range(2):
        fleet.boot()
        fleet.until_ready()
        fleet.stop()
    assert {fleet.facts(rank)["tactics"]["state"] for rank in range(SIZE)} == {"tuned"}
    assert "per-rank caches disagree" in fleet.log(0)


def test_health_is_503_until_ready_and_a_hang_ends_on_sigterm(fleet):
    fleet.order(1, {"hang": "load"})
    fleet.boot()
    fleet.wait(lambda: fleet.get("/health")[0], "listening")
    fleet.wait(lambda: "pool sizes: full=749824" in fleet.log(0), "rank 0 waits for rank 1")
    assert fleet.get("/health")[0] == 503
    assert fleet.get("/v1/models")[0] == 200  # earlier than ready, as in the engine
    assert fleet.get("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})[0] == 503
    fleet.processes[1].send_signal(signal.SIGTERM)
    assert fleet.processes[1].wait(60) == 0


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ({"oom": True}, "oom", "torch.OutOfMemoryError: CUDA out of memory"),
        ({"kv": True}, "kv_budget", "minimum viable = 1 - available/pre = 0.9503"),
    ],
)
def test_a_rank_that_fails_takes_all_down_and_its_log_says_why(fleet, fault, kind, text):
    fleet.order(1, fault)
    fleet.boot()
    assert fleet.ended() == [1, 1, 1]
    assert text in fleet.log(1)
    assert fleet.facts(1)["faults"][0]["fault"] == kind
    assert "Connection closed by peer" in fleet.log(0)


def test_out_of_memory_at_the_first_request(fleet):
    fleet.boot()
    fleet.until_ready()
    fleet.order(0, {"oom": "request"})
    assert fleet.get("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})[0] == 0
    assert fleet.ended() == [1, 1, 1]
    assert fleet.facts(0)["faults"][0]["fault"] == "oom"


def test_not_a_number(fleet):
    fleet.boot()
    fleet.until_ready()
    fleet.order(0, {"nan": True})
    fleet.get("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4})
    assert fleet.facts(0)["faults"][0]["fault"] == "nan"


def test_a_worker_that_dies_while_serving_takes_all_down(fleet):
    fleet.order(1, {"die": {"rank": 1, "after_s": 2, "from": "ready"}})
    fleet.boot()
    assert fleet.ended() == [1, 137, 1]
    assert "ready to roll" in fleet.log(0)
    assert "Connection closed by peer" in fleet.log(0)


def test_a_slow_drain(fleet):
    fleet.boot()
    fleet.until_ready()
    fleet.order(0, {"slow_drain_s": 4})
    begun = time.monotonic()
    fleet.processes[0].send_signal(signal.SIGTERM)
    fleet.wait(lambda: fleet.get("/health")[0] == 503, "draining")
    assert fleet.ended() == [0, 0, 0]
    assert time.monotonic() - begun > 4


def test_a_worker_waits_for_the_head_to_stop_it(fleet):
    fleet.boot()
    fleet.until_ready()
    fleet.wait(lambda: "Dummy health check server started" in fleet.log(1), "the worker serves too")
    fleet.processes[1].send_signal(signal.SIGTERM)
    fleet.wait(lambda: "waiting for the rank-0 ShutdownReq" in fleet.log(1), "the worker's line")
    assert fleet.processes[1].poll() is None
    assert fleet.stop() == [0, 0, 0]


def test_a_rank_without_packed_shards_serves_and_says_false(fleet):
    fleet.order(1, {"packed_false": [1]})
    fleet.boot()
    fleet.until_ready()
    assert [entry["packed"] for entry in fleet.facts(1)["packed"]] == [False, False]
    assert [entry["packed"] for entry in fleet.facts(2)["packed"]] == [True, True]
    assert "no such file" in fleet.log(1)


def test_a_port_that_is_taken_ends_the_start():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = subprocess.run(
            command(0, taken.getsockname()[1], ports.free()[0]),
            env={"PATH": os.environ["PATH"], "PYTHONPATH": PYTHONPATH},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "error while attempting to bind on address" in done.stderr


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--no-such-thing", "1"], "unrecognized arguments: --no-such-thing"),
        (["--ep-size", "2"], "--ep-size 2 does not divide --tp-size 3"),
        (["--nnodes", "2"], "one rank per node"),
    ],
)
def test_arguments_that_the_engine_would_not_take(extra, said):
    done = subprocess.run(
        [sys.executable, "-m", "lockstep_sim", *ARGUMENTS, *extra],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr


def test_a_fault_that_nobody_knows_is_refused(fleet):
    fleet.order(0, {"omo": True})
    fleet.boot(ranks=(0,))
    assert fleet.ended() == [1]
    assert "unknown faults ['omo']" in fleet.log(0)
