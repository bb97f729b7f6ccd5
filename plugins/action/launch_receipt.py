"""Controller side of ``launch_receipt``: see plugins/modules/launch_receipt.py for its documentation."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.lockstep.fleet.plugins.module_utils import files, fleet_lock, receipt
from ansible_collections.lockstep.fleet.plugins.module_utils import plan as plans

display = Display()


def write(directory: Path, name: str, value: dict[str, Any]) -> bool:
    """Write one result file unless it says the same already; whether it was written.

    The words of the generation may differ: they show that the head answers, not what was proven.
    """
    path = directory / name
    if files.look(path):
        there = files.read_json(path)
        if isinstance(there, dict) and {**there, "generation": None} == {**value, "generation": None}:
            return False
    directory.mkdir(parents=True, exist_ok=True)
    files.write_json_atomic(path, value)
    return True


def point_latest(directory: Path) -> bool:
    """Let ``latest`` beside the launch's directory name it; whether it named another one."""
    latest = directory.parent / "latest"
    if latest.is_symlink() and str(latest.readlink()) == directory.name:
        return False
    aside = latest.with_name(".latest.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(directory.name)
    aside.replace(latest)
    return True


def entry(plan: dict[str, Any], proof: dict[str, Any]) -> dict[str, Any]:
    """The journal entry: now, by whoever runs this controller."""
    now = datetime.now(UTC)
    return receipt.entry(plan, proof, recorded=f"{now:%Y-%m-%dT%H:%M:%SZ}", by=fleet_lock.operator())


def foresee(plan: dict[str, Any], launch: str, results_dir: str | None) -> dict[str, Any]:
    """What a launch leaves behind that a check run cannot boot: its receipt and its entry, as far as they are known."""
    known = plan if plan["plan_sha256"] else plans.seal(plan)
    proven = {"launch": launch, "arm": plan["name"], "ok": True, "why": []}
    path = str(Path(results_dir, launch, "receipt.json")) if results_dir else None
    return {
        "changed": True,
        "receipt": None,
        "path": path,
        "entry": entry(known, proven),
    }


class ActionModule(ActionBase):
    """Put the receipt together and keep it on the controller; needs no connection."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "launch": {"type": "str", "required": True},
                "plan": {"type": "dict", "required": True},
                "entries": {"type": "dict", "required": True},
                "looks": {"type": "str", "required": True},
                "generation": {"type": "str", "required": True},
                "reuse": {"type": "bool"},
                "results_dir": {"type": "path"},
            }
        )
        hostvars = (task_vars or {})["hostvars"]
        plan = args["plan"]
        if self._task.check_mode and not args["entries"]:
            return {**result, **foresee(plan, args["launch"], args["results_dir"])}
        hosts = [rank["host"] for rank in plan["ranks"]]
        head = next(rank["host"] for rank in plan["ranks"] if rank["rank"] == 0)
        answer: dict[str, Any] = hostvars[head][args["generation"]]
        # How long it took is no part of the proof: proving the same launch twice gives the same receipt.
        generation = {key: answer.get(key) for key in ("text", "prompt_tokens", "completion_tokens", "finish_reason")}
        proof = receipt.build(
            plan,
            {host: hostvars[host][args["looks"]]["look"] for host in hosts},
            launch=args["launch"],
            agree=args["entries"],
            generation=generation,
            reuse=args["reuse"],
        )
        result.update(receipt=proof, path=None, changed=False)
        result["entry"] = entry(plan, proof)
        lines = [receipt.render(proof)]
        if args["results_dir"]:
            directory = Path(args["results_dir"], args["launch"])
            result["path"] = str(directory / "receipt.json")
            if not self._task.check_mode:
                written = [write(directory, "plan.json", plan), write(directory, "receipt.json", proof)]
                result["changed"] = any([*written, proof["ok"] and point_latest(directory)])
            lines.append(f'receipt: {result["path"]}  "ok": {str(proof["ok"]).lower()}')
        display.display("\n".join(lines))
        if not proof["ok"]:
            result["failed"] = True
            result["msg"] = "not proven:\n" + "\n".join(proof["why"])
        return result
