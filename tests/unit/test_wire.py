"""Room wire: both ends over real sockets, and what must not get in."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from lockstep_core import files, wire
from lockstep_core.errors import LockstepError

KEY = bytes(range(32))


def test_strangers_do_not_keep_the_sender_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GREET_S", 20)
    listener = wire.listen("127.0.0.1")
    port = listener.getsockname()[1]
    found: list[wire.Channel] = []
    waiting = threading.Thread(target=lambda: found.append(wire.accept(listener, KEY)))
    waiting.start()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    with socket.create_connection(("127.0.0.1", port)) as web:
        web.sendall(b"GET / HTTP/1.1\r\nHost: spark1\r\n\r\n" + b"x" * 100)
        with contextlib.suppress(ConnectionResetError):
            assert web.recv(1000) == b""
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(LockstepError, match="does not hold this run's key"):
        wire.connect("127.0.0.1", port, b"?" * 32)
    began = time.monotonic()
    channel = wire.connect("127.0.0.1", port, KEY)
    waiting.join(60)
    assert time.monotonic() - began < wire.GREET_S, "the silent ones are not waited for"
    channel.say("hello", n=1)
    assert found[0].hear("hello")["n"] == 1
    for one in [*silent, channel, *found, listener]:
        one.close()


def test_a_receiver_without_the_key_learns_nothing_and_is_refused() -> None:
    listener = wire.listen("127.0.0.1")
    found: list[bytes] = []

    def pose() -> None:
        connection, _ = listener.accept()
        with connection:
            found.append(connection.recv(48))
            connection.sendall(b"LOCKSTEP-ARCHIVE" + bytes(64))
            found.append(connection.recv(1000))

    thread = threading.Thread(target=pose)
    thread.start()
    with pytest.raises(LockstepError, match="does not hold this run's key"):
        wire.connect("127.0.0.1", listener.getsockname()[1], KEY)
    thread.join(60)
    listener.close()
    assert [len(part) for part in found] == [48, 0]
    assert KEY not in found[0]


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GREET_S", 1)
    monkeypatch.setattr(wire, "IDLE_S", 1)
    monkeypatch.setattr(wire, "WAIT_S", 1)
    listener = wire.listen("127.0.0.1")
    began = time.monotonic()
    with pytest.raises(LockstepError, match="no sender came"):
        wire.accept(listener, KEY)
    # Listens, and never answers.
    with pytest.raises(LockstepError, match="the connection to the other side was lost"):
        wire.connect("127.0.0.1", listener.getsockname()[1], KEY)
    # Proved itself, and then says nothing, or takes nothing.
    monkeypatch.setattr(wire, "GREET_S", 10)
    near, far = socket.socketpair()
    other: list[wire.Channel] = []
    thread = threading.Thread(target=lambda: other.append(wire.Channel(far, KEY, "receiver")))
    thread.start()
    channel = wire.Channel(near, KEY, "sender")
    thread.join()
    with pytest.raises(wire.Lost, match="nothing for 1 s"):
        channel.hear("go")
    with pytest.raises(wire.Lost, match="nothing for 1 s"):
        channel.give(memoryview(bytes(100 << 20)))
    near.close()
    far.close()
    listener.close()
    assert time.monotonic() - began < 60


def test_nobody_listens_there() -> None:
    listener = wire.listen("127.0.0.1")
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(LockstepError) as caught:
        wire.connect("127.0.0.1", port, KEY)
    assert (caught.value.message, caught.value.found) == (f"cannot reach 127.0.0.1 port {port}", "Connection refused")
    with pytest.raises(LockstepError, match=r"cannot listen on 192\.0\.2\.1"):
        wire.listen("192.0.2.1")


@pytest.mark.parametrize(
    "frame",
    [
        b"W\xff\xff\xff\xff",
        b"B\x00\x80\x00\x01",
        b"W\x00\x00\x00\x05hello",
        b"X\x00\x00\x00\x01.",
        b"B\x00\x00\x00\x01.",
    ],
)
def test_frames_that_no_peer_sends_are_refused(frame: bytes) -> None:
    near, far = socket.socketpair()
    thread = threading.Thread(target=lambda: wire.Channel(far, KEY, "sender"))
    thread.start()
    channel = wire.Channel(near, KEY, "receiver")
    thread.join()
    far.sendall(frame)
    with pytest.raises(LockstepError, match="does not speak as it should"):
        channel.hear("file")
    near.close()
    far.close()


def test_a_word_said_twice_is_refused() -> None:
    near, far = socket.socketpair()
    heard: list[bytes] = []
    thread = threading.Thread(target=lambda: wire.Channel(far, KEY, "receiver"))
    thread.start()
    channel = wire.Channel(near, KEY, "sender")
    thread.join()
    channel.say("end", sha256="0" * 64)
    heard.append(far.recv(1000))
    near.close()
    far.close()
    # The same bytes again, to an end that has heard them once.
    near, far = socket.socketpair()
    thread = threading.Thread(target=lambda: wire.Channel(far, KEY, "sender"))
    thread.start()
    channel = wire.Channel(near, KEY, "receiver")
    thread.join()
    far.sendall(heard[0])
    with pytest.raises(LockstepError, match="a word without its proof"):
        channel.hear("end")
    near.close()
    far.close()


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[wire.Channel, wire.Channel]]:
    """A sender and a receiver whose blocks are of 1,000 bytes."""
    monkeypatch.setattr(files, "BLOCK", 1000)
    near, far = socket.socketpair()
    with ThreadPoolExecutor() as pool:
        there = pool.submit(wire.Channel, far, KEY, "receiver")
        sender = wire.Channel(near, KEY, "sender")
        yield sender, there.result()
        near.close()
        far.close()


@pytest.mark.parametrize("sizes", [[], [1], [1000], [999, 1, 1], [10, 2500, 0, 490], [1] * 1500])
def test_a_stream_arrives_as_it_was_whatever_its_pieces(
    ends: tuple[wire.Channel, wire.Channel], sizes: list[int]
) -> None:
    sender, receiver = ends
    whole = os.urandom(sum(sizes))
    rest = io.BytesIO(whole)
    told: list[int] = []
    said: dict[str, Any] = {}
    with ThreadPoolExecutor() as pool:
        came = pool.submit(lambda: list(wire.receive_stream(receiver, said)))
        sent = wire.send_stream(sender, (rest.read(size) for size in sizes), told.append)
        blocks = came.result(60)
    assert b"".join(blocks) == whole
    assert max(map(len, blocks), default=0) <= 1000
    assert sum(told) == len(whole)
    assert said == sent == {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}


def test_what_is_fed_with_a_stream_gets_its_last_block_only_when_all_is_proven(
    ends: tuple[wire.Channel, wire.Channel],
) -> None:
    sender, receiver = ends
    got: list[bytes] = []

    def feed() -> None:
        for block in wire.receive_stream(receiver, {}):
            got.append(block)  # noqa: PERF402 - extend would keep nothing of what came before an error

    with ThreadPoolExecutor() as pool:
        fed = pool.submit(feed)
        for block in (b"a" * 1000, b"b" * 1000, b"c" * 10):
            sender.say("more", bytes=len(block))
            sender.give(memoryview(block))
        sender.say("end", bytes=2010, sha256="0" * 64)
        with pytest.raises(LockstepError, match="what arrived is not what was sent"):
            fed.result(60)
    assert got == [b"a" * 1000, b"b" * 1000]


def test_a_source_that_takes_its_time_is_waited_for_and_a_lost_one_is_not(
    ends: tuple[wire.Channel, wire.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ends
    monkeypatch.setattr(wire, "_ALIVE_S", 0.2)
    for end in ends:
        end._limit(2)

    def slow() -> Iterator[bytes]:
        time.sleep(3)
        yield b"first"

    with ThreadPoolExecutor() as pool:
        came = pool.submit(lambda: list(wire.receive_stream(receiver, {})))
        wire.send_stream(sender, slow(), lambda _: None)
        assert came.result(60) == [b"first"]
        lost = pool.submit(lambda: list(wire.receive_stream(receiver, {})))
        sender.say("more", bytes=5)
        sender.close()
        with pytest.raises(wire.Lost):
            lost.result(60)
