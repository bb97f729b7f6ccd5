"""A journal entry to write and to read back; as a program it prints one, for a playbook."""

from __future__ import annotations

import json
from typing import Any

from lockstep_core import plan as plans


def entry(utc: str, engine: str) -> dict[str, Any]:
    """A whole entry around the smallest plan that has everything that makes a plan what it is."""
    plan: dict[str, Any] = {
        "format": 1,
        "arm": "e8",
        "name": "e8",
        "tp_size": 1,
        "engine": engine,
        "images": {"overlay": {"id": None}},
        "engram": {"split": "rows"},
        "container": {},
        "ranks": [
            {
                "host": "spark1",
                "rank": 0,
                "role": "head",
                "container": "dsv41-head",
                # Values that YAML 1.1 would change: they must come back as they were.
                "env": {"A": "5.10", "B": "0123456", "C": "12:30:45", "D": "no"},
                "argv": ["serve", "--json", '{"a": 1}'],
                "mounts": [],
                "shards": {},
            }
        ],
        "tactics_fingerprint": "7c" * 32,
        "plan_sha256": None,
    }
    plan["plan_sha256"] = plans.sha256(plan)
    return {
        "format": 1,
        "launch": f"{utc}-e8-{plan['plan_sha256'][:6]}",
        "arm": "e8",
        "ok": True,
        "why": [],
        "recorded": "2026-09-24T09:47:00Z",
        "by": "noor@lap",
        "pool_tokens": 4096,
        "plan_sha256": plan["plan_sha256"],
        "tactics_fingerprint": plan["tactics_fingerprint"],
        "plan": plan,
    }


if __name__ == "__main__":
    print(json.dumps(entry("20260924T094700Z", "sim")))
