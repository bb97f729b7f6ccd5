"""The room images: the handed cases of group B through the real functions, and the rules that they rest on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep_core import dockerd, images
from lockstep_core.errors import LockstepError

CASES = {
    case["id"]: case for case in map(json.loads, (Path(__file__).parent / "cases" / "B.jsonl").read_text().splitlines())
}
CLASSIC = {"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]}
CONTAINERD = {"Driver": "overlayfs", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
AMD64 = "linux/amd64"


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def identity(name: str = "a", info=CLASSIC, **fields) -> images.Identity:
    """An identity as inspect would give it: Id and layers follow from the name."""
    inspect = {
        "Id": digest(name),
        "RepoTags": [],
        "RepoDigests": [],
        "Os": "linux",
        "Architecture": "amd64",
        "RootFS": {"Type": "layers", "Layers": [digest("base"), digest(f"top of {name}")]},
        "Config": {"Labels": fields.pop("labels", None)},
    }
    return images.identity(inspect | fields.pop("inspect", {}), info, fields.pop("files", {}), ref=name)


def look(base=None, pinned=None, overlay=None, *, platform=AMD64, store="classic", also=()) -> dict:
    absent = images.identity(None, CLASSIC)
    shown = [base or absent, pinned or absent, overlay or absent]
    every = {item["id"]: item for item in [*shown, *also] if item["present"]}
    return {
        "engine": {"store": store, "platform": platform},
        "base": shown[0],
        "pinned": shown[1],
        "overlay": shown[2],
        "catalogue": [
            {key: item[key] for key in ("id", "repo_tags", "repo_digests", "labels")} for item in every.values()
        ],
    }


# --- the handed cases -------------------------------------------------------------------------------------------------


def test_b01_after_load_the_digest_is_unknown_and_the_id_proves_it():
    given_, expected = CASES["B01"]["input"], CASES["B01"]["expected"]
    head = images.identity(given_["head_inspect"], CLASSIC)
    worker = images.identity(given_["worker_inspect"], CLASSIC)
    pin = images.repo_digest(head)

    compared = images.same(head, worker)
    assert compared["same"] is expected["converged"] is True
    assert compared["by"] == "id"
    assert expected["proof"] == "Id equal on graphdriver hosts (config digest)"
    assert worker["config_digest"] == head["id"]
    assert images.pin_status(head, [pin]) == "match"
    assert expected["digest_status_worker"] == f"{images.pin_status(worker, [pin])} (not mismatch)"
    # Launch by Id: nothing to pull although the engine has no image of that name by digest.
    assert dockerd.trouble(given_["worker_inspect_by_digest_stderr"])["kind"] == "absent"
    base = {"repository": "reg.example:5055/eng", "tag": "dev", "digest": pin}
    work = images.base_work(base, {"head": look(head, head), "worker": look(worker)}, "head")
    assert [work[host]["action"] for host in ("head", "worker")] == ["ok", "ok"]
    assert work["worker"]["image"] == worker["id"]
    assert expected["launch_by"] == "tag or Id, not repo@digest"
    # The way to have the digest back, should one want it: a rank that cannot be compared pulls by exactly this name.
    alone = images.base_work(base, {"worker": look(worker)}, "worker")["worker"]
    assert (alone["action"], alone["image"]) == ("pull", given_["head_inspect"]["RepoDigests"][0])
    assert expected["fix_option"].startswith("docker pull repo@digest")


def test_b02_absent_is_not_the_same_as_without_a_digest():
    given_, expected = CASES["B02"]["input"], CASES["B02"]["expected"]
    texts = [given_["stderr"], given_["missing_image"]["stderr"]]
    assert [dockerd.trouble(text)["kind"] for text in texts] == expected["classify"]
    assert expected["use"] in dockerd.trouble(given_["stderr"])["next_step"]
    # The same two through the API, where an absent image is a 404 and the other has an empty list.
    assert images.presence(identity()) == expected["classify"][0]
    assert images.presence(images.identity(None, CLASSIC)) == expected["classify"][1]
    assert images.presence(identity(inspect={"RepoDigests": [f"r@{digest('m')}"]})) == "present"


def test_b03_a_moved_tag_is_seen_and_the_old_image_kept():
    given_, expected = CASES["B03"]["input"], CASES["B03"]["expected"]
    pin = given_["pin"]
    tagged = images.identity(given_["inspect_tag"] | {"RepoTags": ["reg.example:5055/eng:dev"]}, CLASSIC)
    pinned = images.identity(given_["inspect_old_digest"], CLASSIC)
    assert (images.pin_status(tagged, [images.digest_of(pin)]) == "match") is expected["tag_matches_pin"] is False
    assert (images.pin_status(pinned, [images.digest_of(pin)]) == "match") is expected["pinned_image_present"] is True
    base = {"repository": "reg.example:5055/eng", "tag": "dev", "digest": images.digest_of(pin)}
    (work,) = images.base_work(base, {"spark3": look(tagged, pinned)}, "spark3").values()
    assert expected["action"] == "launch by pinned digest or retag; report drift; never trust the tag"
    assert work["action"] == "tag"
    assert work["image"] == pinned["id"]
    assert work["drift"] == tagged["id"]
    assert images.kept_name("reg.example:5055/eng:dev", tagged, pinned, "20260924") == (
        "reg.example:5055/eng:dev-45cfbe9a801b-20260924"
    )


@pytest.mark.parametrize(("store", "info"), [("graphdriver", CLASSIC), ("containerd_store", CONTAINERD)])
def test_b04_no_tags_in_either_spelling(store, info):
    expected = CASES["B04"]["expected"]
    image = images.identity(CASES["B04"]["input"][store], info)
    assert image["present"] is expected["present"] is True
    assert image["repo_tags"] == expected["tags"] == []
    assert expected["null_tags_handled"] is True
    assert images.presence(image) == "present"
    shown = images.identity(CASES["B04"]["input"][store] | {"RepoTags": ["<none>:<none>"]}, info)
    assert (shown["repo_tags"] == []) is expected["none_is_not_a_tag"] is True


def test_b05_the_digest_comes_from_inspect():
    given_, expected = CASES["B05"]["input"], CASES["B05"]["expected"]
    assert expected["source"] == "docker image inspect"
    image = images.identity({"Id": digest("x"), "RepoDigests": given_["inspect_RepoDigests"]}, CLASSIC)
    assert images.repo_digest(image, "reg.example:5055/eng") == expected["digest"]
    assert image["digest"] == expected["digest"]
    # What `docker images NAME --digests` prints is no digest and is refused as one.
    assert "<none>" in given_["filtered_by_name"]
    with pytest.raises(LockstepError):
        images.digest_of(given_["filtered_by_name"].split()[2])


def test_b06_three_digests_name_one_image():
    given_, expected = CASES["B06"]["input"], CASES["B06"]["expected"]
    by_index = images.identity(given_["pulled_by_index_tag"], CLASSIC)
    by_platform = images.identity(given_["then_pulled_by_platform_digest"], CLASSIC)
    assert images.same(by_index, by_platform)["same"] is expected["same_image"] is True
    pins = images.acceptable_pins(given_["index_digest"], given_["index"], by_index)
    assert pins == expected["acceptable_pins"]
    assert images.pin_status(by_index, pins) == images.pin_status(by_platform, pins) == "match"
    # A rank that pulled by the platform's digest alone is not off the pin, and the other platform's member is no pin.
    only = images.identity(
        given_["pulled_by_index_tag"] | {"RepoDigests": [f"reg.example:5055/multi@{pins[1]}"]}, CLASSIC
    )
    assert images.pin_status(only, pins) == "match"
    assert given_["index"]["manifests"][1]["digest"] not in pins
    # The rule: an index digest is never an Id.
    assert by_index["id"] != given_["index_digest"]
    assert images.pin_status(identity(), [given_["index_digest"]]) == "unknown"


def test_b07_ids_of_two_stores_are_not_comparable():
    given_, expected = CASES["B07"]["input"], CASES["B07"]["expected"]
    hosts = [given_["host_a_graphdriver"], given_["host_b_containerd"]]
    assert [images.store(host) for host in hosts] == ["classic", "containerd"]
    assert images.store(CONTAINERD) == "containerd"
    layers = {"RootFS": {"Layers": [digest("1"), digest("2")]}, "Architecture": "arm64", "Os": "linux"}
    a, b = (
        images.identity({"Id": host["Id"], "RepoDigests": host.get("RepoDigests"), **layers}, info)
        for host, info in zip(hosts, (CLASSIC, CONTAINERD), strict=True)
    )
    assert images.ids_comparable(a, b) is expected["ids_comparable"] is False
    assert [a["config_digest"], b["config_digest"]] == [a["id"], None]
    assert [a["digest"], b["digest"]] == [None, hosts[1]["Id"]]
    assert expected["rule"].startswith("detect the store (docker info: driver-type io.containerd.snapshotter.v1)")
    compared = images.same(a, b)
    assert compared["same"] is expected["rootfs_layers_equal_means_same_content"] is True
    assert compared["by"] == "layers"
    other = images.identity(
        {"Id": hosts[1]["Id"], **layers, "RootFS": {"Layers": [digest("1"), digest("3")]}}, CONTAINERD
    )
    compared = images.same(a, other)
    assert compared["same"] is False
    assert compared["why"] == [
        f"layers: the first 1 of 2 and 2 are equal, layer 2 is {digest('2')[:19]} against {digest('3')[:19]}"
    ]


def test_b56_builds_apart_are_never_made_equal_by_building_again():
    given_, expected = CASES["B56"]["input"], CASES["B56"]["expected"]
    labels = {images.BASE_LABEL: digest("pinned base"), images.CONTEXT_LABEL: "c" * 64}
    files = {"/opt/sglang/deepseek_v4.py": "ab" * 32, "/opt/lockstep/sitecustomize.py": "cd" * 32}

    def built(index: int, **other) -> images.Identity:
        return images.identity(
            {
                "Id": given_["containerd_store_three_cached_builds"][index],
                "RootFS": {"Layers": [digest("base"), digest(f"times of build {index}")]},
                "Config": {"Labels": labels},
                "Architecture": "amd64",
            },
            CLASSIC,
            files | other,
        )

    builds = [built(index) for index in range(3)]
    assert len({image["id"] for image in builds}) == 3
    for other in builds[1:]:
        assert images.same(builds[0], other)["same"] is expected["converged_by_id"] is False
        by_content = images.same_content(builds[0], other)
        assert (by_content["same"], by_content["by"]) == (True, "files")
    assert expected["converged_by"].startswith("base digest equal AND hashes of the overlaid files")
    altered = images.same_content(builds[0], built(1) | {"files": files | {"/opt/sglang/deepseek_v4.py": "00" * 32}})
    assert altered["same"] is False
    assert altered["files"]["differ"] == ["/opt/sglang/deepseek_v4.py"]

    # Build once and ship: whatever the Ids on the workers, nobody builds, and once shipped nothing is left to do.
    assert expected["must_not"] == "loop rebuild until Ids are equal"
    wanted = {
        "base": {"repository": "r/base", "tag": "dev", "digest": digest("pinned base")},
        "overlay": {"tag": "overlay:local", "context_sha256": "c" * 64},
    }
    base = identity("base", inspect={"RootFS": {"Layers": [digest("base")]}})
    looks = {f"spark{rank + 1}": look(base, base, image) for rank, image in enumerate(builds)}
    work = images.work(wanted, looks, "spark1")
    assert [entry["overlay"]["action"] for entry in work.values()] == ["ok", "fetch", "fetch"]
    assert {entry["overlay"]["image"] for entry in work.values()} == {builds[0]["id"]}
    shipped = images.work(wanted, {host: look(base, base, builds[0]) for host in looks}, "spark1")
    assert [entry["todo"] for entry in shipped.values()] == [False, False, False]


def test_every_handed_case_of_the_group_has_its_test():
    tests = [name for name in globals() if name.startswith("test_b") and name[6:8].isdigit()]
    assert {name[5:8].upper() for name in tests} == set(CASES) - {"B08"}  # test_dockerd.py has it


# --- references -------------------------------------------------------------------------------------------------------

D = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "pinned"),
    [
        ("busybox", "docker.io", "busybox", None, None),
        ("docker.io/library/busybox:1", "docker.io", "busybox", "1", None),
        ("index.docker.io/lmsysorg/sglang", "docker.io", "lmsysorg/sglang", None, None),
        (f"lmsysorg/sglang:dev-dsv41@{D}", "docker.io", "lmsysorg/sglang", "dev-dsv41", D),
        ("localhost/eng:1", "localhost", "localhost/eng", "1", None),
        ("fleet-registry:5055/dsv41-3x-spark", "fleet-registry:5055", "fleet-registry:5055/dsv41-3x-spark", None, None),
        (f"[fd00::1]:5055/a/b@{D}", "[fd00::1]:5055", "[fd00::1]:5055/a/b", None, D),
        ("hub.lab:5000/lmsysorg/sglang:dev", "hub.lab:5000", "hub.lab:5000/lmsysorg/sglang", "dev", None),
    ],
)
def test_a_reference_is_split_as_docker_does(text, registry, repository, tag, pinned):
    assert images.parse_reference(text) == {
        "registry": registry,
        "repository": repository,
        "tag": tag,
        "digest": pinned,
        "id": None,
    }


@pytest.mark.parametrize("text", [D, D.removeprefix("sha256:")])
def test_an_id_is_no_repository(text):
    assert images.parse_reference(text)["id"] == D
    assert images.parse_reference(text)["repository"] is None


@pytest.mark.parametrize(
    "text",
    ["", "Eng:dev", "eng:", "eng@sha256:12", "eng:-x", "eng:a/b", "http://r/eng", "a b", "<none>:<none>", "r:5/"],
)
def test_what_docker_refuses_is_refused(text):
    with pytest.raises(LockstepError, match="not an image reference"):
        images.parse_reference(text)


# --- identities -------------------------------------------------------------------------------------------------------


def test_the_layer_chain_is_the_oci_chain_id():
    # From the OCI image specification: ChainID(A|B) = Digest(ChainID(A) + " " + DiffID(B)), here with `sha256sum`.
    one, two = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    assert images.chain_id([one]) == "1" * 64
    assert images.chain_id([one, two]) == "9932074217c35353d2e03a3f5a86549f7c67bfeb0ba53e23d69f4d4c8f7958f5"
    assert images.chain_id([]) is None


def test_a_file_changed_behind_equal_names_is_found():
    one = identity(files={"/a.py": "1" * 64, "/b.py": "2" * 64})
    other = identity(files={"/a.py": "1" * 64, "/b.py": "3" * 64})
    compared = images.same(one, other)
    assert (compared["same"], compared["by"]) == (False, "id")
    assert compared["files"] == {"differ": ["/b.py"], "only_a": [], "only_b": []}
    assert compared["why"][-1] == "files: 1 differ: /b.py"


def test_the_reason_names_base_layer_and_the_forty_files():
    names = [f"/srt/file{number:02}.py" for number in range(40)]
    one = identity("one", files=dict.fromkeys(names, "1" * 64), labels={images.BASE_LABEL: digest("a")})
    other = identity("other", files=dict.fromkeys(names[:-1], "2" * 64) | {names[-1]: None})
    why = images.same(one, other)["why"]
    tops = [digest(f"top of {name}")[:19] for name in ("one", "other")]
    assert why == [
        f"id: {digest('one')[:19]} against {digest('other')[:19]}",
        f"base: {digest('a')} against no label",
        f"layers: the first 1 of 2 and 2 are equal, layer 2 is {tops[0]} against {tops[1]}",
        f"files: 39 differ: {', '.join(names[:8])} and 31 more",
        f"files: 1 only in the first: {names[-1]}",
    ]


def test_equal_layers_with_another_configuration_are_not_the_same():
    layers = {"RootFS": {"Layers": [digest("l")]}}
    compared = images.same(identity("one", inspect=layers), identity("other", inspect=layers))
    assert compared["same"] is False
    assert compared["why"][-1].startswith("configuration: all layers are equal")


SETTINGS = {"Env": ["PATH=/bin", "MODE=fast"], "Cmd": ["serve"], "Labels": {"maker": "é"}}


def configured(config=None, info=CLASSIC, **inspect) -> images.Identity:
    """An image of one layer as an engine inspects it."""
    return images.identity(
        {
            "Id": digest(f"{config}{info}"),
            "Architecture": "amd64",
            "Os": "linux",
            "RootFS": {"Layers": ["sha256:" + "1" * 64]},
            "Config": SETTINGS if config is None else config,
            **inspect,
        },
        info,
    )


def test_the_configuration_hash_is_of_settings_platform_and_layers():
    # Worked out with printf and sha256sum over the three as JSON.
    whole = configured()
    assert whole["config_sha256"] == "bfe263dfeabc916816826b2f9ad5b81c6205e7116c086493c44940d4923f7aa1"
    assert (whole["config"]["Env.MODE"], whole["config"]["Cmd"]) == ("079c9d12005a", "4669c1abecb9")
    assert "fast" not in json.dumps(whole)
    # What Docker 20.10, 26.1 and 28.5 say of one image in other ways: own fields, and null, "" or nothing for empty.
    noise = {"Hostname": "x", "Image": "y", "Tty": False, "User": "", "Volumes": None, "OnBuild": [], "Healthcheck": {}}
    assert configured(SETTINGS | noise, CONTAINERD)["config_sha256"] == whole["config_sha256"]
    assert configured(Created="now", Author="me", Container="z")["config_sha256"] == whole["config_sha256"]
    checked = [
        configured(SETTINGS | {"Healthcheck": {"Test": ["CMD", "/x"], **more}}) for more in ({}, {"StartInterval": 1})
    ]
    assert checked[0]["config_sha256"] == checked[1]["config_sha256"] != whole["config_sha256"]
    # The order of the environment counts, that of the labels does not.
    others = [
        configured(SETTINGS | {"Env": SETTINGS["Env"][::-1]}),
        configured(SETTINGS | {"Labels": {"maker": ""}}),
        configured(Variant="v2"),
        configured(RootFS={"Layers": ["sha256:" + "2" * 64]}),
        *(configured(SETTINGS | {key: ["x"]}) for key in ("Entrypoint", "Cmd", "OnBuild", "Shell")),
        *(configured(SETTINGS | {key: "x"}) for key in ("User", "WorkingDir", "StopSignal")),
        *(configured(SETTINGS | {key: {"x": {}}}) for key in ("ExposedPorts", "Volumes")),
    ]
    assert len({image["config_sha256"] for image in [whole, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"Env": ["PATH=/bin", "MODE=slow", "NEW=1"]}, "Env differs: MODE, NEW"),
        ({"Env": ["MODE=fast", "PATH=/bin"]}, "Env differs: its order"),
        ({"Env": []}, "Env differs: MODE, PATH"),
        ({"Cmd": None, "User": "0"}, "Cmd differs; User differs"),
        ({"Labels": {"maker": "e", "a": ""}}, "labels differ: a, maker"),
        ({"Labels": {"maker": "é", images.BASE_LABEL: "b"}}, None),
    ],
)
def test_equal_layers_across_stores_are_not_enough_and_the_settings_are_named(other, why):
    compared = images.same(configured(), configured(SETTINGS | other, CONTAINERD))
    assert (compared["same"], compared["by"]) == (False, None)
    assert compared["why"] == [f"configuration: {why}" if why else "base: no label against b"]
    between = images.same(configured(), configured(SETTINGS | other))  # two classic stores: the Ids say it as well
    assert between["why"][1:] == compared["why"]
    assert images.same(configured(), configured(info=CONTAINERD))["by"] == "layers"


def test_an_identity_that_does_not_tell_its_configuration_is_compared_by_layers():
    older = {key: value for key, value in configured(info=CONTAINERD).items() if not key.startswith("config_sha")}
    assert images.same(configured({}), older)["by"] == images.same(older, configured({}))["by"] == "layers"


def test_one_index_names_an_image_of_each_platform():
    index = {"Id": digest("index")}
    mine, arm = (configured(info=CONTAINERD, Architecture=name, **index) for name in ("amd64", "arm64"))
    assert images.same(mine, mine)["by"] == "id"
    compared = images.same(mine, arm)
    assert (compared["same"], compared["why"]) == (False, ["platform: linux/amd64 against linux/arm64"])


def test_docker_28_tells_manifest_and_index():
    """As 28.5.2 over containerd answers GET /images/…?manifests=1, for an image pulled by its index; 26.1 does not."""
    index, mine, arm = (digest(name) for name in ("index", "amd64", "arm64"))

    def member(manifest, kind="image", **platform):
        its = {"os": "linux", **platform}
        return {"ID": manifest, "Descriptor": {"digest": manifest}, "Kind": kind, "ImageData": {"Platform": its}}

    told = {
        "Id": index,
        "RepoTags": [f"r@{index}", "r:dev"],
        "Descriptor": {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": index, "size": 534},
        "Manifests": [
            member(mine, architecture="amd64"),
            member(arm, architecture="arm64", variant="v8"),
            {"ID": digest("proof"), "Descriptor": {"digest": digest("proof")}, "Kind": "attestation"},
        ],
    }
    found = configured(info=CONTAINERD, **told)
    assert (found["manifest_digest"], found["index_digest"], found["repo_tags"]) == (mine, index, ["r:dev"])
    found = configured(info=CONTAINERD, **told | {"Architecture": "arm64"})
    assert found["manifest_digest"] == arm
    found = configured(info=CONTAINERD, **told | {"Manifests": None})
    assert (found["manifest_digest"], found["index_digest"]) == (None, index)
    docker = "application/vnd.docker.distribution.manifest"
    found = configured(info=CONTAINERD, Descriptor={"mediaType": f"{docker}.v2+json", "digest": mine})
    assert (found["manifest_digest"], found["index_digest"]) == (mine, None)
    found = configured(info=CONTAINERD, Descriptor={"mediaType": f"{docker}.list.v2+json", "digest": index})
    assert (found["manifest_digest"], found["index_digest"]) == (None, index)
    assert [configured()[key] for key in ("manifest_digest", "index_digest")] == [None, None]


def test_a_containerd_store_gives_a_loaded_image_a_digest_that_proves_nothing():
    loaded = configured(info=CONTAINERD, RepoDigests=[f"r@{digest('made by docker load')}"])
    assert images.pin_status(loaded, [digest("pin")]) == "unknown"
    assert images.pin_status(loaded, [digest("made by docker load")]) == "match"


def test_containerd_hosts_that_pulled_by_index_and_by_platform_hold_the_same():
    layers = {"RootFS": {"Layers": [digest("l")]}}
    compared = images.same(
        identity("index", CONTAINERD, inspect=layers), identity("member", CONTAINERD, inspect=layers)
    )
    assert (compared["same"], compared["by"]) == (True, "layers")


def test_absent_on_one_side_is_said():
    absent = images.identity(None, CLASSIC)
    assert images.same(identity(), absent)["why"] == ["absent: the second has no such image"]
    assert images.same(absent, identity())["why"] == ["absent: the first has no such image"]
    assert images.same(absent, absent)["same"] is True
    assert images.agree({"a": absent, "b": absent})["equal"] is False


def test_agree_groups_the_ranks_and_explains_the_odd_one():
    right = identity("right", files={"/x.py": "1" * 64})
    odd = identity("odd", files={"/x.py": "2" * 64})
    seen = images.agree({"spark1": right, "spark2": odd, "spark3": right})
    assert seen["equal"] is False
    assert seen["groups"] == [["spark1", "spark3"], ["spark2"]]
    assert list(seen["why"]) == ["spark2"]
    assert seen["why"]["spark2"][-1] == "against spark1: files: 1 differ: /x.py"
    assert seen["files"] == ["/x.py"]
    assert images.agree({"spark1": right, "spark3": right})["equal"] is True


def test_a_store_that_does_not_tell_the_time_of_the_build_makes_no_two_others_equal():
    told = {"early": configured(Id=digest("early")), "late": configured(Id=digest("late"))}
    untold = {"neither": configured(info=CONTAINERD)}
    for ranks in (told | untold, untold | told):
        seen = images.agree(ranks)
        assert seen["equal"] is False
        assert seen["groups"] == [["early", "neither"], ["late"]]
        ids = f"id: {digest('early')[:19]} against {digest('late')[:19]}"
        rest = "configuration: all layers are equal, so time, author or history of the build differ"
        assert seen["why"] == {"late": [f"against early: {ids}", f"against early: {rest}"]}


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_agree_puts_every_rank_into_one_group_and_same_is_symmetric(names):
    ranks = {f"h{number}": identity(name) for number, name in enumerate(names)}
    seen = images.agree(ranks)
    assert sorted(host for group in seen["groups"] for host in group) == sorted(ranks)
    assert len(seen["groups"]) == len(set(names))
    assert seen["equal"] is (len(set(names)) == 1)
    for one in ranks.values():
        for other in ranks.values():
            assert images.same(one, other)["same"] is images.same(other, one)["same"] is (one["id"] == other["id"])


# --- names that are kept ----------------------------------------------------------------------------------------------


def test_an_overlay_on_another_base_is_kept_as_mixed():
    # The campaign kept dsv41-3x-spark:mixed-da64c5cbb-20260924, and the base under its tag with build and date.
    old = identity(labels={images.BASE_LABEL: digest("drifted")}, inspect={"Id": "sha256:da64c5cbb000" + "0" * 52})
    new = identity(labels={images.BASE_LABEL: digest("pinned")})
    assert images.kept_name("dsv41-3x-spark:local", old, new, "20260924") == (
        "dsv41-3x-spark:mixed-da64c5cbb000-20260924"
    )
    assert images.kept_name("dsv41-3x-spark:local", old, old, "20260924") == (
        "dsv41-3x-spark:local-da64c5cbb000-20260924"
    )
    assert images.kept_name("lmsysorg/sglang:dev-dsv41", old, identity(), "20260911") == (
        "lmsysorg/sglang:dev-dsv41-da64c5cbb000-20260911"
    )


def test_an_image_that_has_a_dated_name_gets_no_second_one():
    kept = "dsv41-3x-spark:mixed-da64c5cbb000-20260924"
    old = identity(inspect={"Id": "sha256:da64c5cbb000" + "0" * 52, "RepoTags": ["dsv41-3x-spark:local", kept]})
    assert images.kept_name("dsv41-3x-spark:local", old, identity(), "20260925") is None


@pytest.mark.parametrize(
    "template", ["{repo}:{date}", "{repository}-{date}", "{repository}:{tag", "{repository}:{tag}@{date}"]
)
def test_a_template_that_gives_no_name_is_refused(template):
    with pytest.raises(LockstepError):
        images.kept_name("r/e:t", identity(), None, "20260924", template)


def test_a_fleet_may_choose_the_form_of_dated_names():
    form = "old/{repository}:{date}-{id12}-{tag}"
    name = images.kept_name("r/e:t", identity(), None, "20260924", form)
    assert name == f"old/r/e:20260924-{digest('a')[7:19]}-t"
    kept = identity(inspect={"RepoTags": [name]})
    assert images.kept_name("r/e:t", kept, None, "20260925", form) is None
    assert images.kept_name("r/e:t", kept, None, "20260925") == f"r/e:t-{digest('a')[7:19]}-20260925"


# --- work -------------------------------------------------------------------------------------------------------------

PIN = digest("manifest of the pinned base")
WANTED = {
    "base": {"repository": "lmsysorg/sglang", "tag": "dev-dsv41", "digest": PIN},
    "overlay": {"tag": "dsv41-3x-spark:local", "context_sha256": "c" * 64},
}
RIGHT_BASE = identity(
    "pinned base", inspect={"RootFS": {"Layers": [digest("base")]}, "RepoDigests": [f"lmsysorg/sglang@{PIN}"]}
)
OTHER_BASE = identity("other base", inspect={"RepoDigests": [f"lmsysorg/sglang@{digest('other manifest')}"]})
LABELS = {images.CONTEXT_LABEL: "c" * 64, images.BASE_LABEL: PIN}
OVERLAY = identity("overlay", labels=LABELS)
RIGHT = look(RIGHT_BASE, RIGHT_BASE, OVERLAY)


def actions(**looks) -> dict[str, tuple[str, str]]:
    work = images.work(WANTED, looks, "spark1")
    return {host: (entry["base"]["action"], entry["overlay"]["action"]) for host, entry in work.items()}


def test_the_night_of_the_campaign():
    # Rank 2 holds the other build under the same tag and an overlay built from it.
    mixed = identity("mixed overlay", labels={images.CONTEXT_LABEL: "b" * 64})
    night = look(OTHER_BASE, None, mixed)
    assert actions(spark1=RIGHT, spark2=RIGHT, spark3=night) == {
        "spark1": ("ok", "ok"),
        "spark2": ("ok", "ok"),
        "spark3": ("fetch", "fetch"),
    }
    work = images.work(WANTED, {"spark1": RIGHT, "spark3": night}, "spark1")["spark3"]
    assert work["base_source"] == "spark1"
    assert work["base"]["drift"] == OTHER_BASE["id"]
    assert work["overlay"]["drift"] == mixed["id"]


def test_an_empty_fleet_builds_on_the_head_and_ships():
    assert actions(spark1=look(), spark2=look(), spark3=look()) == {
        "spark1": ("pull", "build"),
        "spark2": ("fetch", "fetch"),
        "spark3": ("fetch", "fetch"),
    }


def test_the_base_comes_once_from_the_hub_and_then_from_whoever_holds_it():
    # Only a worker has it: the head gets it from there.
    work = images.work(WANTED, {"spark1": look(), "spark2": RIGHT, "spark3": look()}, "spark1")
    assert [entry["base"]["action"] for entry in work.values()] == ["fetch", "ok", "fetch"]
    assert {entry["base_source"] for entry in work.values()} == {"spark2"}
    # A head that got it without a digest hands it on all the same.
    loaded = look(identity("pinned base"))
    work = images.work(WANTED, {"spark1": loaded, "spark2": RIGHT, "spark3": look()}, "spark1")
    assert [entry["base"]["action"] for entry in work.values()] == ["ok", "ok", "fetch"]
    assert {entry["base_source"] for entry in work.values()} == {"spark1"}


def test_a_rank_of_another_platform_pulls_its_own_member():
    work = images.base_work(WANTED["base"], {"spark1": RIGHT, "spark3": look(platform="linux/arm64")}, "spark1")
    assert work["spark3"]["action"] == "pull"


def test_the_same_base_in_another_kind_of_store_is_known_by_its_layers():
    there = identity("another id", CONTAINERD, inspect={"RootFS": {"Layers": [digest("base")]}})
    work = images.base_work(WANTED["base"], {"spark1": RIGHT, "spark3": look(there, store="containerd")}, "spark1")
    assert (work["spark3"]["action"], work["spark3"]["drift"]) == ("ok", None)
    changed = identity("another id", CONTAINERD, inspect={"RootFS": {"Layers": [digest("changed")]}})
    work = images.base_work(WANTED["base"], {"spark1": RIGHT, "spark3": look(changed, store="containerd")}, "spark1")
    assert (work["spark3"]["action"], work["spark3"]["drift"]) == ("fetch", changed["id"])


MIXED = json.loads((Path(__file__).parent / "data" / "mixed_stores.json").read_text())


def mixed(when: str, **changed) -> dict[str, dict]:
    """Looks recorded by tests/machine/test_mixed_stores.py, on Docker 26.1, 20.10 and 26.1 over containerd."""
    looks = {host: dict(its) for host, its in MIXED[when].items()}
    looks["stores-containerd"] |= changed
    return images.work(MIXED["wanted"], looks, "stores-classic")


def test_a_worker_over_containerd_gets_what_it_lacks_and_then_is_done():
    before, after = mixed("before"), mixed("after")
    assert [(work["base"]["action"], work["overlay"]["action"]) for work in before.values()] == [
        ("ok", "ok"),
        ("fetch", "fetch"),
        ("fetch", "fetch"),
    ]
    # Its overlay has the right layers and labels, and another user.
    worker = before["stores-containerd"]
    assert worker["overlay"]["why"] == "configuration: User differs"
    assert worker["overlay"]["drift"] == MIXED["before"]["stores-containerd"]["overlay"]["id"]
    assert worker["base"]["hub"] is None
    assert before["stores-older"]["base"]["hub"] is not None
    assert [work["todo"] for work in after.values()] == [False, False, False]
    # Neither is work: Ids of two kinds, and that Docker 26.1 over containerd does not list an image whose layers it
    # found unpacked already and so never fetched.
    ids = {host: look["overlay"]["id"] for host, look in MIXED["after"].items()}
    assert ids["stores-classic"] == ids["stores-older"] != ids["stores-containerd"]
    assert ids["stores-containerd"] not in {image["id"] for image in MIXED["after"]["stores-containerd"]["catalogue"]}


def test_an_overlay_over_containerd_whose_file_was_changed_behind_the_engine_is_refused():
    theirs = MIXED["after"]["stores-containerd"]["overlay"]
    path = "/opt/lockstep/x.py"
    changed = theirs | {"files": theirs["files"] | {path: "0" * 64}}
    with pytest.raises(LockstepError, match="changed behind the engine") as refused:
        mixed("after", overlay=changed)
    assert refused.value.host == "stores-containerd"
    other = mixed("after", overlay=changed | {"layers": [*theirs["layers"][:-1], digest("other")]})
    assert other["stores-containerd"]["overlay"]["action"] == "fetch"
    assert f"files: 1 differ: {path}" in other["stores-containerd"]["overlay"]["why"]


def test_nothing_is_pulled_when_the_right_bytes_are_there_under_another_name():
    elsewhere = look(OTHER_BASE, also=[identity("pinned base")])  # loaded from a file: no digest
    kept = look(RIGHT_BASE, RIGHT_BASE, None, also=[OVERLAY])
    work = images.work(WANTED, {"spark1": RIGHT, "spark2": elsewhere, "spark3": kept}, "spark1")
    assert work["spark2"]["base"] == {
        "action": "tag",
        "image": RIGHT_BASE["id"],
        "drift": OTHER_BASE["id"],
        "why": f"present, but lmsysorg/sglang:dev-dsv41 names {OTHER_BASE['id']}",
    }
    assert (work["spark3"]["overlay"]["action"], work["spark3"]["overlay"]["image"]) == ("tag", OVERLAY["id"])


def test_the_head_takes_an_overlay_it_built_before_instead_of_building_again():
    newer = identity("newer", labels=LABELS | {images.CONTEXT_LABEL: "d" * 64})
    assert actions(spark1=look(RIGHT_BASE, RIGHT_BASE, newer, also=[OVERLAY]), spark2=RIGHT) == {
        "spark1": ("ok", "tag"),
        "spark2": ("ok", "ok"),
    }


def test_copied_labels_on_other_layers_do_not_pass_for_an_overlay_of_the_base():
    forged = identity("forged", labels=LABELS, inspect={"RootFS": {"Layers": [digest("strange base")]}})
    assert actions(spark1=look(RIGHT_BASE, RIGHT_BASE, forged)) == {"spark1": ("ok", "build")}


def test_what_was_built_on_top_of_an_overlay_does_not_pass_for_it():
    layers = [*OVERLAY["layers"], digest("one more")]
    on_top = identity(labels=LABELS, inspect={"Id": f"sha256:{'0' * 64}", "RootFS": {"Layers": layers}})
    assert actions(spark1=look(RIGHT_BASE, RIGHT_BASE, on_top)) == {"spark1": ("ok", "build")}
    # Where the tag is lost, the one that has the name it was built under counts, whatever the Ids are.
    built = OVERLAY | {"repo_tags": [f"dsv41-3x-spark:{LABELS[images.CONTEXT_LABEL][:12]}"]}
    work = images.work(WANTED, {"spark1": look(RIGHT_BASE, RIGHT_BASE, also=[on_top, built])}, "spark1")
    assert (work["spark1"]["overlay"]["action"], work["spark1"]["overlay"]["image"]) == ("tag", OVERLAY["id"])


def test_a_plan_of_an_earlier_launch_gets_its_very_image_from_whoever_holds_it():
    earlier = identity("earlier", labels=LABELS | {images.CONTEXT_LABEL: "a" * 64})
    wanted = WANTED | {"overlay": {"tag": "dsv41-3x-spark:local", "context_sha256": "a" * 64, "id": earlier["id"]}}
    both = look(RIGHT_BASE, RIGHT_BASE, OVERLAY, also=[earlier])
    work = images.work(wanted, {"spark1": both, "spark2": both, "spark3": RIGHT}, "spark1")
    assert [entry["overlay"]["action"] for entry in work.values()] == ["tag", "tag", "fetch"]
    assert {entry["source"] for entry in work.values()} == {"spark1"}
    # The head has lost it: the rank that has it hands it on. An image of that Id and another context is no overlay.
    work = images.work(wanted, {"spark1": RIGHT, "spark2": RIGHT, "spark3": both}, "spark1")
    assert [entry["overlay"]["action"] for entry in work.values()] == ["fetch", "fetch", "tag"]
    assert {entry["overlay"]["image"] for entry in work.values()} == {earlier["id"]}
    assert {entry["source"] for entry in work.values()} == {"spark3"}
    # Nobody has it. A build of the same context has another Id than that, unless the builder remembers it.
    again = identity("again", labels=LABELS | {images.CONTEXT_LABEL: "a" * 64})
    work = images.work(wanted, {"spark1": look(RIGHT_BASE, RIGHT_BASE, again), "spark2": RIGHT}, "spark1")
    assert [entry["overlay"]["action"] for entry in work.values()] == ["build", "fetch"]
    assert work["spark1"]["source"] == "spark1"


def test_an_image_of_another_platform_is_refused_with_rank_found_and_expected():
    arm = identity("arm", inspect={"Architecture": "arm64", "RepoDigests": [f"lmsysorg/sglang@{PIN}"]})
    with pytest.raises(LockstepError) as refused:
        images.work(WANTED, {"spark1": RIGHT, "spark2": look(arm, arm)}, "spark1")
    assert refused.value.host == "spark2"
    assert "built for linux/arm64, this rank is linux/amd64" in str(refused.value)


def test_a_changed_image_store_cannot_be_mended_by_pulling_and_is_refused():
    whole = identity("overlay", labels=LABELS, files={"/x.py": "1" * 64})
    changed = identity("overlay", labels=LABELS, files={"/x.py": "2" * 64})
    with pytest.raises(LockstepError, match=r"/x\.py") as refused:
        images.work(
            WANTED,
            {"spark1": look(RIGHT_BASE, RIGHT_BASE, whole), "spark2": look(RIGHT_BASE, RIGHT_BASE, changed)},
            "spark1",
        )
    assert refused.value.host == "spark2"


# --- the build context ------------------------------------------------------------------------------------------------


def test_the_context_hash_counts_content_execute_bit_base_and_split_and_nothing_else():
    entries = [("adapters/Dockerfile", 0o644, b"FROM x\n"), ("lockstep_core/plan.py", 0o644, b"")]
    whole = images.context_sha256(entries, PIN, "rows")
    # Worked out with printf and sha256sum over the lines that the docstring describes.
    lines = (
        f"base {PIN}\nsplit rows\n"
        f"644 {hashlib.sha256(b'FROM x' + bytes([10])).hexdigest()} adapters/Dockerfile\n"
        "644 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 lockstep_core/plan.py\n"
    )
    assert whole == hashlib.sha256(lines.encode()).hexdigest()
    assert images.context_sha256(reversed(entries), PIN, "rows") == whole
    assert images.context_sha256([(path, 0o600, data) for path, _, data in entries], PIN, "rows") == whole
    changed = [
        images.context_sha256([(path, 0o755, data) for path, _, data in entries], PIN, "rows"),
        images.context_sha256([(path, mode, data + b"#") for path, mode, data in entries], PIN, "rows"),
        images.context_sha256(entries[:1], PIN, "rows"),
        images.context_sha256(entries, D, "rows"),
        images.context_sha256(entries, PIN, "heads"),
    ]
    assert len({whole, *changed}) == 6


@pytest.mark.parametrize("path", ["/etc/passwd", "a/../b", "a\nb"])
def test_a_path_that_leaves_the_context_is_refused(path):
    with pytest.raises(LockstepError, match="cannot be in a build context"):
        images.context_sha256([(path, 0o644, b"")], PIN, "rows")


def test_the_export_takes_adapters_and_core_and_leaves_the_rest(tmp_path):
    for path in (
        "adapters/Dockerfile",
        "adapters/lockstep_engine/__init__.py",
        "adapters/lockstep_engine/__pycache__/x.pyc",
        "adapters/.ruff_cache/x",
        "plugins/module_utils/plan.py",
        "plugins/module_utils/docker_api.py",
        "plugins/module_utils/__pycache__/plan.pyc",
        "plugins/modules/rank_facts.py",
        "secrets.env",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    exported = images.overlay_context(str(tmp_path))
    assert exported == [
        ("Dockerfile", 0o644, b"adapters/Dockerfile"),
        ("opt/lockstep/lockstep_core/plan.py", 0o644, b"plugins/module_utils/plan.py"),
        ("opt/lockstep/lockstep_engine/__init__.py", 0o644, b"adapters/lockstep_engine/__init__.py"),
    ]
    (tmp_path / "adapters/Dockerfile").unlink()
    with pytest.raises(LockstepError, match="no overlay to build"):
        images.overlay_context(str(tmp_path))


# --- images as files --------------------------------------------------------------------------------------------------

PIN = digest("index")
PLAN = {
    "base": {"repository": "lmsysorg/sglang", "tag": "dev-dsv41", "digest": PIN},
    "overlay": {"tag": "dsv41-3x-spark:local", "context_sha256": "c" * 64},
}


def saved(registry: str | None = None, **overlay) -> dict:
    """A set as it comes from its file."""
    labels = {images.CONTEXT_LABEL: "c" * 64, images.BASE_LABEL: PIN} | overlay
    pinned = identity("base", inspect={"RepoDigests": [f"lmsysorg/sglang@{PIN}"]})
    found = {"base": pinned, "overlay": identity("overlay", labels=labels)}
    if registry:
        found["registry"] = identity("registry")
    return json.loads(json.dumps({"format": 1, "images": images.set_of(PLAN, found, registry)}))


def test_a_set_says_names_pins_and_what_proves_each_image():
    checked = images.check_set(saved(f"hub.lab:5000/lockstep/registry@{digest('r')}"), PLAN, AMD64)
    assert {what: (image["name"], image["pin"], image["id"]) for what, image in checked.items()} == {
        "base": ("lmsysorg/sglang:dev-dsv41", PIN, digest("base")),
        "overlay": ("dsv41-3x-spark:local", None, digest("overlay")),
        "registry": (f"hub.lab:5000/lockstep/registry:{digest('r')[7:19]}", digest("r"), digest("registry")),
    }
    loaded = identity("base")  # without the digest that it had where it was saved
    assert images.same(loaded, checked["base"]) | {"files": None} == {
        "same": True, "by": "id", "why": [], "files": None
    }  # fmt: skip
    assert not images.same(identity("another"), checked["base"])["same"]


@pytest.mark.parametrize(
    ("listed", "plan", "platform", "said"),
    [
        ({"format": 2}, PLAN, AMD64, "no list of a set of images"),
        ([], PLAN, AMD64, "no list of a set of images"),
        (saved(), PLAN, "linux/arm64", "saved for another platform"),
        (saved(), {**PLAN, "base": {**PLAN["base"], "digest": digest("other")}}, AMD64, f"-e base_digest={PIN}"),
        (saved(**{images.CONTEXT_LABEL: "d" * 64}), PLAN, AMD64, "another overlay than this checkout's"),
        (saved(**{images.BASE_LABEL: digest("other")}), PLAN, AMD64, "another overlay than this checkout's"),
    ],
)
def test_a_set_that_is_not_this_fleets_is_refused(listed, plan, platform, said):
    with pytest.raises(LockstepError) as caught:
        images.check_set(listed, plan, platform)
    assert said in str(caught.value)
    assert caught.value.next_step


def test_digests_that_the_engine_was_not_told_are_read_or_none(tmp_path):
    path = tmp_path / images.KNOWN
    assert images.known(str(path)) == {}
    path.write_text(json.dumps({"format": 1, "digests": {PIN: digest("base")}}))
    assert images.known(str(path)) == {PIN: digest("base")}
    path.write_text("[]")
    with pytest.raises(LockstepError, match="is not what it should be"):
        images.known(str(path))
