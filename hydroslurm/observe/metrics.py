"""All jobs as Prometheus metrics. Their names are public: dashboards use them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hydroslurm.core.status import PAUSE_BOUNDS_S
from hydroslurm.observe.job import JobView
from hydroslurm.observe.watcher import View, Watcher

LABELS = ("job_id", "name", "user", "partition")
"""Labels of every metric of a job."""


def _goodput(name: str) -> Callable[[JobView], float | None]:
    return lambda row: getattr(row.goodput, name, None)


def _slowest(times_s: Iterable[float | None]) -> float | None:
    return max((time_s for time_s in times_s if time_s is not None), default=None)


_Values = Mapping[str, tuple[str, Callable[[JobView], float | None]]]
"""Name -> its description, and a job's value; None: unknown."""
_GAUGES: _Values = {
    "step": ("Training step, as last told.", lambda row: row.step),
    "steps_per_second": (
        "Training steps per second, as last measured.", lambda row: row.steps_per_s),
    "ranks": ("Ranks that have announced themselves.", lambda row: row.n_ranks),
    "parked_ranks": ("Ranks that are held between two operators.", lambda row: row.parked),
    "slow_ranks": (
        "Ranks that reach their first collective later than the others.",
        lambda row: len(row.slow) if row.n_ranks else None),
    "vacated_bytes": (
        "Device memory of its ranks that is on their hosts.",
        lambda row: row.vacated_bytes if row.n_ranks else None),
    "vacate_seconds": (
        "How long its slowest rank took to vacate last.",
        lambda row: _slowest(rank.vacate_s for rank in row.present)),
    "restore_seconds": (
        "How long its slowest rank took to get that back last.",
        lambda row: _slowest(rank.restore_s for rank in row.present)),
    "last_commit_step": ("Step of the newest durable checkpoint.", lambda row: row.commit_step),
    "last_commit_timestamp_seconds": (
        "When the newest durable checkpoint was committed.",
        lambda row: row.commit[1] / 1e9 if row.commit else None),
    "unsaved_steps": (
        "Steps since the newest durable checkpoint, at most.",
        lambda row: row.unsaved_steps if row.n_ranks else None),
    "end_timestamp_seconds": (
        "When its time limit ends the job.",
        lambda row: row.job.end_epoch_s if row.left_s is not None else None),
    "goodput_ratio": (
        "Time of steps that counted, by the time that all attempts held their nodes.",
        _goodput("of_allocated")),
}  # fmt: skip
_COUNTERS: _Values = {
    "preemptions": ("How often Slurm has requeued the job.", lambda row: row.job.restart_count),
    "pauses": (
        "How often the rank that was paused most has been, since the job last started.",
        lambda row: row.pauses),
    "lost_steps": ("Steps of one attempt that the next one repeated.", _goodput("steps_lost")),
    "restarts": ("How often an attempt trained on after another one.", _goodput("restarts")),
    "restart_seconds": (
        "From the stop of an attempt until the next one had made a step.", _goodput("restart_s")),
}  # fmt: skip


class JobCollector(Collector):
    """Looks at most once per interval, however often it is asked, from any thread."""

    def __init__(
        self,
        watcher: Watcher,
        *,
        every_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watcher = watcher
        self._every_s = every_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._asked_mono_s: float | None = None
        self._answer: list[Metric] = []
        self.error: str | None = None

    def registry(self) -> CollectorRegistry:
        """Return a registry with only these metrics."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not ask Slurm."""
        return []

    def collect(self) -> list[Metric]:
        with self._lock:
            now = self._monotonic()
            if self._asked_mono_s is None or now - self._asked_mono_s >= self._every_s:
                view = self._watcher.look()
                self.error = view.error
                self._answer = self._metrics(view)
                self._asked_mono_s = now
            return self._answer

    def _metrics(self, view: View) -> list[Metric]:
        jobs = GaugeMetricFamily("hydroslurm_jobs", "Jobs by Slurm's state.", labels=("state",))
        for state, count in Counter(row.job.state.value for row in view.jobs).items():
            jobs.add_metric((state,), count)
        # a job that Slurm has forgotten keeps its last state
        rows = [replace(row, forgotten_epoch_s=None) for row in view.jobs]
        own: list[Metric] = []
        for kind, declared in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (words, value_of) in declared.items():
                family = kind(f"hydroslurm_job_{name}", words, labels=LABELS)
                for row in rows:
                    if (value := value_of(row)) is not None:
                        family.add_metric(_labels(row), value)
                own.append(family)
        park = HistogramMetricFamily(
            "hydroslurm_park_seconds",
            "From the request to pause a rank until it was parked.",
            labels=LABELS,
        )
        for row in rows:
            if row.present and any(row.pause_counts):
                park.add_metric(_labels(row), _buckets(row.pause_counts), sum_value=row.pause_sum_s)
        up = GaugeMetricFamily(
            "hydroslurm_slurm_up",
            "Whether Slurm answered the latest request.",
            value=float(view.error is None),
        )
        answered = GaugeMetricFamily(
            "hydroslurm_slurm_last_answer_timestamp_seconds",
            "When Slurm last answered a request.",
            value=view.answered_epoch_s,
        )
        return [jobs, *own, park, up, answered]


def _labels(row: JobView) -> tuple[str, ...]:
    return (str(row.job.id), row.job.name, row.job.user, row.job.partition)


def _buckets(counts: tuple[int, ...]) -> list[tuple[str, float]]:
    """Return Prometheus's buckets: upper bound, count up to it."""
    bounds = [*map(repr, PAUSE_BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(counts)), strict=True))
