"""How a job step begins and how its tasks have ended, read from what ``srun -v`` prints. Pure.

srun itself ends with the highest status of all its tasks, and accounting keeps no more. Its
messages name each one::

    srun: launch/slurm: _task_finish: n1: task 0: Completed      (with -v only)
    srun: error: n2: task 1: Exited with exit code 3
    srun: error: n[1-2]: tasks 0-1,3: Killed
    srun: error: n1: task 0: Segmentation fault (core dumped)

Before that it waits for its job step, or says which one it is::

    srun: Job 3 step creation temporarily disabled, retrying (Requested nodes are busy)
    srun: launching StepId=3.1 on host n1, 1 tasks: 0            (with -v only)

Source: Slurm's ``src/srun/libsrun/launch.c`` and ``src/api/step_launch.c``; seen on 22.05.8.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.files import Tail

LOST = 1
"""The status of a task that srun said nothing of when it ended badly itself."""

_ENDED = re.compile(
    # "error: ", "launch/slurm: _task_finish: ": releases differ in what stands here
    r"srun: (?:[\w/]+: )*(?P<nodes>[^\s:]+): tasks? (?P<tasks>[0-9,-]+): (?P<how>\S.*?)"
    r"(?: \(core dumped\))?\s*"
)
_WAITS = re.compile(r"srun: Job \d+ step creation \w+ disabled, retrying \((.*)\)\s*")
_LAUNCHES = re.compile(r"srun: (?:[\w/]+: )*launching StepId=[\d+]+\.(\d+) on .*")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_OUT_OF_MEMORY = re.compile(r"out of memory|oom", re.IGNORECASE)
_SIGNALS = {
    name: int(number)
    for number in signal.valid_signals()
    if (name := signal.strsignal(number)) is not None
}


@dataclass
class TaskExits:
    """Which tasks have ended, and how, according to srun's output so far.

    Attributes:
        statuses: task -> status.
        order: the same tasks, the first to end first.
        unrequested: those whose status asks for a requeue, although nobody had asked them to stop.
        step_id: of the job step, once srun has printed it.
        waits: why there is no job step yet, in Slurm's words, while srun waits for one.
    """

    path: Path
    statuses: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    unrequested: frozenset[int] = frozenset()
    step_id: int | None = None
    waits: str | None = None
    _clock: AwakeClock = field(default_factory=AwakeClock)
    _tail: Tail = field(init=False)

    def __post_init__(self) -> None:
        self._tail = Tail(self.path)
        self._since_s = self._now_s = self._clock.now_s()

    def look(self) -> bool:
        """Read what is new; returns whether any task has ended since."""
        before, self._now_s = len(self.order), self._clock.now_s()
        for data in self._tail.lines():
            line = data.decode(errors="replace").rstrip("\n")
            self.waits = step_waits(line) or self.waits
            if (step_id := step_launched(line)) is not None:
                self.step_id, self.waits = step_id, None
            for task, status in task_ends(line):
                if task not in self.statuses:
                    self.statuses[task] = status
                    self.order.append(task)
        return len(self.order) > before

    @property
    def waited_s(self) -> float:
        """How long srun has waited for a job step; 0 unless it says that it waits, which 22.05 does
        only after 10 s or 2 min."""
        return 0.0 if self.waits is None else self._now_s - self._since_s

    def fill_in(self, tasks: int, status: int) -> None:
        """srun has ended: record this status for the tasks that it did not report."""
        for task in range(tasks):
            if task not in self.statuses:
                self.statuses[task] = status
                self.order.append(task)


def last_error(log: Path) -> str:
    """The last error line of srun."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return str(error)
    found = [line for line in lines if line.startswith(("srun: error: ", "srun: fatal: "))]
    return found[-1] if found else f"see {log}"


def task_ends(line: str) -> Iterator[tuple[int, int]]:
    """The tasks that a line says have ended, each with its status: 0 to 255, and 128 + N for one
    that died of signal N. Nothing for any other line."""
    match = _ENDED.fullmatch(line.rstrip("\n"))
    status = None if match is None else _status(match["how"])
    if match is not None and status is not None:
        for task in _numbers(match["tasks"]):
            yield task, status


def step_waits(line: str) -> str | None:
    """Why Slurm does not make the job step yet, in its own words; None for any other line."""
    match = _WAITS.fullmatch(line)
    return None if match is None else match[1]


def step_launched(line: str) -> int | None:
    """The number of the job step whose tasks are being started; None for any other line."""
    match = _LAUNCHES.fullmatch(line)
    return None if match is None else int(match[1])


def _status(how: str) -> int | None:
    if how == "Completed":
        return 0
    exited = _EXITED.fullmatch(how)
    if exited is not None:
        return int(exited[1])
    if _OUT_OF_MEMORY.search(how):
        return 128 + signal.SIGKILL
    number = _SIGNALS.get(how)
    return None if number is None else 128 + number


def _numbers(text: str) -> Iterator[int]:
    """``0-2,5``"""
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() or not dash):
            yield from range(int(first), int(last or first) + 1)
