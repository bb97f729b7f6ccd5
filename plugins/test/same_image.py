"""Test ``same_image``: whether several ranks hold one image."""

from __future__ import annotations

DOCUMENTATION = r"""
name: same_image
short_description: Whether all ranks hold the same image
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
description:
  - True when every identity given is of a present image and all are the same, as P(lockstep.fleet.images_equal#filter)
    decides it; that filter also says why not.
options:
  _input:
    description: Identities by rank, or a list of them, from M(lockstep.fleet.image_identity).
    type: raw
    required: true
"""

EXAMPLES = r"""
- name: One rank that lacks the image is enough to fail
  ansible.builtin.assert:
    that:
      - "[image, image] is lockstep.fleet.same_image"
      - "[image, {'present': false, 'store': 'classic'}] is not lockstep.fleet.same_image"
  vars:
    image:
      present: true
      store: classic
      id: sha256:37939c26c0ba0000000000000000000000000000000000000000000000000000
      config_digest: sha256:37939c26c0ba0000000000000000000000000000000000000000000000000000
      layers: [sha256:1111111111111111111111111111111111111111111111111111111111111111]
      platform: linux/arm64
      labels: {}
      files: {}
"""

RETURN = r"""
_value:
  description: Whether it is one image everywhere.
  type: bool
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.lockstep.fleet.plugins.module_utils import images


def same_image(value: object) -> bool:
    """Decide; see the documentation above."""
    ranks = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(ranks, (list, tuple)) or not ranks:
        raise AnsibleFilterError("same_image takes identities by rank or a list of them, at least one")
    if not all(isinstance(image, Mapping) and "present" in image for image in ranks):
        raise AnsibleFilterError("same_image takes what lockstep.fleet.image_identity returns under images")
    return bool(images.agree({str(number): image for number, image in enumerate(ranks)})["equal"])


class TestModule:
    """The test, for Ansible."""

    def tests(self) -> dict[str, Callable[..., Any]]:
        return {"same_image": same_image}
