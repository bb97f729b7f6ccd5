"""What the running lab tells its inventory: the SSH key, the hosts' keys, and the images' digests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from .paths import CONTROL, GENERATED, STATE
from .say import sh
from .topology import Host


class _Indented(yaml.SafeDumper):
    """Lists are indented below their key, as yamllint wants it."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent, whatever PyYAML thinks of lists."""
        super().increase_indent(flow, False)


KEY = STATE / "ssh" / "ops"


def make_key() -> None:
    """Generate the controller's SSH key of this lab, where there is none; hosts mount its public half."""
    authorized = STATE / "ssh" / "authorized"
    authorized.mkdir(parents=True, exist_ok=True)
    if not KEY.exists():
        sh(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lockstep-lab", "-f", KEY])
    public, place = KEY.with_suffix(".pub").read_bytes(), authorized / "ops"
    if not place.exists() or place.read_bytes() != public:  # hosts that run read it at every connection
        place.write_bytes(public)


def write(host_keys: dict[Host, str], values: dict[str, Any]) -> None:
    """Write ``inventory/lab/generated``: ``ssh/ops``, ``known_hosts`` and ``lab.yml`` (variables of group fleet)."""
    key = GENERATED / "ssh" / "ops"
    key.parent.mkdir(parents=True, exist_ok=True)
    key.unlink(missing_ok=True)
    descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(KEY.read_bytes())
    lines = [f"{host.lan},{host.name} {' '.join(key.split()[:2])}\n" for host, key in host_keys.items()]
    (GENERATED / "known_hosts").write_text("".join(lines), encoding="utf-8")
    text = "---\n# Written by `make lab`; the lab that runs now.\n" + yaml.dump(values, Dumper=_Indented, width=120)
    (GENERATED / "lab.yml").write_text(text, encoding="utf-8")
    CONTROL.mkdir(mode=0o700, exist_ok=True)


def forget_connections(address: str = "", *, kept: Path = CONTROL) -> None:
    """End Ansible's ``kept`` SSH connections to hosts, or to one of them: what is behind them is going away."""
    if not kept.is_dir():
        return
    for socket in kept.iterdir():
        if not socket.is_socket() or (address and not socket.name.startswith(f"{address}-")):
            continue
        # The connection's process may have ended by itself; then its socket is all there is to remove.
        subprocess.run(["ssh", "-q", "-o", f"ControlPath={socket}", "-O", "exit", "lab"], check=False, timeout=60)
        socket.unlink(missing_ok=True)


def remove() -> None:
    """Remove what ``write`` wrote, and the connections' sockets."""
    forget_connections()
    for path in (GENERATED, CONTROL):
        if path.exists():
            shutil.rmtree(path)
