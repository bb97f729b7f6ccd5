"""Hosts, addresses and networks of the lab, read from its inventory: addresses are written in one place only."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any

import yaml

from .paths import INVENTORY
from .say import LabError

HUB_NAME = "hub.lab"
HUB_PORT = 5000
HUB = f"{HUB_NAME}:{HUB_PORT}"
LAN = "lockstep-lan"


@dataclass(frozen=True)
class Network:
    """One network: its name, its /24, and the address of each host on it."""

    name: str
    subnet: str
    gateway: str
    internal: bool
    hosts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """One host of the fleet as its inventory names it."""

    name: str
    rank: int
    role: str
    lan: str
    engram_dir: str


def _subnet(address: str) -> str:
    return str(ipaddress.ip_interface(f"{address}/24").network)


def hosts() -> list[Host]:
    """The fleet's hosts in rank order."""
    found = []
    for group in _inventory().values():
        for name, values in (group.get("hosts") or {}).items():
            found.append(
                Host(
                    name, values["fleet_rank"], values["fleet_role"], values["ansible_host"], values["fleet_engram_dir"]
                )
            )
    return sorted(found, key=lambda host: host.rank)


def hub_address() -> str:
    """The hub's address on the LAN: the tenth of its /24."""
    return str(ipaddress.ip_network(_subnet(hosts()[0].lan))[10])


def networks() -> list[Network]:
    """The LAN, then one network for each pair of hosts that name each other in ``fleet_fabric``.

    Raises LabError when the two ends of a link are not in one /24.
    """
    values = {name: entry for group in _inventory().values() for name, entry in (group.get("hosts") or {}).items()}
    lan = _subnet(hosts()[0].lan)
    found = [Network(LAN, lan, str(ipaddress.ip_network(lan)[1]), False, {host.name: host.lan for host in hosts()})]
    for one in sorted(values):
        for other, address in values[one]["fleet_fabric"].items():
            if one > other:
                continue
            back = values[other]["fleet_fabric"].get(one, "0.0.0.0")
            if _subnet(address) != _subnet(back):
                raise LabError(
                    f"fabric {one}-{other}: {address} and {back} are not in one /24",
                    f"correct {INVENTORY / 'hosts.yml'}",
                )
            # The bridge of the machine must not take an address of the link's two ends.
            gateway = str(ipaddress.ip_network(_subnet(address))[254])
            found.append(
                Network(f"lockstep-fabric-{one}-{other}", _subnet(address), gateway, True, {one: address, other: back})
            )
    return found


def _inventory() -> dict[str, dict[str, dict[str, Any]]]:
    data = yaml.safe_load((INVENTORY / "hosts.yml").read_text(encoding="utf-8"))
    groups: dict[str, dict[str, dict[str, Any]]] = data["fleet"]["children"]
    return groups
