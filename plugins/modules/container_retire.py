#!/usr/bin/python
"""Ansible module: stop a rank's engine container, keep its log, remove it (the action keeps the controller's copy)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: container_retire
short_description: Stop a container gracefully, save its whole log, then remove it
description:
  - The container gets SIGTERM and O(timeout_s) seconds to end, then SIGKILL.
  - Its log is saved after it ended, so that the last lines are in it, and before it is removed.
  - Volumes are never removed and nothing else of the host is touched. A checkpoint that other ranks mount from this
    host stays exported.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: Says what it would stop and remove and changes nothing.
    support: full
  diff_mode:
    description: Shows the container's state before and after.
    support: full
options:
  name:
    description: Name of the container.
    type: str
    required: true
  logs_dir:
    description:
      - Directory on the rank in which the log is saved, mode 0600, as C(<launch>.log). The launch is the container's
        label C(lockstep.launch); without that label the file is named after the container and its id.
    type: path
    required: true
  results_dir:
    description:
      - Directory on the controller in which the log is kept too, mode 0600, as C(<launch>/logs/<host>.log). Without it,
        and for a container without that label, the log stays on the rank only.
    type: path
  timeout_s:
    description: Seconds between SIGTERM and SIGKILL; the engine ends its running requests in this time.
    type: int
    default: 60
"""

EXAMPLES = r"""
- name: Stop the worker and keep its log
  lockstep.fleet.container_retire:
    name: dsv41-worker
    logs_dir: /srv/lockstep/logs
    timeout_s: 30
"""

RETURN = r"""
container:
  description: The container that was there, null when there was none.
  returned: always
  type: dict
  contains:
    id: {description: "Its id.", type: str}
    image_id: {description: "Id of its image.", type: str}
    state: {description: "Its state before (running, exited, …).", type: str}
    launch: {description: "Its launch, null when it has no such label.", type: str}
    exit_code: {description: "How it ended; null in check mode while it runs.", type: int}
    oom_killed: {description: "Whether the kernel killed it for memory.", type: bool}
kept:
  description: Where on the controller the log was saved (in check mode where it would be), null when it was not.
  returned: always
  type: str
  sample: results/20260924T094700Z-e8-0a1b2c/logs/spark1.log
log:
  description: Where the log was saved (in check mode where it would be), null when there was nothing to save.
  returned: always
  type: str
  sample: /srv/lockstep/logs/20260924T094700Z-e8-0a1b2c.log
"""

import re
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, files
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "name": {"type": "str", "required": True},
    "logs_dir": {"type": "path", "required": True},
    "results_dir": {"type": "path"},
    "timeout_s": {"type": "int", "default": 60},
    "docker_host": {"type": "str"},
}
# The engine answers a stop only when the container ended; removing and reading take time of their own.
ANSWER_S = 60
# What docker can give back; a container that logs elsewhere has its log there.
READABLE_DRIVERS = ("json-file", "local", "journald")


def retire(client: docker_api.Engine, params: dict[str, Any], *, check_mode: bool) -> dict[str, Any]:
    """Stop, save, remove; returns the module's result."""
    name = params["name"]
    inspect = docker_api.inspect_container(client, name)
    if inspect is None:
        return {"changed": False, "container": None, "log": None, "diff": _diff(name, "absent", "absent")}
    text = None
    facts = docker_api.container_facts(inspect)
    readable = inspect["HostConfig"]["LogConfig"]["Type"] in READABLE_DRIVERS
    log = f"{params['logs_dir']}/{_log_name(facts)}" if readable else None
    ended = facts
    if not check_mode:
        if facts["state"] == "paused":
            client.post_call("/containers/{0}/unpause", facts["id"])
        if facts["state"] in ("running", "paused", "restarting"):
            client.post_call(
                "/containers/{0}/stop",
                facts["id"],
                params={"t": params["timeout_s"]},
                timeout=params["timeout_s"] + ANSWER_S,
            )
        ended = docker_api.container_facts(docker_api.inspect_container(client, facts["id"]) or inspect)
        if log:
            text = docker_api.logs(client, facts["id"])
            files.write_atomic(log, text)
        # v=0: volumes stay. Not forced: it has ended, or something is wrong that a person should see.
        client.delete_call("/containers/{0}", facts["id"], params={"v": "0"})
    return {
        "changed": True,
        "container": {
            "id": facts["id"],
            "image_id": facts["image_id"],
            "state": facts["state"],
            "launch": facts["labels"].get("lockstep.launch"),
            "exit_code": None if ended["state"] == "running" else ended["exit_code"],
            "oom_killed": ended["oom_killed"],
        },
        "log": log,
        # For the action, which keeps it and takes it out of the result.
        "packed_log": docker_api.packed(text) if text is not None and params["results_dir"] else None,
        "diff": _diff(name, f"{facts['state']}, id {facts['id'][:12]}", f"absent, log in {log}" if log else "absent"),
    }


def _log_name(facts: dict[str, Any]) -> str:
    launch = facts["labels"].get("lockstep.launch") or f"{facts['name']}-{facts['id'][:12]}"
    return re.sub(r"[^A-Za-z0-9._=+-]", "-", launch) + ".log"  # a label may hold anything, a file name may not


def _diff(name: str, before: str, after: str) -> dict[str, str]:
    return {"before_header": name, "after_header": name, "before": f"{before}\n", "after": f"{after}\n"}


def main() -> None:
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    try:
        client = docker_api.Engine(module.params["docker_host"])
        result = retire(client, module.params, check_mode=module.check_mode)
    except (LockstepError, docker_api.EngineError) as error:
        module.fail_json(msg=f"{module.params['name']}: {error}", exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
