"""Filter ``arm_env``: the environment that an arm means."""

from __future__ import annotations

DOCUMENTATION = r"""
name: arm_env
short_description: Merge an arm, its ancestors and one-off changes into an environment
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
description:
  - Takes arms (as C(fleet_arms) has them) and returns the effective environment of one of them, checked against the
    schema of switches. Later values win - the schema's defaults, O(fleet), the arm from its oldest ancestor on, O(set).
  - Neither asks the rules nor a rank. The action M(lockstep.fleet.plan) does all of it for a whole fleet.
positional: arm, switches
options:
  _input:
    description: Arms by name.
    type: dict
    required: true
  arm:
    description: Name of the arm.
    type: str
    required: true
  switches:
    description: Schema of the keys, as C(fleet_switches) has it.
    type: dict
    required: true
  fleet:
    description: Values of the fleet, below the arm's.
    type: dict
    default: {}
  set:
    description: One-off values, above the arm's.
    type: dict
    default: {}
  unset:
    description: Keys to take out.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: An arm and its parent
  ansible.builtin.set_fact:
    effective: "{{ arms | lockstep.fleet.arm_env('fast', switches, set={'SLOTS': 8}) }}"
  vars:
    switches:
      BLOCK: {type: int, min: 1, default: "3", where: arg, doc: Draft tokens per step.}
      CAP: {type: string, default: "0", where: env, doc: Cut of the verified drafts.}
      SLOTS: {type: int, default: "4", where: arg, doc: Request slots.}
    arms:
      base: {parent: null, changes: {}}
      long: {parent: base, changes: {BLOCK: "5"}}
      fast: {parent: long, changes: {CAP: "conf:0.1"}}

- name: It has its parent's change, its own, and the one-off
  ansible.builtin.assert:
    that: "effective == {'BLOCK': '5', 'CAP': 'conf:0.1', 'SLOTS': '8'}"
"""

RETURN = r"""
_value:
  description: Values by key, all of them text.
  type: dict
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.lockstep.fleet.plugins.module_utils import arms as core
from ansible_collections.lockstep.fleet.plugins.module_utils import switches as schema
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError


def arm_env(
    known: Mapping[str, Any],
    arm: str,
    switches: Mapping[str, Any],
    fleet: Mapping[str, object] | None = None,
    set: Mapping[str, object] | None = None,  # noqa: A002 (the name that -e has)
    unset: Sequence[str] = (),
) -> dict[str, str]:
    try:
        before: list[core.Layer] = [("fleet", schema.values(switches, fleet or {}, "fleet"), [])]
        after: list[core.Layer] = [
            ("set", schema.values(switches, set or {}, "set"), schema.removals(switches, unset, "unset"))
        ]
        env, _ = core.effective(switches, known, str(arm), before, after)
    except LockstepError as error:
        raise AnsibleFilterError(str(error)) from error
    return {str(key): str(value) for key, value in env.items()}


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, Callable[..., object]]:
        return {"arm_env": arm_env}
