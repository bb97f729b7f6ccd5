"""Simulator's stand-in for a module of SGLang; not SGLang. Holds what the overlay hooks on."""

from __future__ import annotations

from types import SimpleNamespace

from lockstep_sim import logs

from sglang.srt.runtime_context import get_parallel


def configure_scheduler_process(
    server_args: SimpleNamespace,
    gpu_id: int,
    display_tp_rank: int | None = None,
    display_dp_rank: int | None = None,
    display_moe_ep_rank: int | None = None,
) -> None:
    """From here on the log lines carry the rank, as the engine's scheduler lines do."""
    parallel = get_parallel()
    prefix = f" TP{parallel.tp_rank}" if parallel.tp_size > 1 else ""
    if parallel.ep_size > 1:
        prefix += f" EP{parallel.moe_ep_rank}"
    logs.configure(server_args.log_level, prefix)
