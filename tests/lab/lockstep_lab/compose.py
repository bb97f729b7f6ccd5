"""Images put together from directories, without a builder: layers as tars equal on every machine, then one load.

A layer depends on its files' content alone: names sorted, owner root, one time for all. So the same inputs give the
same image Id wherever it is made, and two builds share every layer below their own. Nothing runs inside and nothing is
fetched.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker

from .say import LabError, step

EPOCH = 1767225600
"""The time of every file: 2026-01-01. A .pyc file names the time of its source, so it is set before compiling."""


@dataclass(frozen=True)
class Layer:
    """A finished layer: the tar and the SHA-256 of its bytes (the DiffID)."""

    path: Path
    sha256: str


def layer(target: Path, folders: Mapping[str, Path]) -> Layer:
    """A tar of host folders, each below its path inside the image (``{"/usr/lib/x": folder}``), kept at ``target``.

    The digest is kept beside it. An existing ``target`` is taken as it is: name it by what it holds.
    """
    note = target.with_suffix(".sha256")
    if not (target.exists() and note.exists()):
        part = target.with_suffix(".part")
        with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as archive:
            made: set[str] = set()
            for inside, folder in sorted(folders.items()):
                for parent in reversed(Path(inside).parents[:-1]):
                    _directory(archive, made, str(parent))
                _directory(archive, made, inside)
                for path in sorted(folder.rglob("*")):
                    name = f"{inside}/{path.relative_to(folder)}"
                    if path.is_dir() and not path.is_symlink():
                        _directory(archive, made, name)
                    else:
                        archive.add(path, name.lstrip("/"), recursive=False, filter=_plain)
        _keep(part, target, note)
    return Layer(target, note.read_text(encoding="ascii").strip())


def unpacked(target: Path, compressed: Path) -> Layer:
    """A zstd tar (a root filesystem) as a layer, kept unpacked at ``target``."""
    note = target.with_suffix(".sha256")
    if not (target.exists() and note.exists()):
        part = target.with_suffix(".part")
        subprocess.run(["zstd", "-q", "-d", "-f", str(compressed), "-o", str(part)], check=True)
        _keep(part, target, note)
    return Layer(target, note.read_text(encoding="ascii").strip())


def _keep(part: Path, target: Path, note: Path) -> None:
    with part.open("rb") as handle:
        note.write_text(hashlib.file_digest(handle, "sha256").hexdigest(), encoding="ascii")
    part.rename(target)


def _directory(archive: tarfile.TarFile, made: set[str], name: str) -> None:
    if name in made:
        return
    made.add(name)
    info = tarfile.TarInfo(name.lstrip("/"))
    info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, EPOCH
    archive.addfile(info)


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    info.mode = 0o755 if info.mode & 0o100 else 0o644
    info.mtime = EPOCH
    return info


def load(
    client: docker.DockerClient,
    images: Mapping[str, Sequence[Layer]],
    config: Callable[[str], Mapping[str, Any]],
    spool: Path,
) -> None:
    """Load images (``{tag: layers, lowest first}``) into an engine in one go; ``config(tag)`` = docker's Config object.

    ``spool`` is a directory with room for all layers. LabError when the engine refuses.
    """
    architecture = str(client.version()["Arch"])
    archive_path = spool / "load.tar"
    manifest, written = [], set()
    try:
        with tarfile.open(archive_path, "w", format=tarfile.GNU_FORMAT) as archive:
            for tag, layers in images.items():
                text = json.dumps(_image(architecture, layers, config(tag)), sort_keys=True).encode()
                name = f"{hashlib.sha256(text).hexdigest()}.json"
                _bytes(archive, name, text)
                for one in layers:
                    if one.sha256 not in written:
                        written.add(one.sha256)
                        archive.add(one.path, f"{one.sha256}.tar", recursive=False, filter=_plain)
                manifest.append({"Config": name, "RepoTags": [tag], "Layers": [f"{one.sha256}.tar" for one in layers]})
            _bytes(archive, "manifest.json", json.dumps(manifest).encode())
        size = archive_path.stat().st_size >> 20
        with step(f"loading {' and '.join(images)} ({size} MiB)"), archive_path.open("rb") as handle:
            client.images.load(handle)
    finally:
        archive_path.unlink(missing_ok=True)
    for tag in images:
        try:
            client.images.get(tag)
        except docker.errors.ImageNotFound as error:
            raise LabError(f"the engine took {tag} and does not have it", "read the engine's log") from error


def _bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), EPOCH
    archive.addfile(info, io.BytesIO(data))


def _image(architecture: str, layers: Sequence[Layer], config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "os": "linux",
        "created": "2026-01-01T00:00:00Z",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{one.sha256}" for one in layers]},
        "history": [{"created": "2026-01-01T00:00:00Z", "created_by": "lockstep-lab"} for _ in layers],
    }
