"""Ports for servers that a test starts."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path


def free(count: int = 1) -> list[int]:
    """TCP ports that nobody listens on.

    They lie below those that the system hands to clients: one of these could be taken by any connection before the
    server that it is meant for has begun to listen.
    """
    first_of_clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(range(10000, first_of_clients), 100 + count):
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("", port)))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise AssertionError(f"{count} ports: not there among {100 + count} below {first_of_clients}")
