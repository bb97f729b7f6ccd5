"""The crash tests themselves: kills are real, and wrong versions of the product do not get past them."""

from __future__ import annotations

import signal
from collections import Counter

import crash
import pytest
from crash import AFTER, BEFORE, MIDDLE, STAGES, Call, Ended, Moment, moments
from crash_scenes import Archive, Pack, Scene, killed_and_run_again

pytestmark = pytest.mark.timeout(300)

FIRST = "engram-l1-r1of2.bin"


@pytest.fixture
def pack(launcher, made, tmp_path) -> Pack:
    return Pack(launcher, made, tmp_path)


def broken(scene: Scene, functions: dict[str, str]) -> Scene:
    """The job with functions of the core in place that are wrong."""
    scene.settings = {
        **scene.settings,
        **{f"lockstep_core.{name}": f"@crash_broken:{function}" for name, function in functions.items()},
    }
    return scene


def test_drawn_moments_are_of_the_stage_different_and_the_same_by_the_seed() -> None:
    run = [Ended(0, "", (Call("write", 9, "/x"),) * 40 + (Call("rename", 0, "/x"),) * 3)]
    drawn = moments(run, "write", 10, "seed")
    assert drawn == moments(run, "write", 10, "seed") != moments(run, "write", 10, "another")
    assert len(set(drawn)) == 10
    assert {moment.stage for moment in drawn} == {"write"}
    assert all(1 <= moment.number <= 40 for moment in drawn)
    few = moments(run, "rename", 10, "seed")
    assert Counter((moment.number, moment.when) for moment in few).keys() == {
        (number, when) for number in (1, 2, 3) for when in (BEFORE, AFTER)
    }
    assert len(few) == 10
    with pytest.raises(AssertionError, match="no call of stage verify"):
        moments(run, "verify", 1, "seed")


def test_a_run_goes_through_every_stage(pack) -> None:
    (whole,) = pack.run()
    assert whole.status == 0
    assert set(STAGES) == set(whole.counts)


@pytest.mark.parametrize(("when", "size"), [(BEFORE, 4096), (MIDDLE, 4096 + 16 * 4096), (AFTER, 4096 + 264 * 512)])
def test_a_kill_is_at_its_call(when, size, pack) -> None:
    """At the write of the first block of rows: 512 rows of 264 bytes, 33 pages, behind the header's one."""
    scene = broken(pack, {"files.write_blocks": "in_place"})  # it has no threads
    undisturbed = [call.path for call in scene.run()[0].calls if call.stage == "write"]
    scene.fresh()
    (killed,) = scene.run(Moment("write", undisturbed.index(str(pack.out / FIRST)) + 2, when))
    assert killed.status == -signal.SIGKILL
    assert (pack.out / FIRST).stat().st_size == size


@pytest.mark.parametrize(
    ("moment", "functions", "caught"),
    [
        (Moment("write", 20, MIDDLE), {"files.write_blocks": "in_place"}, "wrong under its final name"),
        (Moment("write", 20, MIDDLE), {"files.write_blocks": "forgetful"}, "bytes were proven"),
        (Moment("write", 20, MIDDLE), {"files.write_blocks": "untidy"}, "left behind"),
        (Moment("write", 20, MIDDLE), {"files.look": "restless"}, "a third run changed something"),
    ],
    ids=lambda value: "".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_broken_packing_is_caught_at_a_kill(moment, functions, caught, pack) -> None:
    with pytest.raises(AssertionError, match=caught):
        killed_and_run_again(broken(pack, functions), moment)


def test_a_packing_that_does_not_flush_is_caught_when_the_power_goes(launcher, made, tmp_path) -> None:
    with crash.filesystem(tmp_path / "disk", 32) as disk:
        scene = broken(Pack(launcher, made, disk), {"files.write_blocks": "unsynced"})
        assert [end.status for end in scene.run()] == [0]
        crash.power_off(disk)
        crash.power_back(disk)
        with pytest.raises(AssertionError, match=r"wrong under its final name|vouches for nothing"):
            scene.nothing_wrong()


def test_a_readback_from_the_page_cache_is_caught_by_a_bit_that_turns_on_the_disk(launcher, made, tmp_path) -> None:
    with crash.filesystem(tmp_path / "disk", 32) as disk:
        scene = broken(Pack(launcher, made, disk), {"files.sha256_file": "cached_sha256"})
        partial = scene.out / f"{FIRST}.partial"

        def turn() -> None:
            partial.read_bytes()  # so that the cache has it as it was written
            crash.flip(disk, partial, 100_000)

        (end,) = scene.launcher.run(*scene.jobs(Moment("hash", 30, BEFORE, "hold")), while_held=turn)
        assert end.status == 0
        crash.power_off(disk)
        crash.power_back(disk)
        with pytest.raises(AssertionError, match="wrong under its final name"):
            scene.nothing_wrong()


def test_a_source_that_is_removed_before_the_verdict_is_caught(pack, tmp_path) -> None:
    scene = Archive(pack, tmp_path)
    scene.fresh()
    renames = [call.path for call in scene.run()[1].calls if call.stage == "rename"]
    broken(scene, {"archive._send_one": "hasty"})
    moment = Moment("rename", 1 + renames.index(str(scene.target / FIRST)), BEFORE, process=1)
    with pytest.raises(AssertionError, match="is lost"):
        killed_and_run_again(scene, moment)
