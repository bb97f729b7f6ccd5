"""The engine's endpoints that launches, checks and measurements use. Rank 0 has them all, a worker a dummy /health."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang.version import __version__

from lockstep_sim import faults, logs
from lockstep_sim.generation import Generator, Request

logger = logging.getLogger(logs.SERVING)

# A connection that had its answer is closed after this long, as uvicorn does (SGLANG_TIMEOUT_KEEP_ALIVE).
KEEP_ALIVE_S = 5

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 121.69 GiB "
    "of which 1.21 GiB is free."
)


class State:
    """What the handlers share."""

    def __init__(self, args: Namespace, crash: Callable[[str], None]) -> None:
        self.args, self.crash = args, crash
        self.ready = self.draining = False
        self.generator: Generator | None = None
        self.busy = 0
        self._lock = threading.Lock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request that a shutdown has to wait for."""
        with self._lock:
            self.busy += 1
        try:
            yield
        finally:
            with self._lock:
                self.busy -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State
    served = False  # whether this connection has had a request

    def handle_one_request(self) -> None:
        self.connection.settimeout(KEEP_ALIVE_S if self.served else None)
        super().handle_one_request()

    def parse_request(self) -> bool:
        self.connection.settimeout(None)
        self.served = True
        return super().parse_request()

    def log_message(self, *_: Any) -> None:
        pass  # the engine's own access line is written in `_line`

    def _line(self, status: int, reason: str) -> None:
        client = f"{self.client_address[0]}:{self.client_address[1]}"
        logger.info('INFO:     %s - "%s %s HTTP/1.1" %d %s', client, self.command, self.path, status, reason)

    def _answer(self, status: int, body: Any = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self._line(status, self.responses[status][0])

    def _authorised(self) -> bool:
        key = self.state.args.api_key
        return not key or self.headers.get("Authorization") == f"Bearer {key}"


class WorkerHandler(_Handler):
    """A worker's dummy: it says 200 whatever the state of the rank is."""

    def do_GET(self) -> None:
        self._answer(200 if self.path in ("/health", "/health_generate", "/ping") else 404)


class HeadHandler(_Handler):
    """Rank 0's endpoints."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].replace("/get_", "/")
        answers = {
            "/v1/models": self._models,
            "/v1/loads": self._loads,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
        }
        if path in ("/health", "/health_generate"):
            self._answer(200 if self.state.ready and not self.state.draining else 503)
        elif path in ("/ready", "/ping"):
            self._answer(200 if self.state.ready else 503)
        elif path == "/metrics":
            self._answer(200 if self.state.args.enable_metrics else 404)
        elif not self._authorised():
            self._answer(401, {"error": "Unauthorized"})
        elif path in answers:
            self._answer(200, answers[path]())
        else:
            self._answer(404, {"detail": "Not Found"})

    def _models(self) -> dict[str, Any]:
        args = self.state.args
        model = {"id": args.served_model_name, "object": "model", "owned_by": "simulator", "root": args.model_path}
        return {"object": "list", "data": [model | {"max_model_len": args.context_length}]}

    def _load(self) -> dict[str, float]:
        generator = self.state.generator
        now = generator.load() if generator else {"timestamp": 0.0, "num_running_reqs": 0, "num_waiting_reqs": 0}
        return {"dp_rank": 0, "num_waiting_uncached_tokens": 0, **now}

    def _loads(self) -> dict[str, Any]:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {"timestamp": stamp, "version": __version__, "loads": [self._load()]}

    def _model_info(self) -> dict[str, Any]:
        return {"model_path": self.state.args.model_path, "is_generation": True, "simulator": True}

    def _server_info(self) -> dict[str, Any]:
        args, generator = self.state.args, self.state.generator
        internal = {
            "last_gen_throughput": generator.throughput if generator else 0.0,
            "memory_usage": {"token_capacity": generator.pool if generator else 0},
            "effective_max_running_requests_per_dp": args.max_running_requests,
            "load": self._load(),
        }
        return vars(args) | {"version": __version__, "simulator": True, "internal_states": [internal]}

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw or b"{}")
        except ValueError as error:
            body = error
        generator = self.state.generator
        if not self._authorised():
            self._answer(401, {"error": "Unauthorized"})
        elif not isinstance(body, dict):
            self._answer(400, {"object": "error", "message": f"not a JSON object: {body}"})
        elif self.path == "/abort_request":
            if generator:
                generator.abort(None if body.get("abort_all") else body.get("rid"))
            self._answer(200)
        elif self.path == "/freeze_gc":
            self._answer(200)
        elif self.path != "/v1/chat/completions":
            self._answer(404, {"detail": "Not Found"})
        elif not self.state.ready or self.state.draining or not generator:
            self._answer(503, {"object": "error", "message": "The server is not ready."})
        else:
            with self.state.working():
                self._chat(body, generator)

    def _chat(self, body: dict[str, Any], generator: Generator) -> None:
        if faults.read().get("oom") == "request":
            self.state.crash(OUT_OF_MEMORY)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            error = {"object": "error", "message": "messages: Field required", "type": "BadRequestError"}
            return self._answer(400, error)
        prompt = " ".join(str(message.get("content")) for message in messages)
        most = int(body.get("max_completion_tokens") or body.get("max_tokens") or 128)
        rid = body.get("rid") or uuid.uuid4().hex
        request = generator.request(rid, prompt, most, ignore_eos=bool(body.get("ignore_eos")))
        if body.get("stream"):
            return self._stream(body, generator, request)
        text, count = "", 0
        for tokens in generator.run(request):
            text, count = text + "".join(tokens), count + len(tokens)
        message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": request.finish_reason}
        head = self._head(request, "chat.completion")
        return self._answer(200, head | {"choices": [choice], "usage": self._usage(request, count)})

    def _head(self, request: Request, kind: str) -> dict[str, Any]:
        return {
            "id": request.rid,
            "object": kind,
            "created": int(time.time()),
            "model": self.state.args.served_model_name,
        }

    @staticmethod
    def _usage(request: Request, count: int) -> dict[str, Any]:
        total = request.prompt_tokens + count
        return {"prompt_tokens": request.prompt_tokens, "completion_tokens": count, "total_tokens": total}

    def _event(self, data: str) -> None:
        chunk = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")

    def _stream(self, body: dict[str, Any], generator: Generator, request: Request) -> None:
        # As in the engine, the answer begins, and has its access line, when there is something to answer.
        steps = generator.run(request)
        first = next(steps, None)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._line(200, "OK")
        head, count = self._head(request, "chat.completion.chunk"), 0

        def event(delta: dict[str, Any], finish: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            self._event(json.dumps(head | {"choices": [choice], "usage": None}))

        try:
            event({"role": "assistant", "content": ""})
            for tokens in itertools.chain([first] if first else [], steps):
                count += len(tokens)
                event({"content": "".join(tokens)})
            event({"content": None}, request.finish_reason)
            if (body.get("stream_options") or {}).get("include_usage"):
                self._event(json.dumps(head | {"choices": [], "usage": self._usage(request, count)}))
            self._event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            request.aborted.set()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # more clients than five may come at once


def start(state: State, handler: type[_Handler]) -> ThreadingHTTPServer:
    """Listens and serves on its own thread. Raises OSError when the port is taken."""
    bound = type(handler.__name__, (handler,), {"state": state})
    server = _Server((state.args.host, state.args.port), bound)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
