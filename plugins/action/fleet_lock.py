"""Controller side of ``fleet_lock``: says who asks, and whether a holder that is in the way still lives.

See plugins/modules/fleet_lock.py for the documentation.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.lockstep.fleet.plugins.action.plan import given_problem
from ansible_collections.lockstep.fleet.plugins.module_utils import fleet_lock
from ansible_collections.lockstep.fleet.plugins.modules.fleet_lock import ARGUMENT_SPEC

display = Display()


class ActionModule(ActionBase):
    """Take the fleet's lock or give it back."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        if args["state"] == "held" and (problem := given_problem(self, task_vars or {})):
            return {**result, "failed": True, "changed": False, "msg": problem}
        names = [Path(name).name for name in context.CLIARGS.get("args") or ()]
        # The process of ansible-playbook itself, the parent of every host's worker: it lives as long as the run.
        mine = fleet_lock.me(args["what"] or " ".join(names) or "a playbook", os.getppid(), datetime.now(UTC))
        args["holder"] = mine
        said = self._ask(args, task_vars)
        holder = said.pop("held_by", None)
        if holder and fleet_lock.gone(holder, mine):
            said = self._ask({**args, "over": holder["run"]}, task_vars)
            said.pop("held_by", None)
        if said.get("taken_from"):
            how = "that run is gone" if holder else "broken by break_lock"
            display.display(f"the fleet's lock is taken over, {how}: {fleet_lock.describe(said['taken_from'])}")
        return {**result, **said}

    def _ask(self, args: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        asked: dict[str, Any] = self._execute_module(
            module_name="lockstep.fleet.fleet_lock", module_args=args, task_vars=task_vars
        )
        return asked
