"""The tactics gate of real SGLang between three ranks over gloo, stock and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LAUNCH = "5f" * 32
ENV = {"flashinfer_version": "0.6.18", "gpu": "NVIDIA GB10"}
PLACE = "flashinfer/autotune/0.6.18/sm121/05cc0d96dc7e28b8"

# One interpreter imports the engine, then three forks of it are the ranks.
RANKS = """
import json, os, pathlib, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import sglang.srt.model_executor.runner.flashinfer_autotune as gate

root, env = pathlib.Path(os.environ["TEST_ROOT"]), json.loads(sys.argv[1])
gate.log_info_on_rank0 = lambda logger, text: dist.get_rank() == 0 and print(text, flush=True)

def rank(number):
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=number, world_size=3)
    for case in sorted(path for path in root.iterdir() if path.is_dir()):
        print(f"case {case.name} rank {number}", flush=True)
        cache = case / str(number) / sys.argv[2] / f"rank_tp{number}_pp0_dp0.json"
        gate._drop_diverged_autotune_cache(cache, dist.group.WORLD, env)
        dist.barrier()

processes = [mp.get_context("fork").Process(target=rank, args=(number,)) for number in range(3)]
[process.start() for process in processes]
[process.join(120) for process in processes]
assert [process.exitcode for process in processes] == [0, 0, 0]
"""

# What each rank's file was tuned by: this launch, another one, or there is none.
CASES: dict[str, list[str | None]] = {
    "all match": [LAUNCH, LAUNCH, LAUNCH],
    "one has none": [LAUNCH, None, LAUNCH],
    "one is stale": [LAUNCH, LAUNCH, "ab" * 32],
    "all are stale": ["ab" * 32, "ab" * 32, "ab" * 32],
}


def make(root: Path) -> None:
    """Files as expert parallelism leaves them: every rank has tuned other tactics."""
    for case, launches in CASES.items():
        for rank, launch in enumerate(launches):
            if launch is None:
                continue
            cache = root / case / str(rank) / PLACE / f"rank_tp{rank}_pp0_dp0.json"
            cache.parent.mkdir(parents=True)
            cache.write_text(json.dumps({"_metadata": ENV, "('moe',)": ["MoERunner", rank]}))
            cache.with_suffix(".launch").write_text(launch + "\n")


def kept(root: Path) -> dict[str, list[bool]]:
    return {
        case: [(root / case / str(rank) / PLACE / f"rank_tp{rank}_pp0_dp0.json").exists() for rank in range(3)]
        for case in CASES
    }


@pytest.fixture(scope="module")
def gates(forks, tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """Where the ranks' files were, and what the ranks said, with the stock gate and with the adapter's."""
    roots = {keep: tmp_path_factory.mktemp(f"keep{keep}") for keep in ("0", "1")}
    for root in roots.values():
        make(root)
    common = {"LOCKSTEP_TACTICS_FINGERPRINT": LAUNCH, "GLOO_SOCKET_IFNAME": "lo"}
    envs = [{"DSV41_AUTOTUNE_KEEP": keep, "TEST_ROOT": str(root), **common} for keep, root in roots.items()]
    outputs = forks(RANKS, envs, json.dumps(ENV), PLACE)
    return {keep: (root, output) for (keep, root), output in zip(roots.items(), outputs, strict=True)}


def test_the_stock_gate_discards_every_ranks_file_under_expert_parallelism(gates):
    root, _ = gates["0"]
    assert kept(root) == dict.fromkeys(CASES, [False] * 3)


def test_kept_files_are_used_by_all_ranks_or_by_none_and_nothing_is_deleted(gates):
    root, output = gates["1"]
    nothing = [False] * 3
    assert kept(root) == {
        "all match": [True] * 3,
        "one has none": nothing,
        "one is stale": nothing,
        "all are stale": nothing,
    }
    # The engine's own line, where ranks differ; where all are stale they agree, and the stock gate would load them.
    assert output.count("per-rank caches disagree, discarding them and tuning from scratch") == 2
    every = [f"rank_tp{rank}_pp0_dp0.json" for rank in range(3)]
    aside = {case: sorted(path.name for path in (root / case).rglob("autotune-aside/**/*.json")) for case in CASES}
    assert aside == {
        "all match": [],
        "one has none": [every[0], every[2]],
        "one is stale": every,
        "all are stale": every,
    }


def test_the_context_loads_what_the_gate_leaves_and_writes_the_sidecar(forks, tmp_path: Path):
    """The real context around a stand-in of FlashInfer, for there is none on a CPU: tuned, then reused, then stale."""
    launches = [
        {"DSV41_AUTOTUNE_KEEP": "1", "LOCKSTEP_TACTICS_FINGERPRINT": name} for name in (LAUNCH, LAUNCH, "ab" * 32)
    ]
    results = [json.loads(output.splitlines()[-1]) for output in forks(CONTEXT, launches, str(tmp_path))]
    key = results[0]["key"]
    name = f"{key}/rank_tp0_pp0_dp0"
    assert [result["loaded"] for result in results] == [False, True, False]
    assert results[0]["said"] == [f"[autotune_keep] tuned and saved {name}.json"]
    assert results[1]["said"] == [f"[autotune_keep] reused {name}.json"]
    assert [line.split(": ")[0] for line in results[2]["said"]] == [
        f"[autotune_keep] moved aside {name}.json",
        f"[autotune_keep] moved aside {name}.launch",
        f"[autotune_keep] tuned and saved {name}.json",
    ]


CONTEXT: Any = """
import contextlib, io, json, pathlib, sys, types
import torch
import sglang.srt.model_executor.runner.flashinfer_autotune as gate

class Tuner:
    loaded = False
    def load_configs(self, path): self.loaded = True
    def save_configs(self, path): pathlib.Path(path).write_text(json.dumps({"_metadata": {}, "('moe',)": ["R", 1]}))
tuner = Tuner()
flashinfer = types.ModuleType("flashinfer.autotuner")
flashinfer.AutoTuner = types.SimpleNamespace(get=lambda: tuner)
flashinfer._collect_metadata = dict
flashinfer.autotune = lambda *a, **k: contextlib.nullcontext()
flashinfer.get_autotune_process_group = lambda: None
flashinfer.set_autotune_process_group = lambda group: None
sys.modules["flashinfer"] = types.ModuleType("flashinfer")
sys.modules["flashinfer.autotuner"] = flashinfer
stream = types.SimpleNamespace(wait_stream=lambda other: None)
torch.cuda.current_stream = lambda: stream
torch.get_device_module = lambda device: types.SimpleNamespace(stream=lambda s: contextlib.nullcontext())
gate.get_flashinfer_autotune_skip_ops = lambda runner: set()
path = pathlib.Path(sys.argv[1]) / "flashinfer/autotune/0.6.18/sm121/05cc0d96dc7e28b8/rank_tp0_pp0_dp0.json"
path.parent.mkdir(parents=True, exist_ok=True)
gate.flashinfer_autotune_cache_path = lambda runner: path
runner = types.SimpleNamespace(
    tp_size=1, tp_group=types.SimpleNamespace(world_size=1), device="cuda", forward_stream=stream
)
said = io.StringIO()
with contextlib.redirect_stdout(said):
    with gate.flashinfer_autotune_context(runner, run_lm_head=True):
        pass
print(json.dumps({"loaded": tuner.loaded, "said": said.getvalue().splitlines(), "key": path.parent.name}))
"""
