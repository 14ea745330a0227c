"""Waiting for a rank's answer: its status file is the acknowledgement.

A request is a signal, and the answer is what the rank has become by it: ``parked``, or ``running``
with its first operator released. A rank that is joined with others has not answered a pause before
all of them are parked: a suspend that came sooner could find one of them inside a collective. Read
the status *before* the signal is sent: the answer is what has changed since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from hydroslurm.core.events import EventKind
from hydroslurm.core.status import RankStatus, read_status

_POLL_S = 0.002
_NOT_OWN = {"peers", "vacated"}
"""Causes that clear without a request: another rank is paused, or device memory is on the host."""


@dataclass(frozen=True)
class Answer:
    """What a rank answered.

    Attributes:
        rank: global rank.
        done: it does what was asked for.
        message: for people, with how long that took.
        vacated_bytes: device memory that it has moved to the host; None where that was not asked.
    """

    rank: int
    done: bool
    message: str
    vacated_bytes: int | None = None


Key = TypeVar("Key", bound=Hashable)
Judge = Callable[[RankStatus, RankStatus, bool], Answer | None]
"""The answer of a rank to one request: its status before, its status now, and whether the time is
over. None: not yet, or nothing that could be told."""


def wait_for_answers(
    before: Mapping[Key, tuple[Path, RankStatus]], judge: Judge, *, timeout_s: float
) -> dict[Key, Answer]:
    """Read the statuses until every rank has answered or the time is over; ranks that did not
    answer are absent.

    Args:
        before: of each rank, under any name, its status file, and what was in that before the
            request.
    """
    answers: dict[Key, Answer] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        is_late = time.monotonic() >= deadline
        for rank, (path, status) in before.items():
            if rank in answers:
                continue
            now = read_status(path)
            if now is None or now.pid != status.pid:
                continue
            if (answer := judge(status, now, is_late)) is not None:
                answers[rank] = answer
        if is_late or len(answers) == len(before):
            return answers
        time.sleep(_POLL_S)


def judge_pause(before: RankStatus, now: RankStatus, is_late: bool) -> Answer | None:
    """A rank that is held already says so at once, another one when it has parked, and one of
    several when all have."""
    if (ending := _ending(now)) is not None:
        return ending
    if not _has_answered(before, now):
        return None
    if now.state != "parked":
        if is_late and now.state == "running" and now.pauses != before.pauses:
            return Answer(now.rank, False, "was resumed before all ranks were parked")
        return None
    asleep = "" if now.held else ", it was waiting and issues nothing"
    after = "" if now.park_us is None else f" after {now.park_us:.0f} us"
    message = f"parked{after}{asleep}"
    if is_held_already := _is_same_pause(before, now) and before.state == "parked":
        message = f"held already; causes now: {', '.join(now.causes)}"
    if now.world_size == 1 < before.world_size:
        return Answer(now.rank, False, f"{message}, alone: its connection is gone")
    if now.world_size > 1 and now.all_parked is None:
        why = "the other ranks have not come to one collective with it yet"
        return Answer(now.rank, False, f"{message}, alone: {why}") if is_late else None
    if now.all_parked is None or is_held_already:
        return Answer(now.rank, True, message)
    requested_ns = now.since.mono_ns - int((now.park_us or 0.0) * 1e3)
    all_us = (now.all_parked.mono_ns - requested_ns) / 1e3
    message = f"{message}; {_together_message(now, all_us)}"
    return Answer(now.rank, True, message)


def judge_vacate(before: RankStatus, now: RankStatus, is_late: bool) -> Answer | None:
    """The same of a pause that is to move the device's memory away: parked, and then where the
    memory is."""
    parked = judge_pause(before, now, is_late)
    if parked is None or now.state != "parked":
        return parked
    if now.vacated_bytes:
        took = "" if now.vacate_s is None else f" in {now.vacate_s:.2f} s"
        message = f"{parked.message}; {now.vacated_bytes / 1e9:.2f} GB vacated{took}"
        return replace(parked, message=message, vacated_bytes=now.vacated_bytes)
    is_old = _is_same_pause(before, now) and now.not_vacated == before.not_vacated
    if now.not_vacated and not (is_old and not is_late):
        told = f"not vacated: {now.not_vacated}"
    elif is_late:
        told = "its device memory has not been moved yet"
    else:
        return None
    return replace(parked, done=False, message=f"{parked.message}; {told}")


def judge_resume(before: RankStatus, now: RankStatus, is_late: bool) -> Answer | None:
    """Opened, and then the first operator that runs again, where one was held. A rank that is held
    only for its peers, or until its memory is back, is waited for."""
    if now.is_lost and not before.is_lost:
        return Answer(now.rank, False, f"its device memory is lost: {now.not_vacated}")
    if (ending := _ending(now)) is not None:
        return ending
    if not _has_answered(before, now):
        return None
    if now.state == "running":
        if before.state == "running" and _is_same_pause(before, now):
            return Answer(now.rank, True, "was running already")
        back = ""
        if before.vacated_bytes and now.restore_s is not None:
            gb = before.vacated_bytes / 1e9
            back = f"; {gb:.2f} GB given back in {now.restore_s:.2f} s"
        if not now.held:
            return Answer(now.rank, True, f"running again; no thread was held{back}")
        if now.resume_us is None:
            return None
        message = f"running again after {now.resume_us:.0f} us{back}"
        return Answer(now.rank, True, message)
    if not _NOT_OWN.issuperset(now.causes):
        # what was read before may be older than the pause
        if is_late or _is_same_pause(before, now):
            message = f"still held for: {', '.join(now.causes)}"
            return Answer(now.rank, False, message)
        return None
    if not is_late:
        return None
    why = "because another rank of the job is paused"
    if "vacated" in now.causes:
        why = "until its device memory is back"
    return Answer(now.rank, False, f"still held, {why}")


def judge_stop(before: RankStatus, now: RankStatus, _is_late: bool) -> Answer | None:
    """The save on its way, and whether the job is queued again. Of several ranks one asks for the
    requeue, and the others have answered when they leave saved."""
    saved = ""
    if before.saver == EventKind.STOPS_TAKEN.value:  # tells nothing of what is saved
        saved = "saved in its own way"
    elif now.committed is not None and now.committed != before.committed:
        took_ms = max(0.0, (now.committed.mono_ns - now.request_mono_ns) / 1e6)
        saved = f"step {now.committed_step} committed {took_ms:.0f} ms after the signal"
    told = saved or "nothing was left to save"
    if now.requeue is not None and before.requeue is None:
        if now.requeue:
            return Answer(now.rank, False, f"{told}; not requeued: {now.requeue}")
        return Answer(now.rank, True, f"{told}; requeued")
    if now.finished and not before.finished:
        return Answer(now.rank, False, "finished its training meanwhile")
    if now.state != "ended":
        return None
    if before.world_size > 1 and now.rank > 0:
        return Answer(now.rank, bool(saved), f"{told}; left with the others")
    return Answer(now.rank, False, f"{told}; it has left, not requeued")


def _has_answered(before: RankStatus, now: RankStatus) -> bool:
    return now.request_mono_ns not in (0, before.request_mono_ns)


def _is_same_pause(before: RankStatus, now: RankStatus) -> bool:
    return now.pauses == before.pauses


def _ending(now: RankStatus) -> Answer | None:
    if now.state == "ended":
        return Answer(now.rank, False, "ended before it could answer")
    if now.state == "stopping":
        return Answer(now.rank, False, "is stopping; a stop wins over a pause")
    return None


def _together_message(now: RankStatus, took_us: float) -> str:
    if now.in_flight:
        plural = "" if now.in_flight == 1 else "s"
        return (
            f"all {now.world_size} ranks after {took_us / 1e3:.1f} ms, with {now.in_flight} "
            f"collective{plural} in flight: a suspend longer than their time-out ends the job"
        )
    unknown = "; whether it is in flight is not known" if now.in_flight is None else ""
    return f"all {now.world_size} ranks at one collective after {took_us / 1e3:.1f} ms{unknown}"
