#!/usr/bin/python
"""Documentation of the action ``arms``, which runs on the controller only (plugins/action/arms.py)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: arms
short_description: Show the arms, one of them, or where two differ
description:
  - Lists all arms as a table and as a tree, shows all that is known of one, or where two differ, with the origin of
    each value. Needs no connection.
  - Reads the variables of group C(fleet), as M(lockstep.fleet.plan) does, and prints what it returns as RV(lines).
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
attributes:
  action:
    description: Runs on the controller.
    support: full
  check_mode:
    description: Changes nothing in any mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
options:
  arm:
    description: The arm to show; without it, and without what needs one, all of them.
    type: str
  against:
    description: The arm to show the difference to. Also one that is only history.
    type: str
  set:
    description:
      - One-off values by key, checked like any arm, on O(arm) or else on O(default).
      - JSON text is taken as well, as C(-e set=…) leaves it.
    type: raw
    default: {}
  unset:
    description: Keys to take out of the environment, a list or text with commas. Unset differs from empty.
    type: raw
    default: []
  accept_rule:
    description: Ids of rules that a launch would be asked to accept, a list or text with commas; they are marked.
    type: raw
    default: []
  arms_file:
    description: A file of the operator's own arms, as in M(lockstep.fleet.plan).
    type: str
  default:
    description: The arm that is launched when none is named.
    type: str
    required: true
seealso:
  - module: lockstep.fleet.plan
"""

EXAMPLES = r"""
- name: List all arms
  lockstep.fleet.arms:
    default: final768
  run_once: true

- name: Where does e8 with another confidence cap differ from b0?
  lockstep.fleet.arms:
    arm: e8
    against: b0
    set:
      DSV41_VERIFY_CAP: conf:0.2
    default: final768
  run_once: true
  register: shown
"""

RETURN = r"""
lines:
  description: What was asked for, for a person.
  returned: success
  type: list
  elements: str
arms:
  description: Every arm - parent, changes, medians, acceptance, verdict, whether it can be launched, why not.
  returned: when no arm is asked for
  type: list
  elements: dict
arm:
  description:
    - The arm - lineage, figures, verdict, the rules it trips, the memory estimate, and the environment, each value with
      the ranks that have it and its origin.
  returned: when O(arm) is given without O(against)
  type: dict
difference:
  description: The keys that differ, each with the ranks, and value and origin on both sides (a null value is unset).
  returned: when O(against) is given
  type: list
  elements: dict
  sample:
    - key: EP_SIZE
      where: all
      there: {value: "3", origin: base}
      here: {value: "1", origin: "arm:e8"}
rule:
  description: Id of the rule that refused what was asked for.
  returned: failure
  type: str
  sample: unknown-arm
"""
