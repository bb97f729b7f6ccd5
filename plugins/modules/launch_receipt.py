#!/usr/bin/python
"""Documentation of the action plugin of the same name; it runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: launch_receipt
short_description: Work out what was proven of a launch, and keep it
description:
  - Builds the receipt of a launch from the looks of all ranks and fails unless everything is proven.
  - Runs on the controller and needs no connection to a rank; use it with C(run_once).
options:
  launch:
    description: Id of the launch.
    type: str
    required: true
  plan:
    description: The sealed plan.
    type: dict
    required: true
  entries:
    description: What M(lockstep.fleet.agree) returned as RV(lockstep.fleet.agree#module:entries).
    type: dict
    required: true
  looks:
    description: Name of the variable in which every host registered its look.
    type: str
    required: true
  generation:
    description: Name of the variable in which the head registered its generation.
    type: str
    required: true
  reuse:
    description: Whether the boot was to reuse its tactics. Without it, either is right.
    type: bool
  results_dir:
    description: Directory on the controller that keeps C(<launch>/receipt.json). Without it nothing is written.
    type: path
attributes:
  check_mode:
    support: full
    description: Writes nothing. Without O(entries) nothing was booted and proven; then it says what would be kept.
  diff_mode:
    support: none
    description: A receipt is new, or the same.
author:
  - Lockstep
"""

EXAMPLES = r"""
- name: Say what is proven of the running launch
  lockstep.fleet.launch_receipt:
    launch: "{{ proven.launch }}"
    plan: "{{ proven.plan }}"
    entries: "{{ proven.entries }}"
    looks: look
    generation: answer
  run_once: true
"""

RETURN = r"""
receipt:
  description: The receipt; null in a check run that booted nothing.
  type: dict
  returned: always
entry:
  description: The journal entry that goes with it.
  type: dict
  returned: always
path:
  description: Where the receipt is kept.
  type: str
  returned: always
"""
