"""Waiting for a rank's answer: its event file is the acknowledgement.

A request is a signal, the answer is what the rank writes down: ``parked``, or ``resumed`` and
``first_operator_released``. Take an :class:`EventTail` *before* the signal is sent, so that no
answer can be missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.events import Event, EventKind
from hydroslurm.rankstate import latest

_POLL_S = 0.002


@dataclass(frozen=True)
class Answer:
    """What a rank answered.

    Attributes:
        rank: global rank.
        done: it does what was asked for.
        latency_us: signal's arrival in the rank -> parked, or -> first operator released. None when
            nothing changed, or when no thread was held (a rank that was waiting for data).
        words: in words, for people.
    """

    rank: int
    done: bool
    latency_us: float | None
    words: str


class EventTail:
    """The events that are appended to one file from now on. A torn last line is read again when it
    is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new(self) -> list[Event]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.splitlines():
            try:
                found.append(Event.from_json(line.decode()))
            except ValueError:
                continue
        return found


Judge = Callable[[Event], "Answer | None"]


class JudgePause:
    """The answers to a pause. A rank that is held already says so at once, one that is still on its
    way to be parked when it has arrived."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: Event) -> Answer | None:
        if event.kind is EventKind.PARKED:
            park_us = float(event.data["park_us"])
            asleep = "" if event.data.get("held") else ", it was waiting and issues nothing"
            return Answer(event.rank, True, park_us, f"parked after {park_us:.0f} us{asleep}")
        if event.kind is EventKind.CAUSES_CHANGED and event.data.get("causes"):
            now = latest(self._path)
            if now is not None and now.state == "parked":
                words = f"held already; causes now: {', '.join(now.causes)}"
                return Answer(event.rank, True, None, words)
        return _judge_ending(event)


class JudgeResume:
    """The answers to a resume: opened, and then the first operator that runs again, when one was
    held."""

    def __init__(self, path: Path) -> None:
        """``path`` is not read: the events say it all."""

    def __call__(self, event: Event) -> Answer | None:
        if event.kind is EventKind.FIRST_OPERATOR_RELEASED:
            resume_us = float(event.data["resume_us"])
            return Answer(event.rank, True, resume_us, f"running again after {resume_us:.0f} us")
        if event.kind is EventKind.RESUMED and not event.data.get("held"):
            return Answer(event.rank, True, None, "running again; no thread was held")
        if event.kind is EventKind.CAUSES_CHANGED:
            causes = event.data.get("causes")
            if causes:
                return Answer(event.rank, False, None, f"still held for: {', '.join(causes)}")
            return Answer(event.rank, True, None, "was running already")
        return _judge_ending(event)


class JudgeStop:
    """The answers to a stop: the save on its way, and whether the job is queued again."""

    def __init__(self, path: Path) -> None:  # noqa: ARG002 - as the other judges
        """``path`` is not read: the events say it all."""
        self._asked_ns = 0
        self._saved = "nothing was left to save"

    def __call__(self, event: Event) -> Answer | None:
        kind = event.kind
        if kind is EventKind.STOP_REQUESTED and not self._asked_ns:
            self._asked_ns = int(event.data.get("requested_mono_ns", event.mono_ns))
        elif kind is EventKind.SAVE_COMMITTED and event.data.get("tier") == "durable":
            took_ms = (event.mono_ns - self._asked_ns) / 1e6 if self._asked_ns else 0.0
            step = event.data.get("checkpoint_step")
            self._saved = f"step {step} committed {took_ms:.0f} ms after the signal"
        elif kind is EventKind.REQUEUED:
            since_us = (event.mono_ns - self._asked_ns) / 1e3 if self._asked_ns else None
            return Answer(event.rank, True, since_us, f"{self._saved}; requeued")
        elif kind is EventKind.REQUEUE_FAILED:
            reason = event.data.get("reason")
            return Answer(event.rank, False, None, f"{self._saved}; not requeued: {reason}")
        elif kind is EventKind.RUN_FINISHED:
            return Answer(event.rank, False, None, "finished its training meanwhile")
        elif kind is EventKind.UNINSTALLED:
            return Answer(event.rank, False, None, f"{self._saved}; it has left, not requeued")
        return None


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
        if len(answers) == len(tails) or time.monotonic() >= deadline:
            return answers
        time.sleep(_POLL_S)
