#!/usr/bin/python
"""Documentation of the action plugin of the same name; it runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: agree
short_description: One table over all ranks of what they hold against what a plan wants
description:
  - Takes the looks that M(lockstep.fleet.rank_facts) made on every host of the play and compares them with a plan.
  - Differences are sorted into what refuses the launch, what converging mends and what a new launch mends.
  - Runs on the controller and needs no connection to a rank; use it with C(run_once).
options:
  plan:
    description: The plan. Without it, the one that the running launch recorded in its journal.
    type: dict
  looks:
    description: Name of the variable in which every host registered its look.
    type: str
    required: true
  stage:
    description:
      - What has to hold. V(before) only what no convergence can mend, V(converged) that and what converging mends,
        V(proof) everything.
    type: str
    choices: [before, converged, proof]
    default: before
  engram_missing:
    description:
      - What to do about a missing shard. V(fail) makes it a refusal. With V(fallback), which the plan has to say too,
        the layer is served from the checkpoint.
    type: str
    choices: [pack, fail, fallback]
    default: pack
  engram_wrong:
    description: What to do about a wrong file under the right name; V(fail) makes it a refusal.
    type: str
    choices: [fail, set_aside]
    default: fail
  purge:
    description: Whether all tactics are to be cleared, which takes a new launch.
    type: bool
    default: false
  on_failure:
    description: What follows a swap that fails - the launch before it again, or nothing. Handed through, once checked.
    type: str
    choices: [return, leave]
    default: return
  may_differ:
    description: Entries that are shown and never refuse.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: none
    description: Changes nothing.
author:
  - Lockstep
"""

EXAMPLES = r"""
- name: Look at every rank
  lockstep.fleet.rank_facts:
  register: look

- name: Prove what is running
  lockstep.fleet.agree:
    looks: look
    stage: proof
  run_once: true
"""

RETURN = r"""
entries:
  description: Each entry with what every rank showed.
  type: dict
  returned: always
table:
  description: The same as lines of text.
  type: list
  elements: str
  returned: always
plan:
  description: The plan, with the digests of image and shards once the ranks have them.
  type: dict
  returned: always
swap:
  description: Whether a new launch is needed.
  type: bool
  returned: always
launch:
  description: Id of the launch to come when a new one is needed, else of the running one.
  type: str
  returned: always
reuse:
  description: Whether every rank holds tactics that the launch will reuse.
  type: bool
  returned: always
tactics_match:
  description: Whether the ranks hold the same matching tactics, or none at all.
  type: bool
  returned: always
work:
  description: For each entry that converging mends, the hosts to mend.
  type: dict
  returned: always
converge:
  description: Whether any host has work.
  type: bool
  returned: always
on_failure:
  description: As given.
  type: str
  returned: always
unrecorded:
  description: Hosts whose running launch is not in their journal, or whose entry of it cannot be read.
  type: list
  elements: str
  returned: always
previous:
  description:
    - Journal entry of the launch to serve again when the next one fails, when it is of another plan. It is the one that
      is there; with none there the newest proven one, unless the fleet was stopped on purpose.
  type: dict
  returned: always
"""
