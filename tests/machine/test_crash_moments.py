"""Kills at every stage of packing, archiving and restoring: nothing wrong looks whole, and the next run ends right.

The moments are drawn by a fixed seed from the calls that an undisturbed run makes. Every expected byte is worked out
in ``crash_scenes`` from the checkpoint, not by the product.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import crash
import pytest
from crash import STAGES, Histogram, Moment, moments
from crash_scenes import Archive, Pack, Repack, Restore, killed_and_run_again

SEED = "2026-11-29"
EACH = 10
POWER_CUTS = ("write", "fsync", "rename", "remove")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """Where the jobs work: a real file system, which is not kept waiting by who else uses this machine's."""
    with crash.filesystem(tmp_path_factory.mktemp("disk") / "a disk", 192) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def histogram(request) -> Iterator[Histogram]:
    counted = Histogram("moments")
    yield counted
    counted.show(request.config)


# --- the kills --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pack(launcher, made, place) -> Pack:
    return Pack(launcher, made, place)


@pytest.fixture(scope="module")
def archive(pack, place) -> Archive:
    return Archive(pack, place / "archive")


@pytest.fixture(scope="module")
def restore(pack, place) -> Restore:
    return Restore(pack, place / "restore")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["pack", "archive", "restore"])
def test_killed_and_run_again(name, stage, request, histogram) -> None:
    scene, kept = request.getfixturevalue(name), 0
    scene.fresh()
    for moment in moments(scene.run(), stage, EACH, f"{SEED}/{name}"):
        kept += killed_and_run_again(scene, moment)
        histogram.count(name, stage)
    assert kept, "no kill left anything to go on with"


@pytest.mark.parametrize("stage", ["write", "fsync", "rename", "verify", "remove"])
def test_killed_while_good_shards_are_packed_again(stage, launcher, made, place, histogram) -> None:
    scene = Repack(launcher, made, place / "again")
    scene.fresh()
    undisturbed = scene.run(Moment("write", 1 << 30))
    assert undisturbed[0].status == 0
    for moment in moments(undisturbed, stage, 5, f"{SEED}/again"):
        assert killed_and_run_again(scene, moment) > 0
        histogram.count("pack again", stage)


# --- the power --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", POWER_CUTS)
def test_power_lost_while_packing(stage, launcher, made, tmp_path, histogram) -> None:
    """What was not flushed is gone; what is there under its final name, and every mark, is right all the same."""
    with crash.filesystem(tmp_path / "disk", 32) as disk:
        scene = Pack(launcher, made, disk)
        scene.fresh()
        for moment in moments(scene.run(), stage, 5, f"{SEED}/power"):
            scene.fresh()
            (killed,) = scene.run(replace(moment, act="power", what=str(disk)))
            assert killed.status == -signal.SIGKILL, f"{moment}: {killed}"
            crash.power_back(disk)
            scene.nothing_wrong()
            before = scene.remembered()
            (again,) = scene.run()
            assert again.status == 0, f"{moment}: {again.text}"
            scene.all_right()
            scene.resumed([again], before)
            histogram.count("pack, power lost", stage)


def test_power_lost_just_after_the_end(launcher, made, tmp_path) -> None:
    """What a run called packed is there when the power comes back."""
    with crash.filesystem(tmp_path / "disk", 32) as disk:
        scene = Pack(launcher, made, disk)
        scene.fresh()
        scene.run()
        before = scene.standing()
        crash.power_off(disk)
        crash.power_back(disk)
        assert scene.standing() == before
        scene.all_right()


@pytest.mark.parametrize("stage", POWER_CUTS)
@pytest.mark.parametrize(("name", "side"), [("archive", "target"), ("restore", "target"), ("archive", "source")])
def test_power_lost_while_moving(name, side, stage, request, tmp_path, histogram) -> None:
    """Either end is killed at its call as one of the two loses its power: what the source gave away is there."""
    with crash.filesystem(tmp_path / "disk", 32) as disk:
        move = request.getfixturevalue(name)
        scene = move.at(tmp_path, disk) if side == "target" else move.at(disk, tmp_path)
        scene.fresh()
        for moment in moments(scene.run(), stage, 4, f"{SEED}/{name}/power/{side}"):
            scene.fresh()
            crash.flush(disk)  # what stood at the source had been there for long
            ended = scene.run(replace(moment, act="power", what=str(disk)))
            assert ended[moment.process].status == -signal.SIGKILL, f"{moment}: {ended}"
            crash.power_back(disk)
            scene.nothing_wrong()
            again = scene.run()
            assert not any(end.status for end in again), f"{moment}: {[end.text for end in again]}"
            scene.all_right()
            histogram.count(f"{name}, power lost at the {side}", stage)


def test_power_lost_just_after_a_move(archive, tmp_path) -> None:
    """What is gone at the source is at the target when the power comes back."""
    with crash.filesystem(tmp_path / "disk", 32) as disk:
        scene = archive.at(tmp_path, disk)
        scene.fresh()
        assert [end.status for end in scene.run()] == [0, 0]
        crash.power_off(disk)
        crash.power_back(disk)
        scene.all_right()
