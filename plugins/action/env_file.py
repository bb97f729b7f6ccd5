"""Controller side of ``env_file``: see plugins/modules/env_file.py for its documentation."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.lockstep.fleet.plugins.action.plan import plain
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError
from ansible_collections.lockstep.fleet.plugins.modules.env_file import ARGUMENT_SPEC, keep


class ActionModule(ActionBase):
    """Keep one environment on the controller, on the host, or on both."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec=ARGUMENT_SPEC, required_one_of=[["path", "controller_path"]]
        )
        kept: list[dict[str, Any]] = []
        if args["controller_path"]:
            try:
                kept.append(keep(args["controller_path"], plain(args["env"]), check_mode=self._task.check_mode))
            except LockstepError as error:
                return {**result, "failed": True, "msg": str(error)}
        if args["path"]:
            on_host = self._execute_module(module_args={"path": args["path"], "env": args["env"]}, task_vars=task_vars)
            if on_host.get("failed"):
                return {**result, **on_host}
            kept.append(on_host)
        return {
            **result,
            **kept[-1],
            "path": args["path"],
            "changed": any(one["changed"] for one in kept),
            "diff": [one["diff"] for one in kept],
        }
