"""`make demo` as a newcomer runs it, with real SGLang, and what docker itself says on each host afterwards, over SSH.

It runs last of all (conftest.py): it leaves the lab with another engine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time

import fleet
import playbook
import pytest
from streams import streams

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def demo() -> str:
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1"}
    run = subprocess.run(
        ["make", "demo", "ENGINE=sglang"],
        cwd=fleet.ROOT,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    return run.stdout


@pytest.fixture(scope="module")
def receipt(demo):
    named = re.fullmatch(r'(results/\S+/receipt\.json)  "ok": true', demo.strip().splitlines()[-1])
    assert named, demo[-500:]
    return json.loads((fleet.ROOT / named[1]).read_text())


def test_the_receipt_is_whole_and_real_sglang_answered(receipt):
    assert (receipt["ok"], receipt["arm"], receipt["faults"], receipt["why"]) == (True, "e8", [], [])
    assert [rank["packed"] for rank in receipt["ranks"]] == [{"1": True, "14": True}] * 3
    assert len({rank["image"]["id"] for rank in receipt["ranks"]}) == 1
    assert {rank["pool_tokens"] for rank in receipt["ranks"]} == {4096}  # fleet_env of the lab: MAX_TOTAL_TOKENS
    assert "4" in receipt["generation"]["text"]  # it was asked what 2+2 is
    # Without CUDA FlashInfer tunes nothing; what the overlay lacks is said by name.
    assert {rank["tactics"]["state"] for rank in receipt["ranks"]} == {"none"}
    assert receipt["adapters"]["DSV41_PACKED_DIR"] == "armed"
    assert receipt["adapters"]["DSV41_AUTOTUNE_KEEP"].startswith("not applicable: no CUDA")
    assert receipt["adapters"]["DSV41_WO_A_W8"].startswith("missing")


@pytest.mark.parametrize("host", fleet.HOSTS)
def test_docker_itself_agrees(receipt, host):
    rank = next(rank for rank in receipt["ranks"] if rank["host"] == host)
    with fleet.engine(host) as engine:
        container = engine.containers.get(fleet.CONTAINER[host])
        assert container.status == "running"
        assert container.image.id == rank["image"]["id"]
        assert container.labels["lockstep.launch"] == receipt["launch"]
        log = container.logs().decode()
        assert "server_args=" in log  # SGLang's own first line; the simulator says that it is one
        assert "simulator" not in log
        assert re.findall(rf"TP{rank['rank']}\] Exact nvme Engram layer=(\d+) .* packed=(\w+)$", log, re.MULTILINE) == [
            ("1", "True"),
            ("14", "True"),
        ]


def test_two_open_streams_are_what_drain_names_and_nothing_afterwards(demo, tmp_path):
    assert demo
    task = {"name": "Drain", "lockstep.fleet.drain": {"container": fleet.CONTAINER[fleet.HEAD]}}
    play = {"hosts": "head", "gather_facts": False, "become": True, "tasks": [task]}

    def drain() -> dict[str, object]:
        played = playbook.run_playbook([play], tmp_path, "--check", inventory="inventory/lab")
        return played.results["Drain"]

    with streams(fleet.ADDRESS[fleet.HEAD], 8888, 2, 400) as held:
        held.until_answered(seconds=120)
        time.sleep(7)  # longer than a connection with its answer lives
        seen = drain()
        assert len(held.open()) == 2
    assert {request["client"] for request in seen["requests"]} == {stream.client for stream in held}
    assert {request["state"] for request in seen["requests"]} == {"streaming"}
    after = drain()
    assert (after["state"], after["requests"], after["note"]) == ("idle", [], None)
