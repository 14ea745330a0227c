"""What coordination costs as the number of ranks grows.

The coordinator is the real process; its ranks are simulated, all in the process of this script:
real connections that authenticate, and speak the real protocol with the real framing. Counted are
the CPU seconds of the coordinator's process alone, of all its threads, in each phase of one
attempt:

join     from the first connection until every rank knows that all have joined
agree    one agreement: a value of its own of every rank, as after the writing of a checkpoint
pause    a rank is paused, all are parked in two rounds, with three process groups per rank (all
         ranks, those of its node, those at its place on every node), and released
stop     a stop barrier: called, proposed for by all, agreed on
commit   the agreement that tells all ranks what rank 0 has committed
leave    every rank leaves

`growth_exponent` is the worst of join, agree, pause and commit: log(cost ratio) / log(size ratio)
from the smallest size to 4,096 ranks. 1 is a cost that grows as the number of ranks does.
"""

from __future__ import annotations

import functools
import math
import os
import re
import resource
import secrets
import selectors
import signal
import socket
from collections import Counter, deque
from pathlib import Path
from typing import Any

from harness import finish, options

from hydroslurm.coordination import frames
from hydroslurm.coordination.authentication import RankGreeting
from hydroslurm.coordination.frames import Sealer, Unsealer, pack
from hydroslurm.coordination.messages import Runs, check_from_coordinator, runs_of
from hydroslurm.coordination.network import allow_descriptors
from hydroslurm.coordination.rendezvous import _started, start_coordinator
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import World

SIZES = (256, 1024, 2048, 4096)
QUICK_SIZES = (32, 128)
PHASES = ("join", "agree", "pause", "commit")
"""Those of which the growth is told."""
NODE = 8
AT_ONCE = 128
"""Greetings under way: more than a coordinator can answer, fewer than it closes as idle."""
LIMIT_S = 300.0

# what all ranks are sent alike is parsed once: it is not the ranks that are measured
frames.unpack = functools.lru_cache(8)(frames.unpack)


class SimulatedRank:
    """One connection."""

    def __init__(self, rank: int, connection: socket.socket, greeting: RankGreeting) -> None:
        self.rank = rank
        self.connection = connection
        self.greeting: RankGreeting | None = greeting
        self.sealer: Sealer | None = None
        self.unsealer: Unsealer | None = None

    def send(self, message: dict[str, Any]) -> None:
        assert self.sealer is not None
        self.connection.sendall(self.sealer.seal(pack(message)))

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived; the proof is sent as soon as it can be made."""
        data = self.connection.recv(1 << 18)
        if not data:
            raise RuntimeError(f"the coordinator has hung up on rank {self.rank}")
        if self.greeting is not None:
            proof = self.greeting.feed(data)
            if proof is None:
                return []
            self.connection.sendall(proof)
            session = self.greeting.session
            assert session is not None
            self.sealer, self.unsealer = Sealer(session.to_coordinator), Unsealer(session.to_rank)
            self.greeting, data = None, session.rest
        assert self.unsealer is not None
        return [check_from_coordinator(one) for one in self.unsealer.feed(data)]


class SimulatedRanks:
    """All ranks of one attempt, and their coordinator."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.key = secrets.token_bytes(32)
        self.attempt = f"measured {secrets.token_hex(4)}"
        world = World(rank=0, world_size=size, incarnation_id=self.attempt)
        self.port = start_coordinator(world, Secret("environment", self.key))
        self.pid = _started[os.getpid(), self.attempt][0].pid
        self.ranks: list[SimulatedRank] = []
        self._selector = selectors.DefaultSelector()
        self._heard: Counter[str] = Counter()
        self._issued = [
            {key: issued for key, (_, issued) in self._groups(rank).items()} for rank in range(size)
        ]

    def join(self) -> None:
        waiting, greeting = deque(range(self.size)), set[int]()
        while waiting or greeting:
            while waiting and len(greeting) < AT_ONCE:
                rank = waiting.popleft()
                greeting.add(rank)
                self._connect(rank)
            for key, _ in self._selector.select(LIMIT_S):
                one: SimulatedRank = key.data
                self._hear(one)
                if one.rank in greeting and one.sealer is not None:
                    greeting.discard(one.rank)
                    one.send(self._join_message(one.rank))
        self._wait("all_joined")

    def agree(self) -> None:
        for one in self.ranks:
            index = [10_000_000 + one.rank, secrets.token_hex(4)]
            value = {"index": index, "took_s": 1.25}
            one.send(self._agree_message("written", value, collect_at=[0, 1]))
        self._wait("agreed")

    def commit(self) -> None:
        text = "x" * (285 * self.size)
        for one in self.ranks:
            one.send(self._agree_message("commit", None if one.rank else {"manifest": text}))
        self._wait("agreed")

    def pause(self) -> None:
        self.ranks[0].send({"type": "pause"})
        self._wait("all_parked")
        self.ranks[0].send({"type": "resume"})
        self._wait("release")

    def stop(self) -> None:
        self.ranks[0].send({"type": "call_barrier", "kind": "stop", "message": "SIGTERM"})
        self._wait("barrier_agreed")

    def leave(self) -> None:
        for one in self.ranks:
            one.send({"type": "leave", "done": True})
            one.connection.close()
        _started[os.getpid(), self.attempt][0].wait(LIMIT_S)

    # --- the parts of it

    def _connect(self, rank: int) -> None:
        greeting = RankGreeting(attempt=self.attempt, key=self.key, munge=None)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(greeting.hello)
        one = SimulatedRank(rank, connection, greeting)
        self.ranks.append(one)
        self._selector.register(connection, selectors.EVENT_READ, one)

    def _join_message(self, rank: int) -> dict[str, Any]:
        return {
            "type": "join",
            "incarnation_id": self.attempt,
            "rank": rank,
            "world_size": self.size,
            "cut_off": [],
        }

    def _agree_message(
        self, topic: str, value: Any, *, collect_at: list[int] | None = None
    ) -> dict[str, Any]:
        text = pack(value).decode()
        return {
            "type": "agree", "topic": topic, "value": text, "among": None, "collect_at": collect_at,
        }  # fmt: skip

    def _wait(self, kind: str) -> None:
        """Until every rank has heard a message of this kind once more."""
        self._heard.clear()
        while self._heard[kind] < self.size:
            ready = self._selector.select(LIMIT_S)
            if not ready:
                raise TimeoutError(f"{self._heard[kind]} of {self.size} ranks heard {kind}")
            for key, _ in ready:
                self._hear(key.data)

    def _hear(self, one: SimulatedRank) -> None:
        for message in one.receive():
            kind = message["type"]
            self._heard[kind] += 1
            if kind == "describe":
                groups = self._groups(one.rank)
                wanted = {key: groups[key][0] for key in message["groups"]}
                one.send({"type": "members", "groups": wanted})
            elif kind in ("hold", "count"):
                one.send(self._counts(one.rank, message))
            elif kind == "barrier_called":
                one.send(
                    {"type": "propose", "barrier": message["barrier"], "safe_point_index": 1000}
                )

    def _groups(self, rank: int) -> dict[str, tuple[Runs, int]]:
        """Key -> ranks, issued."""
        node, place = rank - rank % NODE, rank % NODE
        return {
            "world#0": (runs_of(range(self.size)), 5000),
            f"node{node}#0": (runs_of(range(node, node + NODE)), 3000),
            f"place{place}#0": (runs_of(range(place, self.size, NODE)), 2000),
        }

    def _counts(self, rank: int, message: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "counts",
            "pause": message["pause"],
            "round": message["round"],
            "groups": self._issued[rank],
            "in_flight": 0,
            "allowance": 0,
        }


def cpu_s(pid: int) -> float:
    """Of all threads, to the nanosecond; the last known of one that has ended."""
    spent_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent_ns += int((task / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def children_cpu_s() -> float:
    """Of all that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rss_mb(pid: int) -> float:
    """The most that it ever held."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else math.nan


def measure(size: int) -> dict[str, float]:
    """Phase -> CPU seconds, and ``rss_mb``, of one attempt of so many ranks."""
    ranks = SimulatedRanks(size)
    seen: dict[str, float] = {}
    try:
        for phase in ("join", "agree", "pause", "commit", "stop"):
            before_s = cpu_s(ranks.pid)
            getattr(ranks, phase)()
            seen[phase] = cpu_s(ranks.pid) - before_s
        seen["rss_mb"] = rss_mb(ranks.pid)
        before_s = cpu_s(ranks.pid)
        ended_s = children_cpu_s()
        ranks.leave()
        seen["leave"] = children_cpu_s() - ended_s - before_s
    except BaseException:
        os.kill(ranks.pid, signal.SIGKILL)
        raise
    return seen


def main() -> None:
    chosen = options(__doc__.partition("\n")[0])
    sizes = QUICK_SIZES if chosen.quick else SIZES
    allow_descriptors(max(sizes) + 64)
    result: dict[str, Any] = {}
    seen = {size: measure(size) for size in sizes}
    for size, costs in seen.items():
        for phase, cost in costs.items():
            unit = "" if phase == "rss_mb" else "_s"
            result[f"{phase}{unit}_{size}"] = cost
    first, last = min(sizes), max(sizes)
    result["growth_exponent"] = max(
        math.log(seen[last][phase] / seen[first][phase]) / math.log(last / first)
        for phase in PHASES
    )
    finish(chosen, "ranks_scale: CPU seconds of the coordinator", result)


if __name__ == "__main__":
    main()
