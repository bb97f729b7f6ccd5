"""Controller side of ``history``: see plugins/modules/history.py for its documentation."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.lockstep.fleet.plugins.action.plan import check_given, plain
from ansible_collections.lockstep.fleet.plugins.module_utils import history, receipt
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

display = Display()


class ActionModule(ActionBase):
    """Join what the ranks said; needs no connection."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "journal": {"type": "str", "required": True},
                "looks": {"type": "str", "required": True},
                "launch": {"type": "str"},
            }
        )
        variables = task_vars or {}
        try:
            check_given(self, variables)
            result.update(self._history(plain(args), variables))
        except LockstepError as error:
            result.update(failed=True, msg=str(error))
            return result
        result["changed"] = False
        display.display("\n".join(result["lines"]))
        return result

    def _history(self, args: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        hosts, hostvars = list(variables["groups"].get("fleet", [])), variables["hostvars"]
        journals, looks = (
            {host: plain(hostvars[host].get(args[name]) or {}) for host in hosts} for name in ("journal", "looks")
        )
        heard = [host for host in hosts if "entries" in journals[host]]
        notes = [f"{host}: {why}" for host in heard for why in journals[host]["damaged"]]
        for host in hosts:
            silent = [said[host] for said in (journals, looks) if not {"entries", "look"} & said[host].keys()]
            if silent:
                notes.append(f"{host}: {silent[0].get('msg') or 'was not asked'}")
        entries = receipt.merge({host: journals[host]["entries"] for host in heard})
        there = {host: looks[host].get("look") for host in hosts}
        notes += history.unrecorded(entries, there)
        table = history.rows(entries, there, plain(self._templar.template(variables.get("fleet_arms", {}))))
        if args["launch"] is not None:
            one = history.find(table, args["launch"])
            table = [row for row in table if row["launch"] == one["launch"]]
        lines = history.render(table, heard, whole=args["launch"] is not None)
        return {"launches": table, "notes": notes, "lines": [*lines, *notes]}
