#!/usr/bin/python
"""Ansible module: take or give back the fleet's lock on its head (the action of the same name knows who asks)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_lock
short_description: Let one run at a time change a fleet
description:
  - The lock is a file in O(state_dir) on the fleet's head, so every controller sees the same one. It names who holds
    it, for what, since when, and from which process.
  - A holder whose process is gone (a controller that was killed) is replaced without asking, with a line that says so,
    by a run on the same controller. From another controller a person has to decide - O(break_lock).
  - Only the run that holds the lock gives it back.
  - A lock that a run takes and gives back is no state of the host, so neither is reported as a change.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
attributes:
  check_mode:
    description: Refuses what the real run would refuse, and writes nothing.
    support: full
  diff_mode:
    description: Has nothing to show.
    support: none
options:
  state:
    description: V(held) takes the lock, V(free) gives back what this run holds.
    type: str
    choices: [held, free]
    required: true
  state_dir:
    description: Directory of Lockstep's own state on the rank; made when the lock is taken before anything else.
    type: path
    required: true
  what:
    description: What the run is for, for the others to read. Without it the playbook's name.
    type: str
  seen:
    description:
      - When this run looked at the head, in seconds since the epoch by the head's own clock.
      - A run that another one overtook since then is refused, because what it decided no longer fits.
    type: float
  break_lock:
    description: Take the lock from whoever holds it.
    type: bool
    default: false
  holder:
    description: Who asks. Filled in by the action on the controller.
    type: dict
  over:
    description: The run whose lock may be taken, when its process is known to be gone. Filled in by the action.
    type: str
"""

EXAMPLES = r"""
- name: Take the fleet's lock
  lockstep.fleet.fleet_lock:
    state: held
    state_dir: /srv/lockstep
    what: moving a shard by hand

- name: Give it back
  lockstep.fleet.fleet_lock:
    state: free
    state_dir: /srv/lockstep
"""

RETURN = r"""
taken_from:
  description: The holder that was replaced; empty when nobody held the lock.
  returned: success
  type: dict
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import fleet_lock
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "state": {"type": "str", "choices": ["held", "free"], "required": True},
    "state_dir": {"type": "path", "required": True},
    "what": {"type": "str"},
    "seen": {"type": "float"},
    "break_lock": {"type": "bool", "default": False},
    "holder": {"type": "dict"},
    "over": {"type": "str"},
}


def run(params: dict[str, Any], *, check_mode: bool) -> dict[str, Any]:
    """Take the lock or give it back; returns the module's result."""
    mine = params["holder"]
    if params["state"] == "free":
        fleet_lock.give_back(params["state_dir"], mine, time.time(), check=check_mode)
        return {"changed": False, "taken_from": {}}
    over = "any" if params["break_lock"] else params["over"]
    before = fleet_lock.take(params["state_dir"], mine, seen=params["seen"], over=over, check=check_mode)
    return {"changed": False, "taken_from": before}


def main() -> None:
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    try:
        module.exit_json(**run(module.params, check_mode=module.check_mode))
    except fleet_lock.HeldError as error:
        module.fail_json(msg=str(error), held_by=error.holder)
    except LockstepError as error:
        module.fail_json(msg=str(error), exception=error)


if __name__ == "__main__":
    main()
