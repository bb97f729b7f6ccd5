"""Controller side of ``plan``: see plugins/modules/plan.py for its documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible import context
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars
from ansible_collections.lockstep.fleet.plugins.module_utils import arms, history, images, plan, receipt, switches
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError, PlanRefused

display = Display()

ROOT = Path(__file__).resolve().parents[2]
# Where variables are declared that -e may set: group_vars, roles, and the inventories that come with the repository.
DECLARED = (
    "group_vars/all/*.yml",
    "roles/*/defaults/*.yml",
    "inventory/*/group_vars/*/*.yml",
    "inventory/*/hosts.yml",
)
# A text of fleet_extra_variables that begins with the playbooks that the variable is for.
_ONLY = re.compile(r"((?:\w+\.yml(?:, )?)+) - ")
# What these take, here because the task that reads them comes late.
_CHOICES = {
    "on_failure": ("return", "leave"),
    **dict.fromkeys(("drain_then", "fleet_drain_then"), ("fail", "abort")),
}
_SECONDS = ("drain_timeout", "fleet_drain_timeout_s")
# A variable stands at the start of a line, a host's own further in.
_DECLARATION = re.compile(r"^(?:([a-z_][a-z0-9_]*)| +(fleet_[a-z0-9_]+)):", re.MULTILINE)


def plain(value: Any) -> Any:  # noqa: ANN401 (any JSON value)
    """Turn Ansible's tagged and lazy values into plain JSON ones: only those may cross into the core."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def one_off(value: object) -> dict[str, Any]:
    """Read ``set``: a mapping, or the JSON text that ``-e set=…`` leaves of one."""
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value or "{}")
        except ValueError:
            read = None
    if not isinstance(read, dict):
        raise PlanRefused(
            "set is no mapping",
            rule="wrong-value",
            found=_given(value),
            expected='{"KEY": "value"}',
            next_step="""-e '{"set": {"KEY": "value"}}'""",
        )
    return read


def words(name: str, value: object) -> list[str]:
    """Read the list ``name``, which ``-e`` may have left as text with commas."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return list(value)
    raise PlanRefused(
        f"{name} is no list of names",
        rule="wrong-value",
        found=_given(value),
        expected="text with commas, or a list of text",
        next_step=f"-e {name}=ONE,OTHER",
    )


def _given(value: object) -> str:
    """Show a value as it was given; None too, which an error would leave out."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def check_values(given: Mapping[str, Any]) -> None:
    """Refuse the value of an extra variable that would only fail once the ranks are converged."""
    for name in given:
        value = str(given[name])
        if "{{" in value:  # Ansible's to read
            continue
        choices = _CHOICES.get(name)
        if (choices and value not in choices) or (name in _SECONDS and not re.fullmatch("[0-9]{1,9}", value)):
            near = switches.nearest(value, choices or ())
            raise PlanRefused(
                f"{name} cannot be {value!r}" + (f", did you mean {near}?" if near else ""),
                rule="wrong-value",
                found=f"-e {name}={value}",
                expected=" or ".join(choices) if choices else "whole seconds, 0 or more",
                next_step=f"-e {name}={near or (choices or ['120'])[0]}, or take it away",
            )


def check_extra(
    given: Mapping[str, Any], documented: Mapping[str, str], inventories: Iterable[str], playbooks: Iterable[str] = ()
) -> None:
    """Refuse an extra variable that nothing declares: ``-e amr=e8`` would launch the default arm instead.

    One whose text in ``documented`` begins with names of playbooks, as ``render.yml - …``, means something in these
    alone; ``playbooks`` are those that run.
    """
    known = set(documented)
    sources = [path for pattern in DECLARED for path in ROOT.glob(pattern)]
    sources += [path for place in inventories for path in Path(place).glob("group_vars/**/*.yml")]
    for path in filter(Path.is_file, sources):  # the lab's generated values are a link to nothing while no lab runs
        known.update(name for names in _DECLARATION.findall(path.read_text(encoding="utf-8")) for name in names if name)
    running = {name for name in playbooks if (ROOT / name).is_file()}
    for name in given:
        if name == "_raw_params":  # what -e NAME=VALUE leaves over when the value has a blank in it
            raise PlanRefused(
                "a word of -e is no NAME=VALUE",
                rule="unknown-variable",
                found=str(given[name]),
                expected="values without blanks, or JSON",
                next_step="""write it as JSON: -e '{"set": {"KEY": "value"}}'""",
            )
        if name not in known and not name.startswith("ansible_"):
            near = switches.nearest(name, known)
            raise PlanRefused(
                f"unknown extra variable {name!r}" + (f", did you mean {near}?" if near else ""),
                rule="unknown-variable",
                found=f"-e {name}=…",
                expected=near or "a variable of group_vars/all (fleet_extra_variables lists the short ones)",
                next_step=f"use -e {near}=…" if near else "take it away",
            )
        only = _ONLY.match(documented.get(name, ""))
        meant = only.group(1).split(", ") if only else []
        if meant and running and not running & set(meant):
            raise PlanRefused(
                f"extra variable {name!r} means nothing in {', '.join(sorted(running))}",
                rule="unknown-variable",
                found=f"-e {name}=…",
                expected=f"it in {' or '.join(meant)}",
                next_step="take it away, or run the playbook that it is for",
            )


def check_given(action: ActionBase, variables: Mapping[str, Any]) -> None:
    """Check this run's own ``-e``; PlanRefused."""
    documented = action._templar.template(variables.get("fleet_extra_variables", {}))  # noqa: SLF001 (an action's own)
    places = {str(Path(source)) for source in variables.get("ansible_inventory_sources", []) if Path(source).is_dir()}
    playbooks = [Path(name).name for name in context.CLIARGS.get("args") or ()]
    given = load_extra_vars(action._loader)  # noqa: SLF001 (the same)
    check_extra(given, documented, places, playbooks)
    check_values(given)


def given_problem(action: ActionBase, variables: Mapping[str, Any]) -> str | None:
    """Say what is wrong with this run's ``-e`` for an action that others' playbooks use too: there it has no say."""
    if "fleet_extra_variables" in variables:
        try:
            check_given(action, variables)
        except LockstepError as error:
            return str(error)
    return None


def values(
    action: ActionBase,
    variables: Mapping[str, Any],
    arms_file: str | None = None,
    *,
    base_digest: str | None = None,
    overlay: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``plan.build`` is made from: the fleet and the catalog, with the arms of an operator's own file.

    A relative ``arms_file`` is relative to where ansible-playbook runs. ``base_digest``: another base than the pinned
    one. ``overlay``: hash this checkout's overlay too.
    """
    hosts, hostvars = list(variables["groups"].get("fleet", [])), variables["hostvars"]
    if not hosts:
        raise LockstepError(
            "the inventory has no host in group fleet",
            next_step="-i inventory/<your fleet>, made from inventory/spark",
        )
    own = {
        host: {name: plain(hostvars[host][name]) for name in plan.VARIABLES if name in hostvars[host]} for host in hosts
    }
    if base_digest:
        if not images.is_digest(base_digest):
            raise PlanRefused(
                "base_digest is no digest",
                rule="wrong-value",
                found=base_digest,
                expected="sha256:<64 hex digits>, one of fleet_image_builds",
                next_step="docker buildx imagetools inspect REPOSITORY:TAG shows it",
            )
        ours = own[hosts[0]]["fleet_images"]
        own[hosts[0]]["fleet_images"] = {**ours, "base": {**ours["base"], "digest": base_digest}}
    fleet, catalog = plan.inputs(own[hosts[0]], own, root=str(ROOT) if overlay else None)
    if arms_file:
        path = Path(arms_file).expanduser().absolute()
        try:
            found = plain(action._loader.load_from_file(str(path)))  # noqa: SLF001 (an action's own)
        except AnsibleError as error:
            raise PlanRefused(
                f"{path} cannot be read as arms",
                rule="arms-file",
                found=str(error),
                expected="a YAML file: {name: {parent: ARM, changes: {KEY: value}}, …}",
                next_step="a relative path is relative to where ansible-playbook runs",
            ) from error
        try:
            tree = yaml.compose(str(action._loader.get_text_file_contents(str(path))), yaml.SafeLoader)  # noqa: SLF001 (the same)
        except yaml.YAMLError:  # it was read as JSON, where a number is what is written
            tree = None
        arms.check_written(tree, str(path))
        catalog["arms"] = arms.with_extra(catalog["switches"], catalog["arms"], found, str(path))
    return fleet, catalog


class ActionModule(ActionBase):
    """Resolve the launch from variables alone; needs no connection."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "arm": {"type": "str"},
                "set": {"type": "raw", "default": {}},
                "unset": {"type": "raw", "default": []},
                "accept_rule": {"type": "raw", "default": []},
                "against": {"type": "str"},
                "arms_file": {"type": "str"},
                "base_digest": {"type": "str"},
                "plan": {"type": "dict"},
                "journal": {"type": "str"},
                "looks": {"type": "str"},
                "to": {"type": "str"},
                "feature": {"type": "str"},
                "campaign": {"type": "str"},
                "tactics": {"type": "str"},
            },
            mutually_exclusive=[("arm", "plan", "journal")],
            required_by={"journal": ("looks",), **dict.fromkeys(history.WAYS, ("journal",))},
            required_one_of=[("arm", "plan", "journal")],
        )
        variables = task_vars or {}
        try:
            check_given(self, variables)
            result.update(self._plan(plain(args), variables))
        except LockstepError as error:
            result.update(failed=True, changed=False, msg=str(error), rule=getattr(error, "rule", None))
            return result
        result.update(changed=False, summary=plan.summary(result["plan"]))
        display.display("\n".join(result["summary"]))
        return result

    def _plan(self, args: dict[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        hosts = list(variables["groups"].get("fleet", []))
        if args["journal"]:
            args["plan"] = self._back(args, hosts, variables)
        known: dict[str, Any] | None = args["plan"]
        if known:
            plan.check(known)
            absent = [rank["host"] for rank in known["ranks"] if rank["host"] not in hosts]
            if absent:
                raise PlanRefused(
                    f"this plan launches on {absent[0]}, which is not in the inventory",
                    rule="fleet-ranks",
                    found=", ".join(hosts),
                    expected=", ".join(rank["host"] for rank in known["ranks"]),
                    next_step="use the inventory of the fleet that this plan was made for, or launch an arm",
                )
            return {"plan": known}
        fleet, catalog = values(self, variables, args["arms_file"], base_digest=args["base_digest"])
        planned: dict[str, Any] = {
            "plan": plan.build(
                fleet,
                catalog,
                args["arm"],
                changes=one_off(args["set"]),
                unset=words("unset", args["unset"]),
                accept_rule=words("accept_rule", args["accept_rule"]),
            )
        }
        if args["against"]:
            others = plan.environments(fleet, catalog, args["against"])
            planned["against"] = {host: env for host, (env, _) in others.items()}
        return planned

    def _back(self, args: dict[str, Any], hosts: list[str], variables: Mapping[str, Any]) -> dict[str, Any]:
        """The plan of the way back, from every rank's journal and from what runs there."""
        hostvars = variables["hostvars"]
        said = {
            name: {host: plain(hostvars[host].get(args[name]) or {}) for host in hosts} for name in ("journal", "looks")
        }
        entries = receipt.merge({host: one.get("entries", []) for host, one in said["journal"].items()})
        return history.back_to(
            entries,
            history.running({host: one.get("look") for host, one in said["looks"].items()}, entries),
            {way: args[way] for way in history.WAYS},
            lambda: values(self, variables, args["arms_file"]),
            words("accept_rule", args["accept_rule"]),
        )
