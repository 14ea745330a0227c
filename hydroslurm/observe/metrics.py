"""All jobs as Prometheus metrics. Their names are public: dashboards use them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
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
from hydroslurm.observe.folder import RunFacts
from hydroslurm.observe.row import Row
from hydroslurm.observe.watcher import View, Watcher

LABELS = ("job_id", "name", "user", "partition")
"""Labels of every metric of a job."""


_GAUGES = {
    "step": "Training step, as last told.",
    "steps_per_second": "Training steps per second, as last measured.",
    "ranks": "Ranks that have announced themselves.",
    "parked_ranks": "Ranks that are held between two operators.",
    "slow_ranks": "Ranks that reach their first collective later than the others.",
    "vacated_bytes": "Device memory of its ranks that is on their hosts.",
    "vacate_seconds": "How long its slowest rank took to vacate last.",
    "restore_seconds": "How long its slowest rank took to get that back last.",
    "last_commit_step": "Step of the newest durable checkpoint.",
    "last_commit_timestamp_seconds": "When the newest durable checkpoint was committed.",
    "unsaved_steps": "Steps since the newest durable checkpoint, at most.",
    "end_timestamp_seconds": "When its time limit ends the job.",
    "goodput_ratio": "Time of steps that counted, by the time that all attempts held their nodes.",
}
_COUNTERS = {
    "preemptions": "How often Slurm has requeued the job.",
    "pauses": "How often the rank that was paused most has been, since the job last started.",
    "lost_steps": "Steps of one attempt that the next one repeated.",
    "restarts": "How often an attempt trained on after another one.",
    "restart_seconds": "From the stop of an attempt until the next one had made a step.",
}


def _values(row: Row) -> dict[str, float | None]:
    """Return the gauges of one job; None where unknown."""
    job, facts = row.job, row.facts
    spent = {} if facts.goodput is None else vars(facts.goodput)
    return {
        "step": row.step,
        "steps_per_second": row.steps_per_s,
        "ranks": row.ranks,
        "parked_ranks": row.parked,
        "slow_ranks": len(facts.slow) if row.ranks else None,
        "vacated_bytes": row.vacated_bytes if row.ranks else None,
        "vacate_seconds": _slowest(rank.vacate_s for rank in facts.ranks),
        "restore_seconds": _slowest(rank.restore_s for rank in facts.ranks),
        "last_commit_step": row.commit_step,
        "last_commit_timestamp_seconds": facts.commit[1] / 1e9 if facts.commit else None,
        "unsaved_steps": row.unsaved_steps if row.ranks else None,
        "end_timestamp_seconds": job.end_epoch_s if row.left_s is not None else None,
        "preemptions": job.restart_count,
        "pauses": row.pauses,
        "goodput_ratio": spent.get("of_allocated"),
        "lost_steps": spent.get("steps_lost"),
        "restarts": spent.get("restarts"),
        "restart_seconds": spent.get("restart_s"),
    }


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
        own: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: family(f"hydroslurm_job_{name}", words, labels=LABELS)
            for family, described in (
                (GaugeMetricFamily, _GAUGES),
                (CounterMetricFamily, _COUNTERS),
            )
            for name, words in described.items()
        }
        park = HistogramMetricFamily(
            "hydroslurm_park_seconds",
            "From the request to pause a rank until it was parked.",
            labels=LABELS,
        )
        for row in view.jobs:
            # a job that Slurm has forgotten keeps its last state
            row = replace(row, forgotten=False)
            labels = (row.job_id, row.job.name, row.job.user, row.job.partition)
            for name, value in _values(row).items():
                if value is not None:
                    own[name].add_metric(labels, value)
            if row.facts.ranks and any(row.facts.pause_counts):
                park.add_metric(labels, _buckets(row.facts), sum_value=row.facts.pause_sum_s)
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
        return [jobs, *own.values(), park, up, answered]


def _slowest(times_s: Iterable[float | None]) -> float | None:
    return max((time_s for time_s in times_s if time_s is not None), default=None)


def _buckets(facts: RunFacts) -> list[tuple[str, float]]:
    """Return Prometheus's buckets: upper bound, count up to it."""
    bounds = [*map(repr, PAUSE_BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(facts.pause_counts)), strict=True))
