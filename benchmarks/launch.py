"""How long Lockstep itself takes: a plan, a refusal, a proof, a swap beyond the engine's own boot.

    python benchmarks/launch.py [--repetitions 3]

Needs a lab that is up with the simulator (``make demo ENGINE=sim``), whose boot takes about a second: what remains is
Lockstep's. The engine's own boot is from the head's start to the line of its log that says that it is ready, both by
the host's Docker Engine; its stop is not taken off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/lab"))

from lockstep_lab import faults, nodes, topology  # noqa: E402 - its path is set above

HOSTS = [host.name for host in topology.hosts()]
HEAD = HOSTS[0]
READY = "The server is fired up and ready to roll!"


def on(host: str, command: str) -> str:
    """What a shell command says on a host."""
    return nodes.run(faults.host(host), ["sh", "-c", command])


def run(*command: str, status: int = 0) -> float:
    """Run a command of the repository; its seconds."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode != status:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return seconds


def swap(arm: str) -> tuple[float, float]:
    """Serve another arm; seconds in all, and of the engine's boot."""
    whole = run("ansible-playbook", "serve.yml", "-e", f"arm={arm}")
    line = on(HEAD, f"docker logs --timestamps dsv41-head 2>&1 | grep -F '{READY}'").split()[0]
    started = on(HEAD, "docker inspect --format '{{.State.StartedAt}}' dsv41-head").strip()
    boot = datetime.fromisoformat(line) - datetime.fromisoformat(started)
    return whole, boot.total_seconds()


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    repetitions = parser.parse_args().repetitions
    run("ansible-playbook", "serve.yml", "-e", "arm=e8")
    measured: dict[str, tuple[str, Callable[[], float]]] = {
        "plan": ("1", lambda: run(sys.executable, "-m", "lockstep_core", "plan", "--arm", "e8")),
        "refusal of a bad arm": ("5", lambda: run("ansible-playbook", "serve.yml", "-e", "arm=e88", status=2)),
        "nothing to do": ("-", lambda: run("ansible-playbook", "serve.yml", "-e", "arm=e8")),
        "verify": ("15", lambda: run("ansible-playbook", "verify.yml")),
    }
    print(f"{'seconds, median of ' + str(repetitions):<34} {'median':>7} {'limit':>6}   all")
    for what, (limit, once) in measured.items():
        show(what, limit, [once() for _ in range(repetitions)])
    swaps = [swap(arm) for _ in range(repetitions) for arm in ("e9", "e8")]
    show("swap", "-", [whole for whole, _ in swaps])
    show("  the engine's own boot", "-", [boot for _, boot in swaps])
    show("  beyond it, its stop included", "15", [whole - boot for whole, boot in swaps])


def show(what: str, limit: str, seconds: list[float]) -> None:
    """Print a row."""
    each = " ".join(f"{one:.2f}" for one in seconds)
    print(f"{what:<34} {statistics.median(seconds):>7.2f} {limit:>6}   {each}", flush=True)


if __name__ == "__main__":
    main()
