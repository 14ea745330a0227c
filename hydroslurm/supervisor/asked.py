"""Whether an attempt was stopped by somebody: by Slurm, or by one of whom only the ranks' events
tell."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hydroslurm.events import Event, EventKind, read_events
from hydroslurm.slurm.stops import Stop, StopReason

_STOPS = frozenset({
    EventKind.STOP_REQUESTED,
    EventKind.REQUEUE_ASKED,
    EventKind.REQUEUED,
})  # fmt: skip


def is_slurms(stop: Stop) -> bool:
    """A job that runs on, without a preemption in progress, was not stopped by Slurm: a time limit
    that is near ends nothing yet."""
    if stop.reason in (StopReason.ASKED, StopReason.UNKNOWN):
        return False
    return not (stop.reason is StopReason.TIME_LIMIT and (stop.to_end_s or 0.0) > 1.0)


def was_asked_to_stop(events: Path, *, since_epoch_ns: int) -> bool:
    """Whether a rank or an agent has written down a request to stop since then.

    Args:
        events: the folder of their event files; one that cannot be read tells nothing.
    """
    for path in sorted(events.glob("*.jsonl")):
        with contextlib.suppress(OSError):
            if any(_asks(one) for one in read_events(path) if one.epoch_ns >= since_epoch_ns):
                return True
    return False


def _asks(event: Event) -> bool:
    if event.kind is EventKind.SIGNAL_PASSED_ON:
        return event.data.get("meaning") in ("stop", "warning")
    return event.kind in _STOPS
