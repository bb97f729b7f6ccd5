"""The registry that plays the public hub: Debian's docker-registry on the LAN, over a directory of this machine."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path

import docker
from docker.models.containers import Container

from . import nodes, outer, rootfs, topology
from .paths import REGISTRY_DIR
from .say import LabError

NAME = "lockstep-hub"
_STORAGE = "/var/lib/docker-registry"


def image(client: docker.DockerClient) -> str:
    """The registry's image: plays the hub, and is what a fleet's head runs."""
    # Files of three packages and what they need, nothing configured: about 60 MB.
    base = rootfs.image(
        client, "registry", "trixie", ("docker-registry", "ca-certificates", "base-files"), variant="extract"
    )
    return nodes.built(client, "registry", REGISTRY_DIR, base)


def start(
    client: docker.DockerClient,
    registry: str,
    storage: Path,
    *,
    name: str = NAME,
    network: str = topology.LAN,
    at: str | None = None,
) -> Container:
    """Start a hub over ``storage`` and wait until it answers; on the LAN it has the hub's address, or ``at``.

    LabError when it does not answer within 30 s.
    """
    api = client.api
    fixed = at or (topology.hub_address() if network == topology.LAN else None)
    made = api.create_container(
        registry,
        name=name,
        hostname="hub",
        labels={outer.PART: "hub"},
        volumes=[_STORAGE],
        host_config=api.create_host_config(binds=[f"{storage}:{_STORAGE}"], network_mode=network),
        networking_config=api.create_networking_config({network: api.create_endpoint_config(ipv4_address=fixed)}),
    )
    container: Container = client.containers.get(made["Id"])
    container.start()
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://{address(container, network)}:{topology.HUB_PORT}/v2/", timeout=2):
                return container
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                logs = container.logs(tail=10).decode(errors="replace")
                raise LabError(f"the hub {name} does not answer: {error}\n{logs}", f"docker logs {name}") from error
            time.sleep(0.1)


def address(container: Container, network: str) -> str:
    """The container's address on a network."""
    container.reload()
    return str(container.attrs["NetworkSettings"]["Networks"][network]["IPAddress"])
