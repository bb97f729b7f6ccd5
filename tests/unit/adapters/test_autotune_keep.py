"""Which cache files a launch may load, and where the others go. Three real ranks agree in tests/unit/test_sim.py."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from handed import cases
from lockstep_core import tactics
from lockstep_engine import autotune_keep, engine

LAUNCH = "5f" * 32
ENV = {"flashinfer_version": "0.6.18", "cuda_version": "13.0", "gpu": "NVIDIA GB10"}
PLACE = "sglang/flashinfer/autotune/0.6.18/sm121/05cc0d96dc7e28b8/rank_tp0_pp0_dp0.json"


@pytest.fixture
def cache(tmp_path) -> Path:
    """A file that this launch tuned on this machine."""
    path = tmp_path / PLACE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"_metadata": ENV, "('moe', 'MoERunner', ((1, 7168),))": ["MoERunner", [8, 34]]}))
    path.with_name("rank_tp0_pp0_dp0.launch").write_text(f"{LAUNCH}\n")
    return path


def test_the_sidecar_lies_where_the_campaigns_adapter_put_it(cache):
    assert autotune_keep.sidecar(cache).name == "rank_tp0_pp0_dp0.launch"
    (seen,) = tactics.scan(str(cache.parents[6]))
    assert (seen["fingerprint"], seen["problem"]) == (LAUNCH, None)


def test_ranks_of_one_launch_have_one_digest_whatever_they_tuned(cache):
    digest, why = autotune_keep.verdict(cache, LAUNCH, ENV)
    cache.write_text(json.dumps({"_metadata": ENV, "('moe', 'MoERunner', ((1, 7168),))": ["MoERunner", [9, 9]]}))
    assert digest
    assert why is None
    assert autotune_keep.verdict(cache, LAUNCH, ENV) == (digest, None)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda cache: autotune_keep.sidecar(cache).unlink(), "no sidecar says which launch tuned it"),
        (lambda cache: autotune_keep.sidecar(cache).write_text("ab" * 32), "tuned by launch abababababab"),
        (lambda cache: autotune_keep.sidecar(cache).write_text(""), "tuned by launch "),
        (lambda cache: cache.write_text("{half a fi"), "unreadable"),
        (lambda cache: cache.write_text("[]"), "not a JSON object"),
        (lambda cache: cache.write_text(json.dumps({"_metadata": ENV | {"gpu": "NVIDIA B200"}})), "_metadata differs"),
    ],
)
def test_what_must_not_be_loaded(cache, spoil, why):
    spoil(cache)
    digest, said = autotune_keep.verdict(cache, LAUNCH, ENV)
    assert digest == ""
    assert said is not None
    assert why in said


def test_no_file_is_no_complaint(tmp_path):
    assert autotune_keep.verdict(tmp_path / PLACE, LAUNCH, ENV) == ("", None)


def test_a_file_that_flashinfer_would_skip_is_not_kept(cache):
    """Handed case E04: FlashInfer skips the whole file of another environment, in silence, and never overwrites it."""
    case = cases("E_tactics")["E04"]
    cache.write_text(json.dumps(case["input"][cache.name]))
    digest, why = autotune_keep.verdict(cache, LAUNCH, case["input"]["current_env"])
    assert bool(digest) == case["expected"]["loadable"]
    assert why is not None
    assert "the entire file is skipped" in why


def test_set_aside_moves_both_files_out_of_the_engines_sight_and_deletes_nothing(cache, capsys):
    content = cache.read_bytes()
    autotune_keep.set_aside(cache, "tuned by another launch")
    root = cache.parents[3]
    assert not list(root.rglob("rank_*"))
    moved = sorted(root.with_name("autotune-aside").rglob("rank_*"))
    assert [path.name for path in moved] == ["rank_tp0_pp0_dp0.json", "rank_tp0_pp0_dp0.launch"]
    assert moved[0].read_bytes() == content
    # <UTC>/<version>/<arch>/<key>/<file>: nothing that a scan of the cache would take for a cache file.
    assert moved[0].parts[-4:-1] == ("0.6.18", "sm121", "05cc0d96dc7e28b8")
    assert tactics.scan(str(cache.parents[6])) == []
    said = capsys.readouterr().out.splitlines()
    assert said[0] == ("[autotune_keep] moved aside 05cc0d96dc7e28b8/rank_tp0_pp0_dp0.json: tuned by another launch")


def test_a_stale_file_that_cannot_be_moved_ends_the_boot(cache, monkeypatch):
    def refuse(*_: object) -> None:
        raise autotune_keep.LockstepError("cannot move it")

    monkeypatch.setattr(autotune_keep.files, "move", refuse)
    with pytest.raises(RuntimeError, match="cannot move it"):
        autotune_keep.set_aside(cache, "stale")


def test_the_plans_fingerprint_wins_over_one_worked_out_here(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_TACTICS_FINGERPRINT", LAUNCH)
    assert autotune_keep.fingerprint() == LAUNCH
    monkeypatch.delenv("LOCKSTEP_TACTICS_FINGERPRINT")
    monkeypatch.setattr("sys.argv", ["launch_server.py", "--tp", "3", "--node-rank", "1"])
    first = autotune_keep.fingerprint()
    monkeypatch.setattr("sys.argv", ["launch_server.py", "--tp", "3", "--node-rank", "2"])
    monkeypatch.setenv("SGLANG_RUN_ID", "sglang-run-20260924-1")
    assert autotune_keep.fingerprint() == first
    monkeypatch.setenv("DSV41_WO_A_W8", "1")
    assert autotune_keep.fingerprint() != first


def test_body_hash_sees_code_and_not_documentation(tmp_path):
    """The same function under another docstring and other blank lines; then with another body."""
    source = 'def f(a):\n    """{doc}"""\n{gap}    return a + {n}\n'
    hashes = []
    for number, (doc, gap, n) in enumerate(
        [("One.", "", 1), ("Another,\n    of two lines.", "\n", 1), ("One.", "", 2)]
    ):
        path = tmp_path / f"body{number}.py"
        path.write_text(source.format(doc=doc, gap=gap, n=n))
        hashes.append(engine.body_hash(runpy.run_path(str(path))["f"]))
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]
