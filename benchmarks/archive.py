"""Archiving a shard to another lab host, against the usual way: ``scp``, then ``sha256sum`` on both sides.

    python benchmarks/archive.py [--gib 4] [--repetitions 3]

Needs a lab that is up (``make lab ENGINE=sim``), root for an empty page cache before each run, and three times the size
on this machine's disk, which all lab hosts share. The ways take turns over the same file and the same fabric link. The
usual way is timed twice: as it is, where the copy may still lie in memory only and the hash on the other side is the
hash of that, and held to what archiving does, with a ``sync`` after the copy and a destination that is read from its
disk.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/lab"))

from lockstep_lab import faults, nodes, topology  # noqa: E402 - its path is set above
from lockstep_lab.paths import GENERATED  # noqa: E402 - its path is set above

SOURCE, TARGET = "spark3", "spark1"
NAME = "engram-l1-r2of2.bin"  # of a fleet of two: nothing that the lab serves
PLACE = "/home/ops/bench archive"
LINK = re.compile(r"(?:send|receive)-[0-9a-f]{16}\.lock")


def here(host: str) -> Path:
    """A host's directory as this machine sees it."""
    return nodes.disk(host, "disk", "ops", Path(PLACE).name)


def on(host: str, command: str) -> float:
    """Run a command on a host; its seconds."""
    began = time.monotonic()
    nodes.run(faults.host(host), ["sh", "-c", command])
    return time.monotonic() - began


def cold() -> None:
    """Empty the page cache."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def cached() -> int:
    """Bytes of the machine's page cache: of both hosts, and of whatever else runs here."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["Cached"] + kib["Buffers"] - kib["Shmem"]) << 10


def kept(path: Path) -> int:
    """Bytes of a file that the page cache holds (mincore)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        flags = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(pages)
        ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(pages)), flags)
        del start
        return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


@contextlib.contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Peak resident memory, in bytes, of the sender and the receiver: the holders of a move's locks."""
    peaks: dict[str, int] = {}
    over = threading.Event()

    def look() -> None:
        known: dict[str, str] = {}
        while not over.wait(0.3):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    if process.name not in known:
                        if "python3" not in (process / "comm").read_text():
                            continue
                        held = [LINK.search(str(fd.readlink())) for fd in (process / "fd").iterdir()]
                        side = next((match[0].partition("-")[0] for match in held if match), None)
                        if side is None:
                            continue
                        known[process.name] = side
                    peak = int((process / "status").read_text().split("VmHWM:")[1].split()[0]) << 10
                    peaks[known[process.name]] = max(peaks.get(known[process.name], 0), peak)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def may_copy() -> Iterator[str]:
    """The scp options with which the source reaches the target over the fabric, its host key checked."""
    address = next(host.lan for host in topology.hosts() if host.name == TARGET)
    for name, path in (("key", GENERATED / "ssh/ops"), ("known", GENERATED / "known_hosts")):
        subprocess.run(
            ["docker", "exec", "-i", SOURCE, "sh", "-c", f"umask 077; cat > /run/bench-{name}"],
            input=path.read_bytes(),
            check=True,
        )
    try:
        options = ["UserKnownHostsFile=/run/bench-known", f"HostKeyAlias={address}", "BatchMode=yes"]
        yield f"-q -i /run/bench-key {' '.join(f'-o {option}' for option in options)}"
    finally:
        on(SOURCE, "rm -f /run/bench-key /run/bench-known")


def usual(options: str, address: str, *, durable: bool) -> float:
    """Seconds of the usual way; ``durable`` holds it to a copy that is on the disk."""
    file = f"'{PLACE}/{NAME}'"
    seconds = on(SOURCE, f"scp {options} {file} ops@{address}:{file}")
    if durable:
        seconds += on(TARGET, "sync")
        seconds += on(SOURCE, f"sha256sum {file} > /run/bench-sum")
        cold()
    else:
        seconds += on(SOURCE, f"sha256sum {file} > /run/bench-sum")
    seconds += on(TARGET, f"sha256sum {file} > /run/bench-sum")
    sums = {nodes.run(faults.host(host), ["cat", "/run/bench-sum"]) for host in (SOURCE, TARGET)}
    if len(sums) != 1:
        sys.exit(f"the copy differs: {sums}")
    (here(TARGET) / NAME).unlink()
    return seconds


def ours() -> tuple[float, float, int, int]:
    """Seconds of archiving and of the whole playbook; bytes of the file in the page cache, and how far that grew."""
    before = cached()
    began = time.monotonic()
    places = f'{{"archive_from": "{PLACE}", "archive_to": "{TARGET}:{PLACE}"}}'
    run = subprocess.run(
        ["ansible-playbook", "archive_engram.yml", "-l", SOURCE, "-e", places],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
    )
    whole, grown = time.monotonic() - began, cached() - before
    told = re.search(rf"{NAME} sent to .* in ([\d.]+) s, ", run.stdout)
    if not told or (here(SOURCE) / NAME).exists():
        sys.exit(run.stdout + run.stderr)
    left = kept(here(TARGET) / NAME)
    on(TARGET, f"cd '{PLACE}' && sha256sum --check --strict --quiet SHA256SUMS")
    # Back for the next turn.
    (here(TARGET) / NAME).rename(here(SOURCE) / NAME)
    (here(TARGET) / "SHA256SUMS").unlink()
    return float(told[1]), whole, left, grown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=4, help="size of the shard (default: 4)")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    size = int(options.gib * (1 << 30)) + 4096
    address = next(n.hosts[TARGET] for n in topology.networks()[1:] if {SOURCE, TARGET} <= set(n.hosts))
    times: dict[str, list[float]] = {"scp, sha256sum x 2": [], "the same, durable": [], "archive": []}
    playbooks: list[float] = []
    left: list[int] = []
    grown: list[int] = []
    loads: list[float] = []
    memory: dict[str, int] = {}
    for host in (SOURCE, TARGET):
        on(host, f"rm -rf '{PLACE}' && mkdir '{PLACE}' && chown ops:ops '{PLACE}'")
    try:
        on(SOURCE, f"head -c {size} /dev/urandom > '{PLACE}/{NAME}'")
        with may_copy() as scp:
            for _ in range(options.repetitions):
                for way, seconds in times.items():
                    cold()
                    loads.append(os.getloadavg()[0])
                    if way == "archive":
                        with watched() as peaks:
                            taken, whole, pages, more = ours()
                        left.append(pages)
                        grown.append(more)
                        memory = {side: max(peaks.get(side, 0), memory.get(side, 0)) for side in (*peaks, *memory)}
                        playbooks.append(whole)
                        seconds.append(taken)
                    else:
                        seconds.append(usual(scp, address, durable=way != "scp, sha256sum x 2"))
                    print(f"{way}: {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    finally:
        for host in (SOURCE, TARGET):
            on(host, f"rm -rf '{PLACE}' /run/bench-sum")
    middle = {way: statistics.median(seconds) for way, seconds in times.items()}
    print(f"{options.gib:g} GiB, {SOURCE} to {TARGET} over {address}, load {min(loads):.1f} to {max(loads):.1f}")
    print(f"{'way':<22} {'median s':>9} {'range':>13} {'MB/s':>6} {'archive is':>11}")
    for way, seconds in times.items():
        span = f"{min(seconds):.1f}-{max(seconds):.1f}"
        ratio = middle[way] / middle["archive"]
        print(f"{way:<22} {middle[way]:>9.1f} {span:>13} {size / 1e6 / middle[way]:>6.0f} {ratio:>9.2f} x")
    print(f"whole playbook: {statistics.median(playbooks):.1f} s")
    print(
        f"page cache: {max(left) >> 20} MiB of the file; in all, whatever else ran, {max(grown) / (1 << 20):+.0f} MiB"
    )
    print("peak resident memory: " + ", ".join(f"{side} {peak >> 20} MiB" for side, peak in sorted(memory.items())))


if __name__ == "__main__":
    main()
