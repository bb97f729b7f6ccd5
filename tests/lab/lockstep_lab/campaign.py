"""The starting state: what lay on the three hosts' disks on the night of the campaign, at a thousandth of the size.

Every Engram directory is empty. spark2 still has its old TP2 shards (split ``heads``), outside the directory that is
mounted, on a filesystem with 61 units free where its new shards need 67.6. ``free_spark2`` is what the operator did
that night by hand: move the old shards to spark1, with SHA-256 equal on both sides before anything is removed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep_core import engram

from . import checkpoint, engines, topology
from .nodes import disk
from .paths import GENERATED, cache
from .say import LabError, say, sh, step

FULL_HOST = "spark2"
ARCHIVE_HOST = "spark1"
OLD_SHARDS = "/home/ops/dsv41-engram-tp2"
ARCHIVE = "/home/ops/archive/dsv41-engram-tp2-spark2"

_OPS = 1000
"""User and group id of ``ops`` in the node image: the first ordinary user."""

_FREE_OF_NEEDED = 61 / 67.586
"""Free space of the night on spark2 per space that its TP3 shards need (GB, by the campaign's report)."""


@functools.cache
def _sources() -> str:
    """What the generated files depend on: the code that writes them."""
    digest = hashlib.sha256()
    for module in (checkpoint, engram):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:12]


def engram_checkpoint() -> Path:
    """The small checkpoint that every host packs from, made once and kept in the cache."""
    path = cache("checkpoint", _sources())
    if not (path / ".lab.json").exists():
        with step("making the checkpoint"):
            checkpoint.make(path)
    return path


def engram_config() -> dict[str, Any]:
    """What of the checkpoint's configuration decides the tables' sizes, for the fleet's ``engram_config``."""
    config = engram.read_config(engram_checkpoint())
    return {key: config["text_config"][key] for key in engram.REAL_CONFIG}


def _old_shards() -> Path:
    """spark2's shards of the time when two hosts served: rank 1 of 2, split by heads."""
    path = cache("old-shards") / _sources()
    if not path.exists():
        with step("making spark2's old TP2 shards"):
            part = path.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            checkpoint.make_shards(engram_checkpoint(), part, tp=2, rank=1, split="heads")
            for manifest in part.glob("*.manifest.json"):
                manifest.unlink()  # the tool of that time wrote none
            part.rename(path)
    return path


def prune() -> None:
    """Remove checkpoints and shards that older code made; no host may have them mounted."""
    for kind in ("checkpoint", "old-shards"):
        for old in cache(kind).iterdir():
            if old.name != _sources():
                shutil.rmtree(old)


def served_model(engine: str) -> Path:
    """What the engine serves: SmolLM2 with real SGLang; the simulator only looks that a checkpoint is there."""
    return Path(engines.smollm2_dir()) if engine == "sglang" else engram_checkpoint()


def binds(engine: str, host: topology.Host) -> list[str]:
    """What a host finds on its disks, as docker's ``source:target[:ro]``."""
    return [
        f"{disk(host.name, 'disk', 'ops')}:/home/ops",
        f"{disk(host.name, 'disk', 'dsv41')}:/srv/dsv41",
        f"{engram_checkpoint()}:/srv/models/engram-checkpoint:ro",
        f"{served_model(engine)}:/srv/models/DeepSeek-V4.1-Flash:ro",
    ]


def unmount_all() -> None:
    """Unmount the small filesystem of spark2; its loop device goes with it."""
    path = disk(FULL_HOST, "disk")
    while os.path.ismount(path):
        sh(["umount", path])


def make_disks(hosts: Sequence[topology.Host]) -> None:
    """Make each host's disk anew, as it was on the night."""
    for host in hosts:
        disk(host.name, "disk").mkdir(parents=True, exist_ok=True)
        if host.name == FULL_HOST:
            _small_filesystem(host)
        home = disk(host.name, "disk", "ops")
        work = disk(host.name, "disk", "dsv41")
        for path in (home, work):
            path.mkdir()
        shown = {"/home/ops": home, "/srv/dsv41": work}
        parent, _, name = host.engram_dir.rpartition("/")
        if parent not in shown:
            raise LabError(f"{host.name}: fleet_engram_dir {host.engram_dir} is not in {' or '.join(shown)}")
        (shown[parent] / name).mkdir()
        if host.name == FULL_HOST:
            old = home / OLD_SHARDS.rpartition("/")[2]
            shutil.copytree(_old_shards(), old)
            _fill(host)
        for path in (home, *home.rglob("*")):
            os.chown(path, _OPS, _OPS)


def needed(host: topology.Host, tp: int) -> int:
    """Bytes that the host's shards need at this TP size, in the split of the lab's engine."""
    return engram.shard_sizes(tp, "rows", engram.read_config(engram_checkpoint()))[host.rank]


def _small_filesystem(host: topology.Host) -> None:
    room = sum(path.stat().st_size for path in _old_shards().iterdir()) + needed(host, len(topology.hosts()))
    image = disk(host.name, "disk.ext4")
    image.unlink(missing_ok=True)
    with image.open("wb") as handle:
        handle.truncate(room + (64 << 20))
    sh(["mkfs.ext4", "-q", "-m", "0", "-L", "spark2-data", image])
    sh(["mount", "-o", "loop", image, disk(host.name, "disk")])


def _fill(host: topology.Host) -> None:
    """Let the rest of the disk be in use: only so much stays free as on the night."""
    root = disk(host.name, "disk")
    usage = os.statvfs(root)
    spare = usage.f_bavail * usage.f_frsize - int(needed(host, len(topology.hosts())) * _FREE_OF_NEEDED)
    with (root / "other-data").open("wb") as handle:
        os.posix_fallocate(handle.fileno(), 0, spare)


def _ssh(host: str, command: str) -> list[str]:
    """The command line that runs ``command`` on a host over OpenSSH, as user ops, host key checked."""
    address = next(entry.lan for entry in topology.hosts() if entry.name == host)
    options = [
        f"UserKnownHostsFile={GENERATED}/known_hosts",
        "GlobalKnownHostsFile=/dev/null",
        "StrictHostKeyChecking=yes",
        "BatchMode=yes",
    ]
    return [
        "ssh",
        "-i",
        str(GENERATED / "ssh" / "ops"),
        *(word for option in options for word in ("-o", option)),
        f"ops@{address}",
        command,
    ]


def _sums(host: str, directory: str) -> str:
    return sh(_ssh(host, f"cd {directory} && sha256sum -- *.bin"))


def free_spark2() -> None:
    """Move spark2's old shards to spark1: copied, SHA-256 equal on both sides, then removed; a note stays.

    Does nothing when they have been moved already. LabError, with nothing removed, when a copy differs.
    """
    if not sh(_ssh(FULL_HOST, f"ls {OLD_SHARDS}/*.bin 2>/dev/null || true")).strip():
        say(f"{FULL_HOST}:{OLD_SHARDS} holds no shards: nothing to move")
        return
    free = sh(_ssh(FULL_HOST, f"df --output=avail -BM {OLD_SHARDS} | tail -1")).strip()
    with step(f"{FULL_HOST} has {free} free; moving its old shards to {ARCHIVE_HOST}:{ARCHIVE}, as the operator did"):
        sums = _sums(FULL_HOST, OLD_SHARDS)
        with subprocess.Popen(_ssh(FULL_HOST, f"tar -C {OLD_SHARDS} -cf - ."), stdout=subprocess.PIPE) as read:
            write = subprocess.run(
                _ssh(ARCHIVE_HOST, f"mkdir -p {ARCHIVE} && tar -C {ARCHIVE} -xf -"), stdin=read.stdout, check=False
            )
        if write.returncode or read.returncode:
            raise LabError(f"copying {FULL_HOST}:{OLD_SHARDS} to {ARCHIVE_HOST}:{ARCHIVE} failed; nothing was removed")
        there = _sums(ARCHIVE_HOST, ARCHIVE)
        if there != sums:
            raise LabError(
                f"SHA-256 differs between {FULL_HOST} and {ARCHIVE_HOST}; nothing was removed:\n{sums}{there}"
            )
        sh(_ssh(ARCHIVE_HOST, f"cat > {ARCHIVE}/SHA256SUMS"), stdin=sums.encode())
        note = f"{ARCHIVE_HOST}:{ARCHIVE}\n{sums}"
        sh(_ssh(FULL_HOST, f"cat > {OLD_SHARDS}/MOVED.txt && rm {OLD_SHARDS}/*.bin"), stdin=note.encode())
    free = sh(_ssh(FULL_HOST, f"df --output=avail -BM {OLD_SHARDS} | tail -1")).strip()
    say(f"{FULL_HOST} now has {free} free")
