"""The room dockerd: the handed case B08, merging a daemon.json, and what an engine's sentences mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lockstep_core import dockerd
from lockstep_core.errors import LockstepError

CASES = {
    case["id"]: case for case in map(json.loads, (Path(__file__).parent / "cases" / "B.jsonl").read_text().splitlines())
}


def test_b08_daemon_json_is_merged_and_what_would_stop_dockerd_is_refused():
    given_, expected = CASES["B08"]["input"], CASES["B08"]["expected"]
    merged = dockerd.merge_daemon_json(given_["existing_daemon_json"], given_["want"])
    assert merged["config"] == json.loads(merged["text"]) == expected["merged"]
    assert ("nvidia" in merged["config"]["runtimes"]) is expected["keep_nvidia_runtime"] is True
    assert merged["needs"] == "reload"
    assert merged["restart_stops_containers"] is True
    assert expected["needs"] == "daemon restart/reload; a restart stops containers unless live-restore"
    with_restore = dockerd.merge_daemon_json('{"live-restore": true}', {"data-root": "/data"})
    assert (with_restore["needs"], with_restore["restart_stops_containers"]) == ("restart", False)

    assert expected["refuse_on_invalid_json"] is True
    with pytest.raises(LockstepError, match="not valid JSON") as refused:
        dockerd.merge_daemon_json(given_["broken_json_in_the_wild"], given_["want"])
    assert refused.value.next_step
    with pytest.raises(LockstepError, match="not valid JSON"):
        dockerd.merge_daemon_json("[" * 100_000, given_["want"])
    for flags in (
        ["dockerd", "--insecure-registry=192.0.2.10:5000"],
        ["dockerd", "--insecure-registry", "192.0.2.10:5000"],
    ):
        with pytest.raises(LockstepError, match="also given as a flag"):
            dockerd.merge_daemon_json(given_["existing_daemon_json"], given_["want"], flags)
    assert dockerd.trouble(given_["conflict_error"])["kind"] == "flag_conflict"
    assert dockerd.trouble(given_["pull_error"])["kind"] == "plain_http"


def test_merging_twice_changes_nothing_and_no_file_is_an_empty_one():
    want = {"insecure-registries": ["fleet-registry:5055"]}
    once = dockerd.merge_daemon_json(None, want)
    assert json.loads(once["text"]) == want
    again = dockerd.merge_daemon_json(once["text"], want, ["dockerd", "--insecure-registry=other"])
    assert (again["changed"], again["needs"], again["text"]) == (False, None, once["text"])
    added = dockerd.merge_daemon_json('{"insecure-registries": ["a:1"]}', want)
    assert added["config"] == {"insecure-registries": ["a:1", "fleet-registry:5055"]}


@pytest.mark.parametrize("text", ["[]", '"x"', "{", "nonsense"])
def test_what_is_no_json_object_is_left_alone(text):
    with pytest.raises(LockstepError, match="left as it is"):
        dockerd.merge_daemon_json(text, {})


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("toomanyrequests: You have reached your pull rate limit.", "rate_limit"),
        ("pull access denied for x, repository does not exist or may require 'docker login'", "auth"),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries", "wrong_platform"),
        (
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
            "engine_down",
        ),
        ('500 Server Error for http+docker://x/v1.45/y: Internal Server Error ("toomanyrequests: slow")', "rate_limit"),
        ("Bind for 10.0.22.1:5100 failed: port is already allocated", "port_taken"),
        ("something new", "other"),
    ],
)
def test_an_engines_words_become_a_kind_and_a_next_step(text, kind):
    said = dockerd.trouble(text)
    assert said["kind"] == kind
    assert said["next_step"]
    assert said["text"] == (text.partition('("')[2].removesuffix('")') or text)


# Word for word what Docker 26.1 said of a real registry in each of these states, with its own image store and with
# containerd's; digests are cut short.
SAID = json.loads((Path(__file__).parent / "data" / "docker-26.1-of-registries.json").read_text())


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in SAID.items() for text in texts])
def test_what_both_image_stores_say_of_a_registry(kind, text):
    assert dockerd.trouble(text)["kind"] == kind
    # As community.docker brings it: from the stream of a pull, and as the answer to a request. And as our modules do.
    stream = f"Error pulling hub.lab:5000/x - code: None message: {text}"
    answer = f'Error pulling image x:1 - 500 Server Error for http+docker://l/y: Internal Server Error ("{text}")'
    ours = str(LockstepError("no image", found=text, expected="no such image", next_step="x509: toomanyrequests"))
    assert dockerd.trouble(stream) == dockerd.trouble(answer) == dockerd.trouble(ours) == dockerd.trouble(text)
