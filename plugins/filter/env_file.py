"""Filter ``env_file``: an environment as docker's env file."""

from __future__ import annotations

DOCUMENTATION = r"""
name: env_file
short_description: Write an environment in docker's env-file grammar
version_added: "0.1.0"
author:
  - Lockstep contributors (@lockstep)
description:
  - One C(NAME=value) a line, sorted by name; docker reads back the same values to the byte, quotes and blanks included.
  - Fails for what the grammar cannot carry - a newline, a NUL byte, a name that is no variable name.
  - A shell, Compose and C(community.docker)'s own C(env_file) read another dialect; hand this to C(docker --env-file).
options:
  _input:
    description: Values by name. All are text.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Render an environment
  ansible.builtin.set_fact:
    text: "{{ env | lockstep.fleet.env_file }}"
  vars:
    env:
      NCCL_PROTO: ^LL128
      GREETING: 'hello "world" # no comment'

- name: Docker gives both back as they are
  ansible.builtin.assert:
    that:
      - text.splitlines() | last == 'NCCL_PROTO=^LL128'
      - text.splitlines() | first == 'GREETING=' ~ wanted
  vars:
    wanted: 'hello "world" # no comment'
"""

RETURN = r"""
_value:
  description: The file's text.
  type: str
"""

from collections.abc import Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.lockstep.fleet.plugins.module_utils import envfile
from ansible_collections.lockstep.fleet.plugins.module_utils.errors import LockstepError


def env_file(value: object) -> str:
    try:
        return str(envfile.render(envfile.mapping(value)))
    except LockstepError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, Callable[..., object]]:
        return {"env_file": env_file}
