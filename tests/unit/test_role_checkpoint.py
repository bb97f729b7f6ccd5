"""Role checkpoint where no engine is needed: a local checkpoint, and an export that nothing describes."""

import pytest

pytestmark = pytest.mark.ansible


def role(**variables):
    return [{"name": "role", "ansible.builtin.include_role": {"name": "lockstep.fleet.checkpoint"}, "vars": variables}]


def test_a_checkpoint_on_the_ranks_own_disk(tmp_path, play):
    (tmp_path / "config.json").write_text("{}")
    done = play(role(checkpoint_source="local", checkpoint_path=str(tmp_path)))
    assert (done.rc, done.changed) == (0, 0), done.text


def test_a_missing_checkpoint_names_rank_found_expected_and_next_step(tmp_path, play):
    done = play(role(checkpoint_source="local", checkpoint_path=str(tmp_path)), "--check")
    assert done.rc != 0
    assert done.results["lockstep.fleet.checkpoint : Require it"]["msg"].splitlines() == [
        "localhost: there is no checkpoint",
        f"  found: no config.json in {tmp_path}",
        "  expected: a checkpoint's config.json",
        "  next step: copy the checkpoint there, correct fleet_model_path, or set checkpoint_source to nfs",
    ]


def test_an_export_without_an_address_is_refused_before_anything_is_mounted(play):
    done = play(
        role(
            checkpoint_source="nfs",
            checkpoint_path="not-used",
            checkpoint_nfs_server="",
            checkpoint_nfs_export="/srv/models/x",
        )
    )
    assert done.rc != 0
    assert (
        "found: server '', directory '/srv/models/x'"
        in done.results["lockstep.fleet.checkpoint : Require an address and a directory"]["msg"]
    )


def test_a_source_that_does_not_exist_is_refused(tmp_path, play):
    done = play(role(checkpoint_source="s3", checkpoint_path=str(tmp_path)))
    assert done.rc != 0
    assert "must be one of: local, nfs" in done.text
