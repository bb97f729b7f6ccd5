"""A chat completion's SSE stream -> tokens and times.

Tokens are ``usage.completion_tokens``, never the number of events: with speculation one event carries several tokens.
C1 decode tok/s = (tokens - 1) / (last delta - first delta), where a delta is content or reasoning: the tokens of both
are in the usage. Known bias: the first event may already hold more than one token, so the rate is slightly overstated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: What the engine ends a stream with; a stream without it was cut.
DONE = "[DONE]"
#: Reasons that mean "the model ended its answer". ``abort`` is what a draining or stopping engine says, with HTTP 200.
COMPLETE = ("stop", "length", "tool_calls")


@dataclass
class SseDecoder:
    """Server-sent events as the HTML standard defines them, from chunks cut anywhere.

    Lines end in LF, CR or CRLF; a line that starts with ":" is a comment (keep-alive); the space after "data:" is
    optional; data lines of one event are joined by LF; an event without data is none.
    """

    comments: int = 0
    _buffer: str = ""
    _bytes: bytes = b""
    _data: list[str] = field(default_factory=list)
    _begun: bool = False

    def feed(self, chunk: str | bytes) -> list[str]:
        """Return the data of the events that ``chunk`` completes."""
        text = self._decode(chunk) if isinstance(chunk, bytes) else chunk
        if text and not self._begun:
            self._begun = True
            text = text.removeprefix("\ufeff")
        self._buffer += text
        events: list[str] = []
        while (line := self._line()) is not None:
            if line.startswith(":"):
                self.comments += 1
            elif line == "":
                if self._data:
                    events.append("\n".join(self._data))
                self._data = []
            else:
                name, _, value = line.partition(":")
                if name == "data":
                    self._data.append(value.removeprefix(" "))
        return events

    def _decode(self, chunk: bytes) -> str:
        # A character may be cut between chunks: the incomplete tail waits.
        self._bytes += chunk
        try:
            text, self._bytes = self._bytes.decode(), b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                text, self._bytes = self._bytes.decode(errors="replace"), b""
            else:
                text, self._bytes = self._bytes[: error.start].decode(), self._bytes[error.start :]
        return text

    def _line(self) -> str | None:
        ends = [at for at in (self._buffer.find("\n"), self._buffer.find("\r")) if at >= 0]
        if not ends:
            return None
        end = min(ends)
        width = 1
        if self._buffer[end] == "\r":
            if end + 1 == len(self._buffer):
                return None  # perhaps the first half of CRLF
            width = 2 if self._buffer[end + 1] == "\n" else 1
        line, self._buffer = self._buffer[:end], self._buffer[end + width :]
        return line


def completion(
    usage: Mapping[str, Any] | None, finish_reason: str | None, *, max_tokens: int | None = None
) -> dict[str, Any]:
    """Judge one finished request: {"ok", "tokens", "complete_budget", "reason", "note"}.

    ``complete_budget``: all of ``max_tokens`` was generated; repetitions of different length are not mixed silently.
    """
    tokens = usage.get("completion_tokens") if usage else None
    reason = None
    if finish_reason not in COMPLETE:
        reason = (
            f"finish_reason {finish_reason} is not a completion although HTTP 200 and {DONE}"
            if finish_reason
            else "the stream ended without a finish_reason"
        )
    elif tokens is None:
        reason = "no usage: ask for it with stream_options.include_usage; events are not tokens"
    elif tokens < 1:
        reason = "no token was generated"
    short = tokens is not None and max_tokens is not None and tokens < max_tokens
    return {
        "ok": reason is None,
        "tokens": tokens,
        "complete_budget": None if tokens is None or max_tokens is None else not short,
        "reason": reason,
        "note": f"{tokens} of {max_tokens} tokens: do not mix with full ones" if reason is None and short else None,
    }


@dataclass
class _Stream:
    """What has been seen of one stream so far."""

    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    error: str | None = None
    done: bool = False
    content: list[tuple[float, str]] = field(default_factory=list)
    reasoning: list[tuple[float, str]] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)

    def take(self, at: float, data: str) -> None:
        if data.strip() == DONE:
            self.done = True
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            self.error = self.error or f"an event is no JSON: {data[:80]!r}"
            return
        # OpenAI: {"error": …}; SGLang: {"object": "error", "message": …}.
        if not isinstance(chunk, dict) or chunk.get("error") is not None or chunk.get("object") == "error":
            self.error = self.error or f"the server sent an error: {str(data)[:200]}"
            return
        try:
            self._take(at, chunk)
        except (AttributeError, TypeError):
            self.error = self.error or f"an event has an unknown shape: {data[:80]!r}"

    def _take(self, at: float, chunk: Mapping[str, Any]) -> None:
        usage = chunk.get("usage")
        if usage:
            # What is counted is a number: bool is one to Python only.
            if type(usage.get("completion_tokens") or 0) is not int:
                raise TypeError
            self.usage = usage
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            if delta.get("content"):
                self.content.append((at, "" + delta["content"]))
            # SGLang and OpenAI call it reasoning_content, some servers and versions reasoning.
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                self.reasoning.append((at, "" + thought))
            if delta.get("tool_calls"):
                self.calls.append(at)


def stream(
    chunks: Iterable[tuple[float, str | bytes]], *, max_tokens: int | None = None, thinking: bool | None = None
) -> dict[str, Any]:
    """Read one streamed chat completion: ``chunks`` are (seconds since the request was sent, bytes as received).

    {"ok", "reason", "tokens", "prompt_tokens", "cached_tokens", "reasoning_tokens", "ttft_s" (first content),
    "ttft_any_s" (first delta of either kind), "decode_tok_s", "finish_reason", "content_events", "keepalives", "text",
    "reasoning_text", "complete_budget", "note", "flags"}; times in seconds from the request, None where unknown.
    ``thinking=False`` flags reasoning that came all the same.
    """
    decoder, seen = SseDecoder(), _Stream()
    for at, chunk in chunks:
        for data in decoder.feed(chunk):
            seen.take(at, data)
    judged = completion(seen.usage, seen.finish_reason, max_tokens=max_tokens)
    reason = seen.error or judged["reason"] or (None if seen.done else f"the stream was cut: no {DONE}")
    usage = seen.usage or {}
    details, prompt = (
        found if isinstance(found := usage.get(f"{part}_tokens_details"), dict) else {}
        for part in ("completion", "prompt")
    )
    deltas = sorted([at for at, _ in (*seen.content, *seen.reasoning)] + seen.calls)
    tokens = judged["tokens"]
    elapsed = deltas[-1] - deltas[0] if deltas else 0.0
    return {
        **judged,
        "ok": reason is None,
        "reason": reason,
        "prompt_tokens": usage.get("prompt_tokens"),
        "cached_tokens": prompt.get("cached_tokens"),
        # SGLang puts it at the top level of usage, OpenAI under the details.
        "reasoning_tokens": usage.get("reasoning_tokens", details.get("reasoning_tokens")),
        "ttft_s": seen.content[0][0] if seen.content else None,
        "ttft_any_s": deltas[0] if deltas else None,
        "decode_tok_s": round((tokens - 1) / elapsed, 2) if tokens and elapsed > 0 else None,
        "finish_reason": seen.finish_reason,
        "content_events": len(seen.content),
        "keepalives": decoder.comments,
        "text": "".join(text for _, text in seen.content),
        "reasoning_text": "".join(text for _, text in seen.reasoning),
        "flags": ["reasoning present although thinking is off"] if thinking is False and seen.reasoning else [],
    }
