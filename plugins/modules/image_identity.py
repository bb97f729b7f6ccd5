#!/usr/bin/python
"""Ansible module: what an image on this rank really is."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_identity
short_description: Tell what container images on a rank really are, down to hashes of files inside them
description:
  - Returns for each reference the image's Id, digests, tags, layer chain, platform and labels, and SHA-256 hashes of
    chosen files read inside the image. Equal tags say nothing about equal images; these do.
  - Nothing of an image is run. To read files a container is created, never started, and removed again; a running
    container is read as it stands.
  - Compare the results of several ranks with the filter P(lockstep.fleet.images_equal#filter) or the test
    P(lockstep.fleet.same_image#test).
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: Changes nothing in any mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
options:
  images:
    description:
      - References (C(repository:tag), C(repository@sha256:…)) or Ids of images.
      - An image that the rank does not have is reported as absent, not as an error.
    type: list
    elements: str
    default: []
  files:
    description:
      - Absolute paths inside the images whose hashes are taken. A directory takes every regular file below it, less
        compiled Python (C(*.pyc), C(__pycache__)), which holds times.
      - A path that an image does not have gets null.
    type: list
    elements: str
    default: []
  container:
    description:
      - Name of a container. Its image is returned under RV(container), with hashes of O(files) as the container sees
        them now, so that a file changed after its start is found.
    type: str
"""

EXAMPLES = r"""
- name: See what the base image's tag names on this rank
  lockstep.fleet.image_identity:
    images:
      - lmsysorg/sglang:dev-dsv41
    files:
      - /sgl-workspace/sglang/python/sglang/srt/models/deepseek_v4.py
  register: base

- name: Every rank must hold the same one
  ansible.builtin.assert:
    that: ansible_play_hosts | map('extract', hostvars, ['base', 'images', 0]) is lockstep.fleet.same_image
  run_once: true

- name: Read the adapters as the running engine sees them
  lockstep.fleet.image_identity:
    container: dsv41-head
    files:
      - /opt/lockstep
"""

RETURN = r"""
images:
  description: One identity for each entry of O(images), in their order.
  type: list
  elements: dict
  returned: always
  contains:
    ref: {description: "The reference asked for.", type: str}
    present: {description: "Whether the rank has the image.", type: bool}
    store: {description: "The engine's image store, V(classic) or V(containerd).", type: str}
    id: {description: "The image's Id. A config digest on the classic store only.", type: str}
    config_digest: {description: "Digest of the image's configuration; null where the store does not tell.", type: str}
    config_sha256:
      description:
        - Hash of what the image says of running it (C(Env), C(Entrypoint), C(Cmd), C(Labels), C(User), C(WorkingDir),
          C(ExposedPorts), C(Volumes), C(StopSignal), C(Healthcheck), C(OnBuild), C(Shell)), its platform and layers.
        - The same on every engine and in every store, also where RV(images[].config_digest) is null.
      type: str
    config:
      description: Short hashes of the single settings, the labels apart; C(Env.NAME) for each variable.
      type: dict
    manifest_digest: {description: "Digest of the platform's manifest; null where the engine does not tell.", type: str}
    index_digest: {description: "Digest of the index it came from; null where the engine does not tell.", type: str}
    digest: {description: "Digest part of the first entry of RV(images[].repo_digests).", type: str}
    repo_digests: {description: "The names by digest. Empty after C(docker load).", type: list, elements: str}
    repo_tags: {description: "The tags.", type: list, elements: str}
    layers: {description: "DiffIDs of the layers from the bottom up.", type: list, elements: str}
    layers_sha256: {description: "The layers' OCI chain id.", type: str}
    platform: {description: "C(os/architecture[/variant]).", type: str}
    labels: {description: "The labels.", type: dict}
    files: {description: "SHA-256 of each file, null where there is none.", type: dict}
  sample:
    - ref: lmsysorg/sglang:dev-dsv41
      present: true
      id: sha256:37939c26c0ba0000000000000000000000000000000000000000000000000000
      platform: linux/arm64
container:
  description: Identity of the image that O(container) runs, with the container's own files; null when there is none.
  type: dict
  returned: when O(container) is given
engine:
  description: The engine's version, image store, platform and data directory.
  type: dict
  returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, images
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "images": {"type": "list", "elements": "str", "default": []},
    "files": {"type": "list", "elements": "str", "default": []},
    "container": {"type": "str"},
    "docker_host": {"type": "str"},
}


def run(params: dict[str, Any]) -> dict[str, Any]:
    """Look; returns the module's result."""
    client = docker_api.Engine(params["docker_host"])
    info = client.get_json("/info")
    paths = params["files"]
    result = {
        "changed": False,
        "engine": docker_api.engine(info),
        "images": [docker_api.identify(client, ref, paths, info=info) for ref in params["images"]],
    }
    if params["container"]:
        facts = docker_api.inspect_container(client, params["container"])
        result["container"] = facts and images.identity(
            docker_api.inspect_image(client, facts["Image"]),
            info,
            docker_api.container_files(client, facts["Id"], paths),
            ref=params["container"],
        )
    return result


def main() -> None:
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = run(module.params)
    except (LockstepError, docker_api.EngineError) as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
