"""The image filters and tests as a stranger's playbook uses them, and what the image modules decide before they act."""

from __future__ import annotations

import io
import json
import tarfile

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.lockstep.fleet.plugins.action import overlay_build
from ansible_collections.lockstep.fleet.plugins.filter import image_trouble, images_equal, images_work
from ansible_collections.lockstep.fleet.plugins.module_utils import dockerd
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError
from ansible_collections.lockstep.fleet.plugins.modules import rank_facts, registry_access
from ansible_collections.lockstep.fleet.plugins.test import same_image


@pytest.mark.ansible
@pytest.mark.parametrize("plugin", [images_equal, images_work, image_trouble, same_image])
def test_the_examples_run_as_they_are_written(plugin, play):
    tasks = yaml.safe_load(plugin.EXAMPLES)
    done = play(tasks)
    assert done.rc == 0, done.text
    assert all(not result.get("failed", False) for result in done.results.values())


def test_images_equal_shows_the_odd_rank_in_a_table():
    pinned, other_build = (yaml.safe_load(images_equal.EXAMPLES)[0]["vars"][key] for key in ("pinned", "other_build"))
    seen = images_equal.images_equal({"spark1": pinned, "spark3": pinned | other_build})
    assert seen["table"][:3] == [
        "rank    image id      digest  layers        platform     files",
        "spark1  37939c26c0ba  none    111111111111  linux/arm64  1      ok",
        "spark3  381b27ff0000  none    222222222222  linux/arm64  1      DIFFERS",
    ]
    assert seen["table"][-1] == "spark3 against spark1: files: 1 differ: /srt/models/deepseek_v4.py"
    assert images_equal.images_equal([pinned] * 2)["equal"] is True


@pytest.mark.parametrize("value", ["text", 3, [], {}, [None], {"spark1": {"id": "x"}}])
def test_what_is_no_identity_is_refused_by_filter_and_test(value):
    with pytest.raises(AnsibleFilterError):
        images_equal.images_equal(value)
    with pytest.raises(AnsibleFilterError):
        same_image.same_image(value)


def test_images_work_names_the_rank_without_a_look():
    with pytest.raises(AnsibleFilterError, match="spark2"):
        images_work.images_work({"base": {}, "overlay": {}}, {"spark1": {}, "spark2": None}, "spark1")
    with pytest.raises(AnsibleFilterError, match="spark9"):
        images_work.images_work({"base": {}, "overlay": {}}, {"spark1": {}}, "spark9")


# --- registry_access --------------------------------------------------------------------------------------------------

HOSTS = "127.0.0.1 localhost\n10.0.22.2 spark2 # not lockstep-registry\n"


def test_the_alias_is_one_marked_line_that_comes_and_goes():
    present = registry_access.hosts_with(HOSTS, "lockstep-registry", "10.0.22.1")
    assert present == HOSTS + f"10.0.22.1 lockstep-registry {dockerd.REGISTRY_MARK}\n"
    assert registry_access.hosts_with(present, "lockstep-registry", "10.0.22.1") == present
    moved = registry_access.hosts_with(present, "lockstep-registry", "10.0.23.1")
    assert moved == HOSTS + f"10.0.23.1 lockstep-registry {dockerd.REGISTRY_MARK}\n"
    assert registry_access.hosts_with(moved, "lockstep-registry", None) == HOSTS


def test_the_way_to_the_registry_is_open_until_both_its_marks_are_gone(tmp_path):
    hosts, daemon_json = tmp_path / "hosts", tmp_path / "daemon.json"
    hosts.write_text("10.0.22.1 lockstep-registry\n")  # somebody else's line
    assert not rank_facts.way_open(str(hosts), str(daemon_json))
    dockerd.remembered(daemon_json).write_text("{}")
    assert rank_facts.way_open(str(hosts), str(daemon_json))
    dockerd.remembered(daemon_json).unlink()
    hosts.write_text(f"10.0.22.1 lockstep-registry {dockerd.REGISTRY_MARK}\n")
    assert rank_facts.way_open(str(hosts), str(daemon_json))


def test_a_hosts_file_without_a_last_line_break_is_not_glued():
    assert registry_access.hosts_with("::1 localhost", "r", "10.0.0.1").splitlines()[0] == "::1 localhost"


def test_an_alias_that_somebody_else_set_is_respected_or_refused():
    theirs = HOSTS + "10.0.22.1 lockstep-registry\n"
    assert registry_access.hosts_with(theirs, "lockstep-registry", "10.0.22.1") == theirs
    with pytest.raises(LockstepError, match="is taken") as refused:
        registry_access.hosts_with(theirs, "lockstep-registry", "10.0.23.1")
    assert (refused.value.found, refused.value.expected) == (
        "10.0.22.1 lockstep-registry",
        "10.0.23.1 lockstep-registry",
    )
    assert registry_access.hosts_with(theirs, "lockstep-registry", None) == theirs


def test_docker_trusts_its_loopback_and_what_is_listed():
    # As GET /info answers on Docker 26.1 with one insecure registry listed.
    info = {
        "RegistryConfig": {
            "InsecureRegistryCIDRs": ["127.0.0.0/8", "::1/128"],
            "IndexConfigs": {
                "docker.io": {"Name": "docker.io", "Secure": True, "Official": True},
                "hub.lab:5000": {"Name": "hub.lab:5000", "Secure": False, "Official": False},
            },
        }
    }
    assert registry_access.trusted(info, "lockstep-registry:5100", "127.0.0.1") is True
    assert registry_access.trusted(info, "lockstep-registry:5100", "10.0.22.1") is False
    assert registry_access.trusted(info, "lockstep-registry:5100", None) is False
    assert registry_access.trusted(info, "hub.lab:5000", "10.77.0.10") is True
    assert registry_access.trusted(info, "docker.io", None) is False


def test_taking_our_entry_out_of_a_file_that_was_edited_since_leaves_the_edit():
    edited = json.dumps({"insecure-registries": ["a:1", "r:5100"], "log-driver": "journald"})
    assert json.loads(registry_access.without(edited, "r:5100")) == {
        "insecure-registries": ["a:1"],
        "log-driver": "journald",
    }
    assert json.loads(registry_access.without('{"insecure-registries": ["r:5100"]}', "r:5100")) == {}


# --- overlay_build ----------------------------------------------------------------------------------------------------


def test_the_archive_of_a_context_depends_on_nothing_but_the_files():
    context = [("Dockerfile", 0o600, b"FROM x\n"), ("opt/lockstep/run", 0o775, b"#!")]
    packed = overlay_build.archive(context)
    assert packed == overlay_build.archive([(path, mode | 0o020, data) for path, mode, data in reversed(context)])
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = {member.name: (oct(member.mode), member.uid, member.mtime) for member in tar}
    # 315532800 s after the epoch is 1980-01-01T00:00:00Z, the first date that a zip file knows.
    assert members == {
        **dict.fromkeys(["context", "context/opt", "context/opt/lockstep"], ("0o755", 0, 315532800)),
        "context/Dockerfile": ("0o644", 0, 315532800),
        "context/opt/lockstep/run": ("0o755", 0, 315532800),
    }


def test_a_checkout_that_changed_since_the_plan_is_refused(tmp_path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "Dockerfile").write_text("FROM x\n")
    asked = {"root": str(tmp_path), "base_digest": "sha256:" + "0" * 64, "split": "rows", "context_sha256": None}
    _, planned = overlay_build.checked_context(asked)
    assert overlay_build.checked_context(asked | {"context_sha256": planned})[1] == planned
    (tmp_path / "adapters" / "Dockerfile").write_text("FROM y\n")
    with pytest.raises(LockstepError, match="another overlay than the plan's"):
        overlay_build.checked_context(asked | {"context_sha256": planned})
