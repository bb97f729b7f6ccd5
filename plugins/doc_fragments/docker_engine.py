"""What every module that asks a rank's Docker Engine says of it."""

from __future__ import annotations


class ModuleDocFragment:
    """Requirements, and the option C(docker_host)."""

    DOCUMENTATION = r"""
requirements:
  - Docker API >= 1.41 (Docker Engine 20.10)
  - python3-requests on the rank
options:
  docker_host:
    description: Address of the engine. Without it the environment's E(DOCKER_HOST), else the usual socket.
    type: str
"""
