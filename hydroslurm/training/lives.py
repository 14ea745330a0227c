"""attempts.jsonl: a line when an attempt of a run begins, and one when it ends; what follows.

A *life* is one process of rank 0. A life without an end was killed: by a crash, a full memory, a
node that died, or a SIGKILL that came before it could leave. Lines are appended with one write and
an fsync, so that a kill tears the last line at the most, and a torn line is passed over.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hydroslurm.core.files import open_regular, parse_json, read_regular
from hydroslurm.core.supervised import LIVES_ENV, SUPERVISED_ENV
from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import RunEnded, RunFolderError, UntrustedFile, UsageError

Ending = Literal["preempted", "time_limit", "cancelled", "requeued", "asked", "error", "finished"]
DIED = "died"

_MOST_BYTES = 64 << 20
"""Half a million lives."""

_BUDGETS = {
    "preempted": "preemptions",
    "requeued": "preemptions",
    "asked": "preemptions",
    "time_limit": "time_limits",
    "error": "failures",
    DIED: "failures",
}


@dataclass(frozen=True)
class Limits:
    """How often a run may be started again, by cause; None is without limit.

    Attributes:
        preemptions: lives that ended by a preemption, a requeue or a signal of a person's.
        time_limits: lives that ended because their time was over.
        failures: lives that ended by an exception, or without a word (killed, crashed, node died).
        attempts_without_progress: so many lives in a row that began at the same step.
    """

    preemptions: int | None = None
    time_limits: int | None = None
    failures: int | None = 10
    attempts_without_progress: int | None = 5

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if name == "attempts_without_progress" else 0
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value >= least):
                raise UsageError(
                    f"Limits({name}={value!r}): wanted a whole number of {least} or more, or None "
                    "for without limit"
                )


def limits_of(given: Limits | None, environ: Mapping[str, str]) -> Limits:
    """The limits of a run: what its script says, and above it HYDROSLURM_ATTEMPTS_WITHOUT_PROGRESS.
    The supervisor of a TrainingJob counts failures itself, over all ranks; there a run has no limit
    of its own for them unless its script says one.

    Raises:
        UsageError: the variable is no number of 1 or more.
    """
    limits = given or Limits(failures=None if environ.get(SUPERVISED_ENV) else Limits.failures)
    text = environ.get(LIVES_ENV)
    if not text:
        return limits
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{LIVES_ENV}={text!r}: wanted a whole number of 1 or more")
    return replace(limits, attempts_without_progress=int(text))


@dataclass(frozen=True)
class LifeRecord:
    """One life as the file tells it.

    Attributes:
        number: from 1.
        began_epoch_ns: when.
        step: at which it began.
        job_id, restart_count: Slurm's; None and 0 outside of a job.
        ending: None while it lives, or when it died without a word.
        end_step: how far it had come; None with ``ending``.
    """

    number: int
    began_epoch_ns: int
    step: int
    job_id: int | None = None
    restart_count: int = 0
    ending: str | None = None
    end_step: int | None = None


class Ledger:
    """The lives of one run. Used by rank 0 alone, from one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lives(self) -> tuple[LifeRecord, ...]:
        """All lives, oldest first.

        Raises:
            RunFolderError: the file is there and cannot be read.
        """
        try:
            text = read_regular(self.path, limit_bytes=_MOST_BYTES)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise RunFolderError(f"cannot read {self.path}: {error.strerror}") from error
        found: dict[int, LifeRecord] = {}
        for line in text.splitlines():
            _fold(found, line)
        return tuple(found[number] for number in sorted(found))

    def set_aside_foreign(self) -> None:
        """Rename a file that somebody else may have written: its lives could end this run, and ours
        must not be appended to it.

        Raises:
            RunFolderError: it cannot be renamed.
        """
        try:
            check_trusted(self.path, what="the list of lives", shared=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RunFolderError(f"cannot read {self.path}: {error.strerror}") from error
        except UntrustedFile as error:
            aside = self.path.with_name(f"{self.path.name}.not-ours")
            try:
                self.path.replace(aside)
            except OSError as refused:
                raise RunFolderError(f"{error}. It is in the way: {refused.strerror}") from error
            warnings.warn(
                f"hydroslurm: {error}. It is {aside.name} now, and the lives are counted anew",
                RuntimeWarning,
                stacklevel=3,
            )

    def begin(self, step: int, *, now_epoch_ns: int, job_id: int | None, restart_count: int) -> int:
        """Write down that a life begins; returns its number."""
        number = max((life.number for life in self.lives()), default=0) + 1
        self._append(
            {
                "life": number,
                "began_epoch_ns": now_epoch_ns,
                "step": step,
                "job_id": job_id,
                "restart_count": restart_count,
            }
        )
        return number

    def end(self, number: int, ending: Ending, *, step: int, now_epoch_ns: int) -> None:
        """Write down why a life ends, and at which step."""
        self._append(
            {"life": number, "ended": ending, "step": step, "ended_epoch_ns": now_epoch_ns}
        )

    def _append(self, row: dict[str, Any]) -> None:
        line = json.dumps({"v": 1, **row}).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = open_regular(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            try:
                size = os.fstat(fd).st_size
                if size and os.pread(fd, 1, size - 1) != b"\n":
                    line = b"\n" + line  # the line before was torn by a kill
                os.write(fd, line)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise RunFolderError(
                f"cannot write {self.path}: {error.strerror}. The run's folder must be on a file "
                "system that this node can write"
            ) from error


def check_limits(lives: Sequence[LifeRecord], limits: Limits, *, step: int) -> None:
    """Decide whether one more life may begin at ``step``. Pure.

    Raises:
        RunEnded: it may not; the message says which limit, what was counted and how to go on.
    """
    spent = {"preemptions": 0, "time_limits": 0, "failures": 0}
    for life in lives:
        budget = _BUDGETS.get(life.ending or DIED)
        if budget:
            spent[budget] += 1
    for name, count in spent.items():
        limit = getattr(limits, name)
        if limit is not None and count > limit:
            raise RunEnded(
                f"this run has been started again after {count} {name.replace('_', ' ')}, and "
                f"Limits({name}={limit}) allows {limit}. Look at its logs; raise the limit, or "
                f"remove the lives from attempts.jsonl, to go on from step {step}"
            )
    stuck = 0
    for life in reversed(lives):
        if life.step != step or life.ending == "cancelled":
            break
        stuck += 1
    allowed = limits.attempts_without_progress
    if allowed is not None and stuck >= allowed:
        endings = ", ".join(life.ending or DIED for life in lives[-stuck:])
        raise RunEnded(
            f"no progress: the last {stuck} lives all began at step {step} and none got further "
            f"(they ended: {endings}). Is the time between two preemptions shorter than the start "
            "and one step, or does every life fail at the same place? "
            f"Limits(attempts_without_progress={allowed}) decides"
        )


def _fold(found: dict[int, LifeRecord], line: bytes) -> None:
    try:
        row = parse_json(line)
        number, step = _whole(row["life"]), _whole(row["step"])
        if "ended" in row:
            if number in found:
                found[number] = replace(found[number], ending=str(row["ended"]), end_step=step)
            return
        job_id = row.get("job_id")
        found[number] = LifeRecord(
            number=number,
            began_epoch_ns=_whole(row["began_epoch_ns"]),
            step=step,
            job_id=job_id if type(job_id) is int else None,
            restart_count=_whole(row.get("restart_count", 0)),
        )
    except (ValueError, KeyError, TypeError):
        return  # torn, or of a later version


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value
