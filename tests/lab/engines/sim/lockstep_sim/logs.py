"""Log lines in the engine's format: `[date time TPn EPn] text`; lines of the serving process carry no rank."""

from __future__ import annotations

import logging
import sys

SERVING = "serving"


class _Formatter(logging.Formatter):
    def __init__(self, prefix: str) -> None:
        super().__init__("[%(asctime)s%(rank)s] %(message)s", "%Y-%m-%d %H:%M:%S")
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        record.rank = "" if record.name == SERVING else self._prefix
        return super().format(record)


def configure(level: str, prefix: str = "") -> None:
    """One handler on standard error, where the engine logs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(prefix))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
