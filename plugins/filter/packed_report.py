"""Filter ``packed_report``: which ranks hold or serve which layer packed."""

from __future__ import annotations

DOCUMENTATION = r"""
name: packed_report
short_description: Judge over all ranks whether every Engram layer is packed
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
description:
  - Takes what every rank said and demands the full set of rank and layer. A rank that said nothing is no pass, and two
    ranks that own the same rows are none either.
  - A rank's entry may be a result of M(lockstep.fleet.engram_pack), a result of M(lockstep.fleet.rank_facts), or the
    facts of its engine's log.
options:
  _input:
    description: Entries by host.
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
  ranks:
    description: Ranks that have to be packed; those of O(tp) that are not among them are only said. All by default.
    type: list
    elements: int
"""

EXAMPLES = r"""
- name: The log of one rank of three was not collected
  ansible.builtin.set_fact:
    report: "{{ said | lockstep.fleet.packed_report(3, [1, 14]) }}"
  vars:
    said:
      spark1:
        packed:
          - {rank: 0, layer: 1, rows: [0, 128002056], packed: true}
          - {rank: 0, layer: 14, rows: [0, 128005560], packed: true}
      spark3:
        packed:
          - {rank: 2, layer: 1, rows: [256004112, 384006168], packed: true}
          - {rank: 2, layer: 14, rows: [256011121, 384016682], packed: true}

- name: Show it, a row a rank and layer
  ansible.builtin.debug:
    msg: "{{ report.table }}"

- name: Four lines that say True are no pass
  ansible.builtin.assert:
    that:
      - not report.ok
      - report.missing_pairs == [[1, 1], [1, 14]]
      - "report.verdict == 'fail: rank 1 has no evidence'"

- name: Judge what the ranks hold after packing
  ansible.builtin.debug:
    msg: "{{ held | lockstep.fleet.packed_report(1) }}"
  vars:
    held:
      spark1:
        rank: 0
        shards:
          - {layer: 1, state: ok, why: null, bytes: 4360, rows: [0, 1], split: rows, sha256: "9e7573e714d8"}
          - {layer: 14, state: missing, why: no such file, bytes: null, rows: null, split: null, sha256: null}
"""

RETURN = r"""
_value:
  description: The verdict.
  type: dict
  contains:
    ok: {description: Whether every layer is packed on every rank., type: bool}
    verdict: {description: V(pass) or why not., type: str}
    tp_size: {description: Number of ranks., type: int}
    required_pairs: {description: How many pairs of rank and layer there must be., type: int}
    found_true_pairs: {description: Pairs that are packed., type: list, elements: list}
    false_pairs: {description: Pairs that are not., type: list, elements: list}
    missing_pairs: {description: Pairs of which nothing was said., type: list, elements: list}
    row_ranges_disjoint: {description: Whether no two ranks own the same row of a layer., type: bool}
    table: {description: The same as lines of text., type: list, elements: str}
    faults: {description: Each shard that is not right, with rank, fault and next step., type: list, elements: str}
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.lockstep.fleet.plugins.module_utils import engram


def evidence(host: object, entry: object) -> Mapping[str, Any]:
    """What an entry says of its rank's shards, wherever it stands in it; a host that said nothing gives nothing."""
    if isinstance(entry, Mapping) and (entry.get("failed") or entry.get("unreachable")):
        return {"rank": entry.get("rank"), "why": str(entry.get("msg") or "not reached").strip().splitlines()[0]}
    found = entry
    for key in ("look", "engine"):
        found = found.get(key) or {} if isinstance(found, Mapping) and key in found else found
    if found is None or (isinstance(found, Mapping) and not found):
        return {}
    if not isinstance(found, Mapping) or not {"packed", "shards"} & set(found):
        raise AnsibleFilterError(
            f"packed_report finds no shards in what {host} gave; it takes results of lockstep.fleet.engram_pack or "
            "lockstep.fleet.rank_facts, or facts with a key packed"
        )
    return found


def packed_report(
    value: object, tp: object, layers: Sequence[object] = (1, 14), ranks: Sequence[object] | None = None
) -> dict[str, Any]:
    """Judge; see the documentation above."""
    if not isinstance(value, Mapping):
        raise AnsibleFilterError(f"packed_report takes entries by host, not {type(value).__name__}")
    said = {str(host): evidence(host, entry) for host, entry in value.items()}
    present = None if ranks is None else [int(str(rank)) for rank in ranks]
    return engram.packed_report(said, int(str(tp)), [int(str(layer)) for layer in layers], present)


class FilterModule:
    """The filter, for Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"packed_report": packed_report}
