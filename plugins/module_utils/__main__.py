"""The core on the command line, on a controller: ``python -m lockstep_core plan --arm e8``.

Everything here is also done by playbooks; this answers a person without asking any rank. A refusal exits 3 and prints
the rule. Reading group_vars takes PyYAML, which comes with Ansible; the rooms themselves need nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import arms, catalog, cli_log, engram, envfile, files, plan, receipt
from .errors import LockstepError

REFUSED = 3
ALL = ""  # --arm without a name

# All that the shipped values need to be read without Ansible: one that names another, or joins two.
_REFERENCE = re.compile(r"\{\{ *([a-z_]+)(?:\['([^']+)'\]| \| combine\(([a-z_]+)\))? *\}\}")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 3 for a refusal."""
    options = _parser().parse_args(arguments)
    try:
        if options.command is cli_log.cli_parse_log:
            return int(cli_log.cli_parse_log(options.file, options.json))
        result, lines = options.command(options)
    except LockstepError as error:
        rule = getattr(error, "rule", None)
        if options.json:
            fields = ("message", "host", "rank", "found", "expected", "next_step")
            print(json.dumps({"rule": rule, **{name: getattr(error, name) for name in fields}}, default=str, indent=2))
        print(f"refused{f' by rule {rule}' if rule else ''}: {error}", file=sys.stderr)
        return REFUSED
    print(json.dumps(result, indent=2, sort_keys=True) if options.json else "\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep_core", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:  # noqa: ANN401 (a command function)
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("--json", action="store_true", help="print JSON")
        one.set_defaults(command=run)
        return one

    one = command("plan", _plan, "resolve an arm for a fleet: environment, arguments, shards, rules, memory")
    one.add_argument("--arm", nargs="?", const=ALL, help="the arm (default: fleet_default_arm); without a name, all")
    _one_off(one)
    one.add_argument("--accept-rule", action="append", default=[], metavar="ID,…", help="pass in spite of these rules")
    one.add_argument("--against", metavar="ARM", help="show the head's environment as the difference to this arm's")
    _fleet(one)

    one = command("arms", _arms, "all arms as a table, one arm whole, or the difference of two")
    one.add_argument("--tree", action="store_true", help="all arms by descent, each with what it changes")
    one.add_argument("--arm", help="everything of this arm")
    one.add_argument("--against", metavar="ARM", help="its difference to this one, with the origin of each value")
    _one_off(one)
    _fleet(one)

    one = command("switches", _switches, "the reference of environment keys")
    one.add_argument("--markdown", action="store_true", help="as the page docs/switches.md")
    _fleet(one)

    one = command("shard-sizes", _shard_sizes, "bytes of each rank's packed Engram shards, all layers together")
    one.add_argument("--tp", type=int, required=True, help="ranks")
    one.add_argument("--split", choices=["rows", "heads"], required=True, help="how the engine image splits rows")

    one = command("parse-log", cli_log.cli_parse_log, "what an engine log proves: packed, pool, tactics, ready, faults")
    one.add_argument("file", help="the log; - is standard input")

    one = command("receipt", _receipt, "what was proven of a launch; exits 3 unless everything was")
    one.add_argument("file", type=Path, nargs="?", default=Path("results/latest/receipt.json"))

    one = command("check-env", _check_env, "read a docker env file as docker does, and say where other tools would not")
    one.add_argument("file", type=Path)
    return parser


def _one_off(one: argparse.ArgumentParser) -> None:
    one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a one-off value")
    one.add_argument("--unset", action="append", default=[], metavar="KEY", help="a key to take out")


def _fleet(one: argparse.ArgumentParser) -> None:
    one.add_argument("--arms-file", type=Path, metavar="FILE", help="arms of your own, in the form of fleet_arms")
    one.add_argument("--root", type=Path, help="the repository (default: found from here upwards)")
    one.add_argument("--inventory", type=Path, help="the fleet's inventory directory (default: inventory/spark)")


def _read(options: argparse.Namespace, *, overlay: bool = False) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return ``plan.build``'s fleet and catalog, and the default arm; ``overlay`` hashes the overlay's context too."""
    root = options.root or _root()
    variables, hosts = _inventory(root, options.inventory or root / "inventory" / "spark")
    fleet, known = plan.inputs(variables, hosts, root=str(root) if overlay else None)
    if options.arms_file:
        extra = _yaml(options.arms_file, arms.check_written)
        known["arms"] = arms.with_extra(known["switches"], known["arms"], extra, str(options.arms_file))
    return fleet, known, str(variables["fleet_default_arm"])


def _plan(options: argparse.Namespace) -> tuple[Any, list[str]]:
    if options.arm == ALL:
        options.arm, options.tree = None, False
        return _arms(options)
    fleet, known, default = _read(options, overlay=True)
    arm, once = options.arm or default, {"changes": _changes(options), "unset": options.unset}
    accepted = [rule.strip() for given in options.accept_rule for rule in given.split(",") if rule.strip()]
    made = plan.build(fleet, known, arm, accept_rule=accepted, **once)
    head = made["ranks"][0]
    lines = [*plan.summary(made), "  head:"]
    if options.against:
        rows = catalog.difference(fleet, known, arm, options.against, **once)
        made["against"] = {"arm": options.against, "difference": rows}
        other, _ = plan.environments(fleet, known, options.against)[head["host"]]
        mine = {key: value for key, value in head["env"].items() if key != plan.TACTICS_KEY}
        lines += [f"    {line}" for line in envfile.diff_lines(other, mine)]
    else:
        lines += [f"    {key}={value}  [{head['origin'][key]}]" for key, value in sorted(head["env"].items())]
    return made, [*lines, f"  {' '.join(head['argv'])}"]


def _arms(options: argparse.Namespace) -> tuple[Any, list[str]]:
    fleet, known, default = _read(options)
    asked = {name: getattr(options, name) for name in ("arm", "against", "tree", "unset")}
    shown = catalog.show(fleet, known, default, {**asked, "set": _changes(options)})
    return shown["data"], shown["lines"]


def _switches(options: argparse.Namespace) -> tuple[Any, list[str]]:
    _, known, _ = _read(options)
    rows = catalog.reference(known["switches"], known["rules"])
    return rows, [catalog.reference_page(rows).rstrip()] if options.markdown else catalog.reference_lines(rows)


def _changes(options: argparse.Namespace) -> dict[str, str]:
    return dict(_pair(word) for word in options.set)


def _shard_sizes(options: argparse.Namespace) -> tuple[Any, list[str]]:
    sizes = engram.shard_sizes(options.tp, options.split)
    return sizes, [f"rank {rank}: {size:>15,} bytes" for rank, size in enumerate(sizes)]


def _check_env(options: argparse.Namespace) -> tuple[Any, list[str]]:
    text = files.read_bytes(options.file)
    env, traps = envfile.parse(text), envfile.traps(text)
    lines = [f"{key}={value}" for key, value in sorted(env.items())]
    for trap in traps:
        others = ", ".join(
            f"{who} {'does not take it literally' if value is None else repr(value)}"
            for who, value in trap.items()
            if who not in ("name", "docker") and value != trap["docker"]
        )
        lines.append(f"note: {trap['name']} is {trap['docker']!r} to docker, but {others}")
    return {"env": env, "traps": traps}, lines


def _receipt(options: argparse.Namespace) -> tuple[Any, list[str]]:
    """Show a kept receipt. One that is not ok is a refusal with its reasons."""
    found = files.read_json(options.file)
    if not isinstance(found, dict) or not isinstance(found.get("ok"), bool):
        raise LockstepError(f"{options.file} is no receipt", next_step="ansible-playbook serve.yml makes one")
    place = options.file.parent.resolve().name  # the launch that results/latest names
    try:
        table = receipt.render(found)
        why = "\n".join(found["why"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LockstepError(
            f"{options.file} is no whole receipt",
            found=f"{type(error).__name__}: {error}",
            expected="what serve.yml writes",
        ) from error
    lines = [table, f'{options.file.parent.parent / place / options.file.name}  "ok": true']
    if not found["ok"]:
        raise LockstepError(f"{place} was not proven", found=why)
    return found, lines


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals:
        raise LockstepError("--set takes KEY=VALUE", found=word, expected="KEY=VALUE")
    return key, value


def _root() -> Path:
    for place in (Path.cwd(), *Path.cwd().parents):
        if (place / "group_vars" / "all" / "arms.yml").is_file():
            return place
    raise LockstepError("no repository here: group_vars/all/arms.yml was not found", next_step="give it with --root")


def _inventory(root: Path, inventory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read the variables of a fleet and of its hosts as Ansible would, as far as they are plain data."""
    fleets = inventory / "group_vars" / "fleet"
    elsewhere = sorted(
        str(path.relative_to(inventory))
        for folder in ("group_vars", "host_vars")
        for path in (inventory / folder).glob("**/*")
        if path.suffix in (".yml", ".yaml", ".json") and (path.parent != fleets or path.suffix != ".yml")
    )
    if elsewhere:
        raise LockstepError(
            "this inventory keeps values where only Ansible reads them",
            found=", ".join(elsewhere),
            expected="hosts.yml and group_vars/fleet/*.yml",
            next_step="use ansible-playbook render.yml instead",
        )
    variables: dict[str, Any] = {}
    for folder in (root / "group_vars" / "all", fleets):
        for path in sorted(folder.glob("*.yml")):
            if not path.exists():  # a link to values that are yet to be generated
                continue
            found = _yaml(path) or {}
            if not isinstance(found, dict):
                raise LockstepError(f"{path} holds no variables", found=type(found).__name__, expected="a mapping")
            variables.update(found)
    needed = {name: variables[name] for name in (*plan.VARIABLES, "fleet_default_arm") if name in variables}
    try:
        groups = _yaml(inventory / "hosts.yml")["fleet"]["children"]
        hosts = {
            # As Ansible has it: what a group says in the inventory's file itself loses against group_vars/all.
            host: {**(group.get("vars") or {}), **needed, **(own or {})}
            for group in groups.values()
            for host, own in (group.get("hosts") or {}).items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise LockstepError(
            f"{inventory / 'hosts.yml'} is no fleet's inventory",
            found=f"{type(error).__name__}: {error}",
            expected="fleet: children: head and workers, each with its hosts, as in inventory/spark",
        ) from error
    return (
        {name: _resolved(value, variables) for name, value in needed.items()},
        {host: {name: _resolved(value, variables) for name, value in own.items()} for host, own in hosts.items()},
    )


def _resolved(value: Any, variables: dict[str, Any]) -> Any:  # noqa: ANN401 (any YAML value)
    """Replace references; LockstepError for anything that only Ansible can evaluate."""
    if isinstance(value, dict):
        return {key: _resolved(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, variables) for item in value]
    if not isinstance(value, str) or "{{" not in value:
        return value
    match = _REFERENCE.fullmatch(value)
    if match and match[1] in variables:
        named = variables[match[1]]
        joined = {**named, **variables.get(match[3], {})} if match[3] else named
        return _resolved(named[match[2]] if match[2] else joined, variables)
    filled = _REFERENCE.sub(lambda part: str(variables.get(part[1], part[0])), value)
    if "{{" not in filled:
        return filled
    raise LockstepError(
        "this inventory computes its values, which only Ansible can do",
        found=value,
        expected="plain data, as in inventory/spark",
        next_step="use ansible-playbook render.yml instead",
    )


def _yaml(path: Path, check: Callable[[Any, str], None] | None = None) -> Any:  # noqa: ANN401 (any YAML value)
    """Read a file; ``check`` is given its tree of nodes too, for what the values no longer show."""
    try:
        import yaml  # noqa: PLC0415 (controllers have it; a rank, which never comes here, need not)
    except ModuleNotFoundError as error:
        raise LockstepError(
            "reading group_vars takes PyYAML", next_step="run this with the Python of Ansible"
        ) from error
    # libyaml where PyYAML was built with it: ten times faster, which is most of what a plan takes.
    fast: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    def unique(loader: Any, node: Any, deep: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 (PyYAML's own)
        """Refuse a name that stands twice in a mapping, as ansible.cfg has it: the first would be lost."""
        names = [str(key.value) for key, _ in node.value]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"{twice} stands here twice", node.start_mark)
        return fast.construct_mapping(loader, node, deep=deep)

    loader = type("Loader", (fast,), {"construct_mapping": unique})
    try:
        text = files.read_bytes(path)
        found = yaml.load(text, Loader=loader)  # noqa: S506 (safe)
        if check is not None:
            check(yaml.compose(text, Loader=fast), str(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise LockstepError(f"{path} is not YAML", found=str(error)) from error
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly, as any filter
    sys.exit(main())
