"""The image modules, and what they read inside images, against this machine's own Docker Engine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import docker
import pytest
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, images
from ansible_collections.lockstep.fleet.plugins.modules import image_prune
from playbook import examples, run_playbook

# Names of this run's own: two runs at a time must not touch each other's images.
NAME = f"lockstep-test-image-{os.getpid()}"
BUILD_A = {
    "srt/models/deepseek_v4.py": b"a = 1\n",
    "srt/models/same.py": b"same = True\n",
    "srt/__pycache__/deepseek_v4.cpython-311.pyc": b"compiled, with a time in it: a",
}
BUILD_B = {**BUILD_A, "srt/models/deepseek_v4.py": b"a = 2\n", "srt/__pycache__/deepseek_v4.cpython-311.pyc": b"b"}


def packed(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for path, target in (links or {}).items():
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return out.getvalue()


@pytest.fixture(scope="module")
def engine():
    with closing(docker.from_env(timeout=600)) as client:
        yield client


@pytest.fixture(scope="module")
def client():
    return docker_api.Engine()


@pytest.fixture
def builds(engine):
    """Two builds under two tags; the images and every name they get go again."""
    links = {"opt/current": "../srt", "srt/link.py": "models/same.py"}
    for tag, files in (("a", BUILD_A), ("b", BUILD_B)):
        engine.api.import_image_from_data(packed(files, links), repository=NAME, tag=tag)
    yield {tag: engine.images.get(f"{NAME}:{tag}").id for tag in ("a", "b")}
    for image in engine.images.list(name=NAME):
        engine.images.remove(image.id, force=True)


@pytest.fixture
def play(tmp_path):
    def run(tasks, *arguments):
        whole = {"hosts": "all", "connection": "local", "gather_facts": False, "tasks": tasks}
        whole["vars"] = {"ansible_python_interpreter": sys.executable}
        return run_playbook([whole], tmp_path, *arguments, inventory="spark1,")

    return run


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def containers(engine) -> set[str]:
    return {container.id for container in engine.containers.list(all=True, filters={"label": docker_api.LOOK_LABEL})}


def test_files_inside_an_image_are_read_and_nothing_is_left(engine, client, builds):
    before = containers(engine)
    found = docker_api.image_files(client, builds["a"], ["/srt", "/srt/models/deepseek_v4.py", "/nope"])
    assert found == {
        "/srt/models/deepseek_v4.py": sha256(b"a = 1\n"),
        "/srt/models/same.py": sha256(b"same = True\n"),
        "/nope": None,
    }
    assert containers(engine) == before


def test_links_are_followed_by_name_and_compiled_python_is_left_out(client, builds):
    found = docker_api.image_files(client, builds["a"], ["/opt/current", "/srt/link.py"])
    assert found == {
        "/opt/current/models/deepseek_v4.py": sha256(b"a = 1\n"),
        "/opt/current/models/same.py": sha256(b"same = True\n"),
        "/srt/link.py": sha256(b"same = True\n"),
    }


def test_a_container_that_an_interrupted_look_left_behind_goes_with_the_next(engine, client, builds):
    def begun(**more: str) -> str:
        return str(
            engine.containers.create(builds["a"], ["/x"], labels={docker_api.LOOK_LABEL: builds["a"], **more}).id
        )

    ended = subprocess.Popen(["true"])
    ended.wait()
    left = {begun(), begun(**{docker_api.LOOKER_LABEL: str(ended.pid)})}
    running = begun(**{docker_api.LOOKER_LABEL: "1"})  # another look at the same time
    docker_api.image_files(client, builds["a"], ["/srt"])
    assert containers(engine) & {*left, running} == {running}
    engine.containers.get(running).remove()


def test_a_relative_path_is_refused(client, builds):
    with pytest.raises(Exception, match="absolute path"):
        docker_api.image_files(client, builds["a"], ["srt"])


def test_the_layer_chain_is_the_name_the_engine_itself_gives_it(client, builds):
    """The engine keeps each chain of layers in a directory named by the chain's id."""
    chain = docker_api.identify(client, builds["a"])["layers_sha256"]
    root = Path(client.get_json("/info")["DockerRootDir"])
    assert (root / "image" / "overlay2" / "layerdb" / "sha256" / chain).is_dir()


def test_two_builds_under_one_tag_differ_and_the_file_is_named(client, builds):
    paths = ["/srt"]
    seen = images.agree({tag: docker_api.identify(client, builds[tag], paths) for tag in ("a", "b")})
    assert seen["equal"] is False
    assert seen["files"] == ["/srt/models/deepseek_v4.py"]
    by_tag_and_by_id = {ref: docker_api.identify(client, ref, paths) for ref in (f"{NAME}:a", builds["a"])}
    again = images.agree(by_tag_and_by_id)
    assert again["equal"] is True


def test_module_image_identity(engine, builds, play):
    task = {"images": [f"{NAME}:a", f"{NAME}:nope"], "files": ["/srt"]}
    done = play([{"name": "look", "lockstep.fleet.image_identity": task}], "--check")
    assert (done.rc, done.changed) == (0, 0), done.text
    there, absent = done.results["look"]["images"]
    inspect = engine.api.inspect_image(builds["a"])
    assert there["id"] == there["config_digest"] == inspect["Id"]
    assert there["layers"] == inspect["RootFS"]["Layers"]
    assert there["repo_tags"] == [f"{NAME}:a"]
    assert there["platform"] == f"{inspect['Os']}/{inspect['Architecture']}"
    assert there["files"]["/srt/models/deepseek_v4.py"] == sha256(b"a = 1\n")
    assert (absent["present"], absent["id"]) == (False, None)


def test_module_image_identity_reads_a_container_as_it_stands(engine, builds, play):
    container = engine.containers.create(builds["a"], ["/x"], name=NAME)
    try:
        container.put_archive("/srt/models", packed({"deepseek_v4.py": b"changed after its start\n"}))
        task = {"container": NAME, "files": ["/srt/models"]}
        done = play([{"name": "look", "lockstep.fleet.image_identity": task}])
        seen = done.results["look"]["container"]
    finally:
        container.remove(force=True)
    assert seen["id"] == builds["a"]
    assert seen["files"]["/srt/models/deepseek_v4.py"] == sha256(b"changed after its start\n")
    assert seen["files"]["/srt/models/same.py"] == sha256(b"same = True\n")


def test_module_image_name_moves_a_name_and_keeps_what_had_it(engine, builds, play):
    name = f"{NAME}:dev"
    engine.images.get(builds["b"]).tag(NAME, "dev")
    engine.images.remove(f"{NAME}:b")  # the drifted image has no other name
    tasks = [{"name": "name", "lockstep.fleet.image_name": {"name": name, "image": builds["a"]}}]
    dated = f"{NAME}:dev-{builds['b'][7:19]}"
    begun = datetime.now(UTC)

    predicted = play(tasks, "--check", "--diff").results["name"]
    assert predicted["changed"] is True
    assert engine.images.get(name).id == builds["b"]

    done = play(tasks, "--diff").results["name"]
    kept, days = done["kept"], (begun, datetime.now(UTC))  # two, where midnight comes between
    for told in (predicted, done):
        assert told["kept"] in {f"{dated}-{day:%Y%m%d}" for day in days}
        assert told["previous"] == builds["b"]
        assert told["diff"] == {
            "before": {name: builds["b"]},
            "after": {name: builds["a"], told["kept"]: builds["b"]},
        }
    assert engine.images.get(name).id == builds["a"]
    assert engine.images.get(kept).id == builds["b"]

    again = play(tasks)
    assert again.changed == 0
    assert again.results["name"]["kept"] is None

    # Back and forth on another day: the image that has a dated name gets no second one.
    play([{"name": "back", "lockstep.fleet.image_name": {"name": name, "image": kept}}])
    play(tasks)
    names = [tag for tag in engine.images.get(builds["b"]).tags if tag.startswith(NAME)]
    assert names == [kept]


def test_module_image_name_refuses_what_is_not_there_but_predicts_it(builds, play):
    tasks = [{"name": "name", "lockstep.fleet.image_name": {"name": f"{NAME}:dev", "image": f"{NAME}:nope"}}]
    done = play(tasks)
    assert done.rc == 2
    said = done.results["name"]["msg"]
    assert f"found: no {NAME}:nope" in said
    assert "next step: pull or build it first" in said
    assert play(tasks, "--check").results["name"]["changed"] is True
    wrong = play([{"name": "name", "lockstep.fleet.image_name": {"name": NAME, "image": builds["a"]}}])
    assert "a local name is repository:tag" in wrong.results["name"]["msg"]


# --- image_prune ------------------------------------------------------------------------------------------------------

FLEET = {
    "base": {"repository": f"{NAME}/base", "tag": "dev", "digest": "sha256:" + "1" * 64},
    "overlay": {"tag": f"{NAME}-overlay:local"},
    "builds": {},
    "registry": {"image": "registry:2.8.3", "alias": NAME, "port": 5100, "existing": ""},
    "kept_name": images.KEPT_NAME,
}
# What some rank knows by the digest of the pinned base: no image of this machine.
PINNED = images.identity({"Id": "sha256:" + "2" * 64}, {}, ref=f"{NAME}/base@{FLEET['base']['digest']}")


@pytest.fixture
def kept(engine, builds):
    """Both builds under the names of overlays that lost theirs, and under no other."""
    names = {tag: f"{NAME}-overlay:mixed-{image[7:19]}-20260924" for tag, image in builds.items()}
    for tag, name in names.items():
        engine.images.get(builds[tag]).tag(*name.rsplit(":", 1))
        engine.images.get(builds[tag]).tag(f"{NAME}:5100/{NAME}-overlay", tag)
        engine.images.remove(f"{NAME}:{tag}")
    yield names
    for image in builds.values():
        if docker_api.inspect_image(docker_api.Engine(), image):
            engine.images.remove(image, force=True)


def test_module_image_prune_removes_what_nothing_needs_and_says_why_the_rest_stays(engine, builds, kept, play):
    engine.images.get(builds["b"]).tag("somebody/elses", NAME)
    task = {"name": "prune", "lockstep.fleet.image_prune": {"images": FLEET, "launches": [], "known": [PINNED]}}
    predicted = play([task], "--check", "--diff")
    assert (predicted.rc, predicted.changed) == (0, 1), predicted.text
    assert engine.images.get(builds["a"]).id == builds["a"]
    done = play([task], "--diff")
    said = done.results["prune"]
    assert [(image["id"], image["names"]) for image in said["removed"]] == [
        (builds["a"], [f"{NAME}:5100/{NAME}-overlay:a", kept["a"]])
    ]
    assert [(image["id"], image["why"]) for image in said["kept"]] == [
        (builds["b"], f"Lockstep did not name it somebody/elses:{NAME}")
    ]
    for key in ("removed", "kept", "refused", "diff"):
        assert predicted.results["prune"][key] == said[key]
    # Of all images of this machine, where others work too: the lab's hosts tell whether the figure is right.
    assert (predicted.results["prune"]["freed"], type(said["freed"])) == (None, int)
    with pytest.raises(docker.errors.ImageNotFound):
        engine.images.get(builds["a"])
    assert engine.images.get(kept["b"]).id == builds["b"]
    assert play([task]).changed == 0


def test_an_image_that_the_engine_does_not_let_go_is_said_and_the_others_go(engine, builds, kept):
    """A container comes to one of them after the look."""
    late = []

    class Late(docker_api.Engine):
        def delete_call(self, pathfmt, *args, **kwargs):
            if not late:
                late.append(docker_api.inspect_image(self, args[0])["Id"])
                engine.containers.create(late[0], ["/x"], name=NAME)
            super().delete_call(pathfmt, *args, **kwargs)

    try:
        params = {"images": FLEET, "launches": [], "known": [PINNED]}
        said = image_prune.run(params, Late(), check_mode=False)
        (refused,) = said["refused"]
        assert refused["id"] == late[0]
        assert "container" in refused["why"]
        assert engine.images.get(late[0]).id == late[0]
        assert {image["id"] for image in said["removed"]} == {*builds.values()} - {*late}
        again = image_prune.run(params, docker_api.Engine(), check_mode=False)
        assert (again["changed"], again["kept"][0]["why"]) == (False, f"container {NAME} uses it")
    finally:
        engine.containers.get(NAME).remove()


def test_the_registry_goes_even_when_the_way_to_it_does_not_close(engine, builds, play, tmp_path):
    (tmp_path / "daemon.json.lockstep").write_text("no JSON")
    engine.containers.create(builds["a"], ["/x"], name=NAME)
    close = {
        "name": "close",
        "ansible.builtin.include_role": {"name": "lockstep.fleet.image", "tasks_from": "close"},
        "vars": {"image_registry": FLEET["registry"], "__image_registry": {}},
    }
    broken = {"hosts_file": str(tmp_path / "hosts"), "daemon_json": str(tmp_path / "daemon.json")}
    (tmp_path / "hosts").write_text("")
    done = play([{"block": [close], "module_defaults": {"lockstep.fleet.registry_access": broken}}])
    assert done.rc == 2
    assert "daemon.json.lockstep" in done.results["lockstep.fleet.image : Close the way to the fleet's registry"]["msg"]
    with pytest.raises(docker.errors.NotFound):
        engine.containers.get(NAME)


def test_the_examples_run_as_they_are_written(engine, builds, play, tmp_path):
    replaced = {
        "lmsysorg/sglang:dev-dsv41": f"{NAME}:a",
        "/sgl-workspace/sglang/python/sglang/srt/models/deepseek_v4.py": "/srt/models/deepseek_v4.py",
        "dsv41-head": NAME,
        "/opt/lockstep": "/opt/current",
    }
    container = engine.containers.create(builds["a"], ["/x"], name=NAME)
    try:
        done = play(examples("image_identity", replaced))
    finally:
        container.remove(force=True)
    assert done.rc == 0, done.text
    pinned = "lmsysorg/sglang@sha256:3dbc313030a6ef2c5d7de8ecf48e9aece722694a82182cb618cc82b588816349"
    named = play(examples("image_name", {pinned: builds["b"], "lmsysorg/sglang:dev-dsv41": f"{NAME}:named"}))
    assert named.rc == 0, named.text
    assert engine.images.get(f"{NAME}:named").id == builds["b"]
    pruned = play(
        examples("image_prune", {"/srv/lockstep": str(tmp_path)}), "-e", json.dumps({"fleet_images": FLEET}), "--check"
    )
    assert pruned.rc == 0, pruned.text


def test_an_engine_that_does_not_answer_is_said_with_the_next_step(play):
    task = {"images": ["x"], "docker_host": "unix:///nonexistent/docker.sock"}
    done = play([{"name": "look", "lockstep.fleet.image_identity": task}])
    assert done.rc == 2
    assert "does not answer as it should" in done.results["look"]["msg"]
    assert "next step: systemctl status docker" in done.results["look"]["msg"]


def test_logs_keep_the_order_of_both_streams(engine, client):
    """Frames of the engine's stream are taken apart; the container is this machine's own shell."""
    wanted = {"/bin/sh"}
    linked = subprocess.run(["ldd", "/bin/sh"], check=True, capture_output=True, text=True).stdout
    wanted |= {word for word in linked.split() if word.startswith("/")}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", dereference=True) as tar:
        for path in sorted(wanted):
            tar.add(path, recursive=False)
    engine.api.import_image_from_data(out.getvalue(), repository=NAME, tag="shell")
    container = engine.containers.run(
        f"{NAME}:shell", ["/bin/sh", "-c", "echo one; echo two >&2; echo three"], name=NAME, detach=True
    )
    try:
        container.wait()
        lines = docker_api.logs(client, NAME).splitlines()
        last = docker_api.logs(client, NAME, tail=1)
        (facts,) = docker_api.containers(client, names=[NAME])
    finally:
        container.remove(force=True)
        engine.images.remove(f"{NAME}:shell", force=True)
    assert sorted(lines) == ["one", "three", "two"]
    assert lines.index("one") < lines.index("three")
    assert len(last.splitlines()) == 1
    assert (facts["state"], facts["exit_code"], facts["argv"][:2]) == ("exited", 0, ["/bin/sh", "-c"])
    assert docker_api.containers(client, names=[NAME]) == []
    with pytest.raises(Exception, match="no container"):
        docker_api.logs(client, NAME)
