"""Pack or verify a rank's Engram shards: ``python -m lockstep_tools.pack``, run in the engine image on that rank.

Reads only the rank's byte ranges of the checkpoint, writes each shard aside, reads it back and renames it when it is
proven on disk, its manifest last. What was interrupted is taken up again. A good shard is left as it is; one that no
manifest vouches for is compared with the checkpoint instead of being written again; a wrong one is never overwritten.
With ``--verify`` nothing is written at all. Needs Python and the core, nothing else.

``--progress FILE`` is rewritten every second (``-``: a line of standard output each)::

    {"state": "running|done|failed", "layer", "action": "pack|verify|check", "stage": "resume|write|verify", "bytes",
     "total", "layer_bytes", "layer_total", "mb_s", "eta_s", "line": the same in words, "shards": [finished ones],
     "set_aside": [new names], "error": null or text}

``bytes`` and ``total`` count the shards once, ``eta_s`` also their reading back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep_core import engram, files
from lockstep_core.errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

LOCK = ".engram-pack.lock"
# Kept free beside the shards unless told otherwise: logs and journals live on the same disk.
RESERVE = 1 << 30
STDOUT = Path("-")
SIGTERM_STATUS = 128 + signal.SIGTERM


class Progress:
    """Counts bytes, and tells a file and standard output once a second how far the work is."""

    def __init__(self, path: Path | None, total: int = 0, work: int = 0) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)
        # All bytes that are gone through, in any stage, and when the first was; what an earlier run did counts apart.
        self._work, self._done, self._started = work, 0, time.monotonic()
        self._layer_started = self._stage_started = self._started
        self._stage_before = self._back = 0
        self._said: dict[str, Any] = {
            "state": "running",
            "layer": None,
            "action": None,
            "stage": None,
            "bytes": 0,
            "total": total,
            "layer_bytes": 0,
            "layer_total": 0,
            "mb_s": 0.0,
            "eta_s": None,
            "line": None,
            "shards": [],
            "set_aside": [],
            "error": None,
        }

    def start(self) -> None:
        """Write the first report and go on writing one each second."""
        self._write()
        self._thread.start()

    def begin(self, layer: int, action: str, total: int) -> None:
        """Turn to a layer of which ``total`` bytes are to be gone through."""
        self._layer_started = time.monotonic()
        self._said.update({"layer": layer, "action": action, "layer_total": total})
        self._back = 0
        self._turn("write" if action == "pack" else "verify")
        self._said["line"] = line(self._said)
        self._write()

    def add(self, stage: str, count: int) -> None:
        """Count bytes that were gone through; of stage ``resumed`` those that stand from an earlier run."""
        said = self._said
        if stage == "resumed":
            # It was read back to be taken up again.
            self._turn("write", count)
            self._work -= 2 * count
            self._back = count
            said["bytes"] += count
            return
        self._done += count if stage != "resume" else 0
        if said["action"] == "pack" and stage == "verify":
            # Beside the writing, and shown when that is over.
            self._back += count
            if said["stage"] == "verify":
                said["layer_bytes"] = self._back
            return
        if stage != said["stage"]:
            self._turn(stage)
        said["layer_bytes"] += count
        if stage != "resume":
            said["bytes"] += count
        if stage == "write" and said["layer_bytes"] >= said["layer_total"]:
            self._turn("verify", self._back)

    def shard(self, action: str, found: dict[str, Any]) -> None:
        """Count a shard as finished and say so; ``found`` is its manifest, or how it was found."""
        seconds = time.monotonic() - self._layer_started
        done = {
            "layer": found["layer"],
            "file": found["file"],
            "action": action,
            "bytes": found["bytes"],
            "sha256": found["sha256"],
            "seconds": round(seconds, 2),
            "mb_s": round(found["bytes"] / 1e6 / seconds, 1) if seconds and action != "keep" else None,
        }
        self._said["shards"].append(done)
        words = {"keep": "is good, kept", "verify": "verified", "pack": "packed"}[action]
        pace = f" in {done['seconds']} s, {done['mb_s']} MB/s" if action != "keep" else ""
        self._print(f"layer {done['layer']}: {done['file']} {words}{pace}, sha256 {done['sha256']}")

    def checked(self, found: engram.Inspection) -> None:
        """Keep what a check found."""
        self._said["shards"].append(found)
        self._print(f"layer {found['layer']}: {found['file']} {found['fault'] or 'ok'}")

    def more(self, total: int) -> None:
        """Take up the packing of a shard that was not expected."""
        self._said["total"] += total
        self._work += 2 * total

    def aside(self, path: str) -> None:
        """Keep the new name of a file that was set aside."""
        self._said["set_aside"].append(path)
        self._print(f"set aside: {path}")

    def end(self, state: str, error: str | None = None) -> None:
        """Write the last report."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._said.update({"state": state, "error": error, "eta_s": 0 if state == "done" else None})
        self._write()

    def _turn(self, stage: str, before: int = 0) -> None:
        self._stage_started, self._stage_before = time.monotonic(), before
        self._said.update({"stage": stage, "layer_bytes": before})

    def _tick(self) -> None:
        while not self._stop.wait(1):
            said, now = self._said, time.monotonic()
            if said["layer"] is None:
                continue
            said["mb_s"] = round((said["layer_bytes"] - self._stage_before) / 1e6 / (now - self._stage_started), 1)
            pace = self._done / (now - self._started)
            said["eta_s"] = round((self._work - self._done) / pace) if pace else None
            said["line"] = line(said)
            self._write()
            self._print(said["line"])

    def _print(self, text: str) -> None:
        if self._path != STDOUT:
            print(text, flush=True)

    def _write(self) -> None:
        if self._path == STDOUT:
            print(json.dumps(self._said), flush=True)
        elif self._path:
            files.write_json_atomic(self._path, self._said, 0o644, durable=False)


def line(said: dict[str, Any]) -> str:
    """Render a progress report, e.g. ``layer 1 written  45 %, 15,207 of 33,793 MB, 812 MB/s; all 15,207 of …``."""
    doing = {
        "write": "written",
        "resume": "resumed",
        "verify": {"pack": "read back", "verify": "compared", "check": "checked", "keep": "kept"}[said["action"]],
    }[said["stage"]]
    part, whole = said["layer_bytes"], said["layer_total"]
    eta = "?" if said["eta_s"] is None else said["eta_s"]
    return (
        f"layer {said['layer']} {doing} {100 * part // whole if whole else 0:3d} %, {part / 1e6:,.0f} of"
        f" {whole / 1e6:,.0f} MB, {said['mb_s']:.0f} MB/s; all {said['bytes'] / 1e6:,.0f} of"
        f" {said['total'] / 1e6:,.0f} MB, eta {eta} s"
    )


def run(arguments: argparse.Namespace, progress: Progress, steps: Sequence[engram.Step]) -> None:
    """Go through the layers one after the other; LockstepError when one cannot be done."""
    for step in steps:
        expected, action = step["expected"], step["action"]
        path = arguments.out / expected["file"]
        progress.begin(expected["layer"], action, expected["bytes"])
        if action == "keep":
            # Of a packing by force that was interrupted and is not wanted any more.
            files.discard_partial(path)
            progress.shard(action, engram.read_manifest(path) or {})
            continue
        if action == "verify":
            try:
                manifest = engram.verify(arguments.checkpoint, path, expected, partial(progress.add, "verify"))
            except engram.WrongContentError:
                if arguments.wrong == "fail":
                    raise
                set_aside(path, progress)
                engram.require_space(arguments.out, [{**step, "action": "pack"}], arguments.reserve)
                action = "pack"
                progress.more(expected["bytes"])
                progress.begin(expected["layer"], action, expected["bytes"])
        if action == "pack":
            manifest = engram.pack(
                arguments.checkpoint,
                arguments.out,
                expected["layer"],
                arguments.rank,
                arguments.tp,
                arguments.split,
                progress.add,
            )
        progress.shard(action, manifest)


def set_aside(path: Path, progress: Progress) -> None:
    """Rename a shard and its manifest."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for part in (path, engram.manifest_path(path)):
        if files.look(part):
            progress.aside(files.set_aside(part, stamp))


def check(arguments: argparse.Namespace, progress: Progress, shards: Sequence[engram.Expected]) -> None:
    """Look at every shard as closely as asked; what is found stands in the report, and is no error."""
    for expected in shards:
        progress.begin(expected["layer"], "check", expected["bytes"])
        path, tell = arguments.out / expected["file"], partial(progress.add, "verify")
        progress.checked(engram.check_shard(path, expected, arguments.checkpoint, arguments.verify, tell))


def wanted(arguments: argparse.Namespace) -> list[engram.Expected]:
    """Say what the rank must hold."""
    config = engram.read_config(arguments.checkpoint)
    return engram.expected_shards(config, arguments.tp, arguments.rank, arguments.split, arguments.layers)


def plan(arguments: argparse.Namespace) -> list[engram.Step]:
    """Decide what to do, and refuse what cannot end well, before a byte is written."""
    steps = engram.work(arguments.checkpoint, arguments.out, wanted(arguments), force=arguments.force)
    for step in steps:
        if step["action"] == "refuse":
            raise engram.wrong_shard(arguments.out / step["expected"]["file"], step["found"], step["expected"])
    engram.require_space(arguments.out, steps, arguments.reserve)
    return steps


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_tools.pack", description="Pack a rank's Engram shards from the checkpoint."
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory with config.json and safetensors")
    parser.add_argument("--out", type=Path, required=True, help="directory of the shards")
    parser.add_argument("--layers", type=_layers, required=True, help="for example 1,14")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True, help="number of ranks")
    parser.add_argument("--split", choices=engram.SPLITS, required=True, help="how the engine image splits rows")
    parser.add_argument("--progress", type=Path, help="JSON file that is rewritten every second; - is standard output")
    parser.add_argument("--reserve", type=int, default=RESERVE, help="bytes to leave free (default 1 GiB)")
    parser.add_argument("--force", action="store_true", help="pack good shards again")
    parser.add_argument(
        "--wrong", choices=("fail", "set_aside"), default="fail", help="what to do with a shard whose content is wrong"
    )
    parser.add_argument("--verify", choices=engram.LEVELS, help="write nothing, only look this closely")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Pack or check; 0 when every shard is good or was checked, 1 with the reason on standard error."""
    arguments = parse(argv)
    # The first process of a container is not ended by this signal's default.
    signal.signal(signal.SIGTERM, _stop)
    progress = Progress(arguments.progress)
    try:
        if arguments.verify:
            shards = wanted(arguments)
            total = sum(shard["bytes"] for shard in shards)
            progress = Progress(arguments.progress, total, total)
            progress.start()
            check(arguments, progress, shards)
        else:
            files.make_directory(arguments.out)
            with files.lock(arguments.out / LOCK, f"packing of rank {arguments.rank}"):
                steps = plan(arguments)
                todo = [(step["expected"]["bytes"], step["action"]) for step in steps if step["action"] != "keep"]
                # What is packed is gone through twice: it is read back.
                work = sum(size * (2 if action == "pack" else 1) for size, action in todo)
                progress = Progress(arguments.progress, sum(size for size, _ in todo), work)
                progress.start()
                run(arguments, progress, steps)
    except (LockstepError, OSError) as error:
        if isinstance(error, LockstepError) and error.rank is None:
            error.rank = arguments.rank
        print(error, file=sys.stderr)
        # On a full or broken disk the report cannot be written either; the reason stands above.
        with contextlib.suppress(LockstepError):
            progress.end("failed", str(error))
        return 1
    except BaseException as error:
        progress.end("failed", f"ended by {type(error).__name__}")
        raise
    progress.end("done")
    return 0


def _layers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise SystemExit(SIGTERM_STATUS)


if __name__ == "__main__":
    sys.exit(main())
