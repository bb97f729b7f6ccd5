"""Runs the stages of `make test`, says how long each took, and ends with one line of counts.

The stages on hosts of the lab run one after another; the others run beside them, one after another too, and what they
print comes at the end. A stage that fails does not stop the next one: one run shows everything that is
broken. Exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "tests"


@dataclass(frozen=True)
class Stage:
    """What a stage runs: a folder of pytest's, or a command of which only the exit status counts."""

    name: str
    what: str
    tests: str = ""
    command: tuple[str, ...] = ()
    timeout: int = 120  # seconds for one test
    beside: bool = False  # needs none of the lab's hosts, so it runs beside the stages that do
    after: str = ""  # a stage that must have ended before, where it is asked for: it sets up what this one uses too

    def argv(self, junit: Path) -> list[str]:
        """The whole command; a pytest stage writes its counts to ``junit``."""
        if not self.tests:
            return list(self.command)
        return [
            sys.executable,
            "-m",
            "pytest",
            self.tests,
            f"--junitxml={junit}",
            f"--timeout={self.timeout}",
            "--durations=5",
        ]


STAGES = (
    Stage("unit", "the core, its Ansible face, the rules of the house", tests="tests/unit", beside=True),
    Stage("lint", "ansible-lint, yamllint, ruff, mypy", command=("make", "--no-print-directory", "lint"), beside=True),
    Stage("engine", "the adapters against real SGLang", tests="tests/engine", timeout=900, beside=True),
    Stage("hosts", "the lab itself: hosts, networks, hub, the night's starting state", tests="tests/lab", timeout=600),
    Stage("lab", "whole launches on three hosts", tests="tests/integration", timeout=1500),
    Stage(
        "machine",
        "modules and jobs, with this machine's own Docker Engine; killed, and run again",
        tests="tests/machine",
        timeout=600,
        beside=True,
        after="hosts",
    ),
    Stage("molecule", "each role on a host", tests="tests/molecule", timeout=600),
)


@dataclass
class Outcome:
    """What a stage came to: counts of its tests (a stage without tests counts as one) and its seconds."""

    passed: int
    failed: int
    skipped: int
    seconds: float


def run(stage: Stage, log: IO[str] | None = None) -> Outcome:
    """Runs one stage with its output as it comes, or into ``log``."""
    junit = RESULTS / f"{stage.name}.xml"
    junit.unlink(missing_ok=True)
    start = time.monotonic()
    status = subprocess.run(stage.argv(junit), cwd=ROOT, check=False, stdout=log, stderr=log).returncode
    seconds = time.monotonic() - start
    if not stage.tests:
        return Outcome(int(status == 0), int(status != 0), 0, seconds)
    if not junit.exists():  # pytest itself did not get that far
        return Outcome(0, 1, 0, seconds)
    suite = ET.parse(junit).getroot().find("testsuite")
    count = (
        {} if suite is None else {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    )
    failed = count.get("failures", 0) + count.get("errors", 0)
    skipped = count.get("skipped", 0)
    # A status without a counted failure (an interrupt, no test at all) is a failure of the stage.
    failed = failed or int(status != 0)
    return Outcome(max(0, count.get("tests", 0) - failed - skipped), failed, skipped, seconds)


def main() -> int:
    """Runs the stages named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [stage.name for stage in STAGES]
    parser.add_argument("stage", nargs="*", metavar="STAGE", help=f"any of: {' '.join(names)} (default: all)")
    chosen = parser.parse_args().stage or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    start = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    there = [stage for stage in STAGES if stage.name in chosen]
    hosts = [stage for stage in there if not stage.beside] or there  # those that compute have nothing to run beside
    others = [stage for stage in there if stage not in hosts]

    ended = {stage.name: threading.Event() for stage in there}

    def in_turn(stages: list[Stage], log: IO[str] | None = None) -> None:
        for stage in stages:
            if stage.after in ended:
                ended[stage.after].wait()
            print(f"\n=== {stage.name}: {stage.what}", flush=True, file=log)
            try:
                outcomes[stage.name] = run(stage, log)
            finally:
                ended[stage.name].set()
            print(f"=== {stage.name}: {outcomes[stage.name].seconds:.0f} s", flush=True, file=log)

    with (RESULTS / "beside.log").open("w+", encoding="utf-8") as log:
        beside = threading.Thread(target=in_turn, args=(others, log))
        beside.start()
        in_turn(hosts)
        beside.join()
        log.seek(0)
        print(log.read(), flush=True)

    print(f"\n{'stage':<10} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for name, out in sorted(outcomes.items(), key=lambda item: names.index(item[0])):
        print(f"{name:<10} {out.passed:>7} {out.failed:>7} {out.skipped:>8} {out.seconds:>8.0f}")
    passed, failed, skipped = (
        sum(getattr(out, what) for out in outcomes.values()) for what in ("passed", "failed", "skipped")
    )
    print(f"{'all':<10} {passed:>7} {failed:>7} {skipped:>8} {time.monotonic() - start:>8.0f}\n")
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
