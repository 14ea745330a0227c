"""Waiting for a rank's answer: its event file is the acknowledgement, and on a full disk the spare
file beside that.

A request is a signal, the answer is what the rank writes down: ``parked``, or ``resumed`` and
``first_operator_released``. A rank that is joined with others has not answered a pause before
``all_parked``: a suspend that came sooner could find one of them inside a collective. Take an
:class:`EventTail` *before* the signal is sent, so that no answer can be missed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.files import Tail, read_spare, spare_of
from hydroslurm.core.status import read_status, status_of

_POLL_S = 0.002
_POLL_SPARE_S = 0.05
"""Of a thousand ranks each look is a thousand files more, which nobody needs as long as the disk
has room."""
_MOST_BYTES = 4 << 20
"""That are read of one rank at a time."""
_NOT_OWN = {"peers", "vacated"}
"""Causes that go by themselves, once the others are resumed and the device memory is back."""


@dataclass(frozen=True)
class Answer:
    """What a rank answered.

    Attributes:
        rank: global rank.
        done: it does what was asked for.
        latency_us: signal's arrival in the rank -> parked, or -> first operator released. None when
            nothing changed, or when no thread was held (a rank that was waiting for data).
        message: for people.
        all_parked_us: signal's arrival in the rank -> all ranks parked at the same collectives;
            None for a rank that is alone, and where that was not reached.
        vacated_bytes: device memory that it has moved to the host; None where that was not asked.
    """

    rank: int
    done: bool
    latency_us: float | None
    message: str
    all_parked_us: float | None = None
    vacated_bytes: int | None = None


class EventTail:
    """The events that are appended to one file from now on. A torn last line is read again when it
    is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = Tail(path, last_bytes=0)
        self._spare_due_s = 0.0
        # what could not be appended is, later, and is no news then
        self._told = set(read_spare(spare_of(path)))

    def new(self) -> list[Event]:
        spare: list[bytes] = []
        if time.monotonic() >= self._spare_due_s:
            spare = read_spare(spare_of(self.path))  # first: what leaves it is in the log by then
            self._spare_due_s = time.monotonic() + _POLL_SPARE_S
        lines: dict[bytes, None] = {}
        with contextlib.suppress(OSError):
            lines.update(dict.fromkeys(self._tail.lines(most_bytes=_MOST_BYTES)))
        lines.update(dict.fromkeys(spare))
        found = []
        for line in lines:
            if line in self._told:
                continue
            try:
                found.append(Event.from_json(line))
            except ValueError:
                continue
        self._told.update(spare)
        return found


class Judge(Protocol):
    """What a rank's events answer to one request."""

    def __call__(self, event: Event) -> Answer | None:
        """The next event; the answer, when it is complete."""

    def when_late(self) -> Answer | None:
        """The time is over: what has come about so far; None: nothing that could be told."""


class JudgePause:
    """The answers to a pause. A rank that is held already says so at once, one that is still on its
    way to be parked when it has arrived, and one of several when all have."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parked: Event | None = None
        self._all_parked: Event | None = None
        self._asked: Event | None = None
        self._failed = ""
        self._coordinator_lost = False

    def __call__(self, event: Event) -> Answer | None:
        kind = event.kind
        if kind is EventKind.PARKED:
            self._parked = self._parked or event  # it parks again behind each collective
        elif kind is EventKind.ALL_PARKED:
            self._all_parked = event  # two threads write: this line may come first
        elif kind is EventKind.AGREEMENT_FAILED:
            self._failed = event.data.get("message") or ""
            if self._parked is not None and event.data.get("what") == "connection":
                return self.when_late()
        elif kind is EventKind.COORDINATOR_LOST:
            self._coordinator_lost = True  # another one follows, which has them parked again
        elif kind is EventKind.RESUMED and self._coordinator_lost:
            self._parked, self._coordinator_lost = None, False
        elif kind is EventKind.RESUMED and self._parked is not None:
            return Answer(event.rank, False, None, "was resumed before all ranks were parked")
        elif kind is EventKind.CAUSES_CHANGED and event.data.get("causes"):
            self._asked = event
            return self._held_already(event)
        else:
            return _judge_ending(event)
        return self._when_parked()

    def when_late(self) -> Answer | None:
        """A rank that is parked, and the others have not come to where it is."""
        if self._parked is None:
            return self._held_already(self._asked) if self._asked else None
        why = self._failed or "the other ranks have not come to one collective with it yet"
        message = f"{_parked_message(self._parked)}, alone: {why}"
        return Answer(self._parked.rank, False, _park_us(self._parked), message)

    def _when_parked(self) -> Answer | None:
        parked = self._parked
        if parked is None:
            return None
        message = _parked_message(parked)
        if parked.data.get("world_size", 1) == 1:
            return Answer(parked.rank, True, _park_us(parked), message)
        since_ns = parked.data.get("requested_mono_ns") or parked.mono_ns
        if self._all_parked is None or self._all_parked.mono_ns < since_ns:
            return None  # or it is of the pause before
        took_us = (self._all_parked.mono_ns - since_ns) / 1e3
        message = f"{message}; {_together_message(parked, self._all_parked, took_us)}"
        return Answer(parked.rank, True, _park_us(parked), message, all_parked_us=took_us)

    def _held_already(self, event: Event) -> Answer | None:
        """Also a rank whose peers closed its gate before its own signal did comes here: it is
        waited for."""
        if self._parked is not None:
            return None
        now = read_status(status_of(self._path))
        if now is None or now.state != "parked":
            return None
        if now.world_size > 1 and not now.parked_together:
            return None
        message = f"held already; causes now: {', '.join(event.data['causes'])}"
        return Answer(event.rank, True, None, message)


class JudgeVacate:
    """The answers to a pause that is to move the device's memory away: parked, and then where the
    memory is."""

    def __init__(self, path: Path) -> None:
        self._pause = JudgePause(path)
        self._parked: Answer | None = None
        self._moved: Event | None = None

    def __call__(self, event: Event) -> Answer | None:
        if event.kind in (EventKind.VACATED, EventKind.NOT_VACATED):
            self._moved = event
        elif self._parked is None:
            self._parked = self._pause(event)
            if self._parked is not None and not self._parked.done:
                return self._parked
        elif (ending := _judge_ending(event)) is not None:
            return ending
        if self._parked is None or self._moved is None:
            return None
        return _moved(self._parked, self._moved)

    def when_late(self) -> Answer | None:
        """A rank that is parked, and at work on its memory, or that does not do it."""
        parked = self._parked or self._pause.when_late()
        if parked is None:
            return None
        told = "its device memory has not been moved yet"
        return replace(parked, done=False, message=f"{parked.message}; {told}")


def _moved(parked: Answer, event: Event) -> Answer:
    data = event.data
    if event.kind is EventKind.NOT_VACATED:
        told = f"not vacated: {data.get('reason')}"
        return replace(parked, done=False, message=f"{parked.message}; {told}")
    moved_bytes, took_s = data.get("moved_bytes", 0), data.get("vacate_s", 0.0)
    told = f"{moved_bytes / 1e9:.2f} GB vacated in {took_s:.2f} s"
    if data.get("reason"):
        told += f" ({data['reason']})"
    return replace(parked, message=f"{parked.message}; {told}", vacated_bytes=moved_bytes)


class JudgeResume:
    """The answers to a resume: opened, and then the first operator that runs again, when one was
    held. A rank that is held for its peers only waits for the last of them to be resumed."""

    def __init__(self, path: Path) -> None:  # noqa: ARG002 - as the other judges
        """``path`` is not read: the events say it all."""
        self._held: Event | None = None
        self._restored = ""

    def __call__(self, event: Event) -> Answer | None:
        if event.kind is EventKind.FIRST_OPERATOR_RELEASED:
            resume_us = event.data.get("resume_us")
            if self._restored and self._held is not None:  # the gate's own request came last
                resume_us = (event.mono_ns - self._held.mono_ns) / 1e3
            after = "" if resume_us is None else f" after {resume_us:.0f} us"
            return Answer(event.rank, True, resume_us, f"running again{after}{self._restored}")
        if event.kind is EventKind.RESUMED and not event.data.get("held"):
            message = f"running again; no thread was held{self._restored}"
            return Answer(event.rank, True, None, message)
        if event.kind is EventKind.RESTORED:
            data = event.data
            moved_bytes, took_s = data.get("moved_bytes", 0), data.get("restore_s", 0.0)
            self._restored = f"; {moved_bytes / 1e9:.2f} GB given back in {took_s:.2f} s"
            return None
        if event.kind is EventKind.CAUSES_CHANGED:
            causes = event.data.get("causes")
            if causes and _NOT_OWN.issuperset(causes):
                self._held = event
                return None
            if causes:
                return Answer(event.rank, False, None, f"still held for: {', '.join(causes)}")
            return Answer(event.rank, True, None, "was running already")
        if event.kind is EventKind.RESTORE_FAILED:
            reason = f"its device memory is lost: {event.data.get('reason')}"
            return Answer(event.rank, False, None, reason)
        return _judge_ending(event)

    def when_late(self) -> Answer | None:
        """A rank that another one keeps, or whose memory is on its way."""
        if self._held is None:
            return None
        message = "still held, because another rank of the job is paused"
        if "vacated" in self._held.data.get("causes", ()):
            message = "still held, until its device memory is back"
        return Answer(self._held.rank, False, None, message)


class JudgeStop:
    """The answers to a stop: the save on its way, and whether the job is queued again. Of several
    ranks one asks for the requeue, and the others have answered when they leave saved."""

    def __init__(self, path: Path) -> None:
        status = read_status(status_of(path))
        self._follows = status is not None and status.world_size > 1 and status.rank > 0
        self._asked_ns = 0
        # the two calls tell nothing of what is saved between them
        self._saves_itself = status is not None and status.saver == EventKind.STOPS_TAKEN.value
        self._saved = "saved in its own way" if self._saves_itself else ""

    def __call__(self, event: Event) -> Answer | None:
        kind = event.kind
        saved = self._saved or "nothing was left to save"
        if kind is EventKind.STOP_REQUESTED and not self._asked_ns:
            self._asked_ns = event.data.get("requested_mono_ns") or event.mono_ns
        elif kind is EventKind.SAVE_COMMITTED:
            took_ms = (event.mono_ns - self._asked_ns) / 1e6 if self._asked_ns else 0.0
            step = event.data.get("checkpoint_step")
            self._saved = f"step {step} committed {took_ms:.0f} ms after the signal"
        elif kind is EventKind.REQUEUED:
            since_us = (event.mono_ns - self._asked_ns) / 1e3 if self._asked_ns else None
            return Answer(event.rank, True, since_us, f"{saved}; requeued")
        elif kind is EventKind.REQUEUE_FAILED:
            reason = event.data.get("reason")
            return Answer(event.rank, False, None, f"{saved}; not requeued: {reason}")
        elif kind is EventKind.RUN_FINISHED:
            return Answer(event.rank, False, None, "finished its training meanwhile")
        elif kind is EventKind.ATTEMPT_ENDED and self._follows:
            left = "leaves with the others"
            return Answer(event.rank, bool(self._saved), None, f"{saved}; {left}")
        elif kind is EventKind.UNINSTALLED:
            if self._saves_itself and self._follows and self._asked_ns:
                return Answer(event.rank, True, None, f"{saved}; left with the others")
            return Answer(event.rank, False, None, f"{saved}; it has left, not requeued")
        return None

    def when_late(self) -> Answer | None:
        """Nothing: the save, or the requeue, may yet come."""
        return None


def _park_us(parked: Event) -> float | None:
    return parked.data.get("park_us")


def _parked_message(parked: Event) -> str:
    asleep = "" if parked.data.get("held") else ", it was waiting and issues nothing"
    park_us = _park_us(parked)
    after = "" if park_us is None else f" after {park_us:.0f} us"
    return f"parked{after}{asleep}"


def _together_message(parked: Event, all_parked: Event, took_us: float) -> str:
    world_size = parked.data["world_size"]
    if in_flight := all_parked.data.get("in_flight"):
        plural = "" if in_flight == 1 else "s"
        return (
            f"all {world_size} ranks after {took_us / 1e3:.1f} ms, with {in_flight} "
            f"collective{plural} in flight: a suspend longer than their time-out ends the job"
        )
    return f"all {world_size} ranks at one collective after {took_us / 1e3:.1f} ms"


def _judge_ending(event: Event) -> Answer | None:
    if event.kind is EventKind.UNINSTALLED:
        return Answer(event.rank, False, None, "ended before it could answer")
    if event.kind is EventKind.STOP_REQUESTED:
        return Answer(event.rank, False, None, "is stopping; a stop wins over a pause")
    return None


def wait_for_answers(
    tails: Mapping[int, EventTail], judge: Callable[[Path], Judge], *, timeout_s: float
) -> dict[int, Answer]:
    """Read on until every rank has answered or the time is over; ranks that did not answer are
    absent."""
    judges = {rank: judge(tail.path) for rank, tail in tails.items()}
    answers: dict[int, Answer] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        for rank, tail in tails.items():
            for event in tail.new():
                if rank not in answers and (answer := judges[rank](event)):
                    answers[rank] = answer
        if len(answers) == len(tails):
            return answers
        if time.monotonic() >= deadline:
            late = {rank: judges[rank].when_late() for rank in tails.keys() - answers.keys()}
            return answers | {rank: answer for rank, answer in late.items() if answer}
        time.sleep(_POLL_S)
