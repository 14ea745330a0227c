"""What happens between two steps of a run: a save if one is due, the exit if a stop was requested.

The second part of :class:`~hydroslurm.training.run.Run`, on which its loops and its end are built.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from hydroslurm.checkpoint.census import Unkept
from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.checkpoint.store import State
from hydroslurm.coordination.world import World
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import ExitForRequeue
from hydroslurm.errors import RanksError, StaleAttempt, UnsavableState, UsageError
from hydroslurm.runtime.controller import StopRequest
from hydroslurm.training import oversights
from hydroslurm.training.arguments import Cadence
from hydroslurm.training.beginning import Beginning
from hydroslurm.training.checks import FirstStep
from hydroslurm.training.composition import Composition
from hydroslurm.training.contents import largest
from hydroslurm.training.ddp_buckets import STATIC_GRAPH
from hydroslurm.training.objects import OutgrownState
from hydroslurm.training.oversights import FolderWatch
from hydroslurm.training.reporting import warning


class Saving(Beginning):
    """Base of Run, whose constructor makes what it needs."""

    _cadence: Cadence
    _first_step: FirstStep
    _folder: FolderWatch
    _last_save_s: float
    _model: Any
    _world: World

    def safe_point(self) -> None:
        """Declare a step complete and the state consistent: save if a save is due, and exit if a
        stop was requested. :meth:`batches` calls it; your own loop does so once per step.

        In the body of a loop over :meth:`batches`, call it, :meth:`check_stop` and :meth:`save`
        only after the batch was trained: a batch counts as used once it was handed out.

        Raises:
            SystemExit: the run was saved and exits (75, or 143 when it was cancelled).
            SaveFailed: an earlier save failed, with ``on_save_error="fail"``.
            UnsavableState: at the first step of an attempt; the state holds something that only
                pickling could save.
            UsageError: the run was not resumed, and a checkpoint is committed; or the optimizer
                steps, and nobody counts.
        """
        if not self._has_begun:
            self._begin_unasked("a safe point was reached", may_load=False)
        self._saves.unchanged = False
        self._gradients.end_step()
        if self._watch.on:
            self._watch.at_safe_point(self._step)
        stop = self._arrive()
        if self._attempt.note_step(self._step):
            self._check_first_step()
        if stop is not None:
            self._stop(stop)
        try:
            self._saver.poll()
        except StaleAttempt as error:
            self._leave_stale(error)
        if self._is_due():
            self._save_periodically()

    def check_stop(self) -> None:
        """Exit if a stop was requested: for long work between two safe points, which a stop would
        otherwise wait for.

        This saves the state as it is now, and the next attempt resumes from ``run.step`` and
        ``run.epoch``; it does not repeat what follows this call. Two places are exact: after a
        loop over :meth:`batches` nothing is saved and all that follows the loop is repeated; and
        within :meth:`evaluation`.

        Raises:
            SystemExit: as :meth:`safe_point`.
        """
        self._saves.unchanged = False
        self._leave_if_asked()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """A block that a stop cuts off and the next attempt repeats, such as an evaluation.

            for batch in run.batches(epochs=run.epoch + 1):
                ...
            with run.evaluation():
                for batch in test_loader:
                    run.check_stop()
                    ...
            scheduler.step()

        A stop is obeyed where the block begins and at each :meth:`check_stop` in it, with the state
        and the random numbers from its beginning. The block must not change anything that is saved;
        what does (``scheduler.step()``) belongs after it and is then done once. With your own loop
        the script has to return here from ``run.step`` and ``run.epoch`` as they are here: count
        the epoch after the block.

        Raises:
            SystemExit: as :meth:`safe_point`.
            UsageError: in the body of a loop over :meth:`batches`, to which no attempt can return;
                within another such block.
        """
        if not self._has_begun:
            self._begin_unasked("an evaluation begins")
        if self._saves.in_body or self._saves.evaluation is not None:
            where = (
                "the body of a loop over batches() or steps()"
                if self._saves.in_body
                else "another one"
            )
            raise UsageError(
                f"run.evaluation() in {where}: a stop there could not be resumed at this place. "
                "Evaluate behind a loop over run.batches(epochs=run.epoch + 1), one block after "
                "the other; or call only run.check_stop(), after which the rest of the body is "
                "not made up for"
            )
        self._saves.evaluation = self._own_state()
        try:
            self.check_stop()
            yield
        finally:
            self._saves.evaluation = None

    @property
    def stop_requested(self) -> bool:
        """Whether one of the next safe points will be the last. Some ranks know this sooner than
        others, so do not leave a loop by it that all ranks have to leave together."""
        return self._rank_group.stop_wanted()

    def request_stop(self) -> None:
        """Request a stop from inside the program: save, requeue and exit at the next safe point."""
        self._controller.request_stop()

    def save(self, *, kind: str = "manual") -> Saved:
        """Save now; return when the checkpoint is committed.

        Raises:
            SaveFailed: it is not; what was committed before is whole.
            UnsavableState: the state holds something that cannot be saved.
            UsageError: as :meth:`safe_point`; or within :meth:`evaluation`.
        """
        if not self._has_begun:
            self._begin_unasked("save() was called", may_load=False)
        if self._saves.evaluation is not None:
            raise UsageError(
                "run.save() within run.evaluation(), which the next attempt begins anew from what "
                "was saved before it; save behind the block"
            )
        step = self._completed_step()
        with self._leaving_when_stale():
            saved = self._saver.save(
                self._state(), step=step, epoch=self._epoch, kind=kind, meta=self._made_of()
            )
        self._saves.began()
        self._last_save_s = time.monotonic()
        return saved

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _check_first_step(self) -> None:
        """Record it, with what can be known once the optimizer has its own state.

        Raises:
            UnsavableState: the state holds something that could be saved by pickling only.
        """
        samples_per_step = self._samples_of_step()
        self._attempt.record(EventKind.FIRST_STEP, samples_per_step=samples_per_step)
        self._say(self._contents.unkept())
        if self._bucket_orders.has_static_graph():
            self._log_once(STATIC_GRAPH)
        if message := oversights.recompiles(self._model, self._cursor.loader):
            self._log_once(message)
        state = self._state()
        if most := largest(state.own.get("script", {})):
            self._log_once(
                f"{most}: each rank saves them with each checkpoint, as the next step may need "
                "them. Where none does, set them to None behind their use"
            )
        refused = self._saver.reserve(state)  # plans a save of it: what cannot be saved is named
        if refused and self._world.local_rank == 0:  # one rank speaks for those of its node
            warning(
                f"{refused}. So each save holds the training up until it is written. More memory "
                "(--mem) spares that"
            )

    def _say(self, lost: Iterable[Unkept]) -> None:
        for one in lost:
            self._log_once(str(one))

    def _arrive(self) -> StopRequest | None:
        """This rank is at a safe point: the stop that is obeyed here. Exit where one is wanted and
        the ranks cannot reach one safe point together."""
        try:
            return self._rank_group.arrive()
        except RanksError as error:
            request, step = self._controller.stop_request, self._completed_step()
            leaving = self._stopping.leave_unsaved(error, request, step=step)
        raise leaving

    def _leave_if_asked(self) -> None:
        stop = self._arrive()
        if stop is not None:
            self._stop(stop)

    def _stop(self, request: StopRequest) -> NoReturn:
        with self._leaving_when_stale():
            raise self._saved_exit(request, step=self._completed_step())

    def _saved_exit(self, request: StopRequest, *, step: int) -> ExitForRequeue:
        """Save for a stop and have the job requeued; the exit is returned, to be raised."""
        try:
            window = self._stopping.agree_on_window(request, step=step)
            saved = self._save_by(window.deadline_mono_s) if self._has_begun else self._not_begun()
            return self._stopping.leave(window, saved, step=step)
        except RanksError as error:  # a rank died just now
            return self._stopping.leave_unsaved(error, request, step=step)

    def _not_begun(self) -> str:
        """The message of a stop before the run has begun: the newest checkpoint may be ahead."""
        return "the run had not begun, and nothing was saved"

    def _samples_of_step(self) -> int | None:
        return self._cursor.samples_per_step

    def _leave_stale(self, error: StaleAttempt) -> None:
        """A newer attempt has begun. Ranks hear of it at different steps, and one that simply left
        would leave the others in a collective: they stop together, as for a signal."""
        if self._rank_group.world_size == 1:
            with self._leaving_when_stale():
                raise error
        self._log_once(str(error))
        self._controller.request_stop()

    def _save_periodically(self) -> None:
        self._last_save_s = time.monotonic()
        step = self._completed_step()
        if self._saves.takes_periodic(step):
            took_s = self._saver.start(
                self._state(), step=step, epoch=self._epoch, meta=self._made_of()
            )
            if took_s > 0:
                self._saves.began(periodic_step=step)

    def _save_by(self, deadline_mono_s: float) -> str:
        """Save for a stop; return what came of it, as a message."""
        if self._saves.behind_batches:
            return (
                f"step {self._step} is committed as it was behind its last batch, and what follows "
                "the loop over batches() is done anew"
            )
        step = self._completed_step()
        try:
            return self._saver.save_by(
                self._state,
                step=step,
                epoch=self._epoch,
                deadline_mono_s=deadline_mono_s,
                meta=self._made_of(),
                unchanged=self._saves.unchanged,
            ).reason
        except OutgrownState as error:
            return f"nothing was saved, and the next attempt goes on from an older step: {error}"
        except UnsavableState as error:
            if self._objects.uninitialised() is None:
                raise
            return f"nothing was saved, and nothing is lost: {error}"

    def _state(self) -> State:
        if self._rank_group.rank == 0 and (message := self._folder.look()):
            warning(message)
        own = self._saves.evaluation or self._own_state()
        states = self._objects.states()
        self._objects.require_resumable(states)
        return State(shared=states, own=own, frozen=self._contents.frozen())

    def _own_state(self) -> Mapping[str, Any]:
        return self._with_script(self._position())

    def _position(self) -> Mapping[str, Any]:
        """Where this rank is, with what belongs to that place."""
        own = self._cursor.state(step=self._completed_step(), epoch=self._epoch)
        more = {
            "bucket_orders": self._bucket_orders.state(),
            "gradients": self._gradients.state_dict(),
        }
        return {**own, **{name: state for name, state in more.items() if state}}

    def _with_script(self, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """With what no ``state_dict()`` has, as far as the script has changed it."""
        state = self._contents.state()
        self._say(self._contents.take_lost())
        return {**own, "script": state} if state else own

    def _made_of(self) -> dict[str, Any]:
        return Composition(self._objects.classes(), self._cursor.loading).to_meta()

    def _completed_step(self) -> int:
        return self._cursor.completed(self._step)

    def _count_step_left_early(self) -> None:
        """A loop that was left in the body of its last step (``break``) has trained that step."""
        if self._cursor.step_has_begun and self._cursor.step_is_full:
            self._cursor.count_step()
            self._step += 1

    def _is_due(self) -> bool:
        """Whether to save behind this step. All ranks save at one step, and each has a clock of its
        own: the first one's counts, and calls for a save at one of the next steps."""
        if self._rank_group.world_size == 1:
            return self._cadence.is_due(self._step, self._last_save_s)
        called = self._rank_group.takes_save()
        if self._rank_group.rank == 0 and self._cadence.is_due_by_clock(self._last_save_s):
            self._rank_group.call_save()
        return called or self._cadence.is_due_by_step(self._step)
