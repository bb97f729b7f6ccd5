"""Host memory and devices as the kernel and the vendor's tools print them -> numbers.

On a GB10 the CPU and the GPU share one memory: nvidia-smi says "[N/A]" for it and /proc/meminfo is the truth. What is
not known is None, never 0: a guard that reads N/A as "0 used" thinks that memory is free.
"""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

_KIB_PER_GIB = 1 << 20
_UNKNOWN = {"", "n/a", "not supported", "err!", "-"}


def meminfo(text: str) -> dict[str, int]:
    """Read /proc/meminfo: {name as printed: KiB} ("kB" there means KiB; the HugePages counts are plain numbers)."""
    return {name: int(value) for name, value in re.findall(r"^([\w()]+):\s+(\d+)", text, re.MULTILINE)}


def memory(text: str) -> dict[str, float | None]:
    """Sum /proc/meminfo up: {"total_gib", "available_gib", "available_pct", "swap_used_gib", "cached_gib"}."""
    kib = meminfo(text)
    total, available = kib.get("MemTotal"), kib.get("MemAvailable")
    swap = kib["SwapTotal"] - kib["SwapFree"] if "SwapTotal" in kib and "SwapFree" in kib else None
    return {
        "total_gib": _gib(total),
        "available_gib": _gib(available),
        "available_pct": round(100 * available / total, 2) if total and available is not None else None,
        "swap_used_gib": _gib(swap),
        "cached_gib": _gib(kib.get("Cached")),
    }


def _gib(kib: int | None) -> float | None:
    return None if kib is None else round(kib / _KIB_PER_GIB, 2)


def psi(text: str | None) -> dict[str, float | int] | None:
    """Read /proc/pressure/memory: {"some_avg10", …, "some_total_us", "full_avg10", …}; None for what is no PSI.

    avg are percent of time, total microseconds since boot. In a container the file is the host's.
    """
    found: dict[str, float | int] = {}
    for kind, fields in re.findall(r"^(some|full) (avg10=.*)$", text or "", re.MULTILINE):
        for name, value in re.findall(r"(avg\d+|total)=(\d+(?:\.\d+)?)(?!\S)", fields):
            if name == "total" and value.isdigit():
                found[f"{kind}_total_us"] = int(value)
            elif name != "total":
                found[f"{kind}_{name}"] = float(value)
    return found or None


def read_psi(read: Callable[[], str]) -> dict[str, Any]:
    """Read the pressure through ``read``: {"psi": numbers | None, "source": "psi" | "MemAvailable", "why": None | str}.

    The file may be missing (no CONFIG_PSI), or open and then fail to read (CONFIG_PSI_DEFAULT_DISABLED: needs psi=1).
    Both mean "unknown", so the caller falls back to MemAvailable and says so.
    """
    try:
        text = read()
    except OSError as error:
        return {"psi": None, "source": "MemAvailable", "why": f"memory pressure cannot be read: {error}"}
    numbers = psi(text)
    if numbers is None:
        return {"psi": None, "source": "MemAvailable", "why": f"memory pressure is not PSI: {text[:60]!r}"}
    return {"psi": numbers, "source": "psi", "why": None}


def stalled_share(before: Mapping[str, float | int], after: Mapping[str, float | int], seconds: float) -> float:
    """Return the share of time in which some task stalled between two samples; avg10 lags behind it."""
    return (after["some_total_us"] - before["some_total_us"]) / (seconds * 1e6)


def pressure_verdict(
    available_gib: float | None,
    numbers: Mapping[str, float | int] | None = None,
    *,
    warn_gib: float,
    floor_gib: float,
    full_avg10: float,
) -> dict[str, Any]:
    """Judge a serving host: {"verdict": "ok" | "warn" | "kill" | "unknown", "why"}.

    A healthy GB10 serves with 2-4 GiB available (2.9 %) and swap in use, so neither a percentage nor swap decides: only
    an absolute floor, or tasks that all stall (``full`` PSI avg10 in percent) while little is left.
    """
    if available_gib is None:
        return {"verdict": "unknown", "why": "MemAvailable is unknown"}
    if available_gib < floor_gib:
        return {"verdict": "kill", "why": f"{available_gib} GiB available, the floor is {floor_gib}"}
    if available_gib < warn_gib:
        stalled = numbers.get("full_avg10", 0.0) if numbers else 0.0
        if stalled >= full_avg10:
            return {
                "verdict": "kill",
                "why": f"{available_gib} GiB available, all tasks stall {stalled} % of the time",
            }
        return {"verdict": "warn", "why": f"{available_gib} GiB available: how a serving GB10 looks"}
    return {"verdict": "ok", "why": f"{available_gib} GiB available"}


def buddyinfo(text: str, *, page_bytes: int = 4096) -> list[dict[str, Any]]:
    """Read /proc/buddyinfo: [{"node", "zone", "free_blocks": [count by order], "free_bytes", "largest_order"}]."""
    zones = []
    for node, zone, counts in re.findall(r"^Node (\d+), zone\s+(\S+)\s+([\d ]+)$", text, re.MULTILINE):
        blocks = [int(count) for count in counts.split()]
        zones.append(
            {
                "node": int(node),
                "zone": zone,
                "free_blocks": blocks,
                "free_bytes": sum(count * page_bytes << order for order, count in enumerate(blocks)),
                "largest_order": max((order for order, count in enumerate(blocks) if count), default=None),
            }
        )
    return zones


_APP_COLUMNS = 4

# --- nvidia-smi -------------------------------------------------------------------------------------------------------

_CSV_NAMES = {
    "utilization.gpu": "util_pct",
    "power.draw": "power_w",
    "temperature.gpu": "temp_c",
    "pci.bus_id": "bus_id",
}


def _number(text: str) -> int | float | str | None:
    value = text.strip()
    # The tool brackets whatever is no value: "[N/A]", "[Unknown Error]", "[GPU requires reset]".
    if value.startswith("[") or value.lower() in _UNKNOWN:
        return None
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?: ?(?:MiB|W|%|C|MHz))?", value)
    if match is None:
        return value
    return float(match[1]) if "." in match[1] else int(match[1])


def nvidia_smi_csv(text: str, fields: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Read ``nvidia-smi --query-gpu=… --format=csv``: one dict a GPU; ``fields`` names a headerless list's columns.

    memory.total becomes memory_total (MiB), utilization.gpu util_pct, power.draw power_w, temperature.gpu temp_c;
    others keep their name with "_" for ".". "[N/A]" is None. ``memory_source`` says where the memory must be read: on a
    GB10 in /proc/meminfo.
    """
    rows = _csv_rows(text)
    header = fields if fields is not None else rows.pop(0) if rows else []
    names = [re.sub(r" \[.*\]$", "", name) for name in header]
    gpus = []
    for row in rows:
        gpu = {
            _CSV_NAMES.get(name, name.replace(".", "_")): _number(value)
            for name, value in zip(names, row, strict=False)
        }
        known = any(isinstance(gpu.get(f"memory_{part}"), int | float) for part in ("total", "used", "free"))
        gpus.append({**gpu, "memory_source": "nvidia-smi" if known else "/proc/meminfo"})
    return gpus


def compute_apps_csv(text: str) -> list[dict[str, Any]]:
    """Read ``nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv``, header or not.

    [{"gpu_uuid", "pid", "name", "used_mib"}]. It works on a GB10, but the sum over processes is not all that is used.
    """
    apps = []
    for row in _csv_rows(text):
        if len(row) < _APP_COLUMNS or not row[1].isdigit():
            continue  # the header has no pid
        # A process name may hold a comma.
        apps.append(
            {"gpu_uuid": row[0], "pid": int(row[1]), "name": ", ".join(row[2:-1]), "used_mib": _number(row[-1])}
        )
    return apps


def _csv_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.strip()]
    return [[cell.strip() for cell in row] for row in csv.reader(lines, skipinitialspace=True)]


def drained(apps: Iterable[Mapping[str, Any]], serving_pids: Collection[int]) -> bool:
    """Tell whether a stopped container gave the GPU back: none of its processes is a compute app (Xorg may stay)."""
    return not any(app["pid"] in serving_pids for app in apps)


_TABLE_HEADER = re.compile(
    r"^\|\s*(?P<index>\d+)\s+(?P<name>\S.*?)\s+(?:On|Off|N/A)\s*"
    r"\|\s*(?P<bus_id>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s+\S+\s*\|\s*(?P<ecc>\S+)\s*\|"
)
_TABLE_ROW = re.compile(
    r"^\|\s*(?P<fan>\S+)\s+(?P<temp>\d+)C\s+(?P<perf>P\d+|N/A)\s+(?P<power>[\d.]+W|N/A)\s*/\s*(?P<cap>[\d.]+W|N/A)\s*"
    r"\|\s*(?P<memory>[^|]*?)\s*\|\s*(?P<util>\d+%|N/A)\s"
)


def nvidia_smi_table(text: str) -> list[dict[str, Any]]:
    """Read the table that plain ``nvidia-smi`` prints: one dict a GPU, None for "N/A" and "Not Supported".

    {"index", "name", "bus_id", "ecc", "fan_pct", "temp_c", "perf", "power_w", "power_cap_w", "memory" (None |
    {"used_mib", "total_mib"}), "util_pct"}; half a GPU (one of its two rows) gives what that row says.
    """
    gpus: list[dict[str, Any]] = []
    open_header = False
    for line in text.splitlines():
        if header := _TABLE_HEADER.match(line.strip()):
            gpus.append(
                {
                    "index": int(header["index"]),
                    "name": header["name"],
                    "bus_id": header["bus_id"],
                    "ecc": _number(header["ecc"]),
                }
            )
            open_header = True
        elif row := _TABLE_ROW.match(line.strip()):
            if not open_header:
                gpus.append({})
            open_header = False
            sizes = re.fullmatch(r"(\d+)MiB\s*/\s*(\d+)MiB", row["memory"])
            gpus[-1].update(
                fan_pct=_number(row["fan"].replace("%", " %")),
                temp_c=int(row["temp"]),
                perf=_number(row["perf"]),
                power_w=_number(row["power"]),
                power_cap_w=_number(row["cap"]),
                memory={"used_mib": int(sizes[1]), "total_mib": int(sizes[2])} if sizes else None,
                util_pct=_number(row["util"]),
            )
    return gpus


# --- fabric -----------------------------------------------------------------------------------------------------------


def ibdev2netdev(text: str) -> dict[str, Any]:
    """Read ``ibdev2netdev``: {"links": [{"device", "port", "netdev", "up", "physical"}], "up", "physical_ports_up"}.

    ``up`` is [[device, netdev]]. On a DGX Spark each QSFP port shows twice, once per PCIe domain: rocep1s0f1 and
    roceP2p1s0f1 are one port, so two "Up" lines are one cable. Names differ by the case of one letter and are kept.
    """
    links = []
    for device, port, netdev, state in re.findall(r"^(\S+) port (\d+) ==> (\S+) \((\w+)\)", text, re.MULTILINE):
        # "P2" is the PCIe domain; domain 0 is not printed.
        physical = f"{re.sub(r'P[0-9]+(?=p[0-9])', '', device)}/{port}"
        links.append({"device": device, "port": int(port), "netdev": netdev, "up": state == "Up", "physical": physical})
    up = [link for link in links if link["up"]]
    return {
        "links": links,
        "up": [[link["device"], link["netdev"]] for link in up],
        "physical_ports_up": len({link["physical"] for link in up}),
    }
