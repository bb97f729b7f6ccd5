"""Images of this machine's own Docker Engine in a real registry, past ``docker push``; digests known before."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import sys
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import docker
import oci
import pytest
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, layers
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError
from ansible_collections.lockstep.fleet.plugins.modules import image_publish
from lockstep_lab import hub, outer
from playbook import Played, examples, run_playbook

NAME = f"lockstep-test-publish-{os.getpid()}"
MIB = 1 << 20


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)  # noqa: S311 - content of a file


def odd_layer() -> bytes:
    """What a layer's tar can hold: links, a long name, one that is no UTF-8, an empty file, modes, an attribute."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:

        def add(name: str, content: bytes = b"", **its: Any) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in its.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(content))

        add("srv", type=tarfile.DIRTYPE, mode=0o755)
        add("srv/noise", noise(1, 2 * MIB), mode=0o4755, uid=1000, gid=1001, mtime=1790243251.5)
        add("srv/noise-again", type=tarfile.LNKTYPE, linkname="srv/noise")
        add("srv/link", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add("srv/empty")
        add(f"srv/{'long/' * 40}name", b"long\n")
        add("srv/latin-\udce9", b"no UTF-8\n", pax_headers={"hdrcharset": "BINARY"})
        add("srv/é", b"UTF-8\n", pax_headers={"SCHILY.xattr.user.maker": "lockstep"})
    return out.getvalue() + bytes(10240)  # more padding than tar needs


LAYERS = [
    odd_layer(),
    oci.layer({"opt/lines": b"".join(b"%d\n" % line for line in range(500_000))}),
    oci.layer({"srv/.wh.empty": b"", "srv/.wh..wh..opq": b""}),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    with closing(docker.from_env(timeout=600)) as client:
        yield client


@pytest.fixture(scope="module")
def start(engine: docker.DockerClient) -> Iterator[Callable[..., str]]:
    """Start a registry with settings of its environment; where it listens."""
    image = hub.image(outer.engine())
    started = []

    def one(**settings: str) -> str:
        places = {"REGISTRY_HTTP_ADDR": ":5000", "REGISTRY_STORAGE_FILESYSTEM_ROOTDIRECTORY": "/blobs"}
        started.append(
            engine.containers.run(
                image,
                detach=True,
                ports={"5000/tcp": ("127.0.0.1", None)},
                environment=places | settings,
                volumes=["/blobs"],
            )
        )
        started[-1].reload()
        return f"127.0.0.1:{started[-1].ports['5000/tcp'][0]['HostPort']}"

    yield one
    for container in started:
        container.remove(force=True, v=True)


@pytest.fixture(scope="module")
def registry(start: Callable[..., str]) -> str:
    address = start()
    with closing(image_publish.Registry(address)) as client:
        client.wait()
    return address


Get = Callable[..., tuple[str, str]]


@pytest.fixture
def get(engine: docker.DockerClient, registry: str, request: pytest.FixtureRequest) -> Iterator[Get]:
    """Have an image of given layers in this engine: its name, and its Id, which is this test's own by a label."""
    got = []

    def one(name: str = "made", its: list[bytes] = LAYERS) -> tuple[str, str]:
        pushed = oci.push(registry, f"{NAME}/{name}", its, {"Labels": {"test": request.node.name}})
        got.append(engine.images.pull(f"{pushed.repository}@{pushed.index}"))
        assert got[-1].id == pushed.config
        assert got[-1].tag(f"{NAME}-{name}", "local")
        return f"{NAME}-{name}:local", pushed.config

    yield one
    for image in got:
        engine.images.remove(image.id, force=True)


def root(engine: docker.DockerClient) -> str:
    return str(engine.info()["DockerRootDir"])


def publish(registry: str, *images: tuple[str, str], **more: Any) -> dict[str, Any]:
    """In this process; ``images`` are ``(name, repository:tag in the registry)``."""
    listed = [{"name": name, "published": f"{registry}/{NAME}/{published}"} for name, published in images]
    params = {"images": listed, "address": registry, "docker_host": None, **more}
    return image_publish.run(params, check_mode=False)


def asked(url: str) -> bytes:
    request = urllib.request.Request(f"http://{url}", headers={"Accept": image_publish.READ_TYPES})
    with urllib.request.urlopen(request) as answer:  # noqa: S310 - http, above
        return bytes(answer.read())


def published(reference: str) -> dict[str, Any]:
    address, _, path = reference.partition("/")
    repository, _, digest = path.partition("@")
    manifest: dict[str, Any] = json.loads(asked(f"{address}/v2/{repository}/manifests/{digest}"))
    return manifest


def anew(engine: docker.DockerClient, name: str, reference: str) -> str:
    """Forget an image and its layers, pull it by digest; the Id that it has then."""
    engine.images.remove(engine.images.get(name).id, force=True)
    pulled = engine.images.pull(reference)
    assert pulled.tag(*name.split(":"))
    return str(pulled.id)


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Played]:
    def run(tasks: list[dict[str, Any]], *arguments: str) -> Played:
        whole: dict[str, Any] = {"hosts": "all", "connection": "local", "gather_facts": False, "tasks": tasks}
        whole["vars"] = {"ansible_python_interpreter": sys.executable}
        return run_playbook([whole], tmp_path, *arguments, inventory="spark1,")

    return run


def test_a_layer_on_the_engines_disk_is_the_layer_to_the_byte(engine, get):
    _, image_id = get()
    config = layers.config(root(engine), image_id)
    assert oci.sha256(config) == image_id
    diff_ids = json.loads(config)["rootfs"]["diff_ids"]
    assert diff_ids == [oci.sha256(layer) for layer in LAYERS]
    for layer, chain_id in zip(LAYERS, layers.chain_ids(diff_ids), strict=True):
        assert b"".join(layers.tar(root(engine), chain_id)) == layer


@pytest.mark.parametrize("compress_up_to", [layers.COMPRESS_UP_TO, -1], ids=["compressed", "as they are"])
def test_what_is_published_is_the_same_image(engine, registry, get, monkeypatch, compress_up_to):
    monkeypatch.setattr(layers, "COMPRESS_UP_TO", compress_up_to)
    name, image_id = get()
    said = publish(registry, (name, f"same{abs(compress_up_to)}:1"))
    assert (said["changed"], said["left"], said["why"]) == (True, [], [])
    (reference,) = said["digests"]
    assert reference in engine.images.get(name).attrs["RepoDigests"]
    manifest = published(reference)
    assert manifest["config"]["digest"] == image_id
    repository = f"{registry}/v2/{NAME}/same{abs(compress_up_to)}"
    blobs = [asked(f"{repository}/blobs/{layer['digest']}") for layer in manifest["layers"]]
    assert [len(blob) for blob in blobs] == [layer["size"] for layer in manifest["layers"]]
    kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if compress_up_to > 0 else "")
    assert {layer["mediaType"] for layer in manifest["layers"]} == {kind}
    assert [gzip.decompress(blob) if compress_up_to > 0 else blob for blob in blobs] == LAYERS
    assert said["bytes"] == sum(map(len, blobs)) + manifest["config"]["size"]
    assert anew(engine, name, reference) == image_id


def test_only_what_the_registry_lacks_moves(registry, get):
    top = oci.layer({"opt/top": noise(2, MIB)})
    base, overlay = get(), get("overlay", [*LAYERS, top])
    first = publish(registry, (base[0], "below:1"))
    again = publish(registry, (base[0], "below:1"))
    assert (again["bytes"], again["digests"]) == (0, first["digests"])
    both = publish(registry, (base[0], "below:1"), (overlay[0], "above:1"))
    manifest = published(both["digests"][1])
    assert both["bytes"] == manifest["layers"][-1]["size"] + manifest["config"]["size"]
    # As docker compresses it: random bytes get no smaller, and a few bytes for each block larger.
    assert MIB < manifest["layers"][-1]["size"] < 1.001 * MIB
    assert manifest["layers"][:-1] == published(first["digests"][0])["layers"]


@pytest.mark.parametrize("compress_up_to", [layers.COMPRESS_UP_TO, -1], ids=["compressed", "as they are"])
def test_what_is_not_as_its_name_says_is_left_to_the_engine(engine, registry, get, monkeypatch, compress_up_to):
    monkeypatch.setattr(layers, "COMPRESS_UP_TO", compress_up_to)
    # One layer of its own, so that no other image stands on what is damaged here.
    name, image_id = get("damaged", [oci.layer({"opt/own": noise(3, MIB)})])
    whole = get("whole", [oci.layer({"opt/whole": b"whole\n"})])
    (lower,) = Path(engine.images.get(name).attrs["GraphDriver"]["Data"]["UpperDir"]).glob("opt/own")
    lower.write_bytes(noise(4, MIB))
    said = publish(registry, (name, f"damaged{abs(compress_up_to)}:1"), (whole[0], f"whole{abs(compress_up_to)}:1"))
    assert (said["left"], len(said["digests"])) == ([name], 1)
    assert said["why"][0].startswith(f"{name}: ")
    assert "not what its name says" in said["why"][0]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        asked(f"{registry}/v2/{NAME}/damaged{abs(compress_up_to)}/manifests/1")
    lower.write_bytes(b"short\n")
    assert "is shorter than it should be" in publish(registry, (name, "damaged:1"))["why"][0]
    chain_id = layers.chain_ids(engine.images.get(name).attrs["RootFS"]["Layers"])[0]
    described = Path(root(engine), "image/overlay2/layerdb", *chain_id.split(":"))
    (described / "tar-split.json.gz").write_bytes(gzip.compress(b'{"type":1,"name":"opt/own"'))
    assert "does not keep its layers as this version knows it" in publish(registry, (name, "damaged:1"))["why"][0]
    assert image_id == engine.images.get(name).id


def test_a_registry_whose_storage_is_damaged(start, engine, get):
    address = start()
    (container,) = [
        one for one in engine.containers.list(ignore_removed=True) if address.split(":")[1] in str(one.ports)
    ]
    (volume,) = [Path(one["Source"]) for one in container.attrs["Mounts"] if one["Destination"] == "/blobs"]

    def restarted() -> str:
        """Start it again, so that it knows what its disk holds and nothing else."""
        container.restart(timeout=1)
        container.reload()
        return f"127.0.0.1:{container.ports['5000/tcp'][0]['HostPort']}"

    def blob(digest: str) -> Path:
        return volume / "docker/registry/v2/blobs/sha256" / digest[7:9] / digest[7:] / "data"

    name, _ = get()
    manifest = published(publish(address, (name, "stored:1"))["digests"][0])
    # An image beside it that cannot be read, or has no layers, is no hindrance.
    other = get("other", [oci.layer({"opt/other": b"other\n"})])
    publish(address, (other[0], "stored:other"))
    blob(other[1]).write_bytes(b"")
    address = restarted()
    assert publish(address, (name, "stored:1"))["bytes"] == 0
    # One of another size is.
    layer = manifest["layers"][1]
    os.truncate(blob(layer["digest"]), 1000)
    address = restarted()
    with pytest.raises(LockstepError, match="the registry's storage is damaged") as damaged:
        publish(address, (name, "stored:1"))
    assert damaged.value.found == f"{layer['digest']} in {NAME}/stored has 1000 bytes"
    assert damaged.value.expected == f"{layer['size']} bytes"
    assert "remove its volume on this rank" in damaged.value.next_step
    # What is cut or refused leaves no upload behind.
    assert not [*volume.glob("**/_uploads/*")]
    damage_id = get("cut", [oci.layer({"opt/cut": noise(5, MIB)})])[0]
    (lower,) = Path(engine.images.get(damage_id).attrs["GraphDriver"]["Data"]["UpperDir"]).glob("opt/cut")
    os.truncate(lower, MIB // 2)
    assert publish(address, (damage_id, "stored:cut"))["left"] == [damage_id]
    assert not [*volume.glob("**/_uploads/*")]


def test_a_registry_that_refuses_or_does_not_answer_is_said_with_the_next_step(start, get, monkeypatch):
    name, _ = get()
    closed = start(REGISTRY_STORAGE_MAINTENANCE_READONLY='{"enabled": true}')
    with pytest.raises(LockstepError) as refused:
        publish(closed, (name, "refused:1"))
    assert refused.value.message == f"the registry refused an upload to {NAME}/refused"
    assert refused.value.found.startswith("unexpected http status: 405 Method Not Allowed")
    assert "read the registry's log on this rank" in refused.value.next_step
    monkeypatch.setattr(image_publish, "COMES_S", 0.3)
    with pytest.raises(LockstepError, match="the registry on this rank does not answer") as gone:
        publish("127.0.0.1:1", (name, "gone:1"))
    assert "Connection refused" in gone.value.found


def test_image_name_has_the_engine_pull_what_is_not_here(engine, registry, get, play):
    name, image_id = get()
    (reference,) = publish(registry, (name, "pulled:1"))["digests"]
    engine.images.remove(image_id, force=True)
    task = {"name": "have", "lockstep.fleet.image_name": {"name": name, "image": reference, "pull": True}}
    assert play([task], "--check").results["have"]["changed"]
    assert not engine.images.list(name)
    assert (play([task]).results["have"]["changed"], engine.images.get(name).id) == (True, image_id)
    assert not play([task]).results["have"]["changed"]
    none = f"{reference.partition('@')[0]}@sha256:{'0' * 64}"
    failed = play([{"name": "have", "lockstep.fleet.image_name": {"name": name, "image": none, "pull": True}}])
    assert failed.rc == 2
    assert f"manifest for {none} not found: manifest unknown" in failed.results["have"]["msg"]
    assert engine.images.get(name).id == image_id


def test_an_image_that_is_not_here_is_said(registry):
    with pytest.raises(LockstepError, match="the image to publish is not on this rank\n  found: no none:local"):
        publish(registry, ("none:local", "none:1"))


def test_another_driver_is_left_to_the_engine(registry, get, monkeypatch):
    name, _ = get()
    info = docker_api.Engine().get_json("/info")
    monkeypatch.setattr(docker_api.Engine, "get_json", lambda *_, **__: info | {"Driver": "btrfs"})
    said = publish(registry, (name, "other:1"))
    assert (said["left"], said["why"]) == ([name], ["store classic, driver btrfs: only the engine reads it"])


def test_the_module_as_its_examples_say(engine, registry, get, play):
    name, image_id = get()
    own = {"lockstep-registry:5100": f"{registry}/{NAME}", "dsv41-3x-spark:local": name, "127.0.0.1:5100": registry}
    tasks = examples("image_publish", own)
    foreseen = play(tasks, "--check", "--diff")
    assert foreseen.rc == 0, foreseen.text
    shown = foreseen.results["Publish the overlay"]
    assert (shown["changed"], shown["digests"]) == (True, [])
    assert shown["diff"]["after"] == f"{registry}/{NAME}/dsv41-3x-spark:e893dd817d03\n"
    done = play(tasks)
    assert done.rc == 0, done.text
    assert published(done.results["Publish the overlay"]["digests"][0])["config"]["digest"] == image_id
    assert hashlib.sha256(asked(f"{registry}/v2/{NAME}/dsv41-3x-spark/blobs/{image_id}")).hexdigest() == image_id[7:]
