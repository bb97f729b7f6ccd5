"""The identities of a container image, and what "the same on every rank" means.

One image carries several things that are all called "a digest": the index digest, the platform manifest digest and the
image Id. On Docker's classic store the Id is the config digest; on the containerd store it is a manifest digest, so Ids
of the two kinds say nothing about each other. This room turns ``docker image inspect`` into one plain *identity*,
compares two identities and says why they differ, and works out what a rank has to do to hold the right images.

An identity is ``{"ref", "present", "store", "id", "config_digest", "config_sha256", "config", "manifest_digest",
"index_digest", "digest", "repo_digests", "repo_tags", "layers", "layers_sha256", "platform", "labels", "files"}``:
digests with their ``sha256:`` prefix, ``digest`` the one of the first RepoDigest, ``layers`` the DiffIDs from the
bottom up, ``layers_sha256`` their OCI chain id as bare hex, ``files`` ``{path: sha256 hex, or None when absent}``.
``config_digest``, ``manifest_digest`` and ``index_digest`` are None where the engine does not tell them.
``config_sha256`` (bare hex) is the same on every engine: of what the image says of running it, its platform and layers;
``config`` are hashes of its single settings, to name those that differ (values stay where they are).
An absent image has ``present: False``, ``ref``, ``store``, else nothing.

A rank's *look* is ``{"engine": {"store", "platform"}, "base", "pinned", "overlay": identities of the base's tag, of
its pinned digest and of the overlay's tag, "catalogue": [{"id", "repo_tags", "repo_digests", "labels"}, …]}``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import files
from .errors import LockstepError
from .layers import chain_ids

CONTEXT_LABEL = "lockstep.context_sha256"
BASE_LABEL = "lockstep.base_digest"
SPLIT_LABEL = "lockstep.engram_split"

Identity = dict[str, Any]

# --- references ------------------------------------------------------------------------------------------------------

# The grammar of github.com/distribution/reference, which docker itself uses.
_LABEL = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_DOMAIN = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?"
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_REFERENCE = re.compile(
    rf"(?P<name>(?:{_DOMAIN}/)?{_COMPONENT}(?:/{_COMPONENT})*)(?::(?P<tag>[^:@/]*))?(?:@(?P<digest>.*))?"
)


def is_digest(text: str) -> bool:
    """Whether ``text`` is a whole ``sha256:<64 hex>`` digest."""
    return _DIGEST.fullmatch(text) is not None


def parse_reference(text: str) -> dict[str, str | None]:
    """Split an image reference the way docker does.

    Returns ``{"registry", "repository", "tag", "digest", "id"}``. ``repository`` is the familiar name
    (``docker.io/library/busybox`` gives ``busybox``), so two spellings of one repository compare equal. A bare Id
    (``sha256:…`` or 64 hex digits) gives only ``id``. Nothing is made up: no tag means ``None``, not ``latest``.
    Raises LockstepError when docker would not take the reference.
    """
    bare = text if text.startswith("sha256:") else f"sha256:{text}"
    if is_digest(bare):
        return {"registry": None, "repository": None, "tag": None, "digest": None, "id": bare}
    match = _REFERENCE.fullmatch(text)
    if (
        match is None
        or (match["tag"] is not None and _TAG.fullmatch(match["tag"]) is None)
        or (match["digest"] is not None and not is_digest(match["digest"]))
    ):
        raise LockstepError(
            "not an image reference",
            found=repr(text),
            expected="[registry[:port]/]repository[:tag][@sha256:<64 hex digits>]",
            next_step="write the reference in lower case, with the whole digest",
        )
    first, slash, rest = match["name"].partition("/")
    if slash and ("." in first or ":" in first or first == "localhost" or first != first.lower()):
        registry, path = first, rest
    else:
        registry, path = "docker.io", match["name"]
    if registry == "index.docker.io":
        registry = "docker.io"
    if registry == "docker.io":
        path = path.removeprefix("library/")
    repository = path if registry == "docker.io" else f"{registry}/{path}"
    return {"registry": registry, "repository": repository, "tag": match["tag"], "digest": match["digest"], "id": None}


def digest_of(reference: str) -> str:
    """Return the ``sha256:…`` part of ``repository@sha256:…`` or a bare digest: the only part that ranks compare."""
    parsed = parse_reference(reference)
    digest = parsed["digest"] or parsed["id"]
    if digest is None:
        raise LockstepError(
            "the reference carries no digest",
            found=reference,
            expected="repository@sha256:<64 hex digits>",
            next_step="pin the image by digest: a tag can move",
        )
    return digest


# --- digests that an engine was not told ------------------------------------------------------------------------------

# Below a rank's state directory: {"format": 1, "digests": {digest: Id}}.
KNOWN = "images.json"


def known(path: str) -> dict[str, str]:
    """Ids by the digest that names them, as a rank wrote down of images that came without one; ``{}`` without a file.

    ``docker load`` tells an engine no digest. Each entry was proven when it was written, and an Id cannot move.
    """
    if not files.look(path):
        return {}
    said = files.read_json(path)
    digests = said.get("digests") if isinstance(said, dict) else None
    if not isinstance(digests, dict):
        raise LockstepError(
            f"{path} is not what it should be",
            found=str(said)[:80],
            expected='{"digests": {digest: Id}}',
            next_step="remove it and load the images again",
        )
    return {str(digest): str(image) for digest, image in digests.items()}


# --- one image on one rank -------------------------------------------------------------------------------------------


def store(info: Mapping[str, Any]) -> str:
    """``"containerd"`` or ``"classic"``, from ``docker info`` (API shape: ``DriverStatus`` is a list of pairs)."""
    status = info.get("DriverStatus") or []
    pairs = status.items() if isinstance(status, Mapping) else [(pair[0], pair[1]) for pair in status]
    driver_type = dict(pairs).get("driver-type") or info.get("driver-type") or ""
    return "containerd" if str(driver_type).startswith("io.containerd.snapshotter") else "classic"


def chain_id(layers: Sequence[str]) -> str | None:
    """OCI chain id of all DiffIDs, listed bottom up, as bare hex; ``None`` for no layers."""
    return chain_ids(layers)[-1].removeprefix("sha256:") if layers else None


def _names(values: object) -> list[str]:
    """RepoTags or RepoDigests without their traps: null instead of a list, ``<none>`` instead of nothing."""
    if not isinstance(values, (list, tuple)):
        return []
    return sorted(str(value) for value in values if "<none>" not in str(value))


def repo_tags(values: object) -> list[str]:
    """RepoTags without their traps; Docker 28's containerd store has names by digest among them."""
    return [name for name in _names(values) if "@" not in name]


def platform(image: Mapping[str, Any]) -> str | None:
    """``os/architecture[/variant]`` of an inspected image."""
    parts = [image.get("Os") or "linux", image.get("Architecture"), image.get("Variant")]
    return "/".join(str(part) for part in parts if part) if image.get("Architecture") else None


# What an image says of running it: the OCI image specification's keys, and last three of Docker's own. All else that
# inspect shows in Config (Hostname, Image, AttachStdin, …) is the engine's or the builder's.
_SETTINGS = (
    "User", "ExposedPorts", "Env", "Entrypoint", "Cmd", "Volumes", "WorkingDir", "Labels", "StopSignal",
    "Healthcheck", "OnBuild", "Shell",
)  # fmt: skip
# Docker before 25 does not know it and leaves it out.
_NEWER = "StartInterval"


def _settings(inspect: Mapping[str, Any]) -> dict[str, Any]:
    """What an inspected image says of running it, ``{key: value}``, alike on every engine; empty means absent."""
    config = {key: value for key in _SETTINGS if (value := (inspect.get("Config") or {}).get(key))}
    health = {key: value for key, value in config.pop("Healthcheck", {}).items() if value and key != _NEWER}
    return config | ({"Healthcheck": health} if health else {})


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _settings_hashed(config: Mapping[str, Any]) -> dict[str, str]:
    """Twelve hex digits for each setting but the labels, and for each variable of the environment (``Env.NAME``)."""
    each = {f"Env.{name}": value for name, _, value in (entry.partition("=") for entry in config.get("Env", ()))}
    each |= {key: value for key, value in config.items() if key != "Labels"}
    return {key: _sha256(value)[:12] for key, value in sorted(each.items())}


def _descriptors(inspect: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Digests of manifest and index, from what engines with a containerd store tell since API 1.48."""
    top = inspect.get("Descriptor") or {}
    digest = str(top["digest"]) if top else None
    if not str(top.get("mediaType")).endswith((".index.v1+json", ".manifest.list.v2+json")):
        return digest, None
    mine = [inspect.get("Os"), inspect.get("Architecture"), inspect.get("Variant") or None]
    members = [
        str(member["Descriptor"]["digest"])
        for member in inspect.get("Manifests") or []
        if member.get("Kind") == "image" and _fit(_parts(member["ImageData"]["Platform"]), mine)
    ]
    return (members[0] if len(members) == 1 else None), digest


def identity(
    inspect: Mapping[str, Any] | None,
    info: Mapping[str, Any],
    hashes: Mapping[str, str | None] | None = None,
    *,
    ref: str | None = None,
) -> Identity:
    """Return the identity of one image.

    ``inspect`` is the API's ``GET /images/{ref}/json``, ``None`` for a 404; ``info`` is ``GET /info`` of the same
    engine; ``hashes`` are the SHA-256 of files read inside the image.
    """
    kind = store(info)
    if inspect is None:
        return {
            "ref": ref, "present": False, "store": kind, "id": None, "config_digest": None, "config_sha256": None,
            "config": {}, "manifest_digest": None, "index_digest": None, "digest": None, "repo_digests": [],
            "repo_tags": [], "layers": [], "layers_sha256": None, "platform": None, "labels": {}, "files": {},
        }  # fmt: skip
    layers = [str(layer) for layer in (inspect.get("RootFS") or {}).get("Layers") or []]
    labels = (inspect.get("Config") or {}).get("Labels") or {}
    config = _settings(inspect)
    manifest, index = _descriptors(inspect)
    image_id = str(inspect["Id"])
    repo_digests = _names(inspect.get("RepoDigests"))
    return {
        "ref": ref,
        "present": True,
        "store": kind,
        "id": image_id,
        # On the containerd store inspect does not tell the config digest: the Id is a manifest or index digest there.
        "config_digest": image_id if kind == "classic" else None,
        "config_sha256": _sha256([config, platform(inspect), layers]),
        "config": _settings_hashed(config),
        "manifest_digest": manifest,
        "index_digest": index,
        "digest": repo_digests[0].partition("@")[2] if repo_digests else None,
        "repo_digests": repo_digests,
        "repo_tags": repo_tags(inspect.get("RepoTags")),
        "layers": layers,
        "layers_sha256": chain_id(layers),
        "platform": platform(inspect),
        "labels": {str(key): str(value) for key, value in sorted(labels.items())},
        "files": dict(sorted((hashes or {}).items())),
    }


def presence(image: Mapping[str, Any]) -> str:
    """``"absent"``, ``"present"`` or ``"present_without_digest"`` (normal after ``docker load`` and a local build)."""
    if not image.get("present"):
        return "absent"
    return "present" if image.get("repo_digests") else "present_without_digest"


def repo_digest(image: Mapping[str, Any], repository: str | None = None) -> str | None:
    """Return the digest this image has (in ``repository``, if given): from inspect, never from ``docker images``."""
    wanted = parse_reference(repository)["repository"] if repository else None
    for name in image.get("repo_digests") or []:
        its, _, digest = str(name).partition("@")
        if wanted is None or parse_reference(its)["repository"] == wanted:
            return digest
    return None


def acceptable_pins(pin: str, index: Mapping[str, Any] | None, image: Mapping[str, Any] | None) -> list[str]:
    """Every digest that names the same image as ``pin``: the pin, its platform member, the config digest.

    ``index`` is the manifest list that ``pin`` names, or ``None`` where it is not known. ``image`` is an identity
    whose platform chooses the member and whose config digest closes the list. The pin comes first.
    """
    digest = digest_of(pin)
    pins = [digest]
    mine = [*str((image or {}).get("platform") or "").split("/"), None, None][:3]
    members = (index or {}).get("manifests") or []
    pins += [str(member["digest"]) for member in members if _fit(_parts(member.get("platform") or {}), mine)]
    config = (image or {}).get("config_digest")
    if config and set(_digests(image or {})) & set(pins):
        pins.append(str(config))
    return list(dict.fromkeys(pins))


def _parts(its: Mapping[str, Any]) -> list[str | None]:
    return [its.get("os"), its.get("architecture"), its.get("variant")]


def _fit(one: Sequence[str | None], other: Sequence[str | None]) -> bool:
    """Whether two platforms are one; a side that names no variant means any: arm64 is arm64/v8."""
    return all(a == b or None in (a, b) for a, b in zip(one, other, strict=True))


def _digests(image: Mapping[str, Any]) -> list[str]:
    """Return the digest parts of all RepoDigests."""
    return [str(name).partition("@")[2] for name in image.get("repo_digests") or []]


def has_digest(image: Mapping[str, Any], digest: str) -> bool:
    """Whether one of the image's RepoDigests, of any repository, is ``digest``."""
    return digest in _digests(image)


def pin_status(image: Mapping[str, Any], pins: Iterable[str]) -> str:
    """``"absent"``, ``"match"``, ``"mismatch"`` or ``"unknown"`` of an identity against acceptable pins (bare digests).

    ``unknown`` is not ``mismatch``: an image that came by ``docker load`` has no RepoDigests (in a containerd store one
    that no registry knows) although it may be the right one; only a comparison with a rank that pulled by digest tells.
    """
    if not image.get("present"):
        return "absent"
    wanted = set(pins)
    if image.get("config_digest") in wanted or image.get("id") in wanted or wanted & set(_digests(image)):
        return "match"
    return "mismatch" if image.get("repo_digests") and image.get("store") == "classic" else "unknown"


# --- two images ------------------------------------------------------------------------------------------------------


def ids_comparable(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether unequal Ids mean unequal images: only between classic stores, where an Id is a config digest."""
    return a.get("store") == "classic" and b.get("store") == "classic"


def compare_files(a: Mapping[str, str | None], b: Mapping[str, str | None]) -> dict[str, list[str]]:
    """``{"differ", "only_a", "only_b"}``: paths whose content differs, or that one side lacks or did not hash."""
    both = sorted(set(a) | set(b))
    return {
        "differ": [path for path in both if a.get(path) and b.get(path) and a[path] != b[path]],
        "only_a": [path for path in both if a.get(path) and not b.get(path)],
        "only_b": [path for path in both if b.get(path) and not a.get(path)],
    }


def _some(paths: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(paths[:limit])
    return shown if len(paths) <= limit else f"{shown} and {len(paths) - limit} more"


def _proof(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Return the strongest reason to call two present images equal by name: see ``same``."""
    alike = a["layers"] == b["layers"] and a["platform"] == b["platform"]
    # A containerd store's Id may be an index: one name for an image of each platform.
    if a["id"] == b["id"] and (alike or ids_comparable(a, b)):
        return "id"
    if a["config_digest"] and a["config_digest"] == b["config_digest"]:
        return "config"
    if not ids_comparable(a, b) and alike and a["layers"] and _configured_alike(a, b) is not False:
        return "layers"
    return None


def _configured_alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool | None:
    """Whether settings, platform and layers are equal; None where an identity does not tell."""
    both = [a.get("config_sha256"), b.get("config_sha256")]
    return both[0] == both[1] if all(both) else None


def _why_id(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    return f"id: {a['id'][:19]} against {b['id'][:19]}" if ids_comparable(a, b) else None


def _why_platform(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    return None if a["platform"] == b["platform"] else f"platform: {a['platform']} against {b['platform']}"


def _why_base(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    bases = [side["labels"].get(BASE_LABEL) for side in (a, b)]
    return None if bases[0] == bases[1] else f"base: {bases[0] or 'no label'} against {bases[1] or 'no label'}"


def _why_layers(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    left, right = a["layers"], b["layers"]
    if left == right:
        return None
    common = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        common += 1
    first = [layers[common][:19] if common < len(layers) else "none" for layers in (left, right)]
    return (
        f"layers: the first {common} of {len(left)} and {len(right)} are equal, "
        f"layer {common + 1} is {first[0]} against {first[1]}"
    )


def _why_config(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Name the settings that differ, never their values; ``_why_base`` has its own words for the base's label."""

    def differing(key: str) -> list[str]:
        one, other = (side.get(key) or {} for side in (a, b))
        return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))

    keys, labels = differing("config"), [name for name in differing("labels") if name != BASE_LABEL]
    variables = [key.removeprefix("Env.") for key in keys if key.startswith("Env.")]
    said = [f"{key} differs" for key in keys if key.partition(".")[0] != "Env"]
    if "Env" in keys:
        said.append(f"Env differs: {_some(variables) or 'its order'}")
    if labels:
        said.append(f"labels differ: {_some(labels)}")
    if said:
        return f"configuration: {'; '.join(said)}"
    alike = _configured_alike(a, b)
    if a["layers"] != b["layers"] or alike is False:
        return None
    rest = "time, author or history of the build" if alike else "labels, environment or the time of the build"
    return f"configuration: all layers are equal, so {rest} differ"


def _why_files(compared: Mapping[str, Sequence[str]]) -> list[str]:
    said = {
        "differ": "files: {n} differ: {names}",
        "only_a": "files: {n} only in the first: {names}",
        "only_b": "files: {n} only in the second: {names}",
    }
    return [text.format(n=len(paths), names=_some(paths)) for key, text in said.items() if (paths := compared[key])]


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two identities: ``{"same", "by", "why", "files"}``.

    ``by`` names the proof: ``"id"`` (equal Ids; on the classic store they are config digests), ``"config"`` (equal
    config digests), ``"layers"`` (Ids of different kinds; equal layer chains, platforms and, where both tell it,
    ``config_sha256``). File hashes, where both or either have them, must be equal too, whatever the Ids say. ``why``
    lists the differences in words (base, layer, configuration, files); ``files`` is ``compare_files``.
    """
    compared = compare_files(a.get("files") or {}, b.get("files") or {})
    if not (a.get("present") and b.get("present")):
        if a.get("present") == b.get("present"):
            return {"same": True, "by": "absent", "why": [], "files": compared}
        lacks = "second" if a.get("present") else "first"
        return {"same": False, "by": None, "why": [f"absent: the {lacks} has no such image"], "files": compared}
    by = _proof(a, b)
    in_files = _why_files(compared)
    if by is None:
        reasons = (_why_id, _why_platform, _why_base, _why_layers, _why_config)
        why = [text for reason in reasons if (text := reason(a, b))] + in_files
    else:
        # Equal by name, unequal by content: somebody wrote into the rank's image store or into a running container.
        why = ["the names are equal, the content was changed behind the engine", *in_files] if in_files else []
    return {"same": by is not None and not why, "by": by, "why": why, "files": compared}


def same_content(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Like ``same``, for overlays built apart: an equal base and equal hashed files are enough (``by: "files"``).

    Two builds of one tree share an Id only where one kind of engine built both in one way (overlay_build on the classic
    store); elsewhere no rebuild can make them equal. Both must name the same base and have hashed the same, non-empty
    set of files.
    """
    strict = same(a, b)
    if strict["same"] or not (a.get("present") and b.get("present")):
        return strict
    base = a["labels"].get(BASE_LABEL)
    hashed = {path for path, digest in (a.get("files") or {}).items() if digest}
    equal = bool(base) and base == b["labels"].get(BASE_LABEL) and bool(hashed) and a["files"] == b["files"]
    return {**strict, "same": equal, "by": "files" if equal else None}


def agree(images: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compare one image over ranks: ``{"equal", "groups", "why", "seen", "files"}``.

    ``images`` is ``{host: identity}``. ``groups`` are lists of hosts that hold the same image, the largest first (ties,
    and the hosts of a group: classic stores first, in the order given); ``why`` is ``{host: [reasons]}`` for every host
    outside the first group, against that group's first host; ``files`` is the sorted list of all paths whose hashes are
    not equal everywhere. An image that no rank holds is not equal: there is nothing to prove.
    """
    groups: list[list[str]] = []
    # Two classic stores may differ in the time of the build alone, and a third that does not tell it equals both.
    for host in sorted(images, key=lambda host: images[host].get("store") == "containerd"):
        alike = [group for group in groups if same(images[group[0]], images[host])["same"]]
        if alike:
            max(alike, key=len).append(host)
        else:
            groups.append([host])
    groups.sort(key=len, reverse=True)
    why: dict[str, list[str]] = {}
    paths: set[str] = set()
    for group in groups[1:]:
        for host in group:
            against = groups[0][0]
            result = same(images[against], images[host])
            why[host] = [f"against {against}: {reason}" for reason in result["why"]]
            paths.update(path for key in ("differ", "only_a", "only_b") for path in result["files"][key])
    absent = [host for host, image in images.items() if not image.get("present")]
    for host in absent:
        why.setdefault(host, ["absent"])
    return {
        "equal": len(groups) == 1 and not absent,
        "groups": groups,
        "why": why,
        "seen": {host: image.get("id") for host, image in images.items()},
        "files": sorted(paths),
    }


def table(images: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Show one image over ranks in lines: a row a rank with short Id, digest and layer chain, then the reasons."""
    seen = agree(images)
    rows: list[tuple[str, ...]] = [("rank", "image id", "digest", "layers", "platform", "files", "")]
    for host, image in images.items():
        short = [str(image[key] or "none").removeprefix("sha256:")[:12] for key in ("id", "digest", "layers_sha256")]
        hashed = sum(1 for digest in image["files"].values() if digest)
        verdict = "ok" if host in seen["groups"][0] and image["present"] else "DIFFERS"
        rows.append((host, *short, image["platform"] or "none", str(hashed), verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + [f"{host} {reason}" for host, reasons in seen["why"].items() for reason in reasons]


# --- what a rank has to do -------------------------------------------------------------------------------------------


KEPT_NAME = "{repository}:{tag}-{id12}-{date}"


def kept_name(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any] | None, date: str, template: str = KEPT_NAME
) -> str | None:
    """Return the dated name for the image that loses ``name``, ``None`` when it has such a name already.

    ``name`` is ``repository:tag``, ``date`` ``YYYYMMDD``; ``template`` has the fields of ``KEPT_NAME``. An overlay that
    stands on another base than its successor is called ``mixed`` instead of by its tag (the campaign's word).
    Raises LockstepError for a template that gives no name that docker takes.
    """
    repository, _, tag = name.rpartition(":")
    base = ((new or {}).get("labels") or {}).get(BASE_LABEL)
    word = "mixed" if base and old["labels"].get(BASE_LABEL) != base else tag
    kept = _filled(template, repository, old["id"], word, date)
    if not parse_reference(kept)["tag"]:
        raise LockstepError("the dated name has no tag", found=kept, expected=KEPT_NAME)
    # A second day, a second word: the same image keeps the name it has.
    dated = dated_names(repository, old["id"], template)
    return None if any(dated.fullmatch(known) for known in old["repo_tags"]) else kept


def dated_names(repository: str, image_id: str, template: str = KEPT_NAME) -> re.Pattern[str]:
    """Return what every dated name looks like that an image can have in a repository, of any tag and any day."""
    any_day = re.escape(_filled(template, repository, image_id, "\0", "\1"))
    return re.compile(any_day.replace(re.escape("\0"), r"[\w.-]+").replace(re.escape("\1"), "[0-9]{8}"))


def _filled(template: str, repository: str, image_id: str, tag: str, date: str) -> str:
    id12 = image_id.removeprefix("sha256:")[:12]
    try:
        return template.format(repository=repository, tag=tag, id12=id12, date=date)
    except (KeyError, IndexError, ValueError) as error:
        raise LockstepError("not a template of a dated name", found=template, expected=KEPT_NAME) from error


def _held(look: Mapping[str, Any], image_id: str | None) -> bool:
    return bool(image_id) and any(image["id"] == image_id for image in look["catalogue"])


def _is_overlay(labels: Mapping[str, str], overlay: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    wanted = (overlay["context_sha256"], base["digest"])
    return (labels.get(CONTEXT_LABEL), labels.get(BASE_LABEL)) == wanted


def base_work(base: Mapping[str, Any], looks: Mapping[str, Mapping[str, Any]], head: str) -> dict[str, dict[str, Any]]:
    """Say what each rank has to do for the pinned base: ``{host: {"action", "image", "drift", "why"}}``.

    ``action`` is ``"ok"``, ``"tag"`` (the right image is here: only the name is wrong), ``"pull"`` (from the hub: once
    for the fleet), ``"fetch"`` (from the rank of ``base_source``) or ``"refuse"``; ``image`` is the Id or
    ``repository@digest`` to name; ``drift`` is the Id now under the tag when it is another one.
    A fetch has ``hub``, the name by which the rank may learn the digest afterwards, or None.
    ``base`` is ``{"repository", "tag", "digest"}``.
    """
    tag_ref, pin_ref = base_refs(base)
    known, source = _known_base(looks), base_source(looks, head)
    model = next((look["pinned"] for look in looks.values() if look["pinned"]["present"]), None)
    out: dict[str, dict[str, Any]] = {}
    for host, look in looks.items():
        engine, pinned, tagged = look["engine"], look["pinned"], look["base"]
        wanted = pinned["id"] if pinned["present"] else known.get(_kind(look))
        drift = tagged["id"] if tagged["present"] and tagged["id"] != wanted else None
        entry = {"action": "pull", "image": pin_ref, "drift": drift, "why": f"{pin_ref} is not on this rank"}
        if pinned["present"] and not runs_on(pinned["platform"], engine["platform"]):
            entry |= {"action": "refuse", "why": f"built for {pinned['platform']}, this rank is {engine['platform']}"}
        elif wanted is not None and tagged.get("id") == wanted:
            entry |= {"action": "ok", "image": wanted, "why": "under its tag, by digest"}
        elif model and (found := same(model, tagged))["same"] and found["by"] == "layers":
            entry |= {"action": "ok", "image": tagged["id"], "drift": None, "why": "the same layers, by another Id"}
        elif _held(look, wanted):
            entry |= {"action": "tag", "image": wanted, "why": f"present, but {tag_ref} names {drift or 'nothing'}"}
        elif host != source and _kind(looks[source]) == ("classic", engine["platform"]):
            # A containerd store holds an index, of which it pushes what it has: the hub is the surer way there.
            # A classic store that has the bytes learns the hub's digest from the manifest alone.
            entry |= {"action": "fetch", "hub": pin_ref if engine["store"] == "classic" else None}
        out[host] = entry
    return out


def base_source(looks: Mapping[str, Mapping[str, Any]], head: str) -> str:
    """Return the rank that hands the base on: the head, unless only another rank of its platform holds the base."""
    known, platform = _known_base(looks), looks[head]["engine"]["platform"]
    for host in (head, *looks):
        look = looks[host]
        there = look["pinned"]["present"] or _held(look, known.get(_kind(look)))
        if there and look["engine"]["platform"] == platform and runs_on(look["pinned"]["platform"], platform):
            return host
    return head


def _kind(look: Mapping[str, Any]) -> tuple[str, str]:
    """Between ranks that agree in this, equal Ids are equal images."""
    return look["engine"]["store"], look["engine"]["platform"]


def _known_base(looks: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """Return the base's Id by kind of rank, from the ranks that know the pinned digest.

    One that got the image by docker load, or from the head, knows none.
    """
    return {_kind(look): look["pinned"]["id"] for look in looks.values() if look["pinned"]["present"]}


def runs_on(image: object, engine: object) -> bool:
    """Whether a rank can run an image, both ``os/architecture[/variant]``; what is not known does not refuse."""
    return not image or not engine or str(image).split("/")[:2] == str(engine).split("/")[:2]


def base_refs(base: Mapping[str, Any]) -> tuple[str, str]:
    """``(repository:tag, repository@digest)`` of a pinned base."""
    return f"{base['repository']}:{base['tag']}", f"{base['repository']}@{base['digest']}"


def overlay_work(
    base: Mapping[str, Any], overlay: Mapping[str, Any], looks: Mapping[str, Mapping[str, Any]], head: str
) -> dict[str, dict[str, Any]]:
    """Say what each rank has to do for the overlay: ``{host: {"action", "image", "drift", "why"}}``.

    The head alone builds, and only when no image of its own carries this context and base; workers get the head's
    image, never a build of their own, so equal Ids are reached by shipping and no rebuild loops for them. ``action``
    is ``"ok"``, ``"tag"``, ``"build"`` (head), ``"fetch"`` or ``"refuse"``; ``image`` the Id where known.
    ``overlay`` is ``{"tag", "context_sha256"}`` with ``tag`` the whole name, and the ``id`` that a launch ran with when
    its plan comes from the journal: then the rank of ``overlay_source`` stands in for the head.
    """
    source = overlay_source(base, overlay, looks, head)
    there = _overlay_at_head(base, overlay, looks[source])
    mine = looks[source]["overlay"] if there["action"] == "ok" else None
    return {
        host: there if host == source else _overlay_at_worker(str(overlay["tag"]), there["image"], mine, look)
        for host, look in looks.items()
    }


def overlay_source(
    base: Mapping[str, Any], overlay: Mapping[str, Any], looks: Mapping[str, Mapping[str, Any]], head: str
) -> str:
    """Return the rank that hands the overlay on: the head, or one that still holds what an earlier launch ran with."""
    holders = [
        host
        for host in (head, *looks)
        if any(
            image["id"] == overlay.get("id") and _is_overlay(image["labels"], overlay, base)
            for image in looks[host]["catalogue"]
        )
    ]
    return holders[0] if holders else head


def _overlay_at_head(base: Mapping[str, Any], overlay: Mapping[str, Any], look: Mapping[str, Any]) -> dict[str, Any]:
    mine, foundation, name = look["overlay"], look["pinned"], overlay["tag"]
    drift = mine["id"]
    found = [image for image in look["catalogue"] if _is_overlay(image["labels"], overlay, base)]
    # The one that has the name under which it was built comes first.
    built = built_name(overlay)
    fits = [image["id"] for image in sorted(found, key=lambda image: built not in image["repo_tags"])]
    if overlay.get("id"):  # a plan of an earlier launch names its very image
        fits = [image for image in fits if image == overlay["id"]]
    elif foundation["present"] and mine["layers"][:-1] != foundation["layers"]:
        # A label can be copied, and what was built or committed on top of an overlay inherits it. An overlay is one
        # layer on the layers of its base.
        fits = [image for image in fits if image != drift]
    if drift and drift in fits:
        return {"action": "ok", "image": drift, "drift": None, "why": "built from this tree on this base"}
    if fits:
        return {"action": "tag", "image": fits[0], "drift": drift, "why": f"built before, but {name} names {drift}"}
    if overlay.get("id"):  # with the builder's cache the same Id comes back; the converged table holds it against it
        why = f"no rank holds the overlay {overlay['id']} of that launch"
        return {"action": "build", "image": None, "drift": drift, "why": why}
    why = f"{name} was built from another tree or on another base" if drift else f"there is no {name}"
    return {"action": "build", "image": None, "drift": drift, "why": why}


def built_name(overlay: Mapping[str, Any]) -> str:
    """Return the name that an overlay is built under: its repository, and the first 12 digits of its context's hash."""
    return f"{parse_reference(str(overlay['tag']))['repository']}:{str(overlay['context_sha256'])[:12]}"


def _overlay_at_worker(
    name: str, wanted: str | None, mine: Mapping[str, Any] | None, look: Mapping[str, Any]
) -> dict[str, Any]:
    """Say what a worker does to get the head's image ``wanted``; ``mine`` is the head's identity of it, where known."""
    theirs = look["overlay"]
    drift = theirs["id"]
    compared = same(mine, theirs) if mine else {"same": drift == wanted, "by": None, "why": []}
    if wanted is None:
        return {"action": "fetch", "image": None, "drift": drift, "why": "the head builds a new overlay"}
    if compared["same"]:
        return {"action": "ok", "image": drift, "drift": None, "why": "the same as on the head"}
    if compared["by"] is not None:
        return {"action": "refuse", "image": drift, "drift": drift, "why": "; ".join(compared["why"])}
    why = ("; ".join(compared["why"]) or f"{name} is another image") if drift else f"there is no {name}"
    return {"action": "tag" if _held(look, wanted) else "fetch", "image": wanted, "drift": drift, "why": why}


def work(wanted: Mapping[str, Any], looks: Mapping[str, Mapping[str, Any]], head: str) -> dict[str, Any]:
    """Return the work of all ranks: ``{host: {"base", "base_source", "overlay", "source", "todo": bool}}``.

    See ``base_work``, ``base_source``, ``overlay_work`` and ``overlay_source``.
    ``wanted`` is a plan's ``images``: ``{"base": {"repository", "tag", "digest"}, "overlay": {"tag",
    "context_sha256"}}``. Raises LockstepError for a rank that cannot be converged, naming it.
    """
    base = base_work(wanted["base"], looks, head)
    overlay = overlay_work(wanted["base"], wanted["overlay"], looks, head)
    source = overlay_source(wanted["base"], wanted["overlay"], looks, head)
    for host in looks:
        for what, entry in (("base image", base[host]), ("overlay image", overlay[host])):
            if entry["action"] == "refuse":
                raise LockstepError(
                    f"the {what} on this rank cannot be used",
                    host=host,
                    found=f"{entry['image']}: {entry['why']}",
                    expected="the same bytes as on every other rank, for this rank's platform",
                    next_step="pin an image for this platform; or, where files differ, remove the image of the rank "
                    "whose files are not those of this checkout or base, and run again",
                )
    return {
        host: {
            "base": base[host],
            "base_source": base_source(looks, head),
            "overlay": overlay[host],
            "source": source,
            "todo": base[host]["action"] != "ok" or overlay[host]["action"] != "ok",
        }
        for host in looks
    }


# --- images as files -------------------------------------------------------------------------------------------------


def set_of(
    wanted: Mapping[str, Any], found: Mapping[str, Identity], registry: str | None = None
) -> dict[str, dict[str, Any]]:
    """List what a set of images on disk holds: for ``base``, ``overlay`` and ``registry`` an identity.

    Without what is one engine's own (digests and tags), with ``name``, the one it shall have on a rank, and ``pin``,
    the digest that it is asked for by, or None. ``wanted`` is a plan's ``images``.
    """
    pins = {"base": wanted["base"]["digest"]}
    names = {"base": base_refs(wanted["base"])[0], "overlay": str(wanted["overlay"]["tag"])}
    if registry:
        pins["registry"] = parse_reference(registry)["digest"]
        names["registry"] = registry
        if pins["registry"]:
            names["registry"] = f"{parse_reference(registry)['repository']}:{pins['registry'][7:19]}"
    own = ("digest", "repo_digests", "repo_tags", "files", "ref")
    return {
        what: {key: value for key, value in image.items() if key not in own}
        | {"ref": names[what], "name": names[what], "pin": pins.get(what)}
        for what, image in found.items()
    }


def check_set(listed: object, wanted: Mapping[str, Any], platform: str) -> dict[str, dict[str, Any]]:
    """Return the images of a set, for an engine's platform and a plan's ``images``; LockstepError when it is no such.

    ``listed`` is ``{"format": 1, "images": what set_of gave}``.
    """
    images = listed.get("images") if isinstance(listed, dict) and listed.get("format") == 1 else None
    if not isinstance(images, dict) or not {"base", "overlay"} <= set(images):
        raise LockstepError(
            "this is no list of a set of images that this version knows",
            found=str(listed)[:80],
            expected="format 1, with base and overlay",
            next_step="save the set again with this version: ansible-playbook save_images.yml",
        )
    for image in images.values():
        if not runs_on(image["platform"], platform):
            raise LockstepError(
                "the set was saved for another platform than this rank's",
                found=f"{image['name']}: {image['platform']}",
                expected=platform,
                next_step="save it on a host of this platform",
            )
    base, overlay = wanted["base"], wanted["overlay"]
    if images["base"]["pin"] != base["digest"]:
        raise LockstepError(
            "the set holds another base than this fleet pins",
            found=str(images["base"]["pin"]),
            expected=base["digest"],
            next_step=f"-e base_digest={images['base']['pin']} when that base is meant; "
            "else save the set on a fleet that pins this one",
        )
    labels = images["overlay"]["labels"]
    if not _is_overlay(labels, overlay, base):
        raise LockstepError(
            "the set holds another overlay than this checkout's",
            found=f"context {labels.get(CONTEXT_LABEL)} on {labels.get(BASE_LABEL)}",
            expected=f"context {overlay['context_sha256']} on {base['digest']}",
            next_step="use the checkout that the set was saved from, or save it again from this one",
        )
    names = {"base": base_refs(base)[0], "overlay": str(overlay["tag"])}
    return {what: {**image, "files": {}, "name": names.get(what, image["name"])} for what, image in images.items()}


# --- the overlay's build context -------------------------------------------------------------------------------------


# What of the checkout goes into the overlay's build context, and where it lies there and in the image: the adapters
# and the core.
CONTEXT_FOLDERS = {"adapters": "opt/lockstep", "plugins/module_utils": "opt/lockstep/lockstep_core"}
DOCKERFILE = "Dockerfile"
# Of these folders, but not for the image: the recipe itself, and what is for the plugins only.
_APART = {"adapters/Dockerfile": DOCKERFILE, "plugins/module_utils/docker_api.py": None}


def overlay_context(root: str) -> list[tuple[str, int, bytes]]:
    """Read the overlay's build context from a checkout: ``[(path in the context, mode, content), …]``, sorted by path.

    Hidden files and what Python compiled are left out. Raises LockstepError where there is no Dockerfile.
    """
    entries = []
    for folder, place in CONTEXT_FOLDERS.items():
        for path, _, _ in files.tree(f"{root}/{folder}"):
            source = f"{root}/{folder}/{path}"
            name = _APART.get(f"{folder}/{path}", f"{place}/{path}")
            hidden = any(part.startswith(".") or part == "__pycache__" for part in path.split("/"))
            if not hidden and name is not None:
                entries.append((name, files.mode(source), files.read_bytes(source)))
    if DOCKERFILE not in [path for path, _, _ in entries]:
        raise LockstepError(
            "the checkout has no overlay to build",
            found=f"no adapters/Dockerfile below {root}",
            expected="Lockstep's own checkout",
            next_step="run the playbook from the checkout's root",
        )
    return sorted(entries)


def context_sha256(entries: Iterable[tuple[str, int, bytes]], base_digest: str, split: str) -> str:
    """Hash of everything that makes an overlay, 64 hex digits: it decides whether the overlay has to be built again.

    That is the context, the base below it and the Engram split that it is told. ``entries`` are ``(path, mode,
    content)`` with paths relative to the context; times and owners do not count, the order does not matter. Only the
    execute bit of the mode counts, as in git: a checkout's umask must not.
    """
    lines: dict[str, str] = {}
    for path, mode, content in entries:
        if path.startswith("/") or "\n" in path or ".." in path.split("/") or path in lines:
            raise LockstepError(
                "a path that cannot be in a build context",
                found=repr(path),
                expected="each path once, relative, without '..' and line breaks",
                next_step="rename the file",
            )
        lines[path] = f"{'755' if mode & 0o100 else '644'} {hashlib.sha256(content).hexdigest()} {path}\n"
    text = f"base {base_digest}\nsplit {split}\n" + "".join(lines[path] for path in sorted(lines))
    return hashlib.sha256(text.encode()).hexdigest()


def overlay_sha256(root: str, base_digest: str, split: str) -> str:
    """Hash of the overlay that a checkout would build on a base: what a plan calls ``context_sha256``."""
    return context_sha256(overlay_context(root), base_digest, split)
