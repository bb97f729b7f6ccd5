"""The main job on the lab, from the night's starting state to a proven launch, and the way back.

The tests run in order over one lab. They hold against what a person sees, and against what docker's SDK says over SSH.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import ansible_mitogen
import fleet
import httpx
import pytest
from fleet import CONTAINER, HEAD, HOSTS, SECOND, THIRD

pytestmark = pytest.mark.timeout(900)

# Shards of rank 1 of 3: a third of each table's rows, 264 bytes a row, and a header of 4096 bytes.
ROWS = (386748, 392806)
NEEDED = sum(4096 + 264 * (2 * rows // 3 - rows // 3) for rows in ROWS)

# What an environment's value may hold, to the byte: blanks at the ends, quotes, comment signs, JSON, nothing at all.
ODD = {
    "ODD_BLANKS": "  two  words ",
    "ODD_QUOTES": """say "hi" and 'ho'""",
    "ODD_HASH": "x #y # z",
    "ODD_EQUALS": "a=b=c",
    "ODD_JSON": '{"method": "mtp", "n": [4, null]}',
    "ODD_SHELL": "$HOME ${X:-y} $(id) `id` ~/x \\n",
    "ODD_WORDS": "größer … ☃",
    "ODD_EMPTY": "",
}

seen: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def night():
    fleet.lab("reset", "--engine", "sim")


def receipt_of(said: fleet.Said) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said.receipt.read_text())
    return found


def test_a_rank_that_is_too_full_is_refused_before_anything_moves():
    before, kept = fleet.hosts_now(), fleet.results_now()
    free = int(fleet.on(SECOND, f"df --output=avail -B1 {fleet.ENGRAM_DIR[SECOND]} | tail -1"))
    said = fleet.serve("e8")
    assert said.rc != 0
    assert said.blamed.keys() == {("disk", SECOND)}
    blame = said.blamed["disk", SECOND]
    assert f"{free} bytes free" in blame["found"]
    assert f"{NEEDED} bytes" in blame["expected"]
    assert blame["next_step"] == "move old shards of that rank to another host (archive_engram.yml), then run again"
    assert not said.changed
    assert fleet.hosts_now() == before
    assert fleet.results_now() == kept


def test_a_check_run_changes_nothing():
    fleet.lab("free-spark2")
    before, kept = fleet.hosts_now(), fleet.results_now()
    seen["predicted"] = fleet.serve("e8", "--check", "--diff")
    assert seen["predicted"].rc == 0, seen["predicted"].text
    assert fleet.hosts_now() == before
    assert fleet.results_now() == kept


def test_the_drifted_fleet_serves_e8_proven():
    said = fleet.serve("e8")
    assert said.rc == 0, said.text
    receipt = receipt_of(said)
    assert said.receipt.parent == fleet.RESULTS / receipt["launch"]
    assert (fleet.RESULTS / "latest").resolve() == said.receipt.parent
    assert (receipt["ok"], receipt["arm"], receipt["faults"], receipt["why"]) == (True, "e8", [], [])
    assert [rank["host"] for rank in receipt["ranks"]] == list(HOSTS)
    assert [rank["packed"] for rank in receipt["ranks"]] == [{"1": True, "14": True}] * 3
    assert len({rank["image"]["id"] for rank in receipt["ranks"]}) == 1
    assert all(entry["ok"] for entry in receipt["agree"].values())
    seen["served"], seen["receipt"] = said, receipt


def test_the_check_run_predicted_every_change_and_no_other():
    assert seen["served"].changed == seen["predicted"].changed


@pytest.mark.parametrize("host", HOSTS)
def test_docker_itself_agrees(host):
    receipt = seen["receipt"]
    rank = next(rank for rank in receipt["ranks"] if rank["host"] == host)
    kept = Path(fleet.RESULTS, receipt["launch"], "envs", f"e8.{host}.env").read_text().splitlines()
    with fleet.engine(host) as engine:
        container = engine.containers.get(CONTAINER[host])
        assert container.status == "running"
        assert container.image.id == rank["image"]["id"] == engine.images.get(fleet.OVERLAY).id
        labels = {name: container.labels[f"lockstep.{name}"] for name in ("launch", "arm", "plan_sha256")}
        assert labels == {name: receipt[name] for name in labels}
        image_env = engine.images.get(container.image.id).attrs["Config"]["Env"]
        assert set(container.attrs["Config"]["Env"]) - set(image_env) <= set(kept)
        assert set(kept) <= set(container.attrs["Config"]["Env"])
        limits = container.attrs["HostConfig"]
        assert (limits["Privileged"], limits["RestartPolicy"]["Name"]) == (False, "no")
        log = container.logs().decode()
        assert re.findall(r"layer=(\d+) rank=(\d) rows=.* packed=(\w+)$", log, re.MULTILINE) == [
            ("1", str(rank["rank"]), "True"),
            ("14", str(rank["rank"]), "True"),
        ]
        base = engine.images.get(fleet.BASE)
        lab = fleet.lab_images()
        assert base.id == lab["base"]["id"]
        names = [tag for image in engine.images.list() for tag in image.tags]
        dated = [name for name in names if re.fullmatch(rf"{re.escape(fleet.BASE)}-[0-9a-f]+-\d{{8}}", name)]
        assert [engine.images.get(name).id for name in dated] == [lab["moved"]["id"]] * (host == THIRD)
        assert [one.name for one in engine.containers.list(all=True)] == [CONTAINER[host]]


def test_a_second_run_finds_nothing_to_do():
    before, kept = fleet.hosts_now(), fleet.results_now()
    said = fleet.serve("e8")
    assert said.rc == 0, said.text
    assert said.recap == dict.fromkeys(HOSTS, 0)
    assert not said.changed
    assert fleet.hosts_now() == before
    assert fleet.results_now() == kept
    assert said.receipt == seen["served"].receipt


def test_with_mitogen_there_is_nothing_to_do_either():
    before, kept = fleet.hosts_now(), fleet.results_now()
    plugins = Path(ansible_mitogen.__file__).parent / "plugins/strategy"
    said = fleet.serve("e8", ANSIBLE_STRATEGY="mitogen_linear", ANSIBLE_STRATEGY_PLUGINS=str(plugins))
    assert said.rc == 0, said.text
    assert said.recap == dict.fromkeys(HOSTS, 0)
    assert fleet.hosts_now() == before
    assert fleet.results_now() == kept
    assert receipt_of(said) == seen["receipt"]


def test_the_running_fleet_is_proven_again_without_a_change():
    before, kept = fleet.hosts_now(), fleet.results_now()
    said = fleet.play("verify.yml")
    assert said.rc == 0, said.text
    assert f"{seen['receipt']['launch']}: proven" in said.text
    assert fleet.hosts_now() == before
    assert fleet.results_now() == kept


def test_another_arm_with_a_one_off_replaces_it_as_predicted():
    before = fleet.hosts_now()
    keys = {key: {"type": "string", "default": None, "where": "env", "doc": "A test's own."} for key in ODD}
    one_off = ("-e", json.dumps({"fleet_switches_extra": keys, "set": {"PORT": "8899", **ODD}}))
    predicted = fleet.serve("b1", *one_off, "--check", "--diff")
    assert predicted.rc == 0, predicted.text
    assert fleet.hosts_now() == before
    said = fleet.serve("b1", *one_off)
    assert said.rc == 0, said.text
    assert said.changed == predicted.changed
    receipt = receipt_of(said)
    assert re.fullmatch(r"b1\+9-changes-[0-9a-f]{8}", receipt["arm"])
    assert fleet.arms() == dict.fromkeys(HOSTS, receipt["arm"])
    assert receipt["agree"]["container_env"] == {"ok": True, "seen": dict.fromkeys(HOSTS, "as planned")}
    assert httpx.get(f"http://{fleet.ADDRESS[HEAD]}:8899/health", timeout=60).status_code == httpx.codes.OK
    # The log of what was stopped lies beside the receipt of its launch.
    logs = fleet.RESULTS / seen["receipt"]["launch"] / "logs"
    assert {path.name for path in logs.iterdir()} == {f"{host}.log" for host in HOSTS}
    assert all("packed=True" in path.read_text() for path in logs.iterdir())


@pytest.mark.parametrize("host", HOSTS)
def test_odd_values_arrive_to_the_byte(host):
    """In the file that is kept, in what docker says, and in the engine's own process."""
    launch = (fleet.RESULTS / "latest").resolve()
    (kept,) = (launch / "envs").glob(f"*.{host}.env")
    odd = [f"{key}={value}" for key, value in sorted(ODD.items())]
    assert [line for line in kept.read_text().splitlines() if line.startswith("ODD_")] == odd
    with fleet.engine(host) as engine:
        container = engine.containers.get(CONTAINER[host])
        assert sorted(entry for entry in container.attrs["Config"]["Env"] if entry.startswith("ODD_")) == odd
        environ = container.exec_run(["cat", "/proc/1/environ"]).output.decode()
    assert sorted(entry for entry in environ.split("\0") if entry.startswith("ODD_")) == odd
    # What ran is kept beside the receipt: mounts, arguments, environment, hashes, the log.
    ran = json.loads((launch / "boot" / f"{host}.json").read_text())["container"]
    assert {key: value for key, value in ran["env"].items() if key.startswith("ODD_")} == ODD
    assert {mount["target"] for mount in ran["mounts"]} >= {"/engram", "/state", "/models/DeepSeek-V4.1-Flash"}
    own = fleet.ROOT / "adapters/lockstep_engine/store.py"
    assert ran["files"]["/opt/lockstep/lockstep_engine/store.py"] == hashlib.sha256(own.read_bytes()).hexdigest()
    assert "packed=True" in (launch / "boot" / f"{host}.log").read_text()


def test_rollback_goes_back_to_the_plan_that_ran():
    said = fleet.play("rollback.yml")
    assert said.rc == 0, said.text
    receipt = receipt_of(said)
    assert receipt["plan_sha256"] == seen["receipt"]["plan_sha256"]
    assert fleet.arms() == dict.fromkeys(HOSTS, "e8")
    now = {rank["host"]: rank["env_sha256"] for rank in receipt["ranks"]}
    assert now == {rank["host"]: rank["env_sha256"] for rank in seen["receipt"]["ranks"]}


def test_stop_stops_once_and_the_way_back_still_stands():
    said = fleet.play("stop.yml")
    assert said.rc == 0, said.text
    assert set(said.recap.values()) != {0}
    assert set(fleet.containers().values()) == {"none"}
    before, kept = fleet.hosts_now(), fleet.results_now()
    again = fleet.play("stop.yml")
    assert (again.rc, set(again.recap.values())) == (0, {0}), again.text
    assert again.text.count("nothing ran") == len(HOSTS)
    assert fleet.hosts_now() == before
    assert fleet.results_now() == kept
    back = fleet.play("rollback.yml")
    assert back.rc == 0, back.text
    assert receipt_of(back)["plan_sha256"] == seen["receipt"]["plan_sha256"]
    assert fleet.arms() == dict.fromkeys(HOSTS, "e8")
