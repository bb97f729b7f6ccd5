"""Every Molecule scenario, each by Molecule's own test sequence, and one whose verify has to fail."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MUST_FAIL = "must_fail"
SCENARIOS = sorted({path.parent.name for path in HERE.glob("*/molecule.yml")} - {"default", MUST_FAIL})


def molecule(scenario: str) -> tuple[int, str]:
    """Runs ``molecule test`` on one scenario; its exit status and output."""
    run = subprocess.run(
        ["molecule", "-c", "molecule/base.yml", "test", "-s", scenario],
        cwd=HERE.parent,
        env=os.environ | {"NO_COLOR": "1", "ANSIBLE_NOCOLOR": "1"},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # Molecule colours the word "Failed" whatever it is asked.
    return run.returncode, re.sub(r"\x1b\[[0-9;]*m", "", run.stdout)


def steps(output: str, scenario: str) -> list[tuple[str, str]]:
    """Each step of the sequence and how it ended, as Molecule's report says."""
    _, _, report = output.rpartition("DETAILS")
    return re.findall(rf"^{scenario} (?:➜|>) (\w+): Executed: (\w+)", report, re.MULTILINE)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str) -> None:
    status, output = molecule(scenario)
    assert status == 0, output[-6000:]
    assert "DEPRECATION" not in output
    done = [name for name, how in steps(output, scenario) if how == "Successful"]
    assert {"converge", "idempotence", "verify"} <= set(done), output[-2000:]


def test_the_verify_that_must_fail_fails_for_the_right_reason() -> None:
    status, output = molecule(MUST_FAIL)
    assert status != 0
    assert f"[{MUST_FAIL} > side_effect] Executed: Successful" in output, output[-6000:]
    assert f"[{MUST_FAIL} > verify] Executed: Failed" in output, output[-6000:]
    verified = output.partition(f"[{MUST_FAIL} > verify] Executing")[2]
    assert "molecule2: open_shards" in verified
    assert "layer 14: file replaced after boot" in verified
