"""Controller side of ``engram_pack``: starts the packing on the rank, tells how far it is, and waits for its end.

See plugins/modules/engram_pack.py for the documentation.
"""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.lockstep.fleet.plugins.action.plan import given_problem
from ansible_collections.lockstep.fleet.plugins.modules.engram_pack import ARGUMENT_SPEC

display = Display()

# Seconds between two lines of one rank.
SAY_EVERY_S = 1.0


def done(shard: dict[str, Any]) -> str:
    """What was done to a shard, and how fast; or what a check found."""
    if "fault" in shard:
        return f"layer {shard['layer']} {shard['fault'] or 'ok'}" + (f": {shard['why']}" if shard["why"] else "")
    if shard["action"] == "keep":
        return f"layer {shard['layer']} is good, kept"
    word = "packed" if shard["action"] == "pack" else "proven"
    return (
        f"layer {shard['layer']} {word}, {shard['bytes'] / 1e6:,.1f} MB in {shard['seconds']} s, {shard['mb_s']} MB/s"
    )


def room(space: dict[str, int], place: str) -> str:
    """The arithmetic of a disk, before anything is written to it."""
    left = f" + {space['reclaim']:,} of an interrupted packing" if space["reclaim"] else ""
    wanted = f"{space['needed']:,} bytes to write + {space['reserve']:,} kept free"
    return f"{wanted}, of {space['free']:,} free{left} in {place}"


class ActionModule(ActionBase):
    """Start, then poll until the end, on one rank; Ansible runs the ranks side by side."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        _, args = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        if problem := given_problem(self, variables):
            raise AnsibleActionFail(problem)
        host = variables["inventory_hostname"]
        result.update(self._ask("start", args, task_vars))
        container = result.pop("_container")
        if args["state"] == "packed" and result["space"]["needed"]:
            display.display(f"{host}: {room(result['space'], args['dir'])}")
        if container is None:
            return result
        doing = ", ".join(f"{step['action']} layer {step['layer']}" for step in result["actions"])
        display.display(f"{host}: {doing}")
        said_at, told = 0.0, 0
        while True:
            answer = self._ask("poll", args, task_vars)
            progress = answer["_progress"] or {"shards": [], "line": None, "set_aside": []}
            for shard in progress["shards"][told:]:
                display.display(f"{host}: {done(shard)}")
            told = len(progress["shards"])
            if answer["_finished"]:
                result["shards"] = answer["shards"]
                if args["state"] == "packed":
                    result.update(work=progress["shards"], set_aside=result["set_aside"] + progress["set_aside"])
                return result
            if progress["line"] and time.monotonic() - said_at >= SAY_EVERY_S:
                said_at = time.monotonic()
                display.display(f"{host}: {progress['line']}")

    def _ask(self, phase: str, args: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        """Run the module's part on the rank; a failure of it is ours."""
        answer: dict[str, Any] = self._execute_module(
            module_name="lockstep.fleet.engram_pack",
            module_args={**args, "_phase": phase},
            task_vars=task_vars,
            wrap_async=False,
        )
        if answer.get("failed"):
            # What packed_report needs to name this host among the others.
            raise AnsibleActionFail(str(answer.get("msg") or answer), result={"rank": args["rank"], "shards": []})
        answer.pop("invocation", None)
        answer.pop("ansible_facts", None)
        return answer
