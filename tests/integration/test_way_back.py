"""The way back on the lab: any launch of the journal again, from any controller, and the recipes of the campaign.

The tests run in order over one fleet that serves e8. Environments are read from Docker on each rank.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import fleet
import pytest
import yaml
from fleet import CONTAINER, ENGRAM_DIR, HEAD, HOSTS, SECOND, THIRD
from lockstep_lab import faults

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("serving")]

FINGERPRINT = "LOCKSTEP_TACTICS_FINGERPRINT"
AWAY = "/srv/shard-moved-away.bin"

seen: dict[str, Any] = {}


def inspected() -> dict[str, dict[str, Any]]:
    """What Docker says of the engine's container on every rank."""
    return {host: json.loads(fleet.on(host, f"docker inspect {CONTAINER[host]}"))[0] for host in HOSTS}


def environments() -> dict[str, dict[str, str]]:
    return {
        host: dict(line.split("=", 1) for line in found["Config"]["Env"] if not line.startswith(FINGERPRINT))
        for host, found in inspected().items()
    }


def label(name: str) -> str:
    """The one value that all ranks' containers carry."""
    (value,) = {found["Config"]["Labels"][f"lockstep.{name}"] for found in inspected().values()}
    return str(value)


def back(*options: str, where: Path = fleet.ROOT) -> fleet.Said:
    return fleet.play("rollback.yml", *(word for option in options for word in ("-e", option)), where=where)


def listed(where: Path = fleet.ROOT) -> list[str]:
    """The lines of history.yml, past Ansible's own."""
    said = fleet.play("history.yml", where=where)
    assert said.rc == 0, said.text
    assert not said.changed
    shown = said.text.partition("TASK [Show the launches]")[2].partition("\nok: [")[0]
    return shown.splitlines()[1:]


def without(key: str) -> dict[str, dict[str, tuple[str | None, str | None]]]:
    """Take a feature back; by rank, each key of the environment that differs then, with both values."""
    before = environments()
    said = back(f"feature={key}")
    assert said.rc == 0, said.text
    after = environments()
    return {
        host: {
            name: (before[host].get(name), after[host].get(name))
            for name in {*before[host], *after[host]}
            if before[host].get(name) != after[host].get(name)
        }
        for host in HOSTS
    }


def test_a_feature_goes_and_nothing_else_changes():
    seen["e8"] = {name: label(name) for name in ("launch", "plan_sha256")}
    seen["image"] = {found["Image"] for found in inspected().values()}
    assert without("DSV41_ENGRAM_PREFETCH") == {host: {"DSV41_ENGRAM_PREFETCH": ("1", "0")} for host in HOSTS}
    assert label("arm") == "e8+DSV41_ENGRAM_PREFETCH=0"
    assert {found["Image"] for found in inspected().values()} == seen["image"]


def test_with_the_twins_go_the_keys_that_need_them():
    keys = ("DSV41_WO_A_W8", "DSV41_WO_A_W8_DROP", "DSV41_WO_A_W8_MID")
    assert without("DSV41_WO_A_W8") == dict.fromkeys(HOSTS, dict.fromkeys(keys, ("1", "0")))


def test_with_block_5_goes_its_cap_and_only_once():
    differs = {"DSPARK_BLOCK_SIZE": ("5", "3"), "DSV41_VERIFY_CAP": ("conf:0.1", "0")}
    assert without("DSPARK_BLOCK_SIZE") == dict.fromkeys(HOSTS, differs)
    before = fleet.containers()
    again = back("feature=DSPARK_BLOCK_SIZE")
    assert again.rc != 0
    assert "there is nothing to take back of DSPARK_BLOCK_SIZE" in again.text
    assert fleet.containers() == before


def test_the_campaign_began_with_the_original_flags_on_converged_packed_ranks():
    said = back("campaign=true")
    assert said.rc == 0, said.text
    assert label("arm") == "b1"
    original = {"EP_SIZE": "3", "DSPARK_BLOCK_SIZE": "3", "CHUNKED_PREFILL_SIZE": "1024", "DSV41_PACKED_DIR": "/engram"}
    switches = (
        "WO_A_W8",
        "WO_A_W8_MID",
        "WO_A_W8_DROP",
        "VERIFY_CAP",
        "BLOCK_VERIFY",
        "ENGRAM_PREFETCH",
        "AUTOTUNE_KEEP",
    )
    for env in environments().values():
        assert {key: env[key] for key in original} == original
        assert {env[f"DSV41_{key}"] for key in (*switches, "DRAFT_HEAD_FP8")} == {"0"}
    before = fleet.containers()
    again = back("to=b1")
    assert (again.rc, again.changed) == (0, set()), again.text
    assert fleet.containers() == before


def test_history_tells_all_of_it():
    lines = listed()
    assert lines[1].split()[:2] == ["*", label("launch")]
    assert lines[2].strip() == "runs now on all"
    number = next(number for number, line in enumerate(lines) if seen["e8"]["launch"] in line)
    assert "promoted" in lines[number]
    assert lines[number].endswith("all")
    assert "DSPARK_BLOCK_SIZE 5 (now 3)" in lines[number + 1]
    assert lines[number + 1].endswith("more")
    whole = fleet.play("history.yml", "-e", f"launch={seen['e8']['launch'][:-2]}")
    for line in ("DSPARK_BLOCK_SIZE 5 (now 3)", "DSV41_VERIFY_CAP conf:0.1 (now 0)", "EP_SIZE 1 (now 3)"):
        assert f"     {line}\n" in whole.text


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another controller: its own checkout, in which e8 is something else by now, and no results."""
    place = tmp_path_factory.mktemp("controller") / "lockstep"
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=fleet.ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        source = fleet.ROOT / name
        if source.is_symlink() or source.is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place / name, follow_symlinks=False)
    (place / "inventory/lab/generated").symlink_to(fleet.GENERATED.resolve())
    path = place / "group_vars/all/arms.yml"
    values = yaml.safe_load(path.read_text())
    values["fleet_arms"]["e8"]["changes"]["CHUNKED_PREFILL_SIZE"] = "512"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return place


def test_another_controller_brings_a_launch_back_whole_whatever_its_arm_is_now(elsewhere):
    assert listed(elsewhere) == listed()
    stopped = fleet.play("stop.yml")
    assert stopped.rc == 0, stopped.text
    # The head has lost the overlay, and a worker a shard.
    (image,) = seen["image"]
    fleet.on(HEAD, f"docker image rm --force {image}")
    (shard,) = fleet.on(THIRD, f"ls {ENGRAM_DIR[THIRD]}/engram-l14-*.bin").split()
    fleet.on(THIRD, f"mv {shard} {AWAY}")
    said = back(f"to={seen['e8']['launch'][:-3]}", where=elsewhere)
    assert said.rc == 0, said.text
    assert said.receipt.is_relative_to(elsewhere)
    assert json.loads(said.receipt.read_text())["plan_sha256"] == seen["e8"]["plan_sha256"]
    assert label("plan_sha256") == seen["e8"]["plan_sha256"]
    assert {found["Image"] for found in inspected().values()} == {image}
    fleet.on(THIRD, f"cmp {shard} {AWAY} && rm {AWAY}")


def test_a_feature_of_an_arm_that_changed_is_not_taken_back(elsewhere):
    before = fleet.containers()
    said = back("feature=DSV41_ENGRAM_PREFETCH", where=elsewhere)
    assert said.rc != 0
    assert "CHUNKED_PREFILL_SIZE 1024 (now 512)" in said.text
    assert fleet.containers() == before


def test_cleared_tactics_are_tuned_again_in_a_new_launch_of_the_same_plan():
    before = label("launch")
    said = back("tactics=purge")
    assert said.rc == 0, said.text
    receipt = json.loads(said.receipt.read_text())
    assert [rank["tactics"]["state"] for rank in receipt["ranks"]] == ["tuned"] * 3
    assert receipt["plan_sha256"] == seen["e8"]["plan_sha256"]
    assert receipt["launch"] == label("launch") != before


def test_a_rank_that_is_away_is_named_and_the_others_tell():
    whole = listed()
    with faults.unreachable(SECOND):
        said = fleet.play("history.yml")
    assert said.rc == 0, said.text
    assert re.search(rf"^{SECOND}: .*(connect|unreachable)", said.text, re.MULTILINE | re.IGNORECASE), said.text
    assert all(line.split()[0] in said.text for line in whole[1:])
