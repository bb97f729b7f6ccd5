"""The plan: what it holds, what it hashes, what it refuses; on the values that the repository ships."""

import copy
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from lockstep_core import envfile, history, plan
from lockstep_core.errors import LockstepError, PlanRefused
from values import ROOT, build, shipped


def test_who_runs_what() -> None:
    made = build("e8")
    assert [(rank["host"], rank["rank"], rank["role"], rank["container"]) for rank in made["ranks"]] == [
        ("spark1", 0, "head", "dsv41-head"),
        ("spark2", 1, "worker", "dsv41-worker"),
        ("spark3", 2, "worker", "dsv41-worker"),
    ]
    assert (made["arm"], made["name"], made["tp_size"], made["engine"]) == ("e8", "e8", 3, "dev-dsv41")
    assert made["lineage"] == ["b0", "b1", "e1", "e1b", "e1c", "e2", "e3", "e4", "e5", "e6b", "e8"]
    assert made["ports"] == {"api": 8888, "rendezvous": 20000}
    assert json.loads(json.dumps(made)) == made


def test_a_ranks_shards_are_those_of_the_facts() -> None:
    ranks = build("e8")["ranks"]
    assert [rank["shards"]["1"]["file"] for rank in ranks] == [f"engram-l1-r{n}of3.bin" for n in range(3)]
    assert {rank["shards"]["1"]["bytes"] for rank in ranks} == {33792546880}
    assert [rank["shards"]["14"]["bytes"] for rank in ranks] == [33793471936, 33793472200, 33793472200]
    assert ranks[0]["shards"]["1"]["rows"] == [0, 128002056]
    assert {shard["split"] for rank in ranks for shard in rank["shards"].values()} == {"rows"}
    assert {shard["sha256"] for rank in ranks for shard in rank["shards"].values()} == {None}


def test_a_ranks_mounts_are_its_own_paths_under_common_names() -> None:
    head, worker = (
        {mount["target"]: (mount["source"], mount["read_only"]) for mount in rank["mounts"]}
        for rank in build("e8")["ranks"][:2]
    )
    assert head["/models/DeepSeek-V4.1-Flash"] == ("/srv/models/DeepSeek-V4.1-Flash", True)
    assert head["/state"] == ("/srv/lockstep", False)
    assert head["/root/.cache"] == ("/root/.cache", False)
    assert head["/engram"] == ("/home/spark/dsv41-engram", True)
    assert worker["/engram"] == ("/home/spark/dsv41-3x-spark/engram", True)


# --- the order of values ----------------------------------------------------------------------------------------------


def test_each_step_of_the_order_wins_over_the_one_before() -> None:
    key = "DSV41_IO_THREADS"
    fleet, catalog = shipped()
    catalog["arms"] = {**catalog["arms"], "own": {"parent": "b1", "changes": {}}}

    def head(changes: dict[str, Any] | None = None) -> tuple[str, str]:
        rank = plan.build(fleet, catalog, "own", changes=changes)["ranks"][0]
        return rank["env"][key], rank["origin"][key]

    seen = [head()]
    catalog["profile"] = {**catalog["profile"], "env": {key: "10"}}
    seen.append(head())
    fleet["env"] = {**fleet["env"], key: "20"}
    seen.append(head())
    fleet["head_env"] = {key: "30"}
    seen.append(head())
    fleet["hosts"][0] = {**fleet["hosts"][0], "env": {key: "40"}}
    seen.append(head())
    catalog["arms"]["b1"] = {**catalog["arms"]["b1"], "changes": {key: "50"}}
    seen.append(head())
    catalog["arms"]["own"] = {"parent": "b1", "changes": {key: "60"}}
    seen.append(head())
    seen.append(head({key: "70"}))
    assert seen == [
        ("96", "base"),
        ("10", "engine"),
        ("20", "fleet"),
        ("30", "head"),
        ("40", "host"),
        ("50", "arm:b1"),
        ("60", "arm:own"),
        ("70", "set"),
    ]


def test_a_heads_value_is_the_heads_only_and_reaches_its_argument() -> None:
    ranks = build("e8", fleet={"head_env": {"HEAD_MEM_FRACTION_STATIC": "0.945", "DSV41_IO_THREADS": "64"}})["ranks"]
    assert [rank["env"]["DSV41_IO_THREADS"] for rank in ranks] == ["64", "96", "96"]
    fractions = [rank["argv"][rank["argv"].index("--mem-fraction-static") + 1] for rank in ranks]
    assert fractions == ["0.945", "0.95", "0.95"]


def test_the_fleets_size_sets_tp_and_nodes_and_nothing_else_may() -> None:
    made = build("e8", fleet={"tp_size": 2}, accept_rule=["w8-without-drop"])
    assert {(rank["env"]["TP_SIZE"], rank["env"]["NNODES"]) for rank in made["ranks"]} == {("2", "2")}
    assert made["ranks"][0]["origin"]["TP_SIZE"] == "fleet"
    assert made["memory"]["known"] is False
    for key in ("TP_SIZE", "NNODES"):
        with pytest.raises(PlanRefused, match=f"{key}=2 on spark1 does not fit") as refusal:
            build("e8", set={key: "2"})
        assert refusal.value.rule == "fleet-size"


# --- one-off changes --------------------------------------------------------------------------------------------------


def test_a_one_off_names_the_launch_and_can_unset() -> None:
    made = build("e8", set={"DSV41_VERIFY_CAP": "conf:0.2"}, unset=["MAX_TOTAL_TOKENS"])
    assert made["name"] == "e8+DSV41_VERIFY_CAP=conf-0.2+MAX_TOTAL_TOKENS-unset"
    assert (made["set"], made["unset"]) == ({"DSV41_VERIFY_CAP": "conf:0.2"}, ["MAX_TOTAL_TOKENS"])
    head = made["ranks"][0]
    assert head["env"]["DSV41_VERIFY_CAP"] == "conf:0.2"
    assert "MAX_TOTAL_TOKENS" not in head["env"]
    assert "--max-total-tokens" not in head["argv"]
    assert made["args"]["--max-total-tokens"] == "not set"


def test_unset_stays_unset_and_empty_is_something_else() -> None:
    assert "SGLANG_DSPARK_FOLDED_SAMPLING" not in build("e8")["ranks"][0]["env"]
    assert build("e8", set={"NCCL_PROTO": ""})["ranks"][0]["env"]["NCCL_PROTO"] == ""


def test_a_key_that_becomes_an_argument_only_when_set() -> None:
    made = build("e8", set={"MIN_FREE_SLOTS_DELAY": 1, "SLEEP_ON_IDLE": True})
    argv = made["ranks"][0]["argv"]
    assert argv[argv.index("--min-free-slots-delay") + 1] == "1"
    assert argv[-1] == "--sleep-on-idle"
    assert "--sleep-on-idle" not in build("e8", set={"SLEEP_ON_IDLE": "0"})["ranks"][0]["argv"]


def test_a_launch_without_a_draft_has_no_draft_arguments() -> None:
    made = build("b1", unset=["SPEC_ALGO"])
    assert not [word for word in made["ranks"][0]["argv"] if word.startswith("--speculative")]


def test_many_changes_make_a_name_that_still_fits_a_file() -> None:
    keys = {"NCCL_BUFFSIZE": "8192", "NCCL_LL128_BUFFSIZE": "8192", "NCCL_MAX_NCHANNELS": "4", "NCCL_NET": "a/b c"}
    names = {build("e8", set=changes)["name"] for changes in (keys, {**keys, "NCCL_NET": "x"}, {"NCCL_NET": "a/b c"})}
    assert len(names) == 3
    assert all(len(name) < 64 and "/" not in name and " " not in name for name in names)


# --- what must not be launched ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "rule", "says"),
    [
        ({"arm": "e88"}, "unknown-arm", "did you mean e8"),
        ({"arm": "final786"}, "unknown-arm", "did you mean final768"),
        ({"arm": "b0"}, "not-launchable", "two builds"),
        ({"arm": "e8", "set": {"EP_SIZ": "1"}}, "unknown-key", "did you mean EP_SIZE"),
        ({"arm": "e8", "set": {"EP_SIZE": "one"}}, "wrong-value", "expected: int 1.."),
        ({"arm": "e8", "unset": ["EP_SIZE"]}, "wrong-value", "EP_SIZE cannot be unset"),
        ({"arm": "e8", "set": {"EP_SIZE": "2"}}, "ep-does-not-divide-tp", "EP_SIZE=2, tp_size=3"),
        ({"arm": "e8", "accept_rule": ["ep-does-not-divide"]}, "unknown-rule", "did you mean ep-does-not-divide-tp"),
        ({"arm": "e8", "fleet": {"env": {"GLOO_SOCKET": "x"}}}, "unknown-key", "did you mean GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_refusal_names_its_rule_and_the_way_out(arguments: dict[str, Any], rule: str, says: str) -> None:
    with pytest.raises(PlanRefused) as refusal:
        build(**arguments)
    assert refusal.value.rule == rule
    assert says in str(refusal.value)


def test_all_rules_that_refuse_are_named_and_an_accepted_one_is_written_down() -> None:
    changes = {"EP_SIZE": "2", "DSV41_TP_PAD": "0"}
    with pytest.raises(PlanRefused, match="by rule ep-does-not-divide-tp \\(and by tp-pad-off-at-tp3\\)") as refusal:
        build("e8", set=changes)
    assert "-e accept_rule=ep-does-not-divide-tp,tp-pad-off-at-tp3 " in str(refusal.value)
    with pytest.raises(PlanRefused, match="by rule tp-pad-off-at-tp3"):
        build("e8", set=changes, accept_rule=["ep-does-not-divide-tp"])
    made = build("e8", set=changes, accept_rule=["ep-does-not-divide-tp", "tp-pad-off-at-tp3", "expandable-segments"])
    # Only what would have refused counts as accepted.
    assert made["accepted"] == ["ep-does-not-divide-tp", "tp-pad-off-at-tp3"]


def test_a_rule_sees_the_head_and_the_workers() -> None:
    with pytest.raises(PlanRefused) as refusal:
        build("e8", fleet={"head_env": {"HEAD_MEM_FRACTION_STATIC": "0.96"}})
    assert refusal.value.rule == "memory-fraction-too-high"
    fleet, catalog = shipped()
    fleet["hosts"][2] = {**fleet["hosts"][2], "env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    with pytest.raises(PlanRefused) as refusal:
        plan.build(fleet, catalog, "e8")
    assert refusal.value.rule == "expandable-segments"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda hosts: hosts.pop(),
        lambda hosts: hosts.append({**hosts[2], "host": "spark4", "rank": 3}),
        lambda hosts: hosts[2].update(rank=1),
        lambda hosts: hosts[1].update(role="head"),
        lambda hosts: hosts.clear(),
    ],
)
def test_ranks_that_are_not_the_fleets_are_refused(spoil: Any) -> None:
    fleet, catalog = shipped()
    spoil(fleet["hosts"])
    with pytest.raises(PlanRefused, match="fleet_tp_size = 3") as refusal:
        plan.build(fleet, catalog, "e8")
    assert refusal.value.rule == "fleet-ranks"


def test_an_unknown_base_is_refused_rather_than_its_split_guessed() -> None:
    fleet, catalog = shipped()
    catalog["images"]["base"] = {**catalog["images"]["base"], "digest": "sha256:" + "0" * 64}
    with pytest.raises(PlanRefused, match="splits the Engram rows") as refusal:
        plan.build(fleet, catalog, "e8")
    assert refusal.value.rule == "unknown-base"
    catalog["images"]["builds"] = {"sha256:" + "0" * 64: {"engram_split": "heads"}}
    made = plan.build(fleet, catalog, "e8")
    assert made["engram"]["split"] == "heads"
    # The real model, TP3 heads, both layers together.
    sizes = [sum(shard["bytes"] for shard in rank["shards"].values()) for rank in made["ranks"]]
    assert sizes == [67585373072, 67586053664, 67586630240]


def test_a_missing_variable_is_named() -> None:
    fleet_variables = {name: None for name in plan.VARIABLES if name != "fleet_memory"}
    with pytest.raises(LockstepError, match="has no fleet_memory"):
        plan.inputs(fleet_variables, {})


# --- hashes -----------------------------------------------------------------------------------------------------------


def sealed(arm: str = "e8", **arguments: Any) -> dict[str, Any]:
    made = build(arm, **arguments)
    shards = {rank["host"]: {1: "a" * 64, "14": "b" * 64} for rank in made["ranks"]}
    return plan.seal(made, overlay={"id": "sha256:1", "digest": "sha256:2"}, shards=shards)


def test_the_hash_is_that_of_the_canonical_json_of_what_matters() -> None:
    made = sealed()
    fields = ("format", "tp_size", "engine", "images", "engram", "container")
    ranks = ("host", "rank", "role", "container", "env", "argv", "mounts", "shards")
    part = {name: made[name] for name in fields}
    part["ranks"] = [{name: rank[name] for name in ranks} for rank in made["ranks"]]
    text = json.dumps(part, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert made["plan_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    plan.check(made)


def test_arms_with_equal_effect_are_one_plan_and_names_do_not_count() -> None:
    assert len({sealed(arm)["plan_sha256"] for arm in ("e8", "f1", "f2", "f3", "final")}) == 1
    assert sealed("final768")["plan_sha256"] != sealed("final")["plan_sha256"]
    # A one-off that sets what is there anyway is no other launch either.
    assert sealed(set={"EP_SIZE": "1"})["plan_sha256"] == sealed()["plan_sha256"]
    assert sealed(fleet={"memguard": True})["plan_sha256"] == sealed()["plan_sha256"]


def test_everything_that_is_launched_counts() -> None:
    one = sealed()

    def changed(path: list[Any], value: object) -> str:
        other = copy.deepcopy(one)
        place = other
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        return plan.sha256(other)

    hashes = [
        one["plan_sha256"],
        changed(["images", "base", "digest"], "sha256:3"),
        changed(["images", "overlay", "id"], "sha256:3"),
        changed(["ranks", 1, "env", "NCCL_PROTO"], "LL"),
        changed(["ranks", 1, "argv", 0], "python"),
        changed(["ranks", 1, "mounts", 0, "source"], "/other"),
        changed(["ranks", 2, "shards", "14", "sha256"], "c" * 64),
        changed(["container", "shm_size"], "16g"),
    ]
    assert len(set(hashes)) == len(hashes)
    for path in (["arm"], ["name"], ["lineage"], ["warnings"], ["accepted"], ["ranks", 0, "origin"], ["memory"]):
        assert changed(path, "other") == one["plan_sha256"]


def test_a_plan_that_was_changed_after_it_was_sealed_is_found() -> None:
    made = sealed()
    made["ranks"][0]["env"]["EP_SIZE"] = "3"
    with pytest.raises(LockstepError, match="changed after it was sealed"):
        plan.check(made)
    with pytest.raises(LockstepError, match="another format"):
        plan.check({**sealed(), "format": 2})
    whole = sealed()
    del whole["images"]
    with pytest.raises(LockstepError, match="not whole"):
        plan.check(whole)


def test_sealing_refuses_what_the_plan_does_not_have() -> None:
    made = build("e8")
    before = copy.deepcopy(made)
    with pytest.raises(LockstepError, match="no shard of layer 2 on spark1"):
        plan.seal(made, shards={"spark1": {2: "a"}})
    with pytest.raises(LockstepError, match="no shard of layer 1 on spark9"):
        plan.seal(made, shards={"spark9": {1: "a"}})
    with pytest.raises(LockstepError, match="no such field"):
        plan.seal(made, overlay={"ID": "x"})
    plan.seal(made, overlay={"id": "sha256:1"})
    assert made == before


def test_a_launch_is_named_by_time_arm_and_plan() -> None:
    made = sealed(set={"DSV41_VERIFY_CAP": "conf:0.2"})
    when = datetime(2026, 9, 24, 8, 21, 5, tzinfo=UTC)
    assert plan.launch_id(made, when) == f"20260924T082105Z-e8+DSV41_VERIFY_CAP=conf-0.2-{made['plan_sha256'][:6]}"


def test_env_sha256_is_the_rendered_files() -> None:
    made = build("e8")
    for rank in made["ranks"]:
        run = subprocess.run(["sha256sum"], input=envfile.render(rank["env"]).encode(), check=True, capture_output=True)
        assert run.stdout.decode().split()[0] == rank["env_sha256"]
        assert rank["env"]["LOCKSTEP_TACTICS_FINGERPRINT"] == made["tactics_fingerprint"]


def test_the_tactics_fingerprint_follows_facts() -> None:
    def fingerprint(arm: str, **arguments: Any) -> str:
        return str(build(arm, **arguments)["tactics_fingerprint"])

    e8 = fingerprint("e8")
    # e9 reused e8's tactics (the threshold is volatile), e7 those of e6b, e11 those of f2.
    assert fingerprint("e9") == e8
    assert fingerprint("e7") == fingerprint("e6b") == fingerprint("e6a") == fingerprint("e5")
    assert fingerprint("e11") == fingerprint("f2") == e8
    # e10 retuned into e8's directory: the block size is not volatile. EP has keys of its own.
    assert fingerprint("e10") != e8
    assert fingerprint("e6b") != e8
    # Another base is another FlashInfer.
    fleet, catalog = shipped()
    catalog["images"]["builds"] = copy.deepcopy(catalog["images"]["builds"])
    next(iter(catalog["images"]["builds"].values()))["flashinfer"] = "0.6.19"
    assert plan.build(fleet, catalog, "e8")["tactics_fingerprint"] != e8
    # One worker with another NCCL setting: the launch is another one on every rank.
    fleet, catalog = shipped()
    fleet["hosts"][2] = {**fleet["hosts"][2], "env": {"NCCL_BUFFSIZE": "8192"}}
    other = plan.build(fleet, catalog, "e8")
    assert other["tactics_fingerprint"] != e8
    assert {rank["env"]["LOCKSTEP_TACTICS_FINGERPRINT"] for rank in other["ranks"]} == {other["tactics_fingerprint"]}


def test_what_runs_decides_whether_several_features_change_at_once() -> None:
    fleet, catalog = shipped()

    def warned(arm: str, running: str | None) -> list[str]:
        made = plan.build(fleet, catalog, arm)
        warnings = made["warnings"]
        if running:
            there = plan.environments(fleet, catalog, running)["spark1"][0]
            warnings = plan.against_running(made, there, catalog["switches"], catalog["rules"])
        return [str(warning["because"]) for warning in warnings if warning["id"] == "several-features"]

    assert not warned("e8", None)  # against its parent: EP only
    assert not warned("e8", "e6b")
    assert not warned("e8", "f2")  # the same
    assert not warned("e4", "e3")  # cap and block verification are one feature
    (said,) = warned("e8", "b1")
    for feature in ("expert_parallel", "engram_prefetch", "draft_head", "wo_a"):
        assert feature in said, said
    # Other warnings stay.
    made = plan.build(fleet, catalog, "e3")
    there = plan.environments(fleet, catalog, "e2")["spark1"][0]
    assert plan.against_running(made, there, catalog["switches"], catalog["rules"]) == made["warnings"] != []


def test_the_summary_says_what_is_set_and_what_warns() -> None:
    text = "\n".join(plan.summary(build("e8")))
    assert "e8: b0 < b1 < e1" in text
    assert "EP_SIZE=1" in text
    assert "warning context-beyond-measured" in text
    assert "0 rank" not in text


# --- an argument template ---------------------------------------------------------------------------------------------


def test_a_template_that_asks_for_a_fleet_value_that_is_none_is_an_error() -> None:
    with pytest.raises(LockstepError, match="fleet value that does not exist"):
        plan.arguments(
            {"command": ["x"], "args": [{"arg": "--a", "value": "{fleet.rnak}"}]}, {}, {}, {"rank": 0}, "head"
        )


def test_a_template_fills_several_fields_and_values_with_braces_stay() -> None:
    profile = {
        "command": ["x"],
        "args": [
            {"arg": "--at", "value": "{fleet.address}:{PORT}"},
            {"arg": "--json", "value": "{JSON}"},
            {"arg": "--gone", "value": "{PORT}{ABSENT}"},
            {"arg": "--flag"},
            {"arg": "--never", "when": {"key": "PORT", "op": "off"}},
            {"arg": "--other", "value": "cpu", "why": "no GPU"},
            {"arg": "--refused", "value": "1"},
        ],
        "not_applicable_args": {"--refused": "too new"},
    }
    argv, states = plan.arguments(profile, {"PORT": "1", "JSON": '{"a": 1}'}, {}, {"address": "h"}, "worker")
    assert argv == ["x", "--at", "h:1", "--json", '{"a": 1}', "--flag", "--other", "cpu"]
    assert states == {
        "--at": "applied",
        "--json": "applied",
        "--gone": "not set",
        "--flag": "applied",
        "--never": "not set",
        "--other": "not applicable: no GPU",
        "--refused": "not applicable: too new",
    }


def test_building_a_plan_takes_well_under_a_second() -> None:
    build("e8")
    start = time.process_time()
    build("e8")
    assert time.process_time() - start < 0.5


# --- the command line -------------------------------------------------------------------------------------------------


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep_core", *words], cwd=ROOT, check=False, capture_output=True, text=True
    )


def test_the_command_line_plans_and_refuses_with_3() -> None:
    good = run("plan", "--arm", "e8", "--json")
    assert good.returncode == 0, good.stderr
    made = json.loads(good.stdout)
    assert made["ranks"][0]["env"] == build("e8")["ranks"][0]["env"]
    assert len(made["images"]["overlay"]["context_sha256"]) == 64
    bad = run("plan", "--arm", "e8", "--set", "EP_SIZE=2", "--json")
    assert bad.returncode == 3
    assert json.loads(bad.stdout)["rule"] == "ep-does-not-divide-tp"
    assert "refused by rule ep-does-not-divide-tp" in bad.stderr
    passed = run("plan", "--arm", "e8", "--set", "EP_SIZE=2", "--accept-rule", "ep-does-not-divide-tp")
    assert passed.returncode == 0
    assert "accepted against rule ep-does-not-divide-tp" in passed.stdout


def test_the_command_line_shows_the_difference_to_an_arm_that_is_only_history() -> None:
    shown = run("plan", "--arm", "e1c", "--against", "b0").stdout
    lines = [line.strip() for line in shown.splitlines() if line.lstrip().startswith(("+ ", "- "))]
    assert lines == [
        "- DSV41_AUTOTUNE_KEEP=0",
        "+ DSV41_AUTOTUNE_KEEP=1",
        "- DSV41_WO_A_W8=0",
        "+ DSV41_WO_A_W8=1",
        "- DSV41_WO_A_W8_DROP=0",
        "+ DSV41_WO_A_W8_DROP=1",
    ]


def test_an_inventory_that_only_ansible_can_read_says_so() -> None:
    refused = run("plan", "--inventory", "inventory/lab")
    assert refused.returncode == 3
    assert "render.yml" in refused.stderr


def test_the_other_commands(tmp_path: Any) -> None:
    assert json.loads(run("shard-sizes", "--tp", "2", "--split", "heads", "--json").stdout)[1] == 101379729008
    assert "rank 1:  67,586,053,664 bytes" in run("shard-sizes", "--tp", "3", "--split", "heads").stdout
    log = run("parse-log", str(ROOT / "tests/unit/data/sglang-tp3-worker.log"), "--json")
    assert json.loads(log.stdout)["pool_tokens"] == 4096
    good, bad = tmp_path / "good.env", tmp_path / "bad.env"
    good.write_text('A="x"\nB=1\n')
    bad.write_text("export A=1\n")
    checked = run("check-env", str(good), "--json")
    assert json.loads(checked.stdout)["env"] == {"A": '"x"', "B": "1"}
    assert [trap["name"] for trap in json.loads(checked.stdout)["traps"]] == ["A"]
    refused = run("check-env", str(bad))
    assert refused.returncode == 3
    assert "variable 'export A' contains whitespaces" in refused.stderr
    assert run("parse-log", "no-such-file").returncode == 3
    assert run("plan", "--root", str(tmp_path)).returncode == 3


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ("- a: [", "is not YAML"),
        ("", "is no fleet's inventory"),
        ("[]", "is no fleet's inventory"),
        ("fleet: {hosts: {a: {}}}", "is no fleet's inventory"),
        ("fleet: {children: {head: {hosts: [a]}}}", "is no fleet's inventory"),
        ("fleet: {children: {head: {}}}", "no host in group fleet"),
        ("fleet: {children: {head: {hosts: {a: }}}}", "a has no fleet_rank"),
    ],
)
def test_an_inventory_that_is_none_is_refused_with_its_file(hosts: str, why: str, tmp_path: Any) -> None:
    (tmp_path / "hosts.yml").write_text(hosts)
    refused = run("plan", "--inventory", str(tmp_path))
    assert refused.returncode == 3, refused.stderr
    assert why in refused.stderr


def test_variables_of_a_group_count_as_in_ansible(tmp_path: Any) -> None:
    """Those in the inventory's own file lose against group_vars/all, and count where that has no such name."""
    mine = tmp_path / "mine"
    shutil.copytree(ROOT / "inventory/spark", mine)
    path = mine / "hosts.yml"
    text = path.read_text().replace("          fleet_role: worker\n", "")
    path.write_text(
        text.replace(
            "    workers:\n", "    workers:\n      vars: {fleet_role: worker, fleet_host_env: {NCCL_DEBUG: INFO}}\n"
        )
    )
    made = json.loads(run("plan", "--arm", "e8", "--inventory", str(mine), "--json").stdout)
    assert [rank["role"] for rank in made["ranks"]] == ["head", "worker", "worker"]
    assert {rank["env"]["NCCL_DEBUG"] for rank in made["ranks"]} == {"WARN"}
    seen = subprocess.run(
        ["ansible-inventory", "-i", str(mine), "--playbook-dir", str(ROOT), "--list"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    theirs = json.loads(seen.stdout)["_meta"]["hostvars"]["spark2"]
    assert (theirs["fleet_role"], theirs["fleet_host_env"]) == ("worker", {})
    path.write_text(path.read_text().replace("fleet_rank: 2", "fleet_rank: two"))
    refused = run("plan", "--inventory", str(mine))
    assert refused.returncode == 3
    assert "spark3: fleet_rank is no whole number" in refused.stderr


@pytest.mark.parametrize("place", ["host_vars/spark2.yml", "group_vars/head.yml", "group_vars/fleet/more.yaml"])
def test_an_inventory_with_values_elsewhere_is_refused(place: str, tmp_path: Any) -> None:
    shutil.copytree(ROOT / "inventory/spark", tmp_path / "mine")
    (tmp_path / "mine" / place).parent.mkdir(exist_ok=True)
    (tmp_path / "mine" / place).write_text("fleet_host_env: {NCCL_DEBUG: INFO}\n")
    refused = run("plan", "--inventory", str(tmp_path / "mine"))
    assert refused.returncode == 3
    assert place in refused.stderr


def test_the_workers_of_the_shipped_inventory_mount_the_heads_export() -> None:
    """A ``vars`` of a group in hosts.yml would lose against group_vars/all, so the hosts say it themselves."""
    seen = subprocess.run(
        ["ansible-inventory", "-i", "inventory/spark", "--list"], cwd=ROOT, check=True, capture_output=True
    )
    hosts = json.loads(seen.stdout)["_meta"]["hostvars"]
    assert {host: own["fleet_checkpoint_source"] for host, own in hosts.items()} == {
        "spark1": "local",
        "spark2": "nfs",
        "spark3": "nfs",
    }


@pytest.mark.parametrize("text", ['{"ok": true}', '{"ok": false}', '{"ok": true, "ranks": [{}]}', "[1]", "[" * 10**5])
def test_a_receipt_that_is_not_whole_is_refused(text: str, tmp_path: Any) -> None:
    (tmp_path / "receipt.json").write_text(text)
    refused = run("receipt", str(tmp_path / "receipt.json"))
    assert refused.returncode == 3
    assert "receipt" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("place", ["env", "host"])
def test_shards_in_a_place_that_is_not_mounted_are_not_packed(place: str) -> None:
    fleet, catalog = shipped()
    assert plan.assess(fleet, catalog, "e8")["facts"]["packed"] is True
    elsewhere = {"DSV41_PACKED_DIR": "/elsewhere"}
    if place == "env":
        fleet["env"] = {**fleet["env"], **elsewhere}
    else:
        fleet["hosts"][2] = {**fleet["hosts"][2], "env": elsewhere}
    assert plan.assess(fleet, catalog, "e8")["facts"]["packed"] is False
    with pytest.raises(PlanRefused, match="refused by rule packed-dir-elsewhere") as refusal:
        plan.build(fleet, catalog, "e8")
    assert refusal.value.found == "DSV41_PACKED_DIR=/elsewhere, engram_mount=/engram"
    # Where it is mounted is the operator's to say.
    catalog["engram"]["mount"] = "/elsewhere"
    fleet["env"] = {**fleet["env"], **elsewhere}
    assert plan.assess(fleet, catalog, "e8")["facts"]["packed"] is True


def test_a_fleet_of_another_size_is_told_where_its_ep_size_stands() -> None:
    with pytest.raises(PlanRefused, match="ep-does-not-divide-tp") as refusal:
        build("b1", fleet={"tp_size": 4}, set={"DSV41_TP_PAD": "0"})
    assert "fleet_env EP_SIZE" in str(refusal.value)


def test_a_key_is_not_set_and_unset_at_once() -> None:
    with pytest.raises(PlanRefused, match="MAX_TOTAL_TOKENS is both set and unset"):
        build("e8", set={"MAX_TOTAL_TOKENS": "1"}, unset=["MAX_TOTAL_TOKENS"])


def test_several_rules_are_accepted_in_both_spellings() -> None:
    words = ("plan", "--arm", "e8", "--set", "EP_SIZE=2", "--set", "DSV41_TP_PAD=0")
    both = "ep-does-not-divide-tp,tp-pad-off-at-tp3"
    assert f"-e accept_rule={both} (--accept-rule {both} of " in run(*words).stderr
    for passed in (
        run(*words, "--accept-rule", both),
        run(*words, "--accept-rule", "ep-does-not-divide-tp", "--accept-rule", "tp-pad-off-at-tp3"),
    ):
        assert passed.returncode == 0, passed.stderr
        assert "accepted against rule tp-pad-off-at-tp3" in passed.stdout
    assert "unknown rule 'nope'" in run(*words, "--accept-rule", f"{both},nope").stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep_core", "arms"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()  # before it has anything to say
        assert running.stderr.read() == b""
    assert running.returncode == -signal.SIGPIPE


# --- a key back at what it is below the arm ---------------------------------------------------------------------------


def taken_back(fleet: dict[str, Any], arm: str, key: str, **once: Any) -> list[str | None]:
    """What ``rollback.yml -e feature=KEY`` gives each rank of a fleet that runs an arm."""
    _, catalog = shipped()
    catalog["arms"]["own"] = {"parent": "e8", "changes": {"HEAD_MEM_FRACTION_STATIC": "0.948", "EP_SIZE": "3"}}
    rules = [rule["id"] for rule in catalog["rules"]]  # they are not what is asked here
    made = plan.build(fleet, catalog, arm, changes=once.get("set"), unset=once.get("unset", ()), accept_rule=rules)
    entry = {"launch": "20260924T000000Z-x-000000", "plan": made}
    back = history.without(entry, key, fleet, catalog, rules)
    return [rank["env"].get(key) for rank in back["ranks"]]


def test_a_key_goes_back_to_what_the_fleet_says_not_to_the_base() -> None:
    four, _ = shipped(tp_size=4)
    four["env"] = {**four["env"], "EP_SIZE": "4"}
    assert taken_back(four, "e8", "EP_SIZE") == ["4"] * 4
    # The arm has the base's value, which is not the fleet's: there is something to take back.
    assert taken_back(four, "own", "EP_SIZE") == ["4"] * 4


def test_each_rank_has_its_own_value_again_once_a_one_off_is_gone() -> None:
    fleet, _ = shipped()
    fleet["head_env"] = {"HEAD_MEM_FRACTION_STATIC": "0.945"}
    fleet["hosts"][2] = {**fleet["hosts"][2], "env": {"GLOO_SOCKET_IFNAME": "eth9"}}
    key = "HEAD_MEM_FRACTION_STATIC"
    assert taken_back(fleet, "e8", key, set={key: "0.949"}) == ["0.945", "0.95", "0.95"]
    key = "GLOO_SOCKET_IFNAME"
    assert taken_back(fleet, "e8", key, set={key: "eth0"}) == ["enP7s7", "enP7s7", "eth9"]
    assert taken_back(fleet, "e8", key, unset=[key]) == ["enP7s7", "enP7s7", "eth9"]
    # What the arm itself sets stays set by it; a one-off has one value for all ranks.
    with pytest.raises(PlanRefused, match="below the arm the ranks differ") as refusal:
        taken_back(fleet, "own", "HEAD_MEM_FRACTION_STATIC")
    assert refusal.value.rule == "differs-by-rank"
    assert refusal.value.found == "spark1 0.945, spark2 0.95, spark3 0.95"
    assert "-e to=" in str(refusal.value.next_step)
