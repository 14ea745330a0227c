"""The loops of a run: they hand out the steps that are left, with a safe point behind each.

The third part of :class:`~hydroslurm.training.run.Run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hydroslurm.checkpoint.census import MOVED
from hydroslurm.errors import UsageError
from hydroslurm.training.checks import Remedies, own_loop
from hydroslurm.training.saving import Saving


class Looping(Saving):
    """Base of Run, whose constructor makes what it needs."""

    _remedies: Remedies | None = None
    """For what the first step uses and the run lacks, as long as somebody looks."""

    _moved = False
    """A safe point has put the run elsewhere: the batches that follow are opened anew."""

    def batches(self, *, epochs: int, accumulate: int = 1, check: bool = True) -> Iterator[Any]:
        """Yield the remaining batches of ``epochs`` epochs; each is one step.

        Each is followed by a safe point. Leaving the loop early leaves the run where it is.

        At the end the state is saved as one of the last epoch, with all its batches used. What
        follows in the script (an evaluation, ``scheduler.step()``) belongs to that epoch until the
        next :meth:`batches` or :meth:`save`: if the attempt ends there, the next one resumes after
        the last batch and does it once, from the same state.

        Args:
            accumulate: batches per step. Safe points follow only complete steps. A loop that leaves
                it at 1 and adds gradients up itself has them saved.
            check: as of :meth:`steps`.

        Raises:
            UsageError: there is no loader; or as :meth:`steps`.
        """
        if self._cursor.position is None:
            raise UsageError("batches() needs a loader; give one to Run(loader=...)")
        if accumulate < 1 or epochs < 0:
            raise UsageError(
                f"batches(epochs={epochs}, accumulate={accumulate}): wanted epochs of 0 or more, "
                "accumulate of 1 or more"
            )
        self._begin_loop("batches")
        first = self._step
        self._remedies = own_loop("run.batches(epochs=..., check=False)") if check else None
        while self._epoch < epochs:
            self._leave_if_asked()
            yield from self._left_of_epoch(accumulate)
            if self._epoch + 1 == epochs:
                self._save_behind_batches(since=first)
            self._epoch += 1
            self._cursor.in_epoch = False
        self._cursor.restore_rng()  # where there was nothing left to open
        self._contents.restore_waiting()
        self._save_behind_batches(since=self._step)

    def shards(self, batch: Any) -> Iterator[Any]:
        """Yield the parts of a batch that each have a forward and a backward of their own: the
        batch itself, or with ``summation: fixed_order`` in an elastic run this rank's shards.

            for batch in run.batches(epochs=10):
                optimizer.zero_grad()
                for x, y in run.shards(batch):
                    loss_of(model(x), y).backward()
                optimizer.step()

        The loss is the mean over the shard's samples. Behind the loop the gradients are those of
        the mean over all samples of the step. Random numbers are those of the shard in the loop,
        and the same on all ranks outside. A rank may have no shard in the last step of an epoch.
        """
        yield batch

    def steps(self, total: int, *, check: bool = True) -> Iterator[int]:
        """Yield the numbers of the steps that are left, from :attr:`step` to ``total - 1``: for
        loops that fetch their own batches.

            for step in run.steps(10_000):
                x, y = get_batch()
                ...

        Each is followed by a safe point, so the body is one whole step: with its batches, all of
        its accumulation, and the optimizers' steps. Variables of the loop and what hangs in them
        come back by themselves, random generators and a batch that was fetched ahead as well; an
        iterator does not (docs/own-loop.md).

        At the end the state is saved; what follows the loop is repeated if the attempt ends there,
        as with :meth:`batches`. A step that was left with ``break`` counts as trained.

        Args:
            total: how many steps the run has, those of earlier attempts included.
            check: whether to look, at the first step of each attempt, for optimizers, schedulers,
                weights, scalers and iterators that are used and not saved.

        Raises:
            UsageError: one was found; or the loop is within another one.
        """
        if not isinstance(total, int) or total < 0:
            raise UsageError(f"steps({total!r}): wanted the number of steps, an int of 0 or more")
        self._begin_loop("steps")
        first = self._step
        self._remedies = own_loop("run.steps(total, check=False)") if check else None
        self._cursor.begin_steps(step=first, epoch=self._epoch, left=total - first)
        if first <= total:
            self._contents.restore_waiting()
        if first < total:
            self._leave_if_asked()
        while self._step < total:
            yield from self._one_step()
        self._save_behind_batches(since=first)

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _begin_loop(self, name: str) -> None:
        """Resume, if nobody has.

        Raises:
            UsageError: within the body of another loop.
        """
        if self._saves.in_body:
            raise UsageError(
                f"run.{name}() in the body of a loop over run.batches() or run.steps(): both would "
                "count the same steps. Make one loop, or one behind the other"
            )
        self._saves.behind_batches = self._saves.unchanged = False
        if not self._has_begun:
            self._saves.unchanged = self.resume()
        self._gradients.begin()
        self._contents.enter_loop()
        self._watch.close()  # it is we who count
        self._count_step_left_early()

    def _one_step(self) -> Iterator[int]:
        """One step of an own loop, with its safe point."""
        self._cursor.hand_out_step()
        with self._body():
            yield self._step
        self._end_step()

    @contextlib.contextmanager
    def _body(self) -> Iterator[None]:
        """What the script does with a step, or with one of its batches."""
        self._saves.in_body = True
        if self._remedies is not None:
            self._first_step.open()
        try:
            yield
        finally:
            self._first_step.close()
            self._saves.in_body = False
            self._saves.unchanged = False

    def _require_all_given(self, remedies: Remedies) -> None:
        """Find out at the first step of a loop what a resumed run would lack.

        Raises:
            UsageError: the first such thing, with what to do.
        """
        self._remedies = None
        message = self._first_step.missing(*self._given(), remedies)
        self._first_step.forget()
        for one in self._contents.unkept() if message is None else ():
            if one.why == MOVED:
                message = f"{one}. {remedies.batches} If that does no harm: {remedies.unchecked}"
            else:
                self._say([one])
        self._contents.accept_optimizers()
        if message is not None:
            raise UsageError(message)

    def _given(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is part of the run, by name, and what would be saved of it."""
        own = self._cursor.registered
        objects = {**self._objects.by_name(), **own.by_name()}
        return objects, {**self._objects.states(), **own.states()}

    def _left_of_epoch(self, accumulate: int) -> Iterator[Any]:
        """The batches that are left of this epoch, a safe point behind each step."""
        for batch in self._cursor.batches(self._epoch, accumulate=accumulate):
            self._contents.restore_waiting()
            with self._body():
                yield batch
            if self._cursor.step_is_full:
                self._end_step()
                if self._moved:
                    return
        if self._cursor.step_has_begun:  # the last step of an epoch may have fewer batches
            self._end_step()

    def _end_step(self) -> None:
        if self._remedies is not None:
            self._require_all_given(self._remedies)
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
