"""The schema of environment keys: which keys there are, what values each takes, and what it means.

The schema is data (group_vars/all/switches.yml), one entry a key::

    {"type": "flag" | "int" | "float" | "string", "default": str | None, "where": "env" | "arg" | "launcher",
     "doc": str, "allowed": [str]?, "pattern": str?, "min": number?, "max": number?,
     "adapter": str?, "neutral": str?, "feature": str?, "volatile": bool?, "required": bool?,
     "back": {key: value}?, "section": str?}

``default: None`` means unset: the engine decides. Unset differs from empty. Values are text, as in an environment.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .envfile import check_entry
from .errors import LockstepError, PlanRefused

TYPES = ("flag", "int", "float", "string")
# env: the engine or an adapter reads it. arg: it becomes an engine argument. launcher: only Lockstep acts on it.
# In all three cases the container's environment has it: nothing is handed on from a list kept by hand.
PLACES = ("env", "arg", "launcher")
_FIELDS = frozenset(
    {
        "type",
        "default",
        "doc",
        "where",
        "allowed",
        "pattern",
        "min",
        "max",
        "adapter",
        "neutral",
        "feature",
        "volatile",
        "required",
        "back",
        "section",
    }
)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that a misspelt one most resembles, or None when nothing is near. Case is forgiven."""
    by_folded = {known.casefold(): known for known in names}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def unknown(kind: str, name: str, names: Iterable[str]) -> PlanRefused:
    """Return the refusal of a name that nothing knows; ``kind`` is what it should have been (arm, key, rule, …)."""
    known = list(names)
    near = nearest(name, known)
    return PlanRefused(
        f"unknown {kind} {name!r}" + (f", did you mean {near}?" if near else ""),
        rule=f"unknown-{kind.replace(' ', '-')}",
        found=name,
        expected=near or ", ".join(sorted(known)),
        next_step=f"use {near}" if near else f"choose one of these {kind}s",
    )


def check_schema(schema: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise LockstepError for a schema entry with an unknown field, type or place, no doc, or a default it refuses."""
    for key, entry in schema.items():
        extra = sorted(set(entry) - _FIELDS)
        if extra:
            raise LockstepError(f"switch {key} has an unknown field", found=extra, expected=sorted(_FIELDS))
        for field, known in (("type", TYPES), ("where", PLACES)):
            if entry.get(field) not in known:
                raise LockstepError(f"switch {key} has no known {field}", found=entry.get(field), expected=known)
        if not entry.get("doc"):
            raise LockstepError(f"switch {key} has no doc line")
        default = entry.get("default")
        if default is not None:
            if not isinstance(default, str):
                raise LockstepError(f"the default of switch {key} must be quoted text", found=repr(default))
            value(schema, key, default, "its default")
        values(schema, entry.get("back") or {}, f"what goes back with {key}")


def defaults(schema: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the base environment: every key that has a default."""
    return {key: str(entry["default"]) for key, entry in schema.items() if entry.get("default") is not None}


def values(schema: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, object], whose: str) -> dict[str, str]:
    """Check a mapping of changes against the schema and return it as text; ``whose`` says where it comes from."""
    return {key: value(schema, key, wanted[key], whose) for key in sorted(wanted)}


def value(schema: Mapping[str, Mapping[str, Any]], key: str, wanted: object, whose: str) -> str:
    """Return one value as text; raise PlanRefused (unknown-key, wrong-value) naming what the key takes.

    YAML and JSON numbers are taken as their text, and true/false as 1/0 where the key is a flag.
    """
    if key not in schema:
        raise unknown("key", key, schema)
    entry = schema[key]
    text = _text(entry, wanted)
    problem = "is no text or number" if text is None else _problem(entry, text)
    if text is None or problem:
        raise PlanRefused(
            f"{key} cannot be {wanted!r} ({whose}): it {problem}",
            rule="wrong-value",
            found=wanted,
            expected=takes(entry),
            next_step=f"{key}: {entry.get('doc', '')}"
            + (f"; to remove the key use unset: [{key}]" if wanted is None else ""),
        )
    check_entry(key, text)
    return text


def adapters_on(schema: Mapping[str, Mapping[str, Any]], env: Mapping[str, str]) -> dict[str, str]:
    """Return the switches that an environment turns on, each with the adapter of the overlay that it needs."""
    return {
        key: str(entry["adapter"])
        for key, entry in sorted(schema.items())
        if entry.get("adapter") and env.get(key) not in (None, "", "0", entry.get("neutral"))
    }


def taken_back(schema: Mapping[str, Mapping[str, Any]], key: str, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return what taking ``key`` back to its base value means: the key itself and the keys of ``env`` that need it.

    ``None`` means unset. What the fleet says of ``key`` is not known here; ``plan.put_back`` knows it. The dependents
    are the schema's ``back``, and theirs in turn; one that ``env`` has so already is left out. Raises PlanRefused
    (unknown-key) with the nearest name.
    """
    if key not in schema:
        raise unknown("key", key, schema)
    found: dict[str, str | None] = {key: schema[key].get("default")}
    waiting = [key]
    while waiting:
        for other, base in (schema[waiting.pop(0)].get("back") or {}).items():
            if other not in found and env.get(other) not in (None, str(base)):
                found[other] = str(base)
                waiting.append(other)
    return found


def removals(schema: Mapping[str, Mapping[str, Any]], wanted: Iterable[str], whose: str) -> list[str]:
    """Check a list of keys to unset and return it sorted; a key that an engine argument must have cannot go."""
    keys = sorted(set(wanted))
    for key in keys:
        if key not in schema:
            raise unknown("key", key, schema)
        if schema[key].get("required"):
            raise PlanRefused(
                f"{key} cannot be unset ({whose}): no launch is possible without it",
                rule="wrong-value",
                found="unset",
                expected=takes(schema[key]),
            )
    return keys


def takes(entry: Mapping[str, Any]) -> str:
    """Say in words which values a key takes: ``0 or 1``, ``int 1..64``, ``one of a, b``."""
    if entry.get("allowed"):
        return "one of " + ", ".join(map(str, entry["allowed"]))
    if entry["type"] == "flag":
        return "0 or 1"
    low, high = entry.get("min"), entry.get("max")
    limits = "" if low is None and high is None else f" {'' if low is None else low}..{'' if high is None else high}"
    pattern = f" matching {entry['pattern']}" if entry.get("pattern") else ""
    return f"{entry['type']}{limits}{pattern}"


def _text(entry: Mapping[str, Any], wanted: object) -> str | None:
    if isinstance(wanted, bool):
        return str(int(wanted)) if entry["type"] == "flag" else None
    if isinstance(wanted, str):
        return str(wanted)
    return repr(wanted) if isinstance(wanted, int | float) else None


def _problem(entry: Mapping[str, Any], text: str) -> str | None:
    """Say why a text is no value of this key, or None."""
    if entry.get("allowed") and text not in map(str, entry["allowed"]):
        return f"takes {takes(entry)}"
    kind = entry["type"]
    if kind == "flag" and text not in ("0", "1"):
        return "is a flag: 0 or 1"
    if kind in ("int", "float"):
        number = _number(kind, text)
        if number is None:
            return f"takes {takes(entry)}"
        low, high = entry.get("min"), entry.get("max")
        if (low is not None and number < low) or (high is not None and number > high):
            return f"takes {takes(entry)}"
    if entry.get("pattern") and not re.fullmatch(entry["pattern"], text):
        return f"takes {takes(entry)}"
    return None


def _number(kind: str, text: str) -> float | None:
    """Read a number as the engine's argument parser does, but without blanks, underscores, inf or nan."""
    if not re.fullmatch(
        r"[+-]?[0-9]+" if kind == "int" else r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text
    ):
        return None
    number = float(text)
    return number if math.isfinite(number) else None
