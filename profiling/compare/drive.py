"""The storm of preemptions that every peer meets, the same moments for the same seed; take one peer
through it, and write down what it did. Nothing is told by the peer itself: the moments are those of
observer.py, witness.py and of this process, on the one clock of the machine."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from attempts import read_attempts
from harness import SLURM_LIMIT_S
from peers import Peer
from processes import wait_until
from slurm_jobs import Job, Place

Kind = Literal["suspend", "preempt", "requeue", "failure"]
KINDS: tuple[Kind, ...] = get_args(Kind)
START_LIMIT_S = 120.0
WATCH_S = 9.0
"""So long after a preemption this process looks for new saves, as often as it can."""


@dataclass(frozen=True)
class Event:
    """One preemption.

    Attributes:
        at_s: since the first step of the training.
        kind: ``suspend`` and, ``hold_s`` later, resume; ``preempt`` by an urgent job; ``requeue``
            by an operator; ``failure`` of the node.
    """

    at_s: float
    kind: Kind
    hold_s: float = 0.0


def storm(
    *,
    seed: int,
    counts: Mapping[Kind, int],
    mean_gap_s: float,
    hold_s: tuple[float, float] = (2.5, 4.0),
    away_s: float = 18.0,
) -> tuple[Event, ...]:
    """Events in the order of time.

    The gaps are those of a Poisson process (exponential). A gap begins when the event before is
    usually over: a second after the resume of a suspend, ``away_s`` after a preemption. Otherwise
    events would fall on jobs that wait in the queue, and harm the slow less than the quick.

    Args:
        counts: how many of each kind; their order is the seed's.
    """
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS for _ in range(counts.get(kind, 0))]
    chance.shuffle(kinds)
    events, now_s = [], 0.0
    for kind in kinds:
        now_s += chance.expovariate(1 / mean_gap_s)
        held_s = chance.uniform(*hold_s) if kind == "suspend" else 0.0
        events.append(Event(now_s, kind, held_s))
        now_s += held_s + 1.0 if kind == "suspend" else away_s
    return tuple(events)


@dataclass
class Strike:
    """What one event was to a job.

    Attributes:
        state: what Slurm said of the job just before; an event that finds it in the queue is not
            one to it.
        sent_ns, resume_sent_ns: just before the command was started.
        saves: moments at which something that a later attempt could load was there first.
    """

    event: Event
    state: str
    sent_ns: int = 0
    resume_sent_ns: int = 0
    saves: list[int] = field(default_factory=list)

    @property
    def struck(self) -> bool:
        return self.state == "RUNNING"


@dataclass(frozen=True)
class Course:
    """A peer's way through the storm.

    Attributes:
        failure: why it did not reach its end; empty when it did.
        by_hand: what somebody had to do for it to go on.
    """

    strikes: tuple[Strike, ...]
    submitted_ns: int
    done_ns: int
    by_hand: tuple[str, ...]
    failure: str = ""


def through(
    peer: Peer, place: Place, folder: Path, *, events: Sequence[Event], epochs: int, limit_s: float
) -> Course:
    """Train to the end, with all events on the way."""
    submitted_ns = time.monotonic_ns()
    job = Job(peer, place, folder, epochs=epochs)
    strikes: list[Strike] = []
    running: list[subprocess.Popen[str]] = []
    failure = ""
    try:
        _wait(lambda: _first_step_ns(folder), START_LIMIT_S, job)
        first_ns = _first_step_ns(folder)
        for event in events:
            _sleep_until(first_ns + int(event.at_s * 1e9), job)
            if job.is_done:
                break
            strikes.append(_strike(job, event, running))
        _wait(lambda: job.is_done, limit_s - (time.monotonic_ns() - first_ns) / 1e9, job)
    except (AssertionError, RuntimeError, subprocess.SubprocessError, OSError) as error:
        failure = f"{error}\n{job.logs()}"
    finally:
        job.slurm.cancel(job.job_id)
        for command in running:
            _reap(command)
    done_ns = int(job.done()["mono_ns"]) if job.is_done else time.monotonic_ns()
    return Course(tuple(strikes), submitted_ns, done_ns, tuple(job.by_hand), failure)


def _first_step_ns(folder: Path) -> int:
    """0: no attempt has made one."""
    firsts = (attempt.first_step_ns for attempt in read_attempts(folder / "attempts"))
    return next(filter(None, firsts), 0)


def _strike(job: Job, event: Event, running: list[subprocess.Popen[str]]) -> Strike:
    strike = Strike(event, job.state())
    if not strike.struck:
        return strike
    if event.kind == "suspend":
        _suspend(job, event, strike)
    elif event.kind == "failure":
        strike.sent_ns = time.monotonic_ns()
        job.lose_node()
    else:
        _preempt(job, event, strike, running)
    return strike


def _suspend(job: Job, event: Event, strike: Strike) -> None:
    """Pause it for a while, in the way that its documentation has, or with scontrol."""
    if job.peer.pause is None:
        off, on = (("scontrol", verb, job.job_id) for verb in ("suspend", "resume"))
    else:
        off, on = (("scancel", f"--signal={name}", job.job_id) for name in job.peer.pause)
    strike.sent_ns = time.monotonic_ns()
    _reap(job.slurm.start(*off))
    time.sleep(max(0.0, event.hold_s - (time.monotonic_ns() - strike.sent_ns) / 1e9))
    strike.resume_sent_ns = time.monotonic_ns()
    _reap(job.slurm.start(*on))


def _preempt(job: Job, event: Event, strike: Strike, running: list[subprocess.Popen[str]]) -> None:
    """Have it preempted, and look for what it saves until another attempt can have begun."""
    known = job.peer.saved(job.folder)
    strike.sent_ns = time.monotonic_ns()
    if event.kind == "preempt":
        running.append(job.slurm.send_urgent_job(job.place.node))
    else:
        running.append(job.slurm.start("scontrol", "requeue", job.job_id))
    while time.monotonic_ns() - strike.sent_ns < WATCH_S * 1e9:
        found = job.peer.saved(job.folder)
        if found - known:
            strike.saves.append(time.monotonic_ns())
        known = found
        time.sleep(0.003)


def _sleep_until(mono_ns: int, job: Job) -> None:
    while (left_s := (mono_ns - time.monotonic_ns()) / 1e9) > 0 and not job.is_done:
        if left_s > 0.5:
            job.help_up()
        time.sleep(min(0.25, max(0.0, (mono_ns - time.monotonic_ns()) / 1e9)))


def _wait(condition: Callable[[], object], limit_s: float, job: Job) -> None:
    def helped() -> object:
        job.help_up()
        return condition()

    wait_until(helped, f"the end, or the first step, of {job.peer.title}", limit_s=limit_s)


def _reap(command: subprocess.Popen[str]) -> None:
    """Whatever became of it: an event that Slurm refuses is one that did not happen."""
    try:
        command.communicate(timeout=SLURM_LIMIT_S)
    except subprocess.TimeoutExpired:
        command.kill()
        command.communicate()
