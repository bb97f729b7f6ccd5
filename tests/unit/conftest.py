"""What several unit tests use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from playbook import Played, run_playbook

# The same tree gets the same answer, however busy the machine is.
settings.register_profile("lockstep", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockstep")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB, for what happens when a disk is full."""
    if os.geteuid() != 0:
        pytest.skip(reason="only root can mount the small file system that this test fills")
    place = tmp_path / "tiny"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tiny", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.fixture
def play(tmp_path):
    """A callable: ``play([task, …], "--check", …)`` runs tasks on this machine over the local connection."""

    def run(tasks: list[dict[str, Any]], *arguments: str, **play_keys: Any) -> Played:
        whole = {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "tasks": tasks,
            **play_keys,
        }
        whole["vars"] = {"ansible_python_interpreter": sys.executable, **play_keys.get("vars", {})}
        return run_playbook([whole], tmp_path, *arguments)

    return run
