"""The night's move on the lab: spark2 is too full to pack, its old shards go to spark1 over the fabric, then it packs.

The tests run in order over one lab; hashes are asked of the hosts' own ``sha256sum``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fleet
import pytest
from fleet import ENGRAM_DIR, HEAD, SECOND, THIRD
from lockstep_lab import campaign, faults, nodes

pytestmark = pytest.mark.timeout(900)

OLD = campaign.OLD_SHARDS
ARCHIVE = campaign.ARCHIVE
NAMES = ["engram-l1-r1of2.bin", "engram-l14-r1of2.bin"]
OWN = ["engram-l1-r1of3.bin", "engram-l14-r1of3.bin"]
MOVE = ("-l", SECOND, "-e", f"archive_from={OLD}", "-e", f"archive_to={HEAD}:{ARCHIVE}")

seen: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def night() -> None:
    fleet.lab("reset", "--engine", "sim")


def playing_of(entry: str, *arguments: str) -> subprocess.Popen[str]:
    """A playbook under way."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), entry, *arguments]
    return subprocess.Popen(command, cwd=fleet.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines(host: str, command: str) -> list[str]:
    return fleet.on(host, command).splitlines()


def test_spark2_is_too_full_and_is_told_what_to_do() -> None:
    said = fleet.play("pack_engram.yml", "-l", SECOND, "--check")
    assert said.rc != 0
    assert re.search(r"rank 1: not enough room in /srv/dsv41/engram\n +found: [\d,]+ bytes available", said.text)
    assert "archive_engram.yml" in said.text


def test_a_prediction_changes_nothing() -> None:
    seen["sums"] = fleet.on(SECOND, f"cd {OLD} && sha256sum *.bin")
    before = fleet.hosts_now()
    said = fleet.play("archive_engram.yml", *MOVE, "--check", "--diff")
    assert said.rc == 0, said.text
    assert said.recap == {SECOND: 1}
    for name in NAMES:
        assert re.search(rf"^-{SECOND}:{OLD}/{name}, [\d,]+ bytes$", said.text, re.MULTILINE)
        assert re.search(rf"^\+{HEAD}:{ARCHIVE}/{name}, [\d,]+ bytes$", said.text, re.MULTILINE)
    assert fleet.hosts_now() == before


def test_the_old_shards_go_over_the_fabric_and_only_then_from_spark2() -> None:
    link = fleet.on(HEAD, "ip -brief -4 address | grep -w 10.0.22.1").split()[0].partition("@")[0]

    def crossed() -> int:
        """Bytes that have come to the head on its link to spark2."""
        return int(fleet.on(HEAD, f"cat /sys/class/net/{link}/statistics/rx_bytes"))

    before = crossed()
    size = sum(int(line) for line in lines(SECOND, f"stat --format %s {OLD}/*.bin"))
    said = fleet.play("archive_engram.yml", *MOVE)
    assert said.rc == 0, said.text
    assert said.recap == {SECOND: 1}
    assert size < crossed() - before < size * 1.1
    assert lines(HEAD, f"cd {ARCHIVE} && sha256sum --check --strict SHA256SUMS") == [f"{name}: OK" for name in NAMES]
    assert fleet.on(HEAD, f"cd {ARCHIVE} && sha256sum *.bin") == seen["sums"]
    assert lines(SECOND, f"ls {OLD}") == ["MOVED.txt"]
    note = fleet.on(SECOND, f"cat {OLD}/MOVED.txt")
    assert [line for line in note.splitlines() if not line.startswith("#")] == seen["sums"].splitlines()
    assert note.count(f"to {HEAD}:{ARCHIVE}, ") == len(NAMES)
    for host in (HEAD, SECOND):
        # Nobody is left with a lock of the move, and what it left is root's alone and gone at the next boot.
        assert lines(host, "find /proc/[0-9]*/fd -lname '/run/lockstep/*' 2>/dev/null || true") == []
        assert {line.split()[0] for line in lines(host, "stat --format '%A %n' /run/lockstep/*")} == {"-rw-------"}


def test_a_second_run_finds_nothing_to_do() -> None:
    before = fleet.hosts_now()
    said = fleet.play("archive_engram.yml", *MOVE)
    assert (said.rc, said.recap) == (0, {SECOND: 0}), said.text
    assert fleet.hosts_now() == before


def test_now_spark2_has_the_room() -> None:
    said = fleet.play("pack_engram.yml", "-l", SECOND, "--check")
    # Whatever else it lacks before the first launch, it is no longer room.
    assert "not enough room" not in said.text


def test_an_archive_of_two_ranks_does_not_serve_three() -> None:
    before = fleet.hosts_now()
    said = fleet.play("restore_engram.yml", "-l", SECOND, "-e", f"archive_from={HEAD}:{ARCHIVE}")
    assert said.rc != 0
    assert (
        f"{SECOND}, rank 1: {HEAD}:{ARCHIVE} does not hold this rank's shards; nothing was put into service"
        in said.text
    )
    assert f"{NAMES[0]}: TP 2, not 3; split heads, not rows" in said.text
    assert fleet.hosts_now() == before


def test_the_fleet_packs_and_serves() -> None:
    said = fleet.serve("e8")
    assert said.rc == 0, said.text


def test_a_shard_in_service_stays() -> None:
    before = fleet.hosts_now()
    named = ("-l", SECOND, "-e", f"archive_to={THIRD}:/srv/dsv41/of-spark2", "-e", f"archive_files={OWN[0]}")
    said = fleet.play("archive_engram.yml", *named)
    assert said.rc != 0
    assert f"{SECOND}: {OWN[0]} is in service" in said.text
    assert "archive_in_service=true" in said.text
    # Without a name, only what the plan does not need would go: nothing here.
    said = fleet.play("archive_engram.yml", *named[:4])
    assert (said.rc, said.recap) == (0, {SECOND: 0}), said.text
    assert fleet.hosts_now() == before


def test_a_shard_of_this_rank_comes_back_and_the_archive_keeps_its_copy() -> None:
    there = f"/srv/dsv41/archive of {SECOND}"
    nodes.run(faults.host(THIRD), ["mkdir", "-p", there])
    sums = fleet.on(SECOND, f"cd {ENGRAM_DIR[SECOND]} && sha256sum engram-*.bin")
    told = f'{{"archive_to": "{THIRD}:{there}", "archive_files": ["{OWN[0]}", "{OWN[1]}"], "archive_in_service": true}}'
    said = fleet.play("archive_engram.yml", "-l", SECOND, "-e", told)
    assert said.rc == 0, said.text
    assert lines(SECOND, f"ls {ENGRAM_DIR[SECOND]} | grep -c 'bin$' || true") == ["0"]
    kept = fleet.on(THIRD, f"cd '{there}' && stat --format '%n %i %Y %s' *")
    back = ("-l", SECOND, "-e", f'{{"archive_from": "{THIRD}:{there}"}}')
    said = fleet.play("restore_engram.yml", *back)
    assert (said.rc, said.recap) == (0, {SECOND: 1}), said.text
    assert fleet.on(SECOND, f"cd {ENGRAM_DIR[SECOND]} && sha256sum engram-*.bin") == sums
    assert fleet.on(THIRD, f"cd '{there}' && stat --format '%n %i %Y %s' *") == kept
    assert fleet.play("restore_engram.yml", *back).recap == {SECOND: 0}
    # Their manifests vouch for them: there is nothing to pack.
    said = fleet.play("pack_engram.yml", "-l", SECOND)
    assert (said.rc, said.recap) == (0, {SECOND: 0}), said.text


def test_an_interrupted_fabric_ends_the_move_and_the_next_run_goes_on() -> None:
    """The link is cut for real; nothing hangs, nothing is lost."""
    place = "/home/ops/large"
    nodes.run(
        faults.host(HEAD),
        ["sh", "-c", f"mkdir -p {place} && head -c 800000000 /dev/urandom > {place}/engram-l1-r0of2.bin"],
    )
    sums = fleet.on(HEAD, f"cd {place} && sha256sum *.bin")
    move = ("-l", HEAD, "-e", f"archive_from={place}", "-e", f"archive_to={THIRD}:/home/ops/large")
    # On the receiver, by the shell that watches it: the move is short.
    cut = "iptables -I INPUT -s 10.0.23.1 -j DROP; iptables -I OUTPUT -d 10.0.23.1 -j DROP"
    mend = "iptables -D INPUT -s 10.0.23.1 -j DROP; iptables -D OUTPUT -d 10.0.23.1 -j DROP"
    watch = "until [ -e /home/ops/large/engram-l1-r0of2.bin.partial.json ]; do sleep 0.05; done"
    with playing_of("archive_engram.yml", *move) as playing:
        try:
            fleet.on(THIRD, f"{watch}; {cut}")
            text = playing.communicate(timeout=150)[0]
        finally:
            fleet.on(THIRD, mend)
    assert playing.returncode != 0
    assert "the connection to the other side was lost" in text
    assert "next step: run again" in text
    assert fleet.on(HEAD, f"cd {place} && sha256sum *.bin") == sums
    said = fleet.play("archive_engram.yml", *move)
    assert said.rc == 0, said.text
    assert fleet.on(THIRD, "cd /home/ops/large && sha256sum --check --strict SHA256SUMS && sha256sum *.bin").endswith(
        sums
    )
    assert lines(HEAD, f"ls {place}") == ["MOVED.txt"]


def test_the_listing_shows_the_fleets_shards_and_what_could_go() -> None:
    before = fleet.hosts_now()
    said = fleet.play("list_engram.yml")
    assert (said.rc, set(said.recap.values())) == (0, {0}), said.text
    assert fleet.hosts_now() == before
    for host, rank in zip(fleet.HOSTS, range(3), strict=True):
        row = rf"^{host}:{ENGRAM_DIR[host]} +engram-l1-r{rank}of3\.bin +3 +rows +{rank} +[\d,]+ .* manifest +yes$"
        assert re.search(row, said.text, re.MULTILINE), said.text
    row = rf"^{HEAD}:{ARCHIVE} +{re.escape(NAMES[0])} +2 +heads +1 +[\d,]+ .*Z from {SECOND}:{OLD} +SHA256SUMS +no$"
    assert re.search(row, said.text, re.MULTILINE), said.text
    size = sum(int(line) for line in lines(HEAD, f"stat --format %s {ARCHIVE}/*.bin"))
    assert f"{HEAD}: 2 files that this fleet's plan does not need; {size:,} bytes would be free" in said.text
