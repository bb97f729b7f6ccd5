"""Agree: one table over all ranks of what the fleet has against what a plan wants.

Takes a plan (room ``plan``) and one look per host (module ``rank_facts``), returns plain values. The same table is made
three times in a launch: before anything moves (differences are sorted into *refuse*, *converge* and *swap*), after
converging, and at the end, where every entry must hold.

An entry is ``{"ok": bool, "kind": "refuse" | "converge" | "swap", "seen": {host: value}, "bad": {host: {"found",
"expected"}}, "next_step": str}``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from . import images, tactics
from . import plan as plans

Look = Mapping[str, Any]
Looks = Mapping[str, Look]
Plan = Mapping[str, Any]

T = TypeVar("T")

ABSENT = "absent"


@dataclass
class Entry:
    """What was seen of one thing on every rank, and where it is not as wanted."""

    kind: str
    next_step: str
    seen: dict[str, Any] = field(default_factory=dict)
    bad: dict[str, dict[str, Any]] = field(default_factory=dict)

    def see(self, host: str, value: object, expected: object = None, *, ok: bool) -> None:
        """Record ``value`` for ``host``; when it is not ``ok``, what was expected instead."""
        self.seen[host] = value
        if not ok:
            self.bad[host] = {"found": value, "expected": expected}

    def as_dict(self) -> dict[str, Any]:
        """The entry as plain JSON types."""
        return {
            "ok": not self.bad,
            "kind": self.kind,
            "seen": self.seen,
            "bad": self.bad,
            "next_step": self.next_step,
        }


def _rank(plan: Plan, host: str) -> Mapping[str, Any]:
    return next(rank for rank in plan["ranks"] if rank["host"] == host)


def _majority(values: Mapping[str, T]) -> T:
    """The value most ranks have; the first rank's on a draw."""
    counts = Counter(repr(value) for value in values.values())
    best = max(counts.values())
    return next(value for value in values.values() if counts[repr(value)] == best)


def _equal(entry: Entry, values: Mapping[str, Any]) -> None:
    """Every rank must show the value that most ranks show."""
    if not values:
        return
    common = _majority(values)
    for host, value in values.items():
        entry.see(host, value, common, ok=value == common)


def _short(identifier: str | None) -> str:
    return identifier.removeprefix("sha256:")[:12] if identifier else ABSENT


# --- what no convergence can mend: it ends the launch before anything moves ------------------------------------------


def _docker(_plan: Plan, looks: Looks) -> Entry:
    """An engine answers everywhere, over one kind of image store: a launch starts every container by one Id."""
    entry = Entry("refuse", "start the Docker Engine on that rank (systemctl start docker) and run again")
    stores = {host: look["docker"]["store"] for host, look in looks.items() if look["docker"]["ok"]}
    for host, look in looks.items():
        docker = look["docker"]
        if not docker["ok"]:
            entry.see(host, docker["error"], "an answering engine", ok=False)
        elif stores[host] != (common := _majority(stores)):
            entry.see(host, f"{docker['version']}, {stores[host]} image store", f"the {common} image store", ok=False)
            entry.next_step = "give all ranks one image store (features in /etc/docker/daemon.json); see docs/images.md"
        else:
            entry.see(host, docker["version"], ok=True)
    return entry


def _kernel(_plan: Plan, looks: Looks) -> Entry:
    entry = Entry("refuse", "boot the ranks into one kernel, or list 'kernel' in fleet_may_differ")
    _equal(entry, {host: look["kernel"] for host, look in looks.items()})
    return entry


def _clock(_plan: Plan, looks: Looks) -> Entry:
    entry = Entry(
        "refuse", "set the clock of that rank (chronyc makestep); launches and log windows are joined by time"
    )
    for host, look in looks.items():
        skew, limit = look["clock"]["skew_s"], look["clock"]["limit_s"]
        within = abs(skew) <= limit
        # Latency of the look is not skew: within the limit only the verdict is shown, so that equal runs look equal.
        entry.see(host, f"within {limit} s" if within else f"{skew:+.0f} s", f"within {limit} s", ok=within)
    return entry


def _fabric(_plan: Plan, looks: Looks) -> Entry:
    entry = Entry("refuse", "bring the link up or correct fleet_fabric in the inventory")
    for host, look in looks.items():
        missing = look["fabric"]["missing"]
        entry.see(host, f"lacks {', '.join(missing)}" if missing else "all up", "all up", ok=not missing)
    return entry


def _ports(_plan: Plan, looks: Looks) -> Entry:
    entry = Entry("refuse", "stop what listens there, or choose another PORT / DIST_PORT")
    for host, look in looks.items():
        taken = [f"{port} taken by {by}" for port, by in sorted(look["ports"].items()) if by not in (None, "engine")]
        entry.see(host, ", ".join(taken) or "free or ours", "free or ours", ok=not taken)
    return entry


def _checkpoint(_plan: Plan, looks: Looks) -> Entry:
    entry = Entry("refuse", "restore the checkpoint there (engram_checkpoint); every rank packs and checks from it")
    good = {host: look["checkpoint"] for host, look in looks.items() if not look["checkpoint"]["error"]}
    common = _majority({host: item["identity"] for host, item in good.items()}) if good else "a checkpoint"
    for host, look in looks.items():
        item = look["checkpoint"]
        value = item["error"] or item["identity"]
        entry.see(host, value, common, ok=not item["error"] and value == common)
    if entry.bad and all(looks[host]["checkpoint"].get("mountable") for host in entry.bad):
        entry.kind, entry.next_step = "converge", "ansible-playbook serve.yml mounts the head's export"
    return entry


def _journal(_plan: Plan, looks: Looks) -> Entry:
    """A rank that is looked at without a plan needs the entry of what it runs: it says what there is to look at.

    With a plan it may lack or be damaged: the rank counts as unrecorded, and the launch is recorded there again.
    """
    entry = Entry("refuse", "ansible-playbook serve.yml, which records there again what runs")
    for host, look in looks.items():
        running = look["container"]
        ok = not running or _KNOWN in look
        lacks = look.get("journal_damaged") or (running and f"no entry of {running['launch']}")
        entry.see(host, "known" if ok else lacks, "the running launch's entry", ok=ok)
    return entry


# --- what converging mends ------------------------------------------------------------------------------------------


def _image(plan: Plan, looks: Looks, what: str) -> Entry:
    """The pinned base, or the overlay that the head built from this tree and every worker fetched."""
    entry = Entry("converge", "ansible-playbook converge_images.yml")
    wanted, held = plan["images"], {host: look["images"] for host, look in looks.items()}
    head = next(rank["host"] for rank in plan["ranks"] if rank["role"] == "head")
    if head not in held:
        return entry  # the head's own row says why; without it nothing can be compared
    work = (
        images.base_work(wanted["base"], held, head)
        if what == "base"
        else images.overlay_work(wanted["base"], wanted["overlay"], held, head)
    )
    sealed = wanted["overlay"]["id"] if what == "overlay" else None
    for host, todo in work.items():
        have = held[host][what]
        ok = todo["action"] == "ok" and (not sealed or have["id"] == sealed)
        if todo["action"] == "refuse":
            entry.kind = "refuse"
            entry.next_step = "pin an image for this platform, or remove the damaged image on the rank"
        elif sealed and todo["action"] == "build":
            entry.next_step = (
                "no rank holds that launch's image, and one that is built again may have another Id: then launch the "
                "arm anew, ansible-playbook serve.yml -e arm=…"
            )
        entry.see(host, _short(have["id"]), _short(sealed) if sealed else todo["why"], ok=ok)
    return entry


def _directories(_plan: Plan, looks: Looks) -> Entry:
    entry = Entry("converge", "ansible-playbook serve.yml makes them")
    for host, look in looks.items():
        missing = look["directories"]["missing"]
        entry.see(host, f"lacks {', '.join(missing)}" if missing else "there", "there", ok=not missing)
    return entry


def _base_image(plan: Plan, looks: Looks) -> Entry:
    return _image(plan, looks, "base")


def _overlay_image(plan: Plan, looks: Looks) -> Entry:
    return _image(plan, looks, "overlay")


def _adapters(plan: Plan, looks: Looks) -> Entry:
    """Whether the overlay carries what the plan switches on; without GPUs none of it could be used, so it may lack."""
    entry = Entry("refuse", "switch it off, or launch an overlay that carries the adapter")
    for host, look in looks.items():
        overlay = look["images"]["overlay"]
        if overlay["labels"].get("lockstep.context_sha256") != plan["images"]["overlay"]["context_sha256"]:
            continue  # judged once the one to launch is there
        carried = overlay["labels"].get("lockstep.adapters", "").split(",")
        lacks = sorted(switch for switch, adapter in plan["adapters"].items() if adapter not in carried)
        value = f"lacks {', '.join(lacks)}" if lacks else "carries all"
        entry.see(host, value, "an adapter for every switch that is on", ok=not lacks or not plan["accelerators"])
    return entry


def _shards(plan: Plan, looks: Looks) -> Entry:
    """Every rank holds its own shard of every layer, of this split and this size of the world."""
    entry = Entry("converge", "ansible-playbook pack_engram.yml")
    for host, look in looks.items():
        wrong, absent = [], []
        for layer, item in sorted(look["shards"]["files"].items(), key=lambda pair: int(pair[0])):
            if item["state"] == "missing" and plans.reads_checkpoint(plan, _rank(plan, host), layer):
                absent.append(f"layer {layer} from the checkpoint")
            elif item["state"] == "wrong":
                wrong.append(f"layer {layer} {item['fault']}: {item['why']}")
            elif item["state"] != "ok":
                wrong.append(f"layer {layer} {item['why']}")
            elif (sealed := _rank(plan, host)["shards"][layer]["sha256"]) not in (None, item["sha256"]):
                wrong.append(
                    f"layer {layer} has other bytes: sha256 {_short(item['sha256'])}, launched {_short(sealed)}"
                )
                # Packing finds nothing to do, and sealing what lies there would be another launch.
                entry.kind = "refuse"
                entry.next_step = "pack_engram.yml -e force=true packs it anew; for today's checkpoint launch the arm"
        value = "; ".join(wrong + absent) or "packed"
        entry.see(host, value, f"{plan['engram']['split']} shards", ok=not wrong)
    return entry


def _judged(plan: Plan, look: Look) -> list[Mapping[str, Any]]:
    """Leave out what the running launch of this plan tuned itself: without the keep adapter no sidecar says so."""
    have = look["container"]
    if not have or not plan.get("plan_sha256") or have["plan_sha256"] != plan["plan_sha256"]:
        return list(look["tactics"])
    started_ns = datetime.fromisoformat(have["started_at"]).timestamp() * 1e9
    return [item for item in look["tactics"] if item["sidecar"] or item["mtime_ns"] < started_ns]


def _tactics(plan: Plan, looks: Looks) -> Entry:
    """All ranks hold the same tactics of this launch, or none holds any: a mixture desynchronises the ranks."""
    entry = Entry("converge", "ansible-playbook serve.yml moves stale ones aside; -e purge=true clears all")
    judged = {host: _judged(plan, look) for host, look in looks.items()}
    verdict = tactics.verdict(judged)
    for host in looks:
        kept = verdict["seen"][host]
        stale = [f"{item['key']}: {item['why']}" for item in judged[host] if not item["keep"]]
        if not verdict["match"]:
            stale += [f"{key}: not on every rank" for key in kept]
        value = f"matching {', '.join(kept)}" if kept else "none"
        entry.see(host, "; ".join(stale) or value, "the same matching files on every rank, or none", ok=not stale)
    return entry


# --- what only a new launch mends -----------------------------------------------------------------------------------

SWAP = "ansible-playbook serve.yml brings the ranks back to one launch"


def _container(plan: Plan, looks: Looks) -> Entry:
    entry = Entry("swap", SWAP)
    want = plan.get("plan_sha256")
    launches = {host: look["container"]["launch"] for host, look in looks.items() if look["container"]}
    common = _majority(launches) if launches else None
    for host, look in looks.items():
        have = look["container"]
        if not have:
            entry.see(host, ABSENT, "running", ok=False)
            continue
        ok = have["state"] == "running" and have["launch"] == common and (not want or have["plan_sha256"] == want)
        value = f"{have['state']} {have['launch']}"
        if want and have["plan_sha256"] != want:
            value += f" (plan {str(have['plan_sha256'])[:6]})"
        entry.see(host, value, f"running {common}" + (f" (plan {want[:6]})" if want else ""), ok=ok)
    return entry


def _running_image(plan: Plan, looks: Looks) -> Entry:
    """The files that the running container sees are those of its image, and the same on every rank."""
    entry = Entry("swap", SWAP)
    want = plan["images"]["overlay"]["id"]
    running = {host: look["container"] for host, look in looks.items() if look["container"]}
    common = _majority({host: item["files"] for host, item in running.items()}) if running else {}
    for host, look in looks.items():
        have = look["container"]
        if not have:
            entry.see(host, ABSENT, _short(want), ok=False)
            continue
        differing = sorted(path for path in {*have["files"], *common} if have["files"].get(path) != common.get(path))
        value = _short(have["image_id"]) + (f", differs in {', '.join(differing[:3])}" if differing else "")
        ok = not differing and (not want or have["image_id"] == want)
        entry.see(host, value, _short(want or have["image_id"]), ok=ok)
    return entry


def _container_env(plan: Plan, looks: Looks) -> Entry:
    entry = Entry("swap", SWAP)
    for host, look in looks.items():
        have = look["container"]
        want = _rank(plan, host)["env"]
        if not have:
            entry.see(host, ABSENT, f"{len(want)} keys as planned", ok=False)
            continue
        keys = sorted(key for key in want if have["env"].get(key) != want[key])
        extra = sorted(key for key in have["env"] if key not in want and key in plan["keys"])
        value = ", ".join(
            [f"{key}={have['env'].get(key, '(unset)')}" for key in keys] + [f"{key} not planned" for key in extra]
        )
        expected = ", ".join([f"{key}={want[key]}" for key in keys] + [f"no {key}" for key in extra])
        entry.see(host, value or "as planned", expected or "as planned", ok=not value)
    return entry


def _packed(plan: Plan, looks: Looks) -> Entry:
    """Every rank's own log says packed=True for every layer, with the rows that the plan gives it."""
    entry = Entry("swap", "read the rank's boot log; pack_engram.yml mends the shard, serve.yml boots again")
    for host, look in looks.items():
        rank = _rank(plan, host)
        said = {
            item["layer"]: item for item in (look["engine"] or {}).get("packed", []) if item["rank"] == rank["rank"]
        }
        missing: list[str] = []
        absent: list[str] = []
        for layer, shard in rank["shards"].items():
            item = said.get(int(layer))
            if item is None:
                missing.append(f"layer {layer}: no packed= line")
            elif not item["packed"]:
                allowed = plans.reads_checkpoint(plan, rank, layer)
                (absent if allowed else missing).append(f"layer {layer}: packed=False")
            elif item["rows"] is not None and list(item["rows"]) != list(shard["rows"]):
                missing.append(f"layer {layer}: rows {item['rows']}")
        value = "; ".join(missing + absent) or "True for every layer"
        entry.see(host, value, "packed=True for every layer", ok=not missing)
    return entry


def _open_shards(plan: Plan, looks: Looks) -> Entry:
    """The living process holds the very file that lies in the shard directory, with the header that it should have."""
    entry = Entry("swap", SWAP)
    for host, look in looks.items():
        rank = _rank(plan, host)
        layers = [layer for layer in rank["shards"] if not plans.reads_checkpoint(plan, rank, layer)]
        opened = look["process"]["shards"]
        wrong = []
        for layer in layers:
            item = opened.get(layer)
            if item is None:
                wrong.append(f"layer {layer}: not open in the engine")
            elif not item["same_file"]:
                wrong.append(f"layer {layer}: file replaced after boot (inode {item['inode']} is open)")
        entry.see(host, "; ".join(wrong) or "open", "open", ok=not wrong)
    return entry


def _rendezvous(plan: Plan, looks: Looks) -> Entry:
    """A worker's engine holds its connection to where the ranks met: one that lost it lives on and never answers."""
    entry = Entry("swap", SWAP)
    for host, look in looks.items():
        have = look["container"]
        if not have or have["state"] not in ("running", "paused"):
            continue  # row `container` says so
        head = _rank(plan, host)["role"] == "head"
        met = head or look["process"]["rendezvous"]
        entry.see(host, "met" if met else "not connected to the head", "met", ok=met)
    return entry


def _faults(plan: Plan, looks: Looks) -> Entry:
    entry = Entry("swap", SWAP)
    for host, look in looks.items():
        faults = [
            fault
            for fault in (look["engine"] or {}).get("faults", [])
            if fault["severity"] != "warning" and not plans.foreseen(plan, _rank(plan, host), fault)
        ]
        first = next((fault for fault in faults if not fault["consequence"]), faults[0] if faults else None)
        entry.see(host, first["text"] if first else "none", "none", ok=not faults)
    return entry


def _disk(plan: Plan, looks: Looks) -> Entry:
    entry = Entry("refuse", "move old shards of that rank to another host (archive_engram.yml), then run again")
    for host, look in looks.items():
        shards = look["shards"]
        needed = sum(
            _rank(plan, host)["shards"][layer]["bytes"]
            for layer, item in shards["files"].items()
            if item["state"] != "ok" and not plans.reads_checkpoint(plan, _rank(plan, host), layer)
        )
        ok = not needed or shards["free_bytes"] >= needed + shards["reserve_bytes"]
        value = "enough" if ok else f"{shards['free_bytes']} bytes free in {shards['dir']}"
        entry.see(host, value, f"{needed} bytes to pack and {shards['reserve_bytes']} to spare", ok=ok)
    return entry


def _policy(shards: dict[str, Any], looks: Looks, *, engram_missing: str, engram_wrong: str) -> None:
    """Shards that the operator does not let Lockstep mend turn the entry into a refusal, with the way out."""
    states = {item["state"] for host in shards["bad"] for item in looks[host]["shards"]["files"].values()}
    if "wrong" in states and engram_missing == "fallback":
        shards["kind"] = "refuse"
        shards["next_step"] = "look at that file; -e engram_missing=pack -e engram_wrong=set_aside packs the right one"
    elif "wrong" in states and engram_wrong == "fail":
        shards["kind"] = "refuse"
        shards["next_step"] = "look at that file; -e engram_wrong=set_aside keeps it under another name and packs anew"
    elif "missing" in states and engram_missing == "fail":
        shards["kind"] = "refuse"
        shards["next_step"] = "ansible-playbook pack_engram.yml, or -e engram_missing=pack"


CHECKS: dict[str, Callable[[Plan, Looks], Entry]] = {
    "docker": _docker,
    "kernel": _kernel,
    "clock": _clock,
    "fabric": _fabric,
    "ports": _ports,
    "checkpoint": _checkpoint,
    "journal": _journal,
    "directories": _directories,
    "base_image": _base_image,
    "overlay_image": _overlay_image,
    "adapters": _adapters,
    "shards": _shards,
    "disk": _disk,
    "tactics": _tactics,
    "container": _container,
    "running_image": _running_image,
    "container_env": _container_env,
    "packed": _packed,
    "open_shards": _open_shards,
    "rendezvous": _rendezvous,
    "faults": _faults,
}

# What of a look an entry needs that a look without a plan does not have: then entry `journal` says why.
_KNOWN = "shards"
NEEDS = {
    **dict.fromkeys(("base_image", "overlay_image", "adapters"), "images"),
    **dict.fromkeys(("shards", "disk", "packed", "open_shards", "rendezvous", "faults"), "shards"),
    "checkpoint": "checkpoint",
    "tactics": "tactics",
}


def table(
    plan: Plan,
    looks: Mapping[str, Look | None],
    may_differ: Sequence[str] = (),
    *,
    engram_missing: str = "pack",
    engram_wrong: str = "fail",
    unseen: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """All entries by name, over all ranks of ``plan``.

    ``looks`` has None for a rank that could not be looked at: ``unseen`` may say why, else it was unreachable. Entries
    named in ``may_differ`` are shown and never bad. A rank whose engine does not answer is left out of the entries that
    need it: one reason is enough.
    """
    hosts = [rank["host"] for rank in plan["ranks"]]
    reached = Entry(
        "refuse", "see the error above; check the host, its address in the inventory and the SSH key, then run again"
    )
    for host in hosts:
        reached.see(
            host,
            "yes" if looks.get(host) else (unseen or {}).get(host, "unreachable"),
            "an answer over SSH",
            ok=bool(looks.get(host)),
        )
    there: dict[str, Look] = {host: look for host in hosts if (look := looks.get(host)) is not None}
    answering = {host: look for host, look in there.items() if look["docker"]["ok"]}
    entries = {"reachable": reached.as_dict()}
    for name, check in CHECKS.items():
        seen = there if name in ("docker", "kernel", "clock", "fabric") else answering
        entries[name] = check(
            plan, {host: look for host, look in seen.items() if name not in NEEDS or NEEDS[name] in look}
        ).as_dict()
        if name in may_differ:
            entries[name]["ok"], entries[name]["bad"] = True, {}
    _policy(entries["shards"], answering, engram_missing=engram_missing, engram_wrong=engram_wrong)
    return entries


def bad(entries: Mapping[str, Mapping[str, Any]], kind: str | None = None) -> list[str]:
    """Names of the entries that do not hold, of one kind or of all."""
    return [name for name, entry in entries.items() if not entry["ok"] and kind in (None, entry["kind"])]


def explain(entries: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """For each named entry and each rank where it does not hold: found, expected, next step. One block of lines."""
    lines = []
    for name in names:
        for host, item in entries[name]["bad"].items():
            lines += [
                f"{host}: {name}",
                f"  found: {item['found']}",
                f"  expected: {item['expected']}",
                f"  next step: {entries[name]['next_step']}",
            ]
    return "\n".join(lines)


def render(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table as lines of text, one row per entry: whether it holds or what mends it, and what was seen.

    A row where all ranks show one value has it once.
    """
    width = max(len(name) for name in entries)
    rows = []
    for name, entry in entries.items():
        values = {str(value) for value in entry["seen"].values()}
        text = (
            values.pop() if len(values) == 1 else "  ".join(f"{host}: {value}" for host, value in entry["seen"].items())
        )
        rows.append(f"{'ok' if entry['ok'] else entry['kind']:<9} {name:<{width}}  {text}".rstrip())
    return rows
