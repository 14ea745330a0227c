"""Whether an attempt was stopped by somebody, and why: by Slurm, or by one of whom only the ranks'
events tell."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.jobs.supervisor.attempts import Attempt
from hydroslurm.slurm.stops import Stop, StopReason

_STOPS = frozenset({
    EventKind.STOP_REQUESTED,
    EventKind.REQUEUE_ASKED,
    EventKind.REQUEUED,
})  # fmt: skip


def is_by_slurm(stop: Stop) -> bool:
    """A job that runs on, without a preemption in progress, was not stopped by Slurm: a time limit
    that is near ends nothing yet."""
    if stop.reason in (StopReason.ASKED, StopReason.UNKNOWN):
        return False
    return not (stop.reason is StopReason.TIME_LIMIT and (stop.to_end_s or 0.0) > 1.0)


def was_stop_requested(events: Path, *, since_epoch_ns: int) -> bool:
    """Whether a rank or an agent has written down a request to stop since then.

    Args:
        events: the folder of their event files; one that cannot be read tells nothing.
    """
    for path in sorted(events.glob("*.jsonl")):
        with contextlib.suppress(OSError):
            if any(_asks(one) for one in read_events(path) if one.epoch_ns >= since_epoch_ns):
                return True
    return False


def was_requeued_by_ranks(events: Path, attempt: Attempt) -> bool:
    """Whether a rank of an attempt has had the job put back into the queue: then Slurm need not be
    asked whether it is there."""
    # the first one does it for all; where another had to, Slurm is asked
    for path in sorted(events.glob("rank-*.jsonl"))[:1]:
        with contextlib.suppress(OSError):
            return any(
                one.restart_count == attempt.restart_count
                and one.epoch_ns >= attempt.began_epoch_ns
                for one in read_events(path, kinds=(EventKind.REQUEUED,))
            )
    return False


def recorded_stop_reason(events: Path, attempt: Attempt) -> tuple[StopReason, str] | None:
    """Why the ranks of an attempt were stopped, as the first of them that Slurm has told wrote it
    down; None where none has. A rank asks as soon as it is signalled. Later, when it has had the
    job requeued, a preemption, a person's signal and an operator's requeue look the same to Slurm.
    """
    found: list[tuple[int, StopReason, str]] = []
    for path in sorted(events.glob("rank-*.jsonl")):
        signal = ""
        with contextlib.suppress(OSError):
            for event in read_events(path):
                if (
                    event.restart_count != attempt.restart_count
                    or event.epoch_ns < attempt.began_epoch_ns
                ):
                    continue
                if event.kind is EventKind.STOP_REQUESTED:
                    signal = signal or str(event.data.get("signal") or "")
                reason = event.data.get("reason")
                if event.kind is EventKind.STOP_REASON and reason in _REASONS:
                    came = f"{signal} received: " if signal else ""
                    message = f"{came}{event.data.get('message', '')}"
                    found.append((event.epoch_ns, StopReason(reason), message))
    return min(found)[1:] if found else None


def condition_reason(reason: StopReason | None) -> str:
    """For a condition; None where Slurm has only said that the job goes on later."""
    return (reason or StopReason.REQUEUED).value.title().replace("_", "")


_REASONS = frozenset(one.value for one in StopReason) - {"unknown", "cancelled"}
"""Those with which a job may go on later."""


def _asks(event: Event) -> bool:
    if event.kind is EventKind.SIGNAL_PASSED_ON:
        return event.data.get("meaning") in ("stop", "warning")
    return event.kind in _STOPS
