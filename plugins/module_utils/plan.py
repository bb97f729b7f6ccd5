"""The whole of a launch before it happens: who runs what, with which environment, arguments, mounts and shards.

A plan is a plain dict (JSON). It is built on the controller from data alone, refused there if a rule says so, and
sealed once the overlay's identity and the shards' hashes are known. The journal keeps it; a rollback launches it again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from . import arms, engram, envfile, images, memory, rules, switches, tactics
from .errors import LockstepError, PlanRefused

FORMAT = 1
TACTICS_KEY = "LOCKSTEP_TACTICS_FINGERPRINT"

# The facts that a rule may ask for, next to the keys of the environment.
FACTS = {
    "tp_size": "ranks of the fleet",
    "accelerators": "whether the fleet has GPUs",
    "memguard": "whether a memory guard runs on the head",
    "packed": "whether packed shards will be served (a key names their mount on every rank, no falling back)",
    "engram_mount": "where the container has the packed shards",
    "timed": "whether the arm is meant to be timed (a check pass is not)",
    "prefetch_checked": "whether a check pass of what this arm builds on found no differing gather on any rank",
    "measured_prompt": "tokens of the longest prompt that went through on this arm with this chunk; 0 when none did",
    "features_changed": "features unlike what runs; before that is known, unlike the parent (a one-off's: the arm)",
    "split": "how this engine image divides the Engram rows",
    "engine": "name of the engine profile",
}

# What decides whether two plans are the same launch. Names, origins, warnings and reasons do not.
_MATTERS = ("format", "tp_size", "engine", "images", "engram", "container")
_RANK_MATTERS = ("host", "rank", "role", "container", "env", "argv", "mounts", "shards")

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)\}")
_MAX_NAME = 60


# The variables of an inventory and of group_vars that a plan is made from (group_vars/all documents each).
_FLEET_VARIABLES = (
    "fleet_tp_size", "fleet_env", "fleet_head_env", "fleet_accelerators", "fleet_memguard", "fleet_container",
    "fleet_container_names", "fleet_model_mount", "fleet_state_mount", "fleet_cache_mount", "fleet_api_host",
    "fleet_served_model_name", "fleet_switches", "fleet_switches_extra", "fleet_arms", "fleet_rules",
    "fleet_engine_profile", "fleet_images", "fleet_memory", "engram_layers", "engram_mount", "engram_config",
    "engram_missing", "engram_checkpoint_mount",
)  # fmt: skip
_HOST_VARIABLES = (
    "fleet_rank", "fleet_role", "fleet_address", "fleet_host_env", "fleet_model_path", "fleet_engram_dir",
    "fleet_cache_dir", "fleet_state_dir", "engram_checkpoint",
)  # fmt: skip
VARIABLES = (*_FLEET_VARIABLES, *_HOST_VARIABLES)


def inputs(
    variables: Mapping[str, Any], hosts: Mapping[str, Mapping[str, Any]], root: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Turn the variables of an inventory into ``build``'s ``fleet`` and ``catalog``.

    ``variables`` are the fleet's (one host's will do), ``hosts`` ``{host: its variables}``, ``root`` the checkout whose
    overlay is to be launched. Values that came from a command line are text; they are read as what they stand for.
    Raises LockstepError for a variable that is missing.
    """
    for whose, given, names in (
        ("the fleet", variables, _FLEET_VARIABLES),
        *((host, own, _HOST_VARIABLES) for host, own in hosts.items()),
    ):
        absent = [name for name in names if name not in given]
        if absent:
            raise LockstepError(
                f"{whose} has no {absent[0]}",
                found=f"undefined: {', '.join(absent)}",
                expected="host variables in the inventory, the fleet's in inventory/<fleet>/group_vars/fleet",
                next_step="a playbook loads group_vars beside it; group_vars/all/fleet.yml says what a fleet must give",
            )
    fleet = {
        "tp_size": _whole("fleet_tp_size", variables),
        "env": variables["fleet_env"],
        "head_env": variables["fleet_head_env"],
        "accelerators": truth(variables["fleet_accelerators"]),
        "memguard": truth(variables["fleet_memguard"]),
        "container": variables["fleet_container"],
        "names": variables["fleet_container_names"],
        "served": {
            name: variables[f"fleet_{name}"]
            for name in ("model_mount", "state_mount", "cache_mount", "api_host", "served_model_name")
        },
        "hosts": [
            {
                "host": host,
                "rank": _whole("fleet_rank", own, host),
                "env": own["fleet_host_env"],
                "checkpoint": str(own["engram_checkpoint"]),
                **{name: str(own[f"fleet_{name}"]) for name in ("role", "address")},
                **{name: str(own[f"fleet_{name}"]) for name in ("model_path", "engram_dir", "cache_dir", "state_dir")},
            }
            for host, own in hosts.items()
        ],
    }
    catalog: dict[str, Any] = {
        "switches": {**variables["fleet_switches"], **variables["fleet_switches_extra"]},
        "arms": variables["fleet_arms"],
        "rules": variables["fleet_rules"],
        "profile": variables["fleet_engine_profile"],
        "images": {name: variables["fleet_images"][name] for name in ("base", "overlay", "builds")},
        "engram": {
            name: variables[f"engram_{name}"] for name in ("layers", "mount", "config", "missing", "checkpoint_mount")
        },
        "memory": variables["fleet_memory"],
    }
    if root is not None:
        base = str(catalog["images"]["base"]["digest"])
        context = images.overlay_sha256(root, base, engram_split(catalog))
        catalog["images"]["overlay"] = {**catalog["images"]["overlay"], "context_sha256": context}
    return fleet, catalog


def _whole(name: str, variables: Mapping[str, Any], host: str | None = None) -> int:
    """Read a whole number that may have come from a command line as text."""
    try:
        return int(str(variables[name]))
    except ValueError as error:
        raise LockstepError(
            f"{name} is no whole number", host=host, found=repr(variables[name]), expected="0, 1, 2, …"
        ) from error


def truth(value: object) -> bool:
    """Read a yes or no that may have come from a command line as text."""
    return str(value).strip().lower() in ("true", "yes", "on", "1")


def build(
    fleet: Mapping[str, Any],
    catalog: Mapping[str, Any],
    arm: str,
    *,
    changes: Mapping[str, object] | None = None,
    unset: Sequence[str] = (),
    accept_rule: Sequence[str] = (),
) -> dict[str, Any]:
    """Resolve an arm, with one-off changes, for a fleet. Raises PlanRefused (``.rule``) for what must not be launched.

    ``fleet`` is ``{"tp_size", "env", "head_env", "accelerators", "memguard", "container", "names": {role: container},
    "served": {"model_mount", "state_mount", "cache_mount", "api_host", "served_model_name"},
    "hosts": [{"host", "rank", "role", "address", "env", "model_path", "checkpoint", "engram_dir", "cache_dir",
    "state_dir"}]}``; ``catalog`` is ``{"switches", "arms", "rules", "profile", "images": {"base", "overlay", "builds"},
    "engram": {"layers", "mount", "config", "missing", "checkpoint_mount"}, "memory"}``, each as group_vars has it. The
    result's ``ranks`` are in order of rank.
    """
    case = assess(fleet, catalog, arm, changes=changes, unset=unset)
    known_rules(catalog, accept_rule)
    arms.require_launchable(catalog["arms"], arm)
    hosts, resolved = _hosts(fleet), list(case["environments"].values())
    _require_size(fleet, hosts, [env for env, _ in resolved])
    name, facts, tripped = case["name"], case["facts"], case["tripped"]
    _refuse(name, tripped, accept_rule)
    accepted = [rule for rule in tripped if rule["severity"] == "refuse"]

    plan: dict[str, Any] = {
        "format": FORMAT,
        "arm": arm,
        "name": name,
        "set": case["set"],
        "unset": case["unset"],
        "lineage": case["lineage"],
        "tp_size": len(hosts),
        "engine": catalog["profile"]["name"],
        "warnings": [_brief(rule) for rule in tripped if rule["severity"] == "warn"],
        "accepted": sorted(rule["id"] for rule in accepted),
        "accepted_rules": [_brief(rule) for rule in accepted],
        "images": {
            "base": {field: str(catalog["images"]["base"][field]) for field in ("repository", "tag", "digest")},
            "overlay": {
                "tag": str(catalog["images"]["overlay"]["tag"]),
                "context_sha256": catalog["images"]["overlay"].get("context_sha256"),
                "id": None,
                "digest": None,
            },
        },
        "versions": _versions(catalog["images"]),
        "engram": {
            "split": facts["split"],
            "layers": list(catalog["engram"]["layers"]),
            "mount": catalog["engram"]["mount"],
            "fallback": _fallback(catalog),
        },
        "ranks": [],
        "container": copy.deepcopy(dict(fleet["container"])),
        "ports": {"api": int(resolved[0][0]["PORT"]), "rendezvous": int(resolved[0][0]["DIST_PORT"])},
        "args": {},
        "keys": {},
        "accelerators": facts["accelerators"],
        "adapters": {},
        "memory": case["memory"],
        "tactics_fingerprint": None,
        "plan_sha256": None,
    }
    for host, (env, origin) in zip(hosts, resolved, strict=True):
        argv, states = arguments(catalog["profile"], env, facts, _fleet_values(fleet, hosts, host, env), host["role"])
        plan["args"] = {**states, **{arg: state for arg, state in plan["args"].items() if state == "applied"}}
        plan["ranks"].append(
            {
                "host": host["host"],
                "rank": host["rank"],
                "role": host["role"],
                "container": fleet["names"][host["role"]],
                "env": env,
                "origin": origin,
                "argv": argv,
                "mounts": _mounts(fleet, host, catalog["engram"]),
                "shards": _shards(catalog["engram"], len(hosts), host["rank"], facts["split"]),
                "env_sha256": None,
            }
        )
    plan["adapters"] = switches.adapters_on(catalog["switches"], resolved[0][0])
    plan["keys"] = _key_states(catalog["profile"], catalog["switches"], resolved, plan["args"])
    _fingerprint(plan)
    return plan


def assess(
    fleet: Mapping[str, Any],
    catalog: Mapping[str, Any],
    arm: str,
    *,
    changes: Mapping[str, object] | None = None,
    unset: Sequence[str] = (),
) -> dict[str, Any]:
    """Say what an arm with one-off changes comes to on a fleet, launchable or not: ``build`` before its refusals.

    Returns ``{"name", "lineage", "set": {}, "unset": [], "environments": as from environments, "facts", "tripped":
    rules as from rules.evaluate, "memory": as from memory.estimate}``. Raises PlanRefused for an arm, key or value
    that is none.
    """
    arms.get(catalog["arms"], arm)
    one_off: arms.Layer = (
        "set",
        switches.values(catalog["switches"], changes or {}, "set"),
        switches.removals(catalog["switches"], unset, "unset"),
    )
    found = environments(fleet, catalog, arm, one_off)
    head = next(iter(found.values()))[0]
    lineage = arms.lineage(catalog["arms"], arm)
    facts = {
        "tp_size": len(found),
        "accelerators": bool(fleet["accelerators"]),
        "memguard": bool(fleet.get("memguard")),
        "packed": not _fallback(catalog)
        and all(env.get("DSV41_PACKED_DIR") == catalog["engram"]["mount"] for env, _ in found.values()),
        "engram_mount": str(catalog["engram"]["mount"]),
        "timed": bool(catalog["arms"][arm].get("timed", True)),
        "prefetch_checked": arms.prefetch_checked(catalog["arms"], lineage),
        "measured_prompt": memory.measured_prompt(catalog["memory"], lineage, head, len(found))["tokens"],
        "features_changed": len(_features_changed(fleet, catalog, arm, head, one_off)),
        "split": engram_split(catalog),
        "engine": catalog["profile"]["name"],
    }
    return {
        "name": _name(arm, one_off),
        "lineage": lineage,
        "set": dict(one_off[1]),
        "unset": list(one_off[2]),
        "environments": found,
        "facts": facts,
        "tripped": _tripped(catalog["rules"], [env for env, _ in found.values()], facts),
        "memory": _memory(catalog["memory"], lineage, [env for env, _ in found.values()], facts),
    }


def known_rules(catalog: Mapping[str, Any], wanted: Sequence[str]) -> None:
    """Raise PlanRefused (unknown-rule), with the nearest, for an id that is no rule's."""
    known = [rule["id"] for rule in catalog["rules"]]
    for rule in wanted:
        if rule not in known:
            raise switches.unknown("rule", rule, known)


def environments(
    fleet: Mapping[str, Any], catalog: Mapping[str, Any], arm: str, one_off: arms.Layer | None = None
) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """Return ``{host: (environment, origin of each value)}`` in order of rank, for any arm and without the rules."""
    schema, after = catalog["switches"], [one_off] if one_off else []
    return {
        host: arms.effective(schema, catalog["arms"], arm, before, after)
        for host, before in _below_arm(fleet, catalog).items()
    }


def below_arm(fleet: Mapping[str, Any], catalog: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return ``{host: environment}`` without any arm: base < engine < fleet < head < host."""
    base: arms.Layer = ("base", switches.defaults(catalog["switches"]), [])
    return {host: arms.merge([base, *before])[0] for host, before in _below_arm(fleet, catalog).items()}


def moved(before: Mapping[str, Any], below: Mapping[str, Mapping[str, str]], schema: Iterable[str]) -> list[str]:
    """Return the keys that a plan's arm or one-off moved on any rank from what they are ``below`` the arm."""
    found = set()
    for rank in before["ranks"]:
        for name in schema:
            source = rank["origin"].get(name, "unset")  # only an arm or a one-off can unset what has a value below
            if source.startswith(("arm:", "set", "unset")) and rank["env"].get(name) != below[rank["host"]].get(name):
                found.add(name)
    return sorted(found)


def put_back(
    fleet: Mapping[str, Any], catalog: Mapping[str, Any], before: Mapping[str, Any], key: str
) -> tuple[dict[str, str], list[str]]:
    """Return the one-off (changes, unset) with which a plan's arm has ``key`` at its value below the arm.

    The keys that depend on it go back with it, all else of the plan's own one-off stays. Raises PlanRefused
    (differs-by-rank) where the ranks have several values below the arm, which no one-off can say.
    """
    below = below_arm(fleet, catalog)
    alone = {host: env for host, (env, _) in environments(fleet, catalog, before["arm"]).items()}
    changes, unset = dict(before["set"]), list(before["unset"])
    for name, value in switches.taken_back(catalog["switches"], key, before["ranks"][0]["env"]).items():
        wanted = {host: env.get(key) if name == key else value for host, env in below.items()}
        if all(rank["env"].get(name) == wanted[rank["host"]] for rank in before["ranks"]):
            continue
        changes.pop(name, None)
        unset = [other for other in unset if other != name]
        if all(alone[host].get(name) == one for host, one in wanted.items()):
            continue  # it was the one-off that moved it
        if len(set(wanted.values())) > 1:
            raise PlanRefused(
                f"{name} has no one value to go back to: below the arm the ranks differ, and a one-off is for all",
                rule="differs-by-rank",
                found=", ".join(f"{host} {'unset' if one is None else one}" for host, one in wanted.items()),
                expected="one value on all ranks",
                next_step=f"launch an arm that leaves {name} alone (arms_file), or -e to= another launch",
            )
        one = next(iter(wanted.values()))
        if one is None:
            unset.append(name)
        else:
            changes[name] = one
    return changes, unset


def _below_arm(fleet: Mapping[str, Any], catalog: Mapping[str, Any]) -> dict[str, list[arms.Layer]]:
    """The steps between base and arm, by host in order of rank."""
    schema = catalog["switches"]
    size = str(fleet["tp_size"])
    engine = {str(key): str(value) for key, value in (catalog["profile"].get("env") or {}).items()}
    for key, value in engine.items():
        envfile.check_entry(key, value)
    common: list[arms.Layer] = [
        ("engine", engine, []),
        ("fleet", {"TP_SIZE": size, "NNODES": size, **switches.values(schema, fleet["env"] or {}, "fleet_env")}, []),
    ]
    head: arms.Layer = ("head", switches.values(schema, fleet["head_env"] or {}, "fleet_head_env"), [])
    found: dict[str, list[arms.Layer]] = {}
    for host in _hosts(fleet):
        own = switches.values(schema, host["env"] or {}, f"fleet_host_env of {host['host']}")
        found[host["host"]] = [*common, *([head] if host["role"] == "head" else []), ("host", own, [])]
    return found


def seal(
    plan: Mapping[str, Any],
    overlay: Mapping[str, Any] | None = None,
    shards: Mapping[str, Mapping[Any, str | None]] | None = None,
) -> dict[str, Any]:
    """Return the plan with the overlay's identity, the shards' hashes and ``plan_sha256``.

    ``overlay`` is ``{"id", "digest", "context_sha256"?}``, ``shards`` ``{host: {layer: sha256 | None}}``. Raises
    LockstepError for a host or layer that the plan does not have.
    """
    sealed = copy.deepcopy(dict(plan))
    for field, value in (overlay or {}).items():
        if field not in sealed["images"]["overlay"]:
            raise LockstepError(
                "the overlay has no such field", found=field, expected=sorted(plan["images"]["overlay"])
            )
        sealed["images"]["overlay"][field] = value
    ranks = {rank["host"]: rank for rank in sealed["ranks"]}
    for host, layers in (shards or {}).items():
        for layer, digest in layers.items():
            if host not in ranks or str(layer) not in ranks[host]["shards"]:
                raise LockstepError(f"the plan has no shard of layer {layer} on {host}", expected=sorted(ranks))
            ranks[host]["shards"][str(layer)]["sha256"] = digest
    _fingerprint(sealed)
    sealed["plan_sha256"] = sha256(sealed)
    return sealed


def reads_checkpoint(plan: Mapping[str, Any], rank: Mapping[str, Any], layer: str | int) -> bool:
    """Whether a rank may serve a layer from the checkpoint: falling back is allowed, and no shard was there to seal."""
    return bool(plan["engram"].get("fallback")) and rank["shards"][str(layer)]["sha256"] is None


def foreseen(plan: Mapping[str, Any], rank: Mapping[str, Any], fault: Mapping[str, Any]) -> bool:
    """Whether a fault of a rank's log is what the plan allows: a layer without a shard, read from the checkpoint."""
    return fault["fault"] == "engram_unpacked" and reads_checkpoint(plan, rank, fault["layer"])


def sha256(plan: Mapping[str, Any]) -> str:
    """SHA-256 (64 hex digits) of the part of a plan that makes the launch what it is, as canonical JSON.

    The name, the lineage, origins, warnings and reasons do not count: two arms with equal effect are one plan.
    """
    part = {field: plan[field] for field in _MATTERS}
    part["ranks"] = [{field: rank[field] for field in _RANK_MATTERS} for rank in plan["ranks"]]
    text = json.dumps(part, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def launch_id(plan: Mapping[str, Any], utc: datetime) -> str:
    """Name a launch: ``<YYYYmmddTHHMMSSZ>-<name>-<first 6 digits of plan_sha256>``; ``utc`` is the time in UTC."""
    return f"{utc:%Y%m%dT%H%M%SZ}-{plan['name']}-{(plan['plan_sha256'] or sha256(plan))[:6]}"


def check(plan: Mapping[str, Any]) -> None:
    """Raise LockstepError unless a plan out of a journal is whole and its hash is its own."""
    if plan.get("format") != FORMAT:
        raise LockstepError("this plan has another format", found=plan.get("format"), expected=FORMAT)
    absent = [field for field in (*_MATTERS, "ranks", "name", "arm", "plan_sha256") if field not in plan]
    if absent:
        raise LockstepError("this plan is not whole", found=f"no {', '.join(absent)}")
    if plan["plan_sha256"] is not None and plan["plan_sha256"] != sha256(plan):
        raise LockstepError(
            "this plan was changed after it was sealed",
            found=f"hash {sha256(plan)}",
            expected=plan["plan_sha256"],
            next_step="launch another entry of the journal, or an arm",
        )


def summary(plan: Mapping[str, Any]) -> list[str]:
    """Say in a few lines what a plan launches: arm, lineage, changes against base, warnings, what does not apply."""
    head = plan["ranks"][0]
    own = {key: head["env"][key] for key, source in head["origin"].items() if source.startswith(("arm:", "set"))}
    absent = sorted(name for name, state in plan["args"].items() if state.startswith("not applicable"))
    room = plan["memory"]
    ranks = ", ".join(f"{rank['rank']} {rank['host']}" for rank in plan["ranks"])
    base = plan["images"]["base"]["digest"][:19]
    lines = [
        f"{plan['name']}: {' < '.join(plan['lineage'])}",
        f"  {plan['tp_size']} ranks: {ranks}",
        f"  engine {plan['engine']}, base {base}, Engram split {plan['engram']['split']}",
        "  set by arm or one-off: " + (" ".join(f"{key}={value}" for key, value in sorted(own.items())) or "nothing"),
    ]
    lines += [f"  warning {warning['id']}: {warning['reason']}" for warning in plan["warnings"]]
    lines += [f"  accepted against rule {rule}" for rule in plan["accepted"]]
    if absent:
        lines.append(f"  not applicable with this engine: {' '.join(absent)}")
    lines.append(f"  memory: {room['text']}")
    return [*lines, *(f"    {line}" for line in room.get("lines") or [])]


def arguments(
    profile: Mapping[str, Any],
    env: Mapping[str, str],
    facts: Mapping[str, Any],
    values: Mapping[str, object],
    role: str,
) -> tuple[list[str], dict[str, str]]:
    """Fill an engine profile's template for one rank; returns the command line and ``{argument: state}``.

    The state is ``applied``, ``not set`` (a key it takes is unset, or its condition does not hold) or
    ``not applicable: why``. ``{KEY}`` in a value is the rank's environment, ``{fleet.x}`` comes from ``values``.
    """
    argv = [str(word) for word in profile["command"]]
    states: dict[str, str] = {}
    refused = profile.get("not_applicable_args") or {}
    for entry in profile["args"]:
        argument = str(entry["arg"])
        if argument in refused:
            continue
        template = entry["head_value"] if role == "head" and "head_value" in entry else entry.get("value")
        filled = _fill(str(template), env, values) if template is not None else ""
        if filled is None or ("when" in entry and not rules.holds(entry["when"], env, facts)):
            states[argument] = "not set"
            continue
        argv += [argument] if template is None else [argument, filled]
        states[argument] = f"not applicable: {entry['why']}" if "why" in entry else "applied"
    states.update({argument: f"not applicable: {why}" for argument, why in refused.items()})
    return argv, states


def _hosts(fleet: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the hosts in order of rank; PlanRefused unless they are ranks 0..tp-1 once each and the head is 0."""
    hosts = sorted(fleet["hosts"], key=lambda host: int(host["rank"]))
    size = int(fleet["tp_size"])
    seen = ", ".join(f"{host['host']}={host['rank']}({host['role']})" for host in hosts)
    roles = ["head", *["worker"] * (size - 1)]
    if [int(host["rank"]) for host in hosts] != list(range(size)) or [host["role"] for host in hosts] != roles:
        raise PlanRefused(
            "the inventory's ranks are not those of this fleet",
            rule="fleet-ranks",
            found=seen or "no host in group fleet",
            expected=f"fleet_tp_size = {size}: ranks 0..{size - 1} once each, 0 in group head, the others in workers",
            next_step="correct fleet_rank and the groups in the inventory, or fleet_tp_size",
        )
    return hosts


def _require_size(
    fleet: Mapping[str, Any], hosts: Sequence[Mapping[str, Any]], envs: Sequence[Mapping[str, str]]
) -> None:
    """Refuse a TP_SIZE or NNODES other than the number of ranks: one GPU a host, one rank a host."""
    for host, env in zip(hosts, envs, strict=True):
        for key in ("TP_SIZE", "NNODES"):
            if env.get(key) != str(len(hosts)):
                raise PlanRefused(
                    f"{key}={env.get(key)} on {host['host']} does not fit this fleet",
                    rule="fleet-size",
                    found=f"{key}={env.get(key)}",
                    expected=f"{len(hosts)}: the fleet has {len(hosts)} ranks (fleet_tp_size={fleet['tp_size']})",
                    next_step=f"leave {key} alone, the fleet's size sets it: change the inventory and fleet_tp_size",
                )


def _fallback(catalog: Mapping[str, Any]) -> bool:
    return bool(catalog["engram"].get("missing") == "fallback")


def _memory(
    data: Mapping[str, Any], lineage: Sequence[str], envs: Sequence[Mapping[str, str]], facts: Mapping[str, Any]
) -> dict[str, Any]:
    if not facts["accelerators"]:
        return {"known": False, "text": "no accelerators, so nothing is predicted", "lines": []}
    keys = ["HEAD_MEM_FRACTION_STATIC", *["MEM_FRACTION_STATIC"] * (len(envs) - 1)]
    least = min(float(env[key]) for env, key in zip(envs, keys, strict=True))
    return memory.estimate(data, lineage, envs[0], int(facts["tp_size"]), least)


def engram_split(catalog: Mapping[str, Any]) -> str:
    """Return how the base image's engine divides the Engram rows; a guess would serve wrong rows, so it is refused."""
    digest = str(catalog["images"]["base"]["digest"])
    known = catalog["images"]["builds"].get(digest) or {}
    split = known.get("engram_split") or catalog["profile"].get("split")
    if split not in ("rows", "heads"):
        raise PlanRefused(
            "nothing says how this base image splits the Engram rows",
            rule="unknown-base",
            found=digest,
            expected=f"one of {', '.join(catalog['images']['builds'])}",
            next_step="add the digest with its engram_split to fleet_image_builds (the engine's log: rows=[lo,hi))",
        )
    return str(split)


def _versions(known_images: Mapping[str, Any]) -> dict[str, str]:
    """Return what of the image decides its tuned kernels: the base's digest and the versions known of it.

    The overlay does not count: FlashInfer is the base's, and an edited adapter must not cost every host its tactics.
    """
    digest = str(known_images["base"]["digest"])
    known = known_images["builds"].get(digest) or {}
    return {"base": digest, **{name: str(known[name]) for name in ("sglang", "flashinfer") if known.get(name)}}


def _tripped(
    known: Sequence[Mapping[str, Any]], envs: Sequence[Mapping[str, str]], facts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the rules that any rank's environment trips, each once, in the rules' order."""
    found: dict[str, dict[str, Any]] = {}
    for env in envs:
        for rule in rules.evaluate(known, env, facts):
            found.setdefault(rule["id"], rule)
    return [found[rule["id"]] for rule in known if rule["id"] in found]


def _refuse(name: str, tripped: Sequence[Mapping[str, Any]], accepted: Sequence[str]) -> None:
    against = [rule for rule in tripped if rule["severity"] == "refuse" and rule["id"] not in accepted]
    if not against:
        return
    others = f" (and by {', '.join(rule['id'] for rule in against[1:])})" if len(against) > 1 else ""
    rule = against[0]
    ids = ",".join([*accepted, *(rule["id"] for rule in against)])
    raise PlanRefused(
        f"{name} is refused by rule {rule['id']}{others}: {rule['reason']} [{rule['source']}]",
        rule=rule["id"],
        found=", ".join(rule["because"]),
        expected=f"an environment that rule {rule['id']} lets pass",
        next_step=f"change the arm or the one-off; to launch all the same: -e accept_rule={ids} "
        f"(--accept-rule {ids} of python -m lockstep_core plan); it is recorded",
    )


def _brief(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {field: rule[field] for field in ("id", "reason", "source", "because")}


def against_running(
    plan: Mapping[str, Any],
    running: Mapping[str, str],
    schema: Mapping[str, Mapping[str, Any]],
    known: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the plan's warnings, with rules on changed features judged against what runs (the head's environment).

    Before the ranks are looked at, nobody knows what runs, and ``build`` compares with the arm's parent.
    """
    changed = _features(schema, plan["ranks"][0]["env"], running)
    mine = [rule for rule in known if rule["when"].get("fact") == "features_changed"]
    found = [
        {**_brief(rule), "because": [f"against what runs: {', '.join(changed)}"]}
        for rule in rules.evaluate(mine, plan["ranks"][0]["env"], {"features_changed": len(changed)})
    ]
    judged = {rule["id"] for rule in mine}
    return [*(warning for warning in plan["warnings"] if warning["id"] not in judged), *found]


def _features(
    schema: Mapping[str, Mapping[str, Any]], env: Mapping[str, str], reference: Mapping[str, str]
) -> list[str]:
    """Name the features in which two environments differ."""
    return sorted(
        {
            str(entry["feature"])
            for key, entry in schema.items()
            if entry.get("feature") and env.get(key) != reference.get(key)
        }
    )


def _features_changed(
    fleet: Mapping[str, Any], catalog: Mapping[str, Any], arm: str, env: Mapping[str, str], one_off: arms.Layer
) -> list[str]:
    """Name the features in which this environment differs from where the experiment starts."""
    start = arm if one_off[1] or one_off[2] else catalog["arms"][arm].get("parent")
    if start is None:
        return []
    return _features(catalog["switches"], env, next(iter(environments(fleet, catalog, start).values()))[0])


def _name(arm: str, one_off: arms.Layer) -> str:
    """Name arm plus changes so that it can stand in a file name: ``e8+DSV41_VERIFY_CAP=conf-0.2``."""
    parts = [f"{key}={value}" for key, value in one_off[1].items()] + [f"{key}-unset" for key in one_off[2]]
    name = re.sub(r"[^A-Za-z0-9._=+-]", "-", "+".join([arm, *parts]))
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(json.dumps([one_off[1], list(one_off[2])], sort_keys=True).encode()).hexdigest()
    return f"{arm}+{len(parts)}-changes-{digest[:8]}"


def _fleet_values(
    fleet: Mapping[str, Any], hosts: Sequence[Mapping[str, Any]], host: Mapping[str, Any], env: Mapping[str, str]
) -> dict[str, object]:
    """What ``{fleet.x}`` in a profile stands for on this rank."""
    return {
        "rank": host["rank"],
        "nnodes": len(hosts),
        "address": host["address"],
        "head_address": hosts[0]["address"],
        "dist_init_addr": f"{hosts[0]['address']}:{env.get('DIST_PORT')}",
        **fleet["served"],
    }


def _fill(template: str, env: Mapping[str, str], values: Mapping[str, object]) -> str | None:
    """Fill a template; None when a key that it needs is unset."""
    fields = _FIELD.findall(template)
    for field in fields:
        if field.startswith("fleet.") and field.removeprefix("fleet.") not in values:
            raise LockstepError(
                "the engine profile asks for a fleet value that does not exist", found=field, expected=sorted(values)
            )
    if any(not field.startswith("fleet.") and field not in env for field in fields):
        return None
    return _FIELD.sub(
        lambda match: str(values[match[1].removeprefix("fleet.")]) if match[1].startswith("fleet.") else env[match[1]],
        template,
    )


def _mounts(fleet: Mapping[str, Any], host: Mapping[str, Any], tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    served = fleet["served"]
    return [
        {"source": str(host["model_path"]), "target": served["model_mount"], "read_only": True},
        {"source": str(host["state_dir"]), "target": served["state_mount"], "read_only": False},
        {"source": str(host["cache_dir"]), "target": served["cache_mount"], "read_only": False},
        {"source": str(host["engram_dir"]), "target": tables["mount"], "read_only": True},
        {"source": str(host["checkpoint"]), "target": tables["checkpoint_mount"], "read_only": True},
    ]


def _shards(data: Mapping[str, Any], tp: int, rank: int, split: str) -> dict[str, dict[str, Any]]:
    """What ``engram`` expects of this rank, by layer (as text, for JSON), with room for the hash that will be found."""
    expected = engram.expected_shards(data["config"], tp, rank, split, data["layers"])
    return {str(shard["layer"]): {**shard, "sha256": None} for shard in expected}


def _key_states(
    profile: Mapping[str, Any],
    schema: Mapping[str, Mapping[str, Any]],
    resolved: Iterable[tuple[Mapping[str, str], Mapping[str, str]]],
    args: Mapping[str, str],
) -> dict[str, str]:
    """Say of every key of the environment whether this engine can use it.

    A key that only becomes an argument shares the argument's fate; the others are named by the profile.
    """
    refused = profile.get("not_applicable_keys") or {}
    taken: dict[str, list[str]] = {}
    for entry in profile["args"]:
        for template in (entry.get("value"), entry.get("head_value")):
            for key in _FIELD.findall(str(template or "")):
                taken.setdefault(key, []).append(str(entry["arg"]))
    states: dict[str, str] = {}
    for key in sorted({key for env, _ in resolved for key in env}):
        fates = [args[argument] for argument in taken.get(key, [])]
        if key in refused:
            states[key] = f"not applicable: {refused[key]}"
        elif schema.get(key, {}).get("where") == "arg" and fates and "applied" not in fates:
            states[key] = fates[0]
        else:
            states[key] = "applied"
    return states


def _fingerprint(plan: dict[str, Any]) -> None:
    """Compute the tactics fingerprint and the hash of each rank's environment, and put the former into the latter."""
    each = [
        tactics.fingerprint(
            rank["argv"], {key: value for key, value in rank["env"].items() if key != TACTICS_KEY}, plan["versions"]
        )
        for rank in plan["ranks"]
    ]
    # One value for the launch. Ranks whose own settings decide tactics (a host's NCCL value) all count.
    one = each[0] if len(set(each)) == 1 else hashlib.sha256("\n".join(each).encode()).hexdigest()
    plan["tactics_fingerprint"] = one
    for rank in plan["ranks"]:
        rank["env"][TACTICS_KEY] = one
        rank["origin"][TACTICS_KEY] = "plan"
        rank["env_sha256"] = envfile.sha256(rank["env"])
