"""Clients that hold streams open against a head and keep every byte of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

# What differs between two runs of one prompt: the request's id and the second in which its answer began.
_OWN = re.compile(rb'"(id|created)": ?("[^"]*"|\d+)')


class Stream(threading.Thread):
    """One chat completion that streams, read to its end or until it is cut."""

    def __init__(
        self,
        host: str,
        port: int,
        prompt: str,
        max_tokens: int,
        *,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(daemon=True)
        self.headers = {"Content-Type": "application/json", **(headers or {})}
        self.connection = http.client.HTTPConnection(host, port, timeout=300)
        self.body = {
            "model": "deepseek-v4.1-flash",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            **options,
        }
        self.raw = b""
        self.status: int | None = None
        self.cut: str | None = None  # how the connection ended before the answer did
        self.connection.connect()
        address, own_port = self.connection.sock.getsockname()[:2]
        self.client = f"{address}:{own_port}"

    def run(self) -> None:
        try:
            self.connection.request("POST", "/v1/chat/completions", json.dumps(self.body), self.headers)
            answer = self.connection.getresponse()
            self.status = answer.status
            while block := answer.read1():
                self.raw += block
        except (OSError, http.client.HTTPException) as error:
            self.cut = f"{type(error).__name__}: {error}"
        finally:
            self.connection.close()

    def hang_up(self) -> None:
        """Close the connection, whatever is still to come."""
        with contextlib.suppress(OSError, AttributeError):  # it ends by itself meanwhile
            self.connection.sock.shutdown(2)
        self.join(30)

    @property
    def events(self) -> list[Any]:
        """The decoded events, without the last one's word [DONE]."""
        lines = [line.removeprefix(b"data: ") for line in self.raw.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def text(self) -> str:
        """What was answered."""
        deltas = (event["choices"][0]["delta"].get("content") for event in self.events if event["choices"])
        return "".join(delta or "" for delta in deltas)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, by its own word; None for one that was not told."""
        told = [event["choices"][0]["finish_reason"] for event in self.events if event["choices"]]
        return next((reason for reason in told if reason), None)

    @property
    def whole(self) -> bool:
        """Whether it came to its end: status 200, a reason, the last event's word, and the connection not cut."""
        return self.status == 200 and self.cut is None and self.raw.endswith(b"data: [DONE]\n\n")

    def same_bytes(self) -> bytes:
        """Every byte, but for the request's own id and time."""
        return _OWN.sub(rb'"\1": null', self.raw)


class Streams(list[Stream]):
    """Streams that run at once."""

    def begin(self) -> Self:
        for stream in self:
            stream.start()
        return self

    def open(self) -> Self:
        """Those that have not ended."""
        return type(self)(stream for stream in self if stream.is_alive())

    def until_answered(self, count: int | None = None, seconds: float = 60) -> Self:
        """Wait until so many (all by default) have had a byte."""
        deadline = time.monotonic() + seconds
        while sum(bool(stream.raw) for stream in self) < (len(self) if count is None else count):
            assert time.monotonic() < deadline, [(stream.status, stream.cut) for stream in self]
            time.sleep(0.05)
        return self

    def until_ended(self, seconds: float = 120) -> Self:
        deadline = time.monotonic() + seconds
        for stream in self:
            stream.join(max(0.0, deadline - time.monotonic()))
            assert not stream.is_alive(), f"{stream.client} has not ended within {seconds} s"
        return self


@contextlib.contextmanager
def streams(host: str, port: int, count: int, max_tokens: int, **options: Any) -> Iterator[Streams]:
    """So many streams, each with a prompt of its own; what is still open at the end is hung up."""
    held = Streams(Stream(host, port, f"go on, number {number}", max_tokens, **options) for number in range(count))
    try:
        yield held.begin()
    finally:
        for stream in held.open():
            stream.hang_up()
