"""A connection whose two ends have proven to each other that they hold one key: words, and blocks of bytes.

Every frame but the blocks is proven by HMAC-SHA256 with a counter; the blocks are by a hash that the ends exchange
afterwards. Nothing is encrypted. Nothing waits for ever: a silent or lost end is an error, strangers are turned away.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import itertools
import json
import os
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from . import files
from .errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

KEY_BYTES = 32
# Seconds without a byte from the other side; it says that it lives every second.
IDLE_S = 60
# Seconds for a connection and for a stranger to prove that it is none, and that a receiver waits for its sender.
GREET_S, WAIT_S = 10, 60
# Connections that may try to prove themselves at a time.
STRANGERS = 16

_MAGIC = b"LOCKSTEP-ARCHIVE"
_NONCE = 32
_MAC = 32
_HEAD = struct.Struct(">cI")
_BLOCK, _WORD = b"B", b"W"
# Bytes of a word (JSON, a manifest inside); a block is never larger than files.BLOCK.
MAX_WORD = 1 << 20
# So much is under way in the kernel, so that neither side waits for the other's turn.
_SOCKET_BUFFER = 4 << 20
_ALIVE_S = 1.0
_ERROR = ("message", "host", "found", "expected", "next_step")


class Lost(LockstepError):  # noqa: N818 (what happened to a connection)
    """The other end is gone, or silent."""


class Channel:
    """One end of a connection whose two ends have proven to each other that they hold the key.

    ``say`` and ``hear`` exchange words (JSON objects with a ``word``), ``give`` and ``take`` blocks of bytes. An error
    that the other end says is raised here, and a silent or lost end is one too: nothing waits for ever.
    """

    def __init__(self, connection: socket.socket, key: bytes, side: str) -> None:
        self._socket, self._side = connection, side
        self._sent = self._heard = self._unsaid = 0
        self._alive = time.monotonic()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        self._limit(GREET_S)
        self._key = self._greet(key)
        self._limit(IDLE_S)

    def say(self, word: str, **more: object) -> None:
        """Send a word."""
        data = json.dumps({"word": word, **more}).encode()
        self._send(_HEAD.pack(_WORD, len(data) + _MAC) + data + self._mac(self._side, self._sent, data))
        self._sent += 1

    def alive(self, stage: str = "", count: int = 0, *, quiet: bool = False) -> None:
        """Say, once a second at most, that this end works; ``count`` bytes more of ``stage`` are done.

        ``quiet`` keeps the count for later: nothing is said to an end that sends blocks.
        """
        self._unsaid += count
        if quiet:
            return
        if time.monotonic() - self._alive >= _ALIVE_S:
            self._alive = time.monotonic()
            self.say("alive", stage=stage, bytes=self._unsaid)
            self._unsaid = 0

    def hear(self, *words: str, tell: Callable[[str, int], None] | None = None) -> dict[str, Any]:
        """Wait for one of the words; signs of life go to ``tell``. LockstepError for an error of the other end."""
        while True:
            kind, length = self._head()
            if kind != _WORD:
                raise broken(f"{length} bytes of a file", f"the word {words[0]!r}")
            said = self._word(length)
            if said["word"] in words:
                return said
            if said["word"] != "alive":
                raise broken(f"the word {said['word']!r}", repr(words[0]))
            if tell:
                tell(said["stage"], said["bytes"])

    def give(self, block: memoryview) -> None:
        """Send a block; an error that the other end has said meanwhile is raised instead."""
        if select.select([self._socket], [], [], 0)[0]:
            self.hear("nothing while a file is on its way")
        self._send(_HEAD.pack(_BLOCK, block.nbytes), socket.MSG_MORE)
        self._send(block)

    def take(self, block: memoryview) -> None:
        """Fill a block with what the other end gives."""
        while True:
            kind, length = self._head()
            if kind == _BLOCK:
                break
            said = self._word(length)
            if said["word"] != "alive":
                raise broken(f"the word {said['word']!r}", f"{block.nbytes} bytes of the file")
        if length != block.nbytes:
            raise broken(f"a block of {length} bytes", f"{block.nbytes}")
        self._fill(block)

    def fail(self, error: BaseException) -> None:
        """Tell the other end why this one stops, and wait a little for it to have read that."""
        said = {name: getattr(error, name, None) for name in _ERROR}
        said["message"] = said["message"] or str(error) or type(error).__name__
        # As files.write_blocks has it: after an error of the system another run may go on with what arrived.
        passing = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
        with contextlib.suppress(OSError, LockstepError):
            texts = {name: None if value is None else str(value) for name, value in said.items()}
            self.say("error", passing=passing, **texts)
            self._socket.shutdown(socket.SHUT_WR)
            # Closing with bytes unread would reset the connection, and the word would be lost.
            until = time.monotonic() + GREET_S
            while time.monotonic() < until and self._socket.recv(1 << 20):
                pass

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _greet(self, key: bytes) -> bytes:
        own = os.urandom(_NONCE)
        if self._side == "sender":
            self._send(_MAGIC + own)
            theirs = self._exactly(len(_MAGIC) + _NONCE + _MAC)
            nonces = own + theirs[len(_MAGIC) : -_MAC]
            if not hmac.compare_digest(theirs[-_MAC:], _hmac(key, b"receiver" + nonces)):
                raise LockstepError(
                    "what answers there does not hold this run's key",
                    found="a wrong proof",
                    expected="the receiver that this run started",
                    next_step="see what listens there (ss -tlnp), then run again",
                )
            self._send(_hmac(key, b"sender" + nonces))
        else:
            hello = self._exactly(len(_MAGIC) + _NONCE)
            nonces = hello[len(_MAGIC) :] + own
            if hello[: len(_MAGIC)] != _MAGIC:
                raise broken("other first bytes", "a sender")
            self._send(_MAGIC + own + _hmac(key, b"receiver" + nonces))
            if not hmac.compare_digest(self._exactly(_MAC), _hmac(key, b"sender" + nonces)):
                raise broken("a wrong proof", "the sender of this run")
        return _hmac(key, b"session" + nonces)

    def _head(self) -> tuple[bytes, int]:
        kind, length = _HEAD.unpack(self._exactly(_HEAD.size))
        limit = {_BLOCK: files.BLOCK, _WORD: MAX_WORD}.get(kind, 0)
        if length > limit or (kind == _WORD and length < _MAC):
            raise broken(f"a frame {kind!r} of {length} bytes", f"at most {limit}")
        return kind, length

    def _word(self, length: int) -> dict[str, Any]:
        data = self._exactly(length)
        other = "receiver" if self._side == "sender" else "sender"
        if not hmac.compare_digest(data[-_MAC:], self._mac(other, self._heard, data[:-_MAC])):
            raise broken("a word without its proof", "the other end's own")
        self._heard += 1
        said: dict[str, Any] = json.loads(data[:-_MAC])
        if said["word"] == "error":
            raise LockstepError(**{name: said[name] for name in _ERROR}) from OSError() if said["passing"] else None
        return said

    def _mac(self, side: str, number: int, data: bytes) -> bytes:
        return _hmac(self._key, side.encode() + number.to_bytes(8, "big") + data)

    def _limit(self, seconds: int) -> None:
        # The kernel's own limits: with Python's every call would be two, and no call could fill a whole block.
        self._socket.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))

    def _send(self, data: bytes | memoryview, flags: int = 0) -> None:
        try:
            self._socket.sendall(data, flags)
        except OSError as error:
            self._last_word()
            raise _lost(error) from error

    def _last_word(self) -> None:
        """Raise the error that the other end said before it closed, if it did."""
        try:
            while select.select([self._socket], [], [], 0)[0]:
                self._word(self._head()[1])
        except (OSError, KeyError, ValueError):
            return
        except Lost:
            return

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view:
            try:
                got = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise _lost(error) from error
            if not got:
                closed = ConnectionResetError(errno.ECONNRESET, "closed by the other side")
                raise _lost(closed) from closed
            view = view[got:]


# --- a stream whose length nobody knows before its end -------------------------------------------------------------


@contextlib.contextmanager
def kept_alive(channel: Channel) -> Iterator[None]:
    """Tell the other end that this one works, while the body waits for somebody else and does not use the channel."""
    over = threading.Event()

    def tell() -> None:
        with contextlib.suppress(LockstepError):  # whoever uses the channel next finds it lost
            while not over.wait(_ALIVE_S):
                channel.alive()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def send_stream(channel: Channel, chunks: Iterable[bytes], tell: Callable[[int], None]) -> dict[str, Any]:
    """Send what ``chunks`` gives, in blocks of files.BLOCK bytes: ``{"bytes", "sha256"}``; ``tell`` gets each size.

    Whoever makes the first chunk may take his time. LockstepError when the other end has said one, or is lost.
    """
    digest, total, block = hashlib.sha256(), 0, bytearray()
    rest = iter(chunks)
    with kept_alive(channel):
        ahead = next(rest, b"")
    for chunk in itertools.chain([ahead], rest, [None]):
        block += chunk or b""
        while len(block) >= files.BLOCK or (chunk is None and block):
            now = bytes(block[: files.BLOCK])
            del block[: files.BLOCK]
            digest.update(now)
            channel.say("more", bytes=len(now))
            channel.give(memoryview(now))
            total += len(now)
            tell(len(now))
    said = {"bytes": total, "sha256": digest.hexdigest()}
    channel.say("end", **said)
    return said


def receive_stream(channel: Channel, said: dict[str, Any]) -> Iterator[bytes]:
    """Yield the blocks that the other end sends; its last one only when all of them have the hash it says.

    ``said`` gets ``bytes`` and ``sha256``.
    """
    expected: dict[str, Any] = {}

    def blocks() -> Iterator[bytes]:
        while (more := channel.hear("more", "end"))["word"] == "more":
            if not 0 < more["bytes"] <= files.BLOCK:
                raise broken(f"a block of {more['bytes']} bytes", f"1 to {files.BLOCK}")
            block = bytearray(more["bytes"])
            channel.take(memoryview(block))
            yield bytes(block)
        expected.update({name: more[name] for name in ("bytes", "sha256")})

    def prove(size: int, sha256: str) -> None:
        found = {"bytes": size, "sha256": sha256}
        if found != expected:
            raise LockstepError(
                "what arrived is not what was sent",
                found=f"{size:,} bytes, SHA-256 {sha256}",
                expected=f"{expected['bytes']:,} bytes, SHA-256 {expected['sha256']}",
                next_step="run again; when it comes back, look for bad memory or a bad link between the two hosts",
            )
        said.update(found)

    yield from files.last_when_proven(blocks(), prove)


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def broken(found: str, expected: str) -> LockstepError:
    """Make the error for an end that says what it should not."""
    return LockstepError(
        "the other side does not speak as it should",
        found=found,
        expected=expected,
        next_step="run again; if it happens again, both hosts need one version of Lockstep",
    )


def _lost(error: OSError) -> Lost:
    why = f"nothing for {IDLE_S} s" if isinstance(error, BlockingIOError) else os.strerror(error.errno or 0)
    return Lost(
        "the connection to the other side was lost",
        found=why,
        expected="a connection that holds until the last verdict",
        next_step="run again: it goes on where this ended; nothing was removed that had not arrived",
    )


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on one address of this host, at any free port by default. LockstepError when it has no such address."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        listener.bind((address, port))
        listener.listen(STRANGERS)
    except OSError as error:
        listener.close()
        raise LockstepError(
            f"cannot listen on {address}{f' port {port}' if port else ''}",
            found=os.strerror(error.errno or 0),
            expected="an address of this host on its link to the sender",
            next_step="correct fleet_fabric of this host in the inventory",
        ) from error
    return listener


def accept(listener: socket.socket, key: bytes) -> Channel:
    """Wait for the one that holds the key. Strangers are turned away, each in its own time; nobody comes: an error."""
    found: list[Channel] = []
    came = threading.Event()
    turns = threading.BoundedSemaphore(STRANGERS)

    def greet(connection: socket.socket) -> None:
        try:
            _keep_alive(connection)
            channel = Channel(connection, key, "receiver")
        except (LockstepError, OSError):
            connection.close()
        else:
            found.append(channel)
            came.set()
        finally:
            turns.release()

    until = time.monotonic() + WAIT_S
    while not came.is_set() and time.monotonic() < until:
        if select.select([listener], [], [], 0.05)[0]:
            connection, _ = listener.accept()
            if turns.acquire(blocking=False):
                threading.Thread(target=greet, args=(connection,), daemon=True).start()
            else:
                connection.close()
    if not found:
        raise LockstepError(
            "no sender came",
            found=f"nobody with the key within {WAIT_S} s",
            expected="the sender that this run starts",
            next_step="run again",
        )
    return found[0]


def connect(address: str, port: int, key: bytes, source: str = "") -> Channel:
    """Connect to the receiver, from one own address where it matters. LockstepError when it cannot be reached."""
    try:
        connection = socket.create_connection((address, port), GREET_S, (source, 0) if source else None)
    except OSError as error:
        raise LockstepError(
            f"cannot reach {address} port {port}",
            found=os.strerror(error.errno) if error.errno else str(error) or "no answer",
            expected=f"the receiver's answer within {GREET_S} s",
            next_step="see that this link is up (ping), that no firewall is between, and fleet_fabric in the inventory",
        ) from error
    try:
        _keep_alive(connection)
        return Channel(connection, key, "sender")
    except BaseException:
        connection.close()
        raise


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within half a minute that the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
