"""A plugin of the engine (entry point sglang.srt.plugins) that makes a boot on two cores bearable. Changes no answer.

The engine starts its scheduler and its detokenizer as new interpreters, each of which imports for seconds of CPU what
their parent has just imported: on three ranks of one small machine, half of a boot. Here they are forks of it.
LOCKSTEP_LAB_SPAWN=1 leaves the engine as it is.
"""

from __future__ import annotations

import multiprocessing
import os


def install() -> None:
    if os.environ.get("LOCKSTEP_LAB_SPAWN") == "1":
        return
    stock = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        stock("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_start_method
