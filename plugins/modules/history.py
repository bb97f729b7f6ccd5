#!/usr/bin/python
"""Documentation of the action plugin of the same name; it runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: history
short_description: Show the launches of a fleet and how each differs from what runs now
description:
  - Joins the journals and looks of all ranks that answered. One rank's journal is enough; a rank that did not answer
    and an entry that is damaged are named.
  - Runs on the controller and needs no connection to a rank; use it with C(run_once).
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
options:
  journal:
    description: Name of a variable that holds each host's registered result of M(lockstep.fleet.journal).
    type: str
    required: true
  looks:
    description: Name of the variable in which every host registered its look.
    type: str
    required: true
  launch:
    description: Show this launch alone, given by its id, the beginning of it, or its arm, with every difference.
    type: str
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: none
    description: Changes nothing.
seealso:
  - module: lockstep.fleet.journal
  - module: lockstep.fleet.plan
"""

EXAMPLES = r"""
- name: Show the launches
  lockstep.fleet.history:
    journal: journals
    looks: look
  run_once: true
  register: seen

- name: Which launch runs
  ansible.builtin.debug:
    msg: "{{ seen.launches | selectattr('runs_on') | map(attribute='launch') | list }}"
  run_once: true
"""

RETURN = r"""
launches:
  description: The launches, newest first.
  returned: success
  type: list
  elements: dict
  contains:
    launch: {description: Id of the launch., type: str}
    arm: {description: Its arm plus one-off changes., type: str}
    recorded: {description: When it was recorded as proven, type: str}
    by: {description: "Who launched it, C(user@controller); null in entries of an older version.", type: str}
    pool_tokens: {description: Size of the KV pool, type: int}
    ok: {description: Whether it was proven., type: bool}
    verdict: {description: The arm's verdict in the campaign., type: str}
    hosts: {description: Ranks whose journal has it., type: list, elements: str}
    runs_on: {description: Ranks on which it runs now., type: list, elements: str}
    differs:
      description: How its plan differs from the running one, a line each; null when nothing runs.
      type: list
      elements: str
notes:
  description: Damaged entries, and ranks that did not answer, a line each.
  returned: success
  type: list
  elements: str
lines:
  description: The same for a person.
  returned: success
  type: list
  elements: str
"""
