"""How the newest save of a run relates to its current state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Saves:
    """Certain only as long as nothing but the run itself has had control since.

    The same on all ranks, because they make the same calls.

    Attributes:
        unchanged: the state is that of the newest save, which may still be under way.
        periodic_step: of the newest periodic save, or of the checkpoint that this attempt resumed
            from. A step has one at most: a loop may call several safe points at it.
        behind_batches: the newest save is the one after the last batch of an epoch, and no step
            was counted since. A stop resumes there.
        evaluation: what this rank saves in addition to its objects, as it was at the beginning of
            the current ``evaluation()`` block; None outside of one.
        in_body: the training is in the body of a loop over ``batches()`` or ``steps()``.
    """

    unchanged: bool = False
    periodic_step: int | None = None
    behind_batches: bool = False
    evaluation: Mapping[str, Any] | None = None
    in_body: bool = False

    def takes_periodic(self, step: int) -> bool:
        """Whether to make a periodic save at this step. None may come between the end of the
        batches, or the beginning of an evaluation, and what is to be repeated from there."""
        is_cut_off = self.behind_batches or self.evaluation is not None
        return not is_cut_off and step != self.periodic_step

    def began(self, *, periodic_step: int | None = None) -> None:
        """The state as it is now is being saved."""
        self.unchanged, self.behind_batches = True, False
        if periodic_step is not None:
            self.periodic_step = periodic_step
