"""The room that touches files: real disks, a real full file system, real locks between processes."""

import errno
import hashlib
import json
import os
import random
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lockstep_core import files
from lockstep_core.errors import LockstepError

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent / "cases" / "E_engram.jsonl").read_text().splitlines())
}
MIB = 1 << 20


def blocks(*sizes: int) -> Iterator[memoryview]:
    for size in sizes:
        yield memoryview(bytes([size % 251]) * size)


def write(path: Path, size: int, source: Iterable[memoryview], **more: Any) -> str:
    """Write in one go, from the first byte on."""

    def given(offset: int, sha256: str | None) -> Iterable[memoryview]:
        assert (offset, sha256) == (0, None)
        return source

    return files.write_blocks(path, size, given, identity="one", **more)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- small files ------------------------------------------------------------------------------------------------------


def test_an_atomic_write_sets_mode_and_content_and_leaves_nothing_beside(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    target.write_text("old")
    target.chmod(0o644)
    files.write_json_atomic(target, {"b": 1, "a": [2]})
    assert json.loads(target.read_text()) == {"a": [2], "b": 1}
    assert target.read_text().endswith("}\n")
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert names(tmp_path) == ["x.json"]
    files.write_atomic(target, "text", 0o640, durable=False)
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"text", 0o640)


def test_an_atomic_write_takes_over_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / ".x.tmp").write_text("much longer than what is written now")
    files.write_atomic(tmp_path / "x", "short")
    assert ((tmp_path / "x").read_text(), names(tmp_path)) == ("short", ["x"])


def test_atomic_writes_of_many_at_once_are_each_whole(tmp_path: Path) -> None:
    contents = [str(number) * 100_000 for number in range(8)]

    def write(content: str) -> None:
        for _ in range(20):
            files.write_atomic(tmp_path / "x", content, durable=False)
            assert (tmp_path / "x").read_text() in contents

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, contents))
    assert names(tmp_path) == ["x"]


def test_a_failed_atomic_write_keeps_the_old_file(tiny: Path) -> None:
    (tiny / "x").write_bytes(b"old")
    with pytest.raises(LockstepError, match="No space left"):
        files.write_atomic(tiny / "x", bytes(2 * MIB))
    assert names(tiny) == ["x"]
    assert (tiny / "x").read_bytes() == b"old"


def test_reading_says_what_is_missing_broken_or_absurd(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="cannot read") as caught:
        files.read_json(tmp_path / "none")
    assert caught.value.found == "No such file or directory"
    (tmp_path / "x").write_bytes(b"{")
    with pytest.raises(LockstepError, match="is not JSON"):
        files.read_json(tmp_path / "x")
    with pytest.raises(LockstepError, match="too large"):
        files.read_bytes(tmp_path / "x", limit=0)


# --- hashes and reads -------------------------------------------------------------------------------------------------


def test_the_hash_is_that_of_sha256sum_across_blocks(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(os.urandom(files.BLOCK) + b"tail")
    said = subprocess.run(["sha256sum", path], check=True, capture_output=True, text=True).stdout.split()[0]
    seen: list[int] = []
    assert files.sha256_file(path, progress=seen.append) == said
    assert seen == [files.BLOCK, 4]
    (tmp_path / "empty").touch()
    assert files.sha256_file(tmp_path / "empty") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def resident(path: Path) -> int:
    """Bytes of a file in the page cache, as util-linux's fincore counts them."""
    run = subprocess.run(["fincore", "-n", "-b", "-o", "RES", path], check=True, capture_output=True, text=True)
    return int(run.stdout)


def test_reading_and_writing_leave_no_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "big"
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], check=True, capture_output=True, text=True).stdout
    if kind.strip() in {"tmpfs", "ramfs"}:
        pytest.skip(reason="a file system in memory is page cache; this needs a disk")
    # The kernel may give some of it to others meanwhile, or read a little ahead.
    little, most = range(MIB), range(31 * MIB, 32 * MIB + 1)
    write(path, 32 * MIB, blocks(*[8 * MIB] * 4))
    assert resident(path) in little
    path.read_bytes()
    assert resident(path) in most
    files.sha256_file(path, drop_cache=False)
    assert resident(path) in most
    files.sha256_file(path)
    assert resident(path) in little


def test_scatter_fills_more_slots_than_one_system_call_takes(tmp_path: Path) -> None:
    count = 2 * files.IOV_MAX + 3
    data = os.urandom(5 + count * 7)
    (tmp_path / "x").write_bytes(data)
    target = memoryview(bytearray(count * 10))
    with files.Reader(tmp_path / "x") as reader:
        reader.scatter(files.Slots(target, 7, 10), count, 5)
        assert reader.read(1, 3) == data[1:4]
        with pytest.raises(LockstepError, match="ends too early"):
            reader.scatter(files.Slots(target, 7, 10), count, 6)
        with pytest.raises(LockstepError, match="ends too early"):
            reader.read(len(data) - 2, 3)
    for index in range(count - 1):
        assert target[index * 10 : index * 10 + 10] == data[6 + index * 7 : 13 + index * 7] + bytes(3)


def test_a_short_read_goes_on_within_the_slot(tmp_path: Path) -> None:
    """A pipe gives what it holds; only the kernel can make a read of a file short, but not on demand."""

    class Trickle(files.Slots):
        def read(self, fd: int, first: int, count: int, offset: int) -> int:
            got = os.pread(fd, min(5, count * self.width), offset)
            for number, byte in enumerate(got):
                self.buffer[first * self.stride + number // self.width * self.stride + number % self.width] = byte
            return len(got)

    (tmp_path / "x").write_bytes(bytes(range(70)))
    target = memoryview(bytearray(100))
    with files.Reader(tmp_path / "x") as reader:
        reader.scatter(Trickle(target, 7, 10), 10, 0)
    assert bytes(target) == b"".join(bytes(range(at, at + 7)) + bytes(3) for at in range(0, 70, 7))


def test_blocks_are_the_file_and_stay_until_the_one_after_the_next(tmp_path: Path) -> None:
    data = os.urandom(3 * files.BLOCK + 4100)
    (tmp_path / "x").write_bytes(data)
    with files.Reader(tmp_path / "x", direct=True) as reader:
        kept: list[memoryview] = []
        for number, block in enumerate(reader.blocks(4096)):
            kept.append(block)
            for earlier in (number - 1, number):
                start = 4096 + earlier * files.BLOCK
                assert earlier < 0 or kept[earlier] == data[start : start + files.BLOCK]
        assert [len(block) for block in kept] == [files.BLOCK] * 3 + [4]
        assert list(reader.blocks(7, 7)) == []
        assert b"".join(reader.blocks(5, 4105)) == data[5:4105]


# --- space ------------------------------------------------------------------------------------------------------------


def test_free_bytes_is_what_df_calls_available(tmp_path: Path) -> None:
    said = subprocess.run(["df", "-B1", "--output=avail", tmp_path], check=True, capture_output=True, text=True)
    # Other processes write to the same disk meanwhile.
    assert abs(files.free_bytes(tmp_path) - int(said.stdout.split()[1])) < 512 * MIB


def test_the_arithmetic_of_space_is_exact_and_shown(tiny: Path) -> None:
    assert files.free_bytes(tiny) == MIB
    files.require_space(tiny, MIB - 10, reserve=10)
    with pytest.raises(LockstepError) as caught:
        files.require_space(tiny, MIB - 10, reserve=11)
    assert caught.value.found == "1,048,576 bytes available"
    assert caught.value.expected == "1,048,566 bytes to write + 11 kept free = 1,048,577 (1 more)"
    files.require_space(tiny, MIB - 10, reserve=11, reclaim=1)


def test_e05_a_full_disk_leaves_source_and_no_plausible_file(tiny: Path, tmp_path: Path) -> None:
    case = CASES["E05"]
    size = case["input"]["cp"]["src_size"]
    source = tmp_path / "src.bin"
    source.write_bytes(bytes(size))
    expected = case["expected"]
    # precheck: need size + margin <= f_bavail * bsize (avail, not free)
    assert "f_bavail" in expected["precheck"]
    with pytest.raises(LockstepError, match="not enough room"):
        files.require_space(tiny, size, reserve=4096)
    # Without it: the reservation (posix_fallocate, not truncate) fails before a byte is written.
    asked: list[int] = []
    with files.Reader(source) as reader, pytest.raises(LockstepError, match="cannot write") as caught:
        write(tiny / "dst.bin", size, (asked.append(1) or memoryview(reader.read(0, size)) for _ in "x"))
    assert caught.value.found == "No space left on device"
    assert expected["reserve_with"].startswith("posix_fallocate")
    assert asked == []
    assert source.exists() is not expected["source_deleted"]
    assert (names(tiny) == []) is expected["partial_removed_or_marked"]
    assert any(name.startswith("MOVED") for name in names(tiny)) is expected["MOVED_marker_written"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"cannot write .*none/x") as caught:
        write(tmp_path / "none" / "x", 1, blocks(1))
    assert caught.value.found == "No such file or directory"


def test_a_disk_that_fills_halfway_is_found_out_before(tiny: Path) -> None:
    (tiny / "other").write_bytes(bytes(MIB // 2))
    with pytest.raises(LockstepError, match="cannot write"):
        write(tiny / "x", MIB, blocks(MIB))
    assert names(tiny) == ["other"]


# --- big files --------------------------------------------------------------------------------------------------------


def test_a_big_file_is_reserved_written_aside_hashed_and_renamed(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old")
    seen: list[tuple[bytes, int, int]] = []

    def watched() -> Iterator[memoryview]:
        for block in blocks(3 * MIB, MIB, 1):
            aside = (tmp_path / "x.partial").stat()
            seen.append((target.read_bytes(), aside.st_size, aside.st_blocks * 512))
            yield block

    size = 4 * MIB + 1
    digest = write(target, size, watched(), replace=True)
    assert [(content, length) for content, length, _ in seen] == [(b"old", size)] * 3
    # All of it from the first block on; the file system's own map of it may grow.
    assert min(room for _, _, room in seen) >= size
    assert subprocess.run(["sha256sum", target], check=True, capture_output=True, text=True).stdout.startswith(digest)
    assert target.read_bytes() == b"".join(blocks(3 * MIB, MIB, 1))
    assert names(tmp_path) == ["x"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_a_buffer_may_be_used_again_two_blocks_later(tmp_path: Path) -> None:
    buffers = [memoryview(bytearray(MIB)) for _ in range(2)]

    def turns() -> Iterator[memoryview]:
        for number in range(20):
            buffers[number % 2][:] = bytes([number]) * MIB
            yield buffers[number % 2]

    write(tmp_path / "x", 20 * MIB, turns())
    assert (tmp_path / "x").read_bytes() == b"".join(bytes([number]) * MIB for number in range(20))


def test_deeper_flows_take_more_buffers(tmp_path: Path) -> None:
    buffers = [files.aligned(MIB) for _ in range(4)]

    def turns(_offset: int, _sha256: str | None) -> Iterator[memoryview]:
        for number in range(20):
            buffers[number % 4][:] = bytes([number]) * MIB
            yield buffers[number % 4]

    digest = files.write_blocks(tmp_path / "x", 20 * MIB, turns, identity="one", depth=3)
    data = (tmp_path / "x").read_bytes()
    assert data == b"".join(bytes([number]) * MIB for number in range(20))
    assert digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(("size", "words"), [(11, "came out short"), (9, "grow past its size")])
def test_a_wrong_size_is_no_file(size: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=words):
        write(tmp_path / "x", size, blocks(4, 6))
    assert names(tmp_path) == []


def test_whatever_ends_the_writing_the_old_file_stays(tmp_path: Path) -> None:
    def stopped() -> Iterator[memoryview]:
        yield memoryview(b"abc")
        raise KeyboardInterrupt

    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", 6, stopped())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"old"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("write")]


# --- interrupted and taken up again -----------------------------------------------------------------------------------

PIECE = 64 << 10


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Durable every 256 KiB instead of MiB, so that a small file has many marks."""
    monkeypatch.setattr(files, "MARK_EVERY", 4 * PIECE)


class Source:
    """2 MiB and a bit, in pieces of 64 KiB; ends with ``error`` before piece ``stop``."""

    def __init__(self, stop: int | None = None, error: BaseException | None = None) -> None:
        self.data = random.Random(1).randbytes(33 * PIECE + 77)  # noqa: S311 - bytes to write, the same each time
        self.asked: list[tuple[int, str | None]] = []
        self._stop, self._error = stop, error

    def __call__(self, offset: int, sha256: str | None) -> Iterator[memoryview]:
        self.asked.append((offset, sha256))
        for number, at in enumerate(range(offset, len(self.data), PIECE), start=offset // PIECE):
            if number == self._stop and self._error:
                raise self._error
            buffer = files.aligned(min(PIECE, len(self.data) - at))
            buffer[:] = self.data[at : at + PIECE]
            yield buffer

    def write(self, path: Path, identity: object = "one", **more: Any) -> str:
        return files.write_blocks(path, len(self.data), self, identity=identity, **more)


def interrupted(path: Path, error: BaseException | None = None) -> None:
    error = error or SystemExit(143)
    with pytest.raises(LockstepError if isinstance(error, OSError) else type(error)):
        Source(18, error).write(path)


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("error", [SystemExit(143), OSError(errno.EIO, "bad disk"), KeyboardInterrupt()])
def test_an_interrupted_file_is_taken_up_where_it_was_durable(error: BaseException, tmp_path: Path) -> None:
    interrupted(tmp_path / "x", error)
    assert names(tmp_path) == ["x.partial", "x.partial.json"]
    whole, told = Source(), dict.fromkeys(("resume", "write", "verify"), 0)

    def tell(stage: str, count: int) -> None:
        told[stage] += count

    digest = whole.write(tmp_path / "x", readback=True, progress=tell)
    # 18 pieces were asked for; the last mark before is at 16.
    assert whole.asked == [(16 * PIECE, hashlib.sha256(whole.data[: 16 * PIECE]).hexdigest())]
    assert told == {
        "resume": 16 * PIECE,
        "write": len(whole.data) - 16 * PIECE,
        # What was taken up has been read from the disk for that.
        "verify": len(whole.data) - 16 * PIECE,
    }
    assert (tmp_path / "x").read_bytes() == whole.data
    assert digest == hashlib.sha256(whole.data).hexdigest()
    assert names(tmp_path) == ["x"]


@pytest.mark.usefixtures("marked")
def test_what_the_disk_lost_is_written_again(tmp_path: Path) -> None:
    interrupted(tmp_path / "x")
    with (tmp_path / "x.partial").open("r+b") as file:
        file.seek(9 * PIECE)
        file.write(b"torn")
    again = Source()
    again.write(tmp_path / "x")
    assert [offset for offset, _ in again.asked] == [8 * PIECE]
    assert (tmp_path / "x").read_bytes() == again.data


def spoilt(place: Path, how: str) -> None:
    journal = place / "x.partial.json"
    said = json.loads(journal.read_text())
    if how == "no journal":
        journal.unlink()
    elif how == "torn journal":
        journal.write_text(journal.read_text()[:-9])
    elif how == "short file":
        os.truncate(place / "x.partial", 5 * PIECE)
    else:
        said["marks"] = {
            "foreign marks": [[PIECE + 1, "0" * 64]],
            "falling marks": said["marks"][::-1],
            "marks of another kind": 7,
        }[how]
        journal.write_text(json.dumps(said))


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize(
    "how", ["no journal", "torn journal", "short file", "foreign marks", "falling marks", "marks of another kind"]
)
def test_what_no_journal_vouches_for_is_begun_anew(how: str, tmp_path: Path) -> None:
    interrupted(tmp_path / "x")
    spoilt(tmp_path, how)
    again = Source()
    again.write(tmp_path / "x")
    assert again.asked == [(0, None)]
    assert (tmp_path / "x").read_bytes() == again.data
    assert names(tmp_path) == ["x"]


@pytest.mark.usefixtures("marked")
def test_a_file_of_another_identity_is_begun_anew(tmp_path: Path) -> None:
    interrupted(tmp_path / "x")
    other = Source()
    other.write(tmp_path / "x", {"another": (1, 2)})
    assert other.asked == [(0, None)]


@pytest.mark.usefixtures("marked")
def test_an_error_that_no_repetition_mends_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="the source changed"):
        Source(18, LockstepError("the source changed")).write(tmp_path / "x")
    assert names(tmp_path) == []


def test_what_reads_back_otherwise_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")

    def torn(offset: int, sha256: str | None) -> Iterator[memoryview]:
        yield from Source()(offset, sha256)
        with (tmp_path / "x.partial").open("r+b") as file:
            file.seek(PIECE)
            file.write(b"\0" * 512)

    size = len(Source().data)
    with pytest.raises(LockstepError, match="does not read back as it was written"):
        files.write_blocks(tmp_path / "x", size, torn, identity=1, readback=True)
    assert (names(tmp_path), (tmp_path / "x").read_bytes()) == (["x"], b"old")
    again = files.write_blocks(tmp_path / "x", size, torn, identity=1, replace=True)
    assert again == hashlib.sha256(Source().data).hexdigest()


def test_a_file_that_came_meanwhile_stays(tmp_path: Path) -> None:
    def meeting() -> Iterator[memoryview]:
        for block in blocks(MIB, MIB):
            (tmp_path / "x").write_bytes(b"precious")
            yield block

    with pytest.raises(LockstepError, match="is there, and was not when this began"):
        write(tmp_path / "x", 2 * MIB, meeting())
    assert (names(tmp_path), (tmp_path / "x").read_bytes()) == (["x"], b"precious")


def test_a_file_with_two_names_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "x.partial").hardlink_to(tmp_path / "precious")
    with pytest.raises(LockstepError, match="is the same file as another one"):
        write(tmp_path / "x", MIB, blocks(MIB))
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_two_do_not_write_the_same_file(tmp_path: Path) -> None:
    def meeting(offset: int, sha256: str | None) -> Iterator[memoryview]:
        with pytest.raises(LockstepError, match="is being written by another process"):
            Source().write(tmp_path / "x")
        yield from Source()(offset, sha256)

    files.write_blocks(tmp_path / "x", len(Source().data), meeting, identity="one")
    assert (tmp_path / "x").read_bytes() == Source().data


@pytest.mark.usefixtures("marked")
def test_a_kill_at_any_moment_leaves_what_the_next_run_completes(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "sys.path[:0] = sys.argv[2:]\n"
        "import test_files\n"
        "from lockstep_core import files\n"
        "files.MARK_EVERY = 4 * test_files.PIECE\n"
        "def slow(offset, sha256):\n"
        "    for block in test_files.Source()(offset, sha256):\n"
        "        yield block\n"
        "        time.sleep(0.05)\n"
        "files.write_blocks(sys.argv[1], 33 * test_files.PIECE + 77, slow, identity='one', readback=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "x"), str(Path(__file__).parent)]
    resumed = 0
    for _ in range(6):
        with subprocess.Popen(command) as process:
            # The journal says that a mark more is durable than before, or the file is there.
            until, before = time.monotonic() + 60, len(journal_marks(tmp_path))
            while len(journal_marks(tmp_path)) <= before and not (tmp_path / "x").exists():
                assert time.monotonic() < until
                time.sleep(0.001)
            process.kill()
        resumed += bool(journal_marks(tmp_path))
        if (tmp_path / "x").exists():
            break
    assert resumed >= 3
    Source().write(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == Source().data


def journal_marks(place: Path) -> list[Any]:
    try:
        marks: list[Any] = json.loads((place / "x.partial.json").read_text())["marks"]
    except FileNotFoundError:
        return []
    return marks


# --- what is there ----------------------------------------------------------------------------------------------------


def test_setting_aside_never_lands_on_another_file(tmp_path: Path) -> None:
    for content in (b"1", b"2", b"3"):
        (tmp_path / "x").write_bytes(content)
        files.set_aside(tmp_path / "x", "20260924T031500Z")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "x.aside-20260924T031500Z": b"1",
        "x.aside-20260924T031500Z.2": b"2",
        "x.aside-20260924T031500Z.3": b"3",
    }


def test_a_look_is_what_stat_says_and_a_directory_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    said = (tmp_path / "x").stat()
    assert files.look(tmp_path / "x") == {"bytes": 3, "inode": said.st_ino, "mtime_ns": said.st_mtime_ns}
    assert files.look(tmp_path / "none") is None
    with pytest.raises(LockstepError, match="no regular file"):
        files.look(tmp_path)


def test_holes_and_reserved_room_are_where_nothing_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 12288)
    assert files.hole(path) is None
    assert files.allocated(path) == int(
        subprocess.run(["du", "-B1", path], check=True, capture_output=True).stdout.split()[0]
    )
    os.truncate(path, 20480)
    assert (files.hole(path), files.hole(path, 16384)) == (12288, 16384)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 20480)
    assert files.hole(path) == 12288
    assert files.allocated(path) == 20480
    assert files.allocated(tmp_path / "none") == 0


def test_a_stamp_changes_with_whatever_happens_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    (tmp_path / "link").symlink_to(path)
    first = files.stamp(path)
    assert files.stamp(tmp_path / "link") == first
    said = path.stat()
    os.utime(path, ns=(0, first["mtime_ns"] + 1))
    os.utime(path, ns=(said.st_atime_ns, first["mtime_ns"]))
    # The time of its content can be set back, that of the change cannot.
    now = files.stamp(path)
    assert {key for key in first if now[key] != first[key]} == {"ctime_ns"}
    with pytest.raises(LockstepError, match="cannot look at"):
        files.stamp(tmp_path / "none")


# --- trees ------------------------------------------------------------------------------------------------------------


def test_a_tree_lists_regular_files_only_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "y").write_bytes(b"12")
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    assert files.tree(tmp_path) == [
        ("a", 1, (tmp_path / "a").stat().st_mtime_ns),
        ("b/c/y", 2, (tmp_path / "b" / "c" / "y").stat().st_mtime_ns),
    ]
    assert files.tree(tmp_path / "none") == []


def test_a_move_makes_directories_and_never_covers_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    files.move(tmp_path / "x", tmp_path / "deep" / "er" / "x")
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "deep" / "er" / "x").read_text() == "mine"
    (tmp_path / "y").write_text("other")
    with pytest.raises(LockstepError, match="cannot move") as caught:
        files.move(tmp_path / "y", tmp_path / "deep" / "er" / "x")
    assert "is there already" in str(caught.value.found)
    assert (tmp_path / "deep" / "er" / "x").read_text() == "mine"
    with pytest.raises(LockstepError, match="cannot move"):
        files.move(tmp_path / "none", tmp_path / "z")


def test_a_move_to_another_file_system_is_refused_and_leaves_the_file(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(LockstepError, match="cannot move") as caught:
        files.move(tmp_path / "x", tiny / "x")
    assert "cross-device" in str(caught.value.found)
    assert (tmp_path / "x").read_text() == "mine"


def test_a_removal_of_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    files.remove(tmp_path / "x")
    assert names(tmp_path) == []
    with pytest.raises(LockstepError, match="cannot remove"):
        files.remove(tmp_path / "x")


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_lock_names_its_holder_and_goes_with_the_process(tmp_path: Path) -> None:
    program = (
        "import sys; from lockstep_core import files\n"
        f"with files.lock({str(tmp_path / 'lock')!r}, 'pack of rank 2'):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LockstepError, match="is locked") as caught, files.lock(tmp_path / "lock"):
            pass
        assert str(caught.value.found).startswith(f"pack of rank 2, pid {other.pid} on ")
        assert files.holder(tmp_path / "lock") == caught.value.found
        other.kill()
    with files.lock(tmp_path / "lock", "mine"):
        assert (tmp_path / "lock").read_text().startswith(f"mine, pid {os.getpid()} on ")
    assert (tmp_path / "lock").read_text() == ""
    assert files.holder(tmp_path / "lock") is None
    assert files.holder(tmp_path / "none") is None


def test_a_lock_is_not_taken_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(LockstepError, match="cannot lock"), files.lock(tmp_path / "lock"):
        pass
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_a_pipe_is_no_file_to_wait_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(LockstepError, match="is no regular file"):
        files.read_json(tmp_path / "manifest.json")


def test_json_that_nests_without_end_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(LockstepError, match="is not JSON"):
        files.read_json(tmp_path / "deep.json")


# --- whole files as streams -------------------------------------------------------------------------------------------


def test_a_stream_becomes_a_file_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "DROP_EVERY", 5000)
    whole = os.urandom(23_456)
    path = tmp_path / "images.tar"
    said = files.write_stream(path, (whole[at : at + 1000] for at in range(0, len(whole), 1000)), 0o640)
    assert said == {"bytes": 23_456, "sha256": hashlib.sha256(whole).hexdigest()}
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode), names(tmp_path)) == (whole, 0o640, ["images.tar"])

    def breaks() -> Iterator[bytes]:
        yield b"half of another"
        raise LockstepError("the engine is gone")

    with pytest.raises(LockstepError, match="the engine is gone"):
        files.write_stream(path, breaks())
    assert (path.read_bytes(), names(tmp_path)) == (whole, ["images.tar"])


def test_a_stream_that_the_disk_does_not_take_leaves_nothing(tiny: Path) -> None:
    with pytest.raises(LockstepError, match="No space left on device"):
        files.write_stream(tiny / "images.tar", (bytes(1 << 20) for _ in range(1000)))
    assert names(tiny) == []


@pytest.mark.parametrize("size", [0, 1, 1000, 2001])
def test_the_last_block_of_a_file_comes_only_when_all_of_it_is_proven(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK", 1000)
    path = tmp_path / "images.tar"
    whole = os.urandom(size)
    path.write_bytes(whole)
    assert b"".join(files.proven_blocks(path, hashlib.sha256(whole).hexdigest())) == whole
    got: list[bytes] = []
    with pytest.raises(LockstepError, match="is not what its checksum says"):
        got += files.proven_blocks(path, "0" * 64)
    assert b"".join(got) == whole[: (max(size - 1, 0) // 1000) * 1000]


def test_exactly_so_many_bytes_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    assert b"".join(files.exact_blocks(tmp_path, "x", 4)) == b"0123"
    assert b"".join(files.exact_blocks(tmp_path, "x", 10)) == b"0123456789"
    with pytest.raises(LockstepError, match="x is shorter than it should be\n  found: 2 bytes are missing"):
        list(files.exact_blocks(tmp_path, "x", 12))
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/y").write_bytes(b"deep")
    (tmp_path / "root").symlink_to(tmp_path / "a")  # where it starts may be a link
    assert b"".join(files.exact_blocks(tmp_path / "root", "./b/y", 4)) == b"deep"
    (tmp_path / "link").symlink_to(path)
    for name in ("link", "root/b/y", "a/../x"):
        with pytest.raises(LockstepError, match="cannot read"):
            list(files.exact_blocks(tmp_path, name, 4))
