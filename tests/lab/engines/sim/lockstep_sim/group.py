"""The ranks' rendezvous over TCP: rank 0 listens at --dist-init-addr, the others come to it.

Messages are JSON lines. Every connection is watched by its own thread, so a peer that dies is noticed at once, whatever
this rank is doing; that ends this rank too, as a broken collective does in the engine.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

Lost = Callable[[int, str], None]


class Group:
    """`size` ranks that meet, exchange objects and die together."""

    def __init__(self, rank: int, size: int, address: str, *, timeout: float, lost: Lost) -> None:
        self.rank, self.size = rank, size
        self._lost, self._closing = lost, threading.Event()
        self._inbox: dict[int, queue.Queue[Any]] = {r: queue.Queue() for r in range(size)}
        self._sockets: dict[int, socket.socket] = {}
        self.shutdown = threading.Event()
        if size == 1:
            return
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + timeout
        if rank == 0:
            self._listen(int(port), deadline)
        else:
            self._connect(host, int(port), deadline)
        self.all_gather("met")

    def _listen(self, port: int, deadline: float) -> None:
        # On every address: a worker may reach the head on one link and the next worker on another.
        with socket.create_server(("", port)) as server:
            while len(self._sockets) < self.size - 1:
                server.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    waiting = sorted(set(range(1, self.size)) - set(self._sockets))
                    raise TimeoutError(f"Timed out waiting for clients: ranks {waiting} did not join") from None
                reader = peer.makefile("r", encoding="utf-8")
                try:
                    rank = int(json.loads(reader.readline())["rank"])
                except (ValueError, KeyError, TypeError):
                    peer.close()  # a port scan or a health probe, not a rank
                    continue
                if not 0 < rank < self.size or rank in self._sockets:
                    raise RuntimeError(
                        f"a second rank {rank} came from {peer.getpeername()[0]} (world size {self.size})"
                    )
                self._watch(rank, peer, reader)

    def _connect(self, host: str, port: int, deadline: float) -> None:
        while True:
            try:
                peer = socket.create_connection((host, port), timeout=5)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"Timed out connecting to {host}:{port}: {error}") from error
                time.sleep(0.2)
        peer.settimeout(None)
        peer.sendall(json.dumps({"rank": self.rank}).encode() + b"\n")
        self._watch(0, peer, peer.makefile("r", encoding="utf-8"))

    def _watch(self, rank: int, peer: socket.socket, reader: Any) -> None:
        self._sockets[rank] = peer
        threading.Thread(target=self._read, args=(rank, peer.getpeername(), reader), daemon=True).start()

    def _read(self, rank: int, address: tuple[Any, ...], reader: Any) -> None:
        try:
            for line in reader:
                message = json.loads(line)
                if message == {"shutdown": True}:
                    self._closing.set()
                    self.shutdown.set()
                else:
                    self._inbox[rank].put(message)
        except OSError:
            pass
        if not self._closing.is_set():
            self._lost(rank, f"{address[0]}:{address[1]}")

    def _send(self, rank: int, message: Any) -> None:
        with contextlib.suppress(OSError):  # the watcher of this connection sees the end too, and says it
            self._sockets[rank].sendall(json.dumps(message).encode() + b"\n")

    def all_gather(self, item: Any) -> list[Any]:
        """What each rank gave, by rank, on every rank."""
        if self.size == 1:
            return [item]
        if self.rank == 0:
            items = [item] + [self._inbox[rank].get()["item"] for rank in range(1, self.size)]
            for rank in range(1, self.size):
                self._send(rank, {"items": items})
            return items
        self._send(0, {"item": item})
        result: list[Any] = self._inbox[0].get()["items"]
        return result

    def close(self) -> None:
        """Rank 0 tells all to stop: the engine's ShutdownReq broadcast."""
        self._closing.set()
        if self.rank == 0:
            for rank in list(self._sockets):
                self._send(rank, {"shutdown": True})
