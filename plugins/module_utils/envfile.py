"""Docker's env-file grammar, both ways, and where other tools read the same file differently.

The grammar is docker's own (cli ``opts/file.go``, verified with 28.2.2 and 20.10.24): one ``NAME=value`` a line, the
value is everything after the first ``=`` to the end of the line, to the byte. No quotes, no escapes, no inline
comments, no expansion. A shell, compose and community.docker's ``env_file`` each read another dialect; ``traps`` says
where that would show.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping

from .errors import LockstepError

# Go's bufio.Scanner gives up on a longer line ("token too long"); the line feed counts.
MAX_LINE_BYTES = 64 * 1024 - 1

# Go's unicode.IsSpace: what docker trims at the start of a line. Python's str.isspace() also has U+001C..1F.
_GO_SPACE = (
    "\t\n\v\f\r \u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)

# What render takes as a name. Docker takes more (1A, A-B), but no shell and no Python program can set those.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHELL_ASSIGNMENT = re.compile(r"[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SHELL_META = frozenset(";|&<>()")


def parse(text: str | bytes, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Read an env file as ``docker run --env-file`` does; the last of equal names wins.

    A bare ``NAME`` takes its value from ``environ`` and is left out when that has none (docker: the client's own
    environment). Raises LockstepError with docker's wording for a line that docker refuses, and for a NUL byte, which
    docker accepts and the container runtime then refuses.
    """
    env: dict[str, str] = {}
    for number, line in _lines(text):
        name, equals, value = line.lstrip(_GO_SPACE).partition("=")
        if not name and not equals:
            continue
        if name.startswith("#"):
            continue
        if " " in name or "\t" in name:
            raise _refused(number, f"variable '{name}' contains whitespaces", line)
        if not name:
            raise _refused(number, f"no variable name on line '{line.lstrip(_GO_SPACE)}'", line)
        if "\0" in line:
            raise _refused(number, f"variable '{name}' contains a NUL byte", line)
        if equals:
            env[name] = value
        elif environ is not None and name in environ:
            env[name] = environ[name]
    return env


def render(env: Mapping[str, str]) -> str:
    """Write an environment as an env file, sorted by name, so that ``parse`` and docker give back the same bytes.

    Raises LockstepError for what the grammar cannot carry: a newline or a NUL in a value, a carriage return at its end
    (docker drops it), text that is not UTF-8, a line over 64 KiB, a name that is not a shell identifier, a value that
    is not text.
    """
    lines = []
    for name in sorted(env):
        check_entry(name, env[name])
        lines.append(f"{name}={env[name]}\n")
    return "".join(lines)


def mapping(value: object) -> dict[str, str]:
    """Return a mapping of names to text as plain text; LockstepError for anything else."""
    if not isinstance(value, dict):
        raise LockstepError("an environment is a mapping", found=type(value).__name__, expected="names with text")
    wrong = sorted(str(name) for name, one in value.items() if not isinstance(one, str))
    if wrong:
        raise LockstepError(
            f"the value of {wrong[0]} is no text", found=type(value[wrong[0]]).__name__, next_step="quote it"
        )
    return {str(name): str(one) for name, one in value.items()}


def sha256(env: Mapping[str, str]) -> str:
    """SHA-256 (64 hex digits) of the rendered file: what ``sha256sum`` prints for it on a rank."""
    return hashlib.sha256(render(env).encode()).hexdigest()


def check_entry(name: str, value: object) -> None:
    """Raise LockstepError unless ``name=value`` survives the way through an env file to the byte."""
    problem = None
    if not _NAME.fullmatch(name):
        problem = f"{name!r} is not a variable name (letters, digits and _, not starting with a digit)"
    elif not isinstance(value, str):
        problem = f"the value of {name} is {type(value).__name__}, not text"
    elif "\n" in value:
        problem = f"the value of {name} contains a newline"
    elif "\0" in value:
        problem = f"the value of {name} contains a NUL byte"
    elif value.endswith("\r"):
        problem = f"the value of {name} ends with a carriage return"
    elif any("\ud800" <= character <= "\udfff" for character in value):
        problem = f"the value of {name} is not UTF-8"
    elif len(f"{name}={value}".encode()) > MAX_LINE_BYTES:
        problem = f"the line of {name} is longer than {MAX_LINE_BYTES} bytes"
    if problem:
        raise LockstepError(
            f"docker's env file cannot carry this: {problem}",
            found=f"{name}={value!r}"[:200],
            expected="NAME=value on one line of UTF-8",
            next_step="change the value; a file or a mount carries what a line cannot",
        )


def diff(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """Compare two environments: ``{"added": {k: v}, "removed": {k: v}, "changed": {k: {"before", "after"}}}``."""
    return {
        "added": {key: after[key] for key in sorted(after) if key not in before},
        "removed": {key: before[key] for key in sorted(before) if key not in after},
        "changed": {
            key: {"before": before[key], "after": after[key]}
            for key in sorted(after)
            if key in before and before[key] != after[key]
        },
    }


def diff_lines(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Show two environments' difference by name: ``- KEY=old`` and ``+ KEY=new``."""
    lines = []
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            lines += [f"{sign} {key}={env[key]}" for sign, env in (("-", before), ("+", after)) if key in env]
    return lines


def traps(text: str | bytes) -> list[dict[str, str | None]]:
    """List the variables that another reader of this file would see differently than docker does.

    Returns ``[{"name", "docker", "bash", "compose", "community_docker"}]``, sorted by name. ``None`` stands for "not a
    literal": that reader would expand or run something, stop there, or not set the name at all. ``bash`` means
    ``set -a; . file``.
    """
    docker = parse(text)
    readers: dict[str, Mapping[str, str | None]] = {
        "docker": docker,
        "bash": _read(text, _bash_value),
        "compose": _read(text, _compose_value),
        "community_docker": _community_docker(text),
    }
    found: list[dict[str, str | None]] = []
    for name in sorted(docker):
        seen = {who: env.get(name) for who, env in readers.items()}
        if len(set(seen.values())) > 1:
            found.append({"name": name, **seen})
    return found


def _lines(text: str | bytes) -> Iterator[tuple[int, str]]:
    """Give numbered lines as Go's line scanner does: split at LF, one CR before it dropped."""
    try:
        plain = text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise _refused(number, f"invalid utf8 bytes at line {number}", str(error)) from error
    for number, line in enumerate(plain.removeprefix("\ufeff").split("\n"), start=1):
        if len(line.encode("utf-8", "surrogatepass")) > MAX_LINE_BYTES:
            raise _refused(number, "bufio.Scanner: token too long", f"{len(line)} characters")
        yield number, line.removesuffix("\r")


def _refused(number: int, reason: str, found: str) -> LockstepError:
    return LockstepError(
        f"invalid env file, line {number}: {reason}",
        found=found[:200],
        expected="NAME=value, no blanks around the name, no 'export'",
    )


def _community_docker(text: str | bytes) -> dict[str, str | None]:
    """Read as community.docker 4.8.5 does: lines stripped, split at the first ``=``; one without ends it all."""
    plain = text.decode() if isinstance(text, bytes) else text
    env: dict[str, str | None] = {}
    for line in plain.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        name, equals, value = line.strip().partition("=")
        if line.startswith("#") or not line.strip():
            continue
        if not equals:
            return {}
        env[name] = value
    return env


def _read(text: str | bytes, value_of: Callable[[str], str | None]) -> dict[str, str | None]:
    plain = text.decode() if isinstance(text, bytes) else text
    env: dict[str, str | None] = {}
    for line in plain.split("\n"):
        match = _SHELL_ASSIGNMENT.fullmatch(line)
        if match:
            env[match[1]] = value_of(match[2])
    return env


def _bash_value(rest: str) -> str | None:
    """Return the value bash gives to ``NAME=<rest>`` when it sources it, or None if that takes more than quoting."""
    value: list[str] = []
    quote = ""
    position = 0
    if rest.startswith("~"):
        return None
    while position < len(rest):
        character = rest[position]
        position += 1
        if quote == "'":
            if character == "'":
                quote = ""
            else:
                value.append(character)
        elif character in "$`" or (not quote and character in _SHELL_META):
            return None
        elif character == "\\":
            following = rest[position : position + 1]
            if not following:
                return None
            keeps_backslash = quote == '"' and following not in '$`"\\'
            value.append(f"\\{following}" if keeps_backslash else following)
            position += 1
        elif character == '"' or (not quote and character == "'"):
            quote = "" if quote else character
        elif not quote and character in " \t":
            # A second word is a command that runs with this variable; only a comment may follow.
            following = rest[position:].lstrip(" \t")
            return "".join(value) if not following or following.startswith("#") else None
        else:
            value.append(character)
    return None if quote else "".join(value)


def _compose_value(rest: str) -> str | None:
    """Return the value docker compose gives to ``NAME=<rest>``, or None when it would expand a variable."""
    rest = rest.strip()
    if rest[:1] in ("'", '"') and rest.find(rest[0], 1) > 0:
        literal = rest[1 : rest.find(rest[0], 1)]
        if rest[0] == "'":
            return literal
    else:
        literal = re.split(r"\s#", rest, maxsplit=1)[0].rstrip()
    return None if "$" in literal or "\\" in literal else literal
