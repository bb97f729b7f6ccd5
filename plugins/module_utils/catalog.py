"""What people see of arms and switches: lists, one arm whole, the difference of two, the reference of switches.

Each view comes as plain data (for JSON) and as lines of text made from that data. ``fleet`` and ``catalog`` are those
of room ``plan``. Tables fit 140 columns as long as names are no longer than the shipped ones.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import plan, rules, switches

# Workloads as measured: key of the medians, and key of acceptance and step time.
WORKLOADS = {
    "c1_prose": "prose",
    "c1_prose2": "prose2",
    "c1_code": "code",
    "c1_chat": "chat",
    "c4_agg": "c4",
    "c4_stream": None,
}
_SHORT = ("c1_prose", "c1_code", "c1_chat", "c4_agg")
# Fields of `measured` that have a table of their own.
_IN_TABLE = ("medians", "ranges", "accept", "step_ms")


def show(
    fleet: Mapping[str, Any], catalog: Mapping[str, Any], default: str, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what was asked for as ``{"what": "arms" | "arm" | "difference", "data", "lines"}``.

    ``asked`` is ``{"arm", "against", "set": {}, "unset": [], "accept_rule": [], "tree": bool}``, each optional. One-off
    changes, and ``against`` alone, are of the default arm when none is named.
    """
    arm, against = asked.get("arm"), asked.get("against")
    once: dict[str, Any] = {"changes": asked.get("set") or {}, "unset": asked.get("unset") or []}
    accept = asked.get("accept_rule") or []
    plan.known_rules(catalog, accept)
    if arm is None and (against is not None or any(once.values())):
        arm = default
    if arm is None:
        rows = listing(fleet, catalog, default)
        lines = [*([] if asked.get("tree") else [*table(rows), ""]), *tree(rows)]
        return {"what": "arms", "data": rows, "lines": lines}
    if against is None:
        found = one(fleet, catalog, arm, **once)
        return {"what": "arm", "data": found, "lines": one_lines(found, accept)}
    differs = difference(fleet, catalog, arm, against, **once)
    name = plan.assess(fleet, catalog, arm, **once)["name"]
    return {"what": "difference", "data": differs, "lines": difference_lines(name, against, differs)}


# --- all arms ---------------------------------------------------------------------------------------------------------


def listing(fleet: Mapping[str, Any], catalog: Mapping[str, Any], default: str) -> list[dict[str, Any]]:
    """Return all arms in their order.

    ``[{"arm", "default": bool, "parent", "changes", "unset", "medians", "accept", "verdict", "source", "launchable":
    bool, "why_not": str | None, "instead": str | None, "refused_by": [rule ids]}]``. ``launchable`` is false for
    history and for what a rule refuses on this fleet; ``why_not`` then says why.
    """
    rows = []
    for name, arm in catalog["arms"].items():
        refused = [rule for rule in plan.assess(fleet, catalog, name)["tripped"] if rule["severity"] == "refuse"]
        history = not arm.get("launchable", True)
        whys = [str(arm.get("reason"))] if history else [f"rule {rule['id']}: {rule['reason']}" for rule in refused]
        measured = arm.get("measured") or {}
        rows.append(
            {
                "arm": name,
                "default": name == default,
                "parent": arm.get("parent"),
                "changes": {key: str(value) for key, value in (arm.get("changes") or {}).items()},
                "unset": list(arm.get("unset") or []),
                "medians": dict(measured.get("medians") or {}),
                "accept": dict(measured.get("accept") or {}),
                "verdict": arm.get("verdict"),
                "source": arm.get("source"),
                "launchable": not whys,
                "why_not": "; ".join(whys) or None,
                "instead": arm.get("instead"),
                "refused_by": [rule["id"] for rule in refused],
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the arms as a table; the default arm has a star, and why an arm cannot be launched stands below."""
    cells = [["arm", "parent", "changes", "prose  code  chat    c4", "accept p/c/c", "verdict", "launch", "source"]]
    for row in rows:
        figures = [row["medians"].get(workload) for workload in _SHORT]
        accept = [row["accept"].get(workload) for workload in ("prose", "code", "chat")]
        no = f"no, see {row['instead']}" if row["instead"] else "no"
        cells.append(
            [
                row["arm"] + ("*" if row["default"] else ""),
                row["parent"] or "-",
                "\n".join(_changes(row)) or "-",
                " ".join(f"{'-' if one is None else format(one, '.2f'):>5}" for one in figures),
                "/".join("-" if one is None else format(one, ".2f") for one in accept) if any(accept) else "-",
                row["verdict"] or "-",
                "yes" if row["launchable"] else no,
                row["source"] or "-",
            ]
        )
    lines = _table(cells, [12, 12, 30, 23, 14, 19, 12, 14])
    lines += [
        "",
        "tok/s medians of c1 prose, code, chat and c4 aggregate; accepted tokens a step of prose/code/chat; * default",
    ]
    for row in rows:
        if not row["launchable"]:
            lines += textwrap.wrap(f"{row['arm']}: {row['why_not']}", 138, subsequent_indent="  ")
    return lines


def tree(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the arms by descent, each with what it changes on its parent."""
    lines: list[str] = []

    def branch(row: Mapping[str, Any], before: str, joint: str) -> None:
        further = {"": "", "└─ ": "   ", "├─ ": "│  "}[joint]
        mark = ("*" if row["default"] else "") + ("" if row["launchable"] else " (not launchable)")
        lines.append(f"{before}{joint}{row['arm']}{mark}  {' '.join(_changes(row))}".rstrip())
        children = [child for child in rows if child["parent"] == row["arm"]]
        for child in children:
            branch(child, before + further, "└─ " if child is children[-1] else "├─ ")

    for row in rows:
        if row["parent"] is None:
            branch(row, "", "")
    return lines


# --- one arm ----------------------------------------------------------------------------------------------------------


def one(
    fleet: Mapping[str, Any],
    catalog: Mapping[str, Any],
    name: str,
    *,
    changes: Mapping[str, object] | None = None,
    unset: Sequence[str] = (),
) -> dict[str, Any]:
    """Return everything of an arm with one-off changes, launchable or not.

    ``{"arm", "name", "lineage": [{"arm", "changes", "unset"}], "set", "unset", "rules": as from rules.evaluate,
    "memory", "environment": [{"key", "where": "all" | "head" | "workers" | host, "value", "origin"}], …}`` and the
    fields that the arm has for people (why, beside, verdict, launchable, reason, instead, measured, notes, source).
    """
    case = plan.assess(fleet, catalog, name, changes=changes, unset=unset)
    arms = catalog["arms"]
    fields = ("why", "beside", "verdict", "launchable", "reason", "instead", "timed", "measured", "notes", "source")
    values = _values(catalog, case)
    keys = sorted({key for each in values.values() for key in each})
    return {
        "arm": name,
        "name": case["name"],
        "set": case["set"],
        "unset": case["unset"],
        "lineage": [
            {
                "arm": step,
                "changes": dict(arms[step].get("changes") or {}),
                "unset": list(arms[step].get("unset") or []),
            }
            for step in case["lineage"]
        ],
        "rules": case["tripped"],
        "memory": case["memory"],
        "environment": [
            {"key": key, "where": where, **dict(zip(("value", "origin"), pair, strict=True))}
            for key in keys
            for where, pair in _by_place(
                {host: each[key] for host, each in values.items() if key in each}, list(values)
            )
        ],
        **{field: arms[name][field] for field in fields if field in arms[name]},
    }


def one_lines(arm: Mapping[str, Any], accept: Sequence[str] = ()) -> list[str]:
    """Return one arm as text; ``accept`` are rules that would be accepted."""
    lines = [f"{arm['name']}: {arm.get('why', 'no reason given')}"]
    lines += [
        f"  {field}: {arm[field]}" for field in ("beside", "verdict", "notes", "source") if arm.get(field) is not None
    ]
    if not arm.get("launchable", True):
        instead = f"; launch {arm['instead']} instead" if arm.get("instead") else ""
        lines.append(f"  not launchable: {arm.get('reason')}{instead}")
    lines.append("  lineage:")
    lines += [f"    {step['arm']}  {' '.join(_changes(step))}".rstrip() for step in arm["lineage"]]
    if arm["set"] or arm["unset"]:
        lines.append(f"    one-off  {' '.join(_changes({'changes': arm['set'], 'unset': arm['unset']}))}")
    lines += [f"  {line}" for line in _measured(arm.get("measured") or {})]
    lines.append("  rules:" + ("" if arm["rules"] else " none has anything to say"))
    for rule in arm["rules"]:
        word = f"{rule['severity']}, accepted" if rule["id"] in accept else rule["severity"]
        lines.append(f"    {word} {rule['id']} ({', '.join(rule['because'])}): {rule['reason']} [{rule['source']}]")
    lines.append(f"  memory: {arm['memory']['text']}")
    lines += [f"    {line}" for line in arm["memory"]["lines"]]
    lines.append("  environment:")
    for entry in arm["environment"]:
        where = "" if entry["where"] == "all" else f" on {entry['where']}"
        lines.append(f"    {entry['key']}={entry['value']}  [{entry['origin']}]{where}")
    return lines


def _measured(measured: Mapping[str, Any]) -> list[str]:
    if not measured:
        return ["measured: nothing"]
    lines = ["measured:"]
    cells = [["", "tok/s", "min-max", "accept", "step ms"]]
    found = {field: measured.get(field) or {} for field in _IN_TABLE}
    for workload, short in WORKLOADS.items():
        if found["medians"].get(workload) is None and found["accept"].get(short) is None:
            continue
        spread = found["ranges"].get(workload)
        cells.append(
            [
                workload,
                _figure(found["medians"].get(workload)),
                f"{spread[0]:.2f}-{spread[1]:.2f}" if spread else "-",
                _figure(found["accept"].get(short)),
                "-" if found["step_ms"].get(short) is None else f"{found['step_ms'][short]:.1f}",
            ]
        )
    if len(cells) > 1:
        lines += [f"  {line}" for line in _table(cells, [12, 10, 16, 8, 8])]
    return lines + [f"  {field}: {_say(value)}" for field, value in measured.items() if field not in _IN_TABLE]


# --- two arms ---------------------------------------------------------------------------------------------------------


def difference(
    fleet: Mapping[str, Any],
    catalog: Mapping[str, Any],
    name: str,
    against: str,
    *,
    changes: Mapping[str, object] | None = None,
    unset: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the keys whose value differs on any rank between two arms; one-off changes are on the side of ``name``.

    ``[{"key", "where": "all" | "head" | "workers" | host, "there": {"value", "origin"}, "here": the same}]``; a value
    of ``None`` is unset.
    """
    here = _values(catalog, plan.assess(fleet, catalog, name, changes=changes, unset=unset))
    there = _values(catalog, plan.assess(fleet, catalog, against))
    rows = []
    for key in sorted({key for each in (*here.values(), *there.values()) for key in each}):
        pairs = {host: (_value(catalog, there[host], key), _value(catalog, here[host], key)) for host in here}
        if all(one[0] == other[0] for one, other in pairs.values()):
            continue
        rows += [
            {"key": key, "where": where, "there": _pair(pair[0]), "here": _pair(pair[1])}
            for where, pair in _by_place(pairs, list(here))
        ]
    return rows


def difference_lines(name: str, against: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the difference of two arms as a table."""
    if not rows:
        return [f"{name} and {against} have the same environment on every rank"]
    cells = [["key", "ranks", against, "from", name, "from"]]
    for row in rows:
        sides = [text for side in ("there", "here") for text in (_shown(row[side]["value"]), row[side]["origin"])]
        cells.append([row["key"], row["where"], *sides])
    return _table(cells, [40, 12, 26, 16, 26, 16])


def _values(catalog: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, dict[str, tuple[str | None, str]]]:
    """Return ``{host: {key: (value, origin)}}``; a key that an arm or one-off took out has the value None."""
    removed = {
        key: f"arm:{step}" for step in case["lineage"] for key in catalog["arms"][step].get("unset") or []
    } | dict.fromkeys(case["unset"], "set")
    found: dict[str, dict[str, tuple[str | None, str]]] = {}
    for host, (env, origin) in case["environments"].items():
        found[host] = {key: (value, _origin(origin[key])) for key, value in env.items()}
        found[host].update({key: (None, _origin(source)) for key, source in removed.items() if key not in env})
    return found


def _value(
    catalog: Mapping[str, Any], values: Mapping[str, tuple[str | None, str]], key: str
) -> tuple[str | None, str]:
    return values.get(key, (None, "base" if key in catalog["switches"] else "-"))


def _by_place(found: Mapping[str, Any], hosts: Sequence[str]) -> list[tuple[str, Any]]:
    """Name the ranks that share a value: all, head, workers, or a host each. ``hosts`` are in order of rank."""
    head, *workers = [(host, found[host]) for host in hosts if host in found]
    if all(value == head[1] for _, value in workers) and len(found) == len(hosts):
        return [("all", head[1])]
    if len(found) < len(hosts) or len({repr(value) for _, value in workers}) > 1:
        return [head, *workers]
    return [("head", head[1]), ("workers", workers[0][1])]


# --- the reference of switches ----------------------------------------------------------------------------------------


def reference(schema: Mapping[str, Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return every key of the environment with what the schema and the rules say of it.

    ``[{"key", "section", "takes", "default": str | None, "where", "adapter", "volatile": bool, "required": bool,
    "back": {key: value}, "rules": [ids that look at it], "doc"}]``.
    """
    looks = {rule["id"]: rules.keys(rule["when"]) for rule in known}
    rows, section = [], None
    for key, entry in schema.items():
        section = entry.get("section", section)
        rows.append(
            {
                "key": key,
                "section": section,
                "takes": switches.takes(entry),
                "default": entry.get("default"),
                "where": entry["where"],
                "adapter": entry.get("adapter"),
                "volatile": bool(entry.get("volatile")),
                "required": bool(entry.get("required")),
                "back": dict(entry.get("back") or {}),
                "rules": [name for name, keys in looks.items() if key in keys],
                "doc": entry["doc"],
            }
        )
    return rows


_PAGE = """\
# Switches

Every key that an arm, a fleet or a one-off may set: written by `make docs` from `group_vars/all/switches.yml`, where
each is kept. A key that is not here is refused with the nearest name. Values are text; *unset* is not empty, and
`unset: [KEY]` is how to get there.

- **where**: *env*, the engine or an adapter reads it from the environment; *arg*, it becomes an engine argument;
  *launcher*, only Lockstep acts on it. The container's environment has it in every case.
- **adapter**: what of the overlay it switches. *volatile*: a change of it leaves tuned tactics good.
- **back**: what goes back with it (`rollback.yml -e feature=KEY`), because it needs it.
- **rules**: those of `group_vars/all/rules.yml` that look at it.
"""


def reference_page(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the reference as a Markdown page, one table a section."""
    lines, section = [_PAGE], object()
    for row in rows:
        if row["section"] != section:
            section = row["section"]
            lines += [f"\n## {section}\n", "| key | takes | default | where | adapter | back | rules | what |"]
            lines.append("|---|---|---|---|---|---|---|---|")
        cells = [
            f"`{row['key']}`",
            row["takes"] + (", never unset" if row["required"] else ""),
            "*unset*" if row["default"] is None else f"`{row['default']}`",
            row["where"],
            " ".join(filter(None, [row["adapter"], "*volatile*" if row["volatile"] else None])),
            " ".join(f"`{key}={value}`" for key, value in row["back"].items()),
            " ".join(row["rules"]),
            row["doc"],
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def reference_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the reference as plain text, a few lines a key."""
    lines: list[str] = []
    for row in rows:
        default = "unset" if row["default"] is None else row["default"]
        lines.append(f"{row['key']}={default}  {row['takes']}  [{row['where']}]")
        lines += textwrap.wrap(row["doc"], 136, initial_indent="    ", subsequent_indent="    ")
        lines += [
            f"    {name}: {' '.join(found)}"
            for name, found in (
                ("adapter", [row["adapter"]] if row["adapter"] else []),
                ("back", [f"{key}={value}" for key, value in row["back"].items()]),
                ("rules", row["rules"]),
            )
            if found
        ]
    return lines


# --- text -------------------------------------------------------------------------------------------------------------


def _changes(step: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in step["changes"].items()] + [f"unset {key}" for key in step["unset"]]


def _origin(source: str) -> str:
    return "one-off" if source == "set" else source


def _pair(pair: tuple[str | None, str]) -> dict[str, str | None]:
    return {"value": pair[0], "origin": pair[1]}


def _shown(value: str | None) -> str:
    return "unset" if value is None else value or '""'


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _say(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_say(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "[" + ", ".join(map(_say, value)) + "]"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)  # noqa: PLR2004 (five digits)


def _table(rows: Sequence[Sequence[str]], caps: Sequence[int]) -> list[str]:
    """Return rows as columns, a blank between them; a cell wider than its column's cap goes on in the next line."""
    split = [
        [
            [part for line in cell.split("\n") for part in textwrap.wrap(line, cap) or [""]]
            for cell, cap in zip(row, caps, strict=True)
        ]
        for row in rows
    ]
    widths = [max(len(part) for row in split for part in row[column]) for column in range(len(caps))]
    lines = []
    for row in split:
        for number in range(max(map(len, row))):
            parts = [cell[number] if number < len(cell) else "" for cell in row]
            lines.append(" ".join(map(str.ljust, parts, widths)).rstrip())
    return lines
