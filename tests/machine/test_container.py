"""Modules container_retire and preflight and role container, against this machine's own Docker Engine."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import time
from contextlib import closing
from pathlib import Path

import docker
import pytest
import yaml
from playbook import ROOT, examples, run_file, run_playbook

# Names of this run's own: two runs at a time must not stop each other's containers.
NAME = f"lockstep-test-{os.getpid()}"
VOLUME = f"{NAME}-volume"
LAUNCH = "20260924T094700Z-e8-0a1b2c"
# Ends on SIGTERM with a last word and its own exit status, as an engine that drains.
ENGINE = "trap 'echo draining; exit 7' TERM; echo ready; echo trouble >&2; while :; do sleep 0.1; done"


@pytest.fixture(scope="module")
def engine():
    with closing(docker.from_env(timeout=600)) as client:
        yield client


@pytest.fixture(scope="module")
def image(engine):
    """A tiny image of this machine's own shell and sleep: no registry is needed."""
    wanted = {"/bin/sh", "/bin/sleep"}
    for program in ("/bin/sh", "/bin/sleep"):
        linked = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
        wanted |= {word for word in linked.split() if word.startswith("/")}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
        for path in sorted(wanted):
            tar.add(path, recursive=False)
    imported = engine.api.import_image_from_data(packed.getvalue(), repository=NAME, tag="engine")
    assert "sha256:" in imported
    made = engine.images.get(f"{NAME}:engine")
    yield made
    engine.images.remove(made.id, force=True)


@pytest.fixture(autouse=True)
def clean(engine):
    def remove():
        for container in engine.containers.list(all=True, filters={"name": f"^{NAME}$"}):
            container.remove(force=True)
        for volume in engine.volumes.list(filters={"name": f"^{VOLUME}$"}):
            volume.remove()

    remove()
    yield
    remove()


@pytest.fixture
def play(tmp_path):
    def run(tasks, *arguments, **keys):
        whole = {"hosts": "all", "connection": "local", "gather_facts": False, "tasks": tasks, **keys}
        whole["vars"] = {"ansible_python_interpreter": sys.executable, **keys.get("vars", {})}
        return run_playbook([whole], tmp_path, *arguments, inventory="spark1,")

    return run


def start(engine, image, **keys):
    """A container that is up: its last line before serving has been said."""
    container = engine.containers.run(
        image.id, ["/bin/sh", "-c", ENGINE], name=NAME, detach=True, network_mode="none", **keys
    )
    wait_for(lambda: b"trouble" in container.logs())
    return container


def wait_for(condition, seconds: float = 60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def retire(tmp_path, **options):
    return {
        "name": "retire",
        "lockstep.fleet.container_retire": {"name": NAME, "logs_dir": str(tmp_path), "timeout_s": 10, **options},
    }


def there(engine) -> bool:
    return bool(engine.containers.list(all=True, filters={"name": f"^{NAME}$"}))


class TestRetire:
    def test_ends_gracefully_and_the_log_holds_the_last_word(self, engine, image, play, tmp_path):
        engine.volumes.create(VOLUME)
        container = start(engine, image, labels={"lockstep.launch": LAUNCH}, volumes=[f"{VOLUME}:/data"])
        log = tmp_path / f"{LAUNCH}.log"

        predicted = play([retire(tmp_path)], "--check", "--diff").results["retire"]
        container.reload()
        assert (container.status, log.exists()) == ("running", False)
        assert (predicted["changed"], predicted["log"]) == (True, str(log))

        done = play([retire(tmp_path)], "--diff").results["retire"]
        assert done["changed"] is True
        assert done["diff"] == predicted["diff"]
        assert done["container"] == {
            "id": container.id,
            "image_id": image.id,
            "state": "running",
            "launch": LAUNCH,
            "exit_code": 7,
            "oom_killed": False,
        }
        assert sorted(log.read_text().splitlines()) == ["draining", "ready", "trouble"]
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert not there(engine)
        # What other ranks may be reading from stays.
        assert [volume.name for volume in engine.volumes.list(filters={"name": f"^{VOLUME}$"})] == [VOLUME]

        again = play([retire(tmp_path)])
        assert (again.changed, again.results["retire"]["container"]) == (0, None)

    def test_the_controllers_copy_stays_among_the_results(self, engine, image, play, tmp_path):
        start(engine, image, labels={"lockstep.launch": LAUNCH})
        asked = [retire(tmp_path, results_dir=str(tmp_path / "results"))]
        kept = tmp_path / "results" / LAUNCH / "logs" / "spark1.log"
        predicted = play(asked, "--check").results["retire"]
        assert (predicted["kept"], kept.exists()) == (str(kept), False)
        done = play(asked).results["retire"]
        assert (done["kept"], "packed_log" in done) == (str(kept), False)
        assert kept.read_text() == (tmp_path / f"{LAUNCH}.log").read_text()
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        # A label may hold anything.
        start(engine, image, labels={"lockstep.launch": "../.."})
        done = play(asked).results["retire"]
        assert (done["kept"], Path(done["log"]).parent) == (None, tmp_path)
        assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [LAUNCH]

    def test_a_log_that_the_controller_cannot_keep_is_found_on_the_rank(self, engine, image, play, tmp_path):
        (tmp_path / "results").write_text("not a directory")
        start(engine, image, labels={"lockstep.launch": LAUNCH})
        failed = play([retire(tmp_path, results_dir=str(tmp_path / "results"))]).results["retire"]
        assert failed["failed"] is True
        assert f"it lies on the rank: {tmp_path}/{LAUNCH}.log" in failed["msg"]
        assert (tmp_path / f"{LAUNCH}.log").read_text()

    def test_a_paused_one_is_ended_too(self, engine, image, play, tmp_path):
        start(engine, image).pause()
        done = play([retire(tmp_path)]).results["retire"]
        assert (done["container"]["state"], done["container"]["exit_code"]) == ("paused", 7)
        assert not there(engine)

    def test_one_that_will_not_end_is_killed_in_time(self, engine, image, play, tmp_path):
        deaf = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
        container = engine.containers.run(image.id, ["/bin/sh", "-c", deaf], name=NAME, detach=True)
        wait_for(lambda: b"ready" in container.logs())
        done = play([retire(tmp_path, timeout_s=1)]).results["retire"]
        assert done["container"]["exit_code"] == 128 + 9

    def test_one_that_has_ended_and_has_no_launch(self, engine, image, play, tmp_path):
        container = engine.containers.run(image.id, ["/bin/sh", "-c", "echo died; exit 3"], name=NAME, detach=True)
        container.wait()
        done = play([retire(tmp_path)]).results["retire"]
        assert (done["container"]["exit_code"], done["container"]["launch"]) == (3, None)
        assert Path(done["log"]).name == f"{NAME}-{container.id[:12]}.log"
        assert Path(done["log"]).read_text() == "died\n"

    def test_the_examples_run_as_they_are_written(self, engine, image, play, tmp_path):
        start(engine, image)
        done = play(examples("container_retire", {"dsv41-worker": NAME, "/srv/lockstep/logs": str(tmp_path)}))
        assert (done.rc, done.changed) == (0, 1), done.text
        assert not there(engine)

    def test_a_log_that_cannot_be_written_keeps_the_container(self, engine, image, play, tmp_path):
        start(engine, image)
        done = play([retire(tmp_path / "missing")])
        assert done.rc != 0
        assert there(engine)


class TestRole:
    @pytest.fixture
    def plan(self, image, tmp_path):
        (tmp_path / "cache").mkdir()
        return {
            "name": "e8",
            "plan_sha256": "0a1b2c" + "0" * 58,
            "images": {"overlay": {"id": image.id}},
            "container": {"network_mode": "none", "ipc_mode": "private", "shm_size": "64m", "init": True},
            "ranks": [
                {
                    "host": "spark1",
                    "rank": 0,
                    "container": NAME,
                    "argv": ["/bin/sh", "-c", ENGINE],
                    "env": {
                        "VERSION": "5.10",
                        "HASH": "0123456",
                        "TIME": "12:30:45",
                        "JSON": '{"a": "$b"}',
                        "EMPTY": "",
                    },
                    "mounts": [
                        {"source": str(tmp_path / "cache"), "target": "/cache", "read_only": True},
                        {"source": VOLUME, "target": "/model", "read_only": False},
                    ],
                }
            ],
        }

    @staticmethod
    def role(entry: str | None = None):
        include = {"name": "lockstep.fleet.container", **({"tasks_from": entry} if entry else {})}
        return {"name": "role", "ansible.builtin.include_role": include}

    @pytest.fixture
    def variables(self, plan, tmp_path):
        (tmp_path / "logs").mkdir()
        return {
            "container_name": NAME,
            "container_logs_dir": str(tmp_path / "logs"),
            "container_results_dir": str(tmp_path / "results"),
            "container_stop_timeout_s": 10,
            "container_plan": plan,
            "container_launch": LAUNCH,
        }

    def test_starts_what_the_plan_says_and_nothing_twice(self, engine, play, plan, variables):
        predicted = play([self.role("start")], "--check", "--diff", vars=variables)
        assert (predicted.rc, predicted.changed, there(engine)) == (0, 1, False)

        assert play([self.role("start")], vars=variables).changed == 1
        container = engine.containers.get(NAME)
        config, host = container.attrs["Config"], container.attrs["HostConfig"]
        env = dict(item.split("=", 1) for item in config["Env"])
        assert {key: env[key] for key in plan["ranks"][0]["env"]} == plan["ranks"][0]["env"]
        assert config["Labels"] == {
            "lockstep.launch": LAUNCH,
            "lockstep.plan_sha256": plan["plan_sha256"],
            "lockstep.arm": "e8",
        }
        assert container.attrs["Image"] == plan["images"]["overlay"]["id"]
        assert config["Cmd"] == plan["ranks"][0]["argv"]
        assert (host["NetworkMode"], host["ShmSize"], host["Init"]) == ("none", 64 << 20, True)
        assert host["RestartPolicy"]["Name"] in ("no", "")
        assert host["Privileged"] is False
        assert {(m["Type"], m["Destination"], m["RW"]) for m in container.attrs["Mounts"]} == {
            ("bind", "/cache", False),
            ("volume", "/model", True),
        }

        again = play([self.role("start")], vars=variables)
        assert again.changed == 0
        assert engine.containers.get(NAME).id == container.id

    def test_a_check_run_before_the_image_is_built(self, engine, play, variables, plan):
        for unknown in (None, "sha256:" + "00" * 32):
            plan["images"]["overlay"]["id"] = unknown
            predicted = play([self.role("start")], "--check", vars=variables)
            assert (predicted.rc, predicted.changed) == (0, 1)
        done = play([self.role("start")], vars=variables)
        assert done.rc != 0
        assert "Cannot find image" in done.text
        assert not there(engine)

    def test_replaces_what_runs_and_keeps_its_log_here_and_there(self, engine, image, play, variables, tmp_path):
        old = start(engine, image, labels={"lockstep.launch": LAUNCH})
        variables["container_launch"] = "20260925T000000Z-e8-0a1b2c"
        done = play([self.role()], vars=variables)
        assert done.rc == 0, done.text
        new = engine.containers.get(NAME)
        assert new.id != old.id
        assert new.labels["lockstep.launch"] == "20260925T000000Z-e8-0a1b2c"
        kept = tmp_path / "logs" / f"{LAUNCH}.log"
        fetched = tmp_path / "results" / LAUNCH / "logs" / "spark1.log"
        assert kept.read_text() == fetched.read_text()
        assert "draining" in kept.read_text()

        assert play([self.role("stop")], vars=variables).changed == 1
        assert not there(engine)
        assert play([self.role("stop")], vars=variables).changed == 0


class TestStop:
    """stop.yml as it is, on three ranks that are this one machine."""

    @pytest.fixture
    def ranks(self, engine, image, tmp_path):
        names = {"spark1": f"{NAME}-0", "spark2": f"{NAME}-1", "spark3": f"{NAME}-2"}
        hosts = {
            host: {
                "ansible_connection": "local",
                "ansible_python_interpreter": sys.executable,
                "fleet_rank": rank,
                "fleet_role": "worker" if rank else "head",
                "fleet_container_name": name,
                "fleet_state_dir": str(tmp_path / host),
            }
            for rank, (host, name) in enumerate(names.items())
        }
        for host in hosts:
            (tmp_path / host / "logs").mkdir(parents=True)
        groups = {
            "head": {"hosts": {"spark1": hosts["spark1"]}},
            "workers": {"hosts": {host: hosts[host] for host in ("spark2", "spark3")}},
        }
        inventory = tmp_path / "hosts.yml"
        inventory.write_text(yaml.safe_dump({"fleet": {"children": groups}}))
        started = {
            host: engine.containers.run(
                image.id, ["/bin/sh", "-c", ENGINE], name=name, detach=True, labels={"lockstep.launch": LAUNCH}
            )
            for host, name in names.items()
        }
        wait_for(lambda: all(b"trouble" in container.logs() for container in started.values()))
        yield inventory, started
        for name in names.values():
            for container in engine.containers.list(all=True, filters={"name": f"^{name}$"}):
                container.remove(force=True)

    def test_head_first_logs_kept_and_nothing_to_do_the_second_time(self, engine, ranks, tmp_path):
        inventory, started = ranks
        results = tmp_path / "results"

        def stop(*arguments: str):
            variables = {"fleet_become": False, "fleet_results_dir": str(results)}
            return run_file(ROOT / "stop.yml", *arguments, "-e", json.dumps(variables), inventory=str(inventory))

        predicted = stop("--check", "--diff")
        assert (predicted.rc, predicted.changed) == (0, 3), predicted.text
        assert sum(container.name.startswith(NAME) for container in engine.containers.list(ignore_removed=True)) == 3

        done = stop()
        assert (done.rc, done.changed) == (0, 3), done.text
        assert [c.name for c in engine.containers.list(all=True, ignore_removed=True) if c.name.startswith(NAME)] == []
        kept = {host: tmp_path / host / "logs" / f"{LAUNCH}.log" for host in started}
        assert all("draining" in path.read_text() for path in kept.values())
        assert kept["spark1"].stat().st_mtime < min(kept[host].stat().st_mtime for host in ("spark2", "spark3"))
        assert sorted(path.name for path in (results / LAUNCH / "logs").iterdir()) == [f"{h}.log" for h in started]
        assert done.results["Show every rank"]["msg"].splitlines() == [
            f"{host}     stopped: {LAUNCH}, exit status 7, log in {path}" for host, path in kept.items()
        ]

        again = stop()
        assert (again.rc, again.changed) == (0, 0)
        assert again.results["Show every rank"]["msg"].splitlines() == [f"{host}     nothing ran" for host in started]


class TestPreflight:
    def test_makes_what_is_missing_and_sets_private_modes(self, engine, play, tmp_path):
        state = tmp_path / "state"
        state.mkdir(mode=0o755)
        (tmp_path / "there").mkdir(mode=0o750)
        options = {"state_dir": str(state), "directories": [str(tmp_path / "there"), str(tmp_path / "a" / "cache")]}
        task = [{"name": "preflight", "lockstep.fleet.preflight": options}]

        predicted = play(task, "--check", "--diff").results["preflight"]
        assert predicted["changed"] is True
        assert not (tmp_path / "a").exists()
        done = play(task, "--diff").results["preflight"]
        assert done["diff"] == predicted["diff"]
        assert done["made"] == [str(state / name) for name in ("journal", "env", "logs")] + [
            str(tmp_path / "a" / "cache")
        ]
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (state, *state.iterdir())}
        assert modes == dict.fromkeys(("state", "journal", "env", "logs"), 0o700)
        assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o750
        assert done["docker"] == engine.version()["Version"]
        assert play(task).changed == 0

    def test_the_examples_run_as_they_are_written(self, play, tmp_path):
        places = {"/srv/lockstep": f"{tmp_path}/state", "/root/.cache": f"{tmp_path}/c", "/srv/dsv41": f"{tmp_path}/d"}
        done = play(examples("preflight", places))
        assert (done.rc, done.changed) == (0, 1), done.text
        assert (tmp_path / "d" / "engram").is_dir()
