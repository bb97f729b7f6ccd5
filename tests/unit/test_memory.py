"""The memory planner against the campaign's boots."""

from typing import Any

import pytest
from lockstep_core import memory, plan
from values import build, shipped

FLEET, CATALOG = shipped()
DATA = CATALOG["memory"]

# KV calculations before the pin, as the log gives them. The margin between boots of one arm is half a GB, 299k tokens.
MEASURED = {"e1c": 792576, "e4": 1072384, "e5": 956928, "e8": 929024}


def estimate(arm: str) -> dict[str, Any]:
    env = plan.environments(FLEET, CATALOG, arm)["spark1"][0]
    return memory.estimate(DATA, [arm], env, 3)


@pytest.mark.parametrize(("arm", "tokens"), MEASURED.items())
def test_measured_boots_lie_in_the_estimate(arm: str, tokens: int) -> None:
    low, high = estimate(arm)["kv_tokens"]
    assert low <= tokens <= high
    assert high - low == pytest.approx(2 * 500e6 / 1670.75, abs=2)


def test_what_an_arm_adds_is_its_documents_figure() -> None:
    # The log, E5: about 210 MiB, and the calculation fell by as much.
    assert estimate("e5")["parts"]["FP8 twin of the draft's LM head"] == 0
    assert estimate("e4")["parts"]["FP8 twin of the draft's LM head"] == -210 * 2**20
    # The report's memory table: 1280 MB of bf16 copies released, 640 MB of twins kept.
    assert estimate("e1")["parts"]["bf16 copies of wo_a released"] == 1280 * 10**6
    assert estimate("b1")["parts"]["FP8 twins of wo_a"] == -640 * 10**6
    assert estimate("e11")["parts"]["twins of the draft's wo_a"] == 48 * 10**6


def test_an_arm_that_could_not_boot_is_said_to_be_doubtful() -> None:
    assert "may not boot" in estimate("e1")["text"]
    assert "may not boot" not in estimate("e8")["text"]


def test_the_pool_is_cut_at_the_pin() -> None:
    found = estimate("e8")
    assert found["pin_tokens"] == 750000
    assert found["pool_tokens"][1] == 750000
    env = plan.environments(FLEET, CATALOG, "e8")["spark1"][0]
    del env["MAX_TOTAL_TOKENS"]
    without = memory.estimate(DATA, ["e8"], env, 3)
    assert without["pool_tokens"] == without["kv_tokens"]


def test_a_row_cache_costs_what_it_says() -> None:
    env = {**plan.environments(FLEET, CATALOG, "e8")["spark1"][0], "DSV41_CACHE_GIB": "0.25"}
    assert memory.estimate(DATA, ["e8"], env, 3)["parts"]["Engram row cache"] == 2**28


def test_the_transient_and_what_it_means_for_a_prompt() -> None:
    # 14 B x chunk x prefix
    assert memory.transient_bytes(DATA, 1024, 190886) == 14 * 1024 * 190886
    found = build("final768")["memory"]["prompt"]
    # The prompt whose transient at 768 equals that of the longest that went through at 1024; nobody measured it.
    assert found == {
        "measured": 0,
        "failed": None,
        "by_chunk": 190886 * 1024 // 768,
        # A boot with half a GB less has half a GB less for it.
        "by_chunk_low": (14 * 1024 * 190886 - 500_000_000) // (14 * 768),
    }
    assert "chunk 768: unmeasured" in "\n".join(build("final768")["memory"]["lines"])
    known = build("final")["memory"]["prompt"]
    assert (known["measured"], known["failed"], known["by_chunk"]) == (190886, 200000, 190886)


def test_the_crash_of_the_afternoon_is_foretold() -> None:
    """Final, one new prompt of about 200k at chunk 1024: past what had gone through, and the head went down."""
    made = build("final")["memory"]
    assert made["prompt"]["by_chunk"] < 200_000 == made["prompt"]["failed"]
    text = "\n".join(made["lines"])
    assert "190,886 tokens went through, about 200,000 took the head down" in text
    # 14 B x 1024 x 262144 = 3.758 GB
    assert "262,144 tokens, one chunk of which needs 3.76 GB: more than has gone through" in text


# --- what is free on the head -----------------------------------------------------------------------------------------


def test_what_fills_the_head_adds_up_to_its_memory() -> None:
    for arm in ("b1", "e1c", "e5", "e8", "e11", "final768"):
        found = estimate(arm)
        assert sum(row["bytes"] for row in found["bytes"]) == 124610 * 2**20, arm
        assert all(row["source"] for row in found["bytes"]), arm
    sizes = {row["what"]: row["bytes"] for row in estimate("e8")["bytes"]}
    assert sizes["weights"] == 94 * 2**30
    assert sizes["KV pool"] == round(750000 * 1670.75)
    # What no document splits up is the same in every arm.
    rest = {
        next(row["bytes"] for row in estimate(arm)["bytes"] if row["what"] == "all else") for arm in ("b1", "e4", "e8")
    }
    assert max(rest) - min(rest) < 1671  # a token of the pool


def test_a_head_that_has_its_pool_at_the_pin_keeps_the_rest_free() -> None:
    # f1: 2 GB, its pool below the pin. e8 calculated 929,024 tokens and took 750,000 of them.
    middle = {row["what"]: row["bytes"] for row in estimate("e8")["bytes"]}["free"]
    assert middle == pytest.approx(2e9 + (929024 - 750000) * 1670.75, abs=2)
    low, high = estimate("e8")["free_bytes"]
    assert low == pytest.approx(2e9, abs=2)  # half a GB less: the pool shrinks and takes it all
    assert high == pytest.approx(middle + 5e8, abs=2)


def test_a_smaller_pin_leaves_more_for_a_prompt() -> None:
    env = {**plan.environments(FLEET, CATALOG, "e8")["spark1"][0], "MAX_TOTAL_TOKENS": "650000"}
    found = memory.estimate(DATA, ["e8"], env, 3)
    saved = 100_000 * 1670.75
    assert found["pool_tokens"][1] == 650000
    assert found["prompt"]["by_chunk"] == pytest.approx(190886 + saved / (14 * 1024), abs=2)


def test_the_smallest_fraction_of_any_rank_sizes_the_pool() -> None:
    # 0.944 of 111.47 GiB is 0.718 GB less than 0.95 of it.
    less = 0.006 * 111.47 * 2**30 / 1670.75
    for changes in ({"MEM_FRACTION_STATIC": "0.944"}, {"HEAD_MEM_FRACTION_STATIC": "0.944"}):
        low, high = build("e8", set=changes)["memory"]["kv_tokens"]
        assert (low + high) / 2 == pytest.approx(929024 - less, abs=2)
    # Only the head's own fraction keeps memory of the head out of the engine's hands.
    head = build("e8", set={"HEAD_MEM_FRACTION_STATIC": "0.944"})["memory"]["bytes"][-1]["bytes"]
    assert head == pytest.approx(2e9 + 0.006 * 111.47 * 2**30, rel=1e-6)


def test_a_measured_figure_stands_beside_the_estimate() -> None:
    assert "measured on final768: 5.20 GB free, after a hard reset" in "\n".join(build("final768")["memory"]["lines"])
    assert "measured on" not in "\n".join(build("e9")["memory"]["lines"])
    assert "free on the head" in "\n".join(plan.summary(build("e9")))


def test_a_measurement_counts_for_its_arm_its_descendants_and_its_chunk() -> None:
    def tokens(arm: str, chunk: str = "1024", ranks: int = 3) -> int:
        from_arms = build(arm)["lineage"]
        return int(memory.measured_prompt(DATA, from_arms, {"CHUNKED_PREFILL_SIZE": chunk}, ranks)["tokens"])

    assert tokens("e8") == tokens("e9") == tokens("final") == 190886
    assert tokens("e6b") == 28700
    assert tokens("b1") == 95500
    assert tokens("e8", "768") == 0
    # The campaign had three ranks; another fleet has another share of everything on each.
    assert tokens("e8", ranks=4) == tokens("e8", ranks=2) == 0
    changes = {"CONTEXT_LENGTH": "100000", "DSV41_TP_PAD": "0"}
    four = build("e8", fleet={"tp_size": 4}, set=changes)
    assert "context-beyond-measured" in [warning["id"] for warning in four["warnings"]]
    assert "context-beyond-measured" not in [
        warning["id"] for warning in build("e8", set=changes | {"DSV41_TP_PAD": "1"})["warnings"]
    ]


def test_without_a_chunk_nothing_is_said_of_prompts() -> None:
    found = memory.estimate(DATA, ["e8"], {}, 3)
    assert (found["prompt"]["by_chunk"], found["known"]) == (None, True)
    assert not [line for line in found["lines"] if "prompt" in line]


def test_nothing_is_predicted_where_nothing_was_measured() -> None:
    assert memory.estimate(DATA, ["e8"], {}, 4)["known"] is False
    assert build("e8", fleet={"accelerators": False})["memory"]["known"] is False
