"""The rules of the house: who may know whom, what the core may do, what the tree must not hold."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "plugins" / "module_utils"
COLLECTION = ROOT / "collections" / "ansible_collections" / "lockstep" / "fleet"
COLLECTION_CORE = "ansible_collections.lockstep.fleet.plugins.module_utils"
# Not a room of the core but the plugins' way to a rank's Docker Engine: modules ship nothing but module_utils.
DOCKER_API = CORE / "docker_api.py"
CORE_FILES = sorted(set(CORE.glob("*.py")) - {DOCKER_API})
ROOMS = [path.stem for path in CORE_FILES if path.stem != "__init__"]
# The one room that does input and output of files.
FILES_ROOM = "files.py"


def tracked(*patterns: str) -> list[Path]:
    """The files git tracks, and new ones it does not ignore, that still exist."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for line in listed.splitlines() if (path := ROOT / line).is_file() and not path.is_symlink()]


def imports(path: Path) -> list[str]:
    """Every module a file imports, anywhere in it; a relative import starts with its dots."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append("." * node.level + (node.module or ""))
    return found


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


# --- who may know whom ------------------------------------------------------------------------------------------------


# The command line is for controllers only, where PyYAML comes with Ansible; no room imports it.
ALSO = {"__main__.py": {"yaml"}}


@pytest.mark.parametrize("path", CORE_FILES, ids=ids(CORE_FILES))
def test_the_core_imports_only_the_standard_library_and_itself(path: Path) -> None:
    known = sys.stdlib_module_names | ALSO.get(path.name, set())
    strangers = [name for name in imports(path) if not name.startswith(".") and name.split(".")[0] not in known]
    assert strangers == []


@pytest.mark.parametrize("path", CORE_FILES, ids=ids(CORE_FILES))
def test_the_core_imports_nothing_by_a_computed_name_and_reads_no_package_data(path: Path) -> None:
    banned = {"importlib", "pkgutil", "runpy", "imp", "zipimport"}
    assert [name for name in imports(path) if name.split(".")[0] in banned] == []
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    assert names & {"__import__", "exec", "eval", "compile"} == set()
    assert "__file__" not in {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}


def test_the_core_holds_python_files_only() -> None:
    assert [
        p.name for p in CORE.iterdir() if p.suffix != ".py" and p.name not in {"__pycache__", DOCKER_API.name}
    ] == []


def test_the_core_does_not_know_the_docker_api() -> None:
    assert [path.name for path in CORE_FILES if any("docker_api" in name for name in imports(path))] == []


PLUGIN_FILES = sorted(set((ROOT / "plugins").rglob("*.py")) - set(CORE_FILES))
ADAPTER_FILES = sorted((ROOT / "adapters").rglob("*.py"))


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=ids(PLUGIN_FILES))
def test_plugins_know_the_core_by_the_collections_name_and_no_adapter(path: Path) -> None:
    strangers = {"lockstep_core", "lockstep_engine", "lockstep_tools", "adapters", "sglang", "torch"}
    found = imports(path)
    assert [name for name in found if name.split(".")[0] in strangers] == []
    if path != DOCKER_API:
        assert [name for name in found if name.startswith(".")] == [], "the core is imported by its collection name"


@pytest.mark.parametrize("path", ADAPTER_FILES, ids=ids(ADAPTER_FILES))
def test_adapters_know_the_core_and_no_ansible(path: Path) -> None:
    assert [name for name in imports(path) if name.split(".")[0] in {"ansible", "ansible_collections"}] == []


ROLE_FILES = sorted(path for path in (ROOT / "roles").rglob("*.yml"))


@pytest.mark.parametrize("path", ROLE_FILES, ids=ids(ROLE_FILES))
def test_roles_never_call_roles(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^\s*-?\s*(ansible\.builtin\.)?(include_role|import_role)\s*:", text, re.MULTILINE)
    if path.parts[-2:] == ("meta", "main.yml"):
        assert not re.search(r"^dependencies\s*:\s*[^\s\[]|^dependencies\s*:\s*\n\s*-", text, re.MULTILINE)


# --- input and output in one room -------------------------------------------------------------------------------------

# Calls that touch a file, by the name they are called with; not `.replace` and `.remove`, which str and list have too.
IO_FUNCTIONS = {"open"}
IO_MODULES = {"shutil", "tempfile", "fcntl", "mmap", "glob"}
IO_OS = {
    "open", "rename", "replace", "remove", "unlink", "mkdir", "makedirs", "rmdir", "removedirs", "link", "symlink",
    "truncate", "ftruncate", "fsync", "fdatasync", "read", "write", "pread", "pwrite", "sendfile", "copy_file_range",
    "posix_fadvise", "statvfs", "chmod", "chown", "utime", "listdir", "scandir", "walk",
}  # fmt: skip
IO_METHODS = {
    "read_text", "write_text", "read_bytes", "write_bytes", "unlink", "mkdir", "touch", "rmdir", "symlink_to",
    "hardlink_to", "iterdir", "rglob", "open", "chmod",
}  # fmt: skip


def file_calls(tree: ast.AST) -> list[str]:
    """Calls in a syntax tree that read or write files, as ``line: call``."""
    found: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id=name) if name in IO_FUNCTIONS:
                found.append(f"{node.lineno}: {name}()")
            case ast.Attribute(value=ast.Name(id="os"), attr=name):
                if name in IO_OS:
                    found.append(f"{node.lineno}: os.{name}()")
            case ast.Attribute(value=ast.Name(id="files")):
                pass  # the room itself
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in IO_MODULES:
                found.append(f"{node.lineno}: {module}.{name}()")
            case ast.Attribute(attr=name) if name in IO_METHODS:
                found.append(f"{node.lineno}: .{name}()")
            case _:
                pass
    return found


def test_the_watch_for_file_calls_sees_them() -> None:
    calls = [
        "open(p)",
        "os.replace(a, b)",
        "p.read_text()",
        "shutil.rmtree(p)",
        "files.open(p)",
        "s.replace(b, c)",
        "os.path.join(a)",
    ]
    assert file_calls(ast.parse("\n".join(calls))) == [
        "1: open()",
        "2: os.replace()",
        "3: .read_text()",
        "4: shutil.rmtree()",
    ]


@pytest.mark.parametrize("path", [p for p in CORE_FILES if p.name != FILES_ROOM], ids=lambda p: p.name)
def test_only_the_room_files_does_input_and_output(path: Path) -> None:
    assert file_calls(ast.parse(path.read_text())) == []


# --- one core under two names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "other"), [("lockstep_core", COLLECTION_CORE), (COLLECTION_CORE, "lockstep_core")])
def test_every_room_imports_through_both_names(package: str, other: str) -> None:
    program = (
        "import importlib, json, sys\n"
        "sys.path.insert(0, 'collections')\n"
        f"names = [importlib.import_module('{package}.' + room).__name__ for room in {ROOMS!r}]\n"
        "strangers = [m for m in sys.modules if m.split('.')[0] in ('ansible', 'torch', 'yaml', 'sglang')]\n"
        f"print(json.dumps([names, strangers, '{other}' in sys.modules]))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.stderr == ""
    assert json.loads(run.stdout) == [[f"{package}.{room}" for room in ROOMS], [], False]


def test_the_collection_is_links_into_the_root() -> None:
    links = {path.name: path.resolve() for path in COLLECTION.iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in ("galaxy.yml", "meta", "playbooks", "plugins", "roles")}
    assert [path for path in COLLECTION.iterdir() if not path.is_symlink()] == []
    assert all(target.exists() for target in links.values())
    assert (ROOT / "playbooks" / "group_vars").resolve() == ROOT / "group_vars"


# --- what the tree must not hold --------------------------------------------------------------------------------------

# Written with character classes, so that this file does not hold them either.
FORBIDDEN = {
    "a package registry's host": r"pypi[.]org|pythonhosted[.]org|deb[.]debian[.]org|npmjs[.]org",
    "a path of one machine": r"/work/(?:main|notes|steering|[.]library)|[.][.]/share[d]",
    "an error passed over": r"ignore_error[s]:|failed_when:\s*fals[e]",
    "a container with every right": r"privileged:\s*tru[e]",
    "an unchecked host key": r"StrictHostKeyChecking[= ]n[o]|host_key_checking *= *Fals[e]",
    "a silenced lint without its reason": r"#\s*noq[a](?::[ A-Z0-9,]+)?\s*$",
    "a silenced type error without its kind": r"#\s*type:\s*ignor[e](?!\[)",
    "a skipped test without its reason": r"pytest[.](?:mark[.])?(?:skip|xfail)(?:if)?(?!\(.*reason=|[a-z_])",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_tree_does_not_hold(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in {".gz", ".xz", ".zst", ".bin", ".png"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert found == []


# --- what is installed is what is written down ------------------------------------------------------------------------


def test_every_pin_is_in_the_lock_with_hashes_and_no_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = project["dependencies"] + [pin for extra in project["optional-dependencies"].values() for pin in extra]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9-]+==[0-9][0-9.a-z]*", pin)] == []
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    locked = re.findall(r"^([a-z0-9-]+)==(\S+).*\\\n    --hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE)
    assert {tuple(pin.lower().split("==")) for pin in pins} <= set(locked)
    assert len(locked) == len(re.findall(r"^[a-z]", lock, re.MULTILINE))


def test_the_collections_asked_for_are_those_that_come_with_the_package() -> None:
    asked = yaml.safe_load((ROOT / "requirements.yml").read_text())["collections"]
    for collection in asked:
        manifest = Path(site_collections(), *collection["name"].split("."), "MANIFEST.json")
        assert json.loads(manifest.read_text())["collection_info"]["version"] == collection["version"]
    wanted = yaml.safe_load((ROOT / "galaxy.yml").read_text())["dependencies"]
    assert set(wanted) <= {collection["name"] for collection in asked}


def site_collections() -> Path:
    """Where the pip package `ansible` puts its collections."""
    return Path(sysconfig.get_path("purelib"), "ansible_collections")
