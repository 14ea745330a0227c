"""What a run's pauses and stops cost, in numbers: ``report/figures.json``.

docs/figures.md describes every field, and ``hydroslurm report --schema`` prints the JSON Schema;
both are made by :mod:`hydroslurm.report.schema`. A latency that nobody measured is absent from its
summary, never 0.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydroslurm.errors import RunFolderError
from hydroslurm.report.beside import Beside
from hydroslurm.report.goodput import goodput_of
from hydroslurm.report.history import History
from hydroslurm.report.nsys.profile import Profile
from hydroslurm.report.pauses import Pause
from hydroslurm.report.rows import PauseRow, Rows, StopRow, fields_of
from hydroslurm.report.stops import KILLED, steps_lost_total

SCHEMA = 2

MOST_ROWS = 10_000
"""Of ``every_pause`` and ``every_stop``: a file that can still be opened."""


def figures_of(
    history: History, beside: Beside | None = None, rows: Rows | None = None
) -> dict[str, Any]:
    """The object that docs/figures.md describes; ``rows`` where they are made already."""
    beside = beside or Beside()
    all_rows = rows or Rows.of(history, beside)
    pauses, of_pauses = history.pauses, all_rows.pauses
    goodput = goodput_of(history, beside)
    return {
        "schema": SCHEMA,
        "run": history.name,
        "job_ids": list(history.job_ids),
        "ranks": len(history.ranks),
        "lives": len(history.lives),
        "restarts": history.restarts,
        "begin_epoch_s": history.begin_epoch_ns / 1e9,
        "observed_s": history.observed_s,
        "events": history.events,
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
        "asked_us": summary(row.asked_us for row in of_pauses),
        "save_ms": summary(
            save.durable_ms
            for life in history.lives
            if life.progress
            for save in life.progress.saves
        ),
        "by_cause": _by_cause(pauses),
        "every_pause": [_row(row) for row in of_pauses[:MOST_ROWS]],
        "every_pause_left_out": max(0, len(of_pauses) - MOST_ROWS),
        "stops": _stops(all_rows.stops),
        "goodput": None if goodput is None else fields_of(goodput),
        "clocks": _clocks(history),
        "slurm": {
            "suspend_grace_s": beside.accounting.suspend_grace_s,
            "lives": [fields_of(life) for life in beside.accounting.lives],
        },
        "nsys": _nsys(of_pauses, beside),
        "missing": beside.sentences(history),
    }


def write_figures(figures: Mapping[str, Any], path: Path) -> Path:
    """Write them whole or not at all; returns the path.

    Raises:
        RunFolderError: the file cannot be written.
    """
    return write_whole(path, lambda part: _write_lines(figures, part))


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Have a file of the report's folder written beside its place, and put it there; returns the
    path.

    Raises:
        RunFolderError: it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with _own_folder(path.parent) as folder:
            part = folder / f"{path.name}.part"
            part.unlink(missing_ok=True)
            write(part)
            part.replace(folder / path.name)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}. "
            "Copy the run folder to a place that you can write, and report on the copy"
        ) from error
    return path


@contextlib.contextmanager
def _own_folder(path: Path) -> Iterator[Path]:
    """The folder that is there now, whatever its owner's neighbours put in its place meanwhile.

    Who reports on somebody else's run, as root above all, must not be led by a link to write over
    what lies elsewhere.

    Raises:
        OSError: it is a link, or somebody else's.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = os.fstat(fd).st_uid
        if owner != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to uid {owner}", str(path))
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


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


def _write_lines(figures: Mapping[str, Any], path: Path) -> None:
    """One key to a line, and one row of a list of objects: to be read with less and grep, too."""
    with path.open("w") as file:
        file.write(_object(figures, " ") + "\n")


def _object(value: Mapping[str, Any], indent: str) -> str:
    parts = []
    for key, inner in value.items():
        text = json.dumps(inner, allow_nan=False)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            rows = f",\n{indent} ".join(json.dumps(row, allow_nan=False) for row in inner)
            text = f"[\n{indent} {rows}\n{indent}]"
        elif isinstance(inner, dict) and any(isinstance(one, list) for one in inner.values()):
            text = _object(inner, indent + " ")
        parts.append(f"{indent}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + f"\n{indent[:-1]}}}"


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


def _row(row: PauseRow) -> dict[str, Any]:
    return {
        **fields_of(row.pause),
        "outcome": row.pause.outcome,
        "at_s": row.at_s,
        "pid": row.life.pid,
        "asked_us": row.asked_us,
        "stopped_us": row.stopped_us,
        "nsys": None if row.profiled is None else fields_of(row.profiled),
    }


def _stops(rows: list[StopRow]) -> dict[str, Any]:
    stops = [row.stop for row in rows]
    samples = [row.samples_lost for row in rows if row.samples_lost is not None]
    per_rank: dict[int, int] = {}
    for row in rows:
        per_rank[row.stop.rank] = per_rank.get(row.stop.rank, 0) + (row.samples_lost or 0)
    return {
        "count": len(stops),
        "incomplete": sum(not stop.complete for stop in stops),
        "killed": sum(stop.left == KILLED for stop in stops),
        "by_reason": dict(sorted(Counter(stop.reason or stop.left for stop in stops).items())),
        "safe_point_ms": summary(stop.safe_point_ms for stop in stops),
        "staged_ms": summary(stop.staged_ms for stop in stops),
        "written_ms": summary(stop.written_ms for stop in stops),
        "durable_ms": summary(stop.durable_ms for stop in stops),
        "requeued_ms": summary(stop.requeued_ms for stop in stops),
        "eligible_s": summary(row.eligible_s for row in rows),
        "queued_s": summary(row.queued_s for row in rows),
        "start_s": summary(row.start_s for row in rows),
        "waited_s": summary(stop.waited_s for stop in stops),
        "first_step_s": summary(stop.first_step_s for stop in stops),
        "steps_lost_total": steps_lost_total(stops),
        "samples_lost_total": max(per_rank.values()) if samples else None,
        "at_least": any(not stop.steps_lost_exactly for stop in stops),
        "every_stop": [_stop_row(row) for row in rows[:MOST_ROWS]],
        "every_stop_left_out": max(0, len(rows) - MOST_ROWS),
    }


def _stop_row(row: StopRow) -> dict[str, Any]:
    mine = fields_of(row)
    for name in ("stopped", "before", "after"):
        del mine[name]
    return {
        **fields_of(row.stop),
        **mine,
        "slurm_before": None if row.before is None else fields_of(row.before),
        "slurm_after": None if row.after is None else fields_of(row.after),
    }


def _clocks(history: History) -> dict[str, Any]:
    alignment = history.alignment
    return {
        "error_ns": alignment.error_ns,
        "within_ns": alignment.within_ns,
        "between_ns": alignment.between_ns,
        "hosts": [fields_of(host) for host in alignment.hosts],
        "words": " ".join(alignment.sentences()),
    }


def _nsys(rows: list[PauseRow], beside: Beside) -> dict[str, Any] | None:
    if not beside.profiles:
        return None
    seen = [row.profiled for row in rows if row.profiled is not None]
    return {
        "profiles": [_profile(profile) for profile in beside.profiles],
        "joined": len(seen),
        "park_us": summary(one.park_us for one in seen),
        "resume_us": summary(one.resume_us for one in seen),
        "last_kernel_us": summary(one.last_kernel_us for one in seen),
        "first_kernel_us": summary(one.first_kernel_us for one in seen),
        "difference_us": summary(one.difference_us for one in seen),
    }


def _profile(profile: Profile) -> dict[str, Any]:
    error_ns = profile.alignment_error_ns
    return {
        "path": str(profile.path),
        "host": profile.host,
        "pids": list(profile.pids),
        "pauses": len(profile.pauses),
        "stops": len(profile.stops),
        "error_us": None if error_ns is None else error_ns / 1e3,
    }
