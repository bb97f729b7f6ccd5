#!/usr/bin/python
"""Ansible module: a rank may pull from the fleet's own registry, for as long as it must."""

from __future__ import annotations

DOCUMENTATION = r"""
module: registry_access
short_description: Let a rank's engine pull from the fleet's own registry, and take that back
description:
  - An image moves from the head to the workers through a registry that runs on the head only while it is needed. All
    ranks call it by one name; every rank reaches the head at its own address on the fabric.
  - This module keeps that name in C(/etc/hosts), in one marked line, and lists the registry under
    C(insecure-registries) in the engine's C(daemon.json) where the engine would not speak plain HTTP to it already.
  - C(daemon.json) is merged, never overwritten. The engine takes it over by a reload (SIGHUP); nothing is restarted and
    containers keep running. V(absent) brings both files back, byte for byte where nobody else changed them since,
    whatever the registry was called that was opened.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: Says what it would write and changes nothing.
    support: full
  diff_mode:
    description: Shows both files before and after.
    support: full
options:
  registry:
    description:
      - The registry as image references name it, C(name:port).
      - Required when O(state=present).
    type: str
  address:
    description:
      - IP address of the head as this rank reaches it on the fabric.
      - Required when O(state=present).
    type: str
  state:
    description: Whether the rank may pull from it.
    type: str
    choices: [present, absent]
    default: present
  hosts_file:
    description: The rank's hosts file.
    type: path
    default: /etc/hosts
  daemon_json:
    description: The engine's configuration. What it held before lies beside it, with the suffix C(.lockstep).
    type: path
    default: /etc/docker/daemon.json
  pid_file:
    description: Where the engine writes its process id, for the reload.
    type: path
    default: /var/run/docker.pid
"""

EXAMPLES = r"""
- name: Open the way to the head's registry
  lockstep.fleet.registry_access:
    registry: fleet-registry:5055
    address: 10.0.22.1

- name: Close it again
  lockstep.fleet.registry_access:
    state: absent
"""

RETURN = r"""
reloaded:
  description: Whether the engine had to take over a changed C(daemon.json); in check mode whether it would.
  type: bool
  returned: always
"""

import ipaddress
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, dockerd, files
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "registry": {"type": "str"},
    "address": {"type": "str"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "hosts_file": {"type": "path", "default": dockerd.HOSTS_FILE},
    "daemon_json": {"type": "path", "default": dockerd.DAEMON_JSON},
    "pid_file": {"type": "path", "default": "/var/run/docker.pid"},
    "docker_host": {"type": "str"},
}

KEY = "insecure-registries"
# The engine re-reads its configuration at once; a busy one gets this long.
RELOAD_SECONDS = 10.0


def hosts_with(text: str, name: str, address: str | None) -> str:
    """Return the hosts file with one marked line for ``name`` at ``address``, or with none for ``None``.

    Raises LockstepError when a line of somebody else's gives the name another address: it would win or lose by chance.
    """
    lines = text.splitlines(keepends=True)
    others = [line for line in lines if dockerd.REGISTRY_MARK not in line]
    for line in others:
        words = line.partition("#")[0].split()
        if address and name in words[1:]:
            if words[0] == address:
                return "".join(others)
            raise LockstepError(
                "the registry's name is taken in this rank's hosts file",
                found=line.strip(),
                expected=f"{address} {name}",
                next_step="remove that line, or choose another name (image_registry_name)",
            )
    if address is None:
        return "".join(others)
    if others and not others[-1].endswith("\n"):
        others[-1] += "\n"
    return "".join([*others, f"{address} {name} {dockerd.REGISTRY_MARK}\n"])


def trusted(info: dict[str, Any], registry: str, address: str | None) -> bool:
    """Whether the engine speaks plain HTTP to the registry: listed by name, or by a network its address lies in."""
    config = info.get("RegistryConfig") or {}
    entry = (config.get("IndexConfigs") or {}).get(registry)
    if entry is not None and not entry.get("Secure", True):
        return True
    networks = [ipaddress.ip_network(network) for network in config.get("InsecureRegistryCIDRs") or []]
    return address is not None and any(ipaddress.ip_address(address) in network for network in networks)


def without(text: str, registry: str) -> str:
    """Return a daemon.json that somebody changed since, less our entry."""
    config = dockerd.merge_daemon_json(text, {})["config"]
    listed = [item for item in config.get(KEY, []) if item != registry]
    wanted = {key: value for key, value in config.items() if key != KEY} | ({KEY: listed} if listed else {})
    return dockerd.daemon_json_text(wanted)


class Access:
    """The two files of one rank, before and after."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.registry: str = module.params["registry"] or ""
        self.client = docker_api.Engine(self.params["docker_host"])
        self.daemon_json = Path(self.params["daemon_json"])
        self.memory = dockerd.remembered(self.daemon_json)
        self.hosts = Path(self.params["hosts_file"])

    def run(self) -> dict[str, Any]:
        """Converge both files; returns the module's result."""
        present = self.params["state"] == "present"
        hosts = self.hosts.read_text()
        new_hosts = hosts_with(hosts, self.registry.partition(":")[0], self.params["address"] if present else None)
        daemon = self.daemon_json.read_text() if self.daemon_json.exists() else None
        new_daemon = self._opened(daemon) if present else self._closed(daemon)
        if not self.module.check_mode:
            if new_hosts != hosts:
                self._write(self.hosts, new_hosts)
            if new_daemon != daemon:
                self._reload(daemon, new_daemon, present=present)
            if not present:
                self.memory.unlink(missing_ok=True)
        return {
            "changed": new_hosts != hosts or new_daemon != daemon,
            "reloaded": new_daemon != daemon,
            "diff": [
                {"before_header": str(path), "after_header": str(path), "before": before or "", "after": after or ""}
                for path, before, after in (
                    (self.hosts, hosts, new_hosts),
                    (self.daemon_json, daemon, new_daemon),
                )
                if before != after
            ],
        }

    def _opened(self, text: str | None) -> str | None:
        if trusted(self.client.get_json("/info"), self.registry, self.params["address"]):
            return text
        merged: str = dockerd.merge_daemon_json(text, {KEY: [self.registry]}, self._flags())["text"]
        return merged

    def _closed(self, text: str | None) -> str | None:
        if not self.memory.exists():
            return text  # whatever is listed there was never ours
        said: Any = files.read_json(self.memory)
        before: str | None = said["text"]
        self.registry = said["registry"]
        if text in (before, dockerd.merge_daemon_json(before, {KEY: [self.registry]})["text"]):
            return before
        return None if text is None else without(text, self.registry)

    def _flags(self) -> list[str]:
        """Return the running engine's command line."""
        return Path(f"/proc/{self._pid()}/cmdline").read_text().split("\0")

    def _pid(self) -> int:
        try:
            return int(Path(self.params["pid_file"]).read_text())
        except (OSError, ValueError) as error:
            raise LockstepError(
                "the engine's process is not known, so it cannot be told to reload its configuration",
                found=str(error),
                expected=f"its process id in {self.params['pid_file']}",
                next_step="give pid_file (dockerd's --pidfile)",
            ) from error

    def _reload(self, old: str | None, new: str | None, *, present: bool) -> None:
        """Write daemon.json and let the engine take it over; what it held before is remembered, or put back."""
        if present and not self.memory.exists():
            self.daemon_json.parent.mkdir(parents=True, exist_ok=True)
            files.write_json_atomic(self.memory, {"text": old, "registry": self.registry})
        self._put(new)
        deadline = time.monotonic() + RELOAD_SECONDS
        while trusted(self.client.get_json("/info"), self.registry, None) != present:
            if time.monotonic() > deadline:
                self._put(old)
                raise LockstepError(
                    "the engine did not take over its new configuration, so the old one is back",
                    found=f"{self.registry} under {KEY}: {not present}",
                    expected=str(present),
                    next_step="journalctl -u docker says why",
                )
            time.sleep(0.05)

    def _put(self, text: str | None) -> None:
        if text is None:
            self.daemon_json.unlink(missing_ok=True)
        else:
            self._write(self.daemon_json, text)
        os.kill(self._pid(), signal.SIGHUP)

    def _write(self, path: Path, text: str) -> None:
        """Replace a file, keeping owner and mode; a mounted one (a container's hosts file) is written in place."""
        with tempfile.NamedTemporaryFile("w", delete=False) as new:
            new.write(text)
        if not path.exists():
            Path(new.name).chmod(0o644)
        self.module.atomic_move(new.name, str(path), unsafe_writes=True)


def main() -> None:
    module = AnsibleModule(
        ARGUMENT_SPEC, supports_check_mode=True, required_if=[("state", "present", ("registry", "address"))]
    )
    try:
        result = Access(module).run()
    except (LockstepError, docker_api.EngineError) as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
