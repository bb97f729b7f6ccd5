"""Filter ``env_diff``: what differs between two environments."""

from __future__ import annotations

DOCUMENTATION = r"""
name: env_diff
short_description: Compare two environments
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
description: Says which variables the second environment adds, removes and changes against the first.
positional: after
options:
  _input:
    description: The environment before, values by name.
    type: dict
    required: true
  after:
    description: The environment after.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Compare the environments of two arms
  ansible.builtin.set_fact:
    difference: "{{ before | lockstep.fleet.env_diff(after) }}"
  vars:
    before: {EP_SIZE: "3", DSV41_VERIFY_CAP: "0", DSV41_DRAFT_TAU: "1"}
    after: {EP_SIZE: "1", DSV41_VERIFY_CAP: "0", DSV41_BLOCK_VERIFY: "1"}

- name: Each difference is named
  ansible.builtin.assert:
    that:
      - "difference.changed == {'EP_SIZE': {'before': '3', 'after': '1'}}"
      - "difference.added == {'DSV41_BLOCK_VERIFY': '1'}"
      - "difference.removed == {'DSV41_DRAFT_TAU': '1'}"
      - difference.lines == ['+ DSV41_BLOCK_VERIFY=1', '- DSV41_DRAFT_TAU=1', '- EP_SIZE=3', '+ EP_SIZE=1']
"""

RETURN = r"""
_value:
  description: The differences; everything in it is empty when there are none.
  type: dict
  contains:
    added: {description: Values by name that only the second has., type: dict}
    removed: {description: Values by name that only the first has., type: dict}
    changed: {description: By name the values C(before) and C(after)., type: dict}
    lines: {description: The same as lines of text., type: list, elements: str}
"""

from collections.abc import Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.lockstep.fleet.plugins.module_utils import envfile
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError


def env_diff(before: object, after: object) -> dict[str, object]:
    try:
        first, second = envfile.mapping(before), envfile.mapping(after)
    except LockstepError as error:
        raise AnsibleFilterError(str(error)) from error
    return {**envfile.diff(first, second), "lines": envfile.diff_lines(first, second)}


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, Callable[..., object]]:
        return {"env_diff": env_diff}
