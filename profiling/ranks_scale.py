"""What coordination costs as the number of ranks grows.

The coordinator is the real process; its ranks are simulated, all in the process of this script:
real connections that authenticate, and speak the real protocol with the real framing. Counted are
the CPU seconds of the coordinator's process alone, of all its threads, in each phase of one
attempt:

join     from the first connection until every rank knows that all have joined
agree    one agreement on what every rank has written: a value of its own, for the ranks that commit
pause    a rank is paused, all are parked in two rounds, with three process groups per rank (all
         ranks, those of its node, those at its place on every node), and released
commit   the agreement that tells all ranks what rank 0 has committed: a summary of the manifest of
         this many ranks' files
tell     the same with 64 bytes
stop     a stop barrier: called, proposed for by all, agreed on
leave    every rank leaves

`growth_exponent` is the worst of join, agree, pause, commit and tell: log(cost ratio) / log(size
ratio) from the smallest size to 4,096 ranks; 1 is a cost that grows as the number of ranks does.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import finish, options

from hydroslurm.checkpoint.manifest import FileEntry, begun
from hydroslurm.coordination.authentication import RankGreeting
from hydroslurm.coordination.frames import Sealer, Unsealer, pack, unpack
from hydroslurm.coordination.messages import Runs, check_from_coordinator, runs_of
from hydroslurm.coordination.network import allow_descriptors
from hydroslurm.coordination.rendezvous import _started, start_coordinator
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import World

SIZES = (256, 1024, 2048, 4096)
QUICK_SIZES = (32, 128)
PHASES = ("join", "agree", "pause", "commit", "tell", "stop")
GROWING = ("join", "agree", "pause", "commit", "tell")
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
                    self._join(line)
        self._wait("all_joined")

    def agree(self) -> None:
        for rank in range(self.size):
            index = [10_000_000 + rank, secrets.token_hex(4)]
            value = {"index": index, "took_s": 1.25}
            self._put(rank, self._agree_message("written", value, collect_at=[0, 1, 2, 3]))
        self._wait("agreed")

    def commit(self) -> None:
        files = {
            f"part-{rank:05}.{end}": FileEntry(10_000_000 + rank, secrets.token_hex(4))
            for rank in range(self.size)
            for end in ("safetensors", "json")
        }
        header = begun(step=1000, epoch=1, kind="periodic", meta={}, torch_version="2.13.0")
        committed = replace(header, files=files, world_size=self.size)
        self._tell("commit", {"manifest": committed.summary().to_json()})

    def tell(self) -> None:
        self._tell("tell", "x" * 64)

    def pause(self) -> None:
        self._put(0, {"type": "pause"})
        self._wait("all_parked")
        self._put(0, {"type": "resume"})
        self._wait("release")

    def stop(self) -> None:
        self._put(0, {"type": "call_barrier", "kind": "stop", "message": "SIGTERM"})
        self._wait("barrier_agreed")

    def leave(self) -> None:
        for rank in range(self.size):
            self._put(rank, {"type": "leave", "done": True})
        for line in self._lines:
            line.flush()
            line.connection.close()
        _started[os.getpid(), self.attempt][0].wait(LIMIT_S)

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

    def _join(self, line: Line) -> None:
        line.put(
            {
                "type": "join", "incarnation_id": self.attempt, "rank": line.rank,
                "world_size": self.size, "cut_off": [],
            },
        )  # fmt: skip
        line.flush()

    def _put(self, rank: int, message: dict[str, Any]) -> None:
        self._lines[rank].put(message)

    def _tell(self, topic: str, value: Any) -> None:
        for rank in range(self.size):
            self._put(rank, self._agree_message(topic, None if rank else value))
        self._wait("agreed")

    def _agree_message(
        self, topic: str, value: Any, *, collect_at: list[int] | None = None
    ) -> dict[str, Any]:
        text = pack(value).decode()
        return {
            "type": "agree", "topic": topic, "value": text, "among": None, "collect_at": collect_at,
        }  # fmt: skip

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
            line.put(self._counts(line.rank, message))
        elif kind == "barrier_called":
            number = message["barrier"]
            line.put({"type": "propose", "barrier": number, "safe_point_index": 1000})

    def _groups(self, rank: int) -> dict[str, Runs]:
        """Key -> ranks."""
        node, place = rank - rank % NODE, rank % NODE
        ranks = (
            range(self.size),
            range(node, node + NODE),
            range(place, self.size, NODE),
        )
        return dict(zip(issued_by(rank), map(runs_of, ranks), strict=True))

    def _counts(self, rank: int, message: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "counts",
            "pause": message["pause"],
            "round": message["round"],
            "groups": issued_by(rank) if message["type"] == "hold" else None,  # nothing new
            "in_flight": 0,
            "allowance": 0,
        }


def issued_by(rank: int) -> dict[str, int]:
    """Key of each group of a rank -> collectives."""
    return {"world#0": 5000, f"node{rank - rank % NODE}#0": 3000, f"place{rank % NODE}#0": 2000}


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
    """Figure, with its unit, of one attempt of so many ranks."""
    ranks = SimulatedRanks(size)
    seen: dict[str, float] = {}
    try:
        for phase in PHASES:
            before_s = cpu_s(ranks.pid)
            getattr(ranks, phase)()
            seen[f"{phase}_s"] = cpu_s(ranks.pid) - before_s
        seen["rss_mb"] = rss_mb(ranks.pid)
        before_s = cpu_s(ranks.pid)
        ended_s = children_cpu_s()
        ranks.leave()
        seen["leave_s"] = children_cpu_s() - ended_s - before_s
    except BaseException:
        os.kill(ranks.pid, signal.SIGKILL)
        raise
    return seen


def main() -> None:
    chosen = options("What coordination costs as the number of ranks grows.")
    sizes = QUICK_SIZES if chosen.quick else SIZES
    allow_descriptors(max(sizes) + 64)
    seen = {size: measure(size) for size in sizes}
    first, last = min(sizes), max(sizes)

    def growth(phase: str) -> float:
        ratio = seen[last][f"{phase}_s"] / seen[first][f"{phase}_s"]
        return math.log(ratio) / math.log(last / first)

    exponents = {
        "growth_exponent": max(map(growth, GROWING)),
    }
    result = {f"{name}_{size}": one for size, of in seen.items() for name, one in of.items()}
    title = "ranks_scale: CPU seconds of the coordinator"
    finish(chosen, title, {**exponents, **result})


if __name__ == "__main__":
    main()
