"""Registries in trouble, seen through the role and the playbook: real engines, real registries, real faults.

Every rank in trouble is named with the kind, what was found and what to do; the others get their image; nothing half
has a name; and once the fault is gone, as the printed next step says, the next run ends right. Only the limit of pulls
is a simulator's, since Debian's registry has none.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from lockstep_lab import campaign, hub, nodes, outer, topology
from lockstep_lab.say import LabError
from playbook import ROOT, Played, run_file, run_playbook, spoken

pytestmark = pytest.mark.timeout(600)

HEAD, SECOND, THIRD = RANKS = ("trouble-1", "trouble-2", "trouble-3")
HUB, GATE = "trouble-hub", "trouble-gate"
ADDRESS = {HEAD: "10.77.0.90", SECOND: "10.77.0.91", THIRD: "10.77.0.92", HUB: "10.77.0.95", GATE: "10.77.0.96"}
DAEMON_JSON = "/etc/docker/daemon.json"
STORAGE = "/var/lib/docker-registry"

REPOSITORY = f"{topology.HUB}/lmsysorg/sglang"
TAG = f"{REPOSITORY}:dev-dsv41"
OVERLAY = "dsv41-3x-spark:local"
REGISTRY = "lockstep/registry:2"
# Bytes of the base's layers; random, so they are as large packed.
LAYERS = {"first": 1 << 20, "big": 24 << 20, "last": 1 << 20}
CUT_AT = 16 << 20
THIRDS_DISK = 256  # MiB

USER, PASSWORD = "lab", "letmein"
HTPASSWD = f"{USER}:$2b$04$DOnrGnymeAww8ewkHaaq1uVKotqVtoqiV2w7Rjmedc9l8UtmvuZvm\n"  # bcrypt of the password

GATE_CONFIG = f"""
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {STORAGE}}}
http:
  addr: ":5000"
  tls: {{certificate: /gate/crt, key: /gate/key}}
auth:
  htpasswd: {{realm: gate, path: /gate/htpasswd}}
"""

SIMULATOR = """
import http.server

class TooMany(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        first = self.path == "/v2/"
        words = {"code": "TOOMANYREQUESTS", "message": "You have reached your unauthenticated pull rate limit."}
        body = b"" if first else __import__("json").dumps({"errors": [words]}).encode()
        self.send_response(200 if first else 429)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "60")
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", 5001), TooMany).serve_forever()
"""


@dataclass(frozen=True)
class Scene:
    """The hosts, the images in the hub and how to run a playbook on them."""

    client: docker.DockerClient
    where: Path  # the inventory
    digest: str  # of the pinned build

    def on(self, rank: str, command: str) -> str:
        """What a shell command says on a host."""
        return nodes.run(self.client.containers.get(rank), ["bash", "-ec", command])

    def images(self, rank: str) -> list[str]:
        """Every name of an image on a host, and every layer."""
        listed = "docker images --no-trunc --digests --format '{{.Repository}}:{{.Tag}} {{.Digest}} {{.ID}}' | sort"
        return self.on(rank, f"{listed}; ls -A /var/lib/docker/overlay2 /var/lib/docker/tmp").splitlines()

    def settles(self, rank: str, before: list[str]) -> None:
        """The images of a host come to be as before: an engine lets go of a failed pull's layers after its answer."""
        deadline = time.monotonic() + 60
        while (found := self.images(rank)) != before:
            assert time.monotonic() < deadline, (found, before)
            time.sleep(0.2)

    def listens(self, rank: str, address: str) -> None:
        """Wait until something accepts connections at an address, as a host sees it."""
        accepts = f"true 2> /dev/null > /dev/tcp/{address.replace(':', '/')}"
        self.on(rank, f"for try in $(seq 600); do {accepts} && exit; sleep 0.1; done; exit 1")

    def pull(self, *ranks: str, repository: str = REPOSITORY) -> Played:
        """The role's entry that has a rank pull the base, on these ranks at the same time."""
        base = {"repository": repository, "tag": "dev-dsv41", "digest": self.digest}
        play = {
            "hosts": ",".join(ranks),
            "gather_facts": False,
            "become": True,
            "vars": {
                "image_wanted": {"base": base, "overlay": {"tag": OVERLAY, "context_sha256": "0" * 64}},
                "image_work": {"base": {"action": "pull", "image": f"{repository}@{self.digest}"}},
                "image_split": "rows",
            },
            "tasks": [{"ansible.builtin.include_role": {"name": "lockstep.fleet.image", "tasks_from": "base"}}],
        }
        return run_playbook([play], self.where, inventory=str(self.where / "hosts.yml"))

    def converge(self) -> Played:
        """converge_images.yml on all three."""
        return run_file(ROOT / "converge_images.yml", inventory=str(self.where / "hosts.yml"))

    def received(self, rank: str) -> int:
        """Bytes that came to a host so far."""
        return int(self.on(rank, "cat /sys/class/net/eth0/statistics/rx_bytes"))


def stats(played: Played) -> dict[str, tuple[int, int]]:
    """{rank: (tasks that failed, tasks that changed it)}; a task that was rescued counts as none that failed."""
    return {rank: (row["failures"], row["changed"]) for rank, row in spoken(played.text)["stats"].items()}


def named(played: Played, rank: str, kind: str) -> dict[str, str]:
    """The one error that names a rank: it has this kind. What was found and expected, and the next step."""
    said = [
        result["msg"]
        for play in spoken(played.text)["plays"]
        for task in play["tasks"]
        for host, result in task["hosts"].items()
        if host == rank and result.get("failed") and str(result["msg"]).startswith(f"{rank}: ")
    ]
    assert len(said) == 1, played.text
    head, *lines = said[0].splitlines()
    assert head.endswith(f" ({kind})"), said[0]
    fields = dict(line.strip().split(": ", 1) for line in lines)
    assert set(fields) == {"found", "expected", "next step"}
    return fields


def certificates(folder: Path) -> None:
    """A CA of nobody's, and the certificate of the gate's address by it."""

    def write(name: str, subject: str, key: Any, by: Any, extension: Any) -> None:
        now = datetime.now(UTC)
        common = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, word)]) for word in (subject, "a CA of our own")]
        builder = x509.CertificateBuilder(common[1], common[0], key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        made = builder.add_extension(extension, critical=False).sign(by, hashes.SHA256())
        (folder / name).write_bytes(made.public_bytes(serialization.Encoding.PEM))

    ca, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    address = x509.IPAddress(ipaddress.ip_address(ADDRESS[GATE]))
    write("ca.crt", "a CA of our own", ca, ca, x509.BasicConstraints(ca=True, path_length=None))
    write("crt", GATE, own, ca, x509.SubjectAlternativeName([address]))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key").write_bytes(own.private_bytes(serialization.Encoding.PEM, *plain))


def remove(client: docker.DockerClient) -> None:
    """The hosts and registries with their disks."""
    for name in ADDRESS:
        for container in client.containers.list(all=True, filters={"name": f"^{name}$"}):
            container.remove(force=True, v=True)
        nodes.wipe(nodes.disk(name))


def build(scene: Scene, layers: dict[str, int]) -> str:
    """Build a base of these layers on the head and push it; its digest. Nothing of it stays on the head."""
    files = "; ".join(f"head -c {size} /dev/urandom > {name}" for name, size in layers.items())
    lines = "\\n".join(["FROM scratch", *(f"COPY {name} /{name}" for name in layers)])
    scene.on(HEAD, f"mkdir /root/b; cd /root/b; {files}; printf '{lines}' > Dockerfile; docker build -q -t {TAG} .")
    said = scene.on(HEAD, f"docker push {TAG}; rm -r /root/b; docker image rm --force {TAG}; docker builder prune -af")
    (digest,) = re.findall(r"digest: (sha256:[0-9a-f]{64})", said)
    return str(digest)


@pytest.fixture(scope="module")
def machine() -> Iterator[docker.DockerClient]:
    """This machine's engine; nothing of ours is on it before and after."""
    client = outer.engine()
    remove(client)
    yield client
    remove(client)


@pytest.fixture(scope="module")
def scene(machine, tmp_path_factory) -> Scene:
    """Three hosts without an image, and a hub whose tag has moved from the pinned build on to another."""
    where = tmp_path_factory.mktemp("fleet")
    client = machine
    node, registry = nodes.node_image(client), hub.image(client)
    nodes.make_networks(client)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "hub_address", lambda: ADDRESS[HUB])  # for hub.start, and every host's hub.lab
        nodes.disk(HUB).mkdir(parents=True)
        hub.start(client, registry, nodes.disk(HUB), name=HUB)
        hosts = [topology.Host(rank, number, "", ADDRESS[rank], "/srv/engram") for number, rank in enumerate(RANKS)]

        def up(host: topology.Host) -> None:
            nodes.wait_ready(nodes.start(client, node, host, [], {}), host)

        nodes.each(up, hosts)
    found = Scene(client, where, "")
    # One engine has a small file system, and does not try a layer again, as engines do for nearly a minute.
    found.on(THIRD, f"systemctl stop docker.socket docker; mount -t tmpfs -o size={THIRDS_DISK}m tmpfs /var/lib/docker")
    once = json.loads(found.on(THIRD, f"cat {DAEMON_JSON}")) | {"max-download-attempts": 1}
    found.on(THIRD, f"echo '{json.dumps(once)}' > {DAEMON_JSON}; systemctl start docker")
    # The registry that the head will run.
    archive = nodes.disk(HEAD, "docker", "registry.tar")
    archive.write_bytes(b"".join(client.images.get(registry).save(named=True)))
    found.on(HEAD, f"docker load --quiet --input /var/lib/docker/registry.tar; docker tag {registry} {REGISTRY}")
    archive.unlink()
    digests = [build(found, layers) for layers in (LAYERS, {"other": 1 << 20})]
    write_inventory(where, digests[0])
    return Scene(client, where, digests[0])


def write_inventory(where: Path, digest: str) -> None:
    """An inventory of the three hosts with the lab's values, reached by this machine's own engine."""

    def host(rank: str) -> dict[str, Any]:
        number = RANKS.index(rank)
        role = "worker" if number else "head"
        return {
            "fleet_rank": number,
            "fleet_role": role,
            "fleet_address": ADDRESS[rank],
            "fleet_fabric": {other: ADDRESS[rank] for other in RANKS if other != rank},
            "fleet_engram_dir": "/srv/engram",
        }

    groups = {"head": {"hosts": {HEAD: host(HEAD)}}, "workers": {"hosts": {rank: host(rank) for rank in RANKS[1:]}}}
    values = {
        "ansible_connection": "community.docker.docker",
        "ansible_user": "ops",
        "ansible_python_interpreter": "/usr/bin/python3",
        "fleet_lab_engine": "sim",
        "fleet_lab_engram_config": campaign.engram_config(),
        "fleet_image_base": {"repository": REPOSITORY, "tag": "dev-dsv41", "digest": digest},
        "fleet_image_builds_extra": {digest: {"engram_split": "rows", "sglang": "0", "flashinfer": "0", "build": "0"}},
        "fleet_image_registry": {"image": REGISTRY, "alias": "lockstep-registry", "port": 5100},
    }
    (where / "hosts.yml").write_text(yaml.safe_dump({"fleet": {"children": groups}}))
    own = where / "group_vars" / "fleet"
    own.mkdir(parents=True)
    (own / "trouble.yml").write_text(yaml.safe_dump(values))
    (where / "group_vars" / "all").symlink_to(ROOT / "group_vars" / "all")
    for name in ("engine", "engram", "fleet"):
        (own / f"{name}.yml").symlink_to(ROOT / "inventory/lab/group_vars/fleet" / f"{name}.yml")


@pytest.fixture
def empty(scene) -> None:
    """No rank has an image of the base, whatever it is called."""
    for rank in RANKS:
        left = "docker images --quiet --no-trunc --filter reference='*/lmsysorg/sglang*' | sort -u"
        scene.on(rank, f"{left} | xargs -r docker image rm --force")


def trust_plain_http(scene: Scene, rank: str, registry: str) -> None:
    """List a registry in a host's daemon.json and reload the engine, as the next step says."""
    config = json.loads(scene.on(rank, f"cat {DAEMON_JSON}"))
    config["insecure-registries"].append(registry)
    listed = f"docker info --format '{{{{json .RegistryConfig.IndexConfigs}}}}' | grep -qF '{registry}'"
    scene.on(
        rank,
        f"echo '{json.dumps(config)}' > {DAEMON_JSON}; systemctl reload docker; "
        f"for try in $(seq 600); do {listed} && exit; sleep 0.1; done; exit 1",
    )


def push_again(scene: Scene, rank: str) -> None:
    """Push the base from a rank that holds it, under another tag: the hub's own stays moved."""
    again = f"{REPOSITORY}:again"
    scene.on(rank, f"docker tag {TAG} {again}; docker push --quiet {again}; docker image rm {again}")


# --- the hub, pulled from by the role ---------------------------------------------------------------------------------


def test_a_moved_tag_does_not_matter_until_the_pinned_build_is_gone(scene, empty):
    moved = scene.on(SECOND, f"docker pull -q {TAG}; docker image inspect --format '{{{{.Id}}}}' {TAG}").split()[-1]
    done = scene.pull(SECOND)
    assert done.rc == 0, done.text
    assert scene.digest in scene.on(SECOND, f"docker image inspect --format '{{{{.RepoDigests}}}}' {TAG}")
    kept = scene.on(SECOND, f"docker images --no-trunc --format '{{{{.Tag}}}} {{{{.ID}}}}' {REPOSITORY}")
    assert re.search(rf"^dev-dsv41-{moved[7:19]}-20[0-9]{{6}} {moved}$", kept, re.MULTILINE)

    at = f"http://{ADDRESS[HUB]}:{topology.HUB_PORT}/v2/lmsysorg/sglang/manifests/{scene.digest}"
    with urllib.request.urlopen(urllib.request.Request(at, method="DELETE"), timeout=60) as answer:
        assert answer.status == HTTPStatus.ACCEPTED
    before = scene.images(THIRD)
    gone = scene.pull(SECOND, THIRD)
    assert stats(gone) == {SECOND: (0, 0), THIRD: (1, 0)}
    said = named(gone, THIRD, "missing_digest")
    assert said["found"].startswith(f"manifest for {REPOSITORY}@{scene.digest} not found")
    assert said["expected"] == f"{REPOSITORY}@{scene.digest}"
    scene.settles(THIRD, before)

    push_again(scene, SECOND)
    assert stats(scene.pull(SECOND, THIRD)) == {SECOND: (0, 0), THIRD: (0, 2)}


def test_a_rank_that_may_not_speak_plain_http(scene, empty):
    registry = f"{ADDRESS[HUB]}:{topology.HUB_PORT}"
    repository = f"{registry}/lmsysorg/sglang"
    trust_plain_http(scene, HEAD, registry)
    before = scene.images(SECOND)
    done = scene.pull(HEAD, SECOND, repository=repository)
    assert stats(done) == {HEAD: (0, 2), SECOND: (1, 0)}
    said = named(done, SECOND, "plain_http")
    assert said["found"] == f'Get "https://{registry}/v2/": http: server gave HTTP response to HTTPS client'
    assert said["expected"] == f"{repository}@{scene.digest}"
    assert "insecure-registries in /etc/docker/daemon.json" in said["next step"]
    scene.settles(SECOND, before)

    trust_plain_http(scene, SECOND, registry)
    assert stats(scene.pull(HEAD, SECOND, repository=repository)) == {HEAD: (0, 0), SECOND: (0, 2)}


@pytest.fixture
def gate(scene, tmp_path) -> str:
    """The hub's images again, behind TLS by a CA that nobody knows, for who has a login; the registry's name."""
    certificates(tmp_path)
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    (tmp_path / "config.yml").write_text(GATE_CONFIG)
    api = scene.client.api
    made = api.create_container(
        hub.image(scene.client),
        ["serve", "/gate/config.yml"],
        name=GATE,
        labels={outer.PART: "hub"},
        volumes=[STORAGE, "/gate"],
        host_config=api.create_host_config(
            binds=[f"{nodes.disk(HUB)}:{STORAGE}", f"{tmp_path}:/gate:ro"], network_mode=topology.LAN
        ),
        networking_config=api.create_networking_config(
            {topology.LAN: api.create_endpoint_config(ipv4_address=ADDRESS[GATE])}
        ),
    )
    scene.client.containers.get(made["Id"]).start()
    scene.listens(HEAD, f"{ADDRESS[GATE]}:5000")
    return f"{ADDRESS[GATE]}:5000"


def test_ranks_without_the_ca_or_without_a_login(scene, gate, empty, tmp_path):
    repository = f"{gate}/lmsysorg/sglang"
    ca = (tmp_path / "ca.crt").read_text()
    secrets = [PASSWORD, base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()]

    def trust(rank: str) -> None:
        scene.on(rank, f"mkdir -p /etc/docker/certs.d/{gate}; echo '{ca}' > /etc/docker/certs.d/{gate}/ca.crt")

    def login(rank: str, password: str = PASSWORD) -> None:
        command = f"sudo docker login --username {USER} --password-stdin {gate}"
        assert "Login Succeeded" in scene.on(rank, f"su ops -c '{command}' <<< {password} 2>&1")

    def pull() -> Played:
        done = scene.pull(*RANKS, repository=repository)
        assert [word for word in secrets if word in done.text] == []
        return done

    def refused(done: Played, rank: str, kind: str, found: str, step: str) -> None:
        said = named(done, rank, kind)
        assert found in said["found"]
        assert said["expected"] == f"{repository}@{scene.digest}"
        assert step in said["next step"]
        scene.settles(rank, before[rank])

    before = {rank: scene.images(rank) for rank in RANKS}
    trust(HEAD)
    login(HEAD)
    trust(SECOND)
    with pytest.raises(LabError, match="401 Unauthorized"):
        login(SECOND, "wrong")
    done = pull()
    assert stats(done) == {HEAD: (0, 2), SECOND: (1, 0), THIRD: (1, 0)}
    refused(done, SECOND, "auth", "no basic auth credentials", "sudo docker login <registry>")
    refused(done, THIRD, "tls", "x509: certificate signed by unknown", "/etc/docker/certs.d/<registry>/ca.crt")

    login(SECOND)
    trust(THIRD)
    login(THIRD)
    old = base64.b64encode(f"{USER}:old".encode()).decode()
    scene.on(THIRD, f"""sed -i 's/"auth": ".*"/"auth": "{old}"/' /root/.docker/config.json""")
    done = pull()
    assert stats(done) == {HEAD: (0, 0), SECOND: (0, 2), THIRD: (1, 0)}
    refused(done, THIRD, "auth", "unauthorized: authentication required", "sudo docker login <registry>")

    login(THIRD)
    assert stats(pull()) == {HEAD: (0, 0), SECOND: (0, 0), THIRD: (0, 2)}


def test_a_rank_that_has_pulled_too_often(scene, empty):
    """The simulator of a limit stands before the hub, for this rank only."""
    scene.on(SECOND, f"cat > /root/simulator.py <<'END'\n{SIMULATOR}\nEND")
    scene.on(SECOND, "systemd-run --quiet --unit=simulator python3 -u /root/simulator.py")
    scene.listens(SECOND, "127.0.0.1:5001")
    rule = f"OUTPUT --protocol tcp --destination {ADDRESS[HUB]} --dport 5000 --jump REDIRECT --to-ports 5001"
    scene.on(SECOND, f"iptables --table nat --insert {rule}")
    before = scene.images(SECOND)
    try:
        done = scene.pull(HEAD, SECOND)
    finally:
        scene.on(SECOND, f"iptables --table nat --delete {rule}")
    assert stats(done) == {HEAD: (0, 2), SECOND: (1, 0)}
    said = named(done, SECOND, "rate_limit")
    assert said["found"] == "toomanyrequests: You have reached your unauthenticated pull rate limit."
    assert said["next step"] == "log in on this rank (sudo docker login <registry>), or wait and run again"
    scene.settles(SECOND, before)
    # Nobody asks again and again where asking is what is too much.
    assert scene.on(SECOND, "journalctl --unit simulator | grep --count '\" 429 '").strip() == "1"
    scene.on(SECOND, "systemctl stop simulator")
    assert stats(scene.pull(HEAD, SECOND)) == {HEAD: (0, 0), SECOND: (0, 2)}


def damage(path: Path) -> bytes:
    """Change the byte in the middle of a file; what it was before."""
    right = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(right) // 2)
        file.write(bytes([right[len(right) // 2] ^ 255]))
    return right


def big_layer(registry: Path) -> Path:
    """The blob of the base's big layer in a registry's storage."""
    (blob,) = [path for path in registry.rglob("data") if path.is_file() and path.stat().st_size >= LAYERS["big"]]
    return blob


def test_a_damaged_layer_in_the_hub(scene, empty):
    assert scene.pull(HEAD).rc == 0
    blob = big_layer(nodes.disk(HUB))
    right = damage(blob)
    before = scene.images(SECOND)
    done = scene.pull(HEAD, SECOND)
    assert stats(done) == {HEAD: (0, 0), SECOND: (1, 0)}
    said = named(done, SECOND, "corrupt")
    assert said["found"] == f"filesystem layer verification failed for digest sha256:{blob.parent.name}"
    assert "remove that blob from the registry's storage, restart it, push the image anew" in said["next step"]
    scene.settles(SECOND, before)

    # As it says; the head still holds the image.
    blob.unlink()
    scene.client.containers.get(HUB).restart(timeout=1)
    scene.listens(HEAD, f"{ADDRESS[HUB]}:{topology.HUB_PORT}")
    push_again(scene, HEAD)
    assert blob.read_bytes() == right
    assert stats(scene.pull(HEAD, SECOND)) == {HEAD: (0, 0), SECOND: (0, 2)}


def test_a_connection_that_is_cut_in_the_middle_of_a_layer(scene, empty):
    """Of two ranks every connection ends by a reset when this much has come over it; only one of them tries again."""
    most = f"--match connbytes --connbytes {CUT_AT}: --connbytes-dir reply --connbytes-mode bytes"
    rule = f"OUTPUT --protocol tcp --dport {topology.HUB_PORT} {most} --jump REJECT --reject-with tcp-reset"
    before = scene.images(THIRD)
    came = scene.received(SECOND)
    for rank in (SECOND, THIRD):
        scene.on(rank, f"iptables --insert {rule}")
    try:
        done = scene.pull(*RANKS)
    finally:
        for rank in (SECOND, THIRD):
            scene.on(rank, f"iptables --delete {rule}")
    assert stats(done) == {HEAD: (0, 2), SECOND: (0, 2), THIRD: (1, 0)}
    said = named(done, THIRD, "cut")
    assert said["found"].endswith("read: connection reset by peer")
    assert "then run again" in said["next step"]
    scene.settles(THIRD, before)
    # The other engine went on at the byte.
    assert sum(LAYERS.values()) < scene.received(SECOND) - came < 1.05 * sum(LAYERS.values())
    assert stats(scene.pull(*RANKS)) == {HEAD: (0, 0), SECOND: (0, 0), THIRD: (0, 2)}


# --- the fleet's registry, by the whole playbook ----------------------------------------------------------------------


def test_a_full_disk_on_one_rank_and_then_a_damaged_layer_in_the_fleets_registry(scene, empty):
    files = "cat /etc/hosts /etc/docker/daemon.json; docker ps --all --quiet"
    untouched = {rank: scene.on(rank, files) for rank in RANKS}
    before = scene.images(THIRD)
    free = "$(stat --file-system --format '%a * %S' /var/lib/docker)"
    scene.on(THIRD, f"fallocate --length $(({free} - {LAYERS['big'] // 2})) /var/lib/docker/filler")
    done = scene.converge()
    assert done.rc != 0
    said = named(done, THIRD, "disk_full")
    assert re.fullmatch(r"write /var/lib/docker/tmp/\S+: no space left on device", said["found"])
    assert said["expected"].endswith(f"from {ADDRESS[HEAD]}:5100")
    assert said["next step"] == "free space under the engine's data root on this rank, then run again"
    scene.settles(THIRD, before)
    ids = f"docker image inspect --format '{{{{.Id}}}}' {TAG} {OVERLAY}"
    right = scene.on(HEAD, ids)
    assert scene.on(SECOND, ids) == right
    assert {rank: scene.on(rank, files) for rank in RANKS} == untouched

    scene.on(THIRD, "rm /var/lib/docker/filler")
    blob = big_layer(nodes.disk(HEAD, "docker", "volumes", "lockstep-registry"))
    damage(blob)
    done = scene.converge()
    assert done.rc != 0
    said = named(done, THIRD, "corrupt")
    assert said["found"] == f"filesystem layer verification failed for digest sha256:{blob.parent.name}"
    assert f"remove the volume lockstep-registry on the rank that hands on ({ADDRESS[HEAD]})" in said["next step"]
    scene.settles(THIRD, before)

    scene.on(HEAD, "docker volume rm lockstep-registry")
    came = {rank: scene.received(rank) for rank in (HEAD, SECOND)}
    done = scene.converge()
    assert done.rc == 0, done.text
    assert {scene.on(rank, ids) for rank in RANKS} == {right}
    assert stats(done)[SECOND] == (0, 0)
    # Nothing comes from the hub again, and nothing to a rank that has it.
    assert all(scene.received(rank) - came[rank] < 1 << 20 for rank in came)
    assert {rank: scene.on(rank, files) for rank in RANKS} == untouched
