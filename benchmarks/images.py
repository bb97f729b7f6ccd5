"""Handing an image on to workers, against the usual way: ``docker save | ssh | docker load`` from the head to each.

    python benchmarks/images.py [--gib 1] [--workers 2 3 6]

Needs a lab that has converged (``make demo ENGINE=sim``), root, and 10 times the image's size and 3 times more for each
worker on the lab's disk. The head and the workers are hosts of their own beside the fleet, with engines of their own;
one network is their fabric. All of them share this machine's processors and disk. The image is random bytes in eleven
layers. Ours is a whole run of ``ansible-playbook`` around ``playbooks/tasks/hand_on_images.yml``: the start of the
registry, its filling, all pulls, its end. The usual way is timed for the first number of workers, over the same fabric,
to all at once; the first copy to one after another, too, and the better one counts. What a worker received is the
fabric interface's own count; Ansible's modules come over the LAN.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/lab"))

import docker  # noqa: E402 - the lab's path comes first
import yaml  # noqa: E402 - the same
from lockstep_lab import faults, hub, nodes, outer, topology  # noqa: E402 - the same
from lockstep_lab.paths import GENERATED, STATE  # noqa: E402 - the same

HEAD = "bench0"
FIRST_ADDRESS = 70  # of the LAN, for the head; the workers' follow
FABRIC = "lockstep-bench-fabric"
FABRIC_NET = "10.0.44"
REPOSITORY = "bench"
TOP = 19 << 20  # bytes of the top layer: less than 20 MB
# What is handed on, and which layers are new in it; a new layer makes all above it new, too.
CASES = {"first copy": range(11), "top layer changed": range(10, 11), "a fifth changed": range(8, 11)}
LIMITS = {"first copy": 1.0, "top layer changed": 0.2, "a fifth changed": 0.6}
BYTES_LIMIT = 1.05
PAPER = 64
MB = 1e6


def on(host: str, command: str) -> str:
    """What a shell command says on a host."""
    return nodes.run(faults.host(host), ["bash", "-euo", "pipefail", "-c", command])


def address(number: int, net: str = FABRIC_NET) -> str:
    """Address of a host of this benchmark on a /24; the head is number 0."""
    return f"{net}.{FIRST_ADDRESS + number}"


def played(*arguments: str) -> float:
    """Run a playbook from the repository's root; its seconds."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), *arguments]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    print(done.stdout[done.stdout.find("TASKS RECAP") :], file=sys.stderr)
    return seconds


class Fleet:
    """The head and its workers, the image's versions on the head, and the two ways to hand one on."""

    def __init__(self, workers: int, place: Path) -> None:
        self.names = [HEAD, *(f"bench{number}" for number in range(1, workers + 1))]
        self.place = place
        self.known = place / "known_hosts"

    def start(self) -> None:
        """Start the hosts, let the head in at the workers, and write an inventory and the play."""
        client = outer.engine()
        image, registry = nodes.node_image(client), hub.image(client)

        lan = topology.hosts()[0].lan.rpartition(".")[0]
        pool = docker.types.IPAMPool(subnet=f"{FABRIC_NET}.0/24", gateway=f"{FABRIC_NET}.254")
        fabric = client.networks.create(
            FABRIC, internal=True, labels={outer.PART: "network"}, ipam=docker.types.IPAMConfig(pool_configs=[pool])
        )

        def one(number: int) -> str:
            host = topology.Host(self.names[number], number, "worker", address(number, lan), "")
            container = nodes.start(client, image, host, [], {})
            fabric.connect(container, ipv4_address=address(number))
            return nodes.wait_ready(container, host)

        keys = nodes.each(one, range(len(self.names)))
        lines = [f"{address(n)},{address(n, lan)} {' '.join(key.split()[:2])}\n" for n, key in enumerate(keys)]
        self.known.write_text("".join(lines))
        for name, path in (("key", GENERATED / "ssh/ops"), ("known", self.known)):
            into = ["docker", "exec", "-i", HEAD, "sh", "-c", f"umask 077; cat > /run/bench-{name}"]
            subprocess.run(into, input=path.read_bytes(), check=True)
        with subprocess.Popen(["docker", "save", registry], stdout=subprocess.PIPE) as save:
            subprocess.run(["docker", "exec", "-i", HEAD, "docker", "load", "-q"], stdin=save.stdout, check=True)
        inventory = self.place / "inventory"
        (inventory / "group_vars").mkdir(parents=True)
        (inventory / "group_vars/all").symlink_to(ROOT / "group_vars/all")
        hosts = {
            name: {
                "ansible_host": address(n, lan),
                "fleet_role": "worker" if n else "head",
                "fleet_fabric": dict.fromkeys(self.names, address(n)),
            }
            for n, name in enumerate(self.names)
        }
        variables = {
            "ansible_user": "ops",
            "ansible_ssh_private_key_file": str(GENERATED / "ssh/ops"),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={self.known}",
            "fleet_image_registry": {"image": registry, "alias": "lockstep-registry", "port": 5100, "existing": ""},
        }
        (inventory / "hosts.yml").write_text(yaml.safe_dump({"fleet": {"hosts": hosts}}))
        (inventory / "group_vars/fleet.yml").write_text(yaml.safe_dump(variables))
        work = "{{ {'base': {'action': 'ok'}, 'overlay': {'action': 'ok' if fleet_role == 'head' else 'fetch'}} }}"
        play = {
            "hosts": "fleet",
            "gather_facts": False,
            "any_errors_fatal": True,
            "become": True,
            "vars": {
                "hand_on_source": HEAD,
                "hand_on_what": ["overlay"],
                "image_work": work,
                "image_split": "rows",
                "image_wanted": {
                    "base": {"repository": "none", "tag": "none", "digest": "sha256:none"},
                    "overlay": {"tag": f"{REPOSITORY}:{{{{ bench }}}}", "context_sha256": "{{ bench }}"},
                },
            },
            "tasks": [{"ansible.builtin.include_tasks": str(ROOT / "playbooks/tasks/hand_on_images.yml")}],
        }
        (self.place / "play.yml").write_text(yaml.safe_dump([play]))

    def remove(self) -> None:
        """Remove the hosts and their disks."""
        client = outer.engine()
        for name in self.names:
            with contextlib.suppress(docker.errors.NotFound):
                client.containers.get(name).remove(force=True, v=True)
            nodes.wipe(nodes.disk(name))
        for network in client.networks.list(names=[FABRIC]):
            network.remove()

    def build(self, size: int) -> None:
        """Make the image's versions on the head, tags ``v0``, ``v1`` and ``v2``: one for each case."""
        context = nodes.disk(HEAD, "docker", "bench")
        context.mkdir()
        sizes = [(size - TOP) // 10] * 10 + [TOP]
        copies = "".join(f"COPY {number} /\n" for number in range(len(sizes)))
        (context / "Dockerfile").write_text(f'FROM scratch\n{copies}CMD ["none"]\n')
        for version, new in enumerate(CASES.values()):
            for number in new:
                with (context / str(number)).open("wb") as file:
                    for _ in range(sizes[number] >> 20):
                        file.write(os.urandom(1 << 20))
            on(HEAD, f"cd /var/lib/docker/bench && DOCKER_BUILDKIT=1 docker build -q -t {REPOSITORY}:v{version} .")
        on(HEAD, "docker builder prune --all --force")
        shutil.rmtree(context)

    def image_id(self, host: str, version: int) -> str:
        """Id of a version on a host."""
        return on(host, f"docker image inspect --format '{{{{.Id}}}}' {REPOSITORY}:v{version}")

    def forget(self, workers: Sequence[str], version: int) -> None:
        """Let workers lack a version, and with the first one every layer."""
        which = f"{REPOSITORY}:v{version}" if version else ""
        for worker in workers:
            on(worker, f"docker images --quiet {which} | sort -u | xargs -r docker image rm --force")

    @contextlib.contextmanager
    def received(self, workers: Sequence[str]) -> Iterator[list[int]]:
        """Bytes that each worker received, filled in at the end."""
        count = "cat /sys/class/net/eth1/statistics/rx_bytes"
        before = [int(on(worker, count)) for worker in workers]
        bytes_: list[int] = []
        yield bytes_
        bytes_ += [int(on(worker, count)) - was for worker, was in zip(workers, before, strict=True)]

    def arrived(self, workers: Sequence[str], version: int) -> None:
        """End the benchmark when a worker holds another image."""
        ids = {self.image_id(host, version) for host in (HEAD, *workers)}
        if len(ids) != 1:
            raise SystemExit(f"v{version} is not the same everywhere: {ids}")

    def ours(self, workers: Sequence[str], version: int) -> tuple[float, int]:
        """Hand a version on by the role; seconds, and the most that a worker received."""
        os.sync()
        extra = json.dumps({"bench": f"v{version}"})
        limit = ",".join([HEAD, *workers])
        arguments = ["-i", str(self.place / "inventory"), str(self.place / "play.yml"), "-l", limit, "-e", extra]
        with self.received(workers) as counted:
            seconds = played(*arguments)
        self.arrived(workers, version)
        return seconds, max(counted)

    def usual(self, workers: Sequence[str], version: int, *, at_once: bool) -> float:
        """Hand a version on the usual way; its seconds."""
        os.sync()
        ssh = "ssh -i /run/bench-key -o UserKnownHostsFile=/run/bench-known -o BatchMode=yes"
        pipes = [
            f"docker save {REPOSITORY}:v{version} | {ssh} ops@{address(self.names.index(worker))} sudo docker load -q"
            for worker in workers
        ]
        if at_once:
            started = "".join(f"({pipe}) & pids+=($!)\n" for pipe in pipes)
            command = f"pids=()\n{started}for pid in ${{pids[@]}}; do wait $pid; done"
        else:
            command = "\n".join(pipes)
        began = time.monotonic()
        on(HEAD, command)
        seconds = time.monotonic() - began
        self.arrived(workers, version)
        return seconds

    def new_bytes(self, version: int) -> int:
        """Compressed bytes of the layers that are new in a version, by its manifest in the head's registry."""
        blobs = nodes.disk(HEAD, "docker", "volumes", "lockstep-registry", "_data", "docker/registry/v2/blobs/sha256")
        names = on(HEAD, f"docker image inspect --format '{{{{join .RepoDigests \" \"}}}}' {REPOSITORY}:v{version}")
        digest = names.split()[0].rpartition(":")[2]
        manifest = json.loads((blobs / digest[:2] / digest / "data").read_text())
        new = list(CASES.values())[version]
        return sum(manifest["layers"][number]["size"] for number in new)


def refuse_early(size: int, workers: int) -> None:
    """End with what is missing, before anything is started."""
    client = outer.engine()
    for host in topology.hosts():
        try:
            running = client.containers.get(host.name).status == "running"
        except docker.errors.NotFound:
            running = False
        if not running:
            raise SystemExit(f"{host.name} does not run; make demo ENGINE=sim makes the lab and converges it")
    need, free = size * (10 + 3 * workers), shutil.disk_usage(STATE).free
    if free < need:
        raise SystemExit(f"{STATE} has {free >> 30} GiB free, this needs {need >> 30} GiB; take a smaller --gib")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1, help="size of the image (default: 1)")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 6], help="how many workers (default: 2 3 6)")
    options = parser.parse_args()
    size = int(options.gib * (1 << 30)) + TOP
    most = max(options.workers)
    refuse_early(size, most)
    with tempfile.TemporaryDirectory() as place:
        fleet = Fleet(most, Path(place))
        try:
            fleet.remove()
            fleet.start()
            fleet.build(size)
            seconds, received = measured(fleet, options.workers)
        finally:
            fleet.remove()
    if len(options.workers) > 1:
        paper(seconds, received, options.workers)
    again = [played("converge_images.yml") for _ in range(4)][1:]
    print(f"three ranks with nothing to do: median {statistics.median(again):.1f} s of {again} (limit 8)")


def measured(fleet: Fleet, counts: Sequence[int]) -> tuple[dict[tuple[str, int], float], dict[str, int]]:
    """Hand every case on to each number of workers, both ways, and print a row for each."""
    print(f"{'workers':>7} {'case':<18} {'ours s':>7} {'usual s':>8} {'way':<9} {'ratio':>6} {'limit':>6} "
          f"{'MB/worker':>10} {'layers MB':>10} {'ratio':>6} {'limit':>6}")  # fmt: skip
    seconds: dict[tuple[str, int], float] = {}
    bytes_: dict[str, int] = {}
    for count in counts:
        workers = fleet.names[1 : count + 1]
        for version, case in enumerate(CASES):
            fleet.forget(workers, version)
            if version == 0:  # it is filled with all layers, too
                on(HEAD, "docker volume rm --force lockstep-registry")
            took, most = fleet.ours(workers, version)
            new = fleet.new_bytes(version)
            seconds[case, count], bytes_[case] = took, most
            row = f"{count:>7} {case:<18} {took:>7.1f}"
            if count == counts[0]:
                ways = {}
                for way in ["at once", *(["in turn"] if version == 0 else [])]:
                    fleet.forget(workers, version)
                    ways[way] = fleet.usual(workers, version, at_once=way == "at once")
                way, usual = min(ways.items(), key=lambda item: item[1])
                row += f" {usual:>8.1f} {way:<9} {took / usual:>6.2f} {LIMITS[case]:>6}"
            else:
                row += f" {'-':>8} {'':<9} {'':>6} {'':>6}"
            print(f"{row} {most / MB:>10.1f} {new / MB:>10.1f} {most / new:>6.3f} {BYTES_LIMIT:>6}", flush=True)
    return seconds, bytes_


def paper(seconds: dict[tuple[str, int], float], received: dict[str, int], counts: Sequence[int]) -> None:
    """Print what 64 workers would take: computed, not measured."""
    print(f"\n{PAPER} workers, computed: seconds = a + b x workers, fitted to ours above, all on this machine's cores;")
    print("the head sends workers x MB/worker, and on a line of 100 Gbit/s that alone takes:")
    for case, each in received.items():
        fit = statistics.linear_regression(counts, [seconds[case, count] for count in counts])
        sent = PAPER * each
        print(
            f"  {case:<18} {fit.intercept:.1f} + {fit.slope:.2f} x {PAPER} = {fit.intercept + fit.slope * PAPER:.0f} s;"
            f" {sent / 1e9:.1f} GB, {sent * 8 / 100e9:.1f} s"
        )


if __name__ == "__main__":
    main()
