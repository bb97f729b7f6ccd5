"""Images made by hand and put into a registry over its HTTP API: every digest is known before an engine has seen it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TYPE = "application/vnd.oci.image."


@dataclass(frozen=True)
class Pushed:
    """Digests of an image in a registry; ``manifest`` and ``config`` are those of its amd64 member."""

    repository: str
    index: str
    manifest: str
    config: str
    layers: list[str]


def sha256(data: bytes) -> str:
    """The digest of bytes, as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def layer(files: Mapping[str, bytes]) -> bytes:
    """A layer's tar with these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def push(registry: str, name: str, layers: Sequence[bytes], config: Mapping[str, Any]) -> Pushed:
    """Put an index of two members below ``registry`` (host:port): amd64 with all layers, arm64 with the first."""
    url = f"http://{registry}/v2/{name}"
    members = []
    for platform, its in (
        ({"architecture": "amd64", "os": "linux"}, layers),
        ({"architecture": "arm64", "os": "linux", "variant": "v8"}, layers[:1]),
    ):
        image = {
            **platform,
            "created": "2026-01-01T00:00:00Z",
            "config": dict(config),
            "rootfs": {"type": "layers", "diff_ids": [sha256(data) for data in its]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_TYPE}manifest.v1+json",
            "config": _blob(url, json.dumps(image).encode(), "config.v1+json"),
            "layers": [_blob(url, gzip.compress(data, 1, mtime=0), "layer.v1.tar+gzip") for data in its],
        }
        members.append({**_manifest(url, manifest), "platform": platform, "config": manifest["config"]})
    configs = [member.pop("config") for member in members]
    index = {"schemaVersion": 2, "mediaType": f"{_TYPE}index.v1+json", "manifests": members}
    return Pushed(
        repository=f"{registry}/{name}",
        index=_manifest(url, index)["digest"],
        manifest=members[0]["digest"],
        config=configs[0]["digest"],
        layers=[sha256(data) for data in layers],
    )


def _blob(url: str, data: bytes, kind: str) -> dict[str, Any]:
    digest = sha256(data)
    place = _asked("POST", f"{url}/blobs/uploads/", b"", "application/octet-stream")
    _asked("PUT", f"{place}{'&' if '?' in place else '?'}digest={digest}", data, "application/octet-stream")
    return {"mediaType": f"{_TYPE}{kind}", "digest": digest, "size": len(data)}


def _manifest(url: str, document: Mapping[str, Any]) -> dict[str, Any]:
    data = json.dumps(document).encode()
    _asked("PUT", f"{url}/manifests/{sha256(data)}", data, document["mediaType"])
    return {"mediaType": document["mediaType"], "digest": sha256(data), "size": len(data)}


def _asked(method: str, url: str, data: bytes, kind: str) -> str:
    """Send a request to a registry; returns where it says the thing is."""
    request = urllib.request.Request(url, data, {"Content-Type": kind}, method=method)  # noqa: S310 - http, above
    with urllib.request.urlopen(request) as answer:  # noqa: S310 - the same
        place: str = answer.headers["Location"]
    return place
