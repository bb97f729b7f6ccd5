"""Real code in real processes that are killed at a chosen call, held at it, or lose their power at it.

A launcher process imports the product once, with the system calls of ``os``, ``socket`` and ``hashlib`` wrapped to be
counted, and forks a child for every run. Product code is not changed for it. A child given a ``Moment`` sends itself
SIGKILL before, after or in the middle of the n-th call of a stage; ``power`` takes its file system away first, so that
only what was flushed is there when it is mounted again.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import hashlib
import importlib
import itertools
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "tests"

# What a job goes through. A read of a file that the job itself wrote is "verify"; over a socket, reading is "read".
STAGES = ("read", "write", "hash", "fsync", "rename", "verify", "remove")
BEFORE, MIDDLE, AFTER = "before", "middle", "after"

_CALLS = {
    "read": ("read", "pread", "preadv", "readv"),
    "write": ("write", "pwrite", "pwritev", "writev"),
    "fsync": ("fsync", "fdatasync"),
    "rename": ("rename", "replace"),
    "remove": ("unlink", "remove"),
}
_SOCKET_CALLS = {"read": ("recv", "recv_into"), "write": ("send", "sendall", "sendmsg")}
_PAGE = 4096
# The block of the disk that a block of a file lies in.
_FIBMAP = 1
# A job that has not ended by then is aborted; while one is held, the time stands still.
HANGS_S = 100.0
# EXT4_IOC_SHUTDOWN with EXT4_GOING_FLAGS_NOLOGFLUSH: nothing more reaches the disk, the journal included.
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, struct.pack("I", 2)


@dataclass(frozen=True)
class Moment:
    """The n-th call (from 1) of a stage, and what happens there: ``kill``, ``power``, ``hold`` or ``clock``."""

    stage: str
    number: int
    when: str = BEFORE
    act: str = "kill"
    # What ``act`` needs: the mount point (power), or the seconds that the clock jumps (clock).
    what: str | float | None = None
    # Of jobs side by side, the one that it happens to.
    process: int = 0

    def __str__(self) -> str:
        where = f" of process {self.process}" if self.process else ""
        return f"{self.act} {self.when} {self.stage} {self.number}{where}"


class Call(NamedTuple):
    """One call that was made: its stage, the bytes it moved, and the file (or ``socket``)."""

    stage: str
    moved: int
    path: str


@dataclass(frozen=True)
class Job:
    """A function of the product to run in a process of its own, and what happens to it."""

    function: str  # module:function
    arguments: Sequence[Any]
    # Directories whose files the job writes: reading those is reading back.
    targets: Sequence[str] = ()
    moment: Moment | None = None
    # Attributes set before the function is called: {"module.name": value}, a value "@module:function" being that one.
    settings: dict[str, Any] = field(default_factory=dict)
    # File descriptors of a connection with the job beside it are put in place of this argument.
    socket_as: str = "@socket"

    def at(self, moment: Moment | None, process: int = 0) -> Job:
        """The same job, with a moment if it is this process's."""
        return replace(self, moment=moment) if moment and moment.process == process else self


@dataclass(frozen=True)
class Ended:
    """How a process ended (negative: the signal), what it said, and its calls as far as it came."""

    status: int
    text: str
    calls: tuple[Call, ...]

    @property
    def counts(self) -> Counter[str]:
        """How many calls of each stage were made."""
        return Counter(call.stage for call in self.calls)

    def bytes(self, stage: str, path: str = "") -> int:
        """How many bytes the calls of a stage moved, on files whose path holds ``path``."""
        return sum(call.moved for call in self.calls if call.stage == stage and path in call.path)


class Launcher:
    """The process that forks the jobs. As a context manager, it ends with the block."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._numbers = itertools.count()
        paths = [str(ROOT / name) for name in ("collections", "adapters", "tests/lab", "tests/support")]
        self._process = subprocess.Popen(
            [sys.executable, "-B", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def run(self, *jobs: Job, while_held: Callable[[], object] | None = None) -> list[Ended]:
        """Run jobs side by side to their ends; ``while_held`` happens when one of them has come to a ``hold``."""
        logs = [self._place / f"job-{next(self._numbers)}" for _ in jobs]
        self._say({"jobs": [{**asdict(job), "log": str(log)} for job, log in zip(jobs, logs, strict=True)]})
        while (ended := self._hear()["ended"]) is None:
            try:
                assert while_held, "a job was held and nobody waits for it"
                while_held()
            finally:
                self._say({"go": True})
        return [_ended(status, log) for status, log in zip(ended, logs, strict=True)]

    @classmethod
    def once(cls, jobs: Sequence[Job]) -> list[Ended]:
        """Run jobs in a launcher of their own, while another one is held."""
        with TemporaryDirectory() as place, cls(Path(place)) as launcher:
            return launcher.run(*jobs)

    def _say(self, word: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(word) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def moments(undisturbed: Sequence[Ended], stage: str, number: int, seed: str) -> list[Moment]:
    """Draw moments of a stage from the calls that a run made; different ones as long as there are any."""
    source = random.Random(f"{seed}/{stage}")  # noqa: S311 - drawn again the same by the seed
    whens = (BEFORE, MIDDLE, AFTER) if stage == "write" else (BEFORE, AFTER)
    every = [
        Moment(stage, call, when, process=process)
        for process, ended in enumerate(undisturbed)
        for call in range(1, ended.counts[stage] + 1)
        for when in whens
    ]
    assert every, f"no call of stage {stage} was made"
    drawn: list[Moment] = []
    while len(drawn) < number:
        drawn += source.sample(every, min(len(every), number - len(drawn)))
    return drawn


class Histogram:
    """Counts kills by what was killed and where, and keeps them in ``results/tests/crash-<name>.json``."""

    # Of this run of pytest: {job: {where: kills}}.
    _seen: ClassVar[dict[str, Counter[str]]] = {}

    def __init__(self, name: str) -> None:
        self._path = RESULTS / f"crash-{name}.json"
        self._path.unlink(missing_ok=True)
        self._own: dict[str, Counter[str]] = {}

    def count(self, job: str, where: str, kills: int = 1) -> None:
        """Count kills after which the end state was right."""
        for kept in (self._own, self._seen):
            kept.setdefault(job, Counter())[where] += kills

    def show(self, config: Any) -> None:
        """Write this one, and print all of this run to pytest's terminal, past its capture."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._own, indent=1) + "\n")
        terminal = config.pluginmanager.getplugin("terminalreporter")
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            for line in ["", *self.lines()]:
                terminal.write_line(line)

    def lines(self) -> list[str]:
        """Render what was counted in this run, a line a job and the sum."""
        width = max(map(len, [*self._seen, "kills"]))
        lines = [
            f"{job:<{width}}  {kills.total():>4}  {'  '.join(f'{where} {number}' for where, number in kills.items())}"
            for job, kills in self._seen.items()
        ]
        return [*lines, f"{'kills':<{width}}  {sum(kills.total() for kills in self._seen.values()):>4}"]


@contextlib.contextmanager
def filesystem(mounted: Path, megabytes: int, block: int = 1024) -> Iterator[Path]:
    """A real ext4 of its own, mounted at ``mounted``; beside it lies its image, ``<mounted>.img``."""
    image = mounted.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-b", f"{block}", "-m", "0", "-O", "^resize_inode", image], check=True)
    mounted.mkdir(exist_ok=True)
    mount(image, mounted)
    try:
        yield mounted
    finally:
        if os.path.ismount(mounted):
            unmount(mounted)
        image.unlink(missing_ok=True)


def mount(image: Path, mounted: Path, options: str = "rw") -> None:
    """Mount an image. Nothing is written back unasked for five minutes.

    What is flushed is in the image, so this machine's own disk need not be waited for (``barrier=0``): no test cuts
    the power of that one.
    """
    subprocess.run(["mount", "-o", f"loop,commit=300,barrier=0,{options}", image, mounted], check=True)


def unmount(mounted: Path) -> None:
    """Unmount; a loop device in it, or a process that was just killed, may take a moment to let go."""
    until = time.monotonic() + 60
    while subprocess.run(["umount", mounted], check=False, stderr=subprocess.DEVNULL).returncode:
        if time.monotonic() > until:
            # A mount that stays is in the way of whoever clears these directories away.
            subprocess.run(["umount", "--lazy", mounted], check=True)
            raise AssertionError(f"{mounted} stays busy")
        time.sleep(0.1)


def flush(mounted: Path) -> None:
    """Write back all that the kernel holds of a file system."""
    subprocess.run(["sync", "--file-system", mounted], check=True)


def power_off(mounted: Path) -> None:
    """Nothing more reaches a file system's disk, what the kernel still holds of it included."""
    disk = os.open(mounted, os.O_RDONLY)
    fcntl.ioctl(disk, _SHUTDOWN, _NO_LOG_FLUSH)
    os.close(disk)


def released(image: Path) -> None:
    """Wait until nothing has an unmounted image.

    A container that starts has a copy of every mount for a moment. As long as that keeps the file system alive, a new
    mount would be of the same one: without power after a cut, busy with other options.
    """
    until = time.monotonic() + 60
    while subprocess.run(["losetup", "--associated", image], check=True, stdout=subprocess.PIPE).stdout:
        assert time.monotonic() < until, f"{image} stays in use"
        time.sleep(0.05)


def power_back(mounted: Path) -> None:
    """Mount again what lost its power: what was not flushed is gone, the journal is replayed."""
    unmount(mounted)
    image = mounted.with_suffix(".img")
    released(image)
    mount(image, mounted)


@contextlib.contextmanager
def read_only(mounted: Path) -> Iterator[None]:
    """A file system is mounted read-only, as after an error of its disk."""
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)


@contextlib.contextmanager
def unreadable(mounted: Path, paths: Iterable[Path], option: str = "ro") -> Iterator[Path]:
    """The end of the one of some files that lies last on its disk cannot be read (EIO): the image ends before it.

    Yields that file. Nothing of it is in the page cache. With ``option`` rw, what is written meanwhile may be lost.
    """
    image = mounted.with_suffix(".img")
    places = {path: sorted(_on_disk(path)) for path in paths}
    last = max(places, key=lambda path: places[path][-1])
    cut = places[last][-len(places[last]) // 8]
    unmount(mounted)
    released(image)
    with image.open("r+b") as disk:
        disk.seek(cut)
        tail = disk.read()
        mount(image, mounted, option)
        disk.truncate(cut)
        try:
            yield last
        finally:
            disk.seek(cut)
            disk.write(tail)
            disk.flush()
            unmount(mounted)
            released(image)
            mount(image, mounted)


def flip(mounted: Path, path: Path, offset: int) -> None:
    """Turn one bit of a file on its disk, below the file system; who reads from the page cache does not see it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    size = os.statvfs(path).f_bsize
    with mounted.with_suffix(".img").open("r+b") as disk:
        disk.seek(_on_disk(path)[offset // size] + offset % size)
        byte = disk.read(1)[0]
        disk.seek(-1, os.SEEK_CUR)
        disk.write(bytes([byte ^ 1]))


def _on_disk(path: Path) -> list[int]:
    """Where each block of a file lies in its file system's image, in bytes."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        os.fsync(file.fileno())
        size = os.statvfs(path).f_bsize
        blocks = range(-(-status.st_size // size))
        return [size * struct.unpack("i", fcntl.ioctl(file, _FIBMAP, struct.pack("i", block)))[0] for block in blocks]


def _ended(status: int, log: Path) -> Ended:
    calls = log.with_suffix(".json")
    made = tuple(Call(*call) for call in json.loads(calls.read_text())) if calls.exists() else ()
    return Ended(status, log.with_suffix(".out").read_text(errors="replace"), made)


# --- in the launcher and its children ---------------------------------------------------------------------------------


class _Watch:
    """Counts this process's calls by stage; when its moment has come, the moment's act happens."""

    def __init__(self) -> None:
        self.job: dict[str, Any] | None = None
        self.offset = 0.0
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._calls: list[Call] = []

    def begin(self, job: dict[str, Any]) -> None:
        self.job = job
        self.targets = tuple(job["targets"])
        self.moment = Moment(**job["moment"]) if job["moment"] else None

    def save(self) -> None:
        if self.job:
            with _open(f"{self.job['log']}.json", "w") as file:
                json.dump(self._calls, file)

    def call(self, stage: str, path: str, real: Callable[[Any], Any], data: Any, count: int | None = None) -> Any:
        """Make one call, ``real(data)``, unless the moment is before it."""
        if self.job is None:
            return real(data)
        if stage == "read" and path.startswith(self.targets or ("\0",)):
            stage = "verify"
        with self._lock:
            self._counts[stage] += 1
            due = self.moment if self.moment and (self.moment.stage, self.moment.number) == (
                stage, self._counts[stage],
            ) else None  # fmt: skip
        if due and due.when == BEFORE:
            self._act(due)
        if due and due.when == MIDDLE:
            real(_half(data))
            self._act(due)
        moved = 0
        try:
            result = real(data)
            moved = result if count is None else count
            return result
        finally:  # a call that fails is one too
            with self._lock:
                self._calls.append(Call(stage, moved, path))
            if due and due.when == AFTER:
                self._act(due)

    def _act(self, moment: Moment) -> None:
        if moment.act == "clock":
            self.offset += float(moment.what or 0)
            return
        if moment.act == "hold":
            # To this thread: one to the process may stop it only after the call that it was to be held at.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            return
        with self._lock:
            self.save()
        if moment.act == "power":
            power_off(Path(str(moment.what)))
        os.kill(os.getpid(), signal.SIGKILL)


_open = open
_watch = _Watch()


def _fd_path(fd: int) -> str:
    path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - called for each call that is counted
    return "socket" if path.startswith("socket:") else path


def _half(data: Any) -> Any:
    """The first half of a buffer, or of the first of several; whole pages where there are any, as O_DIRECT wants."""
    if isinstance(data, list | tuple):
        return [_half(data[0])]
    view = memoryview(data).cast("B")
    return view[: len(view) // 2 // _PAGE * _PAGE or len(view) // 2]


def _size(data: Any) -> int:
    return memoryview(data).nbytes if not isinstance(data, list | tuple) else sum(map(_size, data))


def _wrap_os() -> None:
    def on_fd(stage: str, name: str) -> None:
        real = getattr(os, name)
        at = 1 if stage == "write" else 0  # the argument that may be halved

        def wrapped(*args: Any, **more: Any) -> Any:
            def call(value: Any) -> Any:
                return real(*args[:at], value, *args[at + 1 :], **more)

            # Of os.read the bytes are counted, the others return their count.
            if name in {"read", "pread"}:
                kept: list[bytes] = []

                def reading(value: Any) -> int:
                    kept.append(call(value))
                    return len(kept[0])

                _watch.call(stage, _fd_path(args[0]), reading, args[at])
                return kept[0]
            return _watch.call(stage, _fd_path(args[0]), call, args[at], 0 if stage == "fsync" else None)

        setattr(os, name, wrapped)

    def on_path(stage: str, name: str) -> None:
        real = getattr(os, name)

        def wrapped(*args: Any, **more: Any) -> Any:
            return _watch.call(stage, os.fspath(args[-1]), lambda _: real(*args, **more), None, 0)

        setattr(os, name, wrapped)

    for stage, names in _CALLS.items():
        for name in names:
            (on_fd if stage in {"read", "write", "fsync"} else on_path)(stage, name)


def _wrap_sockets() -> None:
    def one(stage: str, name: str) -> None:
        real = getattr(socket.socket, name)

        def wrapped(self: socket.socket, data: Any, *args: Any, **more: Any) -> Any:
            answer: list[Any] = []

            def call(value: Any) -> int:
                answer.append(real(self, value, *args, **more))
                last = answer[-1]
                return last if isinstance(last, int) else len(last) if isinstance(last, bytes) else _size(value)

            _watch.call(stage, "socket", call, data)
            return answer[-1]

        setattr(socket.socket, name, wrapped)

    for stage, names in _SOCKET_CALLS.items():
        for name in names:
            one(stage, name)


class _Sha256:
    """hashlib's SHA-256 with its updates counted."""

    name, digest_size, block_size = "sha256", 32, 64
    _real = staticmethod(hashlib.sha256)

    def __init__(self, data: Any = b"", real: Any = None, **more: Any) -> None:
        self._inner = real or self._real(b"", **more)
        if len(data):
            self.update(data)

    def update(self, data: Any) -> None:
        _watch.call("hash", "", self._inner.update, data, _size(data))

    def copy(self) -> _Sha256:
        return _Sha256(real=self._inner.copy())

    def digest(self) -> bytes:
        found: bytes = self._inner.digest()
        return found

    def hexdigest(self) -> str:
        return self.digest().hex()


class _Clock(dt.datetime):
    """A clock that can jump."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Self:
        return cls.fromtimestamp(time.time(), tz)


def _wrap_time() -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + _watch.offset
    time.time_ns = lambda: now_ns() + int(_watch.offset * 1e9)
    dt.datetime = _Clock  # type: ignore[misc]


def _child(job: dict[str, Any], connection: socket.socket | None) -> None:
    """Run a job; never returns."""
    out = os.open(f"{job['log']}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    status = 1
    try:
        for name, given in job["settings"].items():
            module, _, attribute = name.rpartition(".")
            value = _found(given[1:]) if str(given).startswith("@") else given
            setattr(importlib.import_module(module), attribute, value)
        call = _found(job["function"])
        arguments = [connection if argument == job["socket_as"] else argument for argument in job["arguments"]]
        _watch.begin(job)
        status = int(call(*arguments) or 0)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the parent reads it
        sys.excepthook(*sys.exc_info())
    finally:
        _watch.moment = None
        sys.stdout.flush()
        sys.stderr.flush()
        _watch.save()
        os._exit(status)


def _found(name: str) -> Any:
    """The function named ``module:function``."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _fork(jobs: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Start jobs, two of them with a connection between them: {process id: number of the job}."""
    ends: Sequence[socket.socket | None] = socket.socketpair() if len(jobs) == 2 else [None] * len(jobs)
    running: dict[int, int] = {}
    for number, job in enumerate(jobs):
        if not (pid := os.fork()):
            for end in ends:
                if end and end is not ends[number]:
                    end.close()
            _child(job, ends[number])
        running[pid] = number
    for end in ends:
        if end:
            end.close()
    return running


def _serve() -> None:
    """Fork what standard input asks for, and say how it ended or that it is held."""
    for line in sys.stdin:
        running = _fork(json.loads(line)["jobs"])
        ended = [0] * len(running)
        until = time.monotonic() + HANGS_S
        while running:
            pid, status = os.waitpid(-1, os.WUNTRACED | os.WNOHANG)
            if not pid:
                time.sleep(0.001)
                if time.monotonic() > until:  # a test sees how it ended
                    for late in running:
                        os.kill(late, signal.SIGABRT)
                    until += HANGS_S
            elif os.WIFSTOPPED(status):
                print(json.dumps({"ended": None}), flush=True)  # noqa: T201 - the answer
                held = time.monotonic()
                sys.stdin.readline()
                until += time.monotonic() - held
                os.kill(pid, signal.SIGCONT)
            else:
                ended[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        print(json.dumps({"ended": ended}), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    sys.modules["crash"] = sys.modules["__main__"]
    _wrap_os()
    _wrap_sockets()
    _wrap_time()
    hashlib.sha256 = _Sha256  # type: ignore[assignment]
    for name in ("lockstep_tools.pack", "lockstep_core.engram", "lockstep_core.files"):
        importlib.import_module(name)
    _serve()
