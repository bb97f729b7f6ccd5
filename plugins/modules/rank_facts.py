#!/usr/bin/python
"""The one look at a rank: everything that a launch has to know of it, read-only, in one task."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_facts
short_description: Look at one rank - engine, image, shards, tactics, containers, ports, disk, clock, fabric
description:
  - Reads what a launch has to know of a rank and changes nothing.
  - Give a plan to look at the rank as that plan needs it. Without one, the plan that the running container's launch
    recorded in the journal is used, so that a fleet can be proven from any controller.
  - A Docker Engine that does not answer is reported, not an error, so that one table can show all ranks.
options:
  host:
    description: Inventory name of this rank.
    type: str
    required: true
  plan:
    description: The plan of a launch.
    type: dict
  state_dir:
    description: Directory of Lockstep's own state on the rank; holds the journal.
    type: path
    required: true
  container:
    description: Name of the rank's engine container.
    type: str
    required: true
  checkpoint:
    description: Directory of the checkpoint whose Engram tables are packed.
    type: path
  checkpoint_source:
    description: Whether the checkpoint lies on this rank's disk or is the head's export, mounted there.
    type: str
    choices: [local, nfs]
    default: local
  image_files:
    description: Paths inside the image whose hashes are taken; a directory takes every file below it.
    type: list
    elements: str
    default: []
  fabric:
    description: Addresses that this rank must have.
    type: list
    elements: str
    default: []
  ports:
    description: Ports that the engine will listen on. A plan says them itself.
    type: list
    elements: int
    default: []
  directories:
    description: Directories that must be there.
    type: list
    elements: path
    default: []
  reserve_bytes:
    description: Bytes that packing must leave free on the shards' filesystem.
    type: int
    default: 0
  now:
    description: The controller's clock, in seconds since the epoch, when the task was sent.
    type: float
  clock_limit_s:
    description: Seconds by which the rank's clock may differ from the controller's, the way of the task included.
    type: int
    default: 30
  gather_subset:
    description: What to look at; V(all) is everything.
    type: list
    elements: str
    choices: [all, checkpoint, clock, container, directories, fabric, images, kernel, memory, ports, shards, tactics]
    default: [all]
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: none
    description: Changes nothing.
author:
  - Lockstep
"""

EXAMPLES = r"""
- name: Look at the rank's memory and clock
  lockstep.fleet.rank_facts:
    host: "{{ inventory_hostname }}"
    state_dir: /srv/lockstep
    container: dsv41-worker
    gather_subset: [memory, kernel]
  register: look

- name: Show it
  ansible.builtin.debug:
    var: look.look.memory
"""

RETURN = r"""
look:
  description: What was seen, one key a subset.
  type: dict
  returned: always
"""

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import (
    docker_api,
    dockerd,
    enginelog,
    engram,
    files,
    hostmem,
    images,
    receipt,
    tactics,
    traffic,
)
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SUBSETS = (
    "checkpoint",
    "clock",
    "container",
    "directories",
    "fabric",
    "images",
    "kernel",
    "memory",
    "ports",
    "shards",
    "tactics",
)
CACHE_MOUNT = "/root/.cache"
MAPS_CELLS = 6  # /proc/<pid>/maps: range, permissions, offset, device, inode, path
# Characters of a log that are read: the boot's lines stand first, the latest faults last.
LOG_HEAD = 4 << 20
LOG_TAIL = 1 << 20


def text(path: str) -> str:
    """A file of /proc, whole."""
    return Path(path).read_text(encoding="utf-8", errors="replace")


def connect() -> tuple[docker_api.Engine | None, dict[str, Any]]:
    """The client and what the engine says of itself; no client and the reason when it does not answer."""
    try:
        client = docker_api.Engine()
        return client, {"ok": True, "error": None, **docker_api.engine(client.get_json("/info"))}
    except (LockstepError, docker_api.EngineError) as error:
        reason = str(error.found if isinstance(error, LockstepError) else error).strip().splitlines()[0]
        return None, {"ok": False, "error": f"does not answer: {reason}", "version": None, "store": None}


def look_fabric(wanted: list[str]) -> dict[str, Any]:
    """Which of the wanted addresses this host has: an address can be bound only where it is configured."""
    missing = []
    for address in wanted:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                missing.append(address)
    return {"addresses": wanted, "missing": missing}


def sockets() -> list[traffic.Socket]:
    """The TCP sockets of this network namespace."""
    return [socket for table in ("tcp", "tcp6") for socket in traffic.sockets(text(f"/proc/net/{table}"))]


def owner(inodes: set[str], among: Iterable[int] | None = None) -> int | None:
    """The process, of all or ``among`` these, that holds one of these sockets; None for one of another namespace."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    everyone = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    for process in everyone if among is None else among:
        try:
            if any(str(entry.readlink()) in wanted for entry in Path(f"/proc/{process}/fd").iterdir()):
                return process
        except OSError:  # the process ended while it was looked at
            continue
    return None


def look_ports(ports: list[int], engine_pids: set[int]) -> dict[str, str | None]:
    """Who listens on each port: None, ``engine`` for the rank's own container, else the process by name."""
    seen: dict[str, str | None] = {}
    there = sockets()
    for port in ports:
        inodes = {socket.inode for socket in there if socket.state == traffic.LISTENING and socket.port == port}
        pid = owner(inodes) if inodes else None
        if not inodes:
            seen[str(port)] = None
        elif pid in engine_pids:
            seen[str(port)] = "engine"
        else:
            name = text(f"/proc/{pid}/comm").strip() if pid else "a process of another namespace"
            seen[str(port)] = f"{name} (pid {pid})" if pid else name
    return seen


def look_checkpoint(checkpoint: str | None, source: str, rank: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """Whether the checkpoint has the tables that the plan's shards are packed from, and which checkpoint it is."""
    if not checkpoint:
        return {"error": None, "identity": "not asked for"}
    if source == "nfs" and not Path(checkpoint).is_mount():
        return {"error": f"{checkpoint} is not mounted", "identity": None, "mountable": True}
    parts, revision = [], None
    try:
        for layer, shard in sorted(wanted.items(), key=lambda pair: int(pair[0])):
            engram.check_tables(checkpoint, {"layer": int(layer), "rank": rank, **shard})
            here = engram.checkpoint_identity(checkpoint, int(layer))
            parts.append(f"layer {layer}: {sum(here['files'].values())} bytes")
            revision = here["revision"]
    except LockstepError as error:
        found = f": {error.found}, expected {error.expected}" if error.found is not None else ""
        return {"error": f"{error.message}{found}", "identity": None}
    return {"error": None, "identity": f"revision {revision}, {', '.join(parts)}"}


def checkpoint_of(checkpoint: str | None, layer: int) -> engram.Checkpoint | None:
    """Which checkpoint a shard must be of; None when there is none here, which `look_checkpoint` says."""
    try:
        return engram.checkpoint_identity(checkpoint, layer) if checkpoint else None
    except LockstepError:
        return None


def look_shards(
    directory: str, rank: int, tp: int, wanted: dict[str, Any], reserve: int, checkpoint: str | None
) -> dict[str, Any]:
    """State of each shard that the plan gives this rank, and the room to pack what is missing."""
    seen = {
        layer: engram.inspect_shard(
            Path(directory, shard["file"]),
            {"layer": int(layer), "rank": rank, "tp": tp, **shard},
            checkpoint_of(checkpoint, int(layer)),
        )
        for layer, shard in wanted.items()
    }
    free = files.free_bytes(files.nearest(directory))
    return {"dir": directory, "files": seen, "free_bytes": free, "reserve_bytes": reserve}


def way_open(hosts_file: str = dockerd.HOSTS_FILE, daemon_json: str = dockerd.DAEMON_JSON) -> bool:
    """Whether this rank's way to the fleet's registry is open."""
    return dockerd.REGISTRY_MARK in text(hosts_file) or dockerd.remembered(daemon_json).exists()


def look_registry(client: docker_api.Engine) -> dict[str, str]:
    """What a killed run left here of the fleet's registry, ``{"container": name or ""}``; empty for nothing."""
    running = [facts["name"] for facts in docker_api.containers(client, label=dockerd.REGISTRY_LABEL)]
    return {"container": running[0] if running else ""} if running or way_open() else {}


def mapped_shards(pid: int) -> set[tuple[str, int]]:
    """Name and inode of every file that a process maps; nothing when it ended while it was looked at."""
    try:
        lines = text(f"/proc/{pid}/maps").splitlines()
    except OSError:
        return set()
    cells = (line.split(maxsplit=5) for line in lines)
    return {(Path(each[5].removesuffix(" (deleted)")).name, int(each[4])) for each in cells if len(each) == MAPS_CELLS}


def open_shards(pids: list[int], directory: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """For each shard: the inode that the living engine maps, and whether it is the file that lies there now."""
    opened: dict[str, Any] = {}
    mapped = {pid: mapped_shards(pid) for pid in sorted(pids)}
    for layer, shard in wanted.items():
        path = Path(directory, shard["file"])
        there = files.look(path)
        for pid, maps in mapped.items():
            found = {inode for name, inode in maps if name == shard["file"]}
            if not found:
                continue
            inode = min(found)
            same = there is not None and found == {there["inode"]} and header_holds(path, shard)
            opened[layer] = {"path": str(path), "inode": inode, "pid": pid, "same_file": same}
            if not same:
                break
    return opened


def header_holds(path: Path, shard: dict[str, Any]) -> bool:
    """Whether the file's header still says the rows that the plan gives this rank."""
    try:
        return engram.read_header(path)["rows"] == list(shard["rows"])
    except LockstepError:
        return False


def own_rank(plan: dict[str, Any], host: str) -> dict[str, Any]:
    """The plan's entry for this host."""
    found: dict[str, Any] = next((rank for rank in plan["ranks"] if rank["host"] == host), {})
    if not found:
        raise LockstepError(
            "this host is no rank of the plan", host=host, expected=", ".join(rank["host"] for rank in plan["ranks"])
        )
    return found


def mount_source(rank: dict[str, Any], target: str) -> str:
    """The rank's own path of what the container sees at ``target``."""
    return str(next(mount["source"] for mount in rank["mounts"] if mount["target"] == target))


def look_container(client: docker_api.Engine, name: str, image_files: list[str]) -> dict[str, Any] | None:
    """The rank's engine container: state, environment and the hashes of files as the running engine sees them."""
    found = docker_api.containers(client, names=[name])
    if not found:
        return None
    facts = found[0]
    alive = facts["state"] in ("running", "paused")
    labels = facts["labels"]
    return {
        **{key: facts[key] for key in ("name", "id", "image_id", "state", "started_at", "env", "argv", "mounts")},
        **{key: labels.get(f"lockstep.{key}") for key in ("launch", "plan_sha256", "arm")},
        "log_since": docker_api.began(facts),
        "files": docker_api.container_files(client, facts["id"], image_files) if alive else {},
        "pids": pids(client, facts["id"]) if alive else [],
    }


def pids(client: docker_api.Engine, container: str) -> list[int]:
    """Process ids, as this host counts them, of a container's processes."""
    top = client.get_json("/containers/{0}/top", container, params={"ps_args": "-eo pid"})
    column = top["Titles"].index("PID")
    return [int(process[column]) for process in top["Processes"]]


def look_engine(client: docker_api.Engine, container: dict[str, Any], rank: int) -> dict[str, Any]:
    """Facts of the container's log since its start: its boot, and its last lines when it has served for long."""
    log = docker_api.logs(client, container["id"], since=container["log_since"])
    if len(log) > LOG_HEAD + LOG_TAIL:
        log = log[:LOG_HEAD] + "\n" + log[-LOG_TAIL:]
    return dict(enginelog.facts(log, rank=rank))


def plan_ports(plan: dict[str, Any], host: str) -> list[int]:
    """Where this rank will listen: a worker answers health checks on the API's port too, the ranks meet at the head."""
    ports = plan["ports"]
    return [ports["api"], *([ports["rendezvous"]] if own_rank(plan, host)["role"] == "head" else [])]


def look_host(
    asked: dict[str, Any], subset: set[str], container: dict[str, Any] | None, ports: list[int]
) -> dict[str, Any]:
    """What needs neither an engine nor a plan."""
    here: dict[str, Callable[[], Any]] = {
        "kernel": lambda: text("/proc/sys/kernel/osrelease").strip(),
        "directories": lambda: {"missing": [path for path in asked["directories"] if not Path(path).is_dir()]},
        "fabric": lambda: look_fabric(asked["fabric"]),
        "memory": lambda: dict(hostmem.meminfo(text("/proc/meminfo"))),
        "ports": lambda: look_ports(ports, set(container["pids"]) if container else set()),
    }
    return {name: take() for name, take in here.items() if name in subset}


def look_for(plan: dict[str, Any], asked: dict[str, Any], subset: set[str]) -> dict[str, Any]:
    """What the plan wants of this rank's disk."""
    rank = own_rank(plan, asked["host"])
    number, shards = rank["rank"], rank["shards"]
    there: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: look_checkpoint(asked["checkpoint"], asked["checkpoint_source"], number, shards),
        "shards": lambda: look_shards(
            mount_source(rank, plan["engram"]["mount"]),
            number,
            plan["tp_size"],
            shards,
            asked["reserve_bytes"],
            asked["checkpoint"],
        ),
        "tactics": lambda: tactics.judge(
            tactics.scan(mount_source(rank, CACHE_MOUNT)), plan["tactics_fingerprint"], rank=number
        ),
    }
    return {name: take() for name, take in there.items() if name in subset}


def look_running(
    client: docker_api.Engine, plan: dict[str, Any], host: str, container: dict[str, Any]
) -> dict[str, Any]:
    """What the living engine says and holds open."""
    rank = own_rank(plan, host)
    directory = mount_source(rank, plan["engram"]["mount"])
    meets = {
        socket.inode
        for socket in sockets()
        if socket.state == traffic.ESTABLISHED and socket.peer_port == plan["ports"]["rendezvous"]
    }
    return {
        "engine": look_engine(client, container, rank["rank"]),
        "process": {
            "shards": open_shards(container["pids"], directory, rank["shards"]),
            "rendezvous": owner(meets, container["pids"]) is not None,
        },
    }


def look_journal(state_dir: str, launch: str | None) -> dict[str, Any]:
    """The entry of the launch that is there, or why it cannot be read; without one, what could be served again.

    A launch that is being proven has no entry yet.
    """
    seen: dict[str, Any] = {"journal": None, "journal_damaged": None, "journal_newest": None, "stopped": None}
    try:
        if launch and files.look(receipt.entry_path(state_dir, launch)):
            return {**seen, "journal": receipt.read_entry(state_dir, launch)}
    except LockstepError as error:
        seen["journal_damaged"] = error.message
    return {**seen, "journal_newest": receipt.newest_proven(state_dir), "stopped": receipt.stopped(state_dir)}


def look(asked: dict[str, Any]) -> dict[str, Any]:
    """Everything that was asked for, as one dictionary."""
    started = time.time()
    subset = set(SUBSETS if "all" in asked["gather_subset"] else asked["gather_subset"])
    client, engine = connect()
    container = None
    if client and (not asked["plan"] or subset & {"container", "ports"}):
        container = look_container(client, asked["container"], asked["image_files"])
    journal = look_journal(asked["state_dir"], container["launch"] if container else None)
    plan = asked["plan"] or (journal["journal"] or {}).get("plan")
    ports = plan_ports(plan, asked["host"]) if plan else asked["ports"]
    seen = {"taken": started, "docker": engine, "container": container, **journal}
    seen |= look_host(asked, subset, container, ports)
    if "clock" in subset and asked["now"] is not None:
        seen["clock"] = {"skew_s": round(started - asked["now"], 1), "limit_s": asked["clock_limit_s"]}
    if plan:
        seen |= look_for(plan, asked, subset)
    if plan and client and "images" in subset:
        known = images.known(f"{asked['state_dir']}/{images.KNOWN}")
        seen["images"] = docker_api.look(client, plan["images"], asked["image_files"], known=known)
        seen["registry"] = look_registry(client)
    if plan and client and container and "container" in subset:
        seen |= look_running(client, plan, asked["host"], container)
    else:
        seen |= {"engine": None, "process": {"shards": {}, "rendezvous": False}}
    return seen


def main() -> None:
    """Look, and return."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "plan": {"type": "dict"},
            "state_dir": {"type": "path", "required": True},
            "container": {"type": "str", "required": True},
            "checkpoint": {"type": "path"},
            "checkpoint_source": {"type": "str", "choices": ["local", "nfs"], "default": "local"},
            "image_files": {"type": "list", "elements": "str", "default": []},
            "fabric": {"type": "list", "elements": "str", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
            "directories": {"type": "list", "elements": "path", "default": []},
            "reserve_bytes": {"type": "int", "default": 0},
            "now": {"type": "float"},
            "clock_limit_s": {"type": "int", "default": 30},
            "gather_subset": {
                "type": "list",
                "elements": "str",
                "choices": ["all", *SUBSETS],
                "default": ["all"],
            },
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, look=look(module.params))
    except LockstepError as error:
        module.fail_json(msg=str(error), exception=error)


if __name__ == "__main__":
    main()
