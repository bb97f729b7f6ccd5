"""The container that packs is killed at random moments; the module says so, and its next run ends right.

The module's own start and poll are what is run here, on this machine's Docker Engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import docker
import pack_image
import pytest
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError
from ansible_collections.lockstep.fleet.plugins.modules import engram_pack as module
from crash import Histogram, Launcher
from crash_scenes import LOCK, RANK, TP, Pack
from docker.models.images import Image
from lockstep_lab import checkpoint as lab

pytestmark = pytest.mark.timeout(600)

IMAGE = "lockstep-test:crash"
KILLS = 12
SEED = "2026-11-29"
# Marks as close together as the shards of a test are small.
SMALL_STEPS = b"from lockstep_core import files\nfiles.MARK_EVERY = files.DROP_EVERY = 4 << 20\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    with closing(docker.from_env(timeout=600)) as client:
        yield client


@pytest.fixture(scope="module")
def image(engine) -> Iterator[Image]:
    yield pack_image.make(engine, IMAGE, {"sitecustomize.py": SMALL_STEPS})
    engine.images.remove(IMAGE, force=True)


@pytest.fixture(scope="module")
def scene(image, tmp_path_factory) -> Iterator[Pack]:
    """Two shards of 50 MB."""
    place = tmp_path_factory.mktemp("pack")
    lab.make(place / "checkpoint", 16000)
    with Launcher(tmp_path_factory.mktemp("jobs")) as launcher:
        yield Pack(launcher, place / "checkpoint", place)


@pytest.fixture
def params(engine, image, scene) -> Iterator[dict[str, Any]]:
    defaults = {name: spec["default"] for name, spec in module.ARGUMENT_SPEC.items() if "default" in spec}
    remove(engine)
    yield {
        **defaults,
        "image": image.id,
        "checkpoint": str(scene.checkpoint),
        "dir": str(scene.out),
        "rank": RANK,
        "tp": TP,
        "split": "rows",
        "reserve_bytes": 0,
        "docker_host": None,
    }
    remove(engine)


def remove(engine: docker.DockerClient) -> None:
    for container in containers(engine):
        container.remove(force=True)


def containers(engine: docker.DockerClient) -> list[Any]:
    return engine.containers.list(all=True, filters={"name": f"^{module.CONTAINER}$"})


def finish(params: dict[str, Any]) -> None:
    while not module.poll(params)["_finished"]:
        pass


def at_work(scene: Pack) -> float:
    """Wait until the packing in the container has begun, and return when that was."""
    until = time.monotonic() + 60
    while not (scene.out / LOCK).exists():
        assert time.monotonic() < until
        time.sleep(0.001)
    return time.monotonic()


def where(scene: Pack) -> str:
    """How far the packing had come, by what lies there."""
    done = [name for name in scene.right if (scene.out / f"{name}.manifest.json").exists()]
    if list(scene.out.glob("*.partial")):
        return "in the second shard" if done else "in the first shard"
    return f"{len(done)} of {len(scene.right)} packed"


def test_a_killed_container(engine, scene, params, request) -> None:
    scene.fresh()
    assert module.start(params, check_mode=False)["_container"]
    began = at_work(scene)
    finish(params)
    takes = time.monotonic() - began
    scene.all_right()
    histogram = Histogram("container")
    source = random.Random(SEED)  # noqa: S311 - drawn again the same by the seed
    kills = 0
    # The first run may have been slower than the next: a kill that comes too late makes for earlier ones.
    while kills < KILLS:
        scene.fresh()
        module.start(params, check_mode=False)
        at_work(scene)
        time.sleep(source.uniform(0, takes))
        container = containers(engine)[0]
        try:
            container.kill("SIGKILL")
        except docker.errors.APIError:  # it had ended
            takes *= 0.8
            continue
        if container.wait()["StatusCode"] == 0:  # it had ended, and the engine did not know yet
            takes *= 0.8
            continue
        came = where(scene)
        with pytest.raises(LockstepError, match=r"packing failed\n  found: exit status 137"):
            finish(params)
        scene.nothing_wrong()
        whole = {path: path.stat().st_ino for path in scene.out.glob("*.bin")}
        if module.start(params, check_mode=False)["_container"]:  # not when it was killed at its very end
            finish(params)
        scene.all_right()
        assert {path: path.stat().st_ino for path in whole} == whole, "a shard that was whole was made again"
        before = scene.standing()
        again = module.start(params, check_mode=False)
        assert (again["changed"], again["_container"], scene.standing()) == (False, None, before)
        assert containers(engine) == []
        histogram.count("pack, its container", came)
        kills += 1
    histogram.show(request.config)
