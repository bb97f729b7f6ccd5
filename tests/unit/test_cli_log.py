"""parse-log: what an engine log proves, printed."""

import io
import json
from pathlib import Path

import pytest
from lockstep_core.cli_log import cli_parse_log
from lockstep_core.errors import LockstepError

DATA = Path(__file__).parent / "data"


def test_json_holds_the_facts(capsys):
    assert cli_parse_log(str(DATA / "sglang-tp3-worker.log"), as_json=True) == 0
    known = json.loads(capsys.readouterr().out)
    assert (known["pool_tokens"], known["worker_ready"], known["shutdown"], known["faults"]) == (4096, True, True, [])


def test_text_names_the_cause(capsys, tmp_path):
    log = tmp_path / "boot.log"
    log.write_text(
        "[lockstep] adapter DSV41_WO_A_W8: missing: the overlay does not carry it\n"
        "[2026-09-11 23:34:14 TP1] Exact nvme Engram layer=1 rank=1 rows=[5,9) io_threads=96 packed=True\n"
        "[2026-09-11 23:35:14 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
        "[2026-09-11 23:35:15] Received sigquit from a child proces. It usually means the child failed.\n"
    )
    assert cli_parse_log(str(log), as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "engram    rank 1 layer 1 rows [5, 9) packed=True" in lines
    assert "adapter   DSV41_WO_A_W8: missing: the overlay does not carry it" in lines
    assert [line for line in lines if line.startswith("fault")] == [
        "fault     oom (fatal) x1 rank [1] line 3: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        (
            "fault     child_died (fatal) x1 rank ? line 5: "
            "Received sigquit from a child proces. It usually means the child failed."
        ),
    ]
    assert lines[-1].startswith("cause     oom, line 3: ")


def test_standard_input_and_a_cause_elsewhere(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("[2026-01-01 00:00:00] SIGQUIT received. signum=None, frame=None.\n"))
    assert cli_parse_log("-", as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "cause     not in these lines: look further up, and at the other ranks"
    )


def test_missing_file():
    with pytest.raises(LockstepError, match="no-such"):
        cli_parse_log("no-such.log", as_json=True)
