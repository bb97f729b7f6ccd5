"""What the simulator "generates": words from its stand-in of the model file, at a steady pace."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field

from sglang.srt.models import deepseek_v4

from lockstep_sim import faults

logger = logging.getLogger("sglang.srt.managers.scheduler_metrics_mixin")

STEP_S = 0.02
PICTURE_STEPS = 15  # --load-snapshot-publish-interval
_ACCEPTED = (3, 2, 4)  # tokens per step with speculation: several in one event, as a speculative engine sends them


@dataclass
class Request:
    """One generation: `tokens` still to say, what ended it."""

    rid: str
    prompt_tokens: int
    tokens: list[str]
    finish_reason: str
    aborted: threading.Event = field(default_factory=threading.Event)


class Generator:
    """Runs requests and logs the engine's batch lines about them."""

    def __init__(self, args: Namespace, pool: int) -> None:
        self.args, self.pool = args, pool
        self.running: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.throughput = 0.0
        self.picture = {"timestamp": time.time(), "num_running_reqs": 0, "num_waiting_reqs": 0}
        self._lock = threading.Lock()
        self._steps = self._said = 0
        self._mark = time.monotonic()

    def request(self, rid: str, prompt: str, max_tokens: int, *, ignore_eos: bool = False) -> Request:
        words = deepseek_v4.ANSWER.split(" ")
        tokens = words[:1] + [f" {word}" for word in words[1:]]
        if faults.read().get("nan"):
            logger.warning("Detected errors during sampling! NaN in the logits.")
            tokens = ["!"] * max_tokens
        if ignore_eos:
            tokens = list(itertools.islice(itertools.cycle(tokens), max_tokens))
        reason = "length" if ignore_eos or len(tokens) > max_tokens else "stop"
        return Request(rid, max(1, len(prompt.split())), tokens[:max_tokens], reason)

    def run(self, request: Request) -> Iterator[list[str]]:
        """The tokens of each step; ends early when aborted. At most --max-running-requests run, the others wait."""
        speculative = bool(self.args.speculative_algorithm)
        try:
            others, queued = self._admit(request)
            if request.aborted.is_set():
                request.finish_reason = "abort"
                return
            logger.info(
                "Prefill batch, #new-seq: 1, #new-token: %d, #cached-token: 0, full token usage: 0.00, "
                "swa token usage: 0.00, #running-req: %d, #queue-req: %d, #pending-token: 0, cuda graph: False, "
                "input throughput (token/s): %.2f",
                request.prompt_tokens, others, queued, request.prompt_tokens / STEP_S,
            )  # fmt: skip
            said = 0
            for step in itertools.count():
                if said >= len(request.tokens):
                    return
                time.sleep(STEP_S)
                while self._hangs():
                    time.sleep(STEP_S)
                if request.aborted.is_set():
                    request.finish_reason = "abort"
                    return
                accepted = request.tokens[said : said + (_ACCEPTED[step % 3] if speculative else 1)]
                said += len(accepted)
                self._count(len(accepted), speculative)
                yield accepted
        finally:
            with self._lock:
                self.running.pop(request.rid, None)
                self.waiting.pop(request.rid, None)

    def _admit(self, request: Request) -> tuple[int, int]:
        """Wait for a place in the running batch, first come first served; how many run and wait besides."""
        with self._lock:
            self.waiting[request.rid] = request
        while True:
            with self._lock:
                first = next(iter(self.waiting)) == request.rid
                free = first and len(self.running) < self.args.max_running_requests
                if (free or request.aborted.is_set()) and not self._hangs():
                    others = len(self.running)
                    del self.waiting[request.rid]
                    self._take_picture()  # without this request, as the engine does after its prefill
                    self.running[request.rid] = request
                    return others, len(self.waiting)
            time.sleep(STEP_S / 4)

    def _take_picture(self) -> None:
        now = {"num_running_reqs": len(self.running), "num_waiting_reqs": len(self.waiting)}
        self.picture = {"timestamp": time.time(), **now}

    def load(self) -> dict[str, float]:
        """The load as the engine's scheduler last published it: after a prefill, every 15th step, always when idle."""
        with self._lock:
            if not self.running and not self.waiting:
                self._take_picture()
            return dict(self.picture)

    @staticmethod
    def _hangs() -> bool:
        return faults.read().get("hang") == "serve"

    def _count(self, tokens: int, speculative: bool) -> None:
        with self._lock:
            self._steps += 1
            if self._steps % PICTURE_STEPS == 0:
                self._take_picture()
            self._said += tokens
            if self._steps < self.args.decode_log_interval:
                return
            now = time.monotonic()
            self.throughput = self._said / max(now - self._mark, 1e-6)
            mean = self._said / self._steps
            drafts = (self.args.speculative_dspark_block_size or 3) if speculative else 0
            accept = f"accept len: {mean:.2f}, accept rate: {(mean - 1) / drafts:.2f}, " if drafts else ""
            used = sum(r.prompt_tokens + len(r.tokens) for r in self.running.values())
            logger.info(
                "Decode batch, #running-req: %d, #full token: %d, full token usage: %.2f, #swa token: 0, "
                "swa token usage: 0.00, %scuda graph: True, gen throughput (token/s): %.2f, #queue-req: %d",
                len(self.running), used, used / self.pool, accept, self.throughput, len(self.waiting),
            )  # fmt: skip
            self._steps = self._said = 0
            self._mark = now

    def abort(self, rid: str | None) -> None:
        """Ends one request, or all with None."""
        with self._lock:
            for request in (*self.running.values(), *self.waiting.values()):
                if rid in (None, request.rid):
                    request.aborted.set()
