"""What the lab must leave as it found it: the machine's kernel settings, clock, firewall rules and mounts."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import TypedDict

from . import topology
from .paths import STATE
from .say import sh

# Counters and states that change by themselves, and settings of single network interfaces, which come and go.
_MOVING = re.compile(
    r"net/ipv[46]/(conf|neigh)/(?!(all|default)/)|kernel/(hung_task_(detect_count|warnings)|random/|ns_last_pid|pty/nr|sched_domain|perf_event_max_sample_rate|tainted|keys/)"
    r"|fs/(dentry-state|file-nr|inode-nr|inode-state|aio-nr|quota/|binfmt_misc)|net/netfilter/nf_conntrack_count|dev/cdrom|kernel/spl|debug/"
)


class Machine(TypedDict):
    """Kernel settings by path, seconds between clock and uptime, the lab's firewall rules and mounts."""

    settings: dict[str, str]
    clock_offset_s: float
    rules: list[str]
    mounts: list[str]


def look() -> Machine:
    """Read it all, change nothing."""
    settings = {}
    for path in sorted(Path("/proc/sys").rglob("*")):
        name = str(path.relative_to("/proc/sys"))
        if _MOVING.search(name) or not path.is_file():
            continue
        try:
            settings[name] = path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue  # write-only, or not for us: the lab's hosts cannot change it either
    subnets = tuple(network.subnet.rpartition(".")[0] + "." for network in topology.networks())
    rules = sh(["iptables-save"]).splitlines() if shutil.which("iptables-save") else []
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return {
        "settings": settings,
        "clock_offset_s": time.time() - time.clock_gettime(time.CLOCK_BOOTTIME),
        "rules": sorted(rule for rule in rules if any(subnet in rule for subnet in subnets)),
        "mounts": sorted(line for line in mounts if str(STATE) in line),
    }


def differences(before: Machine, after: Machine) -> list[str]:
    """Name what is not as it was; a clock that moved by less than a second is the machine's own time service."""
    names = before["settings"].keys() | after["settings"].keys()
    found = [
        f"kernel setting {name}: was {before['settings'].get(name)}, is {after['settings'].get(name)}"
        for name in sorted(names)
        if before["settings"].get(name) != after["settings"].get(name)
    ]
    moved = after["clock_offset_s"] - before["clock_offset_s"]
    if abs(moved) > 1:
        found.append(f"the clock moved by {moved:.1f} s")
    for what, was, now in (
        ("firewall rule", before["rules"], after["rules"]),
        ("mount", before["mounts"], after["mounts"]),
    ):
        found += [f"{what} left: {line}" for line in now if line not in was]
    return found
