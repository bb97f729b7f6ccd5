#!/usr/bin/python
"""Documentation of the action plugin of the same name; the context comes from the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: overlay_build
short_description: Build the overlay image on this rank from the controller's checkout
description:
  - Exports the overlay's build context from the checkout (the adapters and the core, nothing else), sends it to the
    rank as one archive and builds it there with M(community.docker.docker_image_build). The context is removed again.
  - One tree on one base gives one image Id, whoever builds it, when and where, on Docker Engines of one version with
    the classic store. Other engines may pack the same files in another way, so build on one rank and ship the image.
  - The image carries the hash of its context, the digest of its base and the Engram split as labels.
  - It always builds; ask the filter P(lockstep.fleet.images_work#filter) whether that is needed.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
requirements:
  - Docker CLI with the buildx plugin on the rank
  - tar on the rank
attributes:
  check_mode:
    description: Checks the context and predicts the change; sends and builds nothing.
    support: full
  diff_mode:
    description: Shows the files that go into the image, each with its hash.
    support: full
options:
  name:
    description: Name of the image to build, C(repository:tag).
    type: str
    required: true
  base:
    description: Name under which the rank holds the base image, C(repository:tag). It is not pulled.
    type: str
    required: true
  base_digest:
    description: Digest that the base is pinned to.
    type: str
    required: true
  split:
    description: How the base's engine splits the Engram tables over the ranks.
    type: str
    choices: [rows, heads]
    required: true
  context_sha256:
    description:
      - Hash that the context must have, as the plan has it. A checkout that was changed since is refused.
    type: str
  root:
    description: The checkout on the controller. Without it, the one that this collection lies in.
    type: path
"""

EXAMPLES = r"""
- name: Build the overlay on the head
  lockstep.fleet.overlay_build:
    name: dsv41-3x-spark:local
    base: lmsysorg/sglang:dev-dsv41
    base_digest: sha256:3dbc313030a6ef2c5d7de8ecf48e9aece722694a82182cb618cc82b588816349
    split: rows
  when: fleet_role == 'head'
"""

RETURN = r"""
context_sha256:
  description: Hash of the context, as the image's label C(lockstep.context_sha256) has it.
  type: str
  returned: always
files:
  description: Paths in the context.
  type: list
  elements: str
  returned: always
id:
  description: Id of the image that was built, null in check mode.
  type: str
  returned: always
"""
