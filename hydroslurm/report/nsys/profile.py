"""What one nsys report holds of a job: its pauses and stops, and the clocks they are told in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydroslurm.report.nsys.assembly import pauses_of, stops_of
from hydroslurm.report.nsys.clocks import Clocks
from hydroslurm.report.nsys.database import open_database
from hydroslurm.report.nsys.export import as_sqlite
from hydroslurm.report.nsys.gpu import Gpu, read_gpu
from hydroslurm.report.nsys.marks import Marks, read_marks
from hydroslurm.report.nsys.profiled import ProfiledPause, ProfiledStop

__all__ = ["Profile", "ProfiledPause", "ProfiledStop", "read_profile"]


@dataclass(frozen=True)
class Profile:
    """One nsys report."""

    path: Path
    host: str | None
    session_epoch_ns: int | None
    """Wall clock of the moment that nsys counts from."""
    pids: tuple[int, ...]
    """Processes with marks of hydroslurm."""
    pauses: tuple[ProfiledPause, ...]
    """By process, then in order."""
    stops: tuple[ProfiledStop, ...]
    """By process."""
    alignment_error_ns: int | None
    """The largest ``error_ns`` of the above."""
    missing: tuple[str, ...]
    """What the report does not hold and a reader would look for; plain sentences."""
    epoch_offset_ns: int | None
    """Added to CLOCK_MONOTONIC it gives the wall clock, as it was when nsys began."""
    version: str | None
    """Of the nsys that wrote it."""


def read_profile(path: Path) -> Profile:
    """Read ``*.nsys-rep`` or ``*.sqlite``. A cut-off file is read as far as it goes.

    An ``.nsys-rep`` is turned into SQLite first, which stays beside it where that can be written.

    Raises:
        NsysMissing: the report has to be exported, and there is no ``nsys`` here.
        ProfileError: not a report of nsys, or nothing of it can be read.
    """
    with as_sqlite(path) as exported, open_database(exported) as database:
        marks = read_marks(database)
        clocks = Clocks(marks.clocks)
        paused = [m.global_pid for m in marks.by_pid.values() if m.requests["pause_request"]]
        gpu = read_gpu(database, global_pids=paused)
        pauses = [p for pid in marks.pids for p in pauses_of(marks.by_pid[pid], clocks, gpu)]
        stops = [s for pid in marks.pids for s in stops_of(marks.by_pid[pid], clocks)]
        stated = [p.error_ns for p in pauses] + [s.error_ns for s in stops]
        errors = [error_ns for error_ns in stated if error_ns is not None]
        epoch_ns = database.session_epoch_ns()
        return Profile(
            path=path,
            host=database.host(),
            session_epoch_ns=epoch_ns,
            pids=marks.pids,
            pauses=tuple(pauses),
            stops=tuple(stops),
            alignment_error_ns=max(errors, default=None),
            missing=(*database.missing, *_absent(marks, gpu)),
            epoch_offset_ns=clocks.epoch_offset_ns(epoch_ns),
            version=database.version(),
        )


def _absent(marks: Marks, gpu: Gpu) -> list[str]:
    sentences = list(marks.missing)
    if not marks.pids:
        return sentences
    timed = any(several for one in marks.by_pid.values() for several in one.ranges.values())
    if timed and len(marks.clocks) < 2:
        sentences.append(
            f"{len(marks.clocks)} `clock` mark(s) where two are needed: what nsys timed itself "
            "cannot be told in the clock of the event log"
        )
    if not gpu.pids:
        sentences.append(
            "no kernels, copies or memsets: profiled without --trace=cuda, or no GPU was used"
        )
    elif idle := [str(pid) for pid in marks.pids if pid not in gpu.pids]:
        sentences.append(f"no kernels, copies or memsets of process {', '.join(idle)}")
    return sentences
