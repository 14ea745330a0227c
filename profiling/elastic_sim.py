"""Drive the state machine of an elastic run with 10 to 10,000 members, in simulated time.

    python profiling/elastic_sim.py --json

The membership is the real one, and so is what a new coordinator makes of the ledger. Members are
simulated, by the protocol of ``hydroslurm/elastic/messages.py``: messages take 0.1 to 50 ms, stay
in order within a connection and in no other way; connections break; members are preempted with and
without a word; coordinators are killed at any moment, with all that is on its way.

A generation makes a step whenever all of its ranks would take part in one, whatever the coordinator
believes: so two generations that could both train, or an old one after a new one, are seen here
(``split_brains``). A member that lives, was not sent away, has waited long enough and is not part
of the generation although there is room for it, is lost (``members_lost``).

``change_s_10000`` is the coordinator's processor time per change. The storms are for the tests.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from harness import finish, options

from hydroslurm.elastic.coordinator import restored
from hydroslurm.elastic.folder import CoordinatorOptions, ElasticFolder
from hydroslurm.elastic.membership import Membership
from hydroslurm.elastic.roster import Action, Close, Rank, Record, Refused, Send, Size, Timing

STEP_S = 0.5
CALM_S = 60.0
"""After the last disturbance: longer than any patience of the coordinator."""


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
    asked_behind: int | None = None
    hold_at: int | None = None
    trains: bool = False
    dead: bool = False


class Ledger:
    """What a coordinator leaves to the next one."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def ledger(self) -> Iterator[dict[str, Any]]:
        return iter(self.lines)


class Simulation:
    """One run; see the module."""

    def __init__(self, seed: int, size: Size) -> None:
        self.random = random.Random(seed)
        self.options = CoordinatorOptions(size=size, timing=Timing(gather_s=1.0, silent_s=1e9))
        self.now_s = 0.0
        self.ledger = Ledger()
        self.processes: dict[Rank, Process] = {}
        self.worlds: dict[int, list[Rank]] = {}
        self.messages = self.split_brains = self.newest_step_of = 0
        self.steps = 0
        self.processor_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._born = self._epoch = 0
        self._arrives_s: dict[tuple[Rank, int, bool], float] = {}
        self.membership = self._coordinator()
        self.at(0.0, self._tick)
        self.at(0.0, self._train)

    # --- time

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, call))

    def run(self, for_s: float) -> None:
        end_s = self.now_s + for_s
        while self._events[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
        self.now_s = end_s

    def _tick(self) -> None:
        self._do(lambda: self.membership.tick(self.now_s))
        self.at(0.25, self._tick)

    def _coordinator(self) -> Membership:
        folder = cast(ElasticFolder, self.ledger)
        membership, epoch = restored(folder, self.options, self.now_s)
        self._epoch = epoch
        self.ledger.lines.append({"kind": "coordinator", "epoch": epoch})
        return membership

    # --- what happens to a run

    def start(self, delay_s: float = 0.0) -> None:
        """One more member."""
        self._born += 1
        process = Process((f"m{self._born}", 0))
        self.processes[process.rank] = process
        self.at(delay_s, lambda: self._connect(process))

    def kill(self, process: Process) -> None:
        """Without a word."""
        process.dead, process.trains = True, False
        self._cut(process)

    def preempt(self, process: Process) -> None:
        """With a word, and a little time."""
        self.say(process, "leave", reason="preempted")

        def expired() -> None:
            if not process.dead:
                self.kill(process)

        self.at(30.0, expired)

    def break_connection(self, process: Process) -> None:
        """The process lives, and comes back."""
        self._cut(process)
        self.at(self._delay_s(), lambda: self._connect(process))

    def replace_coordinator(self) -> None:
        """All that is on its way is lost; ranks come back to another one, in any order."""
        self.membership = self._coordinator()
        for process in self.processes.values():
            if not process.dead:
                process.serial += 1
                process.connected = False
                back_s = self.random.uniform(0.2, 3.0)
                self.at(back_s, lambda process=process: self._connect(process))  # type: ignore[misc]

    def alive(self) -> list[Process]:
        return [one for one in self.processes.values() if not one.dead]

    # --- connections

    def _delay_s(self) -> float:
        return math.exp(self.random.uniform(math.log(1e-4), math.log(0.05)))

    def _in_order(self, process: Process, up: bool, call: Callable[[], None]) -> None:
        key, serial = (process.rank, process.serial, up), process.serial
        due_s = max(self._arrives_s.get(key, 0.0), self.now_s + self._delay_s())
        self._arrives_s[key] = due_s
        self.at(due_s - self.now_s, lambda: call() if process.serial == serial else None)

    def _cut(self, process: Process) -> None:
        was, process.connected = process.connected, False
        process.serial += 1
        membership = self.membership

        def noticed() -> None:
            if was and self.membership is membership:
                self._do(lambda: self.membership.lost(process.rank, self.now_s))

        self.at(self._delay_s(), noticed)

    def _connect(self, process: Process) -> None:
        if process.dead:
            return
        holding = process.generation > 0 and not process.trains

        def join() -> None:
            try:
                self._do(
                    lambda: self.membership.join(
                        process.rank,
                        local_size=1,
                        node="n",
                        generation=process.generation,
                        holding=holding,
                        now_s=self.now_s,
                    )
                )
                process.connected = True
            except Refused as refusal:
                if refusal.again:
                    self.at(1.0, lambda: self._connect(process))
                else:
                    process.dead, process.trains = True, False

        self._in_order(process, True, join)
        if not process.generation:
            self.say(process, "ready")

    def say(self, process: Process, kind: str, **fields: Any) -> None:
        """A message to the coordinator."""

        def arrive() -> None:
            self.messages += 1
            call = getattr(self.membership, kind)
            self._do(lambda: call(process.rank, **fields, now_s=self.now_s))

        self._in_order(process, True, arrive)

    def _do(self, call: Callable[[], list[Action]]) -> None:
        begin_s = time.thread_time()
        try:
            actions = call()
        finally:
            self.processor_s += time.thread_time() - begin_s
        for action in actions:
            if isinstance(action, Record):
                self.ledger.lines.append({"kind": action.kind, **action.data})
                if action.kind == "forming":
                    members = action.data["members"]
                    self.worlds[action.data["generation"]] = [(name, 0) for name, _ in members]
            elif isinstance(action, Send):
                self.messages += 1
                self._tell(self.processes[action.to], action.message)
            elif isinstance(action, Close):
                self.processes[action.rank].connected = False

    # --- a rank

    def _tell(self, process: Process, message: dict[str, Any]) -> None:
        self._in_order(process, False, lambda: self._hear(process, message))

    def _hear(self, process: Process, message: dict[str, Any]) -> None:
        kind = message["type"]
        if process.dead or kind == "welcome":
            return
        if kind in ("depart", "finished"):
            process.dead, process.trains = True, False
            self._cut(process)
            return
        process.change = message["change"]
        if kind == "hold":
            process.hold_at = None
            process.asked_behind = process.step + (1 if process.trains else 0)
            self.say(process, "proposed", change=process.change, step=process.asked_behind)
        elif kind == "hold_at":
            process.asked_behind, process.hold_at = None, message["step"]
            self._hold(process)
        elif kind == "abort":
            failed = process.trains and self.random.random() < 0.5
            process.asked_behind = process.hold_at = None
            process.trains = False
            self._arrive(process, failed=failed)
        elif kind == "save":
            self.say(process, "saved", change=process.change)
        elif kind == "form":
            self._form(process, message)

    def _form(self, process: Process, message: dict[str, Any]) -> None:
        ranks = self.worlds[message["generation"]]
        if message["rank"] in message["needs"] and not message["fresh"]:
            source = self.processes[ranks[message["source"]]]
            if source.dead:  # nobody to get the state from
                self.say(process, "formed", change=process.change, ok=False, pause_s=0.0)
                return
            process.step = source.step
        process.generation = message["generation"]
        process.asked_behind = process.hold_at = None
        process.trains = True
        self.say(process, "formed", change=process.change, ok=True, pause_s=0.0)

    def _arrive(self, process: Process, *, failed: bool) -> None:
        self.say(
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
        for generation, ranks in self.worlds.items():
            processes = [self.processes[rank] for rank in ranks]
            if all(
                one.trains and one.generation == generation and one.asked_behind != one.step
                for one in processes
            ):
                stepped.append(generation)
                if len({one.step for one in processes}) > 1:
                    self.split_brains += 1  # ranks of one generation in different steps
                for one in processes:
                    one.step += 1
                    self._hold(one)
        self.split_brains += max(0, len(stepped) - 1)
        self.split_brains += sum(one < self.newest_step_of for one in stepped)
        self.newest_step_of = max([self.newest_step_of, *stepped])
        self.steps += bool(stepped)
        self.at(STEP_S, self._train)

    # --- the end

    def lost_members(self) -> int:
        """Who lives, and should train and does not; or trains by the book only."""
        membership = self.membership
        current = set(membership.current)
        outside = sum(one.rank[0] not in current for one in self.alive())
        room = max(0, membership.size.wanted - len(current))
        ghosts = sum(self.processes[(name, 0)].dead for name in current)
        idle = sum(not one.trains for one in self.alive() if one.rank[0] in current)
        return min(room, outside) + ghosts + idle


def cost_of_changes(members: int, *, seed: int = 1, changes: int = 6) -> tuple[float, float]:
    """Processor seconds and messages per change, of leaves, deaths and joins one by one."""
    simulation = Simulation(seed, Size(min=1, max=2 * members, wanted=members))
    for _ in range(members):
        simulation.start(simulation.random.random())
    simulation.run(10.0)
    assert len(simulation.membership.current) == members, simulation.membership.current[:3]
    seconds, messages = [], []
    # a collection of cycles would walk through all that the simulator keeps, in a call that happens
    # to allocate: at 10,000 members a third of the time was that
    gc.collect()
    gc.disable()
    try:
        for number in range(changes):
            before_s, before = simulation.processor_s, simulation.messages
            generation = simulation.membership.generation
            one = simulation.processes[(simulation.membership.current[number], 0)]
            change = (
                lambda one=one: simulation.preempt(one),
                lambda one=one: simulation.kill(one),
                simulation.start,
            )[number % 3]
            change()
            simulation.run(5.0)
            assert simulation.membership.generation == generation + 1, simulation.membership.change
            seconds.append(simulation.processor_s - before_s)
            messages.append(simulation.messages - before)
    finally:
        gc.enable()
    assert simulation.lost_members() == simulation.split_brains == 0
    return statistics.median(seconds), statistics.median(messages)


def storm(members: int, *, seed: int, disturbances: int, between_s: float) -> Simulation:
    """A preemption trace: bursts of members that go and come, broken connections, coordinators."""
    simulation = Simulation(seed, Size(min=max(1, members // 4), max=members, wanted=members))
    for _ in range(members):
        simulation.start(simulation.random.random())
    for _ in range(disturbances):
        simulation.run(simulation.random.expovariate(1 / between_s))
        what, alive = simulation.random.random(), simulation.alive()
        burst = simulation.random.choice([1, 1, 1, max(1, members // 10)])
        chosen = simulation.random.sample(alive, min(len(alive), burst))
        for one in chosen:
            if what < 0.3:
                simulation.kill(one)
            elif what < 0.6:
                simulation.preempt(one)
            elif what < 0.7 and burst == 1:
                simulation.break_connection(one)
        if 0.7 <= what < 0.8:
            simulation.replace_coordinator()
        for _ in range(members - len(simulation.alive())):
            simulation.start(simulation.random.uniform(0.0, 20.0))
    for _ in range(members - len(simulation.alive())):
        simulation.start()
    simulation.run(CALM_S)
    for _ in range(members - len(simulation.alive())):
        simulation.start()
    simulation.run(CALM_S)
    return simulation


def main() -> None:
    chosen = options(__doc__)
    members = 100 if chosen.quick else 10_000
    seconds, messages = cost_of_changes(members)
    found = {f"change_s_{members}": seconds, f"messages_per_change_{members}": messages}
    finish(chosen, "changes of size, simulated", found)


if __name__ == "__main__":
    main()
