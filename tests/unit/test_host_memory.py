"""A host's page cache is given back, on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

SIZE = 256 << 20
# The kernel may give some of it to others meanwhile.
MOST = range(SIZE * 9 // 10, SIZE + 1)
LITTLE = range(SIZE // 10)


def resident(path: Path) -> int:
    """Bytes of a file in the page cache, as util-linux counts them."""
    said = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", path], capture_output=True, check=True
    )
    return int(said.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may drop the page cache")
def test_the_page_cache_is_given_back(tmp_path: Path, play: Any) -> None:
    file = tmp_path / "cached"
    with file.open("wb") as writing:
        writing.write(os.urandom(1 << 20) * (SIZE >> 20))
        os.fsync(writing.fileno())
    assert resident(file) in MOST
    task = {"name": "settle", "lockstep.fleet.host_memory": {}}
    foreseen = play([task], "--check")
    assert (foreseen.rc, foreseen.changed) == (0, 1), foreseen.text
    assert resident(file) in MOST
    said = foreseen.results["settle"]
    assert said["after"] == said["before"]
    played = play([task])
    assert (played.rc, played.changed) == (0, 1), played.text
    assert resident(file) in LITTLE
    assert played.results["settle"]["after"] != played.results["settle"]["before"]
    nothing = play([{"name": "settle", "lockstep.fleet.host_memory": {"drop_caches": False, "compact": False}}])
    assert (nothing.rc, nothing.changed) == (0, 0), nothing.text
