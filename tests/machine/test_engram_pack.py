"""Module engram_pack against this machine's own Docker Engine: what it packs, refuses, joins and leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import docker
import pack_image
import pytest
import yaml
from ansible_collections.lockstep.fleet.plugins.modules import engram_pack as module
from lockstep_core import engram, files
from lockstep_lab import checkpoint as lab
from playbook import ROOT, run_file, spoken

IMAGE = "lockstep-test:pack"
# For a container that is told so: some seconds for each layer, so that there is time to hold it halfway.
SLOW = b"""import os
if os.environ.get("SLOW"):
    import time
    from lockstep_core import files
    real = files.Reader.scatter
    files.Reader.scatter = lambda *given: (time.sleep(0.2), real(*given))[1]
"""
PROGRESS = re.compile(
    r"spark2: layer 1 (written|resumed|read back|checked) +\d+ %, [\d,]+ of [\d,]+ MB, \d+ MB/s; "
    r"all [\d,]+ of [\d,]+ MB, eta (\d+|\?) s\n"
)
FILES = ["engram-l1-r1of3.bin", "engram-l14-r1of3.bin"]


@pytest.fixture(scope="module")
def engine():
    with closing(docker.from_env(timeout=600)) as client:
        yield client


@pytest.fixture(scope="module")
def image(engine):
    yield pack_image.make(engine, IMAGE, {"sitecustomize.py": SLOW})
    engine.images.remove(IMAGE, force=True)


@pytest.fixture(autouse=True)
def clean(engine):
    def remove():
        for container in engine.containers.list(all=True, filters={"name": f"^{module.CONTAINER}$"}):
            container.remove(force=True)

    remove()
    yield
    remove()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    lab.make(path, 998)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """100 MB a layer, of which a packing can be met halfway."""
    path = tmp_path_factory.mktemp("large")
    lab.make(path, 16000)
    return path


@pytest.fixture
def pack(image, made, tmp_path):
    """A callable: the module's result (or failure) on a rank whose shards lie in ``tmp_path/engram``."""
    options = {
        "image": image.id,
        "checkpoint": str(made),
        "dir": str(tmp_path / "engram"),
        "rank": 1,
        "tp": 3,
        "split": "rows",
        "reserve_bytes": 0,
    }

    def run(*arguments, then=None, **other):
        task = {"name": "pack", "lockstep.fleet.engram_pack": {**options, **other}}
        whole = {"hosts": "all", "connection": "local", "gather_facts": False, "tasks": [task]}
        whole["vars"] = {"ansible_python_interpreter": sys.executable}
        (tmp_path / "play.yml").write_text(yaml.safe_dump([whole]))
        command = ["ansible-playbook", "-i", "spark2,", str(tmp_path / "play.yml"), *arguments]
        settings = {"ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_NOCOLOR": "1"}
        text = ""
        with subprocess.Popen(
            command, cwd=ROOT, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as playing:
            for line in playing.stdout:
                text += line
                # ``then`` happens once, while the packing is being followed.
                if then and PROGRESS.fullmatch(line):
                    then()
                    then = None
            warned = playing.stderr.read()
        assert "DEPRECATION" not in text + warned
        said = spoken(text)
        (result,) = said["plays"][0]["tasks"][0]["hosts"].values()
        changed = said["stats"]["spark2"]["changed"]
        return {**result, "text": text, "played_changed": changed}

    run.options = options
    return run


def standing(place: Path) -> dict[str, tuple[int, int, str]]:
    """Every file of a rank's directory but the lock, by inode, time and content."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in place.glob("*")
        if path.name != ".engram-pack.lock"
    }


def containers(engine) -> list[str]:
    return [c.id for c in engine.containers.list(all=True, filters={"name": f"^{module.CONTAINER}$"})]


def test_a_prediction_then_the_packing_then_nothing(engine, pack, made, tmp_path):
    predicted = pack("--check", "--diff")
    assert (predicted["changed"], (tmp_path / "engram").exists()) == (True, False)

    done = pack("--diff")
    assert (done["changed"], done["actions"], done["diff"]) == (True, predicted["actions"], predicted["diff"])
    assert [(step["file"], step["action"]) for step in done["actions"]] == [(name, "pack") for name in FILES]
    assert [shard["state"] for shard in done["shards"]] == ["ok", "ok"]
    assert [shard["sha256"] for shard in done["shards"]] == [
        hashlib.sha256((tmp_path / "engram" / name).read_bytes()).hexdigest() for name in FILES
    ]
    for name in FILES:
        assert engram.compare_sample(tmp_path / "engram" / name, made, 64, seed=1) == []
    needed = sum(shard["bytes"] for shard in done["shards"])
    assert predicted["space"]["needed"] == done["space"]["needed"] == needed
    for said in (predicted, done):
        assert re.search(
            rf"^spark2: {needed:,} bytes to write \+ 0 kept free, of [\d,]+ free in {tmp_path}/engram$",
            said["text"],
            re.MULTILINE,
        )
    for layer in (1, 14):
        assert re.search(
            rf"^spark2: layer {layer} packed, [\d.,]+ MB in [\d.]+ s, [\d.]+ MB/s$", done["text"], re.MULTILINE
        )
    assert sorted(standing(tmp_path / "engram")) == sorted(FILES + [name + ".manifest.json" for name in FILES])
    assert containers(engine) == []

    before = standing(tmp_path / "engram")
    again = pack()
    assert (again["changed"], again["played_changed"], again["work"]) == (False, 0, [])
    assert [step["action"] for step in again["actions"]] == ["keep", "keep"]
    assert again["shards"] == done["shards"]
    assert standing(tmp_path / "engram") == before


def test_a_shard_without_its_manifest_is_proven(pack, tmp_path):
    pack()
    before = standing(tmp_path / "engram")
    engram.manifest_path(tmp_path / "engram" / FILES[1]).unlink()
    predicted, done = pack("--check"), pack()
    assert [step["action"] for step in done["actions"]] == ["keep", "verify"]
    assert predicted["actions"] == done["actions"]
    assert standing(tmp_path / "engram")[FILES[1]] == before[FILES[1]]


def test_a_wrong_shard_is_named_or_set_aside_but_never_lost(pack, made, tmp_path):
    place = tmp_path / "engram"
    place.mkdir()
    engram.pack(made, place, 14, 1, 3, "heads")
    before = standing(place)
    for check in ([], ["--check"]):
        refused = pack(*check)
        lines = refused["msg"].splitlines()
        assert lines[0] == f"rank 1: {place / FILES[1]} is not this rank's shard"
        assert lines[1].startswith(
            f"  found: {(place / FILES[1]).stat().st_size:,} bytes, wrong-split: split heads, not rows; rows ["
        )
        assert lines[2].startswith("  expected: ")
        assert lines[3].startswith("  next step: ")
        assert standing(place) == before

    predicted = pack("--check", "--diff", wrong="set_aside")
    assert standing(place) == before
    done = pack("--diff", wrong="set_aside")
    assert (predicted["changed"], predicted["actions"], predicted["diff"]) == (True, done["actions"], done["diff"])
    assert predicted["set_aside"] == [str(place / name) for name in (FILES[1], FILES[1] + ".manifest.json")]
    assert [re.sub(r"\.aside-\d{8}T\d{6}Z$", "", path) for path in done["set_aside"]] == predicted["set_aside"]
    after = standing(place)
    assert [after[Path(path).name] for path in done["set_aside"]] == [
        before[Path(path).name] for path in predicted["set_aside"]
    ]
    assert [shard["state"] for shard in done["shards"]] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"checkpoint": "/nowhere/checkpoint"}, "no checkpoint in /nowhere/checkpoint"),
        ({"reserve_bytes": 1 << 60}, "not enough room in"),
        ({"image": "lockstep-test:none"}, "the engine image to pack with is not on this rank"),
        ({"split": "heads"}, "splits the Engram tables in another way"),
        ({"layers": [1, 2]}, "no Engram table for layer 2"),
        ({"rank": 3}, "no such rank"),
        ({"docker_host": "unix:///nowhere/docker.sock"}, "does not answer"),
    ],
)
def test_what_cannot_end_well_ends_before_anything_is_made(other, words, engine, pack, tmp_path):
    refused = pack(**other)
    assert refused["failed"] is True
    assert refused["msg"].startswith(f"rank {other.get('rank', 1)}: ")
    assert words in refused["msg"]
    assert "  found: " in refused["msg"]
    assert "  next step: " in refused["msg"] or "  expected: " in refused["msg"]
    assert not (tmp_path / "engram").exists()
    assert containers(engine) == []


def test_nothing_is_packed_while_a_benchmark_runs(engine, pack, tmp_path):
    lock = tmp_path / "bench.lock"
    with files.lock(lock, "benchmark of e8"):
        for check in ([], ["--check"]):
            refused = pack(*check, bench_lock=str(lock))
            assert refused["msg"].startswith("rank 1: a benchmark runs on this rank\n  found: benchmark of e8, pid ")
            assert "next step: wait for its end" in refused["msg"]
        assert not (tmp_path / "engram").exists()
    pack(bench_lock=str(lock))
    with files.lock(lock, "benchmark of e8"):
        # A look costs nothing, reading through does.
        assert pack(bench_lock=str(lock))["changed"] is False
        assert [shard["state"] for shard in pack(state="verified", verify="quick", bench_lock=str(lock))["shards"]] == [
            "ok",
            "ok",
        ]
        assert "a benchmark runs" in pack(state="verified", bench_lock=str(lock))["msg"]


def test_packing_beside_an_engine_that_serves_is_warned_of(engine, pack, image):
    serving = engine.containers.run(
        image.id, ["-c", "import time; time.sleep(600)"], entrypoint="python3", detach=True,
        name="lockstep-test-serves", labels={"lockstep.launch": "20261129T171054Z-e8-d59e24"},
    )  # fmt: skip
    try:
        done = pack()
        assert done["changed"] is True
        words = "lockstep-test-serves serves on this rank meanwhile (launch 20261129T171054Z-e8-d59e24)"
        assert [warning for warning in done["warnings"] if warning.startswith(words)]
        assert "warnings" not in pack()
    finally:
        serving.remove(force=True)


def test_a_look_at_each_level_names_the_fault_and_changes_nothing(engine, pack, made, tmp_path):
    place = tmp_path / "engram"
    assert [shard["fault"] for shard in pack(state="verified")["shards"]] == ["missing", "missing"]
    assert not place.exists()
    pack()
    flipped = place / FILES[0]
    before = flipped.stat()
    byte = flipped.read_bytes()[9000]
    with flipped.open("r+b") as file:
        file.seek(9000)
        file.write(bytes([byte ^ 1]))
    os.utime(flipped, ns=(before.st_atime_ns, before.st_mtime_ns))
    held = standing(place)
    for level, faults in (("quick", [None, None]), ("full", ["bit-flipped", None])):
        for check in ([], ["--check"]):
            found = pack(*check, state="verified", verify=level)
            assert ([shard["fault"] for shard in found["shards"]], found["changed"]) == (faults, False)
    assert "spark2: layer 1 bit-flipped: 1 of " in found["text"]
    assert "spark2: layer 14 ok\n" in found["text"]
    assert standing(place) == held
    with flipped.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(flipped.stat().st_size - 4096))
    found = pack(state="verified", verify="sample")
    assert [shard["fault"] for shard in found["shards"]] == ["zero-filled", None]
    # Its time of change tells packing, which proves it wrong and, told to, packs it again.
    assert "zero-filled" in pack()["msg"]
    mended = pack(wrong="set_aside")
    assert [Path(path).name.split(".aside-")[0] for path in mended["set_aside"]] == [
        FILES[0],
        FILES[0] + ".manifest.json",
    ]
    assert [shard["state"] for shard in mended["shards"]] == ["ok", "ok"]
    assert hashlib.sha256(flipped.read_bytes()).hexdigest() == mended["shards"][0]["sha256"]
    assert containers(engine) == []


def begin(engine, image, params, place: Path):
    """A packing that an interrupted playbook left: started as the module starts it, and held halfway."""
    place.mkdir(exist_ok=True)
    body = module.body(image.id, params)
    body["Env"].append("SLOW=1")
    made = engine.api._post_json(engine.api._url("/containers/create"), body, params={"name": module.CONTAINER}).json()
    container = engine.containers.get(made["Id"])
    container.start()
    until = time.monotonic() + 60
    while not list(place.glob(f"*{files.PARTIAL}")):
        assert time.monotonic() < until
        time.sleep(0.001)
    container.pause()
    return container


@pytest.fixture
def whole(pack, large):
    """Options of a packing of 200 MB."""
    defaults = {name: spec["default"] for name, spec in module.ARGUMENT_SPEC.items() if "default" in spec}
    return {**defaults, **pack.options, "checkpoint": str(large), "rank": 0, "tp": 1, "docker_host": None}


def test_the_next_run_joins_a_packing_that_was_left(engine, image, pack, whole, tmp_path):
    held = begin(engine, image, whole, tmp_path / "engram")
    host = engine.api.inspect_container(held.id)["HostConfig"]
    assert (host["Privileged"], host["CapDrop"]) == (False, ["ALL"])
    assert [name.removeprefix("CAP_") for name in host["CapAdd"]] == ["DAC_OVERRIDE"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["SecurityOpt"]) == ("none", True, ["no-new-privileges"])
    writable = {m["Destination"]: m["RW"] for m in engine.api.inspect_container(held.id)["Mounts"]}
    assert writable == {whole["checkpoint"]: False, whole["dir"]: True}

    other = pack(checkpoint=whole["checkpoint"], rank=0, tp=2)
    assert other["msg"].startswith(
        "rank 0: another packing, or reading through, runs on this rank\n  found: container "
    )
    joined = pack(checkpoint=whole["checkpoint"], rank=0, tp=1, then=held.unpause)
    # The progress line was seen, or nothing would have let the packing go on.
    assert [shard["state"] for shard in joined["shards"]] == ["ok", "ok"]
    assert containers(engine) == []


def test_a_packing_that_is_killed_says_so_and_the_next_run_mends_it(engine, image, pack, whole, tmp_path):
    held = begin(engine, image, whole, tmp_path / "engram")
    failed = pack(checkpoint=whole["checkpoint"], rank=0, tp=1, then=held.kill)
    assert failed["msg"].startswith("rank 0: packing failed\n  found: exit status 137")
    assert containers(engine) == []
    mended = pack(checkpoint=whole["checkpoint"], rank=0, tp=1)
    assert [shard["state"] for shard in mended["shards"]] == ["ok", "ok"]
    assert not list((tmp_path / "engram").glob(f"*{files.PARTIAL}"))


def test_a_container_that_ended_unseen_is_cleared_away(engine, image, pack, whole):
    pack()
    made = engine.api._post_json(
        engine.api._url("/containers/create"), module.body(image.id, whole), params={"name": module.CONTAINER}
    )
    assert json.loads(made.text)["Id"] in containers(engine)
    cleared = pack()
    assert (cleared["changed"], cleared["work"], containers(engine)) == (True, [], [])
    assert pack()["changed"] is False


def test_an_image_without_the_tool_says_what_it_lacks(engine, pack, image):
    bare = engine.images.get(image.id)
    container = engine.containers.create(bare.id, ["python3"])
    renamed = container.commit("lockstep-test", "bare", changes=["ENV PYTHONPATH=/nowhere"])
    container.remove()
    try:
        failed = pack(image=renamed.id)
        assert "rank 1: packing failed\n  found: exit status 1" in failed["msg"]
        assert "lockstep_tools" in failed["msg"]
        assert containers(engine) == []
    finally:
        engine.images.remove(renamed.id, force=True)


# --- the playbooks, on three ranks of this machine --------------------------------------------------------------------


@pytest.fixture
def ranks(image, made, tmp_path):
    """A callable that plays a playbook of the root on hosts spark1 to spark3, one after the other."""
    common = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "fleet_become": False,
        "fleet_engram_dir": f"{tmp_path}/{{{{ inventory_hostname }}}}",
        "fleet_state_dir": f"{tmp_path}/state-{{{{ inventory_hostname }}}}",
        "engram_checkpoint": str(made),
        "engram_pack_image": image.id,
        "engram_pack_split": "rows",
        "engram_reserve_bytes": 0,
    }
    # Of each host, for the repository's own values win over a group's.
    hosts = {f"spark{rank + 1}": {**common, "fleet_rank": rank} for rank in range(3)}
    inventory = {
        "fleet": {
            "children": {
                "head": {"hosts": {"spark1": hosts["spark1"]}},
                "workers": {"hosts": {name: hosts[name] for name in ("spark2", "spark3")}},
            },
        }
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    for name in hosts:
        (tmp_path / f"state-{name}").mkdir()

    def run(playbook, *words):
        return run_file(ROOT / playbook, "--forks", "1", *words, inventory=str(tmp_path / "hosts.yml"))

    return run


def held(tmp_path: Path) -> dict[str, tuple[int, int, str]]:
    return {f"{host}/{name}": seen for host in HOSTS for name, seen in standing(tmp_path / host).items()}


HOSTS = ("spark1", "spark2", "spark3")


def test_pack_engram_packs_layers_and_sizes_beside_each_other(ranks, made, tmp_path):
    first = ranks("pack_engram.yml")
    assert (first.rc, first.changed) == (0, 3), first.text
    before = held(tmp_path)
    assert sorted(name for name in before if name.endswith(".bin")) == [
        f"{host}/engram-l{layer}-r{rank}of3.bin" for rank, host in enumerate(HOSTS) for layer in (1, 14)
    ]
    verified = ranks("verify_engram.yml")
    assert (verified.rc, verified.changed, held(tmp_path)) == (0, 0, before), verified.text

    larger = ranks("pack_engram.yml", "-e", "engram_tp_size=4", "-e", "layers=[14]")
    assert larger.rc == 0, larger.text
    assert "no host here has rank 3 of 4" in larger.text
    after = held(tmp_path)
    assert {name: after[name] for name in before} == before
    assert sorted(name for name in set(after) - set(before) if name.endswith(".bin")) == [
        f"{host}/engram-l14-r{rank}of4.bin" for rank, host in enumerate(HOSTS)
    ]
    smaller = ranks("pack_engram.yml", "-e", "engram_tp_size=2", "--check")
    assert smaller.rc == 0, smaller.text
    assert "rank 2 has no shard at TP size 2" in smaller.text
    assert held(tmp_path) == after

    forced = ranks("pack_engram.yml", "-e", "force=true", "-e", "layers=1", "--limit", "spark2")
    assert (forced.rc, forced.changed) == (0, 1), forced.text
    again = held(tmp_path)
    assert [name for name in after if name.endswith(".bin") and again[name][0] != after[name][0]] == [
        "spark2/engram-l1-r1of3.bin"
    ]
    assert {name: seen[2] for name, seen in again.items() if name.endswith(".bin")} == {
        name: seen[2] for name, seen in after.items() if name.endswith(".bin")
    }
    with files.lock(tmp_path / "state-spark2" / "bench.lock", "benchmark of e8"):
        measured = ranks("pack_engram.yml", "-e", "force=true", "-e", "layers=[1]")
    assert measured.rc != 0
    assert "rank 1: a benchmark runs on this rank" in measured.text
    assert "benchmark of e8" in measured.text
    assert held(tmp_path)["spark2/engram-l1-r1of3.bin"] == again["spark2/engram-l1-r1of3.bin"]
    assert ranks("pack_engram.yml", "-e", "layers=[2]").rc != 0


@pytest.mark.parametrize("size", ["three", "0", "-3", "65"])
def test_a_tp_size_that_no_fleet_has_is_refused(ranks, size):
    played = ranks("verify_engram.yml", "-e", f"engram_tp_size={size}")
    assert played.rc != 0
    assert f"found: {size}\n" in played.results["Check the TP size"]["msg"]
    assert "See to this rank's shards" not in played.results


def test_verify_engram_names_rank_fault_and_next_step(ranks, made, tmp_path):
    packed = ranks("pack_engram.yml")
    assert packed.rc == 0, packed.text
    other, torn = tmp_path / "spark2" / FILES[1], tmp_path / "spark3" / "engram-l1-r2of3.bin"
    # Rank 0's shard under rank 1's name, and a shard of rank 2 whose disk flipped a bit.
    for suffix in ("", engram.MANIFEST_SUFFIX):
        Path(f"{other}{suffix}").write_bytes(Path(f"{tmp_path}/spark1/engram-l14-r0of3.bin{suffix}").read_bytes())
    before = torn.stat()
    data = bytearray(torn.read_bytes())
    data[5000] ^= 4
    torn.write_bytes(data)
    os.utime(torn, ns=(before.st_atime_ns, before.st_mtime_ns))
    seen = held(tmp_path)
    quick, full = ranks("verify_engram.yml", "-e", "engram_verify=quick"), ranks("verify_engram.yml")
    assert held(tmp_path) == seen
    for played in (quick, full):
        assert played.rc != 0
        said = played.results["Show what every rank holds"]["msg"]
        assert "rank 1 (spark2), layer 14: wrong-rank: rank 0, not 1; rows [" in said
        assert "\n  next step: look at the file; ansible-playbook pack_engram.yml -e engram_wrong=set_aside" in said
    assert "bit-flipped" not in quick.text
    assert "rank 2 (spark3), layer 1: bit-flipped: 1 of " in full.results["Show what every rank holds"]["msg"]
