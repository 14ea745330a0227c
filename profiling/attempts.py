"""What each attempt of a training did, as the job itself writes it: also one that was killed, and
one that was never asked to stop.

A text file per attempt, with a line for each thing that happened: ``began NS STEP``,
``step NUMBER NS SAMPLE ...``, and, of compare/observer.py and compare/witness.py, ``silence NS NS``
and ``signal NUMBER NS``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class AttemptLog:
    """Written by the job, one ``write`` per line."""

    def __init__(self, folder: Path, begin: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"attempt-{len(_files(folder)):05d}"
        self._file = self.path.open("ab", buffering=0)
        self.write("began", time.monotonic_ns(), begin)

    def close(self) -> None:
        self._file.close()

    def made(self, step: int, *samples: int) -> None:
        """Say that a step is complete."""
        self.write("step", step, time.monotonic_ns(), *samples)

    def write(self, kind: str, *numbers: int) -> None:
        self._file.write(f"{kind} {' '.join(map(str, numbers))}\n".encode())


@dataclass(frozen=True)
class Attempt:
    """What one attempt did. Moments are CLOCK_MONOTONIC, in nanoseconds; 0: never.

    Attributes:
        begin: the steps that were done when it began.
        step: the last one that it made.
        silences: begin and end of each time without an operator.
        signals: number and moment of what reached its job step.
        samples: step -> the samples that it was trained on, each a CRC.
    """

    began_ns: int
    begin: int
    step: int
    first_step_ns: int = 0
    step_ns: int = 0
    silences: tuple[tuple[int, ...], ...] = ()
    signals: tuple[tuple[int, ...], ...] = ()
    samples: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def read_attempts(folder: Path) -> list[Attempt]:
    """All attempts that have begun, oldest first."""
    return [_attempt(lines) for lines in map(_lines, _files(folder)) if lines["began"]]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("attempt-*"))


def _lines(path: Path) -> dict[str, list[tuple[int, ...]]]:
    """By kind; a last line that is not whole is left out."""
    found: dict[str, list[tuple[int, ...]]] = {
        kind: [] for kind in ("began", "step", "silence", "signal")
    }
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            kind, *numbers = line.split()
            found[kind].append(tuple(map(int, numbers)))
    return found


def _attempt(lines: Mapping[str, list[tuple[int, ...]]]) -> Attempt:
    (began_ns, begin), steps = lines["began"][0], lines["step"]
    return Attempt(
        began_ns,
        begin,
        step=steps[-1][0] if steps else begin,
        first_step_ns=steps[0][1] if steps else 0,
        step_ns=steps[-1][1] if steps else 0,
        silences=tuple(lines["silence"]),
        signals=tuple(lines["signal"]),
        samples={number: tuple(samples) for number, _, *samples in steps},
    )
