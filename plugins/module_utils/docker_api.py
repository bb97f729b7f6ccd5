"""What the plugins ask a rank's Docker Engine: images, the files inside them, containers and their logs.

This file is the plugins' face to the engine and not a room of the core: it stands here because modules ship to the
ranks only what lies in module_utils. It is left out of the package ``lockstep_core`` and of the overlay image.

``Engine`` is community.docker's own API client (a rank needs python3-requests and nothing else); the functions take any
client with the public methods of ``Client``. Nothing here changes an image, or starts or stops anything.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import posixpath
import re
import tarfile
import time
import zlib
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from ansible_collections.community.docker.plugins.module_utils.common_api import (
    AnsibleDockerClientBase,
    RequestException,
)

try:
    from urllib3 import exceptions

    _CUT: tuple[type[Exception], ...] = (exceptions.HTTPError,)
except ImportError:  # then requests is missing too, and the client says so
    _CUT = ()

from . import dockerd, images
from .errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# What a client raises when the engine refuses a call, for the modules to catch.
EngineError = RequestException

LOOK_LABEL = "lockstep.look"
LOOKER_LABEL = "lockstep.look.process"
BLOCK = 1 << 20
NOT_FOUND = 404
# Seconds after which the engine surely has heard of a start.
START_HEARD_S = 5.0
# Seconds without a word from an engine that packs or unpacks whole images.
UNPACK_S = 1800
# Links inside an image that are followed before it counts as a loop; the kernel's own limit is 40.
LINKS = 16
# Python writes compiled files with times in them: two equal images differ there and nowhere else.
COMPILED = (".pyc", ".pyo")


class Client(Protocol):
    """The part of community.docker's API client that is used here."""

    def get_json(self, pathfmt: str, *args: str, **kwargs: Any) -> Any: ...  # noqa: ANN401, D102 - JSON; requests' arguments
    def get_binary(self, pathfmt: str, *args: str, **kwargs: Any) -> bytes: ...  # noqa: ANN401, D102 - the same
    def get_raw_stream(self, pathfmt: str, *args: str, **kwargs: Any) -> Iterator[bytes]: ...  # noqa: ANN401, D102 - the same
    def post_json_to_json(self, pathfmt: str, *args: str, **kwargs: Any) -> Any: ...  # noqa: ANN401, D102 - the same
    def post_call(self, pathfmt: str, *args: str, **kwargs: Any) -> None: ...  # noqa: ANN401, D102 - the same
    def delete_call(self, pathfmt: str, *args: str, **kwargs: Any) -> None: ...  # noqa: ANN401, D102 - the same


class Engine(AnsibleDockerClientBase):
    """A connection to the Docker Engine of this host, usable outside a module of community.docker.

    ``host`` is its address; without one the environment's ``DOCKER_HOST`` or the usual socket. Raises LockstepError
    when the engine does not answer.
    """

    def __init__(self, host: str | None = None) -> None:
        self._options = {"docker_host": host}
        super().__init__()

    def fail(self, msg: str, **_: object) -> NoReturn:
        """Take community.docker's errors to ours."""
        raise LockstepError(
            "the Docker Engine on this rank does not answer as it should",
            found=msg,
            expected="an engine whose socket this user may open",
            next_step="systemctl status docker; the modules need root or the group docker, and python3-requests",
        )

    def load(self, blocks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        """``POST /images/load`` of a tar as it comes; yields what the engine says. See the function ``load``."""
        refused = "the Docker Engine did not take the images; it kept nothing of them"
        return self._said(refused, "/images/load", data=blocks, params={"quiet": "1"})

    def pull(self, repository: str, digest: str) -> Iterator[dict[str, Any]]:
        """``POST /images/create``; yields what the engine says. See the function ``pull``."""
        refused = f"the Docker Engine did not get {repository}@{digest}"
        return self._said(refused, "/images/create", params={"fromImage": repository, "tag": digest})

    def _said(self, refused: str, path: str, **request: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - requests' own
        """What the engine says of a request, line by line; LockstepError, saying ``refused``, when that is an error."""
        trouble = ""
        try:
            answer = self._post(self._url(path), stream=True, timeout=UNPACK_S, **request)
            self._raise_for_status(answer)
            for said in self._stream_helper(answer, decode=True):
                trouble = str(said.get("error") or trouble)
                yield said
        except EngineError as error:
            trouble = str(error)
        except _CUT as error:
            raise LockstepError(
                "the Docker Engine ended in the middle of its answer",
                found=str(error),
                next_step="systemctl status docker on this rank, then run again",
            ) from error
        if trouble:
            raise LockstepError(refused, found=trouble, next_step=dockerd.trouble(trouble)["next_step"])

    def _get_params(self) -> dict[str, str | None]:
        return self._options


def not_found(error: Exception) -> bool:
    """Whether an API error is a 404; the client's error classes are private to its collection, the response is not."""
    return getattr(getattr(error, "response", None), "status_code", None) == NOT_FOUND


def _inspect(client: Client, path: str, name: str, **params: str) -> dict[str, Any] | None:
    try:
        return cast("dict[str, Any]", client.get_json(path, name, params=params))
    except Exception as error:
        if not_found(error):
            return None
        raise


# --- images ----------------------------------------------------------------------------------------------------------


def engine(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identities need of an engine, from ``GET /info``: ``{"version", "store", "platform", "root"}``."""
    names = {"x86_64": "amd64", "aarch64": "arm64"}
    architecture = str(info.get("Architecture"))
    return {
        "version": info.get("ServerVersion"),
        "store": images.store(info),
        "platform": f"{info.get('OSType', 'linux')}/{names.get(architecture, architecture)}",
        "root": info.get("DockerRootDir"),
    }


def inspect_image(client: Client, ref: str) -> dict[str, Any] | None:
    """``docker image inspect`` of a reference or an Id, ``None`` when the engine does not have it."""
    # With the members of an index, where the engine can tell them (API 1.48); older ones do not look at it.
    return _inspect(client, "/images/{0}/json", ref, manifests="1")


def catalogue(client: Client) -> list[dict[str, Any]]:
    """Every image of the engine, in one call: ``[{"id", "repo_tags", "repo_digests", "labels"}, …]``, sorted by Id."""
    listed = client.get_json("/images/json", params={"all": "0", "digests": "1"})
    found = [
        {
            "id": str(item["Id"]),
            "repo_tags": images.repo_tags(item.get("RepoTags")),
            "repo_digests": sorted(name for name in item.get("RepoDigests") or [] if "<none>" not in name),
            "labels": dict(item.get("Labels") or {}),
        }
        for item in listed
    ]
    return sorted(found, key=lambda item: str(item["id"]))


def identify(
    client: Client, ref: str, paths: Sequence[str] = (), *, info: Mapping[str, Any] | None = None
) -> images.Identity:
    """Identity of one image (see ``images``), with hashes of the files and directories in ``paths`` inside it."""
    info = client.get_json("/info") if info is None else info
    inspect = inspect_image(client, ref)
    hashes = image_files(client, inspect["Id"], paths) if inspect and paths else {}
    return images.identity(inspect, info, hashes, ref=ref)


def look(
    client: Client,
    wanted: Mapping[str, Any],
    paths: Sequence[str] = (),
    *,
    info: Mapping[str, Any] | None = None,
    known: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Look at a rank's images (see ``images``) for a plan's ``images``; ``paths`` are hashed inside the overlay.

    ``known`` are Ids by the digest that names them, for an engine that got an image without its digest; those that are
    here are returned as ``known``.
    """
    info = client.get_json("/info") if info is None else info
    tag_ref, pin_ref = images.base_refs(wanted["base"])
    here = {digest: image for digest, image in (known or {}).items() if inspect_image(client, image)}
    pinned = identify(client, pin_ref, info=info)
    if not pinned["present"] and wanted["base"]["digest"] in here:
        pinned = {**identify(client, here[wanted["base"]["digest"]], info=info), "ref": pin_ref}
    return {
        "engine": engine(info),
        "known": here,
        "base": identify(client, tag_ref, info=info),
        "pinned": pinned,
        "overlay": identify(client, str(wanted["overlay"].get("id") or wanted["overlay"]["tag"]), paths, info=info),
        "catalogue": catalogue(client),
    }


def export(client: Client, ids: Sequence[str]) -> Iterator[bytes]:
    """``docker save`` of images by Id as a stream: one tar, what they share in it once, without their names."""
    chunks: Iterator[bytes] = client.get_raw_stream(
        "/images/get", params={"names": list(ids)}, chunk_size=BLOCK, timeout=UNPACK_S
    )
    return chunks


def pull(client: Engine, reference: str) -> None:
    """``docker pull`` of ``repository@digest``, without a login. LockstepError with what the engine says."""
    repository, _, digest = reference.partition("@")
    for _ in client.pull(repository, digest):
        pass


def load(client: Engine, blocks: Iterable[bytes], expected: Mapping[str, images.Identity]) -> dict[str, str]:
    """``docker load`` of a tar as it comes; returns the Id here of each of the ``expected`` images, by their keys.

    An error that ``blocks`` raises leaves the request without its end, and the engine keeps nothing of it.
    Raises LockstepError when the engine refuses, and when an image that was expected is not among what it took.
    """
    loaded: list[str] = []
    for said in client.load(blocks):
        loaded += re.findall(r"Loaded image(?: ID)?: (\S+)", str(said.get("stream") or ""))
    info = client.get_json("/info")
    here = [identify(client, ref, info=info) for ref in loaded]
    found: dict[str, str] = {}
    for name, image in expected.items():
        same = [mine["id"] for mine in here if images.same(mine, image)["same"]]
        if not same:
            raise LockstepError(
                f"the Docker Engine took another image than {image['ref']}",
                found=", ".join(mine["id"] or mine["ref"] for mine in here) or "nothing",
                expected=image["id"],
                next_step="run again; if it happens again, both engines need one kind of image store",
            )
        found[name] = same[0]
    return found


def image_files(client: Client, image_id: str, paths: Sequence[str]) -> dict[str, str | None]:
    """SHA-256 of files inside an image, ``{path: hex, None for a path that is not there}``.

    A directory gives every regular file below it, compiled Python left out. Nothing of the image runs: a container is
    created, never started, read through the archive endpoint and removed again. One that an interrupted look left
    behind carries the label ``lockstep.look`` and is removed by the next look at the same image; that of a look whose
    process still runs is not.
    """
    filters = f'{{"label":["{LOOK_LABEL}={image_id}"],"status":["created"]}}'
    for left in client.get_json("/containers/json", params={"all": "1", "filters": filters}):
        if Path("/proc", left["Labels"].get(LOOKER_LABEL, "none")).exists():
            continue
        with contextlib.suppress(Exception):  # another look at the same time may have removed it just now
            client.delete_call("/containers/{0}", left["Id"], params={"v": "1"})
    body = {
        "Image": image_id,
        "Entrypoint": ["/never-started"],  # an image without a command cannot be created without one
        "Cmd": [],
        "Labels": {LOOK_LABEL: image_id, LOOKER_LABEL: str(os.getpid())},
        "NetworkDisabled": True,
        "HostConfig": {"NetworkMode": "none", "LogConfig": {"Type": "none"}},
    }
    created = str(client.post_json_to_json("/containers/create", data=body)["Id"])
    try:
        return container_files(client, created, paths)
    finally:
        client.delete_call("/containers/{0}", created, params={"v": "1", "force": "1"})


# --- files inside a container ----------------------------------------------------------------------------------------


class _Stream:
    """The chunks of a response as the file object that tarfile reads from."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Return exactly ``size`` bytes, fewer only at the end."""
        while len(self._rest) < size and (chunk := next(self._chunks, b"")):
            self._rest += chunk
        out, self._rest = self._rest[:size], self._rest[size:]
        return out


def archive(client: Client, container: str, path: str) -> Iterator[tuple[tarfile.TarInfo, Iterator[bytes]]]:
    """Members below ``path`` in a container, running or not, each with its content in blocks of at most 1 MiB.

    Read each member's content before asking for the next one. Yields nothing when the path is not there.
    """
    try:
        chunks = client.get_raw_stream("/containers/{0}/archive", container, params={"path": path}, chunk_size=BLOCK)
    except Exception as error:
        if not_found(error) and "no such container" not in str(error).lower():
            return
        raise
    with tarfile.open(fileobj=cast("Any", _Stream(chunks)), mode="r|", bufsize=BLOCK) as tar:
        for member in tar:
            yield member, _blocks(tar, member)


def _blocks(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    file = tar.extractfile(member) if member.isreg() else None
    while file is not None and (block := file.read(BLOCK)):
        yield block


def container_files(client: Client, container: str, paths: Sequence[str]) -> dict[str, str | None]:
    """SHA-256 of files as a container, running or not, sees them now; paths and result as in ``image_files``."""
    found: dict[str, str | None] = {}
    for path in paths:
        if not path.startswith("/"):
            raise LockstepError(
                "a file inside an image is named by its absolute path", found=path, next_step=f"write /{path}"
            )
        hashes = _hashes(_followed(client, container, path), posixpath.normpath(path))
        if hashes:
            found.update(hashes)
        else:
            found[path] = None
    return dict(sorted(found.items()))


def _followed(client: Client, container: str, path: str) -> Iterator[tuple[tarfile.TarInfo, Iterator[bytes]]]:
    """``archive`` of where ``path`` leads: the engine follows links in its parents, but not one in its last part."""
    target = posixpath.normpath(path)
    for _ in range(LINKS):
        members = archive(client, container, target)
        first = next(members, None)
        if first is None:
            return
        if not first[0].issym():
            yield first
            yield from members
            return
        target = posixpath.normpath(posixpath.join(posixpath.dirname(target), first[0].linkname))


def _hashes(members: Iterable[tuple[tarfile.TarInfo, Iterator[bytes]]], shown: str) -> dict[str, str]:
    """Hashes of an archive's regular files. Each member's name starts with the last part of the path asked for."""
    out: dict[str, str] = {}
    linked: dict[str, str] = {}
    for member, blocks in members:
        below = member.name.partition("/")[2]
        path = posixpath.join(shown, below) if below else shown
        if "__pycache__" in member.name or member.name.endswith(COMPILED):
            continue
        if member.islnk():
            linked[path] = posixpath.join(shown, member.linkname.partition("/")[2])
        elif member.isreg():
            digest = hashlib.sha256()
            for block in blocks:
                digest.update(block)
            out[path] = digest.hexdigest()
    # A hard link's content stands at its first name.
    return out | {path: out[first] for path, first in linked.items() if first in out}


# --- containers ------------------------------------------------------------------------------------------------------


def inspect_container(client: Client, name: str) -> dict[str, Any] | None:
    """``docker container inspect`` of an exact name or Id, ``None`` when there is none."""
    return _inspect(client, "/containers/{0}/json", name)


def containers(client: Client, *, names: Sequence[str] = (), label: str | None = None) -> list[dict[str, Any]]:
    """Return facts of all containers, running or not, with one of the exact ``names`` or with ``label``.

    ``label`` is ``key`` or ``key=value``; neither means all of them. See ``container_facts``; sorted by name.
    """
    filters = f'{{"label":["{label}"]}}' if label else "{}"
    found = []
    for item in client.get_json("/containers/json", params={"all": "1", "filters": filters}):
        known = {name.removeprefix("/") for name in item.get("Names") or []}
        if names and not known & set(names):
            continue
        inspect = inspect_container(client, item["Id"])
        if inspect is not None:  # gone since it was listed
            found.append(container_facts(inspect))
    return sorted(found, key=lambda facts: str(facts["name"]))


def container_facts(inspect: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a container in plain words, from its inspect.

    ``{"name", "id", "image_id", "state" (created, running, paused, exited, …), "health", "pid" (0 when not running),
    "exit_code", "oom_killed", "error", "restarts", "started_at", "finished_at" (RFC 3339, UTC), "argv" (entry point and
    arguments as they run), "env" {key: value}, "labels", "mounts" [{"source", "target", "read_only"}]}``.
    """
    state, config = inspect["State"], inspect["Config"]
    return {
        "name": str(inspect["Name"]).removeprefix("/"),
        "id": inspect["Id"],
        "image_id": inspect["Image"],
        "state": state["Status"],
        "health": (state.get("Health") or {}).get("Status"),
        "pid": state["Pid"],
        "exit_code": state["ExitCode"],
        "oom_killed": state["OOMKilled"],
        "error": state["Error"],
        "restarts": inspect["RestartCount"],
        "started_at": state["StartedAt"],
        "finished_at": state["FinishedAt"],
        "argv": [inspect["Path"], *inspect["Args"]],
        "env": dict(item.partition("=")[::2] for item in config.get("Env") or []),
        "labels": dict(config.get("Labels") or {}),
        "mounts": sorted(
            (
                {"source": mount.get("Source"), "target": mount["Destination"], "read_only": not mount["RW"]}
                for mount in inspect.get("Mounts") or []
            ),
            key=lambda mount: str(mount["target"]),
        ),
    }


def began(facts: Mapping[str, Any]) -> float:
    """Since when (UNIX time) the log of a container is that of its present life; 0 when it has had no other.

    The engine notes a start when it hears of it, under load after the first lines were written, and the last lines of
    the life before when it copies them, a little after that one's end. Between the two only the process itself says
    when it began. Of a container that has ended itself, the life began a little before its start.
    """
    start, end = (datetime.fromisoformat(facts[name]) for name in ("started_at", "finished_at"))
    if end.year == 1 or start.year == 1:  # docker's word for never
        return 0
    if end >= start:
        return start.timestamp() - START_HEARD_S
    itself = process_began(facts["pid"])
    # The engine may stand elsewhere, and then the number is another process's.
    return itself if itself and end.timestamp() < itself < start.timestamp() else end.timestamp()


def process_began(pid: int) -> float | None:
    """When (UNIX time, to 10 ms, never late) a process of this host began; ``None`` for one that is not there."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name may hold blanks and parentheses; starttime is field 22, in ticks since the boot.
    ticks = int(status.rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def logs(
    client: Client,
    container: str,
    *,
    since: float = 0,
    until: float = 0,
    tail: int | None = None,
    timestamps: bool = False,
) -> str:
    """Both output streams of a container as text, in the order written; undecodable bytes are replaced.

    ``since`` and ``until`` are UNIX times in seconds (0: no limit), ``tail`` the number of last lines.
    """
    inspect = inspect_container(client, container)
    if inspect is None:
        raise LockstepError(f"there is no container {container} to read a log from")
    params = {
        "stdout": "1",
        "stderr": "1",
        "since": f"{since:.9f}" if since else "0",
        "until": f"{until:.9f}" if until else "0",
        "timestamps": "1" if timestamps else "0",
        "tail": "all" if tail is None else str(tail),
    }
    raw = client.get_binary("/containers/{0}/logs", inspect["Id"], params=params)
    return (raw if inspect["Config"]["Tty"] else _demultiplexed(raw)).decode(errors="replace")


def packed(log: str) -> str:
    """A log as a module returns it to its action: zlib-compressed, in Base64."""
    return base64.b64encode(zlib.compress(log.encode())).decode()


def unpacked(log: str) -> bytes:
    """The log that `packed` was given."""
    return zlib.decompress(base64.b64decode(log))


def _demultiplexed(raw: bytes) -> bytes:
    """Payload of the engine's frames: a byte for the stream, three zero bytes, a big-endian u32 length, the data."""
    out, at = [], 0
    while at + 8 <= len(raw):
        length = int.from_bytes(raw[at + 4 : at + 8], "big")
        out.append(raw[at + 8 : at + 8 + length])
        at += 8 + length
    return b"".join(out)
