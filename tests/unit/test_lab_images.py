"""The lab's images: layers that depend on content alone, and two builds that differ where they should."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from lockstep_lab import compose, engines
from lockstep_lab.say import LabError


def write(folder: Path, *, mtime: int, mask: int) -> Path:
    """The same content with other times, modes beyond the execute bit, and another order of making."""
    names = ["pkg/b.py", "pkg/a.py", "bin/tool"] if mtime % 2 else ["bin/tool", "pkg/a.py", "pkg/b.py"]
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
        path.chmod((0o777 if name == "bin/tool" else 0o666) & ~mask)
        os.utime(path, (mtime, mtime))
    (folder / "link").symlink_to("bin/tool")
    return folder


def test_a_layer_is_the_same_on_every_machine(tmp_path):
    first = compose.layer(tmp_path / "1.tar", {"/opt/x": write(tmp_path / "one", mtime=1, mask=0o022)})
    second = compose.layer(tmp_path / "2.tar", {"/opt/x": write(tmp_path / "two", mtime=10**9, mask=0o002)})
    assert first.sha256 == second.sha256
    assert first.sha256 == hashlib.sha256(first.path.read_bytes()).hexdigest()
    with tarfile.open(first.path) as archive:
        found = {member.name: (member.mode, member.uid, member.mtime, member.linkname) for member in archive}
    assert found == {
        "opt": (0o755, 0, compose.EPOCH, ""),
        "opt/x": (0o755, 0, compose.EPOCH, ""),
        "opt/x/bin": (0o755, 0, compose.EPOCH, ""),
        "opt/x/bin/tool": (0o755, 0, compose.EPOCH, ""),
        "opt/x/link": (0o755, 0, compose.EPOCH, "bin/tool"),
        "opt/x/pkg": (0o755, 0, compose.EPOCH, ""),
        "opt/x/pkg/a.py": (0o644, 0, compose.EPOCH, ""),
        "opt/x/pkg/b.py": (0o644, 0, compose.EPOCH, ""),
    }


def test_a_finished_layer_is_not_made_again(tmp_path):
    first = compose.layer(tmp_path / "1.tar", {"/x": write(tmp_path / "one", mtime=1, mask=0o022)})
    before = first.path.stat().st_mtime_ns
    assert compose.layer(tmp_path / "1.tar", {"/x": tmp_path / "nothing"}) == first
    assert first.path.stat().st_mtime_ns == before


def test_the_files_that_differ_are_those_of_the_campaign():
    names = engines.changed_files()
    assert len(set(names)) == len(names) >= 40
    for part in ("models/deepseek_v4.py", "models/deepseek_v4_dspark.py", "dspark_worker_v2.py", "moe/topk.py",
                 "fused_moe_triton/layer.py", "quantization/fp8.py", "mem_cache/memory_pool.py"):  # fmt: skip
        assert any(name.endswith(part) for name in names), part


def test_the_simulators_builds_differ_in_those_files_and_one_changes_the_answer(tmp_path):
    answers = {}
    for variant in engines.BUILDS:
        engines._sim_files(tmp_path / variant, variant)
        code = "from sglang.srt.models import deepseek_v4; print(deepseek_v4.ANSWER)"
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / variant)}, capture_output=True, check=True
        )
        answers[variant] = done.stdout
    a, b = tmp_path / "a", tmp_path / "b"
    different = {
        str(path.relative_to(a))
        for path in a.rglob("*.py")
        if path.read_bytes() != (b / path.relative_to(a)).read_bytes()
    }
    assert different == set(engines.changed_files())
    assert answers["a"] != answers["b"]


def test_a_change_that_finds_no_place_is_an_error(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("one two one")
    with pytest.raises(LabError, match="2 times, expected once"):
        engines._replace(path, "one", "three")
