"""The state machine of an elastic run with simulated members, in simulated time.

The membership is the real one, and so is what a new coordinator makes of the ledger. Members follow
the protocol of ``hydroslurm/elastic/messages.py``: messages stay in order within a connection and
in no other way; connections break; members are preempted with and without a word, and do not always
meet; coordinators are killed at any moment, with all that is on its way.

A generation makes a step whenever all of its ranks would take part in one, whatever the coordinator
believes: two generations that could both train, or an old one after a new one, are seen here.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hydroslurm.elastic import membership
from hydroslurm.elastic.coordinator import restored
from hydroslurm.elastic.folder import CoordinatorOptions
from hydroslurm.elastic.membership import Membership, Transition
from hydroslurm.elastic.roster import Action, Rank, Record, Refused, Send, Size, Timing

STEP_S = 0.5
CALM_S = 60.0
"""Longer than any patience of the coordinator."""
GRACE_S = 30.0
FASTEST_S = 1e-4
NOT_MET = {"ok": False, "pause_s": 0.0, "error": "no route to host"}


def checked(transition: Transition) -> Transition:
    """It ends in a phase that the table names."""

    def then(machine: Membership, now_s: float) -> None:
        transition.then(machine, now_s)
        assert machine.phase in transition.to, (transition, machine.phase)

    return transition._replace(then=then)


membership.TRANSITIONS = {
    phase: tuple(map(checked, transitions)) for phase, transitions in membership.TRANSITIONS.items()
}


def gathered(members: int, *, min: int = 1, max: int, are_agents: bool = False) -> World:
    """So many members have come and are calm; as many as there may be are wanted."""
    world = World(1, Size(min=min, max=max, wanted=max))
    world.membership.are_agents = are_agents
    for _ in range(members):
        world.start()
    world.calm()
    return world


@dataclass
class Process:
    """A rank, by what it has been told. ``serial`` of its connection: what an older one carries
    is lost."""

    rank: Rank
    serial: int = 0
    connected: bool = False
    step: int = 0
    generation: int = 0
    change: int = 0
    waits_behind: int | None = None
    hold_at: int | None = None
    trains: bool = False
    dead: bool = False


class World:
    """A membership and its ranks.

    Args:
        slowest_s: messages take between 0.1 ms and this; ranks come in order where it is 0.1 ms.
        misses: the probability that a rank does not meet the others of a generation.

    Attributes:
        ledger: what a coordinator leaves to the next one.
        cannot_meet: members; generations with one of these do not meet.
        told: when which kind of message was sent to a rank.
        split_brains: how often two generations trained, or ranks of one in different steps.
        processor_s: of the membership.
    """

    def __init__(
        self,
        seed: int,
        size: Size,
        *,
        local_size: int = 1,
        slowest_s: float = FASTEST_S,
        misses: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.options = CoordinatorOptions(size=size, timing=Timing(gather_s=1.0, silent_s=1e9))
        self.local_size, self.slowest_s, self.misses = local_size, slowest_s, misses
        self.cannot_meet: set[str] = set()
        self.now_s = self.processor_s = 0.0
        self.ledger: list[Record] = []
        self.told: list[tuple[float, str]] = []
        self.ranks: dict[Rank, Process] = {}
        self.generations: dict[int, list[Rank]] = {}
        self.messages = self.split_brains = self.steps = self._newest_to_train = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._born = 0
        self._arrives_s: dict[tuple[Rank, int, bool], float] = {}
        self.membership = self._coordinator()
        self._at(0.0, self._tick)
        self._at(0.0, self._train)

    # --- time

    def run(self, for_s: float) -> None:
        """Let simulated time pass."""
        end_s = self.now_s + for_s
        while self._events[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
        self.now_s = end_s

    def calm(self) -> None:
        """Nothing more happens to anyone, until all that has happened is dealt with."""
        self.run(CALM_S)

    def _at(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, call))

    def _tick(self) -> None:
        self._do(lambda: self.membership.tick(self.now_s))
        self._at(0.25, self._tick)

    # --- what happens to a run

    def start(self, delay_s: float = 0.0) -> None:
        """One more member."""
        self._born += 1
        for local in range(self.local_size):
            process = Process((f"m{self._born}", local))
            self.ranks[process.rank] = process
            self._at(delay_s, lambda process=process: self._connect(process))  # type: ignore[misc]

    def kill(self, rank: Rank) -> None:
        """Without a word."""
        process = self.ranks[rank]
        if not process.dead:
            self._end(process)

    def preempt(self, rank: Rank) -> None:
        """With a word, and a little time."""
        self._say(self.ranks[rank], "leave", reason="preempted")
        self._at(GRACE_S, lambda: self.kill(rank))

    def break_connection(self, rank: Rank) -> None:
        """The process lives, and comes back."""
        self._cut(self.ranks[rank])
        self._at(self._delay_s(), lambda: self._connect(self.ranks[rank]))

    def replace_coordinator(self) -> None:
        """All that is on its way is lost; ranks come back to another one, in any order."""
        self.membership = self._coordinator()
        for process in map(self.ranks.get, self.alive()):
            assert process is not None
            process.serial += 1
            process.connected = False
            back_s = self.random.uniform(0.2, 3.0)
            self._at(back_s, lambda process=process: self._connect(process))  # type: ignore[misc]

    def alive(self) -> list[Rank]:
        return [rank for rank, process in self.ranks.items() if not process.dead]

    def lost_members(self) -> int:
        """Who lives, and should train and does not; or trains by the book only."""
        membership, current = self.membership, set(self.membership.current)
        outside = {name for name, _ in self.alive() if name not in current}
        room = max(0, membership.size.wanted - len(current))
        idle = sum(not one.trains for one in self.ranks.values() if one.rank[0] in current)
        return min(room, len(outside)) + idle

    # --- the coordinator

    def act(self, actions: list[Action]) -> None:
        """Do what the membership asks for."""
        for action in actions:
            if isinstance(action, Record):
                self.ledger.append(action)
                if action.kind == "forming":
                    ranks = [(m, n) for m, size in action.data["members"] for n in range(size)]
                    self.generations[action.data["generation"]] = ranks
            elif isinstance(action, Send):
                self.messages += 1
                self.told.append((self.now_s, action.message["type"]))
                self._tell(self.ranks[action.to], action.message)
            else:
                self.ranks[action.rank].connected = False

    def _do(self, call: Callable[[], list[Action]]) -> None:
        begin_s = time.thread_time()
        try:
            actions = call()
        finally:
            self.processor_s += time.thread_time() - begin_s
        self.act(actions)

    def _coordinator(self) -> Membership:
        lines = ({"kind": one.kind, **one.data} for one in self.ledger)
        folder: Any = SimpleNamespace(ledger=lambda: lines)
        membership, epoch = restored(folder, self.options, self.now_s)
        self.ledger.append(Record("coordinator", {"epoch": epoch}))
        return membership

    # --- connections

    def _delay_s(self) -> float:
        return math.exp(self.random.uniform(math.log(FASTEST_S), math.log(self.slowest_s)))

    def _in_order(self, process: Process, up: bool, call: Callable[[], None]) -> None:
        key, serial = (process.rank, process.serial, up), process.serial
        due_s = max(self._arrives_s.get(key, 0.0), self.now_s + self._delay_s())
        self._arrives_s[key] = due_s
        self._at(due_s - self.now_s, lambda: call() if process.serial == serial else None)

    def _end(self, process: Process) -> None:
        """Its node's launcher ends the others of its member a moment later."""
        process.dead, process.trains = True, False
        self._cut(process)
        name, _ = process.rank
        for local in range(self.local_size):
            self._at(self._delay_s(), lambda local=local: self.kill((name, local)))  # type: ignore[misc]

    def _cut(self, process: Process) -> None:
        was, process.connected = process.connected, False
        process.serial += 1
        membership = self.membership

        def noticed() -> None:
            if was and self.membership is membership:
                self._do(lambda: membership.lost(process.rank, self.now_s))

        self._at(self._delay_s(), noticed)

    def _connect(self, process: Process) -> None:
        if process.dead:
            return
        holding = process.generation > 0 and not process.trains

        def join() -> None:
            try:
                self._do(
                    lambda: self.membership.join(
                        process.rank,
                        local_size=self.local_size,
                        node="n",
                        generation=process.generation,
                        holding=holding,
                        now_s=self.now_s,
                    )
                )
                process.connected = True
            except Refused as refusal:
                if refusal.again:
                    self._at(1.0, lambda: self._connect(process))
                else:
                    self._end(process)

        self._in_order(process, True, join)
        if not process.generation:
            self._say(process, "ready")

    def _say(self, process: Process, kind: str, **fields: Any) -> None:
        """A message to the coordinator."""

        def arrive() -> None:
            self.messages += 1
            call = getattr(self.membership, kind)
            self._do(lambda: call(process.rank, **fields, now_s=self.now_s))

        self._in_order(process, True, arrive)

    # --- a rank

    def _tell(self, process: Process, message: dict[str, Any]) -> None:
        self._in_order(process, False, lambda: self._hear(process, message))

    def _hear(self, process: Process, message: dict[str, Any]) -> None:
        kind = message["type"]
        if process.dead or kind == "welcome":
            return
        if kind in ("depart", "finished"):
            self._end(process)
            return
        process.change = message["change"]
        if kind == "hold":
            process.hold_at = None
            process.waits_behind = process.step + (1 if process.trains else 0)
            self._say(process, "proposed", change=process.change, step=process.waits_behind)
        elif kind == "hold_at":
            process.waits_behind, process.hold_at = None, message["step"]
            self._hold(process)
        elif kind == "abort":
            failed = process.trains and self.random.random() < 0.5
            process.waits_behind = process.hold_at = None
            process.trains = False
            self._arrive(process, failed=failed)
        elif kind == "save":
            self._say(process, "saved", change=process.change)
        elif kind == "form":
            self._form(process, message)

    def _form(self, process: Process, message: dict[str, Any]) -> None:
        ranks = self.generations[message["generation"]]
        source = self.ranks[ranks[message["source"]]]
        needs_state = message["rank"] in message["needs"] and not message["fresh"]
        process.waits_behind = process.hold_at = None
        is_cause = process.rank[0] in self.cannot_meet or self.random.random() < self.misses
        if is_cause or (needs_state and source.dead):
            self._say(process, "formed", change=process.change, **NOT_MET)
        elif not self.cannot_meet.intersection(name for name, _ in ranks):
            process.step = source.step if needs_state else process.step
            process.generation, process.trains = message["generation"], True
            self._say(process, "formed", change=process.change, ok=True, pause_s=0.0)

    def _arrive(self, process: Process, *, failed: bool) -> None:
        self._say(
            process,
            "arrived",
            change=process.change,
            step=process.step,
            failed=failed,
            has_state=process.generation > 0,
        )

    def _hold(self, process: Process) -> None:
        if process.hold_at is not None and process.trains and process.step >= process.hold_at:
            process.trains = False
            self._arrive(process, failed=False)

    def _train(self) -> None:
        """Each generation whose ranks all take part makes a step."""
        stepped = []
        for generation, ranks in self.generations.items():
            processes = [self.ranks[rank] for rank in ranks]
            if all(
                one.trains and one.generation == generation and one.waits_behind != one.step
                for one in processes
            ):
                stepped.append(generation)
                self.split_brains += len({one.step for one in processes}) > 1
                for one in processes:
                    one.step += 1
                    self._hold(one)
        self.split_brains += max(0, len(stepped) - 1)
        self.split_brains += sum(one < self._newest_to_train for one in stepped)
        self._newest_to_train = max([self._newest_to_train, *stepped])
        self.steps += bool(stepped)
        self._at(STEP_S, self._train)
