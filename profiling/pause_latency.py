"""From `kill` to the first operator held, and from `kill` to the first operator released.

Two processes train, one with hydroslurm and one with the incumbent's hooks; this one sends SIGUSR1
and SIGUSR2 at random moments, in turns of ten, while the other process is stopped. All stamps are
CLOCK_MONOTONIC, the sender's taken just before kill().

``floor_us``: a C program that does nothing but compute, and whose handler stores the time, is sent
the same signals in turns of its own (busy.c). That is what the machine takes, and what is above it
(``pause_above_floor_us_p50``) is what a pause costs.

Then both are paused during backwards of more than two seconds, through one module
of many operators: was it held before the backward ended? Where the incumbent was not, the end is
what counts for it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import PROFILING, EventTail, finish, options, p50_p99, percentile, scratch

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.rundir import RunDir

TURN = 10
LIMIT_S = 120.0
SENDER_SPIN_NS = 300_000
WAYS = ("hydroslurm", "incumbent")


@dataclass
class Pause:
    """One pause as seen from both sides; CLOCK_MONOTONIC, nanoseconds."""

    sent_ns: int
    held_ns: int
    resume_sent_ns: int = 0
    released_ns: int = 0
    handler_ns: int = 0


@dataclass
class Seen:
    """What was measured of one way."""

    pauses: list[Pause] = field(default_factory=list)
    inside: list[bool] = field(default_factory=list)


class Victim:
    """A process of victim.py."""

    def __init__(self, way: str, folder: Path, what: str, seconds: float) -> None:
        self.way = way
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("victim.py")),
                way,
                str(folder),
                what,
                str(seconds),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.events = EventTail(RunDir(folder).rank_events(0))
        self._stamps = folder / "stamps.jsonl"
        self._stamps_read = 0

    def expect(self, word: str) -> str:
        """The rest of the next line, which must start with the word."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith(word):
            raise RuntimeError(f"{self.way} victim said {line!r}, wanted {word!r}")
        return line.removeprefix(word).strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def signal(self, signo: int) -> int:
        return send(self.process.pid, signo)

    def held(self, sent_ns: int) -> Pause:
        """Wait until it is held after a pause that was sent at ``sent_ns``."""
        if self.way == "incumbent":
            return Pause(sent_ns, self._stamp("held"))
        received = self._event(EventKind.SIGNAL_RECEIVED, after_ns=sent_ns)
        held = self._event(EventKind.FIRST_OPERATOR_HELD, EventKind.LATE_OPERATOR_HELD)
        return Pause(sent_ns, held.mono_ns, handler_ns=received.mono_ns)

    def released(self) -> int:
        if self.way == "incumbent":
            return self._stamp("released")
        return self._event(EventKind.FIRST_OPERATOR_RELEASED).mono_ns

    def first_stamp(self, *, after_ns: int, or_else_ns: int) -> int:
        """When the incumbent was first held after a moment, in what it has written so far."""
        lines = self._stamps.read_text().splitlines() if self._stamps.exists() else []
        held = (row["mono_ns"] for row in map(json.loads, lines) if row["what"] == "held")
        return min((int(mono_ns) for mono_ns in held if mono_ns > after_ns), default=or_else_ns)

    def _event(self, *kinds: EventKind, after_ns: int = 0) -> Event:
        while True:
            event = self.events.until(*kinds, limit_s=LIMIT_S)
            if event.mono_ns >= after_ns:
                return event

    def _stamp(self, what: str) -> int:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            lines = self._stamps.read_text().splitlines() if self._stamps.exists() else []
            if len(lines) > self._stamps_read:
                row: dict[str, Any] = json.loads(lines[self._stamps_read])
                self._stamps_read += 1
                if row["what"] == what:
                    return int(row["mono_ns"])
            else:
                time.sleep(0.001)
        raise TimeoutError(f"the incumbent was not {what} within {LIMIT_S:g} s")


def send(pid: int, signo: int) -> int:
    """Send a signal; CLOCK_MONOTONIC just before.

    The sender is kept out of the figure. Before: it spins for a moment, or its own way out of
    sleep, with cold caches, is measured (some 18 us here). After: it sleeps, for on few cores it
    may sit on the very one that the victim needs to act on the signal.
    """
    awake_ns = time.monotonic_ns() + SENDER_SPIN_NS
    while time.monotonic_ns() < awake_ns:
        os.kill(pid, 0)
    sent_ns = time.monotonic_ns()
    os.kill(pid, signo)
    time.sleep(0.003)
    return sent_ns


class Floor:
    """The C program that does nothing but compute."""

    def __init__(self, program: Path, folder: Path) -> None:
        file = folder / "stamp"
        self._process = subprocess.Popen([program, file], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{program} did not start")
        self._stamp = memoryview(mmap.mmap(os.open(file, os.O_RDWR), 8)).cast("q")
        send(self._process.pid, signal.SIGSTOP)

    def handler_us(self, count: int) -> list[float]:
        """What so many signals took from kill() to the first line of its handler."""
        send(self._process.pid, signal.SIGCONT)
        time.sleep(0.05)
        took_us = []
        for _ in range(count):
            time.sleep(random.uniform(0.005, 0.03))
            sent_ns = send(self._process.pid, signal.SIGUSR1)
            while self._stamp[0] < sent_ns:
                time.sleep(0.001)
            took_us.append(_us(sent_ns, self._stamp[0]))
        send(self._process.pid, signal.SIGSTOP)
        return took_us

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def compile_busy(folder: Path) -> Path:
    program = folder / "busy"
    source = PROFILING / "busy.c"
    subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)
    return program


@contextlib.contextmanager
def victims(folder: Path, what: str, seconds: float = 0.0) -> Iterator[list[Victim]]:
    """One process per way; gone after the block."""
    started: list[Victim] = []
    try:
        for way in WAYS:
            victim = Victim(way, folder / f"{way}-{what}", what, seconds)
            started.append(victim)
            victim.expect("ready")
            victim.signal(signal.SIGSTOP)
        yield started
    finally:
        for victim in started:
            victim.process.kill()
            victim.process.communicate()


def pause_while_training(folder: Path, count: int) -> tuple[dict[str, Seen], list[float]]:
    """Pause each way ``count`` times, in turns; and what the same signals took to the floor's
    handler (us)."""
    seen = {way: Seen() for way in WAYS}
    floor, floor_us = Floor(compile_busy(folder), folder), list[float]()
    try:
        with victims(folder, "train") as both:
            for turn in [min(TURN, count - done) for done in range(0, count, TURN)]:
                for victim in both:
                    pause_some(victim, turn, seen[victim.way])
                floor_us += floor.handler_us(turn)
    finally:
        floor.close()
    return seen, floor_us


def pause_some(victim: Victim, count: int, seen: Seen) -> None:
    """Let one that is stopped go on for so many pauses."""
    victim.signal(signal.SIGCONT)
    time.sleep(0.05)
    for _ in range(count):
        time.sleep(random.uniform(0.005, 0.03))
        pause = victim.held(victim.signal(signal.SIGUSR1))
        time.sleep(random.uniform(0.005, 0.03))
        pause.resume_sent_ns = victim.signal(signal.SIGUSR2)
        pause.released_ns = victim.released()
        seen.pauses.append(pause)
    victim.signal(signal.SIGSTOP)


def pause_inside_backward(folder: Path, count: int, seconds: float) -> dict[str, Seen]:
    """Pause each way ``count`` times during a backward; was it held before that backward ended?"""
    seen = {way: Seen() for way in WAYS}
    with victims(folder, "backward", seconds) as both:
        for _ in range(count):
            for victim in both:
                victim.signal(signal.SIGCONT)
                victim.go()
                victim.expect("begin")
                time.sleep(random.uniform(0.1, 0.6) * seconds)
                sent_ns = victim.signal(signal.SIGUSR1)
                if victim.way == "hydroslurm":
                    seen[victim.way].pauses.append(victim.held(sent_ns))
                    time.sleep(0.05)
                    victim.signal(signal.SIGUSR2)
                # the incumbent's module ends first; there is nothing to be held at before that
                ended_ns = int(victim.expect("end"))
                victim.signal(signal.SIGUSR2)
                if victim.way == "incumbent":
                    seen[victim.way].pauses.append(
                        Pause(sent_ns, victim.first_stamp(after_ns=sent_ns, or_else_ns=ended_ns))
                    )
                seen[victim.way].inside.append(seen[victim.way].pauses[-1].held_ns < ended_ns)
                victim.signal(signal.SIGSTOP)
    return seen


def figures(training: dict[str, Seen], backward: dict[str, Seen]) -> dict[str, float]:
    """All pauses -> the figures; those of the incumbent carry its name."""
    result: dict[str, float] = {"pauses": len(training["hydroslurm"].pauses)}
    for way in WAYS:
        prefix = "" if way == "hydroslurm" else "incumbent_"
        pauses, inside = training[way].pauses, backward[way].inside
        result |= p50_p99(f"{prefix}pause_us", _paused_us(training[way]))
        result |= p50_p99(
            f"{prefix}resume_us", [_us(p.resume_sent_ns, p.released_ns) for p in pauses]
        )
        result[f"{prefix}parked_inside_backward"] = sum(inside) / len(inside)
        result |= p50_p99(f"{prefix}pause_in_backward_us", _paused_us(backward[way]))
    handlers = [_us(p.sent_ns, p.handler_ns) for p in training["hydroslurm"].pauses]
    result |= p50_p99("handler_us", handlers)
    return result


def with_floor(result: dict[str, float], floor_us: Sequence[float]) -> dict[str, float]:
    above_us = result["pause_us_p50"] - percentile(floor_us, 50)
    return {**result, **p50_p99("floor_us", floor_us), "pause_above_floor_us_p50": above_us}


def _paused_us(seen: Seen) -> list[float]:
    return [_us(pause.sent_ns, pause.held_ns) for pause in seen.pauses]


def _us(begin_ns: int, end_ns: int) -> float:
    return (end_ns - begin_ns) / 1e3


def main() -> None:
    chosen = options("How long a pause and a resume take, from kill() on.")
    random.seed(0)
    with scratch("pause", chosen) as folder:
        training, floor_us = pause_while_training(folder, 6 if chosen.quick else 300)
        backward = pause_inside_backward(
            folder, 1 if chosen.quick else 8, 0.3 if chosen.quick else 2.5
        )
    finish(
        chosen,
        "pause latency: kill -> first operator held, kill -> first operator released",
        {
            **with_floor(figures(training, backward), floor_us),
            "backwards": len(backward["hydroslurm"].inside),
        },
    )


if __name__ == "__main__":
    main()
