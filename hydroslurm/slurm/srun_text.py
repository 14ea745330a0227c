"""How the tasks of a job step have ended, read from what ``srun -v`` prints. Pure.

srun itself ends with the highest status of all its tasks, and accounting keeps no more. Its
messages name each one::

    srun: launch/slurm: _task_finish: n1: task 0: Completed      (with -v only)
    srun: error: n2: task 1: Exited with exit code 3
    srun: error: n[1-2]: tasks 0-1,3: Killed
    srun: error: n1: task 0: Segmentation fault (core dumped)

Source: Slurm's ``src/srun/libsrun/launch.c``; seen on 22.05.8.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

_ENDED = re.compile(
    # "error: ", "launch/slurm: _task_finish: ": releases differ in what stands here
    r"srun: (?:[\w/]+: )*(?P<nodes>[^\s:]+): tasks? (?P<tasks>[0-9,-]+): (?P<how>\S.*?)"
    r"(?: \(core dumped\))?\s*"
)
_EXITED = re.compile(r"Exited with exit code (\d+)")
_OUT_OF_MEMORY = re.compile(r"out of memory|oom", re.IGNORECASE)
_SIGNALS = {
    words: int(number)
    for number in signal.valid_signals()
    if (words := signal.strsignal(number)) is not None
}


def task_ends(line: str) -> Iterator[tuple[int, int]]:
    """The tasks that a line says have ended, each with its status: 0 to 255, and 128 + N for one
    that died of signal N. Nothing for any other line."""
    match = _ENDED.fullmatch(line.rstrip("\n"))
    status = None if match is None else _status(match["how"])
    if match is not None and status is not None:
        for task in _numbers(match["tasks"]):
            yield task, status


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
