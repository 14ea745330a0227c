"""Event files made by hand: what a rank would have written, with stamps that the tests choose."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.rundir import RunDir

_SIGNAL = {"slurm": "SIGTSTP", "user": "SIGUSR1", "terminal": "SIGTSTP"}


def as_read(events: Iterable[Event]) -> Iterator[Event]:
    """What a reader makes of the lines of events with whatever fields."""
    for event in events:
        with contextlib.suppress(ValueError):
            yield Event.from_json(json.dumps(vars(event)))


@dataclass
class RankLog:
    """Builds the events of one process of one rank; times are seconds since ``boot_s``.

    ``boot_s`` is what CLOCK_MONOTONIC showed at the start of the run: it differs between machines.
    ``date_off_s`` is by how much CLOCK_REALTIME is off, from the next event on. ``boot`` is the
    boot of the host, which is told where it is given.
    """

    rank: int = 0
    pid: int = 100
    restart_count: int = 0
    host: str = "n1"
    job_id: int | None = 7
    boot_s: float = 5000.0
    date_off_s: float = 0.0
    step: int | None = None
    boot: str = ""
    events: list[Event] = field(default_factory=list)
    _pauses: int = 0

    def add(self, kind: EventKind, at_s: float, **data: Any) -> RankLog:
        self.events.append(
            Event(
                kind=kind,
                mono_ns=self.mono_ns(at_s),
                epoch_ns=1_700_000_000 * 10**9 + round((at_s + self.date_off_s) * 1e9),
                rank=self.rank,
                job_id=self.job_id,
                restart_count=self.restart_count,
                pid=self.pid,
                host=self.host,
                step=self.step,
                data=data,
            )
        )
        return self

    def at_step(self, step: int) -> RankLog:
        """The next events are of this step."""
        self.step = step
        return self

    def installed(self, at_s: float = 0.0) -> RankLog:
        boot = {"boot": self.boot} if self.boot else {}
        gate = {"gate": "native", "granularity": "every operator"}
        return self.add(EventKind.INSTALLED, at_s, **gate, **boot)

    def uninstalled(self, at_s: float) -> RankLog:
        return self.add(EventKind.UNINSTALLED, at_s)

    def pause(
        self,
        at_s: float,
        *,
        for_s: float = 1.0,
        cause: str = "slurm",
        park_us: float = 80.0,
        resume_us: float = 40.0,
        held: bool = True,
        until: str = "first_operator_released",
    ) -> RankLog:
        """All lines of one pause, as the controller writes them; ``until`` names the last."""
        self._pauses += 1
        n, us = self._pauses, 1e-6
        parked_s, resume_s = at_s + park_us * us, at_s + for_s
        begin = {"requested_mono_ns": self.mono_ns(at_s)}
        end = {"requested_mono_ns": self.mono_ns(resume_s)}
        if cause in _SIGNAL:
            self._line("signal_received", at_s, signal=_SIGNAL[cause], sender_pid=1, count=1)
        lines: list[tuple[str, float, dict[str, Any]]] = [
            ("gate_closed", at_s + 12 * us, {"pause": n, "causes": [cause], **begin}),
        ]
        if held:
            operator = {"operator": "aten::linear", "phase": "forward", "tid": 1}
            lines.append(("first_operator_held", at_s + park_us * us / 2, {"pause": n, **operator}))
        park = {"park_us": park_us, "held": int(held), "quiet": int(not held), "causes": [cause]}
        lines.append(("parked", parked_s, {"pause": n, **begin, **park}))
        parked_for = {"parked_s": resume_s - parked_s, "passed": 0, "causes": []}
        lines.append(("resumed", resume_s + 9 * us, {"pause": n, **end, **parked_for}))
        if held:
            released = {"pause": n, **end, "resume_us": resume_us}
            lines.append(("first_operator_released", resume_s + resume_us * us, released))
        for kind, when_s, data in lines:
            self._line(kind, when_s, **data)
            if kind == until:
                break
        return self

    def trains(self, at_s: float, *, attempt: int, step: int = 0) -> RankLog:
        """A Run begins with ``step`` 2 s after ``at_s``, and makes its first step 0.5 s later."""
        self.installed(at_s)
        self.step = step
        self._line("attempt_began", at_s + 2, attempt=attempt, step=step)
        self.step = step + 1
        self._line("first_step", at_s + 2.5, attempt=attempt)
        return self

    def stop(
        self,
        at_s: float,
        *,
        step: int,
        attempt: int = 1,
        reason: str = "preempted",
        until: str = "uninstalled",
        without: tuple[str, ...] = (),
    ) -> RankLog:
        """All lines of one stop, as a Run and the controller write them; ``until`` names the last
        and ``without`` those that were torn.

        20 ms to the safe point, 30 to the copy, 45 to the files, 50 to the commit, 60 to the
        requeue.
        """
        save = {"checkpoint_step": step, "save_kind": "stop", "state_bytes": 1000}
        request = {"signal": "SIGTERM", "requested_mono_ns": self.mono_ns(at_s)}
        lines: list[tuple[str, float, int, dict[str, Any]]] = [
            ("stop_requested", at_s, step - 1, request),
            ("stop_reason", at_s + 0.01, step - 1, {"reason": reason, "message": "in words"}),
            ("safe_point", at_s + 0.02, step, {"attempt": attempt, "waited_us": 2e4}),
            ("save_started", at_s + 0.025, step, save),
            ("save_staged", at_s + 0.03, step, save),
            ("save_written", at_s + 0.045, step, save),
            ("save_committed", at_s + 0.05, step, save),
            ("attempt_ended", at_s + 0.055, step, {"attempt": attempt, "ending": reason}),
            ("requeue_asked", at_s + 0.056, step, {"job_id": self.job_id}),
            ("requeued", at_s + 0.06, step, {"job_id": self.job_id, "requeue_us": 4e3}),
            # Slurm signals again while the process leaves
            ("stop_requested", at_s + 0.07, step, {"signal": "SIGTERM"}),
            ("uninstalled", at_s + 0.1, step, {}),
        ]
        for kind, when_s, at_step, data in lines:
            self.step = at_step
            if kind not in without:
                self._line(kind, when_s, **data)
            if kind == until:
                break
        return self

    def write(self, run_dir: RunDir) -> Path:
        """Append the events to the file of the rank, as a requeued job does."""
        path = run_dir.rank_events(self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(event.to_json() + "\n" for event in self.events)
        return path

    def _line(self, kind: str, at_s: float, **data: Any) -> None:
        self.add(EventKind(kind), at_s, **data)

    def mono_ns(self, at_s: float) -> int:
        return round((self.boot_s + at_s) * 1e9)
