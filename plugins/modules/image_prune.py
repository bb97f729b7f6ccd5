#!/usr/bin/python
"""Ansible module: remove the images of this fleet that nothing needs any more."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_prune
short_description: Remove the images that Lockstep named and that nothing needs any more
description:
  - Considers only images all of whose names Lockstep gave - the names in O(images), a dated name with the image's own
    Id in it, the base's digest of a known build, the overlay's tag for its own build context, a name in the fleet's
    registry. One with another name is somebody else's too, and one without any name is left to C(docker image prune).
  - Of those it keeps what a container uses, running or not; the pinned base, what has its name or the overlay's; what
    a launch in O(launches) needs, by Id, by digest and by the overlay's labels; what is below an image that stays; and
    what may be a needed base, when no rank can tell.
  - Each name is removed by itself, never by force, after another look at what it names. An image that the engine does
    not let go is in RV(refused), not an error of the module, so that the others go on.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: Says what it would remove and removes nothing.
    support: full
  diff_mode:
    description: Shows the images that go, by Id, with their names.
    support: full
options:
  images:
    description:
      - C(fleet_images), with C(base) (C(repository), C(tag), C(digest)), C(overlay) (C(tag)), C(builds) (by digest),
        C(registry) (C(image), C(alias), C(port), C(existing)) and C(kept_name).
    type: dict
    required: true
  launches:
    description:
      - Every launch in the journal of any rank, each a launch id and the C(images) of its plan.
      - Without them nothing is known to be needed by a way back, so they have to be given.
    type: list
    elements: list
    required: true
  known:
    description:
      - What the ranks say of the bases by digest, as M(lockstep.fleet.image_identity) returns it for
        C(repository@sha256:…). A rank that got its base by C(docker load), or from the head, knows no digest of it.
    type: list
    elements: dict
    default: []
"""

EXAMPLES = r"""
- name: Read the journal
  lockstep.fleet.journal:
    state_dir: /srv/lockstep
  register: journal

- name: Remove the images that no launch of this rank needs
  lockstep.fleet.image_prune:
    images: "{{ fleet_images }}"
    launches: "{{ journal.entries | map(attribute='launch') | zip(journal.entries | map(attribute='plan.images')) }}"
  register: pruned
"""

RETURN = r"""
removed:
  description: The images that went, or would go.
  returned: always
  type: list
  elements: dict
  contains: &image
    id: {description: "Its Id.", type: str}
    names: {description: "The names it had before.", type: list, elements: str}
    why: {description: "Why it goes or stays; of a refused one, what the engine said.", type: str}
kept:
  description: The images with a name of Lockstep's that stay.
  returned: always
  type: list
  elements: dict
  contains: *image
refused:
  description: The images that should have gone, and are still there.
  returned: always
  type: list
  elements: dict
  contains: *image
freed:
  description:
    - By how many bytes all image layers of the engine became fewer, as the engine itself counts them
      (C(docker system df)). Null in check mode.
  returned: always
  type: int
"""

from collections.abc import Iterable
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, dockerd, prune
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "images": {"type": "dict", "required": True},
    "launches": {"type": "list", "elements": "list", "required": True},
    "known": {"type": "list", "elements": "dict", "default": []},
    "docker_host": {"type": "str"},
}


def run(params: dict[str, Any], client: docker_api.Client, *, check_mode: bool) -> dict[str, Any]:
    """Sort the images and remove those that can go; returns the module's result."""
    info = client.get_json("/info")
    listed = [docker_api.identify(client, image["id"], info=info) for image in docker_api.catalogue(client)]
    held = [image for image in listed if image["present"]]
    # Asked last: what a container took up meanwhile is seen; what one takes up later the engine itself does not let go.
    used = {facts["image_id"]: facts["name"] for facts in docker_api.containers(client)}
    sorted_ = prune.verdicts(held, used, params["images"], params["launches"], params["known"])
    going = [image for image in sorted_ if image["goes"]]
    refused: list[dict[str, Any]] = []
    taken: list[str] = []
    freed = None
    if not check_mode:
        before = _layers_bytes(client) if going else 0
        for image in going:
            trouble = _remove(client, image, taken)
            if trouble:
                refused.append({**image, "why": trouble})
        freed = before - _layers_bytes(client) if going else 0
    stuck = [image["id"] for image in refused]
    removed = [image for image in going if image["id"] not in stuck]
    return {
        "changed": bool(taken or (check_mode and going)),
        "removed": _shown(removed),
        "kept": _shown(image for image in sorted_ if not image["goes"]),
        "refused": _shown(refused),
        "freed": freed,
        "diff": {"before": {image["id"]: image["names"] for image in removed}, "after": {}},
    }


def _shown(some: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: image[key] for key in ("id", "names", "why")} for image in some]


def _remove(client: docker_api.Client, image: dict[str, Any], taken: list[str]) -> str | None:
    """Take an image's names one by one, and the image goes with the last; returns why it did not.

    ``taken`` is given each name that went.
    """
    try:
        for name in image["names"]:
            there = docker_api.inspect_image(client, name)
            if there and there["Id"] == image["id"]:
                # Only what was decided on goes: nothing nameless that is below it.
                client.delete_call("/images/{0}", name, params={"force": "0", "noprune": "1"})
                taken.append(name)
        left = docker_api.inspect_image(client, image["id"])
    except (LockstepError, docker_api.EngineError) as error:
        return dockerd.trouble(str(error))["text"]
    return f"it is still there as {' '.join(left['RepoTags'] or left['RepoDigests'] or [left['Id']])}" if left else None


def _layers_bytes(client: docker_api.Client) -> int:
    """Size of all image layers in bytes; engines from 29 on say it under another name."""
    said = client.get_json("/system/df", params={"type": "image"})
    return int(said["LayersSize"] if "LayersSize" in said else said["ImageUsage"]["TotalSize"])


def main() -> None:
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    try:
        client = docker_api.Engine(module.params["docker_host"])
        result = run(module.params, client, check_mode=module.check_mode)
    except (LockstepError, docker_api.EngineError) as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
