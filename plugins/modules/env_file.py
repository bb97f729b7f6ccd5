#!/usr/bin/python
"""Ansible module: an environment in a file of docker's env-file grammar (the action writes the controller's)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: env_file
short_description: Keep an environment in a docker env file
description:
  - Writes one C(NAME=value) a line, sorted by name, so that docker reads back the same values to the byte. The file is
    read back before the task succeeds.
  - Refuses what the grammar cannot carry - a newline, a NUL byte, a name that is no variable name.
  - Written aside and renamed; its directory is made, with mode 0700, where it is missing.
  - Put no secret into an environment, name its file instead. The values are shown in a diff.
  - Give O(path), O(controller_path) or both.
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
attributes:
  check_mode:
    description: Says what would change and changes nothing.
    support: full
  diff_mode:
    description: Shows the file before and after.
    support: full
options:
  path:
    description: The file on the host.
    type: path
  controller_path:
    description: The same file on the controller.
    type: path
  env:
    description: Values by name, all of them text.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Keep the environment of an engine
  lockstep.fleet.env_file:
    path: /tmp/lockstep-example/engine.env
    env:
      EP_SIZE: "1"
      NCCL_PROTO: ^LL128
  register: written

- name: The file is nobody else's business
  ansible.builtin.stat:
    path: "{{ written.path }}"
  register: there
  failed_when: there.stat.mode != '0600'
"""

RETURN = r"""
path:
  description: The file on the host, null without O(path).
  returned: success
  type: str
  sample: /srv/lockstep/env/e8.spark1.env
sha256:
  description: SHA-256 of the file, as C(sha256sum) prints it; the plan's C(env_sha256) of this rank.
  returned: success
  type: str
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.lockstep.fleet.plugins.module_utils import envfile, files
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError

ARGUMENT_SPEC: dict[str, Any] = {
    "path": {"type": "path"},
    "controller_path": {"type": "path"},
    "env": {"type": "dict", "required": True},
}
MODE = 0o600


def keep(path: str, env: dict[str, str], *, check_mode: bool) -> dict[str, Any]:
    """Bring the file to the environment; returns the module's result."""
    text = envfile.render(env)
    there = files.look(path)
    before = files.read_bytes(path).decode(errors="replace") if there else ""
    mode = files.mode(path) if there else None
    changed = before != text or mode != MODE
    if changed and not check_mode:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write_atomic(path, text, MODE)
        if envfile.parse(files.read_bytes(path)) != env:
            raise LockstepError(f"{path} does not read back as it was written", next_step="look at the file system")
    return {
        "changed": changed,
        "path": path,
        "sha256": envfile.sha256(env),
        "diff": {
            "before_header": f"{path}{'' if mode is None else f' ({mode:04o})'}",
            "after_header": f"{path} ({MODE:04o})",
            "before": before,
            "after": text,
        },
    }


def main() -> None:
    module = AnsibleModule(ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = keep(module.params["path"], module.params["env"], check_mode=module.check_mode)
    except LockstepError as error:
        module.fail_json(msg=str(error), exception=error)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
