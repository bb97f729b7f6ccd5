"""Real ansible-playbook runs on this machine, for tests of modules and roles."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Played:
    """What one ansible-playbook run said."""

    rc: int
    results: dict[str, dict[str, Any]]  # by task name; the last one of a name
    changed: int
    text: str


def run_playbook(plays: list[dict[str, Any]], where: Path, *arguments: str, inventory: str = "localhost,") -> Played:
    """Write plays to ``where`` and run them."""
    playbook = where / "play.yml"
    playbook.write_text(yaml.safe_dump(plays, sort_keys=False))
    return run_file(playbook, *arguments, inventory=inventory)


def run_file(playbook: Path, *arguments: str, inventory: str) -> Played:
    """Run a playbook from the repository root with its ansible.cfg; a printed deprecation fails the test that asked."""
    ansible = Path(sys.executable).with_name("ansible-playbook")
    run = subprocess.run(
        [str(ansible), "-i", inventory, str(playbook), *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_NOCOLOR": "1"},
    )
    text = run.stdout + run.stderr
    assert "DEPRECATION" not in text, text
    said = spoken(run.stdout)
    results = {
        task["task"]["name"]: result
        for play in said["plays"]
        for task in play["tasks"]
        for result in task["hosts"].values()
    }
    changed = sum(host["changed"] for host in said["stats"].values())
    return Played(run.returncode, results, changed, text)


def spoken(text: str) -> dict[str, Any]:
    """What the JSON callback said in a run's output, between an action's progress and the table of times."""
    start = f"\n{text}".find("\n{")
    assert start >= 0, text
    said: dict[str, Any]
    said, _ = json.JSONDecoder().raw_decode(text[start:])
    return said


def examples(module: str, replacements: dict[str, str]) -> list[dict[str, Any]]:
    """The tasks of a module's EXAMPLES, with the places they name replaced by a test's own."""
    tree = ast.parse((ROOT / "plugins" / "modules" / f"{module}.py").read_text())
    (text,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["EXAMPLES"]
    )
    for old, new in replacements.items():
        assert old in text, f"the examples of {module} no longer name {old}"
        text = text.replace(old, new)
    tasks: list[dict[str, Any]] = yaml.safe_load(text)
    return tasks
