"""Receipt: ok only when everything required is there; and the journal, which says where a rollback goes."""

import copy
import hashlib
import json

import pytest
from lockstep_core import files, receipt
from lockstep_core import plan as plans
from lockstep_core.errors import LockstepError

HOSTS = ["spark1", "spark2", "spark3"]
IMAGE = "sha256:" + "5a" * 32
LAYERS = "1a" * 32
FILES = {"/opt/sglang/deepseek_v4.py": "f1" * 32}
FINGERPRINT = "7c" * 32
# TP3 rows of the real model: exact sizes and, from its row counts, the ranges of layer 1.
BYTES = {"1": [33_792_546_880] * 3, "14": [33_793_471_936, 33_793_472_200, 33_793_472_200]}
ROWS = {
    "1": [[0, 128_002_056], [128_002_056, 256_004_112], [256_004_112, 384_006_168]],
    "14": [[0, 128_005_560], [128_005_560, 256_011_121], [256_011_121, 384_016_682]],
}


def shard(layer: str, rank: int) -> dict:
    return {
        "file": f"engram-l{layer}-r{rank}of3.bin",
        "bytes": BYTES[layer][rank],
        "rows": ROWS[layer][rank],
        "split": "rows",
        "sha256": hashlib.sha256(f"{layer}/{rank}".encode()).hexdigest(),
    }


def env_of(rank: int) -> dict[str, str]:
    return {"DSV41_WO_A_W8": "1", "MEM_FRACTION_STATIC": "0.95" if rank else "0.94"}


def env_hash(rank: int) -> str:
    """What sha256sum prints for the rank's env file: one KEY=value a line, sorted."""
    text = "".join(f"{key}={value}\n" for key, value in sorted(env_of(rank).items()))
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def plan():
    value = {
        "format": 1,
        "arm": "e8",
        "name": "e8",
        "tp_size": 3,
        "engine": "sim",
        "accelerators": False,
        "images": {"base": {"digest": "sha256:" + "3d" * 32}, "overlay": {"id": IMAGE}},
        "engram": {"split": "rows", "layers": [1, 14], "mount": "/engram"},
        "container": {"shm_size": "32g"},
        "ranks": [
            {
                "host": host,
                "rank": rank,
                "role": "worker" if rank else "head",
                "container": "dsv41-worker" if rank else "dsv41-head",
                "env": env_of(rank),
                "env_sha256": env_hash(rank),
                "argv": ["serve"],
                "mounts": [],
                "shards": {layer: shard(layer, rank) for layer in ("1", "14")},
            }
            for rank, host in enumerate(HOSTS)
        ],
        "args": {"--tp": "applied"},
        "keys": {"NCCL_NET": "not applicable: no CUDA"},
        "tactics_fingerprint": FINGERPRINT,
        "plan_sha256": None,
    }
    value["plan_sha256"] = plans.sha256(value)
    return value


def look_at(rank: int) -> dict:
    """What rank_facts says of a rank on which everything is right."""
    return {
        "images": {
            "overlay": {
                "id": IMAGE,
                "store": "classic",
                "repo_digests": ["spark1:5000/dsv41-3x-spark@sha256:" + "9d" * 32],
                "layers_sha256": LAYERS,
            }
        },
        "container": {"image_id": IMAGE, "env": {**env_of(rank), "PATH": "/usr/bin"}, "files": dict(FILES)},
        "shards": {"files": {layer: {**shard(layer, rank), "state": "ok"} for layer in ("1", "14")}},
        "engine": {
            "packed": [{"rank": rank, "layer": layer, "rows": None, "packed": True} for layer in (1, 14)],
            "tactics": {"state": "reused", "files": 2},
            # Only the head prints its pool on plain builds.
            "pool_tokens": None if rank else 749_824,
            "adapters": {"DSV41_AUTOTUNE_KEEP": "armed", "DSV41_WO_A_W8": "not applicable: no CUDA"},
            "faults": [],
        },
    }


@pytest.fixture
def looks():
    return {host: look_at(rank) for rank, host in enumerate(HOSTS)}


AGREE = {"kernel": {"ok": True, "kind": "refuse", "seen": dict.fromkeys(HOSTS, "6.14"), "bad": {}, "next_step": "…"}}
GENERATION = {"text": "The answer is 4.", "prompt_tokens": 12, "completion_tokens": 6, "seconds": 1.2}


def build(plan, looks, *, agree=None, generation=GENERATION, reuse=True):
    launch = f"20260924T094700Z-e8-{plan['plan_sha256'][:6]}"
    return receipt.build(
        plan, looks, launch=launch, agree=AGREE if agree is None else agree, generation=generation, reuse=reuse
    )


class TestBuild:
    def test_a_full_receipt_is_ok_and_has_the_promised_shape(self, plan, looks):
        built = build(plan, looks)
        assert built["why"] == []
        assert built["ok"] is True
        # What other programs may rely on, key by key.
        assert built["launch"] == f"20260924T094700Z-e8-{plan['plan_sha256'][:6]}"
        assert (built["arm"], built["plan_sha256"]) == ("e8", plan["plan_sha256"])
        assert built["tactics_fingerprint"] == FINGERPRINT
        assert built["ranks"][1] == {
            "host": "spark2",
            "rank": 1,
            "image": {
                "id": IMAGE,
                "store": "classic",
                "repo_digest": "sha256:" + "9d" * 32,
                "layers_sha256": LAYERS,
                "files": FILES,
            },
            "packed": {"1": True, "14": True},
            "shards": {"1": shard("1", 1), "14": shard("14", 1)},
            "env_sha256": env_hash(1),
            "tactics": {"state": "reused", "files": 2},
            "pool_tokens": None,
        }
        assert [entry["rank"] for entry in built["ranks"]] == [0, 1, 2]
        assert built["adapters"] == {"DSV41_AUTOTUNE_KEEP": "armed", "DSV41_WO_A_W8": "not applicable: no CUDA"}
        assert built["args"] == {"--tp": "applied", "NCCL_NET": "not applicable: no CUDA"}
        assert built["agree"] == {"kernel": {"ok": True, "seen": dict.fromkeys(HOSTS, "6.14")}}
        assert built["faults"] == []
        assert json.loads(json.dumps(built)) == built

    def test_what_was_accepted_and_warned_of_is_in_it_with_the_reason(self, plan, looks):
        assert (build(plan, looks)["accepted"], build(plan, looks)["warnings"]) == ([], [])
        rule = {"id": "w8-without-drop", "reason": "no KV cache", "source": "progress, E1", "because": ["A=1"]}
        warning = {**rule, "id": "fixed-cap"}
        built = build({**plan, "accepted": [rule["id"]], "accepted_rules": [rule], "warnings": [warning]}, looks)
        assert (built["ok"], built["accepted"], built["warnings"]) == (True, [rule], [warning])
        assert "accepted against rule w8-without-drop: no KV cache" in receipt.render(built)
        # A journal of before has the ids alone.
        assert build({**plan, "accepted": [rule["id"]]}, looks)["accepted"] == [{"id": "w8-without-drop"}]

    def test_nothing_seen_proves_nothing(self, plan):
        built = build(plan, {}, agree={}, generation=None, reuse=None)
        assert built["ok"] is False
        why = "\n".join(built["why"])
        for host, rank in zip(HOSTS, range(3), strict=True):
            assert f"{host} (rank {rank}): packed, layer 1: found no evidence, expected True" in why
            assert f"{host} (rank {rank}): packed, layer 14: found no evidence, expected True" in why
            assert f"{host} (rank {rank}): environment of the container: found None" in why
            assert f"{host} (rank {rank}): image id: found nothing" in why
        assert "generation: found none" in why
        assert "agree: found no entries" in why


def spoil_packed(looks):
    looks["spark2"]["engine"]["packed"][1]["packed"] = False


def test_a_layer_served_from_the_checkpoint_is_said_and_no_fault_where_the_plan_allows_it(plan, looks):
    spoil_packed(looks)
    looks["spark2"]["engine"]["faults"] = [
        {"fault": "engram_unpacked", "layer": 14, "severity": "error", "rank": 1, "text": "layer 14 unpacked"}
    ]
    looks["spark2"]["shards"]["files"]["14"].update(state="missing", sha256=None, bytes=None, rows=None, split=None)
    plan["ranks"][1]["shards"]["14"]["sha256"] = None  # none was there when the plan was sealed

    def built_where(*, fallback):
        plan["engram"]["fallback"] = fallback
        plan["plan_sha256"] = plans.sha256(plan)
        return build(plan, looks)

    built = built_where(fallback=True)
    assert built["why"] == []
    assert built["ranks"][1]["packed"] == {"1": True, "14": False}
    assert built["faults"] == []
    forbidden = built_where(fallback=False)
    assert "spark2 (rank 1): packed, layer 14: found False, expected True" in forbidden["why"]
    assert [fault["fault"] for fault in forbidden["faults"]] == ["engram_unpacked"]


def spoil_packed_rank(looks):
    # A line of rank 0 in rank 1's log is no evidence for rank 1.
    looks["spark2"]["engine"]["packed"][0]["rank"] = 0


def spoil_rows(looks):
    looks["spark3"]["shards"]["files"]["1"]["rows"] = [0, 128_002_056]


def spoil_sha(looks):
    looks["spark3"]["shards"]["files"]["14"]["sha256"] = None


def spoil_env(looks):
    looks["spark2"]["container"]["env"]["DSV41_WO_A_W8"] = "0"


def spoil_env_missing(looks):
    del looks["spark1"]["container"]["env"]["MEM_FRACTION_STATIC"]


def spoil_image(looks):
    looks["spark3"]["container"]["image_id"] = "sha256:" + "38" * 32


def spoil_layers(looks):
    looks["spark3"]["images"]["overlay"]["layers_sha256"] = "2b" * 32


def spoil_file(looks):
    looks["spark2"]["container"]["files"]["/opt/sglang/deepseek_v4.py"] = "00" * 32


def spoil_file_absent(looks):
    for look in looks.values():
        look["container"]["files"]["/opt/sglang/deepseek_v4.py"] = None


def spoil_tactics(looks):
    looks["spark2"]["engine"]["tactics"]["state"] = "tuned"


def spoil_pool(looks):
    looks["spark3"]["engine"]["pool_tokens"] = 491_520


def spoil_no_pool(looks):
    looks["spark1"]["engine"]["pool_tokens"] = None


def spoil_fault(looks):
    looks["spark3"]["engine"]["faults"] = [
        {"fault": "oom", "severity": "fatal", "rank": 2, "text": "torch.OutOfMemoryError: CUDA out of memory"}
    ]


def spoil_adapter(looks):
    looks["spark3"]["engine"]["adapters"]["DSV41_AUTOTUNE_KEEP"] = "missing: no such file"


def spoil_adapter_silent(looks):
    del looks["spark2"]["engine"]["adapters"]["DSV41_WO_A_W8"]


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (spoil_packed, "spark2 (rank 1): packed, layer 14: found False, expected True"),
        (spoil_packed_rank, "spark2 (rank 1): packed, layer 1: found no evidence, expected True"),
        (
            spoil_rows,
            "spark3 (rank 2): shard rows, layer 1: found [0, 128002056], expected [256004112, 384006168]",
        ),
        (spoil_sha, f"spark3 (rank 2): shard sha256, layer 14: found None, expected {shard('14', 2)['sha256']}"),
        (spoil_env, f"expected {env_hash(1)}"),
        (spoil_env_missing, f"expected {env_hash(0)}"),
        (spoil_image, f"spark3 (rank 2): image id: found sha256:{'38' * 32}, expected {IMAGE}"),
        (spoil_layers, f"spark3 (rank 2): layers, not spark1's: found {'2b' * 32}, expected {LAYERS}"),
        (spoil_file, "spark2 (rank 1): files in the image: found /opt/sglang/deepseek_v4.py differ"),
        (spoil_file_absent, "spark1 (rank 0): files in the image: found no /opt/sglang/deepseek_v4.py"),
        (spoil_tactics, "spark2 (rank 1): tactics: found tuned, expected reused"),
        (spoil_pool, "spark3 (rank 2): pool_tokens: found 491520, expected 749824"),
        (spoil_no_pool, "spark1 (rank 0): pool_tokens: found None, expected a size"),
        (spoil_fault, "spark3 (rank 2): fault oom: found torch.OutOfMemoryError: CUDA out of memory"),
        (spoil_adapter, "adapter DSV41_AUTOTUNE_KEEP: found differs: spark1: armed; spark2: armed; spark3: missing"),
        (spoil_adapter_silent, "adapter DSV41_WO_A_W8: found differs: spark1: not applicable: no CUDA; spark2: says"),
    ],
)
def test_one_thing_wrong_on_one_rank_is_named_and_spoils_the_launch(plan, looks, spoil, line):
    spoil(looks)
    built = build(plan, looks)
    assert built["ok"] is False
    assert any(line in why for why in built["why"]), built["why"]


class TestCheck:
    def test_no_generation(self, plan, looks):
        for generation in (None, {"text": "", "completion_tokens": 0}, {"text": "x", "completion_tokens": 0}):
            assert [p["what"] for p in receipt.check(build(plan, looks, generation=generation), plan, reuse=True)] == [
                "generation"
            ]

    def test_an_entry_of_agree_that_does_not_hold(self, plan, looks):
        agree = {**AGREE, "clock": {"ok": False, "seen": {"spark3": "+90 s"}}}
        built = build(plan, looks, agree=agree)
        assert built["why"] == ["agree: clock: found {'spark3': '+90 s'}, expected agreement"]

    def test_reuse_where_nothing_was_left_to_reuse(self, plan, looks):
        built = build(plan, looks, reuse=False)
        assert built["ok"] is False
        assert built["why"][0].startswith("spark1 (rank 0): tactics: found reused, expected tuned or none")

    def test_without_knowledge_of_the_boot_only_agreement_counts(self, plan, looks):
        assert build(plan, looks, reuse=None)["ok"] is True
        for look in looks.values():
            look["engine"]["tactics"]["state"] = "none"
        assert build(plan, looks, reuse=None)["ok"] is True
        looks["spark2"]["engine"]["tactics"]["state"] = "tuned"
        assert build(plan, looks, reuse=None)["why"][0].startswith("tactics: found {'spark1': 'none'")

    def test_a_missing_adapter_refuses_only_with_accelerators(self, plan, looks):
        for look in looks.values():
            look["engine"]["adapters"]["DSV41_BLOCK_VERIFY"] = "missing: the overlay does not carry it"
        assert build(plan, looks)["ok"] is True
        built = build({**plan, "accelerators": True}, looks)
        assert built["ok"] is False
        assert "DSV41_BLOCK_VERIFY" in built["why"][0]

    def test_the_receipt_of_another_plan(self, plan, looks):
        built = build(plan, looks)
        other = {**plan, "plan_sha256": "ab" * 32}
        assert [p["what"] for p in receipt.check(built, other, reuse=True)] == [
            "plan_sha256 is not the plan's",
            "the launch is of another plan",
        ]

    def test_a_rank_twice_or_too_many(self, plan, looks):
        built = build(plan, looks)
        twice = {**built, "ranks": [*built["ranks"][:2], built["ranks"][1]]}
        assert {(p["host"], p["what"]) for p in receipt.check(twice, plan, reuse=True)} == {
            ("spark2", "not exactly one entry"),
            ("spark3", "not exactly one entry"),
        }
        more = {**built, "ranks": [*built["ranks"], {**built["ranks"][2], "host": "spark4", "rank": 3}]}
        assert "a rank that the plan does not have" in [p["what"] for p in receipt.check(more, plan, reuse=True)]

    def test_ids_of_two_kinds_of_store_are_not_compared(self, plan, looks):
        looks["spark3"]["images"]["overlay"].update(store="containerd", id="sha256:" + "cc" * 32)
        looks["spark3"]["container"]["image_id"] = "sha256:" + "cc" * 32
        assert build(plan, looks)["why"] == []

    def test_an_unsealed_plan_still_wants_a_hash(self, plan, looks):
        for rank in plan["ranks"]:
            for each in rank["shards"].values():
                each["sha256"] = None
        plan["plan_sha256"] = plans.sha256(plan)
        assert build(plan, looks)["ok"] is True
        looks["spark2"]["shards"]["files"]["1"]["sha256"] = "not a hash"
        assert build(plan, looks)["why"] == [
            "spark2 (rank 1): shard sha256, layer 1: found not a hash, expected 64 hex digits"
        ]


class TestRender:
    def test_a_proven_launch_as_a_table(self, plan, looks):
        assert receipt.render(build(plan, looks)).splitlines() == [
            f"20260924T094700Z-e8-{plan['plan_sha256'][:6]}: proven",
            "  host    rank  image         packed          tactics     env           pool tokens",
            f"  spark1  0     5a5a5a5a5a5a  1=True 14=True  reused (2)  {env_hash(0)[:12]}  749,824",
            f"  spark2  1     5a5a5a5a5a5a  1=True 14=True  reused (2)  {env_hash(1)[:12]}  -",
            f"  spark3  2     5a5a5a5a5a5a  1=True 14=True  reused (2)  {env_hash(2)[:12]}  -",
            "  adapters: 1 armed, 1 not applicable",
        ]

    def test_what_is_wrong_follows(self, plan, looks):
        spoil_packed(looks)
        lines = receipt.render(build(plan, looks)).splitlines()
        assert lines[0].endswith(": not proven")
        assert "1=True 14=False" in lines[3]
        assert lines[-1] == "  spark2 (rank 1): packed, layer 14: found False, expected True"


class TestLaunch:
    def test_parts(self):
        assert receipt.parse_launch("20260924T094700Z-e8+DSV41_VERIFY_CAP=conf-0.2-0a1b2c") == {
            "utc": "20260924T094700Z",
            "name": "e8+DSV41_VERIFY_CAP=conf-0.2",
            "hash": "0a1b2c",
        }

    @pytest.mark.parametrize(
        "launch",
        ["latest", "20260924T094700Z-e8", "20260924T094700Z-../e8-0a1b2c", "20260924T094700Z-e8-0A1B2C", "", "x\n"],
    )
    def test_anything_else_is_refused(self, launch):
        with pytest.raises(LockstepError, match="not a launch id"):
            receipt.parse_launch(launch)


def entry(plan, utc: str, *, ok: bool = True, engine: str | None = None):
    """A journal entry of a launch at ``utc``; ``engine`` makes it another plan."""
    mine = copy.deepcopy(plan)
    mine["engine"] = engine or mine["engine"]
    mine["plan_sha256"] = plans.sha256(mine)
    launch = f"{utc}-e8-{mine['plan_sha256'][:6]}"
    return receipt.entry(mine, {"launch": launch, "arm": "e8", "ok": ok, "why": []}, recorded="2026-09-24T09:47:00Z")


class TestJournal:
    def test_an_entry_comes_back_as_it_was(self, plan, tmp_path):
        (tmp_path / "journal").mkdir()
        written = entry(plan, "20260924T094700Z")
        files.write_json_atomic(receipt.entry_path(str(tmp_path), written["launch"]), written)
        assert receipt.read_entry(str(tmp_path), written["launch"]) == written
        assert written["plan"] == plan

    def test_an_entry_says_who_launched_it_and_the_heads_pool_and_an_older_one_need_not(self, plan, looks):
        built = build(plan, looks)
        written = receipt.entry(plan, built, recorded="2026-09-24T09:47:00Z", by="mia@desk")
        assert (written["by"], written["pool_tokens"]) == ("mia@desk", 749_824)
        older = {name: value for name, value in written.items() if name not in ("by", "pool_tokens")}
        assert receipt.parse_entry(older) == older

    def test_newest_first_and_strangers_are_left_alone(self, plan, tmp_path):
        (tmp_path / "journal").mkdir()
        for utc in ("20260924T094700Z", "20260925T010000Z", "20260923T235959Z"):
            one = entry(plan, utc)
            files.write_json_atomic(receipt.entry_path(str(tmp_path), one["launch"]), one)
        (tmp_path / "journal" / "notes.json").write_text("{")
        assert [launch[:16] for launch in receipt.launches(str(tmp_path))] == [
            "20260925T010000Z",
            "20260924T094700Z",
            "20260923T235959Z",
        ]

    def test_no_journal_is_empty(self, tmp_path):
        assert receipt.launches(str(tmp_path)) == []

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": 2}, "another format"),
            ({"plan": None}, "not whole"),
            ({"ok": "yes"}, "not whole"),
            ({"launch": "20260924T094700Z-e8-000000"}, "of another plan than its name"),
        ],
    )
    def test_a_wrong_entry_is_refused(self, plan, change, message):
        with pytest.raises(LockstepError, match=message):
            receipt.parse_entry({**entry(plan, "20260924T094700Z"), **change})

    def test_all_of_the_hash_has_to_be_the_plans(self, plan):
        one = entry(plan, "20260924T094700Z")
        with pytest.raises(LockstepError, match="of another plan"):
            receipt.parse_entry({**one, "plan_sha256": one["plan_sha256"][:6] + "0" * 58})
        with pytest.raises(LockstepError, match="of another plan"):
            receipt.parse_entry({**one, "plan": {**one["plan"], "plan_sha256": None}})

    def test_damage_where_the_hash_is_made_of_it_is_named(self, plan):
        one = entry(plan, "20260924T094700Z")
        del one["plan"]["ranks"][1]["argv"]
        with pytest.raises(LockstepError, match=r"^/srv/x\.json is not whole"):
            receipt.parse_entry(one, "/srv/x.json")

    def test_a_plan_that_was_changed_afterwards_is_refused(self, plan):
        one = entry(plan, "20260924T094700Z")
        one["plan"]["ranks"][1]["env"]["DSV41_WO_A_W8"] = "0"
        with pytest.raises(LockstepError, match="changed after it was sealed"):
            receipt.parse_entry(one)

    def test_ranks_are_joined_and_one_copy_is_enough(self, plan):
        old, new = entry(plan, "20260924T094700Z"), entry(plan, "20260925T094700Z", engine="sglang")
        merged = receipt.merge({"spark1": [new, old], "spark2": [old], "spark3": []})
        assert [(one["launch"], one["hosts"]) for one in merged] == [
            (new["launch"], ["spark1"]),
            (old["launch"], ["spark1", "spark2"]),
        ]

    def test_who_launched_it_is_who_recorded_it_first(self, plan):
        first = entry(plan, "20260924T094700Z") | {"by": "mia@desk"}
        later = first | {"by": "noor@lap", "recorded": "2026-09-25T00:00:00Z"}
        for journals in ({"spark1": [later], "spark2": [first]}, {"spark1": [first], "spark2": [later]}):
            (one,) = receipt.merge(journals)
            assert (one["by"], one["hosts"]) == ("mia@desk", ["spark1", "spark2"])

    def test_ranks_that_tell_it_differently_are_refused(self, plan):
        one = entry(plan, "20260924T094700Z")
        with pytest.raises(LockstepError, match="spark2: the journals disagree"):
            receipt.merge({"spark1": [one], "spark2": [{**one, "plan_sha256": "0" * 64}]})

    @pytest.mark.parametrize("when", ["2026-09-23T00:00:00Z", "2026-09-25T00:00:00Z"])
    @pytest.mark.parametrize("hosts", [("spark1", "spark2"), ("spark2", "spark1")])
    def test_whoever_recorded_first_and_however_alike_they_begin(self, plan, when, hosts):
        one = entry(plan, "20260924T094700Z")
        other = {**one, "plan_sha256": one["plan_sha256"][:6] + "0" * 58, "recorded": when}
        with pytest.raises(LockstepError, match=f"{hosts[1]}: the journals disagree"):
            receipt.merge(dict(zip(hosts, ([one], [other]), strict=True)))

    def test_the_newest_proven_entry_that_can_be_read(self, plan, tmp_path):
        assert receipt.newest_proven(str(tmp_path)) is None
        (tmp_path / "journal").mkdir()
        old, new = entry(plan, "20260924T010000Z"), entry(plan, "20260924T020000Z", engine="b")
        failed = entry(plan, "20260924T030000Z", engine="c", ok=False)
        for one in (old, new, failed):
            files.write_json_atomic(receipt.entry_path(str(tmp_path), one["launch"]), one)
        (tmp_path / "journal" / "20260924T040000Z-e8-abcdef.json").write_text('{"half')
        assert receipt.newest_proven(str(tmp_path)) == new

    @pytest.mark.parametrize("text", [None, "{", "[]", '{"launch": 1}'])
    def test_a_note_of_a_stop_that_says_nothing_is_none(self, tmp_path, text):
        if text is not None:
            (tmp_path / "stopped.json").write_text(text)
        assert receipt.stopped(str(tmp_path)) is None


class TestPrevious:
    def test_the_launch_before_the_running_one(self, plan):
        first, second = entry(plan, "20260924T010000Z"), entry(plan, "20260924T020000Z", engine="b")
        assert receipt.previous([first, second], second["launch"])["launch"] == first["launch"]

    def test_a_relaunch_of_the_same_plan_and_an_unproven_one_are_stepped_over(self, plan):
        entries = [
            entry(plan, "20260924T010000Z"),
            entry(plan, "20260924T020000Z", engine="b"),
            entry(plan, "20260924T030000Z", engine="c", ok=False),
            entry(plan, "20260924T040000Z", engine="b"),
        ]
        assert receipt.previous(entries, entries[3]["launch"])["launch"] == entries[0]["launch"]

    def test_going_back_twice_returns(self, plan):
        # As helm does: the rollback is a launch like any other, and the one before it is where it came from.
        first, second = entry(plan, "20260924T010000Z"), entry(plan, "20260924T020000Z", engine="b")
        back = entry(plan, "20260924T030000Z")
        assert receipt.previous([first, second, back], back["launch"])["launch"] == second["launch"]

    def test_with_nothing_running_the_newest_proven_one(self, plan):
        entries = [
            entry(plan, "20260924T010000Z"),
            entry(plan, "20260924T020000Z", engine="b"),
            entry(plan, "20260924T030000Z", engine="c", ok=False),
        ]
        assert receipt.previous(entries, None)["launch"] == entries[1]["launch"]

    def test_nothing_to_go_back_to(self, plan):
        only = entry(plan, "20260924T010000Z")
        with pytest.raises(LockstepError, match="no earlier launch") as error:
            receipt.previous([only], only["launch"])
        assert error.value.next_step is not None
