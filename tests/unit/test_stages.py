"""The runner of `make test`: what failed, what runs once more, what that changes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parents[1]
SOUND = "def test_sound(): pass\n"
BROKEN = "def test_broken(): assert 1 == 2\ndef test_beside_it(): pass\n"
# Fails the first time only; its clearing up fails with it, so that pytest names it twice.
UNLUCKY = """
import pathlib
import pytest
MARK = pathlib.Path(__file__).with_suffix(".ran")
@pytest.fixture
def cleared():
    yield
    fresh = not MARK.exists()
    MARK.touch()
    assert not fresh
@pytest.mark.parametrize("size", [1])
def test_unlucky(cleared, size): assert MARK.exists()
@pytest.mark.skip(reason="counted")
def test_left_out(): pass
"""
# Fails the first time, and is skipped from then on.
EVASIVE = """
import pathlib
import pytest
MARK = pathlib.Path(__file__).with_suffix(".ran")
def test_evasive():
    if MARK.exists():
        pytest.skip(reason="not again")
    MARK.touch()
    assert False
"""
# Ends pytest as if all were well.
GONE = """
import os
def test_gone(): os._exit(0)
def test_broken(): assert False
"""
# Ends pytest after a failure, before its last test.
CUT = """
import pytest
def test_unlucky(): assert False
def test_cut(): pytest.exit("enough", returncode=3)
def test_never_ran(): pass
"""


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner, over a tree of its own with the stages ``one`` and ``two``."""
    spec = importlib.util.spec_from_file_location("stages_under_test", TESTS / "stages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(
        module, "STAGES", (module.Stage("one", "first", tests="one"), module.Stage("two", "second", tests="two"))
    )
    monkeypatch.setattr(sys, "argv", ["stages.py"])
    return module


def tree(root: Path, files: dict[str, str]) -> None:
    """Writes ``files``, text by path."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def table(said: str) -> list[str]:
    """What is said from the table on, one space between words and no times."""
    lines = [" ".join(line.split()) for line in said[said.index("stage ") :].splitlines() if line.strip()]
    return [line.rsplit(" ", 1)[0] if line.split()[0] in ("one", "two", "all") else line for line in lines[1:]]


def test_all_pass(stages: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing runs twice where nothing failed."""
    tree(tmp_path, {"one/test_a.py": SOUND, "two/test_b.py": SOUND})
    assert stages.main() == 0
    said = capsys.readouterr().out
    assert "once more" not in said
    assert table(said) == ["one 1 0 0", "two 1 0 0", "all 2 0 0", "2 passed, 0 failed, 0 skipped"]


def test_passes_the_second_time(stages: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A test that fails once is counted as passed and named; only its file runs again."""
    tree(tmp_path, {"one/test_a.py": SOUND, "two/deep/test_b.py": UNLUCKY, "two/test_c.py": SOUND})
    assert stages.main() == 0
    said = capsys.readouterr().out
    assert "=== two, once more: two/deep/test_b.py\n" in said
    assert table(said) == [
        "one 1 0 0",
        "two 2 0 1",
        "all 3 0 1",
        "failed once, then passed: two/deep/test_b.py::test_unlucky[1]",
        "3 passed (1 of them only the second time), 0 failed, 1 skipped",
    ]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        pytest.param(
            {"one/test_a.py": BROKEN, "two/test_b.py": UNLUCKY},
            [
                "one 1 1 0",
                "two 1 0 1",
                "all 2 1 1",
                "FAILED one/test_a.py::test_broken",
                "failed once, then passed: two/test_b.py::test_unlucky[1]",
                "2 passed (1 of them only the second time), 1 failed, 1 skipped",
            ],
            id="it fails twice",
        ),
        pytest.param(
            {"one/test_a.py": EVASIVE, "two/test_b.py": SOUND},
            [
                "one 0 1 0",
                "two 1 0 0",
                "all 1 1 0",
                "FAILED one/test_a.py::test_evasive",
                "1 passed, 1 failed, 0 skipped",
            ],
            id="it is skipped then",
        ),
    ],
)
def test_does_not_pass_the_second_time(
    files: dict[str, str], said: list[str], stages: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A test that does not pass then has failed, whatever passed beside it."""
    tree(tmp_path, files)
    assert stages.main() == 1
    assert table(capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("files", "failed"),
    [
        pytest.param(
            {f"one/test_{at}.py": BROKEN for at in range(4)} | {"two/test_b.py": SOUND}, 4, id="too many files"
        ),
        pytest.param({"one/test_a.py": "import nowhere\n", "two/nothing.py": ""}, 3, id="no test ran"),
        pytest.param({"one/test_a.py": GONE, "two/test_b.py": SOUND}, 1, id="pytest ended itself"),
        pytest.param({"one/test_a.py": CUT, "two/test_b.py": SOUND}, 2, id="a run that was not whole"),
    ],
)
def test_broken_tree(
    files: dict[str, str], failed: int, stages: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where more is wrong than an unlucky moment explains, nothing runs again."""
    tree(tmp_path, files)
    assert stages.main() == 1
    said = capsys.readouterr().out
    assert "once more" not in said
    assert f"{failed} failed" in said.splitlines()[-1]
