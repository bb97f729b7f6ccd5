"""Layers as an engine with overlay2 keeps them, on a root made by hand; the real engine's: tests/machine."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path

import pytest
from lockstep_core import files, layers
from lockstep_core.errors import LockstepError

CHAINED = [
    "sha256:51c0c8ace48498d6f5fee6b0592cc06f2da0f3cbe09c5a34a97dce85c3889676",
    "sha256:2fce7f8ce91bcf0a1428b36e1024639fdbd9469eea762dba98aa749631885106",
]
CHAIN = f"sha256:{'a' * 64}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An engine's root with one layer: a piece of a header, a file, the padding behind it."""
    described = tmp_path / "image/overlay2/layerdb/sha256" / ("a" * 64)
    described.mkdir(parents=True)
    (described / "cache-id").write_text("held")
    (described / "size").write_text("5")
    (tmp_path / "overlay2/held/diff").mkdir(parents=True)
    (tmp_path / "overlay2/held/diff/x").write_bytes(b"hello")
    return tmp_path


def describe(root: Path, *entries: object) -> None:
    text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
    (root / "image/overlay2/layerdb/sha256" / ("a" * 64) / "tar-split.json.gz").write_bytes(
        gzip.compress(text.encode())
    )


def piece(data: bytes) -> dict[str, object]:
    return {"type": 2, "payload": base64.b64encode(data).decode()}


def test_a_layer_is_its_pieces_and_its_files_in_turn(root: Path) -> None:
    describe(root, piece(b"<head>"), {"type": 1, "name": "x", "size": 5}, piece(b"<pad>"), {"type": 1, "name": "dir"})
    assert b"".join(layers.tar(str(root), CHAIN)) == b"<head>hello<pad>"
    assert layers.size(str(root), CHAIN) == 5
    whole = f"sha256:{hashlib.sha256(b'<head>hello<pad>').hexdigest()}"
    packed = layers.compressed(layers.tar(str(root), CHAIN), whole)
    assert gzip.decompress(packed) == b"<head>hello<pad>"
    assert packed == layers.compressed(layers.tar(str(root), CHAIN), whole)  # no time in it
    with pytest.raises(LockstepError, match="not what its name says"):
        layers.compressed(layers.tar(str(root), CHAIN), CHAIN)


@pytest.mark.parametrize("name", ["../diff/x", "sub/x", "sub", "..", ""])
def test_a_name_leads_nowhere_outside_the_layer(root: Path, name: str) -> None:
    (root / "overlay2/held/diff/sub").symlink_to(root / "overlay2/held/diff")
    assert b"".join(files.exact_blocks(root / "overlay2/held/diff", "/./x", 5)) == b"hello"
    describe(root, {"type": 1, "name": name, "size": 5})
    with pytest.raises(LockstepError, match="cannot read"):
        list(layers.tar(str(root), CHAIN))


@pytest.mark.parametrize("entry", [{}, {"type": 1, "name": 7, "size": 5}, {"type": 2, "payload": "%"}, "x"])
def test_what_is_no_tar_split_is_said(root: Path, entry: object) -> None:
    describe(root, entry)
    with pytest.raises(LockstepError, match="the engine does not keep its layers as this version knows it"):
        list(layers.tar(str(root), CHAIN))
    (root / "image/overlay2/layerdb/sha256" / ("a" * 64) / "size").write_text("")
    with pytest.raises(LockstepError, match="the engine does not keep its layers as this version knows it"):
        layers.size(str(root), CHAIN)


def test_the_id_of_a_layer_on_those_below_it() -> None:
    # By sha256sum: printf '%s %s' sha256:$(printf a | sha256sum) sha256:$(printf b | sha256sum), and so on.
    diff_ids = [f"sha256:{hashlib.sha256(name).hexdigest()}" for name in (b"a", b"b", b"c")]
    assert layers.chain_ids(diff_ids)[0] == "sha256:ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert layers.chain_ids(diff_ids)[1:] == CHAINED
    assert layers.chain_ids([]) == []
