"""The hosts: image, networks, containers, and what is true when they are up."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import docker
from docker.models.containers import Container

from . import outer, rootfs, topology
from .paths import NODE_DIR, STATE, cache
from .say import LabError, say, step

_T = TypeVar("_T")
_R = TypeVar("_R")

PACKAGES = (
    "systemd-sysv", "dbus", "openssh-server", "sudo", "ca-certificates", "python3", "python3-requests",
    "docker.io", "docker-cli", "docker-buildx", "iproute2", "iptables", "iputils-ping", "procps", "kmod", "e2fsprogs",
    "zstd",
)  # fmt: skip
"""What a host needs (the README's list for a real one is the same less systemd and tools of the lab)."""

OLDER_PACKAGES = (
    "systemd-sysv",
    "dbus",
    "openssh-server",
    "sudo",
    "python3",
    "python3-requests",
    "docker.io",
    "iproute2",
    "iptables",
)
"""The least that makes a host of Debian 12, with Docker 20.10 and Python 3.11."""

_DROPPED = {"SYS_MODULE": 16, "SYS_RAWIO": 17, "SYS_BOOT": 22, "SYS_RESOURCE": 24, "SYS_TIME": 25}
"""Capabilities (and their numbers) that a host never has: with them it could change the machine's limits, clock or
modules, or reboot it."""


def _ours_to_drop() -> list[str]:
    """Those of them that this machine has at all: Docker from 23 on refuses to drop what it does not have itself."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    bounding = int(next(line for line in status.splitlines() if line.startswith("CapBnd:")).split()[1], 16)
    return [name for name, number in _DROPPED.items() if bounding >> number & 1]


LAYERS = "/var/lib/lab-layers"
"""Where a host sees the layers that all hosts share, read-only."""


def rights(client: docker.DockerClient) -> dict[str, Any]:
    """What a host's own Docker Engine needs, in place of --privileged."""
    # ALL means what the kernel knows up to Docker 22, and from 23 on what the machine itself has.
    knows_all = int(client.version()["Version"].split(".")[0]) < 23
    return {
        "cap_add": ["ALL"],
        "cap_drop": list(_DROPPED) if knows_all else _ours_to_drop(),
        "security_opt": ["seccomp=unconfined", "apparmor=unconfined"],
        "cgroupns": "private",
    }


def each(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Do it for all at once; the first error is raised when all have ended."""
    items = list(items)
    with ThreadPoolExecutor(max(1, len(items))) as pool:
        return list(pool.map(work, items))


def _context_hash(directory: Path, *more: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    digest.update(json.dumps(more).encode())
    return digest.hexdigest()[:12]


def built(client: docker.DockerClient, name: str, directory: Path, base: str) -> str:
    """The image ``lockstep-lab/<name>:<hash of its files and base>``, built from ``directory`` where it is missing."""
    tag = f"lockstep-lab/{name}:{_context_hash(directory, base)}"
    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        with step(f"building {tag}"):
            try:
                client.images.build(
                    path=str(directory),
                    tag=tag,
                    buildargs={"ROOTFS": base},
                    labels={outer.LABEL: "1"},
                    rm=True,
                    forcerm=True,
                )
            except docker.errors.BuildError as error:
                tail = "".join(str(line.get("stream", "")) for line in error.build_log)[-1500:]
                raise LabError(f"building {tag} failed: {error}\n{tail}") from error
    client.images.get(tag).tag(f"lockstep-lab/{name}", "current")
    return tag


def node_image(client: docker.DockerClient) -> str:
    """The image of a lab host."""
    return built(client, "node", NODE_DIR, rootfs.image(client, "node", "trixie", PACKAGES))


def older_node_image(client: docker.DockerClient) -> str:
    """The image of a host of the Debian before: no fleet of the lab has one, a test may."""
    return built(client, "node-older", NODE_DIR, rootfs.image(client, "node-older", "bookworm", OLDER_PACKAGES))


def make_networks(client: docker.DockerClient) -> None:
    """Create the LAN and the fabric links that are missing. LabError when the machine uses such a subnet otherwise."""
    have = {network.name for network in client.networks.list()}
    for network in topology.networks():
        if network.name in have:
            continue
        pool = docker.types.IPAMPool(subnet=network.subnet, gateway=network.gateway)
        try:
            client.networks.create(
                network.name,
                driver="bridge",
                internal=network.internal,
                labels={outer.PART: "network"},
                ipam=docker.types.IPAMConfig(pool_configs=[pool]),
            )
        except docker.errors.APIError as error:
            raise LabError(
                f"network {network.name} {network.subnet}: {error.explanation}",
                "free that subnet (docker network ls shows who holds it), or change inventory/lab/hosts.yml",
            ) from error


def disk(host: str, *parts: str) -> Path:
    """A directory of the host's disk as this machine sees it."""
    return STATE.joinpath("hosts", host, *parts)


def _create(
    client: docker.DockerClient,
    image: str,
    name: str,
    binds: Sequence[str],
    labels: dict[str, str],
    address: str | None,
) -> Container:
    """A container that is a host: systemd first, a network of its own, all capabilities but the machine's."""
    api = client.api
    names = {
        topology.HUB_NAME: topology.hub_address(),
        **{host.name: host.lan for host in topology.hosts() if host.name != name},
    }
    config = api.create_host_config(
        **rights(client),
        tmpfs={"/run": "exec,mode=755,size=512m", "/run/lock": "mode=1777,size=8m", "/tmp": "exec,mode=1777,size=2g"},
        shm_size="4g",
        extra_hosts=names,
        binds=list(binds),
        network_mode=topology.LAN,
    )
    # What the command line calls --security-opt systempaths=unconfined; lab-init locks these paths again itself.
    config |= {"MaskedPaths": [], "ReadonlyPaths": []}
    made = api.create_container(
        image,
        name=name,
        hostname=name,
        labels={outer.PART: "host", **labels},
        environment={"container": "docker"},
        host_config=config,
        networking_config=api.create_networking_config(
            {topology.LAN: api.create_endpoint_config(ipv4_address=address)}
        ),
    )
    return client.containers.get(made["Id"])


def start(
    client: docker.DockerClient, image: str, host: topology.Host, binds: Sequence[str], labels: dict[str, str]
) -> Container:
    """Create and start one host of the fleet. ``binds`` are docker's ``source:target[:ro]``."""
    for part in ("docker", "hostkey"):
        disk(host.name, part).mkdir(parents=True, exist_ok=True)
    own = [
        f"{disk(host.name, 'docker')}:/var/lib/docker",
        f"{disk(host.name, 'hostkey')}:/etc/ssh/host",
        f"{STATE}/ssh/authorized:/etc/ssh/authorized_keys:ro",
        f"{cache('start')}:{LAYERS}:ro",
    ]
    container = _create(client, image, host.name, [*own, *binds], labels, host.lan)
    for network in topology.networks()[1:]:
        if host.name in network.hosts:
            client.networks.get(network.name).connect(container, ipv4_address=network.hosts[host.name])
    container.start()
    return container


def run(container: Container, command: Sequence[str], *, user: str = "root") -> str:
    """Run a command inside a host by this machine's engine. LabError when it fails."""
    code, output = container.exec_run(list(command), user=user)
    text: str = output.decode(errors="replace")
    if code:
        raise LabError(f"{container.name}: {' '.join(command)} exited {code}: {text.strip()[-800:]}")
    return text


def wait_ready(container: Container, host: topology.Host, *, timeout_s: float = 180) -> str:
    """Wait until sshd and the host's engine answer and its LAN is where it should be; returns its host key.

    The key is read inside the host, by this machine's engine: nothing is believed that came over the network.
    """
    deadline = time.monotonic() + timeout_s
    key = "/etc/ssh/host/ssh_host_ed25519_key.pub"
    ask = f"docker info --format '{{{{.ServerVersion}}}}' && systemctl is-active ssh && cat {key}"
    while True:
        try:
            code, output = container.exec_run(["sh", "-c", ask])
        except docker.errors.APIError as error:
            code, output = -1, str(error.explanation).encode()
        lines = output.decode(errors="replace").strip().splitlines()
        if code == 0:
            break
        container.reload()
        if container.status != "running" or time.monotonic() > deadline:
            logs = container.logs(tail=15).decode(errors="replace")
            raise LabError(
                f"{host.name} is {container.status}, its sshd or engine does not answer: {lines[-3:]}\n{logs}",
                f"docker exec {host.name} journalctl -b -u docker -u ssh",
            )
        time.sleep(0.2)
    addresses = {
        entry["ifname"]: [address["local"] for address in entry["addr_info"] if address["family"] == "inet"]
        for entry in json.loads(run(container, ["ip", "-json", "-4", "address"]))
    }
    if host.lan not in addresses.get("eth0", []):
        raise LabError(
            f"{host.name}: eth0 should be the LAN ({host.lan}), found {addresses}",
            "report it: this Docker orders networks in another way",
        )
    return str(lines[-1])


def ours(client: docker.DockerClient) -> list[Container]:
    """Every container of the lab, running or not; also a host that a test has started beside the fleet."""
    return list(client.containers.list(all=True, ignore_removed=True, filters={"label": outer.PART}))


def wipe(path: Path) -> None:
    """Remove a directory of the lab's state, whatever a host has mounted or locked in it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise LabError(
                f"cannot remove {path}: {error}", "see what still holds it (findmnt, fuser) and try again"
            ) from error


def remove(containers: Sequence[Container]) -> None:
    """Remove containers with their anonymous volumes; a host is not shut down first: its disk goes with it."""

    def one(container: Container) -> None:
        until = time.monotonic() + 120
        while True:
            try:
                container.remove(force=True, v=True)
            except docker.errors.NotFound:
                say(f"{container.name} was gone already")
            except docker.errors.APIError:
                # A busy engine gives up waiting for the end of what it has killed.
                if time.monotonic() > until:
                    raise
                time.sleep(1)
                continue
            return

    each(one, containers)
