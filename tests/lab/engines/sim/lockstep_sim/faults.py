"""Faults on command: a JSON file on the rank (`/state/sim-faults.json`), read at start and at each request and step.

{"oom": true | "request"}           out of memory while loading, or at the first request
{"kv": true}                        the weights leave no room for the KV cache
{"nan": true}                       NaN in the logits at every request
{"hang": "load"|"tune"|"warmup"}    stops there for ever (still ends on SIGTERM)
{"hang": "serve"}                   the scheduler takes no further step while this stands; the API answers on
{"die": {"rank": 1, "after_s": 2, "from": "start"|"ready"}}   that rank is gone, without a word
{"slow_drain_s": 5}                 this long between SIGTERM and the end
{"tactics_diverge": true}           this rank's tactics never agree with the others'
{"packed_false": [1]}               these ranks find no packed shard
{"deaf": true}                      does not notice that a peer is gone, as an engine that waits in a collective
{"load_s": 3}                       loading takes this long (default: next to nothing)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_KNOWN = {"oom", "kv", "nan", "hang", "die", "slow_drain_s", "tactics_diverge", "packed_false", "deaf", "load_s"}


def read() -> dict[str, Any]:
    """The commanded faults; {} without a file. An unknown fault ends the simulator: no test may pass by a typo."""
    path = Path(os.environ.get("LOCKSTEP_SIM_FAULTS", "/state/sim-faults.json"))
    try:
        faults = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    unknown = set(faults) - _KNOWN
    if unknown:
        raise SystemExit(f"{path}: unknown faults {sorted(unknown)}; known: {sorted(_KNOWN)}")
    return dict(faults)
