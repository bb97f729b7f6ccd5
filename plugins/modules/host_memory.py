#!/usr/bin/python
"""Ansible module: give a host's page cache back and join its free memory, before an engine sizes its KV pool."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_memory
short_description: Drop a host's page cache and compact its free memory
description:
  - On a host whose memory is also its GPU's, page cache that packing or archiving left takes room from the KV pool,
    which is sized once at boot from the free memory of the poorest rank.
  - Dirty pages are written first. Nothing is lost but the cache - the next reader reads from the disk.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
attributes:
  check_mode:
    description: Says what is free now, drops nothing, and fails where the real run could not drop.
    support: full
  diff_mode:
    description: Has nothing to show.
    support: none
options:
  drop_caches:
    description: Drop clean page cache, dentries and inodes (C(vm.drop_caches=3)).
    type: bool
    default: true
  compact:
    description: Join free pages into large blocks (C(vm.compact_memory=1)), where the kernel can.
    type: bool
    default: true
"""

EXAMPLES = r"""
- name: Give the page cache back
  lockstep.fleet.host_memory:
    compact: false
  register: memory

- name: Show how much that was
  ansible.builtin.debug:
    msg: "{{ memory.after.free_bytes - memory.before.free_bytes }} bytes"
"""

RETURN = r"""
before:
  description: Free, available and cached bytes, and bytes in free blocks of 4 MiB and more.
  returned: success
  type: dict
  sample: {free_bytes: 2147483648, available_bytes: 98784247808, cached_bytes: 92341796864, large_blocks_bytes: 1048576}
after:
  description: The same afterwards; in check mode the same as before.
  returned: success
  type: dict
  sample: {free_bytes: 94489280512, available_bytes: 98784247808, cached_bytes: 1073741824, large_blocks_bytes: 4194304}
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import hostmem
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "drop_caches": {"type": "bool", "default": True},
    "compact": {"type": "bool", "default": True},
}
VM = Path("/proc/sys/vm")
LARGE = 10  # order of a free block of 4 MiB, in pages of 4 KiB


def now() -> dict[str, int]:
    """What is free on this host, in bytes."""
    memory = hostmem.meminfo(Path("/proc/meminfo").read_text(encoding="ascii"))
    page = os.sysconf("SC_PAGE_SIZE")
    zones = hostmem.buddyinfo(Path("/proc/buddyinfo").read_text(encoding="ascii"), page_bytes=page)
    large = sum(
        count * page << order for zone in zones for order, count in enumerate(zone["free_blocks"]) if order >= LARGE
    )
    return {
        "free_bytes": memory["MemFree"] * 1024,
        "available_bytes": memory["MemAvailable"] * 1024,
        "cached_bytes": memory["Cached"] * 1024,
        "large_blocks_bytes": large,
    }


def orders(params: dict[str, Any]) -> list[tuple[Path, str]]:
    """What to write where; LockstepError where the kernel does not let us."""
    asked = [("drop_caches", "3")] * params["drop_caches"]
    # A kernel without CONFIG_COMPACTION has no such file, and nothing to compact with.
    asked += [("compact_memory", "1")] * (params["compact"] and (VM / "compact_memory").exists())
    for name, _ in asked:
        if not os.access(VM / name, os.W_OK):
            raise LockstepError(
                f"cannot write {VM / name}",
                found="read-only for this user" if os.geteuid() else "a read-only /proc/sys, as in a container",
                expected="root on the host itself",
                next_step="run it as root, or without fleet_drop_caches and fleet_compact_memory",
            )
    return [(VM / name, value) for name, value in asked]


def run(params: dict[str, Any], *, check_mode: bool) -> dict[str, Any]:
    """Look, settle, look again; returns the module's result."""
    before, todo = now(), orders(params)
    if check_mode or not todo:
        return {"changed": bool(todo), "before": before, "after": before}
    os.sync()  # only clean pages can be dropped
    for path, value in todo:
        path.write_text(value, encoding="ascii")
    return {"changed": True, "before": before, "after": now()}


def main() -> None:
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    try:
        module.exit_json(**run(module.params, check_mode=module.check_mode))
    except LockstepError as error:
        module.fail_json(msg=str(error), exception=error)


if __name__ == "__main__":
    main()
