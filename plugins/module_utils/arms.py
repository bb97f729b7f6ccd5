"""Arms: named experiments, each its parent plus changes, merged with base and fleet into an environment per rank.

An arm is data (group_vars/all/arms.yml): ``{"parent": name | None, "changes": {key: value}, "unset": [key]?,
"launchable": bool?, "reason": str?, "timed": bool?, …}``; what else it holds (why, figures, verdict, source) is for
people.

Order of values, the later one wins: base (the schema's defaults) < engine profile < fleet < head < host < arm (from the
oldest ancestor to the arm itself) < one-off. Every value keeps its origin.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import switches
from .errors import LockstepError, PlanRefused

# One step of the order above: where from, what it sets, what it takes away.
Layer = tuple[str, Mapping[str, str], Sequence[str]]

# Every field that an arm may have, with what it must be.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "parent": (str, type(None)),
    "changes": dict,
    "unset": list,
    "launchable": bool,
    "timed": bool,
    "measured": dict,
    **dict.fromkeys(("reason", "instead", "why", "beside", "verdict", "notes", "source"), str),
}
# An arm's name stands in the name of its launch, hence in file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
# Figures of `measured` that tables show, by workload.
_FIGURES = ("medians", "accept", "step_ms")
_PAIR = 2


def get(arms: Mapping[str, Mapping[str, Any]], name: object) -> Mapping[str, Any]:
    """Return an arm's data; PlanRefused (unknown-arm) with the nearest name."""
    if not isinstance(name, str) or name not in arms:
        raise switches.unknown("arm", str(name), arms)
    return arms[name]


def lineage(arms: Mapping[str, Mapping[str, Any]], name: str) -> list[str]:
    """Return the arm's ancestors, oldest first, and the arm itself: ``["b0", "b1", …, "e8"]``."""
    found: list[str] = []
    step: str | None = name
    while step is not None:
        if step in found:
            raise LockstepError(f"arm {name} is its own ancestor", found=" < ".join([*found, step]))
        parent = get(arms, step).get("parent")
        found.append(step)
        step = None if parent is None else str(parent)
    return found[::-1]


def require_launchable(arms: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raise PlanRefused (not-launchable), with the arm's own reason, for an arm that is only history."""
    arm = get(arms, name)
    if not arm.get("launchable", True):
        raise PlanRefused(
            f"arm {name} is history and cannot be launched: {arm.get('reason')}",
            rule="not-launchable",
            found=name,
            expected=arm.get("instead") or "an arm that can be launched",
            next_step=f"launch {arm['instead']}" if arm.get("instead") else None,
        )


def layers(schema: Mapping[str, Mapping[str, Any]], arms: Mapping[str, Mapping[str, Any]], name: str) -> list[Layer]:
    """Return the arm's own steps of the order, from the oldest ancestor on, checked against the schema."""
    found: list[Layer] = []
    for ancestor in lineage(arms, name):
        arm = arms[ancestor]
        found.append(
            (
                f"arm:{ancestor}",
                switches.values(schema, arm.get("changes") or {}, f"arm {ancestor}"),
                switches.removals(schema, arm.get("unset") or [], f"arm {ancestor}"),
            )
        )
    return found


def merge(steps: Sequence[Layer]) -> tuple[dict[str, str], dict[str, str]]:
    """Apply the steps in order; returns the environment and, for each of its keys, the origin of the value.

    Raises PlanRefused (wrong-value) for a step that both sets and unsets a key.
    """
    env: dict[str, str] = {}
    origin: dict[str, str] = {}
    for source, changes, unset in steps:
        for key in unset:
            if key in changes:
                raise PlanRefused(
                    f"{key} is both set and unset ({'one-off' if source == 'set' else source})",
                    rule="wrong-value",
                    found=f"{key}={changes[key]}, and unset",
                    expected="one of the two",
                    next_step="take one of them away",
                )
            env.pop(key, None)
            origin.pop(key, None)
        for key, value in changes.items():
            env[key] = value
            origin[key] = source
    return env, origin


def effective(
    schema: Mapping[str, Mapping[str, Any]],
    arms: Mapping[str, Mapping[str, Any]],
    name: str,
    before: Sequence[Layer] = (),
    after: Sequence[Layer] = (),
) -> tuple[dict[str, str], dict[str, str]]:
    """Return an arm's environment and origins: base < ``before`` (engine, fleet, …) < the arm < ``after`` (one-off)."""
    base: Layer = ("base", switches.defaults(schema), [])
    return merge([base, *before, *layers(schema, arms, name), *after])


def check(schema: Mapping[str, Mapping[str, Any]], arms: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise the first problem of an arm: an unknown field or parent, a loop, a key or value that the schema refuses."""
    for name, arm in arms.items():
        _check_form(name, arm)
    for name, arm in arms.items():
        merge(layers(schema, arms, name))
        if arm.get("instead") is not None:
            get(arms, arm["instead"])
        if not arm.get("launchable", True) and not arm.get("reason"):
            raise LockstepError(f"arm {name} is not launchable and does not say why")


def with_extra(
    schema: Mapping[str, Mapping[str, Any]], shipped: Mapping[str, Mapping[str, Any]], found: object, source: str
) -> dict[str, Mapping[str, Any]]:
    """Return the shipped arms and those of an operator's own file, which is ``found`` as read from YAML.

    Raises PlanRefused (arms-file), naming ``source``, for one that is no mapping of arms, takes the name of a shipped
    arm, or holds an arm that ``check`` would refuse.
    """

    def refused(message: str, cause: LockstepError | None = None, **facts: Any) -> PlanRefused:  # noqa: ANN401 (any value)
        if cause is not None:
            facts = {field: getattr(cause, field) for field in ("found", "expected", "next_step")}
        return PlanRefused(f"{source}: {message}", rule="arms-file", **facts)

    if not isinstance(found, dict) or not found:
        raise refused(
            "this holds no arms",
            found="nothing" if found is None else f"{type(found).__name__}: {found!r}"[:200],
            expected="a mapping: {name: {parent: ARM, changes: {KEY: value}}, …}",
            next_step="write it like fleet_arms in group_vars/all/arms.yml",
        )
    if "fleet_arms" in found:
        raise refused(
            "the arms stand by themselves here, under no name",
            found="fleet_arms:",
            expected="{name: {parent: ARM, changes: {KEY: value}}, …}",
            next_step="take the line fleet_arms: away, and move what is below it to the left",
        )
    for name, arm in found.items():
        if name in shipped:
            raise refused(
                f"{name} is an arm that Lockstep comes with",
                found=name,
                expected="a name of its own: what was measured as this arm must stay this arm",
                next_step=f"call it otherwise, with parent: {name}",
            )
        if isinstance(arm, dict) and "parent" not in arm and all(field in _FIELDS for field in arm):
            raise refused(f"arm {name} names no parent", expected="parent: ARM (null begins at the base values)")
    both = {**shipped, **found}
    try:
        check(schema, both)
    except LockstepError as error:
        raise refused(error.message, error) from error
    return both


def prefetch_checked(arms: Mapping[str, Mapping[str, Any]], lineage: Sequence[str]) -> bool:
    """Whether a check pass beside one of these arms (a child of it, or the arm itself) found no differing gather."""
    for name, arm in arms.items():
        seen = ((arm.get("measured") or {}).get("prefetch_check") or {}).get("differing_gathers_per_layer")
        if seen and not any(seen) and (name in lineage or arm.get("parent") in lineage):
            return True
    return False


def _check_form(name: object, arm: object) -> None:
    """Raise LockstepError unless an arm is a mapping of known fields, each of its kind, under a usable name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise LockstepError(
            f"{name!r} cannot be an arm's name",
            expected="text of at most 40 letters, digits, dots, dashes and underscores",
            next_step='quote it if YAML reads it as something else: "1e3"',
        )
    if not isinstance(arm, Mapping):
        raise LockstepError(
            f"arm {name} is no mapping", found=repr(arm), expected="{parent: ARM, changes: {KEY: value}}"
        )
    for field, value in arm.items():
        if field not in _FIELDS:
            is_key = str(field).isupper()
            near = None if is_key else switches.nearest(str(field), _FIELDS)
            raise LockstepError(
                f"arm {name} has an unknown field {field!r}" + (f", did you mean {near}?" if near else ""),
                found=field,
                expected=near or ", ".join(_FIELDS),
                next_step=f"a key of the environment stands under changes: {{{field}: …}}" if is_key else None,
            )
        if not isinstance(value, _FIELDS[field]):
            kinds = _FIELDS[field]
            names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
            raise LockstepError(f"arm {name}: {field} is wrong", found=repr(value), expected=" or ".join(names))
    for field in ("changes", "unset"):
        for key in arm.get(field) or ():
            if not isinstance(key, str):
                raise LockstepError(f"arm {name}: {field} names no key", found=repr(key), expected="text")
    _check_measured(f"arm {name}: measured", arm.get("measured") or {})


def _check_measured(whose: str, measured: Mapping[str, Any]) -> None:
    """Raise LockstepError for figures that no table can show and no rule can read."""
    wrong = functools.partial(_wrong_figure, whose)
    for field in (*_FIGURES, "ranges"):
        figures = measured.get(field) or {}
        if not isinstance(figures, Mapping):
            raise wrong(field, figures, "{workload: number}")
        for workload, figure in figures.items():
            if figure is None:
                continue
            if field == "ranges":
                if not (isinstance(figure, list) and len(figure) == _PAIR and all(map(_is_number, figure))):
                    raise wrong(f"{field}: {workload}", figure, "[least, most], two numbers")
            elif not _is_number(figure):
                raise wrong(f"{field}: {workload}", figure, "a number")
    seen = measured.get("prefetch_check") or {}
    counts = (seen.get("differing_gathers_per_layer") or []) if isinstance(seen, Mapping) else None
    if not isinstance(counts, list) or not all(map(_is_number, counts)):
        raise wrong("prefetch_check", seen, "{differing_gathers_per_layer: [number, …]}")


def _wrong_figure(whose: str, field: str, found: object, expected: str) -> LockstepError:
    return LockstepError(f"{whose}: {field} is wrong", found=repr(found), expected=expected)


def _is_number(found: object) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)


def check_written(root: Any, source: str) -> None:  # noqa: ANN401 (PyYAML's node, which the core does not know)
    """Refuse a value under ``changes`` that YAML reads as another number than is written there.

    ``root`` is the file as PyYAML's ``compose`` gives it: 01024 is octal there (532), 12:30 counts sixties (750), and
    0.950 loses its last digit. Raises PlanRefused (arms-file), naming ``source`` and the line.
    """
    waiting, seen = [(root, "", False)], set()
    while waiting:
        node, key, inside = waiting.pop()
        if node is None or (id(node), inside) in seen:  # an alias may lead back
            continue
        seen.add((id(node), inside))
        if isinstance(node.value, str):
            kind = node.tag.rpartition(":")[2]
            if inside and kind in ("int", "float") and not _as_written(kind, node.value):
                raise PlanRefused(
                    f"{source}: {key} is written {node.value}, which YAML reads as another number",
                    rule="arms-file",
                    found=f"line {node.start_mark.line + 1}: {node.value}",
                    expected="text in quotes",
                    next_step=f'write {key}: "{node.value}"',
                )
            continue
        for part in node.value:
            name, value = part if isinstance(part, tuple) else (None, part)
            label = str(name.value) if name is not None and isinstance(name.value, str) else key
            waiting.append((value, label, inside or label == "changes"))


def _as_written(kind: str, text: str) -> bool:
    if kind == "int":
        return re.fullmatch(r"-?(0|[1-9][0-9]*)", text) is not None
    try:
        return repr(float(text)) == text
    except ValueError:
        return False
