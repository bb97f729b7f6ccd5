"""A shard is gone: serve.yml ends, serves that layer from the checkpoint and says so, or packs it; as it was told."""

from __future__ import annotations

import json

import fleet
import pytest
from fleet import ENGRAM_DIR, HEAD, SECOND, THIRD

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("serving")]

LAYER = "14"
SHARD = f"engram-l{LAYER}-r2of3.bin"


def receipt(said: fleet.Said) -> dict:
    assert said.rc == 0, said.text
    return json.loads(said.receipt.read_text())


def test_fail_then_fallback_then_pack():
    path = f"{ENGRAM_DIR[THIRD]}/{SHARD}"
    size = int(fleet.on(THIRD, f"stat -c %s {path}"))
    before = fleet.containers()
    fleet.on(THIRD, f"rm {path} {path}.manifest.json")

    told = fleet.serve("e8", "-e", "engram_missing=fail")
    assert told.rc != 0
    assert {host for _, host in told.blamed} == {THIRD}
    assert "no such file" in told.blamed["shards", THIRD]["found"]
    assert "engram_missing=pack" in told.blamed["shards", THIRD]["next_step"]
    assert fleet.containers() == before

    fallback = fleet.serve("e8", "-e", "engram_missing=fallback")
    proven = receipt(fallback)
    packed = {rank["host"]: rank["packed"] for rank in proven["ranks"]}
    assert packed == {
        HEAD: {"1": True, LAYER: True},
        SECOND: {"1": True, LAYER: True},
        THIRD: {"1": True, LAYER: False},
    }
    assert f"layer {LAYER}: packed=False" in proven["agree"]["packed"]["seen"][THIRD]
    assert "A layer without a shard is read from the checkpoint" in fallback.text
    assert fleet.on(THIRD, f"ls {ENGRAM_DIR[THIRD]}").count(SHARD) == 0
    serving = fleet.containers()
    assert fleet.play("verify.yml").rc == 0
    again = fleet.serve("e8", "-e", "engram_missing=fallback")
    assert (again.rc, again.changed) == (0, set()), again.text
    assert fleet.containers() == serving

    # The default packs what is missing, and the layer is served from it.
    mended = receipt(fleet.serve("e8"))
    assert {rank["host"]: rank["packed"][LAYER] for rank in mended["ranks"]} == {HEAD: True, SECOND: True, THIRD: True}
    assert int(fleet.on(THIRD, f"stat -c %s {path}")) == size
    assert mended["plan_sha256"] != proven["plan_sha256"]
