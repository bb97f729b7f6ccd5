"""The values that the repository ships, as the plan takes them: group_vars with the fleet of inventory/spark."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from lockstep_core import __main__ as command_line
from lockstep_core import plan

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def _read() -> tuple[dict[str, Any], dict[str, Any]]:
    return plan.inputs(*command_line._inventory(ROOT, ROOT / "inventory" / "spark"))


def shipped(**fleet_changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (fleet, catalog) of inventory/spark; ``tp_size`` and other fields of the fleet may be changed.

    ``engram_missing`` is the catalog's. Ranks beyond the inventory's are made up.
    """
    fleet, catalog = copy.deepcopy(_read())
    catalog["engram"]["missing"] = fleet_changes.pop("engram_missing", catalog["engram"]["missing"])
    size = fleet_changes.get("tp_size", fleet["tp_size"])
    fleet["hosts"] = [
        {**fleet["hosts"][min(rank, 2)], "host": f"spark{rank + 1}", "rank": rank} for rank in range(int(size))
    ]
    return {**fleet, **fleet_changes}, catalog


def build(arm: str, fleet: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """Build the plan of an arm; ``set`` is a one-off, the other arguments are ``plan.build``'s."""
    known, catalog = shipped(**(fleet or {}))
    return plan.build(known, catalog, arm, changes=arguments.pop("set", None), **arguments)
