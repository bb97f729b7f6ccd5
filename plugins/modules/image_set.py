#!/usr/bin/python
"""Ansible module: the images of a plan as files with checksums, for a fleet that has no way to any hub."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_set
short_description: Save the images of a plan as files with checksums, or load them where there is no hub
description:
  - A set is a directory with C(images.tar) (what C(docker save) gives, the layers that images share once),
    C(images.json) (their names, pinned digests, Ids, layers and platform) and C(SHA256SUMS) over both.
  - V(saved) writes the set on this rank, which must hold the images as the plan wants them. Each file is written aside,
    synced and renamed; C(SHA256SUMS) comes last. A set that is there already and right stays as it is.
  - V(loaded) proves the checksums before the engine gets a byte, refuses another platform, another pin and another
    overlay than the plan's, and compares every image that the engine then has with the set.
  - The engine learns no digest from a file, so the pinned ones are written down in O(known) with the Ids that were
    proven. M(lockstep.fleet.rank_facts) reads that file. Images get no names here; see M(lockstep.fleet.image_name).
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: Looks and proves as the real run does, and neither writes nor loads.
    support: full
  diff_mode:
    description: Shows the images of the set before and after.
    support: full
options:
  state:
    description: Whether the set shall be on disk or in the engine.
    type: str
    choices: [saved, loaded]
    required: true
  dir:
    description: The set's directory on this rank. V(saved) makes it.
    type: path
    required: true
  images:
    description:
      - A plan's C(images), C(base) with C(repository), C(tag), C(digest), C(overlay) with C(tag), C(context_sha256).
    type: dict
    required: true
  registry:
    description: Reference of the registry's image, when it is part of the set.
    type: str
  known:
    description: File on the rank with the Ids of images by the digest that the engine was not told.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Save the images of the plan
  lockstep.fleet.image_set:
    state: saved
    dir: /media/usb/lockstep
    images: "{{ plan.images }}"
    registry: registry@sha256:a3d8aaa63ed8681a604f1dea0aa03f100d5895b6a58ace528858a7b332415373
    known: /srv/lockstep/images.json

- name: Load them where there is no hub
  lockstep.fleet.image_set:
    state: loaded
    dir: /media/usb/lockstep
    images: "{{ plan.images }}"
    known: /srv/lockstep/images.json
"""

RETURN = r"""
images:
  description: By C(base), C(overlay) and C(registry) the C(name) that the image is to have and its C(id) on this rank.
  returned: always
  type: dict
  sample: {base: {name: "lmsysorg/sglang:dev-dsv41", id: "sha256:37939c26c0ba…"}}
bytes:
  description: Bytes of C(images.tar); 0 when nothing was written.
  returned: state saved
  type: int
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import checksums, docker_api, files, images
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "state": {"type": "str", "choices": ["saved", "loaded"], "required": True},
    "dir": {"type": "path", "required": True},
    "images": {"type": "dict", "required": True},
    "registry": {"type": "str"},
    "known": {"type": "path", "required": True},
    "docker_host": {"type": "str"},
}
TAR = "images.tar"
LIST = "images.json"
SUMS = "SHA256SUMS"


def named(wanted: dict[str, Any]) -> dict[str, Any]:
    """Name and Id of each image."""
    return {what: {"name": image["name"], "id": image["id"]} for what, image in wanted.items()}


class Set:
    """One set on one rank."""

    def __init__(self, module: AnsibleModule) -> None:
        self.params = module.params
        self.check_mode = module.check_mode
        self.client = docker_api.Engine(self.params["docker_host"])
        self.info = self.client.get_json("/info")
        self.known = images.known(self.params["known"])

    def path(self, name: str) -> str:
        return f"{self.params['dir']}/{name}"

    def sums(self) -> dict[str, str]:
        """SHA-256 by name as the set lists them."""
        listing = checksums.parse(files.read_bytes(self.path(SUMS)).decode(errors="replace"))
        found = {entry["path"]: entry["sha256"] for entry in listing["entries"]}
        if listing["bad_lines"] or set(found) != {TAR, LIST}:
            raise LockstepError(
                f"{self.path(SUMS)} is no list of a set of images",
                found=", ".join(sorted(found)) or "no line that can be read",
                expected=f"{TAR} and {LIST}",
                next_step="copy the whole directory again from where save_images.yml wrote it",
            )
        return found

    def prove(self, name: str, sums: dict[str, str]) -> None:
        """Read a file of the set through; LockstepError unless it has its checksum."""
        for _ in files.proven_blocks(self.path(name), sums[name]):
            pass

    # --- saved ---

    def saved(self) -> dict[str, Any]:
        """Write the set unless it is there."""
        wanted = self.held()
        listing = {"format": 1, "images": wanted}
        result: dict[str, Any] = {"images": named(wanted), "bytes": 0}
        before = self.there()
        if before == listing:
            return {**result, "changed": False}
        diff = {
            "before": before or "",
            "after": listing,
            "before_header": self.path(LIST),
            "after_header": self.path(LIST),
        }
        if not self.check_mode:
            files.make_directory(self.params["dir"])
            ids = [image["id"] for image in wanted.values()]
            # The base's layers are the overlay's too, and come once.
            files.require_space(
                self.params["dir"], sum(self.size(one) for one in ids) - self.size(wanted["base"]["id"])
            )
            tar = files.write_stream(self.path(TAR), docker_api.export(self.client, ids), 0o644)
            files.write_json_atomic(self.path(LIST), listing, 0o644)
            lines = {TAR: tar["sha256"], LIST: files.sha256_file(self.path(LIST))}
            files.write_atomic(self.path(SUMS), checksums.format_lines(lines), 0o644)
            result["bytes"] = tar["bytes"]
        return {**result, "changed": True, "diff": diff}

    def there(self) -> dict[str, Any] | None:
        """What the set on disk lists, when all of it has its checksums."""
        try:
            sums = self.sums()
            for name in (LIST, TAR):
                self.prove(name, sums)
            listed = files.read_json(self.path(LIST))
            return listed if isinstance(listed, dict) else None
        except LockstepError:
            return None  # not there, or damaged: it is written anew

    def held(self) -> dict[str, Any]:
        """The images that this rank holds and the plan wants; LockstepError when it is not converged."""
        wanted = self.params["images"]
        look = docker_api.look(self.client, wanted, info=self.info, known=self.known)
        work = images.work(wanted, {"here": look}, "here")["here"]
        wrong = [f"{what} image: {work[what]['why']}" for what in ("base", "overlay") if work[what]["action"] != "ok"]
        found = {"base": look["pinned"], "overlay": look["overlay"]}
        if ref := self.params["registry"]:
            pin = images.parse_reference(ref)["digest"]
            found["registry"] = docker_api.identify(self.client, ref, info=self.info)
            if not found["registry"]["present"] and pin in self.known:
                found["registry"] = docker_api.identify(self.client, self.known[pin], info=self.info)
            if not found["registry"]["present"]:
                wrong.append(f"registry image: no {ref}")
        if wrong:
            raise LockstepError(
                "this rank does not hold the images of the plan, so there is nothing to save",
                found="; ".join(wrong),
                expected="the pinned base, the overlay of this checkout and the registry's image",
                next_step="ansible-playbook converge_images.yml, then run again",
            )
        return images.set_of(wanted, found, self.params["registry"])

    def size(self, image_id: str) -> int:
        """Bytes of an image's layers, unpacked."""
        return int(self.client.get_json("/images/{0}/json", image_id)["Size"])

    # --- loaded ---

    def loaded(self) -> dict[str, Any]:
        """Have the images of the set in the engine, and their digests known."""
        sums = self.sums()
        self.prove(LIST, sums)
        listed = files.read_json(self.path(LIST))
        wanted = images.check_set(listed, self.params["images"], docker_api.engine(self.info)["platform"])
        here = self.here(wanted)
        missing = sorted(set(wanted) - set(here))
        if missing:
            self.prove(TAR, sums)
            if not self.check_mode:
                blocks = files.proven_blocks(self.path(TAR), sums[TAR])
                here = docker_api.load(self.client, blocks, wanted)
        ids = {name: here.get(name, image["id"]) for name, image in wanted.items()}
        pins = {image["pin"]: ids[name] for name, image in wanted.items() if image["pin"]}
        known = {**self.known, **pins}
        if known != self.known and not self.check_mode:
            files.make_directory(self.params["known"].rpartition("/")[0])
            files.write_json_atomic(self.params["known"], {"format": 1, "digests": known}, 0o644)
        return {
            "changed": bool(missing) or known != self.known,
            "images": named({name: {**image, "id": ids[name]} for name, image in wanted.items()}),
            "diff": {
                "before": {"images": sorted(set(here) & set(wanted) - set(missing)), "digests": self.known},
                "after": {"images": sorted(wanted), "digests": known},
            },
        }

    def here(self, wanted: dict[str, Any]) -> dict[str, str]:
        """Ids of those images that the engine has already."""
        found = {}
        for name, image in wanted.items():
            for ref in (image["id"], self.known.get(image["pin"]), image["name"]):
                mine = docker_api.identify(self.client, ref, info=self.info) if ref else None
                if mine and images.same(mine, image)["same"] and mine["present"]:
                    found[name] = str(mine["id"])
                    break
        return found


def main() -> None:
    """Save or load."""
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = Set(module).saved() if module.params["state"] == "saved" else Set(module).loaded()
    except (LockstepError, docker_api.EngineError) as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
