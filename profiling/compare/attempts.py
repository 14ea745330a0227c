"""What observer.py and witness.py wrote about the attempts of a training."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HEAD = struct.Struct("<7q")
"""The fields of an Attempt before ``silences``, and how many silences there are."""
SILENCE = struct.Struct("<2q")


@dataclass(frozen=True)
class Attempt:
    """What one attempt did. Moments are CLOCK_MONOTONIC, in nanoseconds; 0: never.

    Attributes:
        begin: the steps that were done when it began.
        step: the last one that it made.
        operator_ns: the end of its last operator.
        silences: begin and end of each time without an operator.
        signals: number and moment of what reached its job step.
        samples: step -> the samples that it was trained on, each a CRC.
    """

    began_ns: int
    begin: int
    step: int
    first_step_ns: int
    step_ns: int
    operator_ns: int
    silences: tuple[tuple[int, int], ...]
    signals: tuple[tuple[int, int], ...]
    samples: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def read_attempts(folder: Path) -> list[Attempt]:
    """All attempts so far, oldest first."""
    return [_read(path) for path in sorted((folder / "attempts").glob("attempt-*.bin"))]


def _read(path: Path) -> Attempt:
    data = path.read_bytes()
    *head, count = HEAD.unpack_from(data)
    silences = tuple(SILENCE.iter_unpack(data[HEAD.size :]))[:count]
    signals = path.with_suffix(".signals")
    lines = signals.read_text().splitlines() if signals.exists() else []
    stamps = tuple((int(a), int(b)) for a, b in map(str.split, lines))
    return Attempt(*head, silences, stamps, _samples(path.with_suffix(".samples")))


def _samples(path: Path) -> dict[int, tuple[int, ...]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]
    return {step: tuple(samples) for step, *samples in whole}
