"""The handed cases: real inputs with their right answers, a file of JSON lines for each group, kept word for word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CASES = Path(__file__).resolve().parents[1] / "unit/cases"


def cases(group: str) -> dict[str, dict[str, Any]]:
    """The cases of a group by their names."""
    lines = (CASES / f"{group}.jsonl").read_text(encoding="utf-8").splitlines()
    return {case["id"]: case for case in map(json.loads, lines)}


def hold(case: dict[str, Any], got: dict[str, Any], *, prose: set[str] | None = None) -> None:
    """Hold ``got`` against every field that the case expects; ``prose`` names those that explain and are no values."""
    assert got == {field: value for field, value in case["expected"].items() if field not in (prose or set())}
