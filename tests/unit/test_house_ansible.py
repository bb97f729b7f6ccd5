"""The rules of the house that Ansible itself can answer: entries, roles, plugins whose documentation is true."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.plugins.action import ActionBase

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = sorted(path.name for path in (ROOT / "playbooks").glob("*.yml"))
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
NAMESPACE = "lockstep.fleet"


def plugins(kind: str) -> list[str]:
    """Names of the collection's plugins of one kind (a folder of plugins/)."""
    return sorted(path.stem for path in (ROOT / "plugins" / kind).glob("*.py") if path.stem != "__init__")


def ansible(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs an ansible command from the root, as a person would."""
    return subprocess.run(command, cwd=ROOT, env=os.environ | env, check=False, capture_output=True, text=True)


def documents(kind: str, names: list[str]) -> dict[str, Any]:
    """What ansible-doc shows for the collection's plugins of one kind, documentation fragments merged in."""
    if not names:
        return {}
    run = ansible("ansible-doc", "--json", "--type", kind, *[f"{NAMESPACE}.{name}" for name in names])
    assert run.returncode == 0, run.stderr
    shown: dict[str, Any] = json.loads(run.stdout)
    return {name.removeprefix(f"{NAMESPACE}."): document for name, document in shown.items()}


# --- entries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_every_playbook_has_a_root_entry_of_three_lines(name: str) -> None:
    text = (ROOT / name).read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) <= 3, lines
    (entry,) = yaml.safe_load(text)
    assert entry["ansible.builtin.import_playbook"] == f"playbooks/{name}"


def test_every_root_entry_has_its_playbook() -> None:
    others = {"galaxy.yml", "requirements.yml"}
    assert sorted(path.name for path in ROOT.glob("*.yml") if path.name not in others) == PLAYBOOKS


@pytest.mark.ansible
def test_every_entry_passes_the_syntax_check_without_a_deprecation() -> None:
    spellings = [spelling for name in PLAYBOOKS for spelling in (name, f"playbooks/{name}")]
    run = ansible("ansible-playbook", "--syntax-check", *spellings)
    assert run.returncode == 0, run.stderr
    assert "DEPRECATION" not in run.stdout + run.stderr


@pytest.mark.ansible
@pytest.mark.parametrize("name", PLAYBOOKS)
@pytest.mark.parametrize("folder", ["", "playbooks/"])
def test_both_spellings_of_an_entry_load_group_vars(name: str, folder: str, tmp_path: Path) -> None:
    """A real run of the entry, which a callback ends at its first play, having asked for a host's variables there."""
    expected = set().union(
        *(yaml.safe_load(path.read_text()) or {} for path in (ROOT / "group_vars/all").glob("*.yml"))
    )
    seen = tmp_path / "seen.json"
    run = ansible(
        "ansible-playbook",
        folder + name,
        ANSIBLE_CALLBACK_PLUGINS=str(ROOT / "tests" / "unit" / "callbacks"),
        ANSIBLE_CALLBACKS_ENABLED="stop_at_first_play",
        STOP_AT_FIRST_PLAY_TO=str(seen),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "DEPRECATION" not in run.stdout + run.stderr
    for host, names in json.loads(seen.read_text()).items():
        assert expected - set(names) == set(), host


# --- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_a_role_declares_exactly_its_defaults(role: str) -> None:
    folder = ROOT / "roles" / role
    defaults = yaml.safe_load((folder / "defaults/main.yml").read_text()) or {}
    specs = yaml.safe_load((folder / "meta/argument_specs.yml").read_text())["argument_specs"]
    options = set().union(*(spec.get("options", {}) for spec in specs.values()))
    assert options == set(defaults)
    assert [name for name in defaults if not name.startswith(f"{role}_")] == []
    assert (folder / "tasks/main.yml").is_file()


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_default_has_the_type_its_spec_declares(role: str) -> None:
    folder = ROOT / "roles" / role
    types = {"str": str, "path": str, "int": int, "float": (int, float), "bool": bool, "list": list, "dict": dict}
    defaults = yaml.safe_load((folder / "defaults/main.yml").read_text()) or {}
    spec = yaml.safe_load((folder / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    wrong = {
        name: (spec[name].get("type", "str"), value)
        for name, value in defaults.items()
        if value is not None
        and name in spec
        and spec[name].get("type", "str") != "raw"
        and not (isinstance(value, str) and "{{" in value)
        and not isinstance(value, types[spec[name].get("type", "str")])
    }
    assert wrong == {}


# --- plugins and their documentation ----------------------------------------------------------------------------------


class SpecSeen(Exception):  # noqa: N818 - not an error: it carries what a plugin passed to Ansible's validation
    """Raised in place of that validation, with the arguments of the call."""


def declared(name: str) -> dict[str, Any]:
    """The arguments with which a module calls AnsibleModule, or the action of its name validate_argument_spec."""

    def seen(*positional: object, **named: object) -> None:
        raise SpecSeen({"argument_spec": positional[0], **named} if positional else named)

    kind = "action" if name in ACTIONS else "modules"
    plugin = importlib.import_module(f"ansible_collections.{NAMESPACE}.plugins.{kind}.{name}")
    with pytest.MonkeyPatch.context() as patch:
        if name in ACTIONS:
            action = plugin.ActionModule.__new__(plugin.ActionModule)
            patch.setattr(ActionBase, "run", lambda *_: {})
            patch.setattr(action, "validate_argument_spec", seen)
            call_it = partial(action.run, task_vars={})
        else:
            patch.setattr(plugin, "AnsibleModule", seen)
            call_it = plugin.main
        with pytest.raises(SpecSeen) as caught:
            call_it()
    call: dict[str, Any] = caught.value.args[0]
    return call


def normal(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a documentation or of an argument spec, in one form: what a caller can tell apart, and no prose."""
    return {
        name: {
            "type": option.get("type") or "str",
            "required": bool(option.get("required", False)),
            "default": option.get("default"),
            "choices": sorted(option.get("choices") or [], key=str),
            "elements": option.get("elements"),
            "aliases": sorted(option.get("aliases") or []),
            "suboptions": normal(option.get("suboptions") or option.get("options") or {}),
        }
        for name, option in options.items()
    }


MODULES = plugins("modules")
ACTIONS = set(plugins("action"))


@pytest.fixture(scope="module")
def module_documents() -> dict[str, Any]:
    return documents("module", MODULES)


@pytest.mark.ansible
@pytest.mark.parametrize("name", MODULES)
def test_a_modules_documentation_is_its_argument_spec(name: str, module_documents: dict[str, Any]) -> None:
    call = declared(name)
    doc = module_documents[name]["doc"]
    assert normal(doc.get("options", {})) == normal(call["argument_spec"])
    if name not in ACTIONS:
        check_mode = doc["attributes"]["check_mode"]["support"]
        assert (check_mode in {"full", "partial"}) is bool(call.get("supports_check_mode", False))
    assert {"check_mode", "diff_mode"} <= set(doc["attributes"])


@pytest.mark.ansible
@pytest.mark.parametrize("name", MODULES)
def test_a_modules_examples_and_returns_are_written(name: str, module_documents: dict[str, Any]) -> None:
    tasks = yaml.safe_load(module_documents[name]["examples"])
    assert tasks
    assert any(f"{NAMESPACE}.{name}" in task for task in tasks), "an example calls the module"
    assert all(task.get("name") for task in tasks)
    returns = module_documents[name]["return"]
    assert returns
    assert [key for key, value in returns.items() if not value.get("description") or not value.get("returned")] == []


@pytest.mark.ansible
@pytest.mark.parametrize("kind", ["filter", "test"])
def test_filters_and_tests_have_examples_that_parse(kind: str) -> None:
    documented = documents(kind, registered(kind))
    assert set(documented) == set(registered(kind))
    for name, document in documented.items():
        assert yaml.safe_load(document["examples"]), name
        assert name in document["examples"], f"the examples of {name} use it"
        assert document["return"], name


def registered(kind: str) -> list[str]:
    """Names the collection's filter or test plugins register, which may be several a file."""
    names: list[str] = []
    for stem in plugins(kind):
        module = importlib.import_module(f"ansible_collections.{NAMESPACE}.plugins.{kind}.{stem}")
        names += module.FilterModule().filters() if kind == "filter" else module.TestModule().tests()
    return sorted(names)
