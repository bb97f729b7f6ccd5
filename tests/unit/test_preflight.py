"""Module preflight, through real ansible-playbook runs: everything that does not hold is said at once."""

import pytest

pytestmark = pytest.mark.ansible


def test_a_host_without_engine_room_or_a_proper_directory_hears_of_all_of_it(tmp_path, play):
    (tmp_path / "file").write_text("in the way")
    task = {
        "lockstep.fleet.preflight": {
            "state_dir": str(tmp_path / "state"),
            "directories": [str(tmp_path / "file"), str(tmp_path / "cache")],
            "docker_host": f"unix://{tmp_path}/no-engine.sock",
        }
    }
    done = play([{"name": "check", **task}])
    assert done.rc != 0
    message = done.results["check"]["msg"]
    assert "the Docker Engine on this rank does not answer as it should" in message
    assert f"{tmp_path}/file is no directory" in message
    # Nothing is made on a host that is not ready.
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "cache").exists()

    task["lockstep.fleet.preflight"].update(directories=[], free_bytes=1 << 60)
    message = play([{"name": "check", **task}]).results["check"]["msg"]
    assert "not enough room" in message
    assert f"{1 << 60:,} bytes" in message
