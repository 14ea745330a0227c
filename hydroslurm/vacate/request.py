"""How ``hydroslurm pause --vacate`` asks: a small file beside a rank's event log.

A signal carries nothing but its number. The file names the process and the number of the pause that
it is for, so that it is void for every other pause and needs neither a clock nor to be removed.

    rank-00000.jsonl      the log
    rank-00000.vacate     PID PAUSE GRACE_S NUMBER
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.files import read_regular, write_atomically
from hydroslurm.core.status import read_status, status_of
from hydroslurm.core.trust import is_trusted

_LIMIT_BYTES = 256
_LOOK_BYTES = 64 << 10
_MOVES = (EventKind.INSTALLED, EventKind.GATE_CLOSED, EventKind.RESUMED)


@dataclass(frozen=True)
class VacateRequest:
    """One of them.

    Attributes:
        pid: the process that it is for.
        pause: the number of its pause, as in its events.
        grace_s: how long after SIGTSTP this Slurm sends SIGSTOP; None where nobody has asked.
        number: tells two requests for one pause apart; the same for all ranks of a job.
    """

    pid: int
    pause: int
    grace_s: int | None = None
    number: int = 0


def path_of(log: Path) -> Path:
    """Where a rank looks for one."""
    return log.with_suffix(".vacate")


def ask_to_vacate(log: Path, *, number: int, grace_s: int | None = None) -> None:
    """Have the rank's coming pause, or the one that it is in, vacate.

    Raises:
        OSError: it cannot be written, or the rank has written nothing yet.
    """
    pid, pause = _coming_pause(log)
    text = f"{pid} {pause} {-1 if grace_s is None else grace_s} {number}\n"
    write_atomically(path_of(log), text)


def _coming_pause(log: Path) -> tuple[int, int]:
    """The process, and the number of the pause that it is in or will be in next. By its events: the
    status follows them by milliseconds, in which a pause may have ended."""
    moves = list(read_events(log, kinds=_MOVES, most_bytes=_LOOK_BYTES))
    if moves:
        latest = moves[-1]
        told = latest.data.get("pause", 0)
        return latest.pid, told + (latest.kind is not EventKind.GATE_CLOSED)
    status = read_status(status_of(log))
    if status is None:
        raise FileNotFoundError(f"{log}: the rank has not written anything yet")
    return status.pid, status.pauses + (status.state not in ("parking", "parked"))


def read_request(log: Path) -> VacateRequest | None:
    """The request beside a log; None where there is none that counts.

    Anybody could make the rank copy its memory otherwise, so the file must be ours or root's; it
    may lie in a folder that a lab shares.
    """
    path = path_of(log)
    try:
        pid, pause, grace_s, number = map(int, read_regular(path, limit_bytes=_LIMIT_BYTES).split())
        trusted = is_trusted(path, shared=True)
    except (OSError, ValueError):
        return None
    if not trusted:
        return None
    return VacateRequest(pid, pause, grace_s if grace_s >= 0 else None, number)
