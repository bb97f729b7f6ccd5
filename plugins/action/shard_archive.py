"""Controller side of ``shard_archive``: finds the way, follows a sender to its end and makes the table of the listing.

See plugins/modules/shard_archive.py for the documentation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.lockstep.fleet.plugins.action.plan import check_given
from ansible_collections.lockstep.fleet.plugins.module_utils import archive, switches
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError
from ansible_collections.lockstep.fleet.plugins.modules.shard_archive import ARGUMENT_SPEC

display = Display()

SAY_EVERY_S = 1.0
DOING = {"send": "sent", "compare": "compared", "verify": "read back", "receive": "received", "remove": "removed"}


def route(args: Mapping[str, Any], host: str, hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """Both ends of a move, and the destination's address as the source sees it. LockstepError for bad input."""
    ends = {}
    for side, name in (("source", "archive_from"), ("target", "archive_to")):
        if not args[side]:
            raise LockstepError(
                f"{name} is not given",
                host=host,
                expected="host:/directory, or /directory of the same host",
                next_step=f"-e {name}=host:/directory",
            )
        other, directory = archive.parse_place(args[side], host, name)
        if other not in hostvars:
            near = switches.nearest(other, list(hostvars))
            raise LockstepError(
                f"{name} names a host that the inventory does not have",
                host=host,
                found=other,
                expected=", ".join(sorted(hostvars)),
                next_step=f"-e {name}={near or 'host'}:{directory}",
            )
        ends[side] = {"host": other, "dir": directory}
    source, target = ends["source"]["host"], ends["target"]["host"]
    if source == target:
        return {**ends, "address": None, "note": None}
    own = hostvars[target]
    fabric = own.get("fleet_fabric") or {}
    address = fabric.get(source) or own.get("fleet_address") or own.get("ansible_host")
    if not address:
        raise LockstepError(
            f"no address of {target} is known",
            host=target,
            expected=f"fleet_fabric[{source}] or fleet_address",
            next_step=f"give {target} its fleet_fabric in the inventory",
        )
    note = None if source in fabric else f"no fabric link from {source} to {target} is known: {address} is used instead"
    return {**ends, "address": str(address), "note": note}


def acting(args: Mapping[str, Any], host: str, play: Sequence[str]) -> str:
    """The host of the play that does what ``host`` was asked to: one for all when a host's files are to go."""
    source = archive.parse_place(args["source"], "", "archive_from")[0] if not args["source"].startswith("/") else ""
    if args["mode"] == "restore" or not source:
        return host
    return source if source in play else play[0]


def serves_there(args: Mapping[str, Any], host: str, hostvars: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the source's own rank serves: there it is that files are removed. None when it is no rank."""
    source, serves = args["route"]["source"]["host"], args["serves"]
    if not serves or source == host:
        return dict(serves) if serves else None
    own = hostvars[source]
    if not own.get("fleet_engram_dir") or own.get("fleet_rank") is None:
        return None
    return {**serves, "dir": own["fleet_engram_dir"], "rank": own["fleet_rank"]}


def line(said: Mapping[str, Any]) -> str:
    """How far a file is: ``engram-l1-r1of2.bin  45 % sent, 512 MB/s, eta 9 s``."""
    percent = 100 * said["bytes"] // said["total"] if said["total"] else 100
    speed = "" if said["eta_s"] is None else f", {said['mb_s']:.0f} MB/s, eta {said['eta_s']} s"
    return f"{said['file']} {percent:3d} % {DOING[said['stage']]}{speed}"


def done(file: Mapping[str, Any], target: str) -> str:
    """What was done with a file, and how fast."""
    word = "sent to" if file["action"] == "sent" else "is the same as in"
    gone = ", removed here" if file["removed"] else ""
    speed = f"{file['bytes'] / 1e6:,.1f} MB in {file['seconds']} s, {file['mb_s']} MB/s"
    return f"{file['file']} {word} {target}, read back, SHA-256 equal{gone}: {speed}"


def table(hosts: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """The retention listing: a line a file, then what could go, by host."""
    cells = [["where", "file", "TP", "split", "rank", "bytes", "packed", "moved", "verified", "needed"]]
    total: dict[str, tuple[int, int]] = {}
    for host, shards in sorted(hosts.items()):
        for shard in shards:
            moved = shard["moved"]
            cells.append(
                [
                    f"{host}:{shard['dir']}",
                    shard["file"],
                    str(shard["tp"] or "-"),
                    shard["split"] or "-",
                    "-" if shard["rank"] is None else str(shard["rank"]),
                    f"{shard['bytes']:,}",
                    shard["packed"] or "-",
                    f"{moved['when']} from {moved['from']}" if moved else "-",
                    shard["verified"] or "NO",
                    "yes" if shard["needed"] else "no",
                ]
            )
            if not shard["needed"]:
                count, size = total.get(host, (0, 0))
                total[host] = (count + 1, size + shard["bytes"])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    for host in sorted(hosts):
        count, size = total.get(host, (0, 0))
        lines.append(f"{host}: {count} files that this fleet's plan does not need; {size:,} bytes would be free")
    return [*lines, "Nothing was removed: archive_engram.yml moves files, a person deletes them."]


class ActionModule(ActionBase):
    """One step; only ``send`` takes long, and says every second how far it is."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        variables = task_vars or {}
        host = variables["inventory_hostname"]
        try:
            self._reached(args)
            if args["step"] == "route":
                check_given(self, variables)
                result.update(changed=False, **route(args, host, variables["hostvars"]))
                result["acts"] = acting(args, host, variables["ansible_play_hosts_all"])
                if result["acts"] != host:
                    display.display(f"{host}: leaves {args['source']} to {result['acts']}, so that one host moves it")
                elif result["note"]:
                    display.display(f"{host}: {result['note']}")
            elif args["step"] == "report":
                result.update(changed=False, **self._report(args["lists"], variables))
            elif args["step"] == "send":
                result.update(self._send(host, args, variables))
            else:
                if args["step"] == "look":
                    args["serves"] = serves_there(args, host, variables["hostvars"])
                result.update(self._ask(args, variables))
                for text in result.get("said", []):
                    display.display(f"{host}: {text}")
        except LockstepError as error:
            raise AnsibleActionFail(str(error)) from error
        return result

    def _reached(self, args: Mapping[str, Any]) -> None:
        """Say which host a step before did not reach."""
        for step, side in (("look", "source"), ("plan", "target")):
            if (args[step] or {}).get("unreachable"):
                host = args["route"][side]["host"]
                raise LockstepError(
                    "this host does not answer",
                    host=host,
                    found=str(args[step].get("msg", "")).strip(),
                    expected="an answer over SSH",
                    next_step=f"ansible {host} -m ansible.builtin.ping; nothing was moved",
                )

    def _report(self, name: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        hostvars = variables["hostvars"]
        found = {host: hostvars[host].get(name) or {} for host in variables["ansible_play_hosts_all"]}
        lines = table({host: said["shards"] for host, said in found.items() if "shards" in said})
        silent = sorted(host for host, said in found.items() if "shards" not in said)
        lines += [f"{host}: not seen ({found[host].get('msg', 'it did not answer')})" for host in silent]
        display.display("\n".join(lines))
        return {"table": lines}

    def _send(self, host: str, args: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        source, target = (
            f"{args['route'][side]['host']}:{args['route'][side]['dir']}" for side in ("source", "target")
        )
        joined = (args["look"] or {}).get("running")
        items = [] if joined else args["plan"]["items"]
        stays = args["mode"] == "restore"
        before = "".join(f"{source}/{item['file']}, {item['bytes']:,} bytes\n" for item in items)
        after = (before if stays else "") + "".join(
            f"{target}/{item['file']}, {item['bytes']:,} bytes\n" for item in items
        )
        result: dict[str, Any] = {
            "changed": bool(items or joined),
            "done": [],
            "diff": {"before": before, "after": after},
        }
        if self._task.check_mode or not result["changed"]:
            return result
        if joined:
            display.display(f"{host}: joins the sender of an earlier run (pid {joined['pid']})")
        else:
            size = sum(item["bytes"] for item in items)
            display.display(f"{host}: {source} to {target}: {len(items)} files, {size / 1e6:,.1f} MB")
            self._ask(args, variables)
        told, said_at = 0, 0.0
        while True:
            answer = self._ask({**args, "_poll": True}, variables)
            progress = answer["progress"] or {"done": [], "file": ""}
            for file in progress["done"][told:]:
                display.display(f"{host}: {done(file, target)}")
            told = len(progress["done"])
            if answer["finished"]:
                return {**result, "changed": answer["changed"], "done": answer["done"]}
            if progress["file"] and time.monotonic() - said_at >= SAY_EVERY_S:
                said_at = time.monotonic()
                display.display(f"{host}: {line(progress)}")

    def _ask(self, args: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Run the module's part on the task's host; a failure of it is ours."""
        answer: dict[str, Any] = self._execute_module(
            module_name="lockstep.fleet.shard_archive", module_args=args, task_vars=variables, wrap_async=False
        )
        if answer.get("failed"):
            raise AnsibleActionFail(str(answer.get("msg") or answer))
        answer.pop("invocation", None)
        answer.pop("ansible_facts", None)
        return answer
