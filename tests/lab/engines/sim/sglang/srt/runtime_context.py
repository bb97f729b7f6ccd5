"""Simulator's stand-in for a module of SGLang; not SGLang."""

from __future__ import annotations

from types import SimpleNamespace

_parallel = SimpleNamespace(tp_rank=0, tp_size=1, ep_size=1, moe_ep_rank=0, node_rank=0, nnodes=1)


def publish(server_args: SimpleNamespace) -> None:
    """One rank per node, so a rank's places are all its node's."""
    rank, size, ep = server_args.node_rank, server_args.tp_size, server_args.ep_size
    _parallel.__dict__.update(
        tp_rank=rank,
        tp_size=size,
        ep_size=ep,
        moe_ep_rank=rank // (size // ep),
        node_rank=rank,
        nnodes=server_args.nnodes,
    )


def get_parallel() -> SimpleNamespace:
    return _parallel
