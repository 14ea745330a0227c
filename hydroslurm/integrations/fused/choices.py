"""What was replaced, what was not and why: a table for people, a file for the next attempt.

Which of two equal forwards is the faster one is measured, and may come out otherwise the next time;
their results differ in the last bit. So what a run has chosen is kept, each rank's by itself, and a
resumed run is the undisturbed one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydroslurm.coordination.world import World
from hydroslurm.core import rundir
from hydroslurm.core.files import parse_json, read_regular, write_atomically
from hydroslurm.errors import UsageError
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.arguments import run_directory

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

    def add(self, rows: list[Choice]) -> None:
        """One row for modules that are alike; these before those that are there."""
        made: dict[object, Choice] = {}
        for row in (*rows, *self.rows):
            key = (row.kind, row.replacement, row.applied, row.reason, row.speedup)
            if (first := made.get(key)) is not None:
                seen = [one for one in (first.difference, row.difference) if one is not None]
                names = (*first.names, *row.names)
                row = replace(first, names=names, difference=max(seen, default=None))
            made[key] = row
        self.rows = list(made.values())

    def __str__(self) -> str:
        if not self.rows:
            return "nothing that a rewriter knows"
        lines = [_HEAD, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)


class Record:
    """The file of a run's choices. Whoever can write it can only choose among forms that are equal,
    and are compared again where there is a batch.

    Args:
        given: the folder; else one in that of the job, if there is one.

    Attributes:
        chosen: by the module's name, its replacement ("" for none), and for what kind of call.

    Raises:
        UsageError: what lies there is not one.
    """

    def __init__(self, given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> None:
        rank = World.from_environ(environ).rank
        self._path: Path | None = None
        if given is not None:
            self._path = Path(given).absolute() / f"rank-{rank:05d}.json"
        elif rundir.named_in(environ) or Allocation.from_environ(environ) is not None:
            self._path = run_directory(None, environ).fused(rank)
        self.chosen: dict[str, tuple[str, str]] = {}
        if self._path is None or not self._path.exists():
            return
        try:
            found = parse_json(read_regular(self._path, limit_bytes=_LIMIT_BYTES))
            self.chosen = {name: (one["replacement"], one["like"]) for name, one in found.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"{self._path} does not say which modules of this run were replaced ({error!r}). "
                "Remove it to have them chosen anew"
            ) from error

    def add(self, chosen: Mapping[str, tuple[str, str]]) -> None:
        """Keep what was chosen now."""
        self.chosen.update(chosen)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            made = {n: {"replacement": r, "like": like} for n, (r, like) in self.chosen.items()}
            write_atomically(self._path, json.dumps(made, indent=1))
