"""The conditions of a job: what became true of it, when and why. One line each, appended.

    Created, Queued, Running, Paused, Preempted, Restarting, Suspended, Succeeded, Failed

The names are those of Kubernetes jobs. The newest line says what the job is now, except for Paused:
a supervisor that is suspended with its ranks can write nothing, so that is read from their events.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec

from hydroslurm.core.files import append_entry, entries_of, read_end
from hydroslurm.errors import RunFolderError

ConditionType = Literal[
    "Created",
    "Queued",
    "Running",
    "Paused",
    "Preempted",
    "Restarting",
    "Suspended",
    "Succeeded",
    "Failed",
]
FINAL = frozenset({"Succeeded", "Failed"})
FORMAT = 1
"""Of the lines here and of the files of attempts: their field ``v``."""
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Condition:
    """Something that became true of a job.

    Attributes:
        type: what.
        epoch_ns: when.
        reason: one word for programs, such as BackoffLimitExceeded.
        message: a sentence for people.
        restart_count: Slurm's.
    """

    type: ConditionType
    epoch_ns: int
    reason: str = ""
    message: str = ""
    restart_count: int = 0

    @property
    def is_failure(self) -> bool:
        """Whether the job has failed."""
        return self.type == "Failed"


def add_condition(
    path: Path,
    kind: ConditionType,
    *,
    reason: str = "",
    message: str = "",
    restart_count: int = 0,
    durable: bool = True,
) -> None:
    """Append one.

    Args:
        durable: False where the caller syncs the file with others.

    Raises:
        RunFolderError: the file cannot be written.
    """
    condition = Condition(kind, time.time_ns(), reason, message, restart_count)
    try:
        append_entry(path, {"v": FORMAT, **asdict(condition)}, durable=durable)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error


def read_conditions(path: Path) -> tuple[Condition, ...]:
    """Oldest first; torn lines and those of another version are skipped."""
    found: list[Condition] = []
    try:
        lines = read_end(path, most_bytes=_MOST_BYTES).splitlines()
    except OSError:
        return ()
    for row in entries_of(lines):
        if row.get("v") == FORMAT:
            with contextlib.suppress(ValueError):
                found.append(msgspec.convert(row, Condition))
    return tuple(found)


def final_condition(conditions: Iterable[Condition]) -> Condition | None:
    """Succeeded or Failed, once there is one; the first counts."""
    return next((one for one in conditions if one.type in FINAL), None)
