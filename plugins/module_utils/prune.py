"""Prune: which of a rank's images are the fleet's own, and which of these nothing needs any more.

An image is the fleet's own when Lockstep gave it every name it has: the base's or the overlay's own name, a dated name
with its own Id in it, the base's digest of a known build, the overlay's tag for its own build context, a name in the
fleet's registry. The base's repository is public, and another registry may be other people's too: what has one name
more, or none at all, is theirs and stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import images

Identity = Mapping[str, Any]
Fleet = Mapping[str, Any]


class Need(NamedTuple):
    """Who needs which base, by digest, and which overlay, by Id or by what it was built from."""

    who: str
    digest: str | None
    overlay: str | None = None
    context: str | None = None


def verdicts(
    held: Sequence[Identity],
    used: Mapping[str, str],
    fleet: Fleet,
    launches: Iterable[Sequence[Any]],
    known: Iterable[Identity],
) -> list[dict[str, Any]]:
    """Say of every image that Lockstep named whether it goes: ``[{"id", "names", "goes": bool, "why"}, …]``.

    ``held`` are the identities of all images of a rank, ``used`` is ``{Id: name of a container, running or not}``,
    ``fleet`` is ``fleet_images``, ``launches`` are all that a rollback can go to, each ``[launch, its plan's images]``,
    ``known`` is what the ranks say of the bases by digest (identities whose ``ref`` is ``repository@digest``).

    An image comes before those that it stands on, and the last of its ``names`` is one that tells it as the fleet's: in
    these orders they can be removed one by one. ``why`` says what needs an image that stays.
    """
    needs = [Need("the pinned base", fleet["base"]["digest"]), *_needs(launches)]
    models: dict[str, list[Identity]] = {}
    for model in known:
        if model["present"]:
            models.setdefault(images.digest_of(model["ref"]), []).append(model)
    unseen = [
        need for need in needs if need.digest and not any(images.has_digest(image, need.digest) for image in held)
    ]
    named = {image["id"]: _names(image, fleet) for image in held}
    why: dict[str, str] = {}
    for image in held:
        names = named[image["id"]]
        reasons = [
            *_by_name(names["all"], fleet),
            *([f"container {used[image['id']]} uses it"] if image["id"] in used else []),
            *(need.who for need in needs if _meets(image, need, models)),
            *(f"Lockstep did not name it {name}" for name in names["others"]),
            *(f"no rank can tell whether it is {need.digest}: {need.who}"
              for need in unseen if _may_be(image, fleet, models.get(str(need.digest), []))),
        ]  # fmt: skip
        if reasons or not names["own"]:
            why[image["id"]] = next(iter(reasons), "it is not the fleet's")
    staying = [image for image in held if image["id"] in why]
    for image in held:
        above = next((other for other in staying if _stands_on(other, image)), None)
        if above is not None:
            why.setdefault(image["id"], f"below {_called(above)}, which stays")
    return [
        {
            "id": image["id"],
            "names": named[image["id"]]["all"],
            "goes": image["id"] not in why,
            "why": why.get(image["id"], "nothing needs it"),
        }
        for image in sorted(held, key=lambda image: (-len(image["layers"]), image["id"]))
        if named[image["id"]]["own"]
    ]


# --- whose an image is ------------------------------------------------------------------------------------------------


def _names(image: Identity, fleet: Fleet) -> dict[str, list[str]]:
    """``{"all", "own", "others"}``: an image's names, those that Lockstep gave, and those that it did not.

    A digest in a repository where Lockstep keeps images says neither: it came with a name that does.
    """
    found = [*image["repo_digests"], *image["repo_tags"]]
    # Those of the registry first: the last one is what a person knows the image by.
    own = sorted(
        filter(lambda name: _is_own(name, image, fleet), found), key=lambda name: not _is_handed_on(name, fleet)
    )
    rest = [name for name in found if name not in own]
    return {"all": rest + own, "own": own, "others": [name for name in rest if not _came_along(name, fleet)]}


def _is_own(name: str, image: Identity, fleet: Fleet) -> bool:
    parsed = images.parse_reference(name)
    place, tag = str(parsed["repository"]), parsed["tag"]
    base, overlay = _repositories(fleet)
    if _is_handed_on(name, fleet):
        return True
    if not tag:
        return place == base and parsed["digest"] in fleet["builds"]
    plain, id12 = f"{place}:{tag}", image["id"].removeprefix("sha256:")[:12]
    dated = (images.dated_names(repository, image["id"], fleet["kept_name"]) for repository in (base, overlay))
    # Whatever form dated names have: one without the image's own Id is no proof.
    if id12 in plain and any(form.fullmatch(plain) for form in dated):
        return True
    published = _published(fleet)
    of_builds = [digest.removeprefix("sha256:")[:12] for digest in fleet["builds"]]
    of_context = image["labels"].get(images.CONTEXT_LABEL, "")[:12]
    return (
        plain in (f"{base}:{fleet['base']['tag']}", _plain(fleet["overlay"]["tag"]))
        or (place in (overlay, published["overlay"]) and tag == of_context)
        or (place == published["base"] and tag in of_builds)
    )


def _is_handed_on(name: str, fleet: Fleet) -> bool:
    """Whether a name is of the registry that runs on the head while images are handed on; nobody else has one there."""
    registry = fleet["registry"]  # without a name of its own where one is there already
    return "alias" in registry and name.startswith(f"{registry['alias']}:{registry['port']}/")


def _came_along(name: str, fleet: Fleet) -> bool:
    parsed = images.parse_reference(name)
    return bool(parsed["digest"]) and parsed["repository"] in (_repositories(fleet)[1], *_published(fleet).values())


def _repositories(fleet: Fleet) -> tuple[str, str]:
    """Return the repositories of base and overlay, as the engine spells them."""
    parsed = [images.parse_reference(name) for name in (fleet["base"]["repository"], fleet["overlay"]["tag"])]
    return str(parsed[0]["repository"]), str(parsed[1]["repository"])


def _published(fleet: Fleet) -> dict[str, str | None]:
    """Return where role image publishes base and overlay in a registry that was there already, if one is named."""
    place = fleet["registry"].get("existing")
    if not place:
        return {"base": None, "overlay": None}
    base = re.sub("^[^/]*[.:][^/]*/", "", fleet["base"]["repository"])
    return {"base": f"{place}/{base}", "overlay": f"{place}/{fleet['overlay']['tag'].rpartition(':')[0]}"}


def _plain(name: str) -> str:
    """Spell a name as the engine does."""
    parsed = images.parse_reference(name)
    return f"{parsed['repository']}:{parsed['tag']}"


# --- what needs it ----------------------------------------------------------------------------------------------------


def _needs(launches: Iterable[Sequence[Any]]) -> list[Need]:
    """What launches need, the newest first, each once."""
    found: dict[tuple[str | None, ...], Need] = {}
    for launch, wanted in sorted(launches, key=lambda one: str(one[0]), reverse=True):
        base, overlay = wanted.get("base") or {}, wanted.get("overlay") or {}
        needed = (base.get("digest"), overlay.get("id"), overlay.get("context_sha256"))
        found.setdefault(needed, Need(f"launch {launch} needs it", *needed))
    return list(found.values())


def _by_name(names: Sequence[str], fleet: Fleet) -> list[str]:
    called = {
        f"{_repositories(fleet)[0]}:{fleet['base']['tag']}": "it has the base's name",
        _plain(fleet["overlay"]["tag"]): "the present overlay",
        str(fleet["registry"].get("image")): "the registry's own image",
    }
    return [why for name, why in called.items() if name in names]


def _meets(image: Identity, need: Need, models: Mapping[str, Sequence[Identity]]) -> bool:
    """Whether an image is the base or the overlay that is needed."""
    labels = image["labels"]
    built = (labels.get(images.CONTEXT_LABEL), labels.get(images.BASE_LABEL))
    return (
        image["id"] == need.overlay
        or (None not in built and built == (need.context, need.digest))
        or (need.digest is not None and images.pin_status(image, [need.digest]) == "match")
        # Less than images.same asks for: what has a base's layers is not worth a mistake.
        or any(image["layers"] and image["layers"] == model["layers"] for model in models.get(str(need.digest), []))
    )


def _may_be(image: Identity, fleet: Fleet, models: Sequence[Identity]) -> bool:
    """Whether an image may be a base that no image here has as its digest; ``models`` are what ranks know by that."""
    return (
        not image["labels"].get(images.CONTEXT_LABEL)
        and not any(images.has_digest(image, digest) for digest in fleet["builds"])
        and not any(images.runs_on(model["platform"], image["platform"]) for model in models)
    )


def _stands_on(above: Identity, below: Identity) -> bool:
    """Whether the layers of ``below`` are the lowest of ``above``, or all of them: then it frees nothing."""
    count = len(below["layers"])
    return 0 < count <= len(above["layers"]) and above["layers"][:count] == below["layers"]


def _called(image: Identity) -> str:
    return next(map(str, [*image["repo_tags"], *image["repo_digests"]]), f"an image without a name, {image['id'][:19]}")
