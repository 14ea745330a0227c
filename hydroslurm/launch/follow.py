"""What the tasks of a job have printed: which files, and their growth."""

from __future__ import annotations

import codecs
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hydroslurm.errors import RunFolderError, UsageError
from hydroslurm.files import open_regular
from hydroslurm.launch import submission
from hydroslurm.launch.overview import Overview
from hydroslurm.launch.plan import Plan

POLL_S = 0.3
_CHUNK_BYTES = 1 << 20


def plan_of(found: Overview) -> Plan:
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
    listed = ", ".join(plan.replicas[:20]) + (" ..." if len(plan.replicas) > 20 else "")
    raise UsageError(f"there is no replica {wanted!r}; wanted one of {listed}")


def task_logs(found: Overview, replica: str | None) -> list[Path]:
    """The files of a replica's tasks; they need not be there yet.

    Raises:
        UsageError: as :func:`replica_of` and :func:`plan_of`.
    """
    plan = plan_of(found)
    name = replica_of(plan, replica)
    return [
        found.run.task_log(number) for number, task in enumerate(plan.tasks) if task.replica == name
    ]


def supervisor_logs(found: Overview) -> list[Path]:
    """The file that the batch script prints into, in all lives of the job."""
    return [found.run.logs / f"{submission.read(found.run.root).job_id}_0_log.out"]


def follow_files(
    files: Sequence[Path], *, tail: int = 0, until: Callable[[], bool] | None = None
) -> Iterator[str]:
    """What is in the files, and with ``until`` also what is appended, until that says that nothing
    more will come.

    Args:
        files: those that are not there yet are waited for.
        tail: only so many last lines of what is there; 0: everything.
        until: asked a few times a second.
    """
    growing = [_Growing(file, whole_lines=len(files) > 1) for file in files]
    for one in growing:
        yield from (deque(_lines(one.new()), tail) if tail else one.new())
    is_over = until is None
    while until is not None and not is_over:
        is_over = until()  # before the last look: what comes after it is nothing
        for one in growing:
            yield from one.new()
        if not is_over:
            time.sleep(POLL_S)
    for one in growing:
        yield one.rest


class _Growing:
    """A file that others append to; a character is handed out whole, of several files a line."""

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
