"""Room archive: two real ends over real sockets, held against coreutils' own ``sha256sum``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lockstep_core import archive, engram, files, wire
from lockstep_core.errors import LockstepError
from lockstep_lab import checkpoint as lab

KEY = bytes(range(32))
MIB = 1 << 20
SHARD = "engram-l1-r1of2.bin"


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)  # noqa: S311 - the same bytes every time


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums_hold(directory: Path, name: str = "SHA256SUMS") -> bool:
    """Whether coreutils finds every file of a list as it says."""
    return (
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", name], cwd=directory, check=False).returncode
        == 0
    )


class Ends:
    """A sender and a receiver, each in a thread of its own, on one connection."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.target = source, target
        self.told: Counter[str] = Counter()
        self.on: dict[tuple[str, str], Callable[[int], None]] = {}
        self.errors: dict[str, LockstepError] = {}
        self.done: list[archive.Done] = []
        self.key = {"sender": KEY, "receiver": KEY}
        self.vouched: dict[str, str] = {}

    def tell(self, side: str) -> archive.Tell:
        def tell(_file: str, stage: str, count: int) -> None:
            self.told[f"{side} {stage}"] += count
            if act := self.on.get((side, stage)):
                act(self.told[f"{side} {stage}"])

        return tell

    def run(
        self, *names: str, remove: bool = True, link: Callable[[socket.socket], socket.socket] | None = None
    ) -> None:
        """Move files; what either end raised is in ``errors``."""
        self.told.clear()
        self.errors.clear()
        self.done = []
        items = [dict(archive.item_of(self.source / name)) for name in names]
        agreed = [{**item, "sha256": self.vouched.get(item["file"])} for item in items]
        near, far = socket.socketpair()

        def sending() -> None:
            with near:
                channel = wire.Channel(near, self.key["sender"], "sender")
                place = str(self.target)
                self.done.extend(
                    archive.send(
                        channel, str(self.source), items, host="spark2", target=f"spark1:{place}", remove=remove,
                        tell=self.tell("sender"),
                    )
                )  # fmt: skip

        def receiving() -> None:
            with far, link(far) if link else far as connection:
                channel = wire.Channel(connection, self.key["receiver"], "receiver")
                for _ in archive.receive(
                    channel, str(self.target), agreed, host="spark1", origin=f"spark2:{self.source}",
                    tell=self.tell("receiver"),
                ):  # fmt: skip
                    pass

        def caught(side: str, work: Callable[[], None]) -> None:
            try:
                work()
            except LockstepError as error:
                self.errors[side] = error

        threads = [
            threading.Thread(target=caught, args=pair) for pair in (("sender", sending), ("receiver", receiving))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    source = tmp_path / "old shards"
    source.mkdir()
    return Ends(source, tmp_path / "archive" / "of spark2")


# --- a move -----------------------------------------------------------------------------------------------------------


def test_files_move_with_lists_that_coreutils_accepts(ends: Ends) -> None:
    names = [SHARD, "two words.bin", "back\\slash\nline.bin", "empty.bin"]
    for number, name in enumerate(names):
        (ends.source / name).write_bytes(content(3 * MIB + number, number) if name != "empty.bin" else b"")
        os.utime(ends.source / name, ns=(1, 1_700_000_000_123_456_789 + number))
    before = {name: (sha(ends.source / name), (ends.source / name).stat().st_mtime_ns) for name in names}
    ends.run(*names)
    assert ends.errors == {}
    after = {name: (sha(ends.target / name), (ends.target / name).stat().st_mtime_ns) for name in names}
    assert after == before
    assert sorted(path.name for path in ends.target.iterdir()) == sorted([*names, "SHA256SUMS"])
    assert sums_hold(ends.target)
    assert [path.name for path in ends.source.iterdir()] == ["MOVED.txt"]
    # What was left behind proves the files where they went.
    (ends.target / "left.txt").write_bytes((ends.source / "MOVED.txt").read_bytes())
    assert sums_hold(ends.target, "left.txt")
    assert [(one["file"], one["action"], one["removed"]) for one in ends.done] == [(n, "sent", True) for n in names]
    moved = archive.records((ends.source / "MOVED.txt").read_text())
    assert {name: (one["place"], one["sha256"]) for name, one in moved.items()} == {
        name: (f"spark1:{ends.target}", before[name][0]) for name in names
    }
    came = archive.records((ends.target / "SHA256SUMS").read_text())
    assert {one["place"] for one in came.values()} == {f"spark2:{ends.source}"}


def test_every_byte_goes_once_and_is_read_back(ends: Ends) -> None:
    size = 20 * MIB + 5
    (ends.source / SHARD).write_bytes(content(size))
    ends.run(SHARD)
    assert ends.told["sender send"] == ends.told["receiver receive"] == ends.told["receiver verify"] == size
    assert "sender compare" not in ends.told


def test_a_packed_shard_is_proven_where_it_arrives(tmp_path: Path) -> None:
    lab.make(tmp_path / "checkpoint", 998)
    ends = Ends(tmp_path / "packed", tmp_path / "there")
    ends.source.mkdir()
    manifest = engram.pack(tmp_path / "checkpoint", ends.source, 1, 1, 2, "rows")
    (expected,) = engram.expected_shards(engram.read_config(tmp_path / "checkpoint"), 2, 1, "rows", [1])
    ends.run(SHARD)
    assert ends.errors == {}
    found = engram.inspect_shard(ends.target / SHARD, expected)
    assert (found["state"], found["sha256"]) == ("ok", manifest["sha256"])
    assert [path.name for path in ends.source.iterdir()] == ["MOVED.txt"]
    # And back again, by a copy.
    back = Ends(ends.target, ends.source)
    back.run(SHARD, remove=False)
    assert engram.inspect_shard(ends.source / SHARD, expected)["state"] == "ok"
    assert (ends.target / SHARD).exists()


def test_a_manifest_goes_along_whatever_is_in_it(ends: Ends) -> None:
    (ends.source / SHARD).write_bytes(content(1000))
    odd = b'{"format": 1, "note": "\xff\xfe\\n"}' + bytes(range(128, 256)) * 900
    (ends.source / f"{SHARD}.manifest.json").write_bytes(odd)
    ends.run(SHARD)
    assert ends.errors == {}
    assert (ends.target / f"{SHARD}.manifest.json").read_bytes() == odd
    (ends.source / SHARD).write_bytes(content(1000))
    (ends.source / f"{SHARD}.manifest.json").write_bytes(bytes(200_000))
    ends.run(SHARD)
    assert "manifest.json is too large to be what its name says" in str(ends.errors["sender"])
    assert (ends.source / SHARD).exists()


def test_a_file_that_its_own_manifest_vouches_for_stays_as_it_is(ends: Ends) -> None:
    for place in (ends.source, ends.target):
        place.mkdir(parents=True, exist_ok=True)
        (place / SHARD).write_bytes(content(1000))
    stamp = (ends.target / SHARD).stat().st_mtime_ns
    own = json.dumps({"sha256": sha(ends.target / SHARD), "mtime_ns": stamp})
    (ends.target / f"{SHARD}.manifest.json").write_text(own)
    (ends.source / f"{SHARD}.manifest.json").write_text("{}")
    os.utime(ends.source / SHARD, ns=(1, 1))
    ends.run(SHARD)
    assert ends.errors == {}
    assert ((ends.target / SHARD).stat().st_mtime_ns, (ends.target / f"{SHARD}.manifest.json").read_text()) == (
        stamp,
        own,
    )
    assert not (ends.source / SHARD).exists()


def test_what_is_there_already_is_compared_and_not_sent(ends: Ends) -> None:
    (ends.source / SHARD).write_bytes(content(9 * MIB))
    ends.run(SHARD, remove=False)
    ends.run(SHARD)
    assert ends.errors == {}
    assert (ends.told["sender send"], ends.told["sender compare"]) == (0, 9 * MIB)
    assert [(one["action"], one["removed"]) for one in ends.done] == [("compared", True)]
    assert (ends.target / "SHA256SUMS").read_text().count(SHARD) == 1
    assert not (ends.source / SHARD).exists()


def test_a_record_is_written_once_and_other_lines_stay(ends: Ends) -> None:
    ends.target.mkdir(parents=True)
    other = content(100)
    (ends.target / "other.bin").write_bytes(other)
    old = f"# by hand\r\n{hashlib.sha256(other).hexdigest()} *./other.bin\r\n".encode()
    (ends.target / "SHA256SUMS").write_bytes(old)
    note = "spark1:/home/ops/archive, said the operator of that night"
    (ends.source / "MOVED.txt").write_text(note)
    (ends.source / SHARD).write_bytes(content(1000))
    ends.run(SHARD)
    assert ends.errors == {}
    assert (ends.target / "SHA256SUMS").read_bytes().startswith(old)
    assert sums_hold(ends.target)
    said = (ends.source / "MOVED.txt").read_text()
    assert said.startswith(f"{note}\n# moved ")
    record = archive.records(said)[SHARD]
    assert archive.with_record(said, "to", record["place"], {"file": SHARD, "bytes": 1000}, record["sha256"]) == said


# --- one directory, whatever it is called -----------------------------------------------------------------------------


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """The source again, with another device and other inodes."""
    if os.geteuid() != 0:
        pytest.skip(reason="only root can mount a directory a second time")
    source, again = tmp_path / "old shards", tmp_path / "again"
    (tmp_path / "scratch").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "scratch", tmp_path / "scratch"], check=True)
    for place in (source, again, tmp_path / "scratch" / "upper", tmp_path / "scratch" / "work"):
        place.mkdir(exist_ok=True)
    ways = f"lowerdir={source},upperdir={tmp_path}/scratch/upper,workdir={tmp_path}/scratch/work"
    subprocess.run(["mount", "-t", "overlay", "again", "-o", ways, again], check=True)
    yield again
    subprocess.run(["umount", again, tmp_path / "scratch"], check=True)


def refused_as_one(ends: Ends) -> None:
    (ends.source / SHARD).write_bytes(content(1000))
    before = {path.name for path in ends.source.iterdir()}
    ends.run(SHARD)
    for side in ("sender", "receiver"):
        assert "source and destination are one directory" in str(ends.errors[side])
        assert "next step: name another directory" in str(ends.errors[side])
    assert {path.name for path in ends.source.iterdir()} == {path.name for path in ends.target.iterdir()} == before
    assert (ends.source / SHARD).read_bytes() == content(1000)


def test_one_directory_on_two_mounts_keeps_its_files(ends: Ends, overlay: Path) -> None:
    numbers = [archive.place_of(str(place))["number"] for place in (ends.source, overlay)]
    assert numbers[0] != numbers[1]
    ends.target = overlay
    refused_as_one(ends)
    ends.source, ends.target = ends.target, ends.source
    refused_as_one(ends)


def test_one_directory_that_only_one_side_can_tell_keeps_its_files(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.target = ends.source
    refused_as_one(ends)
    blind, kept = threading.Event(), archive._not_here

    def sender_is_blind(directory: str, mark: str) -> None:
        if blind.is_set():
            kept(directory, mark)
        blind.set()

    monkeypatch.setattr(archive, "_not_here", sender_is_blind)
    refused_as_one(ends)


def test_a_mark_that_a_kill_left_goes_and_one_in_use_stays(ends: Ends) -> None:
    ends.target.mkdir(parents=True)
    left, used = (f".lockstep-{digit * 32}" for digit in "01")
    for place in (ends.source, ends.target):
        (place / left).touch()
        (place / ".lockstep-mine").touch()
    (ends.source / SHARD).write_bytes(content(1000))
    with files.lock(ends.source / used), files.lock(ends.target / used):
        ends.run(SHARD)
        assert ends.errors == {}
        assert {path.name for path in ends.source.iterdir()} == {".lockstep-mine", used, "MOVED.txt"}
        assert {path.name for path in ends.target.iterdir()} == {".lockstep-mine", used, SHARD, "SHA256SUMS"}


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_mark_that_somebody_removed_proves_nothing(ends: Ends, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    (ends.source / SHARD).write_bytes(content(1000))
    before = sha(ends.source / SHARD)
    kept = archive._not_here

    def removed(directory: str, mark: str) -> None:
        if (path := getattr(ends, side) / mark).exists():
            path.unlink()
        kept(directory, mark)

    monkeypatch.setattr(archive, "_not_here", removed)
    ends.run(SHARD)
    assert "cannot remove " in str(ends.errors["sender"])
    stays(ends, before)


# --- what goes wrong on the way ---------------------------------------------------------------------------------------


def stays(ends: Ends, before: str) -> None:
    """The source is as it was, and nothing stands under its name at the destination."""
    assert sha(ends.source / SHARD) == before
    assert not (ends.source / "MOVED.txt").exists()
    assert not (ends.target / SHARD).exists()
    assert not (ends.target / "SHA256SUMS").exists()


def flipping(at: int) -> Callable[[socket.socket], socket.socket]:
    """A wire that changes one bit of what comes from the sender, ``at`` bytes into the connection."""

    def wire(far: socket.socket) -> socket.socket:
        inner, outer = socket.socketpair()

        def carry() -> None:
            passed = 0
            with outer, contextlib.suppress(OSError):
                while True:
                    ready, _, _ = select.select([far, outer], [], [])
                    for one, other in ((far, outer), (outer, far)):
                        if one in ready:
                            data = bytearray(one.recv(1 << 16))
                            if not data:
                                return
                            if one is far:
                                if passed <= at < passed + len(data):
                                    data[at - passed] ^= 1
                                passed += len(data)
                            other.sendall(data)

        threading.Thread(target=carry, daemon=True).start()
        return inner

    return wire


def test_a_bit_that_flips_on_the_wire_costs_nothing(ends: Ends) -> None:
    (ends.source / SHARD).write_bytes(content(9 * MIB))
    before = sha(ends.source / SHARD)
    ends.run(SHARD, link=flipping(4 * MIB))
    assert "did not arrive as it was sent" in str(ends.errors["receiver"])
    assert ends.errors["sender"].message == ends.errors["receiver"].message
    assert ends.errors["sender"].host == "spark1"
    stays(ends, before)
    assert list(ends.target.iterdir()) == []
    ends.run(SHARD)
    assert sums_hold(ends.target)


def test_a_word_that_changes_on_the_wire_is_refused(ends: Ends) -> None:
    (ends.source / SHARD).write_bytes(content(1000))
    before = sha(ends.source / SHARD)
    ends.run(SHARD, link=flipping(16 + 32 + 32 + 5 + 20))  # in the first word's text, after the greeting
    assert "does not speak as it should" in str(ends.errors["receiver"])
    stays(ends, before)


def test_a_disk_that_gives_back_something_else_keeps_the_source(ends: Ends) -> None:
    (ends.source / SHARD).write_bytes(content(20 * MIB))
    before = sha(ends.source / SHARD)

    def damage(_count: int) -> None:
        with (ends.target / f"{SHARD}.partial").open("r+b") as file:
            file.seek(2 * MIB)  # of a block that is written by then
            file.write(b"damage")
            file.flush()
            os.fsync(file.fileno())

    ends.on["receiver", "receive"] = lambda count: damage(count) if count == 20 * MIB else None
    ends.run(SHARD)
    assert "does not read back as it was written" in str(ends.errors["receiver"])
    assert "next step" in str(ends.errors["sender"])
    stays(ends, before)


@pytest.mark.parametrize("change", ["append", "touch", "replace"])
def test_a_source_that_changes_meanwhile_is_kept(ends: Ends, change: str) -> None:
    path = ends.source / SHARD
    path.write_bytes(content(9 * MIB))

    def act(_count: int) -> None:
        if change == "append":
            with path.open("ab") as file:
                file.write(b"more")
        elif change == "touch":
            os.utime(path)
        else:
            (ends.source / "new").write_bytes(content(9 * MIB))
            (ends.source / "new").replace(path)

    ends.on["sender", "send"] = lambda count: act(count) if count == 9 * MIB else None
    ends.run(SHARD)
    assert "changed while it was being archived" in str(ends.errors["sender"])
    assert path.exists()
    assert not (ends.source / "MOVED.txt").exists()


def test_another_file_of_that_name_is_refused_and_kept(ends: Ends) -> None:
    (ends.source / SHARD).write_bytes(content(9 * MIB, 1))
    ends.target.mkdir(parents=True)
    (ends.target / SHARD).write_bytes(content(9 * MIB, 2))
    both = sha(ends.source / SHARD), sha(ends.target / SHARD)
    ends.run(SHARD)
    assert "is another file of that name" in str(ends.errors["receiver"])
    assert "is another file of that name" in str(ends.errors["sender"])
    assert (sha(ends.source / SHARD), sha(ends.target / SHARD)) == both
    assert not (ends.target / "SHA256SUMS").exists()
    with pytest.raises(LockstepError, match="another file of that name"):
        archive.steps(str(ends.target), [{"file": SHARD, "bytes": 5}], 0)


def test_a_file_that_appears_meanwhile_stays(ends: Ends) -> None:
    (ends.source / SHARD).write_bytes(content(9 * MIB))
    before = sha(ends.source / SHARD)
    ends.on["receiver", "receive"] = lambda _count: (ends.target / SHARD).write_bytes(b"somebody else's")
    ends.run(SHARD)
    assert SHARD in str(ends.errors["sender"])
    assert (ends.target / SHARD).read_bytes() == b"somebody else's"
    assert sha(ends.source / SHARD) == before
    assert not (ends.target / "SHA256SUMS").exists()


def test_a_copy_that_its_list_does_not_vouch_for_is_not_restored(ends: Ends) -> None:
    (ends.source / SHARD).write_bytes(content(MIB))
    ends.vouched[SHARD] = "0" * 64
    ends.run(SHARD, remove=False)
    assert "is not what its manifest or SHA256SUMS vouches for" in str(ends.errors["sender"])
    assert "pack_engram.yml" in str(ends.errors["sender"])
    assert list(ends.target.iterdir()) == []


def test_a_move_that_was_cut_goes_on_where_it_ended(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MARK_EVERY", 8 * MIB)
    (ends.source / SHARD).write_bytes(content(40 * MIB + 3))
    before = sha(ends.source / SHARD)

    def cut(count: int) -> None:
        if count > 28 * MIB:
            raise LockstepError("the plug was pulled")

    ends.on["sender", "send"] = cut
    ends.run(SHARD)
    assert "the plug was pulled" in str(ends.errors["sender"])
    stays(ends, before)
    ends.on.clear()
    # An error that the sender says is one that a repetition may not mend; a lost connection is none.
    ends.run(SHARD)
    assert ends.errors == {}
    assert sums_hold(ends.target)
    assert sha(ends.target / SHARD) == before


def test_a_lost_connection_leaves_what_arrived(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MARK_EVERY", 8 * MIB)
    size = 40 * MIB + 3
    (ends.source / SHARD).write_bytes(content(size))
    before = sha(ends.source / SHARD)

    def lossy(far: socket.socket) -> socket.socket:
        def pull(count: int) -> None:
            if count > 28 * MIB:
                far.shutdown(socket.SHUT_RDWR)

        ends.on["receiver", "receive"] = pull
        return far

    ends.run(SHARD, link=lossy)
    assert "the connection to the other side was lost" in str(ends.errors["sender"])
    stays(ends, before)
    ends.on.clear()
    ends.run(SHARD)
    assert ends.errors == {}
    assert 24 * MIB <= ends.told["sender compare"] == size - ends.told["sender send"]
    assert sha(ends.target / SHARD) == before
    assert sums_hold(ends.target)
    assert sorted(path.name for path in ends.target.iterdir()) == ["SHA256SUMS", SHARD]


def test_a_part_that_its_source_no_longer_begins_with_is_not_gone_on_with(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MARK_EVERY", 8 * MIB)
    path = ends.source / SHARD
    path.write_bytes(content(24 * MIB))
    ends.target.mkdir(parents=True)
    item = archive.item_of(path)
    identity = {"from": f"spark2:{ends.source}", **{k: item[k] for k in ("bytes", "inode", "mtime_ns", "ctime_ns")}}
    other = content(24 * MIB, 9)

    def blocks(_offset: int, _sha: str | None) -> Iterator[memoryview]:
        yield memoryview(other)[: 8 * MIB]
        yield memoryview(other)[8 * MIB : 16 * MIB]
        raise OSError(5, "cut")

    with pytest.raises(LockstepError):
        files.write_blocks(ends.target / SHARD, 24 * MIB, blocks, identity=identity)
    ends.run(SHARD)
    assert "no longer begins as it did" in str(ends.errors["sender"])
    assert not (ends.target / SHARD).exists()
    ends.run(SHARD)
    assert ends.errors == {}
    assert sums_hold(ends.target)


def test_only_agreed_files_are_taken(ends: Ends) -> None:
    (ends.source / SHARD).write_bytes(content(1000))
    near, far = socket.socketpair()
    said: list[str] = []

    def receiving() -> None:
        with far:
            channel = wire.Channel(far, KEY, "receiver")
            with pytest.raises(LockstepError) as caught:
                list(
                    archive.receive(
                        channel, str(ends.target), [{"file": "engram-l14-r1of2.bin", "bytes": 1000}], host="spark1",
                        origin="spark2:/x", tell=lambda *_: None,
                    )
                )  # fmt: skip
            said.append(str(caught.value))

    thread = threading.Thread(target=receiving)
    thread.start()
    channel = wire.Channel(near, KEY, "sender")
    with pytest.raises(LockstepError, match="one of the agreed files"):
        list(
            archive.send(
                channel, str(ends.source), [archive.item_of(ends.source / SHARD)], host="spark2", target="spark1:/y",
                remove=True, tell=lambda *_: None,
            )
        )  # fmt: skip
    thread.join()
    near.close()
    assert said
    assert (ends.source / SHARD).exists()
    assert list(ends.target.iterdir()) == []


# --- looking and deciding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/a/b", ("spark2", "/a/b")),
        ("spark1:/a/b/", ("spark1", "/a/b")),
        ("spark1:/a b//c d/.", ("spark1", "/a b/c d")),
        ("/a:b", ("spark2", "/a:b")),
        ("spark1:/a:b", ("spark1", "/a:b")),
    ],
)
def test_places(text: str, found: tuple[str, str]) -> None:
    assert archive.parse_place(text, "spark2", "archive_to") == found


@pytest.mark.parametrize("text", ["", "a/b", "spark1:a", "spark1:", ":/a", "spark1:/a\nb", "~/x", "/a/../b"])
def test_no_places(text: str) -> None:
    with pytest.raises(LockstepError) as caught:
        archive.parse_place(text, "spark2", "archive_to")
    assert caught.value.host == "spark2"
    assert caught.value.found == repr(text)
    assert caught.value.next_step == "-e archive_to=host:/directory"


def test_one_directory_by_whatever_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    a, link = (archive.place_of(str(tmp_path / name)) for name in ("a", "link"))
    for one_host in (True, False):  # two names of one host, too
        with pytest.raises(LockstepError, match="are one directory"):
            archive.check_places(a, link, one_host=one_host)
    for inside in ("a/below", "link/new/deep"):
        with pytest.raises(LockstepError, match="lies inside the source"):
            archive.check_places(a, archive.place_of(str(tmp_path / inside)), one_host=True)
    archive.check_places(a, archive.place_of(str(tmp_path / "ab")), one_host=True)
    archive.check_places(a, archive.place_of(str(tmp_path)), one_host=True)
    same_path_elsewhere = {**a, "kernel": "another", "number": None}
    archive.check_places(a, same_path_elsewhere, one_host=False)


def test_a_look_tells_what_lies_there(tmp_path: Path) -> None:
    lab.make(tmp_path / "checkpoint", 998)
    place = tmp_path / "shards"
    place.mkdir()
    lab.make_shards(tmp_path / "checkpoint", place, tp=2, rank=1, split="heads")
    (place / "engram-l14-r1of2.bin.manifest.json").unlink()
    (place / "notes.txt").write_text("foreign")
    (place / "engram-l1-r0of9.bin").symlink_to(place / SHARD)
    with pytest.raises(LockstepError, match="is no regular file"):
        archive.look(str(place))
    (place / "engram-l1-r0of9.bin").unlink()
    found = archive.look(str(place))
    shown = {s["file"]: (s["layer"], s["rank"], s["tp"], s["split"], s["bytes"]) for s in found["shards"]}
    assert shown == {
        name: (layer, 1, 2, "heads", (place / name).stat().st_size)
        for layer, name in ((1, SHARD), (14, "engram-l14-r1of2.bin"))
    }
    by_name = {s["file"]: s for s in found["shards"]}
    assert by_name[SHARD]["sha256"] == sha(place / SHARD)
    assert by_name["engram-l14-r1of2.bin"]["sha256"] is None
    assert [s["file"] for s in archive.look(str(place), ["notes.txt", "gone.bin"])["shards"]] == ["notes.txt"]
    assert archive.look(str(tmp_path / "none"))["place"]["number"] is None


BAD_LISTS = {
    "prose": "the files of that night\n",
    "short": "abc  engram.bin\n",
    "byte-order mark": f"\ufeff{'0' * 64}  engram.bin\n",
    "two hashes": f"{'0' * 64}  engram.bin\n{'0' * 64}  engram.bin\n\n{'1' * 64}  engram.bin\n",
}


@pytest.mark.parametrize("kind", BAD_LISTS)
def test_a_list_that_cannot_be_trusted_stops_the_move(ends: Ends, kind: str) -> None:
    (ends.source / SHARD).write_bytes(content(1000))
    ends.target.mkdir(parents=True)
    bad = f"# by hand\n\n{BAD_LISTS[kind]}"
    (ends.target / "SHA256SUMS").write_text(bad)
    with pytest.raises(LockstepError, match="cannot be trusted") as caught:
        archive.steps(str(ends.target), [archive.item_of(ends.source / SHARD)], 0)
    assert f"in line {6 if kind == 'two hashes' else 3}" in str(caught.value)
    ends.run(SHARD)  # it became so only after the look
    assert "cannot be trusted" in str(ends.errors["sender"])
    assert (ends.source / SHARD).exists()
    assert (ends.target / "SHA256SUMS").read_text() == bad


def test_a_line_for_a_file_that_is_not_there_is_refused(ends: Ends) -> None:
    ends.target.mkdir(parents=True)
    (ends.target / "SHA256SUMS").write_text(f"{'0' * 64}  {SHARD}\n")
    for known in ({}, {"sha256": None}, {"sha256": "1" * 64}):
        with pytest.raises(LockstepError, match="which is not there"):
            archive.steps(str(ends.target), [{"file": SHARD, "bytes": 5, **known}], 0)
    # The very file comes back.
    assert archive.steps(str(ends.target), [{"file": SHARD, "bytes": 5, "sha256": "0" * 64}], 0)[0]["action"] == "send"


def test_room_is_counted_before_a_byte_goes(tiny: Path) -> None:
    item = {"file": SHARD, "bytes": 900_000}
    assert archive.steps(str(tiny / "new" / "deep"), [item], 0) == [{**item, "action": "send"}]
    with pytest.raises(LockstepError, match="not enough room") as caught:
        archive.steps(str(tiny / "new"), [item, {"file": "engram-l14-r1of2.bin", "bytes": 900_000}], 4096)
    assert "1,800,000 bytes to write + 4,096 kept free" in str(caught.value)
    # What an interrupted move left is taken up again, so its room counts.
    (tiny / f"{SHARD}.partial").write_bytes(bytes(600_000))
    assert archive.steps(str(tiny), [item], 0)
    # Room that it does not take is none.
    (tiny / f"{SHARD}.partial").unlink()
    (tiny / "other").write_bytes(bytes(600_000))
    with (tiny / f"{SHARD}.partial").open("wb") as file:
        file.truncate(600_000)
    with pytest.raises(LockstepError, match="not enough room"):
        archive.steps(str(tiny), [item], 0)


@pytest.mark.parametrize(
    ("shard", "why"),
    [
        ({}, []),
        ({"tp": 2, "split": "heads"}, ["TP 2, not 3", "split heads, not rows"]),
        ({"rank": 2}, ["rank 2, not 1"]),
        ({"rows": [0, 5]}, ["rows [0, 5], not [5, 10]"]),
        ({"split": None}, []),
        ({"bytes": 99}, ["size 99, not 100"]),
    ],
)
def test_what_a_rank_does_not_serve_says_why(shard: dict[str, Any], why: list[str]) -> None:
    fits = {"tp": 3, "rank": 1, "split": "rows", "rows": [5, 10], "bytes": 100, "layer": 1}
    assert archive.misfit(fits | shard, {"tp": "3", "rank": "1", "split": "rows"}, fits) == why


def test_the_listing_knows_live_archived_and_needed(tmp_path: Path, ends: Ends) -> None:
    lab.make(tmp_path / "checkpoint", 998)
    live = tmp_path / "home" / "engram"
    live.mkdir(parents=True)
    lab.make_shards(tmp_path / "checkpoint", live, tp=3, rank=1, split="rows")
    lab.make_shards(tmp_path / "checkpoint", ends.source, tp=2, rank=1, split="heads")
    ends.target = tmp_path / "home" / "archive" / "night"
    ends.run(SHARD, "engram-l14-r1of2.bin")
    (ends.target / "engram-l14-r1of2.bin.manifest.json").unlink()
    (live / "engram-l1-r1of3.bin.manifest.json").unlink()
    (tmp_path / "home" / ".hidden").mkdir()
    (tmp_path / "home" / ".hidden" / SHARD).write_bytes(b"")
    found = archive.survey([str(tmp_path / "home")], str(live), ["engram-l1-r1of3.bin", "engram-l14-r1of3.bin"])
    shown = [(Path(one["dir"]).name, one["file"], one["tp"], one["verified"], one["needed"]) for one in found]
    assert shown == [
        ("engram", "engram-l1-r1of3.bin", 3, None, True),
        ("engram", "engram-l14-r1of3.bin", 3, "manifest", True),
        ("night", SHARD, 2, "manifest", False),
        ("night", "engram-l14-r1of2.bin", 2, "SHA256SUMS", False),
    ]
    assert [one["moved"] and one["moved"]["from"] for one in found] == [None, None, *[f"spark2:{ends.source}"] * 2]
    assert json.dumps(found)


def verdicts(ends: Ends) -> list[str | None]:
    return [one["verified"] for one in archive.survey([], str(ends.target), [])]


def test_the_listing_believes_only_what_vouches(tmp_path: Path, ends: Ends) -> None:
    lab.make(tmp_path / "checkpoint", 998)
    lab.make_shards(tmp_path / "checkpoint", ends.source, tp=2, rank=1, split="heads")
    ends.run(SHARD)
    shard, manifest = ends.target / SHARD, ends.target / f"{SHARD}.manifest.json"
    assert verdicts(ends) == ["manifest"]
    said = json.loads(manifest.read_text())
    for odd in ({"sha256": said["sha256"].upper()}, {"sha256": "yes"}, {"rank": 0}, {"rows": [0, 1]}):
        manifest.write_text(json.dumps(said | odd))
        assert verdicts(ends) == ["SHA256SUMS"], odd
    manifest.write_text(json.dumps(said | {"sha256": "yes"}))
    assert archive.shard_of(shard)["sha256"] is None
    # Written to after it came: the list is older than that.
    stamp = shard.stat().st_mtime_ns
    os.utime(shard)
    later = shard.stat().st_mtime_ns + 5 * 10**9
    os.utime(shard, ns=(later, later))
    assert verdicts(ends) == [None]
    # No header: no shard.
    with shard.open("r+b") as file:
        file.write(bytes(4096))
    os.utime(shard, ns=(stamp, stamp))
    manifest.write_text(json.dumps(said))
    assert verdicts(ends) == [None]


def test_a_time_that_no_calendar_has_ends_nothing(tiny: Path) -> None:
    (tiny / SHARD).write_bytes(content(1000))
    os.utime(tiny / SHARD, ns=(0, 300_000_000_000 * 10**9))  # in the year 11476
    assert archive.shard_of(tiny / SHARD)["packed"] is None
    assert archive.survey([], str(tiny), [])


def test_odd_numbers_in_lists_end_nothing() -> None:
    record = f"# moved 2026-09-24T09:47:00Z to spark1:/x, {{}} bytes\n{'0' * 64}  {SHARD}\n"
    assert archive.records(record.format("9" * 5000)) == {}
    windows = archive.records(record.format(5).replace("\n", "\r\n"))
    assert windows == archive.records(record.format(5))
    assert windows[SHARD]["bytes"] == 5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SHA256SUMS", "is not moved by itself"),
        ("MOVED.txt", "is not moved by itself"),
        (f"{SHARD}.manifest.json", "is not moved by itself"),
        (f"{SHARD}.partial", "is not moved by itself"),
        (f"{SHARD}.partial.json", "is not moved by itself"),
        ("ü" * 119, "is too long"),
    ],
)
def test_a_name_that_cannot_go_is_refused(name: str, words: str) -> None:
    with pytest.raises(LockstepError, match=words) as caught:
        archive.check_names([SHARD, name])
    assert "archive_files" in str(caught.value.next_step)


def test_the_longest_name_goes(ends: Ends) -> None:
    name = "ü" * 118
    archive.check_names([name])
    (ends.source / name).write_bytes(content(1000))
    (ends.source / f"{name}.manifest.json").write_text("{}")
    ends.run(name)
    assert ends.errors == {}
    assert sums_hold(ends.target)
