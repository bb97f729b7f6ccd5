"""Faults for tests, each undone at its end: ``with faults.engine_down("spark2"): …``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import docker
from docker.models.containers import Container

from . import inventory, nodes, topology
from .say import LabError


def host(name: str) -> Container:
    """The container that is this host, to be asked or altered behind Lockstep's back (``nodes.run``)."""
    return docker.from_env().containers.get(name)


@contextmanager
def engine_down(name: str) -> Iterator[None]:
    """The host's Docker Engine is stopped, and its containers with it; started again at the end."""
    nodes.run(host(name), ["systemctl", "stop", "docker.socket", "docker", "containerd"])
    try:
        yield
    finally:
        nodes.run(host(name), ["systemctl", "start", "containerd", "docker.socket", "docker"])


@contextmanager
def engine_away(name: str) -> Iterator[None]:
    """The host's Docker Engine does not answer while its containers run on, as during an upgrade with live-restore."""
    settings = nodes.run(host(name), ["cat", "/etc/docker/daemon.json"])
    _live_restore(name, json.loads(settings), on=True)
    nodes.run(host(name), ["systemctl", "stop", "docker.socket", "docker"])
    try:
        yield
    finally:
        nodes.run(host(name), ["systemctl", "start", "docker.socket", "docker"])
        _live_restore(name, json.loads(settings), on=False)
        nodes.run(host(name), ["sh", "-c", 'printf %s "$0" >/etc/docker/daemon.json', settings])


def _live_restore(name: str, settings: dict[str, object], *, on: bool) -> None:
    """Switch live-restore while the host's engine runs; returns when the engine has read it."""
    text = json.dumps({**settings, "live-restore": on})
    write = 'printf %s "$0" >/etc/docker/daemon.json && systemctl reload docker'
    asked = f'[ "$(docker info --format {{{{.LiveRestoreEnabled}}}})" = {str(on).lower()} ]'
    nodes.run(host(name), ["timeout", "30", "sh", "-c", f"{write} && until {asked}; do sleep 0.1; done", text])


@contextmanager
def unreachable(name: str) -> Iterator[None]:
    """The host's sshd refuses connections, open ones too; everything else of it runs on."""
    rule = ["INPUT", "-i", "eth0", "-p", "tcp", "--dport", "22", "-j", "REJECT", "--reject-with", "tcp-reset"]
    nodes.run(host(name), ["iptables", "-I", *rule])
    try:
        inventory.forget_connections(next(entry.lan for entry in topology.hosts() if entry.name == name))
        yield
    finally:
        nodes.run(host(name), ["iptables", "-D", *rule])


@contextmanager
def frozen(name: str) -> Iterator[None]:
    """Everything on the host stands still, as when its memory has run out; its network still answers."""
    host(name).pause()
    try:
        yield
    finally:
        host(name).unpause()


@contextmanager
def link_down(one: str, other: str) -> Iterator[None]:
    """The fabric link between two hosts drops every packet; the LAN stays."""
    network = next(entry for entry in topology.networks()[1:] if entry.hosts.keys() == {one, other})
    rules = [[chain, flag, network.subnet, "-j", "DROP"] for chain, flag in (("INPUT", "-s"), ("OUTPUT", "-d"))]
    for rule in rules:
        nodes.run(host(one), ["iptables", "-I", *rule])
    try:
        yield
    finally:
        for rule in rules:
            nodes.run(host(one), ["iptables", "-D", *rule])


@contextmanager
def disk_full(name: str, path: str) -> Iterator[None]:
    """No byte is free on the filesystem of ``path``: writes there end with ENOSPC. Only for a small one (spark2's)."""
    free = int(nodes.run(host(name), ["df", "--output=avail", "-B1", path]).splitlines()[-1])
    if free > 1 << 30:
        raise LabError(f"{name}:{path} has {free} bytes free: that would fill this machine's disk", "use spark2's")
    filler = f"{path}/filler-of-a-test"
    nodes.run(host(name), ["sh", "-c", f"fallocate -l {free} {filler} || dd if=/dev/zero of={filler} bs=1M || true"])
    try:
        yield
    finally:
        nodes.run(host(name), ["rm", "-f", filler])


def power_cycle(name: str) -> None:
    """The host loses power and comes back: nothing is shut down, its disk stays. Returns when it answers again."""
    container = host(name)
    container.kill()
    deadline = time.monotonic() + 60
    while container.status == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
        container.reload()
    container.start()
    nodes.wait_ready(container, next(entry for entry in topology.hosts() if entry.name == name))
