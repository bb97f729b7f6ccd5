"""The two collective calls that the simulated tactics gate makes, over the simulator's own group; not torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lockstep_sim.group import Group


def all_gather(group: Group, item: Any) -> list[Any]:
    """What each rank gave, by rank."""
    return group.all_gather(item)


def _all_gather_object(out: list[Any], item: Any, group: Group) -> None:
    out[:] = group.all_gather(item)


distributed = SimpleNamespace(get_world_size=lambda group: group.size, all_gather_object=_all_gather_object)
