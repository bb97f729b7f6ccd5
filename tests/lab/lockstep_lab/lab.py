"""The commands: bring the lab up, back to its starting state, down, and say what there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container

from . import campaign, golden, hub, inventory, machine, nodes, outer, topology
from .paths import STATE, cache
from .say import LabError, say, sh, step

_STATE_FILE = STATE / "lab.json"
_MACHINE_FILE = STATE / "machine-before.json"


def up(engine: str) -> None:
    """Bring up hosts, hub and starting state; a lab that runs with this engine stays as it is."""
    client, state = _prepare(engine)
    if _running(client, state):
        say(f"the lab runs already (engine {engine}); `make lab-reset` puts it back to its starting state")
        _tell_inventory(client, state)
    else:
        _fresh(client, state)


def reset(engine: str | None) -> None:
    """The starting state anew: hosts, disks, images and hub as after the first ``up`` (and where none runs, that)."""
    made = _state()
    _fresh(*_prepare(engine or (made["engine"] if made else "sglang")))


def down() -> None:
    """Remove all that ``up`` made: hosts, hub, networks, disks, keys, generated inventory. Caches stay, named."""
    if not outer.installed():
        inventory.remove()
        nodes.wipe(STATE)
        say("no Docker Engine on this machine, so no lab")
        return
    client = outer.engine()
    with step("removing hosts, hub, networks and disks"):
        inventory.remove()
        _remove(nodes.ours(client))
        for network in client.networks.list(filters={"label": outer.PART}):
            network.remove()
        before = json.loads(_MACHINE_FILE.read_text(encoding="utf-8")) if _MACHINE_FILE.exists() else None
        nodes.wipe(STATE)
    if before is not None:
        left = machine.differences(before, machine.look())
        if left:
            raise LabError("the machine is not as it was before the lab:\n  " + "\n  ".join(left), "report it")
        say("the machine is as it was before the lab: kernel settings, clock, firewall rules, mounts")
    _name_caches(client)


def purge() -> None:
    """Remove the lab's caches too: root filesystems, starts, checkpoint, images."""
    client = outer.engine()
    down()
    with step("removing caches"):
        for entry in cache().iterdir():
            nodes.wipe(entry)
        for image in client.images.list():
            for tag in image.tags:
                if tag.startswith("lockstep-lab/"):
                    client.images.remove(tag, force=True)


def status() -> None:
    """Print what runs, with which engine, and what each host's engine holds."""
    client = outer.engine()
    state = _state()
    print(f"engine: {state['engine']}, start: {state['start']}" if state else "the lab is not up")
    for container in sorted(nodes.ours(client), key=lambda entry: str(entry.name)):
        print(f"{container.name}: {container.status}")
        if state and container.name in state["hosts"] and container.status == "running":
            print("  " + nodes.run(container, ["docker", "images", "--digests"]).strip().replace("\n", "\n  "))
            print(
                "  " + nodes.run(container, ["df", "-h", "--output=avail,target", "/home/ops"]).splitlines()[-1].strip()
            )
    _name_caches(client)


def _prepare(engine: str) -> tuple[docker.DockerClient, dict[str, Any]]:
    """All that takes long and touches no running lab: engine, images, networks, start. Returns the lab to be."""
    client = outer.engine()
    node = nodes.node_image(client)
    registry = hub.image(client)
    STATE.mkdir(parents=True, exist_ok=True)
    if not _MACHINE_FILE.exists():
        _MACHINE_FILE.write_text(json.dumps(machine.look()), encoding="utf-8")
    inventory.make_key()
    nodes.make_networks(client)
    start = golden.make(client, engine, node, registry)
    campaign.served_model(engine)  # made once here; the hosts then start side by side
    names = [host.name for host in topology.hosts()]
    return client, {"engine": engine, "node": node, "registry": registry, "start": str(start.path), "hosts": names}


def _state() -> dict[str, Any] | None:
    if not _STATE_FILE.exists():
        return None
    state: dict[str, Any] = json.loads(_STATE_FILE.read_text(encoding="utf-8"))
    return state


def _running(client: docker.DockerClient, state: dict[str, Any]) -> bool:
    made = _state()
    if made != state:
        return False
    up_now = {container.name for container in nodes.ours(client) if container.status == "running"}
    return {*state["hosts"], hub.NAME} <= up_now


def _remove_fleet(client: docker.DockerClient) -> None:
    """Remove hub and hosts, but not a host that a test has started beside them."""
    names = {hub.NAME, *(host.name for host in topology.hosts())}
    _remove([container for container in nodes.ours(client) if container.name in names])


def _remove(containers: Sequence[Container]) -> None:
    inventory.forget_connections()
    _STATE_FILE.unlink(missing_ok=True)
    nodes.remove(containers)
    campaign.unmount_all()


def _fresh(client: docker.DockerClient, state: dict[str, Any]) -> None:
    """The starting state, whatever there is now."""
    hosts = topology.hosts()
    start = golden.load(Path(state["start"]))
    with step("the night's starting state on every host and the hub"):
        _remove_fleet(client)
        if not nodes.ours(client):  # a test's host beside the fleet may have them mounted
            golden.prune(start.path)
            campaign.prune()
        nodes.wipe(STATE / "hub")
        nodes.each(_clear_disk, hosts)
        campaign.make_disks(hosts)
        golden.copy_hub_storage(start.hub_storage, STATE / "hub")
        nodes.each(
            lambda host: golden.copy_engine_store(start.engine_store(_build_of(host)), nodes.disk(host.name, "docker")),
            hosts,
        )
    with step(f"starting {', '.join(host.name for host in hosts)} and the hub"):
        hub.start(client, state["registry"], STATE / "hub")
        nodes.each(
            lambda host: nodes.start(client, state["node"], host, campaign.binds(state["engine"], host), {}), hosts
        )
        _tell_inventory(client, state)
    _STATE_FILE.write_text(json.dumps(state), encoding="utf-8")
    say(f"up: {', '.join(host.name for host in hosts)}; {topology.HUB}/{golden.BASE} moved from build A to B")


def _build_of(host: topology.Host) -> str:
    """Ranks 0 and 1 had the pinned build that night, the last rank the other one under the same tag."""
    return "b" if host.rank == len(topology.hosts()) - 1 else "a"


def _clear_disk(host: topology.Host) -> None:
    for entry in nodes.disk(host.name).glob("*"):
        if entry.name != "hostkey":
            nodes.wipe(entry)


def _tell_inventory(client: docker.DockerClient, state: dict[str, Any]) -> None:
    """Wait until every host answers, and write the generated part of the inventory."""

    def ready(host: topology.Host) -> str:
        container: Container = client.containers.get(host.name)
        return nodes.wait_ready(container, host)

    hosts = topology.hosts()
    keys = nodes.each(ready, hosts)
    images = golden.load(Path(state["start"])).images
    values = {
        "fleet_lab_engine": state["engine"],
        "fleet_lab_made": {"base": images["a"], "moved": images["b"], "registry": images["registry"]},
        "fleet_lab_engram_config": campaign.engram_config(),
    }
    inventory.write(dict(zip(hosts, keys, strict=True)), values)


def _name_caches(client: docker.DockerClient) -> None:
    size = sh(["du", "-sh", cache()]).split()[0]
    images = sum(
        image.attrs["Size"]
        for image in client.images.list()
        if any(tag.startswith("lockstep-lab/") for tag in image.tags)
    )
    say(
        f"caches that stay: {cache()} ({size}) and this engine's images lockstep-lab/* (at most {images >> 20} MiB); "
        "`python -m lockstep_lab purge` removes them"
    )
