"""Module and role of the archive in real playbooks: two hosts of an inventory, both this machine, over 127.0.0.1."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.lockstep.fleet.plugins.action import shard_archive as action
from ansible_collections.lockstep.fleet.plugins.module_utils import engram
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError
from ansible_collections.lockstep.fleet.plugins.modules import shard_archive as module
from lockstep_lab import checkpoint as lab
from playbook import ROOT, Played, examples, run_playbook

pytestmark = pytest.mark.ansible

OLD = ["engram-l1-r1of2.bin", "engram-l14-r1of2.bin"]
OWN = ["engram-l1-r1of3.bin", "engram-l14-r1of3.bin"]
SEND = "lockstep.fleet.engram_archive : Send, and follow it to its end"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, spark2's shards of TP2 and those of TP3."""
    place = tmp_path_factory.mktemp("made")
    lab.make(place / "checkpoint", 998)
    lab.make_shards(place / "checkpoint", place / "old", tp=2, rank=1, split="heads")
    lab.make_shards(place / "checkpoint", place / "own", tp=3, rank=1, split="rows")
    return place


class Fleet:
    """spark1 and spark2, and what the role is told on spark2."""

    def __init__(self, place: Path, made: Path) -> None:
        self.place, self.made = place, made
        self.engram = place / "spark2" / "engram"
        self.old = place / "spark2" / "old shards"
        self.archive = place / "spark1" / "archive"
        self.run_dir = place / "run"
        self.engram.mkdir(parents=True)
        config = engram.read_config(made / "checkpoint")["text_config"]
        python = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        self.hosts: dict[str, dict[str, Any]] = {
            name: {
                **python,
                "fleet_fabric": {other: "127.0.0.1"},
                "fleet_address": "127.0.0.2",
                "fleet_engram_dir": str(place / name / "engram"),
                "engram_archive_places": [str(place / name)],
            }
            for name, other in (("spark1", "spark2"), ("spark2", "spark1"))
        }
        self.hosts["spark1"]["fleet_rank"], self.hosts["spark2"]["fleet_rank"] = "0", "1"
        self.hosts |= {
            "lost": {
                "ansible_host": "127.0.0.1",
                "ansible_port": 1,
                "fleet_rank": "2",
                "fleet_engram_dir": "/x",
                "engram_archive_places": [],
            },
        }
        self.vars: dict[str, Any] = {
            "fleet_extra_variables": {"archive_from": "", "archive_to": "", "archive_files": ""},
            "fleet_tp_size": 3,
            "fleet_images": {"builds": {}, "base": {"digest": "none"}},
            "fleet_engine_profile": {"split": "rows"},
            "engram_layers": [1, 14],
            "engram_config": {key: config[key] for key in engram.REAL_CONFIG},
            "engram_checkpoint": str(made / "checkpoint"),
            "engram_reserve_bytes": 0,
            "engram_archive_run_dir": str(self.run_dir),
        }

    def take(self, kind: str, place: Path) -> None:
        """Put shards (``old`` or ``own``) in a directory."""
        place.mkdir(parents=True, exist_ok=True)
        for path in (self.made / kind).iterdir():
            (place / path.name).write_bytes(path.read_bytes())
            os.utime(place / path.name, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))

    def play(self, **variables: Any) -> list[dict[str, Any]]:
        task = {"name": "move", "ansible.builtin.import_role": {"name": "lockstep.fleet.engram_archive"}}
        return [{"hosts": "spark2", "gather_facts": False, "vars": {**self.vars, **variables}, "tasks": [task]}]

    @property
    def inventory(self) -> str:
        path = self.place / "hosts.yml"
        path.write_text(yaml.safe_dump({"all": {"hosts": self.hosts}}))
        return str(path)

    def archived(self, *arguments: str, **variables: Any) -> Played:
        given = {"archive_from": str(self.old), "archive_to": f"spark1:{self.archive}", **variables}
        return run_playbook(self.play(**given), self.place, *arguments, inventory=self.inventory)

    def restored(self, *arguments: str, **variables: Any) -> Played:
        given = {
            "engram_archive_mode": "restore",
            "engram_archive_to": str(self.engram),
            "archive_from": f"spark1:{self.archive}",
            **variables,
        }
        return run_playbook(self.play(**given), self.place, *arguments, inventory=self.inventory)

    def planned(self, source: str, target: str, **changes: Any) -> dict[str, Any]:
        """What the module looks at and decides, without a playbook."""
        serves = {"dir": str(self.engram), "rank": "1", "tp": 3, "split": "rows", "layers": [1, 14]}
        serves |= {"config": self.vars["engram_config"], "checkpoint": self.vars["engram_checkpoint"]}
        params = {
            "mode": "archive",
            "route": {"source": {"host": "spark2", "dir": source}, "target": {"host": "spark2", "dir": target}},
            "files": [],
            "in_service": False,
            "serves": serves,
            "reserve_bytes": 0,
            "run_dir": str(self.run_dir),
            **changes,
        }
        return module.plan({**params, "look": module.look(params)})

    def standing(self) -> dict[str, tuple[int, int, str]]:
        """Every file on both hosts, by inode, time and content."""
        return {
            str(path.relative_to(self.place)): (
                path.stat().st_ino, path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest(),
            )
            for host in ("spark1", "spark2")
            for path in (self.place / host).rglob("*")
            if path.is_file()
        }  # fmt: skip


@pytest.fixture
def fleet(tmp_path: Path, made: Path) -> Fleet:
    return Fleet(tmp_path, made)


def why(said: Played) -> str:
    """The message of the task that failed."""
    assert said.rc != 0, said.text
    (message,) = [result["msg"] for result in said.results.values() if result.get("failed")]
    return str(message)


def sums_hold(directory: Path) -> bool:
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    return subprocess.run(command, cwd=directory, check=False).returncode == 0


def at_work(fleet: Fleet) -> set[str]:
    """Processes that hold a lock of the move: senders and receivers."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while it was looked at
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    found |= {process.name} if str(link.readlink()).startswith(str(fleet.run_dir)) else set()
    return found


def test_a_prediction_then_the_move_then_nothing(fleet: Fleet) -> None:
    fleet.take("old", fleet.old)
    (fleet.old / "notes.txt").write_text("foreign")
    before = fleet.standing()
    predicted = fleet.archived("--check", "--diff")
    assert fleet.standing() == before
    assert predicted.changed == 1

    done = fleet.archived("--diff", "-vvv")
    assert done.rc == 0, done.text
    assert (done.changed, done.results[SEND]["diff"]) == (1, predicted.results[SEND]["diff"])
    assert [(one["file"], one["action"], one["removed"]) for one in done.results[SEND]["done"]] == [
        (name, "sent", True) for name in OLD
    ]
    assert sums_hold(fleet.archive)
    assert sorted(path.name for path in fleet.old.iterdir()) == ["MOVED.txt", "notes.txt"]
    for name in OLD:
        for part in (name, f"{name}.manifest.json"):
            assert fleet.standing()[f"spark1/archive/{part}"][1:] == before[f"spark2/old shards/{part}"][1:] or (
                part != name and (fleet.archive / part).read_bytes() == (fleet.made / "old" / part).read_bytes()
            )
        assert re.search(rf"^spark2: {name} sent to spark1:.*SHA-256 equal, removed here: ", done.text, re.MULTILINE)
    # The key is 64 hexadecimal digits too, and nowhere in what was said.
    hashes = {entry[2] for entry in before.values()}
    assert set(re.findall(r"\b[0-9a-f]{64}\b", done.text)) <= hashes
    assert at_work(fleet) == set()
    assert {oct(path.stat().st_mode & 0o777) for path in fleet.run_dir.iterdir()} == {"0o600"}

    before = fleet.standing()
    again = fleet.archived("--diff")
    assert (again.rc, again.changed) == (0, 0)
    assert fleet.standing() == before
    assert f"spark2: {OLD[0]} was moved to spark1:{fleet.archive} on " in again.text


def test_a_directory_of_the_same_host_needs_no_network(fleet: Fleet) -> None:
    fleet.take("old", fleet.old)
    target = fleet.place / "spark2" / "second disk"
    done = fleet.archived(archive_to=str(target))
    assert (done.rc, done.changed) == (0, 1), done.text
    assert sums_hold(target)
    assert [path.name for path in fleet.old.iterdir()] == ["MOVED.txt"]
    assert "lockstep.fleet.engram_archive : See the receiver end" in done.results
    assert done.results["lockstep.fleet.engram_archive : See the receiver end"].get("skipped")


def test_only_what_the_plan_does_not_need_is_taken_by_itself(fleet: Fleet) -> None:
    fleet.take("old", fleet.engram)
    fleet.take("own", fleet.engram)
    done = fleet.archived(archive_from="")
    assert (done.rc, done.changed) == (0, 1), done.text
    assert [one["file"] for one in done.results[SEND]["done"]] == OLD
    assert sorted(path.name for path in fleet.engram.glob("*.bin")) == OWN
    assert f"{OWN[0]} stays: this rank serves it" in done.text
    before = fleet.standing()
    refused = why(fleet.archived("--check", archive_from="", archive_files=OWN[:1]))
    assert f"spark2: {OWN[0]} is in service" in refused
    assert "archive_in_service=true" in refused
    assert fleet.standing() == before
    told = fleet.archived(archive_from="", archive_files=OWN[:1], archive_in_service="true")
    assert [one["file"] for one in told.results[SEND]["done"]] == OWN[:1]
    assert [path.name for path in fleet.engram.glob("*.bin")] == OWN[1:]


def test_what_another_host_serves_stays_there(fleet: Fleet) -> None:
    (fleet.place / "spark1").mkdir()
    live, target = fleet.place / "spark1" / "engram", fleet.place / "spark2" / "archive"
    lab.make_shards(fleet.made / "checkpoint", live, tp=3, rank=0, split="rows")
    fleet.take("old", live)
    given = {"archive_from": f"spark1:{live}", "archive_to": str(target)}
    before = fleet.standing()
    refused = why(fleet.archived(archive_files=["engram-l1-r0of3.bin"], **given))
    assert "spark1: engram-l1-r0of3.bin is in service" in refused
    assert fleet.standing() == before
    done = fleet.archived(**given)
    assert [one["file"] for one in done.results[SEND]["done"]] == OLD
    assert sorted(path.name for path in live.glob("*.bin")) == ["engram-l1-r0of3.bin", "engram-l14-r0of3.bin"]


def test_files_of_a_named_host_are_moved_by_one_host_of_the_play(fleet: Fleet) -> None:
    fleet.take("old", fleet.old)
    plays = fleet.play(archive_from=f"spark2:{fleet.old}", archive_to=f"spark1:{fleet.archive}")
    plays[0]["hosts"] = "spark1,spark2"
    done = run_playbook(plays, fleet.place, inventory=fleet.inventory)
    assert (done.rc, done.changed) == (0, 1), done.text
    assert f"spark1: leaves spark2:{fleet.old} to spark2" in done.text
    assert sums_hold(fleet.archive)


@pytest.mark.parametrize(
    ("mode", "source", "host", "acts"),
    [
        ("archive", "spark2:/x", "spark1", "spark2"),
        ("archive", "spark2:/x", "spark2", "spark2"),
        ("archive", "store:/x", "spark2", "spark1"),
        ("archive", "/x", "spark2", "spark2"),
        ("restore", "spark1:/x", "spark2", "spark2"),
    ],
)
def test_who_acts(mode: str, source: str, host: str, acts: str) -> None:
    assert action.acting({"mode": mode, "source": source}, host, ["spark1", "spark2"]) == acts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"archive_to": "lost:/a"}, ["lost: this host does not answer", "expected: an answer over SSH"]),
        ({"archive_from": "lost:/a"}, ["lost: this host does not answer", "nothing was moved"]),
    ],
)
def test_what_cannot_end_well_ends_before_anything_is_made(
    fleet: Fleet, changes: dict[str, Any], words: list[str]
) -> None:
    fleet.take("old", fleet.old)
    before = fleet.standing()
    message = why(fleet.archived(**changes))
    assert [word for word in words if word not in message] == []
    assert "next step: " in message
    assert "  found: " in message
    assert fleet.standing() == before
    assert at_work(fleet) == set()


INVENTORY = {
    "spark1": {"fleet_fabric": {"spark2": "10.0.22.1"}, "fleet_address": "10.77.0.11"},
    "spark2": {"fleet_fabric": {"spark1": "10.0.22.2"}, "fleet_address": "10.77.0.12"},
    "store": {"ansible_host": "192.0.2.9"},
    "bare": {},
}


@pytest.mark.parametrize(
    ("source", "target", "address", "note"),
    [
        ("/a", "spark1:/b", "10.0.22.1", None),
        ("spark1:/a", "/b", "10.0.22.2", None),
        ("/a", "/b", None, None),
        ("spark2:/a", "/b", None, None),
        ("/a", "store:/b", "192.0.2.9", "no fabric link from spark2 to store is known: 192.0.2.9 is used instead"),
        ("store:/a", "/b", "10.77.0.12", "no fabric link from store to spark2 is known: 10.77.0.12 is used instead"),
    ],
)
def test_the_way_is_the_fabrics(source: str, target: str, address: str | None, note: str | None) -> None:
    found = action.route({"source": source, "target": target}, "spark2", INVENTORY)
    assert (found["address"], found["note"]) == (address, note)


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("/a", "", ["spark2: archive_to is not given", "next step: -e archive_to=host:/directory"]),
        ("", "/a", ["spark2: archive_from is not given"]),
        ("/a", "sprak1:/b", ["a host that the inventory does not have", "found: sprak1", "archive_to=spark1:/b"]),
        ("/a", "spark1:a/b", ["archive_to is no directory of a host", "found: 'spark1:a/b'", "expected: host:/an/abs"]),
        ("/a", "bare:/b", ["no address of bare is known", "expected: fleet_fabric[spark2] or fleet_address"]),
    ],
)
def test_no_way(source: str, target: str, words: list[str]) -> None:
    with pytest.raises(LockstepError) as caught:
        action.route({"source": source, "target": target}, "spark2", INVENTORY)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("source", "target", "files", "words"),
    [
        ("/nowhere/shards", "/a", [], ["there is no directory /nowhere/shards", "-e archive_from=/that/directory"]),
        ("{old}", "/a", ["MOVED.txt"], ["MOVED.txt is not moved by itself", "leave it out of archive_files"]),
        ("{old}", "/a", ["../own"], ["has no file '../own'"]),
        ("{old}", "/a", ["engram-l9-r1of2.bin"], ["has no file 'engram-l9-r1of2.bin'"]),
        ("{old}", "{full}", [], ["not enough room in ", "bytes to write + "]),
        ("{old}", "{old}", [], ["source and destination are one directory"]),
        ("{old}", "{link}", [], ["source and destination are one directory"]),
        ("{old}", "{link}/archive", [], ["the destination lies inside the source"]),
        ("{old}", "{file}", [], ["is no directory"]),
        ("{file}", "/a", [], ["is no directory"]),
    ],
)
def test_no_plan(fleet: Fleet, source: str, target: str, files: list[str], words: list[str]) -> None:
    fleet.take("old", fleet.old)
    (fleet.place / "link").symlink_to(fleet.old)
    (fleet.place / "file").write_text("")
    places = {"old": fleet.old, "link": fleet.place / "link", "file": fleet.place / "file"}
    places["full"] = fleet.place / "spark1" / "full"
    before = fleet.standing()
    with pytest.raises(LockstepError) as caught:
        fleet.planned(
            source.format(**places),
            target.format(**places),
            files=files,
            reserve_bytes=(1 << 60) if target == "{full}" else 0,
        )
    assert [word for word in words if word not in str(caught.value)] == []
    assert "next step: " in str(caught.value)
    assert fleet.standing() == before


def test_an_unknown_variable_is_refused(fleet: Fleet) -> None:
    message = why(fleet.archived("-e", "archive_form=/x"))
    assert "unknown extra variable 'archive_form', did you mean archive_from?" in message


# --- back -------------------------------------------------------------------------------------------------------------


def test_a_restored_shard_serves_and_the_archive_keeps_its_copy(fleet: Fleet) -> None:
    archive_own(fleet)
    archived = {name: entry for name, entry in fleet.standing().items() if name.startswith("spark1")}
    predicted = fleet.restored("--check", "--diff")
    assert not list(fleet.engram.glob("*.bin"))
    done = fleet.restored("--diff")
    assert done.rc == 0, done.text
    assert (done.changed, predicted.changed) == (1, 1)
    assert done.results[SEND]["diff"] == predicted.results[SEND]["diff"]
    for shard in engram.expected_shards(engram.read_config(fleet.made / "checkpoint"), 3, 1, "rows"):
        assert engram.inspect_shard(fleet.engram / shard["file"], shard)["state"] == "ok"
    after = fleet.standing()
    assert {name: entry for name, entry in after.items() if name.startswith("spark1")} == archived
    assert not (fleet.engram / "SHA256SUMS").exists()
    again = fleet.restored(archive_files=[OWN[0], OWN[0]])
    assert (again.rc, again.changed) == (0, 0), again.text
    said = f"spark2: {OWN[0]} is there already, by its manifest; verify_engram.yml reads it through"
    assert again.text.count(said) == 1
    assert fleet.standing() == after
    (fleet.engram / f"{OWN[0]}.manifest.json").unlink()
    plan = fleet.planned(str(fleet.archive), str(fleet.engram), mode="restore", files=OWN[:1])
    assert plan["said"] == [f"{OWN[0]} is there already, by size and time; verify_engram.yml reads it through"]


def test_an_archive_of_another_tp_says_so_and_is_not_put_into_service(fleet: Fleet) -> None:
    fleet.take("old", fleet.archive)
    for names in ([], OLD):
        with pytest.raises(LockstepError) as caught:
            fleet.planned(str(fleet.archive), str(fleet.engram), mode="restore", files=names)
        message = str(caught.value)
        assert message.startswith("spark2, rank 1: ")
        assert "does not hold this rank's shards; nothing was put into service" in message
        assert f"{OLD[0]}: TP 2, not 3; split heads, not rows" in message
        assert "TP 3, split rows, rank 1" in message


def archive_own(fleet: Fleet) -> None:
    fleet.take("own", fleet.archive)
    lines = "".join(f"{hashlib.sha256((fleet.archive / name).read_bytes()).hexdigest()}  {name}\n" for name in OWN)
    (fleet.archive / "SHA256SUMS").write_text(lines)


def damage(fleet: Fleet) -> None:
    with (fleet.archive / OWN[0]).open("r+b") as file:
        file.seek(100_000)
        file.write(b"damage")


def unlist(fleet: Fleet) -> None:
    (fleet.archive / "SHA256SUMS").write_text("")


def other_checkpoint(fleet: Fleet) -> None:
    path = fleet.archive / f"{OWN[0]}.manifest.json"
    manifest = json.loads(path.read_text())
    manifest["checkpoint"]["revision"] = "0" * 40
    path.write_text(json.dumps(manifest))


def without_manifest(fleet: Fleet) -> None:
    (fleet.archive / f"{OWN[0]}.manifest.json").unlink()
    header = engram.read_header(fleet.archive / OWN[0])
    own = {**header["own"], "checkpoint": "0" * 40}
    data = engram.pack_header(header["layer"], header["rows"], header["total_rows"], own)
    with (fleet.archive / OWN[0]).open("r+b") as file:
        file.write(data)


def other_manifest(key: str, value: Any) -> Callable[[Fleet], None]:
    def change(fleet: Fleet) -> None:
        path = fleet.archive / f"{OWN[0]}.manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (without_manifest, [f"{OWN[0]}: packed from checkpoint revision {'0' * 40}, not "]),
        (other_manifest("rank", 0), [f"{OWN[0]}: its manifest is of another shard: rank 0, not 1"]),
        (other_manifest("rows", [0, 5]), [f"{OWN[0]}: its manifest is of another shard: rows [0, 5], not ["]),
        (unlist, [f"nothing vouches for {OWN[0]}", "no line for it in SHA256SUMS"]),
        (other_checkpoint, [f"{OWN[0]}: packed from checkpoint revision {'0' * 40}, not "]),
    ],
)
def test_a_copy_that_nothing_proves_is_not_put_into_service(fleet: Fleet, what: Any, words: list[str]) -> None:
    archive_own(fleet)
    what(fleet)
    with pytest.raises(LockstepError) as caught:
        fleet.planned(str(fleet.archive), str(fleet.engram), mode="restore")
    assert [word for word in words if word not in str(caught.value)] == []
    assert "next step: " in str(caught.value)


def test_a_damaged_copy_is_not_put_into_service(fleet: Fleet) -> None:
    archive_own(fleet)
    damage(fleet)
    before = fleet.standing()
    message = why(fleet.restored())
    assert message.startswith("spark2: engram-l1-r1of3.bin is not what its manifest or SHA256SUMS vouches for")
    assert "pack_engram.yml" in message
    assert fleet.standing() == before
    assert at_work(fleet) == set()


def test_what_is_vouched_for_goes_along(fleet: Fleet) -> None:
    fleet.take("old", fleet.old)
    (fleet.old / f"{OLD[1]}.manifest.json").unlink()
    plan = fleet.planned(str(fleet.old), str(fleet.archive))
    assert [(one["file"], one["sha256"]) for one in plan["items"]] == [
        (OLD[0], hashlib.sha256((fleet.old / OLD[0]).read_bytes()).hexdigest()),
        (OLD[1], None),
    ]


# --- a run that is cut ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def held(fleet: Fleet) -> Iterator[Callable[[], None]]:
    """The receiver waits with its verdict, as somebody else writes the list, until it is let go."""
    fleet.archive.mkdir(parents=True, exist_ok=True)
    fd = os.open(fleet.archive, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield lambda: fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


@contextlib.contextmanager
def begun(fleet: Fleet) -> Iterator[subprocess.Popen[str]]:
    """A playbook in a session of its own."""
    plays = fleet.play(archive_from=str(fleet.old), archive_to=f"spark1:{fleet.archive}")
    (fleet.place / "begun.yml").write_text(yaml.safe_dump(plays))
    command = ["ansible-playbook", "-i", fleet.inventory, str(fleet.place / "begun.yml")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as playing:
        yield playing


def until(playing: subprocess.Popen[str], word: str) -> str:
    """What was said until a line holds the word."""
    text = ""
    for line in playing.stdout or ():
        text += line
        if word in line:
            return text
    raise AssertionError(text)


def sender(fleet: Fleet) -> int:
    """The sender's process id."""
    (path,) = fleet.run_dir.glob("send-*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    return int(json.loads(path.read_text())["pid"])


def ends(pid: int) -> bool:
    """The process is gone, or goes within a minute."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
                time.sleep(0.1)
                continue
        return True
    return False


def test_a_run_that_was_cut_goes_on_and_the_next_joins_it(fleet: Fleet) -> None:
    fleet.take("old", fleet.old)
    with held(fleet) as let_go:
        with begun(fleet) as first:
            until(first, f"spark2: {OLD[0]} ")
            os.killpg(first.pid, signal.SIGKILL)
        pid = sender(fleet)
        os.kill(pid, 0)
        # Another way for the same files is refused meanwhile, and a prediction says what the other will have done.
        with pytest.raises(LockstepError, match="is being archived already"):
            fleet.planned(str(fleet.old), f"{fleet.place}/spark1/elsewhere")
        predicted = fleet.archived("--check")
        assert predicted.changed == 1, predicted.text
        with begun(fleet) as second:
            until(second, f"spark2: joins the sender of an earlier run (pid {pid})")
            let_go()
            text = second.stdout.read() if second.stdout else ""
    assert second.returncode == 0, text
    assert f"{OLD[1]} sent to spark1:" in text
    assert sums_hold(fleet.archive)
    assert [path.name for path in fleet.old.iterdir()] == ["MOVED.txt"]
    assert ends(pid)
    assert fleet.archived().changed == 0


def test_a_sender_that_is_killed_is_said_and_the_next_run_goes_on(fleet: Fleet) -> None:
    fleet.take("old", fleet.old)
    with held(fleet) as let_go:
        with begun(fleet) as playing:
            until(playing, f"spark2: {OLD[0]} ")
            os.kill(sender(fleet), signal.SIGKILL)
            let_go()
            text = playing.stdout.read() if playing.stdout else ""
        assert playing.returncode != 0
        assert "spark2: the sender ended without a word" in text
        assert "next step: run again" in text
    assert (fleet.old / OLD[0]).exists()
    done = fleet.archived()
    assert (done.rc, done.changed) == (0, 1), done.text
    assert sums_hold(fleet.archive)
    assert [path.name for path in fleet.old.iterdir()] == ["MOVED.txt"]


def test_the_examples_move_files(fleet: Fleet) -> None:
    fleet.take("old", fleet.old)
    tasks = examples(
        "shard_archive",
        {"/home/ops/dsv41-engram-tp2": str(fleet.old), "/home/ops/archive": str(fleet.archive)},
    )
    plays = [{"hosts": "spark2", "gather_facts": False, "tasks": tasks, "vars": fleet.vars}]
    done = run_playbook(plays, fleet.place, inventory=fleet.inventory)
    assert (done.rc, done.changed) == (0, 1), done.text
    (place,) = {path.parent for path in fleet.archive.parent.rglob("SHA256SUMS")}
    assert sums_hold(place)


# --- retention --------------------------------------------------------------------------------------------------------


def test_the_listing_shows_every_shard_and_what_could_go(fleet: Fleet) -> None:
    fleet.take("old", fleet.old)
    fleet.take("own", fleet.engram)
    assert fleet.archived(archive_files=OLD[:1]).rc == 0
    before = fleet.standing()
    tasks: list[dict[str, Any]] = [
        {
            "name": "list",
            "ansible.builtin.import_role": {"name": "lockstep.fleet.engram_archive", "tasks_from": "list"},
        },
        {
            "name": "show",
            "lockstep.fleet.shard_archive": {"step": "report", "lists": "__engram_archive_list"},
            "run_once": True,
        },
    ]
    plays = [{"hosts": "spark1,spark2,lost", "gather_facts": False, "tasks": tasks, "vars": fleet.vars}]
    shown = run_playbook(plays, fleet.place, inventory=fleet.inventory)
    assert (shown.rc, shown.changed) == (0, 0), shown.text
    assert fleet.standing() == before
    table = shown.results["show"]["table"]
    rows = [re.split(r"  +", line) for line in table]
    size = (fleet.made / "old" / OLD[1]).stat().st_size
    (here,) = [row for row in rows if row[0] == f"spark2:{fleet.old}"]
    assert (here[1:6], here[-2:]) == ([OLD[1], "2", "heads", "1", f"{size:,}"], ["manifest", "no"])
    (there,) = [row for row in rows if row[0] == f"spark1:{fleet.archive}"]
    assert there[1] == OLD[0]
    assert re.fullmatch(rf"20\S+Z from spark2:{fleet.old}", there[7])
    assert f"spark2: 1 files that this fleet's plan does not need; {size:,} bytes would be free" in table
    assert [row[-1] for row in rows if row[0] == f"spark2:{fleet.engram}"] == ["yes", "yes"]
    assert any(line.startswith("lost: not seen (") for line in table)


def test_a_receiver_that_was_left_waiting_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that started it was cut before its sender came."""
    monkeypatch.setattr(module.background, "ENDS_S", 0.5)
    ends = {"source": {"host": "spark2", "dir": "/old"}, "target": {"host": "spark1", "dir": str(tmp_path)}}
    params = {
        "run_dir": str(tmp_path / "run"),
        "mode": "archive",
        "route": {**ends, "address": "127.0.0.1"},
        "plan": {"items": []},
        "port": 0,
        "key": "00" * 32,
    }
    module.receive(params)
    second = module.receive(params)["pid"]
    try:
        holder = module.background.Run(params["run_dir"], "receive", str(tmp_path), "spark2:/old").holder()
        assert holder
        assert f"pid {second} on" in holder
    finally:
        os.kill(second, signal.SIGTERM)
