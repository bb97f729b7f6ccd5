"""Filter ``packed_report`` and test ``fully_packed``: the real log of two ranks of three, and their own examples."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.lockstep.fleet.plugins.filter import packed_report as filter_plugin
from ansible_collections.lockstep.fleet.plugins.module_utils import enginelog
from ansible_collections.lockstep.fleet.plugins.test import fully_packed as test_plugin

CASES = Path(__file__).parent / "cases" / "A.jsonl"
ROWS = {0: [0, 100], 1: [100, 200], 2: [200, 301]}


def rank(number: int, layers: tuple[int, ...] = (1, 14), **other: Any) -> dict[str, Any]:
    """What engram_pack returns for a rank whose shards are good, or as ``other`` says."""
    good = {
        "state": "ok", "why": None, "bytes": 30496, "rows": ROWS[number], "split": "rows", "sha256": "ab" * 32, **other,
    }  # fmt: skip
    return {"rank": number, "shards": [{"layer": layer, "file": "f", **good} for layer in layers]}


def test_a08_the_log_of_a_rank_is_missing() -> None:
    case = next(case for case in map(json.loads, CASES.read_text().splitlines()) if case["id"] == "A08")
    by_host: dict[str, dict[str, Any]] = {}
    for tag, host in (("TP0", "spark1"), ("TP2", "spark3")):
        lines = [line for line in case["input"].splitlines() if tag in line]
        by_host[host] = {"look": {"engine": enginelog.facts("\n".join(lines))}}
    by_host["spark2"] = {"look": None}
    report = filter_plugin.packed_report(by_host, 3)
    assert {key: report[key] for key in case["expected"]} == case["expected"]
    assert report["ok"] is False
    assert test_plugin.fully_packed(by_host, 3) is False
    assert report["table"] == [
        "host    rank  layer  packed  rows",
        "spark1  0     1      yes     [0,128002056)          by its log",
        "spark1  0     14     yes     [0,128005560)          by its log",
        "?       1     1      NO      -                      nothing said",
        "?       1     14     NO      -                      nothing said",
        "spark3  2     1      yes     [256004112,384006168)  by its log",
        "spark3  2     14     yes     [256011121,384016682)  by its log",
        "fail: rank 1 has no evidence",
    ]


def test_what_the_ranks_hold_is_judged_the_same_way() -> None:
    held = {f"spark{number + 1}": rank(number) for number in range(3)}
    report = filter_plugin.packed_report(held, "3", ["1", "14"])
    assert (report["ok"], report["verdict"], report["required_pairs"]) == (True, "pass", 6)
    assert report["table"][1] == f"spark1  0     1      yes     [0,100)    30,496 bytes, split rows, sha256 {'ab' * 6}"
    assert test_plugin.fully_packed(held, 3) is True


@pytest.mark.parametrize(
    ("broken", "verdict"),
    [
        (rank(1, state="wrong", why="split heads, not rows"), "fail: rank 1 reads layer 1, 14 unpacked"),
        (rank(1, layers=(1,)), "fail: rank 1 has no evidence for layer 14"),
        (rank(1, rows=[0, 100]), "fail: ranks own the same rows"),
        ({"failed": True, "msg": "not enough room", "rank": 1, "shards": []}, "fail: rank 1 has no evidence"),
        ({"unreachable": True}, "fail: rank 1 has no evidence"),
    ],
)
def test_one_rank_is_enough_to_fail(broken: dict[str, Any], verdict: str) -> None:
    held = {"spark1": rank(0), "spark2": broken, "spark3": rank(2)}
    assert filter_plugin.packed_report(held, 3)["verdict"] == verdict
    assert test_plugin.fully_packed(held, 3) is False


def test_a_rank_that_failed_is_named_with_its_reason() -> None:
    failed = {"failed": True, "msg": "rank 1: not enough room in /srv\n  found: 1", "rank": 1, "shards": []}
    report = filter_plugin.packed_report({"spark1": rank(0), "spark2": failed, "spark3": rank(2)}, 3)
    assert report["table"][3] == "spark2  1     1      NO      -          rank 1: not enough room in /srv"
    assert report["missing_pairs"] == [[1, 1], [1, 14]]


def test_a_fault_is_named_with_rank_and_next_step() -> None:
    torn = rank(1, layers=(1,))
    torn["shards"][0] |= {"state": "wrong", "fault": "wrong-rank", "why": "rank 2, not 1"}
    report = filter_plugin.packed_report({"spark1": rank(0, (1,)), "spark2": torn, "spark3": rank(2, (1,))}, 3, [1])
    assert report["table"][2] == "spark2  1     1      NO      -          wrong-rank: rank 2, not 1"
    (fault,) = report["faults"]
    assert fault.startswith("rank 1 (spark2), layer 1: wrong-rank: rank 2, not 1\n  next step: look at the file; ")


def test_ranks_that_no_host_has_are_said_and_not_demanded() -> None:
    held = {"spark1": rank(0), "spark2": rank(1), "spark3": rank(2)}
    report = filter_plugin.packed_report(held, 5, [1, 14], [0, 1, 2])
    assert (report["ok"], report["missing_pairs"], report["faults"]) == (True, [], [])
    assert report["table"][-2:] == ["no host here has rank 3, 4 of 5", "pass"]
    held["spark3"] = {"unreachable": True}
    assert filter_plugin.packed_report(held, 5, [1, 14], [0, 1, 2])["verdict"] == "fail: rank 2 has no evidence"


def test_other_input_is_an_error_that_says_what_is_taken() -> None:
    with pytest.raises(AnsibleFilterError, match="entries by host, not list"):
        filter_plugin.packed_report([], 3)
    with pytest.raises(AnsibleFilterError, match="finds no shards in what spark1 gave"):
        filter_plugin.packed_report({"spark1": {"changed": False}}, 3)


@pytest.mark.ansible
@pytest.mark.parametrize("plugin", [filter_plugin, test_plugin])
def test_the_examples_run(plugin: Any, play: Any) -> None:
    played = play(yaml.safe_load(plugin.EXAMPLES))
    assert played.rc == 0, played.text
