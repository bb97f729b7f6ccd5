"""A head's log, connections and own counts -> the requests that somebody else has in flight there.

Three witnesses, none of which is enough alone.

- The established connections: without one nobody waits for anything. But a client keeps its connection for a while when
  it has its answer (SGLang closes it after 5 s), and may open one before it asks.
- The log has a line for each request when its answer begins: at a stream's first token, at the end of any other answer.
- ``/v1/loads`` knows how many requests run and wait, but not whose, and it is a picture that the scheduler takes after
  each prefill, every 15th decode step, and at least every second while it is idle (0.5.21: load_snapshot.py). A request
  in its prefill or its first steps is in no count; what shows then is that the picture grows old.

So the counts and the picture's age say whether there is traffic, and the connections, by their last line, which.
Health probes and monitoring do not count: they are GETs, and no GET generates. A health probe's own token is never in
the counts.
"""

from __future__ import annotations

import re
from datetime import datetime
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Request = dict[str, Any]

STREAMING = "streaming"
WAITING = "waiting for its answer"
#: SGLang closes a connection 5 s after its last answer (SGLANG_TIMEOUT_KEEP_ALIVE); a second for clocks and rounding.
KEEP_ALIVE_S = 6.0
#: A picture older than this was not taken by an idle scheduler: that takes one a second, even with --sleep-on-idle.
STALE_S = 2.5
#: One older than this was not taken by a busy one either: 15 steps, or a chunk of prefill, take seconds. It hangs.
HUNG_S = 60.0

#: States of a socket as the kernel prints them.
ESTABLISHED = "01"
LISTENING = "0A"
_STATE = 3
_INODE = 9
_V4_DIGITS = 8
_READS = {"GET", "HEAD", "OPTIONS"}
_REFUSED = 400  # HTTP status from which on there was no answer to wait for
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# "2026-11-29T11:39:23.123456789Z [2026-11-29 11:39:23] INFO:     127.0.0.1:55698 - "POST /generate HTTP/1.1" 200 OK"
_ACCESS = re.compile(
    r"^(?:(?P<utc>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)[.\d]*Z )?\[(?P<date>\d{4}-\d\d-\d\d) (?P<time>\d\d:\d\d:\d\d)\] "
    r'INFO: +(?P<address>\S+):(?P<port>\d+) - "(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+" (?P<status>\d{3})',
    re.MULTILINE,
)


class Socket(NamedTuple):
    """A TCP socket of one network namespace; ``peer`` is the far end's address in the kernel's own hex digits."""

    state: str
    port: int
    peer: str
    peer_port: int
    inode: str


def client(address: str, port: int) -> str:
    """Write one end of a connection as ``10.0.0.5:41234`` or ``[fd00::5]:41234``; an IPv4-mapped address is IPv4."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        return f"{ip.ipv4_mapped}:{port}" if ip.ipv4_mapped else f"[{ip}]:{port}"
    return f"{ip}:{port}"


def sockets(tables: str) -> Iterator[Socket]:
    """Read the text of /proc/net/tcp, of tcp6 or of both; their headings are no sockets."""
    for line in tables.splitlines():
        fields = line.split()  # number local remote state queues timer retransmits user timeout inode …
        if len(fields) > _STATE and ":" in fields[1]:
            (_, port), (peer, peer_port) = fields[1].split(":"), fields[2].split(":")
            yield Socket(fields[_STATE], int(port, 16), peer, int(peer_port, 16), "".join(fields[_INODE : _INODE + 1]))


def connections(tables: str, port: int) -> list[str]:
    """Clients with an established connection to ``port``, from the text of /proc/net/tcp, of tcp6 or of both.

    The kernel prints an address as 32-bit words of its own byte order: little-endian on x86 and on ARM.
    """
    found = []
    for socket in sockets(tables):
        if socket.state == ESTABLISHED and socket.port == port:
            far = socket.peer
            words = (bytes.fromhex(far[at : at + _V4_DIGITS])[::-1] for at in range(0, len(far), _V4_DIGITS))
            found.append(client(str(ip_address(b"".join(words))), socket.peer_port))
    return sorted(found)


def answers(log: str) -> dict[str, Request]:
    """Each client's last access line: ``{client: {"method", "path", "status", "since" (UTC, ISO 8601)}}``.

    With docker's own time before each line the time is UTC whatever the container's zone is; without it, the engine's
    own time is taken for UTC, which is right for an image that sets no zone.
    """
    found = {}
    for match in _ACCESS.finditer(_ANSI.sub("", log)):
        since = (match["utc"] or f"{match['date']}T{match['time']}") + "Z"
        try:
            whose = client(match["address"], int(match["port"]))
        except ValueError:  # a proxy's header, of which the engine believes every word
            continue
        found[whose] = {
            "method": match["method"],
            "path": match["path"].partition("?")[0],
            "status": int(match["status"]),
            "since": since,
        }
    return found


def counts(loads: Mapping[str, Any]) -> dict[str, Any]:
    """What /v1/loads says, over all its ranks: ``{"running", "waiting", "at" (UNIX time of the oldest picture)}``.

    A prompt that is prefilled in chunks is in neither count, but its tokens are still to come: it counts as running.
    Raises LockstepError for an answer without these.
    """
    try:
        ranks = loads["loads"]
        running = sum(int(rank["num_running_reqs"]) for rank in ranks)
        waiting = sum(int(rank["num_waiting_reqs"]) for rank in ranks)
        chunked = any(rank["num_waiting_uncached_tokens"] and not rank["num_waiting_reqs"] for rank in ranks)
        at = min(float(rank["timestamp"]) for rank in ranks)
    except (KeyError, TypeError, ValueError) as error:
        raise LockstepError(
            "the answer of /v1/loads has another form",
            found=str(loads)[:200],
            expected='{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "timestamp": …}]}',
            next_step="compare the engine's version with the pinned image's",
        ) from error
    return {"running": max(running, int(chunked)), "waiting": waiting, "at": at}


def in_flight(log: str, clients: Sequence[str], counted: Mapping[str, Any] | None, *, now: float) -> dict[str, Any]:
    """Tell what is in flight at ``now`` (UNIX time).

    ``clients`` is ``connections``, ``counted`` is ``counts`` or None where the engine does not tell. Returns

    - "state": "idle"; "busy"; "quiet" (the counts are zero and fresh, which a request's first moments look like too:
      idle if the next picture says so again); "hung" (the scheduler took no picture for a minute while a client waits);
    - "requests": [{"client", "method", "path", "since", "state"}], oldest first. One that waits for its answer has no
      line yet: its method, path and since are None. With counts and without a single access line in the log
      (--log-level warning) none is named;
    - "running", "waiting": the counts, None where unknown; "age": the picture's, in seconds.
    """
    lines = answers(log)
    known = _known(lines, clients, now)
    requests, age = list(known["sure"]), 0.0
    if counted is None:
        requests += [*known["recent"], *known["silent"]]
        state = "busy" if requests else "idle"
    else:
        total, age = counted["running"] + counted["waiting"], now - counted["at"]
        state = "busy" if total or age > STALE_S else "quiet"
        if clients and age > HUNG_S:
            state = "hung"
        if not total:  # too early to be counted: who has no answer yet waits for one, else an answer has just begun
            requests = [*requests, *known["silent"]] or known["recent"]
        elif total > len(requests):
            requests += [*known["silent"], *known["recent"], *known["other"]][: total - len(requests)]
        requests = requests if lines else []
    return {
        "state": state if clients else "idle",
        "requests": sorted(requests, key=lambda request: (request["since"] or "~", request["client"])),
        "running": None if counted is None else counted["running"],
        "waiting": None if counted is None else counted["waiting"],
        "age": round(age, 1),
    }


def _known(lines: Mapping[str, Request], clients: Sequence[str], now: float) -> dict[str, list[Request]]:
    """Sort clients by what their last line says of a request that is in flight now.

    ``sure``: the answer began longer ago than an idle connection lives. ``silent``: no line yet. ``recent``: the answer
    began just now, or it ended just now. ``other``: the last line is no generation's.
    """
    known: dict[str, list[Request]] = {"sure": [], "silent": [], "recent": [], "other": []}
    for name in clients:
        line = lines.get(name)
        if line is None:
            known["silent"].append(_request(name, WAITING))
        elif line["method"] in _READS or line["status"] >= _REFUSED:
            known["other"].append(_request(name, WAITING))
        else:
            age = now - datetime.fromisoformat(line["since"]).timestamp()
            known["sure" if age > KEEP_ALIVE_S else "recent"].append(_request(name, STREAMING, line))
    return known


def _request(name: str, state: str, line: Mapping[str, Any] | None = None) -> Request:
    known = {key: line[key] if line else None for key in ("method", "path", "since")}
    return {"client": name, **known, "state": state}


def number(seen: Mapping[str, Any]) -> int:
    """How many requests are in flight: as many as are known by name, or more by the engine's counts."""
    return max(len(seen["requests"]), (seen["running"] or 0) + (seen["waiting"] or 0), int(seen["state"] == "busy"))


def summary(seen: Mapping[str, Any]) -> str:
    """Say in one line what is in flight, with the oldest request."""
    count = number(seen)
    said = f"{count} request{'' if count == 1 else 's'} in flight"
    if not seen["requests"]:
        return said
    oldest = seen["requests"][0]
    if oldest["since"] is None:
        return f"{said}, the first: {oldest['client']} {oldest['state']}"
    return f"{said}, oldest since {oldest['since'][11:19]} ({oldest['client']} {oldest['method']} {oldest['path']})"


def refusal(seen: Mapping[str, Any], *, host: str, seconds: float) -> LockstepError:
    """Put requests that did not end in time into words."""
    names = [
        f"{request['client']} {request['method']} {request['path']}, {request['state']} since {request['since']}"
        if request["since"]
        else f"{request['client']}, {request['state']}"
        for request in seen["requests"]
    ]
    unknown = number(seen) - len(names)
    return LockstepError(
        f"{number(seen)} request(s) still in flight after {seconds:.0f} s; nothing was stopped",
        host=host,
        rank=0,  # the head's, wherever it is
        found="; ".join(
            _shown(names) + ([f"{unknown} more that the log and the connections do not name"] * (unknown > 0))
        ),
        expected="a moment without a request",
        next_step="run again later, wait longer with -e drain_timeout=600, or end them with -e drain_then=abort",
    )


def _shown(names: Sequence[str], most: int = 16) -> list[str]:
    return [*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])]
