"""An image to pack with, of this machine's own Python and the tool as the overlay carries it: without a registry."""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import docker
from docker.models.images import Image

ROOT = Path(__file__).resolve().parents[2]
_SKIPPED = {"test", "site-packages", "dist-packages", "__pycache__", "idlelib", "tkinter", "ensurepip"}


def make(engine: docker.DockerClient, reference: str, more: dict[str, bytes] | None = None) -> Image:
    """Import the image; ``more`` are files to put beside the tool, by name."""
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}))
    binaries = [python, *library.glob("lib-dynload/*.so")]
    linked = subprocess.run(["ldd", *binaries], check=False, capture_output=True, text=True).stdout
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
        for path in sorted({word for word in linked.split() if word.startswith("/") and not word.endswith(":")}):
            tar.add(path, recursive=False)
        tar.add(python, python.with_name("python3"))
        tar.add(library, filter=lambda entry: None if _SKIPPED & set(Path(entry.name).parts) else entry)
        for source, target in (
            (ROOT / "plugins" / "module_utils", "lockstep_core"),
            (ROOT / "adapters" / "lockstep_tools", "lockstep_tools"),
        ):
            tar.add(source, f"/opt/lockstep/{target}")
        for name, content in (more or {}).items():
            entry = tarfile.TarInfo(f"/opt/lockstep/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    repository, tag = reference.split(":")
    packed.seek(0)
    engine.api.import_image_from_data(
        packed.getvalue(),
        repository=repository,
        tag=tag,
        changes=[
            f"ENV PATH={python.parent}",
            "ENV PYTHONPATH=/opt/lockstep",
            "LABEL lockstep.engram_split=rows",
        ],
    )
    return engine.images.get(reference)
