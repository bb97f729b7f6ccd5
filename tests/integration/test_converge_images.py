"""converge_images.yml on the lab: the campaign's night, mended; asked past our modules, by docker over SSH.

The tests run in order over one lab that begins in its starting state: spark3 holds another build under the tag.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fleet
import pytest
import yaml
from playbook import ROOT, Played, run_file, run_playbook

INVENTORY = ROOT / "inventory" / "lab"
HOSTS = ("spark1", "spark2", "spark3")
HEAD, SECOND, DRIFTED = HOSTS
OVERLAY = "dsv41-3x-spark:local"
TAG = "hub.lab:5000/lmsysorg/sglang:dev-dsv41"
ROLE = "lockstep.fleet.image : "  # how results name the role's tasks
SITE = "/usr/local/lib/python3.11/dist-packages"


@pytest.fixture(scope="module", autouse=True)
def lab():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "lab")}
    command = [sys.executable, "-m", "lockstep_lab", "reset", "--engine", "sim"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


@pytest.fixture(scope="module")
def variables() -> dict[str, Any]:
    listed = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-inventory")), "-i", str(INVENTORY), "--list"],
        check=True,
        capture_output=True,
        text=True,
    )
    known: dict[str, Any] = json.loads(listed.stdout)["_meta"]["hostvars"]
    return known


@pytest.fixture(scope="module")
def made(variables) -> dict[str, dict[str, str]]:
    """The images that the lab made: reference, digest and Id of the pinned base, the moved one and the registry."""
    return variables[HEAD]["fleet_lab_made"]


@pytest.fixture
def on(variables):
    """``on(host, command)``: what a shell command says on a host."""

    def run(host: str, command: str) -> str:
        own = variables[host]
        options = own["ansible_ssh_common_args"].replace("{{ fleet_lab_generated }}", str(INVENTORY / "generated"))
        key = own["ansible_ssh_private_key_file"].replace("{{ fleet_lab_generated }}", str(INVENTORY / "generated"))
        options = options.replace("{{ inventory_dir }}", str(INVENTORY))
        key = key.replace("{{ inventory_dir }}", str(INVENTORY))
        done = subprocess.run(
            ["ssh", "-i", key, *options.split(), f"ops@{own['ansible_host']}", f"sudo sh -c {json.dumps(command)}"],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{host}: {command}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def state(on):
    """``state()``: everything of every host that converging images may touch."""
    ask = (
        "docker images --no-trunc --format '{{.Repository}}:{{.Tag}}@{{.Digest}} {{.ID}}' | sort; "
        "docker ps --all --no-trunc --format '{{.ID}} {{.Names}}'; cat /etc/hosts /etc/docker/daemon.json; "
        "docker info --format '{{json .RegistryConfig.IndexConfigs}}'; ls -A /etc/docker; "
        "ls -A /home/ops/.ansible/tmp 2>/dev/null || true"
    )
    return lambda: {host: on(host, ask) for host in HOSTS}


def converge(*arguments: str) -> Played:
    return run_file(ROOT / "converge_images.yml", *arguments, inventory=str(INVENTORY))


def per_host(played: Played) -> dict[str, int]:
    """How many tasks changed each host."""
    text = played.text[f"\n{played.text}".find("\n{") :]
    said, _ = json.JSONDecoder().raw_decode(text)
    return {host: numbers["changed"] for host, numbers in said["stats"].items()}


def image_id(on, host: str, name: str) -> str:
    return on(host, f"docker image inspect --format '{{{{.Id}}}}' {name}").strip()


def differing_files(on, *images: str) -> list[str]:
    """Files of the engine's package that two images on the drifted host do not have alike, by sha256sum inside both."""
    ask = f"find {SITE} -type f ! -name '*.pyc' -exec sha256sum {{}} +"
    sums = [set(on(DRIFTED, f'docker run --rm --entrypoint sh {image} -c "{ask}"').splitlines()) for image in images]
    return sorted({line.split(maxsplit=1)[1] for line in sums[0] ^ sums[1]})


def test_the_night_is_seen_and_the_files_that_differ_are_named(on, tmp_path):
    # The overlay that the last rank had that night: built there, on what the tag named there.
    on(DRIFTED, f"printf 'FROM {TAG}\\nENV NIGHT=20260924\\n' | docker build --quiet --tag {OVERLAY} -")
    play = {
        "hosts": "fleet",
        "gather_facts": False,
        "tasks": [
            {
                "name": "look",
                "lockstep.fleet.image_identity": {"images": [TAG], "files": [f"{SITE}/sglang"]},
                "register": "base",
            },
            {
                "name": "verdict",
                "ansible.builtin.set_fact": {
                    "verdict": "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, "
                    "['base', 'images', 0]))) | lockstep.fleet.images_equal }}"
                },
                "run_once": True,
            },
        ],
    }
    path = tmp_path / "play.yml"
    path.write_text(yaml.safe_dump([play]))
    done = run_file(path, inventory=str(INVENTORY))
    assert done.rc == 0, done.text
    verdict = done.results["verdict"]["ansible_facts"]["verdict"]
    assert verdict["groups"] == [[HEAD, SECOND], [DRIFTED]]
    assert len(verdict["files"]) >= 40
    assert f"{SITE}/sglang/srt/models/deepseek_v4.py" in verdict["files"]


def test_check_mode_predicts_and_changes_nothing(state):
    before = state()
    predicted = converge("--check", "--diff")
    assert predicted.rc == 0, predicted.text
    assert state() == before
    changed = per_host(predicted)
    assert all(changed[host] for host in HOSTS)
    assert changed[DRIFTED] == changed[SECOND] + 2  # the base: fetched and named, and its digest


def test_the_fleet_is_converged_and_nothing_else_is_touched(on, state, made):
    on(SECOND, f"docker run --detach --name bystander {TAG} sleep 3600")
    started = on(SECOND, "docker inspect --format '{{.State.StartedAt}} {{.State.Pid}}' bystander")
    mixed = image_id(on, DRIFTED, OVERLAY)
    files = {host: on(host, "cat /etc/hosts /etc/docker/daemon.json | sha256sum") for host in HOSTS}
    trusted = {host: on(host, "docker info --format '{{json .RegistryConfig.IndexConfigs}}'") for host in HOSTS}

    done = converge()
    assert done.rc == 0, done.text

    assert {image_id(on, host, TAG) for host in HOSTS} == {made["base"]["id"]}
    assert len({image_id(on, host, OVERLAY) for host in HOSTS}) == 1
    # Nothing was left for the engine to push.
    assert done.results[f"{ROLE}Publish the images from their layers on this rank's disk"]["left"] == []
    # The base came from the head; its own digest is a name of it again all the same.
    names = on(DRIFTED, f"docker image inspect --format '{{{{join .RepoDigests \" \"}}}}' {TAG}").split()
    assert f"{TAG.rpartition(':')[0]}@{made['base']['digest']}" in names
    assert any(name.startswith("lockstep-registry:5100/lmsysorg/sglang@") for name in names)
    kept = on(DRIFTED, "docker images --format '{{.Repository}}:{{.Tag}}'").split()
    dated = re.compile(rf"{re.escape(TAG)}-{made['moved']['id'][7:19]}-20[0-9]{{6}}")
    (name,) = [name for name in kept if dated.fullmatch(name)]
    assert image_id(on, DRIFTED, name) == made["moved"]["id"]
    dated = re.compile(rf"{OVERLAY.partition(':')[0]}:mixed-{mixed[7:19]}-20[0-9]{{6}}")
    (name,) = [name for name in kept if dated.fullmatch(name)]
    assert image_id(on, DRIFTED, name) == mixed
    # The report names every file that made the other build another one; compared here by what the images hold.
    differ = differing_files(on, TAG, made["moved"]["id"])
    assert len(differ) >= 40
    assert f"{SITE}/sglang/srt/models/deepseek_v4.py" in differ
    said = done.results["Say how this rank's base differed"]["msg"]
    assert said[0].startswith(f"{DRIFTED}: {TAG} named another image, {made['moved']['id'][7:19]}")
    assert said[said.index(f"files that differ: {len(differ)}") + 1 :] == differ
    in_overlay = {on(host, f"docker run --rm --entrypoint sha256sum {OVERLAY} {differ[0]}") for host in HOSTS}
    assert len(in_overlay) == 1
    # The overlay stands on the base's layers, has its labels, and all workers know it by the digest the head knows.
    layers = {
        what: json.loads(on(HEAD, f"docker image inspect --format '{{{{json .RootFS.Layers}}}}' {what}"))
        for what in (TAG, OVERLAY)
    }
    assert layers[OVERLAY][: len(layers[TAG])] == layers[TAG]
    labels = json.loads(on(HEAD, f"docker image inspect --format '{{{{json .Config.Labels}}}}' {OVERLAY}"))
    assert labels["lockstep.base_digest"] == made["base"]["digest"]
    assert re.fullmatch("[0-9a-f]{64}", labels["lockstep.context_sha256"])
    digests = {on(host, f"docker image inspect --format '{{{{json .RepoDigests}}}}' {OVERLAY}") for host in HOSTS}
    assert len(digests) == 1
    assert "lockstep-registry:5100/dsv41-3x-spark@sha256:" in digests.pop()

    # The way is closed: no registry, no entry in any file, and no engine was restarted for it.
    assert {host: on(host, "cat /etc/hosts /etc/docker/daemon.json | sha256sum") for host in HOSTS} == files
    assert {host: on(host, "docker info --format '{{json .RegistryConfig.IndexConfigs}}'") for host in HOSTS} == trusted
    assert on(HEAD, "docker ps --all --quiet --filter name=lockstep-registry") == ""
    assert on(SECOND, "docker inspect --format '{{.State.StartedAt}} {{.State.Pid}}' bystander") == started
    assert all(entry.count("ansible-tmp") == 0 for entry in state().values())
    on(SECOND, "docker rm --force bystander")


def test_a_second_run_changes_nothing(state):
    before = state()
    again = converge()
    assert (again.rc, again.changed) == (0, 0), again.text
    assert state() == before


def test_the_same_tree_gives_the_same_image_on_two_engines_and_another_tree_another_one(on, made, tmp_path):
    """Checkouts apart in place, times and modes, built one after another; nothing of them is in an engine before."""
    roots = {host: tmp_path / f"of {host}" for host in HOSTS}
    for number, (host, root) in enumerate(roots.items()):
        for folder in ("adapters", "plugins/module_utils"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        changed = root / "adapters/lockstep_engine/new/__init__.py"
        changed.parent.mkdir()
        changed.write_text("new = 2\n" if host == DRIFTED else "new = 1\n")
        for path in root.rglob("*"):
            path.chmod(path.stat().st_mode & (0o700 if number else 0o775))
            os.utime(path, (10**9 + number, 10**9 + number))
        on(host, "docker builder prune --all --force")
    name = "lockstep-test:new"
    build = {
        "name": name,
        "base": TAG,
        "base_digest": made["base"]["digest"],
        "split": "rows",
        "root": "{{ roots[inventory_hostname] }}",
    }
    play = {
        "hosts": "fleet",
        "gather_facts": False,
        "serial": 1,  # so each at a time of its own
        "become": True,
        "vars": {"roots": {host: str(root) for host, root in roots.items()}},
        "tasks": [{"name": "build", "lockstep.fleet.overlay_build": build}],
    }
    try:
        done = run_playbook([play], tmp_path, inventory=str(INVENTORY))
        assert done.rc == 0, done.text
        ids = [image_id(on, host, name) for host in HOSTS]
        assert ids[0] == ids[1] != ids[2]
        shown = on(HEAD, f"docker history --human=false --format '{{{{.CreatedAt}}}} {{{{.CreatedBy}}}}' {name}")
        own = shown.splitlines()[: -len(on(HEAD, f"docker history --quiet {TAG}").split())]
        assert len([line for line in own if " COPY " in line]) == 1
        assert {line.split()[0] for line in own} == {"1980-01-01T00:00:00Z"}
        found = f"docker run --rm --entrypoint find {name} /opt -printf '%y %m %U %TY %P\\n'"
        listed = {line.rpartition(" ")[2]: line.rpartition(" ")[0] for line in on(HEAD, found).splitlines()}
        assert listed["lockstep/lockstep_core/plan.py"] == "f 644 0 1980"
        assert listed["lockstep/lockstep_engine/new"] == "d 755 0 1980"
    finally:
        for host in HOSTS:
            on(host, f"docker image rm --force {name}")


def test_a_moved_overlay_tag_is_put_back_without_moving_a_byte(on, made):
    right = image_id(on, HEAD, OVERLAY)
    on(DRIFTED, f"docker tag {made['moved']['id']} {OVERLAY}")
    done = converge()
    assert done.rc == 0, done.text
    assert per_host(done) == {HEAD: 0, SECOND: 0, DRIFTED: 1}
    assert image_id(on, DRIFTED, OVERLAY) == right


def test_a_lost_overlay_is_fetched_again_and_not_built_again(on):
    right = image_id(on, HEAD, OVERLAY)
    on(SECOND, f"docker image rm --force {right}")
    done = converge()
    assert done.rc == 0, done.text
    assert {image_id(on, host, OVERLAY) for host in HOSTS} == {right}
    assert done.results[f"{ROLE}Have it under its name, and keep what had the name"]["changed"]
    assert f"{ROLE}Build the overlay" not in done.results


def test_what_was_built_on_top_of_the_overlay_with_its_labels_is_found_by_name_also_on_the_head(on):
    right = image_id(on, HEAD, OVERLAY)
    changed = "/opt/lockstep/lockstep_core/plan.py"
    build = f"printf '%s\\n' 'FROM {OVERLAY}' 'RUN echo >> {changed}' | docker build --quiet --tag {OVERLAY} -"
    altered = {host: on(host, build).strip() for host in (HEAD, SECOND)}
    done = converge()
    assert done.rc == 0, done.text
    assert {image_id(on, host, OVERLAY) for host in HOSTS} == {right}
    for host, image in altered.items():
        assert f"{host}: {OVERLAY} names {image[7:19]}: " in done.text
        on(host, f"docker image rm --force {image}")
    again = on(SECOND, build).strip()
    done = converge()
    assert done.rc == 0, done.text
    assert f"files: 1 differ: {changed}" in done.text
    on(SECOND, f"docker image rm --force {again}")
    assert image_id(on, SECOND, OVERLAY) == right


def test_a_registry_that_cannot_start_is_named_and_the_way_is_closed_again(on, state):
    right = image_id(on, HEAD, OVERLAY)
    on(SECOND, f"docker image rm --force {right}")
    before = state()
    on(HEAD, "systemd-run --quiet --unit=taken python3 -m http.server 5100")
    try:
        on(HEAD, "until ss -Hltn sport = :5100 | grep -q .; do sleep 0.1; done")
        done = converge()
        assert done.rc != 0
        said = done.results[f"{ROLE}Say why the images could not be published"]["msg"]
        assert said.startswith(f"{HEAD}: the images did not get into the registry (port_taken)")
        assert "next step: stop what listens there, or choose another port" in said
    finally:
        on(HEAD, "systemctl stop taken")
    assert state() == before
    assert converge().rc == 0
    assert image_id(on, SECOND, OVERLAY) == right


def test_what_a_killed_run_left_open_is_closed_by_the_next(on, state):
    right = image_id(on, HEAD, OVERLAY)
    before = state()
    on(SECOND, f"docker image rm --force {right}")
    run = fleet.started("converge_images.yml", alone=True)
    for line in run.stdout:
        if line.startswith(f"TASK [{ROLE}Have it under its name"):
            break
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert "lockstep-registry" in on(HEAD, "docker ps --format '{{.Names}}'")
    for host in HOSTS[:2]:
        assert "# lockstep: the fleet's registry" in on(host, "cat /etc/hosts")
    predicted = converge("--check")
    assert predicted.rc == 0, predicted.text
    assert predicted.results[f"{ROLE}Close the way to the fleet's registry"]["changed"]
    done = converge()
    assert done.rc == 0, done.text
    assert state() == before
    assert (converge().changed, image_id(on, SECOND, OVERLAY)) == (0, right)


def test_an_edited_file_inside_the_image_store_is_found_by_name(on):
    right = image_id(on, SECOND, OVERLAY)
    upper = on(SECOND, f"docker image inspect --format '{{{{.GraphDriver.Data.LowerDir}}}}' {right}").split(":")
    upper.append(on(SECOND, f"docker image inspect --format '{{{{.GraphDriver.Data.UpperDir}}}}' {right}").strip())
    path = next(
        file
        for layer in upper
        if (file := on(SECOND, f"ls {layer.strip()}/opt/lockstep/lockstep_core/plan.py 2>/dev/null || true").strip())
    )
    on(SECOND, f"cp -p {path} /root/plan.py && echo '# changed' >> {path}")
    try:
        done = converge()
        assert done.rc != 0
        assert SECOND in done.text
        assert "/opt/lockstep/lockstep_core/plan.py" in done.text
        assert "changed behind the engine" in done.text
    finally:
        on(SECOND, f"cat /root/plan.py > {path} && rm /root/plan.py")
    assert converge().changed == 0


@pytest.fixture
def no_hub(on):
    """``no_hub(*hosts)``: these hosts cannot reach the hub until the test is over."""
    cut: list[str] = []

    def away(*hosts: str) -> None:
        for host in hosts:
            cut.append(host)
            on(host, f"cp -p /etc/hosts /root/hosts && echo '127.0.0.1 {TAG.partition(':')[0]}' > /etc/hosts")

    yield away
    for host in cut:
        on(host, "cat /root/hosts > /etc/hosts && rm /root/hosts")


def forget(on, host: str, *, base: str) -> None:
    """Remove both images of a host, by Id."""
    for image in (image_id(on, host, OVERLAY), base):
        on(host, f"docker image rm --force {image}")


def test_workers_without_a_way_to_the_hub_get_everything_from_the_head(on, made, no_hub):
    right = {name: image_id(on, HEAD, name) for name in (TAG, OVERLAY)}
    for host in (SECOND, DRIFTED):
        forget(on, host, base=made["base"]["id"])
    no_hub(SECOND, DRIFTED)
    done = converge()
    assert done.rc == 0, done.text
    assert f"{ROLE}Pull the base by digest" not in done.results
    for host in (SECOND, DRIFTED):
        assert {name: image_id(on, host, name) for name in (TAG, OVERLAY)} == right
        # It knows the head's name for it, not the hub's.
        names = on(host, f"docker image inspect --format '{{{{.RepoDigests}}}}' {TAG}")
        assert "lockstep-registry:5100/lmsysorg/sglang@" in names
        assert f"{TAG.rpartition(':')[0]}@" not in names
    again = converge()
    assert (again.rc, again.changed) == (0, 0), again.text


def test_a_head_that_lacks_the_base_gets_it_from_a_rank_that_holds_it(on, made, no_hub):
    right = {name: image_id(on, SECOND, name) for name in (TAG, OVERLAY)}
    # The last test left it without the hub's name.
    on(SECOND, f"docker pull --quiet {TAG.rpartition(':')[0]}@{made['base']['digest']}")
    for host in (HEAD, DRIFTED):
        forget(on, host, base=made["base"]["id"])
    no_hub(HEAD, DRIFTED)
    done = converge()
    assert done.rc == 0, done.text
    assert {image_id(on, host, TAG) for host in HOSTS} == {right[TAG]}
    assert len({image_id(on, host, OVERLAY) for host in HOSTS}) == 1
    assert converge().changed == 0


def test_a_registry_that_is_there_already_is_used_and_nothing_is_started(on, state):
    right = image_id(on, HEAD, OVERLAY)
    on(DRIFTED, f"docker image rm --force {right}")
    named = {"fleet_image_registry": {"existing": f"{TAG.partition('/')[0]}/fleet"}}
    done = converge("--extra-vars", json.dumps(named))
    assert done.rc == 0, done.text
    for name in ("Start the registry", "Open the way to the fleet's registry", "Remove the registry"):
        assert done.results[f"{ROLE}{name}"]["skipped"], name
    assert image_id(on, DRIFTED, OVERLAY) == right
    assert f"{named['fleet_image_registry']['existing']}/dsv41-3x-spark@sha256:" in on(
        DRIFTED, f"docker image inspect --format '{{{{.RepoDigests}}}}' {OVERLAY}"
    )


def test_a_digest_that_the_hub_does_not_have_ends_with_rank_found_expected_and_next_step(state):
    before = state()
    wrong = "sha256:" + "0" * 64
    base = {"repository": TAG.rpartition(":")[0], "tag": "dev-dsv41", "digest": wrong}
    builds = {wrong: {"engram_split": "rows", "sglang": "0", "flashinfer": "0", "build": "0"}}
    extra = json.dumps({"fleet_image_base": base, "fleet_image_builds_extra": builds})
    done = converge("--extra-vars", extra)
    assert done.rc != 0
    said = done.results[f"{ROLE}Say what the base lacks"]["msg"]
    assert "the pinned base is not on this rank (missing_digest)" in said
    assert f"found: manifest for {TAG.rpartition(':')[0]}@{wrong} not found" in said
    assert f"expected: {TAG.rpartition(':')[0]}@{wrong}" in said
    assert "next step: check the digest; the registry does not have it" in said
    assert state() == before


def test_where_no_registry_can_run_the_error_names_the_other_way(on, made, no_hub, state):
    # A head that does not know the pinned digest asks the hub first, and keeps what it learnt.
    on(HEAD, f"docker pull --quiet {TAG.rpartition(':')[0]}@{made['base']['digest']}")
    forget(on, SECOND, base=made["base"]["id"])
    no_hub(SECOND)
    before = state()
    nowhere = {"image": f"{TAG.partition('/')[0]}/lockstep/registry@sha256:{'0' * 64}"}
    done = converge("--extra-vars", json.dumps({"fleet_image_registry": {"alias": "none", "port": 5100, **nowhere}}))
    assert done.rc != 0
    said = done.results[f"{ROLE}Say why the images could not be published"]["msg"]
    assert said.startswith(f"{HEAD}: the images did not get into the registry (missing_digest)")
    assert said.endswith("or hand on without one: fleet_image_hand_on: stream")
    after = state()
    assert {host: after[host].splitlines() for host in HOSTS} == {host: before[host].splitlines() for host in HOSTS}


STREAM = ("--extra-vars", "fleet_image_hand_on=stream")


@pytest.fixture
def cut(on):
    """``cut(host, bytes)``: what comes to the host from the head is let through until it is so much, then reset."""
    rules: list[tuple[str, str]] = []

    def after(host: str, count: int) -> None:
        head = "10.0.22.1"  # on its link to SECOND
        for rule in (
            f"-s {head} -p tcp -j REJECT --reject-with tcp-reset",
            f"-s {head} -m quota --quota {count} -j ACCEPT",
        ):
            on(host, f"iptables -I INPUT {rule}")
            rules.append((host, rule))

    yield after
    for host, rule in rules:
        on(host, f"iptables -D INPUT {rule}")


def test_a_stream_that_is_cut_leaves_nothing_and_the_next_run_sends_it_again(on, made, no_hub, cut, state):
    right = {name: image_id(on, HEAD, name) for name in (TAG, OVERLAY)}
    forget(on, DRIFTED, base=made["base"]["id"])
    no_hub(SECOND, DRIFTED)
    layers = "ls /var/lib/docker/image/overlay2/layerdb/sha256 /var/lib/docker/tmp"
    before, kept = state(), on(SECOND, layers)
    cut(SECOND, 40 << 20)
    done = converge(*STREAM)
    assert done.rc != 0
    assert f"{SECOND}: the connection to the other side was lost" in done.text
    # The other worker has its own, and the head is as it was. The engine clears up a little after its answer.
    until = time.monotonic() + 60
    while on(SECOND, layers) != kept and time.monotonic() < until:
        time.sleep(0.5)
    after = state()
    assert (after[HEAD], after[SECOND], on(SECOND, layers)) == (before[HEAD], before[SECOND], kept)
    assert {name: image_id(on, DRIFTED, name) for name in (TAG, OVERLAY)} == right


def test_streamed_images_are_the_same_and_no_registry_was_started(on, made, no_hub):
    right = {name: image_id(on, HEAD, name) for name in (TAG, OVERLAY)}
    no_hub(SECOND)
    done = converge(*STREAM)
    assert done.rc == 0, done.text
    assert f"{ROLE}Start the registry" not in done.results
    assert {name: image_id(on, SECOND, name) for name in (TAG, OVERLAY)} == right
    assert re.search(rf"{SECOND}: .*overlay sent and loaded, SHA-256 equal at both ends: 1[0-9][0-9]\.", done.text)


STICK = "/root/stick"


def test_a_fleet_without_a_hub_gets_its_images_from_files_with_checksums(on, made, no_hub, state):
    right = {name: image_id(on, HEAD, name) for name in (TAG, OVERLAY)}
    stick = ("--extra-vars", f"images_dir={STICK}")

    def run(entry: str, *arguments: str) -> Played:
        return run_file(ROOT / f"{entry}_images.yml", *stick, *arguments, inventory=str(INVENTORY))

    done = run("save")
    assert done.rc == 0, done.text
    assert on(HEAD, f"cd {STICK} && sha256sum --strict --check SHA256SUMS") == "images.json: OK\nimages.tar: OK\n"
    written = on(HEAD, f"ls -A --full-time {STICK}")
    again = run("save")
    assert (again.rc, again.changed, on(HEAD, f"ls -A --full-time {STICK}")) == (0, 0, written), again.text

    # Another place: nobody has an image, and there is no hub.
    no_hub(*HOSTS)
    for host in HOSTS:
        forget(on, host, base=made["base"]["id"])
    on(HEAD, f"docker image rm --force {made['registry']['id']}")
    on(
        HEAD,
        f"cp {STICK}/images.tar /root/good && printf x | dd of={STICK}/images.tar bs=1 seek=50000000 conv=notrunc 2>&1",
    )
    before = state()
    refused = run("load")
    assert refused.rc != 0
    assert f"{STICK}/images.tar is not what its checksum says" in refused.text
    assert state() == before
    on(HEAD, f"mv /root/good {STICK}/images.tar")
    foreseen = run("load", "--check")
    assert (foreseen.rc, state()) == (0, before), foreseen.text
    done = run("load")
    assert done.rc == 0, done.text
    assert {name: image_id(on, HEAD, name) for name in (TAG, OVERLAY)} == right
    assert on(HEAD, f"docker image inspect --format '{{{{json .RepoDigests}}}}' {TAG}").strip() == "[]"
    again = run("load")
    assert (again.rc, again.changed) == (0, 0), again.text

    done = converge()
    assert done.rc == 0, done.text
    for host in HOSTS:
        assert {name: image_id(on, host, name) for name in (TAG, OVERLAY)} == right
    assert f"{ROLE}Build the overlay" not in done.results
    assert f"{ROLE}Pull the base by digest" not in done.results
    again = converge()
    assert (again.rc, again.changed) == (0, 0), again.text
    on(HEAD, f"rm -r {STICK} /srv/lockstep/images.json")


def test_where_nobody_knows_the_pinned_digest_the_hub_says_it_and_nothing_is_kept_beside_itself(on, made):
    pin = f"{TAG.rpartition(':')[0]}@{made['base']['digest']}"
    digests = f"docker image inspect --format '{{{{join .RepoDigests \" \"}}}}' {TAG}"
    for host in HOSTS:
        if pin in on(host, digests).split():
            on(host, f"docker image rm {pin}")
        assert image_id(on, host, TAG) == made["base"]["id"]
    done = converge()
    assert done.rc == 0, done.text
    for host in HOSTS:
        assert image_id(on, host, TAG) == made["base"]["id"]
        assert pin in on(host, digests).split()
        assert f"-{made['base']['id'][7:19]}-" not in on(host, "docker images --format '{{.Repository}}:{{.Tag}}'")
    again = converge()
    assert (again.rc, again.changed) == (0, 0), again.text
