"""History: where a rollback goes, what taking a feature back means, and how launches differ.

Expected values are those of the campaign's report, section "Rollback", and of its exact final configuration.
"""

from __future__ import annotations

import copy
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from lockstep_core import history, plan, receipt
from lockstep_core.errors import LockstepError, PlanRefused
from values import build, shipped

HOSTS = ["spark1", "spark2", "spark3"]
PREFETCH = "DSV41_ENGRAM_PREFETCH"


def entry(hour: int, arm: str, *, ok: bool = True, image: str = "1", **arguments: Any) -> dict[str, Any]:
    """A journal's entry of an arm that was launched on 2026-09-24."""
    made = build(arm, **arguments)
    shards = {rank["host"]: dict.fromkeys(rank["shards"], f"{rank['rank']:064x}") for rank in made["ranks"]}
    sealed = plan.seal(made, overlay={"id": f"sha256:{image * 64}"}, shards=shards)
    launch = plan.launch_id(sealed, datetime(2026, 9, 24, hour, 30, 5, tzinfo=UTC))
    proof = {
        "launch": launch,
        "arm": sealed["name"],
        "ok": ok,
        "why": [],
        "ranks": [{"rank": 0, "pool_tokens": 749824}],
    }
    return receipt.entry(sealed, proof, recorded=f"2026-09-24T{hour:02}:33:00Z", by="mia@desk") | {"hosts": HOSTS}


def back(entries: list[dict[str, Any]], current: str | None, **options: Any) -> dict[str, Any]:
    return history.back_to(receipt.newest_first(entries), current, options, shipped)


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """Keys that differ, with both values; the same on every rank, or this fails."""
    each = [
        {
            key: (before["env"].get(key), after["env"].get(key))
            for key in {*before["env"], *after["env"]} - {plan.TACTICS_KEY}
            if before["env"].get(key) != after["env"].get(key)
        }
        for before, after in zip(one["ranks"], other["ranks"], strict=True)
    ]
    assert each[1:] == each[:-1]
    return each[0]


def look(launch: str | None, state: str = "running") -> dict[str, Any]:
    return {"container": {"launch": launch, "state": state}}


# --- to ---------------------------------------------------------------------------------------------------------------

B1, E8, E9, E8_AGAIN = entry(1, "b1"), entry(2, "e8"), entry(3, "e9"), entry(4, "e8", image="2")
FAILED = entry(5, "e10", ok=False)
ONCE = entry(6, "e8", set={"DSV41_VERIFY_CAP": "conf:0.3"})
JOURNAL = [B1, E8, E9, E8_AGAIN, FAILED, ONCE]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (E8["launch"], E8),
        (E8["launch"][:12], E8),
        ("20260924T05", FAILED),  # by its id also what was not proven
        ("e8", E8_AGAIN),
        ("e8+DSV41_VERIFY_CAP=conf-0.3", ONCE),
        ("b1", B1),
    ],
)
def test_a_launch_is_named_by_its_id_the_beginning_of_it_or_its_arm(wanted: str, found: dict[str, Any]) -> None:
    assert back(JOURNAL, ONCE["launch"], to=wanted) == found["plan"]


@pytest.mark.parametrize(
    ("wanted", "message", "says"),
    [
        ("20260924T0", "several launches begin with", E9["launch"]),
        ("e88", "did you mean e8?", "arms b1, e10, e8, e8+DSV41_VERIFY_CAP=conf-0.3, e9; launches 20260924T063005Z-"),
        ("e10", "no launch 'e10' in the journal", f"-e to={FAILED['launch']} launches one that was not proven"),
        ("", "no launch '' in the journal", "ansible-playbook history.yml shows all"),
    ],
)
def test_what_names_no_launch_is_refused_with_what_there_is(wanted: str, message: str, says: str) -> None:
    with pytest.raises(LockstepError, match=re.escape(message)) as refused:
        back(JOURNAL, ONCE["launch"], to=wanted)
    assert says in str(refused.value)


def test_what_an_arm_is_by_now_does_not_matter_to_a_launch_of_it() -> None:
    def broken() -> Any:
        raise AssertionError("a journal's entry needs no arms and no switches")

    assert history.back_to(JOURNAL, ONCE["launch"], {"to": "b1"}, broken) == B1["plan"]
    assert history.back_to(receipt.newest_first(JOURNAL), ONCE["launch"], {}, broken) == E8_AGAIN["plan"]
    assert history.back_to(JOURNAL, ONCE["launch"], {"tactics": "purge"}, broken) == ONCE["plan"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "e8", "feature": PREFETCH}, "to and feature are different ways back"),
        ({"to": "e8", "campaign": "true"}, "to and campaign are different ways back"),
        ({"tactics": "clear"}, "expected: purge"),
        ({"campaign": "b0"}, "expected: true"),
        ({"feature": "DSV41_ENGRAM_PREFECH"}, f"did you mean {PREFETCH}?"),
    ],
)
def test_options_that_cannot_be_are_refused_with_what_can(options: dict[str, str], says: str) -> None:
    with pytest.raises(LockstepError) as refused:
        back(JOURNAL, E8["launch"], **options)
    assert says in str(refused.value)


def test_no_is_as_if_it_had_not_been_given() -> None:
    assert back(JOURNAL, ONCE["launch"], campaign="false", to="b1") == B1["plan"]


@pytest.mark.parametrize("options", [{"feature": PREFETCH}, {"campaign": "true"}, {"tactics": "purge"}])
@pytest.mark.parametrize("current", [None, "20260924T120000Z-e8-abcdef"])
def test_what_starts_from_what_runs_needs_its_entry(options: dict[str, str], current: str | None) -> None:
    with pytest.raises(LockstepError, match="no rank has the journal entry" if current else "nothing runs") as refused:
        back(JOURNAL, current, **options)
    assert "-e to=" in str(refused.value)


def test_what_runs_is_the_newest_where_a_run_that_was_cut_off_left_two() -> None:
    looks = {"spark1": look(E8["launch"]), "spark2": look(E9["launch"]), "spark3": {"container": None}, "spark4": None}
    assert history.newest(looks) == E9["launch"]
    assert history.newest({"spark1": None, "spark2": look(None)}) is None


def everywhere(launch: str | None, **others: Any) -> dict[str, Any]:
    return {**{host: look(launch) for host in HOSTS}, **others}


@pytest.mark.parametrize(
    ("looks", "runs"),
    [
        (everywhere(E8["launch"]), E8["launch"]),
        (everywhere(E8["launch"], spark4=None), E8["launch"]),  # its plan has three ranks
        (everywhere(FAILED["launch"]), FAILED["launch"]),
        (everywhere("20260924T120000Z-e8-abcdef"), "20260924T120000Z-e8-abcdef"),  # no journal has it: all ranks do
        (everywhere("20260924T120000Z-e8-abcdef", spark4=None), None),
        (everywhere(None), None),
        *((everywhere(E8["launch"], spark2=other), None) for other in (None, {"container": None})),
        (everywhere(E8["launch"], spark1={"container": {"launch": E8["launch"], "state": "exited"}}), None),
        (everywhere(E8["launch"], spark3={"container": {"launch": E9["launch"], "state": "running"}}), None),
    ],
)
def test_a_launch_runs_only_on_every_rank_of_its_plan(looks: dict[str, Any], runs: str | None) -> None:
    assert history.running(looks, JOURNAL) == runs


@pytest.mark.parametrize("state", ["exited", "created"])
def test_from_what_crashed_or_is_half_booted_the_way_back_is_to_the_newest_proven_launch(state: str) -> None:
    entries = [B1, E8]
    looks = everywhere(E8["launch"], spark3=look(E8["launch"], state))
    assert back(entries, history.running(looks, entries)) == E8["plan"]
    assert back(entries, history.running(everywhere(E8["launch"]), entries)) == B1["plan"]


def test_when_the_next_launch_fails_what_is_there_is_served_again() -> None:
    looks = everywhere(E9["launch"])
    looks["spark1"] |= {"journal": None}  # lost, or damaged, there alone
    looks["spark2"] |= {"journal": E8}
    looks["spark3"] |= {"journal": E9, "journal_newest": None}
    assert history.there(looks) == history.before(looks) == E9
    # Of a cut-off way back to e8 one rank has it again, the others what failed.
    looks = everywhere(FAILED["launch"], spark2={**look(E8["launch"]), "journal": E8})
    looks["spark1"] |= {"journal": None, "journal_newest": E8_AGAIN, "stopped": None}
    assert history.before(looks) == E8


def test_with_none_there_it_is_the_newest_proven_one_unless_it_was_stopped_on_purpose() -> None:
    def gone(newest: dict[str, Any] | None, stopped: str | None = None) -> dict[str, Any]:
        return {"container": None, "journal": None, "journal_newest": newest, "stopped": stopped}

    looks = {"spark1": gone(E8), "spark2": gone(E9), "spark3": None}
    assert history.there(looks) is None
    assert history.before(looks) == E9
    assert history.before({"spark1": gone(E8, E8["launch"]), "spark2": gone(E8, E8["launch"])}) is None
    # A launch that was proven after the stop makes its note void; one rank that was stopped speaks for the fleet.
    assert history.before({"spark1": gone(E9, E8["launch"]), "spark2": gone(E9)}) == E9
    assert history.before({"spark1": gone(E9), "spark2": gone(E9, E9["launch"])}) is None
    assert history.before({"spark1": gone(None), "spark2": None}) is None


# --- feature and campaign ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "differs"),
    [
        (PREFETCH, {PREFETCH: ("1", "0")}),
        ("EP_SIZE", {"EP_SIZE": ("1", "3")}),
        ("DSPARK_BLOCK_SIZE", {"DSPARK_BLOCK_SIZE": ("5", "3"), "DSV41_VERIFY_CAP": ("conf:0.1", "0")}),
        (
            "DSV41_WO_A_W8",
            {"DSV41_WO_A_W8": ("1", "0"), "DSV41_WO_A_W8_MID": ("1", "0"), "DSV41_WO_A_W8_DROP": ("1", "0")},
        ),
        ("DSV41_DRAFT_HEAD_FP8", {"DSV41_DRAFT_HEAD_FP8": ("1", "0")}),
        ("DSV41_AUTOTUNE_KEEP", {"DSV41_AUTOTUNE_KEEP": ("1", "0")}),
    ],
)
def test_the_reports_recipes_for_a_single_feature(key: str, differs: dict[str, tuple[str, str]]) -> None:
    made = back([E8], E8["launch"], feature=key)
    assert differing(E8["plan"], made) == differs
    assert made["images"] == E8["plan"]["images"]
    assert (made["plan_sha256"], made["arm"]) == (None, "e8")


def test_a_second_feature_goes_beside_the_first_and_an_unset_key_stays_unset() -> None:
    first = entry(7, "e8", set={PREFETCH: "0"}, unset=["MAX_TOTAL_TOKENS"])
    made = back([first], first["launch"], feature="DSV41_DRAFT_HEAD_FP8")
    assert differing(first["plan"], made) == {"DSV41_DRAFT_HEAD_FP8": ("1", "0")}
    assert (made["set"], made["unset"]) == ({"DSV41_DRAFT_HEAD_FP8": "0", PREFETCH: "0"}, ["MAX_TOTAL_TOKENS"])
    again = back([first], first["launch"], feature="MAX_TOTAL_TOKENS")
    assert differing(first["plan"], again) == {"MAX_TOTAL_TOKENS": (None, "750000")}


def test_a_key_without_a_base_value_is_unset_again() -> None:
    sampled = entry(7, "e8", set={"SGLANG_DSPARK_FOLDED_SAMPLING": "1"})
    made = back([sampled], sampled["launch"], feature="SGLANG_DSPARK_FOLDED_SAMPLING")
    assert differing(sampled["plan"], made) == {"SGLANG_DSPARK_FOLDED_SAMPLING": ("1", None)}


@pytest.mark.parametrize(
    ("running", "key", "found"),
    [
        (B1, PREFETCH, f"{PREFETCH}=0 (base)"),
        (E8, "TP_SIZE", "TP_SIZE=3 (fleet)"),
        (E8, "SGLANG_DSPARK_FOLDED_SAMPLING", "SGLANG_DSPARK_FOLDED_SAMPLING is unset"),
    ],
)
def test_what_neither_arm_nor_one_off_changed_cannot_be_taken_back(
    running: dict[str, Any], key: str, found: str
) -> None:
    with pytest.raises(PlanRefused, match="nothing to take back") as refused:
        back([running], running["launch"], feature=key)
    assert refused.value.found == found
    if running is E8:
        assert "DSV41_WO_A_W8, DSV41_WO_A_W8_DROP, DSV41_WO_A_W8_MID" in str(refused.value.expected)


def without(change: Any) -> PlanRefused:
    """What taking the prefetch out of e8 says after ``change`` to fleet and catalog."""

    def values() -> tuple[dict[str, Any], dict[str, Any]]:
        fleet, catalog = (copy.deepcopy(value) for value in shipped())
        change(fleet, catalog)
        return fleet, catalog

    with pytest.raises(PlanRefused) as refused:
        history.back_to([E8], E8["launch"], {"feature": PREFETCH}, values)
    return refused.value


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda _, catalog: catalog["arms"]["e8"]["changes"].update(CHUNKED_PREFILL_SIZE="512"),
            "CHUNKED_PREFILL_SIZE 1024 (now 512)",
        ),
        (
            lambda fleet, _: fleet["hosts"][1].update(env={"DSV41_IO_THREADS": "64"}),
            "DSV41_IO_THREADS 96 (now 64) on spark2",
        ),
        (
            lambda _, catalog: catalog["profile"]["args"].append({"arg": "--new-flag"}),
            "arguments of spark1 ---new-flag",
        ),
        (lambda fleet, _: fleet["hosts"][2].update(engram_dir="/elsewhere"), "mounts of spark3"),
        (lambda _, catalog: catalog["arms"].pop("e8"), "unknown arm 'e8'"),
    ],
)
def test_a_feature_is_not_taken_back_with_other_changes_beside_it(change: Any, found: str) -> None:
    refused = without(change)
    assert refused.rule == "definition-changed"
    assert str(refused.found).startswith(found)
    assert E8["launch"] in refused.message


def test_another_tree_and_its_base_are_no_change_of_the_running_launch() -> None:
    def moved() -> tuple[dict[str, Any], dict[str, Any]]:
        fleet, catalog = copy.deepcopy(shipped())
        catalog["images"]["overlay"] = {**catalog["images"]["overlay"], "context_sha256": "e" * 64}
        return fleet, catalog

    made = history.back_to([E8], E8["launch"], {"feature": PREFETCH}, moved)
    assert made["images"] == E8["plan"]["images"]


def test_a_rule_judges_what_will_run() -> None:
    # Block verification carries the cap; without the pair e8 has block 5 and no cap, which only warns.
    made = back([E8], E8["launch"], feature="DSV41_BLOCK_VERIFY")
    assert differing(E8["plan"], made) == {"DSV41_BLOCK_VERIFY": ("1", "0"), "DSV41_VERIFY_CAP": ("conf:0.1", "0")}
    assert "block5-without-cap" in [warning["id"] for warning in made["warnings"]]


def test_a_rule_that_refuses_what_is_left_can_be_accepted() -> None:
    def strict() -> tuple[dict[str, Any], dict[str, Any]]:
        fleet, catalog = copy.deepcopy(shipped())
        next(rule for rule in catalog["rules"] if rule["id"] == "block5-without-cap")["severity"] = "refuse"
        return fleet, catalog

    options = {"feature": "DSV41_VERIFY_CAP"}
    with pytest.raises(PlanRefused, match="refused by rule block5-without-cap"):
        history.back_to([E8], E8["launch"], options, strict)
    made = history.back_to([E8], E8["launch"], options, strict, ["block5-without-cap"])
    assert made["accepted"] == ["block5-without-cap"]


def test_the_campaign_began_with_b0_whose_flags_are_b1s() -> None:
    made = back([E8], E8["launch"], campaign="true")
    assert (made["arm"], made["set"]) == ("b1", {})
    assert differing(B1["plan"], made) == {}


# --- differences and the table ----------------------------------------------------------------------------------------


def test_one_line_a_difference_and_the_rank_where_only_it_differs() -> None:
    head = copy.deepcopy(E8["plan"])
    head["ranks"][0]["env"]["DSV41_IO_THREADS"] = "64"
    head["images"]["base"]["digest"] = "sha256:" + "3d" * 32
    digest = E8["plan"]["images"]["base"]["digest"].removeprefix("sha256:")[:12]
    assert history.differences(E8["plan"], head) == [
        f"base image {digest} (now 3d3d3d3d3d3d)",
        "DSV41_IO_THREADS 96 (now 64) on spark1",
    ]
    assert history.differences(E8["plan"], E8_AGAIN["plan"]) == ["overlay 111111111111 (now 222222222222)"]
    assert history.differences(E9["plan"], E8["plan"]) == ["DSV41_VERIFY_CAP conf:0.2 (now conf:0.1)"]
    assert history.differences(E8["plan"], E8["plan"]) == []
    packed = copy.deepcopy(E8["plan"])
    packed["ranks"][2]["shards"]["14"]["sha256"] = "5a" * 32
    assert history.differences(E8["plan"], packed) == ["shards of spark3 not as now"]


def test_the_table_marks_what_runs_and_shows_how_the_others_differ() -> None:
    old = {name: value for name, value in B1.items() if name not in ("by", "pool_tokens")} | {"hosts": ["spark2"]}
    _, catalog = shipped()
    looks = {"spark1": look(E9["launch"]), "spark2": look(E9["launch"]), "spark3": look(E9["launch"], "exited")}
    rows = history.rows(receipt.newest_first([old, E8, E9]), looks, catalog["arms"])
    lines = history.render(rows, HOSTS)
    assert [re.split(r"  +", line.strip()) for line in lines[:4]] == [
        ["launch", "when (UTC)", "by", "pool tokens", "proven", "verdict", "entry on"],
        [
            f"*  {E9['launch']}".split()[0],
            E9["launch"],
            "2026-09-24 03:30:05",
            "mia@desk",
            "749,824",
            "yes",
            "neutral",
            "all",
        ],
        ["runs now on spark1 spark2"],
        [E8["launch"], "2026-09-24 02:30:05", "mia@desk", "749,824", "yes", "promoted", "all"],
    ]
    assert lines[4] == "     DSV41_VERIFY_CAP conf:0.1 (now conf:0.2)"
    assert re.split(r"  +", lines[5].strip()) == [
        B1["launch"],
        "2026-09-24 01:30:05",
        "-",
        "-",
        "yes",
        "accepted",
        "spark2",
    ]
    # Nine keys make e9 out of b1's: six are named, the rest are counted.
    assert lines[6].startswith("     DSPARK_BLOCK_SIZE 3 (now 5); DSV41_AUTOTUNE_KEEP 0 (now 1); ")
    assert lines[6].endswith("; 4 more")
    whole = history.render(rows[2:], HOSTS, whole=True)
    assert len(whole) == 2 + 10
    assert "     EP_SIZE 3 (now 1)" in whole


def test_what_runs_without_having_been_proven_is_named() -> None:
    looks = {"spark1": look(E8["launch"]), "spark2": look(E9["launch"]), "spark3": None}
    says = f"spark2: {E9['launch']} is running, and no journal has it: it was not proven"
    assert history.unrecorded([E8], looks) == [says]


def test_with_nothing_running_there_is_nothing_to_differ_from() -> None:
    rows = history.rows([E8], {"spark1": look(E8["launch"], "exited"), "spark2": None}, {})
    assert (rows[0]["runs_on"], rows[0]["differs"], rows[0]["verdict"]) == ([], None, None)
    assert len(history.render(rows, HOSTS)) == 2


def test_no_key_that_a_plan_may_hold_is_a_secret() -> None:
    # A journal has the whole environment, so what may stand in it must be nobody's password.
    secret = re.compile(r"SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|_TOKEN$|_KEY$")
    _, catalog = shipped()
    assert [key for key in catalog["switches"] if secret.search(key)] == []
    with pytest.raises(PlanRefused, match="unknown key 'HF_TOKEN'"):
        build("e8", set={"HF_TOKEN": "hf_x"})
