"""Real SGLang 0.5.21 on CPU, in processes of its own: the files of the lab's image, the overlay's folder first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lockstep_lab import engines

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site() -> list[Path]:
    """The folders with SGLang and what it imports; installed on the first run (minutes), kept."""
    return engines.site_folders()


@pytest.fixture(scope="session")
def environment(site) -> Callable[..., dict[str, str]]:
    """A callable: the environment of a process of the engine, with or without the overlay."""

    def make(*, overlay: bool = True, **env: str) -> dict[str, str]:
        folders = [ROOT / "adapters"] if overlay else []
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/root"),
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in [*folders, *site]),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            **env,
        }

    return make


# The engine's imports cost seconds of CPU: one process pays them, before any module that an adapter hooks on, and each
# run of the code is a fork of it with its own environment.
FORKS = """
import json, os, sys
import sglang.srt.utils, sglang.srt.runtime_context, sglang.srt.model_executor.forward_batch_info
code, envs = sys.argv[1], json.loads(sys.argv[2])
sys.argv[1:] = sys.argv[3:]
hooked = [name for name in sys.modules if name.endswith((".flashinfer_autotune", ".managers.scheduler"))]
assert not hooked, hooked
for env in envs:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ.update(env)
        os.dup2(write, 1)
        exec(compile(code, "test", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as output:
        said = output.read()
    assert os.waitpid(child, 0)[1] == 0, said
    print(json.dumps(said), flush=True)
"""


@pytest.fixture(scope="session")
def forks(environment) -> Callable[..., list[str]]:
    """A callable: run code once for each environment, in processes of the engine; their standard outputs."""

    def run(code: str, envs: list[dict[str, str]], *arguments: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", FORKS, code, json.dumps(envs), *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
