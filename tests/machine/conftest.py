"""What tests of jobs on shards share: the processes that run them, and a checkpoint to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crash import Launcher
from lockstep_lab import checkpoint


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """What runs the jobs of packing, archiving and restoring in processes that end as they are told."""
    with Launcher(tmp_path_factory.mktemp("jobs")) as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint for jobs that need no lab; its directory has a blank in its name."""
    path = tmp_path_factory.mktemp("a checkpoint")
    checkpoint.make(path, 998)
    return path
