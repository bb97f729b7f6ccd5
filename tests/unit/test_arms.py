"""Lineage and merge, on small arms; the campaign's are held by test_group_vars."""

import re
from typing import Any

import pytest
import yaml
from lockstep_core import arms
from lockstep_core.errors import LockstepError, PlanRefused

SCHEMA: dict[str, dict[str, Any]] = {
    key: {"type": "string", "default": default, "where": "env", "doc": "d"}
    for key, default in (("A", "base"), ("B", "base"), ("C", "base"), ("D", None))
}
ARMS: dict[str, dict[str, Any]] = {
    "root": {"parent": None, "changes": {"A": "root"}},
    "middle": {"parent": "root", "changes": {"A": "middle", "B": "middle"}},
    "leaf": {"parent": "middle", "changes": {"D": "leaf"}, "unset": ["B"]},
    "old": {"parent": "root", "changes": {}, "launchable": False, "reason": "it was broken", "instead": "middle"},
}


def test_lineage_is_oldest_first() -> None:
    assert arms.lineage(ARMS, "leaf") == ["root", "middle", "leaf"]
    assert arms.lineage(ARMS, "root") == ["root"]


def test_an_unknown_arm_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanRefused, match="unknown arm 'midle', did you mean middle") as refusal:
        arms.get(ARMS, "midle")
    assert refusal.value.rule == "unknown-arm"


def test_a_loop_and_a_missing_parent_are_found() -> None:
    with pytest.raises(LockstepError, match="its own ancestor"):
        arms.lineage({"a": {"parent": "b"}, "b": {"parent": "a"}}, "a")
    with pytest.raises(PlanRefused, match="unknown arm 'gone'"):
        arms.check(SCHEMA, {"a": {"parent": "gone", "changes": {}}})


def test_a_later_arm_wins_and_each_value_has_its_origin() -> None:
    env, origin = arms.effective(SCHEMA, ARMS, "leaf")
    assert env == {"A": "middle", "C": "base", "D": "leaf"}
    assert origin == {"A": "arm:middle", "C": "base", "D": "arm:leaf"}


def test_every_step_of_the_order_wins_over_the_one_before() -> None:
    fleet: arms.Layer = ("fleet", {"A": "fleet", "C": "fleet"}, [])
    once: arms.Layer = ("set", {"A": "once"}, ["C"])
    assert arms.effective(SCHEMA, ARMS, "root", [])[0]["C"] == "base"
    assert arms.effective(SCHEMA, ARMS, "root", [fleet])[0] == {"A": "root", "B": "base", "C": "fleet"}
    assert arms.effective(SCHEMA, ARMS, "root", [fleet], [once])[0] == {"A": "once", "B": "base"}


def test_unset_differs_from_empty() -> None:
    empty, _ = arms.merge([("a", {"X": "1"}, []), ("b", {"X": ""}, [])])
    gone, origin = arms.merge([("a", {"X": "1"}, []), ("b", {}, ["X"])])
    assert (empty, gone, origin) == ({"X": ""}, {}, {})


def test_history_says_why_and_what_instead() -> None:
    arms.require_launchable(ARMS, "leaf")
    with pytest.raises(PlanRefused, match="it was broken") as refusal:
        arms.require_launchable(ARMS, "old")
    assert (refusal.value.rule, refusal.value.next_step) == ("not-launchable", "launch middle")


def test_an_arm_with_a_key_or_value_that_the_schema_refuses_is_found() -> None:
    with pytest.raises(PlanRefused, match="unknown key 'E'"):
        arms.check(SCHEMA, {"a": {"parent": None, "changes": {"E": "1"}}})
    with pytest.raises(PlanRefused, match="arm a"):
        arms.check(SCHEMA, {"a": {"parent": None, "changes": {"A": None}}})
    with pytest.raises(LockstepError, match="does not say why"):
        arms.check(SCHEMA, {"a": {"parent": None, "changes": {}, "launchable": False}})


# --- arms of an operator's own ----------------------------------------------------------------------------------------


def with_extra(found: object) -> dict[str, Any]:
    return dict(arms.with_extra(SCHEMA, ARMS, found, "mine.yml"))


def test_own_arms_stand_beside_the_shipped_ones_and_on_each_other() -> None:
    found = with_extra(
        {
            "second": {"parent": "first", "changes": {"B": 2}, "unset": ["A"], "why": "w"},
            "first": {"parent": "leaf", "changes": {"C": "first"}},
        }
    )
    assert list(found) == [*ARMS, "second", "first"]
    assert arms.effective(SCHEMA, found, "second")[0] == {"B": "2", "C": "first", "D": "leaf"}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "holds no arms"),
        ({}, "holds no arms"),
        ([{"mine": {}}], "holds no arms"),
        ("mine", "holds no arms"),
        ({"leaf": {"parent": "root", "changes": {}}}, "leaf is an arm that Lockstep comes with"),
        ({"mine": {"parent": "lef", "changes": {}}}, "unknown arm 'lef', did you mean leaf"),
        ({"mine": {"changes": {}}}, "names no parent"),
        ({"mine": {"parnet": "leaf", "changes": {}}}, "unknown field 'parnet', did you mean parent"),
        ({"mine": {"parent": "leaf", "change": {"A": "1"}}}, "unknown field 'change', did you mean changes"),
        ({"mine": {"parent": "leaf", "AA": "1"}}, "a key of the environment stands under changes"),
        ({"mine": {"BESIDE_X": 1}}, "unknown field 'BESIDE_X'\n"),
        ({"fleet_arms": {"mine": {"parent": "leaf"}}}, "take the line fleet_arms: away"),
        ({"mine": {"parent": "leaf", "instead": "nope"}}, "unknown arm 'nope'"),
        ({"mine": {"parent": "leaf", "changes": {"A": "1"}, "unset": ["A"]}}, "A is both set and unset (arm:mine)"),
        ({"mine": {"parent": "leaf", "changes": {"AA": "1"}}}, "unknown key 'AA', did you mean A"),
        ({"mine": {"parent": "leaf", "changes": {"A": None}}}, "A cannot be None"),
        ({"mine": {"parent": "leaf", "changes": {"A": "1\n"}}}, "newline"),
        ({"mine": {"parent": "leaf", "changes": {1: "1"}}}, "names no key"),
        ({"mine": {"parent": "leaf", "changes": ["A"]}}, "changes is wrong"),
        ({"mine": {"parent": "leaf", "unset": "A"}}, "unset is wrong"),
        ({"mine": {"parent": "leaf", "unset": ["E"]}}, "unknown key 'E'"),
        ({"mine": {"parent": 3}}, "parent is wrong"),
        ({"mine": {"parent": "leaf", "launchable": "no"}}, "launchable is wrong"),
        ({"mine": {"parent": "leaf", "launchable": False}}, "does not say why"),
        ({"mine": None}, "mine is no mapping"),
        ({"mine": {"parent": "other"}, "other": {"parent": "mine"}}, "its own ancestor"),
        ({"mine": {"parent": "mine"}}, "its own ancestor"),
        ({"my/arm": {"parent": "leaf"}}, "cannot be an arm's name"),
        ({True: {"parent": "leaf"}}, "cannot be an arm's name"),
        ({"x" * 41: {"parent": "leaf"}}, "cannot be an arm's name"),
    ],
)
def test_an_own_file_that_is_wrong_is_refused_by_its_name(found: object, says: str) -> None:
    with pytest.raises(PlanRefused, match=r"^mine\.yml: ") as refusal:
        with_extra(found)
    assert says in str(refusal.value)
    assert refusal.value.rule == "arms-file"


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ({"medians": "nonsense"}, "medians is wrong\n  found: 'nonsense'\n  expected: {workload: number}"),
        ({"medians": {"c1_prose": "abc"}}, "medians: c1_prose is wrong\n  found: 'abc'\n  expected: a number"),
        ({"accept": [1.0]}, "accept is wrong"),
        ({"accept": {"prose": True}}, "accept: prose is wrong"),
        ({"step_ms": {"prose": [70.1]}}, "step_ms: prose is wrong"),
        ({"ranges": {"c1_prose": 28.4}}, "ranges: c1_prose is wrong"),
        ({"ranges": {"c1_prose": [28.4]}}, "ranges: c1_prose is wrong"),
        ({"ranges": {"c1_prose": [28.4, "29"]}}, "expected: [least, most], two numbers"),
        ({"prefetch_check": "0"}, "prefetch_check is wrong"),
        ({"prefetch_check": {"differing_gathers_per_layer": 0.5}}, "prefetch_check is wrong"),
    ],
)
def test_figures_that_no_table_can_show_are_refused(measured: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanRefused, match=r"^mine\.yml: arm mine: measured: ") as refusal:
        with_extra({"mine": {"parent": "leaf", "measured": measured}})
    assert says in str(refusal.value)
    good = {"medians": {"c1_prose": 29, "c1_code": None}, "ranges": {"c1_prose": [28.4, 30]}, "time_idt": "04:27"}
    assert with_extra({"mine": {"parent": "leaf", "measured": good}})["mine"]["measured"] == good


# YAML 1.1: a leading 0 is octal (1*8^3 + 0 + 2*8 + 4 = 532), a colon counts sixties (12*60 + 30 = 750).
@pytest.mark.parametrize("written", ["01024", "12:30", "0x10", "0b1", "1_000", "+5", "0.950", "1.0e+3", ".5", "1:30.5"])
def test_a_number_that_yaml_reads_otherwise_than_written_is_refused(written: str) -> None:
    text = f"mine:\n  parent: leaf\n  changes:\n    A: {written}\n"
    assert str(yaml.safe_load(text)["mine"]["changes"]["A"]) != written
    with pytest.raises(PlanRefused, match=rf"^mine\.yml: A is written {re.escape(written)}, ") as refusal:
        arms.check_written(yaml.compose(text), "mine.yml")
    assert refusal.value.found == f"line 4: {written}"
    assert refusal.value.next_step == f'write A: "{written}"'
    arms.check_written(yaml.compose(text.replace(written, f'"{written}"')), "mine.yml")


def test_other_numbers_are_what_they_are() -> None:
    text = """
    mine: {parent: leaf, changes: {A: 1024, B: 0.95, C: -1, D: conf:0.3}, measured: {medians: {c1_prose: 29.40}}}
    other: &it {parent: leaf, changes: {A: 0}}
    third: *it
    """
    arms.check_written(yaml.compose(text), "mine.yml")
    arms.check_written(yaml.compose(""), "mine.yml")
    merged = "mine: &it {parent: leaf, changes: &c {A: 1}}\nx: {changes: {<<: *c, B: 010}}\n"
    with pytest.raises(PlanRefused, match="B is written 010"):
        arms.check_written(yaml.compose(merged), "mine.yml")


def test_a_step_that_sets_and_unsets_a_key_is_refused() -> None:
    with pytest.raises(PlanRefused, match=r"C is both set and unset \(one-off\)") as refusal:
        arms.effective(SCHEMA, ARMS, "root", [], [("set", {"C": "once"}, ["C"])])
    assert refusal.value.rule == "wrong-value"


@pytest.mark.parametrize("name", [3, None, ["leaf"], {"leaf": 1}])
def test_an_arm_that_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(PlanRefused, match="unknown arm") as refusal:
        arms.get(ARMS, name)
    assert refusal.value.rule == "unknown-arm"
