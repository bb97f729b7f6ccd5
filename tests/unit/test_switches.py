"""The schema of keys, on a small schema of its own; the real one is held by test_group_vars."""

from typing import Any

import pytest
from lockstep_core import switches
from lockstep_core.errors import LockstepError, PlanRefused

SCHEMA: dict[str, dict[str, Any]] = {
    "BLOCK_SIZE": {"type": "int", "min": 1, "max": 16, "default": "3", "where": "arg", "required": True, "doc": "d"},
    "FRACTION": {"type": "float", "min": 0, "max": 1, "default": "0.95", "where": "arg", "doc": "d"},
    "PREFETCH": {"type": "flag", "default": "0", "where": "env", "doc": "d"},
    "ALGO": {"type": "string", "allowed": ["A", "B"], "default": "A", "where": "arg", "doc": "d"},
    "CAP": {"type": "string", "pattern": "0|conf:[0-9.]+", "default": "0", "where": "env", "doc": "d"},
    "SAMPLING": {"type": "int", "default": None, "where": "env", "doc": "d"},
    "FREE": {"type": "string", "default": "", "where": "env", "doc": "d"},
}


def test_defaults_leave_out_what_is_unset_and_keep_what_is_empty() -> None:
    found = switches.defaults(SCHEMA)
    assert "SAMPLING" not in found
    assert found["FREE"] == ""
    assert found["BLOCK_SIZE"] == "3"


@pytest.mark.parametrize(
    ("key", "wanted", "text"),
    [
        ("BLOCK_SIZE", "5", "5"),
        ("BLOCK_SIZE", 5, "5"),
        ("FRACTION", 0.944, "0.944"),
        ("FRACTION", "0.95", "0.95"),
        ("FRACTION", 1, "1"),
        ("PREFETCH", True, "1"),
        ("PREFETCH", False, "0"),
        ("PREFETCH", "1", "1"),
        ("ALGO", "B", "B"),
        ("CAP", "conf:0.1", "conf:0.1"),
        ("FREE", "", ""),
        ("FREE", 'a "b" #c', 'a "b" #c'),
    ],
)
def test_a_value_becomes_text(key: str, wanted: object, text: str) -> None:
    assert switches.value(SCHEMA, key, wanted, "set") == text


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("BLOCK_SIZE", "five"),
        ("BLOCK_SIZE", "0"),
        ("BLOCK_SIZE", "17"),
        ("BLOCK_SIZE", "5.0"),
        ("BLOCK_SIZE", "5\r"),
        ("BLOCK_SIZE", " 5"),
        ("BLOCK_SIZE", "1_0"),
        ("BLOCK_SIZE", ""),
        ("BLOCK_SIZE", True),
        ("BLOCK_SIZE", None),
        ("BLOCK_SIZE", [5]),
        ("BLOCK_SIZE", "\u0665"),
        ("FRACTION", "nan"),
        ("FRACTION", "inf"),
        ("FRACTION", "1e999"),
        ("FRACTION", "1.1"),
        ("PREFETCH", "2"),
        ("PREFETCH", "true"),
        ("PREFETCH", ""),
        ("ALGO", "C"),
        ("CAP", "conf:"),
        ("CAP", "conf:0.1\n"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_what_the_key_takes(key: str, wanted: object) -> None:
    with pytest.raises(PlanRefused) as refusal:
        switches.value(SCHEMA, key, wanted, "set")
    assert refusal.value.rule == "wrong-value"
    assert refusal.value.expected == switches.takes(SCHEMA[key])
    assert key in str(refusal.value)


def test_a_value_that_no_env_file_carries_is_refused_before_it_gets_there() -> None:
    with pytest.raises(LockstepError, match="newline"):
        switches.value(SCHEMA, "FREE", "a\nb", "set")


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    for typo, near in (("BLOCK_SIZ", "BLOCK_SIZE"), ("block_size", "BLOCK_SIZE"), ("PREFECTH", "PREFETCH")):
        with pytest.raises(PlanRefused, match=f"unknown key '{typo}', did you mean {near}") as refusal:
            switches.value(SCHEMA, typo, "1", "set")
        assert refusal.value.rule == "unknown-key"
    with pytest.raises(PlanRefused) as refusal:
        switches.value(SCHEMA, "ZZZ", "1", "set")
    assert "did you mean" not in str(refusal.value)
    assert "BLOCK_SIZE" in str(refusal.value.expected)


def test_a_required_key_cannot_be_unset_and_another_can() -> None:
    assert switches.removals(SCHEMA, ["PREFETCH", "CAP"], "unset") == ["CAP", "PREFETCH"]
    with pytest.raises(PlanRefused, match="BLOCK_SIZE cannot be unset"):
        switches.removals(SCHEMA, ["BLOCK_SIZE"], "unset")
    with pytest.raises(PlanRefused, match="did you mean CAP"):
        switches.removals(SCHEMA, ["CAPS"], "unset")


def test_none_in_a_set_points_to_unset() -> None:
    with pytest.raises(PlanRefused, match=r"unset: \[CAP\]"):
        switches.value(SCHEMA, "CAP", None, "set")


def test_taking_back_follows_what_depends_on_what() -> None:
    schema: dict[str, dict[str, Any]] = {
        key: {"type": "flag", "default": default, "where": "env", "doc": "d", "back": back}
        for key, default, back in (
            ("A", "0", {"B": "0"}),
            ("B", "0", {"C": "0"}),
            ("C", "0", {"A": "0"}),  # a circle ends
            ("D", None, {"A": "0"}),
        )
    }
    every = {"A": "1", "B": "1", "C": "1", "D": "1"}
    assert switches.taken_back(schema, "A", every) == {"A": "0", "B": "0", "C": "0"}
    assert switches.taken_back(schema, "D", every) == {"D": None, "A": "0", "B": "0", "C": "0"}
    # What is so already, or not there, goes nowhere; and nothing beyond it.
    assert switches.taken_back(schema, "A", {**every, "B": "0"}) == {"A": "0"}
    assert switches.taken_back(schema, "A", {"C": "1"}) == {"A": "0"}
    with pytest.raises(PlanRefused, match="did you mean BLOCK_SIZE"):
        switches.taken_back(SCHEMA, "BLOCKSIZE", {})


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"type": "int", "default": "3", "where": "arg"}, "no doc"),
        ({"type": "number", "default": "3", "where": "arg", "doc": "d"}, "no known type"),
        ({"type": "int", "default": "3", "where": "nowhere", "doc": "d"}, "no known where"),
        ({"type": "int", "default": 3, "where": "arg", "doc": "d"}, "quoted text"),
        ({"type": "int", "default": "x", "where": "arg", "doc": "d"}, "cannot be 'x'"),
        ({"type": "int", "default": "3", "where": "arg", "doc": "d", "maximum": 3}, "unknown field"),
        ({"type": "int", "default": "3", "where": "arg", "doc": "d", "back": {"KEI": "1"}}, "did you mean KEY"),
        ({"type": "int", "default": "3", "where": "arg", "doc": "d", "back": {"KEY": "x"}}, "what goes back with KEY"),
    ],
)
def test_a_schema_entry_that_is_not_whole_is_refused(entry: dict[str, Any], why: str) -> None:
    with pytest.raises(LockstepError, match=why):
        switches.check_schema({"KEY": entry})
    switches.check_schema(SCHEMA)
