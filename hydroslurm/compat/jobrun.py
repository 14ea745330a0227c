"""The Run of a job: the same safe points, with epochs counted by the JobRunner."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hydroslurm.checkpoint.catalog import EPOCH
from hydroslurm.checkpoint.newest import Found, Load
from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.checkpoint.store import Checkpoint, State
from hydroslurm.compat.manager import PROGRESS, CheckpointManager, Progress
from hydroslurm.errors import CheckpointError, UsageError
from hydroslurm.training.reporting import notice
from hydroslurm.training.run import Run


class JobRun(Run):
    """What ``job.run`` is. The JobRunner makes it and calls :meth:`resume` and :meth:`finish`.

    Functions of a job use ``step``, ``epoch``, :meth:`epoch_batches`, :meth:`safe_point`,
    :meth:`check_stop`, :meth:`save`, ``stop_requested`` and :meth:`request_stop`.

    Attributes:
        epoch: the current epoch, from 0; between two, the number of completed epochs.
        saves: there is a manager.
        fails_on_save_error: a failed save of an epoch is an error, not a warning.
        begins_at_origin: this attempt, the first in its folder, starts from another run's epoch.
        is_committed: the completed epoch is.
        is_finished: the job was done before this attempt, which has loaded its last epoch.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        *,
        directory: str | os.PathLike[str] | None,
        origin: Found | None = None,
    ) -> None:
        """``manager``: None to save nothing. ``origin``: what to start from while the run has no
        checkpoint of its own."""
        options = manager or CheckpointManager(every_steps=0, every_s=0)
        self._keep_epochs = options.keep
        super().__init__(
            directory=directory,
            every_steps=options.every_steps,
            every_s=options.every_s,
            on_save_error=options.on_save_error,
            limits=options.limits,
        )
        self.progress = Progress()
        self._objects.add(PROGRESS, self.progress)
        self.saves = manager is not None
        self.fails_on_save_error = options.on_save_error == "fail"
        self._origin = origin
        self.begins_at_origin = self.is_committed = self.is_finished = False
        self._unsaved: str | None = None
        if manager is None:
            self._unsaved = "nothing is saved, because the JobRunner has no checkpoint_manager"

    # --- for the functions of a job
    # --------------------------------------------------------------------------------------------

    def epoch_batches(self, *, accumulate: int = 1) -> Iterator[Any]:
        """Yield the remaining batches of this epoch; each is one step, followed by a safe point.

        Call it once per function, which may leave the loop early. An attempt that resumes in the
        middle of an epoch restores the RNG state here.

        Args:
            accumulate: as in :meth:`Run.batches`.

        Raises:
            UsageError: the job has no loader, or this is the second call in one function.
        """
        if self._cursor.position is None:
            raise UsageError("epoch_batches() needs a loader; set job.loader in the build group")
        if accumulate < 1:
            raise UsageError(f"epoch_batches(accumulate={accumulate}): wanted 1 or more")
        if self._cursor.in_epoch:
            raise UsageError(
                "this function has already iterated over its batches, and a stop in a second pass "
                "could not be resumed; make that pass a function of its own in the epoch group"
            )
        yield from self._left_of_epoch(accumulate)

    def batches(
        self,
        *,
        epochs: int,  # noqa: ARG002 - Run's, as the next ones
        accumulate: int = 1,  # noqa: ARG002
        check: bool = True,  # noqa: ARG002
    ) -> Iterator[Any]:
        """Not available in a job, which counts its epochs itself.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "run.batches() counts epochs, and so does a job; use job.run.epoch_batches(), and "
            "epoch_limiter() for their number"
        )

    def save(self, *, kind: str = "manual") -> Saved:
        """As :meth:`Run.save`; refused where the state cannot be resumed from.

        Raises:
            UsageError: in ``download``, ``build``, ``init`` and ``exit``, and without a manager.
        """
        if self._unsaved is not None:
            raise UsageError(f"save() does nothing here: {self._unsaved}")
        return super().save(kind=kind)

    # --- for the runner
    # --------------------------------------------------------------------------------------------

    @contextmanager
    def unsaved(self, why: str) -> Iterator[None]:
        """Disable saving inside: a stop exits with ``why`` as its message, and periodic saves are
        off. For a state that cannot be resumed from, or that is already saved."""
        before = self._unsaved
        self._unsaved = before or why
        try:
            yield
        finally:
            self._unsaved = before

    def take(self, objects: Mapping[str, Any], loader: Any) -> None:
        """Register the objects to save and the loader; before :meth:`resume`."""
        for name, thing in objects.items():
            self._objects.add(name, thing)
        if loader is not None:
            self._use(loader)

    def begin_epoch(self) -> None:
        """Start an epoch."""
        self.progress.begun, self.progress.done, self.progress.outputs = True, 0, {}
        self.progress.first_step = self.step
        self.is_committed = False

    def end_part(self) -> None:
        """Finish one function of the epoch group; the next may iterate over the data again."""
        self._cursor.restore_rng()
        if (
            self._cursor.step_has_begun
        ):  # it left its loop early, after training on the batch it was given
            self._cursor.count_step()
            self.step += 1
        self._cursor.in_epoch = False
        self.progress.done += 1

    def end_epoch(self) -> None:
        """Finish an epoch. One without steps counts as a step, because its step identifies a
        checkpoint."""
        if self.step == self.progress.first_step:
            self.step += 1
            self._controller.step = self.step
        self.epoch += 1
        self.progress.begun, self.progress.done = False, 0

    def agree_to_end(self, ended: bool) -> None:
        """Agree on whether a stop signal was true: the first rank decides for all."""
        told = self._rank_group.exchange("stop signals", ended)
        self.progress.ended = bool(told[min(told)])

    def save_epoch(self, epoch: int) -> None:
        """Commit the checkpoint of the completed epoch; an existing intact one is kept. Without a
        manager nothing is.

        Raises:
            SaveFailed, UnsavableState: as :meth:`Run.save`.
            UsageError: ``epoch`` is not the completed one.
        """
        if epoch != self.epoch or self.progress.begun:
            within = f"within epoch {self.epoch}" if self.progress.begun else f"epoch {self.epoch}"
            raise UsageError(
                f"save({epoch}): the run is at {within}; between two saves of its JobRunner, "
                "job.run.save() saves the current state"
            )
        if not self.saves:
            return
        with self._leaving_when_stale():
            self._saver.save(
                self._state(),
                step=self.step,
                epoch=self.epoch,
                kind=EPOCH,
                meta=self._made_of(),
                again=False,
            )
            self._last_save_s = time.monotonic()
            self._saver.poll()
        self.is_committed = True

    def newest_committed(self) -> Checkpoint | None:
        """The newest checkpoint by its manifest, after the save in flight has ended."""
        self._saver.wait()
        if not self.saves:
            return None
        try:
            return next(reversed(self._store.committed()), None)
        except CheckpointError:  # called while reporting another error
            return None

    def finish(self) -> None:
        if self.is_finished:
            self._cursor.restore_rng()
            self._leave()
        else:
            super().finish()

    # --- Run's seams
    # --------------------------------------------------------------------------------------------

    def _newest(self, load: Load | None) -> Found | None:
        if not self.saves:
            return None
        found = super()._newest(load)
        if found is None and self._origin is not None:
            self.begins_at_origin = True
            if load is not None:
                load(self._origin)
            return self._origin
        return found

    def _go_on_finished(self, step: int) -> bool:
        """Load the last epoch, for the code after the JobRunner: it may not have run yet, and must
        not work on untrained objects."""
        newest = self._load_newest() if self.saves else None
        if newest is not None:
            self._take_over(*newest)
        if newest is None or self._step != step or not self.progress.ended:
            has = "no checkpoint" if newest is None else f"no checkpoint after step {self._step}"
            self._log_once(
                f"{self.dir.checkpoints} has {has}: what follows the JobRunner would not have what "
                f"was trained until step {step}, so the process ends here"
            )
            return super()._go_on_finished(step)
        self.is_finished = True
        self._log_once(
            f"this job has finished at step {step}; it is loaded ({self.dir.root})", notice
        )
        return True

    def _is_saved(self) -> bool:
        return self.is_committed or not self.saves

    def _rest_is_redone(self) -> bool:
        """The exit group is part of the run. So its end counts at once where the last epoch is
        committed: a restart has that for the code after the JobRunner."""
        return not self.is_committed

    def _apply(self, state: State, *, source: str) -> None:
        super()._apply(state, source=source)
        if "data" not in state.own:
            # between two functions of a job: there is no iterator to wait for
            self._cursor.restore_rng()

    def _is_due(self) -> bool:
        return self._unsaved is None and super()._is_due()

    def _save_by(self, deadline_mono_s: float) -> str:
        return super()._save_by(deadline_mono_s) if self._unsaved is None else self._unsaved

    def _not_begun(self) -> str:
        return super()._not_begun() if self._unsaved is None else self._unsaved
