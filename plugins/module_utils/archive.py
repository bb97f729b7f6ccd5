"""Moving shards to another host or directory, and back: the protocol of the two sides, their lists, their verdicts.

A sender and a receiver hold one key and one connection. The bytes go once; both sides hash them on their way. The
receiver writes aside, syncs, reads the disk back past the page cache, compares with the sender's hash, and only then
gives the file its name and lists it in ``SHA256SUMS``. Only after that verdict, and only while the file is still the
one that was read, does the sender list it in ``MOVED.txt`` and remove it. Cut anywhere, the next run goes on there.

The connection (room ``wire``) is not encrypted: the fabric is the fleet's own, and a shard is no secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from . import checksums, engram, files, wire
from .errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    # tell(file, stage, bytes): stage "compare" (own bytes hashed again), "send", "receive" or "verify" (read back).
    Tell = Callable[[str, str, int], None]

SUMS, MOVED = "SHA256SUMS", "MOVED.txt"
SHARD = re.compile(r"engram-l(?P<layer>\d+)-r(?P<rank>\d+)of(?P<tp>\d+)\.bin")
# A byte of it may be six in a word.
_MAX_MANIFEST = wire.MAX_WORD // 8
# The file by which either side sees whether both directories are one.
_MARK = re.compile(r"\.lockstep-[0-9a-f]{32}")
_RECORD = re.compile(
    r"# moved (?P<when>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) (?:to|from) (?P<place>.+), (?P<bytes>\d{1,19}) bytes"
)
# A name has at most 255 bytes, and the longest that is written beside a file is ``.<name>.manifest.json.tmp``.
_MAX_NAME = 255 - len(f".{engram.MANIFEST_SUFFIX}.tmp")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Item(TypedDict):
    """A file that is to go: its name, and the file that it is as long as none of the numbers changes."""

    file: str
    bytes: int
    inode: int
    mtime_ns: int
    ctime_ns: int


class Shard(Item):
    """A shard as it lies in a directory. What its name says, and what its header and manifest say (None: nothing)."""

    layer: int | None
    rank: int | None
    tp: int | None
    split: str | None
    rows: list[int] | None
    sha256: str | None
    checkpoint: dict[str, Any] | None
    revision: str | None  # of the checkpoint, by its header
    packed: str | None
    foreign: str | None  # why its manifest is that of another shard


class Step(TypedDict):
    """What is done with a file: ``send`` it, ``compare`` it with what is there already, or ``keep``."""

    file: str
    bytes: int
    action: str


class Done(TypedDict):
    """What was done with a file: ``sent`` or ``compared``, whether it was removed at the source, and how fast."""

    file: str
    action: str
    bytes: int
    sha256: str
    removed: bool
    seconds: float
    mb_s: float


# --- places -----------------------------------------------------------------------------------------------------------


def parse_place(text: str, host: str, what: str) -> tuple[str, str]:
    """Read ``host:/directory`` or ``/directory`` (then on ``host``) as (host, directory). LockstepError otherwise."""
    name, colon, directory = text.partition(":")
    if text.startswith("/") or not colon:
        name, directory = host, text
    odd = any(char < " " or char == "\x7f" for char in text) or ".." in directory.split("/")
    if not directory.startswith("/") or not name or odd:
        raise LockstepError(
            f"{what} is no directory of a host",
            host=host,
            found=repr(text),
            expected="host:/an/absolute/directory, or /an/absolute/directory of this host, without ..",
            next_step=f"-e {what}=host:/directory",
        )
    return name, os.path.normpath(directory)


def place_of(directory: str) -> dict[str, Any]:
    """Say which directory this is, whatever it is called: the running kernel's id, device and inode, its real path."""
    kernel = files.read_bytes("/proc/sys/kernel/random/boot_id", 100).decode().strip()
    real = os.path.realpath(directory)
    found = Path(real).stat() if Path(real).is_dir() else None
    return {"kernel": kernel, "real": real, "number": [found.st_dev, found.st_ino] if found else None}


def check_places(source: Mapping[str, Any], target: Mapping[str, Any], *, one_host: bool) -> None:
    """Raise LockstepError when both (``place_of``) are one directory, or the target lies inside the source."""
    same = source["kernel"] == target["kernel"] and source["number"] == target["number"] is not None
    if same or (one_host and source["real"] == target["real"]):
        raise _one_directory(f"{source['real']} and {target['real']}")
    if one_host and Path(source["real"]) in Path(target["real"]).parents:
        raise LockstepError(
            "the destination lies inside the source",
            found=f"{target['real']} in {source['real']}",
            expected="a directory outside of it",
            next_step="name another directory to archive to",
        )


def _one_directory(found: str) -> LockstepError:
    return LockstepError(
        "source and destination are one directory",
        found=found,
        expected="two directories",
        next_step="name another directory to archive to; nothing was removed",
    )


@contextlib.contextmanager
def _marked(directory: str) -> Iterator[str]:
    """Have a file of a new name in a directory, which has to be there until the end. What a kill left goes."""
    for name in files.names(directory):
        if _MARK.fullmatch(name) and not files.holder(Path(directory, name)):
            files.discard(Path(directory, name))
    path = Path(directory, f".lockstep-{os.urandom(16).hex()}")
    try:
        with files.lock(path, "a mark of this directory"):
            yield path.name
            files.remove(path)
    finally:
        with contextlib.suppress(LockstepError):
            files.discard(path)


def _not_here(directory: str, mark: str) -> None:
    """Raise LockstepError when the other side's file is in this directory: both are one, by whatever mount."""
    if not _MARK.fullmatch(mark):
        raise wire.broken(repr(mark), "the name of a mark")
    if os.path.lexists(path := Path(directory, mark)):
        raise _one_directory(f"{path}, which the other side made in its own")


# --- lists ------------------------------------------------------------------------------------------------------------


def records(text: str) -> dict[str, dict[str, Any]]:
    """Read who was moved when and where, ``{file: {"when", "place", "bytes", "sha256"}}``, from either list.

    A record is a comment and, under it, the file's line as ``sha256sum`` writes it, so both lists can be given to
    ``sha256sum -c``. Lines of other kinds are skipped; the last record of a file counts.
    """
    found: dict[str, dict[str, Any]] = {}
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    for comment, line in pairwise(lines):
        match = _RECORD.fullmatch(comment)
        entries = checksums.parse(line)["entries"]
        if match and entries:
            entry = entries[0]
            found[entry["name"]] = {
                "when": match["when"],
                "place": match["place"],
                "bytes": int(match["bytes"]),
                "sha256": entry["sha256"],
            }
    return found


def with_record(text: str, way: str, place: str, item: Mapping[str, Any], sha256: str) -> str:
    """Add a file's record to a list; what stands there stays. ``way`` is ``to`` or ``from``; the same one once only."""
    known = records(text).get(item["file"])
    if known and (known["place"], known["sha256"]) == (place, sha256):
        return text
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    line = checksums.format_lines({item["file"]: sha256})
    newline = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{newline}# moved {now} {way} {place}, {item['bytes']} bytes\n{line}"


def read_list(directory: files.StrPath, name: str) -> str:
    """Read a list of a directory; empty when there is none. Bytes that are no UTF-8 come back as they were."""
    path = Path(directory, name)
    return files.read_bytes(path).decode("utf-8", "surrogateescape") if files.look(path) else ""


def write_list(directory: files.StrPath, name: str, text: str) -> None:
    """Replace a list in one step."""
    path = Path(directory, name)
    mode = files.mode(path) if files.look(path) else 0o644
    files.write_atomic(path, text.encode("utf-8", "surrogateescape"), mode)


def listed(directory: files.StrPath) -> dict[str, str]:
    """Read ``{file: sha256}`` of a directory's SHA256SUMS. LockstepError for a list that cannot be trusted."""
    path = Path(directory, SUMS)
    found: dict[str, str] = {}
    bad: list[int] = []
    for number, line in enumerate(read_list(directory, SUMS).split("\n"), start=1):
        listing = checksums.parse(line)
        second = any(found.setdefault(one["path"], one["sha256"]) != one["sha256"] for one in listing["entries"])
        if second or listing["bad_lines"]:
            bad.append(number)
    if bad:
        raise LockstepError(
            f"{path} cannot be trusted",
            found=f"no checksum, or a second one of a file, in line {', '.join(map(str, bad))}",
            expected="lines of sha256sum",
            next_step="look at that list and correct it; nothing was moved",
        )
    return found


# --- what lies there --------------------------------------------------------------------------------------------------


def item_of(path: files.StrPath) -> Item:
    """Say which file this is. LockstepError when it is missing or no regular file (a symbolic link, say)."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise LockstepError(f"cannot look at {os.fspath(path)}", found=os.strerror(error.errno or 0)) from error
    if not stat.S_ISREG(found.st_mode):
        raise LockstepError(
            f"{os.fspath(path)} is no regular file",
            found=stat.filemode(found.st_mode),
            next_step="name the directory where the file itself lies",
        )
    return {
        "file": Path(path).name,
        "bytes": found.st_size,
        "inode": found.st_ino,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def shard_of(path: files.StrPath) -> Shard:
    """Look at one file: what its name, its header and its manifest say. Reads no row."""
    item = item_of(path)
    name = SHARD.fullmatch(item["file"])
    shard: Shard = {
        **item,
        "layer": int(name["layer"]) if name else None,
        "rank": int(name["rank"]) if name else None,
        "tp": int(name["tp"]) if name else None,
        "split": None,
        "rows": None,
        "sha256": None,
        "checkpoint": None,
        "revision": None,
        "packed": None,
        "foreign": None,
    }
    manifest = engram.read_manifest(path) or {}
    own: Mapping[str, Any] = {}
    with contextlib.suppress(LockstepError):
        header = engram.read_header(path)
        shard["rows"], own = header["rows"], header["own"]
    if name:
        mine = {"layer": shard["layer"], "rank": shard["rank"], "tp": shard["tp"], "rows": shard["rows"]}
        known = {key: value for key, value in mine.items() if value is not None and key in manifest}
        other = [f"{key} {manifest[key]}, not {value}" for key, value in known.items() if manifest[key] != value]
        shard["foreign"] = f"its manifest is of another shard: {', '.join(other)}" if other else None
        with contextlib.suppress(ValueError, OverflowError, OSError):  # a year that the calendar does not have
            shard["packed"] = datetime.fromtimestamp(item["mtime_ns"] / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    split = own.get("split") or manifest.get("split")
    shard["split"] = split if isinstance(split, str) else None
    if manifest.get("mtime_ns") == item["mtime_ns"] and _SHA256.fullmatch(str(manifest.get("sha256"))):
        shard["sha256"] = manifest["sha256"]
    if isinstance(manifest.get("checkpoint"), dict):
        shard["checkpoint"] = manifest["checkpoint"]
    shard["revision"] = own.get("checkpoint")
    return shard


def look(directory: str, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Say what lies in a directory that is to be archived, or restored from.

    ``{"place", "shards": [Shard], "sums": {file: sha256}, "moved": records}``. ``names`` are the files asked for;
    without them all that are named as shards. A name that is not there is left out: it may have been moved.
    """
    place = place_of(directory)
    if place["number"] is None:
        if Path(directory).exists():
            raise LockstepError(f"{directory} is no directory", next_step="name the directory that holds the shards")
        return {"place": place, "shards": [], "sums": {}, "moved": {}}
    there = files.names(directory)
    wanted = [name for name in there if SHARD.fullmatch(name)] if names is None else [n for n in names if n in there]
    return {
        "place": place,
        "shards": [shard_of(Path(directory, name)) for name in wanted],
        "sums": listed(directory),
        "moved": records(read_list(directory, MOVED)),
    }


def steps(directory: str, items: Sequence[Mapping[str, Any]], reserve: int) -> list[Step]:
    """Decide at the destination what each file needs, by looking only. LockstepError when it cannot end well."""
    place = Path(directory)
    above = files.nearest(place)
    if not above.is_dir():
        raise LockstepError(
            f"{above} is no directory", found="a file of that name", next_step="name another directory to archive to"
        )
    sums = listed(directory) if above == place else {}
    plan: list[Step] = []
    for item in items:
        path = place / item["file"]
        there = files.look(path)
        action = "compare" if there else "send"
        if there and there["bytes"] != item["bytes"]:
            raise another_file(path, f"{there['bytes']:,} bytes", f"{item['bytes']:,} bytes")
        if not there and sums.get(item["file"], item.get("sha256")) != item.get("sha256"):
            raise LockstepError(
                f"{place / SUMS} lists {item['file']}, which is not there",
                found=f"SHA-256 {sums[item['file']]}",
                expected="no line for a file that is yet to come",
                next_step="find out where that file went, then take its line out, or archive to another place",
            )
        if there and item.get("sha256") and sums.get(item["file"], item["sha256"]) != item["sha256"]:
            raise another_file(path, f"SHA-256 {sums[item['file']]}, by {SUMS}", str(item["sha256"]))
        plan.append({"file": item["file"], "bytes": item["bytes"], "action": action})
    sending = [step for step in plan if step["action"] == "send"]
    if sending:
        reclaim = sum(files.allocated(f"{place / step['file']}{files.PARTIAL}") for step in sending)
        files.require_space(above, sum(step["bytes"] for step in sending), reserve, reclaim)
    return plan


def check_names(names: Iterable[str]) -> None:
    """Raise LockstepError for a name that is no file to move: one of the archive's own, or too long to be written."""
    for name in names:
        own = name in (SUMS, MOVED) or name.endswith(engram.MANIFEST_SUFFIX) or _MARK.fullmatch(name)
        if own or files.PARTIAL in name:
            raise LockstepError(
                f"{name} is not moved by itself",
                found=f"{name} in archive_files",
                expected="shards and other files; a manifest goes along with its shard, lists and parts of files stay",
                next_step="leave it out of archive_files",
            )
        if len(os.fsencode(name)) > _MAX_NAME:
            raise LockstepError(
                f"the name {name!r} is too long",
                found=f"{len(os.fsencode(name))} bytes",
                expected=f"at most {_MAX_NAME}, as longer ones are written beside it on its way",
                next_step="rename that file, or leave it out of archive_files",
            )


def another_file(path: files.StrPath, found: str, expected: str) -> LockstepError:
    """Make the error for a file of the same name that is not the same file."""
    return LockstepError(
        f"{os.fspath(path)} is another file of that name",
        found=found,
        expected=expected,
        next_step="look at both; archive to another directory, or move that file away. Nothing was removed",
    )


def misfit(shard: Mapping[str, Any], serves: Mapping[str, Any], expected: Mapping[str, Any] | None) -> list[str]:
    """Say why a shard is not what a rank serves; empty when it is.

    ``serves`` = ``{"tp", "rank", "split"}`` of the rank, ``expected`` its shard of this name, of
    ``engram.expected_shards``; None when it has none.
    """
    checks = [("TP", shard["tp"], int(serves["tp"])), ("rank", shard["rank"], int(serves["rank"]))]
    checks.append(("split", shard["split"] or serves["split"], serves["split"]))
    if expected:
        checks += [("rows", shard["rows"], expected["rows"]), ("size", shard["bytes"], expected["bytes"])]
    wrong = [f"{what} {found}, not {wanted}" for what, found, wanted in checks if found != wanted]
    if shard.get("foreign"):
        wrong.append(shard["foreign"])
    return wrong if wrong or expected else [f"layer {shard['layer']} has no table"]


# --- the two sides ----------------------------------------------------------------------------------------------------


def send(
    channel: wire.Channel,
    directory: str,
    items: Sequence[Mapping[str, Any]],
    *,
    host: str,
    target: str,
    remove: bool,
    tell: Tell,
) -> Iterator[Done]:
    """Send files one after the other, and remove each at its verdict where ``remove`` says so; yields what was done.

    ``items`` are as ``item_of`` saw them, ``host`` is this one, ``target`` is ``host:directory`` for MOVED.txt. Raises
    LockstepError; the file that it was at stays.
    """
    try:
        _apart(channel, directory, remove=remove)
        for item in items:
            yield _send_one(channel, Path(directory, item["file"]), item, target=target, remove=remove, tell=tell)
        channel.say("bye")
    except BaseException as error:
        if isinstance(error, LockstepError):
            error.host = error.host or host
        channel.fail(error)
        raise


def receive(
    channel: wire.Channel, directory: str, items: Sequence[Mapping[str, Any]], *, host: str, origin: str, tell: Tell
) -> Iterator[str]:
    """Receive the files that are expected, each proven before it has its name; yields the names.

    ``items`` name what may come, with sizes; ``origin`` is ``host:directory`` for SHA256SUMS, empty to leave that list
    alone. Raises LockstepError; what was written of the file that it was at stays for the next run to go on.
    """
    try:
        files.make_directory(directory)
        with _marked(directory) as mark:
            channel.say("mark", file=mark)
            theirs = channel.hear("mark")["file"]
        if theirs is not None:
            _not_here(directory, theirs)
        channel.say("apart")
        expected = {item["file"]: item for item in items}
        for _ in items:
            offer = channel.hear("file")
            item = _agreed(expected, offer)
            _receive_one(channel, Path(directory, offer["file"]), offer, item.get("sha256"), origin, tell)
            yield offer["file"]
        channel.hear("bye")
    except BaseException as error:
        if isinstance(error, LockstepError):
            error.host = error.host or host
        channel.fail(error)
        raise


def _apart(channel: wire.Channel, directory: str, *, remove: bool) -> None:
    """Raise LockstepError unless neither side sees what the other one makes in its directory.

    Device and inode do not tell it: one directory may be mounted twice, on two hosts or on one.
    """
    _not_here(directory, channel.hear("mark")["file"])
    with _marked(directory) if remove else contextlib.nullcontext() as mark:
        channel.say("mark", file=mark)
        channel.hear("apart")


def _agreed(expected: dict[str, Mapping[str, Any]], offer: Mapping[str, Any]) -> Mapping[str, Any]:
    item = expected.pop(offer["file"], None)
    if item is None or item["bytes"] != offer["bytes"]:
        raise wire.broken(f"{offer['file']!r}, {offer['bytes']:,} bytes", "one of the agreed files")
    return item


def _send_one(
    channel: wire.Channel, path: Path, item: Mapping[str, Any], *, target: str, remove: bool, tell: Tell
) -> Done:
    name, size = path.name, int(item["bytes"])
    started = time.monotonic()
    before = item_of(path)
    if any(before[key] != item[key] for key in ("bytes", "inode", "mtime_ns")):
        raise _changed(path, item, before)
    manifest = _manifest(path)
    digest = hashlib.sha256()
    with files.Reader(path, direct=True) as reader:
        channel.say("file", **before, manifest=manifest)
        go = channel.hear("go", tell=lambda stage, count: tell(name, stage, count))
        for block in reader.blocks(0, go["offset"]):
            digest.update(block)
            tell(name, "compare", block.nbytes)
            channel.alive()
        if go["sha256"] not in (None, digest.hexdigest()):
            raise LockstepError(
                f"{path} no longer begins as it did when its first part was sent",
                found=f"SHA-256 {digest.hexdigest()} of its first {go['offset']:,} bytes",
                expected=f"{go['sha256']}, as the other side holds it",
                next_step="run again: it begins anew; if it happens again, a disk or a memory is failing",
            )
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash") as pool:
            hashing = pool.submit(lambda: None)
            for block in reader.blocks(go["offset"], size):
                hashing.result()
                hashing = pool.submit(digest.update, block)
                channel.give(block)
                tell(name, "send", block.nbytes)
            hashing.result()
    if (now := item_of(path)) != before:
        raise _changed(path, before, now)
    channel.say("end", sha256=digest.hexdigest())
    kept = channel.hear("kept", tell=lambda stage, count: tell(name, stage, count))
    if kept["sha256"] != digest.hexdigest():
        raise wire.broken(f"SHA-256 {kept['sha256']}", digest.hexdigest())
    if remove:
        tell(name, "remove", 0)
        _retire(path, before, target, digest.hexdigest())
    seconds = time.monotonic() - started
    return {
        "file": name,
        "action": kept["action"],
        "bytes": size,
        "sha256": digest.hexdigest(),
        "removed": remove,
        "seconds": round(seconds, 1),
        "mb_s": round(size / 1e6 / max(seconds, 0.001), 1),
    }


def _manifest(path: Path) -> str | None:
    """Read a shard's manifest as it is, whatever is in it; None when there is none."""
    manifest = engram.manifest_path(path)
    if not files.look(manifest):
        return None
    return files.read_bytes(manifest, _MAX_MANIFEST).decode("utf-8", "surrogateescape")


def _retire(path: Path, before: Item, target: str, sha256: str) -> None:
    """Say where a file went, then remove it, as long as it is the one that was sent. The shard itself goes last."""
    if (now := item_of(path)) != before:
        raise _changed(path, before, now)
    with files.lock_directory(path.parent):
        write_list(path.parent, MOVED, with_record(read_list(path.parent, MOVED), "to", target, before, sha256))
    if (now := item_of(path)) != before:
        raise _changed(path, before, now)
    if files.look(engram.manifest_path(path)):
        files.remove(engram.manifest_path(path))
    files.remove(path)


def _changed(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> LockstepError:
    names = ("bytes", "inode", "mtime_ns", "ctime_ns")
    return LockstepError(
        f"{path} changed while it was being archived",
        found={name: now[name] for name in names if now[name] != before[name]},
        expected={name: before[name] for name in names if now[name] != before[name]},
        next_step="find out who writes it, then run again; nothing was removed",
    )


def _receive_one(
    channel: wire.Channel, path: Path, offer: Mapping[str, Any], vouched: str | None, origin: str, tell: Tell
) -> None:
    def expected() -> str:
        """Ask for the sender's hash; it must be the one that is vouched for at the file's source, if any."""
        sha256 = str(channel.hear("end")["sha256"])
        if vouched not in (None, sha256):
            raise LockstepError(
                f"{path.name} is not what its manifest or {SUMS} vouches for where it comes from",
                found=f"SHA-256 {sha256}",
                expected=vouched,
                next_step="that file is damaged: pack the shard anew (pack_engram.yml); nothing was moved or replaced",
            )
        return sha256

    arrived = 0

    def progress(stage: str, count: int) -> None:
        nonlocal arrived
        shown = {"write": "receive", "resume": "compare"}.get(stage, stage)
        tell(path.name, shown, count)
        if stage == "verify":
            channel.alive(shown, count, quiet=not there and arrived < offer["bytes"])
        else:
            arrived += count
            if stage == "resume":
                channel.alive(shown, count)

    there = files.look(path)
    if there:
        digest = _compare(channel, path, offer, expected, progress)
    else:
        digest = _arrive(channel, path, offer, origin, expected, progress)
    _vouch(path, offer, digest, origin)
    channel.say("kept", sha256=digest, action="compared" if there else "sent")


def _compare(
    channel: wire.Channel,
    path: Path,
    offer: Mapping[str, Any],
    expected: Callable[[], str],
    progress: Callable[[str, int], None],
) -> str:
    """Both sides hash what they have; nothing is sent."""
    channel.say("go", offset=offer["bytes"], sha256=None)
    files.sync(path)
    digest = files.sha256_file(path, progress=lambda count: progress("verify", count))
    if digest != (theirs := expected()):
        raise another_file(path, f"SHA-256 {digest}", theirs)
    return digest


def _arrive(
    channel: wire.Channel,
    path: Path,
    offer: Mapping[str, Any],
    origin: str,
    expected: Callable[[], str],
    progress: Callable[[str, int], None],
) -> str:
    """Write what comes, from where an earlier run ended on."""
    size = int(offer["bytes"])

    def blocks(offset: int, sha256: str | None) -> Iterator[memoryview]:
        channel.say("go", offset=offset, sha256=sha256)
        buffers = [files.aligned(files.BLOCK) for _ in range(3)]
        for turn, start in enumerate(range(offset, size, files.BLOCK)):
            block = buffers[turn % 3][: min(files.BLOCK, size - start)]
            channel.take(block)
            yield block

    identity = {"from": origin, **{key: offer[key] for key in ("bytes", "inode", "mtime_ns", "ctime_ns")}}
    return files.write_blocks(
        path, size, blocks, identity=identity, readback=True, progress=progress, expected=expected
    )


def _vouch(path: Path, offer: Mapping[str, Any], digest: str, origin: str) -> None:
    """Give a file that is proven its time, its manifest and its line in the list, all durable."""
    files.discard_partial(path)  # the journal of a process that was killed just after the rename
    if shard_of(path)["sha256"] != digest:  # else its own manifest vouches for it already
        if offer["manifest"] not in (None, _manifest(path)):
            files.write_atomic(engram.manifest_path(path), offer["manifest"].encode("utf-8", "surrogateescape"), 0o644)
        # The time last: the manifest vouches from then on, and a restore takes it for the sign that all is there.
        files.set_mtime(path, int(offer["mtime_ns"]))
    if not origin:
        return
    with files.lock_directory(path.parent):
        known = listed(path.parent).get(path.name)
        if known not in (None, digest):
            raise another_file(path, f"SHA-256 {digest}", f"{known}, by {SUMS}")
        if known is None:
            write_list(path.parent, SUMS, with_record(read_list(path.parent, SUMS), "from", origin, offer, digest))


# --- retention --------------------------------------------------------------------------------------------------------


def survey(roots: Iterable[str], live: str, needed: Sequence[str], depth: int = 4) -> list[dict[str, Any]]:
    """List every shard below some directories, live or archived, with all that is known of it without reading it.

    ``live`` is the rank's own directory and ``needed`` the names that the fleet's plan has in it. Each entry:
    ``{"dir", "file", "bytes", "layer", "rank", "tp", "split", "packed", "moved", "verified", "needed"}``;
    ``verified`` names what vouches for the content, None when nothing does.
    """
    real_live = os.path.realpath(live)
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    for root in [live, *roots]:
        for directory, names in files.walk(root, depth):
            real = os.path.realpath(directory)
            shards = [name for name in names if SHARD.fullmatch(name.removesuffix(files.PARTIAL))]
            if real in seen or not shards:
                continue
            seen.add(real)
            try:
                sums, came = listed(directory), records(read_list(directory, SUMS))
            except LockstepError:
                sums, came = {}, {}
            for name in sorted(shards):
                with contextlib.suppress(LockstepError):
                    shard = shard_of(Path(directory, name))
                    moved = came.get(name)
                    # What was written to after it came is not what the list vouches for.
                    by_list = name in sums and (
                        not moved or (moved["bytes"] == shard["bytes"] and (shard["packed"] or "~") <= moved["when"])
                    )
                    verified = "manifest" if shard["sha256"] and not shard["foreign"] else SUMS if by_list else None
                    keys = ("file", "bytes", "layer", "rank", "tp", "split", "packed")
                    found.append(
                        {
                            "dir": directory,
                            **{key: shard[key] for key in keys},  # type: ignore[literal-required]
                            "moved": moved and {"when": moved["when"], "from": moved["place"]},
                            "verified": verified if shard["rows"] and not name.endswith(files.PARTIAL) else None,
                            "needed": real == real_live and name.removesuffix(files.PARTIAL) in needed,
                        }
                    )
    return found
