#!/usr/bin/python
"""Documentation of the action ``plan``, which runs on the controller only (plugins/action/plan.py)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: plan
short_description: Resolve the whole of a launch before anything is asked of a rank
description:
  - Turns an arm, with one-off changes, into what every rank will run - environment, arguments, mounts, shards - or
    refuses it with the rule and its reason. Takes well under a second and needs no connection.
  - Reads the variables of group C(fleet), as F(group_vars/all) and the inventory give them.
  - Refuses extra variables (C(-e)) that nothing declares, with the nearest name, so that a typo cannot launch
    something else.
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
    description:
      - Name of the arm.
      - One of O(arm), O(plan) and O(journal) is required.
    type: str
  set:
    description:
      - One-off values by key, checked like any arm. The launch is then named arm plus changes.
      - JSON text is taken as well, as C(-e set=…) leaves it.
    type: raw
    default: {}
  unset:
    description: Keys to take out of the environment, a list or text with commas. Unset differs from empty.
    type: raw
    default: []
  accept_rule:
    description:
      - Ids of refusing rules to launch against, a list or text with commas. The plan names those that refused.
    type: raw
    default: []
  against:
    description: Another arm, also one that is only history, whose environment is returned for comparison.
    type: str
  base_digest:
    description: Digest of another base image than the pinned one, one of C(fleet_image_builds).
    type: str
  arms_file:
    description:
      - A YAML file with arms of the operator's own, in the form of C(fleet_arms) in F(group_vars/all/arms.yml), checked
        like any arm. It cannot redefine a shipped one. A relative path is relative to where ansible-playbook runs.
    type: str
  plan:
    description: A resolved plan out of a journal, to launch it again as it is. Its hash is checked.
    type: dict
  journal:
    description:
      - Name of a variable that holds each host's registered result of M(lockstep.fleet.journal).
      - The plan is then that of the newest proven launch before the running one that ran another plan, unless O(to),
        O(feature), O(campaign) or O(tactics) say which. The first three exclude each other.
    type: str
  looks:
    description:
      - Name of the variable in which every host registered its look; it says which launch runs.
      - Required with O(journal).
    type: str
  to:
    description: A launch id, the beginning of one, or an arm, whose newest proven launch is meant. Needs O(journal).
    type: str
  feature:
    description:
      - A key of the environment. The plan is the running launch's with that key back at its base value, and with it
        the keys that depend on it. Needs O(journal).
    type: str
  campaign:
    description: V(true) plans the arm that the running launch's campaign began with. Needs O(journal).
    type: str
  tactics:
    description:
      - V(purge) alone plans again what runs; that the tactics are cleared is O(lockstep.fleet.agree#module:purge).
        Needs O(journal).
    type: str
seealso:
  - module: lockstep.fleet.agree
"""

EXAMPLES = r"""
- name: Resolve arm e8
  lockstep.fleet.plan:
    arm: e8
  run_once: true
  register: planned

- name: The same with another confidence cap
  lockstep.fleet.plan:
    arm: e8
    set:
      DSV41_VERIFY_CAP: conf:0.2
  run_once: true
  register: planned_once

- name: Show what the head will run
  ansible.builtin.debug:
    msg: "{{ planned.plan.ranks[0].argv | join(' ') }}"
  run_once: true
"""

RETURN = r"""
plan:
  description: The plan. JSON all through; RV(plan.ranks) is in order of rank.
  returned: success
  type: dict
  contains:
    arm:
      description: The arm that it started from.
      type: str
    name:
      description: The arm plus one-off changes, fit for a file name.
      type: str
    ranks:
      description: What each rank runs - C(host), C(rank), C(role), C(container), C(env), C(origin) of each value,
        C(argv), C(mounts), C(shards) by layer, C(env_sha256).
      type: list
      elements: dict
    args:
      description: What becomes of each engine argument - C(applied), C(not set) or C(not applicable) with the reason.
      type: dict
    keys:
      description: What becomes of each key of the environment - C(applied) or C(not applicable) with the reason.
      type: dict
    warnings:
      description: Rules that warn, with reason and source.
      type: list
      elements: dict
    accepted:
      description: Refusing rules that were accepted; RV(plan.accepted_rules) has their reasons.
      type: list
      elements: str
    accepted_rules:
      description: The same with reason, source and what tripped them.
      type: list
      elements: dict
    tactics_fingerprint:
      description: What the tuned tactics of this launch depend on, 64 hex digits.
      type: str
    plan_sha256:
      description: Hash of the launch; null until the overlay and the shards are known.
      type: str
against:
  description: For each host the environment of the arm in O(against).
  returned: when O(against) is given
  type: dict
summary:
  description: The plan in a few lines for a person.
  returned: success
  type: list
  elements: str
rule:
  description: Id of the rule that refused the launch.
  returned: failure
  type: str
  sample: ep-does-not-divide-tp
"""
