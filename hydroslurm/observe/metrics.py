"""All jobs as metrics for Prometheus. The names are part of the interface: dashboards have them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from hydroslurm.observe.row import Row, row_of, unsaved_steps
from hydroslurm.observe.watcher import View, Watcher

LABELS = ("job_id", "name", "user", "partition")
"""Of every metric of one job."""


class _Families:
    """The metrics of one scrape, empty: name, meaning and labels of each."""

    def __init__(self) -> None:
        def gauge(name: str, words: str, labels: tuple[str, ...] = LABELS) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"hydroslurm_{name}", words, labels=labels)

        self.jobs = gauge("jobs", "Jobs by Slurm's state.", ("state",))
        self.step = gauge("job_step", "Training step, as last told.")
        self.rate = gauge("job_steps_per_second", "Training steps per second, as last measured.")
        self.ranks = gauge("job_ranks", "Ranks that have announced themselves.")
        self.parked = gauge("job_parked_ranks", "Ranks that are held between two operators.")
        self.vacated = gauge(
            "job_vacated_bytes", "Device memory of its ranks that is on their hosts."
        )
        self.vacate_s = gauge(
            "job_vacate_seconds", "How long its slowest rank took to vacate last."
        )
        self.restore_s = gauge(
            "job_restore_seconds", "How long its slowest rank took to get that back last."
        )
        self.commit_step = gauge("job_last_commit_step", "Step of the newest durable checkpoint.")
        self.commit = gauge(
            "job_last_commit_timestamp_seconds", "When the newest durable checkpoint was committed."
        )
        self.unsaved = gauge(
            "job_unsaved_steps", "Steps since the newest durable checkpoint, at most."
        )
        self.end = gauge("job_end_timestamp_seconds", "When its time limit ends the job.")
        self.preemptions = CounterMetricFamily(
            "hydroslurm_job_preemptions", "How often Slurm has requeued the job.", labels=LABELS
        )
        self.pauses = CounterMetricFamily(
            "hydroslurm_job_pauses",
            "How often the rank that was paused most has been, since the job last started.",
            labels=LABELS,
        )
        self.park = HistogramMetricFamily(
            "hydroslurm_park_seconds",
            "From the request to pause a rank until it was parked.",
            labels=LABELS,
        )
        self.up = gauge("slurm_up", "Whether Slurm answered the latest request.", ())
        self.answered = gauge(
            "slurm_last_answer_timestamp_seconds", "When Slurm last answered a request.", ()
        )

    def all(self) -> Iterator[Metric]:
        yield from vars(self).values()


class JobCollector(Collector):
    """Looks at most once per interval, however often it is asked; from any thread."""

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
        """A registry with these metrics and no others."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def describe(self) -> list[Metric]:
        """Nothing is asked of Slurm in order to be registered."""
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
        made = _Families()
        made.up.add_metric((), float(view.error is None))
        if view.answered_epoch_s is not None:
            made.answered.add_metric((), view.answered_epoch_s)
        for state, count in Counter(row.job.state.value for row in view.jobs).items():
            made.jobs.add_metric((state,), count)
        for row in view.jobs:
            # one that Slurm has forgotten stays as it was last
            now = row_of(row.job, row.facts, None, now_epoch_s=view.epoch_s)
            _add_job(made, now, now_epoch_s=view.epoch_s)
        return list(made.all())


def _add_job(made: _Families, row: Row, *, now_epoch_s: float) -> None:
    job, facts = row.job, row.facts
    labels = (row.job_id, job.name, job.user, job.partition)
    values: tuple[tuple[GaugeMetricFamily, float | None], ...] = (
        (made.step, row.step),
        (made.rate, row.steps_per_s),
        (made.ranks, row.ranks),
        (made.parked, row.parked),
        (made.vacated, row.vacated_bytes if row.ranks else None),
        (made.vacate_s, _slowest(rank.vacate_s for rank in facts.ranks)),
        (made.restore_s, _slowest(rank.restore_s for rank in facts.ranks)),
        (made.commit_step, row.commit_step),
        (made.commit, facts.commit[1] / 1e9 if facts.commit else None),
        (made.unsaved, unsaved_steps(facts, now_epoch_s=now_epoch_s) if row.ranks else None),
        (made.end, job.end_epoch_s if row.left_s is not None else None),
    )
    for gauge, value in values:
        if value is not None:
            gauge.add_metric(labels, value)
    made.preemptions.add_metric(labels, job.restart_count)
    if row.pauses is not None:
        made.pauses.add_metric(labels, row.pauses)
    if facts.ranks and any(facts.pause_counts):
        made.park.add_metric(labels, _buckets(facts), sum_value=facts.pause_sum_s)


def _slowest(times_s: Iterable[float | None]) -> float | None:
    return max((time_s for time_s in times_s if time_s is not None), default=None)


def _buckets(facts: RunFacts) -> list[tuple[str, float]]:
    """As Prometheus has them: upper bound, how many up to it."""
    bounds = [*map(repr, PAUSE_BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(facts.pause_counts)), strict=True))
