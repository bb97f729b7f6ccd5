"""The values in group_vars: whole, consistent with each other, and those of the campaign's documents.

Expected values are copied from the documents here, by hand; nothing is read from the files under test twice.
"""

import re
import shlex
from typing import Any

import pytest
import yaml
from lockstep_core import arms, engram, plan, rules, switches, tactics
from lockstep_core.errors import PlanRefused
from values import ROOT, build, shipped

FLEET, CATALOG = shipped()
SCHEMA, ARMS, RULES = CATALOG["switches"], CATALOG["arms"], CATALOG["rules"]
RULE_IDS = [rule["id"] for rule in RULES]

# The report's section "Exact final configuration": the changed keys, then those that it names as unchanged.
SEED_FINAL = {
    "EP_SIZE": "1",
    "DSV41_WO_A_W8": "1",
    "DSV41_WO_A_W8_MID": "1",
    "DSV41_WO_A_W8_DROP": "1",
    "DSV41_DRAFT_HEAD_FP8": "1",
    "DSV41_VERIFY_CAP": "conf:0.1",
    "DSV41_BLOCK_VERIFY": "1",
    "DSV41_ENGRAM_PREFETCH": "1",
    "DSPARK_BLOCK_SIZE": "5",
    "DSV41_AUTOTUNE_KEEP": "1",
}
SEED_UNCHANGED = {
    "TP_SIZE": "3",
    "NNODES": "3",
    "MEM_FRACTION_STATIC": "0.95",
    "HEAD_MEM_FRACTION_STATIC": "0.95",
    "MAX_TOTAL_TOKENS": "750000",
    "MAX_RUNNING_REQUESTS": "4",
    "CHUNKED_PREFILL_SIZE": "1024",
    "DSV41_CACHE_GIB": "0",
    "DSV41_MXFP8_BACKEND": "b12x",
    "SGLANG_FLASHINFER_MOE_FUSED_FINALIZE": "0",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    "CONTEXT_LENGTH": "262144",
}
# "NCCL settings as before", and the rest of the environment that every arm of the campaign had.
BASE = {
    "OFFLOAD_MODE": "nvme",
    "SPEC_ALGO": "DSPARK",
    "DSV41_PACKED_DIR": "/engram",
    "DSV41_CACHE_WAYS": "4",
    "DSV41_IO_THREADS": "96",
    "DSV41_RESIDENT_SCALES": "0",
    "DSV41_STATS_SECONDS": "60",
    "DSV41_TP_PAD": "1",
    "DSV41_PREFILL_EMPTY_CACHE_TOKENS": "8192",
    "NCCL_NET": "IB",
    "NCCL_IB_DISABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV",
    "NCCL_BUFFSIZE": "1048576",
    "NCCL_LL128_BUFFSIZE": "262144",
    "NCCL_PROTO": "^LL128",
    "NCCL_MAX_NCHANNELS": "8",
    "NCCL_CUMEM_ENABLE": "0",
    "GLOO_SOCKET_IFNAME": "enP7s7",
    "NCCL_SOCKET_IFNAME": "enP7s7",
    "NCCL_IB_HCA": "rocep1s0f0,rocep1s0f1",
    "DIST_PORT": "20000",
    "PORT": "8888",
    "SGLANG_DSV41_REASONING_EFFORT": "75",
    "DSV41_MAX_NEW_TOKENS": "32768",
    "DSV41_LOOP_ABORT": "1",
    "DSV41_LOOP_NGRAM": "32",
    "DSV41_LOOP_REPEATS": "4",
    "DSV41_LOOP_LINE_REPEATS": "8",
}
# Adapter switches, "all off unless an arm sets them".
OFF = {
    "DSV41_WO_A_W8_DRAFT": "0",
    "DSV41_ENGRAM_PREFETCH_CHECK": "0",
    "DSV41_DRAFT_TAU": "1",
    "DSV41_FOLDED_FENCE": "0",
    "DSV41_SHARED_PAD_K": "0",
}
B0 = {
    **SEED_UNCHANGED,
    **BASE,
    **OFF,
    **dict.fromkeys(SEED_FINAL, "0"),
    "EP_SIZE": "3",
    "DSPARK_BLOCK_SIZE": "3",
}


def env(arm: str) -> dict[str, str]:
    """The head's environment of an arm, launchable or not."""
    return plan.environments(FLEET, CATALOG, arm)["spark1"][0]


# --- the data is whole ------------------------------------------------------------------------------------------------


def test_the_schema_is_whole() -> None:
    switches.check_schema(SCHEMA)
    assert {key for key, entry in SCHEMA.items() if entry.get("volatile")} == {
        key for key in SCHEMA if tactics.is_volatile(key)
    }


def test_every_key_of_the_facts_has_its_default_and_a_section() -> None:
    facts = {
        **SEED_UNCHANGED,
        **BASE,
        **OFF,
        **dict.fromkeys(SEED_FINAL, "0"),
        "EP_SIZE": "3",
        "DSPARK_BLOCK_SIZE": "3",
    }
    assert switches.defaults(SCHEMA) == facts
    # Unset until an arm says otherwise: the engine decides, or no argument is given.
    assert {key for key in SCHEMA if key not in facts} == {
        "SGLANG_DSPARK_FOLDED_SAMPLING", "SGLANG_DSPARK_FAST_KERNEL", "SGLANG_DSPARK_FP32_LM_HEAD",
        "MIN_FREE_SLOTS_DELAY", "DSPARK_SPS_TABLE", "SLEEP_ON_IDLE",
    }  # fmt: skip
    assert next(iter(SCHEMA.values()))["section"]
    # A key that becomes an argument is one of the profile's, and the other way round.
    arguments = {key for entry in CATALOG["profile"]["args"] for key in keys_of(entry)}
    assert {key for key, entry in SCHEMA.items() if entry["where"] == "arg"} == arguments


def keys_of(entry: dict[str, Any]) -> set[str]:
    """Keys that an argument of a profile is made from: in its values, its condition, or the rendezvous's address."""
    named = {
        word
        for text in (entry.get("value"), entry.get("head_value"))
        for word in re.findall(r"{([A-Z0-9_]+)}", text or "")
    }
    if "when" in entry:
        named |= rules.keys(entry["when"])
    return named | ({"DIST_PORT"} if entry["arg"] == "--dist-init-addr" else set())


def test_every_arm_has_its_parents_and_only_known_keys_and_values() -> None:
    arms.check(SCHEMA, ARMS)
    for name, arm in ARMS.items():
        assert arm["why"], name
        assert arm["verdict"], name
        assert arm["source"], name
        # Values are quoted: YAML would make 0.8 a number and conf:0.1 is text anyway.
        assert all(isinstance(value, str) for value in arm["changes"].values()), name


def test_all_rules_are_whole() -> None:
    rules.check(RULES, SCHEMA, plan.FACTS)


def test_variables_have_one_home_and_a_comment() -> None:
    seen: dict[str, str] = {}
    for path in sorted((ROOT / "group_vars" / "all").glob("*.yml")):
        lines = path.read_text().splitlines()
        for name in yaml.safe_load(path.read_text()):
            assert name not in seen, f"{name} is in {path.name} and in {seen[name]}"
            seen[name] = path.name
            above = lines[next(n for n, line in enumerate(lines) if line.startswith(f"{name}:")) - 1]
            assert above.startswith(("#", "fleet_", "engram_", "measure_")), f"{name} in {path.name} has no comment"
    wrong = [name for name in seen if not name.startswith(("fleet_", "engram_", "measure_"))]
    assert wrong == []


def test_nothing_in_group_vars_names_a_secret() -> None:
    text = " ".join(path.read_text() for path in (ROOT / "group_vars").rglob("*.yml")).lower()
    assert "password" not in text
    assert not any(word in key for key in SCHEMA for word in ("SECRET", "PASSWORD", "API_KEY", "HF_TOKEN"))


# --- the campaign's arms ----------------------------------------------------------------------------------------------


def test_the_arms_are_those_of_the_campaign() -> None:
    assert list(ARMS) == [
        "b0", "b1", "e1", "e1b", "e1c", "e2", "e3", "e4", "e5", "e6a", "e6b", "e7", "e8", "e9", "e10",
        "f1", "f2", "e11", "f3", "final", "final768",
    ]  # fmt: skip


def test_the_base_is_the_original_configuration_key_by_key() -> None:
    assert env("b0") == B0
    assert env("b1") == B0


@pytest.mark.parametrize("arm", ["e8", "f1", "f2", "f3", "final"])
def test_the_final_environment_is_the_seeds_key_by_key(arm: str) -> None:
    expected = {**BASE, **OFF, **SEED_UNCHANGED, **SEED_FINAL}
    assert env(arm) == expected


def test_the_default_arm_is_final_with_chunk_768() -> None:
    default = yaml.safe_load((ROOT / "group_vars/all/arms.yml").read_text())["fleet_default_arm"]
    assert default == "final768"
    assert env(default) == {**env("final"), "CHUNKED_PREFILL_SIZE": "768"}


# Each arm against its parent, by the campaign's report.
STEPS = [
    ("b1", "b0", {}),
    ("e1", "b1", {"DSV41_WO_A_W8": "1", "DSV41_AUTOTUNE_KEEP": "1"}),
    ("e1b", "e1", {"DSV41_WO_A_W8_DROP": "1"}),
    ("e1c", "e1b", {}),
    ("e2", "e1c", {"DSV41_WO_A_W8_MID": "1"}),
    ("e3", "e2", {"DSPARK_BLOCK_SIZE": "5"}),
    ("e4", "e3", {"DSV41_VERIFY_CAP": "conf:0.1", "DSV41_BLOCK_VERIFY": "1"}),
    ("e5", "e4", {"DSV41_DRAFT_HEAD_FP8": "1"}),
    ("e6a", "e5", {"DSV41_ENGRAM_PREFETCH": "1", "DSV41_ENGRAM_PREFETCH_CHECK": "1"}),
    ("e6b", "e5", {"DSV41_ENGRAM_PREFETCH": "1"}),
    ("e7", "e6b", {"DSV41_DRAFT_TAU": "0.8"}),
    ("e8", "e6b", {"EP_SIZE": "1"}),
    ("e9", "e8", {"DSV41_VERIFY_CAP": "conf:0.2"}),
    ("e10", "e8", {"DSPARK_BLOCK_SIZE": "3", "DSV41_VERIFY_CAP": "0"}),
    ("e11", "final", {"DSV41_WO_A_W8_DRAFT": "1"}),
    ("e11", "f2", {"DSV41_WO_A_W8_DRAFT": "1"}),
    ("e1c", "e1b", {}),
    ("final", "e8", {}),
    ("final768", "final", {"CHUNKED_PREFILL_SIZE": "768"}),
]


@pytest.mark.parametrize(("arm", "against", "changes"), STEPS)
def test_an_arm_is_its_parent_plus_its_changes(arm: str, against: str, changes: dict[str, str]) -> None:
    assert env(arm) == {**env(against), **changes}


# Medians and acceptance of the report's first table and of the log, by hand.
FIGURES = [
    ("b0", "c1_code", 44.65, [42.39, 44.79], ("code", 3.27), 491520),
    ("b1", "c4_agg", 66.88, [66.23, 70.15], ("c4", 2.46), 226816),
    ("e2", "c1_chat", 31.96, [30.76, 32.53], ("chat", 2.20), 749824),
    ("e8", "c1_prose2", 32.59, [31.92, 32.69], ("prose2", 1.83), 749824),
    ("f1", "c1_code", 62.69, [62.00, 62.76], ("code", 4.00), 658176),
    ("f2", "c4_agg", 75.79, [73.36, 76.60], ("c4", 2.34), 749824),
]


@pytest.mark.parametrize(("arm", "workload", "median", "spread", "accept", "pool"), FIGURES)
def test_figures_are_those_of_the_documents(
    arm: str, workload: str, median: float, spread: list[float], accept: tuple[str, float], pool: int
) -> None:
    measured = ARMS[arm]["measured"]
    assert measured["medians"][workload] == median
    assert measured["ranges"][workload] == spread
    assert measured["accept"][accept[0]] == accept[1]
    assert measured["pool_tokens"] == pool
    assert min(spread) <= median <= max(spread)


def test_every_median_lies_in_its_range() -> None:
    pairs = [
        (measured["medians"][workload], spread)
        for measured in (arm["measured"] for arm in ARMS.values())
        for workload, spread in measured.get("ranges", {}).items()
    ]
    assert len(pairs) == 53
    assert [pair for pair in pairs if not pair[1][0] <= pair[0] <= pair[1][1]] == []


# The campaign's documents as data: group_vars must hold all of it. Its names of fields, and ours.
CAMPAIGN = yaml.safe_load((ROOT / "tests/unit/data/campaign-20260924.yml").read_text())["arms"]
CALLED = {"post768": "final768"}
FIELDS = {
    "non_env_changes": "beside",
    "kv_pool": "pool_tokens",
    "kv_calc": "pool_calculated_tokens",
    "autotune": "tactics",
    "chat_10_reps": "chat_10_repetitions",
    "host_available_gb": "memavailable_gb_by_rank",
}
# What is checked elsewhere, or in other words: notes, the file of a launcher that is gone.
ELSEWHERE = {"parent", "changes", "explicit_off", "unknown", "notes", "env_file"}


def given(value: Any) -> Any:
    """What a document gives: null means that it does not, at any depth of a mapping."""
    if isinstance(value, dict):
        return {key: given(item) for key, item in value.items() if item is not None}
    return value


@pytest.mark.parametrize("name", CAMPAIGN)
def test_an_arm_holds_all_of_the_campaigns_documents(name: str) -> None:
    arm = ARMS[CALLED.get(name, name)]
    wanted: dict[str, Any] = {}
    for field, value in CAMPAIGN[name].items():
        if field.startswith("pct_stated"):
            wanted[f"percent_against_{value['against']}"] = {key: it for key, it in value.items() if key != "against"}
        elif field == "host_available_gb":  # an arm names no machine
            wanted[FIELDS[field]] = [value["spark1"], value["spark2"], value["spark3"]]
        elif field not in ELSEWHERE and given(value) not in (None, {}):
            wanted[FIELDS.get(field, field)] = given(value)
    assert {field: arm["measured"].get(field, arm.get(field)) for field in wanted} == wanted
    # And nothing that the documents do not give.
    rounded = {"pool_calculated_tokens"} if name == "post768" else set()  # "a 1.24M budget"
    assert set(arm["measured"]) - rounded <= set(wanted), name


@pytest.mark.parametrize("name", CAMPAIGN)
def test_an_arm_changes_what_the_campaigns_documents_say(name: str) -> None:
    theirs, ours = CAMPAIGN[name], CALLED.get(name, name)
    assert ARMS[ours]["changes"] == theirs["changes"]
    # The default arm hangs below `final`, which is f3's configuration by its name.
    assert ARMS[ours]["parent"] == ("final" if name == "post768" else theirs["parent"])
    for key, value in theirs.get("explicit_off", {}).items():
        assert env(ours)[key] == value


@pytest.mark.parametrize(("arm", "instead"), [("b0", "b1"), ("e1b", "e1c")])
def test_history_is_not_launched_and_says_why(arm: str, instead: str) -> None:
    with pytest.raises(PlanRefused) as refusal:
        build(arm)
    assert refusal.value.rule == "not-launchable"
    assert refusal.value.next_step == f"launch {instead}"
    assert env(arm) == env(instead)
    assert build(instead)["name"] == instead


# --- rules ------------------------------------------------------------------------------------------------------------


def tripped(example: dict[str, Any], accept: list[str]) -> list[str]:
    """Ids of the rules that an example trips, warnings and accepted refusals alike."""
    made = build(
        example["arm"],
        fleet=example.get("fleet"),
        set=example.get("set"),
        unset=example.get("unset", ()),
        accept_rule=accept,
    )
    return [*[warning["id"] for warning in made["warnings"]], *made["accepted"]]


@pytest.mark.parametrize("rule", RULES, ids=RULE_IDS)
def test_a_rule_has_an_arm_that_trips_it_and_one_that_does_not(rule: dict[str, Any]) -> None:
    # Other rules may have their say as well (a fleet of four trips TP_PAD); only this one is asked about.
    assert rule["id"] in tripped(rule["trips"], RULE_IDS)
    assert rule["id"] not in tripped(rule["passes"], RULE_IDS)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule["severity"] == "refuse"], ids=lambda rule: rule["id"])
def test_a_refusing_rule_refuses_with_its_reason_and_says_how_to_accept_it(rule: dict[str, Any]) -> None:
    example = rule["trips"]
    with pytest.raises(PlanRefused) as refusal:
        build(example["arm"], fleet=example.get("fleet"), set=example.get("set"))
    text = str(refusal.value)
    assert rule["id"] in text
    assert f"accept_rule={refusal.value.rule}" in text
    assert next(known for known in RULES if known["id"] == refusal.value.rule)["reason"] in text


@pytest.mark.parametrize("arm", ["e8", "final", "final768"])
def test_the_promoted_arms_pass_without_an_exception(arm: str) -> None:
    made = build(arm)
    assert made["accepted"] == []
    assert [warning["id"] for warning in made["warnings"]] == ["context-beyond-measured"]
    assert build(arm, fleet={"memguard": True})["warnings"] == []


def test_e1_is_the_only_other_arm_that_a_rule_refuses() -> None:
    refused = {}
    for name in ARMS:
        try:
            build(name)
        except PlanRefused as refusal:
            refused[name] = refusal.rule
    assert refused == {"b0": "not-launchable", "e1": "w8-without-drop", "e1b": "not-launchable"}


SPELLINGS = [
    "expandable_segments:True",
    "expandable_segments:true",
    "expandable_segments : TRUE",
    "max_split_size_mb:128,expandable_segments:True",
    "garbage_collection_threshold:0.8, expandable_segments: True,max_split_size_mb:64",
    "expandable_segments:1",
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_every_spelling_of_expandable_segments_is_refused(text: str) -> None:
    with pytest.raises(PlanRefused) as refusal:
        build("e8", set={"PYTORCH_CUDA_ALLOC_CONF": text})
    assert refusal.value.rule == "expandable-segments"


@pytest.mark.parametrize("text", ["expandable_segments:False", "expandable_segments:False,pinned_use_x:True", ""])
def test_what_only_looks_like_it_passes(text: str) -> None:
    assert build("e8", set={"PYTORCH_CUDA_ALLOC_CONF": text})["accepted"] == []


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"DIST_PORT": "8888"}, "ports-equal"),
        ({"PORT": "20000"}, "ports-equal"),
        ({"PORT": "9000", "DIST_PORT": 9000}, "ports-equal"),
        ({"DSV41_VERIFY_CAP": "conf:0.1,0.2,0.3,0.4", "DSV41_BLOCK_VERIFY": "0"}, "cap-without-block-verify"),
        ({"DSV41_WO_A_W8": "0"}, "w8-parts-without-w8"),
        ({"DSV41_WO_A_W8_DROP": "0"}, "w8-without-drop"),
        ({"HEAD_MEM_FRACTION_STATIC": "0.96"}, "memory-fraction-too-high"),
        ({"HEAD_MEM_FRACTION_STATIC": "0.9439"}, "memory-fraction-too-low"),
        ({"DSPARK_SPS_TABLE": "/state/sps.json"}, "sps-with-engram"),
        ({"EP_SIZE": "6"}, "ep-does-not-divide-tp"),
    ],
)
def test_what_e8_must_not_become(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(PlanRefused) as refusal:
        build("e8", set=changes)
    assert refusal.value.rule == rule


def test_a_timed_prefetch_arm_wants_a_check_pass_before_it() -> None:
    warned = {
        name: [warning["id"] for warning in plan.assess(FLEET, CATALOG, name)["tripped"]]
        for name in ARMS
        if env(name)["DSV41_ENGRAM_PREFETCH"] == "1"
    }
    assert "e6b" in warned
    assert [name for name, found in warned.items() if "prefetch-without-check-pass" in found] == []
    own = {"mine": {"parent": "b1", "changes": {"DSV41_ENGRAM_PREFETCH": "1"}}}
    check = {"parent": "b1", "changes": {}, "timed": False}

    def ids(**arms_of_mine: Any) -> list[str]:
        catalog = {**CATALOG, "arms": {**ARMS, **own, **arms_of_mine}}
        return [rule["id"] for rule in plan.assess(FLEET, catalog, "mine")["tripped"]]

    assert "prefetch-without-check-pass" in ids()
    counted = {"prefetch_check": {"differing_gathers_per_layer": [0, 3]}}
    assert "prefetch-without-check-pass" in ids(check={**check, "measured": counted})
    counted = {"prefetch_check": {"differing_gathers_per_layer": [0, 0]}}
    assert "prefetch-without-check-pass" not in ids(check={**check, "measured": counted})


# --- what goes back with a key ----------------------------------------------------------------------------------------

# The report's section Rollback, a feature each.
BACK = [
    ("EP_SIZE", {"EP_SIZE": "3"}),
    ("DSPARK_BLOCK_SIZE", {"DSPARK_BLOCK_SIZE": "3", "DSV41_VERIFY_CAP": "0"}),
    ("DSV41_WO_A_W8", {"DSV41_WO_A_W8": "0", "DSV41_WO_A_W8_MID": "0", "DSV41_WO_A_W8_DROP": "0"}),
    ("DSV41_DRAFT_HEAD_FP8", {"DSV41_DRAFT_HEAD_FP8": "0"}),
    ("DSV41_ENGRAM_PREFETCH", {"DSV41_ENGRAM_PREFETCH": "0"}),
    ("DSV41_AUTOTUNE_KEEP", {"DSV41_AUTOTUNE_KEEP": "0"}),
]


@pytest.mark.parametrize(("key", "expected"), BACK)
def test_a_feature_goes_back_with_what_needs_it(key: str, expected: dict[str, str]) -> None:
    assert switches.taken_back(SCHEMA, key, env("final")) == expected


def test_the_check_goes_back_with_prefetch_and_the_drafts_twins_with_w8() -> None:
    found = switches.taken_back(SCHEMA, "DSV41_ENGRAM_PREFETCH", env("e6a"))
    assert found == {"DSV41_ENGRAM_PREFETCH": "0", "DSV41_ENGRAM_PREFETCH_CHECK": "0"}
    assert switches.taken_back(SCHEMA, "DSV41_WO_A_W8", env("e11"))["DSV41_WO_A_W8_DRAFT"] == "0"


@pytest.mark.parametrize("arm", ["e2", "e5", "e6a", "e8", "e11", "final768"])
def test_no_key_taken_back_leaves_a_launch_that_a_rule_refuses(arm: str) -> None:
    for key in SCHEMA:
        found = switches.taken_back(SCHEMA, key, env(arm))
        changes = {name: value for name, value in found.items() if value is not None}
        made = build(arm, set=changes, unset=[name for name, value in found.items() if value is None])
        assert made["ranks"][0]["env"].get(key) == SCHEMA[key]["default"], key


# --- images, engine, engram -------------------------------------------------------------------------------------------


def test_the_base_is_pinned_and_its_split_known() -> None:
    images = CATALOG["images"]
    digest = "sha256:3dbc313030a6ef2c5d7de8ecf48e9aece722694a82182cb618cc82b588816349"
    assert images["base"] == {"repository": "lmsysorg/sglang", "tag": "dev-dsv41", "digest": digest}
    assert images["overlay"]["tag"] == "dsv41-3x-spark:local"
    assert images["builds"][digest]["engram_split"] == "rows"


def test_the_engram_config_is_the_checkpoints() -> None:
    config = CATALOG["engram"]["config"]
    assert {key: engram.REAL_CONFIG[key] for key in config} == config
    assert [table["rows"] for table in engram.layout(config).values()] == [384006168, 384016682]


# The campaign's command line, in its order; then the extra arguments.
CAMPAIGN_ARGV = shlex.split("""
    --model-path /models/DeepSeek-V4.1-Flash --served-model-name deepseek-v4.1-flash --trust-remote-code
    --load-format safetensors --tp 3 --ep-size 1 --attention-backend dsv4 --moe-runner-backend flashinfer_mxfp4
    --mem-fraction-static 0.95 --chunked-prefill-size 1024 --context-length 262144 --max-running-requests 4
    --cuda-graph-max-bs-decode 4 --random-seed 0 --enable-decoder-swa-bounded-replay --tool-call-parser deepseekv41
    --reasoning-parser deepseek-v41 --host 0.0.0.0 --port 8888 --speculative-algorithm DSPARK
    --speculative-dspark-block-size 5 --nnodes 3 --node-rank 2 --dist-init-addr 192.0.2.11:20000
    --max-total-tokens 750000 --fp8-gemm-backend flashinfer_cutlass --watchdog-timeout 1800
""")


def test_the_targets_command_line_is_that_of_the_facts() -> None:
    argv = build("e8")["ranks"][2]["argv"]
    assert argv == ["python3", "-m", "sglang.launch_server", *CAMPAIGN_ARGV]


def lab_profile(engine: str) -> dict[str, Any]:
    values = yaml.safe_load((ROOT / "inventory/lab/group_vars/fleet/engine.yml").read_text())
    if engine == "sim":
        return {**CATALOG["profile"], **values["fleet_lab_sim_differs"]}
    profile: dict[str, Any] = values["fleet_lab_sglang"]
    return profile


def test_every_argument_of_the_facts_is_taken_or_has_a_reason_on_the_labs_engine() -> None:
    profile = lab_profile("sglang")
    wanted = {word for word in CAMPAIGN_ARGV if word.startswith("--")}
    taken = {entry["arg"] for entry in profile["args"]}
    assert wanted - taken - set(profile["not_applicable_args"]) == set()
    assert set(profile["not_applicable_keys"]) <= set(SCHEMA)
    fleet, catalog = shipped(accelerators=False)
    made = plan.build(fleet, {**catalog, "profile": profile}, "e8")
    assert {arg for arg, state in made["args"].items() if state.startswith("not applicable")} == {
        *profile["not_applicable_args"],
        "--attention-backend",
    }
    # A key that only becomes such an argument shares its fate, and stays in the environment all the same.
    assert made["keys"]["EP_SIZE"].startswith("not applicable: ")
    assert made["keys"]["TP_SIZE"] == "applied"
    assert made["ranks"][0]["env"]["EP_SIZE"] == "1"
    assert made["ranks"][0]["env"]["SGLANG_USE_CPU_ENGINE"] == "1"


def test_the_simulator_takes_the_targets_whole_command_line() -> None:
    fleet, catalog = shipped(accelerators=False)
    made = plan.build(fleet, {**catalog, "profile": lab_profile("sim")}, "e8")
    assert made["ranks"][2]["argv"] == ["python3", "-m", "lockstep_sim", *CAMPAIGN_ARGV]
    assert {state for state in made["args"].values() if state.startswith("not applicable")} == set()
