"""The queue of what the module-hook gate saw."""

from __future__ import annotations

import contextlib
import queue
import time

from hydroslurm.core.events import EventKind
from hydroslurm.gate.protocol import Cause, GateEvent, Phase

_MAX_EVENTS = 4096


class EventQueue:
    """Written by any thread, a Python signal handler included; read by one.

    Attributes:
        causes: why the gate is closed now; goes into every event.
    """

    def __init__(self) -> None:
        self.causes = Cause(0)
        self._events: queue.SimpleQueue[GateEvent | None] = queue.SimpleQueue()
        self._dropped = 0

    def emit(
        self,
        kind: EventKind,
        *,
        mono_ns: int = 0,
        signo: int = 0,
        value_ns: int = 0,
        tid: int = 0,
        phase: Phase = Phase.FORWARD,
        held: int = 0,
        quiet: int = 0,
        count: int = 0,
        passed: int = 0,
        text: str = "",
    ) -> None:
        """Add one event, now unless ``mono_ns`` is given; a full queue only counts it."""
        if self._events.qsize() >= _MAX_EVENTS:
            self._dropped += 1
            return
        self._events.put(
            GateEvent(
                kind=kind,
                mono_ns=mono_ns or time.monotonic_ns(),
                epoch_ns=time.time_ns(),
                signo=signo,
                value_ns=value_ns,
                causes=self.causes,
                tid=tid,
                phase=phase,
                held=held,
                quiet=quiet,
                count=count,
                passed=passed,
                text=text,
            )
        )

    def wake(self) -> None:
        """Make a blocked :meth:`wait` return."""
        self._events.put(None)

    def wait(self, timeout_s: float | None) -> list[GateEvent]:
        """The events that are there, oldest first; waits for the first one, or a :meth:`wake`."""
        found: list[GateEvent] = []
        with contextlib.suppress(queue.Empty):
            event = self._events.get(block=timeout_s != 0, timeout=timeout_s)
            while True:
                if event is not None:
                    found.append(event)
                event = self._events.get_nowait()
        if self._dropped:
            count, self._dropped = self._dropped, 0
            self.emit(EventKind.EVENTS_DROPPED, count=count)
            found += self.wait(0)
        return found
