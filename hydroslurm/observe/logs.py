"""The output of a job: which files hold it, and following them."""

from __future__ import annotations

import codecs
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hydroslurm.core.files import open_regular
from hydroslurm.errors import HydroslurmError, NoSuchJob, RunFolderError, UsageError
from hydroslurm.jobs.plan import Plan, read_submission
from hydroslurm.observe.find import view_of
from hydroslurm.observe.job import JobView
from hydroslurm.slurm.client import open_client

POLL_S = 0.3
_OF_RANK = re.compile(r"([0-9]+(?:_[0-9]+)?)_([0-9]+)_log\.(out|err)")
_OF_MEMBER = re.compile(r"member-([0-9]+_[0-9]+)-[0-9]+\.log")
_CHUNK_BYTES = 1 << 20


def plan_of(found: JobView) -> Plan:
    """The plan of a job.

    Raises:
        UsageError: it has none, because its submission was interrupted.
    """
    if found.plan is None:
        raise UsageError(f"{found.run.plan_json} is missing or broken: the job was never submitted")
    return found.plan


def replica_of(plan: Plan, wanted: str | None) -> str:
    """The replica of that name; None means the master.

    Raises:
        UsageError: there is none; the message lists those that there are.
    """
    if wanted is None or wanted in plan.replicas:
        return wanted or plan.replicas[0]
    raise no_replica(wanted, plan.replicas)


def no_replica(wanted: str, names: Sequence[str]) -> UsageError:
    """The error for a name that is none of these."""
    listed = ", ".join(names[:20]) + (" ..." if len(names) > 20 else "")
    return UsageError(f"there is no replica {wanted!r}; wanted one of {listed}")


def task_logs(found: JobView, replica: str | None) -> list[Path]:
    """The files of a replica's tasks; they need not be there yet.

    Raises:
        UsageError: as :func:`replica_of` and :func:`plan_of`.
    """
    plan = plan_of(found)
    if found.spec.elastic is not None:
        return _member_logs(found, replica)
    name = replica_of(plan, replica)
    return [
        found.run.task_log(number) for number, task in enumerate(plan.tasks) if task.replica == name
    ]


def _member_logs(found: JobView, member: str | None) -> list[Path]:
    """Of an elastic job: what the ranks of a member print, or of all that there have been."""
    files = {
        path: name[1]
        for path in found.run.logs.glob("member-*.log")
        if (name := _OF_MEMBER.fullmatch(path.name)) is not None
    }
    names = sorted(set(files.values()), key=lambda name: tuple(map(int, name.split("_"))))
    if member is not None and member not in names:
        raise no_replica(member, names)
    return sorted(
        (path for path in files if member in (None, files[path])),
        key=lambda path: (names.index(files[path]), path.name),
    )


def output_logs(found: JobView, replica: str | None) -> list[Path]:
    """The output files of a job without a spec, for all its attempts: those of one rank if submitit
    made one per rank, else the job's.

    Raises:
        UsageError: there are none, or no such rank; or the rank has no file of its own, and the
            message says where the output is.
    """
    files = _slurm_files(found)
    if not files:
        raise UsageError(
            f"Slurm has no output file for {found.name}: srun and salloc print to the terminal "
            "that they were called from, unless they get --output=FILE"
        )
    of_ranks = _rank_files(files)
    if of_ranks and (number := _rank_number(replica)) in of_ranks:
        return of_ranks[number]
    if of_ranks:
        raise no_replica(replica or "rank-0", [f"rank-{number}" for number in of_ranks])
    if replica is not None:
        raise UsageError(
            f"{replica} has no file of its own: what this job prints is in "
            f"{', '.join(map(str, files))}, which hydroslurm logs shows without --replica"
        )
    return files


def _slurm_files(found: JobView) -> list[Path]:
    """As Slurm names them; accounting has no names, but submitit always takes the same."""
    slurm = found.slurm
    named = [slurm.std_out, slurm.std_err] if slurm is not None else []
    files = [Path(one) for one in dict.fromkeys(named) if one and one != os.devnull]
    if not files and found.submission is not None:
        stem = f"{found.submission.job_id}_0_log"
        files = [found.run.logs / f"{stem}.out", found.run.logs / f"{stem}.err"]
    return files


def _rank_files(files: Sequence[Path]) -> dict[int, list[Path]]:
    """submitit's files of each rank; Slurm knows only those of the first."""
    found: dict[int, list[Path]] = {}
    for file in files:
        name = _OF_RANK.fullmatch(file.name)
        if name is None:
            return {}
        found.setdefault(0, []).append(file)  # it need not be there yet
        for other in sorted(file.parent.glob(f"{name[1]}_*_log.{name[3]}")):
            its = _OF_RANK.fullmatch(other.name)
            if its is not None and its[1] == name[1] and int(its[2]):
                found.setdefault(int(its[2]), []).append(other)
    return dict(sorted(found.items()))


def _rank_number(replica: str | None) -> int | None:
    if replica is None:
        return 0
    word, _, number = replica.partition("-")
    return int(number) if word == "rank" and number.isdecimal() else None


def supervisor_logs(found: JobView) -> list[Path]:
    """The output of the batch script, for all attempts of the job."""
    return [found.run.logs / f"{read_submission(found.run.root).job_id}_0_log.out"]


def follow_files(
    files: Sequence[Path], *, tail: int = 0, until: Callable[[], bool] | None = None
) -> Iterator[str]:
    """Yield what is in the files; with ``until`` also what is appended, until it returns True.

    Args:
        files: may not exist yet.
        tail: start with so many last lines; 0: all.
        until: called a few times a second.
    """
    growing = [_Growing(file, whole_lines=len(files) > 1) for file in files]
    for one in growing:
        yield from (deque(_lines(one.new()), tail) if tail else one.new())
    is_over = until is None
    while until is not None and not is_over:
        is_over = until()  # before the last look, which then finds everything
        for one in growing:
            yield from one.new()
        if not is_over:
            time.sleep(POLL_S)
    for one in growing:
        yield one.rest


ASK_EVERY_S = 10.0
"""How often Slurm is asked whether a job has ended: sites dislike more."""


class Ended:
    """Whether a job is over: the run folder tells at once, Slurm if nobody could write there."""

    def __init__(self, found: JobView) -> None:
        self._found = found
        self._asked_s = time.monotonic()

    def __call__(self) -> bool:
        if self._found.is_over:
            return True
        if time.monotonic() - self._asked_s > ASK_EVERY_S:
            slurm = None if self._found.has_spec else self._found.slurm
            which = str(self._found.run.root if slurm is None else slurm.id)
            try:
                self._found = view_of(open_client(), which)
            except NoSuchJob:  # it ended, and slurmctld has forgotten it
                return True
            except HydroslurmError:
                pass
            self._asked_s = time.monotonic()
        return self._found.is_over


class _Growing:
    """A file that others append to; yields whole characters, or whole lines if there are several
    files."""

    def __init__(self, file: Path, *, whole_lines: bool) -> None:
        self._file = file
        self._whole_lines = whole_lines
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.rest = ""

    def new(self) -> Iterator[str]:
        """What was appended since the last call.

        Raises:
            RunFolderError: it is there, and cannot be read.
        """
        try:
            with os.fdopen(open_regular(self._file), "rb") as stream:
                stream.seek(self._offset)
                while chunk := stream.read(_CHUNK_BYTES):
                    self._offset += len(chunk)
                    text = self.rest + self._decoder.decode(chunk)
                    end = text.rfind("\n") + 1 if self._whole_lines else len(text)
                    self.rest = text[end:]
                    yield text[:end]
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunFolderError(f"cannot read {self._file}: {error.strerror}") from error


def _lines(texts: Iterator[str]) -> Iterator[str]:
    """Whole lines, and what follows the last of them."""
    held = ""
    for text in texts:
        *whole, held = (held + text).split("\n")
        yield from (f"{line}\n" for line in whole)
    if held:
        yield held
