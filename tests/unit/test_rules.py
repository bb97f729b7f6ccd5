"""The grammar of rules; what the real rules say is held by test_group_vars."""

from typing import Any

import pytest
from lockstep_core import rules
from lockstep_core.errors import LockstepError

ENV = {"W8": "1", "DROP": "0", "EMPTY": "", "FRACTION": "0.95", "BLOCK": "5", "CAP": "conf:0.1", "EP": "2"}
FACTS = {"tp_size": 3, "accelerators": False, "prompt": 0, "name": "e8"}


@pytest.mark.parametrize(
    ("node", "truth"),
    [
        ({"key": "W8", "op": "on"}, True),
        ({"key": "DROP", "op": "on"}, False),
        ({"key": "EMPTY", "op": "on"}, False),
        ({"key": "ABSENT", "op": "on"}, False),
        ({"key": "CAP", "op": "on"}, True),
        ({"key": "DROP", "op": "off"}, True),
        ({"key": "EMPTY", "op": "off"}, True),
        ({"key": "ABSENT", "op": "off"}, True),
        ({"fact": "accelerators", "op": "off"}, True),
        ({"fact": "tp_size", "op": "on"}, True),
        ({"key": "EMPTY", "op": "set"}, True),
        ({"key": "ABSENT", "op": "set"}, False),
        ({"key": "ABSENT", "op": "unset"}, True),
        ({"key": "EMPTY", "op": "unset"}, False),
        # numbers as numbers: "10" < "9" as text
        ({"key": "BLOCK", "op": "lt", "value": 10}, True),
        ({"key": "BLOCK", "op": "eq", "value": "5.0"}, True),
        ({"key": "FRACTION", "op": "gt", "value": 0.95}, False),
        ({"key": "FRACTION", "op": "ge", "value": 0.95}, True),
        ({"key": "FRACTION", "op": "le", "value": 0.95}, True),
        # other text as text
        ({"key": "CAP", "op": "eq", "value": "conf:0.1"}, True),
        ({"key": "CAP", "op": "gt", "value": 3}, True),
        ({"key": "CAP", "op": "ne", "value": "0"}, True),
        ({"key": "CAP", "op": "in", "value": ["1", "2"]}, False),
        ({"key": "BLOCK", "op": "in", "value": [4, 5]}, True),
        ({"key": "CAP", "op": "matches", "value": "^conf:"}, True),
        ({"key": "CAP", "op": "matches", "value": "0.2"}, False),
        # something unset
        ({"key": "ABSENT", "op": "eq", "value": "0"}, False),
        ({"key": "ABSENT", "op": "ne", "value": "0"}, True),
        ({"key": "ABSENT", "op": "lt", "value": 1}, False),
        ({"key": "ABSENT", "op": "ge", "value": 1}, False),
        ({"key": "ABSENT", "op": "matches", "value": ""}, False),
        ({"key": "EP", "op": "divides", "than": {"key": "ABSENT"}}, False),
        # compared with another
        ({"key": "EP", "op": "divides", "than": {"fact": "tp_size"}}, False),
        ({"fact": "tp_size", "op": "divides", "than": {"fact": "tp_size"}}, True),
        ({"fact": "prompt", "op": "divides", "than": {"fact": "tp_size"}}, False),
        ({"key": "BLOCK", "op": "gt", "than": {"fact": "prompt"}}, True),
        # joints
        ({"all": []}, True),
        ({"any": []}, False),
        ({"all": [{"key": "W8", "op": "on"}, {"key": "DROP", "op": "on"}]}, False),
        ({"any": [{"key": "W8", "op": "on"}, {"key": "DROP", "op": "on"}]}, True),
        ({"not": {"any": [{"key": "DROP", "op": "on"}, {"not": {"key": "W8", "op": "on"}}]}}, True),
    ],
)
def test_an_expression(node: dict[str, Any], *, truth: bool) -> None:
    assert rules.holds(node, ENV, FACTS) is truth


def test_a_tripped_rule_says_what_it_looked_at() -> None:
    rule = {
        "id": "r",
        "severity": "warn",
        "reason": "why",
        "source": "where",
        "when": {
            "all": [
                {"key": "W8", "op": "on"},
                {"not": {"key": "ABSENT", "op": "on"}},
                {"key": "BLOCK", "op": "ge", "than": {"fact": "tp_size"}},
                {"key": "W8", "op": "set"},
            ]
        },
    }
    assert rules.evaluate([rule], ENV, FACTS) == [
        {
            "id": "r",
            "severity": "warn",
            "reason": "why",
            "source": "where",
            "because": ["W8=1", "ABSENT=unset", "BLOCK=5", "tp_size=3"],
        }
    ]
    assert rules.evaluate([rule], {**ENV, "W8": "0"}, FACTS) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"severity": "maybe"}, "unknown severity"),
        ({"reason": ""}, "incomplete"),
        ({"source": None}, "incomplete"),
        ({"when": {"key": "W8", "op": "is"}}, "unknown operator"),
        ({"when": {"key": "W9", "op": "on"}}, "nothing knows"),
        ({"when": {"fact": "tp", "op": "on"}}, "nothing knows"),
        ({"when": {"key": "W8", "op": "eq"}}, "value or than"),
        ({"when": {"key": "W8", "op": "eq", "value": 1, "than": {"key": "W8"}}}, "value or than"),
        ({"when": {"key": "W8", "op": "eq", "than": {"key": "W9"}}}, "nothing knows"),
    ],
)
def test_a_malformed_rule_is_refused(change: dict[str, Any], why: str) -> None:
    rule = {"id": "r", "severity": "warn", "reason": "r", "source": "s", "when": {"key": "W8", "op": "on"}}
    rules.check([rule], ENV, FACTS)
    with pytest.raises(LockstepError, match=why):
        rules.check([{**rule, **change}], ENV, FACTS)
    with pytest.raises(LockstepError, match="a second one"):
        rules.check([rule, rule], ENV, FACTS)


def test_the_keys_of_an_expression() -> None:
    node = {"any": [{"key": "A", "op": "on"}, {"not": {"key": "B", "op": "eq", "than": {"key": "C"}}}]}
    assert rules.keys(node) == {"A", "B", "C"}
    assert rules.keys({"fact": "tp_size", "op": "eq", "value": 3}) == set()


def test_an_unknown_operator_is_no_silent_false() -> None:
    with pytest.raises(LockstepError, match="unknown operator"):
        rules.holds({"key": "W8", "op": "__import__", "value": "os"}, ENV, FACTS)
