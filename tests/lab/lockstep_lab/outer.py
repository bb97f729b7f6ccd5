"""The Docker Engine of this machine, which carries the lab; found, or installed and started where we may."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

import docker

from .say import LabError, say, sh, step

LABEL = "lockstep.lab"
"""Carried by every image that the lab makes."""

PART = "lockstep.lab.part"
"""Carried by every container and network of the lab. Not an image's: a container inherits those, whoever starts it."""

_LOG = Path("/var/log/lockstep-dockerd.log")
_APT = Path("/run/lock/lockstep-apt.lock")


def _debian_like() -> bool:
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(
        line.startswith(("ID=debian", "ID=ubuntu", "ID_LIKE=")) and ("debian" in line or "ubuntu" in line)
        for line in text.splitlines()
    )


def _connect() -> docker.DockerClient | None:
    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except docker.errors.DockerException:
        return None
    return client


def need_packages(*names: str) -> None:
    """Install Debian packages that the lab builds with, where we may.

    Raises LabError, with the command to type, where we are not root on Debian or Ubuntu.
    """
    if os.geteuid() != 0 or not _debian_like() or shutil.which("apt-get") is None:
        raise LabError(
            f"missing on this machine: {' '.join(names)}", f"install them (apt-get install {' '.join(names)})"
        )
    # One at a time: apt-get update does not wait for another one's lock.
    with step(f"installing {' '.join(names)}"), _APT.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sh(["apt-get", "update", "-qq"])
        sh(
            [
                "env",
                "DEBIAN_FRONTEND=noninteractive",
                "apt-get",
                "-o",
                "DPkg::Lock::Timeout=300",
                "install",
                "-y",
                "-qq",
                "--no-install-recommends",
                *names,
            ]
        )


def need_tools(**tools: str) -> None:
    """Make sure that each command (keyword) is there, from its Debian package (value)."""
    missing = sorted({package for command, package in tools.items() if shutil.which(command) is None})
    if missing:
        need_packages(*missing)


def _start_engine() -> None:
    if Path("/run/systemd/system").is_dir():
        sh(["systemctl", "enable", "--now", "docker"])
        return
    say(f"no systemd here: starting dockerd in the background, its log is {_LOG}")
    # A stale pid file of an engine that was killed would stop the new one.
    Path("/var/run/docker.pid").unlink(missing_ok=True)
    with _LOG.open("ab") as log:
        daemon = ["setsid", "--fork", "dockerd"]
        subprocess.run(daemon, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", check=True)


def installed() -> bool:
    """Whether this machine has a Docker Engine, running or not (or is told to use another one's)."""
    return bool(os.environ.get("DOCKER_HOST")) or shutil.which("dockerd") is not None or _connect() is not None


def engine() -> docker.DockerClient:
    """The machine's Docker Engine, started (and on Debian or Ubuntu installed) where none answers and we are root.

    Raises LabError that says what to do where that is not possible.
    """
    client = _connect()
    if client is None and os.environ.get("DOCKER_HOST"):
        raise LabError(
            f"no Docker Engine answers at DOCKER_HOST={os.environ['DOCKER_HOST']}", "start it, or unset DOCKER_HOST"
        )
    if client is None and os.geteuid() != 0:
        raise LabError(
            "no Docker Engine answers and this is not root",
            "start Docker (sudo systemctl start docker) or install it, and run this as root (sudo -E make lab)",
        )
    if client is None:
        if shutil.which("dockerd") is None:
            need_packages("docker.io")
        # Debian's package starts the engine by itself where there is systemd; give it the chance.
        client = _connect()
    if client is None:
        _start_engine()
        for _ in range(120):
            client = _connect()
            if client is not None:
                break
            time.sleep(0.5)
    if client is None:
        raise LabError("the Docker Engine did not come up within 60 s", f"read {_LOG} or journalctl -u docker")
    if os.geteuid() != 0:
        raise LabError("the lab keeps the hosts' disks as root-owned directories", "run it as root (sudo -E make lab)")
    return client
