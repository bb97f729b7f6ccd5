"""History: which launches there were, where a rollback goes, and how one launch differs from another.

All of it comes from the ranks: their journals (room ``receipt``, merged over the ranks) and what runs on them. An entry
holds its whole plan, so it can be launched again whatever has become of the arm since.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import arms, receipt, switches
from . import plan as plans
from .errors import LockstepError, PlanRefused

Entry = Mapping[str, Any]
Plan = Mapping[str, Any]
# A look of rank_facts by host, None where there is none.
Looks = Mapping[str, Mapping[str, Any] | None]

# The options of a rollback.
WAYS = ("to", "feature", "campaign", "tactics")
# Differences and launches that a line of a message names before it only counts them.
_SHOWN = 6
_OF_A_RANK = ("rank", "role", "container", "argv", "mounts", "shards")
_UTC = re.compile(r"(....)(..)(..)T(..)(..)(..)Z")


# --- where a rollback goes --------------------------------------------------------------------------------------------


def newest(looks: Looks) -> str | None:
    """Return the launch whose containers are there, in any state; the newest where a run that was cut off left two."""
    return max(_there(looks).values(), default=None)


def running(looks: Looks, entries: Sequence[Entry]) -> str | None:
    """Return the launch that runs whole: on every rank of its plan. One that crashed or is half booted does not run.

    ``entries`` know the ranks of a plan; a launch that no journal has is of all ranks.
    """
    alive = _there(looks, "running")
    for launch in sorted(set(alive.values()), reverse=True):
        plan = next((entry["plan"] for entry in entries if entry["launch"] == launch), None)
        ranks = [rank["host"] for rank in plan["ranks"]] if plan else list(looks)
        if all(alive.get(host) == launch for host in ranks):
            return launch
    return None


def there(looks: Looks) -> Entry | None:
    """Return the entry of the newest launch that is there and in the journal, from any rank that has it."""
    return _latest(looks, "journal")


def before(looks: Looks) -> Entry | None:
    """Return the entry of the launch to serve again when the next one fails.

    It is the one that is there. With none there, as after a controller that was killed between stop and start, it is
    the newest proven one; unless the fleet was stopped on purpose since that was proven: then there is none.
    """
    found = there(looks)
    if found:
        return found
    last = _latest(looks, "journal_newest")
    stopped = [look.get("stopped") for look in looks.values() if look]
    return None if last is None or last["launch"] in stopped else last


def _latest(looks: Looks, field: str) -> Entry | None:
    """The newest of the entries that the ranks show under ``field``."""
    found = [look[field] for look in looks.values() if look and look.get(field)]
    return max(found, key=lambda entry: str(entry["launch"]), default=None)


def _there(looks: Looks, *states: str) -> dict[str, str]:
    """The launch of each rank's container, of those in one of ``states`` when any is given."""
    found = {host: look["container"] for host, look in looks.items() if look and look.get("container")}
    return {
        host: container["launch"]
        for host, container in found.items()
        if container["launch"] and (not states or container["state"] in states)
    }


def back_to(
    entries: Sequence[Entry],
    current: str | None,
    options: Mapping[str, Any],
    values: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]],
    accept_rule: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the plan that a rollback launches; without options that of the previous launch.

    ``entries`` are merged, newest first; ``current`` is the launch that runs whole. ``options`` are, each or None:
    ``to``, a launch id, its beginning or an arm; ``feature``, a key; ``campaign``, true for the campaign's start;
    ``tactics``, ``purge``, which alone boots again what runs. ``values`` gives ``plan.build``'s fleet and catalog: what
    is in a journal needs neither, nor ``accept_rule``. Raises LockstepError for what cannot be, with what there is.
    """
    to, feature = options.get("to"), options.get("feature")
    start = _only("campaign", options.get("campaign"), "true", "the start of the running launch's campaign")
    purge = _only("tactics", options.get("tactics"), "purge", "tuned tactics are cleared on all ranks first")
    ways = [
        name for name, given in (("to", to is not None), ("feature", feature is not None), ("campaign", start)) if given
    ]
    if len(ways) > 1:
        raise LockstepError(
            f"{' and '.join(ways)} are different ways back",
            found=" ".join(f"-e {name}=…" for name in ways),
            expected="one of them; tactics=purge goes with each",
            next_step="take the others away",
        )
    if to is not None:
        return dict(find(entries, to)["plan"])
    if not ways and not purge:
        return dict(receipt.previous(entries, current)["plan"])
    now = _current(entries, current)
    if feature is not None:
        return without(now, feature, *values(), accept_rule)
    return campaign_start(now["plan"], *values(), accept_rule) if start else dict(now["plan"])


def find(entries: Sequence[Entry], wanted: str) -> Entry:
    """Return the entry that a person names: by launch id, by the beginning of one, or an arm's newest proven one."""
    exact = [entry for entry in entries if entry["launch"] == wanted]
    begins = [entry for entry in entries if wanted and entry["launch"].startswith(wanted)]
    if exact or len(begins) == 1:
        return (exact or begins)[0]
    if begins:
        raise LockstepError(
            f"several launches begin with {wanted}",
            found=_few([entry["launch"] for entry in begins]),
            expected="the beginning of one",
            next_step="give more of its id",
        )
    of_arm = [entry for entry in receipt.newest_first(entries) if entry["arm"] == wanted]
    proven = [entry for entry in of_arm if entry["ok"]]
    if proven:
        return proven[0]
    launches, names = [entry["launch"] for entry in entries], sorted({entry["arm"] for entry in entries})
    near = switches.nearest(wanted, [*launches, *names])
    raise LockstepError(
        f"no launch {wanted!r} in the journal of any rank" + (f", did you mean {near}?" if near else ""),
        found=f"arms {', '.join(names) or '(none)'}; launches {_few(launches) or '(none)'}",
        expected="a launch id, the beginning of one, or an arm with a proven launch",
        next_step=f"-e to={of_arm[0]['launch']} launches one that was not proven"
        if of_arm
        else "ansible-playbook history.yml shows all; serve.yml -e arm=… launches what was never launched",
    )


def without(
    now: Entry, key: str, fleet: Mapping[str, Any], catalog: Mapping[str, Any], accept_rule: Sequence[str] = ()
) -> dict[str, Any]:
    """Plan what runs with one key back at its value below the arm, and those that depend on it; all else stays.

    Its images stay too, so nothing but these keys differs. Raises PlanRefused for a key that is no change of arm or
    one-off, and when arm or fleet are no longer what they were at the launch.
    """
    before, schema = now["plan"], catalog["switches"]
    if key not in schema:
        raise switches.unknown("key", key, schema)
    catalog = {
        **catalog,
        "images": {**catalog["images"], **before["images"]},
        "engram": {**catalog["engram"], "missing": "fallback" if before["engram"].get("fallback") else "pack"},
    }
    _require_same(now, fleet, catalog)
    changed = plans.moved(before, plans.below_arm(fleet, catalog), schema)
    head = before["ranks"][0]
    if key not in changed:
        raise PlanRefused(
            f"there is nothing to take back of {key} in {now['launch']}",
            rule="nothing-to-take-back",
            found=f"{key}={head['env'][key]} ({head['origin'].get(key)})" if key in head["env"] else f"{key} is unset",
            expected=f"a key that arm or one-off moved: {', '.join(changed) or 'there is none'}",
            next_step="-e feature= one of these, or -e to= another launch",
        )
    changes, unset = plans.put_back(fleet, catalog, before, key)
    planned = plans.build(
        fleet,
        catalog,
        before["arm"],
        changes=changes,
        unset=unset,
        accept_rule=[*(rule["id"] for rule in catalog["rules"] if rule["id"] in before["accepted"]), *accept_rule],
    )
    return {**planned, "images": before["images"]}


def campaign_start(
    before: Plan, fleet: Mapping[str, Any], catalog: Mapping[str, Any], accept_rule: Sequence[str] = ()
) -> dict[str, Any]:
    """Plan the arm that a launch's campaign began with; for one that is history, the arm that stands for it."""
    root = before["lineage"][0]
    arm = arms.get(catalog["arms"], root)
    stands = root if arm.get("launchable", True) else arm.get("instead") or root
    return plans.build(fleet, catalog, stands, accept_rule=accept_rule)


def _only(name: str, value: object, accepted: str, meaning: str) -> bool:
    """Read an option that takes one value; false and nothing are no."""
    if value is None or str(value).lower() in (accepted, "false"):
        return str(value).lower() == accepted
    raise LockstepError(
        f"{name} takes one value",
        found=f"-e {name}={value}",
        expected=f"{accepted}: {meaning}",
        next_step=f"-e {name}={accepted}, or take it away",
    )


def _current(entries: Sequence[Entry], current: str | None) -> Entry:
    """The entry of the launch that runs; LockstepError when nothing runs or no rank has it."""
    for entry in entries:
        if entry["launch"] == current:
            return entry
    raise LockstepError(
        f"no rank has the journal entry of {current}"
        if current
        else "nothing runs on all its ranks that could be launched differently",
        found=f"{len(entries)} journal entries, running: {current or 'nothing'}",
        expected="a proven launch that runs",
        next_step="ansible-playbook rollback.yml goes to the newest proven launch, -e to=… to any",
    )


def _require_same(now: Entry, fleet: Mapping[str, Any], catalog: Mapping[str, Any]) -> None:
    """Refuse unless arm and one-off still mean for this fleet what they meant at the launch."""
    before = now["plan"]
    try:
        again = plans.build(
            fleet,
            catalog,
            before["arm"],
            changes=before["set"],
            unset=before["unset"],
            accept_rule=[rule["id"] for rule in catalog["rules"]],  # they judge what will run, not what runs
        )
        found = "; ".join(differences(before, {**again, "images": before["images"]}))
    except PlanRefused as error:
        found = error.message + (" (its own file: -e arms_file=…)" if error.rule == "unknown-arm" else "")
    if found:
        raise PlanRefused(
            f"arm {before['arm']} or the fleet is defined otherwise than when {now['launch']} was launched",
            rule="definition-changed",
            found=found,
            expected="what it was, so that only the keys taken back differ",
            next_step=f"ansible-playbook serve.yml -e arm={before['arm']} launches what it is now, "
            "rollback.yml -e to=… any launch as it was",
        )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# --- how two launches differ ------------------------------------------------------------------------------------------


def differences(then: Plan, now: Plan) -> list[str]:
    """Say how a plan differs from the one that runs, one thing a line: ``EP_SIZE 3 (now 1)``.

    The tactics fingerprint follows from the rest and is left out.
    """
    lines = []
    for what, ours, theirs in (
        ("base image", *(_short(plan["images"]["base"]["digest"]) for plan in (then, now))),
        ("overlay", *(_overlay(plan) for plan in (then, now))),
        ("engine", then["engine"], now["engine"]),
        ("ranks", *(", ".join(rank["host"] for rank in plan["ranks"]) for plan in (then, now))),
    ):
        if ours != theirs:
            lines.append(f"{what} {ours} (now {theirs})")
    after = {rank["host"]: rank for rank in now["ranks"]}
    pairs = [(rank, after[rank["host"]]) for rank in then["ranks"] if rank["host"] in after]
    environment = _environment(pairs)
    lines += environment
    # Arguments follow from the environment; alone they say that the engine's profile is another.
    lines += [
        f"{'arguments' if name == 'argv' else name} of {one['host']} {_unlike(one[name], other[name])}"
        for name in _OF_A_RANK
        for one, other in pairs
        if not _same(one[name], other[name]) and not (name == "argv" and environment)
    ]
    lines += [f"{name} not as now" for name in ("container", "engram") if then[name] != now[name]]
    return lines


def _environment(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """Each key that differs on any rank, once where all ranks say the same."""
    said: dict[str, dict[str, list[str]]] = {}
    for one, other in pairs:
        for key in sorted({*one["env"], *other["env"]} - {plans.TACTICS_KEY}):
            values = [env.get(key, "unset") for env in (one["env"], other["env"])]
            if values[0] != values[1]:
                said.setdefault(key, {}).setdefault(f"{key} {values[0]} (now {values[1]})", []).append(one["host"])
    return [
        text if len(hosts) == len(pairs) else f"{text} on {', '.join(hosts)}"
        for key in sorted(said)
        for text, hosts in said[key].items()
    ]


def _same(ours: object, theirs: object) -> bool:
    """Compare values of two plans; a hash that one of them does not know yet, unsealed, is no difference."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        known = {
            name for name in {*ours, *theirs} if name != "sha256" or None not in (ours.get(name), theirs.get(name))
        }
        return all(_same(ours.get(name), theirs.get(name)) for name in known)
    return ours == theirs


def _unlike(ours: object, theirs: object) -> str:
    """Name the members by which two lists differ; for what is no list, that it does."""
    if not isinstance(ours, list) or not isinstance(theirs, list):
        return "not as now"
    return (
        " ".join(
            [*(f"-{item}" for item in theirs if item not in ours), *(f"+{item}" for item in ours if item not in theirs)]
        )
        or "in another order"
    )


def _overlay(plan: Plan) -> str:
    overlay = plan["images"]["overlay"]
    return _short(overlay.get("id") or overlay.get("context_sha256"))


def _short(identifier: str | None) -> str:
    return str(identifier).removeprefix("sha256:")[:12]


# --- the table --------------------------------------------------------------------------------------------------------


def rows(
    entries: Sequence[Entry],
    looks: Looks,
    known_arms: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return one row a launch, newest first.

    ``{"launch", "arm", "recorded", "by", "pool_tokens", "ok", "verdict", "hosts", "runs_on", "differs"}``: ``verdict``
    is the arm's in the campaign, ``hosts`` have the entry, on ``runs_on`` it runs, ``differs`` says how it differs from
    the launch that runs (None when nothing runs).
    """
    alive = _there(looks, "running")
    current = max(alive.values(), default=None)
    now = next((entry["plan"] for entry in entries if entry["launch"] == current), None)
    return [
        {
            **{field: entry.get(field) for field in ("launch", "arm", "recorded", "by", "pool_tokens", "ok", "hosts")},
            "verdict": known_arms.get(entry["plan"]["arm"], {}).get("verdict"),
            "runs_on": [host for host, launch in alive.items() if launch == entry["launch"]],
            "differs": None if now is None else differences(entry["plan"], now),
        }
        for entry in entries
    ]


def unrecorded(entries: Sequence[Entry], looks: Looks) -> list[str]:
    """Name the containers whose launch no journal has, a line each: it was never proven."""
    known = {entry["launch"] for entry in entries}
    there = {host: look["container"] for host, look in looks.items() if look and look.get("container")}
    return [
        f"{host}: {container['launch']} is {container['state']}, and no journal has it: it was not proven"
        for host, container in there.items()
        if container["launch"] not in known
    ]


def render(table: Sequence[Mapping[str, Any]], hosts: Sequence[str], *, whole: bool = False) -> list[str]:
    """Return the rows as lines for people: ``*`` marks what runs; ``whole`` shows every difference, one a line."""
    cells = [["", "launch", "when (UTC)", "by", "pool tokens", "proven", "verdict", "entry on"]]
    for row in table:
        pool = row["pool_tokens"]
        cells.append(
            [
                "*" if row["runs_on"] else "",
                row["launch"],
                _UTC.sub(r"\1-\2-\3 \4:\5:\6", receipt.parse_launch(row["launch"])["utc"]),
                row["by"] or "-",
                f"{pool:,}" if pool else "-",
                "yes" if row["ok"] else "no",
                row["verdict"] or "-",
                _on(row["hosts"], hosts),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    head, *lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    found = [head]
    for row, line in zip(table, lines, strict=True):
        found.append(line)
        if row["runs_on"]:
            found.append(f"     runs now on {_on(row['runs_on'], hosts)}")
        elif row["differs"] is not None:
            found += _shown(row["differs"], whole=whole)
    return found


def _shown(differs: Sequence[str], *, whole: bool) -> list[str]:
    if not differs:
        return ["     the same plan as now"]
    if whole:
        return [f"     {line}" for line in differs]
    return [
        f"     {'; '.join(differs[:_SHOWN])}" + (f"; {len(differs) - _SHOWN} more" if len(differs) > _SHOWN else "")
    ]


def _on(some: Sequence[str], hosts: Sequence[str]) -> str:
    return "all" if set(some) >= set(hosts) else " ".join(some)
