#!/usr/bin/python
"""Ansible module: a rank's journal of launches."""

from __future__ import annotations

DOCUMENTATION = r"""
module: journal
short_description: Write to and read a rank's journal of launches
description:
  - A journal has one file a launch, C(<state_dir>/journal/<launch>.json), mode 0600, written aside and renamed.
  - An entry holds the whole resolved plan, so that going back to it needs neither the arm's name nor the repository
    of that day.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
attributes:
  check_mode:
    description: Says whether it would write and changes nothing.
    support: full
  diff_mode:
    description: Shows launch, arm, outcome and plan of an entry before and after, not the whole plan; a note whole.
    support: full
options:
  state_dir:
    description: Directory of Lockstep's own state on the rank. Its folder C(journal) must be there to be written to.
    type: path
    required: true
  state:
    description:
      - V(present) makes sure that O(entry) is in the journal; a damaged file of that launch is replaced.
      - V(listed) changes nothing and returns all entries.
      - V(stopped) notes beside the journal that the rank was stopped on purpose after its newest proven launch, so that
        this one is not served again when the next launch fails. A newer proven launch makes the note void.
    type: str
    choices: [present, listed, stopped]
    default: listed
  entry:
    description:
      - The entry to record, as the module M(lockstep.fleet.launch_receipt) returns it.
      - Required when O(state=present).
    type: dict
"""

EXAMPLES = r"""
- name: Read the journal of this rank
  lockstep.fleet.journal:
    state_dir: /srv/lockstep
  register: journal

- name: Show the launches, newest first
  ansible.builtin.debug:
    var: journal.entries | map(attribute='launch') | list
"""

RETURN = r"""
entries:
  description: All entries of this rank, newest first. What cannot be read as an entry is in RV(damaged) instead.
  returned: when O(state=listed)
  type: list
  elements: dict
damaged:
  description: Why a file in the journal could not be read as an entry, one line each.
  returned: when O(state=listed)
  type: list
  elements: str
path:
  description: The file of the entry or of the note; null when there is no proven launch to note.
  returned: when O(state=present) or O(state=stopped)
  type: str
  sample: /srv/lockstep/journal/20260924T094700Z-e8-0a1b2c.json
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import files, receipt
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "state_dir": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["present", "listed", "stopped"], "default": "listed"},
    "entry": {"type": "dict"},
}
# What of an entry may differ when the same launch is recorded again.
AGAIN = {"recorded": None, "by": None}
# What of an entry a person reads in a diff.
SHOWN = ("launch", "arm", "ok", "why", "recorded", "by", "pool_tokens", "plan_sha256", "tactics_fingerprint")


def readable(path: str) -> dict[str, Any]:
    """What a file says as JSON; nothing for a damaged one, which is then replaced: what is recorded now is the same."""
    try:
        there = files.read_json(path) if files.look(path) else {}
    except LockstepError:
        return {}
    return there if isinstance(there, dict) else {}


def record(state_dir: str, value: dict[str, Any], *, check_mode: bool) -> dict[str, Any]:
    """Write an entry unless it is there already; who recorded it when makes no difference."""
    entry = receipt.parse_entry(value)
    path = receipt.entry_path(state_dir, entry["launch"])
    before = readable(path)
    changed = {**before, **AGAIN} != {**entry, **AGAIN}
    after = entry if changed else before
    if changed and not check_mode:
        files.write_json_atomic(path, entry)
    return {
        "changed": changed,
        "path": path,
        "diff": {
            "before_header": path,
            "after_header": path,
            "before": {key: before[key] for key in SHOWN if key in before},
            "after": {key: after[key] for key in SHOWN if key in after},
        },
    }


def stop(state_dir: str, *, check_mode: bool) -> dict[str, Any]:
    """Note which launch is the newest proven one now that the rank is stopped on purpose."""
    newest = receipt.newest_proven(state_dir)
    if newest is None:  # nothing that anybody could serve again
        return {"changed": False, "path": None}
    path, before, after = receipt.stopped_path(state_dir), receipt.stopped(state_dir), newest["launch"]
    if before != after and not check_mode:
        files.write_json_atomic(path, {"launch": after})
    return {
        "changed": before != after,
        "path": path,
        "diff": {
            "before_header": path,
            "after_header": path,
            "before": {"launch": before} if before else {},
            "after": {"launch": after},
        },
    }


def listed(state_dir: str) -> dict[str, Any]:
    """Read all entries; a damaged one must not hide the others."""
    entries, damaged = [], []
    for launch in receipt.launches(state_dir):
        try:
            entries.append(receipt.read_entry(state_dir, launch))
        except LockstepError as error:
            damaged.append(str(error).replace("\n", " "))
    return {"changed": False, "entries": entries, "damaged": damaged}


def main() -> None:
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True, required_if=[("state", "present", ("entry",))])
    params = module.params
    try:
        if params["state"] == "present":
            result = record(params["state_dir"], params["entry"], check_mode=module.check_mode)
        elif params["state"] == "stopped":
            result = stop(params["state_dir"], check_mode=module.check_mode)
        else:
            result = listed(params["state_dir"])
    except LockstepError as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
