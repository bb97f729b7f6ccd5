"""The lab's fleet for tests: the root's entries as a person runs them, and its hosts asked past Lockstep's modules."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import docker
import yaml
from lockstep_lab import faults, nodes, topology

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
GENERATED = ROOT / "inventory/lab/generated"

# In order of rank.
HOSTS = HEAD, SECOND, THIRD = tuple(host.name for host in topology.hosts())
ADDRESS = {host.name: host.lan for host in topology.hosts()}
ENGRAM_DIR = {host.name: host.engram_dir for host in topology.hosts()}
CONTAINER = {HEAD: "dsv41-head", SECOND: "dsv41-worker", THIRD: "dsv41-worker"}
STATE_DIR = "/srv/lockstep"
BASE = f"{topology.HUB}/lmsysorg/sglang:dev-dsv41"
OVERLAY = "dsv41-3x-spark:local"

# What ansible-core says of every strategy but its own, whoever switches Mitogen on.
_ANY_STRATEGY = "Use of strategy plugins not included in ansible.builtin are deprecated"

_TASK = re.compile(r"TASK \[(.*)\] \*+")
_RESULT = re.compile(r"(ok|changed|skipping|fatal|included): \[([^] ]+)(?: -> [^]]+)?\]")
_RECAP = re.compile(r"(\S+) +: ok=(\d+) +changed=(\d+) +unreachable=(\d+) +failed=(\d+)")
_BLAME = re.compile(r"(\S+): (\w+)\n +found: (.*)\n +expected: (.*)\n +next step: (.*)")


@dataclass(frozen=True)
class Said:
    """What one ansible-playbook run printed, on the standard callback."""

    rc: int
    text: str

    @cached_property
    def results(self) -> list[tuple[str, str, str]]:
        """(task, host, ok | changed | skipping | fatal) in the order shown."""
        found, task = [], ""
        for line in self.text.splitlines():
            if header := _TASK.fullmatch(line):
                task = header[1]
            elif result := _RESULT.match(line):
                found.append((task, result[2], result[1]))
        return found

    @property
    def changed(self) -> set[tuple[str, str]]:
        """(task, host) that reported a change."""
        return {(task, host) for task, host, status in self.results if status == "changed"}

    @property
    def recap(self) -> dict[str, int]:
        """How many tasks changed each host, by the recap."""
        return {row[0]: int(row[2]) for row in _RECAP.findall(self.text)}

    @property
    def blamed(self) -> dict[tuple[str, str], dict[str, str]]:
        """{(entry of agree, host): {"found", "expected", "next_step"}} as the message names them."""
        return {
            (entry, host): {"found": found, "expected": expected, "next_step": step}
            for host, entry, found, expected, step in _BLAME.findall(self.text)
        }

    @property
    def receipt(self) -> Path:
        """The receipt that the run names as proven."""
        (path,) = set(re.findall(r'^receipt: (\S+)  "ok": true$', self.text, re.MULTILINE))
        return Path(path)


def started(
    entry: str, *arguments: str, where: Path = ROOT, alone: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Start a root entry of a checkout with its own configuration, as ``ansible-playbook <entry> <arguments>``.

    ``alone`` gives it a process group of its own.
    """
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("ansible-playbook")), entry, *arguments],
        cwd=where,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_STDOUT_CALLBACK": "default", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=alone,
    )


def play(
    entry: str, *arguments: str, where: Path = ROOT, at: Callable[[str], object] | None = None, **environment: str
) -> Said:
    """Run a root entry to its end; ``at`` is called with each task's name when the task begins."""
    text = ""
    with started(entry, *arguments, where=where, **environment) as run:
        for line in run.stdout or ():
            text += line
            if at is not None and (header := _TASK.match(line)):
                at(header[1])
    warned = [line for line in text.splitlines() if "DEPRECATION" in line and _ANY_STRATEGY not in line]
    assert not warned, text
    # Ansible's own or a module's; what an engine's log says stands behind other words.
    assert not re.search(r"^ *Traceback", text, re.MULTILINE), text
    return Said(run.returncode, text)


def serve(arm: str, *arguments: str, **environment: str) -> Said:
    """Run serve.yml for an arm."""
    return play("serve.yml", "-e", f"arm={arm}", *arguments, **environment)


def lab(*command: str) -> None:
    """A command of the lab."""
    places = [str(ROOT / "tests/lab"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    subprocess.run([sys.executable, "-m", "lockstep_lab", *command], cwd=ROOT, env=environment, check=True)


def lab_images() -> dict[str, dict[str, str]]:
    """The images that the lab made: {"base" | "moved" | "registry": {"reference", "digest", "id"}}."""
    made: dict[str, dict[str, str]] = yaml.safe_load((GENERATED / "lab.yml").read_text())["fleet_lab_made"]
    return made


def on(host: str, command: str) -> str:
    """What a shell command says on a host; it comes through this machine's engine, not over SSH."""
    return nodes.run(faults.host(host), ["sh", "-c", command])


@contextmanager
def engine(host: str) -> Iterator[docker.DockerClient]:
    """Docker's own SDK on a host's engine, over SSH: a connection is ``docker system dial-stdio``, as for ``ssh://``.

    The SDK's ``ssh://`` itself takes neither the lab's key nor sudo.
    """
    options = [
        f"UserKnownHostsFile={GENERATED}/known_hosts",
        "GlobalKnownHostsFile=/dev/null",
        "StrictHostKeyChecking=yes",
        "BatchMode=yes",
    ]
    flags = [word for option in options for word in ("-o", option)]
    dial = ["ssh", "-i", str(GENERATED / "ssh/ops"), *flags, f"ops@{ADDRESS[host]}", "sudo docker system dial-stdio"]
    connections: list[subprocess.Popen[bytes]] = []

    def accept(server: socket.socket) -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:  # closed: this is the end
                return
            with peer:
                connections.append(subprocess.Popen(dial, stdin=peer, stdout=peer, stderr=subprocess.DEVNULL))

    with TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{place}/docker.sock")
        server.listen()
        thread = threading.Thread(target=accept, args=(server,))
        thread.start()
        client = docker.DockerClient(base_url=f"unix://{place}/docker.sock", timeout=60)
        try:
            yield client
        finally:
            client.close()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.terminate()
                connection.wait()


# Everything of a host that a run may touch, but for Ansible's own folder of the moment and the fleet's lock, which a
# run takes and gives back, and the times of their parents.
_LOOK = r"""
docker images --all --no-trunc --digests --format '{{.Repository}}:{{.Tag}} {{.Digest}} {{.ID}}' | sort
shown='{{.Id}} {{.Name}} {{.Image}} {{.State.Status}} {{.State.StartedAt}}'
docker ps --all --quiet --no-trunc | sort | xargs -r docker inspect --format "$shown"
docker volume ls --quiet
docker info --format '{{json .RegistryConfig}}'
find /srv /root/.cache /home/ops /etc/docker /etc/hosts 2>/dev/null \
  -path /home/ops/.ansible -prune -o -path /srv/models -prune -o -path /home/ops -o \
  -path /srv/lockstep -o -name fleet-lock.json -o \
  -printf '%p %y %i %m %U %s %T@ %l\n' | sort
"""


def hosts_now() -> dict[str, list[str]]:
    """Images, containers with their start times, and files with inodes and times, of every host."""
    return dict(zip(HOSTS, nodes.each(lambda host: on(host, _LOOK).splitlines(), HOSTS), strict=True))


def results_now() -> dict[str, tuple[int, int]]:
    """Inode and time of every file that the controller keeps of launches."""
    found = {}
    for path in RESULTS.rglob("*") if RESULTS.exists() else ():
        if path.relative_to(RESULTS).parts[0] != "tests":  # pytest's own, when run by tests/stages.py
            status = path.lstat()
            found[str(path)] = (status.st_ino, status.st_mtime_ns)
    return found


def containers() -> dict[str, str]:
    """Id and start time of the engine's container on every host; "none" where there is none."""
    shown = "'{{.Id}} {{.State.StartedAt}} {{.State.Status}}'"
    ask = {host: f"docker inspect --format {shown} {CONTAINER[host]} 2>/dev/null || echo none" for host in HOSTS}
    return {host: on(host, ask[host]).strip() for host in HOSTS}


def arms() -> dict[str, str]:
    """The arm that runs on every host; empty where nothing runs."""
    shown = "'{{.Label \"lockstep.arm\"}}'"
    return {host: on(host, f"docker ps --filter name={CONTAINER[host]} --format {shown}").strip() for host in HOSTS}
