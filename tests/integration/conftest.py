"""Tests on the lab share one lab and its launches: who begins at the starting state comes first, who resets it last."""

from __future__ import annotations

import fleet
import pytest

ORDER = ("test_main_job", "test_bad_input", "test_agree_on_lab", "test_faults")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem
        if name == "test_demo_sglang":  # leaves the lab with another engine
            return len(ORDER) + 1
        return ORDER.index(name) if name in ORDER else len(ORDER)

    items.sort(key=place)


@pytest.fixture(scope="module")
def serving() -> None:
    """A fleet that serves e8, proven: the one that is there, or the lab from its starting state on."""
    fleet.lab("up", "--engine", "sim")
    if fleet.serve("e8").rc == 0:
        return
    fleet.lab("reset", "--engine", "sim")
    fleet.lab("free-spark2")
    served = fleet.serve("e8")
    assert served.rc == 0, served.text
