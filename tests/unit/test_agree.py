"""Agree: each entry names the one rank that was altered, what was found there and what was expected."""

import copy

import pytest
from lockstep_core import agree

HOSTS = ("spark1", "spark2", "spark3")
ROWS = {"spark1": [0, 128002056], "spark2": [128002056, 256004112], "spark3": [256004112, 384006168]}
PIN = "sha256:" + "3d" * 32
BASE = {
    "present": True,
    "id": "sha256:" + "37" * 32,
    "repo_digests": [f"lmsysorg/sglang@{PIN}"],
    "repo_tags": ["lmsysorg/sglang:dev-dsv41"],
    "labels": {},
    "layers": ["l1"],
    "layers_sha256": "aa",
    "platform": "linux/arm64",
    "config_digest": "sha256:" + "37" * 32,
    "store": "classic",
    "files": {},
}
OVERLAY = {
    **BASE,
    "id": "sha256:" + "0e" * 32,
    "repo_digests": [],
    "repo_tags": ["dsv41-3x-spark:local"],
    "labels": {"lockstep.context_sha256": "c0", "lockstep.base_digest": PIN, "lockstep.adapters": "wo_a_w8"},
    "layers": ["l1", "l2"],
    "config_digest": "sha256:" + "0e" * 32,
    "files": {"/e/deepseek_v4.py": "11" * 32},
}


def make_plan():
    return {
        "tp_size": 3,
        "images": {
            "base": {"repository": "lmsysorg/sglang", "tag": "dev-dsv41", "digest": PIN},
            "overlay": {"tag": "dsv41-3x-spark:local", "context_sha256": "c0", "id": OVERLAY["id"], "digest": None},
        },
        "engram": {"split": "rows", "layers": [1], "mount": "/engram"},
        "accelerators": True,
        "adapters": {"DSV41_WO_A_W8": "wo_a_w8"},
        "keys": {"EP_SIZE": "applied", "PORT": "applied"},
        "plan_sha256": "ab" * 32,
        "ranks": [
            {
                "host": host,
                "rank": rank,
                "role": "head" if rank == 0 else "worker",
                "env": {"EP_SIZE": "1"},
                "shards": {
                    "1": {
                        "file": f"engram-l1-r{rank}of3.bin",
                        "bytes": 33792546880,
                        "rows": ROWS[host],
                        "sha256": "cd" * 32,
                    }
                },
            }
            for rank, host in enumerate(HOSTS)
        ],
    }


def make_look(host):
    rank = HOSTS.index(host)
    return {
        "docker": {"ok": True, "error": None, "version": "26.1.5", "store": "classic"},
        "kernel": "6.17.0",
        "clock": {"skew_s": 0.8, "limit_s": 30},
        "fabric": {"missing": []},
        "directories": {"missing": []},
        "ports": {"8888": "engine"},
        "checkpoint": {"error": None, "identity": "revision fb2764a5"},
        "images": {
            "engine": {"store": "classic", "platform": "linux/arm64"},
            "base": copy.deepcopy(BASE),
            "pinned": copy.deepcopy(BASE),
            "overlay": copy.deepcopy(OVERLAY),
            "catalogue": [copy.deepcopy(BASE), copy.deepcopy(OVERLAY)],
        },
        "shards": {
            "dir": "/engram",
            "free_bytes": 10,
            "reserve_bytes": 1 << 30,
            "files": {"1": {"state": "ok", "why": None, "sha256": "cd" * 32}},
        },
        "tactics": [{"key": "05cc0d96dc7e28b8", "file": "f", "sidecar": "s", "mtime_ns": 1, "keep": True, "why": None}],
        "container": {
            "started_at": "2026-09-24T04:53:07.123456789Z",
            "state": "running",
            "launch": "L1",
            "plan_sha256": "ab" * 32,
            "image_id": OVERLAY["id"],
            "files": dict(OVERLAY["files"]),
            "env": {"EP_SIZE": "1", "PATH": "/bin"},
        },
        "process": {"shards": {"1": {"inode": 7, "same_file": True}}, "rendezvous": True},
        "engine": {"packed": [{"layer": 1, "rank": rank, "rows": ROWS[host], "packed": True}], "faults": []},
    }


def looks():
    return {host: make_look(host) for host in HOSTS}


def test_a_whole_fleet_agrees_on_everything():
    assert agree.bad(agree.table(make_plan(), looks())) == []


def put(*path):
    """The alteration that sets the value at the end of ``path``."""
    *keys, value = path

    def alter(look):
        for key in keys[:-1]:
            look = look[key]
        look[keys[-1]] = value

    return alter


def without_a_plan(look):
    """What is left of a look when nothing says what to look for."""
    for name in ("checkpoint", "images", "shards", "tactics"):
        del look[name]


# entry -> how spark3 is altered, what is found there
ALTERED = {
    "docker": (put("docker", {"ok": False, "error": "does not answer"}), "does not answer"),
    "kernel": (put("kernel", "6.11.0"), "6.11.0"),
    "clock": (put("clock", "skew_s", -95.0), "-95 s"),
    "fabric": (put("fabric", "missing", ["10.0.33.3"]), "lacks 10.0.33.3"),
    "ports": (put("ports", "8888", "nc (pid 9)"), "8888 taken by nc (pid 9)"),
    "checkpoint": (put("checkpoint", {"error": "no config.json", "identity": None}), "no config.json"),
    "journal": (without_a_plan, "no entry of L1"),
    "directories": (put("directories", "missing", ["/srv/lockstep/journal"]), "lacks /srv/lockstep/journal"),
    "base_image": (put("images", "base", {**BASE, "id": "sha256:" + "38" * 32}), "383838383838"),
    "overlay_image": (put("images", "overlay", {**OVERLAY, "id": "sha256:" + "0f" * 32}), "0f0f0f0f0f0f"),
    "adapters": (put("images", "overlay", "labels", "lockstep.adapters", "verify_cap"), "lacks DSV41_WO_A_W8"),
    "shards": (
        put("shards", "files", "1", {"state": "wrong", "fault": "wrong-tp", "why": "tp 2"}),
        "layer 1 wrong-tp: tp 2",
    ),
    "tactics": (put("tactics", []), "05cc0d96dc7e28b8: not on every rank"),
    "container": (put("container", "launch", "L0"), "running L0"),
    "running_image": (put("container", "files", {"/e/deepseek_v4.py": "22"}), "differs in /e/deepseek_v4.py"),
    "container_env": (put("container", "env", {"EP_SIZE": "3"}), "EP_SIZE=3"),
    "packed": (put("engine", "packed", 0, "packed", False), "layer 1: packed=False"),
    "open_shards": (put("process", "shards", "1", {"inode": 7, "same_file": False}), "replaced after boot"),
    "rendezvous": (put("process", "rendezvous", False), "not connected to the head"),
    "faults": (
        put(
            "engine",
            "faults",
            [
                {"fault": "peer_lost", "severity": "fatal", "consequence": True, "text": "Connection closed by peer"},
                {"fault": "nan", "severity": "fatal", "consequence": False, "text": "NaN in the logits"},
            ],
        ),
        "NaN in the logits",
    ),
}


@pytest.mark.parametrize("name", ALTERED)
def test_one_altered_rank_is_named(name):
    alter, found = ALTERED[name]
    seen = looks()
    alter(seen["spark3"])
    entry = agree.table(make_plan(), seen)[name]
    assert not entry["ok"]
    # Tactics that one rank lacks go aside on the others: those are the ranks with work.
    expected_hosts = {"spark1", "spark2"} if name == "tactics" else {"spark3"}
    assert set(entry["bad"]) == expected_hosts
    host = min(expected_hosts)
    assert found in str(entry["bad"][host]["found"])
    text = agree.explain({name: entry}, [name])
    assert f"{host}: {name}" in text
    assert "expected:" in text
    assert "next step:" in text


def test_a_rank_with_another_image_store_is_refused_as_one_id_cannot_start_all():
    seen = looks()
    seen["spark3"]["docker"]["store"] = "containerd"
    entry = agree.table(make_plan(), seen)["docker"]
    assert (entry["kind"], entry["seen"]["spark3"]) == ("refuse", "26.1.5, containerd image store")
    assert entry["bad"] == {
        "spark3": {"found": "26.1.5, containerd image store", "expected": "the classic image store"}
    }
    assert "one image store" in entry["next_step"]


def test_an_entry_that_is_damaged_there_is_named_with_the_damage_and_the_next_step():
    seen = looks()
    without_a_plan(seen["spark3"])
    seen["spark3"]["journal_damaged"] = "/srv/lockstep/journal/L1.json is not JSON"
    table = agree.table(make_plan(), seen)
    assert agree.bad(table) == ["journal"]
    assert table["journal"]["bad"]["spark3"]["found"] == "/srv/lockstep/journal/L1.json is not JSON"
    assert "ansible-playbook serve.yml" in agree.explain(table, ["journal"])
    # Who looks with a plan can do without it.
    seen = looks()
    seen["spark3"]["journal_damaged"] = "/srv/lockstep/journal/L1.json is not JSON"
    assert agree.bad(agree.table(make_plan(), seen)) == []


def test_every_entry_has_an_alteration():
    tested = set(ALTERED) | {"reachable", "disk"}
    assert tested == set(agree.table(make_plan(), looks()))


def test_an_unreachable_rank_is_a_refusal_and_the_others_are_still_compared():
    table = agree.table(make_plan(), {**looks(), "spark2": None})
    assert agree.bad(table, "refuse") == ["reachable"]
    assert table["reachable"]["bad"]["spark2"]["found"] == "unreachable"
    assert table["shards"]["seen"] == {"spark1": "packed", "spark3": "packed"}


def test_too_full_to_pack_says_what_is_free_and_what_is_needed():
    seen = looks()
    seen["spark2"]["shards"]["files"]["1"] = {"state": "missing", "why": "no such file"}
    table = agree.table(make_plan(), seen)
    assert agree.bad(table, "refuse") == ["disk"]
    assert table["disk"]["bad"] == {
        "spark2": {"found": "10 bytes free in /engram", "expected": "33792546880 bytes to pack and 1073741824 to spare"}
    }


def test_what_the_operator_forbids_to_mend_refuses():
    seen = looks()
    seen["spark2"]["shards"]["files"]["1"] = {"state": "missing", "why": "no such file"}
    assert agree.table(make_plan(), seen)["shards"]["kind"] == "converge"
    assert agree.table(make_plan(), seen, engram_missing="fail")["shards"]["kind"] == "refuse"
    seen["spark2"]["shards"]["files"]["1"] = {"state": "wrong", "fault": "wrong-split", "why": "split heads"}
    assert agree.table(make_plan(), seen)["shards"]["kind"] == "refuse"
    assert agree.table(make_plan(), seen, engram_wrong="set_aside")["shards"]["kind"] == "converge"


def test_a_layer_without_a_shard_is_served_from_the_checkpoint_where_the_plan_allows_it():
    seen = looks()
    spark2 = seen["spark2"]
    spark2["shards"]["files"]["1"] = {"state": "missing", "why": "no such file"}
    spark2["engine"]["packed"][0]["packed"] = False
    spark2["engine"]["faults"] = [
        {"fault": "engram_unpacked", "layer": 1, "severity": "error", "consequence": False, "text": "layer 1"}
    ]
    spark2["process"]["shards"] = {}
    rows = ("shards", "disk", "packed", "open_shards", "faults")

    def bad(*, fallback, sha256):
        plan = make_plan()
        plan["engram"]["fallback"] = fallback
        plan["ranks"][1]["shards"]["1"]["sha256"] = sha256
        table = agree.table(plan, seen, engram_missing="fallback")
        assert {host for name in rows for host in table[name]["bad"]} <= {"spark2"}
        return [name for name in rows if not table[name]["ok"]]

    assert bad(fallback=True, sha256=None) == []
    assert bad(fallback=False, sha256=None) == list(rows)
    # It had a shard when the launch was planned: then its loss is no plan of anybody's.
    assert bad(fallback=True, sha256="ab" * 32) == list(rows)
    spark2["shards"]["files"]["1"] = {"state": "wrong", "fault": "wrong-split", "why": "split heads"}
    assert "shards" in bad(fallback=True, sha256=None)
    assert (
        agree.table(make_plan(), seen, engram_missing="fallback", engram_wrong="set_aside")["shards"]["kind"]
        == "refuse"
    )


def test_a_shard_with_other_bytes_than_the_plan_was_sealed_with_is_refused():
    seen = looks()
    seen["spark2"]["shards"]["files"]["1"]["sha256"] = "5a" * 32
    entry = agree.table(make_plan(), seen)["shards"]
    assert (entry["ok"], entry["kind"], set(entry["bad"])) == (False, "refuse", {"spark2"})
    assert entry["bad"]["spark2"]["found"] == "layer 1 has other bytes: sha256 5a5a5a5a5a5a, launched cdcdcdcdcdcd"
    plan = make_plan()
    plan["ranks"][1]["shards"]["1"]["sha256"] = None  # an arm that is not sealed yet takes what lies there
    assert agree.table(plan, seen)["shards"]["ok"]


def test_without_accelerators_an_adapter_may_lack():
    seen = looks()
    ALTERED["adapters"][0](seen["spark3"])
    entry = agree.table({**make_plan(), "accelerators": False}, seen)["adapters"]
    assert entry["ok"]
    assert entry["seen"]["spark3"] == "lacks DSV41_WO_A_W8"


def test_the_adapters_of_an_overlay_that_will_be_replaced_do_not_refuse():
    seen = looks()
    for look in seen.values():
        for image in (look["images"]["overlay"], look["images"]["catalogue"][1]):
            image["labels"] |= {"lockstep.context_sha256": "older", "lockstep.adapters": ""}
    plan = {**make_plan(), "plan_sha256": None}
    plan["images"]["overlay"]["id"] = None
    table = agree.table(plan, seen)
    assert table["adapters"]["ok"]
    assert table["overlay_image"]["kind"] == "converge"
    assert set(table["overlay_image"]["bad"]) == set(HOSTS)


def test_what_may_differ_is_shown_and_does_not_refuse():
    seen = looks()
    seen["spark3"]["kernel"] = "6.11.0"
    entry = agree.table(make_plan(), seen, ["kernel"])["kernel"]
    assert entry["ok"]
    assert entry["seen"]["spark3"] == "6.11.0"


def test_what_the_running_launch_tuned_without_a_sidecar_is_its_own():
    own = {"key": "k", "file": "f", "sidecar": None, "mtime_ns": 1790225588 * 10**9, "keep": False, "why": "no sidecar"}
    seen = looks()
    for look in seen.values():
        look["tactics"] = [own]
    assert agree.table(make_plan(), seen)["tactics"]["ok"]
    older = {**own, "mtime_ns": 1790225586 * 10**9}
    seen["spark3"]["tactics"] = [older]
    assert agree.table(make_plan(), seen)["tactics"]["bad"]["spark3"]["found"] == "k: no sidecar"
    another = {**make_plan(), "plan_sha256": "cd" * 32}
    assert set(agree.table(another, seen)["tactics"]["bad"]) == set(HOSTS)


def test_an_export_that_is_not_mounted_is_mended_and_a_lost_checkpoint_is_not():
    seen = looks()
    seen["spark2"]["checkpoint"] = {"error": "/srv/models/x is not mounted", "identity": None, "mountable": True}
    assert agree.table(make_plan(), seen)["checkpoint"]["kind"] == "converge"
    seen["spark3"]["checkpoint"] = {"error": "no config.json", "identity": None}
    assert agree.table(make_plan(), seen)["checkpoint"]["kind"] == "refuse"


def test_a_fleet_that_serves_nothing_needs_a_swap_and_no_refusal():
    seen = looks()
    for look in seen.values():
        look["container"] = look["engine"] = None
        look["process"] = {"shards": {}, "rendezvous": False}
    table = agree.table(make_plan(), seen)
    assert agree.bad(table, "refuse") == agree.bad(table, "converge") == []
    assert agree.bad(table, "swap") == ["container", "running_image", "container_env", "packed", "open_shards"]


def test_rows_are_shown_once_where_all_ranks_agree():
    seen = looks()
    seen["spark3"]["kernel"] = "6.11.0"
    lines = agree.render(agree.table(make_plan(), seen))
    assert "ok        shards         packed" in lines
    assert "refuse    kernel         spark1: 6.17.0  spark2: 6.17.0  spark3: 6.11.0" in lines
