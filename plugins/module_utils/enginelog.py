"""SGLang log text -> typed events -> facts of one rank: stage, packed, pool, tactics, ready, faults.

Log lines are read by ``name: value`` and ``key=value`` pairs, never by position: the set of fields changes between
builds (2024 to 0.5.23, plain and DSV4 pools, with and without speculation). Faults are matched at the start of a
message only: a healthy boot is full of lines that contain "failed", "error", "inf" or "out of memory", and a logged
prompt may contain anything. What a fault *causes* (SIGQUIT, kill_process_tree, a peer's closed socket) is kept apart
from the fault itself, so that the first cause is named and not the loudest line.

Sizes that the engine prints as "GB" are GiB (it divides by 2**30) and carry the suffix ``_gib`` here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Event = dict[str, Any]
Facts = dict[str, Any]
Fault = dict[str, Any]

#: KV pages of the DSV4 pools hold 256 tokens, so a pool pinned to N tokens holds floor(N / 256) * 256.
PAGE_TOKENS = 256
#: SGLang's --decode-log-interval default: one "Decode batch" line per this many decode steps.
DECODE_LOG_INTERVAL = 40
#: FlashInfer autotunes once for the target and once for the draft model: two cache keys per boot.
TACTIC_KEYS = 2
_UNAVAILABLE = 503  # what /health answers until the engine is warm
#: The stages of a boot, in the order of a cold start.
STAGES = ("starting", "init parallel", "load weights", "kv pool", "autotune", "graph capture", "warm-up", "ready")

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DOCKER_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) ")
# Seen: a date and a time with DP, TP, EP, PP tags; the time alone (2024); milliseconds; the tags alone; a gpu number.
_STAMP = re.compile(
    r"\[(?:(?:(?P<date>\d{4}-\d\d-\d\d)[ T])?(?P<time>\d\d:\d\d:\d\d)(?:[.,]\d+)?(?P<tags>(?: [A-Z_]+\d+)*)"
    r"|(?P<bare>[A-Z]+\d+(?: [A-Z_]+\d+)*)|gpu[=_](?P<gpu>\d+))\]"
    r"(?: \[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\])?[ \t]*"
)
# torch's C++ logger: "[rank1]:[E909 08:45:30.126 ProcessGroupNCCL.cpp:732] message"
_TORCH = re.compile(r"^(?:\[rank(?P<rank>\d+)\]:\s*)?\[(?P<level>[EFW])\d{3,4} [\d:.]+ [\w.]+:\d+\]\s*")
_TORCH_RANK = re.compile(r"^\[rank(?P<rank>\d+)\]:\s?")
_PROGRESS = re.compile(r"(?:\d+% Completed \||\d+%\|[^|]*\|) *(?P<done>\d+)/(?P<total>\d+) \[")
_PROGRESS_END = re.compile(r"(?:it/s|s/it|\?it/s)\]")


@dataclass(frozen=True)
class _Line:
    number: int
    raw: str
    message: str
    stamped: bool = False
    date: str | None = None
    time: str | None = None
    tp: int | None = None
    ep: int | None = None
    level: str | None = None

    @property
    def ts(self) -> str | None:
        return f"{self.date} {self.time}" if self.date and self.time else None


def _split(text: str) -> list[_Line]:
    lines: list[_Line] = []
    for number, whole in enumerate(text.split("\n"), 1):
        # A progress bar rewrites its line with "\r" and may be glued to the next message.
        for part in whole.split("\r"):
            clean = _DOCKER_STAMP.sub("", _ANSI.sub("", part)).rstrip()
            if not clean and lines and whole:
                continue
            stamp = _STAMP.search(clean)
            if stamp and stamp.start() > 0 and _PROGRESS_END.search(clean[: stamp.start()]):
                lines.append(_line(number, clean[: stamp.start()]))
                clean = clean[stamp.start() :]
            lines.append(_line(number, clean))
    return lines


def _line(number: int, clean: str) -> _Line:
    stamp = _STAMP.match(clean)
    if stamp:
        tags = dict(re.findall(r"([A-Z_]+)(\d+)", stamp["tags"] or stamp["bare"] or ""))
        tp = tags.get("TP", stamp["gpu"])
        return _Line(
            number,
            clean,
            clean[stamp.end() :],
            stamped=True,
            date=stamp["date"],
            time=stamp["time"],
            tp=int(tp) if tp is not None else None,
            ep=int(tags["EP"]) if "EP" in tags else None,
        )
    torch = _TORCH.match(clean)
    if torch:
        rank = int(torch["rank"]) if torch["rank"] else None
        return _Line(number, clean, clean[torch.end() :], stamped=True, tp=rank, level=torch["level"])
    ranked = _TORCH_RANK.match(clean)
    if ranked:
        return _Line(number, clean, clean[ranked.end() :], tp=int(ranked["rank"]))
    return _Line(number, clean, clean)


# --- values -----------------------------------------------------------------------------------------------------------


def _value(text: str) -> int | float | bool | str | None:
    text = text.strip()
    if text in {"True", "False"}:
        return text == "True"
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    # "140." is what a line says that was read while it was being written.
    if re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", text):
        return float(text)
    # "nan" and "inf" are no numbers anyone can compute with: unknown.
    return None if text.lower().lstrip("+-") in {"", "nan", "inf", "none", "n/a"} else text


def _name(text: str) -> str:
    """``"#running-req"`` -> ``running_req``; the unit "(token/s)" goes."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"\([^)]*\)", "", text).strip().lower()).strip("_")


def _with_unit(name: str, text: str) -> tuple[str, Any]:
    text = text.strip().rstrip(".") if not re.search(r"\d\.\d*$", text.strip()) else text.strip()
    if text.endswith("%"):
        return f"{name}_pct", _value(text[:-1])
    if text.endswith((" GB", " GiB")):
        return f"{name.removesuffix('_bytes')}_gib", _value(text.rsplit(" ", 1)[0])
    if text.endswith(" s"):
        return f"{name}_s", _value(text[:-2])
    return name, _value(text)


def _pairs(body: str, separator: str) -> dict[str, Any]:
    """Fields of ``name<separator>value, name<separator>value,``; what is no pair is passed over."""
    found: dict[str, Any] = {}
    for part in body.split(","):
        name, sep, value = part.rpartition(separator)
        if sep and _name(name):
            key, parsed = _with_unit(_name(name), value)
            found[key] = parsed
    return found


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FaultRule:
    fault: str
    pattern: re.Pattern[str]
    #: What other faults bring about: never the root cause while another one is known.
    consequence: bool = False
    #: How an orderly stop looks too: no fault after "SIGTERM received".
    shutdown: bool = False
    severity: str = "fatal"


def _rule(
    fault: str, pattern: str, *, consequence: bool = False, shutdown: bool = False, severity: str = "fatal"
) -> _FaultRule:
    return _FaultRule(fault, re.compile(pattern), consequence, shutdown, severity)


# What dmesg and the journal put before a line of the kernel.
_KERNEL = r"(?:\w{3} +\d+ [\d:]+ \S+ kernel: )?(?:\[[^\]]*\] ?)?"
# Matched at the start of a whole message (line).
_MESSAGE_RULES = (
    _rule("nan", r"Detected errors during sampling! NaN in the (?:logits|probability)"),
    _rule("kv_exhausted", r"(?:Prefill|Decode) out of memory\. Try to lower your batch size"),
    _rule("host_oom", rf"{_KERNEL}(?:Memory cgroup out of memory|Out of memory): Killed process \d+"),
    # A GB10 says so when host and device together run out; the driver may succeed at the next try.
    _rule("device_oom", rf"{_KERNEL}NVRM: .*NV_ERR_NO_MEMORY", severity="error"),
    _rule("xid", rf"{_KERNEL}NVRM: Xid "),
    _rule("warmup_failed", r"Initialization failed\. (?:warmup|Warmup) error: "),
    _rule("child_died", r"Received sigquit from a child proc", consequence=True, shutdown=True),
    _rule("child_died", r"SIGQUIT received\.", consequence=True, shutdown=True),
    _rule("child_died", r"SIGTERM/SIGQUIT/Exception triggered, but crash dump", consequence=True, shutdown=True),
    _rule(
        "child_died",
        r"Subprocess (?P<process>\S+) \(pid=\d+\) crashed with exit code (?P<exit_code>-?\d+)",
        consequence=True,
        shutdown=True,
    ),
    _rule(
        "child_died",
        r"Scheduler or DataParallelController \d+ terminated with (?P<exit_code>-?\d+)",
        consequence=True,
        shutdown=True,
    ),
    _rule("child_died", r"Rank \d+ scheduler (?:is dead|died)", consequence=True, shutdown=True),
    _rule("child_died", r"kill_process_tree called", consequence=True, shutdown=True),
    _rule("crash", r"(?:Fatal Python error: |!*\s*Segfault encountered|Segmentation fault|Bus error|Aborted \(core)"),
    _rule("crash", r"terminate called after throwing an instance of ", consequence=True, shutdown=True),
    _rule("killed", r"Killed$"),
    _rule("port_taken", r"ERROR:\s+\[Errno 98\] .*address already in use"),
    _rule("bad_arguments", r"\S+: error: (?:unrecognized arguments|argument |the following arguments are required)"),
    _rule("health_timeout", r"Health check failed\. Server couldn't get a response", severity="error"),
)

# Matched anywhere in an exception's text ("ValueError: Loaded weights leave …"), in this order.
_EXCEPTION_RULES = (
    _rule("kv_budget", r"leave no GPU memory for the\s+KV\s+cache"),
    _rule("kv_budget", r"Not enough memory[.;]? .*--?mem[-_]fraction[-_]static"),
    _rule("kv_budget", r"leaves no room for the full\s+KV\s+pool"),
    _rule("kv_exhausted", r"(?:Prefill|Decode) out of memory\. |alloc_req_slots runs out of memory"),
    _rule(
        "oom", r"OutOfMemoryError|CUDA(?: error:)? out of memory|cudaErrorMemoryAllocation|Cuda failure .*out of memory"
    ),
    _rule("host_oom", r"^MemoryError|Cannot allocate memory"),
    _rule("nan", r"contains either `inf`, `nan`|NaN (?:in|detected)"),
    _rule("port_taken", r"[Aa]ddress already in use|EADDRINUSE"),
    _rule("peers_missing", r"[Tt]imed out after \d+ seconds waiting for clients"),
    _rule("collective_timeout", r"Watchdog caught collective operation timeout", consequence=True),
    _rule(
        "peer_lost",
        r"Connection (?:closed|reset) by (?:remote )?peer|gloo/.*(?:Broken pipe|Timed out|Application timeout)"
        r"|ncclRemoteError|remote process exited",
        consequence=True,
        shutdown=True,
    ),
    _rule("nccl", r"NCCL error|ncclUnhandled|ncclSystemError|ncclInternalError"),
    _rule("cuda_error", r"CUDA error: |CUDA driver error|CUBLAS_STATUS_|CUDNN_STATUS_"),
)

_ADVICE = {
    "kv_budget": "Do not raise the memory fraction: above 0.95 it took a host down. Free memory instead: fewer fp8 "
    "twins (DROP), a smaller graph set, page cache, other processes.",
    "oom": "Look at what the arm keeps on the device beside the pool, which is sized before the graphs are captured.",
    "host_oom": "The host ran out of memory, which on a GB10 is the GPU's memory too: look at page cache and helpers.",
    "nan": "Look at the allocator (expandable_segments must be False) and at the last adapter that was switched on.",
    "port_taken": "Find what listens on the port; an old container may still be there.",
    "peers_missing": "A rank never joined: look at the other ranks' logs and at the bootstrap interface.",
    "child_died": "This only says that a process ended: look further up, and at the other ranks.",
    "bad_arguments": "The engine of this image does not know the argument: correct the engine profile.",
}

_WATCHDOG = re.compile(
    r"(?:[\w ]+ )?[Ww]atchdog timeout "
    r"\(self\.watchdog_timeout=(?P<timeout>\d+(?:\.\d+)?)(?:, self\.soft=(?P<soft>True|False))?\)"
)
_HIT = re.compile(r"(?:(?P<process>[\w ]*?) ?hit an exception|Exception in \w+): Traceback \(most recent call last\)")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION_LINE = re.compile(r"(?P<type>[A-Za-z_]\w*(?:\.\w+)*)(?:: (?P<message>.*)|:?)$")
_WHAT = re.compile(r"\s*what\(\): ")
_BARE_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception): ")
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_ANNOUNCED = re.compile(r"fail|error|exception|ignor|warn|unable|could not", re.IGNORECASE)
_STOPPED = {"KeyboardInterrupt", "SystemExit", "asyncio.exceptions.CancelledError"}
_SHUTDOWN = re.compile(r"SIGTERM received|INFO:\s+Shutting down|Gracefully exiting|Gracefully shutting down")

_MEM_FRACTION = re.compile(r"mem[-_]fraction[-_]static\s*=\s*(\d*\.\d+)")
_MINIMUM = re.compile(r"minimum\s+viable\s*=[^=]*=\s*(\d*\.\d+)")
_SUGGESTED = re.compile(r"above\s+(\d*\.\d+)")


def _fault_details(fault: str, text: str) -> dict[str, Any]:
    details: dict[str, Any] = {"advice": _ADVICE[fault]} if fault in _ADVICE else {}
    if fault == "kv_budget":
        for key, pattern in (
            ("mem_fraction_static", _MEM_FRACTION),
            ("minimum_viable", _MINIMUM),
            ("suggested", _SUGGESTED),
        ):
            match = pattern.search(text)
            details[key] = float(match[1]) if match else None
    return details


@dataclass(frozen=True)
class _Traceback:
    end: int  # index of the first line after the block
    type: str | None
    text: str  # "ValueError: message", wrapped lines joined
    rule: _FaultRule | None


def _read_traceback(lines: Sequence[_Line], start: int) -> _Traceback:
    """Read the traceback whose header is ``lines[start]``: the known cause if its chain holds one, else the last."""
    texts, end = _exception_texts(lines, start + 1)
    for rule in _EXCEPTION_RULES:
        for text in texts:
            if rule.pattern.search(text):
                return _Traceback(end, _exception_type(text), text, rule)
    text = texts[-1] if texts else ""
    return _Traceback(end, _exception_type(text), text, None)


def _exception_texts(lines: Sequence[_Line], start: int) -> tuple[list[str], int]:
    texts: list[str] = []
    open_message = False
    for index in range(start, len(lines)):
        message = lines[index].message
        if lines[index].stamped:
            return texts, index
        if message.startswith((" ", "\t", *_CHAIN)) or message in {"", _TRACEBACK}:
            open_message = open_message and message == ""
        elif open_message and not _is_news(lines[index]):
            # The engine's long messages may be wrapped by whatever carried the log.
            texts[-1] += " " + message
        elif _EXCEPTION_LINE.match(message) and not _is_news(lines[index]):
            texts.append(message)
            open_message = True
        else:
            return texts, index
    return texts, len(lines)


def _is_news(line: _Line) -> bool:
    """Tell whether a line ends a wrapped message: one that is known by itself, or a bracketed tag."""
    known = _message_event(line) is not None or any(rule.pattern.match(line.message) for rule in _MESSAGE_RULES)
    return known or line.message.startswith("[") or bool(_WATCHDOG.match(line.message))


def _exception_type(text: str) -> str | None:
    match = _EXCEPTION_LINE.match(text)
    return match["type"] if match else None


# --- events -----------------------------------------------------------------------------------------------------------

_ROWS = re.compile(r"rows=\[(\d+),\s*(\d+)\)")
_RANK = re.compile(r"\brank=(\d+)")
_CACHE_PATH = re.compile(r"autotune/(?P<flashinfer>[^/]+)/(?P<arch>[^/]+)/(?P<key>[0-9a-f]+)/(?P<file>[^/]+)$")
_FILE_RANK = re.compile(r"rank_tp(\d+)")
_RATIO = re.compile(r"#new_token_ratio: (\d*\.?\d+) -> (\d*\.?\d+)")

_USAGE_KEYS = ("token_usage", "full_token_usage", "swa_token_usage", "running_req", "queue_req", "cuda_graph")
_DECODE_KEYS = ("token", "full_token", "swa_token", "accept_len", "accept_rate", "gen_throughput", *_USAGE_KEYS)
_PREFILL_KEYS = (
    *("new_seq", "new_token", "cached_token", "cache_hit_rate_pct", "pending_token", "input_throughput"),
    *_USAGE_KEYS,
)


def step_ms(running_req: int | None, gen_throughput: float | None, accept_len: float | None = None) -> float | None:
    """Return the ms of one decode step: accept_len * running_req / gen_throughput * 1000 (accept_len 1 if None)."""
    if not running_req or not gen_throughput:
        return None
    return round((1 if accept_len is None else accept_len) * running_req / gen_throughput * 1000, 2)


def _batch(match: re.Match[str], _line: _Line) -> Event:
    kind = match["kind"].lower()
    fields: Event = dict.fromkeys(_DECODE_KEYS if kind == "decode" else _PREFILL_KEYS)
    # What is computed with is a number or unknown, whatever a cut or strange line says.
    fields.update(
        {
            name: None if name in fields and isinstance(value, str) else value
            for name, value in _pairs(match["body"], ":").items()
        }
    )
    if match["iteration"]:
        fields["iteration"] = int(match["iteration"])
    if kind == "decode":
        fields["step_ms"] = step_ms(fields["running_req"], fields["gen_throughput"], fields["accept_len"])
    return {"kind": kind, **fields}


def _engram(match: re.Match[str], line: _Line) -> Event:
    rows = _ROWS.search(match["rest"])
    return {
        "kind": "engram",
        "layer": int(match["layer"]),
        "rank": _said_rank(_RANK, match["rest"], line),
        "rows": [int(rows[1]), int(rows[2])] if rows else None,
        "packed": match["packed"] == "True",
    }


def _said_rank(pattern: re.Pattern[str], text: str, line: _Line) -> int | None:
    match = pattern.search(text)
    return int(match[1]) if match else line.tp


def _calculation(match: re.Match[str], _line: _Line) -> Event:
    sizes = _pairs(match["body"], "=")
    # Another branch names the field effective_available_bytes.
    sizes.setdefault("available_gib", sizes.get("effective_available_gib"))
    return {"kind": "pool_calculation", **sizes}


def _kept_tactics(match: re.Match[str], line: _Line) -> Event:
    return {
        "kind": "tactics",
        "state": "reused" if match["what"] == "reused" else "tuned",
        "key": match["key"],
        "file": match["file"],
        "rank": _said_rank(_FILE_RANK, match["file"], line),
    }


def _autotune(match: re.Match[str], line: _Line) -> Event:
    path = _CACHE_PATH.search(match["path"] or "")
    parts = path.groupdict() if path else dict.fromkeys(("flashinfer", "arch", "key", "file"))
    return {"kind": "autotune", **parts, "rank": _said_rank(_FILE_RANK, parts["file"] or "", line)}


def _adapter(match: re.Match[str], _line: _Line) -> Event:
    state = match["state"] if match["why"] is None else f"{match['state']}: {match['why'].strip()}"
    return {"kind": "adapter", "switch": match["switch"], "state": state}


def _retract(match: re.Match[str], _line: _Line) -> Event:
    ratio = _RATIO.search(match["body"])
    return {
        "kind": "kv_retract",
        "retracted_reqs": _pairs(match["body"], ":").get("retracted_reqs"),
        "new_token_ratio": [float(ratio[1]), float(ratio[2])] if ratio else None,
    }


def _http(match: re.Match[str], _line: _Line) -> Event:
    return {"kind": "http", "method": match["method"], "path": match["path"], "status": int(match["status"])}


def _capture(match: re.Match[str], _line: _Line) -> Event:
    return {"kind": f"capture_{match['edge']}", "what": match["what"].strip(), **_pairs(match["body"], "=")}


def _just(kind: str) -> Callable[[re.Match[str], _Line], Event]:
    """Events that carry the ``name=value`` or ``name: value`` pairs of the group ``body`` or ``fields``, or nothing."""

    def build(match: re.Match[str], _line: _Line) -> Event:
        groups = match.groupdict()
        return {"kind": kind, **_pairs(groups.get("body") or "", "="), **_pairs(groups.get("fields") or "", ":")}

    return build


# What each message form becomes; the first that matches the start of a message wins.
_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], _Line], Event]], ...] = tuple(
    (re.compile(pattern), build)
    for pattern, build in (
        (r"(?P<kind>Decode|Prefill) batch(?: \[(?P<iteration>\d+)\])?[,.] *(?P<body>.*)", _batch),
        (r"(?:Exact \S+ )?Engram layer=(?P<layer>\d+)\b(?P<rest>.*)\bpacked=(?P<packed>True|False)\b", _engram),
        # "DSV4" and, in older builds, "DSv4".
        (r"(?i:dsv4 pool sizes: )(?P<body>.*)", _just("pool")),
        (r"(?i:dsv4 memory calculation: )(?P<body>.*)", _calculation),
        (r"(?P<body>max_total_num_tokens=.*)", _just("pool_total")),
        (r"KV Cache is allocated\.? *(?P<fields>.*)", _just("kv_allocated")),
        (r"Memory pool end\. *(?P<body>.*)", _just("pool_end")),
        (r"\[autotune_keep\] (?P<what>reused|tuned and saved) (?P<key>[0-9a-f]+)/(?P<file>\S+)", _kept_tactics),
        (r"\[autotune_keep\] armed", _just("tactics_armed")),
        (r"\[autotune_keep\] moved aside", _just("tactics_aside")),
        (r"Running FlashInfer autotune(?: with cache: (?P<path>\S+))?", _autotune),
        (r"FlashInfer autotune: per-rank caches disagree", _just("autotune_disagree")),
        (r"FlashInfer autotune completed", _just("autotune_end")),
        (r"\[lockstep\] adapter (?P<switch>\w+): (?P<state>armed|not applicable|missing)(?:: (?P<why>.*))?$", _adapter),
        # Not "out of memory" at all: requests go back to the queue and the server lives on.
        (r"(?:Decode out of memory happened|KV cache pool is full\. Retract requests)\.? *(?P<body>.*)", _retract),
        (r'INFO:\s+\S+ - "(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+" (?P<status>\d{3})', _http),
        (r"Init (?:parallel|torch distributed) begin", _just("init_begin")),
        (r"Init (?:parallel|torch distributed) ends?\b\.? *(?P<body>.*)", _just("init_end")),
        (r"Load weight begin\.? *(?P<body>.*)", _just("weights_begin")),
        (r"Load weight end\.? *(?P<body>.*)", _just("weights_end")),
        (r"Capture (?P<what>.*?) ?\b(?P<edge>begin|end)\. *(?P<body>.*)", _capture),
        (r"INFO:\s+Started server process", _just("http_server")),
        (r"Dummy health check server started", _just("dummy_health")),
        (r"The server is fired up and ready to roll", _just("ready")),
        (_SHUTDOWN.pattern, _just("shutdown")),
        (
            r"(?:\S+ )?\S+:\d+:\d+ \[\d+\] .*NCCL WARN ",
            lambda _match, _line: {"kind": "warning", "warning": "nccl_warn"},
        ),
    )
)


def _message_event(line: _Line) -> Event | None:
    for pattern, build in _FORMS:
        if match := pattern.match(line.message):
            return build(match, line)
    if progress := _PROGRESS.search(line.message):
        return {"kind": "progress", "done": int(progress["done"]), "total": int(progress["total"])}
    return None


def parse(text: str) -> list[Event]:
    """Return all that is known in a log: events in the order of the log.

    Every event has ``kind``, ``ts`` ("YYYY-MM-DD HH:MM:SS", None when the line has no date), ``ts_date``, ``ts_time``,
    ``tp``, ``ep`` (None where the line does not say), ``line`` (the text) and ``line_no`` (from 1). Kinds: decode,
    prefill, engram, pool, pool_calculation, pool_total, kv_allocated, tactics, tactics_armed/_aside, autotune,
    autotune_disagree, autotune_end, adapter, kv_retract, http, init_begin/_end, weights_begin/_end, pool_end,
    capture_begin/_end, http_server, dummy_health, ready, shutdown, progress, warning, fault. A fault has ``fault``,
    ``severity`` (fatal: the engine is lost; error: it may live on), ``consequence`` (brought about by another fault),
    ``traceback``, ``exception``, ``text``, and numbers and advice where known.
    """
    lines = _split(text)
    events: list[Event] = []
    stopping = False
    last_ts: str | None = None
    index = 0
    while index < len(lines):
        line = lines[index]
        last_ts = line.ts or last_ts
        following = index + 1
        event: Event | None
        if _HIT.match(line.message) or line.message.startswith(_TRACEBACK):
            event, following = _traceback_event(lines, index, stopping=stopping)
        else:
            event = _message_event(line) or _fault_event(line, stopping=stopping)
        if event is not None:
            stopping = stopping or event["kind"] == "shutdown"
            event = {
                "ts": line.ts or (last_ts if event["kind"] in {"fault", "warning"} else None),
                "ts_date": line.date,
                "ts_time": line.time,
                "tp": line.tp,
                "ep": line.ep,
                "line": line.raw,
                "line_no": line.number,
                **event,
            }
            events.append(event)
        index = following
    return events


def _fault_event(line: _Line, *, stopping: bool) -> Event | None:
    message = line.message
    if watchdog := _WATCHDOG.match(message):
        if watchdog["soft"] == "True":
            # It only dumps stacks, on all ranks, during a long graph capture: nothing dies.
            return {"kind": "warning", "warning": "soft_watchdog", "timeout_s": float(watchdog["timeout"])}
        return _fault("watchdog", message, consequence=True, timeout_s=float(watchdog["timeout"]))
    for rule in _MESSAGE_RULES:
        if match := rule.pattern.match(message):
            return _from_rule(rule, message, match.groupdict(), stopping=stopping)
    if line.level == "W":
        return None
    # An exception's own line without its traceback: cut logs, the what() of a C++ exception, torch's logger.
    loud = line.level in {"E", "F"} or bool(_WHAT.match(message))
    if loud or _BARE_EXCEPTION.match(message):
        for rule in _EXCEPTION_RULES:
            if rule.pattern.search(message):
                details = {"exception": _exception_type(message), "severity": None if loud else _lone(rule)}
                return _from_rule(rule, message.strip(), details, stopping=stopping)
    return None


def _lone(rule: _FaultRule) -> str:
    """Weigh an exception that nobody reports: a lost connection may be a client's, lack of memory is the engine's."""
    return "error" if rule.consequence else rule.severity


def _traceback_event(lines: Sequence[_Line], index: int, *, stopping: bool) -> tuple[Event | None, int]:
    line = lines[index]
    block = _read_traceback(lines, index)
    details: dict[str, Any] = {"traceback": True, "exception": block.type}
    rule = block.rule or _FaultRule("exception", _EXCEPTION_LINE)
    text = block.text or line.message
    before = next((lines[i].message for i in range(index - 1, -1, -1) if lines[i].message.strip()), "")
    announced = bool(_ANNOUNCED.search(before))
    if block.type in _STOPPED:
        return {"kind": "shutdown"}, block.end
    if _HIT.match(line.message) or line.stamped or re.match(r"Process \S+:$", before):
        return _from_rule(rule, text, details, stopping=stopping), block.end
    if block.rule is not None and not rule.consequence and not announced:
        return _from_rule(rule, text, details, stopping=stopping), block.end
    if any(later.stamped and not _is_end(later.message) for later in lines[block.end :]):
        return {"kind": "warning", "warning": "handled_exception", "text": text, **details}, block.end
    # Nothing came after it: perhaps the end of the process. Its exit will tell.
    return _from_rule(rule, text, {**details, "severity": "error"}, stopping=stopping), block.end


def _is_end(message: str) -> bool:
    return bool(_SHUTDOWN.match(message)) or any(
        rule.shutdown and rule.pattern.match(message) for rule in _MESSAGE_RULES
    )


def _from_rule(rule: _FaultRule, text: str, details: Mapping[str, Any], *, stopping: bool) -> Event:
    if stopping and rule.shutdown:
        return {"kind": "shutdown"}
    known = {key: value for key, value in details.items() if value is not None}
    if "exit_code" in known:
        known["exit_code"] = int(known["exit_code"])
    return _fault(rule.fault, text, known.pop("severity", rule.severity), consequence=rule.consequence, **known)


def _fault(fault: str, text: str, severity: str = "fatal", *, consequence: bool = False, **details: object) -> Event:
    return {
        "kind": "fault",
        "fault": fault,
        "severity": severity,
        "consequence": consequence,
        "traceback": False,
        "exception": None,
        "text": text,
        **_fault_details(fault, text),
        **details,
    }


# --- facts ------------------------------------------------------------------------------------------------------------


def _events(log: str | Iterable[Event]) -> list[Event]:
    return parse(log) if isinstance(log, str) else list(log)


def faults(log: str | Iterable[Event], *, rank: int | None = None) -> list[Fault]:
    """Return the faults of a log, each kind once, in the order of appearance, with ``count``, ``rank`` and ``ranks``.

    The argument ``rank`` is the rank whose log it is, for lines that name none.
    """
    merged: dict[tuple[str, str | None], Fault] = {}
    for event in _events(log):
        if event["kind"] != "fault":
            continue
        where = event["tp"] if event["tp"] is not None else rank
        key = (event["fault"], event["exception"] if event["fault"] == "exception" else None)
        known = merged.get(key)
        if known is None:
            merged[key] = {
                **{
                    name: value
                    for name, value in event.items()
                    if name not in {"kind", "ts_date", "ts_time", "tp", "ep"}
                },
                "rank": where,
                "ranks": [] if where is None else [where],
                "count": 1,
            }
            continue
        known["count"] += 1
        if where is not None and where not in known["ranks"]:
            known["ranks"].append(where)
        for name in ("exit_code", "exception"):
            if known.get(name) is None and event.get(name) is not None:
                known[name] = event[name]
    return list(merged.values())


def root_cause(found: Iterable[Fault]) -> Fault | None:
    """Return the first fault not brought about by another one; None when these lines do not hold the cause.

    Faults of several ranks may be given together: they are compared by their time stamps.
    """
    own = [fault for fault in found if not fault["consequence"]]
    fatal = [fault for fault in own if fault["severity"] == "fatal"]
    # Second resolution: sorted() is stable, so faults of one second stay in the order of the log.
    ordered = sorted(fatal or own, key=lambda fault: fault["ts"] or "9999")
    return ordered[0] if ordered else None


def pool(log: str | Iterable[Event], *, pin: int | None = None, page: int = PAGE_TOKENS) -> dict[str, Any]:
    """Return the KV pool in tokens, None where unknown.

    {"calculated", "effective", "page_size", "pin", "at_pin", "available_gib", "agrees_with_total"}. A DSV4 rank prints
    its pool twice, calculated and then clamped by the pin: the last word counts. Only rank 0 prints
    max_total_num_tokens; plain pools print "KV Cache is allocated" on every rank.
    """
    events = _events(log)
    sizes = [event["full"] for event in events if event["kind"] == "pool" and isinstance(event.get("full"), int)]
    calculations = [event for event in events if event["kind"] == "pool_calculation"]
    totals, plain = (
        [event[name] for event in events if event["kind"] == kind and isinstance(event.get(name), int)]
        for kind, name in (("pool_total", "max_total_num_tokens"), ("kv_allocated", "tokens"))
    )
    effective = sizes[-1] if sizes else totals[-1] if totals else plain[0] if plain else None
    calculated = calculations[-1].get("full_token") if calculations else sizes[0] if sizes else None
    return {
        "calculated": calculated,
        "effective": effective,
        "page_size": page,
        "pin": pin,
        "at_pin": None if pin is None or effective is None else effective == pin // page * page,
        "available_gib": calculations[-1].get("available_gib") if calculations else None,
        "agrees_with_total": None if not (sizes and totals) else sizes[-1] == totals[-1],
    }


def _packed(events: Iterable[Event], rank: int | None) -> list[dict[str, Any]]:
    """Return the last word of each (rank, layer); the rows come from the start-up line."""
    found: dict[tuple[int | None, int], dict[str, Any]] = {}
    for event in events:
        if event["kind"] != "engram":
            continue
        where = event["rank"] if event["rank"] is not None else rank
        entry = found.setdefault(
            (where, event["layer"]), {"rank": where, "layer": event["layer"], "rows": None, "packed": event["packed"]}
        )
        entry["packed"] = event["packed"]
        entry["rows"] = event["rows"] or entry["rows"]
    return sorted(found.values(), key=lambda entry: (-1 if entry["rank"] is None else entry["rank"], entry["layer"]))


def tactics(log: str | Iterable[Event]) -> dict[str, Any]:
    """Return what one log says of FlashInfer's tactics.

    ``state`` is "reused" (every key seen was reused), "none" (no autotune at all) or "tuned" (new tactics, or reuse not
    proven); ``detail`` says which: reused, tuned, mixed, disagree, unproven, none. "Running FlashInfer autotune with
    cache" proves nothing: it is printed on a full retune too. Only rank 0 prints the "disagree" line, so its absence on
    a worker is no evidence.
    """
    events = _events(log)
    runs = [event for event in events if event["kind"] == "autotune"]
    kept = [event for event in events if event["kind"] == "tactics"]
    disagree = [event for event in events if event["kind"] == "autotune_disagree"]
    per_key: dict[str, str] = {}
    for event in kept:
        # One tuned rank file makes the key tuned.
        per_key[event["key"]] = "tuned" if "tuned" in {event["state"], per_key.get(event["key"])} else "reused"
    keys = sorted({event["key"] for event in (*runs, *kept) if event["key"] is not None})
    states = set(per_key.values())
    if disagree:
        detail = "disagree"
    elif len(states) > 1:
        detail = "mixed"
    elif states == {"tuned"}:
        detail = "tuned"
    elif states == {"reused"} and set(per_key) == set(keys):
        detail = "reused"
    elif runs or kept:
        detail = "unproven"
    else:
        detail = "none"
    names = sorted({event["file"] for event in (*runs, *kept) if event["file"] is not None})
    paths = [event for event in runs if event["flashinfer"] is not None]
    return {
        "state": detail if detail in {"reused", "none"} else "tuned",
        "detail": detail,
        "files": len({(event["key"], event["file"]) for event in kept or runs if event["file"] is not None}),
        "per_key": per_key,
        "keys": keys,
        "rank_files": names,
        "disagree": bool(disagree),
        "disagree_ranks": sorted({event["tp"] for event in disagree if event["tp"] is not None}),
        "flashinfer": paths[-1]["flashinfer"] if paths else None,
        "arch": paths[-1]["arch"] if paths else None,
    }


def tactics_verdict(
    facts_by_rank: Mapping[int, Facts], *, ranks: Iterable[int], keys: int = TACTIC_KEYS
) -> dict[str, Any]:
    """Tell whether a boot reused its tactics: {"state", "why", "comparable"}.

    "reused" only when every rank reused the same keys, and at least ``keys`` of them (target and draft). Anything
    else has new tactics, hence other greedy text: not comparable with the boot before.
    """
    wanted = sorted(ranks)
    seen = {rank: facts_by_rank[rank]["tactics"] for rank in wanted if rank in facts_by_rank}
    why = [f"rank {rank} has no evidence" for rank in wanted if rank not in seen]
    if seen and all(entry["detail"] == "none" for entry in seen.values()):
        return {"state": "none", "why": why, "comparable": not why}
    everything = sorted({key for entry in seen.values() for key in entry["keys"]})
    if len(everything) < keys:
        why.append(f"{len(everything)} of {keys} cache keys seen")
    for rank, entry in seen.items():
        if entry["detail"] != "reused":
            why.append(f"rank {rank}: {entry['detail']}")
        elif entry["keys"] != everything:
            why.append(f"rank {rank} says nothing of {', '.join(sorted(set(everything) - set(entry['keys'])))}")
    return {"state": "tuned" if why else "reused", "why": why, "comparable": not why}


def stage(log: str | Iterable[Event]) -> str:
    """Return the last known stage of a boot, one of STAGES, with progress if the log tells: "load weights 24/48"."""
    now, progress = STAGES[0], ""
    begins = {
        "init_begin": "init parallel",
        "weights_begin": "load weights",
        "weights_end": "kv pool",
        "pool_calculation": "kv pool",
        "kv_allocated": "kv pool",
        "autotune": "autotune",
        "capture_begin": "graph capture",
        "http_server": "warm-up",
        "dummy_health": "warm-up",
        "ready": "ready",
    }
    for event in _events(log):
        if event["kind"] in begins:
            now, progress = begins[event["kind"]], ""
        elif event["kind"] == "progress" and now in {"load weights", "graph capture"}:
            progress = f" {event['done']}/{event['total']}"
        if now == "ready":
            break
    return now + progress


def facts(log: str | Iterable[Event], *, rank: int | None = None) -> Facts:
    """Return what one rank's log proves. ``rank`` fills in where a line names no rank.

    {"packed": [{"rank", "layer", "rows": [lo, hi] | None, "packed"}], "pool_tokens": int | None, "pool": {…},
    "tactics": {"state", "files", "detail", …}, "stage": str, "ready": bool (the head's last word; HTTP must confirm
    it), "worker_ready": bool (the scheduler's end of init was reached), "shutdown": bool, "faults": [{"fault",
    "severity", "rank", "ranks", "count", "line", "line_no", "ts", …}], "adapters": {switch: "armed" |
    "not applicable: why" | "missing: why"}, "warnings": [{"warning", "count", "line", …}]}
    """
    events = _events(log)
    kinds = {event["kind"] for event in events}
    sizes = pool(events)
    packed = _packed(events, rank)
    found = faults(events, rank=rank)
    unpacked = [entry for entry in packed if not entry["packed"]]
    for entry in unpacked:
        line = next(
            event
            for event in reversed(events)
            if event["kind"] == "engram" and event["layer"] == entry["layer"] and not event["packed"]
        )
        found.append(
            {
                **_fault(
                    "engram_unpacked",
                    f"layer {entry['layer']} is not served from a packed shard",
                    severity="error",
                    layer=entry["layer"],
                ),
                "ts": line["ts"],
                "line": line["line"],
                "line_no": line["line_no"],
                "rank": entry["rank"],
                "ranks": [] if entry["rank"] is None else [entry["rank"]],
                "count": 1,
            }
        )
        found[-1].pop("kind")
    adapters: dict[str, str] = {}
    for event in events:
        if event["kind"] == "adapter":
            adapters[event["switch"]] = event["state"]
        elif event["kind"] == "tactics_armed":
            adapters.setdefault("DSV41_AUTOTUNE_KEEP", "armed")
    return {
        "packed": packed,
        "pool_tokens": sizes["effective"],
        "pool": sizes,
        "tactics": tactics(events),
        "stage": stage(events),
        "ready": "ready" in kinds,
        # Worker ranks serve a dummy /health that is always 200: only the log tells. Old builds do not log its start.
        "worker_ready": "dummy_health" in kinds or bool(kinds & {"pool_end", "pool_total"} and packed),
        "shutdown": "shutdown" in kinds,
        "faults": found,
        "adapters": dict(sorted(adapters.items())),
        "warnings": _warnings(events, sizes),
    }


def _warnings(events: Sequence[Event], sizes: Mapping[str, Any]) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    ready = False
    for event in events:
        ready = ready or event["kind"] == "ready"
        name = event.get("warning")
        if event["kind"] == "kv_retract":
            name = "kv_retract"
        elif (
            event["kind"] == "http"
            and ready
            and event["status"] == _UNAVAILABLE
            and event["path"].startswith("/health")
        ):
            name = "health_503"  # before "ready" this is how a boot looks
        if name is None:
            continue
        line = event.get("text") or event["line"]
        entry = merged.setdefault(name, {"warning": name, "count": 0, "line": line, "line_no": event["line_no"]})
        entry["count"] += 1
    if sizes["agrees_with_total"] is False:
        merged["pool_differs"] = {"warning": "pool_differs", "count": 1, "line": "DSV4 pool sizes", "line_no": None}
    return list(merged.values())


def packed_verdict(
    facts_by_rank: Mapping[int | None, Facts], tp: int, layers: Sequence[int], ranks: Sequence[int] | None = None
) -> dict[str, Any]:
    """Tell whether every layer is served packed on every rank.

    ``facts_by_rank`` is {rank: facts(log)}; the key None holds the facts of a log that several ranks wrote. Silence is
    no proof: the full set of rank x layer must say True, and the row ranges of one layer must not overlap. ``ranks``
    are those that have to, all of ``tp`` by default.
    Returns {"ok", "verdict": "pass" | "fail: …", "tp_size", "required_pairs": n, "found_true_pairs": [[rank, layer]],
    "false_pairs", "missing_pairs", "row_ranges_disjoint"}.
    """
    entries: list[dict[str, Any]] = []
    why: list[str] = []
    for rank, known in facts_by_rank.items():
        for entry in known["packed"]:
            said = rank if entry["rank"] is None else entry["rank"]
            if rank is not None and said != rank:
                why.append(f"the log of rank {rank} speaks of rank {said}")
            entries.append({**entry, "rank": said})
    word = {(entry["rank"], entry["layer"]): entry["packed"] for entry in entries}
    ranks = range(tp) if ranks is None else ranks
    required = [(rank, layer) for rank in ranks for layer in layers]
    missing = [pair for pair in required if pair not in word]
    false = [pair for pair in required if word.get(pair) is False]
    disjoint = _disjoint(entries)
    for rank in ranks:
        silent = [layer for r, layer in missing if r == rank]
        if len(silent) == len(layers):
            why.append(f"rank {rank} has no evidence")
        elif silent:
            why.append(f"rank {rank} has no evidence for layer {', '.join(map(str, silent))}")
        unpacked = [layer for r, layer in false if r == rank]
        if unpacked:
            why.append(f"rank {rank} reads layer {', '.join(map(str, unpacked))} unpacked")
    if not disjoint:
        why.append("ranks own the same rows")
    return {
        "ok": not why,
        "verdict": f"fail: {'; '.join(why)}" if why else "pass",
        "tp_size": tp,
        "required_pairs": len(required),
        "found_true_pairs": [list(pair) for pair in required if word.get(pair) is True],
        "false_pairs": [list(pair) for pair in false],
        "missing_pairs": [list(pair) for pair in missing],
        "row_ranges_disjoint": disjoint,
    }


def _disjoint(entries: Iterable[Mapping[str, Any]]) -> bool:
    by_layer: dict[int, list[tuple[int, int]]] = {}
    for entry in entries:
        if entry["rows"] is not None:
            by_layer.setdefault(entry["layer"], []).append((entry["rows"][0], entry["rows"][1]))
    return all(earlier[1] <= later[0] for ranges in by_layer.values() for earlier, later in pairwise(sorted(ranges)))


# --- throughput lines -------------------------------------------------------------------------------------------------


def window(log: str | Iterable[Event], start: str, end: str) -> dict[str, Any]:
    """Return the decode and prefill events of a phase, ``start`` <= ts <= ``end`` ("YYYY-MM-DD HH:MM:SS").

    Returns {"events", "valid", "why"}: a phase in which requests were retracted is no measurement.
    Raises LockstepError for a log whose lines carry no date (builds of 2024): they cannot be joined to a phase.
    """
    events = [event for event in _events(log) if event["kind"] in {"decode", "prefill", "kv_retract"}]
    for event in events:
        if event["ts"] is None:
            raise LockstepError(
                "this log cannot be joined to a phase window: its lines carry no date",
                found=event["line"][:80],
                expected="[YYYY-MM-DD HH:MM:SS …]",
                next_step="take the log of a build that prints dates, or measure without a log join",
            )
    inside = [event for event in events if start <= event["ts"] <= end]
    retracted = [event for event in inside if event["kind"] == "kv_retract"]
    why = [f"requests were retracted at {event['ts']}" for event in retracted]
    return {"events": [event for event in inside if event["kind"] != "kv_retract"], "valid": not why, "why": why}


def decode_steps(log: str | Iterable[Event]) -> dict[str, Any]:
    """Return the decode lines fit for a step time, and the acceptance.

    #running-req is the value at the moment of the line, throughput and acceptance are means over the interval before
    it: a line counts only when the line before it had the same #running-req. Returns {"parsed", "usable": [events],
    "cuda_graph_false", "accept_len" (mean over the lines that have one; None when there is none: unknown, not 0)}.
    """
    lines = [event for event in _events(log) if event["kind"] == "decode"]
    usable = [line for before, line in pairwise(lines) if before["running_req"] == line["running_req"]]
    accepted = [line["accept_len"] for line in lines if line["accept_len"] is not None]
    return {
        "parsed": len(lines),
        "usable": usable,
        "cuda_graph_false": sum(line["cuda_graph"] is False for line in lines),
        "accept_len": sum(accepted) / len(accepted) if accepted else None,
    }


def expected_decode_lines(tokens: int, *, accept_len: float = 1.0, interval: int = DECODE_LOG_INTERVAL) -> int:
    """How many Decode lines one request of ``tokens`` gives: floor((tokens / accept_len) / interval)."""
    return int(tokens / accept_len / interval)


def prefills(log: str | Iterable[Event]) -> list[dict[str, Any]]:
    """Return the prefilled requests: chunks of one prompt belong together.

    A chunked prefill prints "#new-seq: 1" for each chunk, #pending-token tells what is left of the prompt. #new-token
    of the last chunk is rounded up to the page, so the true size is what the pending count fell by. Each: {"chunks",
    "sum_new_token" (as printed), "pending": [int], "tokens" (true uncached tokens of the prompt, None if the log does
    not tell), "last_chunk_tokens"}.
    """
    grouped: list[list[Event]] = []
    for event in _events(log):
        if event["kind"] != "prefill":
            continue
        if grouped and grouped[-1][-1]["pending_token"] and grouped[-1][-1]["tp"] == event["tp"]:
            grouped[-1].append(event)
        else:
            grouped.append([event])
    requests = []
    for chunks in grouped:
        pending = [chunk["pending_token"] for chunk in chunks]
        known = None not in pending and len(chunks) > 1
        requests.append(
            {
                "chunks": len(chunks),
                "sum_new_token": sum(chunk["new_token"] or 0 for chunk in chunks),
                "pending": pending,
                "tokens": chunks[0]["new_token"] + pending[0] - pending[-1]
                if known and chunks[0]["new_token"]
                else None,
                "last_chunk_tokens": pending[-2] - pending[-1] if known else None,
            }
        )
    return requests
