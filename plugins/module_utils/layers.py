"""An image's layers as a Docker Engine with the driver overlay2 keeps them, and the manifest that names them elsewhere.

``docker push`` compresses every layer before it knows whether the registry has it, one core at tens of megabytes a
second. The engine keeps a layer as files and as ``tar-split``: all that is not files' content, in the order of the
layer's tar. Put together they are that tar to the byte, as the engine itself does it for a push or a save
(github.com/vbatts/tar-split). That is read only, and the engine's own business: so whoever takes such a tar must hold
it against the layer's diff id, its SHA-256, and have another way when it differs.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import zlib
from typing import TYPE_CHECKING, Any

from . import files
from .errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DRIVER = "overlay2"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
# A layer up to here is compressed: it takes a second or two. A bigger one takes longer to compress than to move.
COMPRESS_UP_TO = 64 << 20
BLOCK = 1 << 20
# Bytes of what describes a layer; a layer of a million files has some 200 MB of it.
DESCRIBED_LIMIT = 1 << 30


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """Return for each DiffID, listed bottom up, the id that the layer has on those below it.

    chain(L0) = L0; chain(L0..Ln) = sha256(chain(L0..Ln-1) + " " + Ln), digests in their ``sha256:`` spelling (OCI image
    spec, "Layer ChainID").
    """
    chain: list[str] = []
    for diff_id in diff_ids:
        below = f"{chain[-1]} {diff_id}".encode() if chain else None
        chain.append(f"sha256:{hashlib.sha256(below).hexdigest()}" if below else diff_id)
    return chain


def config(root: str, image_id: str) -> bytes:
    """Read an image's configuration, which its Id is the hash of. ``root`` is the engine's ``DockerRootDir``."""
    data = files.read_bytes(f"{root}/image/{DRIVER}/imagedb/content/{image_id.replace(':', '/')}")
    _proven(image_id, f"sha256:{hashlib.sha256(data).hexdigest()}")
    return data


def size(root: str, chain_id: str) -> int:
    """Bytes of the files of a layer, as the engine counted them."""
    described = f"{_described(root, chain_id)}/size"
    text = files.read_bytes(described).decode(errors="replace").strip()
    if not text.isdecimal():
        raise _strange(described, text)
    return int(text)


def tar(root: str, chain_id: str) -> Iterator[bytes]:
    """Yield the tar of a layer in blocks of about ``BLOCK`` bytes. LockstepError when the engine keeps it otherwise."""
    return _blocks(_pieces(root, chain_id))


def compressed(blocks: Iterable[bytes], diff_id: str) -> bytes:
    """Gzip a layer; the same bytes for the same layer, with the same zlib. LockstepError when it is not ``diff_id``."""
    digest, packer = hashlib.sha256(), zlib.compressobj(wbits=31)
    out = []
    for block in blocks:
        digest.update(block)
        out.append(packer.compress(block))
    _proven(diff_id, f"sha256:{digest.hexdigest()}")
    return b"".join([*out, packer.flush()])


def manifest(image_id: str, config_size: int, layers: Sequence[dict[str, Any]]) -> bytes:
    """Write the manifest of an image; ``layers`` are descriptors: ``{"mediaType", "digest", "size"}``."""
    own = {"mediaType": CONFIG_TYPE, "digest": image_id, "size": config_size}
    return json.dumps(
        {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": own, "layers": list(layers)}, sort_keys=True
    ).encode()


def _described(root: str, chain_id: str) -> str:
    return f"{root}/image/{DRIVER}/layerdb/{chain_id.replace(':', '/')}"


def _pieces(root: str, chain_id: str) -> Iterator[bytes]:
    described = _described(root, chain_id)
    held = files.read_bytes(f"{described}/cache-id").decode().strip()
    packed = files.read_bytes(f"{described}/tar-split.json.gz", DESCRIBED_LIMIT)
    try:
        for line in gzip.GzipFile(fileobj=io.BytesIO(packed)):
            entry = json.loads(line)
            if entry["type"] == 2:  # noqa: PLR2004 (tar-split's number for what is no file's content)
                yield base64.b64decode(entry.get("payload") or "", validate=True)
            elif entry.get("size"):
                name = os.fsdecode(base64.b64decode(entry["name_raw"])) if entry.get("name_raw") else entry["name"]
                yield from files.exact_blocks(f"{root}/{DRIVER}/{held}/diff", name, entry["size"])
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _strange(f"{described}/tar-split.json.gz", repr(error)) from error


def _strange(path: str, found: str) -> LockstepError:
    return LockstepError(
        "the engine does not keep its layers as this version knows it",
        found=f"{path}: {found}",
        expected="a layer store of overlay2, with tar-split of version 1",
        next_step="hand on with docker push",
    )


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    block = bytearray()
    for piece in pieces:
        block += piece
        if len(block) >= BLOCK:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _proven(expected: str, found: str) -> None:
    if found != expected:
        raise LockstepError(
            "what the engine keeps on disk is not what its name says",
            found=found,
            expected=expected,
            next_step="hand on with docker push",
        )
