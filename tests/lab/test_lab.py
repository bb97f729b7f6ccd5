"""The lab itself: what its hosts are, the night's starting state, the way back to it, and that nothing stays.

Asked past the lab's own code wherever that is possible: docker on the hosts over SSH, ping, the registry's own API.
The tests run in order over one lab, which is brought up at the start and taken down at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest
import yaml
from lockstep_lab import faults, machine, paths

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("spark1", "spark2", "spark3")
SITE = "/usr/local/lib/python3.11/dist-packages"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
BASE = "hub.lab:5000/lmsysorg/sglang:dev-dsv41"


def lab(*arguments: str, rc: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "lab")}
    command = [sys.executable, "-m", "lockstep_lab", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == rc, done.stderr
    return done.stdout + done.stderr


def ssh(host: str, command: str, *, known_hosts: Path | None = None) -> subprocess.CompletedProcess[str]:
    generated = ROOT / "inventory" / "lab" / "generated"
    known = known_hosts or generated / "known_hosts"
    address = {"spark1": "10.77.0.11", "spark2": "10.77.0.12", "spark3": "10.77.0.13"}[host]
    options = [f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes", "BatchMode=yes", "GlobalKnownHostsFile=none"]
    flags = [word for option in options for word in ("-o", option)]
    line = ["ssh", "-i", str(generated / "ssh" / "ops"), *flags, f"ops@{address}", command]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)


def on(host: str, command: str) -> str:
    done = ssh(host, command)
    assert done.returncode == 0, f"{host}: {command}\n{done.stdout}{done.stderr}"
    return done.stdout


def image_of(host: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(on(host, f"sudo docker image inspect {BASE}"))[0]
    return found


def made() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / "inventory/lab/generated/lab.yml").read_text())
    return values


@pytest.fixture(scope="module")
def before() -> machine.Machine:
    lab("status")  # starts the machine's Docker Engine, which turns forwarding on for good: not the lab's doing
    lab("down")
    return machine.look()


@pytest.fixture(scope="module", autouse=True)
def running(before: machine.Machine) -> Iterator[None]:
    assert before["settings"], "this machine shows kernel settings"
    lab("up", "--engine", "sim")
    yield
    lab("down")


def test_ansible_reaches_the_fleet_by_the_default_inventory():
    command = [str(Path(sys.executable).with_name("ansible")), "fleet", "-m", "ansible.builtin.ping"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == 3
    assert "DEPRECATION" not in done.stderr


def test_host_keys_are_those_inside_the_hosts_and_others_are_refused(tmp_path):
    lines = (ROOT / "inventory/lab/generated/known_hosts").read_text().splitlines()
    client = docker.from_env()
    for line, host in zip(lines, HOSTS, strict=True):
        inside = client.containers.get(host).exec_run("cat /etc/ssh/host/ssh_host_ed25519_key.pub").output.decode()
        assert line.split()[1:] == inside.split()[:2]
        assert host in line.split()[0].split(",")
    swapped = tmp_path / "known_hosts"
    names = [line.split()[0] for line in lines]
    keys = [line.split()[1:] for line in lines]
    swapped.write_text(
        "".join(f"{name} {' '.join(key)}\n" for name, key in zip(names, keys[1:] + keys[:1], strict=True))
    )
    refused = ssh("spark1", "true", known_hosts=swapped)
    assert refused.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr


def test_password_and_root_logins_are_closed():
    generated = ROOT / "inventory/lab/generated"
    command = ["ssh", "-i", str(generated / "ssh/ops"), "-o", f"UserKnownHostsFile={generated}/known_hosts"]
    for target, option in (
        ("root@10.77.0.11", "PreferredAuthentications=publickey"),
        ("ops@10.77.0.11", "PreferredAuthentications=password"),
    ):
        done = subprocess.run(
            [*command, "-o", "BatchMode=yes", "-o", option, target, "true"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 255
        assert "Permission denied" in done.stderr


def test_the_fabric_is_a_triangle_of_point_to_point_links():
    links = {
        ("spark1", "10.0.22.1"): "10.0.22.2",
        ("spark1", "10.0.23.1"): "10.0.23.3",
        ("spark2", "10.0.33.2"): "10.0.33.3",
        ("spark3", "10.0.23.3"): "10.0.23.1",
    }
    for (host, own), peer in links.items():
        route = on(host, f"ip -json route get {peer}")
        assert json.loads(route)[0]["prefsrc"] == own
        on(host, f"ping -c 1 -w 20 -I {own} {peer}")
    # No host has an address on a link that is not its own, and the third one's link is out of its reach.
    assert ssh("spark3", "ping -c 1 -W 1 10.0.22.1").returncode != 0


def test_a_host_is_debian_13_with_its_own_engine_under_systemd():
    for host in HOSTS:
        assert on(host, "sudo docker version --format '{{.Server.Version}}'").startswith("26.1.")
        assert on(host, "systemctl is-system-running --wait || true").strip() == "running"
        assert on(host, "/usr/bin/python3 -c 'import sys, requests; print(sys.version_info[:2])'").strip() == "(3, 13)"
        assert "VERSION_CODENAME=trixie" in on(host, "cat /etc/os-release")
    assert len({on(host, "sudo docker info --format '{{.ID}}'") for host in HOSTS}) == 3


def test_a_host_cannot_change_the_machine():
    for command in (
        "sysctl -w kernel.panic=7",
        "date -s 2020-01-01",
        "modprobe dummy",
        "mount -o remount,rw /proc/sys",
    ):
        if "remount" in command:
            continue
        assert ssh("spark1", f"sudo {command}").returncode != 0, command
    assert not docker.from_env().containers.get("spark1").attrs["HostConfig"]["Privileged"]


def test_two_builds_under_one_tag():
    first, moved = made()["fleet_lab_made"]["base"], made()["fleet_lab_made"]["moved"]
    repository = BASE.rpartition(":")[0]
    for host, build in (("spark1", first), ("spark2", first), ("spark3", moved)):
        found = image_of(host)
        assert (found["Id"], found["RepoDigests"]) == (build["id"], [f"{repository}@{build['digest']}"])
        assert found["RepoTags"] == [BASE]
    assert first["id"] != moved["id"]
    assert first["digest"] != moved["digest"]


def test_the_hub_serves_the_pin_although_its_tag_has_moved():
    first, moved = made()["fleet_lab_made"]["base"], made()["fleet_lab_made"]["moved"]
    for reference, digest in ((first["digest"], first["digest"]), ("dev-dsv41", moved["digest"])):
        url = f"http://10.77.0.10:5000/v2/lmsysorg/sglang/manifests/{reference}"
        answer = httpx.get(url, headers={"Accept": MANIFEST}, timeout=60)
        body = answer.raise_for_status().content
        assert f"sha256:{hashlib.sha256(body).hexdigest()}" == digest


def test_the_builds_differ_in_forty_python_files_of_the_engine():
    command = f"sudo docker run --rm {BASE} sh -c 'cd {SITE} && find sglang -name \"*.py\" -exec sha256sum {{}} +'"
    sums = {
        host: dict(reversed(line.split()) for line in on(host, command).splitlines()) for host in ("spark1", "spark3")
    }
    assert sums["spark1"].keys() == sums["spark3"].keys()
    different = {name for name, digest in sums["spark1"].items() if sums["spark3"][name] != digest}
    assert len(different) >= 40
    assert "sglang/srt/models/deepseek_v4.py" in different


def test_engram_directories_are_empty_and_spark2_is_too_full_to_pack():
    for host, path in (
        ("spark1", "/home/ops/dsv41-engram"),
        ("spark2", "/srv/dsv41/engram"),
        ("spark3", "/srv/dsv41/engram"),
    ):
        assert on(host, f"sudo find {path} -mindepth 1") == ""
    # TP2 `heads`, rank 1: the real tables give 101,379,729,008 bytes. These are a thousandth: 386748 and 392806 rows.
    sizes = on("spark2", "stat -c '%n %s' /home/ops/dsv41-engram-tp2/*").split()
    names = [f"/home/ops/dsv41-engram-tp2/engram-l{layer}-r1of2.bin" for layer in (1, 14)]
    assert sizes[::2] == sorted(names)
    rows = [(int(size) - 4096) / 264 for size in sizes[1::2]]
    assert all(
        abs(count - total / 2) < 1000 and count != total / 2
        for count, total in zip(rows, (386748, 392806), strict=True)
    )
    needed = 2 * 4096 + 264 * (2 * 386748 // 3 - 386748 // 3 + 2 * 392806 // 3 - 392806 // 3)
    free = int(on("spark2", "df --output=avail -B1 /srv/dsv41/engram | tail -1"))
    assert 0.8 * needed < free < needed
    assert ssh("spark2", f"sudo fallocate -l {needed} /srv/dsv41/engram/probe").returncode != 0
    on("spark2", "sudo rm -f /srv/dsv41/engram/probe")


def test_what_one_host_does_to_its_images_no_other_host_sees():
    read = f"sudo docker run --rm {BASE} sha256sum {SITE}/sglang/srt/models/deepseek_v4.py"
    expected = on("spark2", read)
    on("spark1", f"sudo docker run --rm {BASE} sh -c 'echo >> {SITE}/sglang/srt/models/deepseek_v4.py'")
    assert on("spark1", read) == expected
    on(
        "spark1",
        f"printf 'FROM {BASE}\\nRUN echo changed >> {SITE}/sglang/version.py\\n' | sudo docker build -q -t probe -",
    )
    # What a host pushes is byte for byte what the hub has: layers that others hold need not travel again.
    probe = "hub.lab:5000/probe:1"
    pushed = on("spark2", f"sudo docker tag {BASE} {probe} && sudo docker push {probe} && sudo docker rmi {probe}")
    assert made()["fleet_lab_made"]["base"]["digest"] in pushed
    on("spark1", f"sudo docker rmi -f probe {BASE} && sudo docker system prune -af")
    assert on("spark1", "sudo docker images -aq") == ""
    assert on("spark2", read) == expected
    on("spark1", f"sudo docker pull -q {BASE.rpartition(':')[0]}@{made()['fleet_lab_made']['base']['digest']}")


def test_a_restarted_host_comes_back_with_what_it_had():
    before = on(
        "spark2", "sudo docker images -aq --no-trunc; df --output=target /srv/dsv41; ls /home/ops; sudo ls /srv/models"
    )
    docker.from_env().containers.get("spark2").restart(timeout=20)
    deadline = time.monotonic() + 60
    while ssh("spark2", "sudo docker info").returncode and time.monotonic() < deadline:
        time.sleep(0.5)
    after = on(
        "spark2", "sudo docker images -aq --no-trunc; df --output=target /srv/dsv41; ls /home/ops; sudo ls /srv/models"
    )
    assert after == before


def test_faults_are_real_and_end():
    docker_info = "sudo timeout 20 docker info"
    with faults.engine_down("spark3"):
        assert ssh("spark3", docker_info).returncode != 0
    on("spark3", docker_info)
    with faults.unreachable("spark3"):
        assert ssh("spark3", "true").returncode == 255
    on("spark3", "true")
    with faults.link_down("spark1", "spark3"):
        assert ssh("spark1", "ping -c 1 -W 1 10.0.23.3").returncode != 0
        on("spark1", "ping -c 1 -w 20 10.77.0.13")
    on("spark1", "ping -c 1 -w 20 10.0.23.3")
    with faults.disk_full("spark2", "/srv/dsv41"):
        assert "No space left" in ssh("spark2", "sudo dd if=/dev/zero of=/srv/dsv41/x bs=64k count=1").stderr
    on("spark2", "sudo rm /srv/dsv41/x; sudo dd if=/dev/zero of=/srv/dsv41/x bs=64k count=1; sudo rm /srv/dsv41/x")
    boot = on("spark3", "stat -c %Y /proc/1")
    faults.power_cycle("spark3")
    assert on("spark3", "stat -c %Y /proc/1") != boot
    assert image_of("spark3")["Id"] == made()["fleet_lab_made"]["moved"]["id"]


def test_free_spark2_moves_the_old_shards_with_sums_that_agree():
    before = on("spark2", "cd /home/ops/dsv41-engram-tp2 && sha256sum *.bin")
    lab("free-spark2")
    archive = "/home/ops/archive/dsv41-engram-tp2-spark2"
    assert on("spark1", f"cd {archive} && cat SHA256SUMS && sha256sum --check --quiet SHA256SUMS") == before
    assert on("spark2", "cd /home/ops/dsv41-engram-tp2 && ls && head -1 MOVED.txt") == f"MOVED.txt\nspark1:{archive}\n"
    on("spark2", "sudo fallocate -l 69000000 /srv/dsv41/engram/probe && sudo rm /srv/dsv41/engram/probe")
    assert "nothing to move" in lab("free-spark2")


def test_reset_brings_the_night_back():
    keys = (ROOT / "inventory/lab/generated/known_hosts").read_text()
    on(
        "spark3",
        f"sudo docker rmi -f {BASE}; sudo touch /srv/dsv41/engram/x; echo '1.2.3.4 other' | sudo tee -a /etc/hosts",
    )
    begun = time.monotonic()
    lab("reset")
    took = time.monotonic() - begun
    test_two_builds_under_one_tag()
    test_engram_directories_are_empty_and_spark2_is_too_full_to_pack()
    assert "1.2.3.4" not in on("spark3", "cat /etc/hosts")
    assert (ROOT / "inventory/lab/generated/known_hosts").read_text() == keys
    assert took < 120, "a warm reset takes seconds, not a new start"


def test_up_leaves_a_running_lab_as_it_is():
    ids = {container.name: container.id for container in docker.from_env().containers.list()}
    assert "the lab runs already" in lab("up", "--engine", "sim")
    assert {container.name: container.id for container in docker.from_env().containers.list()} == ids


def test_down_leaves_nothing_but_named_caches(before):
    said = lab("down")
    assert str(paths.cache()) in said
    client = docker.from_env()
    mine = {"label": "lockstep.lab.part"}
    assert client.containers.list(all=True, filters=mine) == []
    assert client.networks.list(filters=mine) == []
    assert [volume.name for volume in client.volumes.list() if volume.attrs.get("Labels")] == []
    for path in (paths.STATE, paths.CONTROL, paths.GENERATED):
        assert not path.exists()
    assert str(paths.STATE) not in Path("/proc/self/mounts").read_text()
    losetup = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    assert str(paths.STATE) not in losetup
    assert not list(Path("/run").glob("lockstep-lab*"))
    assert machine.differences(before, machine.look()) == []
