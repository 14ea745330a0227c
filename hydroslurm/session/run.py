"""``Run``: the loop that a user writes around their training, made to survive.

    run = hydroslurm.Run(model=model, optimizer=optimizer, loader=loader, directory="runs/a")
    for batch in run.batches(epochs=10):
        ...

Safe points lie between two steps. There, and only there, is the state consistent: periodic saves
begin there, and a stop is obeyed there. Nothing is exchanged, synchronised or asked for at a safe
point as long as nobody wants anything: two attribute reads and, with ``every_s``, a clock. The same
holds for several ranks, which are told of a stop from outside the loop, and meet at one place (see
:mod:`hydroslurm.session.company`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

from hydroslurm.checkpoint import memory
from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, State
from hydroslurm.checkpoint.tiers import Found, Tier
from hydroslurm.errors import (
    CheckpointError,
    HydroslurmError,
    RanksError,
    RunEnded,
    SaveFailed,
    StaleAttempt,
    UsageError,
)
from hydroslurm.events import EventKind
from hydroslurm.exitcodes import Departure
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import StopRequest
from hydroslurm.runtime.world import World
from hydroslurm.session import finished, oversights
from hydroslurm.session.arguments import (
    Cadence,
    controller_for,
    fast_store,
    fence_of,
    run_directory,
)
from hydroslurm.session.buckets import UNSETTLED, is_settled
from hydroslurm.session.company import company_of
from hydroslurm.session.cursor import Cursor
from hydroslurm.session.leaving import Leaver
from hydroslurm.session.life import Life
from hydroslurm.session.lives import Limits, limits_of
from hydroslurm.session.notice import notice
from hydroslurm.session.objects import Objects, require_savable
from hydroslurm.session.oversights import LoopWatch
from hydroslurm.session.recording import SaveRecorder
from hydroslurm.session.resuming import load_for, newest_of, set_aside
from hydroslurm.session.stopping import Stopping
from hydroslurm.slurm.allocation import Allocation

_COULD_NOT_RESUME = (
    "the checkpoint of this run could not be loaded: it does not train from 0 in its place. Mend "
    "what resume() has said; to begin anew, give another directory= or Run(resume=False)"
)


class Run:
    """One training over all its lives: saved, stopped, requeued and continued.

    Takes SIGTERM and the warning signal over (see :meth:`Controller.claim_stops`); both mean: go on
    to the next safe point, save, and leave. Installs pausing where that was not done yet.

    One per process, used from the main thread. As a context manager it also writes the marker that
    lets a restart of a finished run leave at once.

    With several ranks each makes the same calls: all load, save and stop together, at one step,
    whichever of them was signalled. Each saves its own part, its random numbers and its place in
    the data; a run may come back with another number of ranks. They find each other by the
    variables of Slurm or torchrun.

    Args:
        model, optimizer, scheduler, scaler: what is saved under these names; all optional.
        loader: what :meth:`batches` iterates: a DataLoader, torchdata's StatefulDataLoader, or any
            iterable (see :func:`hydroslurm.data.position.position_of`).
        directory: where the run keeps its checkpoints, lives and marker, on a file system that all
            nodes share; default: the run folder of this job (``hydroslurm-runs/JOBID``).
        every_steps, every_s: save so often while training, in the background; every 600 s when
            neither is given, never when both are 0. The background needs memory for a copy of the
            state: where a limit leaves too little, the training waits for each save.
        keep: how many periodic checkpoints stay, at least 2. Two of stops stay besides.
        extra: more objects by name, each with ``state_dict`` and ``load_state_dict``.
        fast_directory: a local folder (/dev/shm, NVMe) that is written first; each run makes one
            of its own in it. It survives the process, and a requeue to the same node, not the node.
        on_save_error: ``warn`` goes on when a periodic save fails, ``fail`` raises SaveFailed at
            the next safe point.
        limits: how often the run may be started again.
        resume: False begins at step 0, and sets aside what is committed in the folder. A restart of
            the same job goes on all the same, from what its first start has saved.

    Raises:
        UsageError: a wrong argument; no directory outside of a job; several ranks and a fast tier;
            another Run that is open in this process; not the main thread.
        InstallError, GateError: as :func:`hydroslurm.install`.
    """

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
        self._step = 0
        self._epoch = 0
        self._begins_anew = not resume and not (allocation and allocation.restart_count)
        self._has_begun = self._is_closed = False
        self._resumed_unasked: bool | None = None
        self._watch = LoopWatch()
        self._model = model
        self._objects = Objects()
        for name, thing in {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
        }.items():
            if thing is not None:
                self._add(name, thing)
        for name, thing in (extra or {}).items():
            self._add(name, thing)
        self._cursor = Cursor()
        self._last_save_s = time.monotonic()
        self._fence = fence_of(self.dir, allocation)
        self._fast = fast_store(fast_directory, self.dir, fence=self._fence)
        self._controller, self._installed_here = controller_for(self.dir, environ)
        self._company = company_of(self._controller)
        self._world = World.from_environ(environ)
        self._room = functools.partial(memory.room, ranks_here=self._world.local_world_size)
        peers = self._company.peers
        self._durable = CheckpointStore(self.dir.checkpoints, peers=peers, fence=self._fence)
        with contextlib.ExitStack() as undo:
            if self._installed_here:
                undo.callback(installation.uninstall)
            if loader is not None:
                self._use(loader)
            self._life = Life(
                self.dir,
                self._controller,
                limits=limits_of(limits, environ),
                fence=self._fence,
                allocation=allocation,
            )
            self._saver = Saver(
                self._durable,
                fast=self._fast,
                keep=keep,
                on_save_error=on_save_error,
                exempt=self._controller.exempt,
                tell=SaveRecorder(self._controller),
                peers=peers,
                room=self._room,
            )
            leaver = Leaver(
                allocation,
                self._controller,
                environ=environ,
                fence=self._fence,
                reads_ahead=self._company.rank == 0,
            )
            self._stopping = Stopping(
                self._company, life=self._life, saver=self._saver, leaver=leaver
            )
            self._controller.claim_stops(leaver.hear)
            undo.pop_all()
        oversights.opened(self, self._controller)

    # --- where it is
    # --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Training steps completed. Settable, for loops that do not use :meth:`batches`.

        Who reads it wants to know where to go on, so that the first look resumes the run where
        :meth:`resume` was not called: with several ranks, on all of them.

        Raises:
            UsageError: the run was not resumed, a checkpoint is committed, and something may have
                been trained since; or it is set before the run was resumed.
        """
        if not self._has_begun:
            self._begin_unasked("run.step was read")
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if not self._has_begun:
            self._begin_unasked("run.step was set", may_load=False)
        self._step = step

    @property
    def epoch(self) -> int:
        """The epoch that is being trained, from 0; as :attr:`step`."""
        if not self._has_begun:
            self._begin_unasked("run.epoch was read")
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if not self._has_begun:
            self._begin_unasked("run.epoch was set", may_load=False)
        self._epoch = epoch

    # --- registering and going on
    # --------------------------------------------------------------------------------------------

    def register(self, name: str, thing: Any) -> None:
        """Save one more object; before :meth:`resume`.

        Raises:
            UsageError: the run has begun, the name is taken, or it is not an object with
                ``state_dict`` and ``load_state_dict``.
        """
        if self._life.number is not None:
            raise UsageError(
                f"register({name!r}) comes too late: the run has been resumed already, by resume() "
                "or the first look at run.step or run.epoch"
            )
        self._add(name, thing)

    def resume(self) -> bool:
        """Go on from the newest committed checkpoint; False when there is none.

        A run that has finished leaves with status 0 here; one that must not go on (a limit is
        spent, or lives pass without progress) with 93. From here on the folder is this attempt's:
        an older one that is still alive can neither save nor remove anything there, and leaves with
        93 when it tries. Called by :meth:`batches` when it was not called before, and by the first
        look at :attr:`step` or :attr:`epoch`.

        Raises:
            StateMismatch: the checkpoint belongs to other objects; names the keys.
            UsageError: called twice.
        """
        if self._resumed_unasked is not None:  # the script has looked at run.step before
            resumed, self._resumed_unasked = self._resumed_unasked, None
            return resumed
        if self._has_begun:
            raise UsageError("resume() was called already; a run goes on once")
        if self._life.number is not None:
            raise UsageError(_COULD_NOT_RESUME)
        return self._begin(may_load=True, seen="")

    def _begin_unasked(self, seen: str, *, may_load: bool = True) -> None:
        """The loop begins, and nobody has called :meth:`resume`. That is made good where the state
        is still what the script has made; in the middle of a loop it would be too late.

        Raises:
            UsageError: a checkpoint is committed, which the loop would begin without.
        """
        if self._is_closed or self._life.number is not None:
            if may_load:  # an error that is being handled may look at the step
                return
            raise UsageError(
                f"{seen} and the run is closed; make another Run(...)"
                if self._is_closed
                else f"{seen} and {_COULD_NOT_RESUME}"
            )
        may_load = may_load and not self._watch.may_have_trained
        resumed = self._begin(may_load=may_load, seen=seen)
        if may_load:
            self._resumed_unasked = resumed
        else:
            self._say(
                f"{seen} and run.resume() was not called: this attempt begins at step 0, and the "
                "next one could not go on. Call it before the loop, and begin that at run.step"
            )

    def _begin(self, *, may_load: bool, seen: str) -> bool:
        company = self._company
        try:
            company.gather()
        except RanksError as error:
            raise self._stopping.leave_unsaved(
                error, self._controller.stop_request, step=0
            ) from error
        with self._leaving_when_stale(), contextlib.ExitStack() as loading:
            for store in self._written_stores():
                loading.enter_context(store.pinning())
            resumed = self._go_on(may_load=may_load, seen=seen)
        self._watch.begin(self._step, in_loop=not may_load)
        self._has_begun = True
        return resumed

    def _go_on(self, *, may_load: bool, seen: str) -> bool:
        company = self._company
        entered = company.decide("enter", self._enter)
        if (step := entered["finished"]) is not None:
            self._say(f"this run has finished at step {step}; nothing to do ({self.dir.root})")
            self._leave()
            raise Departure.finished()
        self._fence.hold(entered["claim"])
        found = self._newest()
        if found is not None and not may_load:
            raise UsageError(
                f"{seen} and the run was not resumed, but step {found.checkpoint.step} is "
                f"committed ({found.checkpoint.path}): the loop would train from 0 again. Call "
                "run.resume() before the loop, and begin that at run.step; to begin anew, give "
                "another directory= or Run(resume=False)"
            )
        begins_at = found.checkpoint.step if found else 0
        try:
            number = company.decide("life", lambda: self._life.enter(begins_at))
        except RunEnded as error:
            self._say(str(error))
            self._leave()
            raise Departure.must_not_run_again() from error
        self._life.begin(number, begins_at)
        if found is None:
            self._say(f"a new run, step 0 ({self.dir.root})")
            return False
        try:
            state = load_for(company, found, like=self._objects.templates())
        except (CheckpointError, OSError):
            self._fence.check(f"loading {found.checkpoint.path}")  # a newer attempt removed it
            raise
        if found.tier is Tier.DURABLE:
            self._saver.continues_from(found.checkpoint)
        self._apply(state, source=str(found.checkpoint.path))
        self._say(f"life {number} goes on from step {self._step} ({found.checkpoint.path})")
        return True

    # --- the loop
    # --------------------------------------------------------------------------------------------

    def batches(self, *, epochs: int, accumulate: int = 1) -> Iterator[Any]:
        """Yield the batches that are left of ``epochs`` epochs; one is one step.

        A safe point lies behind each. Leaving the loop early leaves the run where it is.

        Args:
            accumulate: safe points only behind every so many batches, which are then one step:
                gradients that are being accumulated are not saved.
        """
        if self._cursor.position is None:
            raise UsageError("batches() needs a loader; give one to Run(loader=...)")
        if accumulate < 1 or epochs < 0:
            raise UsageError(
                f"batches(epochs={epochs}, accumulate={accumulate}): wanted epochs of 0 or more, "
                "accumulate of 1 or more"
            )
        if not self._has_begun:
            self.resume()
        self._watch.close()  # it is we who count
        while self._epoch < epochs:
            self.check_stop()
            yield from self._left_of_epoch(accumulate)
            self._epoch += 1
            self._cursor.in_epoch = False
        self._saver.wait()
        if self._step != self._saver.durable_step:
            self.save()

    def safe_point(self) -> None:
        """Say that a step is complete and the state consistent: save if it is time to, and leave if
        a stop was asked for. :meth:`batches` calls it; a loop of one's own does, once per step.

        In the body of a loop over :meth:`batches` call it, :meth:`check_stop` and :meth:`save` only
        when the batch has been trained: it counts as used from the moment it was handed out.

        Raises:
            SystemExit: the run was saved and leaves (75, or 143 when it was cancelled).
            SaveFailed: an earlier save failed, with ``on_save_error="fail"``.
            UnsavableState: at the first step of a life; the state holds something that could be
                saved by pickling only.
            UsageError: the run was not resumed, and a checkpoint is committed; or the optimizer
                steps, and nobody counts.
        """
        if not self._has_begun:
            self._begin_unasked("a safe point was reached", may_load=False)
        if self._watch.on:
            self._watch.at_safe_point(self._step)
        stop = self._arrive()
        if self._life.note_step(self._step, samples_per_step=self._cursor.samples_per_step):
            if self._company.world_size > 2 and is_settled(self._model) is False:
                self._say(UNSETTLED)
            state = self._state()  # now that the optimizer has its own
            require_savable(state)
            if refused := self._saver.reserve(state):
                self._tell_of_node(
                    f"{refused}. So each save holds the training up until it is written. "
                    "More memory (--mem) spares that"
                )
        if stop is not None:
            self._stop(stop)
        self._poll()
        if self._is_due():
            self._last_save_s = time.monotonic()
            step = self._completed_step()
            self._saver.start(self._state(), step=step, epoch=self._epoch, kind="periodic")

    def check_stop(self) -> None:
        """Leave if a stop was asked for: for long evaluations, which a stop would else wait for.

        Raises:
            SystemExit: as :meth:`safe_point`.
        """
        stop = self._arrive()
        if stop is not None:
            self._stop(stop)

    @property
    def stop_requested(self) -> bool:
        """Whether one of the next safe points will be the last. Of several ranks some know sooner
        than others: it is no condition to leave a loop by that all have to leave."""
        return self._company.stop_wanted()

    def request_stop(self) -> None:
        """Ask for a stop from inside the program: save, requeue, leave at the next safe point."""
        self._controller.request_stop()

    def save(self, *, kind: str = "manual") -> Saved:
        """Save now, and come back when it is committed on the durable tier.

        Raises:
            SaveFailed: it is not; what was committed before is whole.
            UnsavableState: the state holds something that cannot be saved.
            UsageError: as :meth:`safe_point`.
        """
        if not self._has_begun:
            self._begin_unasked("save() was called", may_load=False)
        step = self._completed_step()
        with self._leaving_when_stale():
            saved = self._saver.save(self._state(), step=step, epoch=self._epoch, kind=kind)
        self._last_save_s = time.monotonic()
        return saved

    # --- the end
    # --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the marker that makes a restart leave at once, and close.

        Raises:
            AgreementFailed: a rank has failed before it was done, so that the run is not finished.
            UsageError: the run was not resumed, and a checkpoint is committed.
        """
        if not self._has_begun:
            self._begin_unasked("the run is to be finished", may_load=False)
        self._saver.wait()
        self._company.exchange("finish", self._step)
        self._life.record(EventKind.RUN_FINISHED)
        with self._leaving_when_stale():
            self._company.decide("finish", self._write_finished)
        self._life.record_end("finished")
        self._leave()

    def close(self) -> None:
        """Wait for a save in flight and give the signals back. Nothing else is needed."""
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
        elif not isinstance(error, Departure):
            if isinstance(error, Exception):
                self._leave_if_cut_short(error)
            if self._company.rank == 0:
                with contextlib.suppress(StaleAttempt):  # the newer one writes the ledger
                    self._life.end("error", step=self._step)
            self._life.record_end("error")
            self.close()

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _leave_if_cut_short(self, error: Exception) -> None:
        """A rank that died in the middle of a stop makes the collectives of the others fail. That
        is no error of the program: within the grace its status would end the job.

        Raises:
            Departure: as of a stop that nothing could be saved at.
        """
        request = self._controller.stop_request
        if request is None or self._life.number is None:
            return
        broken = self._company.broken()
        if broken is None:
            return
        notice(f"while the ranks were about to stop: {type(error).__name__}: {error}")
        raise self._stopping.leave_unsaved(broken, request, step=self._step) from error

    def _add(self, name: str, thing: Any) -> None:
        self._objects.add(name, thing)
        self._watch.add(thing)

    def _use(self, loader: Any) -> None:
        company = self._company
        shield = self._controller.plan.stopping()
        self._cursor.use(loader, shield=shield, rank=company.rank, world_size=company.world_size)

    def _arrive(self) -> StopRequest | None:
        """This rank is at a place: the stop that is obeyed here. Where one is wanted and the ranks
        cannot come to one place, leave."""
        try:
            return self._company.arrive()
        except RanksError as error:
            request, step = self._controller.stop_request, self._completed_step()
            departure = self._stopping.leave_unsaved(error, request, step=step)
        raise departure

    def _stop(self, request: StopRequest) -> None:
        with self._leaving_when_stale():
            save_by = self._save_by if self._has_begun else self._save_nothing
            raise self._stopping.obey(request, step=self._completed_step(), save_by=save_by)

    def _save_nothing(self, _: float) -> str:
        """For a stop before the run has begun: what is committed may be further than we are."""
        return "the run had not begun, and nothing was saved"

    def _poll(self) -> None:
        """What became of saves in the background. Ranks hear at different steps that a newer
        attempt has begun, and one that simply left would leave the others in a collective: they
        stop together, as for a signal."""
        if self._company.world_size == 1:
            with self._leaving_when_stale():
                self._saver.poll()
            return
        try:
            self._saver.poll()
        except StaleAttempt as error:
            self._say(str(error))
            self._controller.request_stop()

    def _save_by(self, deadline_mono_s: float) -> str:
        """Save for a stop; what came of it, in words."""
        return self._saver.save_by(
            self._state,
            step=self._completed_step(),
            epoch=self._epoch,
            deadline_mono_s=deadline_mono_s,
        ).reason

    def _newest(self) -> Found | None:
        return newest_of(self._company, durable=self._durable, fast=self._fast)

    def _enter(self) -> dict[str, Any]:
        """Claim the folder for all ranks, unless there is nothing left to do in it."""
        done = None if self._begins_anew else finished.step_of(self.dir)
        claim = None
        if done is None:
            claim = self._fence.claim()
            for store in self._written_stores():
                try:
                    store.revoke_others()
                except SaveFailed:  # a fast tier that cannot be used costs no start
                    if store is not self._fast:
                        raise
            if self._begins_anew:
                self._set_aside()
            done = finished.step_of(self.dir)  # an older attempt may have been about to write it
        return {"finished": done, "claim": claim}

    def _set_aside(self) -> None:
        """Nothing of what is here may be taken for this run's, now or by a later attempt."""
        finished.remove(self.dir)
        for store in self._written_stores():
            if (aside := set_aside(store.directory)) is not None:
                notice(f"resume=False: what was committed is in {aside} now")

    def _written_stores(self) -> list[CheckpointStore]:
        return [self._durable, *([] if self._fast is None else [self._fast])]

    @contextlib.contextmanager
    def _leaving_when_stale(self) -> Iterator[None]:
        """Of an attempt that a newer one has taken the place of nothing is wanted any more.

        Raises:
            Departure: in the place of StaleAttempt.
        """
        try:
            yield
        except StaleAttempt as error:
            self._say(f"this attempt ends: {error}")
            self._saver.give_up()
            with contextlib.suppress(HydroslurmError):
                self._leave()
            raise Departure.must_not_run_again() from error

    def _write_finished(self) -> None:
        self._fence.check("the end of the run")
        self._life.end("finished", step=self._step)
        finished.write(self.dir, step=self._step)

    def _leave(self) -> None:
        """Done, together with the others."""
        self._company.part()
        self.close()

    def _say(self, words: str) -> None:
        """One rank speaks for all."""
        if self._company.rank == 0:
            notice(words)

    def _tell_of_node(self, words: str) -> None:
        """One rank speaks for those of its node."""
        if self._world.local_rank == 0:
            notice(words)

    def _state(self) -> State:
        own = self._cursor.state(step=self._completed_step(), epoch=self._epoch)
        return State(shared=self._objects.states(), own=own)

    def _apply(self, state: State, *, source: str) -> None:
        self._objects.load(state.shared, source=source)
        counters = state.own["counters"]
        self._step, self._epoch = counters["step"], counters["epoch"]
        self._cursor.load(state.own)

    def _left_of_epoch(self, accumulate: int) -> Iterator[Any]:
        """The batches that are left of this epoch, a safe point behind each step."""
        for batch in self._cursor.batches(self._epoch, accumulate=accumulate):
            yield batch
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
        if self._company.world_size == 1:
            return self._cadence.is_due(self._step, self._last_save_s)
        called = self._company.takes_save()
        if self._company.rank == 0 and self._cadence.is_due_by_clock(self._last_save_s):
            self._company.call_save()
        return called or self._cadence.is_due_by_step(self._step)
