"""The room prune: a rank's images of two bases and two overlays, and what makes one of them stay."""

from __future__ import annotations

import hashlib

import pytest
from lockstep_core import images, prune

CLASSIC = {"Driver": "overlay2"}
CONTAINERD = {"Driver": "overlayfs", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


BASE, OVERLAY, REGISTRY = "lmsysorg/sglang", "dsv41-3x-spark", "lockstep-registry:5100"
FLEET = {
    "base": {"repository": BASE, "tag": "dev-dsv41", "digest": digest("new index")},
    "overlay": {"tag": f"{OVERLAY}:local"},
    "builds": {digest("new index"): {}, digest("old index"): {}},
    "registry": {"image": "registry:2.8.3", "alias": "lockstep-registry", "port": 5100, "existing": ""},
    "kept_name": images.KEPT_NAME,
}
# What launches of the old base and its overlay have in their plans.
OLD_LAUNCH = {
    "base": {"repository": BASE, "tag": "dev-dsv41", "digest": digest("old index")},
    "overlay": {"tag": f"{OVERLAY}:local", "context_sha256": digest("old tree")[7:], "id": digest("old overlay")},
}


def image(name: str, layers: list[str], tags=(), digests=(), info=CLASSIC, labels=None) -> images.Identity:
    inspect = {
        "Id": digest(name),
        "RepoTags": list(tags),
        "RepoDigests": list(digests),
        "Os": "linux",
        "Architecture": "arm64",
        "RootFS": {"Layers": [digest(layer) for layer in layers]},
        "Config": {"Labels": labels},
    }
    return images.identity(inspect, info, ref=name)


def dated(repository: str, name: str, of: str) -> str:
    return f"{repository}:{name}-{digest(of)[7:19]}-20260924"


def labels(tree: str, base: str) -> dict[str, str]:
    return {images.CONTEXT_LABEL: digest(tree)[7:], images.BASE_LABEL: digest(base)}


def old_base(*more: str, **fields) -> images.Identity:
    names = {
        "tags": [dated(BASE, "dev-dsv41", "old base"), f"{REGISTRY}/{BASE}:{digest('old index')[7:19]}"],
        "digests": [f"{BASE}@{digest('old index')}", f"{REGISTRY}/{BASE}@{digest('pushed')}"],
    } | fields
    return image("old base", ["debian", "old sglang"], [*names.pop("tags"), *more], **names)


def old_overlay(*more: str, **fields) -> images.Identity:
    context = digest("old tree")[7:19]
    names = {
        "tags": [dated(OVERLAY, "mixed", "old overlay"), f"{OVERLAY}:{context}", f"{REGISTRY}/{OVERLAY}:{context}"],
        "digests": [f"{REGISTRY}/{OVERLAY}@{digest('pushed too')}"],
        "labels": labels("old tree", "old index"),
    } | fields
    return image("old overlay", ["debian", "old sglang", "old core"], [*names.pop("tags"), *more], **names)


NEW_BASE = image("new base", ["debian", "sglang"], [f"{BASE}:dev-dsv41"], [f"{BASE}@{digest('new index')}"])
NEW_OVERLAY = image(
    "new overlay", ["debian", "sglang", "core"], [f"{OVERLAY}:local"], labels=labels("new tree", "new index")
)
NEW = [NEW_BASE, NEW_OVERLAY]


def sorted_(held, used=None, launches=(), known=(), **fleet):
    return {one["id"]: one for one in prune.verdicts(held, used or {}, FLEET | fleet, launches, known)}


def why(one: images.Identity, *also: images.Identity, **given) -> str | None:
    """Why an image stays; None when it goes, "unseen" when it is not considered at all."""
    said = sorted_([*NEW, one, *also], **given).get(one["id"])
    return "unseen" if said is None else None if said["goes"] else said["why"]


def test_what_nothing_needs_goes_the_upper_image_first_and_the_rest_stays_with_its_reason():
    said = prune.verdicts([old_base(), *NEW, old_overlay()], {}, FLEET, [], [])
    assert [one["id"] for one in said if one["goes"]] == [digest("old overlay"), digest("old base")]
    assert {one["id"]: one["why"] for one in said if not one["goes"]} == {
        digest("new base"): "it has the base's name",
        digest("new overlay"): "the present overlay",
    }
    for one in said:
        assert set(one["names"]) == {
            name
            for held in [old_base(), *NEW, old_overlay()]
            if held["id"] == one["id"]
            for name in [*held["repo_tags"], *held["repo_digests"]]
        }
    # Removed one by one, the last name still says whose the image is.
    assert [one["names"][-1] for one in said if one["goes"]] == [
        dated(OVERLAY, "mixed", "old overlay"),
        dated(BASE, "dev-dsv41", "old base"),
    ]


# --- whose it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        f"{BASE}:latest",  # the repository is public
        f"{BASE}:dev-dsv41-da64c5cbb-20260911",  # kept by hand
        dated(BASE, "dev-dsv41", "another image"),
        "mine:backup",
        f"registry.example:5000/{BASE}:{digest('old index')[7:19]}",
        f"{OVERLAY}:please-keep",
        f"{OVERLAY}:{digest('another tree')[7:19]}",
    ],
)
def test_an_image_that_also_has_a_name_of_somebody_elses_stays(name):
    assert why(old_base(name)) == f"Lockstep did not name it {name}"
    # With that name alone it is no image of the fleet's.
    assert why(old_base(tags=[name], digests=[])) == "unseen"


def test_a_digest_of_the_public_repository_that_is_no_known_build_is_somebody_elses():
    unknown = f"{BASE}@{digest('a build of the hub')}"
    assert why(old_base(digests=[unknown])) == f"Lockstep did not name it {unknown}"
    assert why(old_base(tags=[], digests=[unknown])) == "unseen"
    assert why(old_base(tags=[], digests=[f"{BASE}@{digest('old index')}"])) is None


def test_an_image_without_a_name_is_nobodys_to_remove():
    assert why(old_overlay(tags=[], digests=[])) == "unseen"


def test_of_a_registry_that_is_there_already_only_what_was_published_is_the_fleets():
    there = {"registry": FLEET["registry"] | {"existing": "registry.example:5000/team"}}
    place = f"registry.example:5000/team/{BASE}"
    published, pushed = f"{place}:{digest('old index')[7:19]}", f"{place}@{digest('pushed')}"
    assert why(old_base(tags=[published], digests=[pushed]), **there) is None
    assert why(old_base(tags=[], digests=[pushed]), **there) == "unseen"
    assert why(old_base(tags=[f"{place}:theirs"], digests=[pushed]), **there) == "unseen"
    assert why(old_base(tags=[published, f"{place}:theirs"]), **there) == f"Lockstep did not name it {place}:theirs"
    published = f"registry.example:5000/team/{OVERLAY}:{digest('old tree')[7:19]}"
    assert why(old_overlay(tags=[published]), **there) is None


def test_names_are_compared_as_the_engine_spells_them():
    spelled = {"base": FLEET["base"] | {"repository": f"docker.io/{BASE}"}}
    assert why(old_base(), **spelled) is None
    assert why(NEW_BASE, **spelled) == "it has the base's name"


def test_dated_names_without_an_id_in_them_prove_nothing():
    assert why(old_base(tags=[f"{BASE}:old-20260924"], digests=[]), kept_name="{repository}:{tag}-{date}") == "unseen"


# --- what needs it ----------------------------------------------------------------------------------------------------


def test_what_a_container_uses_stays_running_or_not():
    assert why(old_overlay(), used={digest("old overlay"): "dsv41-head"}) == "container dsv41-head uses it"


def test_the_pinned_base_stays_under_whatever_name():
    kept = image("pinned", ["debian", "pinned"], [dated(BASE, "dev-dsv41", "pinned")])
    by_digest = image("pinned", ["debian", "pinned"], kept["repo_tags"], [f"{BASE}@{digest('new index')}"])
    assert why(by_digest) == "the pinned base"
    # Loaded from an archive it has no digest here; another rank knows its Id by the digest.
    elsewhere = by_digest | {"ref": f"{BASE}@{digest('new index')}"}
    assert why(kept, known=[elsewhere]) == "the pinned base"


def test_a_base_that_nobody_can_tell_from_a_needed_one_stays():
    loaded = old_base(digests=[])
    pin = f"no rank can tell whether it is {digest('new index')}: the pinned base"
    assert sorted_([loaded])[loaded["id"]]["why"] == pin
    unknown = [["20260911T094700Z-b1-0a1b2c", OLD_LAUNCH]]
    assert why(loaded, launches=unknown) == (
        f"no rank can tell whether it is {digest('old index')}: launch 20260911T094700Z-b1-0a1b2c needs it"
    )
    told = image("another", ["other"]) | {"ref": f"{BASE}@{digest('old index')}"}
    assert why(loaded, launches=unknown, known=[told]) is None
    # What an image of another platform is says nothing here; an absent one says nothing at all.
    assert why(loaded, launches=unknown, known=[told | {"platform": "linux/amd64"}]) is not None
    absent = images.identity(None, CLASSIC, ref=told["ref"])
    assert why(loaded, launches=unknown, known=[absent]) is not None


@pytest.mark.parametrize("way", ["id", "labels"])
def test_what_a_launch_of_the_journal_ran_with_stays(way):
    overlay = OLD_LAUNCH["overlay"] | ({"context_sha256": None} if way == "id" else {"id": digest("on the head")})
    launches = [
        ["20260910T094700Z-b1-0a1b2c", OLD_LAUNCH | {"overlay": overlay}],
        ["20260911T094700Z-e8-0a1b2c", OLD_LAUNCH | {"overlay": overlay}],
        ["20260912T094700Z-e8-ffffff", {"overlay": {"id": None}}],
    ]
    said = "launch 20260911T094700Z-e8-0a1b2c needs it"
    assert why(old_overlay(), launches=launches) == said
    assert why(old_base(), launches=launches) == said


def test_a_base_of_the_journal_is_known_across_image_stores_by_its_layers():
    loaded = old_base(digests=[])
    there = image("its manifest", ["debian", "old sglang"], info=CONTAINERD) | {"ref": f"{BASE}@{digest('old index')}"}
    launches = [["20260911T094700Z-e8-0a1b2c", OLD_LAUNCH | {"overlay": {}}]]
    assert why(loaded, launches=launches, known=[there]) == "launch 20260911T094700Z-e8-0a1b2c needs it"


def test_what_an_image_that_stays_stands_on_stays():
    # By its overlay alone: no digest tells that the base below it is needed.
    launches = [["20260911T094700Z-e8-0a1b2c", OLD_LAUNCH | {"base": {}}]]
    below = why(old_base(), old_overlay(), launches=launches)
    assert below == f"below {old_overlay()['repo_tags'][0]}, which stays"
    theirs = image("theirs", ["debian", "old sglang", "their work"], ["theirs:1"])
    assert why(old_base(), theirs) == "below theirs:1, which stays"
    nameless = image("nameless", ["debian", "old sglang", "work"])
    assert why(old_base(), nameless) == f"below an image without a name, {digest('nameless')[:19]}, which stays"
    beside = image("beside", ["debian"], ["debian:13"])
    assert why(old_base(), beside) is None
