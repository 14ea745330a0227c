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
from dataclasses import dataclass, field
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
        lines = [_HEAD, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[n]) for line in lines) for n in range(len(_HEAD))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def _cells(row: Choice) -> tuple[str, ...]:
    return (
        f"{_together(row.names)} ({row.kind})",
        row.replacement or "-",
        f"{row.speedup:.2f}x" if row.speedup is not None else "-",
        f"{row.difference:.1e}" if row.difference is not None else "-",
        "replaced" if row.applied else row.reason,
    )


def _together(names: tuple[str, ...]) -> str:
    """``blocks.0.norm`` and ``blocks.1.norm`` are ``blocks.*.norm x2``."""
    if len(names) == 1:
        return names[0] or "the model"
    shapes = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    return f"{shapes[0]}{', ...' if len(shapes) > 1 else ''} x{len(names)}"


class Record:
    """The file of a run's choices. Whoever can write it can only choose among forms that are equal,
    and are compared again where there is a batch.

    Args:
        given: the folder; else one in that of the job, if there is one.

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
        self._chosen = self._read()

    def _read(self) -> dict[str, tuple[str, str]]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            found = parse_json(read_regular(self._path, limit_bytes=_LIMIT_BYTES))
            chosen = {name: (one["replacement"], one["like"]) for name, one in found.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"{self._path} does not say which modules of this run were replaced ({error!r}). "
                "Remove it to have them chosen anew"
            ) from error
        return chosen

    def get(self, name: str) -> tuple[str, str] | None:
        """The replacement that was chosen before, empty for none, and for what kind of call; None
        if nothing was chosen."""
        return self._chosen.get(name)

    def add(self, chosen: Mapping[str, tuple[str, str]]) -> None:
        """Keep what was chosen now."""
        self._chosen.update(chosen)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            made = {
                name: {"replacement": replacement, "like": like}
                for name, (replacement, like) in self._chosen.items()
            }
            write_atomically(self._path, json.dumps(made, indent=1))
