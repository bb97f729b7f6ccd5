"""``python -m lockstep_core parse-log FILE``: what an engine log proves, for a person or as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from . import enginelog, files

_LIMIT = 1 << 30  # a server that logged every request for weeks


def cli_parse_log(path: str, as_json: bool) -> int:  # noqa: FBT001 - the signature agreed with the command line
    """Print the facts of the log at ``path`` ("-" is standard input); return 0.

    Raises LockstepError if the file cannot be read.
    """
    text = sys.stdin.read() if path == "-" else files.read_bytes(path, _LIMIT).decode(errors="replace")
    events = enginelog.parse(text)
    known = enginelog.facts(events)
    known["root_cause"] = enginelog.root_cause(known["faults"])
    known["decode_lines"] = sum(event["kind"] == "decode" for event in events)
    sys.stdout.write(json.dumps(known, indent=2, sort_keys=True) + "\n" if as_json else render(known))
    return 0


def render(known: dict[str, Any]) -> str:
    """Render facts as lines for a person."""
    ready = "ready (head)" if known["ready"] else "ready (worker)" if known["worker_ready"] else "not ready"
    if known["shutdown"]:
        ready += ", then stopped in order"
    tactics = known["tactics"]
    lines = [
        f"stage     {known['stage']}; {ready}",
        f"pool      {known['pool_tokens'] if known['pool_tokens'] is not None else 'unknown'} tokens",
        f"tactics   {tactics['state']} ({tactics['detail']}), {tactics['files']} files",
    ]
    for entry in known["packed"]:
        rows = "" if entry["rows"] is None else f" rows [{entry['rows'][0]}, {entry['rows'][1]})"
        lines.append(f"engram    rank {entry['rank']} layer {entry['layer']}{rows} packed={entry['packed']}")
    lines += [f"adapter   {switch}: {state}" for switch, state in known["adapters"].items()]
    lines += [f"warning   {entry['warning']} x{entry['count']}: {entry['line'][:100]}" for entry in known["warnings"]]
    lines += [
        f"fault     {fault['fault']} ({fault['severity']}) x{fault['count']} rank {fault['ranks'] or '?'} "
        f"line {fault['line_no']}: {fault['text'][:160]}"
        for fault in known["faults"]
    ]
    cause = known["root_cause"]
    if cause is not None:
        lines.append(
            f"cause     {cause['fault']}, line {cause['line_no']}"
            + (f": {cause['advice']}" if "advice" in cause else "")
        )
    elif known["faults"]:
        lines.append("cause     not in these lines: look further up, and at the other ranks")
    return "\n".join(lines) + "\n"
