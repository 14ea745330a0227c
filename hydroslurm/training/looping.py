"""The loops of a run: they hand out the steps that are left, with a safe point behind each.

The third part of :class:`~hydroslurm.training.run.Run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydroslurm.errors import UsageError
from hydroslurm.training.saving import Saving


class Looping(Saving):
    """Base of Run, whose constructor makes what it needs."""

    def batches(self, *, epochs: int, accumulate: int = 1) -> Iterator[Any]:
        """Yield the remaining batches of ``epochs`` epochs; each is one step.

        Each is followed by a safe point. Leaving the loop early leaves the run where it is.

        At the end the state is saved as one of the last epoch, with all its batches used. What
        follows in the script (an evaluation, ``scheduler.step()``) belongs to that epoch until the
        next :meth:`batches` or :meth:`save`: if the attempt ends there, the next one resumes after
        the last batch and does it once, from the same state.

        Args:
            accumulate: batches per step. Safe points follow only complete steps, because gradients
                that are being accumulated are not saved.
        """
        if self._cursor.position is None:
            raise UsageError("batches() needs a loader; give one to Run(loader=...)")
        if accumulate < 1 or epochs < 0:
            raise UsageError(
                f"batches(epochs={epochs}, accumulate={accumulate}): wanted epochs of 0 or more, "
                "accumulate of 1 or more"
            )
        self._saves.behind_batches = self._saves.unchanged = False
        if not self._has_begun:
            self._saves.unchanged = self.resume()
        self._watch.close()  # it is we who count
        first = self._step
        while self._epoch < epochs:
            self._leave_if_asked()
            yield from self._left_of_epoch(accumulate)
            if self._epoch + 1 == epochs:
                self._save_behind_batches(since=first)
            self._epoch += 1
            self._cursor.in_epoch = False
        self._cursor.restore_rng()  # where there was nothing left to open
        self._save_behind_batches(since=self._step)

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _left_of_epoch(self, accumulate: int) -> Iterator[Any]:
        """The batches that are left of this epoch, a safe point behind each step."""
        for batch in self._cursor.batches(self._epoch, accumulate=accumulate):
            self._saves.in_body = True
            try:
                yield batch
            finally:
                self._saves.in_body = False
                self._saves.unchanged = False
            if self._cursor.step_is_full:
                self._complete_step()
        if self._cursor.step_has_begun:  # the last step of an epoch may have fewer batches
            self._complete_step()

    def _complete_step(self) -> None:
        self._cursor.count_step()
        self._step += 1
        self.safe_point()

    def _save_behind_batches(self, *, since: int) -> None:
        """The state behind the last batch, to which a stop in what follows comes back. Nothing is
        to be saved where nothing was trained ``since`` this step, or the last safe point did it."""
        self._saver.wait()
        is_saved = self._step == self._saver.durable_step and (
            self._step == since or (self._saves.unchanged and self._saver.is_durable)
        )
        if not is_saved:
            self.save()
        self._saves.behind_batches = True
