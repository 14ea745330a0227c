"""attempts.jsonl: a line when an attempt of a run begins, a line when it ends; their limits. And
finished.json, the marker that makes a restart exit at once.

An attempt without an end was killed: by a crash, by running out of memory, by a node failure, or by
a SIGKILL before it could leave. Each line is one write and an fsync, so a kill can tear only the
last line, and torn lines are skipped.

A run is finished when its training is done *and* the process that did it exits with status 0. What
a script does after its ``with Run`` block (an export, say) belongs to the job and has no safe
points, so the marker is written when the interpreter shuts down. After any other exit there is
none: the next start trains nothing, and repeats that last part. Slurm 25.11 requeues a preempted
job whatever its exit status, including one that finished its training within the grace; without
the marker everything after the training would run again.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from hydroslurm.core.decoding import Count, Text, decode
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import at_end
from hydroslurm.core.fence import Fence
from hydroslurm.core.files import append_entry, parse_json, read_end, read_regular, write_atomically
from hydroslurm.core.rundir import (
    ATTEMPT_ENV,
    ATTEMPTS_ENV,
    GENERATION_ENV,
    SUPERVISED_ENV,
    RunDir,
)
from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import RunEnded, RunFolderError, UntrustedFile, UsageError
from hydroslurm.gate.marks import NO_RANGE, Emit, Range
from hydroslurm.runtime.controller import Controller
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.rank_group import warning

Ending = Literal["preempted", "time_limit", "cancelled", "requeued", "asked", "error", "finished"]
DIED = "died"

FORMAT = 2
_MOST_BYTES = 64 << 20
"""Half a million attempts."""

_BUDGETS = {
    "preempted": "preemptions",
    "requeued": "preemptions",
    "asked": "preemptions",
    "time_limit": "time_limits",
    "error": "failures",
    DIED: "failures",
}


@dataclass(frozen=True)
class StopPlan:
    """What a stop means for this job.

    Attributes:
        ending: for attempts.jsonl.
        deadline_mono_s: until when the process certainly survives (``time.monotonic()``);
            infinite where nothing will kill it.
        requeue: whether to ask Slurm to start the job again.
        exit_code: the status to exit with.
        message: why, for the log.
    """

    ending: Ending
    deadline_mono_s: float
    requeue: bool
    exit_code: int
    message: str


@dataclass(frozen=True)
class Limits:
    """How often a run may be started again, by cause; None means no limit.

    Attributes:
        preemptions: attempts that ended by a preemption, a requeue or a person's signal.
        time_limits: attempts that ended at their time limit.
        failures: attempts that ended by an exception, or died (killed, crashed, node failure).
        attempts_without_progress: consecutive attempts that began at the same step, as far as
            there was something left to train.
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
                    "for no limit"
                )


def limits_of(given: Limits | None, environ: Mapping[str, str]) -> Limits:
    """The limits of a run: its script's, overridden by HYDROSLURM_ATTEMPTS_WITHOUT_PROGRESS.

    The supervisor of a TrainingJob counts failures itself, over all ranks, so under one a run has
    no limit on them unless its script sets one. So does the coordinator of an elastic run, whose
    members may change several times within one step.

    Raises:
        UsageError: the variable is not a whole number of 1 or more.
    """
    limits = given or Limits(failures=None if environ.get(SUPERVISED_ENV) else Limits.failures)
    if given is None and environ.get(GENERATION_ENV):
        limits = Limits(failures=None, attempts_without_progress=None)
    text = environ.get(ATTEMPTS_ENV)
    if not text:
        return limits
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{ATTEMPTS_ENV}={text!r}: wanted a whole number of 1 or more")
    return replace(limits, attempts_without_progress=int(text))


def least_number(environ: Mapping[str, str], allocation: Allocation | None) -> int:
    """The number of this attempt as the job counts it: its supervisor's, else Slurm's restarts plus
    one. An attempt that was killed before it had a Run is counted there, and not in the log."""
    text = environ.get(ATTEMPT_ENV, "")
    if text.isascii() and text.isdecimal():
        return max(1, int(text))
    return 1 if allocation is None else allocation.restart_count + 1


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt as recorded in the file.

    Attributes:
        number: from 1.
        step: where it began.
        ending: None while it runs, or when it died.
        end_step, ended_epoch_ns: where and when it ended; None and 0 with ``ending``.
        token: random; of two that took one number, the first in the file has it.
    """

    number: int
    began_epoch_ns: int
    step: int
    ending: str | None = None
    end_step: int | None = None
    ended_epoch_ns: int = 0
    token: str = field(default="", compare=False)


class AttemptLog:
    """The attempts.jsonl of one run. Used by rank 0 only, from one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def attempts(self) -> tuple[AttemptRecord, ...]:
        """All attempts, oldest first.

        Raises:
            RunFolderError: the file cannot be read.
        """
        try:
            text = read_end(self.path, most_bytes=_MOST_BYTES)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise RunFolderError(f"cannot read {self.path}: {error.strerror}") from error
        found: dict[int, AttemptRecord] = {}
        for line in text.splitlines():
            _fold(found, line)
        return tuple(found[number] for number in sorted(found))

    def set_aside_foreign(self) -> None:
        """Rename a file that another user may have written: its entries could end this run, and
        ours must not be appended to it.

        Raises:
            RunFolderError: it cannot be renamed.
        """
        try:
            check_trusted(self.path, what="the list of attempts", shared=True)
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
                f"hydroslurm: {error}. It was renamed to {aside.name}, and the count of attempts "
                "starts over",
                RuntimeWarning,
                stacklevel=3,
            )

    def begin(
        self,
        step: int,
        *,
        now_epoch_ns: int,
        job_id: int | None,
        restart_count: int,
        at_least: int = 1,
    ) -> int:
        """Record that an attempt begins; returns its number, the next one that is ``at_least``."""
        token = secrets.token_hex(8)
        while True:
            last = max((attempt.number for attempt in self.attempts()), default=0)
            number = max(last + 1, at_least)
            self._append(
                {
                    "attempt": number,
                    "began_epoch_ns": now_epoch_ns,
                    "step": step,
                    "job_id": job_id,
                    "restart_count": restart_count,
                    "token": token,
                }
            )
            # another start may have read the file at the same time
            taken = {one.number: one.token for one in self.attempts()}
            if taken.get(number, token) == token:
                return number

    def end(self, number: int, ending: Ending, *, step: int, now_epoch_ns: int) -> None:
        """Record why an attempt ends, and at which step."""
        self._append(
            {"attempt": number, "ended": ending, "step": step, "ended_epoch_ns": now_epoch_ns}
        )

    def _append(self, row: dict[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_entry(self.path, {"v": FORMAT, **row})
        except OSError as error:
            raise RunFolderError(
                f"cannot write {self.path}: {error.strerror}. The run's folder must be on a file "
                "system that this node can write"
            ) from error


def check_limits(attempts: Sequence[AttemptRecord], limits: Limits, *, step: int) -> None:
    """Decide whether one more attempt may begin at ``step``. Pure.

    Raises:
        RunEnded: it may not; the message gives the limit, the count and how to continue.
    """
    spent = {"preemptions": 0, "time_limits": 0, "failures": 0}
    for attempt in attempts:
        budget = _BUDGETS.get(attempt.ending or DIED)
        if budget:
            spent[budget] += 1
    for name, count in spent.items():
        limit = getattr(limits, name)
        if limit is not None and count > limit:
            raise RunEnded(
                f"this run has been started again after {count} {name.replace('_', ' ')}, and "
                f"Limits({name}={limit}) allows {limit}. Look at its logs; raise the limit, or "
                f"remove lines from attempts.jsonl, to continue from step {step}"
            )
    stuck = 0
    for attempt in reversed(attempts):
        if attempt.step != step or attempt.ending in ("cancelled", "finished"):
            break  # of a finished one, what follows the training may be long
        stuck += 1
    allowed = limits.attempts_without_progress
    if allowed is not None and stuck >= allowed:
        endings = ", ".join(attempt.ending or DIED for attempt in attempts[-stuck:])
        raise RunEnded(
            f"no progress: the last {stuck} attempts all began at step {step} and none got further "
            f"(they ended: {endings}). Is the time between two preemptions shorter than the start "
            "and one step, or does every attempt fail at the same place? "
            f"Limits(attempts_without_progress={allowed}) decides"
        )


def losses(history: Sequence[AttemptRecord], *, now_epoch_ns: int) -> tuple[int, float]:
    """Count the attempts that lost work; and for how long all have run, in seconds. Pure.

    An attempt lost work if it died, or if the next one resumed from an earlier step than its last.
    When one died is unknown: it counts as running until the next one began.
    """
    lost, ran_ns = 0, sum(now_epoch_ns - one.began_epoch_ns for one in history[-1:])
    for before, after in itertools.pairwise(history):
        lost += before.end_step is None or 0 < after.step < before.end_step  # 0: resume=False
        ran_ns += (before.ended_epoch_ns or after.began_epoch_ns) - before.began_epoch_ns
    return lost, max(0, ran_ns) / 1e9


@dataclass(frozen=True)
class _Line:
    """What a line of the file has; of an attempt that begins, or of one that ends."""

    attempt: Count
    step: Count
    began_epoch_ns: Count | None = None
    token: Text = ""
    ended: Annotated[str, msgspec.Meta(pattern=r"^[\w ]{1,40}\Z")] | None = None
    ended_epoch_ns: Count = 0


def _fold(found: dict[int, AttemptRecord], text: bytes) -> None:
    try:
        line = decode(_Line, text)
    except ValueError:
        return  # torn, or written by a later version
    number, begun = line.attempt, found.get(line.attempt)
    if line.ended is None and line.began_epoch_ns is not None and begun is None:
        found[number] = AttemptRecord(number, line.began_epoch_ns, line.step, token=line.token)
    elif line.ended is not None and begun is not None:
        found[number] = replace(
            begun, ending=line.ended, end_step=line.step, ended_epoch_ns=line.ended_epoch_ns
        )


class CurrentAttempt:
    """One start of a run, with all its ranks. One rank records it in attempts.jsonl for all; each
    rank records it in its own events.

    Attributes:
        number: from 1; None before it has begun.
        step: the last one that is complete.
        history: all attempts of the run, this one last; only on the rank that records them.
        run: its folder.
    """

    def __init__(
        self,
        run: RunDir,
        controller: Controller,
        *,
        limits: Limits,
        fence: Fence,
        allocation: Allocation | None,
        at_least: int = 1,
    ) -> None:
        """``at_least``: the smallest number that it may get."""
        self.number: int | None = None
        self.step = 0
        self.run = run
        self._log = AttemptLog(run.attempts_jsonl)
        self._controller = controller
        self._limits = limits
        self._fence = fence
        self._allocation = allocation
        self._at_least = at_least
        self.history: tuple[AttemptRecord, ...] = ()
        self._has_stepped = False
        self._marks_steps = Emit.STEPS in controller.marks.emitting
        self._stepping = NO_RANGE
        self._watch = controller.watch

    def enter(self, step: int) -> int:
        """Record for all ranks that an attempt begins at a step; returns its number.

        Raises:
            RunEnded: a limit is spent, or attempts make no progress. Nothing is recorded.
            StaleAttempt: a newer attempt has claimed the folder. Nothing is recorded.
        """
        self._check_fence("the start")
        self._log.set_aside_foreign()
        check_limits(self._log.attempts(), self._limits, step=step)
        allocation = self._allocation
        number = self._log.begin(
            step,
            now_epoch_ns=time.time_ns(),
            job_id=allocation.job_id if allocation else None,
            restart_count=allocation.restart_count if allocation else 0,
            at_least=self._at_least,
        )
        self.history = self._log.attempts()
        return number

    def begin(self, number: int, step: int) -> None:
        """Begin, on this rank, the attempt that was entered."""
        self.number = number
        self.step = self._controller.step = step
        self.record(EventKind.ATTEMPT_BEGAN, step=step)
        self._mark_step(step)

    def note_step(self, step: int) -> bool:
        """Pass the step on to events and NVTX; True for the first step of this attempt."""
        self.step = self._controller.step = step
        if self._marks_steps:
            self._mark_step(step)
        if self._watch.is_due:
            self._watch.at_safe_point()
        is_first, self._has_stepped = not self._has_stepped, True
        return is_first

    def end(self, ending: Ending, *, step: int) -> None:
        """Record for all ranks why it ends; does nothing if it never began.

        Raises:
            StaleAttempt: a newer attempt writes this log now.
        """
        if self.number is not None:
            self._check_fence("the end of this attempt")
            self._log.end(self.number, ending, step=step, now_epoch_ns=time.time_ns())

    def record_end(self, ending: Ending) -> None:
        """Record the end in this rank's events."""
        if self.number is not None:
            self.record(EventKind.ATTEMPT_ENDED, ending=ending)

    def record(self, kind: EventKind, **data: object) -> None:
        """Record an event of this attempt."""
        self._controller.record(kind, {"attempt": self.number, **data})

    def _check_fence(self, what: str) -> None:
        try:
            self._fence.check(what)
        except OSError as error:
            raise RunFolderError(f"cannot read {self._fence.path}: {error.strerror}") from error

    def _mark_step(self, step: int) -> None:
        """NVTX: one step ends at this safe point, and the next begins."""
        marks = self._controller.marks
        marks.end(self._stepping)
        if self._marks_steps:
            self._stepping = marks.begin(Range.STEP, step + 1)


# --- the marker of a finished run
# ------------------------------------------------------------------------------------------------

_LIMIT_BYTES = 4096


def write_finished(run: RunDir, *, step: int) -> None:
    """Write the marker, durably.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    path = run.finished_json
    content = json.dumps({"v": 1, "step": step, "epoch_ns": time.time_ns()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, mode=0o644, durable=True)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error


def remove_finished(run: RunDir) -> None:
    """Remove the marker, for a run that starts over.

    Raises:
        RunFolderError: it cannot be removed.
    """
    try:
        run.finished_json.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(f"cannot remove {run.finished_json}: {error.strerror}") from error


def finished_step(run: RunDir) -> int | None:
    """The step at which a run was finished, None when it is not. A marker that another user may
    have written is ignored with a warning.

    Raises:
        RunFolderError: it exists and cannot be read.
    """
    try:
        check_trusted(run.finished_json, what="the marker", shared=True)
        return int(parse_json(read_regular(run.finished_json, limit_bytes=_LIMIT_BYTES))["step"])
    except FileNotFoundError:
        return None
    except UntrustedFile as error:
        warnings.warn(
            f"hydroslurm: {error}. It says that this run has finished; it is ignored, and the "
            "run continues",
            RuntimeWarning,
            stacklevel=1,  # from one place, so that Python says it once
        )
        return None
    except OSError as error:
        raise RunFolderError(f"the run folder {run.root}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{run.finished_json} cannot be read ({error}). Remove it to train on"
        ) from error


@dataclass(frozen=True)
class _Trained:
    """A run whose training is done, in this process."""

    pid: int
    run: RunDir
    step: int
    fence: Fence
    others: Callable[[], bool]


_trained: dict[Path, _Trained] = {}


def finish_at_good_end(run: RunDir, *, step: int, fence: Fence, others: Callable[[], bool]) -> None:
    """Write the marker of a run once this process exits with status 0; see
    :func:`hydroslurm.core.exitcodes.at_end`.

    Args:
        others: asked then: whether all other ranks that have to have ended well, too.
    """
    if not _trained:
        at_end(settle_finished)
    _trained[run.root] = _Trained(os.getpid(), run, step, fence, others)


def next_unfinished(run: RunDir) -> RunDir:
    """The folder itself, or the first ``fit-N`` in it in which this process has not finished."""
    number, found = 1, run
    while found.root in _trained and _trained[found.root].pid == os.getpid():
        number += 1
        found = RunDir(run.root / f"fit-{number}")
    return found


def require_unfinished(run: RunDir) -> None:
    """Check that a Run may be created in a folder.

    Raises:
        UsageError: another one has finished there in this process: a restart of the first would
            load what the second has saved.
    """
    done = _trained.get(run.root)
    if done is not None and done.pid == os.getpid():
        raise UsageError(
            f"this process has already finished a Run in {run.root}, and a folder belongs to one "
            "run. Give each of two consecutive runs its own: "
            f'Run(directory="{run.root}/second", ...)'
        )


def settle_finished(problem: str = "") -> None:
    """Write the markers as the process exits, or log why not."""
    for done in [one for one in _trained.values() if one.pid == os.getpid()]:
        del _trained[done.run.root]
        if not done.run.root.is_dir():  # a folder that was made for this process only
            continue
        if problem or not done.others():
            why = f"the process ends with {problem}" if problem else "another rank ends otherwise"
            warning(
                f"the training in {done.run.root} is done, but {why}: a restart repeats what "
                "follows the training"
            )
            continue
        try:
            done.fence.check("the end of the run")
            write_finished(done.run, step=done.step)
        except Exception as error:  # an exit status cannot be changed any more
            warning(f"finished.json could not be written, so a restart repeats the end: {error}")
