"""Turn gate events into lines of the event log. Pure.

Numbers the pauses and turns timestamps into latencies. All records of one pause carry the same
``pause`` number. A latency starts at the timestamp of the signal handler, or of the request.
"""

from __future__ import annotations

from hydroslurm.core.events import EventKind
from hydroslurm.core.signals import signal_name
from hydroslurm.gate.protocol import GateEvent


class Recorder:
    """Follows one process's gate.

    Attributes:
        pause: number of the latest pause, from 1; 0 before the first.
    """

    def __init__(self) -> None:
        self.pause = 0
        self._parked_ns = 0
        self._closed_ns = 0
        self._resume_requested_ns = 0

    def record(self, seen: GateEvent) -> dict[str, object]:
        """The data of the line that one gate event makes."""
        kind = seen.kind
        causes = seen.causes.names()
        if kind is EventKind.SIGNAL_RECEIVED:
            return {**_sender(seen), "count": seen.count}
        if kind is EventKind.GATE_CLOSED:
            self.pause += 1
            self._closed_ns, self._parked_ns = seen.mono_ns, 0
            return self._pause(causes=causes, requested_mono_ns=seen.value_ns)
        if kind in (EventKind.FIRST_OPERATOR_HELD, EventKind.LATE_OPERATOR_HELD):
            return self._pause(**_operator(seen))
        if kind is EventKind.PARKED:
            self._parked_ns = seen.mono_ns
            return self._pause(
                requested_mono_ns=seen.value_ns,
                park_us=(seen.mono_ns - seen.value_ns) / 1e3,
                held=seen.held,
                quiet=seen.quiet,
                causes=causes,
            )
        if kind is EventKind.LET_THROUGH:
            return self._pause(collectives=seen.count)
        if kind is EventKind.RESUMED:
            self._resume_requested_ns = seen.value_ns
            since_ns = self._parked_ns or self._closed_ns
            return self._pause(
                requested_mono_ns=seen.value_ns,
                parked_s=(seen.mono_ns - since_ns) / 1e9,
                held=seen.held,
                passed=seen.passed,
                causes=causes,
            )
        if kind is EventKind.FIRST_OPERATOR_RELEASED:
            return self._pause(
                requested_mono_ns=self._resume_requested_ns,
                resume_us=(seen.mono_ns - self._resume_requested_ns) / 1e3,
                tid=seen.tid,
            )
        if kind is EventKind.STOP_REQUESTED:
            return {**_sender(seen), "requested_mono_ns": seen.value_ns}
        if kind is EventKind.EVENTS_DROPPED:
            return {"count": seen.count}
        return {"causes": causes}

    def _pause(self, **data: object) -> dict[str, object]:
        return {"pause": self.pause, **data}


def _sender(seen: GateEvent) -> dict[str, object]:
    name = signal_name(seen.signo) if seen.signo else None
    return {"signal": name, "sender_pid": seen.sender_pid}


def _operator(seen: GateEvent) -> dict[str, object]:
    return {"operator": seen.text, "phase": seen.phase.name.lower(), "tid": seen.tid}
