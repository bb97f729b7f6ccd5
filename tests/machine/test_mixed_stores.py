"""One image on three kinds of Docker Engine, beside the fleet: 20.10 and 26.1 as they come, and 26.1 over containerd.

The images are made by hand, so every digest is known before an engine has seen it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import oci
import pytest
import yaml
from lockstep_lab import hub, inventory, nodes, outer, topology
from playbook import ROOT, Played, run_file

# The first test may have to download what the hosts are made of.
pytestmark = pytest.mark.timeout(900)

HUB = "stores-hub"
REGISTRY = f"10.77.0.60:{topology.HUB_PORT}"
CLASSIC, OLDER, CONTAINERD = (
    topology.Host(name, rank, "worker" if rank else "head", f"10.77.0.6{rank + 1}", "")
    for rank, name in enumerate(("stores-classic", "stores-older", "stores-containerd"))
)
HOSTS = (CLASSIC, OLDER, CONTAINERD)
NAMES = [host.name for host in HOSTS]
SHARED = "shared"
TAG = "engine:dev"
OVERLAY = "overlay:local"

LAYERS = [
    oci.layer({f"srt/part{number}.py": b"".join(b"%d\n" % line for line in range(number, 200_000))})
    for number in range(4)
]
# Each key that an image can have, and what Docker 20.10 does not know of it (StartInterval).
SETTINGS: dict[str, Any] = {
    "User": "1000:1000",
    "ExposedPorts": {"8888/tcp": {}, "53/udp": {}},
    "Env": ["PATH=/usr/bin:/bin", "MODE=fast", "EMPTY="],
    "Entrypoint": ["/bin/serve"],
    "Cmd": ["--port", "8888"],
    "Volumes": {"/data": {}},
    "WorkingDir": "/srv",
    "Labels": {"lockstep.base_digest": f"sha256:{'1' * 64}", "maker": "é"},
    "StopSignal": "SIGINT",
    "Healthcheck": {"Test": ["CMD", "/bin/ok"], "Interval": 5_000_000_000, "StartInterval": 1_000_000_000},
    "OnBuild": ["RUN true"],
    "Shell": ["/bin/bash", "-c"],
}


def _remove(client: Any) -> None:
    for container in nodes.ours(client):
        if container.name in {HUB, *NAMES}:
            nodes.remove([container])
    for name in (HUB, SHARED, *NAMES):
        nodes.wipe(nodes.disk(name))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Iterator[Path]:
    """Three hosts and a registry; the path of an inventory that reaches them."""
    client = outer.engine()
    _remove(client)
    inventory.make_key()
    nodes.make_networks(client)
    newer, registry = nodes.node_image(client), hub.image(client)
    images = {CLASSIC: newer, OLDER: nodes.older_node_image(client), CONTAINERD: newer}
    for name in (HUB, SHARED):
        nodes.disk(name).mkdir(parents=True)
    (nodes.disk(SHARED) / "registry.tar").write_bytes(b"".join(client.images.get(registry).save(named=True)))

    def up(host: topology.Host) -> str:
        daemon: dict[str, Any] = {"insecure-registries": [REGISTRY], "storage-driver": "overlay2"}
        if host is CONTAINERD:
            daemon |= {"storage-driver": "overlayfs", "features": {"containerd-snapshotter": True}}
        for part in ("etc", "containerd"):
            nodes.disk(host.name, part).mkdir(parents=True)
        nodes.disk(host.name, "etc", "daemon.json").write_text(json.dumps(daemon))
        binds = [
            f"{nodes.disk(host.name, 'etc')}:/etc/docker",
            f"{nodes.disk(host.name, 'containerd')}:/var/lib/containerd",
            f"{nodes.disk(SHARED)}:/srv/shared",
        ]
        return nodes.wait_ready(nodes.start(client, images[host], host, binds, {}), host)

    try:
        hub.start(client, registry, nodes.disk(HUB), name=HUB, at=REGISTRY.partition(":")[0])
        keys = nodes.each(up, HOSTS)
        yield _inventory(tmp_path_factory.mktemp("mixed"), dict(zip(HOSTS, keys, strict=True)))
    finally:
        _remove(client)


def _inventory(where: Path, keys: Mapping[topology.Host, str]) -> Path:
    (where / "known_hosts").write_text("".join(f"{host.lan} {key}\n" for host, key in keys.items()))
    options = (
        f"-o UserKnownHostsFile={where}/known_hosts -o GlobalKnownHostsFile=/dev/null -o StrictHostKeyChecking=yes"
    )
    reached = {
        "ansible_user": "ops",
        "ansible_become": True,
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_ssh_private_key_file": str(inventory.KEY),
        "ansible_ssh_common_args": f"{options} -o IdentitiesOnly=yes -o BatchMode=yes",
        "ansible_control_path": f"/run/stores-{os.getpid()}-%%h",
    }

    def listed(host: topology.Host) -> dict[str, Any]:
        fabric = {other.name: host.lan for other in HOSTS if other is not host}
        return {"ansible_host": host.lan, "fleet_address": host.lan, "fleet_fabric": fabric}

    groups = {
        "head": {"hosts": {CLASSIC.name: listed(CLASSIC)}},
        "workers": {"hosts": {host.name: listed(host) for host in HOSTS[1:]}},
    }
    path = where / "hosts.yml"
    path.write_text(yaml.safe_dump({"fleet": {"children": groups, "vars": reached}}, sort_keys=False))
    return path


def on(host: topology.Host, command: str) -> str:
    return nodes.run(outer.engine().containers.get(host.name), ["sh", "-ec", command])


@pytest.fixture
def play(mixed, tmp_path) -> Callable[[list[dict[str, Any]]], Played]:
    def run(tasks: list[dict[str, Any]]) -> Played:
        path = tmp_path / "play.yml"
        path.write_text(yaml.safe_dump([{"hosts": "fleet", "gather_facts": False, "tasks": tasks}], sort_keys=False))
        done = run_file(path, inventory=str(mixed))
        assert done.rc == 0, done.text
        return done

    return run


def by_rank(*path: str | int) -> str:
    """What every rank has at this place of its registered results, as an expression of Ansible's."""
    return f"dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, {list(path)})))"


@pytest.fixture
def compared(play) -> Callable[[], dict[str, Any]]:
    """What module, filter and test say of the image under TAG: the verdict, ``same`` and the ``identities``."""

    def look() -> dict[str, Any]:
        asked = {"images": [TAG], "files": ["/srt"]}
        ranks = by_rank("seen", "images", 0)
        said = {
            "verdict": f"{{{{ {ranks} | lockstep.fleet.images_equal }}}}",
            "same": f"{{{{ {ranks} is lockstep.fleet.same_image }}}}",
            "identities": f"{{{{ {ranks} }}}}",
        }
        done = play(
            [
                {"name": "look", "lockstep.fleet.image_identity": asked, "register": "seen"},
                {"name": "compare", "ansible.builtin.set_fact": said, "run_once": True},
            ]
        )
        facts: dict[str, Any] = done.results["compare"]["ansible_facts"]
        return {**facts["verdict"], "same": facts["same"], "identities": facts["identities"]}

    return look


def get(host: topology.Host, reference: str, name: str = TAG) -> None:
    """Have an image under a name."""
    on(host, f"docker pull -q {reference} && docker tag {reference} {name}")


def clear(host: topology.Host) -> None:
    on(host, "docker images -q | sort -u | xargs -r docker rmi -f")


@pytest.mark.parametrize(
    ("loads", "by_index", "by_member"),
    [(CONTAINERD, CLASSIC, OLDER), (OLDER, CONTAINERD, CLASSIC), (CLASSIC, OLDER, CONTAINERD)],
    ids=["containerd loads", "20.10 loads", "26.1 loads"],
)
def test_by_index_by_member_or_loaded_it_is_one_image(compared, loads, by_index, by_member):
    pushed = oci.push(REGISTRY, "engine", LAYERS, SETTINGS)
    nodes.each(clear, HOSTS)
    known = {by_index: pushed.index, by_member: pushed.manifest}
    nodes.each(lambda host: get(host, f"{pushed.repository}@{known[host]}"), known)
    on(by_index, f"docker save -o /srv/shared/image.tar {TAG}")
    on(loads, "docker load -qi /srv/shared/image.tar")

    seen = compared()
    assert seen["equal"] is seen["same"] is True, seen["table"]
    assert seen["groups"] == [NAMES]
    classic, older, containerd = (seen["identities"][name] for name in NAMES)
    assert [image["store"] for image in (classic, older, containerd)] == ["classic", "classic", "containerd"]
    assert classic["config_digest"] == older["config_digest"] == pushed.config
    assert containerd["config_digest"] is None
    # What the containerd store calls the Id is the digest that it pulled by; after a load it is one that nobody pushed.
    if CONTAINERD is not loads:
        assert containerd["id"] == known[CONTAINERD]
    assert {image["config_sha256"] for image in seen["identities"].values()} == {classic["config_sha256"]}
    assert all(image["layers"] == pushed.layers for image in seen["identities"].values())
    assert [seen["identities"][host.name]["digest"] for host in known] == list(known.values())


@pytest.mark.parametrize(("in_a_layer", "in_settings"), [(CONTAINERD, OLDER), (OLDER, CONTAINERD)], ids=["a", "b"])
def test_a_changed_file_is_named_with_its_layer_and_a_changed_setting_by_its_name(compared, in_a_layer, in_settings):
    """All labels are kept by both."""
    files = [LAYERS[0], oci.layer({"srt/part1.py": b"changed\n"}), *LAYERS[2:]]
    right = oci.push(REGISTRY, "engine", LAYERS, SETTINGS)
    changed = oci.push(REGISTRY, "engine", files, SETTINGS)
    configured = oci.push(
        REGISTRY, "engine", LAYERS, SETTINGS | {"Env": ["PATH=/usr/bin:/bin", "MODE=slow", "EMPTY="], "Cmd": ["--help"]}
    )
    have = {CLASSIC: right, in_a_layer: changed, in_settings: configured}
    nodes.each(lambda host: get(host, f"{right.repository}@{have[host].index}"), HOSTS)

    seen = compared()
    assert seen["equal"] is seen["same"] is False
    assert seen["groups"] == [[name] for name in NAMES]
    why = {host: [reason for reason in said if " id: " not in reason] for host, said in seen["why"].items()}
    layer = f"layer 2 is {right.layers[1][:19]} against {changed.layers[1][:19]}"
    assert why == {
        in_a_layer.name: [
            f"against {CLASSIC.name}: layers: the first 1 of 4 and 4 are equal, {layer}",
            f"against {CLASSIC.name}: files: 1 differ: /srt/part1.py",
        ],
        in_settings.name: [f"against {CLASSIC.name}: configuration: Cmd differs; Env differs: MODE"],
    }
    assert seen["files"] == ["/srt/part1.py"]
    assert "slow" not in json.dumps(seen)  # names are told, values are not


def test_a_mixed_fleet_converges_from_its_head(play):
    """The head has base and overlay; the others get them from its registry, whatever their store.

    The containerd worker begins with an overlay of the same layers and labels, and another user, under the tag.
    """
    base = oci.push(REGISTRY, "engine", LAYERS, SETTINGS)
    labels = {"lockstep.base_digest": base.index, "lockstep.context_sha256": "c" * 64}
    layers = [*LAYERS, oci.layer({"opt/lockstep/x.py": b"x = 1\n"})]
    overlay = oci.push(REGISTRY, "overlay", layers, SETTINGS | {"Labels": labels})
    drifted = oci.push(REGISTRY, "overlay", layers, SETTINGS | {"Labels": labels, "User": "0"})
    nodes.each(clear, HOSTS)
    on(
        CLASSIC,
        "docker load -qi /srv/shared/registry.tar | sed 's/.*: //' | xargs -I% docker tag % lockstep/registry:2",
    )
    get(CLASSIC, f"{base.repository}@{base.index}", f"{base.repository}:dev")
    get(CLASSIC, f"{overlay.repository}@{overlay.index}", OVERLAY)
    get(CONTAINERD, f"{overlay.repository}@{drifted.index}", OVERLAY)
    wanted = {
        "base": {"repository": base.repository, "tag": "dev", "digest": base.index},
        "overlay": {"tag": OVERLAY, "context_sha256": "c" * 64},
    }
    ranks = [{"host": host.name, "rank": host.rank, "role": host.role, "shards": {}} for host in HOSTS]
    fleet_images = {
        "registry": {"image": "lockstep/registry:2", "alias": "lockstep-registry", "port": 5100, "existing": ""},
        "hand_on": "registry",
        "kept_name": "{repository}:{tag}-{id12}-{date}",
        "builds": {base.index: {"engram_split": "rows"}},
    }
    look = {
        "lockstep.fleet.rank_facts": {
            "host": "{{ inventory_hostname }}",
            "plan": {"images": wanted, "ranks": ranks, "ports": {"api": 8888, "rendezvous": 20000}},
            "state_dir": "/srv/lockstep",
            "container": "dsv41",
            "image_files": ["/srt", "/opt/lockstep"],
            "gather_subset": ["images"],
        },
        "register": "fleet_look",
    }
    work = f"{{{{ wanted | lockstep.fleet.images_work({by_rank('fleet_look', 'look', 'images')}, '{CLASSIC.name}') }}}}"
    tell = {"ansible.builtin.set_fact": {"work": work}, "run_once": True, "vars": {"wanted": wanted}}
    converge = {
        "ansible.builtin.include_tasks": str(ROOT / "playbooks/tasks/images.yml"),
        "vars": {"fleet_images": fleet_images, "images_wanted": wanted, "images_split": "rows"},
    }
    done = play(
        [
            {"name": "look", **look},
            {"name": "before", **tell},
            {"name": "converge", **converge},
            {"name": "look again", **look},
            {"name": "after", **tell},
        ]
    )
    before, after = (done.results[name]["ansible_facts"]["work"] for name in ("before", "after"))
    assert {host: (its["base"]["action"], its["overlay"]["action"]) for host, its in before.items()} == {
        CLASSIC.name: ("ok", "ok"),
        OLDER.name: ("fetch", "fetch"),
        CONTAINERD.name: ("fetch", "fetch"),
    }
    assert before[CONTAINERD.name]["overlay"]["why"] == "configuration: User differs"
    assert [its["todo"] for its in after.values()] == [False, False, False]
    for host in HOSTS[:2]:
        assert on(host, f"docker image inspect --format '{{{{.Id}}}}' {OVERLAY}").strip() == overlay.config
    kept = on(CONTAINERD, "docker images --format '{{.Repository}}:{{.Tag}} {{.ID}}' --no-trunc overlay")
    assert f"{OVERLAY}-{drifted.index[7:19]}-" in kept
    assert f"User={SETTINGS['User']}" in on(
        CONTAINERD, f"docker image inspect --format 'User={{{{.Config.User}}}}' {OVERLAY}"
    )
