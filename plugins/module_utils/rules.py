"""Rules learnt the hard way, as data: when an environment must not be booted, or should make somebody think.

A rule is ``{"id", "severity": "refuse" | "warn", "when": node, "reason", "source"}``. A node is one of::

    {"all": [node, …]}   {"any": [node, …]}   {"not": node}
    {"key": NAME, "op": OP, "value": V}                 a key of the effective environment
    {"fact": NAME, "op": OP, "value": V}                a fact of fleet and plan (tp_size, accelerators, …)
    {"key": NAME, "op": OP, "than": {"key"|"fact": N}}  compared with another key or fact

Operators: ``on`` (set, not empty, not 0), ``off`` (the opposite), ``set``, ``unset``, ``eq``, ``ne``, ``lt``, ``le``,
``gt``, ``ge``, ``in`` (value is a list), ``matches`` (a regular expression found in it), ``divides`` (the left side
divides the right side without a remainder). Numbers compare as numbers, other text as text. A comparison with
something unset is false, ``ne`` and ``off`` are then true. Nothing is ever evaluated as code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .errors import LockstepError

SEVERITIES = ("refuse", "warn")

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_UNARY = ("on", "off", "set", "unset")
OPERATORS = (*_UNARY, *_ORDER, "ne", "in", "matches", "divides")


def evaluate(
    rules: Sequence[Mapping[str, Any]], env: Mapping[str, str], facts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the rules that this environment trips, in their order.

    Each is ``{"id", "severity", "reason", "source", "because": ["KEY=value", "fact=value", …]}``.
    """
    return [
        {
            **{field: str(rule[field]) for field in ("id", "severity", "reason", "source")},
            "because": because(rule["when"], env, facts),
        }
        for rule in rules
        if holds(rule["when"], env, facts)
    ]


def holds(node: Mapping[str, Any], env: Mapping[str, str], facts: Mapping[str, Any]) -> bool:
    """Tell whether an expression is true of this environment and these facts; LockstepError if it is malformed."""
    if "all" in node:
        return all(holds(part, env, facts) for part in node["all"])
    if "any" in node:
        return any(holds(part, env, facts) for part in node["any"])
    if "not" in node:
        return not holds(node["not"], env, facts)
    left, op = _look_up(node, env, facts), node["op"]
    if op in ("set", "unset"):
        return bool((left is not None) == (op == "set"))
    if op in ("on", "off"):
        return bool((left not in (None, "", "0", 0)) == (op == "on"))
    right = _look_up(node["than"], env, facts) if "than" in node else node["value"]
    return not _compare("eq", left, right) if op == "ne" else _compare(op, left, right)


def because(node: Mapping[str, Any], env: Mapping[str, str], facts: Mapping[str, Any]) -> list[str]:
    """List the keys and facts that an expression looks at with their values, each once, in order of appearance."""
    seen: dict[str, None] = {}
    for leaf in _leaves(node):
        for side in (leaf, leaf.get("than")):
            if side is not None:
                found = _look_up(side, env, facts)
                seen[f"{_name(side)}={'unset' if found is None else found}"] = None
    return list(seen)


def keys(node: Mapping[str, Any]) -> set[str]:
    """Return the keys of the environment that an expression looks at."""
    sides = [side for leaf in _leaves(node) for side in (leaf, leaf.get("than")) if side is not None]
    return {str(side["key"]) for side in sides if "key" in side}


def check(rules: Sequence[Mapping[str, Any]], keys: Iterable[str], facts: Iterable[str]) -> None:
    """Raise LockstepError for a rule that is malformed or asks for a key or fact that nothing knows."""
    known = {"key": frozenset(keys), "fact": frozenset(facts)}
    seen: set[str] = set()
    for rule in rules:
        name = rule.get("id")
        missing = [field for field in ("id", "severity", "when", "reason", "source") if not rule.get(field)]
        if missing:
            raise LockstepError(f"rule {name} is incomplete", found=f"no {', '.join(missing)}")
        if name in seen or rule["severity"] not in SEVERITIES:
            raise LockstepError(f"rule {name}: a second one, or an unknown severity", found=rule["severity"])
        seen.add(str(name))
        for leaf in _leaves(rule["when"]):
            if leaf.get("op") not in OPERATORS:
                raise LockstepError(f"rule {name} has an unknown operator", found=leaf, expected=OPERATORS)
            if leaf["op"] not in _UNARY and ("value" in leaf) == ("than" in leaf):
                raise LockstepError(f"rule {name} needs either value or than", found=leaf)
            for side in (leaf, leaf.get("than")):
                if side is not None and not any(side.get(kind) in known[kind] for kind in known):
                    raise LockstepError(f"rule {name} asks for something that nothing knows", found=side)


def _leaves(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for joint in ("all", "any"):
        if joint in node:
            for part in node[joint]:
                yield from _leaves(part)
            return
    if "not" in node:
        yield from _leaves(node["not"])
    else:
        yield node


def _name(side: Mapping[str, Any]) -> str:
    return str(side["key"] if "key" in side else side["fact"])


def _look_up(side: Mapping[str, Any], env: Mapping[str, str], facts: Mapping[str, Any]) -> object:
    return env.get(side["key"]) if "key" in side else facts.get(side["fact"])


def _compare(op: str, left: object, right: object) -> bool:
    """Compare two values that are both there: as numbers when both are numbers, else as text."""
    if left is None or right is None:
        return False
    if op == "in":
        return isinstance(right, list | tuple) and any(_compare("eq", left, one) for one in right)
    if op == "matches":
        return re.search(str(right), str(left)) is not None
    a, b = _number(left), _number(right)
    if op == "divides":
        return a is not None and b is not None and a != 0 and b % a == 0
    if op not in _ORDER:
        raise LockstepError("a rule has an unknown operator", found=op, expected=OPERATORS)
    return _ORDER[op](str(left), str(right)) if a is None or b is None else _ORDER[op](a, b)


def _number(found: object) -> float | None:
    try:
        return float(str(found))
    except ValueError:
        return None
