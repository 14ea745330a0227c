"""How a run ends: finished, closed, or cut short.

The last part of :class:`~hydroslurm.training.run.Run`.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import ExitForRequeue
from hydroslurm.errors import SaveFailed, StaleAttempt
from hydroslurm.runtime import install as installation
from hydroslurm.training import finished, oversights
from hydroslurm.training.reporting import warning
from hydroslurm.training.saving import Saving

if TYPE_CHECKING:
    from typing_extensions import Self


class Ending(Saving):
    """Base of Run, whose constructor makes what it needs."""

    _installed_here: bool

    def finish(self) -> None:
        """Declare the training done: save its last step unless that is saved already, and close.
        The marker that makes a restart exit at once is written when this process exits with status
        0: see :class:`Run`.

        Raises:
            AgreementFailed: a rank has failed before it was done, so that the run is not finished.
            UsageError: the run was not resumed, and a checkpoint is committed.
        """
        if not self._has_begun:
            self._begin_unasked("the run is to be finished", may_load=False)
        self._saver.wait()
        self._cursor.restore_rng()  # for what follows, where there was nothing left to train
        self._count_step_left_early()
        self._rank_group.exchange("finish", self._step)
        if not self._is_saved():
            try:
                self.save()
            except SaveFailed as error:
                self._log_once(f"{error}. A restart trains on from there")
        self._attempt.record(EventKind.RUN_FINISHED)
        with self._leaving_when_stale():
            self._rank_group.decide("finish", self._write_finished)
        self._attempt.record_end("finished")
        self._leave()

    def close(self) -> None:
        """Wait for a save in flight and restore the signal handlers; no other cleanup is needed."""
        self._is_closed = True
        oversights.closed(self)
        self._stopping.stand_down()
        self._watch.close()
        self._first_step.close()
        try:
            self._saver.close()
        finally:
            if installation.is_installed():
                self._controller.release_stops()
                if self._installed_here:
                    installation.uninstall()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        elif not isinstance(error, ExitForRequeue):
            if isinstance(error, Exception):
                self._leave_if_cut_short(error)
            if self._rank_group.rank == 0:
                with contextlib.suppress(StaleAttempt):  # the newer one writes the ledger
                    self._attempt.end("error", step=self._step)
            self._attempt.record_end("error")
            self.close()

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _leave_if_cut_short(self, error: Exception) -> None:
        """A rank that died in the middle of a stop makes the collectives of the others fail. That
        is no error of the program: within the grace its status would end the job.

        Raises:
            ExitForRequeue: as of a stop that nothing could be saved at.
        """
        request = self._controller.stop_request
        if request is None or self._attempt.number is None:
            return
        broken = self._rank_group.broken()
        if broken is None:
            return
        warning(f"while the ranks were about to stop: {type(error).__name__}: {error}")
        raise self._stopping.leave_unsaved(broken, request, step=self._step) from error

    def _others_have_ended(self) -> bool:
        """Asked as this process ends: whether those that count have ended well."""
        return True

    def _is_saved(self) -> bool:
        """Whether the last step is, or is not to be."""
        return self._step == (self._saver.durable_step or 0)

    def _rest_is_redone(self) -> bool:
        """Whether a restart repeats what follows the training, until a process has done it."""
        return True

    def _write_finished(self) -> None:
        self._fence.check("the end of the run")
        self._attempt.end("finished", step=self._step)
        if self._rest_is_redone():
            others = self._others_have_ended
            finished.at_good_end(self.dir, step=self._step, fence=self._fence, others=others)
        else:
            finished.write(self.dir, step=self._step)
