#!/usr/bin/python
"""Ansible module: one rank's FlashInfer autotune cache."""

from __future__ import annotations

DOCUMENTATION = r"""
module: autotune_cache
short_description: Keep a rank's FlashInfer autotune cache to what the coming launch may use
description:
  - The engine loads whatever autotune files lie in its cache as soon as the ranks agree, and they agree as well when
    none of them has a file of this launch. Files that another launch tuned must therefore be out of the way on every
    rank before a boot.
  - Each cache file has a sidecar with the suffix C(.launch) that names the launch fingerprint which tuned it.
  - Only files that match the layout C(<version>/<arch>/<key>/rank_tp<R>_pp<P>_dp<D>.json) and their sidecars are ever
    touched.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
attributes:
  check_mode:
    description: Says what it would move or delete and changes nothing.
    support: full
  diff_mode:
    description: Shows the files that lie in the cache before and after.
    support: full
options:
  path:
    description:
      - The host's directory that is mounted at C(/root/.cache) in the engine's container.
      - The autotune files lie below it in C(sglang/flashinfer/autotune).
    type: path
    required: true
  state:
    description:
      - V(judged) moves aside every file that the launch named by O(fingerprint) may not boot with; nothing is deleted.
      - V(purged) deletes all autotune files and sidecars of this rank.
      - V(listed) changes nothing and returns what is there, judged when O(fingerprint) is given.
    type: str
    choices: [judged, purged, listed]
    default: judged
  fingerprint:
    description:
      - The tactics fingerprint of the coming launch.
      - Required when O(state=judged).
    type: str
  environment:
    description:
      - What is known of the rank, as FlashInfer writes it into a file's C(_metadata), for example C(flashinfer_version)
        and C(gpu). A file of another environment is skipped by FlashInfer as a whole, so it goes aside too.
    type: dict
    default: {}
  rank:
    description:
      - The rank's place in the tensor-parallel world. When given, files of another rank go aside.
    type: int
  fleet_match:
    description:
      - Whether every rank of the fleet holds the same matching files. When false, matching files go aside as well,
        because tactics are used on all ranks or on none.
    type: bool
    default: true
  aside:
    description:
      - Directory for what is moved aside; a folder named by the UTC time is made in it. It must be on the same file
        system as O(path).
      - The default is C(sglang/flashinfer/autotune-aside) below O(path).
    type: path
"""

EXAMPLES = r"""
- name: Move aside what the coming launch may not boot with
  lockstep.fleet.autotune_cache:
    path: /root/.cache
    fingerprint: "{{ plan.tactics_fingerprint }}"
    rank: "{{ fleet_rank }}"

- name: See what lies there
  lockstep.fleet.autotune_cache:
    path: /root/.cache
    state: listed
  register: cache

- name: Clear the cache of this rank
  lockstep.fleet.autotune_cache:
    path: /root/.cache
    state: purged
"""

RETURN = r"""
files:
  description: The autotune files that were there, each with why it may not be used (null when it may).
  returned: always
  type: list
  elements: dict
  sample:
    - file: 0.6.18/sm121/05cc0d96dc7e28b8/rank_tp0_pp0_dp0.json
      sidecar: 0.6.18/sm121/05cc0d96dc7e28b8/rank_tp0_pp0_dp0.launch
      fingerprint: 5f0c2d7e
      entries: 112
      keep: false
      why: tuned by launch 5f0c2d7e, the coming one is 91ab3344
kept:
  description: Cache files that stay and match.
  returned: always
  type: list
  elements: str
moved:
  description: Where files were moved to (in check mode where they would go); sidecars included.
  returned: always
  type: list
  elements: str
removed:
  description: Deleted files, relative to the cache root; sidecars included.
  returned: always
  type: list
  elements: str
"""

from datetime import UTC, datetime
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import tactics
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "path": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["judged", "purged", "listed"], "default": "judged"},
    "fingerprint": {"type": "str"},
    "environment": {"type": "dict", "default": {}},
    "rank": {"type": "int"},
    "fleet_match": {"type": "bool", "default": True},
    "aside": {"type": "path"},
}


def run(params: dict[str, Any], *, check_mode: bool) -> dict[str, Any]:
    """Judge, move aside or purge; returns the module's result."""
    path, state = params["path"], params["state"]
    listing = tactics.scan(path)
    judged = _judge(listing, params)
    before = tactics.paths(listing)
    moved: list[str] = []
    removed: list[str] = []
    if state == "judged":
        stale = [item for item in judged if not item["keep"]]
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        aside = f"{params['aside'] or f'{path}/{tactics.CACHE_SUBDIR}-aside'}/{stamp}"
        moved = [f"{aside}/{name}" for name in tactics.paths(stale)]
        if not check_mode:
            tactics.set_aside(path, stale, aside)
        gone = tactics.paths(stale)
    elif state == "purged":
        gone = removed = before
        if not check_mode:
            tactics.purge(path, listing)
    else:
        gone = []
    after = [name for name in before if name not in gone]
    return {
        "changed": bool(gone),
        "files": [
            {**item, "keep": mark["keep"], "why": mark["why"]} for item, mark in zip(listing, judged, strict=True)
        ],
        "kept": [item["file"] for item in judged if item["keep"] and item["file"] not in gone],
        "moved": moved,
        "removed": removed,
        "diff": {
            "before_header": path,
            "after_header": path,
            "before": "".join(f"{name}\n" for name in before),
            "after": "".join(f"{name}\n" for name in after),
        },
    }


def _judge(listing: list[dict[str, Any]], params: dict[str, Any]) -> list[dict[str, Any]]:
    if not params["fingerprint"]:
        return [{**item, "keep": item["problem"] is None, "why": item["problem"]} for item in listing]
    judged = tactics.judge(listing, params["fingerprint"], params["environment"], params["rank"])
    return judged if params["fleet_match"] else tactics.spoil(judged)


def main() -> None:
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True, required_if=[("state", "judged", ("fingerprint",))])
    try:
        result = run(module.params, check_mode=module.check_mode)
    except LockstepError as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
