"""Safetensors files: their headers, and where in which file of a checkpoint a tensor's bytes lie.

Format: 8 bytes little-endian header length, a JSON object ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``
whose offsets count from the end of the header, then the data.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from . import files
from .errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Iterable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Bytes of the length field, of the shortest header ("{}"), and of the longest that the reference implementation reads.
_LENGTH_BYTES = 8
_HEADER_MINIMUM = 2
_HEADER_LIMIT = 100_000_000
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64,
}  # fmt: skip


class Tensor(TypedDict):
    """One tensor: ``offset`` is its first byte counted from the start of the file."""

    dtype: str
    shape: list[int]
    offset: int
    bytes: int


class Header(TypedDict):
    """A file's header: its tensors by name, the free text fields, the whole file's size in bytes."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    size: int


class Located(Tensor):
    """A tensor and the file (name within the checkpoint, and path) that holds it."""

    file: str
    path: str
    file_bytes: int


def header(path: files.StrPath) -> Header:
    """Read and check a header. LockstepError when it is malformed or the file is shorter than it promises."""
    name = os.fspath(path)
    with files.Reader(path) as reader:
        length = int.from_bytes(reader.read(0, _LENGTH_BYTES), "little") if reader.size >= _LENGTH_BYTES else -1
        if not _HEADER_MINIMUM <= length <= min(_HEADER_LIMIT, reader.size - _LENGTH_BYTES):
            raise LockstepError(
                f"{name} is no safetensors file",
                found=f"{reader.size:,} bytes, header length {length}",
                next_step="fetch the file again",
            )
        text, size = reader.read(_LENGTH_BYTES, length), reader.size
    try:
        raw = json.loads(text)
        metadata = {str(key): str(value) for key, value in raw.pop("__metadata__", {}).items()}
        tensors = {key: _tensor(value, _LENGTH_BYTES + length) for key, value in raw.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise LockstepError(
            f"{name} has a malformed safetensors header",
            found=f"{type(error).__name__}: {error}",
            next_step="fetch the file again",
        ) from error
    end = max((tensor["offset"] + tensor["bytes"] for tensor in tensors.values()), default=_LENGTH_BYTES + length)
    if end > size:
        raise LockstepError(
            f"{name} is cut short",
            found=f"{size:,} bytes",
            expected=f"{end:,} bytes",
            next_step="the download or copy did not end; fetch the file again",
        )
    return {"tensors": tensors, "metadata": metadata, "size": size}


def locate(checkpoint: files.StrPath, names: Iterable[str]) -> dict[str, Located]:
    """Find tensors in a checkpoint directory, by its index or in its single file.

    Raises LockstepError when the checkpoint, one of the files or one of the tensors is missing.
    """
    root = Path(checkpoint)
    indexed = (root / INDEX).exists()
    if not indexed and not (root / SINGLE).exists():
        raise LockstepError(
            f"no checkpoint in {root}",
            found="neither an index nor a single file" if root.is_dir() else "no such directory",
            expected=f"{INDEX} or {SINGLE}",
            next_step="set engram_checkpoint to the directory of the checkpoint, or fetch it there",
        )
    where = _from_index(root, list(names)) if indexed else dict.fromkeys(names, SINGLE)
    headers = {file: header(root / file) for file in sorted(set(where.values()))}
    located: dict[str, Located] = {}
    for name, file in where.items():
        tensor = headers[file]["tensors"].get(name)
        if tensor is None:
            raise LockstepError(
                f"tensor {name} is not in {root / file}",
                expected=f"there, by {INDEX}" if indexed else None,
                next_step="the checkpoint is not the one expected, or its index belongs to another",
            )
        located[name] = {**tensor, "file": file, "path": str(root / file), "file_bytes": headers[file]["size"]}
    return located


def _from_index(root: Path, names: list[str]) -> dict[str, str]:
    index = files.read_json(root / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise LockstepError(f"{root / INDEX} has no weight_map", next_step="fetch the file again")
    absent = [name for name in names if not isinstance(weight_map.get(name), str)]
    if absent:
        raise LockstepError(
            f"{root / INDEX} does not name {', '.join(absent)}",
            found=f"{len(weight_map)} other tensors",
            next_step="this checkpoint has no Engram table for that layer; check engram_checkpoint and engram_layers",
        )
    where = {name: str(weight_map[name]) for name in names}
    for file in where.values():
        # A name from a downloaded file must not lead out of its directory.
        if Path(file).name != file:
            raise LockstepError(f"{root / INDEX} names a file elsewhere", found=file, expected="a plain file name")
    return where


def _tensor(raw: dict[str, object], data_start: int) -> Tensor:
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)):
        raise TypeError("dtype, shape or data_offsets of the wrong kind")
    begin, end = (int(value) for value in offsets)
    sizes = [int(value) for value in shape]
    if min([begin, end - begin, *sizes]) < 0:
        raise ValueError(f"offsets {offsets} or shape {shape} below zero")
    if dtype in _DTYPE_BITS and math.prod(sizes) * _DTYPE_BITS[dtype] != (end - begin) * 8:
        raise ValueError(f"{dtype} {shape} does not fill bytes {begin} to {end}")
    return {"dtype": dtype, "shape": sizes, "offset": data_start + begin, "bytes": end - begin}
