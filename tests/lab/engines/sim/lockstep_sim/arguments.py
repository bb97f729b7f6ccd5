"""SGLang's command line, as far as launches use it. An unknown argument ends the start, as it does in the engine."""

from __future__ import annotations

import argparse

_VALUES = (
    "model-path", "served-model-name", "load-format", "attention-backend", "moe-runner-backend", "tool-call-parser",
    "reasoning-parser", "speculative-algorithm", "fp8-gemm-backend", "device", "sampling-backend", "dtype",
    "log-level", "kv-cache-dtype", "quantization", "page-size", "swa-full-tokens-ratio", "api-key",
    "grammar-backend", "tokenizer-path", "disable-flashinfer-autotune-ops",
)  # fmt: skip
_NUMBERS = (
    "chunked-prefill-size", "context-length", "max-running-requests", "cuda-graph-max-bs-decode", "random-seed",
    "port", "nnodes", "node-rank", "speculative-dspark-block-size", "max-total-tokens", "watchdog-timeout",
    "decode-log-interval", "min-free-slots-delay", "max-prefill-tokens", "dist-timeout",
)  # fmt: skip
_FLAGS = (
    "trust-remote-code", "enable-decoder-swa-bounded-replay", "sleep-on-idle", "enable-metrics",
    "skip-server-warmup", "disable-overlap-schedule", "disable-cuda-graph", "disable-custom-all-reduce",
    "disable-radix-cache",
)  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments with SGLang's defaults. Exits with 2 on an unknown argument."""
    parser = argparse.ArgumentParser(prog="launch_server.py", description="simulator of the engine", allow_abbrev=False)
    parser.add_argument("--tp", "--tp-size", "--tensor-parallel-size", dest="tp_size", type=int, default=1)
    parser.add_argument("--ep", "--ep-size", "--expert-parallel-size", dest="ep_size", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--dist-init-addr", default=None)
    parser.add_argument("--mem-fraction-static", type=float, default=0.9)
    for name in _VALUES:
        parser.add_argument(f"--{name}")
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in _FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args(argv)
    defaults = {
        "port": 30000, "nnodes": 1, "node_rank": 0, "log_level": "info", "max_running_requests": 4,
        "chunked_prefill_size": 1024, "max_prefill_tokens": 16384, "context_length": 262144, "decode_log_interval": 40,
        "served_model_name": args.model_path, "random_seed": 0, "dist_timeout": 1800,
    }  # fmt: skip
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not args.model_path:
        parser.error("the following arguments are required: --model-path")
    if args.nnodes != args.tp_size:
        parser.error(f"the simulator runs one rank per node: --tp-size {args.tp_size} needs --nnodes {args.tp_size}")
    if args.tp_size % args.ep_size:
        parser.error(f"--ep-size {args.ep_size} does not divide --tp-size {args.tp_size}")
    return args
