"""What the hub and the hosts' engines hold at the start, made once per engine image and kept in the cache.

Build A is pushed first (its digest is the fleet's pin), then build B under the same tag: the tag moved. Each host's
/var/lib/docker then begins with the notes of that push and, for each layer, a link to its files, which all hosts share
read-only: nothing is unpacked or copied again. Layers are only ever read (overlayfs copies a file up before it changes
it), a removed image only loses its links, and the page cache is shared.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import docker
from docker.models.containers import Container

from . import engines, hub, nodes, outer, topology
from .paths import cache
from .say import LabError, say, sh, step

_RECIPE = 4
"""Raise it when the way this is made changes: it is part of the cache's key."""

BASE = "lmsysorg/sglang:dev-dsv41"
REGISTRY = "lockstep/registry:2"
_WORKSHOP = "lockstep-lab-workshop"


@dataclass(frozen=True)
class Golden:
    """A finished start: directory, and the references the fleet's inventory needs."""

    path: Path
    images: dict[str, dict[str, str]]
    """{"a" | "b" | "registry": {"reference", "digest", "id"}}; digest is the manifest's, as the hub names it."""

    def engine_store(self, build: str) -> Path:
        """The /var/lib/docker that holds base build ``a`` or ``b`` under the tag."""
        return self.path / build

    @property
    def hub_storage(self) -> Path:
        """The storage directory of the hub."""
        return self.path / "hub"


def copy_engine_store(source: Path, target: Path) -> None:
    """Make ``target`` a /var/lib/docker like ``source``, one of a start's: notes are copied, layers stay links."""
    target.mkdir(parents=True, exist_ok=True)
    sh(["cp", "-a", f"{source}/.", target])


def _link_layers(store: Path, layers: Path, name: str) -> None:
    """Put links to the files of ``layers`` (shown in a host below nodes.LAYERS) into a store that has their notes."""
    for layer in layers.iterdir():
        notes = store / "overlay2" / layer.name
        if layer.name == "l":
            shutil.copytree(layer, notes, symlinks=True)
            continue
        notes.mkdir(mode=0o710, parents=True)
        for note in layer.iterdir():
            if note.is_file():
                shutil.copy2(note, notes / note.name)
        # Without it the driver mounts a layer that nothing stands on for writing, to read it for a push.
        (notes / "committed").touch(mode=0o600)
        (notes / "diff").symlink_to(f"{nodes.LAYERS}/{name}/layers/{layer.name}/diff")
        if (layer / "work").is_dir():
            (notes / "work").mkdir(mode=0o700)


def copy_hub_storage(source: Path, target: Path) -> None:
    """Make ``target`` a registry storage like ``source``: blobs (never written again) by hard link, names by copy."""
    link = source.stat().st_dev == target.parent.stat().st_dev

    def one(from_path: str, to_path: str) -> None:
        if link and Path(from_path).name == "data":
            os.link(from_path, to_path)
        else:
            shutil.copy2(from_path, to_path)

    shutil.copytree(source, target, copy_function=one)


def load(path: Path) -> Golden:
    """A finished start."""
    return Golden(path, json.loads((path / "images.json").read_text(encoding="utf-8")))


def make(client: docker.DockerClient, engine: str, node_image: str, registry_image: str) -> Golden:
    """The start for this engine from the cache, made where it is missing (minutes for real SGLang, once).

    A lab that runs is not touched: this has a network, a hub and an engine of its own for the while.
    """
    # The images' tags name what they are made from: the node's decides which Docker packs and pushes.
    facts = [_RECIPE, engine, engines.key(engine), node_image, registry_image]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    final = cache("start") / f"{engine}-{key}"
    if not final.exists():
        part = final.with_name(f"{final.name}.part")
        nodes.wipe(part)
        (part / "hub").mkdir(parents=True)
        with step(f"the start of engine '{engine}': two builds under one tag (kept for next time)"):
            _make(client, engine, node_image, registry_image, part, final.name)
        part.rename(final)
    return load(final)


def prune(keep: Path) -> None:
    """Remove older starts of the same engine; none may be in use by a lab that runs."""
    for old in keep.parent.glob(f"{keep.name.rpartition('-')[0]}-*"):
        if old != keep:
            say(f"removing an older start: {old}")
            nodes.wipe(old)


def _make(
    client: docker.DockerClient, engine: str, node_image: str, registry_image: str, part: Path, name: str
) -> None:
    _remove_workshop(client)
    try:
        client.networks.create(_WORKSHOP, driver="bridge", labels={outer.PART: "workshop"})
        running = hub.start(client, registry_image, part / "hub", name=f"{_WORKSHOP}-hub", network=_WORKSHOP)
        at = hub.address(running, _WORKSHOP)
        both = part / "both"
        with _engine_over(client, node_image, both, [], at) as inner:
            inner.images.load(client.images.get(registry_image).save(named=True))
            registry = _publish(inner, registry_image, REGISTRY)
            inner.images.remove(registry["id"], force=True)
            bases = engines.load(inner, engine)
            builds = {variant: _publish(inner, bases[variant], BASE) for variant in ("a", "b")}
            if builds["a"]["digest"] == builds["b"]["digest"]:
                raise LabError("builds A and B of the base are the same image: the hub's tag would not have moved")
        (both / "overlay2").rename(part / "layers")
        for variant, other in (("a", "b"), ("b", "a")):
            shutil.copytree(both / "image", part / variant / "image")
            _link_layers(part / variant, part / "layers", name)
            binds = [f"{part}:{nodes.LAYERS}/{name}:ro"]
            with _engine_over(client, node_image, part / variant, binds, at) as inner:
                # By digest the other one goes; the tag is the last build's by now, and goes to this one.
                inner.images.get(builds[variant]["id"]).tag(builds[variant]["reference"])
                inner.images.remove(f"{_repository(builds[other])}@{builds[other]['digest']}")
        nodes.wipe(both)
    finally:
        _remove_workshop(client)
    text = json.dumps({**builds, "registry": registry}, indent=1)
    (part / "images.json").write_text(text, encoding="utf-8")


def _remove_workshop(client: docker.DockerClient) -> None:
    nodes.remove([entry for entry in nodes.ours(client) if str(entry.name).startswith(_WORKSHOP)])
    for network in client.networks.list(names=[_WORKSHOP]):
        network.remove()


@contextmanager
def _engine_over(
    client: docker.DockerClient, node_image: str, store: Path, binds: Sequence[str], hub_at: str
) -> Iterator[docker.DockerClient]:
    """A Docker Engine like the hosts' own over ``store``: what it packs and pushes is byte for byte what a host would.

    At the end it is stopped cleanly, and only images and layers stay: the rest is of one host and one day.
    """
    store.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="lockstep-", dir="/run") as sockets:
        container = client.containers.run(
            node_image,
            ["dockerd", "--host=unix:///run/lab/docker.sock", "--iptables=false", "--bridge=none"],
            name=f"{_WORKSHOP}-engine",
            detach=True,
            labels={outer.PART: "workshop"},
            network=_WORKSHOP,
            extra_hosts={topology.HUB_NAME: hub_at},
            volumes=[f"{store}:/var/lib/docker", f"{sockets}:/run/lab", *binds],
            **nodes.rights(client),
        )
        inner = _connect(f"unix://{sockets}/docker.sock", container)
        try:
            yield inner
        finally:
            inner.close()
            container.kill("SIGTERM")
            container.wait(timeout=60)
            container.remove(v=True)
    for entry in store.iterdir():
        if entry.name not in {"image", "overlay2"}:
            nodes.wipe(entry)


def _connect(address: str, container: Container) -> docker.DockerClient:
    deadline = time.monotonic() + 60
    while True:
        try:
            inner = docker.DockerClient(base_url=address, timeout=600)
            inner.ping()
        except docker.errors.DockerException as error:
            if time.monotonic() > deadline:
                logs = container.logs(tail=15).decode(errors="replace")
                raise LabError(f"{container.name} does not answer: {error}\n{logs}", "report it") from error
            time.sleep(0.1)
        else:
            return inner


def _repository(build: dict[str, str]) -> str:
    return build["reference"].rpartition(":")[0]


def _publish(inner: docker.DockerClient, image: str, reference: str) -> dict[str, str]:
    """Push an image to the hub as a host's own engine does; returns its reference, manifest digest and Id."""
    name = f"{topology.HUB}/{reference}"
    repository = name.rpartition(":")[0]
    found = inner.images.get(image)
    found.tag(name)
    with step(f"pushing {name} ({found.attrs['Size'] >> 20} MiB unpacked)"):
        for line in inner.images.push(name, stream=True, decode=True):
            if "error" in line:
                raise LabError(f"pushing {name} failed: {line['error']}")
    inner.images.remove(image)
    found.reload()
    digests = [entry.partition("@")[2] for entry in found.attrs["RepoDigests"] if entry.startswith(f"{repository}@")]
    if len(digests) != 1:
        raise LabError(f"after the push {name} has digests {found.attrs['RepoDigests']}, expected one of that name")
    return {"reference": name, "digest": digests[0], "id": str(found.id)}
