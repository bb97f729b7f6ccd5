#!/usr/bin/python
"""Ansible module: images that go from one engine to another, past registries and files. The action follows it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_stream
short_description: Hand images from one rank's Docker Engine to another's, with no registry and no file in between
description:
  - V(receive) starts the receiver on the rank that lacks the images, V(send) starts the sender on the rank that holds
    them and follows it to its end, V(close) ends a receiver that nobody came to. The role C(image) has them in their
    order (C(stream.yml)).
  - What the sending engine saves goes over the fabric as it comes and into the receiving engine as it comes, at no time
    more than a few blocks of it in memory. All layers of an image move, also those that the other rank has.
  - Both sides hash the stream. The receiver holds its last block back until both hashes are equal, so an engine never
    gets to the end of what was not proven, and keeps nothing of a stream that was cut; the next run sends it again.
  - Images arrive without a name and are known by their Id; an engine with the other kind of image store gives its own,
    and has to show the same layers.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: V(send) says that it would; nothing is started.
    support: full
  diff_mode:
    description: V(send) shows which images would be on the other rank.
    support: full
options:
  step:
    description: What to do.
    type: str
    choices: [receive, send, close]
    required: true
  to:
    description: Inventory name of the rank that lacks the images.
    type: str
    required: true
  images:
    description: The images to send, by any name of the caller's, each an Id or a reference on the sending rank.
    type: dict
    default: {}
  address:
    description: Address of the receiving rank on its link to the sending one. For V(receive) and V(send).
    type: str
  port:
    description: TCP port of the receiver; any free one by default.
    type: int
    default: 0
  key:
    description: The key that both sides hold for this one run, 64 hexadecimal digits. It is held in memory only.
    type: str
  run_dir:
    description: Directory for locks and progress, which are worth nothing after a reboot.
    type: path
    default: /run/lockstep
  receiver:
    description: Result of V(receive).
    type: dict
"""

EXAMPLES = r"""
- name: Start the receiver
  lockstep.fleet.image_stream:
    step: receive
    to: spark2
    address: 10.0.22.2
    key: "{{ key }}"
  register: receiver

- name: Send the base, and follow it to its end
  lockstep.fleet.image_stream:
    step: send
    to: spark2
    images:
      base: lmsysorg/sglang:dev-dsv41
    address: 10.0.22.2
    key: "{{ key }}"
    receiver: "{{ receiver }}"
  delegate_to: spark1
"""

RETURN = r"""
port:
  description: Where the receiver listens.
  returned: step receive
  type: int
images:
  description: The Id of each image on the receiving rank; empty in check mode.
  returned: step send
  type: dict
  sample: {base: "sha256:37939c26c0ba…"}
bytes:
  description: Bytes of the stream.
  returned: step send
  type: int
sha256:
  description: SHA-256 of the stream, equal at both ends.
  returned: step send
  type: str
mb_s:
  description: Megabytes a second, the receiving engine's work included.
  returned: step send
  type: float
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import background, docker_api, images, wire
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "step": {"type": "str", "choices": ["receive", "send", "close"], "required": True},
    "to": {"type": "str", "required": True},
    "images": {"type": "dict", "default": {}},
    "address": {"type": "str"},
    "port": {"type": "int", "default": 0},
    "key": {"type": "str", "no_log": True},
    "run_dir": {"type": "path", "default": "/run/lockstep"},
    "receiver": {"type": "dict"},
    "docker_host": {"type": "str"},
}
# Of the action plugin alone: ``send`` starts the sender, ``poll`` waits a while and reports.
PHASE = {"_poll": {"type": "bool", "default": False}}

# Seconds that one poll waits for the end.
POLL_S = 0.7
# Seconds between two writings of the progress.
TELL_S = 0.5
# Seconds for a receiver to end by itself once its sender has.
ENDS_S = 2.0


def _run(params: dict[str, Any], side: str) -> background.Run:
    return background.Run(params["run_dir"], f"images-{side}", "/", params["to"])


def receive(params: dict[str, Any]) -> dict[str, Any]:
    """Start the receiver and say where it listens."""
    run, key = _run(params, "receive"), bytes.fromhex(params["key"])

    def work(report: Callable[[dict[str, Any]], None]) -> None:
        with run.held(f"receiving images for {params['to']}"):
            client = docker_api.Engine(params["docker_host"])
            with wire.listen(params["address"], params["port"]) as listener:
                run.say(waiting=os.getpid())
                report({"port": listener.getsockname()[1], "pid": os.getpid()})
                channel = wire.accept(listener, key)
                run.say(waiting=None)
            with contextlib.closing(channel), _told(channel, params["to"]):
                taken(channel, client)

    return {"changed": False, **background.detach(work)}


@contextlib.contextmanager
def _told(channel: wire.Channel, host: str | None = None) -> Iterator[None]:
    """Whatever ends this side is said to the other one."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, LockstepError):
            error.host = error.host or host
        channel.fail(error)
        raise


def taken(channel: wire.Channel, client: docker_api.Engine) -> None:
    """Take the images that the other end offers into the engine, and say what their Ids are here."""
    offered = channel.hear("images")["images"]
    platform = docker_api.engine(client.get_json("/info"))["platform"]
    for image in offered.values():
        if not images.runs_on(image["platform"], platform):
            raise LockstepError(
                "the image is built for another platform than this rank's",
                found=f"{image['ref']}: {image['platform']}",
                expected=platform,
                next_step="pin an image that has this rank's platform",
            )
    channel.say("go")
    said: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:

        def blocks() -> Iterator[bytes]:
            yield from wire.receive_stream(channel, said)
            stack.enter_context(wire.kept_alive(channel))  # from here on the engine unpacks

        found = docker_api.load(client, blocks(), offered)
    channel.say("loaded", images=found, sha256=said["sha256"])


def send(params: dict[str, Any]) -> dict[str, Any]:
    """Start the sender."""
    run = _run(params, "send")

    def work(report: Callable[[dict[str, Any]], None]) -> None:
        with run.held(f"sending images to {params['to']}"):
            client = docker_api.Engine(params["docker_host"])
            offered = {name: docker_api.identify(client, ref) for name, ref in params["images"].items()}
            if absent := [image["ref"] for image in offered.values() if not image["present"]]:
                raise LockstepError(
                    "the images to hand on are not all on this rank",
                    found=f"no {', '.join(absent)}",
                    next_step="run again",
                )
            run.say(bytes=0, mb_s=0.0, loading=False, finished=False, error=None)
            report({"pid": os.getpid()})
            try:
                done = given(params, client, offered, run)
                run.say(finished=True, error=None, **done)
            except Exception as error:  # noqa: BLE001 - whatever it was, who follows this sender has to read it
                run.say(finished=True, error=background.fields(error))

    return {"changed": False, **background.detach(work)}


def given(
    params: dict[str, Any], client: docker_api.Engine, offered: dict[str, images.Identity], run: background.Run
) -> dict[str, Any]:
    """Give the images to the other end: ``{"images", "bytes", "sha256", "seconds", "mb_s"}``."""
    channel = wire.connect(params["address"], params["receiver"]["port"], bytes.fromhex(params["key"]))
    began = time.monotonic()
    sent, told = 0, began

    def tell(count: int = 0, *, loading: bool = False) -> None:
        nonlocal sent, told
        sent += count
        now = time.monotonic()
        if loading or now - told >= TELL_S:
            told = now
            run.say(bytes=sent, mb_s=round(sent / (now - began) / 1e6, 1), loading=loading, finished=False, error=None)

    with contextlib.closing(channel), _told(channel):
        try:
            channel.say("images", images=offered)
            channel.hear("go")
            said = wire.send_stream(channel, docker_api.export(client, [one["id"] for one in offered.values()]), tell)
            tell(loading=True)
            loaded = channel.hear("loaded")
        except wire.Lost as error:
            error.host, error.next_step = (
                params["to"],
                "run again: it is sent anew; the engine there kept nothing of it",
            )
            raise
    if loaded["sha256"] != said["sha256"]:
        raise wire.broken(loaded["sha256"], said["sha256"])
    seconds = time.monotonic() - began
    rate = round(said["bytes"] / seconds / 1e6, 1)
    return {**said, "images": loaded["images"], "seconds": round(seconds, 1), "mb_s": rate}


def poll(params: dict[str, Any]) -> dict[str, Any]:
    """Wait a while for the sender's end; how far it is, or how it ended."""
    run = _run(params, "send")
    alive = run.wait(POLL_S)
    said = run.said()
    if alive:
        return {"changed": False, "progress": said, "finished": False}
    if not said or not said["finished"]:
        raise LockstepError(
            "the sender ended without a word",
            found=f"it was at {said['bytes']:,} bytes" if said else "no trace of it",
            expected="its report",
            next_step="run again; see dmesg for a kill for memory",
        )
    if said["error"]:
        raise LockstepError(**said["error"])
    return {
        "changed": True,
        "finished": True,
        **{key: said[key] for key in ("images", "bytes", "sha256", "seconds", "mb_s")},
    }


def close(params: dict[str, Any]) -> dict[str, Any]:
    """See the receiver end, and end one that its sender has not come to."""
    run = _run(params, "receive")
    run.end(int(params["receiver"]["pid"]), ENDS_S)
    return {"changed": False}


STEPS = {"receive": receive, "send": send, "close": close}


def main() -> None:
    """Do the step that was asked for."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC | PHASE, supports_check_mode=True)
    params = module.params
    try:
        result = poll(params) if params["_poll"] else STEPS[params["step"]](params)
    except (LockstepError, docker_api.EngineError, OSError) as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
