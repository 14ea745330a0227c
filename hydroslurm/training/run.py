"""``Run``: makes a training loop survive preemption.

    run = hydroslurm.Run(model=model, optimizer=optimizer, loader=loader, directory="runs/a")
    for batch in run.batches(epochs=10):
        ...

Safe points lie between two steps. Only there is the state consistent, so that is where periodic
saves begin and stops are obeyed. As long as nothing was requested, a safe point exchanges and
synchronises nothing: it costs two attribute reads and, with ``every_s``, a clock. The same holds
for several ranks: they learn of a stop outside the loop, and agree on one safe point (see
:mod:`hydroslurm.training.rank_group`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, NoReturn

from hydroslurm.checkpoint import memory
from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, State
from hydroslurm.checkpoint.tiers import clear_fast
from hydroslurm.coordination.world import World
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import ExitForRequeue
from hydroslurm.errors import (
    RanksError,
    SaveFailed,
    StaleAttempt,
    UnsavableState,
    UsageError,
)
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import StopRequest
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training import finished, oversights
from hydroslurm.training.arguments import (
    Cadence,
    controller_for,
    fast_store,
    fence_of,
    run_directory,
)
from hydroslurm.training.attempts import Limits, least_number, limits_of
from hydroslurm.training.beginning import Beginning
from hydroslurm.training.composition import Composition
from hydroslurm.training.current_attempt import CurrentAttempt
from hydroslurm.training.cursor import Cursor
from hydroslurm.training.ddp_buckets import UNSETTLED, is_settled
from hydroslurm.training.objects import Objects, require_savable
from hydroslurm.training.oversights import FolderWatch, LoopWatch
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.reporting import SaveRecorder, notice
from hydroslurm.training.requeue import StopHandler
from hydroslurm.training.saves import Saves
from hydroslurm.training.stopping import Stopping


class Run(Beginning):
    """One training over all its attempts: saved, stopped, requeued and resumed.

    Takes over SIGTERM and the warning signal (see :meth:`Controller.claim_stops`); both mean:
    continue to the next safe point, save, and exit. Installs pausing if that was not done yet.

    A process has one at a time, used from the main thread. As a context manager it also finishes
    the run: a restart of a finished run exits at once, with status 0.

    A run has finished when its block has ended and its process exits with status 0 (with several
    ranks, that of rank 0). If anything ends the process in between (SIGTERM, an exception, a node
    failure), the next start resumes at the last step, trains nothing, and repeats what follows the
    loop, inside the block and after it, until that has completed once. So write an export under
    another name and rename it.

    With several ranks, each makes the same calls: all load, save and stop together at one step,
    whichever of them was signalled. Each saves its shard, its random numbers and its position in
    the data; a run may resume with another number of ranks. They find each other by the variables
    of Slurm or torchrun.

    Args:
        model, optimizer, scheduler, scaler: what is saved under these names; all optional.
        loader: what :meth:`batches` iterates: a DataLoader, torchdata's StatefulDataLoader, or any
            iterable (see :func:`hydroslurm.data.position.position_of`).
        directory: where the run keeps its checkpoints and attempts, on a file system that all nodes
            share; default: the run folder of this job (``hydroslurm-runs/JOBID``).
        every_steps, every_s: how often to save in the background while training; every 600 s when
            neither is given, never when both are 0. A save in the background needs memory for a
            copy of the state: where a limit leaves too little, the training waits for each save.
        keep: how many periodic checkpoints to keep, at least 2; two of stops are kept in addition.
        extra: more objects by name, each with ``state_dict`` and ``load_state_dict``. They are
            loaded in this order, before model, optimizer, scheduler and scaler, so that they can
            rebuild what was added to those while training, such as a parameter group.
        fast_directory: a local folder (/dev/shm, NVMe) that is written first; each run makes a
            folder of its own in it. It survives the process and a requeue to the same node, but
            not the node.
        on_save_error: ``warn`` continues when a periodic save fails, ``fail`` raises SaveFailed at
            the next safe point.
        limits: how often the run may be restarted.
        resume: False starts at step 0 and sets aside what is committed in the folder. A restart of
            the same job still resumes, from what its first start has saved.

    Raises:
        UsageError: a wrong argument; no directory outside of a job; a fast tier with several
            ranks; another Run is open in this process, or has finished in this folder in this
            process; not the main thread.
        InstallError, GateError: as :func:`hydroslurm.install`.
    """

    _rest_is_redone = True
    """What follows the training is repeated until the process that has done it exits well."""

    _keep_epochs: int | None = None
    """How many checkpoints of kind ``epoch`` stay, which only a job makes; None: all of them."""

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        directory: str | os.PathLike[str] | None = None,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 2,
        extra: Mapping[str, Any] | None = None,
        fast_directory: str | os.PathLike[str] | None = None,
        on_save_error: Literal["warn", "fail"] = "warn",
        limits: Limits | None = None,
        resume: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        oversights.require_place()
        environ = os.environ if environ is None else environ
        allocation = Allocation.from_environ(environ)
        self._cadence = Cadence.of(every_steps, every_s, environ)
        self.dir = run_directory(directory, environ)
        finished.require_unfinished(self.dir)
        self._folder = FolderWatch(self.dir.root)
        self._step = 0
        self._epoch = 0
        self._begins_anew = not resume and not (allocation and allocation.restart_count)
        self._has_begun = self._is_closed = False
        self._resumed_unasked: bool | None = None
        self._watch = LoopWatch()
        self._model = model
        self._objects = Objects()
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        present = {name: thing for name, thing in named.items() if thing is not None}
        for name, thing in [*present.items(), *(extra or {}).items()]:
            self._add(name, thing)
        self._cursor = Cursor()
        self._saves = Saves()
        self._last_save_s = time.monotonic()
        self._fence = fence_of(self.dir, allocation)
        self._fast = fast_store(fast_directory, self.dir, fence=self._fence)
        self._controller, self._installed_here = controller_for(self.dir, environ)
        self._world = World.from_environ(environ)
        self._rank_group = RankGroup(self._controller)
        self._durable = CheckpointStore(
            self.dir.checkpoints, peers=self._rank_group.peers, fence=self._fence
        )
        with contextlib.ExitStack() as undo:
            if self._installed_here:
                undo.callback(installation.uninstall)
            if loader is not None:
                self._use(loader)
            self._attempt = CurrentAttempt(
                self.dir,
                self._controller,
                limits=limits_of(limits, environ),
                fence=self._fence,
                allocation=allocation,
                at_least=least_number(environ, allocation),
            )
            self._saver = self._make_saver(keep=keep, on_save_error=on_save_error)
            self._stopping = self._take_over_stops(allocation, environ)
            undo.pop_all()
        oversights.opened(self, self._controller)

    def _make_saver(self, *, keep: int, on_save_error: Literal["warn", "fail"]) -> Saver:
        return Saver(
            self._durable,
            fast=self._fast,
            keep=keep,
            keep_epochs=self._keep_epochs,
            on_save_error=on_save_error,
            exempt=self._controller.exempt,
            tell=SaveRecorder(self._controller),
            peers=self._rank_group.peers,
            room=functools.partial(memory.room, ranks_here=self._world.local_world_size),
        )

    def _take_over_stops(
        self, allocation: Allocation | None, environ: Mapping[str, str]
    ) -> Stopping:
        stop_handler = StopHandler(
            allocation,
            self._controller,
            environ=environ,
            fence=self._fence,
            reads_ahead=self._rank_group.rank == 0,
        )
        self._controller.claim_stops(stop_handler.note_request)
        return Stopping(
            self._rank_group, attempt=self._attempt, saver=self._saver, stop_handler=stop_handler
        )

    # --- the loop
    # --------------------------------------------------------------------------------------------

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
        if self._watch.on:
            self._watch.at_safe_point(self._step)
        stop = self._arrive()
        if self._attempt.note_step(self._step, samples_per_step=self._cursor.samples_per_step):
            self._check_first_step()
        if stop is not None:
            self._stop(stop)
        self._poll()
        if self._is_due():
            self._last_save_s = time.monotonic()
            step = self._completed_step()
            if self._saves.takes_periodic(step):
                took_s = self._saver.start(
                    self._state(), step=step, epoch=self._epoch, meta=self._made_of()
                )
                if took_s > 0:
                    self._saves.began(periodic_step=step)

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
            where = "the body of the loop over batches()" if self._saves.in_body else "another one"
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
        """Save now; return when the checkpoint is committed on the durable tier.

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

    # --- the end
    # --------------------------------------------------------------------------------------------

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
        self._rank_group.exchange("finish", self._step)
        if self._rest_is_redone and self._step != (self._saver.durable_step or 0):
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
        self._watch.close()
        try:
            self._saver.close()
        finally:
            if installation.is_installed():
                self._controller.release_stops()
                if self._installed_here:
                    installation.uninstall()

    def __enter__(self) -> Run:
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

    def _check_first_step(self) -> None:
        """What can be known once the optimizer has its own state.

        Raises:
            UnsavableState: the state holds something that could be saved by pickling only.
        """
        if self._rank_group.world_size > 2 and is_settled(self._model) is False:
            self._log_once(UNSETTLED)
        if message := oversights.recompiles(self._model, self._cursor.loader):
            self._log_once(message)
        state = self._state()
        require_savable(state)
        refused = self._saver.reserve(state)
        if refused and self._world.local_rank == 0:  # one rank speaks for those of its node
            notice(
                f"{refused}. So each save holds the training up until it is written. More memory "
                "(--mem) spares that"
            )

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
        notice(f"while the ranks were about to stop: {type(error).__name__}: {error}")
        raise self._stopping.leave_unsaved(broken, request, step=self._step) from error

    def _add(self, name: str, thing: Any) -> None:
        self._objects.add(name, thing)
        self._watch.add(thing)

    def _use(self, loader: Any) -> None:
        rank_group = self._rank_group
        shield = self._controller.plan.stopping()
        self._cursor.use(
            loader, shield=shield, rank=rank_group.rank, world_size=rank_group.world_size
        )

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

    def _poll(self) -> None:
        """What became of saves in the background. Ranks hear at different steps that a newer
        attempt has begun, and one that simply left would leave the others in a collective: they
        stop together, as for a signal."""
        if self._rank_group.world_size == 1:
            with self._leaving_when_stale():
                self._saver.poll()
            return
        try:
            self._saver.poll()
        except StaleAttempt as error:
            self._log_once(str(error))
            self._controller.request_stop()

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
        except UnsavableState as error:
            if self._objects.uninitialised() is None:
                raise
            return f"nothing was saved, and nothing is lost: {error}"

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

    def _write_finished(self) -> None:
        self._fence.check("the end of the run")
        self._attempt.end("finished", step=self._step)
        if self._rest_is_redone:
            finished.at_good_end(self.dir, step=self._step, fence=self._fence)
        else:
            finished.write(self.dir, step=self._step)
        clear_fast(durable=self._durable, fast=self._fast)

    def _state(self) -> State:
        if self._rank_group.rank == 0 and (message := self._folder.look()):
            notice(message)
        own = self._saves.evaluation or self._own_state()
        return State(shared=self._objects.states(), own=own)

    def _own_state(self) -> Mapping[str, Any]:
        return self._cursor.state(step=self._completed_step(), epoch=self._epoch)

    def _made_of(self) -> dict[str, Any]:
        return Composition(self._objects.classes(), self._cursor.loading).to_meta()

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

    def _completed_step(self) -> int:
        return self._cursor.completed(self._step)

    def _is_due(self) -> bool:
        """Whether to save behind this step. All ranks save at one step, and each has a clock of its
        own: the first one's counts, and calls for a save at one of the next steps."""
        if self._rank_group.world_size == 1:
            return self._cadence.is_due(self._step, self._last_save_s)
        called = self._rank_group.takes_save()
        if self._rank_group.rank == 0 and self._cadence.is_due_by_clock(self._last_save_s):
            self._rank_group.call_save()
        return called or self._cadence.is_due_by_step(self._step)
