"""The Engram store says packed=True only for shards that have proven themselves."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import pytest
from lockstep_core import enginelog, engram
from lockstep_engine import engine, store
from lockstep_lab import checkpoint as lab

VOCAB = 998  # two small tables, 24 primes each


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    lab.make(path, VOCAB)
    return path


@pytest.fixture
def look(checkpoint, monkeypatch, caplog):
    """A callable: the store's check of a folder of shards; returns its lines."""
    monkeypatch.setattr(engine, "split", lambda: None)  # no SGLang here: the overlay's label says how it splits
    monkeypatch.setattr(store, "_held", [])

    def check(folder: Path, rank: int = 1, tp: int = 3, **env: str) -> list[str]:
        values = {
            "DSV41_PACKED_DIR": str(folder),
            "LOCKSTEP_ENGRAM_CHECKPOINT": str(checkpoint),
            "LOCKSTEP_ENGRAM_SPLIT": "rows",
            **env,
        }
        caplog.clear()
        with caplog.at_level(logging.INFO):
            store.check(rank, tp, values, logging.getLogger("lockstep"))
        return caplog.messages

    return check


def packed(lines: list[str]) -> dict[int, bool]:
    facts = enginelog.facts("\n".join(f"[2026-09-11 23:34:14 TP1] {line}" for line in lines))
    return {entry["layer"]: entry["packed"] for entry in facts["packed"]}


def shards(checkpoint: Path, folder: Path, rank: int = 1, tp: int = 3, split: str = "rows") -> Path:
    lab.make_shards(checkpoint, folder, tp, rank, split)
    return folder


def test_a_proven_shard_of_each_layer(checkpoint, tmp_path, look):
    lines = look(shards(checkpoint, tmp_path / "engram"))
    assert packed(lines) == {1: True, 14: True}
    assert len(lines) == 2


def test_the_line_of_the_real_model_to_the_letter(tmp_path, look):
    """Files of the real sizes (98 GB and 34 GB, all holes), so the line is the one in the logs of the real fleet."""
    rows = engram.REAL_CONFIG["engram_num_embeddings"]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(str({"text_config": engram.REAL_CONFIG}).replace("'", '"'))
    where = []
    for layer, count in zip((1, 14), rows, strict=True):
        name = f"layers.{layer}.engram.embed"
        header = (
            f'{{"{name}.weight":{{"dtype":"F8_E4M3","shape":[{count},256],"data_offsets":[0,{count * 256}]}},'
            f'"{name}.scale":{{"dtype":"F8_E8M0","shape":[{count},8],"data_offsets":[{count * 256},{count * 264}]}}}}'
        ).encode()
        with (folder / f"{layer}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + count * 264)
        where += [f'"{name}.{part}": "{layer}.safetensors"' for part in ("weight", "scale")]
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{", ".join(where)}}}}}')
    # Sizes and ranges of the real model, and its log line.
    for layer, size, end, total in ((1, 33792546880, 128002056, rows[0]), (14, 33793471936, 128005560, rows[1])):
        with (tmp_path / f"engram-l{layer}-r0of3.bin").open("wb") as file:
            file.write(b"DSV41EN1" + struct.pack("<5Q", layer, 0, end, total, 264))
            file.truncate(size)
    assert look(tmp_path, rank=0, LOCKSTEP_ENGRAM_CHECKPOINT=str(folder)) == [
        (
            "Exact nvme Engram layer=1 rank=0 rows=[0,128002056) cache=0.0GiB (0 slots, 4-way, 0.0% of owned rows) "
            "scales=0.0GiB io_threads=96 packed=True"
        ),
        (
            "Exact nvme Engram layer=14 rank=0 rows=[0,128005560) cache=0.0GiB (0 slots, 4-way, 0.0% of owned rows) "
            "scales=0.0GiB io_threads=96 packed=True"
        ),
    ]


def test_missing_is_said_with_the_path(checkpoint, tmp_path, look):
    folder = shards(checkpoint, tmp_path / "engram")
    (folder / "engram-l14-r1of3.bin").unlink()
    lines = look(folder)
    assert packed(lines) == {1: True, 14: False}
    assert lines[-1] == (
        f"[lockstep] Engram layer=14 rank=1 is not packed: {folder}/engram-l14-r1of3.bin: no such file"
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-264]), "size"),
        (lambda path: path.write_bytes(b"\0" * 4096 + path.read_bytes()[4096:]), "no Engram shard"),
        # Another layer's number, and rows that begin elsewhere, in a header that is whole.
        (lambda path: _patch(path, 8, struct.pack("<Q", 14)), "layer 14, not 1"),
        (lambda path: _patch(path, 16, struct.pack("<Q", 0)), "rows"),
        # One byte of the first row's weight, one of the last row's scale: both rows are always among the sample.
        (lambda path: _flip(path, 4096), "is not the checkpoint's"),
        (lambda path: _flip(path, path.stat().st_size - 1), "is not the checkpoint's"),
        (lambda path: path.write_bytes(b""), "ends too early"),
        (lambda path: (path.unlink(), path.mkdir()), "no regular file"),
    ],
)
def test_a_wrong_shard_is_not_packed_and_the_line_says_why(checkpoint, tmp_path, look, spoil, said):
    folder = shards(checkpoint, tmp_path / "engram")
    spoil(folder / "engram-l1-r1of3.bin")
    lines = look(folder)
    assert packed(lines) == {1: False, 14: True}
    (why,) = [line for line in lines if "is not packed" in line]
    assert said in why


def _patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _flip(path: Path, offset: int) -> None:
    _patch(path, offset, bytes([path.read_bytes()[offset] ^ 1]))


def test_another_ranks_shard_under_this_ranks_name(checkpoint, tmp_path, look):
    folder = shards(checkpoint, tmp_path / "engram", rank=2)
    for layer in (1, 14):
        (folder / f"engram-l{layer}-r2of3.bin").rename(folder / f"engram-l{layer}-r1of3.bin")
    lines = look(folder)
    assert packed(lines) == {1: False, 14: False}
    assert "rank 2, not 1" in lines[1]


def test_the_other_split_under_the_right_name(checkpoint, tmp_path, look):
    """24 columns divide by 2: at TP2 the two splits have other rows under the same name."""
    lines = look(shards(checkpoint, tmp_path / "engram", rank=1, tp=2, split="heads"), tp=2)
    assert packed(lines) == {1: False, 14: False}
    assert "split heads, not rows" in lines[1]


def test_a_label_that_the_engine_contradicts(checkpoint, tmp_path, look, monkeypatch):
    monkeypatch.setattr(engine, "split", lambda: "heads")
    lines = look(shards(checkpoint, tmp_path / "engram"))
    assert packed(lines) == {1: False, 14: False}
    assert lines[1].endswith("the overlay's label says split rows, this engine splits heads")


def test_without_the_checkpoint_nothing_is_proven(checkpoint, tmp_path, look):
    lines = look(shards(checkpoint, tmp_path / "engram"), LOCKSTEP_ENGRAM_CHECKPOINT=str(tmp_path / "nowhere"))
    assert packed(lines) == {}
    assert len(lines) == 1
    assert str(tmp_path / "nowhere") in lines[0]


def test_the_shard_stays_open_so_that_a_later_replacement_can_be_seen(checkpoint, tmp_path, look):
    path = shards(checkpoint, tmp_path / "engram") / "engram-l1-r1of3.bin"
    look(path.parent)
    inode = path.stat().st_ino
    path.rename(path.with_suffix(".old"))
    path.write_bytes(b"another file")
    opened = {entry.stat().st_ino for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    assert inode in opened
    assert path.stat().st_ino not in opened
    for held in store._held:
        held.close()
