"""What coordination costs with 4,096 ranks.

The coordinator is the real process; its ranks are simulated, all in the process of this script:
real connections that authenticate, and speak the real protocol with the real framing. Counted are
the CPU seconds of the coordinator's process alone, of all its threads:

join     from the first connection until every rank knows that all have joined
pause    a rank is paused, all are parked in two rounds, with three process groups per rank (all
         ranks, those of its node, those at its place on every node), and released
"""

from __future__ import annotations

import functools
import os
import secrets
import selectors
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Any

from harness import finish, options

from hydroslurm.coordination.authentication import Greeting, pack, unpack
from hydroslurm.coordination.messages import Runs, check_from_coordinator, runs_of
from hydroslurm.coordination.network import allow_descriptors
from hydroslurm.coordination.rendezvous import _started, start_coordinator
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import World

NODE = 8
AT_ONCE = 128
"""Greetings under way: more than a coordinator can answer, fewer than it closes as idle."""
LIMIT_S = 300.0


class Line:
    """The connection of one rank, which greets."""

    def __init__(self, rank: int, port: int, *, key: bytes) -> None:
        self.rank = rank
        self._greeting = Greeting.of_rank(key=key, open_credential=lambda _: key)
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.sendall(self._greeting.hello)

    def prove(self) -> None:
        """End the greeting: it knows the key."""
        while self._greeting.session is None:
            self.connection.sendall(self._greeting.feed(self._data()))
        self._session = self._greeting.session

    def send(self, message: dict[str, Any]) -> None:
        self.connection.sendall(self._session.sealer.seal(pack(message)))

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived."""
        bodies = self._session.unsealer.bodies(self._data())
        return [check_from_coordinator(cached_unpack(body)) for body in bodies]

    def _data(self) -> bytes:
        data = self.connection.recv(1 << 18)
        if not data:
            raise RuntimeError(f"the coordinator has hung up on rank {self.rank}")
        return data


cached_unpack = functools.lru_cache(8)(unpack)
"""What all ranks are sent alike is parsed once: it is not the ranks that are measured."""


class SimulatedRanks:
    """All ranks of one attempt, and their coordinator."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.key = secrets.token_bytes(32)
        self.attempt = f"measured {secrets.token_hex(4)}"
        world = World(rank=0, world_size=size, incarnation_id=self.attempt)
        self.port = start_coordinator(world, Secret("environment", self.key))
        self.pid = _started[os.getpid(), self.attempt][0].pid
        self._lines: list[Line] = []
        self._selector = selectors.DefaultSelector()
        self._heard: Counter[str] = Counter()

    def join(self) -> None:
        for first in range(0, self.size, AT_ONCE):
            lines = [
                Line(rank, self.port, key=self.key)
                for rank in range(first, min(first + AT_ONCE, self.size))
            ]
            for line in lines:
                line.prove()
            for line in lines:
                self._selector.register(line.connection, selectors.EVENT_READ, line)
                line.send(
                    {
                        "type": "join", "incarnation_id": self.attempt, "rank": line.rank,
                        "world_size": self.size, "cut_off": [],
                    }
                )  # fmt: skip
            self._lines += lines
        self._wait("all_joined")

    def pause(self) -> None:
        self._lines[0].send({"type": "pause"})
        self._wait("all_parked")
        self._lines[0].send({"type": "resume"})
        self._wait("release")

    # --- the parts of it

    def _wait(self, kind: str) -> None:
        """Until every rank has heard a message of this kind since the last wait."""
        while self._heard[kind] < self.size:
            ready = self._selector.select(LIMIT_S)
            if not ready:
                raise TimeoutError(f"{self._heard[kind]} of {self.size} ranks heard {kind}")
            for key, _ in ready:
                for message in key.data.receive():
                    self._heard[message["type"]] += 1
                    self._answer(key.data, message)
        self._heard.clear()

    def _answer(self, line: Line, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "describe":
            groups = self._groups(line.rank)
            wanted = {key: groups[key] for key in message["groups"]}
            line.send({"type": "members", "groups": wanted})
        elif kind in ("hold", "count"):
            groups = issued_by(line.rank) if kind == "hold" else None  # nothing new
            line.send(
                {
                    "type": "counts", "pause": message["pause"], "round": message["round"],
                    "groups": groups, "in_flight": 0, "allowance": 0,
                }
            )  # fmt: skip

    def _groups(self, rank: int) -> dict[str, Runs]:
        """Key -> ranks."""
        node, place = rank - rank % NODE, rank % NODE
        ranks = (range(self.size), range(node, node + NODE), range(place, self.size, NODE))
        return dict(zip(issued_by(rank), map(runs_of, ranks), strict=True))


def issued_by(rank: int) -> dict[str, int]:
    """Key of each group of a rank -> collectives."""
    return {"world#0": 5000, f"node{rank - rank % NODE}#0": 3000, f"place{rank % NODE}#0": 2000}


def cpu_s(pid: int) -> float:
    """Of all threads, to the nanosecond; the last known of one that has ended."""
    spent_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent_ns += int((task / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def main() -> None:
    chosen = options("What coordination costs with thousands of ranks.")
    size = 128 if chosen.quick else 4096
    allow_descriptors(size + 64)
    ranks = SimulatedRanks(size)
    result: dict[str, float] = {}
    try:
        for phase in (ranks.join, ranks.pause):
            before_s = cpu_s(ranks.pid)
            phase()
            result[f"{phase.__name__}_s_{size}"] = cpu_s(ranks.pid) - before_s
    finally:
        os.kill(ranks.pid, signal.SIGKILL)
    finish(chosen, "ranks_scale: CPU seconds of the coordinator", result)


if __name__ == "__main__":
    main()
