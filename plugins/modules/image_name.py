#!/usr/bin/python
"""Ansible module: a local name points to an image, and what it pointed to before is kept."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_name
short_description: Make a local name point to an image, and keep the image that loses the name
description:
  - Gives the image O(image), which must be on the rank unless O(pull) is true, the name O(name).
  - An image that loses the name gets a dated one, C(repository:tag-id12-YYYYMMDD), unless it has such a name already,
    so that no image is left without a name for C(docker image prune) to delete. An overlay that stands on another
    base than its successor is called C(repository:mixed-id12-YYYYMMDD).
  - Nothing is deleted.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description:
      - Says what it would name. An image that is not there yet is taken to be brought by an earlier task.
    support: full
  diff_mode:
    description: Shows the names and the Ids behind them before and after.
    support: full
options:
  name:
    description: The local name, C(repository:tag).
    type: str
    required: true
  image:
    description: The image that gets the name, by Id, C(repository@sha256:…) or C(repository:tag).
    type: str
    required: true
  pull:
    description:
      - Let the engine pull O(image), C(repository@sha256:…), when it is not on the rank; without a login.
    type: bool
    default: false
  kept_name:
    description:
      - Form of the dated name. C({tag}) is the word V(mixed) for an overlay that stands on another base than its
        successor.
    type: str
    default: "{repository}:{tag}-{id12}-{date}"
"""

EXAMPLES = r"""
- name: The pinned base has its usual name; a drifted image of that name is kept
  lockstep.fleet.image_name:
    name: lmsysorg/sglang:dev-dsv41
    image: lmsysorg/sglang@sha256:3dbc313030a6ef2c5d7de8ecf48e9aece722694a82182cb618cc82b588816349
"""

RETURN = r"""
image:
  description: Identity of the image that has the name now (see M(lockstep.fleet.image_identity)).
  type: dict
  returned: always
previous:
  description: Id that the name pointed to before, null when there was none.
  type: str
  returned: always
kept:
  description: Dated name that the previous image got, null when none was needed.
  type: str
  returned: always
  sample: lmsysorg/sglang:dev-dsv41-381b27ff0e52-20260924
"""

from datetime import UTC, datetime
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, images
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "name": {"type": "str", "required": True},
    "image": {"type": "str", "required": True},
    "pull": {"type": "bool", "default": False},
    "kept_name": {"type": "str", "default": images.KEPT_NAME},
    "docker_host": {"type": "str"},
}


def run(params: dict[str, Any], *, check_mode: bool) -> dict[str, Any]:
    """Name the image; returns the module's result."""
    name, ref = params["name"], params["image"]
    parsed = images.parse_reference(name)
    if not parsed["tag"] or parsed["digest"]:
        raise LockstepError("a local name is repository:tag", found=name)
    client = docker_api.Engine(params["docker_host"])
    info = client.get_json("/info")
    image = docker_api.identify(client, ref, info=info)
    pulled = params["pull"] and not image["present"] and not check_mode
    if pulled:
        docker_api.pull(client, ref)
        image = docker_api.identify(client, ref, info=info)
    old = docker_api.identify(client, name, info=info)
    if not image["present"] and not check_mode:
        raise LockstepError(
            "the image that shall get a name is not on this rank",
            found=f"no {ref}",
            expected=f"{ref}, to be named {name}",
            next_step="pull or build it first",
        )
    here = docker_api.engine(info)["platform"]
    if not images.runs_on(image["platform"], here):
        raise LockstepError(
            "the image is built for another platform than this rank's",
            found=f"{ref}: {image['platform']}",
            expected=here,
            next_step="pin the index digest, or the digest of this platform's member",
        )
    changed = image["id"] is None or old["id"] != image["id"]
    kept = None
    if changed and old["present"]:
        kept = images.kept_name(name, old, image, f"{datetime.now(UTC):%Y%m%d}", params["kept_name"])
    if changed and not check_mode:
        if kept:
            _tag(client, old["id"], kept)
        _tag(client, image["id"], name)
        image = docker_api.identify(client, image["id"], info=info)
    before = {name: old["id"]}
    after = {name: image["id"] or ref} | ({kept: old["id"]} if kept else {})
    return {
        "changed": changed or pulled,
        "image": image,
        "previous": old["id"],
        "kept": kept,
        "diff": {"before": before, "after": after if changed else before},
    }


def _tag(client: docker_api.Client, image_id: str, name: str) -> None:
    repository, _, tag = name.rpartition(":")
    client.post_call("/images/{0}/tag", image_id, params={"repo": repository, "tag": tag})


def main() -> None:
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = run(module.params, check_mode=module.check_mode)
    except (LockstepError, docker_api.EngineError) as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
