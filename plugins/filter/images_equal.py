"""Filter ``images_equal``: one image over several ranks, equal or why not."""

from __future__ import annotations

DOCUMENTATION = r"""
name: images_equal
short_description: Compare one image over several ranks and say why it differs
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
description:
  - Takes the identities that M(lockstep.fleet.image_identity) returned on several ranks.
  - Equal means equal configuration and layers, whatever the tags say, and equal hashes of the files that were read.
    Between Docker's classic and containerd stores, whose Ids are of different kinds, layers, platform and configuration
    are compared.
options:
  _input:
    description: Identities by rank, or a list of them.
    type: raw
    required: true
"""

EXAMPLES = r"""
- name: Compare two ranks that hold different builds under one tag
  ansible.builtin.set_fact:
    verdict: "{{ {'spark1': pinned, 'spark3': drifted} | lockstep.fleet.images_equal }}"
  vars:
    pinned:
      present: true
      store: classic
      id: sha256:37939c26c0ba0000000000000000000000000000000000000000000000000000
      config_digest: sha256:37939c26c0ba0000000000000000000000000000000000000000000000000000
      digest: null
      repo_digests: []
      repo_tags: [lmsysorg/sglang:dev-dsv41]
      layers: [sha256:1111111111111111111111111111111111111111111111111111111111111111]
      layers_sha256: "1111111111111111111111111111111111111111111111111111111111111111"
      platform: linux/arm64
      labels: {}
      files: {/srt/models/deepseek_v4.py: "6f1e"}
    drifted: "{{ pinned | combine(other_build) }}"
    other_build:
      id: sha256:381b27ff00000000000000000000000000000000000000000000000000000000
      config_digest: sha256:381b27ff00000000000000000000000000000000000000000000000000000000
      layers: [sha256:2222222222222222222222222222222222222222222222222222222222222222]
      layers_sha256: "2222222222222222222222222222222222222222222222222222222222222222"
      files: {/srt/models/deepseek_v4.py: "90ab"}

- name: Show them, a row a rank
  ansible.builtin.debug:
    msg: "{{ verdict.table }}"

- name: The one that is not like the others is named, and the file
  ansible.builtin.assert:
    that:
      - not verdict.equal
      - verdict.why.spark3 | select('search', 'deepseek_v4.py') | length == 1
"""

RETURN = r"""
_value:
  description: The verdict.
  type: dict
  contains:
    equal: {description: Whether every rank holds the image and all hold the same., type: bool}
    groups: {description: Ranks that hold the same image; the largest group first., type: list, elements: list}
    why: {description: "By rank outside the first group the reasons: base, layer, settings, files.", type: dict}
    seen: {description: The image Id on each rank., type: dict}
    files: {description: All paths whose content is not equal everywhere., type: list, elements: str}
    table: {description: The same as lines of text., type: list, elements: str}
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.lockstep.fleet.plugins.module_utils import images


def by_rank(value: object) -> dict[str, Any]:
    """Identities by rank; a list's entries are called by their place."""
    if isinstance(value, Mapping):
        return {str(host): image for host, image in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"#{number}": image for number, image in enumerate(value, 1)}
    raise AnsibleFilterError(f"images_equal takes identities by rank or a list of them, not {type(value).__name__}")


def images_equal(value: object) -> dict[str, Any]:
    """Compare; see the documentation above."""
    ranks = by_rank(value)
    wrong = [host for host, image in ranks.items() if not isinstance(image, Mapping) or "present" not in image]
    if wrong or not ranks:
        raise AnsibleFilterError(
            f"images_equal found no image identity for {', '.join(wrong) or 'any rank'}; "
            "give it what lockstep.fleet.image_identity returns under images"
        )
    return {**images.agree(ranks), "table": images.table(ranks)}


class FilterModule:
    """The filter, for Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"images_equal": images_equal}
