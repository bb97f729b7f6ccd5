"""Safetensors headers and where a checkpoint keeps a tensor; the files are made byte by byte here."""

import json
import struct
from pathlib import Path

import pytest
from lockstep_core import safetensors
from lockstep_core.errors import LockstepError

TWO = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F8_E4M3", "shape": [3, 256], "data_offsets": [0, 768]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [768, 776]},
}


def write(path: Path, header: object, data: int) -> int:
    """A file with this header and so many bytes of data; returns where the data starts."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return 8 + len(text)


def test_offsets_count_from_the_start_of_the_file(tmp_path: Path) -> None:
    start = write(tmp_path / "m", TWO, 776)
    assert safetensors.header(tmp_path / "m") == {
        "tensors": {
            "a": {"dtype": "F8_E4M3", "shape": [3, 256], "offset": start, "bytes": 768},
            "b": {"dtype": "BF16", "shape": [4], "offset": start + 768, "bytes": 8},
        },
        "metadata": {"format": "pt"},
        "size": start + 776,
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no safetensors file"),
        (b"\x01", "no safetensors file"),
        (struct.pack("<Q", 1 << 40) + b"{}", "no safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "malformed"),
        (struct.pack("<Q", 2) + b"{x", "malformed"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "no safetensors file"),
    ],
)
def test_what_is_no_safetensors_file_is_said(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(LockstepError, match=words):
        safetensors.header(tmp_path / "m")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F8_E4M3", "shape": [3, 256], "data_offsets": [0, 767]},
        {"dtype": "F8_E4M3", "shape": [3, 256], "data_offsets": [768, 0]},
        {"dtype": "F8_E4M3", "shape": [-3, -256], "data_offsets": [0, 768]},
        {"dtype": "F8_E4M3", "shape": 768, "data_offsets": [0, 768]},
        {"dtype": "F8_E4M3", "shape": [768], "data_offsets": [0]},
        {"shape": [768], "data_offsets": [0, 768]},
    ],
)
def test_an_entry_that_cannot_be_is_malformed(entry: dict[str, object], tmp_path: Path) -> None:
    write(tmp_path / "m", {"a": entry}, 768)
    with pytest.raises(LockstepError, match="malformed"):
        safetensors.header(tmp_path / "m")


def test_a_file_cut_short_says_both_sizes(tmp_path: Path) -> None:
    start = write(tmp_path / "m", TWO, 700)
    with pytest.raises(LockstepError, match="cut short") as caught:
        safetensors.header(tmp_path / "m")
    assert (caught.value.found, caught.value.expected) == (f"{start + 700:,} bytes", f"{start + 776:,} bytes")


def test_tensors_are_found_by_the_index_in_different_files(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, 4)
    two = write(tmp_path / "two", {"s": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]}}, 5)
    (tmp_path / safetensors.INDEX).write_text(json.dumps({"weight_map": {"w": "one", "s": "two"}}))
    found = safetensors.locate(tmp_path, ["w", "s"])
    assert (found["w"]["file"], found["w"]["offset"], found["w"]["bytes"]) == ("one", one, 4)
    assert (found["s"]["file"], found["s"]["offset"], found["s"]["file_bytes"]) == ("two", two + 3, two + 5)
    assert found["s"]["path"] == str(tmp_path / "two")


def test_without_an_index_the_single_file_holds_all(tmp_path: Path) -> None:
    start = write(tmp_path / "model.safetensors", TWO, 776)
    assert safetensors.locate(tmp_path, ["b"])["b"]["offset"] == start + 768


def test_a_missing_checkpoint_file_or_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="no checkpoint in") as caught:
        safetensors.locate(tmp_path / "none", ["w"])
    assert caught.value.found == "no such directory"
    (tmp_path / safetensors.INDEX).write_text(json.dumps({"weight_map": {"w": "one", "x": "../one"}}))
    with pytest.raises(LockstepError, match=r"cannot read .*one"):
        safetensors.locate(tmp_path, ["w"])
    with pytest.raises(LockstepError, match="does not name s"):
        safetensors.locate(tmp_path, ["w", "s"])
    with pytest.raises(LockstepError, match="names a file elsewhere"):
        safetensors.locate(tmp_path, ["x"])
    write(tmp_path / "one", TWO, 776)
    with pytest.raises(LockstepError, match="tensor w is not in"):
        safetensors.locate(tmp_path, ["w"])


@pytest.mark.parametrize(
    "text", [b"[" * 50_000, b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,1]}}'], ids=["deep", "infinite"]
)
def test_a_header_that_no_number_or_stack_can_hold_is_malformed(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(LockstepError, match="malformed"):
        safetensors.header(tmp_path / "m")
