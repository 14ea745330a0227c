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
from collections import Counter, deque
from pathlib import Path
from typing import Any

from harness import finish, options

from hydroslurm.coordination.authentication import RankGreeting
from hydroslurm.coordination.frames import Sealer, Unsealer, pack, unpack
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
    """The connection of one rank."""

    def __init__(self, rank: int, connection: socket.socket, greeting: RankGreeting) -> None:
        self.rank = rank
        self.connection = connection
        self.sealer: Sealer | None = None
        self._greeting = greeting
        self._unsealer: Unsealer | None = None
        self._unsent: list[bytes] = []

    def put(self, message: dict[str, Any]) -> None:
        self._unsent.append(pack(message))

    def flush(self) -> None:
        """Send what was put."""
        assert self.sealer is not None
        unsent, self._unsent = self._unsent, []
        if unsent:
            self.connection.sendall(b"".join(map(self.sealer.seal, unsent)))

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived; the proof is sent as soon as it can be made."""
        data = self.connection.recv(1 << 18)
        if not data:
            raise RuntimeError(f"the coordinator has hung up on rank {self.rank}")
        if self._unsealer is None:
            proof = self._greeting.feed(data)
            if proof is None:
                return []
            self.connection.sendall(proof)
            session = self._greeting.session
            assert session is not None
            self.sealer, self._unsealer = Sealer(session.to_coordinator), Unsealer(session.to_rank)
            data = session.rest
        return [check_from_coordinator(cached_unpack(body)) for body in self._unsealer.bodies(data)]


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
        waiting, greeting = deque(range(self.size)), set[Line]()
        while waiting or greeting:
            while waiting and len(greeting) < AT_ONCE:
                greeting.add(self._connect(waiting.popleft()))
            for key, _ in self._selector.select(LIMIT_S):
                line: Line = key.data
                self._hear(line)
                if line in greeting and line.sealer is not None:
                    greeting.discard(line)
                    line.put(
                        {
                            "type": "join", "incarnation_id": self.attempt, "rank": line.rank,
                            "world_size": self.size, "cut_off": [],
                        },
                    )  # fmt: skip
                    line.flush()
        self._wait("all_joined")

    def pause(self) -> None:
        self._lines[0].put({"type": "pause"})
        self._wait("all_parked")
        self._lines[0].put({"type": "resume"})
        self._wait("release")

    # --- the parts of it

    def _connect(self, rank: int) -> Line:
        greeting = RankGreeting(attempt=self.attempt, key=self.key, munge=None)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(greeting.hello)
        line = Line(rank, connection, greeting)
        self._lines.append(line)
        self._selector.register(connection, selectors.EVENT_READ, line)
        return line

    def _wait(self, kind: str) -> None:
        """Until every rank has heard a message of this kind since the last wait."""
        for line in self._lines:
            line.flush()
        while self._heard[kind] < self.size:
            ready = self._selector.select(LIMIT_S)
            if not ready:
                raise TimeoutError(f"{self._heard[kind]} of {self.size} ranks heard {kind}")
            for key, _ in ready:
                self._hear(key.data)
        self._heard.clear()

    def _hear(self, line: Line) -> None:
        for message in line.receive():
            self._heard[message["type"]] += 1
            self._answer(line, message)
        if line.sealer is not None:
            line.flush()

    def _answer(self, line: Line, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "describe":
            groups = self._groups(line.rank)
            wanted = {key: groups[key] for key in message["groups"]}
            line.put({"type": "members", "groups": wanted})
        elif kind in ("hold", "count"):
            groups = issued_by(line.rank) if kind == "hold" else None  # nothing new
            line.put(
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
