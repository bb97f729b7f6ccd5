"""SHA256SUMS lists: the grammar of ``sha256sum``, both ways, and what "all of it is verified" means.

Follows GNU coreutils 9.1 with ``--strict``: a list that holds a line it cannot read verifies nothing.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PLAIN = re.compile(r"[ \t]*(?P<escaped>\\?)(?P<hash>[0-9a-fA-F]{64}) [ *](?P<name>.+)", re.DOTALL)
_TAGGED = re.compile(r"[ \t]*(?P<escaped>\\?)SHA256 ?\((?P<name>.+)\)[ \t]*=[ \t]*(?P<hash>[0-9a-fA-F]{64})", re.DOTALL)
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escape: char for char, escape in _ESCAPES.items()}


class Entry(TypedDict):
    """One line: the name as written, the same name without a leading ``./``, and the hash in lower case."""

    name: str
    path: str
    sha256: str


class Listing(TypedDict):
    """A parsed list: its entries in order, and the numbers (from 1) of lines that are no checksum lines."""

    entries: list[Entry]
    bad_lines: list[int]


class Verdict(TypedDict):
    """What a check found; ``ok`` only when every expected file, and every listed one, was verified."""

    ok: bool
    verified: list[str]
    different: list[str]
    missing: list[str]
    unlisted: list[str]
    bad_lines: list[int]


def parse(text: str) -> Listing:
    """Read a list in plain (``hash  name``, ``hash *name``), ``--tag`` or OpenSSL form.

    Names may be escaped, lines may end in CRLF and begin with blanks. Nothing raises: what cannot be read is numbered
    in ``bad_lines`` (a byte-order mark makes a line unreadable, as it does for ``sha256sum``). Empty lines and ``#``
    comments are skipped.
    """
    entries: list[Entry] = []
    bad: list[int] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.removesuffix("\r")
        if not line or line.startswith("#"):
            continue
        match = _PLAIN.fullmatch(line) or _TAGGED.fullmatch(line)
        name = match and (_unescape(match["name"]) if match["escaped"] else match["name"])
        if not match or name is None:
            bad.append(number)
            continue
        entries.append({"name": name, "path": normalise(name), "sha256": match["hash"].lower()})
    return {"entries": entries, "bad_lines": bad}


def format_lines(hashes: Mapping[str, str]) -> str:
    """Render ``{name: sha256}`` as a list sorted by name, ``hash  name`` lines, odd names escaped as coreutils does."""
    return "".join(_line(name, digest) for name, digest in sorted(hashes.items()))


def check_line(name: str, status: str) -> str:
    """Render a line of ``sha256sum -c`` output, e.g. ``a.bin: OK``; a name that needs it is escaped again."""
    escaped = escape(name)
    # In the output only a line feed calls for escaping; in the list a backslash or carriage return does too.
    return f"\\{escaped}: {status}" if "\n" in name else f"{name}: {status}"


def verify(text: str, found: Mapping[str, str | None], expected: Iterable[str]) -> Verdict:
    """Judge a list against the hashes that were computed.

    ``found`` is ``{name: sha256 or None when the file is not there}``, ``expected`` the names that must be proven. The
    exit status of ``sha256sum -c`` is not enough: it is 0 for a list that leaves a file out.
    """
    listing = parse(text)
    hashes = {normalise(name): digest for name, digest in found.items()}
    wanted = {normalise(name) for name in expected}
    listed: dict[str, set[str]] = {}
    for entry in listing["entries"]:
        listed.setdefault(entry["path"], set()).add(entry["sha256"])
    missing = sorted(name for name in listed.keys() | wanted if hashes.get(name) is None)
    different = sorted(name for name in listed if name not in missing and listed[name] != {hashes[name]})
    verified = sorted(name for name in listed if name not in missing and name not in different)
    return {
        "ok": bool(wanted) and not (missing or different or listing["bad_lines"]) and wanted <= set(verified),
        "verified": verified,
        "different": different,
        "missing": missing,
        "unlisted": sorted(wanted - listed.keys()),
        "bad_lines": listing["bad_lines"],
    }


def normalise(name: str) -> str:
    """Give the one spelling of a name: ``./a.bin`` and ``a.bin`` are one file."""
    return posixpath.normpath(name)


def escape(name: str) -> str:
    """Write backslash, line feed and carriage return as two characters each."""
    return "".join(_ESCAPES.get(char, char) for char in name)


def _line(name: str, digest: str) -> str:
    escaped = escape(name)
    mark = "" if escaped == name else "\\"
    return f"{mark}{digest}  {escaped}\n"


def _unescape(name: str) -> str | None:
    """Undo ``escape``; None for an escape that coreutils does not know."""
    parts = re.findall(r"\\.?|[^\\]+", name, re.DOTALL)
    plain = [_UNESCAPES.get(part) if part.startswith("\\") else part for part in parts]
    return None if None in plain else "".join(part for part in plain if part is not None)
