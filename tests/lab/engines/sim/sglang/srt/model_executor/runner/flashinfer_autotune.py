"""Simulator's stand-in for a module of SGLang; not SGLang.

The same functions with the same arguments and the same decisions over real files, with tactics drawn by lot.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep_sim import torch_stand_in as torch

from sglang.srt.utils import log_info_on_rank0

logger = logging.getLogger(__name__)

FLASHINFER_VERSION = "0.6.18"
ARCH = "sm121"


def _collect_metadata(model_runner: Any) -> dict[str, str]:
    env = {"flashinfer_version": FLASHINFER_VERSION, "cuda_version": "13.0", "gpu": "simulated GB10"}
    if model_runner.tactics_diverge:
        env["gpu"] += f" that differs on rank {model_runner.tp_rank}"
    return env


def flashinfer_autotune_cache_path(model_runner: Any) -> Path:
    """One key per model and parallelism: as in the engine, block size, graph sizes and switches are left out."""
    parts = [model_runner.model_path, str(model_runner.tp_size), str(model_runner.moe_ep_size)]
    parts += ["draft_quant=fp8"] if model_runner.is_draft_worker else []
    key = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
    root = Path(os.environ.get("SGLANG_CACHE_DIR") or Path.home() / ".cache/sglang")
    folder = root / "flashinfer/autotune" / FLASHINFER_VERSION / ARCH / key
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rank_tp{model_runner.tp_rank}_pp0_dp0.json"


def _autotune_cache_digest(cache_path: Path, env: dict[str, str]) -> str:
    try:
        configs = json.loads(cache_path.read_text())
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(json.dumps({"file": configs, "env": env}, sort_keys=True).encode()).hexdigest()


def _drop_diverged_autotune_cache(cache_path: Path, group: Any, env: dict[str, str]) -> None:
    digests = [""] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(digests, _autotune_cache_digest(cache_path, env), group=group)
    if len(set(digests)) == 1:
        return
    log_info_on_rank0(
        logger,
        "FlashInfer autotune: per-rank caches disagree, discarding them and "
        "tuning from scratch so all ranks agree on the tactics.",
    )
    cache_path.unlink(missing_ok=True)


@contextlib.contextmanager
def flashinfer_autotune_context(model_runner: Any, *, run_lm_head: bool) -> Iterator[None]:
    mr = model_runner
    cache_path = flashinfer_autotune_cache_path(mr)
    env = _collect_metadata(mr)
    if mr.tp_size > 1:
        _drop_diverged_autotune_cache(cache_path, mr.tp_group, env)
    logger.info("Running FlashInfer autotune with cache: %s", cache_path)
    loaded = json.loads(cache_path.read_text()) if cache_path.is_file() else {}
    yield
    if loaded.get("_metadata") != env:
        # Without experts spread over the ranks all tune the same shapes on the same timings.
        lots = torch.all_gather(mr.tp_group, random.getrandbits(16))
        lot = lots[mr.tp_rank if mr.moe_ep_size > 1 else 0]
        shapes = ["((1, 7168), (1, 256))", "((4, 7168), (7168, 4608))"]
        loaded = {"_metadata": env} | {
            f"('simulated_moe', 'MoERunner', {s})": ["MoERunner", [lot % 97, lot % 31]] for s in shapes
        }
        cache_path.write_text(json.dumps(loaded, indent=1, sort_keys=True))
    logger.info("FlashInfer autotune completed.")
