"""Filter ``image_trouble``: a Docker Engine's error text in words that help."""

from __future__ import annotations

DOCUMENTATION = r"""
name: image_trouble
short_description: Say what a Docker Engine's error means and what to do about it
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
description:
  - Sorts the texts with which pulls, pushes and builds fail - a missing digest, an unreachable registry, a full disk,
    plain HTTP, missing rights - because their exit codes are all the same.
options:
  _input:
    description: The text.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: A digest that the registry does not have
  ansible.builtin.assert:
    that:
      - ("manifest unknown" | lockstep.fleet.image_trouble).kind == 'missing_digest'
"""

RETURN = r"""
_value:
  description: C(kind) (a word), C(next_step) (a sentence) and C(text) (the input on one line).
  type: dict
"""

from collections.abc import Callable
from typing import Any

from ansible_collections.lockstep.fleet.plugins.module_utils import dockerd


def image_trouble(text: object) -> dict[str, str]:
    """Sort it; see the documentation above."""
    return dockerd.trouble(str(text))


class FilterModule:
    """The filter, for Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"image_trouble": image_trouble}
