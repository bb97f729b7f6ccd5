"""Controller side of ``container_retire``: see plugins/modules/container_retire.py for its documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, files, receipt
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError
from ansible_collections.lockstep.fleet.plugins.modules.container_retire import ARGUMENT_SPEC


class ActionModule(ActionBase):
    """Keep the log on the controller too."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        result |= self._execute_module(task_vars=task_vars)
        text = result.pop("packed_log", None)
        if result.get("failed"):
            return result
        host = (task_vars or {})["inventory_hostname"]
        kept = self._kept(args["results_dir"], result, host)
        if kept and text is not None:
            try:
                kept.parent.mkdir(parents=True, exist_ok=True)
                files.write_atomic(kept, docker_api.unpacked(text))
            except (OSError, LockstepError) as error:
                raise AnsibleActionFail(
                    f"{host}: the log of the retired container was not kept here: {error}\n"
                    f"  next step: it lies on the rank: {result['log']}; see to {args['results_dir']} and run again"
                ) from error
        return {**result, "kept": kept and str(kept)}

    def _kept(self, directory: str | None, retired: dict[str, Any], host: str) -> Path | None:
        """Where the log belongs here; None for a container of no launch. A label may hold anything, a path too."""
        launch = retired["log"] and retired["container"]["launch"]
        if not directory or not launch:
            return None
        try:
            receipt.parse_launch(launch)
        except LockstepError:
            return None
        return Path(directory, launch, "logs", f"{host}.log")
