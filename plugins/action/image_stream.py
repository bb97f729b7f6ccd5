"""Controller side of ``image_stream``: follows a sender to its end. See the module for the documentation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.lockstep.fleet.plugins.modules.image_stream import ARGUMENT_SPEC

display = Display()

SAY_EVERY_S = 1.0


def line(said: Mapping[str, Any]) -> str:
    """How far a stream is: ``512.0 MB sent, 480 MB/s``."""
    doing = "sent, the engine there loads them" if said["loading"] else "sent"
    return f"{said['bytes'] / 1e6:,.1f} MB {doing}, {said['mb_s']:.0f} MB/s"


class ActionModule(ActionBase):
    """One step; only ``send`` takes long, and says every second how far it is."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        variables = task_vars or {}
        if args["step"] != "send":
            return result | self._ask(args, variables)
        names = "".join(f"{ref}\n" for ref in args["images"].values())
        result.update(changed=True, images={}, diff={"before": "", "after": names, "after_header": args["to"]})
        if self._task.check_mode:
            return result
        self._ask(args, variables)
        said_at = 0.0
        while not (answer := self._ask({**args, "_poll": True}, variables))["finished"]:
            if answer["progress"]["bytes"] and time.monotonic() - said_at >= SAY_EVERY_S:
                said_at = time.monotonic()
                display.display(f"{args['to']}: {line(answer['progress'])}")
        display.display(
            f"{args['to']}: {', '.join(args['images'])} sent and loaded, SHA-256 equal at both ends: "
            f"{answer['bytes'] / 1e6:,.1f} MB in {answer['seconds']} s, {answer['mb_s']} MB/s"
        )
        return result | answer

    def _ask(self, args: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Run the module's part on the task's host; a failure of it is ours."""
        answer: dict[str, Any] = self._execute_module(
            module_name="lockstep.fleet.image_stream", module_args=args, task_vars=variables, wrap_async=False
        )
        if answer.get("failed"):
            raise AnsibleActionFail(str(answer.get("msg") or answer))
        answer.pop("invocation", None)
        return answer
