"""Tactics: which launch tuned a FlashInfer autotune cache, and whether the coming launch may use it.

The engine's own cache key leaves out block size, graph sizes and every adapter switch, so one arm overwrites another
arm's tactics under the same name. A sidecar beside each cache file therefore records the fingerprint of the launch that
tuned it. Files of another launch must be out of the way before a boot: the engine loads whatever lies there as soon as
the ranks agree, and they agree when none of them has a matching sidecar. Tactics change numerics, hence greedy text,
hence acceptance, so they are used on every rank or on none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import files

# Where the caches lie below the directory that is mounted at /root/.cache.
CACHE_SUBDIR = "sglang/flashinfer/autotune"

# What of a launch decides the tactics: the arguments and these families of environment keys.
PREFIXES = ("SGLANG_", "DSV41_", "SPARK_", "B12X_", "NCCL_")

# Switches that touch no op that FlashInfer tunes: arms that differ only in these share tactics.
VOLATILE = frozenset(
    {
        "DSV41_VERIFY_CAP",
        "DSV41_VERIFY_CAP_MIN",
        "DSV41_DRAFT_TAU",
        "DSV41_BLOCK_VERIFY",
        "DSV41_FOLDED_FENCE",
        "DSV41_AUTOTUNE_KEEP",
        "DSV41_DRAFT_HEAD_FP8",
        "DSV41_ENGRAM_PREFETCH",
        "DSV41_ENGRAM_PREFETCH_CHECK",
        "DSV41_WO_A_W8_DRAFT",
        "SGLANG_RUN_ID",  # a fresh value every boot: fingerprinting it meant that nothing was ever reused
    }
)
VOLATILE_PREFIXES = ("DSV41_DRAFT_CAPTURE",)

# What differs between the ranks of one launch and decides no tactic. Without these the fingerprint is one per fleet.
RANK_ARGUMENTS = frozenset({"--node-rank", "--host", "--port", "--dist-init-addr", "--mem-fraction-static"})
RANK_KEYS = frozenset(
    {
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_HCA",
        "NCCL_SOCKET_IFNAME",
        "SGLANG_CPU_OMP_THREADS_BIND",
        "SGLANG_HOST_IP",
        "SGLANG_LOCAL_IP_NIC",
    }
)

# Keys of a cache file that are no tactics.
NOT_ENTRIES = ("_metadata", "_last_updated_by")

# Older FlashInfer names for what newer ones write: one meaning under two spellings.
_METADATA_ALIASES = {"gpu_name": "gpu"}

# <flashinfer version>/<arch>/<key>/rank_tp<R>_pp0_dp0.json, and its sidecar. The sidecar's suffix replaces .json (as
# the campaign's adapter wrote it); one appended to the whole name is read as well.
_LAYOUT = re.compile(
    r"(?P<version>[^/]+)/(?P<arch>[^/]+)/(?P<key>[^/]+)/"
    r"(?P<name>rank_tp(?P<tp>\d+)_pp(?P<pp>\d+)_dp(?P<dp>\d+))(?P<suffix>\.json|\.launch|\.json\.launch)"
)


def fingerprint(argv: Sequence[str], env: Mapping[str, str], versions: Mapping[str, Any]) -> str:
    """Return the 64 hex digits that name everything of a launch that its tactics depend on.

    ``argv`` is the engine's whole command line, ``env`` the container's environment, ``versions`` what else decides
    (image digest, FlashInfer, kernel), any JSON values. Volatile names and what differs from rank to rank are left
    out, so every rank of a launch yields the same value.
    """
    considered = {key: value for key, value in env.items() if key.startswith(PREFIXES) and not is_volatile(key)}
    payload = {
        "argv": _without_rank_arguments(argv),
        "env": {key: value for key, value in considered.items() if key not in RANK_KEYS},
        "versions": dict(versions),
    }
    return hashlib.sha256(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_volatile(key: str) -> bool:
    """Tell whether an environment key may change without making the tactics stale."""
    return key in VOLATILE or key.startswith(VOLATILE_PREFIXES)


def _without_rank_arguments(argv: Sequence[str]) -> list[str]:
    """Drop each rank-specific argument with its value, in both spellings (``--a v`` and ``--a=v``)."""
    kept: list[str] = []
    skip_value = False
    for word in argv:
        if skip_value and not word.startswith("--"):
            skip_value = False
            continue
        name, equals, _ = word.partition("=")
        skip_value = name in RANK_ARGUMENTS and not equals
        if name not in RANK_ARGUMENTS:
            kept.append(word)
    return kept


def parse_path(path: str) -> dict[str, Any] | None:
    """Read a path below the cache root; ``None`` for anything that is not a cache file or a sidecar.

    Returns ``{"version", "arch", "key": "<version>/<arch>/<key>", "stem": path without suffix, "tp", "pp", "dp": int,
    "kind": "cache" | "sidecar"}``.
    """
    match = _LAYOUT.fullmatch(path)
    if match is None:
        return None
    key = f"{match['version']}/{match['arch']}/{match['key']}"
    return {
        "version": match["version"],
        "arch": match["arch"],
        "key": key,
        "stem": f"{key}/{match['name']}",
        "tp": int(match["tp"]),
        "pp": int(match["pp"]),
        "dp": int(match["dp"]),
        "kind": "cache" if match["suffix"] == ".json" else "sidecar",
    }


def sidecar_name(cache_file: str) -> str:
    """Return the sidecar's path for a cache file's: ``rank_tp0_pp0_dp0.json`` → ``rank_tp0_pp0_dp0.launch``."""
    return cache_file.removesuffix(".json") + ".launch"


def inspect(content: object, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Judge a cache file's JSON as FlashInfer will: it skips the whole file when ``_metadata`` is another machine's.

    ``environment`` holds what is known of this rank (``flashinfer_version``, ``gpu``, …); keys it does not name are
    not compared. Returns ``{"entries": number of tactics, "loadable": bool, "reason": str | None, "metadata": dict |
    None}``. A skipped file is not overwritten on exit either: that a file exists after a boot proves nothing.
    """
    if not isinstance(content, Mapping):
        return {"entries": 0, "loadable": False, "reason": "not a JSON object", "metadata": None}
    entries = {key: value for key, value in content.items() if key not in NOT_ENTRIES}
    malformed = sorted(key for key, value in entries.items() if not _is_entry(value))
    metadata = content.get("_metadata")
    known = dict(metadata) if isinstance(metadata, Mapping) else None
    if malformed:
        reason: str | None = f"entry {malformed[0]} is not [runner, tactic]"
    else:
        reason = _metadata_differs(known, environment or {})
    return {"entries": len(entries), "loadable": reason is None, "reason": reason, "metadata": known}


def _is_entry(value: object) -> bool:
    """Tell whether this is ``[runner class, tactic]``; a compound tactic is a nested list of integers."""
    return (
        isinstance(value, list)
        and len(value) == len(("runner", "tactic"))
        and isinstance(value[0], str)
        and _is_tactic(value[1])
    )


def _is_tactic(value: object) -> bool:
    parts = [value]
    while parts:  # not by recursion: JSON may nest deeper than Python calls
        part = parts.pop()
        if isinstance(part, list):
            parts.extend(part)
        elif not isinstance(part, int) or isinstance(part, bool):
            return False
    return True


def _metadata_differs(metadata: Mapping[str, Any] | None, environment: Mapping[str, str]) -> str | None:
    if not environment:
        return None
    if metadata is None:
        return "no _metadata: nothing says where it was tuned"
    found, here = _one_spelling(metadata), _one_spelling(environment)
    differing = [
        f"{key} {found.get(key)!r}, here {value!r}"
        for key, value in sorted(here.items())
        if _comparable(key, found.get(key)) != _comparable(key, value)
    ]
    return f"_metadata differs, so the entire file is skipped: {'; '.join(differing)}" if differing else None


def _one_spelling(names: Mapping[str, Any]) -> dict[str, Any]:
    return {_METADATA_ALIASES.get(key, key): value for key, value in names.items()}


def _comparable(key: str, value: object) -> object:
    """Bring a cuDNN version to one form: written ``9.19.0`` by some, ``91900`` (before 9: ``8907``) by others."""
    if key != "cudnn_version" or not isinstance(value, str | int):
        return value
    text = str(value)
    if re.fullmatch(r"\d{5,}", text):
        return (int(text[:-4]), int(text[-4:-2]), int(text[-2:]))
    if re.fullmatch(r"\d{4}", text):
        return (int(text[0]), int(text[1]), int(text[2:]))
    if re.fullmatch(r"\d+(\.\d+)+", text):
        parts = [int(part) for part in text.split(".")]
        return (*parts[:3], *[0] * (3 - len(parts)))
    return text


def scan(cache_dir: str) -> list[dict[str, Any]]:
    """List the autotune files of one rank; ``cache_dir`` is the directory mounted at ``/root/.cache``.

    One item a cache file, sorted by path: ``{"file": path below the cache root, "sidecar": the same or None,
    "fingerprint": what the sidecar says or None, "key", "version", "arch", "tp", "pp", "dp", "bytes", "mtime_ns",
    "entries", "metadata", "problem": why it cannot be used by anyone, or None}``. A sidecar without its file is an
    item of its own, with a problem. Files that do not match the layout are nobody's business and are not listed.
    A missing directory is an empty list.
    """
    root = f"{cache_dir}/{CACHE_SUBDIR}"
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path, size, mtime_ns in files.tree(root):
        place = parse_path(path)
        if place is not None:
            kinds = found.setdefault(place["stem"], {})
            kinds[place["kind"]] = {**place, "path": path, "bytes": size, "mtime_ns": mtime_ns}
    items = []
    for stem in sorted(found):
        cache, sidecar = found[stem].get("cache"), found[stem].get("sidecar")
        source = cache or sidecar or {}
        item = {name: source[name] for name in ("key", "version", "arch", "tp", "pp", "dp", "bytes", "mtime_ns")}
        content = _read_json(f"{root}/{cache['path']}") if cache else None
        seen = inspect(content)
        problem = "a sidecar without its cache file" if cache is None else seen["reason"]
        items.append(
            {
                **item,
                "file": source["path"],
                "sidecar": sidecar["path"] if sidecar else None,
                "fingerprint": _read_text(f"{root}/{sidecar['path']}").strip() if sidecar else None,
                "entries": seen["entries"],
                "metadata": seen["metadata"],
                "problem": problem,
            }
        )
    return items


def _read_text(path: str) -> str:
    return files.read_bytes(path).decode(errors="replace")


def _read_json(path: str) -> object:
    try:
        return json.loads(_read_text(path))
    except (ValueError, RecursionError):  # half a file after a crash is as useless as another launch's
        return None


def judge(
    listing: Sequence[Mapping[str, Any]],
    fingerprint: str,
    environment: Mapping[str, str] | None = None,
    rank: int | None = None,
) -> list[dict[str, Any]]:
    """Say of each scanned file whether the launch named by ``fingerprint`` may boot with it on this rank.

    Returns ``[{"file", "sidecar", "key", "mtime_ns", "keep": bool, "why": str | None}]`` in the listing's order. With
    ``rank`` given, files of another tensor-parallel rank are not kept: they would count as this rank's and never be
    loaded.
    """
    judged = []
    for item in listing:
        why = _why_aside(item, fingerprint, environment or {}, rank)
        named = {name: item[name] for name in ("file", "sidecar", "key", "mtime_ns")}
        judged.append({**named, "keep": why is None, "why": why})
    return judged


def _why_aside(
    item: Mapping[str, Any], fingerprint: str, environment: Mapping[str, str], rank: int | None
) -> str | None:
    if item["problem"]:
        return str(item["problem"])
    if rank is not None and item["tp"] != rank:
        return f"tuned by rank {item['tp']}, this is rank {rank}"
    if item["fingerprint"] is None:
        return "no sidecar says which launch tuned it"
    if item["fingerprint"] != fingerprint:
        return f"tuned by launch {item['fingerprint'][:12]}, the coming one is {fingerprint[:12]}"
    return _metadata_differs(item["metadata"], environment)


def spoil(judged: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the judgement for a rank of a fleet whose ranks do not all match: nothing is kept."""
    return [{**item, "keep": False, "why": item["why"] or "another rank has no matching file"} for item in judged]


def set_aside(cache_dir: str, judged: Sequence[Mapping[str, Any]], aside: str) -> list[str]:
    """Move each judged file with its sidecar below the directory ``aside``, under the path it had; nothing is deleted.

    Returns the new paths. ``aside`` must lie on the cache's own file system: a rename cannot leave half a file.
    """
    moved = []
    for path in paths(judged):
        files.move(f"{cache_dir}/{CACHE_SUBDIR}/{path}", f"{aside}/{path}")
        moved.append(f"{aside}/{path}")
    return moved


def purge(cache_dir: str, listing: Sequence[Mapping[str, Any]]) -> list[str]:
    """Delete the listed cache files and sidecars, nothing else; returns their paths below the cache root."""
    gone = paths(listing)
    for path in gone:
        files.remove(f"{cache_dir}/{CACHE_SUBDIR}/{path}")
    return gone


def paths(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return every path of scanned or judged items, files and sidecars, sorted."""
    return sorted({path for item in items for path in (item["file"], item["sidecar"]) if path})


def verdict(per_rank: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Decide for the fleet from each host's ``judge``: the ranks hold the same matching files, or none is used.

    Returns ``{"match": bool, "reuse": bool, "keys": [common keys], "seen": {host: [kept keys]}, "why": [str]}``.
    ``match`` is false when the ranks differ: every file then has to go aside, also the matching ones, because a rank
    that loads while another tunes desynchronises the timing. ``reuse`` is true when there is something to load.
    """
    seen = {host: sorted({str(item["key"]) for item in judged if item["keep"]}) for host, judged in per_rank.items()}
    everywhere = sorted({key for keys in seen.values() for key in keys})
    why = [
        f"{host} has no matching file for {key}" for key in everywhere for host in sorted(seen) if key not in seen[host]
    ]
    keys = [] if why else everywhere
    return {"match": not why, "reuse": bool(keys), "keys": keys, "seen": seen, "why": why}
