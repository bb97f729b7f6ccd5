"""enginelog: SGLang's lines of 2024 to 0.5.23, real boots of it, faults and what only looks like one."""

import json
import math
from pathlib import Path

import pytest
from handed import cases, hold
from lockstep_core import enginelog
from lockstep_core.errors import LockstepError

HERE = Path(__file__).parent
CASES = cases("A")


def log(name):
    return (HERE / "data" / name).read_bytes().decode()  # as the engine wrote it: a progress bar has bare "\r"


def only(text):
    (event,) = enginelog.parse(text)
    return event


def same(event, name, *fields):
    return {field: event[field] for field in CASES[name]["expected"] if field in fields or field in event}


def names(text):
    return [(fault["fault"], fault["severity"]) for fault in enginelog.faults(text)]


class TestHanded:
    def test_a01_decode_of_the_target(self):
        event = only(CASES["A01"]["input"])
        hold(CASES["A01"], same(event, "A01"), prose={"step_formula"})
        assert "token" in event, "a field that the build does not print is None"
        assert event["token"] is None

    def test_a02_decode_without_speculation(self):
        hold(CASES["A02"], same(only(CASES["A02"]["input"]), "A02"), prose={"step_formula_when_no_spec"})

    def test_a03_decode_of_2024_has_no_date(self):
        event = only(CASES["A03"]["input"])
        hold(CASES["A03"], same(event, "A03"), prose={"phase_join"})
        assert event["ts"] is None
        with pytest.raises(LockstepError, match="no date"):
            enginelog.window([event], "2024-08-30 00:00:00", "2024-08-31 00:00:00")

    def test_a04_prefill_of_2025(self):
        hold(CASES["A04"], same(only(CASES["A04"]["input"]), "A04"))

    def test_a05_trailing_comma(self):
        hold(CASES["A05"], same(only(CASES["A05"]["input"]), "A05"))

    def test_a06_chunks_of_one_prompt(self):
        events = enginelog.parse(CASES["A06"]["input"])
        (request,) = enginelog.prefills(events)
        got = {
            "prefill_lines": len(events),
            "chunks_of_one_request": request["chunks"],
            "sum_new_token": request["sum_new_token"],
            "pending_sequence": request["pending"],
            "true_uncached_tokens_of_last_chunk": request["last_chunk_tokens"],
        }
        hold(CASES["A06"], got, prose={"do_not"})
        assert request["tokens"] == 1024 + 2128

    def test_a07_pool_last_word_and_pin(self):
        expected = CASES["A07"]["expected"]
        pool = enginelog.pool(CASES["A07"]["input"], pin=expected["kv_pin"])
        got = {
            "kv_calculated_tokens": pool["calculated"],
            "kv_effective_tokens": pool["effective"],
            "kv_pin": pool["pin"],
            "at_pin": pool["at_pin"],
            "page_size": pool["page_size"],
        }
        hold(CASES["A07"], got, prose={"rule", "available_bytes_unit"})
        # GiB: only then do the bytes give the tokens that the engine calculated.
        assert (pool["available_gib"] - 0.30) * 2**30 / 1670.75 == pytest.approx(5491200, rel=0.002)
        assert enginelog.facts(CASES["A07"]["input"])["pool_tokens"] == 2999808
        assert pool["agrees_with_total"] is True

    def test_a08_a_rank_without_evidence(self):
        verdict = enginelog.packed_verdict({None: enginelog.facts(CASES["A08"]["input"])}, 3, [1, 14])
        hold(CASES["A08"], {field: verdict[field] for field in CASES["A08"]["expected"]})
        assert not verdict["ok"]

    def test_a09_disagreeing_tactics(self):
        tactics = enginelog.tactics(CASES["A09"]["input"])
        got = {
            "disagree": tactics["disagree"],
            "disagree_ranks_that_print": tactics["disagree_ranks"],
            "status_all_ranks": tactics["state"],
            "cache_key": tactics["keys"][0],
            "flashinfer": tactics["flashinfer"],
            "arch": tactics["arch"],
            "rank_files": tactics["rank_files"],
        }
        hold(CASES["A09"], got, prose={"note"})
        without = "\n".join(line for line in CASES["A09"]["input"].splitlines() if "disagree" not in line)
        assert enginelog.tactics(without)["state"] != "reused", "'with cache' is printed on a full retune too"

    def test_a10_one_reused_and_one_tuned(self):
        known = enginelog.facts(CASES["A10"]["input"])
        verdict = enginelog.tactics_verdict({0: known}, ranks=[0])
        expected = CASES["A10"]["expected"]
        got = {
            "per_key": known["tactics"]["per_key"],
            "boot_status": f"{known['tactics']['detail']} -> not 'reused'",
            "comparable_with_previous_boot": verdict["comparable"],
        }
        assert got == {field: expected[field] for field in got}
        assert set(expected) - set(got) == {"rank"}
        assert [event["rank"] for event in enginelog.parse(CASES["A10"]["input"]) if event["kind"] == "tactics"] == [
            0,
            0,
        ]
        assert verdict["state"] == "tuned"
        assert known["adapters"] == {"DSV41_AUTOTUNE_KEEP": "armed"}

    def test_a11_nan(self):
        (fault,) = enginelog.faults(CASES["A11"]["input"])
        hold(CASES["A11"], {field: fault[field] for field in CASES["A11"]["expected"]})

    def test_a12_consequences(self):
        found = enginelog.faults(CASES["A12"]["input"])
        got = {
            "faults": [fault["fault"] for fault in found],
            "severity": found[0]["severity"],
            "root_cause_is_in_these_lines": enginelog.root_cause(found) is not None,
        }
        hold(CASES["A12"], got, prose={"dedupe"})
        assert found[1]["count"] == 3
        assert found[0]["ranks"] == [4]

    def test_a13_kv_budget(self):
        (fault,) = enginelog.faults(CASES["A13"]["input"])
        got = {field: fault[field] for field in CASES["A13"]["expected"] if field != "advice"}
        hold(CASES["A13"], got, prose={"advice"})
        assert fault["exception"] == "ValueError"
        assert fault["advice"].startswith("Do not raise the memory fraction")
        assert fault["ts"] == "2026-08-28 01:41:18"

    def test_a14_benign_lines(self):
        known = enginelog.facts(CASES["A14"]["input"])
        got = {"faults": known["faults"], "verdict": "dirty" if known["faults"] or known["warnings"] else "clean"}
        hold(CASES["A14"], got, prose={"health_503_before_ready", "negative_mem_usage"})
        (capture,) = (event for event in enginelog.parse(CASES["A14"]["input"]) if event["kind"] == "capture_end")
        assert capture["mem_usage_gib"] == -0.01
        ready = "The server is fired up and ready to roll!\n" + CASES["A14"]["input"]
        assert [entry["warning"] for entry in enginelog.facts(ready)["warnings"]] == ["health_503"]

    def test_a15_changing_batch(self):
        steps = enginelog.decode_steps(CASES["A15"]["input"])
        got = {
            "parsed": steps["parsed"],
            "usable_for_step_at_fixed_bs": len(steps["usable"]),
            "cuda_graph_false_lines": steps["cuda_graph_false"],
        }
        hold(CASES["A15"], got, prose={"reason", "lines_expected_per_request"})
        assert enginelog.expected_decode_lines(512, accept_len=4.0) == 3
        assert enginelog.expected_decode_lines(512, interval=30) == 17
        assert steps["accept_len"] is None, "unknown, never 0"

    def test_a54_retraction_is_no_oom(self):
        text = CASES["A54"]["input"]
        event = only(text)
        got = {
            "fault": event.get("fault"),
            "event": event["kind"],
            "retracted_reqs": event["retracted_reqs"],
            "new_token_ratio": event["new_token_ratio"],
        }
        hold(CASES["A54"], got, prose={"measurement"})
        assert enginelog.faults(text) == []
        window = enginelog.window(text, "2025-05-28 08:00:00", "2025-05-28 09:00:00")
        assert not window["valid"]
        assert enginelog.window(text, "2025-05-28 09:00:00", "2025-05-28 10:00:00")["valid"]

    def test_a60_soft_and_hard_watchdog(self):
        hard, soft = map(only, CASES["A60"]["input"].splitlines())
        expected = CASES["A60"]["expected"]
        assert {field: hard[field] for field in expected["line1"]} == expected["line1"]
        assert soft.get("fault") == expected["line2"]["fault"]
        assert soft["warning"] == expected["line2"]["warning"]
        assert set(expected["line2"]) == {"fault", "warning", "severity"}
        assert enginelog.faults([soft]) == []

    def test_a63_spellings_of_the_calculation(self):
        first, second = map(only, CASES["A63"]["input"].splitlines())
        expected = CASES["A63"]["expected"]
        assert {field: first[field] for field in expected["line1"]} == expected["line1"]
        assert {field: second[field] for field in expected["line2"]} == expected["line2"]

    def test_every_case_is_here(self):
        tested = {name[5:8].upper() for name in dir(TestHanded) if name.startswith("test_a")}
        assert tested == set(CASES)


class TestRealBoots:
    """Logs that SGLang wrote on CPU: two of three ranks with TP=3, and one process that survived an exception."""

    def test_head(self):
        known = enginelog.facts(log("sglang-tp3-head.log"))
        assert known["ready"]
        assert not known["worker_ready"]
        assert known["pool_tokens"] == 4096
        assert known["stage"] == "ready"
        assert known["tactics"]["state"] == "none"
        assert known["faults"] == []

    def test_worker_says_nothing_of_ready_but_starts_its_dummy_health(self):
        known = enginelog.facts(log("sglang-tp3-worker.log"))
        assert not known["ready"]
        assert known["worker_ready"]
        assert known["pool_tokens"] == 4096, "a worker prints no max_total_num_tokens"
        assert known["faults"] == []

    def test_orderly_stop_is_no_fault(self):
        for name in ("sglang-tp3-head.log", "sglang-tp3-worker.log", "sglang-handled-traceback.log"):
            text = log(name)
            assert enginelog.facts(text)["shutdown"], name
            assert enginelog.faults(text) == [], name
            # Without the SIGTERM the same lines are a death.
            died = "\n".join(line for line in text.splitlines() if "SIGTERM received" not in line)
            assert names(died) == [("child_died", "fatal")], name

    def test_handled_traceback_is_a_warning(self):
        (warning,) = enginelog.facts(log("sglang-handled-traceback.log"))["warnings"]
        assert warning["warning"] == "handled_exception"
        assert warning["line"].startswith("requests.exceptions.ConnectionError: ")

    def test_handled_traceback_is_not_fatal_while_nothing_followed_yet(self):
        text = log("sglang-handled-traceback.log")
        so_far = text[: text.index("[2026-11-29 11:29:54] The server is fired up")]
        assert [severity for _, severity in names(so_far)] == ["error"]

    def test_stages_in_order(self):
        text = log("sglang-tp3-head.log").split("\n")
        seen = []
        for end in range(len(text)):
            now = enginelog.stage("\n".join(text[: end + 1]))
            if not seen or seen[-1] != now:
                seen.append(now)
        assert seen == [
            *("starting", "init parallel", "load weights"),
            *("load weights 1/1", "kv pool", "warm-up", "ready"),
        ]

    def test_decode_on_cpu(self):
        lines = [event for event in enginelog.parse(log("sglang-tp3-head.log")) if event["kind"] == "decode"]
        assert [(line["tp"], line["token"], line["cuda_graph"], line["cpu_graph"]) for line in lines] == [
            (0, 51, None, False),
            (0, 71, None, False),
        ]

    def test_docker_time_stamps_and_colours_do_not_matter(self):
        plain = log("sglang-tp3-head.log")
        dressed = "\n".join(f"2026-11-29T11:35:26.123456789Z \x1b[0m{line}" for line in plain.split("\n"))
        assert enginelog.facts(dressed)["pool_tokens"] == 4096
        assert enginelog.facts(dressed)["ready"]


class TestPacked:
    LINE = (
        "[2026-09-11 23:34:14 TP{r} EP{r}] Exact nvme Engram layer={layer} rank={r} rows=[{lo},{hi}) cache=0.0GiB "
        "(0 slots, 4-way, 0.0% of owned rows) scales=0.0GiB io_threads=96 packed={packed}"
    )
    PERIODIC = (
        "Engram layer={layer} lookups=6040 hit_rate=0.0% reads=6040 cache=0.0GiB(4-way) threads=96 packed={packed}"
    )

    def rank(self, r, packed="True", layers=(1, 14), lo=None, hi=None):
        rows = {"lo": 100 * r if lo is None else lo, "hi": 100 * r + 100 if hi is None else hi}
        return "\n".join(self.LINE.format(r=r, layer=layer, packed=packed, **rows) for layer in layers)

    def verdict(self, logs, tp=3):
        return enginelog.packed_verdict({r: enginelog.facts(text, rank=r) for r, text in logs.items()}, tp, [1, 14])

    def test_all_six(self):
        verdict = self.verdict({r: self.rank(r) for r in range(3)})
        assert verdict["ok"]
        assert verdict["verdict"] == "pass"
        assert len(verdict["found_true_pairs"]) == 6

    def test_false_is_named_and_a_fault(self):
        logs = {0: self.rank(0), 1: self.rank(1, packed="False"), 2: self.rank(2)}
        verdict = self.verdict(logs)
        assert verdict["verdict"] == "fail: rank 1 reads layer 1, 14 unpacked"
        assert verdict["false_pairs"] == [[1, 1], [1, 14]]
        assert verdict["missing_pairs"] == []
        found = enginelog.facts(logs[1], rank=1)["faults"]
        assert [(fault["fault"], fault["severity"], fault["rank"], fault["layer"]) for fault in found] == [
            ("engram_unpacked", "error", 1, 1),
            ("engram_unpacked", "error", 1, 14),
        ]

    def test_last_word_wins_and_the_periodic_line_names_no_rank(self):
        text = self.rank(1) + "\n" + self.PERIODIC.format(layer=14, packed="False")
        known = enginelog.facts(text, rank=1)
        assert known["packed"] == [
            {"rank": 1, "layer": 1, "rows": [100, 200], "packed": True},
            {"rank": 1, "layer": 14, "rows": [100, 200], "packed": False},
        ]
        assert [fault["fault"] for fault in known["faults"]] == ["engram_unpacked"]
        healed = enginelog.facts(text + "\n" + self.PERIODIC.format(layer=14, packed="True"), rank=1)
        assert healed["faults"] == []

    def test_one_layer_missing(self):
        logs = {0: self.rank(0), 1: self.rank(1), 2: self.rank(2, layers=(14,))}
        assert self.verdict(logs)["verdict"] == "fail: rank 2 has no evidence for layer 1"

    def test_overlapping_rows(self):
        verdict = self.verdict({0: self.rank(0), 1: self.rank(1, lo=50, hi=150), 2: self.rank(2)})
        assert not verdict["row_ranges_disjoint"]
        assert verdict["verdict"] == "fail: ranks own the same rows"

    def test_the_wrong_ranks_log(self):
        verdict = self.verdict({0: self.rank(0), 1: self.rank(0), 2: self.rank(2)})
        assert "the log of rank 1 speaks of rank 0" in verdict["verdict"]
        assert "rank 1 has no evidence" in verdict["verdict"]


class TestTactics:
    KEYS = ("05cc0d96dc7e28b8", "3ea8a0a6a68937f8")

    def boot(self, rank, states=("reused", "reused")):
        return enginelog.facts(
            "\n".join(
                f"[autotune_keep] {state} {key}/rank_tp{rank}_pp0_dp0.json"
                for state, key in zip(states, self.KEYS, strict=False)
            )
        )

    def test_reused_on_all_ranks(self):
        verdict = enginelog.tactics_verdict({rank: self.boot(rank) for rank in range(3)}, ranks=range(3))
        assert verdict == {"state": "reused", "why": [], "comparable": True}

    def test_one_tuned_key_on_one_rank(self):
        boots = {0: self.boot(0), 1: self.boot(1, ("reused", "tuned and saved")), 2: self.boot(2)}
        verdict = enginelog.tactics_verdict(boots, ranks=range(3))
        assert verdict["state"] == "tuned"
        assert verdict["why"] == ["rank 1: mixed"]

    def test_a_silent_rank_and_a_single_key(self):
        assert enginelog.tactics_verdict({0: self.boot(0)}, ranks=[0, 1])["why"] == ["rank 1 has no evidence"]
        one = {rank: self.boot(rank, ("reused",)) for rank in range(2)}
        assert enginelog.tactics_verdict(one, ranks=[0, 1])["state"] == "tuned"
        assert enginelog.tactics_verdict(one, ranks=[0, 1], keys=1)["state"] == "reused"
        uneven = {0: self.boot(0), 1: self.boot(1, ("reused",))}
        assert enginelog.tactics_verdict(uneven, ranks=[0, 1])["why"] == ["rank 1 says nothing of 3ea8a0a6a68937f8"]

    def test_no_autotune_at_all(self):
        empty = {rank: enginelog.facts("") for rank in range(2)}
        assert enginelog.tactics_verdict(empty, ranks=[0, 1])["state"] == "none"

    def test_files_and_rank_from_the_name(self):
        tactics = self.boot(2)["tactics"]
        assert (tactics["state"], tactics["files"], tactics["rank_files"]) == ("reused", 2, ["rank_tp2_pp0_dp0.json"])

    def test_reuse_of_one_key_does_not_prove_the_other(self):
        path = "/root/.cache/sglang/flashinfer/autotune/0.6.18/sm121/3ea8a0a6a68937f8/rank_tp0_pp0_dp0.json"
        text = f"Running FlashInfer autotune with cache: {path}\n[autotune_keep] reused {self.KEYS[0]}/rank_tp0.json"
        assert enginelog.tactics(text)["detail"] == "unproven"

    def test_lines_with_the_engines_prefix(self):
        text = f"[2026-09-11 23:46:18 TP1 EP1] [autotune_keep] tuned and saved {self.KEYS[0]}/rank_tp1_pp0_dp0.json"
        assert enginelog.tactics(text)["per_key"] == {self.KEYS[0]: "tuned"}
        assert only("[autotune_keep] moved aside 05cc/rank_tp0_pp0_dp0.json: no sidecar")["kind"] == "tactics_aside"


def test_adapters_last_word_with_and_without_prefix():
    text = (
        "[lockstep] adapter DSV41_AUTOTUNE_KEEP: armed\n"
        "[2026-09-11 23:34:14 TP0] [lockstep] adapter DSV41_WO_A_W8: not applicable: no CUDA device: a CPU engine\n"
        "[lockstep] adapter DSV41_VERIFY_CAP: missing: the overlay does not carry it\n"
        "a prompt that says [lockstep] adapter DSV41_BLOCK_VERIFY: armed\n"
    )
    assert enginelog.facts(text)["adapters"] == {
        "DSV41_AUTOTUNE_KEEP": "armed",
        "DSV41_VERIFY_CAP": "missing: the overlay does not carry it",
        "DSV41_WO_A_W8": "not applicable: no CUDA device: a CPU engine",
    }


@pytest.mark.parametrize(
    ("pin", "pool", "at_pin"),
    [(750000, 749824, True), (750000, 226816, False), (None, 491520, None)],
)
def test_pool_at_the_pin(pin, pool, at_pin):
    # 750,000 is no multiple of 256; a pool shrinks below the pin instead of failing.
    assert enginelog.pool(f"DSV4 pool sizes: full={pool}, swa=13312, c4=749952", pin=pin)["at_pin"] is at_pin


FATAL = {
    "nan, wording of 2024": ("[10:01:02 TP1] Detected errors during sampling! NaN in the probability.", "nan"),
    "nan, torch": (
        (
            "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
            '  File "sampler.py", line 1\n'
            "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"
        ),
        "nan",
    ),
    "oom, old and new class": (
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 540.00 MiB."
        ),
        "oom",
    ),
    "oom under a graph capture": (
        (
            "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB.\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n"
            '  File "cuda_graph_runner.py", line 269, in __init__\n'
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB.\n"
            "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)"
        ),
        "oom",
    ),
    "kv budget, older": (
        (
            "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
            "Current value: mem_fraction_static=0.95"
        ),
        "kv_budget",
    ),
    "kv budget, message wrapped by the terminal": (
        (
            "[2026-08-28 01:41:18] Scheduler hit an exception: Traceback (most recent call last):\n"
            "ValueError: Loaded weights leave no GPU memory for the KV\n"
            "cache under --mem-fraction-static=0.95. Raise --mem-fraction-static above 0.951 (minimum\n"
            "viable = 1 - available/pre = 0.9503)."
        ),
        "kv_budget",
    ),
    "prefill out of memory": (
        "[2026-01-01 00:00:00 TP0] Prefill out of memory. Try to lower your batch size.",
        "kv_exhausted",
    ),
    "the kernel's killer": ("[12345.678] Out of memory: Killed process 4242 (python3) total-vm:1kB", "host_oom"),
    "the kernel's killer, from the journal": (
        "Sep 24 01:32:11 spark3 kernel: Out of memory: Killed process 4242 (sglang::schedul) total-vm:1kB",
        "host_oom",
    ),
    "a device that fell off the bus": ("[Thu Sep 24 01:32:11 2026] NVRM: Xid (PCI:000f:01:00): 79, pid=1", "xid"),
    "killed child": (
        "[2026-01-01 00:00:00] Subprocess scheduler_0 (pid=12446) crashed with exit code -9. Triggering SIGQUIT",
        "child_died",
    ),
    "port": (
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8888): address already in use",
        "port_taken",
    ),
    "bad argument": ("launch_server.py: error: unrecognized arguments: --enable-decoder-swa", "bad_arguments"),
    "segfault": ("Fatal Python error: Segmentation fault", "crash"),
    "collective": (
        (
            "[rank1]:[E909 08:45:30.126 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=9141) ran for 600020 milliseconds before timing out."
        ),
        "collective_timeout",
    ),
    "rendezvous": (
        (
            "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
            "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/3 clients joined."
        ),
        "peers_missing",
    ),
    "nccl": (
        (
            "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error"
        ),
        "nccl",
    ),
    "cuda": (
        (
            "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
        ),
        "cuda_error",
    ),
    "anything else": (
        (
            "[TP5 EP5] Scheduler hit an exception: Traceback (most recent call last):\n"
            '  File "swa_radix_cache.py", line 807\nAssertionError: dec_lock_ref on node'
        ),
        "exception",
    ),
    "spawned process": (
        "Process Process-1:\nTraceback (most recent call last):\n  File \"x.py\"\nKeyError: 'layers.0.weight'",
        "exception",
    ),
    "level after the stamp": (
        "[2025-05-25 19:45:03] [ERROR] Scheduler hit an exception: Traceback (most recent call last):\nValueError: x",
        "exception",
    ),
}


@pytest.mark.parametrize("name", FATAL)
def test_fatal(name):
    text, fault = FATAL[name]
    assert names(text) == [(fault, "fatal")]


@pytest.mark.parametrize(
    "text",
    [
        "[2026-01-01 00:00:00] Receive: obj=GenerateReqInput(text='CUDA out of memory. NaN in the logits.')",
        "[2026-01-01 00:00:00] server_args={'watchdog_timeout': 1800, 'soft_watchdog_timeout': None, 'x': 'killed'}",
        (
            "[2026-01-01 00:00:00] KV cache pool is full. Retract requests. #retracted_reqs: 1, "
            "#new_tokens_gained: 646, #new_token_ratio: 0.0980 -> 0.3487"
        ),
        "[2026-01-01 00:00:00 TP0] Setup Custom allreduce failed with . To silence this warning, specify x explicitly.",
        (
            "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)\nProcess 123: python3\n"
            "Thread 0x7F (active): MainThread\n    raise_error (torch/x.py:1)\n    watchdog_timeout (y.py:2)"
        ),
        "spark1:83:83 [0] NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
        "spark1:83:83 [0] NCCL INFO Connected all trees",
        "[rank1]:[W1129 11:35:28.1 TCPStore.cpp:125] recvValue failed on SocketImpl: Connection reset by peer",
        (
            "ERROR:    Exception in ASGI application\nTraceback (most recent call last):\n  x\nValueError: bad\n"
            "[2026-01-01 00:00:00 TP0] Decode batch, #running-req: 1, gen throughput (token/s): 1.00, #queue-req: 0"
        ),
        "UserWarning: NaN in the logits is possible",
    ],
)
def test_looks_like_a_fault(text):
    assert names(text) == []


def test_first_cause_not_the_loudest():
    # The order in which an old build printed it: the SIGQUIT before its cause.
    text = (
        "[2025-01-20 19:10:07] Received sigquit from a child proces. It usually means the child failed.\n"
        "[2025-01-20 19:10:07 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        "KeyError: 'layers.0.self_attn.qkv_proj.weight'\n"
        + "[2025-01-20 19:10:08] kill_process_tree called: parent_pid=1, include_parent=True, pid=1\n"
        * 12
        + "[2025-01-20 19:10:09 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        "torch.OutOfMemoryError: CUDA out of memory.\n"
    )
    found = enginelog.faults(text)
    cause = enginelog.root_cause(found)
    assert cause["text"] == "KeyError: 'layers.0.self_attn.qkv_proj.weight'"
    assert cause["rank"] == 0
    assert [fault["count"] for fault in found if fault["fault"] == "child_died"] == [13]


def test_first_cause_over_the_ranks():
    gloo = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.22.2]:1"
    hit = "Scheduler hit an exception: Traceback (most recent call last):\n"
    head = enginelog.faults(f"[2026-01-01 00:00:05 TP0] {hit}{gloo}", rank=0)
    worker = enginelog.faults(f"[2026-01-01 00:00:04 TP1] {hit}torch.OutOfMemoryError: CUDA out of memory.", rank=1)
    late = enginelog.faults(f"[2026-01-01 00:00:09 TP2] {hit}torch.OutOfMemoryError: CUDA out of memory.", rank=2)
    cause = enginelog.root_cause([*late, *head, *worker])
    assert (cause["fault"], cause["rank"]) == ("oom", 1)
    assert enginelog.root_cause(head) is None, "a closed connection tells of another rank's death"


def test_bare_traceback_with_nothing_after_it_is_suspicious():
    text = 'some warning line\nTraceback (most recent call last):\n  File "x.py", line 1\nImportError: libcuda.so.1'
    assert names(text) == [("exception", "error")]
    later = text + "\n[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=19.46 GB"
    assert names(later) == []
    assert enginelog.facts(later)["warnings"][0]["warning"] == "handled_exception"


def test_keyboard_interrupt_is_a_stop():
    known = enginelog.facts("Traceback (most recent call last):\n  x\nKeyboardInterrupt")
    assert known["faults"] == []
    assert known["shutdown"]


def test_progress_bar_glued_to_the_next_message():
    text = (
        "[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=19.46 GB\n"
        "Loading safetensors:   0% Completed | 0/48 [00:00<?, ?it/s]\rLoading safetensors:  52% Completed | 25/48 "
        "[00:01<00:01,  1.23s/it]"
    )
    assert enginelog.stage(text) == "load weights 25/48"
    glued = text + "[2026-01-01 00:01:00 TP0] Load weight end. elapsed=541.76 s, type=DeepseekV4ForCausalLM, "
    (end,) = (
        event
        for event in enginelog.parse(glued + "avail mem=17.47 GB, mem usage=94.00 GB.")
        if event["kind"] == "weights_end"
    )
    assert (end["elapsed_s"], end["type"], end["avail_mem_gib"], end["mem_usage_gib"]) == (
        541.76,
        "DeepseekV4ForCausalLM",
        17.47,
        94.0,
    )


def test_draft_model_and_autotune_and_graphs_are_stages():
    boot = [
        ("[2026-09-11 23:34:02 TP0] Init torch distributed begin.", "init parallel"),
        ("[2026-09-11 23:34:14 TP0] Load weight begin. avail mem=111.00 GB", "load weights"),
        ("[2026-09-11 23:43:14 TP0] Load weight end. elapsed=541.76 s, type=X", "kv pool"),
        ("[2026-09-11 23:43:15 TP0] Load weight begin. avail mem=17.00 GB", "load weights"),
        (
            "[2026-09-11 23:46:11 TP0 EP0] DSV4 memory calculation: bytes_per_full_token=1670.75, full_token=1",
            "kv pool",
        ),
        ("[2026-09-11 23:46:18 TP0] Running FlashInfer autotune with cache: /x", "autotune"),
        (
            "[2026-09-11 23:46:40 TP0] Capture cuda graph begin. This can take minutes. avail mem=3.66 GB",
            "graph capture",
        ),
        ("[2026-09-11 23:46:52] INFO:     Started server process [83]", "warm-up"),
        ("[2026-09-11 23:46:57] The server is fired up and ready to roll!", "ready"),
        ("[2026-09-11 23:47:57 TP0] Capture cuda graph begin.", "ready"),
    ]
    text = ""
    for line, now in boot:
        text += line + "\n"
        assert enginelog.stage(text) == now, line


def test_fields_of_newer_decode_lines():
    event = only(
        "[2026-11-01 10:00:00.123 DP0 TP2 EP1] Decode batch [4711], #running-req: 4, #full token: 10, "
        "full token usage: 0.10, accept len: 3.90, accept rate: 0.58, cap len: 4.20, block accept len: 4.10, "
        "cuda graph: True, gen throughput (token/s): 87.25, #queue-req: 0, est. decode TFLOPS/s (per GPU): 1.20"
    )
    assert (event["iteration"], event["tp"], event["ep"]) == (4711, 2, 1)
    assert (event["cap_len"], event["block_accept_len"], event["est_decode_tflops_s"]) == (4.2, 4.1, 1.2)
    assert event["step_ms"] == pytest.approx(3.9 * 4 / 87.25 * 1000, abs=0.01)


def test_idle_decode_line_has_no_step():
    line = (
        "[2026-01-01 00:00:00] Decode batch, #running-req: 1, #token: 0, gen throughput (token/s): 0.00, #queue-req: 0"
    )
    assert only(line)["step_ms"] is None
    assert only(line.replace("0.00", "nan"))["gen_throughput"] is None


def test_usable_decode_lines():
    line = "[2026-01-01 00:00:0{n}] Decode batch, #running-req: {bs}, accept len: {a}, gen throughput (token/s): 10.00"
    text = "\n".join(line.format(n=n, bs=bs, a=a) for n, (bs, a) in enumerate([(4, 3.0), (4, 4.0), (2, 5.0), (2, 4.0)]))
    steps = enginelog.decode_steps(text)
    assert [event["ts"][-1] for event in steps["usable"]] == ["1", "3"]
    assert math.isclose(steps["accept_len"], 4.0)


def test_empty_log():
    known = enginelog.facts("")
    assert (known["stage"], known["pool_tokens"], known["packed"], known["faults"]) == ("starting", None, [], [])
    assert enginelog.parse("\n\n") == []


def test_facts_are_plain_json():
    assert json.loads(json.dumps(enginelog.facts(log("sglang-tp3-head.log"))))["pool_tokens"] == 4096


@pytest.mark.parametrize(
    ("said", "value"),
    [("140.", 140.0), ("1e+03", 1000.0), ("inf", None), ("-inf", None), ("nan", None), ("-", None), ("", None)],
)
def test_a_line_read_while_it_is_written_or_with_no_number_stops_nothing(said, value):
    event = only(f"[2026-09-12 01:00:00 TP0] Decode batch, #running-req: 2, gen throughput (token/s): {said}")
    assert event["gen_throughput"] == value
    assert event["step_ms"] == (None if value is None else pytest.approx(2 / value * 1000, abs=0.01))


@pytest.mark.parametrize("name", ["A01", "A06", "A07", "A10", "A15", "A63"])
def test_a_handed_log_cut_anywhere_can_be_read(name):
    text = CASES[name]["input"]
    for end in range(0, len(text), 2):
        known = enginelog.facts(text[:end])
        assert known["pool_tokens"] is None or isinstance(known["pool_tokens"], int)
        enginelog.prefills(text[:end])
        enginelog.decode_steps(text[:end])


def test_a_pool_that_is_no_number_is_unknown():
    assert (
        enginelog.facts("DSV4 pool sizes: full=x\nmax_total_num_tokens=-\nKV Cache is allocated. #tokens: ?")[
            "pool_tokens"
        ]
        is None
    )


def test_a_chunk_without_its_tokens_makes_no_sum():
    chunk = "[2026-09-12 01:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: {}, #pending-token: {}"
    (request,) = enginelog.prefills(chunk.format("x", 100) + "\n" + chunk.format(100, 0))
    assert (request["tokens"], request["last_chunk_tokens"]) == (None, 100)
