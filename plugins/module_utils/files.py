"""The one room of the core that touches files: atomic writes, streaming hashes, locks, exact space, page cache dropped.

Host memory is GPU memory on the fleet this is made for: whoever reads or writes a big file here also drops its pages,
or the next boot's KV pool is smaller by as much.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import socket
import stat
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType
    from typing import Self

BLOCK = 8 << 20
# Pages are dropped each time this much was read, so that a 31-GiB file never fills the cache on its way.
DROP_EVERY = 64 << 20
# So often a file that is being written becomes durable up to here, and an interrupted run can go on from here.
MARK_EVERY = 256 << 20
# What offsets, lengths and buffers must be multiples of to pass the page cache by.
ALIGN = 4096
# The kernel takes at most this many buffers in one preadv (IOV_MAX).
IOV_MAX = 1024
PARTIAL = ".partial"
JOURNAL = ".partial.json"

StrPath = str | os.PathLike[str]


def read_bytes(path: StrPath, limit: int = 64 << 20) -> bytes:
    """Read a small file whole. Raises LockstepError when it is missing, unreadable or over ``limit`` bytes."""
    try:
        # Opening a pipe would wait for its writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            kind = os.fstat(file.fileno()).st_mode
            data = file.read(limit + 1) if stat.S_ISREG(kind) else b""
    except OSError as error:
        raise _os_error(f"cannot read {os.fspath(path)}", error) from error
    if not stat.S_ISREG(kind):
        raise _no_file(path, kind)
    if len(data) > limit:
        raise LockstepError(
            f"{os.fspath(path)} is too large to be what its name says", found=f"more than {limit} bytes"
        )
    return data


def read_json(path: StrPath) -> object:
    """Read the JSON value in a file. Raises LockstepError when the file is missing or is no JSON."""
    data = read_bytes(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LockstepError(f"{os.fspath(path)} is not JSON", found=str(error)) from error


def write_atomic(path: StrPath, data: bytes | str, mode: int = 0o600, *, durable: bool = True) -> None:
    """Write a small file so that a reader sees the old content or the new, never a part. LockstepError when it cannot.

    Written to ``.<name>.tmp`` beside, synced, renamed, directory synced; what a killed process left there is written
    over. ``durable=False`` leaves the syncs out, for a progress file that is rewritten every second and worth nothing
    after a power cut.
    """
    with _written_aside(Path(path), mode, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_stream(path: StrPath, chunks: Iterable[bytes], mode: int = 0o600) -> dict[str, Any]:
    """Write a large file as it comes, as ``write_atomic`` does, past the page cache: ``{"bytes", "sha256"}``.

    LockstepError when it cannot be written; whatever ``chunks`` raises goes through. Neither leaves a file.
    """
    digest, total, synced = hashlib.sha256(), 0, 0
    with _written_aside(Path(path), mode) as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            total += len(chunk)
            if total - synced >= DROP_EVERY:
                file.flush()
                os.fdatasync(file.fileno())
                drop_cache(file.fileno())
                synced = total
        file.flush()
        os.fdatasync(file.fileno())
        drop_cache(file.fileno())
    return {"bytes": total, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def _written_aside(target: Path, mode: int, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Give a file to write, which gets its name once the body has ended well; else nothing of it is left."""
    aside = _aside(target)
    try:
        with _alone(aside) as file:
            try:
                os.fchmod(file.fileno(), mode)
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                aside.replace(target)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise
        if durable:
            sync_dir(target.parent)
    except OSError as error:
        raise _os_error(f"cannot write {target}", error) from error


def proven_blocks(path: StrPath, sha256: str) -> Iterator[bytes]:
    """Read a file in blocks of ``BLOCK`` bytes; the last one comes only when all of them have the hash.

    LockstepError when they do not, or when it cannot be read.
    """

    def blocks() -> Iterator[bytes]:
        try:
            with Path(path).open("rb") as file:
                while block := file.read(BLOCK):
                    yield block
                    drop_cache(file.fileno(), 0, file.tell())
        except OSError as error:
            raise _os_error(f"cannot read {os.fspath(path)}", error) from error

    def prove(_size: int, found: str) -> None:
        if found != sha256:
            raise LockstepError(
                f"{os.fspath(path)} is not what its checksum says",
                found=found,
                expected=sha256,
                next_step="copy it again from where it was made",
            )

    yield from last_when_proven(blocks(), prove)


def exact_blocks(root: StrPath, name: str, size: int) -> Iterator[bytes]:
    """Read ``size`` bytes of the file ``name`` below ``root``, in blocks of ``BLOCK``.

    No link below ``root`` is followed, so nothing outside is read. LockstepError when it cannot be, and when the file
    has fewer.
    """
    *folders, last = [part for part in name.split("/") if part not in ("", ".")] or ["."]
    path = f"{os.fspath(root)}/{name}"
    folder = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        with contextlib.ExitStack() as opened:

            def below(at: int, part: str, flags: int) -> int:
                # ".." would lead out; no file has the name "".
                return os.open(part if part != ".." else "", flags | os.O_NOFOLLOW, dir_fd=at)

            at = os.open(root, folder)
            opened.callback(os.close, at)
            for part in folders:
                at = below(at, part, folder)
                opened.callback(os.close, at)
            file = os.fdopen(below(at, last, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            opened.enter_context(file)
            while size and (block := file.read(min(BLOCK, size))):
                size -= len(block)
                yield block
            drop_cache(file.fileno())
    except OSError as error:
        raise _os_error(f"cannot read {path}", error) from error
    if size:
        raise LockstepError(f"{path} is shorter than it should be", found=f"{size} bytes are missing")


def last_when_proven(blocks: Iterable[bytes], prove: Callable[[int, str], None]) -> Iterator[bytes]:
    """Yield blocks, the last one only when ``prove(bytes, sha256)`` of them all has not raised.

    So whoever is fed with them never gets to the end of what was not proven.
    """
    digest, total, held = hashlib.sha256(), 0, b""
    for block in blocks:
        digest.update(block)
        total += len(block)
        if held:
            yield held
        held = block
    prove(total, digest.hexdigest())
    if held:
        yield held


def _aside(path: Path) -> Path:
    """Name the file that ``write_atomic`` writes first."""
    return path.with_name(f".{path.name}.tmp")


def _alone(path: Path) -> BinaryIO:
    """Open a file, empty, for this process alone; waits for another one that writes it, until that has renamed it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        file = os.fdopen(fd, "r+b")
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.lstat(), os.fstat(fd)):
                os.ftruncate(fd, 0)
                return file
        file.close()


def write_json_atomic(path: StrPath, obj: object, mode: int = 0o600, *, durable: bool = True) -> None:
    """Write one JSON value as ``write_atomic`` does: sorted keys, indented by two, a newline at the end."""
    write_atomic(path, json.dumps(obj, indent=2, sort_keys=True) + "\n", mode, durable=durable)


def sync_dir(path: StrPath) -> None:
    """Make the names in a directory (a rename, a removal) survive a power cut."""
    _fsync(path, os.O_DIRECTORY)


def drop_cache(fd: int, offset: int = 0, length: int = 0) -> None:
    """Ask the kernel to forget the clean pages of an open file; ``length`` 0 means to the end."""
    # A file system without fadvise (EINVAL, ENOSYS) keeps no pages worth dropping.
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def sha256_file(path: StrPath, *, drop_cache: bool = True, progress: Callable[[int], None] | None = None) -> str:
    """Hash a file (SHA-256, 64 hex digits), read in 8-MiB blocks; ``progress`` gets the bytes of each block.

    With ``drop_cache`` it is read past the page cache: what is hashed is what the disk holds.
    """
    digest = hashlib.sha256()
    with Reader(path, drop=drop_cache, direct=drop_cache) as reader:
        for block in reader.blocks():
            digest.update(block)
            if progress:
                progress(len(block))
    return digest.hexdigest()


def nearest(path: StrPath) -> Path:
    """Return a path, or the nearest of its parents that is there: where it is, or will be."""
    return next(place for place in (Path(path), *Path(path).parents) if place.exists())


def free_bytes(path: StrPath) -> int:
    """Count the bytes that a writer can still take: ``f_bavail``, not ``f_bfree`` (which counts the root reserve)."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def require_space(directory: StrPath, needed: int, reserve: int = 0, reclaim: int = 0) -> None:
    """Raise LockstepError unless ``needed + reserve`` bytes fit; ``reclaim`` bytes are about to be given back."""
    free = free_bytes(directory)
    if needed + reserve > free + reclaim:
        raise LockstepError(
            f"not enough room in {os.fspath(directory)}",
            found=f"{free + reclaim:,} bytes available",
            expected=f"{needed:,} bytes to write + {reserve:,} kept free = {needed + reserve:,}"
            f" ({needed + reserve - free - reclaim:,} more)",
            next_step="free that much there, then run again; archive_engram.yml moves old shards to another host",
        )


@contextlib.contextmanager
def lock(path: StrPath, what: str = "") -> Iterator[None]:
    """Hold an exclusive lock on a file; raises LockstepError at once, naming the holder, when another process has it.

    The lock belongs to the open file, so it goes with its process however that ends, and it holds across containers
    that share the directory. The file itself stays: removing it would let two holders in.
    """
    try:
        # Behind a link it would be another file that is locked, and emptied.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _os_error(f"cannot lock {os.fspath(path)}", error) from error
    try:
        try:
            _lock(fd)
        except BlockingIOError as error:
            holder = os.read(fd, 4096).decode(errors="replace").strip()
            raise LockstepError(
                f"{os.fspath(path)} is locked",
                found=holder or "held by a process that left no name",
                next_step="wait for it to end; the lock goes with that process",
            ) from error
        since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        name = f"{what or 'lockstep'}, pid {os.getpid()} on {socket.gethostname()} since {since}\n"
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, name.encode(), 0)
        except OSError as error:
            raise _os_error(f"cannot lock {os.fspath(path)}", error) from error
        try:
            yield
        finally:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


@contextlib.contextmanager
def lock_directory(path: StrPath) -> Iterator[None]:
    """Have a directory to oneself for a moment, among those who ask; waits for the others."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def aligned(size: int) -> memoryview:
    """Make a buffer that begins on a page, as reading and writing past the page cache want it."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def holder(path: StrPath) -> str | None:
    """Name who holds the ``lock`` on a file now; None when nobody does, or there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _os_error(f"cannot look at {os.fspath(path)}", error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(fd, 4096).decode(errors="replace").strip() or "a process that left no name"
    finally:
        os.close(fd)
    return None


def _lock(fd: int) -> None:
    """Lock at once, or after a moment: ``holder`` holds each lock it looks at for as long as a look takes."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.05)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Slots:
    """Places of ``width`` bytes in a buffer, every ``stride`` bytes, that one system call fills 1024 at a time.

    With 256 in 264 bytes it lays table rows apart while the kernel copies them anyway. The kernel's list of places is
    made once: for 31 GB of rows, making it for each call costs as much as reading.
    """

    def __init__(self, buffer: memoryview, width: int, stride: int) -> None:
        self.buffer, self.width, self.stride = buffer, width, stride
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        places = [part for at in range(0, len(buffer), stride) for part in (start + at, width)]
        self._places = (ctypes.c_size_t * len(places))(*places)
        self._preadv = ctypes.CDLL(None, use_errno=True).preadv
        self._preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong]
        self._preadv.restype = ctypes.c_ssize_t

    def read(self, fd: int, first: int, count: int, offset: int) -> int:
        """Fill up to ``count`` slots from number ``first`` on, at most 1024; the bytes read, OSError."""
        place = ctypes.addressof(self._places) + first * 2 * ctypes.sizeof(ctypes.c_size_t)
        got = int(self._preadv(fd, place, count, offset))
        if got < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return got


class Reader:
    """Exact positioned reads of one file, whose pages are dropped as they are used.

    ``fill`` reads into one buffer, ``scatter`` into many ``Slots``. ``direct`` passes the page cache by where the
    file system can and ``fill`` is given whole pages.
    """

    def __init__(self, path: StrPath, *, drop: bool = True, direct: bool = False) -> None:
        self.path = os.fspath(path)
        self._drop = drop
        self._used: list[int] = []
        self._pending = 0
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _os_error(f"cannot read {self.path}", error) from error
        self.size = os.fstat(self._fd).st_size
        self._direct = _open_direct(self._fd, os.O_RDONLY) if direct else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop what was read and close."""
        self._forget()
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes at ``offset``."""
        data = bytearray(size)
        self.fill(memoryview(data), offset)
        return bytes(data)

    def blocks(self, start: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """Bytes [start, end) in 8-MiB blocks; while the caller uses one, the next is read.

        A block is valid until the one after the next is asked for, which is what ``write_blocks`` wants.
        """
        end = self.size if end is None else end
        buffers = [aligned(min(BLOCK, max(end - start, 1))) for _ in range(3)]
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read") as pool:
            reading: Future[None] | None = None
            block = memoryview(b"")
            for turn, offset in enumerate(range(start, end, BLOCK)):
                ready, following = reading, block
                block = buffers[turn % 3][: min(BLOCK, end - offset)]
                reading = pool.submit(self.fill, block, offset)
                if ready:
                    yield following
                reading.result()
            if reading:
                yield block

    def expect(self, offset: int, size: int) -> None:
        """Have the kernel fetch what is wanted next, and from now on nothing that was not asked for."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            if size > 0:
                os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def fill(self, view: memoryview, offset: int) -> None:
        """Fill the whole of ``view`` from ``offset`` on; LockstepError when the file ends before."""
        start, end = offset, offset + len(view)
        whole = len(view) - len(view) % ALIGN if self._direct is not None and offset % ALIGN == 0 else 0
        try:
            if self._direct is not None and whole:
                try:
                    self._read(self._direct, view[:whole], offset)
                    view, offset = view[whole:], offset + whole
                except OSError as error:
                    # A buffer that does not begin on a page, or a file system that cannot after all.
                    if error.errno != errno.EINVAL:
                        raise
            self._read(self._fd, view, offset)
        except OSError as error:
            raise _os_error(f"cannot read {self.path} at byte {offset}", error) from error
        self._note(start, end)

    def scatter(self, slots: Slots, count: int, offset: int) -> None:
        """Fill the first ``count`` slots one after the other with the file's bytes from ``offset`` on."""
        done, size = 0, count * slots.width
        while done < size:
            first, rest = divmod(done, slots.width)
            if rest:
                # The read before ended within a slot.
                at = first * slots.stride + rest
                self.fill(slots.buffer[at : at + slots.width - rest], offset + done)
                done += slots.width - rest
                continue
            try:
                got = slots.read(self._fd, first, min(IOV_MAX, count - first), offset + done)
            except OSError as error:
                raise _os_error(f"cannot read {self.path} at byte {offset + done}", error) from error
            self._some(got)
            done += got
        self._note(offset, offset + size)

    def _read(self, fd: int, view: memoryview, offset: int) -> None:
        while view:
            got = os.preadv(fd, [view], offset)
            self._some(got)
            offset += got
            view = view[got:]

    def _some(self, got: int) -> None:
        if not got:
            raise LockstepError(f"{self.path} ends too early", found=f"{self.size:,} bytes", expected="more")

    def _note(self, start: int, end: int) -> None:
        self._used = [min([start, *self._used]), max([end, *self._used])]
        self._pending += end - start
        if self._pending >= DROP_EVERY:
            self._forget()

    def _forget(self) -> None:
        if self._drop and self._used:
            low, high = self._used
            drop_cache(self._fd, low, high - low)
        self._used, self._pending = [], 0


def write_blocks(  # noqa: PLR0913 (what differs between those who write)
    path: StrPath,
    size: int,
    blocks: Callable[[int, str | None], Iterable[memoryview]],
    *,
    identity: object,
    readback: bool = False,
    progress: Callable[[str, int], None] | None = None,
    mode: int = 0o644,
    expected: Callable[[], str] | None = None,
    depth: int = 1,
    replace: bool = False,
) -> str:
    """Write a big file of exactly ``size`` bytes past the page cache and return its SHA-256 (64 hex digits).

    ``blocks(offset, sha256)`` is called once and gives the bytes from ``offset`` on; ``sha256`` is that of the bytes
    before it, None at 0. Threads hash and write up to ``depth`` blocks while it makes the next, so a block must stay as
    it is until so many more were given and another is asked for (1: the one after the next). Blocks of whole pages in
    ``aligned`` buffers pass the page cache by; others are written through it, and their pages dropped.

    The bytes go to ``<path>.partial``, reserved with posix_fallocate before the first one. Beside it
    ``<path>.partial.json`` = ``{"identity", "size", "marks": [[bytes, sha256 of as many], …]}`` says how far it is
    durable. A later call of equal size and ``identity`` (any JSON value) reads that back from the disk, and goes on
    behind the last mark that still holds; any other begins anew. At the end: fsync, rename, directory sync. Until then
    what stood under the name stays. With ``readback`` what is durable is read from the disk again while the rest is
    written, and the file gets its name only when its SHA-256 as read is the one of what was written.

    ``expected`` is asked, after the last block, for the SHA-256 that the whole must have to get its name. Without
    ``replace`` another file that has come to stand under the name meanwhile is an error, and stays.

    ``progress(stage, count)`` counts bytes as they are gone through, stage ``resume`` (read back of an earlier run),
    ``write`` or ``verify`` (readback). What is durable stays behind an interruption or an OSError for the next run; an
    error that no repetition mends removes it. Raises LockstepError, also while another process writes the same file.
    """
    target = Path(path)
    tell = progress or (lambda _stage, _count: None)
    try:
        with _Partial(target, size, identity, mode) as partial:
            digest = partial.fill(blocks, tell, readback=readback, depth=depth)
            if expected and (wanted := expected()) != digest:
                raise LockstepError(
                    f"{target} did not arrive as it was sent", found=f"SHA-256 {digest}", expected=wanted
                )
            if not replace and os.path.lexists(target):
                raise LockstepError(
                    f"{target} is there, and was not when this began",
                    found="a file that somebody else put there",
                    expected="nothing under that name",
                    next_step="find out who writes there, and look at that file; it was not touched",
                )
            partial.path.replace(target)
            sync_dir(target.parent)
            partial.journal.unlink(missing_ok=True)
    except OSError as error:
        raise _os_error(f"cannot write {target}", error) from error
    return digest


class _Partial:
    """A file on its way, locked against other writers, and the journal of what of it is durable."""

    def __init__(self, target: Path, size: int, identity: object, mode: int) -> None:
        self.path, self.journal = Path(f"{target}{PARTIAL}"), Path(f"{target}{JOURNAL}")
        self._target, self._size = target, size
        self._identity: object = json.loads(json.dumps(identity))
        self._marks: list[list[Any]] = []
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        self._direct: int | None = None
        try:
            self._own()
            os.fchmod(self._fd, mode)
            self._direct = _open_direct(self._fd, os.O_WRONLY)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        final = isinstance(error, LockstepError) and not isinstance(error.__cause__, OSError)
        if error is not None and (final or not self._marks):
            discard_partial(self._target)
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)

    def fill(
        self,
        blocks: Callable[[int, str | None], Iterable[memoryview]],
        tell: Callable[[str, int], None],
        *,
        readback: bool,
        depth: int,
    ) -> str:
        """Write what is not there yet, make it durable, and return the SHA-256 of the whole."""
        digest, done = self._resume(tell)
        if self._size:
            os.posix_fallocate(self._fd, 0, self._size)
        with contextlib.ExitStack() as stack:
            back = None
            if readback:
                back = stack.enter_context(_ReadBack(self._target, self.path, digest.copy(), done, tell))
            with _Flow(self, digest, done, depth, back) as flow:
                for block in blocks(done, digest.hexdigest() if done else None):
                    if flow.done + block.nbytes > self._size:
                        raise LockstepError(
                            f"{self._target} would grow past its size", expected=f"{self._size:,} bytes"
                        )
                    flow.give(block)
                    tell("write", block.nbytes)
                flow.end()
            if flow.done != self._size:
                raise LockstepError(
                    f"{self._target} came out short", found=f"{flow.done:,} bytes", expected=f"{self._size:,} bytes"
                )
            os.fsync(self._fd)
            drop_cache(self._fd)
            if back:
                back.finish(flow.done, digest.hexdigest())
        return str(digest.hexdigest())

    def write(self, block: memoryview, offset: int) -> None:
        """Write a block, past the page cache as far as it is whole pages."""
        view = block.cast("B")
        whole = len(view) - len(view) % ALIGN if self._direct is not None and offset % ALIGN == 0 else 0
        if self._direct is not None and whole:
            try:
                _write_all(self._direct, view[:whole], offset)
            except OSError as error:
                # A buffer or a file system that cannot; what was written is written again.
                if error.errno != errno.EINVAL:
                    raise
                whole = 0
        _write_all(self._fd, view[whole:], offset + whole)

    def mark(self, done: int, prefix: Future[str], writing: Iterable[Future[None]]) -> None:
        """Make what is written durable, and only then say so."""
        for task in writing:
            task.result()
        digest = prefix.result()
        os.fdatasync(self._fd)
        drop_cache(self._fd)
        self._marks.append([done, digest])
        said = {"identity": self._identity, "size": self._size, "marks": self._marks}
        write_json_atomic(self.journal, said, 0o644, durable=False)

    def _own(self) -> None:
        """Lock the file; LockstepError when another process writes it or has just renamed it, or it has two names."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            named = self.path.stat()
        except (BlockingIOError, FileNotFoundError):
            named = None
        if named is None or not os.path.samestat(named, os.fstat(self._fd)):
            raise LockstepError(
                f"{self.path} is being written by another process",
                found="its lock is held",
                next_step="wait for it to end; its lock goes with it",
            )
        if os.fstat(self._fd).st_nlink > 1:
            raise LockstepError(
                f"{self.path} is the same file as another one",
                found="a second name for it",
                expected="a file of its own",
                next_step="remove that name",
            )

    def _resume(self, tell: Callable[[str, int], None]) -> tuple[Any, int]:
        """Return the hash and the bytes of what an earlier run left and the disk still holds; else make it empty."""
        digest, done = hashlib.sha256(), 0
        with Reader(self.path, direct=True) as reader:
            for end, expected in self._left(reader.size):
                further = digest.copy()
                for block in reader.blocks(done, end):
                    further.update(block)
                    tell("resume", block.nbytes)
                if further.hexdigest() != expected:
                    break
                digest, done = further, end
                self._marks.append([end, expected])
        if not self._marks:
            self.journal.unlink(missing_ok=True)
            os.ftruncate(self._fd, 0)
        return digest, done

    def _left(self, size: int) -> list[tuple[int, str]]:
        """Read the journal's marks; none when it belongs to another file or cannot be read."""
        try:
            said = read_json(self.journal)
            if not isinstance(said, dict) or size != self._size:
                return []
            if (said["identity"], said["size"]) != (self._identity, self._size):
                return []
            marks = [(int(end), str(digest)) for end, digest in said["marks"]]
        except (LockstepError, KeyError, TypeError, ValueError):
            return []
        ends = [0, *(end for end, _ in marks)]
        good = all(low < high <= size and high % ALIGN == 0 for low, high in pairwise(ends))
        return marks if good else []


class _Flow:
    """Hashes and writes up to ``depth`` blocks, and marks what is written, each in threads of its own."""

    def __init__(self, partial: _Partial, digest: Any, done: int, depth: int, back: _ReadBack | None) -> None:  # noqa: ANN401 (hashlib's type has no public name)
        self._partial, self._digest, self._depth, self._back = partial, digest, depth, back
        self.done = self._marked = done
        self._flight: deque[tuple[Future[None], Future[None]]] = deque()
        # One thread hashes, for the order counts. Two write, so that a disk is not idle between two blocks.
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="write-hash")
        self._writer = ThreadPoolExecutor(max_workers=2, thread_name_prefix="write")
        self._marker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="write-mark")
        self._marking = self._marker.submit(lambda: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in (self._hasher, self._writer, self._marker):
            pool.shutdown()

    def give(self, block: memoryview) -> None:
        """Take a block, when there is room in the flow for it; raises what went wrong with an earlier one."""
        while len(self._flight) >= self._depth:
            self._land()
        hashing = self._hasher.submit(self._digest.update, block)
        self._flight.append((hashing, self._writer.submit(self._partial.write, block, self.done)))
        self.done += block.nbytes
        if self.done - self._marked >= MARK_EVERY and self.done % ALIGN == 0:
            self._mark()
        if self._back:
            self._back.look()

    def end(self) -> None:
        """Wait for all that was given."""
        while self._flight:
            self._land()
        self._marking.result()

    def _land(self) -> None:
        for task in self._flight.popleft():
            task.result()

    def _mark(self) -> None:
        self._marking.result()
        # Asked behind the hashing of the last block and before that of the next.
        prefix: Future[str] = self._hasher.submit(self._digest.hexdigest)
        self._marking = self._marker.submit(
            self._partial.mark, self.done, prefix, [writing for _, writing in self._flight]
        )
        self._marked = self.done
        if self._back:
            self._back.follow(self.done, prefix, self._marking)


class _ReadBack:
    """Reads what is durable of a file from the disk again, beside its writing, and holds that against what was written.

    ``digest`` is that of the first ``done`` bytes, which have been read from the disk already.
    """

    def __init__(self, target: Path, path: Path, digest: Any, done: int, tell: Callable[[str, int], None]) -> None:  # noqa: ANN401 (hashlib's type has no public name)
        self._target, self._digest, self._done, self._tell = target, digest, done, tell
        self._reader = Reader(path, direct=True)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verify")
        self._last = self._pool.submit(lambda: None)
        self._wrong: LockstepError | None = None
        self._read = self._told = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def follow(self, end: int, prefix: Future[str], durable: Future[None]) -> None:
        """Read on to ``end`` as soon as it is ``durable``; the SHA-256 of all before it has to be ``prefix``."""

        def check() -> None:
            durable.result()
            self._check(end, prefix.result())

        self._last = self._pool.submit(check)

    def look(self) -> None:
        """Tell how far it is; raises what was found wrong."""
        self._tell("verify", (now := self._read) - self._told)
        self._told = now
        if self._last.done():
            self._last.result()
        if self._wrong:
            raise self._wrong

    def finish(self, end: int, expected: str) -> None:
        """Read the rest, which is durable, and wait for the end of it."""
        self._last = self._pool.submit(self._check, end, expected)
        while not self._last.done():
            wait([self._last], 0.2)
            self.look()
        self.look()

    def _check(self, end: int, expected: str) -> None:
        for block in self._reader.blocks(self._done, end):
            self._digest.update(block)
            self._read += block.nbytes
        self._done = end
        if self._digest.hexdigest() != expected and not self._wrong:
            self._wrong = LockstepError(
                f"{self._target} does not read back as it was written",
                found=f"SHA-256 {self._digest.hexdigest()} of its first {end:,} bytes",
                expected=expected,
                next_step="run again; if it happens again, the disk or the memory of this host is failing",
            )


def discard_partial(path: StrPath) -> None:
    """Remove what an interrupted ``write_blocks`` of this file left, if anything."""
    journal = Path(f"{os.fspath(path)}{JOURNAL}")
    for left in (_aside(journal), journal, Path(f"{os.fspath(path)}{PARTIAL}")):
        left.unlink(missing_ok=True)


def look(path: StrPath) -> dict[str, int] | None:
    """Return ``{"bytes", "inode", "mtime_ns"}`` of a regular file, None when there is none; else LockstepError."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _os_error(f"cannot look at {os.fspath(path)}", error) from error
    if not stat.S_ISREG(found.st_mode):
        raise _no_file(path, found.st_mode)
    return {"bytes": found.st_size, "inode": found.st_ino, "mtime_ns": found.st_mtime_ns}


def stamp(path: StrPath) -> dict[str, int]:
    """What changes when a file, or the file that a link leads to, is written to or replaced."""
    try:
        found = Path(path).stat()
    except OSError as error:
        raise _os_error(f"cannot look at {os.fspath(path)}", error) from error
    return {
        "bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
    }


def allocated(path: StrPath) -> int:
    """Count the bytes that a file takes on its disk; a missing one takes none."""
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def hole(path: StrPath, start: int = 0) -> int | None:
    """Find the first byte from ``start`` on that nothing was ever written to; None when there is none.

    Reserved but unwritten room counts, as it reads as zeros too. A file system that knows no holes has none.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found, size = os.lseek(fd, start, os.SEEK_HOLE), os.fstat(fd).st_size
    except OSError:
        return None
    finally:
        os.close(fd)
    return found if found < size else None


def set_aside(path: StrPath, stamp: str) -> str:
    """Rename a file to ``<path>.aside-<stamp>`` (never onto another file) and return the new path."""
    base = f"{os.fspath(path)}.aside-{stamp}"
    for number in range(1, 1000):
        new = base if number == 1 else f"{base}.{number}"
        if not os.path.lexists(new):
            Path(path).rename(new)
            sync_dir(Path(new).parent)
            return new
    raise LockstepError(f"too many files named {base}*", next_step="look at them and remove what is not needed")


def tree(directory: StrPath) -> list[tuple[str, int, int]]:
    """List the regular files below a directory as (relative path, bytes, mtime in ns); a missing one is empty."""
    found = []
    for place, _, names in os.walk(directory, onerror=_not_missing):
        for path in (Path(place, name) for name in names):
            seen = path.lstat()
            if stat.S_ISREG(seen.st_mode):
                found.append((str(path.relative_to(directory)), seen.st_size, seen.st_mtime_ns))
    return sorted(found)


def names(directory: StrPath) -> list[str]:
    """List the names in a directory, sorted."""
    try:
        return sorted(path.name for path in Path(directory).iterdir())
    except OSError as error:
        raise _os_error(f"cannot list {os.fspath(directory)}", error) from error


def walk(root: StrPath, depth: int) -> Iterator[tuple[str, list[str]]]:
    """Go through the directories down to ``depth`` below a root: (path, names of what is no directory).

    Hidden ones, links and what may not be read are passed over.
    """
    for place, below, found in os.walk(root):
        level = len(Path(place).relative_to(root).parts)
        below[:] = sorted(name for name in below if level < depth and not name.startswith("."))
        yield place, found


def null() -> int:
    """Open what takes everything and gives nothing; a file descriptor."""
    return os.open(os.devnull, os.O_RDWR)


def make_directory(path: StrPath, mode: int = 0o755) -> None:
    """Have a directory and its parents, durably."""
    missing = [place for place in (Path(path), *Path(path).parents) if not place.exists()]
    try:
        Path(path).mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise _os_error(f"cannot make {os.fspath(path)}", error) from error
    for place in missing:
        sync_dir(place.parent)


def set_mtime(path: StrPath, mtime_ns: int) -> None:
    """Give a file its modification time, durably; its manifest vouches for it by that time."""
    if Path(path).stat().st_mtime_ns != mtime_ns:
        os.utime(path, ns=(mtime_ns, mtime_ns))
        sync(path)


def sync(path: StrPath) -> None:
    """Make a file's content and its name durable, whoever wrote them."""
    _fsync(path)
    sync_dir(Path(path).parent)


def mode(path: StrPath) -> int:
    """Return a file's permission bits."""
    try:
        return stat.S_IMODE(Path(path).stat().st_mode)
    except OSError as error:
        raise _os_error(f"cannot look at {os.fspath(path)}", error) from error


def move(source: StrPath, target: StrPath) -> None:
    """Rename a file within its file system, making the target's directories; never onto another file."""
    if os.path.lexists(target):
        raise LockstepError(f"cannot move {os.fspath(source)}", found=f"{os.fspath(target)} is there already")
    try:
        Path(target).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(source).rename(target)
    except OSError as error:
        raise _os_error(f"cannot move {os.fspath(source)} to {os.fspath(target)}", error) from error
    sync_dir(Path(target).parent)
    sync_dir(Path(source).parent)


def remove(path: StrPath) -> None:
    """Remove a file for good."""
    try:
        Path(path).unlink()
    except OSError as error:
        raise _os_error(f"cannot remove {os.fspath(path)}", error) from error
    sync_dir(Path(path).parent)


def discard(path: StrPath) -> None:
    """Remove a file that is worth nothing, if there is one."""
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise _os_error(f"cannot remove {os.fspath(path)}", error) from error


def _no_file(path: StrPath, mode: int) -> LockstepError:
    return LockstepError(
        f"{os.fspath(path)} is no regular file",
        found=stat.filemode(mode),
        expected="the file itself, and no link",
        next_step="look at it, and move it away or put the file in its place",
    )


def _not_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise _os_error(f"cannot list {error.filename}", error) from error


def _open_direct(fd: int, flags: int) -> int | None:
    """Open the same file again, past the page cache; None where the file system cannot."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def _fsync(path: StrPath, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]


def _os_error(message: str, error: OSError) -> LockstepError:
    hints = {
        errno.ENOSPC: "free room on this file system, then run again",
        errno.EDQUOT: "free room in this user's quota, then run again",
        errno.EACCES: "run as a user that may, or correct the file's mode",
        errno.EROFS: "the file system is mounted read-only",
        errno.EFBIG: "this file system takes no file of that size (FAT32: 4 GiB); use one with exFAT or ext4",
        errno.EIO: "see dmesg: the disk, or the way to it, is failing",
    }
    return LockstepError(message, found=os.strerror(error.errno or 0), next_step=hints.get(error.errno or 0))
