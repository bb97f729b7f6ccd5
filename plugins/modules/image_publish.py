#!/usr/bin/python
"""Ansible module: images of this rank's engine into the fleet's own registry, without compressing big layers first."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_publish
short_description: Put images of this rank into a registry that runs on it, at disk speed
description:
  - C(docker push) compresses every layer, which for a first copy takes most of the time. This module reads the layers
    as the engine keeps them, compresses small ones only, and gives the registry those that it does not have. The image
    is the same one, with the same Id; its manifest is another.
  - Afterwards the engine pulls the image by its new digest, which moves nothing; the digest is a name of the image from
    then on. What was in the registry before is taken by name and size; who pulls it holds it against its digest.
  - It reads the engine's own directories, and only with the driver overlay2 of the classic store. An image that it
    cannot read in that way, or whose layers are not what their names say, is returned in RV(left) for C(docker push).
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: Says that it would; publishes nothing.
    support: full
  diff_mode:
    description: Shows the names that the registry would have.
    support: full
options:
  images:
    description: The images.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Id or reference of the image on this rank.
        type: str
        required: true
      published:
        description: Its name in the registry, C(registry/repository:tag), the registry as this rank's engine calls it.
        type: str
        required: true
  address:
    description: Where the registry listens on this rank, C(host:port). It speaks plain HTTP and asks for no login.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Publish the overlay
  lockstep.fleet.image_publish:
    images:
      - name: dsv41-3x-spark:local
        published: lockstep-registry:5100/dsv41-3x-spark:e893dd817d03
    address: 127.0.0.1:5100
"""

RETURN = r"""
digests:
  description: The published images by digest, C(registry/repository@digest); empty in check mode.
  type: list
  elements: str
  returned: always
left:
  description: The names of those that the engine has to push.
  type: list
  elements: str
  returned: always
why:
  description: Why it has to.
  type: list
  elements: str
  returned: always
bytes:
  description: Bytes that the registry was given.
  type: int
  returned: always
"""

import contextlib
import hashlib
import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, dockerd, images, layers
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "images": {
        "type": "list",
        "elements": "dict",
        "required": True,
        "options": {"name": {"type": "str", "required": True}, "published": {"type": "str", "required": True}},
    },
    "address": {"type": "str", "required": True},
    "docker_host": {"type": "str"},
}

# Seconds for a registry that only starts to listen, and for an engine that reads a changed /etc/hosts after up to 5 s.
COMES_S = 15.0
# Seconds for an answer: the registry hashes a whole layer before it gives one.
ANSWER_S = 1800
READ_TYPES = f"{layers.MANIFEST_TYPE}, application/vnd.docker.distribution.manifest.v2+json"

Answer = tuple[http.HTTPStatus, http.client.HTTPMessage, bytes]
Descriptor = dict[str, Any]
# Layers that a registry has, by diff id: in which repository, and how manifests there describe them.
Held = dict[str, tuple[str, Descriptor]]


class RefusedError(LockstepError):
    """The registry does not do what it is asked."""


class Registry:
    """A registry by the OCI distribution API, over plain HTTP. ``bytes`` counts what blobs it was given."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._http = http.client.HTTPConnection(address, timeout=ANSWER_S)
        self.bytes = 0

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _ask(self, method: str, path: str, body: bytes | Iterator[bytes] | None = None, kind: str = "") -> Answer:
        """One request; a body that is no bytes goes in chunks."""
        try:
            # It may have answered before it had read everything.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._http.request(method, path, body, {"Accept": READ_TYPES, "Content-Type": kind})
            with contextlib.closing(self._http.getresponse()) as answer:
                return http.HTTPStatus(answer.status), answer.headers, answer.read()
        except BaseException as error:
            self._http.close()  # perhaps in the middle of a body; the next request connects anew
            if not isinstance(error, (OSError, http.client.HTTPException)):
                raise
            raise RefusedError(
                "the registry on this rank does not answer",
                found=f"{method} {path}: {error}",
                expected=f"a registry on {self._address}",
                next_step="docker logs of its container on this rank",
            ) from error

    def _expect(self, status: http.HTTPStatus, answer: Answer, what: str) -> None:
        if answer[0] != status:
            said = answer[2].decode(errors="replace").strip()[:500]
            raise RefusedError(
                f"the registry refused {what}",
                found=f"unexpected http status: {answer[0].value} {answer[0].phrase} {said}",
                expected=f"{status.value} {status.phrase}",
                next_step="read the registry's log on this rank; when its disk is full, free space there",
            )

    def wait(self) -> None:
        """Wait until it listens."""
        retried(lambda: self._expect(http.HTTPStatus.OK, self._ask("GET", "/v2/"), "GET /v2/"))

    def _json(self, path: str) -> dict[str, Any]:
        status, _, body = self._ask("GET", path)
        return dict(json.loads(body)) if status == http.HTTPStatus.OK else {}

    def held(self, repository: str) -> Held:
        """Layers of every image in a repository; an image that is damaged there, or is none of layers, has none."""
        out: Held = {}
        for tag in self._json(f"/v2/{repository}/tags/list").get("tags") or []:
            with contextlib.suppress(RefusedError, ValueError, LookupError, TypeError):
                manifest = self._json(f"/v2/{repository}/manifests/{tag}")
                diff_ids = self._json(f"/v2/{repository}/blobs/{manifest['config']['digest']}")["rootfs"]["diff_ids"]
                out |= {one: (repository, its) for one, its in zip(diff_ids, manifest["layers"], strict=True)}
        return out

    def size(self, repository: str, digest: str) -> int | None:
        """Bytes of a blob that a repository has."""
        status, headers, _ = self._ask("HEAD", f"/v2/{repository}/blobs/{digest}")
        return int(headers["Content-Length"]) if status == http.HTTPStatus.OK else None

    def has(self, repository: str, digest: str, size: int) -> bool:
        """Whether a repository has a blob. RefusedError when of another size: a registry writes none a second time."""
        found = self.size(repository, digest)
        if found not in (None, size):
            raise RefusedError(
                "the registry's storage is damaged",
                found=f"{digest} in {repository} has {found} bytes",
                expected=f"{size} bytes",
                next_step="remove its volume on this rank (docker volume rm lockstep-registry): it is filled anew",
            )
        return found is not None

    def mount(self, repository: str, digest: str, source: str) -> bool:
        """Let a repository have a blob of another one; whether that was possible."""
        answer = self._ask("POST", f"/v2/{repository}/blobs/uploads/?mount={digest}&from={source}", b"")
        if answer[0] == http.HTTPStatus.ACCEPTED:
            self._drop(answer)
        return answer[0] == http.HTTPStatus.CREATED

    def _drop(self, opened: Answer) -> None:
        """Give an upload up, so that the registry keeps nothing of it; the first error is the one that counts."""
        with contextlib.suppress(RefusedError):
            self._ask("DELETE", _path(opened[1]["Location"]))

    def put(self, repository: str, digest: str, content: Iterable[bytes]) -> int:
        """Give a repository a blob; its bytes. LockstepError when the content is not what the digest says."""
        opened = self._ask("POST", f"/v2/{repository}/blobs/uploads/", b"")
        self._expect(http.HTTPStatus.ACCEPTED, opened, f"an upload to {repository}")
        sent = 0

        def counted() -> Iterator[bytes]:
            nonlocal sent
            for block in content:
                sent += len(block)
                yield block

        path = _path(opened[1]["Location"])
        path += f"{'&' if '?' in path else '?'}digest={digest}"
        try:
            answer = self._ask("PUT", path, counted(), "application/octet-stream")
        except LockstepError:
            self._drop(opened)
            raise
        if answer[0] == http.HTTPStatus.BAD_REQUEST and b"DIGEST_INVALID" in answer[2]:
            raise LockstepError("a layer on the engine's disk is not what its name says", expected=digest)
        self._expect(http.HTTPStatus.CREATED, answer, f"{digest} in {repository}")
        self.bytes += sent
        return sent

    def name(self, repository: str, tag: str, manifest: bytes) -> str:
        """Give an image's manifest, under a tag; its digest."""
        answer = self._ask("PUT", f"/v2/{repository}/manifests/{tag}", manifest, layers.MANIFEST_TYPE)
        self._expect(http.HTTPStatus.CREATED, answer, f"the manifest of {repository}:{tag}")
        return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def _path(location: str) -> str:
    return location[location.index("/v2/") :]


def retried(step: Callable[[], None]) -> None:
    """Do a step again while what it asks cannot be reached yet."""
    end = time.monotonic() + COMES_S
    while True:
        try:
            return step()
        except LockstepError as error:
            if time.monotonic() > end or dockerd.trouble(str(error.found))["kind"] not in ("unreachable", "cut"):
                raise
        time.sleep(0.1)


def layer(registry: Registry, root: str, repository: str, diff_id: str, chain_id: str, held: Held) -> Descriptor:
    """Have a layer in a repository; its descriptor for manifests there."""
    source, known = held.get(diff_id, ("", {}))
    if known and registry.has(repository, known["digest"], known["size"]):
        return known
    if known and source != repository and registry.mount(repository, known["digest"], source):
        return known
    kind, digest, content = layers.LAYER_TYPE, diff_id, layers.tar(root, chain_id)
    if layers.size(root, chain_id) <= layers.COMPRESS_UP_TO:
        packed = layers.compressed(content, diff_id)
        kind, digest, content = f"{kind}+gzip", f"sha256:{hashlib.sha256(packed).hexdigest()}", iter([packed])
    size = registry.size(repository, digest)
    if size is None:
        size = registry.put(repository, digest, content)
    return {"mediaType": kind, "digest": digest, "size": size}


def publish(registry: Registry, root: str, image_id: str, name: str, held: Held) -> str:
    """Have an image in the registry under a name; its digest there. ``held`` grows by its layers."""
    repository, tag = placed(name)
    config = layers.config(root, image_id)
    diff_ids = json.loads(config)["rootfs"]["diff_ids"]
    described = []
    for diff_id, chain_id in zip(diff_ids, layers.chain_ids(diff_ids), strict=True):
        described.append(layer(registry, root, repository, diff_id, chain_id, held))
        held[diff_id] = repository, described[-1]
    if not registry.has(repository, image_id, len(config)):
        registry.put(repository, image_id, [config])
    return registry.name(repository, tag, layers.manifest(image_id, len(config), described))


def placed(name: str) -> tuple[str, str]:
    """Repository and tag of ``registry/repository:tag``, as the registry knows them."""
    repository, _, tag = name.partition("/")[2].rpartition(":")
    return repository, tag


def proven(client: docker_api.Engine, name: str, digest: str, image_id: str) -> str:
    """Let the engine pull an image that it has by a new digest, which it learns by that; ``repository@digest``."""
    reference = f"{images.parse_reference(name)['repository']}@{digest}"
    retried(lambda: docker_api.pull(client, reference))
    found = docker_api.identify(client, reference)["id"]
    if found != image_id:
        raise LockstepError("the registry has another image", found=f"{reference}: {found}", expected=image_id)
    return reference


def run(params: dict[str, Any], *, check_mode: bool) -> dict[str, Any]:
    """Publish what can be; returns the module's result."""
    wanted = [(entry["name"], entry["published"]) for entry in params["images"]]
    result: dict[str, Any] = {"changed": bool(wanted), "digests": [], "left": [], "why": [], "bytes": 0}
    result["diff"] = {"before": "", "after": "".join(f"{published}\n" for _, published in wanted)}
    if check_mode or not wanted:
        return result
    client = docker_api.Engine(params["docker_host"])
    info = client.get_json("/info")
    if images.store(info) != "classic" or info.get("Driver") != layers.DRIVER:
        why = f"store {images.store(info)}, driver {info.get('Driver')}: only the engine reads it"
        return result | {"left": [name for name, _ in wanted], "why": [why]}
    with contextlib.closing(Registry(params["address"])) as registry:
        registry.wait()
        held: Held = {}
        for repository in {placed(published)[0] for _, published in wanted}:
            held |= registry.held(repository)
        for name, published in wanted:
            image = docker_api.identify(client, name, info=info)
            if not image["present"]:
                raise LockstepError("the image to publish is not on this rank", found=f"no {name}")
            try:
                digest = publish(registry, info["DockerRootDir"], image["id"], published, held)
            except RefusedError:
                raise
            except LockstepError as error:
                result["left"].append(name)
                result["why"].append(f"{name}: {error}")
            else:
                result["digests"].append(proven(client, published, digest, image["id"]))
        return result | {"bytes": registry.bytes}


def main() -> None:
    """Publish, and say what happened."""
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = run(module.params, check_mode=module.check_mode)
    except (LockstepError, docker_api.EngineError) as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
