"""``python -m lockstep_lab COMMAND``: the lab's command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from . import campaign, lab
from .paths import only_one
from .say import LabError


def main() -> int:
    """Run one command; 1 and one message when the lab cannot do it."""
    parser = argparse.ArgumentParser(prog="lockstep_lab", description=__doc__)
    parser.add_argument("command", choices=["up", "status", "reset", "free-spark2", "down", "purge"])
    parser.add_argument("--engine", choices=["sglang", "sim"], help="which engine's images the hub serves")
    options = parser.parse_args()
    commands: dict[str, Callable[[], None]] = {
        "up": lambda: lab.up(options.engine or os.environ.get("ENGINE") or "sglang"),
        "reset": lambda: lab.reset(options.engine),
        "free-spark2": campaign.free_spark2,
        "down": lab.down,
        "purge": lab.purge,
    }
    try:
        if options.command == "status":
            lab.status()
        else:
            with only_one():
                commands[options.command]()
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
