"""Debian root filesystems without an image registry: made once by mmdebstrap, kept as a tar, imported."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import docker

from . import outer
from .paths import cache
from .say import LabError, say, sh, step

_RECIPE = 1
"""Raise it when the way a root filesystem is made changes: it is part of the cache's key."""


def _mirror() -> list[str]:
    """The Debian mirror of this machine's own apt configuration; empty = mmdebstrap's own default."""
    for line in sh(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(SUITE)", "Identifier: Packages"]
    ).splitlines():
        uri, origin, *_ = [*line.split(), ""]
        if origin == "Debian" and "security" not in uri:
            return [uri.rstrip("/")]
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        # Before the first `apt-get update` there are no index targets with an origin: read the sources themselves.
        if not path.is_file():
            continue
        for word in path.read_text(encoding="utf-8", errors="replace").split():
            if word.startswith(("http://", "https://")) and word.rstrip("/").endswith("/debian"):
                return [word.rstrip("/")]
    return []


def tar(name: str, suite: str, packages: Sequence[str], *, variant: str = "apt") -> Path:
    """The finished root filesystem as ``<cache>/rootfs/<name>-<hash>.tar.zst``, made where it is missing.

    ``variant`` is mmdebstrap's: ``apt`` (a working system), ``extract`` (files only, nothing configured).
    """
    key = hashlib.sha256(json.dumps([_RECIPE, suite, variant, sorted(packages)]).encode()).hexdigest()[:12]
    final = cache("rootfs") / f"{name}-{key}.tar.zst"
    if final.exists():
        return final
    outer.need_tools(mmdebstrap="mmdebstrap", eatmydata="eatmydata", zstd="zstd")
    aside = final.with_suffix(".part")
    plain = final.with_suffix(".tar-part")
    with step(f"Debian {suite} root filesystem '{name}' ({len(packages)} packages; kept for next time)"):
        options = ["--quiet", "--mode=root", "--format=tar", f"--variant={variant}", f"--include={','.join(packages)}"]
        options += ['--aptopt=APT::Install-Recommends "false"']
        options += [f"--dpkgopt=path-exclude=/usr/share/{unread}/*" for unread in ("doc", "man", "locale")]
        sh(["eatmydata", "mmdebstrap", *options, suite, plain, *_mirror()])
        sh(["zstd", "-q", "-f", "-T0", "-3", plain, "-o", aside])
        plain.unlink()
        aside.rename(final)
    return final


def image(client: docker.DockerClient, name: str, suite: str, packages: Sequence[str], *, variant: str = "apt") -> str:
    """The root filesystem as an image of this engine; returns its tag ``lockstep-lab/rootfs-<name>:<hash>``."""
    path = tar(name, suite, packages, variant=variant)
    tag = path.name.removesuffix(".tar.zst").removeprefix(f"{name}-")
    repository = f"lockstep-lab/rootfs-{name}"
    try:
        client.images.get(f"{repository}:{tag}")
    except docker.errors.ImageNotFound:
        with step(f"importing {path.name} ({path.stat().st_size >> 20} MiB)"):
            with subprocess.Popen(["zstd", "-dc", str(path)], stdout=subprocess.PIPE) as unpack:
                answer = client.api.import_image_from_stream(
                    unpack.stdout, repository=repository, tag=tag, changes=[f"LABEL {outer.LABEL}=1"]
                )
            if unpack.returncode or '"error"' in answer:
                raise LabError(
                    f"docker import of {path} failed: {answer.strip()[-300:]}", f"remove {path} and try again"
                ) from None
    else:
        say(f"root filesystem {repository}:{tag} is there")
    return f"{repository}:{tag}"
