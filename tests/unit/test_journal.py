"""Module journal, through real ansible-playbook runs on this machine."""

import copy
import json
import stat
from pathlib import Path

import pytest
from ansible_collections.lockstep.fleet.plugins.modules import rank_facts
from journal_entry import entry
from playbook import examples

pytestmark = pytest.mark.ansible


@pytest.fixture
def state(tmp_path):
    (tmp_path / "state" / "journal").mkdir(parents=True)
    return tmp_path / "state"


def record(state: Path) -> dict:
    return {
        "name": "record",
        "lockstep.fleet.journal": {"state_dir": str(state), "state": "present", "entry": "{{ value }}"},
    }


def read(state: Path) -> dict:
    return {"name": "read", "lockstep.fleet.journal": {"state_dir": str(state)}}


def from_file(tmp_path: Path, value: dict) -> list[str]:
    """The entry as an extra variable."""
    path = tmp_path / "value.json"
    path.write_text(json.dumps({"value": value}))
    return ["-e", f"@{path}"]


def test_an_entry_is_recorded_once_privately_and_comes_back_unchanged(state, tmp_path, play):
    value = entry("20260924T094700Z", "sim")
    arguments = from_file(tmp_path, value)
    path = state / "journal" / f"{value['launch']}.json"

    predicted = play([record(state)], *arguments, "--check", "--diff")
    assert predicted.results["record"]["changed"] is True
    assert not path.exists()

    done = play([record(state)], *arguments, "--diff")
    assert done.results["record"]["changed"] is True
    assert done.results["record"]["diff"] == predicted.results["record"]["diff"]
    assert done.results["record"]["path"] == str(path)
    assert json.loads(path.read_text()) == value
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    before = path.stat()
    again = play([record(state), read(state)], *arguments)
    assert again.changed == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert again.results["read"]["entries"] == [value]


def test_who_recorded_it_when_is_no_difference_but_the_outcome_is(state, tmp_path, play):
    value = entry("20260924T094700Z", "sim")
    path = state / "journal" / f"{value['launch']}.json"
    path.write_text(json.dumps({**value, "recorded": "2026-09-23T00:00:00Z", "by": "mia@desk"}))
    assert play([record(state)], *from_file(tmp_path, value)).changed == 0
    failed = {**value, "ok": False, "why": ["spark2 (rank 1): packed, layer 1: found False, expected True"]}
    assert play([record(state)], *from_file(tmp_path, failed)).changed == 1
    assert json.loads(path.read_text())["ok"] is False


@pytest.mark.parametrize("text", ['{"half', "[]", "\x00\xff"])
def test_a_damaged_file_is_replaced(state, tmp_path, play, text):
    value = entry("20260924T094700Z", "sim")
    path = state / "journal" / f"{value['launch']}.json"
    path.write_bytes(text.encode("latin-1"))
    done = play([record(state)], *from_file(tmp_path, value))
    assert (done.rc, done.changed) == (0, 1), done.text
    assert json.loads(path.read_text()) == value


def test_that_it_was_stopped_on_purpose_is_noted_once_and_after_which_launch(state, play):
    stop = {"name": "stop", "lockstep.fleet.journal": {"state_dir": str(state), "state": "stopped"}}
    note = state / "stopped.json"
    assert play([stop]).changed == 0
    assert not note.exists()  # without a proven launch there is nothing to note
    old, new = entry("20260924T094700Z", "sim"), entry("20260925T010000Z", "sglang")
    for value in (old, new):
        (state / "journal" / f"{value['launch']}.json").write_text(json.dumps(value))
        assert play([stop], "--check").changed == 1
        done = play([stop], "--diff")
        assert (done.changed, done.results["stop"]["path"]) == (1, str(note))
        assert done.results["stop"]["diff"]["after"] == json.loads(note.read_text()) == {"launch": value["launch"]}
        assert stat.S_IMODE(note.stat().st_mode) == 0o600
        assert play([stop]).changed == 0


def test_the_look_says_what_is_damaged_and_what_could_be_served_again(state):
    value, other = entry("20260924T094700Z", "sim"), entry("20260925T010000Z", "sglang")
    path = state / "journal" / f"{other['launch']}.json"
    nothing = {"journal": None, "journal_damaged": None, "journal_newest": None, "stopped": None}
    look = rank_facts.look_journal
    assert look(str(state), None) == look(str(state), other["launch"]) == nothing
    path.write_text(json.dumps(other))
    assert look(str(state), other["launch"]) == {**nothing, "journal": other}
    assert look(str(state), None) == {**nothing, "journal_newest": other}
    (state / "journal" / f"{value['launch']}.json").write_text(json.dumps(value))
    path.write_text('{"half')
    (state / "stopped.json").write_text(json.dumps({"launch": value["launch"]}))
    damaged = {"journal_damaged": f"{path} is not JSON", "journal_newest": value, "stopped": value["launch"]}
    assert look(str(state), other["launch"]) == {**nothing, **damaged}


def test_newest_first_and_a_damaged_file_is_named_not_fatal(state, play):
    old, new = entry("20260924T094700Z", "sim"), entry("20260925T010000Z", "sglang")
    for value in (old, new):
        (state / "journal" / f"{value['launch']}.json").write_text(json.dumps(value))
    tampered = copy.deepcopy(entry("20260926T010000Z", "sim"))
    tampered["plan"]["ranks"][0]["env"]["A"] = "5.1"
    (state / "journal" / f"{tampered['launch']}.json").write_text(json.dumps(tampered))
    (state / "journal" / "20260927T010000Z-e8-abcdef.json").write_text('{"half')
    seen = play([read(state)]).results["read"]
    assert [one["launch"] for one in seen["entries"]] == [new["launch"], old["launch"]]
    assert len(seen["damaged"]) == 2
    assert "20260927T010000Z-e8-abcdef.json is not JSON" in seen["damaged"][0]
    assert "changed after it was sealed" in seen["damaged"][1]


def test_no_journal_is_an_empty_one(tmp_path, play):
    seen = play([read(tmp_path / "none")]).results["read"]
    assert (seen["entries"], seen["damaged"], seen["changed"]) == ([], [], False)


def test_what_could_not_be_launched_again_is_not_recorded(state, tmp_path, play):
    value = entry("20260924T094700Z", "sim")
    value["plan"]["ranks"][0]["env"] = {"A": "other"}
    done = play([record(state)], *from_file(tmp_path, value))
    assert done.rc != 0
    assert "changed after it was sealed" in done.results["record"]["msg"]
    assert list((state / "journal").iterdir()) == []


def test_the_examples_run_as_they_are_written(state, play):
    value = entry("20260924T094700Z", "sim")
    (state / "journal" / f"{value['launch']}.json").write_text(json.dumps(value))
    done = play(examples("journal", {"/srv/lockstep": str(state)}))
    assert done.rc == 0, done.text
    assert value["launch"] in json.dumps(done.results["Show the launches, newest first"])
