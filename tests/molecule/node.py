"""``node.py up|down``: the hosts of the Molecule scenarios and a hub for them, like the lab's and beside it.

Whatever the lab serves meanwhile stays as it is: nothing is shared with it but the LAN.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import docker
import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "lab"))

from lockstep_lab import campaign, golden, hub, inventory, nodes, outer, topology  # noqa: E402 - its path is set above
from lockstep_lab.say import LabError  # noqa: E402 - the same

# Molecule tests roles, not the engine: the simulator is enough, and quick.
ENGINE = "sim"
HUB = "molecule-hub"
topology.hub_address = lambda: (
    "10.77.0.200"
)  # for this process: hub.start takes it, and every host resolves hub.lab to it
KEYS = HERE.parents[1] / "results" / "tests" / "molecule"
# Sockets of Ansible's connections to the hosts (base.yml); the path must stay short.
CONTROL = Path("/run/lockstep-molecule")


def hosts() -> list[topology.Host]:
    """The hosts that Molecule's own inventory names."""
    groups = yaml.safe_load((HERE / "inventory" / "hosts.yml").read_text())["fleet"]["children"].values()
    return [
        topology.Host(
            name, values["fleet_rank"], values["fleet_role"], values["ansible_host"], values["fleet_engram_dir"]
        )
        for group in groups
        for name, values in group["hosts"].items()
    ]


def up() -> None:
    """Start hub and hosts anew, and write the key that opens them, the keys they show and what the hub holds.

    Each host begins with the other build of the base image under the fleet's tag, as the campaign's spark3 did.
    """
    down()
    client = outer.engine()
    node, registry = nodes.node_image(client), hub.image(client)
    inventory.make_key()
    nodes.make_networks(client)
    start = golden.make(client, ENGINE, node, registry)
    nodes.disk(HUB).parent.mkdir(parents=True, exist_ok=True)
    golden.copy_hub_storage(start.hub_storage, nodes.disk(HUB))
    hub.start(client, registry, nodes.disk(HUB), name=HUB)
    binds = [
        f"{campaign.engram_checkpoint()}:/srv/models/engram-checkpoint:ro",
        f"{campaign.served_model(ENGINE)}:/srv/models/DeepSeek-V4.1-Flash:ro",
    ]
    shown = []
    for host in hosts():
        golden.copy_engine_store(start.engine_store("b"), nodes.disk(host.name, "docker"))
        shown.append(nodes.wait_ready(nodes.start(client, node, host, binds, {}), host))
    KEYS.mkdir(parents=True)
    with os.fdopen(os.open(KEYS / "ops", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
        handle.write(inventory.KEY.read_bytes())
    lines = [f"{host.lan} {' '.join(key.split()[:2])}\n" for host, key in zip(hosts(), shown, strict=True)]
    (KEYS / "known_hosts").write_text("".join(lines))
    values = inventory_values(start)
    (KEYS / "lab.yml").write_text(yaml.safe_dump(values))
    CONTROL.mkdir(mode=0o700)


def inventory_values(start: golden.Golden) -> dict[str, Any]:
    """What the lab's own inventory learns from `make lab`, of this hub."""
    made = {"base": start.images["a"], "moved": start.images["b"], "registry": start.images["registry"]}
    return {"fleet_lab_engine": ENGINE, "fleet_lab_made": made, "fleet_lab_engram_config": campaign.engram_config()}


def down() -> None:
    """Remove hub and hosts, their disks and their keys; the lab's own stay."""
    client = outer.engine()
    for name in [HUB, *(host.name for host in hosts())]:
        with contextlib.suppress(docker.errors.NotFound):
            nodes.remove([client.containers.get(name)])
        nodes.wipe(nodes.disk(name))
    inventory.forget_connections(kept=CONTROL)
    for folder in (CONTROL, KEYS):
        nodes.wipe(folder)


if __name__ == "__main__":
    try:
        {"up": up, "down": down}[sys.argv[1]]()
    except LabError as error:
        sys.exit(f"molecule's host: {error}")
