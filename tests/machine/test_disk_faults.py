"""Real disks that are full, broken, read-only or altered under way, for packing, archiving and restoring.

Each fault is said clearly, leaves nothing wrong under a final name and no source touched, and the next run after it is
gone ends right.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import crash
import pytest
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError
from crash import BEFORE, Ended, Launcher, Moment
from crash_scenes import LOCK, Archive, Move, Pack, Restore, Scene, names_are, shard_rows, standing

pytestmark = pytest.mark.timeout(300)

FIRST = "engram-l1-r1of2.bin"


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with crash.filesystem(tmp_path / "disk", 32) as mounted:
        yield mounted


@pytest.fixture
def pack(launcher, made, disk) -> Pack:
    return Pack(launcher, made, disk)


def refused(ended: Ended, *words: str, who: str = "rank 1") -> None:
    """The job ended with an error of ours that says who, what was found and what to do."""
    assert ended.status == 1, ended.text
    assert "Traceback" not in ended.text
    assert f"{who}: " in ended.text, ended.text
    for word in (*words, "\n  found: ", "\n  next step: "):
        assert word in ended.text, ended.text


def mended(scene: Scene) -> None:
    """The fault is gone: one run ends right, the next one changes nothing."""
    again = scene.run()
    assert not any(end.status for end in again), [end.text for end in again]
    scene.all_right()
    before = scene.standing()
    assert not any(end.status for end in scene.run())
    assert scene.standing() == before


def fill(disk: Path, spare: int = 0) -> Path:
    """Take every free byte of a file system but ``spare``."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        room = os.statvfs(disk)
        left = room.f_bavail * room.f_frsize - spare
        while left > 0:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, left)
            except OSError:
                left //= 2
            else:
                room = os.statvfs(disk)
                left = room.f_bavail * room.f_frsize - spare
    return filler


# --- the disk is full -------------------------------------------------------------------------------------------------


def test_a_disk_too_full_to_pack_is_refused_before_a_byte_is_written(pack, disk) -> None:
    filler = fill(disk, pack.bytes - 4096)
    (end,) = pack.run()
    refused(end, str(pack.out), "not enough room", f"{pack.bytes:,} bytes to write")
    assert [path.name for path in pack.out.iterdir() if not path.name.startswith(".")] == []
    assert end.bytes("write", "engram-l") == 0
    filler.unlink()
    mended(pack)


@pytest.mark.parametrize("stage", ["write", "fsync", "rename"])
def test_a_disk_that_fills_up_under_way(stage, pack, disk) -> None:
    """Its room was counted, then another writer took it: the first shard is whole, the second one not there."""
    (end,) = pack.launcher.run(*pack.jobs(Moment(stage, 1, BEFORE, "hold")), while_held=lambda: fill(disk))
    refused(end, str(pack.out), "No space left on device", "free room")
    pack.nothing_wrong()
    (disk / "filler").unlink()
    mended(pack)


# --- the disk is broken -----------------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_read(launcher, made, tmp_path) -> None:
    """A part of the disk under the checkpoint is gone: the kernel says EIO, and the error where."""
    with crash.filesystem(tmp_path / "source", 48) as source:
        shutil.copytree(made, source / "a checkpoint")
        scene = Pack(launcher, source / "a checkpoint", tmp_path)
        with crash.unreadable(source, scene.checkpoint.glob("*.safetensors")) as path:
            (end,) = scene.run()
            refused(end, f"cannot read {path} at byte ", "Input/output error")
        scene.nothing_wrong()
        scene.source = standing(scene.checkpoint)
        mended(scene)


def test_a_shard_that_does_not_read_back(pack, disk) -> None:
    """One bit of it turns on the disk after it was written: read past the cache, it is not given its name."""
    partial = pack.out / "engram-l1-r1of2.bin.partial"
    (end,) = pack.launcher.run(
        *pack.jobs(Moment("verify", 1, BEFORE, "hold")), while_held=lambda: crash.flip(disk, partial, 100_000)
    )
    refused(end, "engram-l1-r1of2.bin does not read back as it was written")
    assert not partial.exists()
    pack.nothing_wrong()
    mended(pack)


def test_a_disk_that_cannot_be_written(launcher, made, tmp_path) -> None:
    """The disk promised more than it has: what was reserved cannot be written, and the kernel says EIO or ENOSPC."""
    with crash.filesystem(tmp_path / "thin", 6) as thin, crash.filesystem(thin / "disk", 32) as disk:
        scene = Pack(launcher, made, tmp_path).at(disk)
        (end,) = scene.run()
        refused(end, f"cannot write {scene.out}")
        scene.nothing_wrong()


@pytest.mark.parametrize("after", [False, True])
def test_a_target_that_is_mounted_read_only(after, pack, disk) -> None:
    if after:
        pack.run()
        (pack.out / "engram-l14-r1of2.bin").unlink()
    with crash.read_only(disk):
        (end,) = pack.run()
        refused(end, str(pack.out), "Read-only file system", "mounted read-only")
    mended(pack)


# --- the checkpoint changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in place", "replaced"])
@pytest.mark.parametrize("write", [9, 20])
def test_a_checkpoint_that_changes_halfway(how, write, launcher, made, tmp_path) -> None:
    """Nothing of the mixture is left; the next run packs what the checkpoint holds then."""
    copy = tmp_path / "a checkpoint"
    shutil.copytree(made, copy)
    scene = Pack(launcher, copy, tmp_path)

    def change() -> None:
        path = next(copy.glob("model-00001-*"))
        data = bytearray(path.read_bytes())
        data[-1 << 20 :: 997] = bytes(len(data[-1 << 20 :: 997]))
        if how == "replaced":
            path.unlink()
        path.write_bytes(data)

    (end,) = launcher.run(*scene.jobs(Moment("write", write, BEFORE, "hold")), while_held=change)
    refused(end, f"{copy} changed while layer 1 was packed from it")
    names_are(scene.out, {LOCK})
    mended(Pack(launcher, copy, tmp_path))


def test_a_checkpoint_that_changed_since_a_packing_was_interrupted(launcher, made, tmp_path) -> None:
    """What an earlier run wrote of the old one is not gone on with, though it is as long and has the same name."""
    copy = tmp_path / "a checkpoint"
    shutil.copytree(made, copy)
    scene = Pack(launcher, copy, tmp_path)
    (killed,) = scene.run(Moment("write", 24))
    assert killed.status == -9
    assert scene.remembered()[FIRST] > 0
    path = next(copy.glob("model-00001-*"))
    seen = path.stat()
    path.write_bytes(changed(path.read_bytes(), seen.st_size - (2 << 20)))
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    (end,) = scene.run()
    assert end.status == 0
    data = (scene.out / FIRST).read_bytes()
    assert data[4096:] == shard_rows(copy, 1)[3]


# --- two at once, and a clock that jumps ------------------------------------------------------------------------------


def test_two_packs_at_once(pack) -> None:
    """The second one ends at once and names the first, which goes on."""
    said = []

    def another() -> None:
        (second,) = Launcher.once(pack.jobs())
        said.append(second)

    (first,) = pack.launcher.run(*pack.jobs(Moment("write", 9, BEFORE, "hold")), while_held=another)
    refused(said[0], f"{pack.out}/{LOCK} is locked", "packing of rank 1, pid ", " since 20")
    assert first.status == 0
    pack.all_right()
    mended(pack)


@pytest.mark.parametrize("years", [-60, -1, 10])
@pytest.mark.parametrize("stage", ["write", "rename"])
def test_a_clock_that_jumps(years, stage, pack) -> None:
    """The time of day is not what tells a whole file from another."""
    (end,) = pack.run(Moment(stage, 5, BEFORE, "clock", years * 365.25 * 86400))
    assert end.status == 0, end.text
    assert " -" not in end.text
    pack.all_right()
    before = pack.standing()
    (again,) = pack.run(Moment("read", 1, BEFORE, "clock", -years * 365.25 * 86400))
    assert again.status == 0
    assert pack.standing() == before


# --- archiving and restoring ------------------------------------------------------------------------------------------

HALFWAY = Moment("write", 9, BEFORE, "hold", process=1)


@pytest.fixture(scope="module")
def moves(launcher, made, tmp_path_factory) -> dict[str, Move]:
    packed = Pack(launcher, made, tmp_path_factory.mktemp("pack"))
    return {kind.mode: kind(packed, tmp_path_factory.mktemp(kind.mode)) for kind in (Archive, Restore)}


@pytest.fixture(params=["archive", "restore"])
def move(request, moves, disk, tmp_path) -> Move:
    """A move whose target is a small disk of its own."""
    scene = moves[request.param].at(tmp_path, disk)
    scene.fresh()
    return scene


def size(scene: Move) -> int:
    return sum((scene.kept / name).stat().st_size for name in scene.right)


def stopped(scene: Move, ended: list[Ended], *words: str, who: str = "target") -> None:
    """Both ends say the same error; the source is whole, and nothing wrong is called right."""
    for end in ended:
        refused(end, *words, who=who)
    scene.nothing_wrong()
    for name in scene.right:
        assert (scene.source / name).exists() or scene.mode == "archive"


def test_a_target_too_full_is_refused_before_a_byte_is_sent(move, disk) -> None:
    filler = fill(disk, size(move) - 4096)
    with pytest.raises(LockstepError, match="not enough room in") as caught:
        move.run()
    assert f"{size(move):,} bytes to write" in str(caught.value)
    assert caught.value.found
    assert caught.value.next_step
    move.nothing_wrong()
    assert not move.target.exists()
    filler.unlink()
    mended(move)


@pytest.mark.parametrize(
    "moment",
    [
        Moment("read", 1, BEFORE, "hold"),
        Moment("rename", 1, BEFORE, "hold", process=1),
        Moment("verify", 8, BEFORE, "hold", process=1),
    ],
    ids=str,
)
def test_a_target_that_fills_up_under_way(moment, move, disk) -> None:
    ended = move.launcher.run(*move.jobs(moment), while_held=lambda: fill(disk))
    stopped(move, ended, str(move.target), "No space left on device", "free room")
    (disk / "filler").unlink()
    mended(move)


def test_a_source_without_room_for_its_note(moves, disk, tmp_path) -> None:
    """The copy is proven, but where it went cannot be written down: nothing is removed."""
    scene = moves["archive"].at(disk, tmp_path)
    scene.fresh()
    ended = scene.launcher.run(*scene.jobs(Moment("hash", 1, BEFORE, "hold")), while_held=lambda: fill(disk))
    stopped(scene, ended, str(scene.source), "No space left on device", who="source")
    assert all((scene.source / name).exists() for name in scene.right)
    (disk / "filler").unlink()
    mended(scene)


@pytest.mark.parametrize("mode", ["archive", "restore"])
def test_a_source_that_cannot_be_read(mode, moves, tmp_path) -> None:
    with crash.filesystem(tmp_path / "source", 24) as source:
        scene = moves[mode].at(source, tmp_path)
        scene.fresh()
        # Archiving first proves in its source that it is another directory than the target.
        option = "rw" if mode == "archive" else "ro"
        with crash.unreadable(source, scene.source.glob("*.bin"), option) as path:
            ended = scene.run(files=[path.name])
            assert not (scene.target / path.name).exists()
        stopped(scene, ended, f"cannot read {path} at byte", "Input/output error", who="source")
        mended(scene)


def test_a_copy_that_does_not_read_back(move, disk) -> None:
    """One bit of it turns on the target's disk: it is not given its name, and the source stays."""
    partial = move.target / f"{FIRST}.partial"
    ended = move.launcher.run(
        *move.jobs(Moment("verify", 1, BEFORE, "hold", process=1)),
        while_held=lambda: crash.flip(disk, partial, 100_000),
    )
    stopped(move, ended, "does not read back as it was written")
    assert (move.source / FIRST).exists()
    assert not (move.target / FIRST).exists()
    mended(move)


def test_a_target_that_cannot_be_written(moves, tmp_path) -> None:
    for kind in moves.values():
        with crash.filesystem(tmp_path / "thin", 6) as thin, crash.filesystem(thin / "disk", 32) as disk:
            scene = kind.at(tmp_path, disk)
            scene.fresh()
            stopped(scene, scene.run(), f"cannot write {scene.target}")
            assert all((scene.source / name).exists() for name in scene.right)


@pytest.mark.parametrize("side", ["source", "target"])
def test_an_end_that_is_mounted_read_only(side, moves, disk, tmp_path) -> None:
    for name, kind in moves.items():
        scene = kind.at(disk, tmp_path / name) if side == "source" else kind.at(tmp_path / name, disk)
        scene.fresh()
        with crash.read_only(disk):
            if side == "source" and name == "restore":
                assert [end.status for end in scene.run()] == [0, 0]
            else:
                stopped(scene, scene.run(), "Read-only file system", "mounted read-only", str(disk), who=side)
        mended(scene)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("number", [4, 13])
def test_a_source_that_changes_while_it_is_read(number, manifest, move) -> None:
    """No mixture of the two gets a name at the target, and the source is not removed."""
    path = move.source / FIRST
    if not manifest:  # as with a shard that an older tool packed
        (move.source / f"{FIRST}.manifest.json").unlink()
    data = changed(path.read_bytes())
    ended = move.launcher.run(
        *move.jobs(Moment("read", number, BEFORE, "hold")), while_held=lambda: path.write_bytes(data)
    )
    for end in ended:
        refused(end, FIRST, "changed while", who="source")
    assert path.read_bytes() == data
    assert not (move.target / FIRST).exists()
    assert not (move.target / f"{FIRST}.manifest.json").exists()


def test_a_source_that_is_replaced_while_it_is_read(moves, tmp_path) -> None:
    """The file that was read is not the one that would be removed: that one stays."""
    scene = moves["archive"].at(tmp_path, tmp_path)
    scene.fresh()
    path = scene.source / FIRST
    data = changed(path.read_bytes())

    def replace() -> None:
        path.unlink()
        path.write_bytes(data)

    ended = scene.launcher.run(*scene.jobs(Moment("read", 6, BEFORE, "hold")), while_held=replace)
    for end in ended:
        refused(end, str(path), "changed while", who="source")
    assert path.read_bytes() == data
    scene.whole(scene.target)


def changed(data: bytes, start: int = 4096) -> bytes:
    new = bytearray(data)
    new[start::997] = bytes(len(new[start::997]))
    return bytes(new)


def test_two_at_once(move) -> None:
    """The second one ends and says why; the first goes on."""
    said = []

    def another() -> None:
        said.extend(Launcher.once(move.jobs()))

    first = move.launcher.run(*move.jobs(HALFWAY), while_held=another)
    for end in said:
        refused(end, f"{move.target / FIRST}.partial is being written by another process", who="target")
    assert [end.status for end in first] == [0, 0]
    move.all_right()
    mended(move)


@pytest.mark.parametrize("years", [-60, 10])
@pytest.mark.parametrize("process", [0, 1])
def test_a_clock_that_jumps_while_moving(years, process, move) -> None:
    stage = ("read", "rename")[process]
    ended = move.run(Moment(stage, 2, BEFORE, "clock", years * 365.25 * 86400, process))
    assert [end.status for end in ended] == [0, 0], [end.text for end in ended]
    move.all_right()
    mended(move)


def test_an_archived_copy_that_was_damaged_is_not_put_into_service(moves, tmp_path) -> None:
    scene = moves["restore"].at(tmp_path, tmp_path)
    scene.fresh()
    path = scene.source / FIRST
    seen = path.stat()
    data = bytearray(path.read_bytes())
    data[1 << 20] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    for end in scene.run():
        refused(end, FIRST, "SHA256SUMS vouches for", who="target")
    assert not (scene.target / FIRST).exists()
    assert not (scene.target / f"{FIRST}.manifest.json").exists()
