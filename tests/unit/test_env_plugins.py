"""Environments in Ansible: the filters, the module env_file, the action plan, the role env and render.yml."""

import hashlib
import json
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.lockstep.fleet.plugins.action import plan as action
from ansible_collections.lockstep.fleet.plugins.filter import arm_env, env_diff, env_file
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import PlanRefused
from lockstep_core import envfile, plan, receipt
from playbook import ROOT, Played, examples, run_file, run_playbook
from values import build, shipped

SPARK = str(ROOT / "inventory" / "spark")

# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.ansible
@pytest.mark.parametrize("plugin", [arm_env, env_diff, env_file])
def test_the_filters_examples_run(plugin: Any, play: Any) -> None:
    played = play(yaml.safe_load(plugin.EXAMPLES))
    assert played.rc == 0, played.text


def test_a_filter_names_what_it_cannot_take() -> None:
    with pytest.raises(AnsibleFilterError, match="newline"):
        env_file.env_file({"A": "1\n2"})
    with pytest.raises(AnsibleFilterError, match="the value of A is no text"):
        env_diff.env_diff({"A": 1}, {})
    _, catalog = shipped()
    with pytest.raises(AnsibleFilterError, match="did you mean e8"):
        arm_env.arm_env(catalog["arms"], "e88", catalog["switches"])
    with pytest.raises(AnsibleFilterError, match="did you mean EP_SIZE"):
        arm_env.arm_env(catalog["arms"], "e8", catalog["switches"], set={"EP_SIZ": "1"})


def test_arm_env_is_the_plans_environment_where_the_fleet_adds_nothing() -> None:
    _, catalog = shipped()
    own = {"TP_SIZE": "3", "NNODES": "3"}
    expected = build("e8")["ranks"][0]["env"]
    del expected["LOCKSTEP_TACTICS_FINGERPRINT"]
    assert arm_env.arm_env(catalog["arms"], "e8", catalog["switches"], fleet=own) == expected
    assert "MAX_TOTAL_TOKENS" not in arm_env.arm_env(
        catalog["arms"], "e8", catalog["switches"], unset=["MAX_TOTAL_TOKENS"]
    )


# --- module env_file --------------------------------------------------------------------------------------------------


@pytest.mark.ansible
def test_the_modules_examples_run(tmp_path: Path, play: Any) -> None:
    played = play(examples("env_file", {"/tmp/lockstep-example": str(tmp_path / "made")}))
    assert played.rc == 0, played.text
    assert (tmp_path / "made" / "engine.env").read_text() == "EP_SIZE=1\nNCCL_PROTO=^LL128\n"
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


def task(path: Path, **env: Any) -> list[dict[str, Any]]:
    return [{"name": "keep", "lockstep.fleet.env_file": {"path": str(path), "env": env}}]


@pytest.mark.ansible
def test_check_real_again_and_what_was_changed_behind_its_back(tmp_path: Path, play: Any) -> None:
    path = tmp_path / "e"
    # What YAML, JSON and templating could turn into something else on the way.
    env = {
        "N": "1",
        "B": "True",
        "J": '{"a": [1]}',
        "Q": '""',
        "S": " two  words # ",
        "D": "$HOME",
        "E": "",
        "Y": "0123",
    }
    predicted = play(task(path, **env), "--check", "--diff")
    assert (predicted.rc, predicted.changed, path.exists()) == (0, 1, False), predicted.text
    done = play(task(path, **env), "--diff")
    assert (done.rc, done.changed) == (0, 1), done.text
    assert predicted.results["keep"]["diff"] == done.results["keep"]["diff"]
    assert done.results["keep"]["diff"][0]["after"] == path.read_text()
    assert envfile.parse(path.read_text()) == env
    assert done.results["keep"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    before = path.stat()
    again = play(task(path, **env))
    assert (again.rc, again.changed) == (0, 0)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    path.chmod(0o644)
    assert play(task(path, **env)).changed == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("N=2\n")
    assert play(task(path, **env)).changed == 1
    assert envfile.parse(path.read_text()) == env


@pytest.mark.ansible
def test_what_cannot_be_carried_leaves_the_old_file(tmp_path: Path, play: Any) -> None:
    path = tmp_path / "e"
    path.write_text("A=1\n")
    refused = play(task(path, A="1\n2"))
    assert refused.rc != 0
    assert "docker's env file cannot carry this" in refused.results["keep"]["msg"]
    assert path.read_text() == "A=1\n"


@pytest.mark.ansible
def test_the_controllers_file_is_the_same_and_alone_it_needs_no_host(tmp_path: Path, play: Any) -> None:
    here, there = tmp_path / "controller" / "e", tmp_path / "host" / "e"
    tasks = task(there, A="1")
    tasks[0]["lockstep.fleet.env_file"]["controller_path"] = str(here)
    predicted = play(tasks, "--check")
    assert (predicted.rc, predicted.changed, here.exists(), there.exists()) == (0, 1, False, False), predicted.text
    assert play(tasks).changed == 1
    assert (here.read_text(), stat.S_IMODE(here.stat().st_mode)) == ("A=1\n", 0o600)
    assert there.read_text() == "A=1\n"
    assert play(tasks).changed == 0
    here.write_text("A=2\n")
    again = play(tasks, "--diff")
    assert again.changed == 1
    assert [one["before"] for one in again.results["keep"]["diff"]] == ["A=2\n", "A=1\n"]
    there.unlink()
    del tasks[0]["lockstep.fleet.env_file"]["path"]
    alone = play(tasks)
    assert (alone.rc, alone.changed, alone.results["keep"]["path"], there.exists()) == (0, 0, None, False)
    del tasks[0]["lockstep.fleet.env_file"]["controller_path"]
    assert "one of the following is required: path, controller_path" in play(tasks).text


# --- action plan ------------------------------------------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A place for a playbook that has our group_vars beside it, as the root and playbooks/ have."""
    (tmp_path / "group_vars").symlink_to(ROOT / "group_vars")
    return tmp_path


def planned(beside: Path, arguments: dict[str, Any], *words: str) -> Played:
    """Run the action for the Spark fleet, none of whose hosts exists: it must not ask any."""
    tasks = [{"name": "plan", "lockstep.fleet.plan": arguments, "run_once": True}]
    plays = [{"hosts": "fleet", "gather_facts": False, "tasks": tasks}]
    return run_playbook(plays, beside, *words, inventory=SPARK)


@pytest.mark.ansible
def test_the_action_makes_the_cores_plan_without_asking_a_rank(beside: Path) -> None:
    played = planned(beside, {"arm": "e8", "against": "b0"})
    assert (played.rc, played.changed) == (0, 0), played.text
    result = played.results["plan"]
    made = result["plan"]
    expected = build("e8")
    # The action knows the checkout, hence the overlay to launch.
    assert len(made["images"]["overlay"].pop("context_sha256")) == 64
    del expected["images"]["overlay"]["context_sha256"]
    assert made == expected
    assert result["summary"] == plan.summary(expected)
    fleet, catalog = shipped()
    assert result["against"] == {host: env for host, (env, _) in plan.environments(fleet, catalog, "b0").items()}


@pytest.mark.ansible
@pytest.mark.parametrize(
    ("arguments", "words", "rule", "says"),
    [
        ({"arm": "e88"}, [], "unknown-arm", "did you mean e8"),
        ({"arm": "e8"}, ["-e", "amr=e8"], "unknown-variable", "unknown extra variable 'amr', did you mean arm?"),
        ({"arm": "e8"}, ["-e", "fleet_stat_dir=/x"], "unknown-variable", "did you mean fleet_state_dir?"),
        ({"arm": "e8", "set": "{{ set }}"}, ["-e", '{"set": {"EP_SIZE": 2}}'], "ep-does-not-divide-tp", "EP_SIZE=2"),
        ({"arm": "e8", "set": "{{ set }}"}, ["-e", 'set={"EP_SIZ":"2"}'], "unknown-key", "did you mean EP_SIZE"),
        ({"arm": "e8"}, ["-e", 'set={"EP_SIZE": "2"}'], "unknown-variable", "write it as JSON"),
        ({"arm": "e8", "set": "EP_SIZE=2"}, [], "wrong-value", "set is no mapping\n  found: EP_SIZE=2"),
        (
            {"arm": "e8", "unset": "{{ unset }}"},
            ["-e", '{"unset": {"EP_SIZE": null}}'],
            "wrong-value",
            "unset is no list",
        ),
        ({"arm": "e8"}, ["-e", "drain_then=abrot"], "wrong-value", "drain_then cannot be 'abrot', did you mean abort?"),
        ({"plan": {"format": 1}}, [], None, "not whole"),
    ],
)
def test_a_refusal_of_the_action(
    beside: Path, arguments: dict[str, Any], words: list[str], rule: str | None, says: str
) -> None:
    played = planned(beside, arguments, *words)
    assert played.rc != 0
    result = played.results["plan"]
    assert result["rule"] == rule
    assert says in result["msg"]


def test_what_is_no_mapping_or_list_is_refused_with_what_was_given() -> None:
    assert action.one_off('{"EP_SIZE": "2"}') == {"EP_SIZE": "2"}
    assert action.one_off("") == action.one_off({}) == {}
    for given, shown in (("EP_SIZE=2", "EP_SIZE=2"), ("null", "null"), (None, "null"), (["EP_SIZE"], '["EP_SIZE"]')):
        with pytest.raises(PlanRefused, match="set is no mapping") as refused:
            action.one_off(given)
        assert refused.value.found == shown
    assert action.words("unset", " A, B,") == action.words("unset", ["A", "B"]) == ["A", "B"]
    for wrong, shown in (({"A": None}, '{"A": null}'), ([["A"]], '[["A"]]'), (3, "3"), (None, "null")):
        with pytest.raises(PlanRefused, match="unset is no list of names") as refused:
            action.words("unset", wrong)
        assert refused.value.found == shown


@pytest.mark.parametrize(
    ("name", "good", "wrong", "expected"),
    [
        ("drain_then", ["fail", "abort"], ["abrot", "Abort", "", None], "fail or abort"),
        ("fleet_drain_then", ["fail", "abort"], ["abrot"], "fail or abort"),
        ("on_failure", ["return", "leave"], ["leav", "false"], "return or leave"),
        (
            "drain_timeout",
            ["0", "600", 600, "{{ 2 * 60 }}"],
            ["abc", "-1", "1.5", True, "60s", ""],
            "whole seconds, 0 or more",
        ),
    ],
)
def test_values_that_would_fail_late_are_refused_at_once(
    name: str, good: list[Any], wrong: list[Any], expected: str
) -> None:
    for value in good:
        action.check_values({name: value, "arm": "e8"})
    for value in wrong:
        with pytest.raises(PlanRefused, match=f"{name} cannot be") as refused:
            action.check_values({name: value})
        assert (refused.value.found, refused.value.expected) == (f"-e {name}={value}", expected)


@pytest.mark.ansible
def test_known_extra_variables_and_accepted_rules_pass(beside: Path) -> None:
    arguments = {"arm": "{{ arm }}", "set": "{{ set }}", "accept_rule": "{{ accept_rule }}", "unset": "{{ unset }}"}
    words = ["-e", "arm=e8", "-e", 'set={"EP_SIZE":"2"}', "-e", "accept_rule=ep-does-not-divide-tp,tp-pad-off-at-tp3"]
    words += ["-e", "unset=MAX_TOTAL_TOKENS,SPEC_ALGO", "-e", "fleet_memguard=true", "-e", "ansible_user=x"]
    played = planned(beside, arguments, *words)
    assert played.rc == 0, played.text
    made = played.results["plan"]["plan"]
    assert made["accepted"] == ["ep-does-not-divide-tp"]
    assert made["unset"] == ["MAX_TOTAL_TOKENS", "SPEC_ALGO"]
    assert made["warnings"] == []  # -e gives text, and "true" is a yes


@pytest.mark.ansible
def test_a_plan_out_of_a_journal_is_launched_as_it_is(beside: Path) -> None:
    sealed = plan.seal(build("e8", set={"DSV41_VERIFY_CAP": "conf:0.3"}), overlay={"id": "sha256:1"})
    played = planned(beside, {"plan": sealed})
    assert played.rc == 0, played.text
    assert played.results["plan"]["plan"] == sealed
    other = plan.seal({**sealed, "ranks": [{**rank, "host": f"other{rank['rank']}"} for rank in sealed["ranks"]]})
    refused = planned(beside, {"plan": other})
    assert "launches on other0, which is not in the inventory" in refused.results["plan"]["msg"]


@pytest.mark.ansible
def test_the_way_back_is_the_newest_proven_launch_of_another_plan_on_any_rank(beside: Path) -> None:
    once, e8, e9 = (
        plan.seal(build(arm, set=changes), overlay={"id": "sha256:1"})
        for arm, changes in (("e8", {"DSV41_VERIFY_CAP": "conf:0.3"}), ("e8", None), ("e9", None))
    )
    journal = [entry(1, e9), entry(2, once), entry(3, e9, ok=False), entry(4, e8), entry(5, e8)]
    # No rank has all of it: one was rebuilt since, another was away.
    held = {"spark1": journal[3:], "spark2": journal[:4], "spark3": []}
    played = told(beside, held, journal[4]["launch"], {"lockstep.fleet.plan": {}})
    assert played.rc == 0, played.text
    assert played.results["do"]["plan"] == once


def entry(when: int, made: dict[str, Any], *, ok: bool = True) -> dict[str, Any]:
    """A journal's entry of a sealed plan, launched at an hour of 2026-09-24."""
    launch = plan.launch_id(made, datetime(2026, 9, 24, when, tzinfo=UTC))
    return receipt.entry(made, {"launch": launch, "arm": made["name"], "ok": ok, "why": []}, recorded="", by="mia@desk")


def told(
    beside: Path, held: dict[str, Any], runs: str, task: dict[str, Any], *words: str, but: str | None = None
) -> Played:
    """Run an action over what the ranks of the Spark fleet say: their journals, and what runs on all ``but`` one.

    A rank that ``held`` has no list for could not be reached.
    """
    journals = {
        host: {"unreachable": True, "msg": "Failed to connect"}
        if entries is None
        else {"entries": entries, "damaged": []}
        for host, entries in held.items()
    }
    journals["spark1"]["damaged"] = ["/srv/lockstep/journal/x.json is not JSON"]
    looks = {
        host: {"look": {"container": {"launch": runs, "state": "running"} if host != but else None}}
        for host, entries in held.items()
        if entries is not None
    }
    ((action_name, options),) = task.items()
    facts = {
        "seen": "{{ journals[inventory_hostname] }}",
        "looked": "{{ looks[inventory_hostname] | default({'unreachable': true, 'msg': 'Failed to connect'}) }}",
    }
    tasks = [
        {"name": "look", "ansible.builtin.set_fact": facts},
        {"name": "do", action_name: {"journal": "seen", "looks": "looked", **options}, "run_once": True},
    ]
    plays = [{"hosts": "fleet", "gather_facts": False, "vars": {"journals": journals, "looks": looks}, "tasks": tasks}]
    return run_playbook(plays, beside, *words, inventory=SPARK)


@pytest.mark.ansible
def test_a_feature_is_taken_back_from_what_the_ranks_run(beside: Path) -> None:
    # As the action itself builds it, so its overlay is that of this checkout.
    made = planned(beside, {"arm": "e8"}).results["plan"]["plan"]
    e8 = entry(1, plan.seal(made, overlay={"id": "sha256:1"}))
    played = told(
        beside,
        {"spark1": [], "spark2": [e8], "spark3": []},
        e8["launch"],
        {"lockstep.fleet.plan": {"feature": "{{ feature }}", "tactics": "{{ tactics }}"}},
        *("-e", "feature=DSV41_WO_A_W8", "-e", "tactics=purge"),
    )
    assert played.rc == 0, played.text
    back = played.results["do"]["plan"]
    assert back["set"] == {"DSV41_WO_A_W8": "0", "DSV41_WO_A_W8_DROP": "0", "DSV41_WO_A_W8_MID": "0"}
    assert back["images"] == e8["plan"]["images"]


@pytest.mark.ansible
def test_the_history_of_the_ranks_that_answer_with_what_is_wrong_beside_it(beside: Path) -> None:
    e8, e9 = (entry(hour, plan.seal(build(arm), overlay={"id": "sha256:1"})) for hour, arm in ((1, "e8"), (2, "e9")))
    held = {"spark1": [e9, e8], "spark2": [e9], "spark3": None}
    played = told(beside, held, e9["launch"], {"lockstep.fleet.history": {}}, but="spark1")
    assert played.rc == 0, played.text
    said = played.results["do"]
    assert [(row["launch"], row["by"], row["hosts"], row["runs_on"], row["verdict"]) for row in said["launches"]] == [
        (e9["launch"], "mia@desk", ["spark1", "spark2"], ["spark2"], "neutral"),
        (e8["launch"], "mia@desk", ["spark1"], [], "promoted"),
    ]
    assert said["launches"][1]["differs"] == ["DSV41_VERIFY_CAP conf:0.1 (now conf:0.2)"]
    assert said["notes"] == ["spark1: /srv/lockstep/journal/x.json is not JSON", "spark3: Failed to connect"]
    one = told(beside, held, e9["launch"], {"lockstep.fleet.history": {"launch": "e8"}})
    assert [row["launch"] for row in one.results["do"]["launches"]] == [e8["launch"]]
    assert one.results["do"]["changed"] is False
    none = told(beside, held, e9["launch"], {"lockstep.fleet.history": {"launch": "e7"}})
    assert (none.rc != 0, "no launch 'e7'" in none.results["do"]["msg"]) == (True, True)


@pytest.mark.ansible
def test_the_actions_examples_run(beside: Path) -> None:
    plays = [{"hosts": "fleet", "gather_facts": False, "tasks": examples("plan", {})}]
    played = run_playbook(plays, beside, inventory=SPARK)
    assert played.rc == 0, played.text


def test_every_variable_that_may_be_set_by_hand_is_known() -> None:
    documented = yaml.safe_load((ROOT / "group_vars/all/fleet.yml").read_text())["fleet_extra_variables"]
    declared = [name for path in (ROOT / "group_vars/all").glob("*.yml") for name in yaml.safe_load(path.read_text())]
    roles = [
        name for path in (ROOT / "roles").glob("*/defaults/main.yml") for name in yaml.safe_load(path.read_text()) or {}
    ]
    known = [*documented, *declared, *roles, "ansible_become_password", "fleet_engram_dir"]
    action.check_extra(dict.fromkeys(known), documented, [])
    # A key inside a variable is no variable.
    for name in ("TP_SIZE", "doc", "command", "e8", "parent"):
        with pytest.raises(PlanRefused):
            action.check_extra({name: ""}, documented, [])


def test_variables_of_a_fleets_own_inventory_are_known(tmp_path: Path) -> None:
    own = tmp_path / "group_vars" / "fleet"
    own.mkdir(parents=True)
    (own / "fleet.yml").write_text("fleet_racks_of_mine: 3\n")
    action.check_extra({"fleet_racks_of_mine": "3"}, {}, [str(tmp_path)])
    with pytest.raises(PlanRefused):
        action.check_extra({"fleet_racks_of_mine": "3"}, {}, [])


def test_a_variable_of_other_playbooks_is_refused() -> None:
    documented = {
        "force": "pack_engram.yml - packs again",
        "against": "render.yml, verify.yml - other",
        "arm": "the arm",
    }
    action.check_extra({"force": True, "arm": "e8"}, documented, [], ["pack_engram.yml"])
    action.check_extra({"against": "b0"}, documented, [], ["verify.yml"])
    # Playbooks of others, such as a test's own, may use them all.
    action.check_extra({"force": True}, documented, [], ["mine.yml"])
    with pytest.raises(PlanRefused, match=r"'force' means nothing in serve\.yml") as caught:
        action.check_extra({"force": True}, documented, [], ["serve.yml"])
    assert caught.value.expected == "it in pack_engram.yml"


@pytest.mark.ansible
@pytest.mark.parametrize(
    ("playbook", "word", "says"),
    [
        ("render.yml", "force=true", "extra variable 'force' means nothing in render.yml"),
        ("pack_engram.yml", "forse=true", "unknown extra variable 'forse', did you mean force?"),
        ("pack_engram.yml", "engram_verify=quick", "extra variable 'engram_verify' means nothing in pack_engram.yml"),
    ],
)
def test_playbooks_refuse_what_they_do_not_take(playbook: str, word: str, says: str) -> None:
    played = run_file(ROOT / playbook, "-e", word, "-e", "ansible_connection=local", "--limit", "head", inventory=SPARK)
    assert played.rc != 0
    assert says in played.text


def test_values_cross_as_plain_json() -> None:
    class Tagged(str):
        __slots__ = ()

    crossed = action.plain({Tagged("a"): [Tagged("b"), 1, True, None, 1.5], "c": {"d": (Tagged("e"),)}})
    assert crossed == {"a": ["b", 1, True, None, 1.5], "c": {"d": ["e"]}}
    assert {type(crossed["a"][0]), type(next(iter(crossed)))} == {str}
    assert crossed["a"][2] is True


# --- role env and render.yml ------------------------------------------------------------------------------------------


@pytest.mark.ansible
def test_render_writes_every_ranks_file_and_shows_the_difference(tmp_path: Path) -> None:
    words = ["-e", "arm=e8", "-e", "against=b0", "-e", f"fleet_results_dir={tmp_path}", "--diff"]
    predicted = run_file(ROOT / "render.yml", *words, "--check", inventory=SPARK)
    assert (predicted.rc, predicted.changed, list(tmp_path.iterdir())) == (0, 3, []), predicted.text
    played = run_file(ROOT / "render.yml", *words, inventory=SPARK)
    assert (played.rc, played.changed) == (0, 3), played.text
    shown = played.results["Show the difference"]["msg"]
    assert "- EP_SIZE=3\n+ EP_SIZE=1" in shown
    assert shown.count("\n") == 19  # ten keys, each before and after
    made = build("e8")
    for rank in made["ranks"]:
        file = tmp_path / "render" / "envs" / f"e8.{rank['host']}.env"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert envfile.parse(file.read_bytes()) == rank["env"]
        assert hashlib.sha256(file.read_bytes()).hexdigest() == rank["env_sha256"]
    assert run_file(ROOT / "render.yml", *words, inventory=SPARK).changed == 0


@pytest.mark.ansible
def test_render_refuses_like_serve(tmp_path: Path) -> None:
    played = run_file(
        ROOT / "render.yml", "-e", "arm=e1", "-e", "against=b0", "-e", f"fleet_results_dir={tmp_path}", inventory=SPARK
    )
    assert played.rc != 0
    assert played.results["Plan"]["rule"] == "w8-without-drop"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ansible
def test_role_env_writes_both_copies(tmp_path: Path) -> None:
    made = json.loads(json.dumps(build("e8", set={"DSV41_VERIFY_CAP": "conf:0.2"})))
    tasks = [
        {
            "name": "env",
            "ansible.builtin.include_role": {"name": "lockstep.fleet.env"},
            "vars": {
                "env_plan": made,
                "env_launch": "20260924T082105Z-e8-c0ffee",
                "env_results_dir": str(tmp_path / "results"),
                "env_state_dir": str(tmp_path / "{{ inventory_hostname }}"),
            },
        }
    ]
    plays = [{"hosts": "fleet", "gather_facts": False, "connection": "local", "tasks": tasks}]
    done = run_playbook(plays, tmp_path, inventory=SPARK)
    assert (done.rc, done.changed) == (0, 3), done.text
    for rank in made["ranks"]:
        name = f"{made['name']}.{rank['host']}.env"
        ours = tmp_path / "results/20260924T082105Z-e8-c0ffee/envs" / name
        theirs = tmp_path / rank["host"] / "env" / name
        assert ours.read_bytes() == theirs.read_bytes()
        assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(theirs.stat().st_mode) == 0o600
        assert hashlib.sha256(ours.read_bytes()).hexdigest() == rank["env_sha256"]
    assert run_playbook(plays, tmp_path, inventory=SPARK).changed == 0
