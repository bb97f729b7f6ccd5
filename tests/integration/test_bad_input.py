"""Bad input on a fleet that serves e8: each ends before anything is stopped, says who, found, expected and what to do.

Every run asks for another arm, so that a run that did not end in time would have replaced what runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fleet
import httpx
import pytest
from fleet import ADDRESS, ENGRAM_DIR, HEAD, HOSTS, SECOND, THIRD
from lockstep_lab import campaign, checkpoint, faults, nodes

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("serving")]

CHECKPOINT = "/srv/models/engram-checkpoint"
PORT_TAKEN = 8899


@pytest.fixture
def untouched() -> Iterator[None]:
    """The very same containers serve afterwards, and the head answers."""
    before = fleet.containers()
    yield
    assert fleet.containers() == before
    assert httpx.get(f"http://{ADDRESS[HEAD]}:8888/health", timeout=60).status_code == httpx.codes.OK


def one_off(**keys: str) -> str:
    return json.dumps({"set": keys})


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-e", "arm=e88"], ["unknown arm 'e88', did you mean e8?"]),
        (["-e", "arm=b0"], ["b0", "b1"]),  # history: the night's mixed builds cannot be launched
        (
            ["-e", "arm=b1", "-e", one_off(DSV41_VERIFI_CAP="1")],
            ["DSV41_VERIFI_CAP", "did you mean DSV41_VERIFY_CAP?"],
        ),
        (
            ["-e", "arm=b1", "-e", one_off(NCCL_DEBUG_SUBSYS="INIT\nENV")],
            ["the value of NCCL_DEBUG_SUBSYS contains a newline"],
        ),
        (["-e", "amr=b1"], ["unknown extra variable 'amr', did you mean arm?", "next step: use -e arm=…"]),
        (
            ["-e", "arm=b1", "-e", one_off(MEM_FRACTION_STATIC="0.96")],
            ["refused by rule memory-fraction-too-high", "found: MEM_FRACTION_STATIC=0.96", "-e accept_rule="],
        ),
    ],
    ids=["arm", "arm-of-the-past", "key", "newline", "variable", "rule"],
)
def test_what_no_plan_can_be_made_of(arguments, words):
    said = fleet.play("serve.yml", *arguments)
    assert said.rc != 0
    assert [word for word in words if word not in said.text] == []
    assert "next step: " in said.text
    # The plan is the first task, and it is the last.
    assert {task for task, _, _ in said.results} == {"Plan the launch"}


@contextmanager
def mounted_over(host: str, source: str, target: str) -> Iterator[None]:
    """``target`` of the host shows ``source``; who had it open before sees what it was."""
    fleet.on(host, f"mount --bind {source} {target}")
    try:
        yield
    finally:
        fleet.on(host, f"umount {target}")


@contextmanager
def no_checkpoint(host: str) -> Iterator[None]:
    fleet.on(host, "mkdir -p /run/empty")
    with mounted_over(host, "/run/empty", CHECKPOINT):
        yield


# A file with the header of the right one, but for a row fewer in the table, and of the same size: the rest is a hole.
_ONE_ROW_FEWER = """
import json, pathlib, sys
path, table = pathlib.Path(sys.argv[1]), sys.argv[2]
with path.open("rb") as file:
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
header[table]["shape"][0] -= 1
header[table]["data_offsets"][1] -= header[table]["shape"][1]
with open("/run/other", "wb") as file:
    file.write(length.to_bytes(8, "little") + json.dumps(header, separators=(",", ":")).encode().ljust(length))
    file.truncate(path.stat().st_size)
"""


@contextmanager
def table_of_another_shape(host: str) -> Iterator[None]:
    table = "layers.1.engram.embed.weight"
    index = json.loads(fleet.on(host, f"cat {CHECKPOINT}/model.safetensors.index.json"))
    path = f"{CHECKPOINT}/{index['weight_map'][table]}"
    nodes.run(faults.host(host), ["python3", "-c", _ONE_ROW_FEWER, path, table])
    with mounted_over(host, "/run/other", path):
        yield


@contextmanager
def port_taken(host: str) -> Iterator[None]:
    fleet.on(host, f"systemd-run --quiet --unit=taken python3 -m http.server {PORT_TAKEN}")
    fleet.on(host, f"until ss -Hltn sport = :{PORT_TAKEN} | grep -q .; do sleep 0.1; done")
    try:
        yield
    finally:
        fleet.on(host, "systemctl stop taken")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("entry", "host", "fault", "arguments", "found", "expected"),
    [
        ("reachable", THIRD, faults.unreachable, [], "unreachable", "an answer over SSH"),
        ("docker", SECOND, faults.engine_away, [], "does not answer", "an answering engine"),
        ("checkpoint", THIRD, no_checkpoint, [], CHECKPOINT, "revision"),
        ("checkpoint", HEAD, table_of_another_shape, [], "386747.*386748", "revision"),
        (
            "ports", SECOND, port_taken, ["-e", one_off(PORT=str(PORT_TAKEN))], f"{PORT_TAKEN} taken by python3", "free"
        ),
    ],
    ids=["unreachable", "engine", "checkpoint-missing", "table-shape", "port"],
)  # fmt: skip
def test_what_a_rank_lacks(entry, host, fault, arguments, found, expected):
    with fault(host):
        said = fleet.serve("b1", *arguments)
    assert said.rc != 0
    assert said.blamed.keys() == {(entry, host)}, said.text
    blame = said.blamed[entry, host]
    assert re.search(found, blame["found"])
    assert expected in blame["expected"]
    assert blame["next_step"]
    assert not said.changed


@pytest.mark.usefixtures("untouched")
def test_a_digest_that_the_registry_does_not_have():
    wrong = "sha256:" + "0" * 64
    repository, _, tag = fleet.BASE.rpartition(":")
    builds = {wrong: {"engram_split": "rows", "sglang": "0", "flashinfer": "0", "build": "0"}}
    base = {"repository": repository, "tag": tag, "digest": wrong}
    extra = json.dumps({"fleet_image_base": base, "fleet_image_builds_extra": builds})
    before = fleet.hosts_now()
    said = fleet.serve("b1", "-e", extra)
    assert said.rc != 0
    assert f"{HEAD}: the pinned base is not on this rank (missing_digest)" in said.text  # the head asks for all
    assert f"found: manifest for {repository}@{wrong} not found" in said.text
    assert f"expected: {repository}@{wrong}" in said.text
    assert "next step: check the digest; the registry does not have it" in said.text
    assert fleet.hosts_now() == before


SHARD = "engram-l1-r1of3.bin"  # the second rank's, of layer 1


@contextmanager
def shard_replaced(content: Path) -> Iterator[None]:
    """Another file lies under the shard's name; what serves keeps the right one open."""
    place = ENGRAM_DIR[SECOND]
    fleet.on(SECOND, f"mkdir {place}/kept && mv {place}/{SHARD}* {place}/kept/")
    shutil.copyfile(content, nodes.disk(SECOND, "disk", "dsv41", "engram", SHARD))
    try:
        yield
    finally:
        fleet.on(SECOND, f"rm -f {place}/{SHARD}* && mv {place}/kept/* {place} && rmdir {place}/kept")


@pytest.fixture(scope="module")
def wrong_shards(tmp_path_factory) -> dict[str, Path]:
    """Shards of layer 1 as they would lie under the name that rank 1 of 3 looks for, by what is wrong with them."""
    place = tmp_path_factory.mktemp("shards")
    made = {}
    ours, theirs = campaign.engram_checkpoint(), place / "checkpoint"
    checkpoint.make(theirs, revision="0" * 40)
    for fault, source, tp, split in (
        ("wrong-tp", ours, 2, "rows"),
        ("wrong-split", ours, 3, "heads"),
        ("wrong-checkpoint", theirs, 3, "rows"),
    ):
        checkpoint.make_shards(source, place / fault, tp=tp, rank=1, split=split)
        made[fault] = place / fault / f"engram-l1-r1of{tp}.bin"
    return made


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("fault", ["wrong-tp", "wrong-split", "wrong-checkpoint"])
def test_another_shard_under_the_right_name(wrong_shards, fault):
    with shard_replaced(wrong_shards[fault]):
        said = fleet.serve("b1")
    assert said.rc != 0
    assert said.blamed.keys() == {("shards", SECOND)}
    assert f"layer 1 {fault}: " in said.blamed["shards", SECOND]["found"]
    assert said.blamed["shards", SECOND]["expected"] == "rows shards"
    assert "-e engram_wrong=set_aside keeps it" in said.blamed["shards", SECOND]["next_step"]
    assert not said.changed


def test_set_aside_keeps_that_file_and_packs_the_right_one(wrong_shards):
    place, before = ENGRAM_DIR[SECOND], fleet.containers()
    right = fleet.on(SECOND, f"sha256sum <{place}/{SHARD}")
    fleet.on(SECOND, f"rm {place}/{SHARD}*")
    shutil.copyfile(wrong_shards["wrong-split"], nodes.disk(SECOND, "disk", "dsv41", "engram", SHARD))
    said = fleet.serve("e8", "-e", "engram_wrong=set_aside")
    assert said.rc == 0, said.text
    aside = fleet.on(SECOND, f"ls {place}/{SHARD}.aside-*").split()
    assert len(aside) == 1
    content = hashlib.sha256(wrong_shards["wrong-split"].read_bytes()).hexdigest()
    assert fleet.on(SECOND, f"sha256sum <{aside[0]}").split()[0] == content
    assert fleet.on(SECOND, f"sha256sum <{place}/{SHARD}") == right
    assert all(fleet.containers()[host] != before[host] for host in HOSTS)  # what ran had another file open
    fleet.on(SECOND, f"rm {aside[0]}")
