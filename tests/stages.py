"""Runs the stages of `make test`, says how long each took, and ends with one line of counts.

The stages on hosts of the lab run one after another; the others run beside them, one after another too, and what they
print comes at the end. A stage that fails does not stop the next one: one run shows everything that is
broken. Exits 1 if any failed.

Real engines, kernels and networks on a busy machine also fail for reasons that are not the tree's. So when everything
has ended and few files had a failure, each of those files runs once more, whole, with nothing beside it: a test that
fails again has failed; one that passes then is counted as passed, and named under the table as one to look at.
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
from typing import IO, TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "tests"
# More files than this with a failure are a broken tree, not an unlucky moment: they do not run again.
AGAIN_AT_MOST = 3


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

    def argv(self, junit: Path, files: Sequence[str] = ()) -> list[str]:
        """The whole command, for all its tests or those in ``files``; a pytest stage writes its counts to ``junit``."""
        if not self.tests:
            return list(self.command)
        return [
            sys.executable,
            "-m",
            "pytest",
            *(files or (self.tests,)),
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


@dataclass(frozen=True)
class Outcome:
    """What a stage came to: the result of each of its tests (a stage without tests counts as one), and its seconds."""

    results: Mapping[str, str]  # passed, failed or skipped
    seconds: float
    again: frozenset[str] = frozenset()  # failed, and passed when their file ran once more

    def those(self, result: str) -> frozenset[str]:
        """The tests that passed, failed or were skipped."""
        return frozenset(name for name, own in self.results.items() if own == result)

    @property
    def files(self) -> frozenset[str]:
        """The files of the tests that failed; "" for a failure that is no test's own."""
        return frozenset(name.partition("::")[0] if "::" in name else "" for name in self.those("failed"))


def run(stage: Stage, log: IO[str] | None = None, files: Sequence[str] = ()) -> Outcome:
    """Runs one stage, or only its ``files``, with its output as it comes, or into ``log``."""
    junit = RESULTS / f"{stage.name}{'-again' if files else ''}.xml"
    junit.unlink(missing_ok=True)
    start = time.monotonic()
    status = subprocess.run(stage.argv(junit, files), cwd=ROOT, check=False, stdout=log, stderr=log).returncode
    seconds = time.monotonic() - start
    if not junit.exists():  # not pytest's, or pytest itself did not get that far
        return Outcome({stage.name: "failed" if status or stage.tests else "passed"}, seconds)
    said: dict[str, set[str]] = {}  # a test whose clearing up fails too stands there twice
    for case in ET.parse(junit).getroot().iter("testcase"):
        said.setdefault(_named(case), set()).update(child.tag for child in case)
    results = {
        name: "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        for name, tags in said.items()
    }
    # 0 and 1 say what the tests say; anything else is a run that was not whole (an interrupt, no test at all).
    if status != int("failed" in results.values()):
        results[stage.name] = "failed"
    return Outcome(results, seconds)


def _named(case: ET.Element) -> str:
    """A test as pytest's command line takes it, from how its XML names it: ``tests/unit/test_a.py::test_b``."""
    place, name = case.get("classname", ""), case.get("name", "")
    parts = place.split(".") if place else name.split(".")  # a file that could not be imported stands as the name
    for last in range(len(parts), 0, -1):
        file = "/".join(parts[:last]) + ".py"
        if (ROOT / file).is_file():
            return "::".join([file, *parts[last:], *([name] if place else [])])
    return f"{place}.{name}"


def once_more(stage: Stage, first: Outcome) -> Outcome:
    """Runs the files in which a test failed once more; what does not pass then has failed."""
    second = run(stage, files=sorted(first.files))
    again = first.those("failed") & second.those("passed")
    still = dict.fromkeys(first.those("failed") - again, "failed")
    return Outcome({**first.results, **second.results, **still}, first.seconds + second.seconds, again)


def run_all(there: Sequence[Stage]) -> dict[str, Outcome]:
    """Runs the stages, those beside the hosts' in a thread of their own; then once more what may have been unlucky."""
    outcomes: dict[str, Outcome] = {}
    hosts = [stage for stage in there if not stage.beside] or there  # those that compute have nothing to run beside
    others = [stage for stage in there if stage not in hosts]
    ended = {stage.name: threading.Event() for stage in there}

    def in_turn(stages: Sequence[Stage], log: IO[str] | None = None) -> None:
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

    files = frozenset[str]().union(*(out.files for out in outcomes.values()))
    if "" not in files and len(files) <= AGAIN_AT_MOST:
        for stage in there:
            if outcomes[stage.name].files:
                print(f"\n=== {stage.name}, once more: {' '.join(sorted(outcomes[stage.name].files))}", flush=True)
                outcomes[stage.name] = once_more(stage, outcomes[stage.name])
    return {stage.name: outcomes[stage.name] for stage in there}


def report(outcomes: dict[str, Outcome], seconds: float) -> None:
    """Prints a line for each stage, every test that failed at all, and the counts last."""
    print(f"\n{'stage':<10} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    whole = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for name, out in outcomes.items():
        counts = {result: len(out.those(result)) for result in whole}
        whole = {result: whole[result] + count for result, count in counts.items()}
        print(f"{name:<10} {counts['passed']:>7} {counts['failed']:>7} {counts['skipped']:>8} {out.seconds:>8.0f}")
    print(f"{'all':<10} {whole['passed']:>7} {whole['failed']:>7} {whole['skipped']:>8} {seconds:>8.0f}\n")
    for out in outcomes.values():
        for what, tests in (("FAILED", out.those("failed")), ("failed once, then passed:", out.again)):
            for test in sorted(tests):
                print(f"{what} {test}")
    again = sum(len(out.again) for out in outcomes.values())
    second = f" ({again} of them only the second time)" if again else ""
    print(f"{whole['passed']} passed{second}, {whole['failed']} failed, {whole['skipped']} skipped", flush=True)


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
    outcomes = run_all([stage for stage in STAGES if stage.name in chosen])
    report(outcomes, time.monotonic() - start)
    return 1 if any(out.those("failed") for out in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
