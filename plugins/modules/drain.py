#!/usr/bin/python
"""Ansible module: one look at the requests on the head (the action of the same name repeats it)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: drain
short_description: Wait until nobody else's request is in flight on the head
description:
  - Waits, while the engine serves on, for a moment without a foreign request, and prints a line on the controller when
    what is in flight changes or every ten seconds.
  - Which requests these are is worked out from the engine's own counts (C(/v1/loads)), from the established connections
    to its port and from the access lines of its log. Health probes and monitoring do not count, and a kept connection
    without a request does not either.
  - Nothing can be waited for where the container does not run, its API does not answer, or its scheduler has requests
    and has taken no step for a minute. It ends at once there and says so in RV(note), because a hung engine must be
    replaceable.
  - Where C(/v1/loads) is refused (an API key) or unknown (an older engine), connections and log alone decide.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: Says what is in flight, waits for nothing and ends nothing.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
options:
  container:
    description: Name of the head's engine container.
    type: str
    required: true
  port:
    description: Port of the engine's HTTP server; without it the C(--port) of the container's own command line.
    type: int
  timeout:
    description: Seconds to wait at most. 0 looks once.
    type: int
    default: 120
  then:
    description:
      - What happens to requests that did not end in time. V(fail) touches nothing and fails, with their names.
        V(abort) ends them through the engine's C(/abort_request), so that each client gets a proper end.
    type: str
    choices: [fail, abort]
    default: fail
  wait:
    description: Seconds that one look at the head lasts at most, if nothing changes. The action sets it.
    type: int
    default: 0
  since:
    description: RV(cursor) of the look before; the look ends when something else is in flight. The action sets it.
    type: str
  abort:
    description: End what is in flight. The action sets it.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Drain
  lockstep.fleet.drain:
    container: dsv41-head
    port: 8888
    timeout: 60
    then: abort
"""

RETURN = r"""
requests:
  description: What is in flight, oldest first. Where the log tells no more than that they are there, none is named.
  returned: success, and when requests did not end in time
  type: list
  elements: dict
  contains:
    client: {description: "Address and port of the client.", type: str}
    method: {description: "HTTP method; null while the request waits for its answer.", type: str}
    path: {description: "Path; null while the request waits for its answer.", type: str}
    since: {description: "When its answer began, ISO 8601, UTC; null while it waits for it.", type: str}
    state: {description: "C(streaming) or C(waiting for its answer).", type: str}
running:
  description: Requests that the engine runs, null where it does not tell.
  returned: as requests
  type: int
waiting:
  description: Requests that wait in the engine, null where it does not tell.
  returned: as requests
  type: int
aborted:
  description: The requests that were ended.
  returned: as requests
  type: list
  elements: dict
note:
  description: Why nothing could be waited for, or by what less the requests were told; null when all went as described.
  returned: as requests
  type: str
seconds:
  description: How long it took.
  returned: as requests
  type: float
state:
  description: V(busy) or V(idle).
  returned: as requests
  type: str
cursor:
  description: Where the next look goes on.
  returned: as requests
  type: str
"""

import json
import time
import urllib.error
import urllib.request
from itertools import pairwise
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, files, traffic
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "container": {"type": "str", "required": True},
    "port": {"type": "int"},
    "timeout": {"type": "int", "default": 120},
    "then": {"type": "str", "choices": ["fail", "abort"], "default": "fail"},
    "wait": {"type": "int", "default": 0},
    "since": {"type": "str"},
    "abort": {"type": "bool", "default": False},
    "docker_host": {"type": "str"},
}
STEP_S = 0.5
# Pictures with counts of zero, one after the other and all taken since the look began, that make an engine idle. The
# first alone may be that of a request's prefill, which is not counted yet.
PICTURES = 2
# An API that gives no answer to a GET that needs no GPU, twice, is hung.
ANSWER_S = 5.0
TRIES = 2
ABORTED_S = 5.0
# The last line of every connection that is still open stands in these: over two hours beside a dashboard's five GETs in
# two seconds. More would cost seconds of reading.
LOG_LINES = 20000
NO_COUNTS = {401: "it wants an API key", 403: "it wants an API key", 404: "this engine has none"}


def ask(port: int, path: str, body: object = None) -> tuple[int | None, bytes]:
    """Status and body of one request to the engine on this rank, (None, …) when nothing answers. Never a proxy."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_S) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError as error:
        return None, str(getattr(error, "reason", error)).encode()


def api_port(params: dict[str, Any], container: dict[str, Any]) -> int | None:
    """The API's port: as asked, else as the running engine was told; None for a container that was told none."""
    told = next((value for key, value in pairwise(container["argv"]) if key == "--port" and value.isdigit()), None)
    return params["port"] or (int(told) if told else None)


def counted(port: int) -> tuple[dict[str, Any] | None, str | None, bool]:
    """The engine's counts (None where it has none to give), a note on that, and whether it answers at all."""
    for _ in range(TRIES):
        status, body = ask(port, "/v1/loads?include=core")
        if status is not None:
            break
    if status is None:
        return None, f"the API on port {port} does not answer ({body.decode()}): nothing can be waited for", False
    if status in NO_COUNTS:
        why = NO_COUNTS[status]
        return None, f"/v1/loads answered {status} ({why}): told by connections and log alone", True
    try:
        return traffic.counts(json.loads(body)), None, True
    except (ValueError, LockstepError):
        return None, f"/v1/loads answered {status} without counts: told by connections and log alone", True


def look(client: docker_api.Client, params: dict[str, Any]) -> dict[str, Any]:
    """Look once."""
    inspect = docker_api.inspect_container(client, params["container"])
    container = docker_api.container_facts(inspect) if inspect is not None else None
    if container is None or container["state"] != "running":
        state = "is not there" if container is None else f"is {container['state']}"
        return _nothing(f"{params['container']} {state}: nothing can be waited for")
    port = api_port(params, container)
    if port is None:
        return _nothing(f"{params['container']} was told no --port: nothing can be waited for")
    counts, note, answered = counted(port)
    if not answered:
        return _nothing(note)
    # As the container sees them, whatever network it has.
    tables = [path for path in (f"/proc/{container['pid']}/net/{kind}" for kind in ("tcp", "tcp6")) if files.look(path)]
    clients = traffic.connections("".join(files.read_bytes(path).decode() for path in tables), port)
    # A container that was started again keeps the log of its earlier life.
    since = docker_api.began(container)
    log = docker_api.logs(client, container["id"], since=since, tail=LOG_LINES, timestamps=True) if clients else ""
    seen = traffic.in_flight(log, clients, counts, now=time.time())
    if seen["state"] == "hung":
        return _nothing(f"its scheduler has taken no step for {seen['age']:.0f} s: nothing can be waited for")
    return {**seen, "note": note, "port": port, "at": counts and counts["at"], "cursor": _cursor(seen)}


def _cursor(seen: dict[str, Any]) -> str:
    return " ".join([str(traffic.number(seen)), *(request["client"] for request in seen["requests"])])


def _nothing(note: str | None) -> dict[str, Any]:
    none = {"running": None, "waiting": None, "port": None, "at": None}
    return {**none, "state": "idle", "requests": [], "note": note, "cursor": ""}


def watch(client: docker_api.Client, params: dict[str, Any]) -> dict[str, Any]:
    """Look until the engine is surely idle, something else is in flight, or ``wait`` seconds are over."""
    begun, clock = time.time(), time.monotonic()
    zeros: set[float] = set()
    while True:
        seen = look(client, params)
        if seen["state"] == "busy":
            zeros.clear()
            if seen["cursor"] != params["since"] or time.monotonic() - clock + STEP_S > params["wait"]:
                return seen
        elif seen["state"] == "quiet":
            zeros |= {seen["at"]} if seen["at"] > begun else set()
        if seen["state"] == "idle" or len(zeros) == PICTURES:
            return {**seen, "state": "idle", "requests": []}
        time.sleep(STEP_S if seen["state"] == "busy" else STEP_S / 5)  # the next picture of a quiet engine comes soon


def end(client: docker_api.Client, params: dict[str, Any]) -> dict[str, Any]:
    """End what is in flight, and wait a little for the engine to say so."""
    before = watch(client, params)
    if before["state"] == "idle":
        return {**before, "changed": False, "aborted": []}
    status, body = ask(before["port"], "/abort_request", {"abort_all": True})
    if status != 200:  # noqa: PLR2004 - HTTP's OK
        said = body.decode(errors="replace")[:200]
        note = f"/abort_request answered {status} ({said}): what is in flight ends with the engine"
        return {**before, "changed": False, "aborted": [], "note": note}
    until, seen = time.monotonic() + ABORTED_S, before
    while seen["state"] == "busy" and time.monotonic() < until:
        time.sleep(STEP_S / 5)
        seen = look(client, params)
    return {
        **seen,
        "state": "busy" if seen["state"] == "busy" else "idle",
        "changed": True,
        "aborted": before["requests"],
    }


def main() -> None:
    """Run as a module."""
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    begun = time.monotonic()
    try:
        client = docker_api.Engine(module.params["docker_host"])
        if module.params["abort"] and not module.check_mode:
            seen = end(client, module.params)
        else:
            seen = {**watch(client, module.params), "changed": False, "aborted": []}
    except (LockstepError, docker_api.EngineError) as error:
        module.fail_json(msg=str(error), exception=error)
    kept = ("changed", "state", "requests", "running", "waiting", "aborted", "note", "cursor")
    module.exit_json(**{key: seen[key] for key in kept}, seconds=round(time.monotonic() - begun, 3))


if __name__ == "__main__":
    main()
