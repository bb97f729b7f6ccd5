"""The SSH connection dies at random moments while a playbook runs on the lab; the next run ends right.

Killed are, in turn, the clients on this machine (the shared connection of each host and what uses it) and the sessions
on the hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fleet
import pytest
from crash import Histogram
from crash_scenes import LAYERS, shard_rows
from fleet import ENGRAM_DIR, HEAD, HOSTS, THIRD
from lockstep_lab import campaign, nodes

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("serving")]

SEED = "2026-11-29"
PACKING = "lockstep-engram-pack"
SIDES = ("client", "session")


@pytest.fixture(scope="module")
def histogram(request) -> Iterator[Histogram]:
    counted = Histogram("ssh")
    yield counted
    counted.show(request.config)


class Playing:
    """A playbook under way, with SSH connections of its own."""

    def __init__(self, entry: str, arguments: list[str], place: Path) -> None:
        self._place = place
        place.mkdir(exist_ok=True)
        self._out = place / "out"
        with self._out.open("w") as out:
            self._process = subprocess.Popen(
                [str(Path(sys.executable).with_name("ansible-playbook")), entry, *arguments, *through(place)],
                cwd=fleet.ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
            )

    def connections(self) -> dict[int, str]:
        """{process id: command line} of the ssh clients that this playbook started, those that stay behind included."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if line.startswith("ssh") and f"{self._place}/" in line:
                    found[int(process.name)] = line
        return found

    def kill_clients(self) -> int:
        """Kill them all; how many of them held a connection."""
        found = self.connections()
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return sum("[mux]" in line for line in found.values())

    def connected(self) -> None:
        """Wait until the first host is reached."""
        while not any("[mux]" in line for line in self.connections().values()):
            assert self._process.poll() is None, self.text
            time.sleep(0.02)

    def running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Wait for the end; its exit status."""
        status = self._process.wait(300)
        self.kill_clients()  # the idle ones, which would wait for the next playbook
        return status

    @property
    def text(self) -> str:
        return self._out.read_text()


def through(place: Path) -> list[str]:
    """Have a playbook keep its connections in a place."""
    return ["-e", f"ansible_control_path={place}/%%h"]


def kill_sessions() -> int:
    """Kill what sshd runs for the user on every host; how many hosts that was."""
    return sum(
        nodes.each(
            lambda host: fleet.on(host, "pkill -KILL -x sshd-session -u ops && echo 1 || echo 0") == "1\n", HOSTS
        )
    )


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    """{host: {shard: SHA-256 of its rows}}, from the checkpoint."""
    made = campaign.engram_checkpoint()
    return {
        host: {
            f"engram-l{layer}-r{rank}of3.bin": hashlib.sha256(shard_rows(made, layer, rank, 3)[3]).hexdigest()
            for layer in LAYERS
        }
        for rank, host in enumerate(HOSTS)
    }


def packed(host: str) -> dict[str, str]:
    """The shards of a host by the SHA-256 of their rows; no container and no file of a packing is left."""
    place = ENGRAM_DIR[host]
    assert fleet.on(host, f"docker ps --all --quiet --filter name={PACKING}") == ""
    names = fleet.on(host, f"ls -A {place}").split()
    shards = [name for name in names if name.endswith(".bin")]
    known = {*shards, *(f"{name}.manifest.json" for name in shards), ".engram-pack.lock", "MOVED.txt"}
    assert set(names) <= known, f"left behind: {set(names) - known}"
    assert len([name for name in names if name.endswith(".manifest.json")]) == len(shards)
    whole = fleet.on(host, f"cd {place} && sha256sum *.bin")
    for line in whole.splitlines():
        digest, name = line.split()
        assert digest in fleet.on(host, f"cat {place}/{name}.manifest.json")
    return {
        name: fleet.on(host, f"tail -c +4097 {place}/{name} | sha256sum").split()[0] for name in shards
    }  # fmt: skip


def nothing_wrong(host: str, right: dict[str, str]) -> None:
    """What stands under a final name is whole."""
    place = ENGRAM_DIR[host]
    for name in fleet.on(host, f"cd {place} && ls | grep 'bin$' || true").split():
        assert fleet.on(host, f"tail -c +4097 {place}/{name} | sha256sum").split()[0] == right[name]


def killed_and_played_again(
    entry: str,
    arguments: list[str],
    place: Path,
    moment: tuple[str, float],
    fresh: Callable[[], None],
    held: Callable[[], None],
) -> int:
    """Play, kill the connections so many seconds after the first ones stood, play again; how many were killed.

    ``fresh`` makes all as it was before, ``held`` is what must be true as soon as the first playbook has ended.
    """
    side, seconds = moment
    while True:
        fresh()
        playing = Playing(entry, arguments, place)
        playing.connected()
        time.sleep(seconds)
        if playing.running():
            break
        assert playing.end() == 0, playing.text
        seconds /= 2  # the machine is less busy than when the moment was drawn
    kills = playing.kill_clients() if side == "client" else kill_sessions()
    assert kills
    playing.end()
    held()
    again = fleet.play(entry, *arguments, *through(place))
    assert again.rc == 0, again.text
    return kills


def drawn(entry: str, arguments: list[str], place: Path, number: int) -> list[tuple[str, float]]:
    """Draw moments from the time that an undisturbed run takes, killing each side in turn."""
    playing = Playing(entry, arguments, place)
    playing.connected()
    began = time.monotonic()
    assert playing.end() == 0, playing.text
    takes = time.monotonic() - began
    source = random.Random(f"{SEED}/{entry}")  # noqa: S311 - drawn again the same by the seed
    return [(SIDES[turn % 2], source.uniform(0, takes * 0.85)) for turn in range(number)]


def test_packing(rows, histogram, tmp_path) -> None:
    def fresh() -> None:
        nodes.each(lambda host: fleet.on(host, f"rm -f {ENGRAM_DIR[host]}/engram-*"), HOSTS)

    def held() -> None:
        nodes.each(lambda host: nothing_wrong(host, rows[host]), HOSTS)

    fresh()
    for moment in drawn("pack_engram.yml", [], tmp_path, 4):
        kills = killed_and_played_again("pack_engram.yml", [], tmp_path, moment, fresh, held)
        assert dict(zip(HOSTS, nodes.each(packed, HOSTS), strict=True)) == rows
        histogram.count("pack, its SSH connection", moment[0], kills)
    assert fleet.play("pack_engram.yml").recap == dict.fromkeys(HOSTS, 0)


# --- archiving and restoring, between the third host and the first ----------------------------------------------------


def sums(host: str, place: str, pattern: str = "*.bin") -> dict[str, str]:
    """The files of a directory by their SHA-256."""
    text = fleet.on(host, f"cd '{place}' 2>/dev/null && sha256sum -- {pattern} 2>/dev/null || true")
    return {name: digest for digest, name in (line.split(maxsplit=1) for line in text.splitlines())}


def ended(host: str) -> bool:
    """No process of a move is left: none holds its lock."""
    return fleet.on(host, "for lock in /run/lockstep/*.lock; do flock -w 30 $lock true || echo held; done") == ""


def test_archiving(histogram, tmp_path) -> None:
    source, target = "/home/ops/crash source", "/home/ops/crash archive"
    old = campaign._old_shards()
    right = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(old.iterdir())}
    arguments = ["-l", THIRD, "-e", json.dumps({"archive_from": source, "archive_to": f"{HEAD}:{target}"})]

    def fresh() -> None:
        fleet.on(HEAD, f"rm -rf '{target}'")
        fleet.on(THIRD, f"rm -rf '{source}'")
        shutil.copytree(old, nodes.disk(THIRD, "disk", "ops") / "crash source")

    def held() -> None:
        here = sums(THIRD, source)
        there = sums(HEAD, target)
        assert {**there, **here} == right
        assert right.items() >= there.items()
        if there.keys() - here.keys():
            fleet.on(HEAD, f"cd '{target}' && sha256sum --check --strict SHA256SUMS")

    fresh()
    for moment in drawn("archive_engram.yml", arguments, tmp_path, 4):
        kills = killed_and_played_again("archive_engram.yml", arguments, tmp_path, moment, fresh, held)
        held()
        assert fleet.on(THIRD, f"ls -A '{source}'").split() == ["MOVED.txt"]
        assert set(fleet.on(HEAD, f"ls -A '{target}'").split()) == {*right, "SHA256SUMS"}
        assert ended(HEAD)
        assert ended(THIRD)
        histogram.count("archive, its SSH connection", moment[0], kills)
    assert not any(fleet.play("archive_engram.yml", *arguments).recap.values())
    fleet.on(THIRD, f"rm -r '{source}'")
    fleet.on(HEAD, f"rm -r '{target}'")


def test_restoring(rows, histogram, tmp_path) -> None:
    archive, place = "/home/ops/crash archive", ENGRAM_DIR[THIRD]
    packing = fleet.play("pack_engram.yml")
    assert packing.rc == 0, packing.text
    kept = nodes.disk(HEAD, "disk", "ops") / "crash archive"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for path in nodes.disk(THIRD, "disk", "dsv41").glob("engram/engram-*"):
        shutil.copy2(path, kept)
    right = sums(HEAD, archive)
    fleet.on(HEAD, f"cd '{archive}' && sha256sum *.bin >SHA256SUMS")
    arguments = ["-l", THIRD, "-e", json.dumps({"archive_from": f"{HEAD}:{archive}"})]

    def fresh() -> None:
        fleet.on(THIRD, f"rm -f {place}/engram-*")

    def held() -> None:
        assert sums(HEAD, archive) == right
        assert right.items() >= sums(THIRD, place).items()

    fresh()
    for moment in drawn("restore_engram.yml", arguments, tmp_path, 4):
        kills = killed_and_played_again("restore_engram.yml", arguments, tmp_path, moment, fresh, held)
        assert packed(THIRD) == rows[THIRD]
        assert ended(HEAD)
        assert ended(THIRD)
        histogram.count("restore, its SSH connection", moment[0], kills)
    assert not any(fleet.play("restore_engram.yml", *arguments).recap.values())
    fleet.on(HEAD, f"rm -r '{archive}'")
