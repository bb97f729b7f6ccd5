"""traffic: which requests are in flight on a head, from its log, its connections and its own counts."""

import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from lockstep_core import traffic
from lockstep_core.errors import LockstepError

DATA = Path(__file__).parent / "data"
HEAD = (DATA / "sglang-tp3-head.log").read_bytes().decode()  # genuine, SGLang 0.5.21
NOON = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC).timestamp()

# What a kernel prints (x86-64): sshd listening, an SSH connection, the API listening, five of its connections in states
# 01 ESTABLISHED, 08 CLOSE_WAIT and 06 TIME_WAIT, and the other end of a local one.
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 635
   1: 0B004D0A:0016 01004D0A:9442 01 00000000:00000000 02:000ACE46 00000000     0        0 6570627
   2: 00000000:22B8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 700
   3: 0B004D0A:22B8 01004D0A:A122 01 00000000:00000000 00:00000000 00000000     0        0 701
   4: 0B004D0A:22B8 05000A0A:C0B8 01 0000001A:00000000 00:00000000 00000000     0        0 702
   5: 0B004D0A:22B8 06000A0A:C0B9 08 00000000:00000000 00:00000000 00000000     0        0 703
   6: 0B004D0A:22B8 07000A0A:C0BA 06 00000000:00000000 03:00000AD0 00000000     0        0 0
   7: 0100007F:22B8 0100007F:D982 01 00000000:00000000 00:00000000 00000000     0        0 705
   8: 0100007F:D982 0100007F:22B8 01 00000000:00000000 00:00000000 00000000     0        0 706
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue
   0: 00000000000000000000000000000000:22B8 00000000000000000000000000000000:0000 0A 00000000:00000000
   1: 0000000000000000FFFF00000B004D0A:22B8 0000000000000000FFFF000001004D0A:A122 01 00000000:00000000
   2: 00000000000000000000000001000000:22B8 00000000000000000000000001000000:D982 01 00000000:00000000
   3: B80D0120000000000000000001000000:22B8 B80D0120000000000000000005000000:01BB 01 00000000:00000000
"""


def line(seconds_ago, client, request="POST /v1/chat/completions", status="200 OK", stamp=""):
    shown = datetime.fromtimestamp(NOON - seconds_ago, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f'{stamp}[{shown}] INFO:     {client} - "{request} HTTP/1.1" {status}\n'


def counted(running, waiting=0, age=0.1):
    return {"running": running, "waiting": waiting, "at": NOON - age}


def look(log, clients, counts):
    return traffic.in_flight(log, clients, counts, now=NOON)


def named(seen):
    return [(request["client"], request["since"], request["state"]) for request in seen["requests"]]


# --- connections ------------------------------------------------------------------------------------------------------


def test_established_connections_to_the_port_only():
    assert traffic.connections(TCP, 8888) == ["10.10.0.5:49336", "10.77.0.1:41250", "127.0.0.1:55682"]
    assert traffic.connections(TCP, 22) == ["10.77.0.1:37954"]
    assert traffic.connections("", 8888) == []


def test_ipv6_and_mapped_addresses():
    assert traffic.connections(TCP + TCP6, 8888)[-2:] == ["[2001:db8::5]:443", "[::1]:55682"]
    assert traffic.connections(TCP6, 8888) == ["10.77.0.1:41250", "[2001:db8::5]:443", "[::1]:55682"]


def test_the_kernels_own_tables():
    """Real connections on this machine: their own ends say what has to be found."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def found() -> list[str]:
            return traffic.connections(Path("/proc/net/tcp").read_text(), port)

        assert found() == []
        with socket.create_connection(("127.0.0.1", port)) as one, socket.create_connection(("127.0.0.1", port)) as two:
            expected = sorted("{}:{}".format(*end.getsockname()) for end in (one, two))
            assert found() == expected
        accepted = [server.accept()[0] for _ in range(2)]
        deadline = time.monotonic() + 60
        while found():
            assert time.monotonic() < deadline, "the clients have hung up"
            time.sleep(0.01)
        for end in accepted:
            end.close()


# --- the log ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["unknown:0", "[::1]:5", "proxy.example, 10.0.0.7:0", "10.0.0.300:9"])
def test_what_a_proxys_header_names_is_no_client(said):
    line = f'[2026-11-29 11:37:17] INFO:     {said} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    mine = '[2026-11-29 11:37:18] INFO:     10.0.0.5:41234 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    assert list(traffic.answers(line + mine)) == ["10.0.0.5:41234"]


def test_a_genuine_logs_answers():
    assert traffic.answers(HEAD) == {
        "127.0.0.1:34976": {"method": "POST", "path": "/freeze_gc", "status": 200, "since": "2026-11-29T11:35:56Z"},
        "127.0.0.1:45436": {
            "method": "POST",
            "path": "/v1/chat/completions",
            "status": 200,
            "since": "2026-11-29T11:37:17Z",
        },
        "127.0.0.1:46822": {
            "method": "POST",
            "path": "/v1/chat/completions",
            "status": 200,
            "since": "2026-11-29T11:37:24Z",
        },
        "127.0.0.1:38262": {"method": "GET", "path": "/ready", "status": 200, "since": "2026-11-29T11:37:50Z"},
        "127.0.0.1:38268": {"method": "GET", "path": "/health", "status": 200, "since": "2026-11-29T11:37:51Z"},
        "127.0.0.1:38274": {"method": "GET", "path": "/metrics", "status": 200, "since": "2026-11-29T11:37:51Z"},
    }


def test_the_last_line_of_a_connection_counts():
    log = line(90, "10.0.0.5:1") + line(40, "10.0.0.5:1", "POST /v1/completions")
    assert traffic.answers(log)["10.0.0.5:1"]["path"] == "/v1/completions"


def test_dockers_own_time_is_utc_whatever_the_containers_zone_is():
    log = line(-7200, "10.0.0.5:1", stamp="2026-11-29T11:59:00.123456789Z ")
    assert traffic.answers(log)["10.0.0.5:1"]["since"] == "2026-11-29T11:59:00Z"


def test_colours_and_addresses_as_uvicorn_prints_them():
    log = line(60, "::ffff:10.0.0.5:1") + line(60, "::1:2").replace("INFO:", "\x1b[32mINFO\x1b[0m:")
    assert set(traffic.answers(log)) == {"10.0.0.5:1", "[::1]:2"}


def test_a_prompt_in_the_log_is_no_answer():
    said = "[2026-11-29 11:00:00] Receive: text='INFO:     10.0.0.5:1 - \"POST /generate HTTP/1.1\" 200 OK'\n"
    assert traffic.answers(said) == {}


# --- the counts -------------------------------------------------------------------------------------------------------

# The answer of a real server of SGLang 0.5.21 to /v1/loads?include=core, idle.
RANK = {
    "timestamp": 1795995074.2788339,
    "dp_rank": 0,
    "num_running_reqs": 0,
    "num_waiting_reqs": 0,
    "num_waiting_uncached_tokens": 0,
    "num_used_tokens": 0,
    "num_total_tokens": 0,
    "max_total_num_tokens": 2048,
    "max_running_requests": 4,
    "token_usage": 0.0,
    "total_prefill_uncached_tokens": 6,
    "decode_moments": [6.0, 6.0, 522785.0, 6.0, 522785.0, 6.0],
}
LOADS = {"timestamp": "2026-11-29T23:31:14.278984+00:00", "version": "0.5.21", "num_accelerators": 1, "loads": [RANK]}


def test_counts_of_a_genuine_answer():
    assert traffic.counts(LOADS) == {"running": 0, "waiting": 0, "at": 1795995074.2788339}


def test_counts_over_ranks_and_the_oldest_picture():
    second = {**RANK, "dp_rank": 1, "num_running_reqs": 3, "num_waiting_reqs": 2, "timestamp": 1795995070.5}
    both = {**LOADS, "loads": [{**RANK, "num_running_reqs": 1}, second]}
    assert traffic.counts(both) == {"running": 4, "waiting": 2, "at": 1795995070.5}


def test_a_prompt_in_chunks_is_a_request():
    chunked = {**LOADS, "loads": [{**RANK, "num_waiting_uncached_tokens": 190000}]}
    assert traffic.counts(chunked)["running"] == 1


@pytest.mark.parametrize("other", [{}, {"loads": [{}]}, {"loads": None}, {"loads": []}, {"loads": "x"}])
def test_another_form_is_named(other):
    with pytest.raises(LockstepError, match="another form"):
        traffic.counts(other)


# --- what is in flight ------------------------------------------------------------------------------------------------


def test_nobody_connected_is_idle_whatever_the_counts_say():
    assert look(line(60, "10.0.0.5:1"), [], counted(3))["state"] == "idle"


def test_streams_and_a_request_without_an_answer():
    log = line(60, "10.0.0.5:1") + line(90, "10.0.0.5:2", "POST /generate")
    seen = look(log, ["10.0.0.5:1", "10.0.0.5:2", "10.0.0.6:3"], counted(2, 1))
    assert seen["state"] == "busy"
    assert named(seen) == [
        ("10.0.0.5:2", "2026-11-29T11:58:30Z", "streaming"),
        ("10.0.0.5:1", "2026-11-29T11:59:00Z", "streaming"),
        ("10.0.0.6:3", None, "waiting for its answer"),
    ]
    assert [request["path"] for request in seen["requests"]] == ["/generate", "/v1/chat/completions", None]


def test_a_kept_connection_does_not_count_beside_a_stream():
    log = line(60, "10.0.0.5:1") + line(2, "10.0.0.5:2") + line(1, "10.0.0.9:3", "GET /metrics")
    assert named(look(log, ["10.0.0.5:1", "10.0.0.5:2", "10.0.0.9:3"], counted(1))) == [
        ("10.0.0.5:1", "2026-11-29T11:59:00Z", "streaming")
    ]


@pytest.mark.parametrize(
    "path",
    [
        "/health", "/health_generate", "/ping", "/ready", "/metrics", "/v1/models", "/v1/loads?include=core",
        "/get_load", "/server_info", "/get_server_info", "/model_info", "/get_model_info",
    ],
)  # fmt: skip
def test_probes_and_monitoring_never_count(path):
    seen = look(line(60, "10.0.0.9:3", f"GET {path}"), ["10.0.0.9:3"], None)
    assert (seen["state"], seen["requests"]) == ("idle", [])


def test_zero_counts_are_believed_when_the_next_picture_says_so_too():
    """A request's first steps look the same: a fresh picture without it."""
    assert look(line(2, "10.0.0.5:1"), ["10.0.0.5:1"], counted(0))["state"] == "quiet"


def test_an_old_picture_is_no_idle_schedulers():
    """Genuine: a prompt of 1,500 tokens took 6 s on a CPU, with counts of zero and a picture that grew old."""
    seen = look(line(60, "10.0.0.9:3", "GET /v1/models"), ["10.0.0.5:1", "10.0.0.9:3"], counted(0, age=4))
    assert seen["state"] == "busy"
    assert named(seen) == [("10.0.0.5:1", None, "waiting for its answer")]


def test_a_stream_that_is_in_no_picture_yet():
    """Genuine: on three CPUs the 15 steps until the next picture take 10 s."""
    seen = look(line(4, "10.0.0.5:1"), ["10.0.0.5:1"], counted(0, age=4))
    assert named(seen) == [("10.0.0.5:1", "2026-11-29T11:59:56Z", "streaming")]


def test_counts_that_lag_hide_no_stream():
    log = line(60, "10.0.0.5:1") + line(50, "10.0.0.5:2")
    assert len(look(log, ["10.0.0.5:1", "10.0.0.5:2"], counted(1))["requests"]) == 2


def test_a_scheduler_that_takes_no_step_hangs():
    assert look(line(300, "10.0.0.5:1"), ["10.0.0.5:1"], counted(1, age=61))["state"] == "hung"
    assert look(line(300, "10.0.0.5:1"), ["10.0.0.5:1"], counted(1, age=30))["state"] == "busy"


def test_without_access_lines_the_counts_alone():
    seen = look("[2026-11-29 11:00:00] Decode batch, #running-req: 2\n", ["10.0.0.5:1", "10.0.0.5:2"], counted(2))
    assert (seen["state"], seen["requests"], traffic.number(seen)) == ("busy", [], 2)
    assert traffic.summary(seen) == "2 requests in flight"
    assert "2 more that the log and the connections do not name" in str(traffic.refusal(seen, host="h", seconds=3))


def test_without_counts_the_log_and_the_connections():
    log = line(60, "10.0.0.5:1") + line(60, "10.0.0.6:2", "POST /v1/completions", "400 Bad Request")
    seen = look(log, ["10.0.0.5:1", "10.0.0.6:2", "10.0.0.7:3"], None)
    assert [request["client"] for request in seen["requests"]] == ["10.0.0.5:1", "10.0.0.7:3"]
    assert (seen["state"], seen["running"], seen["waiting"]) == ("busy", None, None)
    assert look(log, ["10.0.0.6:2"], None)["state"] == "idle"


# --- words ------------------------------------------------------------------------------------------------------------


def test_the_words():
    log = line(60, "10.77.0.1:41234") + line(30, "10.77.0.1:41235")
    seen = look(log, ["10.77.0.1:41234", "10.77.0.1:41235", "10.77.0.1:41236"], counted(2, 1))
    assert traffic.summary(seen) == (
        "3 requests in flight, oldest since 11:59:00 (10.77.0.1:41234 POST /v1/chat/completions)"
    )
    assert str(traffic.refusal(seen, host="spark1", seconds=3.2)).splitlines() == [
        "spark1, rank 0: 3 request(s) still in flight after 3 s; nothing was stopped",
        (
            "  found: 10.77.0.1:41234 POST /v1/chat/completions, streaming since 2026-11-29T11:59:00Z; "
            "10.77.0.1:41235 POST /v1/chat/completions, streaming since 2026-11-29T11:59:30Z; "
            "10.77.0.1:41236, waiting for its answer"
        ),
        "  expected: a moment without a request",
        "  next step: run again later, wait longer with -e drain_timeout=600, or end them with -e drain_then=abort",
    ]


def test_many_requests_are_not_all_listed():
    clients = [f"10.0.0.5:{port}" for port in range(1, 21)]
    said = str(traffic.refusal(look(line(1, "10.0.0.1:1"), clients, counted(4, 16)), host="spark1", seconds=1))
    assert "and 4 more" in said
    assert said.count("waiting for its answer") == 16
