"""Module autotune_cache, through real ansible-playbook runs on this machine."""

import json
from pathlib import Path

import pytest
from playbook import examples

pytestmark = pytest.mark.ansible

E8 = "e8" * 32
E10 = "10" * 32
ROOT = "sglang/flashinfer/autotune"
MATCHING, STALE = "0.6.18/sm121/05cc0d96dc7e28b8", "0.6.18/sm121/085bb8a93fd1bc79"


@pytest.fixture
def cache(tmp_path):
    """A rank's cache with one matching and one stale file, each with its sidecar, and a stranger's file."""
    for key, fingerprint in ((MATCHING, E8), (STALE, E10)):
        file = tmp_path / "cache" / ROOT / key / "rank_tp0_pp0_dp0.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"('op',)": ["Runner", 1]}))
        file.with_suffix(".launch").write_text(fingerprint + "\n")
    (tmp_path / "cache" / ROOT / STALE / "notes.txt").write_text("mine")
    return tmp_path / "cache"


def task(name: str, cache: Path, **options):
    return {"name": name, "lockstep.fleet.autotune_cache": {"path": str(cache), **options}}


def below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def both(key: str) -> list[str]:
    return [f"{key}/rank_tp0_pp0_dp0.json", f"{key}/rank_tp0_pp0_dp0.launch"]


def test_stale_files_go_aside_and_nothing_is_lost(cache, play):
    before = below(cache)
    judged = [task("judge", cache, fingerprint=E8, rank=0)]

    predicted = play(judged, "--check", "--diff")
    assert below(cache) == before
    assert predicted.results["judge"]["changed"] is True

    done = play(judged, "--diff").results["judge"]
    assert done["changed"] is True
    assert below(cache / ROOT) == sorted([*both(MATCHING), f"{STALE}/notes.txt"])
    stamps = list((cache / f"{ROOT}-aside").iterdir())
    assert len(stamps) == 1
    assert below(stamps[0]) == both(STALE)
    assert (stamps[0] / STALE / "rank_tp0_pp0_dp0.launch").read_text().strip() == E10
    assert done["moved"] == [str(stamps[0] / path) for path in both(STALE)]
    assert done["kept"] == [f"{MATCHING}/rank_tp0_pp0_dp0.json"]
    why = {file["file"]: file["why"] for file in done["files"]}
    assert why[f"{STALE}/rank_tp0_pp0_dp0.json"] == "tuned by launch 101010101010, the coming one is e8e8e8e8e8e8"
    # The prediction named the same files in the same words.
    assert done["diff"] == predicted.results["judge"]["diff"]
    assert done["diff"]["after"].splitlines() == both(MATCHING)

    again = play(judged)
    assert again.changed == 0


def test_a_fleet_that_does_not_match_keeps_nothing(cache, play):
    done = play([task("judge", cache, fingerprint=E8, rank=0, fleet_match="no", aside=str(cache.parent / "elsewhere"))])
    assert below(cache / ROOT) == [f"{STALE}/notes.txt"]
    assert len(below(cache.parent / "elsewhere")) == 4
    why = {file["file"]: file["why"] for file in done.results["judge"]["files"]}
    assert why[f"{MATCHING}/rank_tp0_pp0_dp0.json"] == "another rank has no matching file"
    assert done.results["judge"]["kept"] == []


def test_purge_deletes_what_matches_the_layout_and_nothing_else(cache, play):
    before = below(cache)
    listed = play([task("list", cache, state="listed"), task("purge", cache, state="purged")], "--check")
    assert listed.results["list"]["changed"] is False
    assert [file["fingerprint"] for file in listed.results["list"]["files"]] == [E8, E10]
    assert listed.results["purge"]["changed"] is True
    assert below(cache) == before

    purge = [task("purge", cache, state="purged")]
    done = play(purge)
    assert done.results["purge"]["removed"] == sorted([*both(MATCHING), *both(STALE)])
    assert below(cache) == [f"{ROOT}/{STALE}/notes.txt"]
    assert play(purge).changed == 0


def test_an_empty_rank_has_nothing_to_do(tmp_path, play):
    done = play([task("judge", tmp_path / "none", fingerprint=E8), task("purge", tmp_path / "none", state="purged")])
    assert (done.rc, done.changed) == (0, 0)


def test_judging_needs_a_fingerprint(cache, play):
    done = play([task("judge", cache)])
    assert done.rc != 0
    assert "fingerprint" in done.results["judge"]["msg"]


def test_a_directory_that_cannot_take_the_files_is_named(cache, play):
    (cache.parent / "file").write_text("in the way")
    done = play([task("judge", cache, fingerprint=E8, aside=str(cache.parent / "file"))])
    assert done.rc != 0
    assert "cannot move" in done.results["judge"]["msg"]
    assert len(below(cache / ROOT)) == 5


def test_the_examples_run_as_they_are_written(cache, play):
    tasks = examples("autotune_cache", {"/root/.cache": str(cache)})
    done = play(tasks, vars={"plan": {"tactics_fingerprint": E8}, "fleet_rank": 0})
    assert done.rc == 0, done.text
    aside, seen, cleared = (done.results[task["name"]] for task in tasks)
    assert aside["kept"] == [f"{MATCHING}/rank_tp0_pp0_dp0.json"]
    assert [file["file"] for file in seen["files"]] == aside["kept"]
    assert cleared["removed"] == both(MATCHING)
