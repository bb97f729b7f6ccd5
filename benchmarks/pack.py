"""Packing a shard against the usual way of placing it: ``cp``, ``sync``, then ``sha256sum``. Needs root and no GPU.

    python benchmarks/pack.py --dir /srv/bench [--gib 4] [--repetitions 3]

Everything runs on one disk, one after the other, interleaved, each on an empty page cache; ``sha256sum`` right after
``cp``, as a person does it, with the copy still cached (which favours the usual way). Prints medians with ranges,
what the rules of speed make of them, and the machine. ``--dir`` needs room for three times ``--gib`` and a little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockstep_core import engram, files
from rich.console import Console
from rich.table import Table

GIB = 1 << 30
LAYER = 1
PIECE = 8 << 20
# The rules of speed: times the usual way; times cp + sync where hashing takes less than this of copying; never less.
USUAL, FEW, SLOW_DISK, NEVER = 1.8, 0.8, 0.95, 0.8
PACK = """
import sys
from lockstep_core import engram
engram.pack(sys.argv[1], sys.argv[2], 1, 0, 1, "rows", readback=sys.argv[3] == "readback")
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
COPY, HASH, COLD_HASH, PACKED, PROVEN = "cp + sync", "sha256sum after it", "sha256sum, cold", "pack", "pack, read back"


@dataclass
class Method:
    """What one way took, a value a repetition."""

    seconds: list[float] = field(default_factory=list)
    rss: int = 0  # bytes at most
    grown: list[int] = field(default_factory=list)  # bytes of page cache more than before, of whatever on this machine
    left: int = 0  # bytes at most of its own files in the page cache when it had ended

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


def make_checkpoint(place: Path, gib: float) -> int:
    """Write a checkpoint whose table of one layer packs to about ``gib``, and return the exact bytes of that shard."""
    columns = engram.prime_columns(1, 3, 8, int(gib * GIB / engram.ROW_BYTES / 24))
    rows = sum(columns[0])
    config = {
        "engram_layer_ids": [LAYER],
        "engram_num_embeddings": [rows],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": engram.WEIGHT_BYTES,
        "engram_vocab_size": int(gib * GIB / engram.ROW_BYTES / 24),
        "engram_pad_token_id": 2,
    }
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for part, dtype, width in (("weight", "F8_E4M3", engram.WEIGHT_BYTES), ("scale", "F8_E8M0", engram.SCALE_BYTES)):
        name = f"layers.{LAYER}.engram.embed.{part}"
        size = rows * width
        header = json.dumps({name: {"dtype": dtype, "shape": [rows, width], "data_offsets": [0, size]}}).encode()
        header += b" " * (-(len(header) + 8) % files.ALIGN)
        weight_map[name] = f"{part}.safetensors"
        head = len(header).to_bytes(8, "little") + header
        files.write_blocks(place / weight_map[name], len(head) + size, given(head, size), identity=None)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return engram.expected_shards(config, 1, 0, "rows")[0]["bytes"]


def given(head: bytes, size: int) -> Callable[[int, str | None], Iterator[memoryview]]:
    """A header, then one block of random bytes again and again: SHA-256 and disks do not look for repetitions."""
    piece = files.aligned(PIECE)
    piece[:] = random.Random(0).randbytes(PIECE)  # noqa: S311 (bytes to copy)

    def blocks(_offset: int, _sha256: str | None) -> Iterator[memoryview]:
        yield memoryview(head)
        for at in range(0, size, PIECE):
            yield piece[: min(PIECE, size - at)]

    return blocks


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def cached() -> int:
    """Bytes in the page cache."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return values["Cached"] + values["Buffers"] - values["Shmem"]


def measured(method: Method, files_of: Iterable[Path], *command: str | Path) -> str:
    """Run a command to its end and return what it said; its seconds, and what it left in the page cache."""
    before, started = cached(), time.perf_counter()
    said = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
    method.seconds.append(time.perf_counter() - started)
    method.grown.append(cached() - before)
    own = [str(path) for place in files_of for path in ([place] if place.is_file() else sorted(place.iterdir()))]
    listed = subprocess.run(["fincore", "-nbo", "RES", *own], check=True, capture_output=True, text=True).stdout
    method.left = max(method.left, sum(map(int, listed.split())))
    return said


def round_of(methods: dict[str, Method], place: Path, turn: int) -> None:
    """Each way once; which one begins changes."""
    shard, copy = place / "source" / engram.shard_name(LAYER, 0, 1), place / "copy.bin"

    def usual() -> None:
        drop_caches()
        measured(methods[COPY], [shard, copy], "sh", "-c", f"cp '{shard}' '{copy}' && sync '{copy}'")
        measured(methods[HASH], [shard, copy], "sha256sum", copy)
        drop_caches()
        measured(methods[COLD_HASH], [copy], "sha256sum", copy)
        copy.unlink()

    def ours(name: str, readback: str) -> None:
        out, checkpoint = place / "out", place / "checkpoint"
        out.mkdir(exist_ok=True)
        drop_caches()
        said = measured(methods[name], [out, checkpoint], sys.executable, "-c", PACK, checkpoint, out, readback)
        methods[name].rss = max(methods[name].rss, int(said) * 1024)
        for path in out.iterdir():
            path.unlink()

    ways = [usual, lambda: ours(PACKED, "no"), lambda: ours(PROVEN, "readback")]
    for way in ways[turn % 3 :] + ways[: turn % 3]:
        way()


def main() -> int:
    """Measure and print; 0 when the rules of speed hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="directory on the disk to measure; what is made goes")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the shard (default 4)")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    place = arguments.dir / "lockstep-pack-benchmark"
    methods = {name: Method() for name in (COPY, HASH, COLD_HASH, PACKED, PROVEN)}
    load = []
    try:
        size = make_checkpoint(place / "checkpoint", arguments.gib)
        (place / "source").mkdir(exist_ok=True)
        engram.pack(place / "checkpoint", place / "source", LAYER, 0, 1, "rows")
        for turn in range(arguments.repetitions):
            load.append(os.getloadavg()[0])
            round_of(methods, place, turn)
    finally:
        subprocess.run(["rm", "-rf", place], check=True)
    return show(methods, size, arguments, load)


def show(methods: dict[str, Method], size: int, arguments: argparse.Namespace, load: list[float]) -> int:
    copy, hashing, pack = methods[COPY].median, methods[HASH].median, methods[PACKED].median
    table = Table(title=f"One shard of {size / GIB:.2f} GiB, median (range) of {arguments.repetitions}")
    for column in ("", "s", "MB/s", "x usual way", "x cp + sync", "peak RSS", "own cache", "all cache"):
        table.add_column(column, justify="right" if column else "left")
    rows = {name: method.seconds for name, method in methods.items()}
    rows["usual way"] = [a + b for a, b in zip(rows[COPY], rows[HASH], strict=True)]
    usual = statistics.median(rows["usual way"])
    for name in (COPY, HASH, "usual way", COLD_HASH, PACKED, PROVEN):
        seconds, method = rows[name], methods.get(name)
        middle = statistics.median(seconds)
        compared = name in ("usual way", PACKED, PROVEN)
        table.add_row(
            name,
            f"{middle:.2f} ({min(seconds):.2f}-{max(seconds):.2f})",
            f"{size / 1e6 / middle:.0f}",
            f"{usual / middle:.2f} x" if compared else "",
            f"{copy / middle:.2f} x" if compared else "",
            f"{method.rss >> 20} MiB" if method and method.rss else "",
            f"{method.left >> 20} MiB" if method else "",
            f"{statistics.median(method.grown) / (1 << 20):+.0f} MiB" if method else "",
        )
    console = Console(width=120)
    console.print(table)
    against_all, against_copy, share = usual / pack, copy / pack, hashing / copy
    fast = against_all >= USUAL or (share < FEW and against_copy >= SLOW_DISK)
    holds = fast and against_copy >= NEVER
    ours = (methods[PACKED], methods[PROVEN])
    memory, left = max(way.rss for way in ours) <= 512 << 20, max(way.left for way in ours) <= 64 << 20
    console.print(
        f"hashing takes {share:.2f} of copying; pack {against_all:.2f} x the usual way, {against_copy:.2f} x cp + sync:"
        f" {'holds' if holds else 'FAILS'}"
    )
    console.print(
        f"rule: >= {USUAL} x the usual way, or >= {SLOW_DISK} x cp + sync where hashing takes < {FEW} of copying; "
        f"never < {NEVER} x cp + sync"
    )
    console.print(f"resident memory <= 512 MiB: {memory}; own files in the page cache afterwards <= 64 MiB: {left}")
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    cpu = names[0].split(":")[1].strip() if names else "?"
    disk = subprocess.run(
        ["findmnt", "-no", "SOURCE,FSTYPE", "-T", arguments.dir], check=True, capture_output=True, text=True
    ).stdout.strip()
    loads = ", ".join(f"{value:.1f}" for value in load)
    console.print(
        f"{platform.machine()}, {os.cpu_count()} x {cpu}, kernel {platform.release()}, {disk}, load before: {loads}, "
        f"nice {os.nice(0)}"
    )
    return 0 if holds and memory and left else 1


if __name__ == "__main__":
    sys.exit(main())
