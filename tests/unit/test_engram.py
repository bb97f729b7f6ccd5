"""The Engram tables: layout and sizes against published figures, shards against bytes put together here by hand."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep_core import engram, files
from lockstep_core.errors import LockstepError
from lockstep_lab import checkpoint as lab

# 48 primes from 997 on: 25,000 rows a layer, so that a shard is more than one block of 16,384 rows.
VOCAB = 998
SEED = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    lab.make(path, VOCAB, SEED)
    return path


def table(checkpoint: Path, layer: int) -> list[bytes]:
    """The rows of a layer's table, 264 bytes each, read the plain way."""
    weight_map = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    parts = []
    for part, width in (("weight", 256), ("scale", 8)):
        name = f"layers.{layer}.engram.embed.{part}"
        data = (checkpoint / weight_map[name]).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
        body = data[8 + length + begin : 8 + length + end]
        parts.append([body[at : at + width] for at in range(0, len(body), width)])
    return [weight + scale for weight, scale in zip(*parts, strict=True)]


def expected(checkpoint: Path, layer: int = 1, tp: int = 3, rank: int = 1, split: str = "rows") -> engram.Expected:
    return engram.expected_shards(engram.read_config(checkpoint), tp, rank, split, [layer])[0]


# --- layout -----------------------------------------------------------------------------------------------------------


def test_the_real_tables_follow_from_the_primes() -> None:
    started = time.process_time()
    tables = engram.layout(engram.REAL_CONFIG)
    assert time.process_time() - started < 2
    assert list(tables) == [1, 14]
    # The published first and last primes, and engram_num_embeddings.
    assert tables[1]["columns"][:2] == [16000057, 16000079]
    assert tables[1]["columns"][-1] == 16000463
    assert (tables[14]["columns"][0], tables[14]["columns"][-1]) == (16000477, 16000889)
    assert [table["rows"] for table in tables.values()] == [384006168, 384016682]
    assert [len(table["columns"]) for table in tables.values()] == [24, 24]


def literal_rule(layers: int, sizes: int, heads: int, vocab: int) -> list[list[int]]:
    """The rule word by word: each (layer, n-gram size) searches again from vocab - 1 for primes not used before."""
    used: set[int] = set()
    columns: list[list[int]] = []
    for _ in range(layers):
        layer: list[int] = []
        for _ in range(sizes):
            candidate = vocab - 1
            for _ in range(heads):
                candidate += 1
                while candidate in used or any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)):
                    candidate += 1
                used.add(candidate)
                layer.append(candidate)
        columns.append(layer)
    return columns


@pytest.mark.parametrize(
    ("layers", "sizes", "heads", "vocab"), [(2, 3, 8, 3), (1, 1, 1, 2), (3, 2, 4, 997), (2, 3, 8, 16000)]
)
def test_one_walk_gives_what_the_rule_says_word_by_word(layers: int, sizes: int, heads: int, vocab: int) -> None:
    assert engram.prime_columns(layers, sizes, heads, vocab) == literal_rule(layers, sizes, heads, vocab)


def test_primes_are_those_of_factor() -> None:
    """Coreutils' factor decides; among the numbers are strong pseudoprimes to base 2 and Carmichael numbers."""
    numbers = [*range(2000), 2047, 3277, 4033, 561, 1105, 1729, 3215031751, 3825123056546413051, 2**61 - 1]
    said = subprocess.run(["factor", *map(str, numbers)], check=True, capture_output=True, text=True).stdout
    primes = {int(line.split(":")[0]) for line in said.splitlines() if line.split(": ")[1:] == [line.split(":")[0]]}
    assert {number for number in numbers if engram._is_prime(number)} == primes


def test_a_config_whose_counts_do_not_follow_is_refused() -> None:
    wrong = {**engram.REAL_CONFIG, "engram_num_embeddings": [384006168, 384016683]}
    with pytest.raises(LockstepError, match="does not follow") as caught:
        engram.layout(wrong)
    assert (caught.value.found, caught.value.expected) == ([384006168, 384016683], [384006168, 384016682])
    with pytest.raises(LockstepError, match="no Engram tables"):
        engram.layout({"text_config": {"vocab_size": 5}})
    with pytest.raises(LockstepError, match="row width"):
        engram.layout({**engram.REAL_CONFIG, "engram_head_dim": 128})


def test_the_keys_may_stand_under_text_config() -> None:
    assert engram.layout({"text_config": engram.REAL_CONFIG}) == engram.layout(engram.REAL_CONFIG)


# --- ranges and sizes -------------------------------------------------------------------------------------------------


def test_the_sizes_are_the_published_ones() -> None:
    assert engram.shard_sizes(tp=2, split="heads")[1] == 101379729008
    assert engram.shard_sizes(3, "heads") == [67585373072, 67586053664, 67586630240]
    rows = [
        {shard["layer"]: shard["bytes"] for shard in engram.expected_shards(engram.REAL_CONFIG, 3, rank, "rows")}
        for rank in range(3)
    ]
    assert [sizes[1] for sizes in rows] == [33792546880] * 3
    assert [sizes[14] for sizes in rows] == [33793471936, 33793472200, 33793472200]


def test_the_rows_are_those_of_a_real_boot_log() -> None:
    """A08's lines of ranks 0 and 2 at TP3: ``rows=[0,128002056)``, …"""
    ranges = {
        (rank, shard["layer"]): shard["rows"]
        for rank in range(3)
        for shard in engram.expected_shards(engram.REAL_CONFIG, 3, rank, "rows")
    }
    assert ranges[0, 1] == [0, 128002056]
    assert ranges[0, 14] == [0, 128005560]
    assert ranges[2, 1] == [256004112, 384006168]
    assert ranges[2, 14] == [256011121, 384016682]


@given(st.integers(1, 64), st.sampled_from(engram.SPLITS), st.sampled_from([1, 14]))
def test_every_row_has_exactly_one_rank(tp: int, split: str, layer: int) -> None:
    one = engram.layout(engram.REAL_CONFIG)[layer]
    ranges = [engram.shard_range(one, tp, rank, split) for rank in range(tp)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == one["rows"]
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert all(first < end for first, end in ranges)


@given(st.integers(1, 64))
def test_heads_keeps_columns_whole_where_they_divide_and_is_rows_elsewhere(tp: int) -> None:
    one = engram.layout(engram.REAL_CONFIG)[1]
    ends = {sum(one["columns"][:count]) for count in range(25)}
    for rank in range(tp):
        both = [engram.shard_range(one, tp, rank, split) for split in ("heads", "rows")]
        if 24 % tp == 0:
            assert set(both[0]) <= ends
            assert both[0][1] - both[0][0] == sum(one["columns"][24 // tp * rank : 24 // tp * (rank + 1)])
        else:
            assert both[0] == both[1]


def test_an_unknown_split_rank_or_layer_is_refused() -> None:
    one = engram.layout(engram.REAL_CONFIG)[1]
    with pytest.raises(LockstepError, match="split"):
        engram.shard_range(one, 3, 0, "columns")
    for tp, rank in ((3, 3), (3, -1), (0, 0)):
        with pytest.raises(LockstepError, match="rank"):
            engram.shard_range(one, tp, rank, "rows")
    with pytest.raises(LockstepError, match="no Engram table for layer 2") as caught:
        engram.expected_shards(engram.REAL_CONFIG, 3, 0, "rows", [1, 2])
    assert caught.value.found == "tables for 1, 14"


# --- header -----------------------------------------------------------------------------------------------------------


def test_the_header_is_six_numbers_zeros_and_our_fields_from_byte_256() -> None:
    header = engram.pack_header(14, [128005560, 256011121], 384016682, {"split": "rows"})
    assert len(header) == 4096
    assert header[:8] == b"DSV41EN1"
    assert struct.unpack("<5Q", header[8:48]) == (14, 128005560, 256011121, 384016682, 264)
    assert header[48:256] == bytes(208)
    assert header[256:].rstrip(b"\0") == b'{"split":"rows"}'
    assert engram.parse_header(header) == {
        "layer": 14,
        "rows": [128005560, 256011121],
        "total_rows": 384016682,
        "row_bytes": 264,
        "own": {"split": "rows"},
    }


@pytest.mark.parametrize("tail", [b"", b"not json", b"[1]"])
def test_a_header_of_another_tool_has_no_own_fields(tail: bytes) -> None:
    """The constant is the one that the packers and loaders in the wild hold; on disk it reads DSV1EN41."""
    header = struct.pack("<6Q", 0x31344E4531565344, 1, 0, 5, 10, 264).ljust(256, b"\0") + tail
    assert engram.parse_header(header.ljust(4096, b"\0"))["own"] == {}


def test_other_bytes_are_no_shard() -> None:
    for data in (b"", bytes(4096), b"DSV41EN1"):
        with pytest.raises(LockstepError, match="no Engram shard"):
            engram.parse_header(data)
    with pytest.raises(LockstepError, match="do not fit"):
        engram.pack_header(1, [0, 1], 1, {"x": "y" * 4000})


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "rank", "split"), [(1, 0, "rows"), (3, 1, "rows"), (2, 1, "heads"), (5, 4, "heads")])
def test_a_shard_is_the_header_and_the_rows_of_the_rank(
    tp: int, rank: int, split: str, made: Path, tmp_path: Path
) -> None:
    for layer in (1, 14):
        rows = table(made, layer)
        want = expected(made, layer, tp, rank, split)
        seen = dict.fromkeys(("write", "verify"), 0)

        def count(stage: str, size: int, seen: dict[str, int] = seen) -> None:
            seen[stage] += size

        manifest = engram.pack(made, tmp_path, layer, rank, tp, split, count)
        data = (tmp_path / f"engram-l{layer}-r{rank}of{tp}.bin").read_bytes()
        first, end = want["rows"]
        assert struct.unpack("<6Q", data[:48])[1:] == (layer, first, end, len(rows), 264)
        assert data[4096:] == b"".join(rows[first:end])
        assert seen == {"write": len(data), "verify": len(data)}
        assert len(data) == want["bytes"]
        assert manifest["sha256"] == hashlib.sha256(data).hexdigest()


def test_the_manifest_says_what_was_packed_from_where(made: Path, tmp_path: Path) -> None:
    manifest = engram.pack(made, tmp_path, 1, 0, 3, "rows")
    path = tmp_path / "engram-l1-r0of3.bin"
    rows = sum(engram.prime_columns(1, 3, 8, VOCAB)[0])
    names = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]
    assert json.loads((tmp_path / "engram-l1-r0of3.bin.manifest.json").read_text()) == manifest
    assert manifest == {
        "format": 1,
        "file": path.name,
        "layer": 1,
        "rank": 0,
        "tp": 3,
        "rows": [0, rows // 3],
        "split": "rows",
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "mtime_ns": path.stat().st_mtime_ns,
        "checkpoint": {
            "revision": "fb2764a5cf321eaa5070ca8f9e892818f477c16d",
            "files": {name: (made / name).stat().st_size for name in names},
        },
        "version": 1,
    }


def test_the_same_checkpoint_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    digests = set()
    for name in "ab":
        (tmp_path / name).mkdir()
        digests.add(engram.pack(made, tmp_path / name, 14, 2, 3, "rows")["sha256"])
    assert len(digests) == 1


def test_rows_and_samples_come_out_alike_from_shard_and_checkpoint(made: Path, tmp_path: Path) -> None:
    engram.pack(made, tmp_path, 14, 1, 3, "rows")
    path = tmp_path / "engram-l14-r1of3.bin"
    header = engram.read_header(path)
    first, end = header["rows"]
    rows = table(made, 14)
    wanted = [end - 1, first, first + 7]
    assert engram.read_rows(path, header, wanted) == b"".join(rows[row] for row in wanted)
    assert engram.checkpoint_rows(made, 14, wanted) == b"".join(rows[row] for row in wanted)
    assert engram.compare_sample(path, made, 64, seed=0) == []
    with pytest.raises(LockstepError, match=f"row {end} is not in"):
        engram.read_rows(path, header, [end])
    with pytest.raises(LockstepError, match="is not in layer 14's table"):
        engram.checkpoint_rows(made, 14, [len(rows)])


def test_a_differing_row_is_found(made: Path, tmp_path: Path) -> None:
    engram.pack(made, tmp_path, 1, 1, 3, "rows")
    path = tmp_path / "engram-l1-r1of3.bin"
    first, end = expected(made)["rows"]
    broken = end - 1
    with path.open("r+b") as file:
        file.seek(4096 + (broken - first) * 264 + 260)
        file.write(b"\xff")
    assert engram.compare_sample(path, made, 64, seed=0) == [broken]
    assert engram.compare_all(path, made, expected(made)) == broken


def test_a_sample_has_the_ends_and_no_row_twice() -> None:
    rows = engram.sample_rows(1000, 5000, 64, seed=7)
    assert len(set(rows)) == 64
    assert (rows[0], rows[-1]) == (1000, 4999)
    assert engram.sample_rows(1000, 5000, 64, seed=7) == rows != engram.sample_rows(1000, 5000, 64, seed=8)
    assert engram.sample_rows(0, 3, 64, seed=0) == [0, 1, 2]
    assert engram.sample_rows(4, 5, 64, seed=0) == [4]
    assert engram.sample_rows(4, 4, 64, seed=0) == []


def remake(source: Path, target: Path, **text_config: object) -> Path:
    """A checkpoint with other values in its config, its files those of ``source``."""
    target.mkdir()
    for path in source.iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    config["text_config"] |= text_config
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_table_of_another_shape_than_the_config_says_is_refused(made: Path, tmp_path: Path) -> None:
    columns = engram.prime_columns(2, 3, 8, 500)
    other = remake(
        made,
        tmp_path / "other",
        engram_vocab_size=500,
        engram_num_embeddings=[sum(layer) for layer in columns],
    )
    with pytest.raises(LockstepError, match=r"weight table of layer 1 .* wrong shape") as caught:
        engram.pack(other, tmp_path, 1, 2, 3, "rows")
    rows = sum(engram.prime_columns(1, 3, 8, VOCAB)[0])
    assert caught.value.rank == 2
    assert caught.value.found == f"F8_E4M3 [{rows}, 256]"
    assert caught.value.expected == f"F8_E4M3 [{sum(columns[0])}, 256] by config.json"
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"no checkpoint in .*/none"):
        engram.pack(tmp_path / "none", tmp_path, 1, 0, 3, "rows")


def own_copy(made: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may write to."""
    shutil.copytree(made, tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.parametrize("how", ["written to", "replaced", "touched", "shortened"])
def test_a_checkpoint_that_changes_halfway_gives_no_shard(how: str, made: Path, tmp_path: Path) -> None:
    checkpoint = own_copy(made, tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "engram-l1-r1of3.bin").write_bytes(b"what was there")
    tables = checkpoint / "model-00001-of-00003.safetensors"
    done: list[str] = []

    def change(stage: str, _: int) -> None:
        if stage != "write" or done:
            return
        done.append(how)
        if how == "written to":
            with tables.open("r+b") as file:
                file.seek(-9, 2)
                file.write(b"x")
        elif how == "replaced":
            shutil.copy2(tables, tmp_path / "new")
            (tmp_path / "new").rename(tables)
        elif how == "touched":
            os.utime(tables)
        else:
            os.truncate(tables, tables.stat().st_size - 1)

    with pytest.raises(LockstepError, match=r"changed while layer 1 was packed from it|is cut short"):
        engram.pack(checkpoint, out, 1, 1, 3, "rows", change)
    assert done == [how]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"engram-l1-r1of3.bin": b"what was there"}


def test_a_packing_that_was_interrupted_begins_anew_when_the_checkpoint_changed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MARK_EVERY", 1 << 20)
    monkeypatch.setattr(engram, "_BLOCK_ROWS", 1024)
    checkpoint = own_copy(made, tmp_path)
    out = tmp_path / "out"
    out.mkdir()

    def interrupted(change: bool) -> dict[str, int]:
        told: dict[str, int] = {}

        def stop(stage: str, count: int) -> None:
            told[stage] = told.get(stage, 0) + count
            if told.get("write", 0) > 1_700_000:
                raise SystemExit(143)

        with pytest.raises(SystemExit):
            engram.pack(checkpoint, out, 1, 1, 3, "rows", stop)
        assert [path.name for path in out.glob("*.json")] == ["engram-l1-r1of3.bin.partial.json"]
        if change:
            os.utime(checkpoint / "model-00002-of-00003.safetensors")
        told.clear()
        engram.pack(checkpoint, out, 1, 1, 3, "rows", lambda stage, n: told.update({stage: told.get(stage, 0) + n}))
        return told

    size = expected(made)["bytes"]
    resumed = interrupted(change=False)
    assert resumed["resumed"] == resumed["resume"] > 1_000_000
    assert resumed["resumed"] + resumed["write"] == size
    (out / "engram-l1-r1of3.bin").unlink()
    engram.manifest_path(out / "engram-l1-r1of3.bin").unlink()
    anew = interrupted(change=True)
    assert (anew["write"], "resumed" in anew) == (size, False)
    assert engram.compare_all(out / "engram-l1-r1of3.bin", made, expected(made)) is None


# --- what stands under a name -----------------------------------------------------------------------------------------


@pytest.fixture
def packed(made: Path, tmp_path: Path) -> Path:
    engram.pack(made, tmp_path, 1, 1, 3, "rows")
    return tmp_path / "engram-l1-r1of3.bin"


def state(path: Path, made: Path, **other: Any) -> tuple[str, str | None]:
    found = engram.inspect_shard(path, {**expected(made), **other}, engram.checkpoint_identity(made, 1))
    return found["state"], found["why"]


def test_a_packed_shard_is_ok(packed: Path, made: Path) -> None:
    stat = packed.stat()
    assert engram.inspect_shard(packed, expected(made), engram.checkpoint_identity(made, 1)) == {
        "layer": 1,
        "file": packed.name,
        "state": "ok",
        "fault": None,
        "why": None,
        "bytes": stat.st_size,
        "rows": expected(made)["rows"],
        "split": "rows",
        "sha256": hashlib.sha256(packed.read_bytes()).hexdigest(),
        "inode": stat.st_ino,
        "mtime_ns": stat.st_mtime_ns,
    }


def test_nothing_there_is_missing(made: Path, tmp_path: Path) -> None:
    assert state(tmp_path / "none", made) == ("missing", "no such file")


def test_what_no_manifest_vouches_for_is_missing(packed: Path, made: Path) -> None:
    os.utime(packed)
    assert state(packed, made) == ("missing", "written to after it was packed")
    engram.manifest_path(packed).write_text("{")
    assert state(packed, made) == ("missing", "no manifest vouches for the file that is there")
    engram.manifest_path(packed).unlink()
    assert state(packed, made) == ("missing", "no manifest vouches for the file that is there")


def test_another_split_or_tp_under_the_right_name_is_wrong(made: Path, tmp_path: Path) -> None:
    """The two cases of the field: a shard of the other split, and one of another TP size that was renamed."""
    right = tmp_path / "engram-l1-r1of3.bin"
    engram.pack(made, tmp_path, 1, 1, 3, "heads")
    (result, why) = state(right, made)
    assert result == "wrong"
    assert why is not None
    assert why.startswith("split heads, not rows; rows [")
    engram.pack(made, tmp_path, 1, 1, 2, "heads")
    (tmp_path / "engram-l1-r1of2.bin").rename(right)
    found = engram.inspect_shard(right, expected(made))
    error = engram.wrong_shard(right, found, expected(made))
    assert "tp 2, not 3" in str(error)
    assert error.rank == 1
    assert str(error.found).startswith(
        f"{right.stat().st_size:,} bytes, wrong-tp: split heads, not rows; tp 2, not 3; rows ["
    )
    assert str(error.expected).startswith(f"{expected(made)['bytes']:,} bytes, split rows, tp 3, rows [")
    assert error.next_step is not None
    assert "set_aside" in error.next_step


def test_a_shard_of_an_older_tool_is_judged_by_its_range(packed: Path, made: Path) -> None:
    """Such a shard has no own fields and no manifest; its range still says what it is."""
    engram.manifest_path(packed).unlink()
    with packed.open("r+b") as file:
        file.seek(256)
        file.write(bytes(4096 - 256))
    assert state(packed, made)[0] == "missing"
    assert engram.inspect_shard(packed, expected(made))["split"] is None
    assert state(packed, made, rows=[0, 8], bytes=4096 + 8 * 264)[0] == "wrong"


def test_a_cut_or_foreign_file_is_wrong(packed: Path, made: Path) -> None:
    os.truncate(packed, packed.stat().st_size - 1)
    (result, why) = state(packed, made)
    assert (result, why) == ("wrong", f"size {packed.stat().st_size}, not {expected(made)['bytes']}")
    packed.write_bytes(b"hello")
    assert state(packed, made)[0] == "wrong"


def test_a_shard_of_another_checkpoint_is_wrong(packed: Path, made: Path) -> None:
    now = engram.checkpoint_identity(made, 1)
    other = {**now, "revision": "0" * 40}
    found = engram.inspect_shard(packed, expected(made), other)
    assert (found["state"], found["why"]) == (
        "wrong",
        f"packed from revision {now['revision']}, not {'0' * 40}",
    )
    sizes = {**now, "revision": None, "files": dict.fromkeys(now["files"], 1)}
    assert engram.inspect_shard(packed, expected(made), sizes)["state"] == "wrong"
    assert engram.inspect_shard(packed, expected(made), {**now, "revision": None})["state"] == "ok"


def test_the_revision_comes_from_the_snapshots_name_too(made: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / ("ab" * 20)
    snapshot.parent.mkdir()
    remake(made, snapshot)
    (snapshot / ".cache").unlink()
    assert engram.checkpoint_identity(snapshot, 1)["revision"] == "ab" * 20
    other = remake(made, tmp_path / "plain")
    (other / ".cache").unlink()
    assert engram.checkpoint_identity(other, 1)["revision"] is None


# --- proving what no manifest vouches for -----------------------------------------------------------------------------


def test_a_good_shard_without_its_manifest_is_proven_and_not_touched(packed: Path, made: Path) -> None:
    before, manifest = packed.stat(), engram.manifest_path(packed).read_bytes()
    engram.manifest_path(packed).unlink()
    engram.verify(made, packed, expected(made))
    assert engram.manifest_path(packed).read_bytes() == manifest
    assert packed.stat().st_mtime_ns == before.st_mtime_ns
    assert packed.stat().st_ino == before.st_ino
    assert state(packed, made) == ("ok", None)


def test_a_shard_that_was_copied_is_proven_by_its_hash(packed: Path, made: Path) -> None:
    os.utime(packed, (1, 1))
    engram.verify(made, packed, expected(made))
    assert state(packed, made) == ("ok", None)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_shard_with_other_content_is_not_proven(*, with_manifest: bool, packed: Path, made: Path) -> None:
    with packed.open("r+b") as file:
        file.seek(4096 + 264 * 17 + 3)
        file.write(b"\x00\x01\x02")
    if not with_manifest:
        engram.manifest_path(packed).unlink()
    with pytest.raises(LockstepError, match="does not hold what its name and header say") as caught:
        engram.verify(made, packed, expected(made))
    if not with_manifest:
        first = expected(made)["rows"][0] + 17
        assert str(caught.value.found).startswith("bit-flipped: 1 of ")
        assert str(caught.value.found).endswith(f" rows looked at differ, first row {first}")
    assert state(packed, made)[0] == "missing"


def test_a_wrong_manifest_does_not_condemn_a_right_shard(packed: Path, made: Path) -> None:
    path = engram.manifest_path(packed)
    right = json.loads(path.read_text())
    for said in ({"sha256": "0" * 64}, {"tp": 2, "sha256": "0" * 64}, {"sha256": "none"}):
        path.write_text(json.dumps(right | said))
        os.utime(packed)
        engram.verify(made, packed, expected(made))
        assert json.loads(path.read_text())["sha256"] == right["sha256"]
        assert state(packed, made) == ("ok", None)


def test_a_shard_that_is_written_to_meanwhile_is_not_vouched_for(packed: Path, made: Path) -> None:
    engram.manifest_path(packed).unlink()
    with pytest.raises(LockstepError, match="was written to while it was verified"):
        engram.verify(made, packed, expected(made), lambda _: os.utime(packed))
    assert not engram.manifest_path(packed).exists()


# --- every fault by its name ------------------------------------------------------------------------------------------


def damaged(path: Path, offset: int, data: bytes, *, unseen: bool = True) -> None:
    """Write into a shard; ``unseen``: its modification time stays, as when a disk or a cable does it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    if unseen:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def punched(path: Path, offset: int, size: int) -> None:
    """Take a shard's bytes off the disk, so that a hole is left that reads as zeros."""
    before = path.stat()
    subprocess.run(["fallocate", "--punch-hole", "--offset", str(offset), "--length", str(size), path], check=True)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def as_packed_by_an_older_tool(path: Path) -> None:
    """No manifest, no own fields, and the constant that packers in the wild write."""
    engram.manifest_path(path).unlink()
    damaged(path, 0, b"DSV1EN41")
    damaged(path, 256, bytes(4096 - 256))


def put(made: Path, where: Path, name: str, layer: int, rank: int, tp: int, split: str) -> Path:
    """Another shard under the name of this rank's, its manifest with it."""
    (where / "other").mkdir()
    engram.pack(made, where / "other", layer, rank, tp, split)
    path = where / name
    (where / "other" / engram.shard_name(layer, rank, tp)).rename(path)
    (where / "other" / f"{engram.shard_name(layer, rank, tp)}.manifest.json").rename(engram.manifest_path(path))
    return path


def faults(path: Path, made: Path, sample: int = 20_000) -> tuple[str | None, ...]:
    """What each level says, the quick one first; 20,000 rows are all that the shard has."""
    return tuple(
        engram.check_shard(path, expected(made), made, level, sample=sample)["fault"] for level in engram.LEVELS
    )


def test_a_good_shard_has_no_fault_at_any_level(packed: Path, made: Path) -> None:
    assert faults(packed, made) == (None, None, None)
    assert faults(packed, made, sample=2) == (None, None, None)
    counted: list[int] = []
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in packed.parent.iterdir()}
    found = engram.check_shard(packed, expected(made), made, "full", counted.append)
    assert (found["state"], found["sha256"]) == ("ok", hashlib.sha256(packed.read_bytes()).hexdigest())
    assert sum(counted) == packed.stat().st_size
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in packed.parent.iterdir()} == before
    with pytest.raises(LockstepError, match="unknown level of verification"):
        engram.check_shard(packed, expected(made), made, "thorough")


def test_missing_truncated_and_too_long(packed: Path, made: Path) -> None:
    size = packed.stat().st_size
    for wrong in (size - 1, size - 4096, 5000, 4096, 4095, 8, 0):
        os.truncate(packed, wrong)
        assert faults(packed, made) == ("truncated",) * 3, wrong
        os.truncate(packed, size)
    with packed.open("ab") as file:
        file.write(b"x")
    engram.pack(made, packed.parent, 1, 1, 3, "rows")
    with packed.open("ab") as file:
        file.write(b"x")
    assert faults(packed, made) == ("too-long",) * 3
    packed.unlink()
    assert faults(packed, made) == ("missing",) * 3


def test_zero_filled(packed: Path, made: Path) -> None:
    size = packed.stat().st_size
    page = 4096 + 264 * 4096
    damaged(packed, page, bytes(4096))
    assert faults(packed, made) == (None, "zero-filled", "zero-filled")
    damaged(packed, 4096, bytes(size - 4096))
    assert faults(packed, made, sample=2) == (None, "zero-filled", "zero-filled")
    damaged(packed, 0, bytes(4096))
    assert faults(packed, made) == ("zero-filled",) * 3


def test_sparse(packed: Path, made: Path) -> None:
    size = packed.stat().st_size
    punched(packed, 4096 * 100, 4096 * 2)
    assert faults(packed, made) == ("sparse",) * 3
    assert state(packed, made) == ("missing", f"nothing was ever written at byte {4096 * 100:,}")
    with pytest.raises(engram.WrongContentError) as caught:
        engram.verify(made, packed, expected(made))
    assert str(caught.value.found).startswith("sparse: ")
    packed.unlink()
    packed.touch()
    os.truncate(packed, size)
    assert faults(packed, made) == ("sparse",) * 3
    with packed.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    assert faults(packed, made) == ("sparse",) * 3
    # Begun, and the rest never written: the hole begins on a page, within a row.
    engram.pack(made, packed.parent, 1, 1, 3, "rows")
    os.truncate(packed, 4096 * 100)
    os.truncate(packed, size)
    assert faults(packed, made) == ("sparse",) * 3


def test_a_hole_where_the_checkpoint_has_zeros_is_no_fault_once_proven(made: Path, tmp_path: Path) -> None:
    """As ``cp --sparse=always`` leaves a shard, or a file system that compresses."""
    empty = remake(made, tmp_path / "empty")
    for path in empty.glob("*.safetensors"):
        data = path.read_bytes()
        head = 8 + int.from_bytes(data[:8], "little")
        path.unlink()
        path.write_bytes(data[:head] + bytes(len(data) - head))
    engram.pack(empty, tmp_path, 1, 1, 3, "rows")
    path = tmp_path / "engram-l1-r1of3.bin"
    punched(path, 8192, 1 << 20)
    check = {level: engram.check_shard(path, expected(made), empty, level)["fault"] for level in engram.LEVELS}
    assert check == {"quick": "sparse", "sample": "sparse", "full": None}
    engram.verify(empty, path, expected(made))
    assert engram.check_shard(path, expected(made), empty, "quick")["fault"] is None


def test_bit_flipped(packed: Path, made: Path) -> None:
    at = 4096 + 264 * 1000 + 17
    byte = packed.read_bytes()[at]
    damaged(packed, at, bytes([byte ^ 0x10]))
    assert faults(packed, made) == (None, "bit-flipped", "bit-flipped")
    damaged(packed, at, bytes([byte]))
    assert faults(packed, made) == (None, None, None)
    damaged(packed, 3000, b"!")
    assert engram.check_shard(packed, expected(made), made, "full")["fault"] == "bit-flipped"


def test_a_checkpoint_of_links_says_why_it_cannot_be_packed_from(made: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "fb2764a5"
    snapshot.mkdir(parents=True)
    for path in made.glob("*.*"):
        (snapshot / path.name).symlink_to(path)
    with pytest.raises(LockstepError, match="holds links to its files elsewhere") as caught:
        engram.read_config(snapshot)
    assert "--local-dir" in str(caught.value.next_step)


def test_own_fields_that_say_nothing_of_use(packed: Path, made: Path) -> None:
    header = engram.pack_header(1, expected(made)["rows"], expected(made)["total_rows"], {"split": 5})
    damaged(packed, 0, header)
    assert faults(packed, made) == ("bit-flipped",) * 3


def test_a_flipped_number_of_the_header(packed: Path, made: Path) -> None:
    damaged(packed, 16, bytes([packed.read_bytes()[16] ^ 1]))
    assert faults(packed, made) == ("bit-flipped",) * 3


@pytest.mark.parametrize(
    ("layer", "rank", "tp", "split", "fault"),
    [
        (14, 1, 3, "rows", "wrong-layer"),
        (1, 2, 3, "rows", "wrong-rank"),
        (1, 0, 3, "rows", "wrong-rank"),
        (1, 1, 3, "heads", "wrong-split"),
        (1, 1, 2, "rows", "wrong-tp"),
        (1, 1, 2, "heads", "wrong-tp"),
        (1, 3, 4, "rows", "wrong-tp"),
        (1, 7, 8, "heads", "wrong-tp"),
    ],
)
def test_a_shard_of_other_rows(
    layer: int, rank: int, tp: int, split: str, fault: str, made: Path, tmp_path: Path
) -> None:
    path = put(made, tmp_path, "engram-l1-r1of3.bin", layer, rank, tp, split)
    assert faults(path, made) == (fault,) * 3
    as_packed_by_an_older_tool(path)
    assert faults(path, made) == (fault,) * 3
    if layer == 1:
        why = engram.check_shard(path, expected(made), made, "quick")["why"]
        assert f"these are the rows of rank {rank} of {tp}, split {split}" in str(why)


def test_rows_that_no_rank_owns(packed: Path, made: Path) -> None:
    as_packed_by_an_older_tool(packed)
    damaged(packed, 16, bytes([packed.read_bytes()[16] ^ 1]))
    assert faults(packed, made) == ("wrong-split",) * 3


def test_wrong_checkpoint(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other-checkpoint"
    lab.make(other, VOCAB, SEED + 1, revision="0" * 40)
    path = put(other, tmp_path, "engram-l1-r1of3.bin", 1, 1, 3, "rows")
    assert faults(path, made) == ("wrong-checkpoint",) * 3
    engram.manifest_path(path).unlink()
    assert faults(path, made) == ("wrong-checkpoint",) * 3
    # Without a word of where it comes from, only its rows tell; its size and range are right.
    damaged(path, 256, bytes(4096 - 256))
    assert faults(path, made, sample=50) == ("unproven", "wrong-checkpoint", "wrong-checkpoint")
    smaller = tmp_path / "smaller"
    lab.make(smaller, 500)
    path.unlink()
    (tmp_path / "other").rmdir()
    assert faults(put(smaller, tmp_path, path.name, 1, 1, 3, "rows"), made) == ("wrong-checkpoint",) * 3


def test_no_shard(packed: Path, made: Path) -> None:
    for data in (b"hello", b"hello" * 1000, b"\x7fELF".ljust(expected(made)["bytes"], b"\0")):
        packed.write_bytes(data)
        assert faults(packed, made) == ("no-shard",) * 3


def test_unproven(packed: Path, made: Path) -> None:
    os.utime(packed)
    assert faults(packed, made) == ("unproven", "unproven", None)
    as_packed_by_an_older_tool(packed)
    assert faults(packed, made) == ("unproven", "unproven", None)
    engram.pack(made, packed.parent, 1, 1, 3, "rows")
    path = engram.manifest_path(packed)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sha256": "0" * 64}))
    assert faults(packed, made) == (None, None, "unproven")


def test_every_fault_has_a_next_step() -> None:
    assert len({*engram.FAULTS}) == len(engram.FAULTS) == 13
    for fault in engram.FAULTS:
        assert "ansible-playbook pack_engram.yml" in engram.next_step(fault)


def test_a_look_takes_milliseconds(packed: Path, made: Path) -> None:
    """A file of the real size: nothing that is looked at grows with it."""
    want = expected(made)
    started = time.process_time()
    for _ in range(20):
        engram.inspect_shard(packed, want, engram.checkpoint_identity(made, 1))
    assert (time.process_time() - started) / 20 < 0.05


@given(st.integers(1, 12), st.sampled_from(engram.SPLITS), st.data())
def test_a_range_leads_back_to_its_rank(tp: int, split: str, data: st.DataObject) -> None:
    table = engram.layout(engram.REAL_CONFIG)[14]
    rank = data.draw(st.integers(0, tp - 1))
    found = engram.owner(engram.shard_range(table, tp, rank, split), table, tp, split)
    if split == "rows" or 24 % tp == 0:
        assert found == (split, tp, rank)
    else:
        assert found in {("heads", tp, rank), ("rows", tp, rank)}
    assert engram.owner([1, 384016682], table) is None


def test_own_fields_that_nest_without_end_are_none() -> None:
    header = engram.pack_header(1, [0, 10], 10)[:256] + b"[" * (4096 - 256)
    assert engram.parse_header(header)["own"] == {}


@pytest.mark.parametrize("ranks", [-1, 0, 65, 10**20])
def test_sizes_for_a_number_of_ranks_that_no_fleet_has_are_refused(ranks: int) -> None:
    with pytest.raises(LockstepError, match="no such fleet"):
        engram.shard_sizes(ranks, "heads")


def test_seven_ranks_do_not_divide_the_columns_so_heads_is_rows() -> None:
    assert engram.shard_sizes(7, "heads") == engram.shard_sizes(7, "rows")
