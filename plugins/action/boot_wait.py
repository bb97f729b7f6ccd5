"""Controller side of ``boot_wait``: see plugins/modules/boot_wait.py for its documentation."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.lockstep.fleet.plugins.module_utils import boot, docker_api, files
from ansible_collections.lockstep.fleet.plugins.modules.boot_wait import ARGUMENT_SPEC

display = Display()

# A line at least this often, so that a person sees that something is alive.
SILENCE_S = 10.0
# A rank that only shows a consequence (a closed connection) leaves the first word to the rank that has the cause.
GRACE_S = 4.0
# A Docker Engine under load may fail to answer, and a connection may break: a boot of minutes does not end with that.
LOST_S = 30.0
# A worker that is ready is looked at this often while the head is not.
WATCH_S = 1.0
# What is kept of a rank, besides its log.
KEPT = ("container", "state", "facts")


class Signals:
    """What the hosts of one launch tell each other through a directory on the controller.

    ``fatal.<run>.json``: who failed first; created once, never overwritten. ``following.<run>.<host>``: this host is
    being followed, with its role; the file goes when it is done. ``<run>`` is the process id of ansible-playbook, the
    parent of all hosts' workers, so that what an earlier run left behind does not speak.
    """

    def __init__(self, directory: str | None, host: str) -> None:
        self.host = host
        self.directory = Path(directory).absolute() if directory else None
        self.run = os.getppid()

    def _path(self, name: str) -> Path | None:
        return self.directory / name if self.directory else None

    def begin(self, role: str) -> None:
        """Say that this host is being followed."""
        if (path := self._path(f"following.{self.run}.{self.host}")) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_json_atomic(path, {"role": role}, durable=False)

    def end(self) -> None:
        """Say that this host is done."""
        if (path := self._path(f"following.{self.run}.{self.host}")) is not None:
            path.unlink(missing_ok=True)

    def head_is_followed(self) -> bool:
        """Whether some other host is the head and not done yet."""
        for path in self.directory.glob(f"following.{self.run}.*") if self.directory else ():
            with contextlib.suppress(OSError, ValueError):  # gone in between
                if json.loads(path.read_text())["role"] == "head":
                    return True
        return False

    def first_fatal(self) -> dict[str, Any] | None:
        """Who failed first."""
        path = self._path(f"fatal.{self.run}.json")
        if path is None or files.look(path) is None:
            return None
        first = files.read_json(path)
        return first if isinstance(first, dict) else None

    def claim(self, message: str) -> None:
        """Say that this host failed, unless another did so before: the link is made whole and only once."""
        path = self._path(f"fatal.{self.run}.json")
        if path is None:
            return
        mine = path.with_name(f".{path.name}.{self.host}")
        files.write_json_atomic(mine, {"host": self.host, "message": message}, durable=False)
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
        mine.unlink()


class ActionModule(ActionBase):
    """Follow one host's boot; Ansible runs one of these for each host at the same time."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        if self._task.check_mode:
            return {**result, "skipped": True, "changed": False, "msg": "nothing was started that could be awaited"}
        self._host = (task_vars or {})["inventory_hostname"]
        self._args, self._vars = args, task_vars
        self._begun = self._spoke = time.monotonic()
        self._stage = ""
        signals = Signals(args["signal_dir"], self._host)
        signals.begin(args["role"])
        self._seen: dict[str, Any] = {}
        try:
            failure = self._follow(signals)
        finally:
            signals.end()
        if signals.directory:
            self._keep(signals.directory)
        return {**result, **self._report(failure)}

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _follow(self, signals: Signals) -> str | None:
        """Look until this host's boot has ended; why it failed, None when it is ready. The last look stays in _seen."""
        args = self._args
        lost_since = None
        while True:
            # A worker that is ready has waited for the head already, on the controller.
            left = max(1, int(args["timeout"] - self._elapsed()))
            wait = 0 if self._seen.get("state") == "ready" else min(args["wait"], left)
            # The head's being ready is the end of the wait: what is kept of it comes along.
            collect = "ready" if args["role"] == "head" else "never"
            new = self._look(self._seen.get("cursor") or args["since"], wait, collect)
            if new.get("failed"):
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since >= LOST_S:
                    signals.claim(f"{self._host}: {new.get('msg')}")
                    return str(new.get("msg"))
                if (first := signals.first_fatal()) is not None:
                    return f"{self._host}: stopped: {first['host']} was fatal first"
                time.sleep(1)
                continue
            lost_since, self._seen = None, new
            self._say(new)
            if new["state"] == "ready" and (args["role"] == "head" or self._head_is_done(signals)):
                return None
            if new["state"] in {"fatal", "exited"}:
                return self._failure(new, signals)
            # Every rank that is late says how far it came: which of them holds up the others, a person has to see.
            if self._elapsed() >= args["timeout"]:
                late = str(boot.overdue(new, host=self._host, rank=args["rank"], seconds=self._elapsed()))
                signals.claim(late)
                return late
            if (first := signals.first_fatal()) is not None:
                return f"{self._host}: stopped: {first['host']} was fatal first"

    def _head_is_done(self, signals: Signals) -> bool:
        """Whether the head is done; waits a moment for it, since a worker that is ready has nothing to tell."""
        until = time.monotonic() + WATCH_S
        while (followed := signals.head_is_followed()) and time.monotonic() < until:
            time.sleep(0.1)
        return not followed

    def _failure(self, seen: dict[str, Any], signals: Signals) -> str:
        """What to say of this host's end, and to the others."""
        args = self._args
        until = time.monotonic() + (0 if seen["cause"] else GRACE_S)
        while (first := signals.first_fatal()) is None and time.monotonic() < until:
            time.sleep(0.2)
        message = str(boot.failure(seen, host=self._host, rank=args["rank"], container=args["container"]))
        if first is None:
            signals.claim(message)
        elif not seen["cause"]:
            return f"{self._host}: stopped: {first['host']} was fatal first\n{message}"
        return message

    def _look(self, cursor: str | None, wait: int, collect: str) -> dict[str, Any]:
        passed = ("container", "role", "port", "rank", "image_files", "docker_host")
        try:
            looked: dict[str, Any] = self._execute_module(
                module_name="lockstep.fleet.boot_wait",
                module_args={
                    **{key: self._args[key] for key in passed},
                    "since": cursor,
                    "wait": wait,
                    "collect": collect,
                },
                task_vars=self._vars,
            )
        except AnsibleConnectionFailure as error:
            return {"failed": True, "msg": f"unreachable: {error}"}
        return looked

    def _keep(self, directory: Path) -> None:
        """Keep the rank's log and what it runs; a rank that cannot give them has said so before."""
        seen = self._seen if "log" in self._seen else self._look(None, 0, "now")
        if not seen.get("container"):
            return
        kept = {"host": self._host, "rank": self._args["rank"], **{key: seen[key] for key in KEPT}}
        (directory / "boot").mkdir(parents=True, exist_ok=True)
        files.write_atomic(directory / f"boot/{self._host}.log", docker_api.unpacked(seen["log"]))
        files.write_json_atomic(directory / f"boot/{self._host}.json", kept)

    def _say(self, seen: dict[str, Any]) -> None:
        stage = seen["stage"] if seen["state"] in {"starting", "ready"} else f"{seen['stage']}: {seen['state']}"
        if seen["state"] == "ready":
            stage = "ready"
        if stage != self._stage or time.monotonic() - self._spoke >= SILENCE_S:
            self._stage, self._spoke = stage, time.monotonic()
            display.display(f"{self._host}: {stage:<16} {self._elapsed():4.0f} s")

    def _report(self, failure: str | None) -> dict[str, Any]:
        kept = ("state", "stage", "facts", "cause", "log_tail", "events", "cursor", "exit_code", "oom_killed")
        report: dict[str, Any] = {key: self._seen[key] for key in kept if key in self._seen}
        report |= {"changed": False, "seconds": round(self._elapsed(), 1)}
        return report if failure is None else {**report, "failed": True, "msg": failure}
