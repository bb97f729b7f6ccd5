"""A whole fleet goes to another base and back, and what nothing needs any more is pruned. Asked of Docker on each rank.

The tests run in order over one fleet that serves e8 on the pinned base. The hub's tag names the other one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import fleet
import pytest
import yaml
from fleet import BASE, HEAD, HOSTS, OVERLAY, SECOND, THIRD

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("serving")]

REPOSITORIES = (BASE.rpartition(":")[0], OVERLAY.rpartition(":")[0], "lockstep-registry")


@pytest.fixture(name="made", scope="module")
def _made() -> dict[str, dict[str, str]]:
    """What the lab's hub has: `base` and `moved`, each with `id` and `digest`. Known once the lab is up."""
    return yaml.safe_load((fleet.GENERATED / "lab.yml").read_text())["fleet_lab_made"]


def image(name: str) -> str:
    """The Id behind a name, the same on every rank."""
    (found,) = {fleet.on(host, f"docker image inspect --format '{{{{.Id}}}}' {name}").strip() for host in HOSTS}
    return found


def held(host: str) -> dict[str, set[str]]:
    """The fleet's own images of a host: Id, and its names by tag."""
    found: dict[str, set[str]] = {}
    for line in fleet.on(host, "docker images --no-trunc --format '{{.ID}} {{.Repository}}:{{.Tag}}'").splitlines():
        image_id, _, name = line.partition(" ")
        if name.startswith(REPOSITORIES):
            found.setdefault(image_id, set()).add(name)
    return found


def runs() -> str:
    """The Id of the image that every rank runs."""
    (found,) = {
        fleet.on(host, f"docker inspect --format '{{{{.Image}}}}' {fleet.CONTAINER[host]}").strip() for host in HOSTS
    }
    return found


seen: dict[str, str] = {}


def test_one_word_brings_the_whole_fleet_to_another_base(made):
    seen["old"] = runs()
    assert image(BASE) == made["base"]["id"]
    done = fleet.play("serve.yml", "-e", "arm=e8", "-e", f"base_digest={made['moved']['digest']}")
    assert done.rc == 0, done.text
    assert image(BASE) == made["moved"]["id"]
    seen["new"] = runs()
    assert seen["new"] == image(OVERLAY) != seen["old"]
    label = '{{index .Config.Labels "lockstep.base_digest"}}'
    assert {fleet.on(host, f"docker image inspect --format '{label}' {OVERLAY}").strip() for host in HOSTS} == {
        made["moved"]["digest"]
    }
    for host in HOSTS:  # the old base and the overlay on it have names still
        assert any(name.startswith(f"{BASE}-") for name in held(host)[made["base"]["id"]])
        assert held(host)[seen["old"]]


def test_a_base_that_nobody_has_ends_before_anything_is_touched():
    before = {host: held(host) for host in HOSTS}
    done = fleet.play("serve.yml", "-e", "arm=e8", "-e", "base_digest=sha256:" + "0" * 64)
    assert done.rc != 0
    assert "the pinned base is not on this rank (missing_digest)" in done.text
    assert ({host: held(host) for host in HOSTS}, runs()) == (before, seen["new"])


def test_the_way_back_moves_no_byte(made):
    done = fleet.play("rollback.yml")
    assert done.rc == 0, done.text
    assert (runs(), image(BASE)) == (seen["old"], made["base"]["id"])  # by Id: the overlay's name need not follow
    assert not [task for task, _, status in done.results if status == "changed" and "ull" in task]
    assert fleet.play("converge_images.yml").rc == 0
    assert image(OVERLAY) == seen["old"]


# --- prune ------------------------------------------------------------------------------------------------------------

JOURNAL = f"{fleet.STATE_DIR}/journal"


@pytest.fixture(name="theirs", scope="module")
def _theirs() -> Iterator[list[str]]:
    """Names that other people gave images on the second rank, none of which stands on a base of the fleet's."""
    # Of the public repository; under a dated name with another image's Id; under its own dated name, and one of theirs.
    names = [f"{BASE.rpartition(':')[0]}:theirs", f"{BASE}-0123456789ab-20260924", "mine:backup"]
    for name in names:
        fleet.on(SECOND, f"echo {name} > /tmp/theirs; tar -C /tmp -c theirs | docker import - {name}; rm /tmp/theirs")
    image_id = fleet.on(SECOND, f"docker image inspect --format '{{{{.Id}}}}' {names[-1]}").strip()
    names.append(f"{BASE}-{image_id[7:19]}-20260924")
    fleet.on(SECOND, f"docker tag {names[-2]} {names[-1]}")
    yield names
    fleet.on(SECOND, f"docker rmi {' '.join(names)}")


def everything() -> dict[str, set[str]]:
    """Ids and names of all images of each host, the fleet's own or not."""
    shown = "'{{.ID}} {{.Repository}}:{{.Tag}} {{.Digest}}'"
    return {
        host: set(fleet.on(host, f"docker images --no-trunc --digests --format {shown}").splitlines()) for host in HOSTS
    }


def ids(lines: set[str]) -> set[str]:
    return {line.split()[0] for line in lines}


def names(lines: set[str]) -> set[str]:
    return {line.split()[1] for line in lines}


def test_what_a_launch_of_the_journal_needs_is_not_pruned(made, theirs):
    serving, before = fleet.containers(), everything()
    done = fleet.play("prune_images.yml")
    assert done.rc == 0, done.text
    after = everything()
    for host in HOSTS:
        assert {made["base"]["id"], made["moved"]["id"], seen["old"], seen["new"]} <= ids(after[host])
        assert not ids(before[host] - after[host]) & ids(after[host])  # nothing that stays has lost a name
        assert re.search(rf"{host} +stays +\S*: launch \S+ needs it", done.text)
    assert {*theirs} <= names(after[SECOND])
    assert f"Lockstep did not name it {theirs[2]}" in done.text
    assert theirs[0] not in done.text
    assert fleet.containers() == serving


def test_a_journal_that_is_not_read_keeps_everything():
    before = everything()
    limited = fleet.play("prune_images.yml", "--limit", HEAD)
    assert limited.rc != 0
    assert "run it without --limit" in limited.text
    damaged = f"{JOURNAL}/20260101T000000Z-b1-000000.json"
    fleet.on(THIRD, f"echo '{{' > {damaged}")
    try:
        done = fleet.play("prune_images.yml")
    finally:
        fleet.on(THIRD, f"rm {damaged}")
    assert done.rc != 0
    assert f"{THIRD}: what a launch needs cannot be told, so nothing is removed" in done.text
    assert damaged in done.text
    assert everything() == before


def test_what_only_launches_needed_that_are_given_up_goes_and_nothing_else(made, theirs):
    for host in HOSTS:
        fleet.on(host, f"grep -l {made['moved']['digest']} {JOURNAL}/*.json | xargs rm")
    serving, before = fleet.containers(), everything()
    predicted = fleet.play("prune_images.yml", "--check", "--diff")
    assert predicted.rc == 0, predicted.text
    assert everything() == before

    done = fleet.play("prune_images.yml")
    assert done.rc == 0, done.text
    assert predicted.recap == done.recap == dict.fromkeys(HOSTS, 1)
    after = everything()
    for host in HOSTS:
        gone = before[host] - after[host]
        assert ids(gone) == {made["moved"]["id"], seen["new"]}
        assert not ids(gone) & ids(after[host])
        assert after[host] <= before[host]
        (freed,) = re.findall(rf"{host} +freed +([0-9.]+) MiB of image layers", done.text)
        assert float(freed) > 0
    assert {*theirs} <= names(after[SECOND])
    assert fleet.containers() == serving

    again = fleet.play("prune_images.yml")
    assert (again.rc, set(again.recap.values())) == (0, {0}), again.text
