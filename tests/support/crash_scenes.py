"""Jobs on shards for crash and fault tests: how each is run, and what is right, worked out without the product."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from ansible_collections.lockstep.fleet.plugins.modules import shard_archive
from crash import Ended, Job, Launcher, Moment
from lockstep_core import archive, wire
from lockstep_core.errors import LockstepError

RANK, TP = 1, 2
LAYERS = (1, 14)
LOCK = ".engram-pack.lock"
SUMS, MOVED = "SHA256SUMS", "MOVED.txt"
# Small steps for small tables, so that a shard of 3.4 MB is written in 26 blocks and has several marks.
SETTINGS = {
    "lockstep_core.engram._BLOCK_ROWS": 512,
    "lockstep_core.files.BLOCK": 1 << 18,
    "lockstep_core.files.DROP_EVERY": 1 << 18,
    "lockstep_core.files.MARK_EVERY": 1 << 19,
    # No signs of life: how many there are depends on how busy this machine is, and so would the calls of a run.
    "lockstep_core.wire._ALIVE_S": 3600.0,
    "lockstep_core.wire.GREET_S": 60,
}

# --- what is right, worked out here -----------------------------------------------------------------------------------


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def table(checkpoint: Path, layer: int, part: str) -> bytes:
    """A tensor's bytes, found by the index and the file's own header."""
    name = f"layers.{layer}.engram.embed.{part}"
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    file: str = index["weight_map"][name]
    data = (checkpoint / file).read_bytes()
    size = int.from_bytes(data[:8], "little")
    first, end = map(int, json.loads(data[8 : 8 + size])[name]["data_offsets"])
    return data[8 + size + first : 8 + size + end]


def shard_rows(checkpoint: Path, layer: int, rank: int = RANK, tp: int = TP) -> tuple[int, int, int, bytes]:
    """First row, end row, rows in all, and the rows of a rank's shard, split in equal parts."""
    weight, scale = table(checkpoint, layer, "weight"), table(checkpoint, layer, "scale")
    total = len(scale) // 8
    first, end = total * rank // tp, total * (rank + 1) // tp
    rows = b"".join(weight[256 * row : 256 * row + 256] + scale[8 * row : 8 * row + 8] for row in range(first, end))
    return first, end, total, rows


def file_name(layer: int) -> str:
    return f"engram-l{layer}-r{RANK}of{TP}.bin"


def standing(*places: Path) -> dict[str, tuple[int, int, int]]:
    """Every file below the places, by inode, size and time."""
    found = (path for place in places for path in place.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def free(lock: Path) -> bool:
    """Nobody holds this lock."""
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def proven(target: Path) -> int:
    """Bytes that the journal of an interrupted write vouches for, each mark compared with what lies there."""
    journal = target.with_name(f"{target.name}.partial.json")
    if not journal.exists():
        return 0
    written = target.with_name(f"{target.name}.partial").read_bytes()
    try:
        marks = json.loads(journal.read_text())["marks"]
    except ValueError:  # not flushed when the power was lost: it vouches for nothing
        return 0
    for count, digest in marks:
        assert sha256(written[:count]) == digest, f"a mark at {count} of {target} is wrong"
    return max((count for count, _ in marks), default=0)


class Scene(Protocol):
    """A job, where it works, and what must hold of it."""

    launcher: Launcher
    settings: dict[str, Any]

    def fresh(self) -> None:
        """Put everything back to where it was before the first run."""

    def run(self, moment: Moment | None = None) -> list[Ended]:
        """Run the job to its end, or to its moment."""

    def nothing_wrong(self) -> None:
        """Hold the job to what must be true at every moment."""

    def remembered(self) -> dict[str, int]:
        """Count the bytes of each file that need not be made again."""

    def resumed(self, ended: list[Ended], before: dict[str, int]) -> None:
        """Hold a run to having gone on from there."""

    def all_right(self) -> None:
        """Hold the end state to be right and complete, and nothing to be left behind."""

    def standing(self) -> dict[str, tuple[int, int, int]]:
        """Every file that a run with nothing to do must not touch, by inode, size and time."""


def killed_and_run_again(scene: Scene, moment: Moment) -> int:
    """Kill a job at a moment, hold what is there to the invariants, run it again to the right end, and once more.

    Returns the bytes that the second run needed not to make again.
    """
    scene.fresh()
    ended = scene.run(moment)
    said = f"{moment}: {[(end.status, end.text) for end in ended]}"
    assert ended[moment.process].status == -signal.SIGKILL, said
    assert all(end.status in {0, 1} and "Traceback" not in end.text for end in ended if end.status != -9), said
    scene.nothing_wrong()
    before = scene.remembered()
    again = scene.run()
    assert not any(end.status for end in again), f"{moment}: {[end.text for end in again]}"
    scene.all_right()
    scene.resumed(again, before)
    standing = scene.standing()
    assert not any(end.status for end in scene.run())
    assert scene.standing() == standing, f"{moment}: a third run changed something"
    return sum(before.values())


class Pack:
    """Packing two layers of a rank."""

    def __init__(self, launcher: Launcher, made: Path, place: Path) -> None:
        self.launcher, self.checkpoint, self.out = launcher, made, place / "the shards"
        self.settings: dict[str, Any] = SETTINGS
        self.source = standing(made)
        self.right: dict[str, str] = {}
        self.fresh()
        (end,) = self.run()
        assert end.status == 0, end.text
        for layer in LAYERS:
            first, end_row, total, rows = shard_rows(made, layer)
            data = (self.out / file_name(layer)).read_bytes()
            assert data[:48] == struct.pack("<8s5Q", b"DSV41EN1", layer, first, end_row, total, 264)
            assert len(data) == 4096 + len(rows)
            assert data[4096:] == rows
            self.right[file_name(layer)] = sha256(data)
        self.bytes = sum(path.stat().st_size for path in self.out.glob("*.bin"))
        self.fresh()

    def at(self, place: Path) -> Pack:
        """The same job, its shards in another place."""
        other = copy.copy(self)
        other.out = place / "the shards"
        return other

    def fresh(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    def jobs(self, moment: Moment | None = None) -> list[Job]:
        arguments = ["--checkpoint", str(self.checkpoint), "--out", str(self.out), "--rank", str(RANK), "--tp", str(TP)]
        arguments += ["--layers", ",".join(map(str, LAYERS)), "--split", "rows", "--reserve", "0"]
        return [Job("lockstep_tools.pack:main", [arguments], [str(self.out)], moment, self.settings)]

    def run(self, moment: Moment | None = None) -> list[Ended]:
        return self.launcher.run(*self.jobs(moment))

    def nothing_wrong(self) -> None:
        """What stands under a final name is whole, a manifest vouches for nothing else, the checkpoint is as it was."""
        for name, digest in self.right.items():
            path, manifest = self.out / name, self.out / f"{name}.manifest.json"
            if path.exists():
                assert sha256(path.read_bytes()) == digest, f"{path} is wrong under its final name"
            if manifest.exists():
                assert path.exists(), f"{manifest} vouches for nothing"
                assert json.loads(manifest.read_text())["sha256"] == digest
        assert standing(self.checkpoint) == self.source

    def remembered(self) -> dict[str, int]:
        """Bytes of each file that need not be made again."""
        return {
            name: (self.out / name).stat().st_size if (self.out / name).exists() else proven(self.out / name)
            for name in self.right
        }

    def resumed(self, ended: list[Ended], before: dict[str, int]) -> None:
        """The run wrote no proven byte of a shard again, and read no proven row."""
        (end,) = ended
        for name, kept in before.items():
            size = (self.out / name).stat().st_size
            assert end.bytes("write", name) == size - kept, f"{name}: {kept} of {size} bytes were proven"

    def all_right(self) -> None:
        """Everything is there, right, and nothing else."""
        self.nothing_wrong()
        names = {*self.right, *(f"{name}.manifest.json" for name in self.right), LOCK}
        names_are(self.out, names)
        assert free(self.out / LOCK)

    def standing(self) -> dict[str, tuple[int, int, int]]:
        found = standing(self.out, self.checkpoint)
        found.pop(str(self.out / LOCK))
        return found


class Repack(Pack):
    """Packing good shards again, as ``--force`` has it, which is not wanted any more after a kill."""

    def fresh(self) -> None:
        super().fresh()
        self.run()

    def jobs(self, moment: Moment | None = None) -> list[Job]:
        (job,) = super().jobs(moment)
        forced = [*job.arguments[0], "--force"] if moment else job.arguments[0]
        return [replace(job, arguments=[forced])]


class Move:
    """Moving a rank's two shards with their manifests to another directory; what archiving and restoring share."""

    mode: str

    def __init__(self, packed: Pack, place: Path) -> None:
        self.launcher, self.right, self.settings = packed.launcher, packed.right, packed.settings
        self.checkpoint, self.place = packed.checkpoint, place
        self.kept, self.source, self.target = place / "as it was", place / "the source", place / "the target"
        packed.fresh()
        packed.run()
        shutil.copytree(packed.out, self.kept, ignore=shutil.ignore_patterns(LOCK))
        packed.fresh()

    def at(self, source: Path, target: Path) -> Self:
        """The same move between other places."""
        other = copy.copy(self)
        other.source, other.target = source / "the source", target / "the target"
        return other

    def fresh(self) -> None:
        for path in (self.source, self.target):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.kept, self.source)

    def items(self, files: list[str]) -> list[dict[str, Any]]:
        """What is to go (no names: all), as the module decides by looking; LockstepError when it cannot end well."""
        ends = {"source": self.source, "target": self.target}
        params = {
            "mode": self.mode,
            "route": {**{side: {"host": side, "dir": str(path)} for side, path in ends.items()}, "address": "::1"},
            "files": files,
            "in_service": False,
            "serves": {
                "dir": str(self.place / "the rank's own" if self.mode == "archive" else self.target),
                "rank": RANK,
                "tp": TP,
                "split": "rows",
                "layers": LAYERS,
                "config": json.loads((self.checkpoint / "config.json").read_text()),
                "checkpoint": str(self.checkpoint),
            },
            "reserve_bytes": 0,
            "run_dir": str(self.place / "run"),
        }
        found: list[dict[str, Any]] = shard_archive.plan({**params, "look": shard_archive.look(params)})["items"]
        return found

    def jobs(self, moment: Moment | None = None, files: list[str] | None = None) -> list[Job]:
        """The two ends; none when there is nothing to move."""
        items = self.items(files or [])
        if not items:
            return []
        remove, origin = self.mode == "archive", f"source:{self.source}" if self.mode == "archive" else ""
        ends = [
            Job("crash_scenes:send", ["@socket", str(self.source), items, f"target:{self.target}", remove]),
            Job("crash_scenes:receive", ["@socket", str(self.target), items, origin]),
        ]
        return [
            replace(job, targets=[str(self.target)], settings=self.settings).at(moment, process)
            for process, job in enumerate(ends)
        ]

    def run(self, moment: Moment | None = None, files: list[str] | None = None) -> list[Ended]:
        return self.launcher.run(*self.jobs(moment, files))

    def whole(self, *places: Path) -> None:
        """What stands under a final name is right, and a manifest vouches for nothing else."""
        for path in (place / name for place in places for name in self.right):
            digest = self.right[path.name]
            if path.exists():
                assert sha256(path.read_bytes()) == digest, f"{path} is wrong under its final name"
            manifest = path.with_name(f"{path.name}.manifest.json")
            if manifest.exists():
                assert path.exists(), f"{manifest} vouches for nothing"
                assert json.loads(manifest.read_text())["sha256"] == digest

    def remembered(self) -> dict[str, int]:
        found = {}
        for name in self.right:
            path = self.target / name
            if (self.source / name).exists():
                found[name] = path.stat().st_size if path.exists() else proven(path)
        return found

    def resumed(self, ended: list[Ended], before: dict[str, int]) -> None:
        """The run sent and wrote no proven byte of a shard again."""
        if not ended:
            return
        for name, kept in before.items():
            size = (self.target / name).stat().st_size
            assert ended[1].bytes("write", name) == size - kept, f"{name}: {kept} of {size} bytes were proven"
        missing = sum((self.target / name).stat().st_size - kept for name, kept in before.items())
        words = ended[0].bytes("write", "socket") - missing
        assert 0 <= words < 1 << 16, f"{words} bytes more than were missing went through the connection"

    def standing(self) -> dict[str, tuple[int, int, int]]:
        return standing(self.source, self.target)


def names_are(place: Path, names: set[str]) -> None:
    """Nothing but this lies there."""
    there = {path.name for path in place.iterdir()}
    assert there == names, f"left behind: {there - names}, not there: {names - there}"


class Archive(Move):
    """To an archive, removed at the source."""

    mode = "archive"

    def nothing_wrong(self) -> None:
        """Every shard is whole at one end at least; where its source is gone, it is listed and checks at the other."""
        self.whole(self.source, self.target)
        listed, moved = self.checked(SUMS), self.checked(MOVED)
        for name in self.right:
            there = (self.target / name).exists() and name in listed
            assert (self.source / name).exists() or there, f"{name} is lost"
            assert there or name not in moved, f"{name} is said to be moved"

    def checked(self, name: str) -> set[str]:
        """The files that a list names, all of which the system's own sha256sum finds right at the target."""
        path = (self.target if name == SUMS else self.source) / name
        if not path.exists():
            return set()
        run = subprocess.run(
            ["sha256sum", "--check", "--strict", path], cwd=self.target, check=False, capture_output=True, text=True
        )
        assert run.returncode == 0, f"{path}: {run.stdout}{run.stderr}"
        return {line.removesuffix(": OK") for line in run.stdout.splitlines()}

    def all_right(self) -> None:
        """Everything is there, right, and nothing else; at the source a note only."""
        self.nothing_wrong()
        names_are(self.target, {*self.right, *(f"{name}.manifest.json" for name in self.right), SUMS})
        names_are(self.source, {MOVED})
        assert self.checked(SUMS) == self.checked(MOVED) == set(self.right)


class Restore(Move):
    """From an archive, which keeps its copy, into the rank's own directory."""

    mode = "restore"

    def __init__(self, packed: Pack, place: Path) -> None:
        super().__init__(packed, place)
        archived = Archive(packed, place / "before")
        archived.fresh()
        archived.run()
        archived.all_right()
        shutil.rmtree(self.kept)
        shutil.copytree(archived.target, self.kept)

    def fresh(self) -> None:
        super().fresh()
        self.before = standing(self.source)

    def nothing_wrong(self) -> None:
        """The archive is as it was, and the rank's directory holds nothing wrong under a final name."""
        self.whole(self.target)
        assert standing(self.source) == self.before, "the archive was touched"

    def all_right(self) -> None:
        """Everything is there, right, proven, and nothing else."""
        self.nothing_wrong()
        names_are(self.target, {*self.right, *(f"{name}.manifest.json" for name in self.right)})
        for name in self.right:
            manifest = json.loads((self.target / f"{name}.manifest.json").read_text())
            assert manifest["mtime_ns"] == (self.target / name).stat().st_mtime_ns, f"nothing vouches for {name}"


# --- run in a child ---------------------------------------------------------------------------------------------------

KEY = b"k" * 32


def send(connection: socket.socket, directory: str, items: list[dict[str, Any]], target: str, remove: bool) -> int:
    """Be the sending end."""
    ours: dict[str, Any] = {"host": "source", "target": target, "remove": remove, "tell": lambda *_: None}
    return _ending(
        lambda: archive.send(wire.Channel(connection, KEY, "sender"), directory, items, **ours),
    )


def receive(connection: socket.socket, directory: str, items: list[dict[str, Any]], origin: str) -> int:
    """Be the receiving end."""
    ours: dict[str, Any] = {"host": "target", "origin": origin, "tell": lambda *_: None}
    return _ending(lambda: archive.receive(wire.Channel(connection, KEY, "receiver"), directory, items, **ours))


def _ending(work: Callable[[], Iterable[object]]) -> int:
    try:
        for done in work():
            print(done)  # noqa: T201 - a test reads it
    except LockstepError as error:
        print(error)  # noqa: T201 - a test reads it
        return 1
    return 0
