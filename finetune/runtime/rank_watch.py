"""Heartbeats between ranks: when one is killed, stopped or fails, the others end and name it.

Collectives do not report this: gloo does not say which rank failed, NCCL waits for hours, and both wait for a stopped
process. So rank 0 has a connection to each other rank, over which both sides send a heartbeat every second. The
connection of a killed process closes; that of a stopped one falls silent. A heartbeat carries the number of sync points
(calls at which ranks wait for each other) that the rank has passed: one that hangs stays behind. Rank 0 informs the
others. Messages are lines of JSON.

torch's store cannot replace the connections, because it does not report that a client is gone: torchrun ends the other
ranks within half a second after one was killed, before missing heartbeats can tell which one it was.
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
from typing import Any

from finetune.errors import FinetuneError, MachineError, OutOfMemoryError

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""A rank silent for this long counts as lost. Its heartbeat thread needs the GIL for a moment each second."""
BEHIND_SECONDS = 1800.0
"""A rank for which others wait this long, while it passes no further sync point, hangs and counts as lost."""
MAIN_BEHIND_SECONDS = 7200.0
"""The same for rank 0, which verifies checkpoints, generates the base's answers and writes to slow disks alone."""
GRACE_SECONDS = 10.0
"""Time for the main thread to end by itself before the process, which may be stuck in a collective, is ended."""
_CONNECT_SECONDS = 60.0
_CLOSE_SECONDS = 2.0
_LINE_BYTES = 4096
_CLOSED = "was killed, or its machine failed: its connection closed unexpectedly"


@dataclass(frozen=True)
class Lost:
    """A lost rank and the reason.

    `signalled`: a person or a launcher ended it, and may be ending all others too. `out_of_memory`: it ran out of
    memory, so all ranks end with that exit code; `next_start` is copied from its error.
    """

    rank: int
    why: str
    signalled: bool = False
    out_of_memory: bool = False
    next_start: str = ""

    def error(self) -> FinetuneError:
        remedy = self.next_start or "fix the cause and run the same command again to resume from the last one"
        return (OutOfMemoryError if self.out_of_memory else MachineError)(
            f"rank {self.rank} {self.why}; the other ranks cannot continue without it. Earlier checkpoints are "
            f"untouched: {remedy}"
        )


class _Peer:
    """The connection to another rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._sending = threading.Lock()
        self._begun = b""
        self.silent_seconds = 0.0
        self.passed = 0

    def say(self, **message: object) -> None:
        # A peer that is gone, or does not read, is detected by its silence.
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(json.dumps(message).encode() + b"\n")

    def heard(self) -> Iterator[dict[str, Any]]:
        """Yield the messages since the last call. Raises ConnectionError if the connection is closed."""
        with contextlib.suppress(BlockingIOError):
            while content := self._connection.recv(_LINE_BYTES):
                self.silent_seconds = 0.0
                *lines, self._begun = (self._begun + content).split(b"\n")
                yield from map(json.loads, lines)
            raise ConnectionError

    def close(self) -> None:
        """Close after the peer has closed: closing a socket with unread heartbeats discards the last message sent."""
        with self._connection as connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(_CLOSE_SECONDS)
            while connection.recv(_LINE_BYTES):
                pass


class Watch:
    """Watches the ranks in `connections`: rank 0 watches all others, and each of them watches rank 0.

    `passed` is the number of sync points passed so far; all ranks pass the same ones.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = {other: _Peer(connection) for other, connection in connections.items()}
        self._lost: Lost | None = None
        self.passed = 0
        self._sync_points: dict[int, int] = {}
        self._behind_seconds: dict[int, float] = {}
        self._known, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def lost(self, wait_seconds: float) -> Lost | None:
        """The first lost rank, waiting up to `wait_seconds` for one."""
        self._known.wait(wait_seconds)
        return self._lost

    def leave(self, failure: Lost | None = None) -> None:
        """End the watch: this rank is done or, with a `failure`, is lost."""
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
            # If this process was itself stopped, the gap is not the silence of the others.
            elapsed, looked = min(now - looked, 2 * BEAT_SECONDS), now
            lost = None
            for rank, peer in list(self._peers.items()):
                peer.say(passed=self.passed)
                lost = lost or self._look(rank, peer, elapsed)
            if self._rank == 0:
                lost = lost or self._hanging(elapsed)
            if lost:
                self._end(lost)
                return

    def _look(self, rank: int, peer: _Peer, elapsed_seconds: float) -> Lost | None:
        peer.silent_seconds += elapsed_seconds
        try:
            for message in peer.heard():
                if "lost" in message:
                    return Lost(**message["lost"])
                if "passed" in message:
                    peer.passed = int(message["passed"])
                if "done" in message:
                    del self._peers[rank]
                    peer.close()
                    return None
        except (OSError, ValueError):
            return Lost(rank, _CLOSED)
        if peer.silent_seconds > SILENCE_SECONDS:
            return Lost(rank, f"has been silent for {SILENCE_SECONDS:.0f} seconds: it or its machine is stopped")
        return None

    def _hanging(self, elapsed_seconds: float) -> Lost | None:
        """The first rank that others have waited for too long, if any."""
        sync_points = {self._rank: self.passed, **{rank: peer.passed for rank, peer in self._peers.items()}}
        for rank, passed in sync_points.items():
            if passed == max(sync_points.values()) or passed != self._sync_points.get(rank):
                self._behind_seconds[rank] = 0.0
            else:
                self._behind_seconds[rank] += elapsed_seconds
            if self._behind_seconds[rank] > (limit := BEHIND_SECONDS if rank else MAIN_BEHIND_SECONDS):
                return Lost(rank, f"hangs: the others have waited for it for {limit / 60:.0f} minutes")
        self._sync_points = sync_points
        return None

    def _end(self, lost: Lost) -> None:
        """Tell the other ranks and the main thread; end the process if that thread is stuck in a collective."""
        for peer in self._peers.values():  # the lost one too: if it hangs, it can still end
            peer.say(lost=asdict(lost))
        self._lost = lost
        self._known.set()
        if self._left.wait(GRACE_SECONDS):
            return
        show_cursor = "\033[?25h" if sys.__stdout__ and sys.__stdout__.isatty() else ""  # hidden by the live line
        error = lost.error()
        os.write(2, f"{show_cursor}error: {error}\n".encode())
        os._exit(error.exit_code)


def host() -> socket.socket:
    """Open the socket on which rank 0 accepts the other ranks' connections."""
    several = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if several else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=several)


def accept(server: socket.socket, token: str, others: int) -> Watch:
    """Return rank 0's watch over the `others`, which each send `token`. Raises MachineError if one does not connect."""
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
            with connection.makefile("rb", buffering=0) as opened:  # unbuffered, to read no further than the line
                hello = json.loads(opened.readline(_LINE_BYTES))
            if hello["token"] == token:
                connections[int(hello["rank"])] = connection
                continue
        connection.close()
    return Watch(0, connections)


def connect(address: tuple[str, int], token: str, rank: int) -> Watch:
    """Return another rank's watch over rank 0. Raises MachineError if rank 0 cannot be reached."""
    try:
        connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        connection.sendall(json.dumps({"token": token, "rank": rank}).encode() + b"\n")
    except OSError as error:
        raise MachineError(f"rank {rank} cannot reach rank 0 at {address[0]} port {address[1]}: {error}") from None
    return Watch(rank, {0: connection})
