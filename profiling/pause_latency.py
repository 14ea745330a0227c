"""From `kill` to the first operator held, and from `kill` to the first operator released.

Two processes train, one with hydroslurm and one with the incumbent's hooks; this one sends SIGUSR1
and SIGUSR2 at random moments, in turns of ten, while the other process is stopped. All stamps are
CLOCK_MONOTONIC, the sender's taken just before kill().

Then both are paused during backwards of more than two seconds, through one module of many
operators: was it held before the backward ended?
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from harness import PROFILING, EventTail, finish, options, p50_p99, scratch

# isort: split
from processes import Child

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir

TURN = 10
LIMIT_S = 120.0
SENDER_SPIN_NS = 300_000
WAYS = ("hydroslurm", "incumbent")
HELD = (EventKind.FIRST_OPERATOR_HELD, EventKind.LATE_OPERATOR_HELD)


Pause = tuple[float, float]
"""Microseconds from kill() to the first operator held, and to the first one released."""


class Victim(Child):
    """A process of victim.py. What holds and releases it is an event in either way."""

    def __init__(self, way: str, folder: Path, what: str, seconds: float) -> None:
        folder.mkdir()
        environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROFILING)}
        arguments = (way, str(folder), what, str(seconds))
        super().__init__("import victim\nvictim.main()", folder, *arguments, environ=environ)
        self.way = way
        self._path = RunDir(folder).rank_events(0)
        self._events = EventTail(self._path)

    def send(self, signo: int) -> int:
        """Send a signal; CLOCK_MONOTONIC just before.

        The sender is kept out of the figure. Before: it spins for a moment, or its own way out of
        sleep, with cold caches, is measured (some 18 us here). After: it sleeps, for on few cores
        it may sit on the very one that the victim needs to act on the signal.
        """
        awake_ns = time.monotonic_ns() + SENDER_SPIN_NS
        while time.monotonic_ns() < awake_ns:
            os.kill(self.pid, 0)
        sent_ns = time.monotonic_ns()
        os.kill(self.pid, signo)
        time.sleep(0.003)
        return sent_ns

    def held(self, sent_ns: int) -> int:
        """Wait until it is held after a pause that was sent at ``sent_ns``; when."""
        while True:
            held = self._events.until(*HELD, limit_s=LIMIT_S)
            if held.mono_ns >= sent_ns:
                return held.mono_ns

    def released(self) -> int:
        return self._events.until(EventKind.FIRST_OPERATOR_RELEASED, limit_s=LIMIT_S).mono_ns

    def first_held(self, *, after_ns: int, or_else_ns: int) -> int:
        """When it was first held after a moment, in what it has written so far."""
        events = list(read_events(self._path)) if self._path.exists() else []
        held = (event.mono_ns for event in events if event.kind in HELD)
        return min((mono_ns for mono_ns in held if mono_ns > after_ns), default=or_else_ns)


@contextlib.contextmanager
def victims(folder: Path, what: str, seconds: float = 0.0) -> Iterator[list[Victim]]:
    """One process per way; gone after the block."""
    started: list[Victim] = []
    try:
        for way in WAYS:
            victim = Victim(way, folder / f"{way}-{what}", what, seconds)
            started.append(victim)
            victim.expect("ready")
            victim.send(signal.SIGSTOP)
        yield started
    finally:
        for victim in started:
            victim.close()


def pause_while_training(folder: Path, count: int) -> dict[str, list[Pause]]:
    """Pause each way ``count`` times, in turns."""
    seen: dict[str, list[Pause]] = {way: [] for way in WAYS}
    with victims(folder, "train") as both:
        for turn in [min(TURN, count - done) for done in range(0, count, TURN)]:
            for victim in both:
                pause_some(victim, turn, seen[victim.way])
    return seen


def pause_some(victim: Victim, count: int, seen: list[Pause]) -> None:
    """Let one that is stopped go on for so many pauses."""
    victim.send(signal.SIGCONT)
    time.sleep(0.05)
    for _ in range(count):
        time.sleep(random.uniform(0.005, 0.03))
        sent_ns = victim.send(signal.SIGUSR1)
        held_ns = victim.held(sent_ns)
        time.sleep(random.uniform(0.005, 0.03))
        resumed_ns = victim.send(signal.SIGUSR2)
        seen.append(((held_ns - sent_ns) / 1e3, (victim.released() - resumed_ns) / 1e3))
    victim.send(signal.SIGSTOP)


def inside_backward(folder: Path, count: int, seconds: float) -> dict[str, list[bool]]:
    """Pause each way ``count`` times during a backward; was it held before that backward ended?"""
    seen: dict[str, list[bool]] = {way: [] for way in WAYS}
    with victims(folder, "backward", seconds) as both:
        for _ in range(count):
            for victim in both:
                victim.send(signal.SIGCONT)
                victim.say("go")
                victim.expect("begin")
                time.sleep(random.uniform(0.1, 0.6) * seconds)
                sent_ns = victim.send(signal.SIGUSR1)
                if victim.way == "hydroslurm":
                    victim.held(sent_ns)
                    time.sleep(0.05)
                    victim.send(signal.SIGUSR2)
                # the incumbent's module ends first; there is nothing to be held at before that
                ended_ns = int(victim.expect("end"))
                victim.send(signal.SIGUSR2)
                held_ns = victim.first_held(after_ns=sent_ns, or_else_ns=ended_ns)
                seen[victim.way].append(held_ns < ended_ns)
                victim.send(signal.SIGSTOP)
    return seen


def figures(training: dict[str, list[Pause]], inside: dict[str, list[bool]]) -> dict[str, float]:
    """All pauses -> the figures; those of the incumbent carry its name."""
    result: dict[str, float] = {"pauses": len(training["hydroslurm"])}
    for way, pauses in training.items():
        prefix = "" if way == "hydroslurm" else "incumbent_"
        to_held_us, to_released_us = zip(*pauses, strict=True)
        result |= p50_p99(f"{prefix}pause_us", to_held_us)
        result |= p50_p99(f"{prefix}resume_us", to_released_us)
        result[f"{prefix}parked_inside_backward"] = sum(inside[way]) / len(inside[way])
    return result


def main() -> None:
    chosen = options("How long a pause and a resume take, from kill() on.")
    random.seed(0)
    count, backwards, seconds = (6, 1, 0.3) if chosen.quick else (300, 8, 2.5)
    with scratch("pause") as folder:
        training = pause_while_training(folder, count)
        inside = inside_backward(folder, backwards, seconds)
    title = "pause latency: kill -> first operator held, kill -> first operator released"
    finish(chosen, title, figures(training, inside))


if __name__ == "__main__":
    main()
