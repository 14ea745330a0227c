"""What a run's pauses and stops cost, in numbers: ``report/figures.json``.

The file holds one JSON object. A latency that nobody measured is absent from its summary, never 0::

    schema           1
    run              name of the run folder
    job_ids          Slurm's; [] outside of a job
    ranks            number of ranks that wrote events
    lives            number of processes over all ranks and requeues
    restarts         how often the job was requeued
    begin_epoch_s    the run's first event, seconds since 1970
    observed_s       from the first event to the last
    pauses           number of pauses, those included that are not complete
    incomplete       number of those
    stop_requests    number of requests to save and leave; two for one preemption are normal
    parked_total_s   parked time of all ranks added up
    in_flight        pauses in which collectives were in flight when all ranks were parked
    park_us          SUMMARY of request -> parked
    all_parked_us    SUMMARY of request -> all ranks parked, of each rank (several ranks only)
    drain_us         SUMMARY of parked -> devices idle (GPU only)
    resume_us        SUMMARY of request -> running again
    parked_s         SUMMARY of the parked time
    by_cause         cause -> {pauses, park_us, resume_us, parked_s}; a pause counts under its first
                     cause, ``peers`` only where it has no other, ``unknown`` when that was lost
    every_pause      one object per pause: the fields of report.pauses.Pause, ``outcome``, and
                     ``at_s``, the seconds from the run's begin; stamps are CLOCK_MONOTONIC ns
    stops            the lives that were stopped, and how the run went on:
      count            number of stops, of all ranks; killed lives that were followed by another
                       one are included
      incomplete       number of those whose log misses something
      killed           number of those that left without a word
      by_reason        what ended them -> number; how they left, where Slurm did not say why
      safe_point_ms    SUMMARY of request -> end of the step that was being made
      staged_ms        SUMMARY of request -> the state is copied
      durable_ms       SUMMARY of request -> committed on the durable tier
      requeued_ms      SUMMARY of request -> in Slurm's queue again
      waited_s         SUMMARY of last event -> the next life's first event
      first_step_s     SUMMARY of the next life's first event -> end of its first step
      steps_lost_total steps that were made again; of the rank that lost the most
      at_least         true where more steps may have been lost: a life was killed, or a log is torn
      every_stop       one object per stop: the fields of report.stops.Stop, and ``at_s``, the
                       seconds from the run's begin to the request, or to the last event

    SUMMARY          {count, p50, p99, max}, or {count: 0}; nearest-rank percentiles, so that each
                     is a value that was measured (p99 of fewer than 100 values: the maximum)
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydroslurm.errors import RunFolderError
from hydroslurm.report.history import History
from hydroslurm.report.pauses import Life, Pause
from hydroslurm.report.stops import KILLED, Stopped, steps_lost_total

SCHEMA = 1


def figures_of(history: History) -> dict[str, Any]:
    """The object that the module's docstring describes."""
    pauses = history.pauses
    return {
        "schema": SCHEMA,
        "run": history.name,
        "job_ids": list(history.job_ids),
        "ranks": len(history.ranks),
        "lives": len(history.lives),
        "restarts": history.restarts,
        "begin_epoch_s": history.begin_epoch_ns / 1e9,
        "observed_s": history.observed_s,
        "pauses": len(pauses),
        "incomplete": sum(not pause.complete for pause in pauses),
        "stop_requests": len(history.stop_requests),
        "parked_total_s": math.fsum(pause.parked_s or 0.0 for pause in pauses),
        "in_flight": sum(bool(pause.in_flight) for pause in pauses),
        "park_us": summary(pause.park_us for pause in pauses),
        "all_parked_us": summary(pause.all_parked_us for pause in pauses),
        "drain_us": summary(pause.drain_us for pause in pauses),
        "resume_us": summary(pause.resume_us for pause in pauses),
        "parked_s": summary(pause.parked_s for pause in pauses),
        "by_cause": _by_cause(pauses),
        "every_pause": [
            _row(history, life, pause) for life in history.lives for pause in life.pauses
        ],
        "stops": _stops(history),
    }


def write_figures(figures: Mapping[str, Any], path: Path) -> Path:
    """Write them whole or not at all; returns the path.

    Raises:
        RunFolderError: the file cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n")
        part.replace(path)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}. "
            "Copy the run folder to a place that you can write, and report on the copy"
        ) from error
    return path


def summary(values: Iterable[float | None]) -> dict[str, float | int]:
    """Count, p50, p99 and max of the values that are known."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"count": 0}
    return {
        "count": len(known),
        "p50": percentile(known, 50),
        "p99": percentile(known, 99),
        "max": known[-1],
    }


def percentile(ordered: list[float], percent: int) -> float:
    """The nearest-rank percentile of values in ascending order; there must be one at least."""
    return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]


def _by_cause(pauses: Iterable[Pause]) -> dict[str, Any]:
    groups: dict[str, list[Pause]] = {}
    for pause in pauses:
        groups.setdefault(pause.main_cause or "unknown", []).append(pause)
    return {
        cause: {
            "pauses": len(group),
            "park_us": summary(pause.park_us for pause in group),
            "resume_us": summary(pause.resume_us for pause in group),
            "parked_s": summary(pause.parked_s for pause in group),
        }
        for cause, group in sorted(groups.items())
    }


def _row(history: History, life: Life, pause: Pause) -> dict[str, Any]:
    begin = pause.begin_mono_ns
    at_s = None if begin is None else history.since_begin_s(life, begin)
    return {**asdict(pause), "outcome": pause.outcome, "at_s": at_s}


def _stops(history: History) -> dict[str, Any]:
    stops = history.stops
    return {
        "count": len(stops),
        "incomplete": sum(not stop.complete for stop in stops),
        "killed": sum(stop.left == KILLED for stop in stops),
        "by_reason": dict(sorted(Counter(stop.reason or stop.left for stop in stops).items())),
        "safe_point_ms": summary(stop.safe_point_ms for stop in stops),
        "staged_ms": summary(stop.staged_ms for stop in stops),
        "durable_ms": summary(stop.durable_ms for stop in stops),
        "requeued_ms": summary(stop.requeued_ms for stop in stops),
        "waited_s": summary(stop.waited_s for stop in stops),
        "first_step_s": summary(stop.first_step_s for stop in stops),
        "steps_lost_total": steps_lost_total(stops),
        "at_least": any(not stop.steps_lost_exactly for stop in stops),
        "every_stop": [_stop_row(history, stopped) for stopped in history.stopped],
    }


def _stop_row(history: History, stopped: Stopped) -> dict[str, Any]:
    at_s = history.since_begin_s(stopped.life, stopped.begin_mono_ns)
    return {**asdict(stopped.stop), "at_s": at_s}
