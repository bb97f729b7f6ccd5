"""What people see of arms and switches: on the command line, from arms.yml, and in docs/switches.md."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lockstep_core import catalog, plan
from lockstep_core.errors import PlanRefused
from playbook import Played, examples, run_file, run_playbook
from values import ROOT, shipped

SPARK = str(ROOT / "inventory/spark")
FLEET, CATALOG = shipped()
ROWS = catalog.listing(FLEET, CATALOG, "final768")
WIDTH = 140


def row(name: str) -> dict[str, Any]:
    return next(one for one in ROWS if one["arm"] == name)


# --- all arms ---------------------------------------------------------------------------------------------------------


def test_the_listing_has_what_the_campaign_says_of_each_arm() -> None:
    assert len(ROWS) == 21
    e8 = row("e8")
    assert (e8["parent"], e8["changes"], e8["verdict"]) == ("e6b", {"EP_SIZE": "1"}, "promoted")
    assert [e8["medians"][key] for key in ("c1_prose", "c1_code", "c1_chat", "c4_agg")] == [34.20, 62.53, 35.82, 75.96]
    assert (e8["accept"]["prose"], e8["accept"]["code"]) == (2.04, 3.98)
    assert [one["arm"] for one in ROWS if one["default"]] == ["final768"]


def test_the_listing_says_why_an_arm_cannot_be_launched() -> None:
    assert [one["arm"] for one in ROWS if not one["launchable"]] == ["b0", "e1", "e1b"]
    assert (row("b0")["instead"], row("e1b")["instead"]) == ("b1", "e1c")
    assert "two builds" in row("b0")["why_not"]
    assert row("e1")["refused_by"] == ["w8-without-drop"]
    assert "0.9503" in row("e1")["why_not"]


def test_the_table_is_readable_at_140_columns() -> None:
    lines = catalog.table(ROWS)
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    (e8,) = [line for line in lines if line.startswith("e8 ")]
    assert " ".join(e8.split()) == ("e8 e6b EP_SIZE=1 34.20 62.53 35.82 75.96 2.04/3.98/2.21 promoted yes progress §10")
    assert "no, see b1" in text
    assert "final768*" in text
    # Nothing is cut: what does not fit goes on in the next line.
    for one in ROWS:
        for key, value in one["changes"].items():
            assert f"{key}={value}" in text


def test_a_long_cell_goes_on_below() -> None:
    own = {
        "an-arm-with-a-rather-long-name": {
            "parent": "e8",
            "changes": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:128"},
            "verdict": "not tried by anybody so far",
        }
    }
    lines = catalog.table(catalog.listing(FLEET, {**CATALOG, "arms": {**CATALOG["arms"], **own}}, "e8"))
    assert max(map(len, lines)) <= WIDTH
    whole = "".join(line[:12].strip() for line in lines if not line[:1].isdigit())
    assert "an-arm-with-a-rather-long-name" in whole


def test_the_tree_has_every_arm_below_its_parent_with_its_changes() -> None:
    lines = catalog.tree(ROWS)
    depth = {line.split("─ ")[-1].split()[0].rstrip("*"): len(line) - len(line.lstrip(" │├└─")) for line in lines}
    assert list(depth) == [line.split("─ ")[-1].split()[0].rstrip("*") for line in lines]
    assert set(depth) == set(CATALOG["arms"])
    for name, arm in CATALOG["arms"].items():
        assert depth[name] == (depth[arm["parent"]] + 3 if arm["parent"] else 0)
    assert "                     └─ e5  DSV41_DRAFT_HEAD_FP8=1" in lines
    assert "                        ├─ e6a  DSV41_ENGRAM_PREFETCH=1 DSV41_ENGRAM_PREFETCH_CHECK=1" in lines


# --- one arm ----------------------------------------------------------------------------------------------------------


def test_one_arm_whole() -> None:
    text = "\n".join(catalog.one_lines(catalog.one(FLEET, CATALOG, "e8")))
    for part in (
        "Experts sharded over all ranks",
        "verdict: promoted",
        "source: progress §10",
        "e1  DSV41_WO_A_W8=1 DSV41_AUTOTUNE_KEEP=1",
        "c1_code   62.53 61.68-62.83 3.98   68.8",
        "pool_calculated_tokens: 929,024",
        "needles_found_tokens [28,700, 95,541, 190,886]",
        "warn context-beyond-measured",
        "GB free on the head",
        "EP_SIZE=1  [arm:e8]",
        "NCCL_NET=IB  [base]",
        "GLOO_SOCKET_IFNAME=enP7s7  [fleet]",
        "TP_SIZE=3  [fleet]",
    ):
        assert part in text, part


def test_an_arm_that_is_history_is_shown_with_its_reason() -> None:
    text = "\n".join(catalog.one_lines(catalog.one(FLEET, CATALOG, "e1b")))
    assert "not launchable: it was a defect of the adapter" in text
    assert "launch e1c instead" in text


def test_a_rule_that_refuses_is_shown_and_so_is_that_it_is_accepted() -> None:
    shown = catalog.show(FLEET, CATALOG, "e8", {"arm": "e8", "set": {"EP_SIZE": "2"}})
    assert "    refuse ep-does-not-divide-tp (EP_SIZE=2, tp_size=3): " in "\n".join(shown["lines"])
    shown = catalog.show(
        FLEET, CATALOG, "e8", {"arm": "e8", "set": {"EP_SIZE": "2"}, "accept_rule": ["ep-does-not-divide-tp"]}
    )
    assert "    refuse, accepted ep-does-not-divide-tp" in "\n".join(shown["lines"])
    with pytest.raises(PlanRefused, match="did you mean ports-equal"):
        catalog.show(FLEET, CATALOG, "e8", {"arm": "e8", "accept_rule": ["port-equal"]})


# --- two arms ---------------------------------------------------------------------------------------------------------


def test_the_difference_names_both_values_and_their_origins() -> None:
    found = {one["key"]: one for one in catalog.difference(FLEET, CATALOG, "e8", "b0")}
    # The report's "Exact final configuration", against the defaults of the base.
    wanted = {
        "EP_SIZE": ("3", "1", "arm:e8"),
        "DSV41_WO_A_W8": ("0", "1", "arm:e1"),
        "DSV41_WO_A_W8_MID": ("0", "1", "arm:e2"),
        "DSV41_WO_A_W8_DROP": ("0", "1", "arm:e1b"),
        "DSV41_DRAFT_HEAD_FP8": ("0", "1", "arm:e5"),
        "DSV41_VERIFY_CAP": ("0", "conf:0.1", "arm:e4"),
        "DSV41_BLOCK_VERIFY": ("0", "1", "arm:e4"),
        "DSV41_ENGRAM_PREFETCH": ("0", "1", "arm:e6b"),
        "DSPARK_BLOCK_SIZE": ("3", "5", "arm:e3"),
        "DSV41_AUTOTUNE_KEEP": ("0", "1", "arm:e1"),
    }
    assert found == {
        key: {
            "key": key,
            "where": "all",
            "there": {"value": there, "origin": "base"},
            "here": {"value": here, "origin": origin},
        }
        for key, (there, here, origin) in wanted.items()
    }


def test_every_origin_has_its_name_and_head_and_workers_are_told_apart() -> None:
    fleet, known = shipped()
    key = "DSV41_IO_THREADS"
    known["profile"] = {**known["profile"], "env": {"NCCL_DEBUG": "INFO"}}
    fleet["env"] = {**fleet["env"], "NCCL_BUFFSIZE": "2097152"}
    fleet["head_env"] = {key: "64"}
    fleet["hosts"][2] = {**fleet["hosts"][2], "env": {"NCCL_PROTO": "LL"}}
    known["arms"] = {**known["arms"], "none": {"parent": "e8", "changes": {}, "unset": ["NCCL_DEBUG_SUBSYS"]}}
    shown = {
        (one["key"], one["where"]): (one["value"], one["origin"])
        for one in catalog.one(fleet, known, "none", changes={"PORT": "9000"}, unset=["MAX_TOTAL_TOKENS"])[
            "environment"
        ]
    }
    assert shown["NCCL_DEBUG", "all"] == ("INFO", "engine")
    assert shown["NCCL_BUFFSIZE", "all"] == ("2097152", "fleet")
    assert shown[key, "head"] == ("64", "head")
    assert shown[key, "workers"] == ("96", "base")
    assert shown["NCCL_PROTO", "spark1"] == shown["NCCL_PROTO", "spark2"] == ("^LL128", "base")
    assert shown["NCCL_PROTO", "spark3"] == ("LL", "host")
    assert shown["EP_SIZE", "all"] == ("1", "arm:e8")
    assert shown["PORT", "all"] == ("9000", "one-off")
    assert shown["MAX_TOTAL_TOKENS", "all"] == (None, "one-off")
    assert shown["NCCL_DEBUG_SUBSYS", "all"] == (None, "arm:none")
    differs = catalog.difference(fleet, known, "none", "e8", changes={key: "32"}, unset=["MAX_TOTAL_TOKENS"])
    assert [(one["key"], one["where"], one["there"], one["here"]) for one in differs] == [
        (key, "head", {"value": "64", "origin": "head"}, {"value": "32", "origin": "one-off"}),
        (key, "workers", {"value": "96", "origin": "base"}, {"value": "32", "origin": "one-off"}),
        ("MAX_TOTAL_TOKENS", "all", {"value": "750000", "origin": "base"}, {"value": None, "origin": "one-off"}),
        ("NCCL_DEBUG_SUBSYS", "all", {"value": "INIT,ENV", "origin": "base"}, {"value": None, "origin": "arm:none"}),
    ]
    assert any("unset" in line for line in catalog.difference_lines("none", "e8", differs))


def test_a_difference_that_only_one_rank_has_is_shown_whole() -> None:
    fleet, known = shipped()
    fleet["hosts"][1] = {**fleet["hosts"][1], "env": {"DSPARK_BLOCK_SIZE": "2"}}
    known["arms"] = {**known["arms"], "twin": {"parent": "b1", "changes": {"DSPARK_BLOCK_SIZE": "3"}}}
    differs = catalog.difference(fleet, known, "twin", "b1")
    assert [(one["where"], one["there"]["value"], one["here"]["value"]) for one in differs] == [
        ("spark1", "3", "3"),
        ("spark2", "2", "3"),
        ("spark3", "3", "3"),
    ]


def test_an_empty_value_is_not_an_unset_one() -> None:
    differs = catalog.difference(FLEET, CATALOG, "e8", "e8", changes={"NCCL_PROTO": ""})
    assert differs[0]["here"] == {"value": "", "origin": "one-off"}
    assert '""' in catalog.difference_lines("e8", "e8", differs)[1]
    assert catalog.difference_lines("f1", "e8", catalog.difference(FLEET, CATALOG, "f1", "e8")) == [
        "f1 and e8 have the same environment on every rank"
    ]


# --- the command line -------------------------------------------------------------------------------------------------


def run(*words: str, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep_core", *words], cwd=where, check=False, capture_output=True, text=True
    )


def test_the_command_line_shows_arms() -> None:
    assert run("arms").stdout == "\n".join([*catalog.table(ROWS), "", *catalog.tree(ROWS)]) + "\n"
    assert run("arms", "--tree").stdout == "\n".join(catalog.tree(ROWS)) + "\n"
    assert json.loads(run("arms", "--json").stdout) == json.loads(json.dumps(ROWS))
    one = run("arms", "--arm", "e8", "--set", "DSV41_VERIFY_CAP=conf:0.2", "--json")
    assert json.loads(one.stdout)["name"] == "e8+DSV41_VERIFY_CAP=conf-0.2"
    # Of the default arm, when none is named.
    differs = json.loads(run("arms", "--against", "final", "--json").stdout)
    assert [(found["key"], found["there"], found["here"]) for found in differs] == [
        (
            "CHUNKED_PREFILL_SIZE",
            {"value": "1024", "origin": "arm:final"},
            {"value": "768", "origin": "arm:final768"},
        )
    ]
    refused = run("arms", "--arm", "e88")
    assert (refused.returncode, "did you mean e8" in refused.stderr) == (3, True)


def test_the_difference_of_a_plan_is_in_its_json_too() -> None:
    made = json.loads(run("plan", "--arm", "e9", "--against", "e8", "--json").stdout)
    assert made["arm"] == "e9"
    assert made["against"] == {"arm": "e8", "difference": catalog.difference(FLEET, CATALOG, "e9", "e8")}


def test_own_arms_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text('mine: {parent: e8, changes: {DSV41_VERIFY_CAP: "conf:0.3"}, why: a try}\n')
    words = ("--root", str(ROOT), "--arms-file", "mine.yml", "--json")
    made = json.loads(run("plan", "--arm", "mine", *words, where=tmp_path).stdout)
    assert made["ranks"][0]["env"]["DSV41_VERIFY_CAP"] == "conf:0.3"
    assert made["lineage"][-2:] == ["e8", "mine"]
    assert json.loads(run("arms", *words, where=tmp_path).stdout)[-1]["arm"] == "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine: [", "mine.yml is not YAML"),
        ("mine: {parent: e8}\nmine: {parent: e9}\n", "mine stands here twice"),
        ("- mine\n", "mine.yml: this holds no arms"),
        ("e8: {parent: b1}\n", "mine.yml: e8 is an arm that Lockstep comes with"),
        ("mine: {parent: e8, changes: {DSV41_IO_THREADS: 010}}\n", "DSV41_IO_THREADS is written 010"),
        ("mine: {parent: e8, measured: {medians: nonsense}}\n", "arm mine: measured: medians is wrong"),
        ("mine: {parent: e8, changes: {EP_SIZ: 1}}\n", "mine.yml: unknown key 'EP_SIZ', did you mean EP_SIZE?"),
    ],
)
def test_an_own_file_that_is_wrong_on_the_command_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text(text)
    refused = run("plan", "--arm", "mine", "--root", str(ROOT), "--arms-file", "mine.yml", where=tmp_path)
    assert refused.returncode == 3
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr


# --- ansible-playbook arms.yml ----------------------------------------------------------------------------------------


def arms_yml(*words: str) -> Played:
    return run_file(ROOT / "arms.yml", *words, inventory=SPARK)


@pytest.mark.ansible
def test_the_playbook_lists_all_arms_without_asking_a_rank() -> None:
    played = arms_yml()
    assert (played.rc, played.changed) == (0, 0), played.text
    result = played.results["Show the arms"]
    assert result["arms"] == json.loads(json.dumps(ROWS))
    assert result["lines"] == [*catalog.table(ROWS), "", *catalog.tree(ROWS)]
    assert "\n".join(result["lines"]) in played.text


@pytest.mark.ansible
def test_the_playbook_shows_an_arm_and_a_difference() -> None:
    result = arms_yml("-e", "arm=e8").results["Show the arms"]
    assert result["arm"] == json.loads(json.dumps(catalog.one(FLEET, CATALOG, "e8")))
    words = [
        "-e",
        "arm=e8",
        "-e",
        "against=b0",
        "-e",
        '{"set": {"DSV41_IO_THREADS": 64}}',
        "-e",
        "unset=MAX_TOTAL_TOKENS",
    ]
    played = arms_yml(*words)
    expected = catalog.difference(
        FLEET, CATALOG, "e8", "b0", changes={"DSV41_IO_THREADS": "64"}, unset=["MAX_TOTAL_TOKENS"]
    )
    assert played.results["Show the arms"]["difference"] == expected


@pytest.mark.ansible
@pytest.mark.parametrize(
    ("words", "rule", "says"),
    [
        (["-e", "arm=e88"], "unknown-arm", "did you mean e8"),
        (["-e", "arm=e8", "-e", "against=finale"], "unknown-arm", "did you mean final"),
        (["-e", "amr=e8"], "unknown-variable", "did you mean arm?"),
        (["-e", "arm=e8", "-e", '{"set": {"EP_SIZ": 1}}'], "unknown-key", "did you mean EP_SIZE"),
        (["-e", "arm=e8", "-e", "accept_rule=port-equal"], "unknown-rule", "did you mean ports-equal"),
        (["-e", "arms_file=no/such/file.yml"], "arms-file", "no/such/file.yml"),
    ],
)
def test_the_playbook_refuses(words: list[str], rule: str, says: str) -> None:
    played = arms_yml(*words)
    assert played.rc != 0
    result = played.results["Show the arms"]
    assert result["rule"] == rule
    assert says in result["msg"]


@pytest.fixture
def own_file() -> Any:
    """A file of own arms in the place where ansible-playbook runs, so that a relative path can be meant."""
    path = ROOT / ".ansible" / "own-arms-of-a-test.yml"
    path.parent.mkdir(exist_ok=True)
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.ansible
def test_own_arms_in_the_playbooks(own_file: Path) -> None:
    own_file.write_text(
        yaml.safe_dump({"mine": {"parent": "e8", "changes": {"DSV41_VERIFY_CAP": "{{ 1 + 1 }}"}, "why": "a try"}})
    )
    words = ("-e", "arm=mine", "-e", f"arms_file={own_file.relative_to(ROOT)}")
    refused = arms_yml(*words).results["Show the arms"]
    assert f"{own_file}: DSV41_VERIFY_CAP cannot be '{{{{ 1 + 1 }}}}' (arm mine)" in refused["msg"]  # never a template
    own_file.write_text(yaml.safe_dump({"mine": {"parent": "e8", "changes": {"DSV41_VERIFY_CAP": "conf:0.3"}}}))
    played = arms_yml(*words, "-e", "against=e8")
    (differs,) = played.results["Show the arms"]["difference"]
    assert differs["here"] == {"value": "conf:0.3", "origin": "arm:mine"}
    # serve.yml plans it too; there it ends at the first rank that is asked, which does not exist.
    served = run_file(ROOT / "serve.yml", *words, inventory=SPARK)
    assert served.results["Plan the launch"]["plan"]["lineage"][-2:] == ["e8", "mine"]
    rendered = run_file(ROOT / "render.yml", *words, "-e", "against=e8", "--check", inventory=SPARK)
    assert rendered.results["Plan"]["plan"]["arm"] == "mine"


@pytest.mark.ansible
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine: [", "cannot be read as arms"),
        ("mine: {parent: e8}\nmine: {parent: e9}\n", "cannot be read as arms"),
        ("mine: {parnt: e8}\n", "unknown field 'parnt', did you mean parent"),
        ("mine: {parent: e8, changes: {DSV41_IO_THREADS: 010}}\n", "DSV41_IO_THREADS is written 010"),
    ],
)
def test_serve_refuses_an_own_file_that_is_wrong(text: str, says: str, own_file: Path) -> None:
    own_file.write_text(text)
    played = run_file(ROOT / "serve.yml", "-e", "arm=mine", "-e", f"arms_file={own_file}", inventory=SPARK)
    assert played.rc != 0
    result = played.results["Plan the launch"]
    assert result["rule"] == "arms-file"
    assert str(own_file) in result["msg"]
    assert says in result["msg"]


@pytest.mark.ansible
def test_the_actions_examples_run(tmp_path: Path) -> None:
    (tmp_path / "group_vars").symlink_to(ROOT / "group_vars")
    plays = [{"hosts": "fleet", "gather_facts": False, "tasks": examples("arms", {})}]
    played = run_playbook(plays, tmp_path, inventory=SPARK)
    assert played.rc == 0, played.text


# --- the reference of switches ----------------------------------------------------------------------------------------


def test_the_page_of_switches_is_what_the_schema_says() -> None:
    page = (ROOT / "docs/switches.md").read_text()
    assert page == catalog.reference_page(catalog.reference(CATALOG["switches"], CATALOG["rules"])), "run `make docs`"
    assert page == run("switches", "--markdown").stdout


def test_the_reference_has_every_key_with_all_that_is_known_of_it() -> None:
    found = {one["key"]: one for one in json.loads(run("switches", "--json").stdout)}
    assert set(found) == set(CATALOG["switches"])
    assert found["DSV41_WO_A_W8"]["back"] == {
        "DSV41_WO_A_W8_MID": "0",
        "DSV41_WO_A_W8_DROP": "0",
        "DSV41_WO_A_W8_DRAFT": "0",
    }
    assert found["DSV41_WO_A_W8"]["rules"] == ["w8-without-drop", "w8-parts-without-w8", "w8-drop-without-mid"]
    assert (found["EP_SIZE"]["where"], found["EP_SIZE"]["required"]) == ("arg", True)
    assert found["SGLANG_DSPARK_FOLDED_SAMPLING"]["default"] is None
    assert found["DSV41_VERIFY_CAP"]["volatile"] is True
    assert {one["section"] for one in found.values() if not one["section"]} == set()
    text = run("switches").stdout
    assert "DSV41_DRAFT_TAU=1  float 0.01..10  [env]" in text
    assert "back: DSV41_ENGRAM_PREFETCH_CHECK=0" in text


def test_a_bar_in_a_pattern_does_not_end_a_cell() -> None:
    page = (ROOT / "docs/switches.md").read_text().splitlines()
    for line in page:
        if line.startswith("| `"):
            assert line.replace("\\|", "").count("|") == 9, line


def test_what_a_plan_accepted_is_in_it_with_the_reason() -> None:
    fleet, known = shipped()
    made = plan.build(fleet, known, "e1", accept_rule=["w8-without-drop"])
    assert made["accepted"] == ["w8-without-drop"]
    (rule,) = made["accepted_rules"]
    assert "minimum viable" in rule["reason"]
    assert rule["source"] == "progress, E1"
    assert "DSV41_WO_A_W8_DROP=0" in rule["because"]


def test_plan_without_an_arms_name_lists_them_all() -> None:
    assert run("plan", "--arm").stdout == run("arms").stdout
