#!/usr/bin/python
"""Ansible module: what must hold on a rank before anything else is tried, and the directories everything else uses."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Check what Lockstep needs of a host and make its directories
description:
  - Checks that the host's Python can run the other modules, that its Docker Engine answers and that there is room for
    journal and logs. Everything that does not hold is reported at once, with what to do.
  - Makes the state directory with its folders C(journal), C(env) and C(logs), all of mode 0700, and the directories
    that the engine's container mounts.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
extends_documentation_fragment: [lockstep.fleet.docker_engine]
attributes:
  check_mode:
    description: Checks, says which directories it would make, and makes none.
    support: full
  diff_mode:
    description: Shows the directories it makes or whose mode it sets.
    support: full
options:
  state_dir:
    description: Directory of Lockstep's own state on this rank.
    type: path
    required: true
  directories:
    description: Further directories to make, mode 0755, when they are missing; what is there is left as it is.
    type: list
    elements: path
    default: []
  free_bytes:
    description: Bytes that must be free for the state directory.
    type: int
    default: 1073741824
"""

EXAMPLES = r"""
- name: Make this host ready
  lockstep.fleet.preflight:
    state_dir: /srv/lockstep
    directories: [/root/.cache, /srv/dsv41/engram]
"""

RETURN = r"""
made:
  description: Directories that were made (in check mode would be).
  returned: always
  type: list
  elements: str
python:
  description: The host's Python version.
  returned: always
  type: str
  sample: 3.13.5
docker:
  description: The Docker Engine's version.
  returned: always
  type: str
  sample: 26.1.5
"""

import stat
import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

try:
    from ansible_collections.lockstep.fleet.plugins.module_utils import docker_api, files
    from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError
except ImportError as error:  # an older Python cannot even import the core: that is the first thing to find out
    IMPORT_ERROR: str | None = str(error)
else:
    IMPORT_ERROR = None

ARGUMENT_SPEC: dict[str, Any] = {
    "state_dir": {"type": "path", "required": True},
    "directories": {"type": "list", "elements": "path", "default": []},
    "free_bytes": {"type": "int", "default": 1 << 30},
    "docker_host": {"type": "str"},
}
FOLDERS = ("journal", "env", "logs")
PRIVATE = 0o700  # environments and journals may name secrets
SHARED = 0o755


def docker_version(host: str | None) -> str:
    """Version of the Docker Engine; LockstepError when it does not answer."""
    return str(docker_api.engine(docker_api.Engine(host).get_json("/info"))["version"])


def room(state_dir: str, wanted: int) -> None:
    """LockstepError unless ``wanted`` bytes are free where the state directory is or will be."""
    files.require_space(files.nearest(state_dir), wanted)


def directories(params: dict[str, Any]) -> list[dict[str, Any]]:
    """What to do about each directory: ``{"path", "before": mode or None, "mode"}``; LockstepError for a file."""
    state = Path(params["state_dir"])
    work = []
    for path, mode in [(state, PRIVATE), *((state / name, PRIVATE) for name in FOLDERS)]:
        before = _mode(path)
        if before != mode:
            work.append({"path": path, "before": before, "mode": mode})
    missing = [Path(name) for name in params["directories"] if _mode(Path(name)) is None]
    return [*work, *({"path": path, "before": None, "mode": SHARED} for path in missing)]


def _mode(path: Path) -> int | None:
    if not path.exists():
        return None
    if not path.is_dir():
        raise LockstepError(
            f"{path} is no directory",
            found=stat.filemode(path.stat().st_mode),
            expected="a directory, or nothing",
            next_step="move it away, or name another directory in the inventory",
        )
    return stat.S_IMODE(path.stat().st_mode)


def make(work: list[dict[str, Any]]) -> None:
    """Make the directories, or set their modes."""
    for item in work:
        item["path"].mkdir(parents=True, exist_ok=True)
        item["path"].chmod(item["mode"])


def run(params: dict[str, Any], *, check_mode: bool) -> dict[str, Any]:
    """Check everything, then make what is missing; returns the module's result."""
    problems, version, work = [], "", []
    try:
        version = docker_version(params["docker_host"])
    except (LockstepError, docker_api.EngineError) as error:
        problems.append(str(error))
    try:
        room(params["state_dir"], params["free_bytes"])
        work = directories(params)
    except LockstepError as error:
        problems.append(str(error))
    if problems:
        raise LockstepError("\n".join(problems))
    if not check_mode:
        make(work)
    return {
        "changed": bool(work),
        "made": [str(item["path"]) for item in work if item["before"] is None],
        "python": sys.version.split()[0],
        "docker": version,
        "diff": {
            "before": "".join(_line(item["path"], item["before"]) for item in work),
            "after": "".join(_line(item["path"], item["mode"]) for item in work),
        },
    }


def _line(path: Path, mode: int | None) -> str:
    return f"{path} {'absent' if mode is None else f'{mode:04o}'}\n"


def main() -> None:
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    if IMPORT_ERROR:
        module.fail_json(
            msg=f"the Python of this host cannot run Lockstep's modules: {IMPORT_ERROR}\n"
            f"  found: Python {sys.version.split()[0]} ({sys.executable})\n"
            "  expected: Python 3.11 or newer\n"
            "  next step: install one and name it in ansible_python_interpreter"
        )
    try:
        result = run(module.params, check_mode=module.check_mode)
    except LockstepError as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
