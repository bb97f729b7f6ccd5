"""Test ``fully_packed``: whether every Engram layer is packed on every rank."""

from __future__ import annotations

DOCUMENTATION = r"""
name: fully_packed
short_description: Whether every Engram layer is packed on every rank
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
description:
  - True when the full set of rank and layer is packed and no two ranks own the same rows, as
    P(lockstep.fleet.packed_report#filter) decides it; that filter also says what is missing.
options:
  _input:
    description: Entries by host, as for P(lockstep.fleet.packed_report#filter).
    type: dict
    required: true
  tp:
    description: Number of ranks.
    type: int
    required: true
  layers:
    description: Layers that have an Engram table.
    type: list
    elements: int
    default: [1, 14]
"""

EXAMPLES = r"""
- name: Half of the ranks are not the fleet, and the same rows twice are not two halves
  ansible.builtin.assert:
    that:
      - "{'spark1': first, 'spark2': second} is lockstep.fleet.fully_packed(2, [1])"
      - "{'spark1': first} is not lockstep.fleet.fully_packed(2, [1])"
      - "{'spark1': first, 'spark2': same} is not lockstep.fleet.fully_packed(2, [1])"
  vars:
    first: {packed: [{rank: 0, layer: 1, rows: [0, 50], packed: true}]}
    second: {packed: [{rank: 1, layer: 1, rows: [50, 100], packed: true}]}
    same: {packed: [{rank: 1, layer: 1, rows: [0, 50], packed: true}]}
"""

RETURN = r"""
_value:
  description: Whether it is.
  type: bool
"""

from collections.abc import Callable, Sequence
from typing import Any

from ansible_collections.lockstep.fleet.plugins.filter.packed_report import packed_report


def fully_packed(value: object, tp: object, layers: Sequence[object] = (1, 14)) -> bool:
    """Decide; see the documentation above."""
    return bool(packed_report(value, tp, layers)["ok"])


class TestModule:
    """The test, for Ansible."""

    def tests(self) -> dict[str, Callable[..., Any]]:
        return {"fully_packed": fully_packed}
