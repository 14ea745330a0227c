"""What a rank is told to do once it holds between two steps, and what becomes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Form:
    """Meet the others of a new generation; see ``form`` in :mod:`hydroslurm.elastic.messages`.

    Attributes:
        source: the rank that has the state; with ``fresh`` nobody has, and it loads the newest
            checkpoint.
        needs: the ranks that get it from there.
    """

    change: int
    generation: int
    rank: int
    world_size: int
    members: int
    source: int
    needs: tuple[int, ...]
    fresh: bool
    cause: str
    since_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Save:
    """Save, for too few are left to go on; then say so."""

    change: int


@dataclass(frozen=True)
class Average:
    """Make the weights equal with all ranks of the generation, which hold behind this step, too;
    then come to the safe point again."""


@dataclass(frozen=True)
class Depart:
    """This rank has nothing more to do with the run.

    Attributes:
        again: started anew it may join again, as one whose generation went on without it.
        failed: that is no order, but the end of what cannot go on.
    """

    reason: str
    again: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Finished:
    """All ranks have trained to the end."""

    step: int


Directive = Form | Save | Average | Depart | Finished
