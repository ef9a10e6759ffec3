"""The ranks of a run watch each other, so that one that is killed, stopped or fails ends the others by its number.

A collective does not tell: gloo names no rank, and NCCL waits for hours, as either does for a process that is stopped.
So rank 0 has a connection to each other rank, over which both sides say once a second that they are there. It closes
with a process that is killed, and falls silent with one that is stopped. Rank 0 passes on what it finds. The messages
are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from finetune.errors import MachineError

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""A rank that says nothing for so long is taken for lost. Its thread needs Python's lock for a moment each second."""
GRACE_SECONDS = 10.0
"""Time for the main thread to end by itself, before a process that waits in a collective is ended."""
_CONNECT_SECONDS = 60.0
_LINE_BYTES = 4096


@dataclass(frozen=True)
class Lost:
    """A rank that is gone, and why; `signalled`: because a person or a launcher ended it, as it may all the others."""

    rank: int
    why: str
    signalled: bool = False

    def error(self) -> MachineError:
        return MachineError(
            f"rank {self.rank} {self.why}; the other ranks cannot go on without it. What was saved before is "
            "untouched: once the cause is mended, start the same command again to go on from the last checkpoint"
        )


class _Peer:
    """The connection to another rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._sending = threading.Lock()
        self._begun = b""
        self.silent_seconds = 0.0

    def say(self, **message: object) -> None:
        # A peer that is gone, or reads nothing, is found by what it does not say.
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(json.dumps(message).encode() + b"\n")

    def heard(self) -> Iterator[dict[str, object]]:
        """The messages since the last call. Raises ConnectionError where the connection is closed."""
        with contextlib.suppress(BlockingIOError):
            while content := self._connection.recv(_LINE_BYTES):
                self.silent_seconds = 0.0
                *lines, self._begun = (self._begun + content).split(b"\n")
                yield from map(json.loads, lines)
            raise ConnectionError

    def close(self) -> None:
        self._connection.close()


class Watch:
    """Watches the ranks at the other end of `connections`: all others for rank 0, and rank 0 for each of them."""

    def __init__(self, rank: int, connections: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = {other: _Peer(connection) for other, connection in connections.items()}
        self._lost: Lost | None = None
        self._known, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def lost(self, wait_seconds: float) -> Lost | None:
        """The first rank that was lost, if one is within so many seconds."""
        self._known.wait(wait_seconds)
        return self._lost

    def leave(self, failure: Lost | None = None) -> None:
        """End the watch: this rank is done or, with a `failure`, lost to the others."""
        if self._left.is_set():
            return
        self._left.set()
        self._thread.join()
        for peer in self._peers.values():
            peer.say(**({"lost": asdict(failure)} if failure else {"done": True}))
            peer.close()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._left.wait(BEAT_SECONDS):
            now = time.monotonic()
            # A process that was itself stopped heard nothing meanwhile, which is nobody else's silence.
            passed, looked = min(now - looked, 2 * BEAT_SECONDS), now
            for rank, peer in list(self._peers.items()):
                peer.say()
                if lost := self._look(rank, peer, passed):
                    self._end(lost)
                    return

    def _look(self, rank: int, peer: _Peer, passed_seconds: float) -> Lost | None:
        peer.silent_seconds += passed_seconds
        try:
            for message in peer.heard():
                if "lost" in message:
                    return Lost(**message["lost"])  # type: ignore[arg-type]
                if "done" in message:
                    del self._peers[rank]
                    peer.close()
                    return None
        except (OSError, ValueError):
            return Lost(rank, "was killed, or its machine is gone: its connection closed without a word")
        if peer.silent_seconds > SILENCE_SECONDS:
            return Lost(rank, f"has said nothing for {SILENCE_SECONDS:.0f} seconds: it is stopped, or its machine is")
        return None

    def _end(self, lost: Lost) -> None:
        """Tell the others and the main thread; end the process where that one is caught in a collective."""
        for rank, peer in self._peers.items():
            if rank != lost.rank:
                peer.say(lost=asdict(lost))
        self._lost = lost
        self._known.set()
        if self._left.wait(GRACE_SECONDS):
            return
        show_cursor = "\033[?25h" if sys.__stdout__ and sys.__stdout__.isatty() else ""  # a live line hides it
        os.write(2, f"{show_cursor}error: {lost.error()}\n".encode())
        os._exit(MachineError.exit_code)


def host() -> socket.socket:
    """Where rank 0 takes the other ranks' connections."""
    several = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if several else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=several)


def accept(server: socket.socket, token: str, others: int) -> Watch:
    """Rank 0's watch over the `others`, each of which shows `token`. Raises MachineError where one does not come."""
    connections: dict[int, socket.socket] = {}
    until = time.monotonic() + _CONNECT_SECONDS
    while len(connections) < others:
        server.settimeout(max(0.01, until - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = sorted(set(range(1, others + 1)) - connections.keys())
            raise MachineError(f"rank 0 waited {_CONNECT_SECONDS:.0f} seconds for ranks {missing} to connect") from None
        connection.settimeout(_CONNECT_SECONDS)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            with connection.makefile("rb", buffering=0) as opened:  # no byte more than the line
                hello = json.loads(opened.readline(_LINE_BYTES))
            if hello["token"] == token:
                connections[int(hello["rank"])] = connection
                continue
        connection.close()
    return Watch(0, connections)


def connect(address: tuple[str, int], token: str, rank: int) -> Watch:
    """Another rank's watch over rank 0. Raises MachineError where that cannot be reached."""
    try:
        connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        connection.sendall(json.dumps({"token": token, "rank": rank}).encode() + b"\n")
    except OSError as error:
        raise MachineError(f"rank {rank} cannot reach rank 0 at {address[0]} port {address[1]}: {error}") from None
    return Watch(rank, {0: connection})
