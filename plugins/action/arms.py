"""Controller side of ``arms``: see plugins/modules/arms.py for its documentation."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.lockstep.fleet.plugins.action.plan import check_given, one_off, plain, values, words
from ansible_collections.lockstep.fleet.plugins.module_utils import catalog
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

display = Display()


class ActionModule(ActionBase):
    """Show arms from variables alone; needs no connection."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "arm": {"type": "str"},
                "against": {"type": "str"},
                "set": {"type": "raw", "default": {}},
                "unset": {"type": "raw", "default": []},
                "accept_rule": {"type": "raw", "default": []},
                "arms_file": {"type": "str"},
                "default": {"type": "str", "required": True},
            },
        )
        variables, asked = task_vars or {}, plain(args)
        try:
            check_given(self, variables)
            asked |= {
                "set": one_off(asked["set"]),
                **{name: words(name, asked[name]) for name in ("unset", "accept_rule")},
            }
            fleet, known = values(self, variables, asked["arms_file"], overlay=False)
            shown = catalog.show(fleet, known, asked["default"], asked)
        except LockstepError as error:
            result.update(failed=True, changed=False, msg=str(error), rule=getattr(error, "rule", None))
            return result
        result.update(changed=False, lines=shown["lines"], **{shown["what"]: shown["data"]})
        display.display("\n".join(shown["lines"]))
        return result
