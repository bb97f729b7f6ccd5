"""The packing tool, run as it is run in the engine image: a process of its own, real files."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lockstep_core import engram, files
from lockstep_lab import checkpoint as lab
from lockstep_tools import pack

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "adapters")}
FILES = ["engram-l1-r1of3.bin", "engram-l14-r1of3.bin"]
# The tool itself, from a disk so slow that it is met halfway however busy this machine is.
SLOW = (
    "import sys, time; from lockstep_core import files; from lockstep_tools import pack\n"
    "scatter = files.Reader.scatter\n"
    "files.Reader.scatter = lambda *arguments: (time.sleep(0.05), scatter(*arguments))[1]\n"
    "sys.exit(pack.main(sys.argv[1:]))\n"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    lab.make(path, 998)
    return path


def command(checkpoint: Path, out: Path, *more: str, tp: int = 3, rank: int = 1) -> list[str]:
    arguments = ["--layers", "1,14", "--rank", str(rank), "--tp", str(tp), "--split", "rows", "--reserve", "0"]
    return ["--checkpoint", str(checkpoint), "--out", str(out), *arguments, *more]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep_tools.pack", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )


def until(report: Path, ready: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The first progress report that is as asked."""
    deadline = time.monotonic() + 60
    while not ready(said := json.loads(report.read_text())):
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    return dict(said)


def standing(out: Path) -> dict[str, tuple[int, int, int]]:
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_size) for path in out.glob("engram-*")
    }


def test_it_packs_once_and_then_leaves_the_shards_alone(made: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "new" / "engram", tmp_path / "progress.json"
    first = run(*command(made, out, "--progress", str(report)))
    assert (first.returncode, first.stderr) == (0, "")
    assert [line.split(": ")[1].split()[:2] for line in first.stdout.splitlines()] == [
        [name, "packed"] for name in FILES
    ]
    assert sorted(standing(out)) == sorted(FILES + [name + engram.MANIFEST_SUFFIX for name in FILES])
    said = json.loads(report.read_text())
    size = sum(shard["bytes"] for shard in engram.expected_shards(engram.read_config(made), 3, 1, "rows"))
    assert (said["state"], said["error"], said["bytes"], said["total"]) == ("done", None, size, size)
    before = standing(out)
    again = run(*command(made, out, "--progress", str(report)))
    assert again.returncode == 0
    assert standing(out) == before
    assert [shard["action"] for shard in json.loads(report.read_text())["shards"]] == ["keep", "keep"]
    for shard, line in zip(said["shards"], first.stdout.splitlines(), strict=True):
        path = out / shard["file"]
        true = subprocess.run(["sha256sum", path], check=True, capture_output=True, text=True).stdout.split()[0]
        assert shard["sha256"] == true
        assert line.endswith(true)


def test_force_packs_good_shards_again(made: Path, tmp_path: Path) -> None:
    run(*command(made, tmp_path))
    before = standing(tmp_path)
    assert run(*command(made, tmp_path, "--force")).returncode == 0
    after = standing(tmp_path)
    assert all(after[name][0] != before[name][0] for name in FILES)
    assert [after[name][2] for name in FILES] == [before[name][2] for name in FILES]


def test_a_shard_without_its_manifest_is_verified_not_packed(made: Path, tmp_path: Path) -> None:
    run(*command(made, tmp_path))
    before = standing(tmp_path)
    engram.manifest_path(tmp_path / FILES[1]).unlink()
    second = run(*command(made, tmp_path))
    assert f"{FILES[0]} is good, kept" in second.stdout
    assert f"{FILES[1]} verified" in second.stdout
    assert all(standing(tmp_path)[name] == before[name] for name in FILES)


def test_only_the_ranks_bytes_are_read(made: Path, tmp_path: Path) -> None:
    """The kernel counts what the process reads: a third of 13 MB of tables, what it wrote, and not a file more."""
    program = (
        "import sys; from lockstep_tools import pack\n"
        "def read(): return int(open('/proc/self/io').read().split()[1])\n"
        "before = read(); code = pack.main(sys.argv[1:]); print('read', read() - before, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command(made, tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    written = sum(standing(tmp_path)[name][2] for name in FILES)
    read = int(done.stderr.split()[1])
    # Beside them headers, index and configuration, and modules that Python itself reads meanwhile.
    assert 0 <= read - (2 * written - 2 * 4096) < 300_000


def test_packing_leaves_no_page_cache(made: Path, tmp_path: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], check=True, capture_output=True, text=True).stdout
    if kind.strip() in {"tmpfs", "ramfs"}:
        pytest.skip(reason="a file system in memory is page cache; this needs a disk")
    tables = sorted(made.glob("model-0000[12]*"))
    for path in tables:
        files.sha256_file(path)
    assert run(*command(made, tmp_path, tp=1, rank=0)).returncode == 0
    shards = sorted(tmp_path.glob("*.bin"))
    assert [path.stat().st_size > 6_000_000 for path in shards] == [True, True]
    listed = ["fincore", "-n", "-b", "-o", "RES", *map(str, [*tables, *shards])]
    resident = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    # The kernel may have read a little ahead of what was asked for.
    assert sum(map(int, resident)) < 1 << 20


def test_a_wrong_shard_is_named_and_never_overwritten(made: Path, tmp_path: Path) -> None:
    engram.pack(made, tmp_path, 14, 1, 3, "heads")
    before = standing(tmp_path)
    for more in ([], ["--force"]):
        refused = run(*command(made, tmp_path, *more))
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"rank 1: {tmp_path / FILES[1]} is not this rank's shard\n")
        for word in ("  found: ", "  expected: ", "  next step: "):
            assert word in refused.stderr
        assert standing(tmp_path) == before


def test_too_little_room_is_said_before_a_byte_is_written(made: Path, tmp_path: Path) -> None:
    report = tmp_path / "progress.json"
    refused = run(*command(made, tmp_path / "out", "--progress", str(report), "--reserve", str(1 << 60)))
    assert refused.returncode == 1
    needed = sum(shard["bytes"] for shard in engram.expected_shards(engram.read_config(made), 3, 1, "rows"))
    assert refused.stderr.startswith(f"rank 1: not enough room in {tmp_path / 'out'}")
    assert f"{needed:,} bytes to write + {1 << 60:,} kept free" in refused.stderr
    assert standing(tmp_path / "out") == {}
    said = json.loads(report.read_text())
    assert (said["state"], said["error"] + "\n") == ("failed", refused.stderr)


def test_what_an_interrupted_run_left_counts_as_room(made: Path, tiny: Path) -> None:
    (tiny / f"{FILES[0]}{files.PARTIAL}").write_bytes(bytes(1 << 19))
    refused = run(*command(made, tiny))
    assert refused.returncode == 1
    # Half of the megabyte is free, the other half is given back; the lock names its holder in one page.
    assert "found: 1,044,480 bytes available" in refused.stderr
    assert files.free_bytes(tiny) == 1 << 19


def test_what_an_interrupted_run_left_is_removed(made: Path, tmp_path: Path) -> None:
    (tmp_path / f"{FILES[0]}{files.PARTIAL}").write_bytes(b"x" * 4096)
    assert run(*command(made, tmp_path)).returncode == 0
    assert not (tmp_path / f"{FILES[0]}{files.PARTIAL}").exists()


def test_two_packs_do_not_meet(made: Path, tmp_path: Path) -> None:
    with files.lock(tmp_path / pack.LOCK, "packing of rank 1"):
        refused = run(*command(made, tmp_path))
    assert refused.returncode == 1
    assert f"{pack.LOCK} is locked" in refused.stderr
    assert f"found: packing of rank 1, pid {os.getpid()} on " in refused.stderr
    assert run(*command(made, tmp_path)).returncode == 0


def test_a_missing_checkpoint_ends_with_its_name(tmp_path: Path) -> None:
    refused = run(*command(tmp_path / "none", tmp_path))
    assert (refused.returncode, f"no checkpoint in {tmp_path}/none" in refused.stderr) == (1, True)


def test_a_stopped_run_leaves_no_shard(tmp_path: Path) -> None:
    lab.make(tmp_path / "checkpoint", 16000)  # 100 MB a layer
    out, report = tmp_path / "out", tmp_path / "progress.json"
    arguments = command(tmp_path / "checkpoint", out, "--progress", str(report), tp=1, rank=0)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments], env=ENVIRONMENT, stdout=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 60
        while not list(out.glob(f"*{files.PARTIAL}")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert [name for name in standing(out) if files.PARTIAL not in name] == []
    assert json.loads(report.read_text())["state"] == "failed"


def test_progress_is_told_every_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, heard = tmp_path / "progress.json", ""
    begun = time.monotonic()
    progress = pack.Progress(report, total=1_000_000_000, work=2_000_000_000)
    progress.begin(1, "pack", 400_000_000)
    progress.add("write", 100_000_000)
    progress.start()
    said = until(report, lambda said: said["mb_s"])
    most = time.monotonic() - begun
    assert (said["state"], said["layer"], said["action"], said["stage"]) == ("running", 1, "pack", "write")
    assert (said["bytes"], said["total"], said["layer_bytes"]) == (100_000_000, 1_000_000_000, 100_000_000)
    # After a second or more: 100 MB in it, 900 MB to write and 1000 MB to read back.
    assert 100 / most - 0.1 <= said["mb_s"] <= 100
    assert 19 <= said["eta_s"] <= 19 * most + 1
    while said["line"] not in (heard := heard + capsys.readouterr().out).splitlines():
        assert time.monotonic() < begun + 60, heard
        time.sleep(0.02)
    assert said["line"] == (
        f"layer 1 written  25 %, 100 of 400 MB, {said['mb_s']:.0f} MB/s; all 100 of 1,000 MB, eta {said['eta_s']} s"
    )
    progress.add("verify", 50_000_000)
    progress.add("write", 300_000_000)
    progress.add("verify", 150_000_000)
    said = until(report, lambda said: said["line"].startswith("layer 1 read back  50 %, 200 of 400 MB, "))
    # What is read back is no byte more of the shards.
    assert "; all 400 of 1,000 MB, " in said["line"]
    progress.end("done")
    assert json.loads(report.read_text())["state"] == "done"


def test_what_an_earlier_run_did_is_no_pace_of_this_one(tmp_path: Path) -> None:
    progress = pack.Progress(tmp_path / "p.json", total=1_000_000_000, work=2_000_000_000)
    progress.begin(1, "pack", 1_000_000_000)
    progress.add("resume", 600_000_000)
    progress.add("resumed", 500_000_000)
    progress.add("write", 100_000_000)
    progress.start()
    until(tmp_path / "p.json", lambda said: said["mb_s"])
    progress.end("done")
    said = json.loads((tmp_path / "p.json").read_text())
    assert (said["bytes"], said["layer_bytes"], said["stage"]) == (600_000_000, 600_000_000, "write")
    assert said["mb_s"] <= 100


# --- interrupted, forced, set aside -----------------------------------------------------------------------------------


def test_a_killed_run_is_taken_up_where_it_was_durable(tmp_path: Path) -> None:
    """Layer 1 at 64,000 is 400 MB: one mark after 256 MiB."""
    lab.make(tmp_path / "checkpoint", 64000)
    out = tmp_path / "out"
    arguments = command(tmp_path / "checkpoint", out, "--layers", "1", tp=1, rank=0)
    with subprocess.Popen([sys.executable, "-c", SLOW, *arguments], env=ENVIRONMENT) as process:
        deadline = time.monotonic() + 60
        while not list(out.glob(f"*{files.JOURNAL}")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    (marks,) = [json.loads(path.read_text())["marks"] for path in out.glob(f"*{files.JOURNAL}")]
    written = (out / f"engram-l1-r0of1.bin{files.PARTIAL}").stat().st_mtime_ns
    # The first half a change of the checkpoint would not be seen in: it must not be read from there again.
    program = (
        "import sys; from lockstep_core import engram, files\n"
        "asked = []\n"
        "scatter = files.Reader.scatter\n"
        "files.Reader.scatter = lambda self, slots, count, offset: (asked.append(count), scatter(self, slots, count, "
        "offset))[1]\n"
        "from lockstep_tools import pack\n"
        "code = pack.main(sys.argv[1:]); print('rows', sum(asked)); sys.exit(code)\n"
    )
    again = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True, env=ENVIRONMENT
    )
    total = engram.expected_shards(engram.read_config(tmp_path / "checkpoint"), 1, 0, "rows", [1])[0]["rows"][1]
    done = (marks[-1][0] - 4096) // 264
    assert done > 900_000
    assert f"rows {total - done}\n" in again.stdout
    assert (out / "engram-l1-r0of1.bin").stat().st_mtime_ns > written
    assert sorted(path.name for path in out.glob("engram*")) == [
        "engram-l1-r0of1.bin",
        "engram-l1-r0of1.bin.manifest.json",
    ]
    assert engram.compare_sample(out / "engram-l1-r0of1.bin", tmp_path / "checkpoint", 500, seed=3) == []


def test_a_forced_run_that_was_interrupted_and_not_wanted_again_leaves_nothing(made: Path, tmp_path: Path) -> None:
    run(*command(made, tmp_path))
    before = standing(tmp_path)
    for suffix in (files.PARTIAL, files.JOURNAL):
        (tmp_path / f"{FILES[0]}{suffix}").write_bytes(b"x")
    assert run(*command(made, tmp_path)).returncode == 0
    assert standing(tmp_path) == before


def test_wrong_content_is_set_aside_only_when_told_to(made: Path, tmp_path: Path) -> None:
    run(*command(made, tmp_path))
    path, report = tmp_path / FILES[0], tmp_path / "progress.json"
    good = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(4096 + 264 * 50)
        file.write(b"torn")
    bad = path.read_bytes()
    refused = run(*command(made, tmp_path))
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        f"rank 1: {path} does not hold what its name and header say\n  found: bit-flipped: "
    )
    assert path.read_bytes() == bad
    done = run(*command(made, tmp_path, "--wrong", "set_aside", "--progress", str(report)))
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == good
    said = json.loads(report.read_text())
    assert [Path(name).name.split(".aside-")[0] for name in said["set_aside"]] == [
        FILES[0],
        FILES[0] + engram.MANIFEST_SUFFIX,
    ]
    assert Path(said["set_aside"][0]).read_bytes() == bad
    assert [shard["action"] for shard in said["shards"]] == ["pack", "keep"]
    assert said["bytes"] == said["total"]


def test_a_report_that_cannot_be_written_does_not_hide_the_reason(made: Path, tmp_path: Path) -> None:
    said = run(*command(made, tmp_path, "--rank", "7", "--progress", "/nonexistent/report.json"))
    assert said.returncode == 1
    assert "no such rank" in said.stderr
    assert "Traceback" not in said.stderr


# --- only looking -----------------------------------------------------------------------------------------------------


def test_a_check_writes_nothing_and_names_the_fault(made: Path, tmp_path: Path) -> None:
    run(*command(made, tmp_path))
    with (tmp_path / FILES[1]).open("r+b") as file:
        file.seek(4096 + 264 * 50)
        file.write(bytes(4096 * 300))
    before = standing(tmp_path)
    found = {}
    for level in engram.LEVELS:
        checked = run(*command(made, tmp_path, "--verify", level, "--progress", "-"))
        assert (checked.returncode, checked.stderr) == (0, "")
        reports = [json.loads(text) for text in checked.stdout.splitlines()]
        assert reports[-1]["state"] == "done"
        found[level] = [(shard["state"], shard["fault"]) for shard in reports[-1]["shards"]]
    assert found == {
        "quick": [("ok", None), ("missing", "unproven")],
        "sample": [("ok", None), ("wrong", "zero-filled")],
        "full": [("ok", None), ("wrong", "zero-filled")],
    }
    assert standing(tmp_path) == before
    absent = run(*command(tmp_path / "none", tmp_path, "--verify", "full"))
    assert (absent.returncode, absent.stderr.startswith("rank 1: no checkpoint in ")) == (1, True)
