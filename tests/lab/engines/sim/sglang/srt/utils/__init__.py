"""Simulator's stand-in for a module of SGLang; not SGLang."""

from __future__ import annotations

import logging

from sglang.srt.runtime_context import get_parallel


def is_cuda() -> bool:
    """The simulator plays an engine on CUDA."""
    return True


def log_info_on_rank0(logger: logging.Logger, msg: str) -> None:
    if get_parallel().tp_rank == 0:
        logger.info(msg)
