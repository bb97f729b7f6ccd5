"""The Engram tables: primes -> table layout -> a rank's rows -> the packed shard on its disk, and the proof of it.

A table has one row per hash bucket; a row is 256 bytes of weight (float8_e4m3fn) and 8 bytes of scale (float8_e8m0fnu),
two tensors in the checkpoint. A shard holds the rows of one rank, weight and scale side by side, so that a lookup is
one local read. Shard = a 4096-byte header, then the rows; beside it a manifest that says what was packed from where.

Two ways to split rows over ranks exist under the same file name, a property of the engine image: ``rows`` (equal
parts) and ``heads`` (on the boundaries of hash columns, as SGLang 0.5.23). A shard of one kind under a loader of the
other serves wrong rows, so name, header, manifest and range are all compared.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from . import enginelog, files, safetensors
from .errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

WEIGHT_BYTES = 256
SCALE_BYTES = 8
ROW_BYTES = WEIGHT_BYTES + SCALE_BYTES
HEADER_BYTES = 4096
MAGIC = b"DSV41EN1"
# Packers in the wild write this constant, whose bytes on disk read DSV1EN41: read here, not written.
_MAGIC_IN_THE_WILD = (0x31344E4531565344).to_bytes(8, "little")
SPLITS = ("rows", "heads")
# What is wrong with a shard, by name. ``bit-flipped`` is any damage that is none of the others.
FAULTS = (
    "missing", "truncated", "too-long", "sparse", "zero-filled", "bit-flipped", "wrong-layer", "wrong-rank",
    "wrong-split", "wrong-tp", "wrong-checkpoint", "no-shard", "unproven",
)  # fmt: skip
# How closely a shard is looked at: name, header, size and manifest; also some rows; also every byte.
LEVELS = ("quick", "sample", "full")
# Of the packed format's own fields (from byte 256 of the header) and of the manifest.
VERSION = 1
MANIFEST_SUFFIX = ".manifest.json"

# Loaders read the first 48 bytes and ignore the rest of the header; ours begins here.
_OWN_FIELDS_AT = 256
_WEIGHT_DTYPE = "F8_E4M3"
_SCALE_DTYPE = "F8_E8M0"
# Far above any fleet; without a limit a mistyped number of ranks would be worked on for hours.
_MAX_RANKS = 64
# Rows that level ``sample`` compares with the checkpoint.
_SAMPLE_ROWS = 256
# So many rows behind the first differing one tell what happened to it, and so many zero bytes in a row are no accident.
_RUN_ROWS = 16
_ZERO_BYTES = 16
# Blocks that are hashed and written while the next is read: so many even out what a disk or a scheduler holds up.
_DEPTH = 3
# Blocks that the disk is asked for ahead of the one that is read.
_AHEAD = 4
# 4.3 MB of shard, whole pages: small enough for the caches of a CPU, large enough for a disk at one request at a time.
_BLOCK_ROWS = 16 * files.IOV_MAX

# text_config of deepseek-ai/DeepSeek-V4.1-Flash at revision fb2764a5cf321eaa5070ca8f9e892818f477c16d.
REAL_CONFIG: dict[str, Any] = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_vocab_size": 16000000,
    "engram_pad_token_id": 2,
}


class LayerLayout(TypedDict):
    """One table: its rows, and how many of them each hash column (n-gram size, then head) has, in order."""

    rows: int
    columns: list[int]


class Expected(TypedDict):
    """What a rank's shard of one layer must be. ``rows`` = [first, end) of the table's ``total_rows``."""

    layer: int
    rank: int
    tp: int
    file: str
    bytes: int
    rows: list[int]
    total_rows: int
    split: str


class ShardHeader(TypedDict):
    """The header of a shard; ``own`` are our own fields, empty in a shard that another tool packed."""

    layer: int
    rows: list[int]
    total_rows: int
    row_bytes: int
    own: dict[str, Any]


class Checkpoint(TypedDict):
    """What a shard was packed from: the revision where one is known, and the two files with their sizes in bytes."""

    revision: str | None
    files: dict[str, int]


class Inspection(TypedDict):
    """What stands under a shard's name.

    ``state``: ``ok`` = proven by its manifest; ``missing`` = nothing there, or something that no manifest vouches for
    (``why`` says what; packing verifies it against the checkpoint); ``wrong`` = another thing under this name.
    ``fault`` is one of ``FAULTS``, None when the state is ``ok``.
    """

    layer: int
    file: str
    state: str
    fault: str | None
    why: str | None
    bytes: int | None
    rows: list[int] | None
    split: str | None
    sha256: str | None
    inode: int | None
    mtime_ns: int | None


class WrongContentError(LockstepError):
    """A shard whose name and header are right, but whose bytes are not."""


class Step(TypedDict):
    """What a shard needs: ``keep`` it, ``verify`` it, ``pack`` it (``needed`` bytes), or ``refuse`` what is there."""

    expected: Expected
    found: Inspection
    action: str
    needed: int


class Space(TypedDict):
    """Bytes: what is to be written, what is free, what an interrupted packing left, and what has to stay free."""

    needed: int
    free: int
    reclaim: int
    reserve: int


# --- layout -----------------------------------------------------------------------------------------------------------


def layout(config: Mapping[str, Any]) -> dict[int, LayerLayout]:
    """Work out the tables of a model, ``{layer: {"rows", "columns"}}``, from its config.json (or its ``text_config``).

    Column sizes are primes, one ascending sequence without repeats over (layer, n-gram size, head): each (layer, n-gram
    size) restarts its search at ``engram_vocab_size - 1`` and takes the next primes not used before. Their sums must
    equal ``engram_num_embeddings``; LockstepError when they do not, or when a key is missing.
    """
    text = config.get("text_config", config)
    try:
        layers = [int(layer) for layer in text["engram_layer_ids"]]
        declared = [int(rows) for rows in text["engram_num_embeddings"]]
        sizes, heads = int(text["engram_max_ngram_size"]) - 1, int(text["engram_n_heads"])
        vocab, head_dim = int(text["engram_vocab_size"]), int(text["engram_head_dim"])
    except (KeyError, TypeError, ValueError) as error:
        raise LockstepError(
            "config.json describes no Engram tables",
            found=f"{type(error).__name__}: {error}",
            expected="engram_layer_ids, engram_num_embeddings, engram_max_ngram_size, engram_n_heads, "
            "engram_head_dim, engram_vocab_size",
            next_step="check that engram_checkpoint is a DeepSeek V4.1 checkpoint",
        ) from error
    if head_dim != WEIGHT_BYTES:
        raise LockstepError("unknown row width", found=f"engram_head_dim {head_dim}", expected=str(WEIGHT_BYTES))
    columns = prime_columns(len(layers), sizes, heads, vocab)
    sums = [sum(layer_columns) for layer_columns in columns]
    if sums != declared:
        raise LockstepError(
            "engram_num_embeddings does not follow from engram_vocab_size",
            found=declared,
            expected=sums,
            next_step="config.json and the tables do not belong together; fetch the checkpoint again",
        )
    return {
        layer: {"rows": rows, "columns": layer_columns}
        for layer, rows, layer_columns in zip(layers, sums, columns, strict=True)
    }


def prime_columns(layers: int, sizes: int, heads: int, vocab_size: int) -> list[list[int]]:
    """Find the column sizes per layer, ``sizes * heads`` primes each, by the rule of ``layout``.

    Each restart passes over all primes used before, which are exactly those from the start on, so one ascending walk
    gives the same sequence.
    """
    primes = _primes_above(vocab_size - 1)
    return [[next(primes) for _ in range(sizes * heads)] for _ in range(layers)]


def shard_range(table: LayerLayout, tp: int, rank: int, split: str) -> tuple[int, int]:
    """Work out the rows [first, end) of a table that a rank owns.

    ``rows``: equal parts, ``n * r // tp``. ``heads``: an equal number of whole hash columns; as ``rows`` when the
    columns (24) do not divide by ``tp``. Raises LockstepError for an unknown split or a rank outside of ``tp``.
    """
    if split not in SPLITS:
        raise LockstepError("unknown Engram split", found=split, expected=" or ".join(SPLITS))
    if tp < 1 or not 0 <= rank < tp:
        raise LockstepError("no such rank", found=f"rank {rank} of {tp}", expected="0 <= rank < tp_size")
    columns = table["columns"]
    if split == "heads" and len(columns) % tp == 0:
        ends = [0, *accumulate(columns)]
        return ends[len(columns) * rank // tp], ends[len(columns) * (rank + 1) // tp]
    return table["rows"] * rank // tp, table["rows"] * (rank + 1) // tp


def shard_name(layer: int, rank: int, tp: int) -> str:
    """Name the file that the engine looks for, e.g. ``engram-l14-r0of3.bin``."""
    return f"engram-l{layer}-r{rank}of{tp}.bin"


def owner(
    rows: Sequence[int], table: LayerLayout, tp: int | None = None, split: str | None = None
) -> tuple[str, int, int] | None:
    """Find whose rows these are: (split, tp, rank), None when nobody's.

    Several may own the same rows (rank 0 of 1, both splits); ``tp`` and ``split`` are preferred.
    """
    sizes = range(1, _MAX_RANKS + 1)
    for ranks in [tp, *sizes] if tp in sizes else sizes:
        # The splits differ by less than a rank's share, so only neighbours of the equal part can be meant.
        near = int(rows[0]) * ranks // table["rows"] if ranks and table["rows"] else 0
        for way in sorted(SPLITS, key=lambda name: name != split):
            for rank in range(max(near - 1, 0), min(near + 2, ranks or 0)):
                if list(shard_range(table, ranks or 1, rank, way)) == list(rows):
                    return way, ranks or 1, rank
    return None


def expected_shards(
    config: Mapping[str, Any], tp: int, rank: int, split: str, layers: Sequence[int] | None = None
) -> list[Expected]:
    """Say what a rank must hold, one entry per layer. LockstepError when ``layers`` names one without a table."""
    tables = layout(config)
    absent = [layer for layer in layers or [] if layer not in tables]
    if absent:
        raise LockstepError(
            f"no Engram table for layer {', '.join(map(str, absent))}",
            found=f"tables for {', '.join(map(str, tables))}",
            next_step="correct engram_layers",
        )
    shards: list[Expected] = []
    for layer in tables if layers is None else layers:
        first, end = shard_range(tables[layer], tp, rank, split)
        shards.append(
            {
                "layer": layer,
                "rank": rank,
                "tp": tp,
                "file": shard_name(layer, rank, tp),
                "bytes": HEADER_BYTES + (end - first) * ROW_BYTES,
                "rows": [first, end],
                "total_rows": tables[layer]["rows"],
                "split": split,
            }
        )
    return shards


def shard_sizes(tp: int, split: str, config: Mapping[str, Any] = REAL_CONFIG) -> list[int]:
    """Sum the bytes of all layers' shards, by rank: ``shard_sizes(2, "heads")[1] == 101379729008``.

    LockstepError for a number of ranks that no fleet has.
    """
    if not 1 <= tp <= _MAX_RANKS:
        raise LockstepError("no such fleet", found=f"{tp} ranks", expected=f"1 to {_MAX_RANKS} ranks")
    return [sum(shard["bytes"] for shard in expected_shards(config, tp, rank, split)) for rank in range(tp)]


# --- header and manifest ----------------------------------------------------------------------------------------------


def pack_header(layer: int, rows: Sequence[int], total_rows: int, own: Mapping[str, Any] | None = None) -> bytes:
    """Make the 4096 bytes before the rows: six little-endian u64, zeros, our own fields as JSON from byte 256 on."""
    numbers = [int.from_bytes(MAGIC, "little"), layer, rows[0], rows[1], total_rows, ROW_BYTES]
    fixed = b"".join(number.to_bytes(8, "little") for number in numbers)
    fields = json.dumps(own, sort_keys=True, separators=(",", ":")).encode() if own else b""
    header = fixed.ljust(_OWN_FIELDS_AT, b"\0") + fields
    if len(header) > HEADER_BYTES:
        raise LockstepError("own fields do not fit the header", found=f"{len(fields)} bytes")
    return header.ljust(HEADER_BYTES, b"\0")


def _header(expected: Mapping[str, Any], source: Checkpoint) -> bytes:
    """The header of a shard as it is packed here."""
    own = {
        "format": VERSION,
        "split": expected["split"],
        "rank": expected["rank"],
        "tp": expected["tp"],
        "checkpoint": source["revision"],
    }
    return pack_header(expected["layer"], expected["rows"], expected["total_rows"], own)


def parse_header(data: bytes) -> ShardHeader:
    """Read a header from a shard's first 4096 bytes. LockstepError when it is none."""
    if len(data) < HEADER_BYTES or data[:8] not in (MAGIC, _MAGIC_IN_THE_WILD):
        raise LockstepError("no Engram shard", found=f"first bytes {data[:8]!r}", expected=repr(MAGIC))
    numbers = [int.from_bytes(data[at : at + 8], "little") for at in range(8, 48, 8)]
    fields = data[_OWN_FIELDS_AT:HEADER_BYTES].rstrip(b"\0")
    try:
        own = json.loads(fields) if fields else {}
    except (ValueError, RecursionError):
        own = {}
    return {
        "layer": numbers[0],
        "rows": numbers[1:3],
        "total_rows": numbers[3],
        "row_bytes": numbers[4],
        "own": own if isinstance(own, dict) else {},
    }


def read_header(path: files.StrPath) -> ShardHeader:
    """Read a file's header (``parse_header``)."""
    with files.Reader(path) as reader:
        return parse_header(reader.read(0, min(HEADER_BYTES, reader.size)))


def manifest_path(path: files.StrPath) -> Path:
    """Name a shard's manifest, which lies beside it."""
    return Path(f"{path}{MANIFEST_SUFFIX}")


def read_manifest(path: files.StrPath) -> dict[str, Any] | None:
    """Read a shard's manifest; None when there is none or it cannot be read (then nothing is proven)."""
    try:
        found = files.read_json(manifest_path(path))
    except LockstepError:
        return None
    return found if isinstance(found, dict) else None


def inspect_shard(
    path: files.StrPath,
    expected: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    table: LayerLayout | None = None,
) -> Inspection:
    """Say what stands under a shard's name, without reading its rows.

    ``expected`` is an entry of ``expected_shards``. With ``checkpoint`` (``checkpoint_identity``) a shard packed from
    another revision, or from files of other sizes, is ``wrong`` too. ``table`` (of ``layout``) tells another split from
    another TP size in a file that does not say so itself. Raises LockstepError only when looking fails.
    """
    found = files.look(path)
    result: Inspection = {
        "layer": int(expected["layer"]),
        "file": str(expected["file"]),
        "state": "missing",
        "fault": "missing",
        "why": "no such file",
        "bytes": None,
        "rows": None,
        "split": None,
        "sha256": None,
        "inode": None,
        "mtime_ns": None,
    }
    if found is None:
        return result
    result.update({"bytes": found["bytes"], "inode": found["inode"], "mtime_ns": found["mtime_ns"]})
    with files.Reader(path) as reader:
        data = reader.read(0, min(HEADER_BYTES, reader.size))
    try:
        header = parse_header(data)
    except LockstepError as error:
        kind, seen = _no_header(path, data)
        result.update({"state": "wrong", "fault": kind, "why": f"{error.message}: {seen or error.found}"})
        return result
    manifest = read_manifest(path)
    split = header["own"].get("split") or (manifest or {}).get("split")
    result.update({"rows": header["rows"], "split": split if isinstance(split, str) else None})
    fault, wrong = _disagreements(header, found["bytes"], expected, table)
    if not wrong and checkpoint is not None:
        fault, wrong = "wrong-checkpoint", _other_checkpoint(header, manifest, checkpoint)
    if wrong:
        result.update({"state": "wrong", "fault": fault, "why": "; ".join(wrong)})
        return result
    fault, why = _doubt(path, manifest, expected, found)
    if why:
        result.update({"fault": fault, "why": why})
    else:
        result.update({"state": "ok", "fault": None, "why": None, "sha256": str((manifest or {})["sha256"])})
    return result


def check_shard(
    path: files.StrPath,
    expected: Expected,
    checkpoint: files.StrPath,
    level: str,
    progress: Callable[[int], None] | None = None,
    *,
    sample: int = _SAMPLE_ROWS,
) -> Inspection:
    """Look at a shard as closely as ``level`` says, and change nothing.

    ``quick`` is ``inspect_shard``; ``sample`` also compares ``sample`` rows, chosen anew each time, with the
    checkpoint; ``full`` also hashes the file, and compares every row when its manifest does not vouch for that hash.
    A shard without a manifest is ``ok`` only at ``full``. ``progress`` gets the bytes of each block that is read.
    """
    if level not in LEVELS:
        raise LockstepError("unknown level of verification", found=level, expected=", ".join(LEVELS))
    table = layout(read_config(checkpoint))[expected["layer"]]
    found = inspect_shard(path, expected, checkpoint_identity(checkpoint, expected["layer"]), table)
    if level == "quick" or found["state"] == "wrong" or found["bytes"] is None:
        return found
    if level == "full":
        proof = _prove(checkpoint, path, expected, progress)
    else:
        first, end = expected["rows"]
        rows = sample_rows(first, end, sample, random.SystemRandom().randrange(1 << 64))
        proof = {"fault": None, "why": None, "sha256": found["sha256"], **_diagnose(checkpoint, path, expected, rows)}
    if proof["fault"]:
        state = "missing" if proof["fault"] == "unproven" else "wrong"
        return {**found, "state": state, "fault": proof["fault"], "why": proof["why"]}
    if level == "full":
        return {**found, "state": "ok", "fault": None, "why": None, "sha256": proof["sha256"]}
    return found


def next_step(fault: str) -> str:
    """What a person does about a fault of a shard."""
    pack = "ansible-playbook pack_engram.yml"
    aside = f"{pack} -e engram_wrong=set_aside"
    return {
        "missing": f"{pack} packs it",
        "unproven": f"{pack} compares it with the checkpoint and then vouches for it",
        "sparse": f"{aside} compares it with the checkpoint, and renames it and packs the right one if it differs",
        "wrong-checkpoint": f"see that engram_checkpoint is the right one; {aside} renames the file and packs anew",
    }.get(fault, f"look at the file; {aside} renames it and packs the right one")


def wrong_shard(path: files.StrPath, inspection: Mapping[str, Any], expected: Mapping[str, Any]) -> LockstepError:
    """Make the error for a ``wrong`` shard: it names the rank, found and expected, and the two ways on."""
    return LockstepError(
        f"{path} is not this rank's shard",
        rank=int(expected["rank"]),
        found=f"{inspection['bytes']:,} bytes, {inspection['fault']}: {inspection['why']}",
        expected=f"{expected['bytes']:,} bytes, split {expected['split']}, tp {expected['tp']}, rows"
        f" [{expected['rows'][0]},{expected['rows'][1]}) of {expected['total_rows']:,}",
        next_step="look at the file; engram_wrong=set_aside renames it and packs the right one",
    )


# --- rows -------------------------------------------------------------------------------------------------------------


def checkpoint_identity(checkpoint: files.StrPath, layer: int) -> Checkpoint:
    """Say what a layer's shard is packed from: the revision, where one is known, and the two files."""
    weight, scale = _tables(checkpoint, layer)
    return {
        "revision": _revision(Path(checkpoint)),
        "files": {table["file"]: table["file_bytes"] for table in (weight, scale)},
    }


def check_tables(checkpoint: files.StrPath, expected: Mapping[str, Any]) -> None:
    """Raise LockstepError unless the checkpoint holds a layer's two tensors in the shape that its config promises."""
    weight, scale = _tables(checkpoint, int(expected["layer"]))
    total = int(expected["total_rows"])
    for table, dtype, width, name in (
        (weight, _WEIGHT_DTYPE, WEIGHT_BYTES, "weight"),
        (scale, _SCALE_DTYPE, SCALE_BYTES, "scale"),
    ):
        if table["dtype"] != dtype or table["shape"] != [total, width]:
            raise LockstepError(
                f"the {name} table of layer {expected['layer']} in {table['path']} has the wrong shape",
                rank=int(expected["rank"]),
                found=f"{table['dtype']} {table['shape']}",
                expected=f"{dtype} {[total, width]} by config.json",
                next_step="config.json and the tables do not belong together; fetch the checkpoint again",
            )


def read_rows(path: files.StrPath, header: ShardHeader, rows: Iterable[int]) -> bytes:
    """Read rows of a shard by their number in the whole table, 264 bytes each, in the order asked for."""
    first, end = header["rows"]
    with files.Reader(path) as reader:
        parts = []
        for row in rows:
            if not first <= row < end:
                raise LockstepError(f"row {row} is not in {path}", expected=f"[{first},{end})")
            parts.append(reader.read(HEADER_BYTES + (row - first) * ROW_BYTES, ROW_BYTES))
    return b"".join(parts)


def checkpoint_rows(checkpoint: files.StrPath, layer: int, rows: Iterable[int]) -> bytes:
    """Read the same rows from the checkpoint: weight then scale, 264 bytes each, in the order asked for."""
    weight, scale = _tables(checkpoint, layer)
    total = weight["bytes"] // WEIGHT_BYTES
    with files.Reader(weight["path"]) as weights, files.Reader(scale["path"]) as scales:
        parts = []
        for row in rows:
            if not 0 <= row < total:
                raise LockstepError(f"row {row} is not in layer {layer}'s table", expected=f"[0,{total})")
            parts.append(weights.read(weight["offset"] + row * WEIGHT_BYTES, WEIGHT_BYTES))
            parts.append(scales.read(scale["offset"] + row * SCALE_BYTES, SCALE_BYTES))
    return b"".join(parts)


def compare_sample(shard_path: files.StrPath, checkpoint: files.StrPath, n: int, seed: int) -> list[int]:
    """Compare ``n`` rows of a shard (first, last, others by seed) with the checkpoint; the row numbers that differ."""
    header = read_header(shard_path)
    first, end = header["rows"]
    rows = sample_rows(first, end, n, seed)
    packed, original = read_rows(shard_path, header, rows), checkpoint_rows(checkpoint, header["layer"], rows)
    return [
        row
        for at, row in enumerate(rows)
        if packed[at * ROW_BYTES : (at + 1) * ROW_BYTES] != original[at * ROW_BYTES : (at + 1) * ROW_BYTES]
    ]


def sample_rows(first: int, end: int, n: int, seed: int) -> list[int]:
    """Choose at most ``n`` distinct rows of [first, end), ascending, the first and the last always among them."""
    count = min(n, end - first)
    chosen = set([first, end - 1][:count])
    source = random.Random(seed)  # noqa: S311 - which rows are compared is no secret; a seed must give the same ones
    while len(chosen) < count:
        chosen.add(source.randrange(first, end))
    return sorted(chosen)


def work(
    checkpoint: files.StrPath, out_dir: files.StrPath, shards: Sequence[Expected], *, force: bool = False
) -> list[Step]:
    """Decide what each of a rank's shards needs, by looking only (checkpoint headers, shard headers, manifests).

    ``shards`` are entries of ``expected_shards``; ``force`` packs good ones again. Raises LockstepError when the
    checkpoint has no tables in the shape that its config promises.
    """
    tables = layout(read_config(checkpoint))
    steps: list[Step] = []
    for expected in shards:
        layer = expected["layer"]
        check_tables(checkpoint, expected)
        found = inspect_shard(
            Path(out_dir) / expected["file"], expected, checkpoint_identity(checkpoint, layer), tables[layer]
        )
        if found["state"] == "ok":
            action = "pack" if force else "keep"
        elif found["state"] == "wrong":
            action = "refuse"
        else:
            action = "pack" if found["bytes"] is None or force else "verify"
        needed = expected["bytes"] if action == "pack" else 0
        steps.append({"expected": expected, "found": found, "action": action, "needed": needed})
    return steps


def require_space(out_dir: files.StrPath, steps: Sequence[Step], reserve: int) -> Space:
    """Count what the steps write and what there is for it, in ``out_dir`` or where it will be made.

    Raises LockstepError, naming the rank, unless all of it fits and ``reserve`` bytes stay free. What an interrupted
    packing left behind is counted as free: packing goes on in it, or removes it first.
    """
    packing = [step["expected"] for step in steps if step["action"] == "pack"]
    partials = (Path(out_dir) / f"{shard['file']}{files.PARTIAL}" for shard in packing)
    count: Space = {
        "needed": sum(shard["bytes"] for shard in packing),
        "free": files.free_bytes(out_dir),
        "reclaim": sum(files.allocated(partial) for partial in partials),
        "reserve": reserve,
    }
    if packing:
        try:
            files.require_space(out_dir, count["needed"], reserve, count["reclaim"])
        except LockstepError as error:
            error.rank = packing[0]["rank"]
            raise
    return count


def pack(
    checkpoint: files.StrPath,
    out_dir: files.StrPath,
    layer: int,
    rank: int,
    tp: int,
    split: str,
    progress: Callable[[str, int], None] | None = None,
    *,
    readback: bool = True,
) -> dict[str, Any]:
    """Write one layer's shard of a rank, then its manifest, and return the manifest.

    Only the rank's byte ranges are read. ``progress`` and ``readback`` as in ``files.write_blocks``: an interrupted
    packing is taken up where it was durable (stage ``resumed`` counts what stands), as long as the checkpoint's files
    are untouched. What stood under the name is replaced when the new file is complete and proven on disk, not before.
    LockstepError, and no shard, when the checkpoint changed meanwhile.
    """
    config = read_config(checkpoint)
    (expected,) = expected_shards(config, tp, rank, split, [layer])
    # Before anything is read of them.
    stamps = _stamps(checkpoint, layer)
    check_tables(checkpoint, expected)
    source = checkpoint_identity(checkpoint, layer)
    header = _header(expected, source)

    def blocks(offset: int, _: str | None) -> Iterator[memoryview]:
        row = expected["rows"][0]
        if offset:
            row += (offset - HEADER_BYTES) // ROW_BYTES
            if progress:
                progress("resumed", offset)
        else:
            yield memoryview(header)
        yield from _row_blocks(checkpoint, layer, row, expected["rows"][1])
        now = _stamps(checkpoint, layer)
        if now != stamps:
            raise LockstepError(
                f"{checkpoint} changed while layer {layer} was packed from it",
                rank=rank,
                found=now,
                expected=stamps,
                next_step="let whatever writes to it end, then pack again",
            )

    target = Path(out_dir) / expected["file"]
    replace = files.look(target) is not None
    digest = files.write_blocks(
        target,
        expected["bytes"],
        blocks,
        identity={"shard": expected, "source": source, "stamps": stamps, "block_rows": _BLOCK_ROWS, "version": VERSION},
        readback=readback,
        progress=progress,
        depth=_DEPTH,
        replace=replace,
    )
    return write_manifest(target, expected, source, digest)


def verify(
    checkpoint: files.StrPath, path: files.StrPath, expected: Expected, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Prove a shard that no manifest vouches for, write its manifest and return it; the shard stays untouched.

    Its SHA-256 must be the one of its earlier manifest, if any, or else every row the checkpoint's. Raises
    ``WrongContentError`` when the content is not what it should be. ``progress`` gets the bytes of each block.
    """
    before = files.stamp(path)
    proof = _prove(checkpoint, path, expected, progress)
    # A wrong manifest is no fault of the file.
    if proof["fault"] not in (None, "unproven"):
        raise WrongContentError(
            f"{path} does not hold what its name and header say",
            rank=expected["rank"],
            found=f"{proof['fault']}: {proof['why']}",
            expected=f"the checkpoint's rows [{expected['rows'][0]},{expected['rows'][1]})",
            next_step=next_step(proof["fault"]),
        )
    if files.stamp(path) != before:
        raise LockstepError(
            f"{path} was written to while it was verified",
            rank=expected["rank"],
            next_step="let whatever writes to it end, then run again",
        )
    return write_manifest(Path(path), expected, checkpoint_identity(checkpoint, expected["layer"]), proof["sha256"])


def compare_all(
    path: files.StrPath,
    checkpoint: files.StrPath,
    expected: Mapping[str, Any],
    passed: Callable[[memoryview], object] | None = None,
) -> int | None:
    """Find the first row in which a shard differs from the checkpoint, None when none does. Reads both through.

    ``passed`` gets the shard's bytes, header included, as far as they were compared.
    """
    first, end = int(expected["rows"][0]), int(expected["rows"][1])
    buffer = memoryview(bytearray(_BLOCK_ROWS * ROW_BYTES))
    at, offset = first, HEADER_BYTES
    with files.Reader(path) as reader:
        if passed:
            passed(memoryview(reader.read(0, HEADER_BYTES)))
        for block in _row_blocks(checkpoint, int(expected["layer"]), first, end):
            mine = buffer[: len(block)]
            reader.fill(mine, offset)
            if mine != block:
                theirs, ours = bytes(block), bytes(mine)
                return at + next(i for i in range(len(ours)) if ours[i] != theirs[i]) // ROW_BYTES
            if passed:
                passed(mine)
            at += len(block) // ROW_BYTES
            offset += len(block)
    return None


def write_manifest(path: Path, expected: Expected, source: Checkpoint, digest: str) -> dict[str, Any]:
    """Write a shard's manifest beside it, last of all: it vouches for the file as of its modification time."""
    files.discard_partial(path)  # the journal of a process that was killed just after the rename
    found = files.look(path)
    manifest = {
        "format": 1,
        "file": expected["file"],
        "layer": expected["layer"],
        "rank": expected["rank"],
        "tp": expected["tp"],
        "rows": expected["rows"],
        "split": expected["split"],
        "bytes": expected["bytes"],
        "sha256": digest,
        "mtime_ns": found["mtime_ns"] if found else None,
        "checkpoint": {"revision": source["revision"], "files": source["files"]},
        "version": VERSION,
    }
    if files.hole(path) is not None:
        # A file system may keep rows of zeros as holes; proven with them, it stays proven.
        manifest["holes"] = True
    files.write_json_atomic(manifest_path(path), manifest, 0o644)
    return manifest


def read_config(checkpoint: files.StrPath) -> Mapping[str, Any]:
    """Read a checkpoint's config.json. LockstepError when it is missing or no object."""
    path = Path(checkpoint) / "config.json"
    if path.is_symlink():
        raise LockstepError(
            f"{checkpoint} holds links to its files elsewhere",
            found=f"config.json -> {path.readlink()}",
            expected="the files themselves: a container sees this directory and no other",
            next_step="fetch the checkpoint into a directory of its own (hf download --local-dir)",
        )
    if files.look(path) is None:
        raise LockstepError(
            f"no checkpoint in {checkpoint}",
            found="no config.json there",
            expected="config.json and the safetensors files of the model",
            next_step="set engram_checkpoint to the directory of the checkpoint, or fetch it there",
        )
    config = files.read_json(path)
    if not isinstance(config, dict):
        raise LockstepError(f"{path} is no JSON object")
    return config


# --- all ranks together ----------------------------------------------------------------------------------------------


def packed_report(
    ranks: Mapping[str, Mapping[str, Any]], tp: int, layers: Sequence[int], present: Sequence[int] | None = None
) -> dict[str, Any]:
    """Judge over all ranks which rank and layer pairs are packed, with a table a person can read.

    ``ranks`` is ``{host: entry}``; an entry holds ``packed`` (facts of the rank's log, ``enginelog``), or ``rank`` and
    ``shards`` (``inspect_shard`` of each layer), or ``rank`` and ``why`` nothing is known. Returns
    ``enginelog.packed_verdict`` plus ``table``, its lines, and ``faults``, what is wrong with which rank's shard and
    what to do about it. Silence is no proof: such a rank's pairs are missing. ``present`` are the ranks that exist, all
    of ``tp`` by default; of the others the table says that no host has them.
    """
    rows: list[dict[str, Any]] = []
    facts: dict[int | None, Any] = {}
    faults: list[str] = []
    for host, entry in ranks.items():
        said = [_said(item, entry.get("rank")) for item in [*entry.get("packed", []), *entry.get("shards", [])]]
        rows += [{"host": host, **item} for item in said]
        for item in said:
            facts.setdefault(item["rank"], {"packed": []})["packed"].append(item)
        faults += [
            f"rank {entry.get('rank')} ({host}), layer {item['layer']}: {item['fault']}: {item['why']}\n"
            f"  next step: {next_step(item['fault'])}"
            for item in entry.get("shards", [])
            if item.get("fault")
        ]
    report = enginelog.packed_verdict(facts, tp, layers, present)
    silent = {entry.get("rank"): (host, entry.get("why")) for host, entry in ranks.items()}
    for rank, layer in report["missing_pairs"]:
        host, why = silent.get(rank, ("?", None))
        note = why or "nothing said"
        rows.append({"host": host, "rank": rank, "layer": layer, "packed": False, "rows": None, "note": note})
    rows.sort(key=lambda row: (row["rank"] is None, row["rank"], row["layer"]))
    table = _table(rows)
    absent = [rank for rank in range(tp) if present is not None and rank not in present]
    if absent:
        table.append(f"no host here has rank {', '.join(map(str, absent))} of {tp}")
    return {**report, "faults": faults, "table": [*table, report["verdict"]]}


# --- inside -----------------------------------------------------------------------------------------------------------


def _primes_above(number: int) -> Iterator[int]:
    candidate = number + 1
    while True:
        if _is_prime(candidate):
            yield candidate
        candidate += 1


def _is_prime(number: int) -> bool:
    """Miller-Rabin with the bases that decide every number below 3.3e24."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if number <= 1:
        return False
    for base in bases:
        if number % base == 0:
            return number == base
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in bases:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def _no_header(path: files.StrPath, data: bytes) -> tuple[str, str | None]:
    """Name the fault of a file that has no header, and say what was seen of it."""
    if len(data) < HEADER_BYTES and (not data or data[:8] in (MAGIC, _MAGIC_IN_THE_WILD)):
        return "truncated", f"it ends too early, at byte {len(data):,}"
    if any(data):
        return "no-shard", None
    return ("sparse", "nothing was ever written to it") if files.hole(path) == 0 else ("zero-filled", "it holds zeros")


def _disagreements(
    header: ShardHeader, size: int, expected: Mapping[str, Any], table: LayerLayout | None
) -> tuple[str | None, list[str]]:
    """Name what kind of other shard a header and a size are of, and say all that differs."""
    own = header["own"]
    checks = [
        ("layer", header["layer"], expected["layer"]),
        ("split", own.get("split", expected["split"]), expected["split"]),
        ("tp", own.get("tp", expected["tp"]), expected["tp"]),
        ("rank", own.get("rank", expected["rank"]), expected["rank"]),
        ("rows", header["rows"], expected["rows"]),
        ("total rows", header["total_rows"], expected["total_rows"]),
        ("row bytes", header["row_bytes"], ROW_BYTES),
        ("size", size, expected["bytes"]),
    ]
    said = [f"{what} {found}, not {wanted}" for what, found, wanted in checks if found != wanted]
    wrong = {what for what, found, wanted in checks if found != wanted}
    if not wrong:
        return None, []
    if "row bytes" in wrong:
        return "no-shard", said
    if "layer" in wrong:
        return "wrong-layer", said
    if "total rows" in wrong:
        return "wrong-checkpoint", said
    if wrong & {"split", "tp", "rank", "rows"}:
        return _whose(header, expected, table, said), said
    return ("truncated" if size < expected["bytes"] else "too-long"), said


def _whose(header: ShardHeader, expected: Mapping[str, Any], table: LayerLayout | None, said: list[str]) -> str:
    """Name how a shard of other rows differs: in TP size before split before rank."""
    wanted = (expected["split"], expected["tp"], expected["rank"])
    own = header["own"]
    if {"split", "tp", "rank"} <= set(own):
        whose = (own["split"], own["tp"], own["rank"])
    else:
        found = owner(header["rows"], table, expected["tp"], expected["split"]) if table else None
        if found is None:
            # Whole other rows of the same table: another way to split it.
            return "wrong-split"
        whose = found
        said.append(f"these are the rows of rank {whose[2]} of {whose[1]}, split {whose[0]}")
    if whose == wanted:
        # What the tool that packed it said twice differs within the header.
        return "bit-flipped"
    if whose[1] != wanted[1]:
        return "wrong-tp"
    return "wrong-split" if whose[0] != wanted[0] else "wrong-rank"


def _other_checkpoint(header: ShardHeader, manifest: Mapping[str, Any] | None, checkpoint: Checkpoint) -> list[str]:
    """Say that a shard was packed from another checkpoint, by its header or by its manifest."""
    source = (manifest or {}).get("checkpoint")
    source = source if isinstance(source, dict) else {}
    revision, wanted = header["own"].get("checkpoint") or source.get("revision"), checkpoint["revision"]
    if revision and wanted and revision != wanted:
        return [f"packed from revision {revision}, not {wanted}"]
    if source and source.get("files") != checkpoint["files"]:
        return [f"packed from {source.get('files')}, not {checkpoint['files']}"]
    return []


def _doubt(
    path: files.StrPath, manifest: Mapping[str, Any] | None, expected: Mapping[str, Any], found: Mapping[str, int]
) -> tuple[str, str | None]:
    """Say why a file with the right header is not proven, if it is not; (fault, None) when it is."""
    first = files.hole(path)
    if first is not None and not (manifest or {}).get("holes"):
        return "sparse", f"nothing was ever written at byte {first:,}"
    if manifest is None:
        return "unproven", "no manifest vouches for the file that is there"
    other = _not_its_manifest(manifest, expected)
    if other:
        return "unproven", f"its manifest is of another file: {other}"
    if manifest.get("mtime_ns") != found["mtime_ns"]:
        return "unproven", "written to after it was packed"
    if _claimed(manifest, expected) is None:
        return "unproven", "its manifest has no SHA-256"
    return "unproven", None


def _not_its_manifest(manifest: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    keys = ("layer", "rank", "tp", "rows", "split", "bytes")
    wrong = [
        f"{key} {manifest.get(key)}, not {expected[key]}"
        for key in keys
        # A plan's shard does not say everything.
        if key in expected and manifest.get(key) != expected[key]
    ]
    return "; ".join(wrong) or None


def _claimed(manifest: Mapping[str, Any] | None, expected: Mapping[str, Any]) -> str | None:
    """Return the SHA-256 that a shard's manifest claims, None when there is none or it is of another file."""
    if manifest is None or _not_its_manifest(manifest, expected):
        return None
    digest = str(manifest.get("sha256"))
    return digest if re.fullmatch(r"[0-9a-f]{64}", digest) else None


def _prove(
    checkpoint: files.StrPath, path: files.StrPath, expected: Expected, progress: Callable[[int], None] | None
) -> dict[str, Any]:
    """Read a shard through: ``{"fault", "why", "sha256"}``.

    Its SHA-256 is its manifest's: no fault. Otherwise its rows are compared with the checkpoint's; when those are
    equal it is the header that differs, or the manifest that is wrong (``unproven``).
    """
    claimed = _claimed(read_manifest(path), expected)
    if claimed and files.sha256_file(path, progress=progress) == claimed:
        return {"fault": None, "why": None, "sha256": claimed}
    digest = hashlib.sha256()

    def passed(block: memoryview) -> None:
        digest.update(block)
        if progress and not claimed:
            progress(len(block))

    differing = compare_all(path, checkpoint, expected, passed)
    if differing is not None:
        first, end = expected["rows"]
        rows = set(range(differing, min(differing + _RUN_ROWS, end)))
        rows.update(sample_rows(first, end, 4 * _RUN_ROWS, seed=0))
        return {**_diagnose(checkpoint, path, expected, sorted(rows)), "sha256": None}
    found = {"fault": None, "why": None, "sha256": digest.hexdigest()}
    if not claimed:
        return found
    source = checkpoint_identity(checkpoint, expected["layer"])
    with files.Reader(path) as reader:
        header = reader.read(0, HEADER_BYTES)
    if header != _header(expected, source):
        return {**found, "fault": "bit-flipped", "why": "its header is not as it was packed, its rows are"}
    return {**found, "fault": "unproven", "why": "its manifest names another SHA-256, but every byte is as packed"}


def _diagnose(
    checkpoint: files.StrPath, path: files.StrPath, expected: Mapping[str, Any], rows: Sequence[int]
) -> dict[str, Any]:
    """Compare these rows with the checkpoint's: ``{"fault", "why"}``, a fault of None when all are equal."""
    packed = read_rows(path, read_header(path), rows)
    original = checkpoint_rows(checkpoint, int(expected["layer"]), rows)
    differing, empty = [], []
    for number, row in enumerate(rows):
        at = slice(number * ROW_BYTES, (number + 1) * ROW_BYTES)
        mine = [ours for ours, theirs in zip(packed[at], original[at], strict=True) if ours != theirs]
        if mine:
            differing.append(row)
            if len(mine) >= _ZERO_BYTES and not any(mine):
                empty.append(row)
    if not differing:
        return {"fault": None, "why": None}
    why = f"{len(differing)} of {len(rows)} rows looked at differ, first row {differing[0]}"
    if len(empty) * 2 >= len(differing):
        at_byte = HEADER_BYTES + (empty[0] - int(expected["rows"][0])) * ROW_BYTES
        hole = files.hole(path, at_byte)
        # A hole begins on a page, within or behind the first row that it empties.
        fault = "sparse" if hole is not None and hole < at_byte + ROW_BYTES else "zero-filled"
        return {"fault": fault, "why": f"{why}; {len(empty)} hold zeros"}
    return {"fault": "wrong-checkpoint" if len(differing) * 2 > len(rows) else "bit-flipped", "why": why}


def _tables(checkpoint: files.StrPath, layer: int) -> tuple[safetensors.Located, safetensors.Located]:
    names = [f"layers.{layer}.engram.embed.{part}" for part in ("weight", "scale")]
    located = safetensors.locate(checkpoint, names)
    return located[names[0]], located[names[1]]


def _revision(checkpoint: Path) -> str | None:
    """Find the commit a checkpoint was fetched at: from its snapshot's name, or the downloader's notes beside it."""
    if checkpoint.resolve().parent.name == "snapshots":
        return checkpoint.resolve().name
    try:
        notes = files.read_bytes(checkpoint / ".cache/huggingface/download/config.json.metadata", 4096)
    except LockstepError:
        return None
    first = notes.decode(errors="replace").split("\n", 1)[0].strip()
    return first if re.fullmatch(r"[0-9a-f]{40}", first) else None


def _stamps(checkpoint: files.StrPath, layer: int) -> dict[str, Any]:
    """Everything that the file system says of a layer's two files and that changes when they do."""
    return {table["file"]: files.stamp(table["path"]) for table in _tables(checkpoint, layer)}


def _row_blocks(checkpoint: files.StrPath, layer: int, first: int, end: int) -> Iterator[memoryview]:
    """Rows [first, end) of a table, interleaved, in blocks.

    A block is valid until ``_DEPTH`` more were given and another is asked for.

    The weights go straight from the file to their places, 264 bytes apart, by scattered reads; the scales, one u64 a
    row, by one strided assignment. So no Python loop touches a row.
    """
    weight, scale = _tables(checkpoint, layer)
    scales = memoryview(bytearray(_BLOCK_ROWS * SCALE_BYTES))
    buffers = [files.aligned(_BLOCK_ROWS * ROW_BYTES) for _ in range(_DEPTH + 1)]
    slots = [files.Slots(buffer, WEIGHT_BYTES, ROW_BYTES) for buffer in buffers]
    words = ROW_BYTES // SCALE_BYTES
    with files.Reader(weight["path"]) as weights_file, files.Reader(scale["path"]) as scales_file:

        def expect(row: int) -> None:
            count = max(min(_BLOCK_ROWS, end - row), 0)
            weights_file.expect(weight["offset"] + row * WEIGHT_BYTES, count * WEIGHT_BYTES)
            scales_file.expect(scale["offset"] + row * SCALE_BYTES, count * SCALE_BYTES)

        for ahead in range(_AHEAD):
            expect(first + ahead * _BLOCK_ROWS)
        for turn, row in enumerate(range(first, end, _BLOCK_ROWS)):
            count = min(_BLOCK_ROWS, end - row)
            buffer = buffers[turn % len(buffers)][: count * ROW_BYTES]
            expect(row + _AHEAD * _BLOCK_ROWS)
            weights_file.scatter(slots[turn % len(slots)], count, weight["offset"] + row * WEIGHT_BYTES)
            scales_file.fill(scales[: count * SCALE_BYTES], scale["offset"] + row * SCALE_BYTES)
            buffer.cast("Q")[words - 1 :: words] = scales[: count * SCALE_BYTES].cast("Q")
            yield buffer


def _said(item: Mapping[str, Any], rank: int | None) -> dict[str, Any]:
    """One layer of one rank, from a log's facts or from a look at its file."""
    if "packed" in item:
        own = item.get("rank")
        return {
            "rank": rank if own is None else own,
            "layer": item["layer"],
            "packed": item["packed"],
            "rows": item["rows"],
            "note": "by its log",
        }
    good = item["state"] == "ok"
    return {
        "rank": rank,
        "layer": item["layer"],
        "packed": good,
        # What a wrong or unproven file claims is no evidence of what the rank owns.
        "rows": item["rows"] if good else None,
        "note": f"{item['bytes']:,} bytes, split {item['split']}, sha256 {str(item['sha256'])[:12]}"
        if good
        else f"{item.get('fault') or item['state']}: {item['why']}",
    }


def _table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    cells = [["host", "rank", "layer", "packed", "rows", ""]]
    for row in rows:
        span = f"[{row['rows'][0]},{row['rows'][1]})" if row["rows"] else "-"
        cells.append(
            [row["host"], str(row["rank"]), str(row["layer"]), "yes" if row["packed"] else "NO", span, row["note"]]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[5]]).rstrip()
        for line in cells
    ]
