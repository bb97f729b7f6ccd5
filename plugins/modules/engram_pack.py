#!/usr/bin/python
"""Ansible module: a rank's packed Engram shards. The action of the same name asks for its steps, on the rank."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engram_pack
short_description: Have a rank's Engram shards packed and proven, or only look at them
description:
  - Looks at the rank's shards first. One that is good (its manifest vouches for the file as it lies there, its header
    says this rank, split and range) stays as it is. One without a manifest is compared with the checkpoint. A missing
    one is packed. Another file under a shard's name is refused or set aside.
  - Packing and comparing run in a container of the engine image on the rank, with the checkpoint mounted read-only,
    without a network, a writable root or any capability but that of writing into the shards' directory. The container
    is removed again.
  - Every shard is read back from the disk before it gets its name. An interrupted packing is taken up again where it
    was durable, as long as the checkpoint's files are untouched.
  - Progress is printed for every rank each second. An interrupted playbook does not interrupt the packing; the next run
    joins it.
  - Space is counted and shown before a byte is written.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: Predicts what it would pack, compare and set aside, space included, and changes nothing.
    support: full
  diff_mode:
    description: Shows the rank's shards before and after.
    support: full
options:
  image:
    description:
      - The engine image with Lockstep's overlay, as a name or an Id. It is not pulled.
    type: str
    required: true
  checkpoint:
    description:
      - Directory of the checkpoint on the rank, with C(config.json) and the safetensors files.
    type: path
    required: true
  dir:
    description:
      - Directory of this rank's shards. It is made when there is something to pack.
    type: path
    required: true
  state:
    description:
      - V(packed) packs what is missing. V(verified) writes nothing, and whatever it finds is no error; RV(shards) says
        it.
    type: str
    choices: [packed, verified]
    default: packed
  verify:
    description:
      - How closely O(state=verified) looks. V(quick) compares name, header, size and manifest, in milliseconds;
        V(sample) also some rows with the checkpoint; V(full) also reads every byte, in a container as packing does.
    type: str
    choices: [quick, sample, full]
    default: full
  rank:
    description: The rank's place in the tensor-parallel world.
    type: int
    required: true
  tp:
    description: Number of ranks.
    type: int
    required: true
  split:
    description:
      - How the engine image splits the tables over the ranks. A property of the image, V(rows) for C(dev-dsv41) and
        SGLang up to 0.5.22, V(heads) from 0.5.23 on.
    type: str
    choices: [rows, heads]
    required: true
  layers:
    description: Layers that have an Engram table.
    type: list
    elements: int
    default: [1, 14]
  wrong:
    description:
      - What to do with another file under a shard's name, such as a shard of another TP size or split, or with a shard
        whose content turns out to be wrong.
      - V(fail) names it, V(set_aside) renames it to C(<name>.aside-<UTC time>). Nothing is ever deleted.
    type: str
    choices: [fail, set_aside]
    default: fail
  force:
    description: Pack good shards again.
    type: bool
    default: false
  reserve_bytes:
    description: Bytes that stay free on the shards' filesystem.
    type: int
    default: 1073741824
  bench_lock:
    description:
      - File that a benchmark on this rank holds a lock on. While one does, nothing is packed or read through.
    type: path
"""

EXAMPLES = r"""
- name: Pack this rank's shards
  lockstep.fleet.engram_pack:
    image: dsv41-3x-spark:local
    checkpoint: /srv/models/DeepSeek-V4.1-Flash
    dir: /srv/dsv41/engram
    rank: "{{ fleet_rank }}"
    tp: 3
    split: rows
  register: packed

- name: Show what every rank holds
  ansible.builtin.debug:
    msg: "{{ packed.shards }}"

- name: The same, after a change of TP size
  lockstep.fleet.engram_pack:
    image: dsv41-3x-spark:local
    checkpoint: /srv/models/DeepSeek-V4.1-Flash
    dir: /srv/dsv41/engram
    rank: "{{ fleet_rank }}"
    tp: 2
    split: heads
    wrong: set_aside

- name: Read this rank's shards through and say what is wrong with them
  lockstep.fleet.engram_pack:
    image: dsv41-3x-spark:local
    checkpoint: /srv/models/DeepSeek-V4.1-Flash
    dir: /srv/dsv41/engram
    rank: "{{ fleet_rank }}"
    tp: 3
    split: rows
    state: verified
    verify: full
"""

RETURN = r"""
rank:
  description: The rank, as P(lockstep.fleet.packed_report#filter) wants it beside RV(shards).
  returned: success
  type: int
  sample: 0
actions:
  description: What was done to each shard (V(check) with O(state=verified)), in check mode what would be.
  returned: success
  type: list
  elements: dict
  sample: [{layer: 1, file: engram-l1-r0of3.bin, action: pack}, {layer: 14, file: engram-l14-r0of3.bin, action: keep}]
shards:
  description: The rank's shards as they are afterwards, in check mode as they are.
  returned: success
  type: list
  elements: dict
  sample:
    - layer: 1
      file: engram-l1-r0of3.bin
      state: ok
      fault: null
      why: null
      bytes: 33792546880
      rows: [0, 128002056]
      split: rows
      sha256: 9e7573e714d807fcdf86861b5cffd483a8214c12a55a1d67571bb20e674603f9
      inode: 2385745
      mtime_ns: 1795967714200924814
space:
  description: Bytes that are to be written, that are free, that an interrupted packing left, and that stay free.
  returned: O(state=packed)
  type: dict
  sample: {needed: 67586019136, free: 420906795008, reclaim: 0, reserve: 8589934592}
work:
  description: What the packing said of each shard, with seconds and MB/s. Empty when there was nothing to do.
  returned: success
  type: list
  elements: dict
  sample: [{layer: 1, file: engram-l1-r0of3.bin, action: pack, bytes: 33792546880, seconds: 96.1, mb_s: 351.6}]
set_aside:
  description: New names of files that stood under a shard's name (in check mode the files that would be renamed).
  returned: success
  type: list
  elements: str
"""

import contextlib
import hashlib
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, engram, files, images
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Sequence

ARGUMENT_SPEC: dict[str, Any] = {
    "image": {"type": "str", "required": True},
    "checkpoint": {"type": "path", "required": True},
    "dir": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["packed", "verified"], "default": "packed"},
    "verify": {"type": "str", "choices": ["quick", "sample", "full"], "default": "full"},
    "rank": {"type": "int", "required": True},
    "tp": {"type": "int", "required": True},
    "split": {"type": "str", "choices": ["rows", "heads"], "required": True},
    "layers": {"type": "list", "elements": "int", "default": [1, 14]},
    "wrong": {"type": "str", "choices": ["fail", "set_aside"], "default": "fail"},
    "force": {"type": "bool", "default": False},
    "reserve_bytes": {"type": "int", "default": 1 << 30},
    "bench_lock": {"type": "path"},
    "docker_host": {"type": "str"},
}
# Of the action plugin alone: ``start`` looks and starts what is needed, ``poll`` waits a while and reports.
PHASE = {"_phase": {"type": "str", "choices": ["start", "poll"], "required": True}}

CONTAINER = "lockstep-engram-pack"
LABEL = "lockstep.pack"
PROGRESS = ".engram-pack.json"
# Of a container that serves.
LAUNCH_LABEL = "lockstep.launch"
# Seconds that one poll waits for the end before it reports how far the work is; asking takes half a second more.
POLL_S = 0.5
LOG_LINES = 30


def expected(params: dict[str, Any]) -> list[engram.Expected]:
    """The shards that this rank must hold, by the checkpoint's own config."""
    config = engram.read_config(params["checkpoint"])
    return engram.expected_shards(config, params["tp"], params["rank"], params["split"], params["layers"])


def table(found: Sequence[engram.Inspection]) -> str:
    """The shards as lines for the diff."""
    lines = []
    for shard in found:
        rows = shard["rows"]
        size = "" if shard["bytes"] is None else f", {shard['bytes']:,} bytes"
        span = f", rows [{rows[0]},{rows[1]})" if rows else ""
        split = f", split {shard['split']}" if shard["split"] else ""
        why = f" ({shard['why']})" if shard["why"] else ""
        lines.append(f"layer {shard['layer']}: {shard['file']} {shard['state']}{why}{size}{span}{split}\n")
    return "".join(lines)


def predicted(step: engram.Step) -> engram.Inspection:
    """The shard as it will be: what is good stays, the rest becomes good."""
    wanted = step["expected"]
    return {
        **step["found"],
        "state": "ok",
        "why": None,
        "bytes": wanted["bytes"],
        "rows": wanted["rows"],
        "split": wanted["split"],
    }


class Plan(NamedTuple):
    """What each shard needs, which files have to go aside first, and the space for it."""

    steps: list[engram.Step]
    aside: list[Path]
    space: engram.Space


def plan(params: dict[str, Any]) -> Plan:
    """Decide by looking. LockstepError when it cannot end well."""
    place = Path(params["dir"])
    steps = engram.work(params["checkpoint"], place, expected(params), force=params["force"])
    aside: list[Path] = []
    for step in steps:
        path = place / step["expected"]["file"]
        if step["action"] != "refuse":
            continue
        if params["wrong"] == "fail":
            raise engram.wrong_shard(path, step["found"], step["expected"])
        aside += [part for part in (path, engram.manifest_path(path)) if files.look(part)]
        step.update({"action": "pack", "needed": step["expected"]["bytes"]})
    return Plan(steps, aside, engram.require_space(files.nearest(place), steps, params["reserve_bytes"]))


def require_quiet(params: dict[str, Any]) -> None:
    """Refuse to load a rank's disk while a benchmark runs on it."""
    measuring = files.holder(params["bench_lock"]) if params.get("bench_lock") else None
    if measuring:
        raise LockstepError(
            "a benchmark runs on this rank",
            rank=params["rank"],
            found=f"{measuring} holds {params['bench_lock']}",
            expected="nobody does, as packing and reading through would spoil its figures",
            next_step="wait for its end, then run again",
        )


def serving(engine: docker_api.Engine) -> list[str]:
    """Warnings: what serves on this rank meanwhile."""
    return [
        f"{container['name']} serves on this rank meanwhile (launch {container['labels'][LAUNCH_LABEL]}): its answers "
        "slow down while the disk is busy"
        for container in docker_api.containers(engine, label=LAUNCH_LABEL)
        if container["state"] == "running"
    ]


def engine_image(engine: docker_api.Engine, params: dict[str, Any]) -> str:
    """Id of the image to pack with. LockstepError when this rank does not have it."""
    found = docker_api.inspect_image(engine, params["image"])
    if found is None:
        raise LockstepError(
            "the engine image to pack with is not on this rank",
            rank=params["rank"],
            found=f"no image {params['image']}",
            expected="the overlay image that all ranks share",
            next_step="ansible-playbook converge_images.yml",
        )
    stamped = (found["Config"].get("Labels") or {}).get(images.SPLIT_LABEL)
    if stamped not in (None, params["split"]):
        raise LockstepError(
            f"the engine of {params['image']} splits the Engram tables in another way",
            rank=params["rank"],
            found=f"split {params['split']} asked for",
            expected=f"{stamped}, by the image's label {images.SPLIT_LABEL}",
            next_step="correct engram_split of this base image in fleet_image_builds",
        )
    return str(found["Id"])


def body(image: str, params: dict[str, Any]) -> dict[str, Any]:
    """The container that packs. Both directories keep the host's paths, so that messages name files a person finds."""
    place, checkpoint, packs = params["dir"], params["checkpoint"], params["state"] == "packed"
    command = ["--checkpoint", checkpoint, "--out", place, "--layers", ",".join(map(str, params["layers"]))]
    command += ["--rank", str(params["rank"]), "--tp", str(params["tp"]), "--split", params["split"]]
    if packs:
        command += ["--reserve", str(params["reserve_bytes"]), "--progress", f"{place}/{PROGRESS}"]
        command += ["--wrong", params["wrong"], *(["--force"] if params["force"] else [])]
    else:
        command += ["--verify", params["verify"], "--progress", "-"]
    what = json.dumps([image, command])
    return {
        "Image": image,
        "Entrypoint": ["python3", "-m", "lockstep_tools.pack"],
        "Cmd": command,
        "User": "0:0",
        "WorkingDir": "/",
        # Packing needs no accelerator, whatever the engine's default runtime hands out.
        "Env": ["NVIDIA_VISIBLE_DEVICES=void", "PYTHONDONTWRITEBYTECODE=1"],
        "Labels": {LABEL: hashlib.sha256(what.encode()).hexdigest()},
        "NetworkDisabled": True,
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            # Root without it cannot write into, or read from, a directory that belongs to another user.
            "CapAdd": ["DAC_OVERRIDE" if packs else "DAC_READ_SEARCH"],
            "SecurityOpt": ["no-new-privileges"],
            "LogConfig": {"Type": "json-file"},
            "Mounts": [
                {"Type": "bind", "Source": checkpoint, "Target": checkpoint, "ReadOnly": True},
                {"Type": "bind", "Source": place, "Target": place, "ReadOnly": not packs},
            ],
        },
    }


def report(params: dict[str, Any]) -> Path:
    """Where the packing says how far it is."""
    return Path(params["dir"]) / PROGRESS


def progress(engine: docker_api.Engine, params: dict[str, Any]) -> dict[str, Any] | None:
    """How far the container says it is; one that only looks writes no file, but its log."""
    said: object = None
    if params["state"] == "packed":
        said = files.read_json(report(params)) if files.look(report(params)) else None
    elif docker_api.inspect_container(engine, CONTAINER):
        for line in docker_api.logs(engine, CONTAINER, tail=LOG_LINES).splitlines():
            with contextlib.suppress(ValueError):  # other words between the reports
                said = json.loads(line)
    return said if isinstance(said, dict) else None


def join(engine: docker_api.Engine, wanted: dict[str, Any], params: dict[str, Any]) -> str | None:
    """Id of the container that an interrupted run left packing the very same; LockstepError for one at other work."""
    standing = docker_api.inspect_container(engine, CONTAINER)
    if standing and standing["State"]["Running"]:
        if standing["Config"]["Labels"].get(LABEL) == wanted["Labels"][LABEL]:
            return str(standing["Id"])
        raise LockstepError(
            "another packing, or reading through, runs on this rank",
            rank=params["rank"],
            found=f"container {CONTAINER}: {' '.join(standing['Args'])}",
            next_step=f"wait for its end, or docker stop {CONTAINER}",
        )
    return None


def launch(engine: docker_api.Engine, wanted: dict[str, Any], params: dict[str, Any]) -> str:
    """Start the container and return its Id."""
    remove(engine)
    report(params).unlink(missing_ok=True)
    created = engine.post_json_to_json("/containers/create", data=wanted, params={"name": CONTAINER})
    engine.post_call("/containers/{0}/start", created["Id"])
    return str(created["Id"])


def remove(engine: docker_api.Engine) -> bool:
    """Remove a container that has ended; whether there was one."""
    standing = docker_api.inspect_container(engine, CONTAINER)
    if standing is None or standing["State"]["Running"]:
        return False
    engine.delete_call("/containers/{0}", standing["Id"], params={"v": "1"})
    return True


def start(params: dict[str, Any], *, check_mode: bool) -> dict[str, Any]:
    """Look, decide, and start what is needed. The result of a run in which nothing is to do, or of check mode."""
    if params["state"] == "verified":
        return look(params)
    steps, aside, space = plan(params)
    work = [step for step in steps if step["action"] != "keep"]
    before = [step["found"] for step in steps]
    result: dict[str, Any] = {
        "changed": bool(work),
        "rank": params["rank"],
        "actions": [{**_names(step["expected"]), "action": step["action"]} for step in steps],
        "shards": before,
        "space": space,
        "work": [],
        "set_aside": [str(path) for path in aside],
        "diff": {
            "before": table(before),
            "after": table([predicted(step) for step in steps]),
            "before_header": params["dir"],
            "after_header": params["dir"],
        },
        "_container": None,
    }
    if work:
        require_quiet(params)
        result["warnings"] = serving(docker_api.Engine(params["docker_host"]))
    if check_mode:
        return result
    engine = docker_api.Engine(params["docker_host"])
    if not work:
        # What an interrupted run left behind, its work done.
        result["changed"] = remove(engine)
        report(params).unlink(missing_ok=True)
        return result
    wanted = body(engine_image(engine, params), params)
    result["_container"] = join(engine, wanted, params)
    if result["_container"] is None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        result["set_aside"] = [files.set_aside(path, stamp) for path in aside]
        Path(params["dir"]).mkdir(mode=0o755, parents=True, exist_ok=True)
        result["_container"] = launch(engine, wanted, params)
    return result


def look(params: dict[str, Any]) -> dict[str, Any]:
    """Check the shards and change nothing; start the container that reads through those that can be right."""
    wanted = expected(params)
    level = "sample" if params["verify"] == "sample" else "quick"
    found = [
        engram.check_shard(Path(params["dir"]) / shard["file"], shard, params["checkpoint"], level) for shard in wanted
    ]
    result: dict[str, Any] = {
        "changed": False,
        "rank": params["rank"],
        "actions": [{**_names(shard), "action": "check"} for shard in wanted],
        "shards": found,
        "work": [],
        "set_aside": [],
        "_container": None,
    }
    if params["verify"] == "full" and any(shard["state"] != "wrong" and shard["bytes"] is not None for shard in found):
        require_quiet(params)
        engine = docker_api.Engine(params["docker_host"])
        result["warnings"] = serving(engine)
        container = body(engine_image(engine, params), params)
        result["_container"] = join(engine, container, params) or launch(engine, container, params)
    return result


def poll(params: dict[str, Any]) -> dict[str, Any]:
    """Wait a while for the end; how far the work is, or how it ended and what the rank holds now."""
    engine = docker_api.Engine(params["docker_host"])
    until = time.monotonic() + POLL_S
    standing = docker_api.inspect_container(engine, CONTAINER)
    while standing and standing["State"]["Running"] and time.monotonic() < until:
        time.sleep(0.1)
        standing = docker_api.inspect_container(engine, CONTAINER)
    said = progress(engine, params)
    if standing is None:
        raise LockstepError(
            "the packing container was removed while it ran",
            rank=params["rank"],
            found=f"no container {CONTAINER}",
            next_step="run again; finished shards are kept",
        )
    if standing["State"]["Running"]:
        return {"changed": False, "_progress": said, "_finished": False}
    if standing["State"]["ExitCode"] != 0:
        error = _failure(engine, standing, said, params["rank"])
        remove(engine)
        raise error
    remove(engine)
    if params["state"] == "verified":
        return {"changed": False, "_progress": said, "_finished": True, "shards": (said or {})["shards"]}
    report(params).unlink(missing_ok=True)
    shards = [
        engram.inspect_shard(
            Path(params["dir"]) / wanted["file"],
            wanted,
            engram.checkpoint_identity(params["checkpoint"], wanted["layer"]),
        )
        for wanted in expected(params)
    ]
    return {"changed": True, "_progress": said, "_finished": True, "shards": shards}


def _failure(engine: docker_api.Engine, standing: dict[str, Any], said: object, rank: int) -> LockstepError:
    """Why the container ended: its own words, the kernel's, or the end of its log."""
    if isinstance(said, dict) and said.get("error"):
        return LockstepError(str(said["error"]).removeprefix(f"rank {rank}: "), rank=rank)
    state = standing["State"]
    log = docker_api.logs(engine, CONTAINER, tail=LOG_LINES).strip()
    return LockstepError(
        "packing failed",
        rank=rank,
        found="killed for memory" if state["OOMKilled"] else f"exit status {state['ExitCode']} {state['Error']}\n{log}",
        expected="exit status 0",
        next_step="mend it and run again; finished shards are kept",
    )


def _names(wanted: engram.Expected) -> dict[str, Any]:
    return {"layer": wanted["layer"], "file": wanted["file"]}


def main() -> None:
    """Do the step that was asked for."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC | PHASE, supports_check_mode=True)
    try:
        if module.params["_phase"] == "start":
            result = start(module.params, check_mode=module.check_mode)
        else:
            result = poll(module.params)
    except (LockstepError, docker_api.EngineError, OSError) as error:
        if isinstance(error, LockstepError) and error.rank is None:
            error.rank = module.params["rank"]
        module.fail_json(msg=str(error), exception=error)
    for warning in result.pop("warnings", []):
        module.warn(warning)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
