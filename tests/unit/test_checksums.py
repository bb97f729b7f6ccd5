"""SHA256SUMS lists, held against the real ``sha256sum`` wherever it has something to say."""

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep_core import checksums

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent / "cases" / "E_engram.jsonl").read_text().splitlines())
}
# The content of the handed cases' a.bin is not handed over: these are of "x".
X = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
GOOD = f"{X}  a.bin\n"


def sha256sum(folder: Path, text: str, *options: str) -> tuple[int, str]:
    (folder / "LIST").write_bytes(text.encode())
    run = subprocess.run(
        ["sha256sum", "-c", *options, "LIST"],
        cwd=folder,
        check=False,
        capture_output=True,
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
    )
    return run.returncode, (run.stdout + run.stderr).decode()


def test_e01_line_forms() -> None:
    case = CASES["E01"]
    parsed = [checksums.parse(line) for line in case["input"]]
    assert [entry["name"] for listing in parsed for entry in listing["entries"]] == case["expected"]["names"]
    assert {entry["sha256"] for listing in parsed for entry in listing["entries"]} == {case["expected"]["hash_all"]}
    assert all(listing["bad_lines"] == [] for listing in parsed)
    # "normalise ./"
    assert [listing["entries"][0]["path"] for listing in parsed] == ["a.bin"] * 4 + ["with space.bin"]


def test_e02_escaped_names() -> None:
    case = CASES["E02"]
    entries = [checksums.parse(line)["entries"][0] for line in case["input"]]
    assert [entry["name"] for entry in entries] == case["expected"]["names"]
    assert case["expected"]["hash_starts_after_leading_backslash"] is True
    assert [entry["sha256"] for entry in entries] == [line[1:65] for line in case["input"]]
    assert checksums.check_line(entries[1]["name"], "OK") == case["expected"]["check_output_escapes_again"]
    # Both ways: what was parsed is written as it was read.
    written = checksums.format_lines({entry["name"]: entry["sha256"] for entry in entries})
    assert sorted(written.splitlines()) == sorted(case["input"])


@pytest.mark.parametrize("kind", ["crlf", "garbage", "empty", "all_missing", "bom"])
def test_e03_what_a_list_proves(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    raw = CASES["E03"]["input"][kind]
    hash_of_a = CASES["E03"]["input"]["crlf"][:64]
    text = (
        raw.replace("<good line>", GOOD.rstrip())
        .replace("\\n", "\n")
        .replace("\\xef\\xbb\\xbf", "\ufeff")
        .replace("000..0", "0" * 64)
        .replace(" with --ignore-missing", "")
        .replace(hash_of_a, X)
    )
    code, said = sha256sum(tmp_path, text, *(["--ignore-missing"] if kind == "all_missing" else []))
    # The words and the exit status that the case states, from the tool itself …
    stated = CASES["E03"]["expected"]["sha256sum -c"][kind]
    assert f"rc {code}" in stated
    for words in ("a.bin: OK", "1 line is improperly formatted", "no properly formatted checksum lines found"):
        assert (words in said) == (words in stated)
    if kind == "all_missing":
        assert "no file was verified" in said
        assert "no file was verified" in stated
    # … and ours: ok only when all that was expected is verified, under --strict.
    verdict = checksums.verify(text, {"a.bin": X, "missing.bin": None}, ["a.bin"])
    strict, _ = sha256sum(tmp_path, text, "--strict")
    assert verdict["ok"] is (strict == 0) is (kind == "crlf")
    assert verdict["verified"] == (["a.bin"] if kind in {"crlf", "garbage"} else [])
    assert verdict["missing"] == (["missing.bin"] if kind == "all_missing" else [])
    assert verdict["bad_lines"] == {"garbage": [2], "bom": [1]}.get(kind, [])
    assert verdict["unlisted"] == ([] if kind in {"crlf", "garbage"} else ["a.bin"])


def test_a_list_that_leaves_a_shard_out_proves_nothing() -> None:
    verdict = checksums.verify(GOOD, {"a.bin": X, "b.bin": X}, ["a.bin", "b.bin"])
    assert (verdict["ok"], verdict["verified"], verdict["unlisted"]) == (False, ["a.bin"], ["b.bin"])


def test_a_different_hash_or_two_hashes_for_one_name_are_different() -> None:
    assert checksums.verify(GOOD, {"a.bin": "0" * 64}, ["a.bin"])["different"] == ["a.bin"]
    both = GOOD + "0" * 64 + "  ./a.bin\n"
    assert checksums.verify(both, {"a.bin": X}, ["a.bin"])["different"] == ["a.bin"]


def test_nothing_expected_is_not_ok() -> None:
    assert checksums.verify(GOOD, {"a.bin": X}, [])["ok"] is False


@pytest.mark.parametrize(
    "name",
    ["plain.bin", " leading", "trailing ", "back\\slash", "new\nline", "carriage\rreturn", "\\n", "*star", "ü.bin"],
)
def test_a_list_we_write_is_read_by_sha256sum_and_one_it_writes_by_us(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert sha256sum(tmp_path, checksums.format_lines({name: X}), "--strict")[0] == 0
    assert sha256sum(tmp_path, checksums.format_lines({name: X}))[1] == checksums.check_line(name, "OK") + "\n"
    theirs = subprocess.run(["sha256sum", "--", name], cwd=tmp_path, check=True, capture_output=True).stdout.decode()
    tagged = subprocess.run(["sha256sum", "--tag", "--", name], cwd=tmp_path, check=True, capture_output=True)
    for text in (theirs, tagged.stdout.decode()):
        assert checksums.parse(text) == {"entries": [{"name": name, "path": name, "sha256": X}], "bad_lines": []}


@pytest.mark.parametrize(
    "line",
    [
        *(
            "",
            "# a comment",
            X,
            f"{X} a.bin",
            f"{X[:-1]}  a.bin",
            f"{X}  ",
            f"\\{X}  bad\\escape",
            f"{X.upper()}  a.bin",
        ),
        *(f" \t{X}  a.bin", f"SHA256(a.bin)= {X}", f"SHA256 (a.bin)\t=  {X}", f"  SHA256 (a.bin) = {X}"),
        *(f"sha256 (a.bin) = {X}", f"SHA256  (a.bin) = {X}", f"{X}\ta.bin", f"sha256:{X}  a.bin"),
    ],
)
def test_lines_are_judged_as_sha256sum_judges_them(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    # One good line first, so that "one space" cannot be taken for the reversed format of old BSDs.
    text = f"{GOOD}{line}\n"
    ours = checksums.verify(text, {"a.bin": X}, ["a.bin"])["ok"]
    assert ours is (sha256sum(tmp_path, text, "--strict")[0] == 0)


names = st.text(st.characters(blacklist_characters="\0/", blacklist_categories=["Cs"]), min_size=1).filter(
    lambda name: checksums.normalise(name) == name and name != "."
)


@given(st.dictionaries(names, st.text("0123456789abcdef", min_size=64, max_size=64)))
def test_format_then_parse_gives_the_same_names_and_hashes(hashes: dict[str, str]) -> None:
    listing = checksums.parse(checksums.format_lines(hashes))
    assert {entry["name"]: entry["sha256"] for entry in listing["entries"]} == hashes
    assert listing["bad_lines"] == []
