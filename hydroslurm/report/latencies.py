"""The latencies of a run, declared once for tables, histograms and summaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from hydroslurm.report.history import History

Kind = Literal["pause", "nsys", "save", "stop"]

_UNITS = {"us": ("µs", 1e-6), "ms": ("ms", 1e-3), "s": ("s", 1.0)}


class Latency(NamedTuple):
    """One latency.

    Attributes:
        kind: what has it.
        key: its name in ``figures.json``; the suffix is its unit.
        label: the two moments.
        spec: how a value is printed.
    """

    kind: Kind
    key: str
    label: str
    spec: str

    @property
    def unit(self) -> str:
        return _UNITS[self.key.rpartition("_")[2]][0]

    def measured_s(self, history: History) -> list[float]:
        """The values that the event log holds, in seconds, smallest first."""
        having: Iterable[object] = ()
        if self.kind == "pause":
            having = history.pauses
        elif self.kind == "save":
            having = history.saves
        elif self.kind == "stop":
            having = history.stops
        unit_s = _UNITS[self.key.rpartition("_")[2]][1]
        values = (getattr(one, self.key, None) for one in having)
        return sorted(value * unit_s for value in values if value is not None)


LATENCIES = (
    Latency("pause", "park_us", "signal → parked", ",.0f"),
    Latency("pause", "all_parked_us", "signal → all ranks parked", ",.0f"),
    Latency("pause", "drain_us", "parked → devices idle", ",.0f"),
    Latency("pause", "parked_s", "parked", ",.3f"),
    Latency("pause", "resume_us", "resume → running", ",.0f"),
    Latency("nsys", "park_us", "signal → parked", ",.0f"),
    Latency("nsys", "last_kernel_us", "signal → last kernel's end", ",.0f"),
    Latency("nsys", "resume_us", "resume → running", ",.0f"),
    Latency("nsys", "first_kernel_us", "resume → first kernel", ",.0f"),
    Latency("nsys", "difference_us", "difference to the log, at most", ",.0f"),
    Latency("save", "save_ms", "start → committed", ",.1f"),
    Latency("stop", "safe_point_ms", "signal → safe point", ",.1f"),
    Latency("stop", "written_ms", "signal → files written", ",.1f"),
    Latency("stop", "durable_ms", "signal → committed", ",.1f"),
    Latency("stop", "requeued_ms", "signal → requeued", ",.1f"),
    Latency("stop", "eligible_s", "end → eligible", ",.0f"),
    Latency("stop", "queued_s", "eligible → started", ",.0f"),
    Latency("stop", "start_s", "started → first event", ",.1f"),
    Latency("stop", "waited_s", "end → next attempt", ",.2f"),
    Latency("stop", "first_step_s", "next attempt → first step", ",.2f"),
)
