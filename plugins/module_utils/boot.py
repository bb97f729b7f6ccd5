"""A rank's container and log during a boot -> how far it is, and what to tell a person when it fails.

The head is ready when its log says so and its /health answers 200: the log line can come before the port accepts. A
worker serves a dummy /health that is always 200, so only its log counts: the end of its scheduler's start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import enginelog
from .errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Last lines of a log that a report carries.
TAIL = 40
HEALTHY = 200
_LIVING = ("created", "running", "restarting", "paused")
# Counted at every step or request: of no use in following a boot.
_CHATTER = ("decode", "prefill", "http", "progress", "shutdown")


def judge(
    log: str, container: Mapping[str, Any] | None, *, role: str, health: int | None = None, rank: int | None = None
) -> dict[str, Any]:
    """Tell how far a rank's boot is.

    ``container`` is docker_api.container_facts, None if there is none; ``health`` the status of /health, None if it
    did not answer. Returns {"state": "starting" | "ready" | "fatal" | "exited", "stage", "facts" (enginelog.facts),
    "events" (those that a person may want to see), "cause" (the first fault that no other brought about, None if
    unknown), "log_tail", "present" (whether there is a container), "exit_code", "oom_killed"}.
    """
    events = enginelog.parse(log)
    facts = enginelog.facts(events, rank=rank)
    alive = container is not None and container["state"] in _LIVING and not container["error"]
    fatal = any(fault["severity"] == "fatal" for fault in facts["faults"])
    ready = facts["ready"] and health == HEALTHY if role == "head" else facts["worker_ready"]
    running = container is not None and container["state"] == "running"
    return {
        "state": "exited" if not alive else "fatal" if fatal else "ready" if ready and running else "starting",
        "stage": facts["stage"],
        "facts": facts,
        "events": [event for event in events if event["kind"] not in _CHATTER],
        "cause": enginelog.root_cause(facts["faults"]),
        "log_tail": log.splitlines()[-TAIL:],
        "present": container is not None,
        "exit_code": None if container is None or alive else container["exit_code"],
        "oom_killed": bool(container and container["oom_killed"]),
    }


def failure(seen: Mapping[str, Any], *, host: str, rank: int | None, container: str) -> LockstepError:
    """Put the end of a boot into words: ``seen`` is what ``judge`` said of a rank that is fatal or exited."""
    cause, faults = seen["cause"], seen["facts"]["faults"]
    said = cause or (faults[0] if faults else None)
    own_rank = rank if rank is not None or said is None else said["rank"]
    last = next((line for line in reversed(seen["log_tail"]) if line.strip()), "no line at all")
    if said is not None:
        found = f"{said['text']} (line {said['line_no']} of the log)"
        advice = said.get("advice") or "read the log's last lines (log_tail) and the other ranks' logs"
        if cause is None:
            advice = f"that is a consequence: look for the cause in the other ranks' logs; {advice}"
    elif seen["oom_killed"]:
        found, advice = "the kernel killed it for memory", "free memory on this host: page cache, helper processes"
    elif not seen["present"]:
        found, advice = f"there is no container {container}", "see what removed it, and launch again"
    else:
        found = f"exit code {seen['exit_code']} and no line that names a cause; the last line: {last}"
        advice = f"read the log: docker logs {container}"
    what = said["fault"] if said is not None else "its container ended"
    return LockstepError(
        f"the boot failed during {seen['stage']!r}: {what}",
        host=host,
        rank=own_rank,
        found=found,
        expected="a boot without a fatal line",
        next_step=advice,
    )


def overdue(seen: Mapping[str, Any], *, host: str, rank: int | None, seconds: float) -> LockstepError:
    """Put a boot that took too long into words."""
    last = next((line for line in reversed(seen["log_tail"]) if line.strip()), "no line at all")
    return LockstepError(
        f"not ready after {seconds:.0f} s",
        host=host,
        rank=rank,
        found=f"stage {seen['stage']!r}; the last line: {last}",
        expected="ready within the time limit",
        next_step="if the stage still moves, allow more time; if not, look at the other ranks",
    )
