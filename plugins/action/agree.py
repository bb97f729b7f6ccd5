"""Controller side of ``agree``: see plugins/modules/agree.py for its documentation."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.lockstep.fleet.plugins.action.plan import given_problem, plain
from ansible_collections.lockstep.fleet.plugins.module_utils import agree, history, plan, tactics

display = Display()

CONVERGED = ("base_image", "overlay_image", "shards")  # what a sealed plan names by digest


def seal(wanted: dict[str, Any], looks: dict[str, Any]) -> dict[str, Any]:
    """The plan with the digests of the overlay and the shards that the ranks hold."""
    overlay = next(look["images"]["overlay"] for look in looks.values())  # equal on all ranks, or it is not sealed
    shards = {
        host: {layer: item["sha256"] for layer, item in look["shards"]["files"].items()} for host, look in looks.items()
    }
    return plan.seal(wanted, overlay={"id": overlay["id"]}, shards=shards)


def nothing_to_compare(looks: dict[str, Any]) -> AnsibleActionFail:
    """Without a plan, and with no rank that knows one."""
    damaged = [f"{host}: {look['journal_damaged']}" for host, look in looks.items() if look and look["journal_damaged"]]
    return AnsibleActionFail(
        "\n  ".join(
            [
                "no rank has a journal entry of what runs, so there is nothing to compare"
                if history.newest(looks)
                else "no launch is running on any rank, so there is nothing to compare",
                *damaged,
                "next step: ansible-playbook serve.yml",
            ]
        )
    )


def failed(result: dict[str, Any]) -> bool:
    """Whether a rank was reached and its look ended in an error."""
    return bool(result.get("failed")) and not result.get("unreachable")


class ActionModule(ActionBase):
    """Compare what every rank shows with the plan; needs no connection."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "plan": {"type": "dict"},
                "looks": {"type": "str", "required": True},
                "stage": {"type": "str", "choices": ["before", "converged", "proof"], "default": "before"},
                "engram_missing": {"type": "str", "choices": ["pack", "fail", "fallback"], "default": "pack"},
                "engram_wrong": {"type": "str", "choices": ["fail", "set_aside"], "default": "fail"},
                "purge": {"type": "bool", "default": False},
                "on_failure": {"type": "str", "choices": ["return", "leave"], "default": "return"},
                "may_differ": {"type": "list", "elements": "str", "default": []},
            }
        )
        # Where nothing was planned, nothing has checked this run's -e.
        if not args["plan"] and (problem := given_problem(self, task_vars or {})):
            return {**result, "failed": True, "changed": False, "msg": problem}
        hostvars = (task_vars or {})["hostvars"]
        taken = {host: hostvars[host].get(args["looks"]) or {} for host in (task_vars or {})["ansible_play_hosts_all"]}
        looks: dict[str, Any] = {host: said.get("look") for host, said in taken.items()}
        there, previous = history.there(looks), history.before(looks)
        wanted = args["plan"] or (there or {}).get("plan")
        if not wanted:
            raise nothing_to_compare(looks)
        policy: dict[str, Any] = {key: args[key] for key in ("engram_missing", "engram_wrong")}
        policy["unseen"] = {
            host: f"the look failed: {said['msg'].splitlines()[0]}" for host, said in taken.items() if failed(said)
        }
        entries = agree.table(wanted, looks, args["may_differ"], **policy)
        # A plan that is sealed, that of what runs or of a journal, stays what it is: the ranks are held against it.
        if not wanted["plan_sha256"] and not agree.bad(
            {name: entries[name] for name in (*CONVERGED, "reachable", "docker")}
        ):
            wanted = seal(wanted, looks)
            entries = agree.table(wanted, looks, args["may_differ"], **policy)
        must_hold = {
            "before": agree.bad(entries, "refuse"),
            "converged": agree.bad(entries, "refuse") + agree.bad(entries, "converge"),
            "proof": agree.bad(entries),
        }[args["stage"]]
        verdict = tactics.verdict({host: look["tactics"] for host, look in looks.items() if look and "tactics" in look})
        lines = agree.render(entries)
        if args["stage"] != "proof" or must_hold:
            display.display("\n".join(lines))
        if must_hold:
            # The table stands above; the rest of the result would bury the reason.
            return {"failed": True, "changed": False, "msg": agree.explain(entries, must_hold)}
        same = bool(previous and previous["plan_sha256"] == wanted["plan_sha256"])
        if there and same:  # it was warned of against what ran before it
            wanted = {**wanted, "warnings": there["plan"]["warnings"]}
        elif args["plan"] and args["stage"] != "proof":
            wanted = {**wanted, "warnings": self._warnings(wanted, looks, hostvars, show=args["stage"] == "before")}
        swap = args["purge"] or bool(agree.bad(entries, "swap") + agree.bad(entries, "converge"))
        work = {
            name: sorted(looks) if name == "tactics" and args["purge"] else sorted(entry["bad"])
            for name, entry in entries.items()
            if entry["kind"] == "converge"
        }
        if same:
            previous = None  # the same plan again is no way back
        result.update(
            changed=False,
            entries=entries,
            table=lines,
            plan=wanted,
            swap=swap,
            launch=plan.launch_id(wanted, datetime.now(UTC)) if swap else history.newest(looks),
            reuse=verdict["reuse"],
            work=work,
            converge=any(work.values()),
            tactics_match=verdict["match"],
            on_failure=args["on_failure"],
            previous=previous,
            unrecorded=sorted(
                host for host, look in looks.items() if look and look["container"] and not look["journal"]
            ),
        )
        return result

    @staticmethod
    def _warnings(
        wanted: dict[str, Any],
        looks: dict[str, Any],
        hostvars: Any,  # noqa: ANN401 (Ansible's own mapping)
        *,
        show: bool,
    ) -> list[dict[str, Any]]:
        """The plan's warnings, now that it is known what runs; what is new is shown."""
        head = wanted["ranks"][0]["host"]
        running, variables = looks[head]["container"], hostvars[head]
        if not running or "fleet_rules" not in variables:
            return list(wanted["warnings"])
        schema = plain({**variables["fleet_switches"], **variables["fleet_switches_extra"]})
        warnings = plan.against_running(wanted, running["env"], schema, plain(variables["fleet_rules"]))
        for warning in warnings:
            if show and warning not in wanted["warnings"]:
                display.display(f"warning {warning['id']}: {warning['reason']} ({', '.join(warning['because'])})")
        return warnings
