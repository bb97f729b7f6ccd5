"""The Docker Engine of a rank: its daemon.json, its way to the fleet's registry, and what it says when it fails."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import LockstepError

# --- docker's daemon.json --------------------------------------------------------------------------------------------

# Keys that dockerd takes over on SIGHUP (docs.docker.com/reference/cli/dockerd, "Configuration reload behavior").
_RELOADABLE = frozenset(
    {
        "debug", "labels", "live-restore", "max-concurrent-downloads", "max-concurrent-uploads",
        "max-download-attempts", "default-runtime", "runtimes", "authorization-plugins", "insecure-registries",
        "registry-mirrors", "shutdown-timeout", "features",
    }
)  # fmt: skip
# The flag of a list-valued key is its singular.
_FLAGS = {"insecure-registries": "insecure-registry", "registry-mirrors": "registry-mirror", "labels": "label"}


def merge_daemon_json(text: str | None, want: Mapping[str, Any], flags: Sequence[str] = ()) -> dict[str, Any]:
    """Merge ``want`` into a daemon.json: ``{"changed", "config", "text", "needs", "restart_stops_containers"}``.

    ``text`` is the file's content, ``None`` or empty where there is none; ``flags`` is dockerd's command line. Lists
    are extended, objects merged key by key, everything else that is there stays. ``needs`` is ``None``, ``"reload"``
    (SIGHUP: containers keep running) or ``"restart"`` (which stops containers unless live-restore is on).
    Raises LockstepError for content that is not a JSON object, and for a key that is also a flag: dockerd would not
    start again with both (moby/moby#29936).
    """
    try:
        config = json.loads(text) if text and text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise LockstepError(
            "the engine's daemon.json is not valid JSON, so it is left as it is",
            found=str(error),
            expected="one JSON object",
            next_step="mend /etc/docker/daemon.json by hand; 'dockerd --validate' checks it",
        ) from error
    if not isinstance(config, dict):
        raise LockstepError(
            "the engine's daemon.json is not a JSON object, so it is left as it is",
            found=type(config).__name__,
            expected="one JSON object",
            next_step="mend /etc/docker/daemon.json by hand",
        )
    merged = dict(config)
    for key, value in want.items():
        present = merged.get(key)
        if isinstance(value, list) and isinstance(present, list):
            merged[key] = present + [item for item in value if item not in present]
        elif isinstance(value, Mapping) and isinstance(present, dict):
            merged[key] = {**present, **value}
        else:
            merged[key] = value
    changed = sorted(key for key in merged if key not in config or merged[key] != config[key])
    for key in changed:
        flag = f"--{_FLAGS.get(key, key)}"
        given = [word for word in flags if word == flag or word.startswith(f"{flag}=")]
        if given:
            raise LockstepError(
                "dockerd would not start again with this key in daemon.json: it is also given as a flag",
                found=f"{key} from flag: {' '.join(given)}",
                expected=f"{key} in one place",
                next_step=f"move {flag} from dockerd's command line into /etc/docker/daemon.json",
            )
    needs = None if not changed else "reload" if set(changed) <= _RELOADABLE else "restart"
    return {
        "changed": bool(changed),
        "config": merged,
        "text": daemon_json_text(merged) if changed else text,
        "needs": needs,
        "restart_stops_containers": not merged.get("live-restore", False),
    }


def daemon_json_text(config: Mapping[str, Any]) -> str:
    """Render an engine's configuration the way this room writes it."""
    return json.dumps(config, indent=4) + "\n"


# --- its way to the fleet's registry ---------------------------------------------------------------------------------

HOSTS_FILE = "/etc/hosts"
DAEMON_JSON = "/etc/docker/daemon.json"
# Ends the line of the hosts file that gives the registry its name.
REGISTRY_MARK = "# lockstep: the fleet's registry"
# The registry's container has it.
REGISTRY_LABEL = "lockstep.registry"


def remembered(daemon_json: str | Path) -> Path:
    """Where it stands what a daemon.json held before a registry was listed in it, and which one that is."""
    return Path(f"{daemon_json}.lockstep")


# --- what the engine says when it fails ------------------------------------------------------------------------------

# In the sentences of both image stores; the first that fits counts. A containerd store wraps whatever went wrong in
# "failed to resolve reference": by itself that says nothing.
_TROUBLE: tuple[tuple[str, str, str], ...] = (
    ("engine_down", r"cannot connect to the docker daemon|error connecting: error while fetching server api version",
     "start the Docker Engine on this rank (systemctl start docker)"),
    ("flag_conflict", r"specified both as a flag and in the configuration file",
     "keep the key in one place: dockerd's flags or daemon.json"),
    ("present_without_digest", r"error calling index: reflect: slice index out of range",
     "nothing is wrong: the image has no RepoDigests; ask for {{json .RepoDigests}}"),
    ("disk_full", r"no space left on device", "free space under the engine's data root on this rank, then run again"),
    ("rate_limit", r"toomanyrequests|429 too many requests|rate limit",
     "log in on this rank (sudo docker login <registry>), or wait and run again"),
    ("wrong_platform", r"no matching manifest for|does not match the (?:detected|specified) (?:host )?platform",
     "pin an image that has this rank's platform"),
    ("corrupt",
     r"verification failed|unexpected commit digest|failed size|digest did not|end of json|unknown blob|fetch content",
     "run again; when it comes back, remove that blob from the registry's storage, restart it, push the image anew"),
    ("missing_digest", r"manifest unknown|manifest for \S+ not found|: not found$",
     "check the digest; the registry does not have it, or no longer: pin one that it has"),
    ("plain_http", r"server gave http response to https client|first record does not look like a tls handshake",
     "list it under insecure-registries in /etc/docker/daemon.json on this rank, then systemctl reload docker"),
    ("tls", r"x509:|tls: ",
     "put its certificate authority on this rank, as /etc/docker/certs.d/<registry>/ca.crt, then run again"),
    ("auth", r"unauthorized|authentication required|access to the resource is denied|pull access denied|no basic auth",
     "log in on this rank (sudo docker login <registry>); a repository that does not exist looks the same"),
    ("port_taken", r"port is already allocated|address already in use",
     "stop what listens there, or choose another port"),
    ("absent", r"no such image", "pull the image or correct its name"),
    ("registry_error", r"unexpected http status: 5\d\d|unexpected status from .* 5\d\d ",
     "the registry failed: free space where it keeps its blobs, or read its log"),
    # Also a request without an answer: a port is published a moment before the registry behind it listens.
    ("unreachable",
     r"/v2/\S*\": (?:eof|read)|connection refused|no such host|name resolution|misbehav|no route|unreach|timed? ?out",
     "check the registry and this rank's way to it"),
    ("cut", r"connection reset|unexpected eof|broken pipe|closed network connection|closed connection without response",
     "mend this rank's line to the registry (ip -s link shows its errors), then run again"),
)  # fmt: skip


def trouble(text: str) -> dict[str, str]:
    """Say what an engine's error text means: ``{"kind", "next_step", "text"}``; kind ``"other"`` when nothing matches.

    An exit code cannot tell these apart: ``docker image inspect`` ends with 1 both for an absent image and for a
    template that asks for the first of no digests.
    """
    ours = re.search(r"^  found: (.+)$", text, re.MULTILINE)  # in a LockstepError, which has more to say
    said = " ".join((ours[1] if ours else text).split())
    # community.docker puts the engine's own sentence in parentheses behind HTTP status and URL, or behind a code.
    own = re.search(r'Error for http\S+ .*\("(.+)"\)$|^Error pulling \S+ - code: \w+ message: (.+)$', said)
    said = (own[1] or own[2]) if own else said
    for kind, pattern, next_step in _TROUBLE:
        if re.search(pattern, said, re.IGNORECASE):
            return {"kind": kind, "next_step": next_step, "text": said}
    own = re.search(r"^  next step: (.+)$", text, re.MULTILINE)
    return {"kind": "other", "next_step": own[1] if own else "read the engine's journal on this rank", "text": said}
