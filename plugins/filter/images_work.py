"""Filter ``images_work``: what each rank has to do to hold a plan's images."""

from __future__ import annotations

DOCUMENTATION = r"""
name: images_work
short_description: Say what each rank has to do to hold the images of a plan
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
description:
  - Compares what the ranks hold with the base and overlay that a plan wants. Nothing moves where the right bytes are
    there under any name. The base is pulled once, by the head, the overlay is built there, and the workers get both
    from it.
  - An image that cannot be used on a rank ends with an error that names the rank.
options:
  _input:
    description:
      - A plan's C(images) - C(base) with C(repository), C(tag) and C(digest), C(overlay) with C(tag) and
        C(context_sha256).
    type: dict
    required: true
  looks:
    description: By rank what M(lockstep.fleet.rank_facts) returns under C(look.images).
    type: dict
    required: true
  head:
    description: The rank that builds.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: A rank that holds nothing pulls the base; the head builds
  ansible.builtin.assert:
    that:
      - work.spark1.base.action == 'pull'
      - work.spark1.overlay.action == 'build'
      - work.spark1.todo
  vars:
    nothing: {present: false, store: classic, id: null, layers: [], labels: {}, files: {}}
    looks:
      spark1:
        engine: {store: classic, platform: linux/arm64}
        base: "{{ nothing }}"
        pinned: "{{ nothing }}"
        overlay: "{{ nothing }}"
        catalogue: []
    wanted:
      base:
        repository: lmsysorg/sglang
        tag: dev-dsv41
        digest: sha256:3dbc313030a6ef2c5d7de8ecf48e9aece722694a82182cb618cc82b588816349
      overlay:
        tag: dsv41-3x-spark:local
        context_sha256: "0d5c"
    work: "{{ wanted | lockstep.fleet.images_work(looks, 'spark1') }}"
"""

RETURN = r"""
_value:
  description:
    - By rank C(base) and C(overlay), each with C(action) (V(ok), V(tag), V(fetch), and V(pull) or V(build)), C(image)
      (the Id or reference to name), C(drift) (the Id that the name has now, if another) and C(why), C(base_source) and
      C(source), the ranks that hand the base and the overlay on, and C(todo), whether there is anything to do.
  type: dict
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.lockstep.fleet.plugins.module_utils import images
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError


def images_work(wanted: Mapping[str, Any], looks: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Work it out; see the documentation above."""
    if not isinstance(wanted, Mapping) or not {"base", "overlay"} <= set(wanted):
        raise AnsibleFilterError("images_work takes the images of a plan: base and overlay")
    missing = [str(host) for host, look in looks.items() if not isinstance(look, Mapping)]
    if missing or head not in looks:
        raise AnsibleFilterError(f"images_work has no look at the images of {', '.join(missing) or head}")
    try:
        return images.work(wanted, looks, head)
    except LockstepError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """The filter, for Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"images_work": images_work}
