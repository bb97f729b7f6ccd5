"""Controller side of ``drain``: see plugins/modules/drain.py for its documentation."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.lockstep.fleet.plugins.module_utils import traffic
from ansible_collections.lockstep.fleet.plugins.modules.drain import ARGUMENT_SPEC

display = Display()

# A line at least this often, so that a person sees that something is alive.
SILENCE_S = 10


class ActionModule(ActionBase):
    """Wait for the head to be idle."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        self._args, self._vars = args, task_vars or {}
        self._host = self._vars["inventory_hostname"]
        self._begun = time.monotonic()
        return {**result, **self._drained()}

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _drained(self) -> dict[str, Any]:
        args = self._args
        seen = self._look()
        while seen.get("state") == "busy":
            display.display(f"{self._host}: {traffic.summary(seen)} {self._elapsed():4.0f} s")
            left = args["timeout"] - self._elapsed()
            if self._task.check_mode or left <= 0:
                break
            seen = self._look(since=seen["cursor"], wait=max(1, min(SILENCE_S, int(left))))
        if seen.get("state") != "busy" or self._task.check_mode:
            return self._report(seen)
        if args["then"] == "fail":
            refusal = str(traffic.refusal(seen, host=self._host, seconds=self._elapsed()))
            return {**self._report(seen), "failed": True, "msg": refusal}
        ended = self._report(self._look(abort=True))
        if ended.get("changed"):
            display.display(f"{self._host}: {len(ended['aborted'])} requests ended {self._elapsed():4.0f} s")
        return ended

    def _look(self, **step: object) -> dict[str, Any]:
        passed = ("container", "port", "docker_host")
        looked: dict[str, Any] = self._execute_module(
            module_name="lockstep.fleet.drain",
            module_args={**{key: self._args[key] for key in passed}, **step},
            task_vars=self._vars,
        )
        return looked

    def _report(self, seen: dict[str, Any]) -> dict[str, Any]:
        if seen.get("note"):
            display.display(f"{self._host}: {seen['note']}")
        return {**seen, "seconds": round(self._elapsed(), 1)}
