"""Ranks that are forked from one process, which decides their agreements: the real book of the
coordinator, over socket pairs. A rank that dies is seen at once, by the end of its socket."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hydroslurm.coordination.agreements import values_of
from hydroslurm.coordination.messages import ranks_of, runs_of
from hydroslurm.coordination.state import Agreements
from hydroslurm.errors import AgreementFailed, CoordinatorLost

LIMIT_S = 60.0

Hook = Callable[[str, str], None]


class PipePeers:
    """One rank's side. ``hook`` is called with "before" or "after" and the topic."""

    def __init__(self, rank: int, world_size: int, connection: socket.socket) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hook: Hook = lambda _when, _topic: None
        self._connection = connection
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._decided: dict[str, dict[str, Any]] = {}
        self._lost = False
        threading.Thread(target=self._listen, daemon=True).start()

    def agree(
        self,
        topic: str,
        value: Any,
        *,
        timeout_s: float | None = None,
        cancel: threading.Event | None = None,
        among: Sequence[int] | None = None,
        collect_at: Collection[int] | None = None,
    ) -> Mapping[int, Any]:
        self.hook("before", topic)
        ask = {"type": "agree", "topic": topic, "value": json.dumps(value, allow_nan=False)}
        ask["among"] = None if among is None else runs_of(among)
        ask["collect_at"] = None if collect_at is None else sorted(collect_at)
        self._send(ask)
        end_s = time.monotonic() + (LIMIT_S if timeout_s is None else timeout_s)
        withdrawn = False
        with self._changed:
            while topic not in self._decided:
                if self._lost:
                    raise CoordinatorLost("the forker has ended")
                self._changed.wait(0.02)
                given_up = time.monotonic() > end_s or (cancel is not None and cancel.is_set())
                if given_up and not withdrawn:
                    withdrawn = True
                    self._send({"type": "withdraw", "topic": topic})
            told = self._decided[topic]
        self.hook("after", topic)
        if told["type"] == "agreed":
            return values_of(told)
        raise AgreementFailed(
            f"no agreement on {topic}",
            missing=tuple(ranks_of(told["missing"])),
            withdrawn=tuple(ranks_of(told["withdrawn"])),
        )

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._connection.sendall(json.dumps(message, allow_nan=False).encode() + b"\n")

    def _listen(self) -> None:
        for line in self._connection.makefile("rb"):
            told = json.loads(line)
            with self._changed:
                self._decided[told["topic"]] = told
                self._changed.notify_all()
        with self._changed:
            self._lost = True
            self._changed.notify_all()


def together(world_size: int, work: Callable[[PipePeers], int | None]) -> list[int]:
    """Run in as many forked ranks; what each of them returned, or minus the signal it died of."""
    pairs = [socket.socketpair() for _ in range(world_size)]
    pids = []
    for rank, (_, theirs) in enumerate(pairs):
        pid = os.fork()
        if pid == 0:
            for other, (ours, unused) in enumerate(pairs):
                ours.close()
                if other != rank:
                    unused.close()
            _live(PipePeers(rank, world_size, theirs), work)
        pids.append(pid)
    for _, theirs in pairs:
        theirs.close()
    try:
        _decide(world_size, [ours for ours, _ in pairs])
    except BaseException:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for ours, _ in pairs:
            ours.close()
    return ended


def _live(peers: PipePeers, work: Callable[[PipePeers], int | None]) -> None:
    code = 1
    try:
        code = work(peers) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _decide(world_size: int, connections: list[socket.socket]) -> None:
    """Be the coordinator until all ranks have ended."""
    book, gone = Agreements(world_size), set[int]()
    buffers = [b""] * world_size
    end_s = time.monotonic() + LIMIT_S
    while len(gone) < world_size:
        alive = [one for rank, one in enumerate(connections) if rank not in gone]
        ready = select.select(alive, [], [], max(0.0, end_s - time.monotonic()))[0]
        assert ready, f"hung: ranks {sorted(set(range(world_size)) - gone)} say nothing"
        for connection in ready:
            rank = connections.index(connection)
            data = _receive(connection)
            if not data:
                gone.add(rank)
                _deliver(book.without(rank), connections)
                continue
            *lines, buffers[rank] = (buffers[rank] + data).split(b"\n")
            for line in lines:
                ask = json.loads(line)
                if ask["type"] == "withdraw":
                    letters = book.withdraw(rank, ask["topic"])
                else:
                    letters = book.submit(rank, ask, died=gone, left=())
                _deliver(letters, connections)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 20)
    except ConnectionResetError:
        return b""


def _deliver(letters: Any, connections: list[socket.socket]) -> None:
    for rank, message in letters:
        try:
            connections[rank].sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            continue  # it is dead, which the next look finds
