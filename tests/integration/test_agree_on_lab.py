"""Every entry of agree on the lab: one rank is altered behind Lockstep's back, for real, and is named, it and no other.

The fleet serves e8 all the time; an alteration is undone at its end, by hand, so that the next one stands alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import fleet
import httpx
import pytest
from fleet import ADDRESS, CONTAINER, ENGRAM_DIR, HEAD, HOSTS, SECOND, STATE_DIR, THIRD
from lockstep_core import agree
from lockstep_lab import faults, nodes, topology

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("serving")]

SHARD = "engram-l1-r1of3.bin"  # of the second rank
CACHE = "/root/.cache/sglang/flashinfer/autotune"
MODEL = "/usr/local/lib/python3.11/dist-packages/sglang/srt/models/deepseek_v4.py"
ADAPTER = "/opt/lockstep/lockstep_engine/store.py"


@contextmanager
def done(host: str, command: str, undo: str) -> Iterator[None]:
    """A shell command on a host, and the one that undoes it."""
    fleet.on(host, command)
    try:
        yield
    finally:
        fleet.on(host, undo)


def another_kernel() -> AbstractContextManager[None]:
    return done(
        THIRD,
        "echo 5.10.0-other >/run/osrelease && mount --bind /run/osrelease /proc/sys/kernel/osrelease",
        "umount /proc/sys/kernel/osrelease",
    )


def clock_ahead() -> AbstractContextManager[None]:
    """The rank's Python reads a clock that is 900 s ahead. The machine's own clock is nobody's to touch."""
    line = "import time; time.time = lambda real=time.time: real() + 900"
    path = "$(python3 -c 'import site; print(site.getsitepackages()[0])')"
    return done(SECOND, f"mkdir -p {path} && echo '{line}' >{path}/ahead.pth", f"rm {path}/ahead.pth")


@contextmanager
def address_lost() -> Iterator[None]:
    """The second rank loses its address on the link to the head."""
    link = next(network for network in topology.networks()[1:] if network.hosts.keys() == {HEAD, SECOND})
    own = link.hosts[SECOND]
    shown = json.loads(fleet.on(SECOND, "ip -json -4 address"))
    device = next(one["ifname"] for one in shown for entry in one["addr_info"] if entry["local"] == own)
    with done(SECOND, f"ip address delete {own}/24 dev {device}", f"ip address add {own}/24 brd + dev {device}"):
        yield


@contextmanager
def port_taken() -> Iterator[None]:
    """Something else listens where the ranks of the next launch would meet."""
    fleet.on(HEAD, "systemd-run --quiet --unit=taken python3 -m http.server 20000")
    fleet.on(HEAD, "until ss -Hltn sport = :20000 | grep -q .; do sleep 0.1; done")
    try:
        yield
    finally:
        fleet.on(HEAD, "systemctl stop taken")


def checkpoint_gone() -> AbstractContextManager[None]:
    place = "/srv/models/engram-checkpoint"
    return done(THIRD, f"mkdir -p /run/empty && mount --bind /run/empty {place}", f"umount {place}")


def directory_gone() -> AbstractContextManager[None]:
    return done(THIRD, f"mv {STATE_DIR}/journal {STATE_DIR}/away", f"mv {STATE_DIR}/away {STATE_DIR}/journal")


def entry_gone() -> AbstractContextManager[None]:
    return done(THIRD, f"mv {STATE_DIR}/journal/*.json /run/", f"mv /run/*.json {STATE_DIR}/journal/")


def base_retagged() -> AbstractContextManager[None]:
    return done(
        SECOND,
        f"docker tag {fleet.BASE} kept && docker tag {fleet.OVERLAY} {fleet.BASE}",
        f"docker tag kept {fleet.BASE} && docker rmi kept",
    )


@contextmanager
def overlay_edited() -> Iterator[None]:
    """A file of the overlay is edited where the Docker Engine keeps its layers."""
    shown = "'{{.GraphDriver.Data.UpperDir}}:{{.GraphDriver.Data.LowerDir}}'"
    layers = fleet.on(SECOND, f"docker image inspect --format {shown} {fleet.OVERLAY}").strip().split(":")
    path = fleet.on(SECOND, f"ls {' '.join(layer + ADAPTER for layer in layers)} 2>/dev/null || true").split()[0]
    with done(SECOND, f"cp -p {path} /run/kept && echo '# edited' >>{path}", f"cat /run/kept >{path}"):
        yield


@contextmanager
def adapters_lost() -> Iterator[None]:
    """The rank's overlay says that it carries no adapter."""
    text = f"FROM {fleet.OVERLAY}\\nLABEL lockstep.adapters=\\n"
    build = f"docker tag {fleet.OVERLAY} kept && printf '{text}' | docker build --quiet --tag {fleet.OVERLAY} -"
    with done(SECOND, build, f"docker tag kept {fleet.OVERLAY} && docker rmi kept"):
        yield


def shard_lost() -> AbstractContextManager[None]:
    path = f"{ENGRAM_DIR[SECOND]}/{SHARD}"
    return done(SECOND, f"mv {path} {path}.away", f"mv {path}.away {path}")


@contextmanager
def no_room_for_a_shard() -> Iterator[None]:
    with shard_lost(), faults.disk_full(SECOND, ENGRAM_DIR[SECOND]):
        yield


def shard_replaced() -> AbstractContextManager[None]:
    """The same bytes, but not the file that the engine has open."""
    path = f"{ENGRAM_DIR[SECOND]}/{SHARD}"
    replace = f"ln {path} {path}.away && cp -p {path} {path}.new && mv {path}.new {path}"
    return done(SECOND, replace, f"mv {path}.away {path}")


def sidecar_of_another_launch() -> AbstractContextManager[None]:
    first = f"$(find {CACHE} -name '*.launch' | sort | head -1)"
    edit = f"sed -i 's/[0-9a-f]\\{{64\\}}/{'0' * 64}/' {first}"
    return done(THIRD, f"cp -p {first} /run/kept && {edit}", f"cat /run/kept >{first}")


def paused() -> AbstractContextManager[None]:
    return done(SECOND, f"docker pause {CONTAINER[SECOND]}", f"docker unpause {CONTAINER[SECOND]}")


def edited_in_the_container() -> AbstractContextManager[None]:
    run = f"docker exec {CONTAINER[THIRD]} sh -c"
    edit = f"{run} 'cp -p {MODEL} /tmp/kept && echo \"# edited\" >>{MODEL}'"
    return done(THIRD, edit, f"{run} 'cat /tmp/kept >{MODEL}'")


def boot_again(hosts: Sequence[str] = HOSTS) -> None:
    """Start the engine's containers again, as they are, without Lockstep.

    Not ``docker restart``: a rank whose peer is gone ends by itself, and a Docker Engine that kills what has just
    ended may ten seconds later take the container that it has started since for ended.
    """
    end = "docker kill {0} || true; docker wait {0}"
    nodes.each(lambda host: fleet.on(host, end.format(CONTAINER[host])), hosts)
    nodes.each(lambda host: fleet.on(host, f"docker start {CONTAINER[host]}"), hosts)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://{ADDRESS[HEAD]}:8888/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail("the fleet does not come back")


def created_again(host: str, env: list[str]) -> list[str]:
    """Create the rank's container again with another environment and the rest as it was; returns the one before."""
    with fleet.engine(host) as engine:
        old = engine.containers.get(CONTAINER[host])
        before: list[str] = old.attrs["Config"]["Env"]
        names = {entry.partition("=")[0] for entry in env}
        changed = [entry for entry in before if entry.partition("=")[0] not in names] + env
        made = {**old.attrs["Config"], "Env": changed, "HostConfig": old.attrs["HostConfig"]}
        old.remove(force=True)
        engine.api.create_container_from_config(made, CONTAINER[host])
    boot_again()
    return before


@contextmanager
def another_value() -> Iterator[None]:
    before = created_again(SECOND, ["DSV41_IO_THREADS=64"])
    try:
        yield
    finally:
        created_again(SECOND, before)


@contextmanager
def booted_without_shards() -> Iterator[None]:
    """The rank's engine started where it found no packed shard."""
    fleet.on(SECOND, f"echo '{{\"packed_false\": [1]}}' >{STATE_DIR}/sim-faults.json")
    boot_again()
    fleet.on(SECOND, f"rm {STATE_DIR}/sim-faults.json")
    try:
        yield
    finally:
        boot_again()


@contextmanager
def connection_lost() -> Iterator[None]:
    """The rank's connection to the head goes, and neither end notices: the process lives on and will never answer."""
    deaf = f"{STATE_DIR}/sim-faults.json"
    for host in (HEAD, SECOND):
        fleet.on(host, f"echo '{{\"deaf\": true}}' >{deaf}")
    fleet.on(SECOND, "ss --kill state established dport = :20000")
    try:
        yield
    finally:
        for host in (HEAD, SECOND):
            fleet.on(host, f"rm {deaf}")
        boot_again()


@contextmanager
def memory_ran_out() -> Iterator[None]:
    """The head's engine wrote a fault into its log and lives on."""
    line = "[2026-09-24 12:00:00 TP0] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.62 GiB."
    fleet.on(HEAD, f"docker exec {CONTAINER[HEAD]} sh -c 'echo \"{line}\" >/proc/1/fd/2'")
    try:
        yield
    finally:
        boot_again()


@dataclass(frozen=True)
class Case:
    """An alteration, the rank, and what the message has to say of it; ``also`` are entries that it cannot but touch,
    ``others`` what the other ranks are told of the same entry, if anything."""

    alter: Callable[[], AbstractContextManager[None]]
    host: str
    found: str
    expected: str
    also: tuple[str, ...] = ()
    others: str = ""
    entry: tuple[str, ...] = ("verify.yml",)


CASES = {
    "reachable": Case(lambda: faults.unreachable(THIRD), THIRD, "unreachable", "an answer over SSH"),
    "docker": Case(lambda: faults.engine_away(SECOND), SECOND, "does not answer", "an answering engine"),
    "kernel": Case(another_kernel, THIRD, "5.10.0-other", "6."),
    "clock": Case(clock_ahead, SECOND, "+9", "within 30 s"),
    "fabric": Case(address_lost, SECOND, "lacks 10.", "all up"),
    "ports": Case(port_taken, HEAD, "20000 taken by python3", "free or ours"),
    "checkpoint": Case(checkpoint_gone, THIRD, "/srv/models/engram-checkpoint", "revision"),
    "directories": Case(directory_gone, THIRD, f"lacks {STATE_DIR}/journal", "there", also=("journal",)),
    "journal": Case(entry_gone, THIRD, "no entry of ", "the running launch's entry"),
    "base_image": Case(base_retagged, SECOND, "", ""),
    "overlay_image": Case(overlay_edited, SECOND, "", "", also=("running_image",)),
    "adapters": Case(
        adapters_lost,
        SECOND,
        "lacks DSV41_AUTOTUNE_KEEP",
        "an adapter for every switch that is on",
        entry=("serve.yml", "-e", "arm=b1", "-e", '{"set": {"DSV41_AUTOTUNE_KEEP": "1"}, "fleet_accelerators": true}'),
    ),
    "shards": Case(shard_lost, SECOND, "layer 1 no such file", "rows shards", also=("open_shards",)),
    "disk": Case(no_room_for_a_shard, SECOND, "bytes free in", "bytes to pack", also=("shards", "open_shards")),
    # What matches on the others must go as well: reused on some ranks only, tactics desynchronise them.
    "tactics": Case(
        sidecar_of_another_launch,
        THIRD,
        "tuned by launch 000000000000",
        "the same matching files on every rank, or none",
        others="not on every rank",
    ),
    "container": Case(paused, SECOND, "paused", "running"),
    "running_image": Case(edited_in_the_container, THIRD, "differs in", ""),
    "container_env": Case(another_value, SECOND, "DSV41_IO_THREADS=64", "DSV41_IO_THREADS=96"),
    "packed": Case(
        booted_without_shards,
        SECOND,
        "layer 1: packed=False",
        "packed=True for every layer",
        also=("open_shards", "faults"),
    ),
    "open_shards": Case(shard_replaced, SECOND, "layer 1: file replaced after boot", "open"),
    "rendezvous": Case(connection_lost, SECOND, "not connected to the head", "met"),
    "faults": Case(memory_ran_out, HEAD, "torch.OutOfMemoryError", "none"),
}


def test_every_entry_has_its_case():
    assert CASES.keys() == {"reachable", *agree.CHECKS}


@pytest.mark.parametrize("name", CASES)
def test_the_altered_rank_is_named_and_no_other(name):
    case = CASES[name]
    with case.alter():
        said = fleet.play(*case.entry)
    assert said.rc != 0
    told = {host for host in HOSTS if host != case.host and case.others}
    expected = {(entry, case.host) for entry in (name, *case.also)} | {(name, host) for host in told}
    assert said.blamed.keys() == expected, said.text
    for host in told:
        assert {part.partition(": ")[2] for part in said.blamed[name, host]["found"].split("; ")} == {case.others}
    blame = said.blamed[name, case.host]
    assert case.found in blame["found"]
    assert case.expected in blame["expected"]
    assert blame["next_step"]
    assert not said.changed


def test_a_journal_that_cannot_be_read_is_named_too():
    path = f"$(ls {STATE_DIR}/journal/*.json | tail -1)"
    with done(THIRD, f"cp -p {path} /run/kept && sed -i 's/rows/rOws/' {path}", f"cat /run/kept >{path}"):
        said = fleet.play("verify.yml")
        mended = fleet.serve("e8")
    assert mended.rc == 0, mended.text
    assert {host for _, host in mended.changed} == {THIRD}
    assert said.rc != 0
    assert said.blamed.keys() == {("journal", THIRD)}, said.text
    assert f"{STATE_DIR}/journal/" in said.blamed["journal", THIRD]["found"]
    assert "changed after it was sealed" in said.blamed["journal", THIRD]["found"]
    assert "serve.yml" in said.blamed["journal", THIRD]["next_step"]


def test_a_lost_entry_is_recorded_again_without_a_new_launch():
    before = fleet.containers()
    fleet.on(THIRD, f"rm {STATE_DIR}/journal/*.json")
    said = fleet.serve("e8")
    assert said.rc == 0, said.text
    assert {host for _, host in said.changed} == {THIRD}
    assert fleet.containers() == before
    launch = json.loads(said.receipt.read_text())["launch"]
    kept = [json.loads(fleet.on(host, f"cat {STATE_DIR}/journal/{launch}.json")) for host in HOSTS]
    assert len({json.dumps(entry | {"recorded": None}, sort_keys=True) for entry in kept}) == 1


def test_after_all_of_it_the_fleet_is_proven():
    said = fleet.play("verify.yml")
    assert said.rc == 0, said.text


def test_the_next_serve_repairs_a_fleet_that_lost_a_rank():
    before = fleet.containers()
    fleet.on(SECOND, f"docker kill {CONTAINER[SECOND]}")
    said = fleet.play("verify.yml")
    assert said.rc != 0
    assert ("container", SECOND) in said.blamed
    repaired = fleet.serve("e8")
    assert repaired.rc == 0, repaired.text
    assert json.loads(repaired.receipt.read_text())["ok"]
    assert all(fleet.containers()[host] != before[host] for host in HOSTS)
