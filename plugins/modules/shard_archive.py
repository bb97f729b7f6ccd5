#!/usr/bin/python
"""Ansible module: Engram shards moved to another host or directory, and back. The action of the same name follows."""

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_archive
short_description: Move Engram shards to another host or directory, or bring archived ones back, without fear
description:
  - A move takes several steps on two hosts; the role C(engram_archive) has them in their order. V(route) finds the way
    between the two hosts, V(look) looks at the source, V(plan) decides at the destination, V(receive) starts the
    receiver there, V(send) starts the sender and follows it to its end, V(close) ends a receiver that nobody came to.
    V(list) looks for shards on a host, V(report) makes one table of what several hosts listed.
  - The bytes go over the fabric once; both sides hash them on their way. A file is removed at its source only after the
    destination synced it, read it back past the page cache, found the same SHA-256 and listed it in C(SHA256SUMS), and
    while it is still the file that was read. C(MOVED.txt) is left where it was.
  - Sender and receiver outlive the task that starts them. When the connection to a host is cut, the next run joins
    them; when they were killed, it goes on where they ended.
  - A restored shard has to be what this rank serves; the archive keeps its copy.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
attributes:
  check_mode:
    description: Looks and plans as the real run does, predicts what would move, and changes nothing.
    support: full
  diff_mode:
    description: V(send) shows where each file lies before and after.
    support: full
options:
  step:
    description: What to do.
    type: str
    choices: [route, look, plan, receive, send, close, list, report]
    required: true
  mode:
    description: V(archive) removes a file at its source once it has arrived, V(restore) leaves it.
    type: str
    choices: [archive, restore]
    default: archive
  source:
    description:
      - Directory that files come from, as C(host:/directory) or as a directory of this host. For V(route).
    type: str
  target:
    description: Directory that files go to, in the same form. For V(route).
    type: str
  files:
    description:
      - Names of files. Without them, every shard that this rank does not serve is archived, or its own are restored.
    type: list
    elements: str
    default: []
  in_service:
    description: Archive also a shard that this rank serves when O(files) names it.
    type: bool
    default: false
  serves:
    description:
      - What this rank serves. C(dir) is the directory of its shards, C(rank), C(tp), C(split), C(layers) and C(config)
        (of config.json what decides the tables' sizes) say which they are, C(checkpoint) is what they are packed from.
        When another host is the source, V(look) takes its C(dir) and C(rank) from the inventory (C(fleet_engram_dir),
        C(fleet_rank)).
    type: dict
  reserve_bytes:
    description: Bytes that stay free on the destination's filesystem.
    type: int
    default: 1073741824
  port:
    description: TCP port of the receiver; any free one by default.
    type: int
    default: 0
  key:
    description: The key that both sides hold for this one run, 64 hexadecimal digits. It is held in memory only.
    type: str
  run_dir:
    description: Directory for locks and progress, which are worth nothing after a reboot.
    type: path
    default: /run/lockstep
  route:
    description: Result of V(route).
    type: dict
  look:
    description: Result of V(look).
    type: dict
  plan:
    description: Result of V(plan).
    type: dict
  receiver:
    description: Result of V(receive).
    type: dict
  roots:
    description: Directories below which V(list) looks for shards, four levels deep.
    type: list
    elements: path
    default: []
  lists:
    description: Name of the variable in which every host keeps its result of V(list). For V(report).
    type: str
"""

EXAMPLES = r"""
- name: Find the way
  lockstep.fleet.shard_archive:
    step: route
    source: /home/ops/dsv41-engram-tp2
    target: /home/ops/archive/dsv41-engram-tp2
  register: route

- name: Look at what is to go
  lockstep.fleet.shard_archive:
    step: look
    route: "{{ route }}"
  register: look

- name: Decide at the destination
  lockstep.fleet.shard_archive:
    step: plan
    route: "{{ route }}"
    look: "{{ look }}"
  register: plan

- name: Move it
  lockstep.fleet.shard_archive:
    step: send
    route: "{{ route }}"
    look: "{{ look }}"
    plan: "{{ plan }}"
"""

RETURN = r"""
source:
  description: Host and directory that files come from.
  returned: step route
  type: dict
  sample: {host: spark2, dir: /home/ops/dsv41-engram-tp2}
target:
  description: Host and directory that files go to.
  returned: step route
  type: dict
  sample: {host: spark1, dir: /home/ops/archive/dsv41-engram-tp2-spark2}
address:
  description: Address of the destination as the source sees it; null when both are one host.
  returned: step route
  type: str
  sample: 10.0.22.1
acts:
  description:
    - The host of the play that does it. Files of a host that O(source) names are archived by one host only, that one
      when it is in the play.
  returned: step route
  type: str
  sample: spark2
shards:
  description: The files that were found, with what their names, headers and manifests say.
  returned: steps look and list
  type: list
  elements: dict
running:
  description: The sender that works on this directory already, and where to; null when none does.
  returned: step look
  type: dict
items:
  description: The files that are to go.
  returned: step plan
  type: list
  elements: dict
steps:
  description: What is done with each of them.
  returned: step plan
  type: list
  elements: dict
  sample: [{file: engram-l1-r1of2.bin, bytes: 50689864504, action: send}]
said:
  description: What else a person should know.
  returned: step plan
  type: list
  elements: str
port:
  description: Where the receiver listens.
  returned: step receive
  type: int
done:
  description: What was done with each file, and how fast.
  returned: step send
  type: list
  elements: dict
  sample:
    - file: engram-l1-r1of2.bin
      action: sent
      bytes: 50689864504
      sha256: 9f86d0…
      removed: true
      seconds: 81.0
      mb_s: 625.8
table:
  description: The lines of the retention listing.
  returned: step report
  type: list
  elements: str
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import archive, background, engram, files, wire
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "step": {
        "type": "str",
        "choices": ["route", "look", "plan", "receive", "send", "close", "list", "report"],
        "required": True,
    },
    "mode": {"type": "str", "choices": ["archive", "restore"], "default": "archive"},
    "source": {"type": "str"},
    "target": {"type": "str"},
    "files": {"type": "list", "elements": "str", "default": []},
    "in_service": {"type": "bool", "default": False},
    "serves": {"type": "dict"},
    "reserve_bytes": {"type": "int", "default": 1 << 30},
    "port": {"type": "int", "default": 0},
    "key": {"type": "str", "no_log": True},
    "run_dir": {"type": "path", "default": "/run/lockstep"},
    "route": {"type": "dict"},
    "look": {"type": "dict"},
    "plan": {"type": "dict"},
    "receiver": {"type": "dict"},
    "roots": {"type": "list", "elements": "path", "default": []},
    "lists": {"type": "str"},
}
# Of the action plugin alone: ``send`` starts the sender, ``poll`` waits a while and reports.
PHASE = {"_poll": {"type": "bool", "default": False}}

# Seconds that one poll waits for the end.
POLL_S = 0.7
# Seconds between two writings of the progress.
TELL_S = 0.5


class Progress:
    """How far a sender is, for ``Run``: written twice a second."""

    def __init__(self, run: background.Run, params: dict[str, Any]) -> None:
        self._run = run
        self._sizes = {item["file"]: item["bytes"] for item in params["plan"]["items"]}
        self._base = {"pid": os.getpid(), "source": _place(params, "source"), "target": _place(params, "target")}
        self.done: list[archive.Done] = []
        self._at = ("", "")
        self._bytes = self._first = 0
        self._began = self._told = 0.0
        self.say()

    def tell(self, file: str, stage: str, count: int) -> None:
        now = time.monotonic()
        if (file, stage) != self._at:
            # The first count of a stage may be of work that was done beside another: no measure of its speed.
            self._at, self._bytes, self._first, self._began, self._told = (file, stage), 0, count, now, 0.0
        self._bytes += count
        if now - self._told >= TELL_S:
            self._told = now
            self.say()

    def say(self, *, finished: bool = False, error: dict[str, Any] | None = None) -> None:
        file, stage = self._at
        total = self._sizes.get(file, 0)
        seconds = time.monotonic() - self._began
        rate = (self._bytes - self._first) / seconds if seconds > TELL_S else 0.0
        left = total - self._bytes
        self._run.say(
            **self._base,
            file=file,
            stage=stage,
            bytes=self._bytes,
            total=total,
            mb_s=round(rate / 1e6, 1),
            eta_s=round(left / rate) if rate else None,
            done=self.done,
            finished=finished,
            error=error,
        )


def _place(params: dict[str, Any], side: str) -> str:
    return f"{params['route'][side]['host']}:{params['route'][side]['dir']}"


# --- the steps --------------------------------------------------------------------------------------------------------


def expected_of(serves: dict[str, Any] | None) -> dict[str, engram.Expected]:
    """The shards that this rank serves, by name."""
    if not serves:
        return {}
    layers = [int(layer) for layer in serves["layers"]]
    tp, rank = int(serves["tp"]), int(serves["rank"])
    return {
        shard["file"]: shard for shard in engram.expected_shards(serves["config"], tp, rank, serves["split"], layers)
    }


def look(params: dict[str, Any]) -> dict[str, Any]:
    """What lies at the source, which of it is in service, and whether a sender works there already."""
    directory = params["route"]["source"]["dir"]
    archive.check_names(params["files"])
    found = archive.look(directory, params["files"] or None)
    serves = params["serves"]
    live = bool(serves) and os.path.realpath(serves["dir"]) == found["place"]["real"] and params["mode"] == "archive"
    run = background.Run(params["run_dir"], "send", directory)
    said = run.said() if run.holder() else None
    if said and said["target"] != _place(params, "target"):
        raise LockstepError(
            f"{directory} is being archived already",
            found=f"to {said['target']}, {run.holder()}",
            expected=f"to {_place(params, 'target')}",
            next_step="wait for it to end, then run again",
        )
    return {
        "changed": False,
        **found,
        "in_service": sorted(expected_of(serves)) if live else [],
        "running": {"target": said["target"], "pid": said["pid"]} if said else None,
    }


def plan(params: dict[str, Any]) -> dict[str, Any]:
    """What is to go and what the destination needs for it. LockstepError when it cannot end well."""
    route, seen = params["route"], params["look"]
    directory = route["target"]["dir"]
    one_host = route["source"]["host"] == route["target"]["host"]
    archive.check_places(seen["place"], archive.place_of(directory), one_host=one_host)
    chosen, said = (to_archive if params["mode"] == "archive" else to_restore)(params)
    steps = archive.steps(directory, chosen, params["reserve_bytes"])
    return {"changed": False, "items": chosen, "steps": steps, "said": said}


def to_archive(params: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The files of the source that go: those asked for, else every shard that is not in service."""
    seen, source, target = params["look"], _place(params, "source"), _place(params, "target")
    there = {shard["file"]: shard for shard in seen["shards"]}
    if seen["place"]["number"] is None:
        raise LockstepError(
            f"there is no directory {params['route']['source']['dir']}",
            host=params["route"]["source"]["host"],
            found="nothing under that name",
            expected="the directory that the shards lie in",
            next_step="-e archive_from=/that/directory",
        )
    for name in params["files"]:
        if "/" in name or (name not in there and seen["moved"].get(name, {}).get("place") != target):
            raise LockstepError(
                f"{source} has no file {name!r}",
                found=", ".join(sorted(there)) or "none of the files that were named",
                next_step="correct archive_files",
            )
    held = [name for name in seen["in_service"] if name in there]
    if not params["in_service"] and (asked := [name for name in held if name in params["files"]]):
        raise LockstepError(
            f"{', '.join(asked)} is in service",
            host=params["route"]["source"]["host"],
            found=f"this rank's own shard, in the directory that it serves from ({params['route']['source']['dir']})",
            expected="a shard that the fleet's plan does not need",
            next_step="leave it, or say -e archive_in_service=true; the rank then packs it again at the next launch",
        )
    kept = [name for name in held if name not in params["files"]]
    said = [f"{name} stays: this rank serves it" for name in kept]
    # What is vouched for here must be what arrives there: a damaged file is not moved as if it were whole.
    chosen = [
        {**shard, "sha256": seen["sums"].get(name, shard["sha256"])}
        for name, shard in there.items()
        if name not in kept
    ]
    if not chosen:
        gone = [f"{name} was moved to {one['place']} on {one['when']}" for name, one in sorted(seen["moved"].items())]
        said += gone or [f"{source} holds no shard to move"]
    return chosen, said


def to_restore(params: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The archived files that this rank serves and does not have, each with the hash that the archive vouches for."""
    seen, route, serves = params["look"], params["route"], params["serves"]
    expected = expected_of(serves)
    wanted = list(dict.fromkeys(params["files"])) or sorted(expected)
    there = {shard["file"]: shard for shard in seen["shards"]}
    other = {name: archive.misfit(shard, serves, expected.get(name)) for name, shard in there.items()}
    chosen, said = [], []
    for name in wanted:
        shard = there.get(name)
        if shard and not other[name]:
            other[name] = _wrong_checkpoint(shard, serves)
        if not shard or other[name]:
            continue
        if name not in seen["sums"]:
            raise LockstepError(
                f"nothing vouches for {name} in {_place(params, 'source')}",
                host=route["source"]["host"],
                found=f"no line for it in {archive.SUMS}",
                expected="its SHA-256 of the day it was archived",
                next_step="pack the shard instead: ansible-playbook pack_engram.yml",
            )
        place = Path(route["target"]["dir"], name)
        mine = archive.shard_of(place) if files.look(place) else None
        if mine and (
            mine["sha256"] == seen["sums"][name]
            or (mine["bytes"], mine["mtime_ns"]) == (shard["bytes"], shard["mtime_ns"])
        ):
            by = "its manifest" if mine["sha256"] == seen["sums"][name] else "size and time"
            said.append(f"{name} is there already, by {by}; verify_engram.yml reads it through")
        else:
            chosen.append({**shard, "sha256": seen["sums"][name]})
    absent = [name for name in wanted if name not in there]
    wrong = {name: why for name, why in other.items() if why}
    said += [f"{name} is not put into service: {'; '.join(why)}" for name, why in sorted(wrong.items())]
    if absent or [name for name in wanted if name in wrong]:
        held = [f"{name}: {'; '.join(why)}" for name, why in sorted(wrong.items())]
        raise LockstepError(
            f"{_place(params, 'source')} does not hold this rank's shards; nothing was put into service",
            host=route["target"]["host"],
            rank=int(serves["rank"]),
            found=" | ".join(held) or ", ".join(sorted(there)) or "no shard",
            expected=f"{', '.join(wanted)}: TP {serves['tp']}, split {serves['split']}, rank {serves['rank']}",
            next_step="name the archive of this rank at this TP size, or pack: ansible-playbook pack_engram.yml",
        )
    return chosen, said


def _wrong_checkpoint(shard: dict[str, Any], serves: dict[str, Any]) -> list[str]:
    """Why a shard was not packed from the checkpoint that this rank has; empty when nothing says so."""
    said = shard["checkpoint"] or {}
    if not serves.get("checkpoint") or not (said or shard["revision"]):
        return []
    here = engram.checkpoint_identity(serves["checkpoint"], int(shard["layer"]))
    for revision in (shard["revision"], said.get("revision")):
        if revision and here["revision"] and revision != here["revision"]:
            return [f"packed from checkpoint revision {revision}, not {here['revision']}"]
    if said and said.get("files") != here["files"]:
        return [f"packed from checkpoint files {said.get('files')}, not {here['files']}"]
    return []


def receive(params: dict[str, Any]) -> dict[str, Any]:
    """Start the receiver and say where it listens."""
    route, directory = params["route"], params["route"]["target"]["dir"]
    run = background.Run(params["run_dir"], "receive", directory, _place(params, "source"))
    key = bytes.fromhex(params["key"])
    origin = _place(params, "source") if params["mode"] == "archive" else ""

    def work(report: Callable[[dict[str, Any]], None]) -> None:
        with run.held(f"receiving in {directory} from {_place(params, 'source')}"):
            with wire.listen(route["address"], params["port"]) as listener:
                run.say(waiting=os.getpid())
                report({"port": listener.getsockname()[1], "pid": os.getpid()})
                channel = wire.accept(listener, key)
                run.say(waiting=None)
            items, host = params["plan"]["items"], route["target"]["host"]
            for _ in archive.receive(channel, directory, items, host=host, origin=origin, tell=_nothing):
                pass

    return {"changed": False, **background.detach(work)}


def _nothing(_file: str, _stage: str, _count: int) -> None:
    """The receiver tells the sender over their connection."""


def send(params: dict[str, Any]) -> dict[str, Any]:
    """Start the sender; with one host, the receiver is a thread of it."""
    route, items = params["route"], params["plan"]["items"]
    run = background.Run(params["run_dir"], "send", route["source"]["dir"])

    def work(report: Callable[[dict[str, Any]], None]) -> None:
        with run.held(f"sending {_place(params, 'source')} to {_place(params, 'target')}"):
            progress = Progress(run, params)
            report({"pid": os.getpid()})
            try:
                for done in archive.send(
                    _channel(params),
                    route["source"]["dir"],
                    items,
                    host=route["source"]["host"],
                    target=_place(params, "target"),
                    remove=params["mode"] == "archive",
                    tell=progress.tell,
                ):
                    progress.done.append(done)
                    progress.say()
                progress.say(finished=True)
            except Exception as error:  # noqa: BLE001 - whatever it was, who follows this sender has to read it
                progress.say(finished=True, error=background.fields(error))

    return {"changed": False, **background.detach(work)}


def _channel(params: dict[str, Any]) -> wire.Channel:
    route = params["route"]
    if route["address"]:
        key = bytes.fromhex(params["key"])
        return wire.connect(route["address"], params["receiver"]["port"], key)
    key = os.urandom(wire.KEY_BYTES)
    ours, theirs = socket.socketpair()
    origin = _place(params, "source") if params["mode"] == "archive" else ""

    def receiving() -> None:
        # Its errors come to the sender as words.
        with theirs, contextlib.suppress(LockstepError, OSError):
            for _ in archive.receive(
                wire.Channel(theirs, key, "receiver"),
                route["target"]["dir"],
                params["plan"]["items"],
                host=route["target"]["host"],
                origin=origin,
                tell=_nothing,
            ):
                pass

    threading.Thread(target=receiving, daemon=True).start()
    return wire.Channel(ours, key, "sender")


def poll(params: dict[str, Any]) -> dict[str, Any]:
    """Wait a while for the sender's end; how far it is, or how it ended."""
    run = background.Run(params["run_dir"], "send", params["route"]["source"]["dir"])
    alive = run.wait(POLL_S)
    said = run.said()
    if alive:
        return {"changed": False, "progress": said, "finished": False}
    if not said or not said["finished"]:
        raise LockstepError(
            "the sender ended without a word",
            host=params["route"]["source"]["host"],
            found=f"it was at {said['stage']} of {said['file']}, {said['bytes']:,} bytes" if said else "no trace of it",
            expected="its report",
            next_step="run again: it goes on where it ended; see dmesg for a kill for memory",
        )
    # The report stays for whoever else follows this sender; the next one writes its own over it.
    if said["error"]:
        raise LockstepError(**said["error"])
    moved = [done for done in said["done"] if done["removed"] or params["mode"] == "restore"]
    return {"changed": bool(moved), "progress": said, "finished": True, "done": said["done"]}


def close(params: dict[str, Any]) -> dict[str, Any]:
    """See the receiver end, and end one that its sender has not come to. What it wrote stays for the next run."""
    run = background.Run(params["run_dir"], "receive", params["route"]["target"]["dir"], _place(params, "source"))
    run.end(int(params["receiver"]["pid"]), wire.GREET_S)
    return {"changed": False}


def survey(params: dict[str, Any]) -> dict[str, Any]:
    """Every shard on this host."""
    serves = params["serves"]
    shards = archive.survey(params["roots"], serves["dir"], sorted(expected_of(serves)))
    return {"changed": False, "shards": shards, "live": serves["dir"]}


STEPS = {"look": look, "plan": plan, "receive": receive, "send": send, "close": close, "list": survey}


def main() -> None:
    """Do the step that was asked for."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC | PHASE, supports_check_mode=True)
    params = module.params
    try:
        result = poll(params) if params["_poll"] else STEPS[params["step"]](params)
    except (LockstepError, OSError) as error:
        if isinstance(error, LockstepError):
            side = {"look": "source", "send": "source"}.get(params["step"], "target")
            error.host = error.host or ((params["route"] or {}).get(side) or {}).get("host")
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
