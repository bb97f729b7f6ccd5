"""Receipt: what was proven at a launch, and the journal of launches.

A receipt is JSON, with the keys that ``build`` gives it. ``ok`` is never claimed, it is worked out: ``check`` lists
everything that is missing or wrong, and a launch with a list that is not empty is not a success. Silence proves
nothing: a rank that says nothing about a layer is as bad as one that says ``packed=False``.

The journal holds one entry a launch, the same on every rank, with the resolved plan, so that going back needs neither
the arm's name nor the repository of that day.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import envfile, files, images
from . import plan as plans
from .errors import LockstepError

FORMAT = 1
TACTICS_STATES = ("reused", "tuned", "none")
JOURNAL = "journal"
STOPPED = "stopped.json"

_LAUNCH = re.compile(r"(?P<utc>\d{8}T\d{6}Z)-(?P<name>[A-Za-z0-9._=+-]+)-(?P<hash>[0-9a-f]{6})", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")

Problem = dict[str, Any]


def parse_launch(launch: str) -> dict[str, str]:
    """Split a launch id ``<YYYYmmddTHHMMSSZ>-<name>-<hash6>`` into ``{"utc", "name", "hash"}``."""
    match = _LAUNCH.fullmatch(launch)
    if match is None:
        raise LockstepError(
            "not a launch id",
            found=repr(launch),
            expected="<YYYYmmddTHHMMSSZ>-<arm>-<6 hex digits>",
            next_step="take one from results/ or from the journal on a rank",
        )
    return match.groupdict()


# --- building a receipt -----------------------------------------------------------------------------------------------


def build(
    plan: Mapping[str, Any],
    looks: Mapping[str, Mapping[str, Any]],
    *,
    launch: str,
    agree: Mapping[str, Mapping[str, Any]],
    generation: Mapping[str, Any] | None,
    reuse: bool | None = None,
) -> dict[str, Any]:
    """Put together what one launch's looks prove.

    ``plan`` is sealed, ``looks`` are ``{host: look of rank_facts}``, ``agree`` the table of room ``agree``,
    ``generation`` what the API answered (``{"text", "prompt_tokens", "completion_tokens", "seconds"}`` or ``None``),
    ``reuse`` whether the boot was to reuse its tactics (``None``: not known, as when proving a running fleet).
    Returns the receipt, with ``ok`` and the list ``why`` of what keeps it from being so.
    """
    ranks = [_rank(rank, looks.get(rank["host"]) or {}) for rank in plan["ranks"]]
    receipt = {
        "launch": launch,
        "arm": plan["name"],
        "plan_sha256": plan["plan_sha256"],
        "tactics_fingerprint": plan["tactics_fingerprint"],
        "accepted": _accepted(plan),
        "warnings": [dict(rule) for rule in plan.get("warnings") or []],
        "ranks": ranks,
        "adapters": _adapters(looks),
        "args": {**plan["keys"], **plan["args"]},
        "agree": {name: {"ok": entry["ok"], "seen": dict(entry["seen"])} for name, entry in agree.items()},
        "faults": _faults(plan, looks),
        "generation": dict(generation) if generation else None,
    }
    problems = check(receipt, plan, reuse=reuse)
    return {"ok": not problems, **receipt, "why": [describe(problem) for problem in problems]}


def _accepted(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rules that refused this plan and were accepted, with their reasons; a plan of an older journal has the ids."""
    whole = plan.get("accepted_rules")
    return [{"id": name} for name in plan.get("accepted") or []] if whole is None else [dict(rule) for rule in whole]


def _rank(rank: Mapping[str, Any], look: Mapping[str, Any]) -> dict[str, Any]:
    engine = look.get("engine") or {}
    container = look.get("container") or {}
    image = (look.get("images") or {}).get("overlay") or {}
    there = (look.get("shards") or {}).get("files") or {}
    tactics = engine.get("tactics") or {}
    env = container.get("env") or {}
    return {
        "host": rank["host"],
        "rank": rank["rank"],
        "image": {
            "id": container.get("image_id"),
            "store": image.get("store"),
            "repo_digest": images.repo_digest(image),
            # Those of the tagged image say nothing when the container runs another one.
            "layers_sha256": image.get("layers_sha256") if image.get("id") == container.get("image_id") else None,
            "files": dict(container.get("files") or {}),
        },
        "packed": {
            str(entry["layer"]): bool(entry["packed"])
            for entry in engine.get("packed") or []
            if entry["rank"] == rank["rank"]
        },
        "shards": {
            str(layer): {key: shard.get(key) for key in ("file", "bytes", "split", "rows", "sha256")}
            for layer, shard in there.items()
        },
        # The planned keys as the container really has them; the image's own (PATH, …) are part of its identity.
        "env_sha256": envfile.sha256({key: env[key] for key in rank["env"] if key in env}) if env else None,
        "tactics": {"state": tactics.get("state"), "files": tactics.get("files")},
        "pool_tokens": engine.get("pool_tokens"),
    }


def _adapters(looks: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """One state a switch; where the ranks differ, the state says so and which rank says what."""
    said: dict[str, dict[str, str]] = {}
    for host, look in looks.items():
        for switch, state in ((look.get("engine") or {}).get("adapters") or {}).items():
            said.setdefault(switch, {})[host] = state
    merged = {}
    for switch, by_host in sorted(said.items()):
        states = {by_host.get(host) for host in looks}
        first = next(iter(by_host.values()))
        apart = "; ".join(f"{host}: {by_host.get(host, 'says nothing')}" for host in looks)
        merged[switch] = first if len(states) == 1 else f"differs: {apart}"
    return merged


def _faults(plan: Mapping[str, Any], looks: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"host": rank["host"], **fault}
        for rank in plan["ranks"]
        for fault in ((looks.get(rank["host"]) or {}).get("engine") or {}).get("faults") or []
        if not plans.foreseen(plan, rank, fault)
    ]


# --- checking one -----------------------------------------------------------------------------------------------------


def check(receipt: Mapping[str, Any], plan: Mapping[str, Any], *, reuse: bool | None = None) -> list[Problem]:
    """List what a receipt lacks or has wrong against its plan; an empty list is a success.

    A problem is ``{"what", "host", "rank", "found", "expected"}``; host and rank are ``None`` for the whole fleet.
    """
    problems = [
        _problem(f"{key} is not the plan's", found=receipt.get(key), expected=plan.get(key))
        for key in ("plan_sha256", "tactics_fingerprint")
        if not receipt.get(key) or receipt.get(key) != plan.get(key)
    ]
    if parse_launch(receipt["launch"])["hash"] != str(plan.get("plan_sha256"))[:6]:
        problems.append(_problem("the launch is of another plan", receipt["launch"], str(plan.get("plan_sha256"))[:6]))
    said: dict[int, list[Mapping[str, Any]]] = {}
    for entry in receipt["ranks"]:
        said.setdefault(entry["rank"], []).append(entry)
    for rank in plan["ranks"]:
        entries = said.pop(rank["rank"], [])
        if len(entries) != 1 or entries[0]["host"] != rank["host"]:
            hosts = [entry["host"] for entry in entries]
            problems.append(_problem("not exactly one entry", hosts, [rank["host"]], rank))
        else:
            problems.extend(_check_rank(entries[0], rank, plan))
    problems += [_problem("a rank that the plan does not have", rank, "nothing") for rank in said]
    problems.extend(_check_alike(receipt["ranks"]))
    problems.extend(_check_tactics(receipt["ranks"], reuse=reuse))
    problems.extend(_check_fleet(receipt, plan))
    return problems


def describe(problem: Problem) -> str:
    """Say a problem in one line."""
    where = f"{problem['host']} (rank {problem['rank']}): " if problem["host"] is not None else ""
    return f"{where}{problem['what']}: found {problem['found']}, expected {problem['expected']}"


def _problem(what: str, found: object, expected: object, rank: Mapping[str, Any] | None = None) -> Problem:
    place = rank or {"host": None, "rank": None}
    return {"what": what, "host": place["host"], "rank": place["rank"], "found": found, "expected": expected}


def _check_rank(entry: Mapping[str, Any], rank: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[Problem]:
    for layer in map(str, plan["engram"]["layers"]):
        packed = entry["packed"].get(layer)
        if packed is False and plans.reads_checkpoint(plan, rank, layer):
            continue  # as allowed; the receipt says so
        if packed is not True:
            yield _problem(f"packed, layer {layer}", "no evidence" if packed is None else "False", "True", rank)
        yield from _check_shard(entry["shards"].get(layer) or {}, rank, layer)
    if entry["env_sha256"] != rank["env_sha256"]:
        yield _problem("environment of the container", entry["env_sha256"], rank["env_sha256"], rank)
    for name in ("id", "layers_sha256", "files"):
        if not entry["image"].get(name):
            yield _problem(f"image {name}", "nothing", "a value", rank)
    absent = sorted(path for path, digest in entry["image"]["files"].items() if not digest)
    if absent:
        yield _problem("files in the image", f"no {', '.join(absent)}", "all of them", rank)
    wanted = plan["images"]["overlay"].get("id")
    if wanted and entry["image"]["store"] == "classic" and entry["image"]["id"] != wanted:
        yield _problem("image id", entry["image"]["id"], wanted, rank)


def _check_shard(shard: Mapping[str, Any], rank: Mapping[str, Any], layer: str) -> Iterator[Problem]:
    wanted = rank["shards"][layer]
    for key in ("file", "bytes", "split", "rows", "sha256"):
        found, expected = shard.get(key), wanted.get(key)
        if key == "sha256" and expected is None:  # an unsealed plan knows none, but there has to be one
            if not _SHA256.fullmatch(str(found)):
                yield _problem(f"shard sha256, layer {layer}", found, "64 hex digits", rank)
        elif found != expected:
            yield _problem(f"shard {key}, layer {layer}", found, expected, rank)


def _check_alike(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    """Compare every rank with the first: the same image to the byte, the same pool."""
    if not ranks:
        return
    first = ranks[0]
    for entry in ranks[1:]:
        image, other = entry["image"], first["image"]
        if image["store"] == other["store"] and image["id"] != other["id"]:
            yield _problem(f"image id, not {first['host']}'s", image["id"], other["id"], entry)
        if image["layers_sha256"] != other["layers_sha256"]:
            yield _problem(f"layers, not {first['host']}'s", image["layers_sha256"], other["layers_sha256"], entry)
        differ = sorted(
            path for path in {*image["files"], *other["files"]} if image["files"].get(path) != other["files"].get(path)
        )
        if differ:
            yield _problem("files in the image", f"{', '.join(differ)} differ", f"as on {first['host']}", entry)
    # Only the head prints max_total_num_tokens; a rank that says nothing of its pool has none to differ.
    head = next((entry for entry in ranks if entry["rank"] == 0), first)
    pool = head["pool_tokens"]
    if not pool:
        yield _problem("pool_tokens", pool, "a size", head)
    for entry in ranks:
        if pool and entry["pool_tokens"] not in (None, pool):
            yield _problem("pool_tokens", entry["pool_tokens"], pool, entry)


def _check_tactics(ranks: Sequence[Mapping[str, Any]], *, reuse: bool | None) -> Iterator[Problem]:
    states = {entry["host"]: entry["tactics"]["state"] for entry in ranks}
    for entry in ranks:
        state = entry["tactics"]["state"]
        if state not in TACTICS_STATES:
            yield _problem("tactics", state, " or ".join(TACTICS_STATES), entry)
        elif reuse is True and state != "reused":
            yield _problem("tactics", state, "reused: matching files lay there on every rank", entry)
        elif reuse is False and state == "reused":
            yield _problem("tactics", state, "tuned or none: no matching file was left to reuse", entry)
    if len(set(states.values())) > 1:
        yield _problem("tactics", states, "one state on every rank")


def _check_fleet(receipt: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[Problem]:
    for name, entry in receipt["agree"].items():
        if not entry["ok"]:
            yield _problem(f"agree: {name}", entry["seen"], "agreement")
    if not receipt["agree"]:
        yield _problem("agree", "no entries", "the table over all ranks")
    for fault in receipt["faults"]:
        yield _problem(f"fault {fault['fault']}", fault["text"], "no fault line", fault)
    for switch, state in receipt["adapters"].items():
        if state.startswith("differs") or (plan.get("accelerators") and state.startswith("missing")):
            yield _problem(f"adapter {switch}", state, "armed, or not applicable, alike on every rank")
    generation = receipt["generation"] or {}
    if not generation.get("text") or not generation.get("completion_tokens"):
        yield _problem("generation", generation or "none", "text and completion tokens from the API")


def render(receipt: Mapping[str, Any]) -> str:
    """Return a receipt as a table for people: what was proven on each rank, and what keeps it from being ok."""
    rows = [["host", "rank", "image", "packed", "tactics", "env", "pool tokens"]]
    for entry in receipt["ranks"]:
        tactics, pool = entry["tactics"], entry["pool_tokens"]
        rows.append(
            [
                str(entry["host"]),
                str(entry["rank"]),
                str(entry["image"]["id"]).removeprefix("sha256:")[:12],
                " ".join(f"{layer}={packed}" for layer, packed in sorted(entry["packed"].items(), key=_layer)) or "-",
                f"{tactics['state']} ({tactics['files']})",
                str(entry["env_sha256"])[:12],
                "-" if pool is None else f"{pool:,}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{receipt['launch']}: {'proven' if receipt['ok'] else 'not proven'}"]
    lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    states = Counter(state.partition(":")[0] for state in receipt["adapters"].values())
    lines.append("  adapters: " + (", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"))
    lines += [
        f"  accepted against rule {rule['id']}: {rule.get('reason', 'see group_vars/all/rules.yml')}"
        for rule in receipt.get("accepted") or []
    ]
    lines += [f"  {why}" for why in receipt["why"]]
    return "\n".join(lines)


def _layer(packed: tuple[str, bool]) -> int:
    return int(packed[0])


# --- the journal ------------------------------------------------------------------------------------------------------


def entry(
    plan: Mapping[str, Any], receipt: Mapping[str, Any], *, recorded: str, by: str | None = None
) -> dict[str, Any]:
    """Return the journal entry of a launch.

    ``recorded`` is the UTC time of writing, ISO 8601, ``by`` who launched it, ``user@controller``. Older entries have
    neither ``by`` nor ``pool_tokens``.
    """
    return {
        "format": FORMAT,
        "launch": receipt["launch"],
        "arm": receipt["arm"],
        "ok": receipt["ok"],
        "why": list(receipt["why"]),
        "recorded": recorded,
        "by": by,
        "pool_tokens": next((rank["pool_tokens"] for rank in receipt.get("ranks", []) if rank["rank"] == 0), None),
        "plan_sha256": plan["plan_sha256"],
        "tactics_fingerprint": plan["tactics_fingerprint"],
        "plan": dict(plan),
    }


def parse_entry(value: object, source: str = "journal entry") -> dict[str, Any]:
    """Check one entry read from a journal; raises LockstepError naming ``source`` when it cannot be launched again."""
    fields = {"launch": str, "arm": str, "ok": bool, "plan_sha256": str, "tactics_fingerprint": str, "plan": dict}
    if not isinstance(value, dict):
        raise LockstepError(f"{source} is not an entry", found=type(value).__name__, expected="a JSON object")
    if value.get("format") != FORMAT:
        raise LockstepError(
            f"{source} has another format",
            found=value.get("format"),
            expected=FORMAT,
            next_step="read it with the version of Lockstep that wrote it",
        )
    wrong = sorted(name for name, kind in fields.items() if not isinstance(value.get(name), kind))
    if wrong:
        raise LockstepError(f"{source} is not whole", found=f"no usable {', '.join(wrong)}", expected="a whole entry")
    try:
        plans.check(value["plan"])
    except LockstepError as error:
        raise LockstepError(
            f"{source}: {error.message}",
            found=error.found,
            expected=error.expected,
            next_step="move the file aside (other ranks have the entry too), or launch an arm",
        ) from error
    except (AttributeError, KeyError, TypeError) as error:  # damaged where the hash is made of it
        raise LockstepError(
            f"{source} is not whole", found=f"{type(error).__name__}: {error}", expected="a whole plan"
        ) from error
    said, of_plan = value["plan_sha256"], value["plan"]["plan_sha256"]
    if said != of_plan or said[:6] != parse_launch(value["launch"])["hash"]:
        raise LockstepError(
            f"{source} is of another plan than its name",
            found=f"plan {of_plan}" + ("" if said == of_plan else f", and {said} beside it"),
            expected=value["launch"],
            next_step="move the file aside; other ranks have the entry too",
        )
    return value


def entry_path(state_dir: str, launch: str) -> str:
    """Return where a rank keeps the entry of a launch."""
    parse_launch(launch)  # the name becomes a path
    return f"{state_dir}/{JOURNAL}/{launch}.json"


def read_entry(state_dir: str, launch: str) -> dict[str, Any]:
    """Read one entry of a rank's journal."""
    path = entry_path(state_dir, launch)
    return parse_entry(files.read_json(path), path)


def launches(state_dir: str) -> list[str]:
    """List the launches in a rank's journal, newest first; a missing one is empty, other files are not looked at."""
    names = [
        path.removesuffix(".json") for path, _, _ in files.tree(f"{state_dir}/{JOURNAL}") if path.endswith(".json")
    ]
    return sorted((name for name in names if _LAUNCH.fullmatch(name)), reverse=True)


def newest_proven(state_dir: str) -> dict[str, Any] | None:
    """Read the newest proven entry of a rank's journal; one that cannot be read is stepped over."""
    for launch in launches(state_dir):
        with contextlib.suppress(LockstepError):
            item = read_entry(state_dir, launch)
            if item["ok"]:
                return item
    return None


def stopped_path(state_dir: str) -> str:
    """Return where a rank keeps which launch was the newest proven one when it was stopped on purpose."""
    return f"{state_dir}/{STOPPED}"


def stopped(state_dir: str) -> str | None:
    """Return the launch that was the newest proven one when the rank was last stopped on purpose.

    Nobody has to take the mark away: once a newer launch is proven it says nothing any more.
    """
    try:
        said = files.read_json(stopped_path(state_dir))
    except LockstepError:
        return None
    launch = said.get("launch") if isinstance(said, dict) else None
    return launch if isinstance(launch, str) else None


def newest_first(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sort entries by the time in their launch ids."""
    return [dict(item) for item in sorted(entries, key=lambda item: str(item["launch"]), reverse=True)]


def merge(journals: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Join the journals of all hosts, newest first; each entry gets ``hosts``, those that have it.

    One rank's copy is enough to go back with, but two ranks that tell one launch differently are refused.
    """
    known: dict[str, dict[str, Any]] = {}
    for host, entries in journals.items():
        for item in entries:
            seen = known.setdefault(item["launch"], {**item, "hosts": []})
            if seen["plan_sha256"] != item["plan_sha256"]:
                raise LockstepError(
                    f"the journals disagree about {item['launch']}",
                    host=host,
                    found=f"plan {item['plan_sha256']}",
                    expected=f"plan {seen['plan_sha256']} as on {seen['hosts'][0]}",
                    next_step="move the wrong file in the journal aside",
                )
            # Whoever recorded it again on a rank that lacked it did not launch it.
            if str(item.get("recorded")) < str(seen.get("recorded")):
                seen.update(item)
            seen["hosts"].append(host)
    return newest_first(known.values())


def previous(entries: Sequence[Mapping[str, Any]], current: str | None) -> dict[str, Any]:
    """Return the entry a rollback goes to: the newest proven launch before ``current`` that ran another plan.

    ``entries`` are merged, newest first; ``current`` is the launch that runs (``None`` when nothing runs: then the
    newest proven one). A relaunch of the same plan is no way back, so it is stepped over. Raises LockstepError when
    there is nothing to go back to.
    """
    now = next((item for item in entries if item["launch"] == current), None)
    for item in newest_first(entries):
        older = current is None or item["launch"] < current
        if older and item["ok"] and (now is None or item["plan_sha256"] != now["plan_sha256"]):
            return item
    raise LockstepError(
        "there is no earlier launch to go back to",
        found=f"{len(entries)} journal entries, running: {current or 'nothing'}",
        expected="a proven launch of another plan before it",
        next_step="name an arm instead: ansible-playbook serve.yml -e arm=…",
    )
