"""How much of a run's time became steps that counted, and what became of the rest. Pure.

Goodput is productive time ÷ time, as Google's ml-goodput-measurement defines it
(https://docs.cloud.google.com/tpu/docs/goodput). It is measured on the first rank, whose steps are
those of all ranks: by the report on whole event logs, with the times of Slurm's accounting, and in
the first rank's status while the job runs. Without accounting the allocated time extends from an
attempt's first event to its last; the time between, Python's start included, is ``queued``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from hydroslurm.core.decoding import Count, Integer, Seconds
from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.figure import figure, seconds


@dataclass
class Goodput:
    """Seconds of one run, of its first rank."""

    # fmt: off
    of_allocated: Seconds | None = figure(
        "Productive ÷ allocated time; null where no steps were recorded.")
    of_wall: Seconds | None = figure(
        "Productive time ÷ wall clock; null where no steps were recorded.")
    at_most: bool = figure(
        "True where more steps than known may have been repeated.", default=False)
    allocated_from: Literal["slurm", "events", "both"] = figure(
        "Source of the allocated time; `both`: Slurm does not know some attempts.",
        default="events")
    wall_s: Seconds = seconds(
        "From the submission, or the first event, to the end, or the last event.")
    allocated_s: Seconds = seconds("The job held its nodes, including suspended time.")
    productive_s: Seconds = seconds("Steps that counted.", "steps that counted")
    made_again_s: Seconds = seconds("Steps that a later attempt repeated.", "steps repeated")
    saving_s: Seconds = seconds(
        "Waiting for a copy of the state, or for a save in the foreground.", "waiting for saves")
    parked_s: Seconds = seconds("From each pause's request until the gate was opened.", "parked")
    starting_s: Seconds = seconds(
        "From the start of the allocation to the end of an attempt's first step.", "starting up")
    leaving_s: Seconds = seconds(
        "From a stop's safe point, or the training's end, to the end of the allocation.",
        "saving and leaving")
    unknown_s: Seconds = seconds(
        "After the last event of a killed process; all, if no steps were recorded.", "unknown")
    queued_s: Seconds = seconds("Between allocations, and before the first.")
    steps: Count = figure("How many counted.", default=0)
    step_s: Seconds | None = figure("Mean seconds of a step.")
    steps_lost: Count = figure("Made by one attempt and repeated by the next.", default=0)
    restarts: Count = figure("Attempts that trained on after another one had ended.", default=0)
    restart_s: Seconds = seconds(
        "From the stop of each such other, or its last event, to the end of the next step.")
    # fmt: on

    @property
    def message(self) -> str:
        """One line; empty where no steps were recorded."""
        if self.of_allocated is None:
            return ""
        most, least = ("at most ", "at least ") if self.at_most else ("", "")
        return (
            f"goodput {most}{self.of_allocated:.2f} of {self.allocated_s:.0f} s, "
            f"steps lost: {least}{self.steps_lost}, restarts: {self.restarts}, which took "
            f"{self.restart_s:.0f} s from the stop until a step was trained again"
        )


Part = Literal[
    "productive_s", "made_again_s", "saving_s", "parked_s", "starting_s", "leaving_s", "unknown_s"
]  # fmt: skip
PARTS: tuple[Part, ...] = get_args(Part)
"""Of the allocated time."""
_SAVE_ENDS = (
    EventKind.SAVE_STAGED, EventKind.SAVE_COMMITTED, EventKind.SAVE_FAILED, EventKind.SAVE_ABANDONED
)  # fmt: skip


@dataclass
class AttemptTime:
    """Where the time of one attempt of the first rank went, event by event.

    Attributes:
        first_ns, last_ns: stamps, CLOCK_MONOTONIC: of its first event, and until when it is known.
        stop_ns: of the first request to stop.
        began_step: the step that it began with; None without a Run.
        step: the highest that is known; set by whoever reads the events.
        exact: ``step`` is where it was stopped, not just the newest that was seen.
        parts: seconds of some :data:`PARTS`.
    """

    first_ns: Count = 0
    last_ns: Count = 0
    stop_ns: Count | None = None
    began_step: Integer | None = None
    step: Integer | None = None
    has_stepped: bool = False
    parked: bool = False
    saving: bool = False
    left: bool = False
    exact: bool = False
    finished: bool = False
    parts: dict[Part, Seconds] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Follow one event."""
        kind, data = event.kind, event.data
        if kind is EventKind.GATE_CLOSED:
            self.pass_until(data.get("requested_mono_ns") or event.mono_ns)
            self.parked = True
        self.pass_until(event.mono_ns)
        if kind is EventKind.RESUMED:
            self.parked = False
        elif kind is EventKind.SAVE_STARTED or kind in _SAVE_ENDS:
            self.saving = kind is EventKind.SAVE_STARTED
        elif kind is EventKind.ATTEMPT_BEGAN and type(data.get("step")) is int:
            self.began_step = data["step"]
        elif kind is EventKind.FIRST_STEP and not self.has_stepped:
            self.has_stepped, self.parts = True, {"starting_s": sum(self.parts.values())}
        elif kind is EventKind.STOP_REQUESTED and self.stop_ns is None:
            self.stop_ns = data.get("requested_mono_ns") or event.mono_ns
        elif kind in (EventKind.SAFE_POINT, EventKind.ATTEMPT_ENDED) and not self.left:
            self.left, self.exact = True, kind is EventKind.SAFE_POINT
            self.finished = data.get("ending") == "finished"

    def pass_until(self, mono_ns: int) -> None:
        """Count the time up to this moment, unless that is done."""
        waits: Part = "parked_s" if self.parked else "saving_s" if self.saving else "productive_s"
        part: Part = "leaving_s" if self.left else waits
        self.parts[part] = self.parts.get(part, 0.0) + max(0, mono_ns - self.last_ns) / 1e9
        self.last_ns = max(self.last_ns, mono_ns)


@dataclass
class Account:
    """Adds up the attempts of a run, oldest first.

    Attributes:
        goodput: the sums so far; ratios are those of :meth:`result`.
        timed_steps: how many steps took the time that was trained.
        begin_s, end_s: the first and the last moment of any attempt, on a clock that they share.
        trained: the newest attempt that made a step, until another one does.
        stopped_s: when that one was stopped, or seen last.
    """

    goodput: Goodput = field(default_factory=Goodput)
    timed_steps: Count = 0
    begin_s: float | None = None
    end_s: float = 0.0
    trained: AttemptTime | None = None
    stopped_s: float = 0.0

    def add(self, time: AttemptTime, *, begin_s: float, since_s: float | None = None) -> None:
        """Add one attempt.

        Args:
            begin_s: when its first event was, on the clock that the attempts share.
            since_s: until when the time before it is accounted for; default: that event, or the end
                of the attempt before it.
        """
        parts, sums = time.parts, self.goodput
        since_s = max(begin_s, self.end_s) if since_s is None else since_s
        self.begin_s = begin_s if self.begin_s is None else min(self.begin_s, begin_s)
        self.end_s = max(self.end_s, begin_s + (time.last_ns - time.first_ns) / 1e9)
        if time.began_step is None:
            parts["unknown_s"] = parts.pop("productive_s", 0.0)
        elif not time.has_stepped:
            time.parts = parts = {"starting_s": sum(parts.values())}
        else:
            self._settle(time, begin_s)
        parts["starting_s"] = max(0.0, parts.get("starting_s", 0.0) + begin_s - since_s)
        for part, part_s in parts.items():
            setattr(sums, part, getattr(sums, part) + part_s)

    def _settle(self, time: AttemptTime, begin_s: float) -> None:
        """Count the steps of an attempt, what the one before it has lost to it, and how long it
        took until steps were made again."""
        before, sums, began = self.trained, self.goodput, time.began_step or 0
        steps = max(0, (time.step or 0) - began)
        sums.steps += steps
        self.timed_steps += max(0, steps - 1)
        if before is not None and not before.finished:
            made = max(0, (before.step or 0) - (before.began_step or 0))
            lost = max(0, (before.step or 0) - began)
            again_s = before.parts.get("productive_s", 0.0) * min(1.0, lost / max(1, made - 1))
            sums.productive_s = max(0.0, sums.productive_s - again_s)
            sums.made_again_s += again_s
            sums.steps = max(0, sums.steps - min(lost, made))
            sums.steps_lost += lost
            sums.at_most |= not before.exact
            sums.restarts += 1
            sums.restart_s += max(0.0, begin_s + time.parts.get("starting_s", 0.0) - self.stopped_s)
        stopped_ns = time.last_ns if time.stop_ns is None else time.stop_ns
        self.trained, self.stopped_s = time, begin_s + (stopped_ns - time.first_ns) / 1e9

    def result(self, *, allocated_s: float | None = None, wall_s: float | None = None) -> Goodput:
        """The sums with their ratios; without the times of accounting, those of the events."""
        found = self.goodput
        if wall_s is None:
            wall_s = max(0.0, self.end_s - (self.begin_s or 0.0))
        if allocated_s is None:
            allocated_s = sum(getattr(found, part) for part in PARTS)
        found.allocated_s, found.wall_s = allocated_s, wall_s
        found.queued_s = max(0.0, wall_s - allocated_s)
        if self.timed_steps:
            found.step_s = (found.productive_s + found.made_again_s) / self.timed_steps
        if found.steps > 0:
            found.of_allocated = found.productive_s / allocated_s if allocated_s else None
            found.of_wall = found.productive_s / wall_s if wall_s else None
        return found
