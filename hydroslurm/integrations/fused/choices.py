"""What was replaced, what was not and why: a table for people, a file for the next attempt.

Which of two equal forwards is the faster one is measured, and may come out otherwise the next time;
their results differ in the last bit. So each rank keeps what it has chosen, and a resumed run is
the undisturbed one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hydroslurm.coordination.world import World
from hydroslurm.core import rundir
from hydroslurm.core.decoding import decode
from hydroslurm.core.files import read_regular, write_atomically
from hydroslurm.errors import UsageError
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.claim import run_directory

_HEAD = ("what", "in its place", "speed", "largest difference", "")
_LIMIT_BYTES = 1 << 24


@dataclass(frozen=True)
class Choice:
    """About one module, or about several that are alike.

    Attributes:
        names: in the model. kind: the class.
        replacement: what would be in its place; empty if nothing is proposed.
        speedup: time of a forward and a backward of its own over that of the replacement.
        difference: the largest, of outputs and gradients, relative to the largest value of the
            same tensor.
        applied: whether it is in place. reason: why not.
    """

    names: tuple[str, ...]
    kind: str
    replacement: str = ""
    speedup: float | None = None
    difference: float | None = None
    applied: bool = False
    reason: str = ""

    def cells(self) -> tuple[str, ...]:
        """Of the table; ``blocks.0.norm`` and ``blocks.1.norm`` are ``blocks.*.norm x2``."""
        shapes = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in self.names))
        names = f"{shapes[0]}{', ...' if len(shapes) > 1 else ''} x{len(self.names)}"
        if len(self.names) == 1:
            names = self.names[0] or "the model"
        return (
            f"{names} ({self.kind})",
            self.replacement or "-",
            f"{self.speedup:.2f}x" if self.speedup is not None else "-",
            f"{self.difference:.1e}" if self.difference is not None else "-",
            "replaced" if self.applied else self.reason,
        )


@dataclass
class Choices:
    """All of them; ``print()`` shows a table."""

    rows: list[Choice] = field(default_factory=list)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.rows)

    @property
    def applied(self) -> list[Choice]:
        return [row for row in self.rows if row.applied]

    def __str__(self) -> str:
        if not self.rows:
            return "nothing that a rewriter knows"
        lines = [_HEAD, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)


@dataclass(frozen=True)
class Chosen:
    """What is in place of a module's forward, "" for its own, and for what kind of call."""

    replacement: str
    like: str


def record_of(given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path | None:
    """The file of this rank's choices: in the folder that is given, else in that of the job, if
    there is one. Whoever can write it can only choose among forms that are equal, and are compared
    again where there is a batch."""
    rank = World.from_environ(environ).rank
    if given is not None:
        return Path(given).absolute() / f"rank-{rank:05d}.json"
    if rundir.named_in(environ) or Allocation.from_environ(environ) is not None:
        return run_directory(None, environ).fused(rank)
    return None


def read_record(path: Path | None) -> dict[str, Chosen]:
    """What an earlier attempt has chosen, by the module's name.

    Raises:
        UsageError: what lies there is no such file.
    """
    if path is None or not path.exists():
        return {}
    try:
        return decode(dict[str, Chosen], read_regular(path, limit_bytes=_LIMIT_BYTES))
    except ValueError as error:
        raise UsageError(
            f"{path} does not say which modules of this run were replaced ({error}). Remove it to "
            "have them chosen anew"
        ) from error


def write_record(path: Path | None, chosen: Mapping[str, Chosen]) -> None:
    """Keep all that is chosen by now."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = {name: asdict(one) for name, one in chosen.items()}
        write_atomically(path, json.dumps(made, indent=1))
