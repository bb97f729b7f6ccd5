"""What an arm should leave free on the head, before it is booted: differences from a boot that was measured.

Host memory is GPU memory here, and it is nearly full in every arm, so a sum of parts from zero would be off by more
than what is left. This starts from one measured boot (the anchor) and adds what the arm changes; what no document
splits up - the draft model, CUDA, graphs, the system - is what the anchor leaves over. Boots of one arm differ by about
half a GB, so every figure comes with that margin. The data is ``fleet_memory`` in group_vars/all/engine.yml, each
figure with its source. A GB is 10**9 bytes; the engine's log prints GiB as "GB".

How the engine spends what it finds: a fixed part of the memory (the fraction) is for weights and KV pool. Below the
pin the pool takes all of it, and what is free does not depend on the arm; at the pin the rest stays free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GB = 10**9


def measured_prompt(
    data: Mapping[str, Any], lineage: Sequence[str], env: Mapping[str, str], tp_size: int
) -> dict[str, Any]:
    """Return the longest prompt known to go through: ``{"tokens", "failed", "arm", "source"}``, 0 tokens when unknown.

    A measurement counts for its arm and for arms derived from it, at the same chunk and on as many ranks as the
    anchor's fleet has; the nearest ancestor's is taken.
    """
    for name in reversed(lineage) if tp_size == int(data["anchor"]["tp_size"]) else ():
        for entry in data["measured_prompts"]:
            if entry["arm"] == name and str(entry["chunk"]) == env.get("CHUNKED_PREFILL_SIZE"):
                return {field: entry.get(field) for field in ("tokens", "failed", "arm", "source")}
    return {"tokens": 0, "failed": None, "arm": None, "source": None}


def transient_bytes(data: Mapping[str, Any], chunk: int, prefix: int) -> int:
    """Return the extra memory of one prefill chunk over a prefix of that many tokens: about 14 B × chunk × prefix."""
    return round(float(data["transient_bytes_per_chunk_token_and_prefix_token"]) * chunk * prefix)


def estimate(
    data: Mapping[str, Any],
    lineage: Sequence[str],
    env: Mapping[str, str],
    tp_size: int,
    fraction: float | None = None,
) -> dict[str, Any]:
    """Estimate what an environment leaves on the head: KV pool, free memory, and the prompt length that this allows.

    ``env`` is the head's; ``fraction`` the smallest memory fraction of any rank, which sizes everybody's pool (default:
    the head's own). Returns ``{"known": bool, "anchor": arm, "parts": {what: bytes against the anchor}, "bytes":
    [{"what", "bytes", "source"}] adding up to the head's memory, "kv_tokens": [low, high] before the pin,
    "pin_tokens", "pool_tokens": [low, high], "free_bytes": [low, high] while no prompt is read, "prompt", "text",
    "lines"}``. ``prompt`` is ``{"measured", "failed", "by_chunk", "by_chunk_low"}``: ``by_chunk`` the tokens whose
    transient fits as that of the longest that went through did, ``by_chunk_low`` the same on a boot with the margin
    less. Arithmetic, not measurements.
    """
    anchor = data["anchor"]
    prompt = measured_prompt(data, lineage, env, tp_size)
    if tp_size != int(anchor["tp_size"]):
        known = {"measured": prompt["tokens"], "failed": prompt["failed"], "by_chunk": None, "by_chunk_low": None}
        text = f"no boot at TP{tp_size} was measured, so nothing is predicted"
        return {"known": False, "anchor": anchor["arm"], "prompt": known, "text": text, "lines": []}
    per_token, margin = float(data["kv_bytes_per_token"]), float(data["boot_margin_bytes"])
    idle = float(data["free"]["bytes"])
    parts = {
        str(part["what"]): round(float(part["bytes"]) * (_amount(env, part) - bool(part["in_anchor"])))
        for part in data["parts"]
    }
    own = float(env.get("HEAD_MEM_FRACTION_STATIC") or anchor["fraction"])
    pin = _number(env, "MAX_TOTAL_TOKENS")

    def boot(more: float) -> tuple[int, int, int]:
        """KV calculation and pool in tokens, and free bytes, of a boot that finds ``more`` bytes than the anchor's."""
        budgets = [
            (given - float(anchor["fraction"])) * float(data["before_load"]["bytes"])
            for given in (own, own if fraction is None else fraction)
        ]
        here, least = (
            float(anchor["kv_tokens"]) + (budget - sum(parts.values()) + more) / per_token for budget in budgets
        )
        pool = max(0.0, min(least, pin) if pin else least)
        return max(0, round(least)), round(pool), round(idle - budgets[0] + max(0.0, here - pool) * per_token)

    low, middle, high = boot(-margin), boot(0), boot(margin)
    result = {
        "known": True,
        "anchor": anchor["arm"],
        "parts": parts,
        "bytes": _sum(data, env, middle[1], middle[2]),
        "kv_tokens": [low[0], high[0]],
        "pin_tokens": pin,
        "pool_tokens": [low[1], high[1]],
        "free_bytes": [low[2], high[2]],
        "prompt": {
            "measured": prompt["tokens"],
            "failed": prompt["failed"],
            **_by_chunk(data, _number(env, "CHUNKED_PREFILL_SIZE"), middle[2]),
        },
    }
    result["text"] = _text(result, middle[2], margin, per_token)
    return {**result, "lines": _lines(data, lineage, env, result)}


def _by_chunk(data: Mapping[str, Any], chunk: int, free: int) -> dict[str, int | None]:
    """Return the prompts that a chunk allows by arithmetic, with ``free`` bytes on the head and the margin less."""
    anchor = data["anchor"]
    best = anchor["prompt"]
    beyond_pin = max(0.0, float(anchor["kv_tokens"]) - float(anchor["pin"])) * float(data["kv_bytes_per_token"])
    room = transient_bytes(data, int(best["chunk"]), int(best["tokens"]))
    room += round(free - (float(data["free"]["bytes"]) + beyond_pin))
    each = transient_bytes(data, chunk, 1)
    return {
        name: max(0, round((room - less) // each)) if each else None
        for name, less in (("by_chunk", 0.0), ("by_chunk_low", float(data["boot_margin_bytes"])))
    }


def _sum(data: Mapping[str, Any], env: Mapping[str, str], pool: int, free: int) -> list[dict[str, Any]]:
    """List what fills the head's memory; what is left over of it by the anchor stands last but one."""
    kv = round(pool * float(data["kv_bytes_per_token"]))
    rows = [{"what": "weights", "bytes": int(data["weights"]["bytes"]), "source": data["weights"]["source"]}]
    rows += [
        {"what": str(part["what"]), "bytes": size, "source": part["source"]}
        for part in data["parts"]
        if (size := round(float(part["bytes"]) * _amount(env, part)))
    ]
    rows.append({"what": "KV pool", "bytes": kv, "source": f"{pool:,} tokens"})
    rest = int(data["total"]["bytes"]) - sum(row["bytes"] for row in rows) - free
    rows.append({"what": "all else", "bytes": rest, "source": "left over: draft model, CUDA, graphs, system"})
    return [*rows, {"what": "free", "bytes": free, "source": data["free"]["source"]}]


def _text(result: Mapping[str, Any], free: int, margin: float, per_token: float) -> str:
    """Say in one line what is left and how large the pool is."""
    (least, most), pool = result["free_bytes"], result["pool_tokens"]
    text = (
        f"about {_gb(free)} GB free on the head ({_gb(least)} to {_gb(most)}, boots differ by {_gb(margin)}), "
        f"KV pool {pool[0]:,} to {pool[1]:,} tokens (pin {result['pin_tokens'] or 'none'}, {per_token} B each)"
    )
    return text + ("" if result["kv_tokens"][0] else "; it may not boot: no memory may be left for the KV cache")


def _lines(
    data: Mapping[str, Any], lineage: Sequence[str], env: Mapping[str, str], result: Mapping[str, Any]
) -> list[str]:
    """Say what fills the head, what was measured of this arm, and how long a prompt may be."""
    terms = "".join(
        f" {'-' if row['bytes'] < 0 else '+'} {row['what']} {_gb(abs(row['bytes']))}" for row in result["bytes"]
    )
    lines = [f"{_gb(data['total']['bytes'])} GB = {terms.removeprefix(' + ')}"]
    lines += [
        f"measured on {entry['arm']}: {_gb(entry['bytes'])} GB free, {entry['source']}"
        for entry in data["measured_free"]
        if entry["arm"] == lineage[-1]
    ]
    prompt, chunk = result["prompt"], _number(env, "CHUNKED_PREFILL_SIZE")
    if not chunk:
        return lines
    measured = f"{prompt['measured']:,} tokens went through" if prompt["measured"] else "unmeasured"
    failed = f", about {prompt['failed']:,} took the head down" if prompt["failed"] else ""
    lines.append(
        f"longest prompt at chunk {chunk}: {measured}{failed}; by arithmetic {prompt['by_chunk']:,}, "
        f"{prompt['by_chunk_low']:,} on a boot with {_gb(data['boot_margin_bytes'])} GB less"
    )
    context = _number(env, "CONTEXT_LENGTH")
    if context > prompt["by_chunk_low"]:
        need = _gb(transient_bytes(data, chunk, context))
        why = "more than has gone through" if context > prompt["by_chunk"] else "no room on a boot with less"
        lines.append(f"the API takes prompts of {context:,} tokens, one chunk of which needs {need} GB: {why}")
    return lines


def _gb(size: float) -> str:
    return f"{size / GB:.1f}" if abs(size) >= 10 * GB else f"{size / GB:.2f}"


def _amount(env: Mapping[str, str], part: Mapping[str, Any]) -> float:
    """Return how often a part counts: 0 or 1 for a switch, the number itself where the part says so."""
    value = float(env.get(part["key"]) or 0)
    return value if part.get("times_value") else float(value != 0)


def _number(env: Mapping[str, str], key: str) -> int:
    """Return an integer key's value, 0 when it is unset."""
    return int(env.get(key) or 0)
