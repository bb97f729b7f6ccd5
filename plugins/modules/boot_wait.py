#!/usr/bin/python
"""Ansible module: one long look at the boot of a rank's container (the action of the same name repeats it)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: boot_wait
short_description: Follow the boot of a rank's engine until it serves, fails or takes too long
description:
  - Reads the state and the log of a rank's container through Docker's API, prints a line on the controller when the
    stage changes or every ten seconds, and ends as soon as the rank is ready or a fatal line appears.
  - The head is ready when its log says so and C(/health) on O(port) answers 200. A worker is ready when its log reached
    the end of its scheduler's start; its HTTP health is a dummy and never asked. A worker that is ready keeps being
    watched until the head is ready too.
  - One rank's fatal line ends the wait on all hosts that share O(signal_dir). The message names the rank, the line that
    came first and not the loudest, what was expected and what to do next.
  - When the wait ends, however it does, what can be known of the rank is kept in O(signal_dir), mode 0600 - its log as
    C(boot/<host>.log), and as C(boot/<host>.json) its container's mounts, arguments, effective environment and hashes
    of O(image_files), and what its log says.
  - Never changes anything on the rank.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: Skipped without waiting, because nothing was started.
    support: none
  diff_mode:
    description: Changes nothing.
    support: none
options:
  container:
    description: Name of the rank's engine container.
    type: str
    required: true
  role:
    description: What the rank is.
    type: str
    choices: [head, worker]
    required: true
  port:
    description: Port of the head's HTTP server on the rank.
    type: int
    required: true
  rank:
    description: Number of the rank, for messages; without it the one that the log's lines name.
    type: int
  timeout:
    description: Seconds until a boot that neither got ready nor failed counts as failed.
    type: int
    default: 900
  signal_dir:
    description:
      - Directory on the controller, one for each launch, through which the hosts tell each other that one failed, and
        where their logs are kept. Without it each host waits for itself and keeps nothing.
    type: path
  wait:
    description: Seconds that one look at the rank lasts at most, if nothing changes.
    type: int
    default: 10
  since:
    description: RV(cursor) of the look before; events before it are not returned again.
    type: str
  image_files:
    description: Paths inside the container whose hashes are kept; a directory takes every file below it.
    type: list
    elements: str
    default: []
  collect:
    description: Whether to return what is kept of the rank - never, when it is ready, or in any case.
    type: str
    choices: [never, ready, now]
    default: never
"""

EXAMPLES = r"""
- name: Follow the boot
  lockstep.fleet.boot_wait:
    container: "{{ 'dsv41-head' if fleet_role == 'head' else 'dsv41-worker' }}"
    role: "{{ fleet_role }}"
    rank: "{{ fleet_rank }}"
    port: 8888
    timeout: 1800
    signal_dir: results/20260924T010203Z-e8-0a1b2c
  register: boot

- name: Show how large the KV pool became
  ansible.builtin.debug:
    var: boot.facts.pool_tokens
"""

RETURN = r"""
state:
  description: How far the boot is.
  type: str
  returned: when the rank was looked at
  sample: ready
stage:
  description: The last known stage of the boot, with progress where the log tells.
  type: str
  returned: when the rank was looked at
  sample: load weights 24/48
facts:
  description: What the log proves - packed, pool_tokens, tactics, adapters, faults, warnings.
  type: dict
  returned: when the rank was looked at
cause:
  description: The fault that no other fault brought about; null when there is none or the log does not hold it.
  type: dict
  returned: when the rank was looked at
log_tail:
  description: The last 40 lines of the log.
  type: list
  elements: str
  returned: when the rank was looked at
events:
  description: What happened since the cursor.
  type: list
  elements: dict
  returned: when the rank was looked at
cursor:
  description: Where the next look goes on.
  type: str
  returned: when the rank was looked at
seconds:
  description: How long the wait lasted.
  type: float
  returned: when the rank was looked at
exit_code:
  description: The container's exit code; null while it lives.
  type: int
  returned: when the rank was looked at
oom_killed:
  description: Whether the kernel killed it for memory.
  type: bool
  returned: when the rank was looked at
log:
  description: The log since the container's start, zlib-compressed, in Base64.
  type: str
  returned: as O(collect) says
container:
  description: The container, null when there is none - C(argv), C(env), C(mounts), C(image_id), C(state), C(files).
  type: dict
  returned: as O(collect) says
"""

import time
import urllib.error
import urllib.request
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import boot, docker_api
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "container": {"type": "str", "required": True},
    "role": {"type": "str", "choices": ["head", "worker"], "required": True},
    "port": {"type": "int", "required": True},
    "rank": {"type": "int"},
    "timeout": {"type": "int", "default": 900},
    "signal_dir": {"type": "path"},
    "wait": {"type": "int", "default": 10},
    "since": {"type": "str"},
    "image_files": {"type": "list", "elements": "str", "default": []},
    "collect": {"type": "str", "choices": ["never", "ready", "now"], "default": "never"},
    "docker_host": {"type": "str"},
}
# Between two readings of the log: short at first, for an engine that is quick.
STEP_S = (0.2, 1.0)
# A change of stage is told after this long, so that stages of a moment do not each cost a new look.
TELL_S = 1.0
# The engine makes a token before it answers, which takes over a second on a CPU.
HEALTH_TIMEOUT_S = 8.0


def health(port: int) -> int | None:
    """Status of /health on this rank, None when nothing answers. Never through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def look(client: docker_api.Client, params: dict[str, Any]) -> dict[str, Any]:
    """Look once; ``boot.judge``'s answer, when this container was started, its log and the container."""
    inspect = docker_api.inspect_container(client, params["container"])
    container = docker_api.container_facts(inspect) if inspect is not None else None
    started = container["started_at"] if container else ""
    log = ""
    if container is not None and not started.startswith("0001-"):  # one that never started has no log
        # A container that was started again keeps the log of its earlier life.
        log = docker_api.logs(client, container["id"], since=docker_api.began(container))
    seen = boot.judge(log, container, role=params["role"], rank=params["rank"])
    if params["role"] == "head" and seen["state"] == "starting" and seen["facts"]["ready"]:
        seen = boot.judge(log, container, role="head", health=health(params["port"]), rank=params["rank"])
    return {**seen, "started_at": started, "log": log, "container": container}


def run(params: dict[str, Any]) -> dict[str, Any]:
    """Look until something that matters changes, ``wait`` seconds at most."""
    client = docker_api.Engine(params["docker_host"])
    begun = time.monotonic()
    before, _, shown = (params["since"] or "").rpartition("|")
    while True:
        seen = look(client, params)
        # "24/48" moves all the time and is no change of stage.
        now = "|".join((seen["started_at"], seen["state"], seen["stage"].rstrip("0123456789/ ")))
        ended, changed = seen["state"] in {"fatal", "exited"}, now != before
        elapsed = time.monotonic() - begun
        step = min(max(elapsed, STEP_S[0]), STEP_S[1])
        if ended or (changed and (seen["state"] == "ready" or elapsed >= TELL_S)) or elapsed + step > params["wait"]:
            break
        time.sleep(step)
    log, container = seen.pop("log"), seen.pop("container")
    if params["collect"] in {"now", seen["state"]}:
        seen["log"] = docker_api.packed(log)
        seen["container"] = container and {
            **container,
            "files": docker_api.container_files(client, container["id"], params["image_files"]),
        }
    same_life = before.startswith(seen["started_at"] + "|") and shown.isdigit()
    return {
        **seen,
        "changed": False,
        "events": seen["events"][int(shown) if same_life else 0 :],
        "cursor": f"{now}|{len(seen['events'])}",
        "seconds": round(time.monotonic() - begun, 3),
    }


def main() -> None:
    """Run as a module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=False)
    try:
        module.exit_json(**run(module.params))
    except (LockstepError, docker_api.EngineError) as error:
        module.fail_json(msg=str(error), exception=error)


if __name__ == "__main__":
    main()
