"""``Session``: one attempt of a run. It claims the folder and resumes; after each step it saves,
stops or goes on; then it ends.

Whoever owns the loop holds one: :class:`hydroslurm.training.run.Run` for a loop of one's own, the
adapter of a framework, a job of Caffe2's. What differs between them are values that they give and
calls that they make; nothing inherits from it.

Safe points lie between two steps. Only there is the state consistent, so that is where periodic
saves begin and stops are obeyed. As long as nothing was requested, a safe point exchanges and
synchronises nothing: it costs three attribute reads and, with ``every_s``, a clock. The same holds
for several ranks: they learn of a stop outside the loop, and agree on one safe point (see
:mod:`hydroslurm.training.rank_group`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, final

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.saver import Saved, Saver
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, Retention, State
from hydroslurm.coordination.world import World
from hydroslurm.core import memory
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import FAILED, RUN_AGAIN, ExitForRequeue
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import (
    HydroslurmError,
    RanksError,
    RunEnded,
    SaveFailed,
    StaleAttempt,
    UsageError,
)
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import StopRequest
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.attempts import (
    CurrentAttempt,
    Limits,
    finish_at_good_end,
    least_number,
    limits_of,
    next_unfinished,
    require_unfinished,
    write_finished,
)
from hydroslurm.training.cadence import cadence_of
from hydroslurm.training.checks import FirstStep, LoopWatch
from hydroslurm.training.claim import (
    enter,
    fence_of,
    install_for,
    require_one_folder,
    require_place,
    run_directory,
)
from hydroslurm.training.contents import Contents
from hydroslurm.training.loggers import Trackers
from hydroslurm.training.objects import Models
from hydroslurm.training.rank_group import RankGroup, notice, warning
from hydroslurm.training.saves import SaveRecorder, Saves
from hydroslurm.training.stopping import StopHandler, Stopping

if TYPE_CHECKING:
    from hydroslurm.training.elastic_rank import ElasticRank

_COULD_NOT_RESUME = (
    "the checkpoint of this run could not be loaded: it does not train from 0 in its place. Mend "
    "what resume() has said; to begin anew, give another directory= or Run(resume=False)"
)


_newest: weakref.ref[Session] | None = None
"""Of this process, which has one open at a time."""


@final
class Session:
    """See the module.

    Args:
        objects: what is saved, each with its name. They are loaded in this order, but for model,
            optimizer, scheduler and scaler, which come last.
        owner: who trains with a fixed number of ranks, for messages; with ``elastic``, nobody.
        keep_epochs: how many checkpoints of kind ``epoch`` stay; None: all of them.
        origin: what to start from while the run has no checkpoint of its own.
        models: those that the framework trains which owns the loop. Its adapter calls
            :meth:`Contents.remember` and :meth:`Contents.begin` itself.
        elastic: the run's members may come and go.
        others: those of :class:`hydroslurm.training.run.Run`.

    Attributes:
        has_begun: the run was resumed, or has begun anew.
        moved: a safe point has put the run elsewhere: the batches that follow are opened anew.
        on_finished: asked with the step of a run that has finished before: whether to go on to what
            follows the training, instead of ending the process.
        samples_per_step: of all ranks together; None where the loader does not say.
    """

    dir: RunDir

    def __init__(
        self,
        objects: Sequence[tuple[str, Any]],
        *,
        owner: str = "",
        loader: Any = None,
        directory: str | os.PathLike[str] | None = None,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 2,
        keep_epochs: int | None = None,
        on_save_error: Literal["warn", "fail"] = "warn",
        limits: Limits | None = None,
        resume: bool = True,
        origin: Checkpoint | None = None,
        models: Models | None = None,
        elastic: ElasticRank | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        global _newest
        environ = os.environ if environ is None else environ
        require_place(owner, environ)
        other = None if _newest is None else _newest()
        if other is not None and other.is_open:
            raise UsageError(
                f"this process has a Run already, in {other.dir.root}, which is not closed: both "
                "would answer one SIGTERM, and the process can leave once. Put what belongs "
                "together into one, Run(extra={name: object}); of two in sequence close() the first"
            )
        allocation = Allocation.from_environ(environ)
        cadence = cadence_of(every_steps, every_s, environ)
        self.dir = run_directory(directory, environ)
        if directory is None:  # a script makes the same runs, in the same order, in each attempt
            from hydroslurm.slurm import run_folders

            run_folders.warn_of_doubt(self.dir)
            self.dir = next_unfinished(self.dir).claim()
        require_unfinished(self.dir)
        self._elastic, self._origin = elastic, origin
        self._is_own_loop = models is None
        self._begins_anew = not resume and not (allocation and allocation.restart_count)
        self.has_begun = self.moved = self._is_closed = False
        self._resumed_unasked: bool | None = None
        self.on_finished: Callable[[int], bool] = lambda _: False
        self.watch, self.first_step = LoopWatch(), FirstStep()
        self.fence = fence_of(self.dir, allocation)
        self.controller, self._installed_here = (
            elastic.install(environ) if elastic is not None else install_for(self.dir, environ)
        )
        self._world = World.from_environ(environ)
        with contextlib.ExitStack() as undo:
            if self._installed_here:
                undo.callback(installation.uninstall)
            group = self.rank_group = RankGroup(self.controller)
            trackers = Trackers(self.dir.root, anew=self._begins_anew, is_first=group.rank == 0)
            self.contents = Contents(group, trackers=trackers, models=models)
            self.cursor = self.contents.cursor
            self.samples_per_step: Callable[[], int | None] = self.cursor.samples_per_step
            for name, thing in objects:
                self._add(name, thing)
            if loader is not None:
                self.use(loader)
            self.store = CheckpointStore(self.dir.checkpoints, peers=group.peers, fence=self.fence)
            self.attempt = CurrentAttempt(
                self.dir,
                self.controller,
                limits=limits_of(limits, environ),
                fence=self.fence,
                allocation=allocation,
                at_least=least_number(environ, allocation),
            )
            self.saver = Saver(
                self.store,
                retention=Retention(keep, keep_epochs=keep_epochs),
                on_save_error=on_save_error,
                exempt=self.controller.exempt,
                tell=SaveRecorder(self.controller),
                room=functools.partial(memory.room, ranks_here=self._world.local_world_size),
            )
            self.saves = Saves(
                self.contents,
                self.saver,
                cadence=cadence,
                rank_group=group,
                attempt=self.attempt,
            )
            stop_handler = StopHandler(
                allocation, self.controller, group, environ=environ, fence=self.fence
            )
            self.stopping = Stopping(
                group, attempt=self.attempt, saver=self.saver, stop_handler=stop_handler
            )
            self.controller.claim_stops(self.stopping.note_request)
            undo.pop_all()
        self._pid, _newest = os.getpid(), weakref.ref(self)
        if elastic is not None:
            elastic.join(self)

    @property
    def is_open(self) -> bool:
        """Not closed yet, nor forked from another process, nor without the signals' handlers."""
        if self._is_closed or self._pid != os.getpid() or not installation.is_installed():
            return False
        return installation.controller() is self.controller

    def use(self, loader: Any) -> None:
        """Take batches from this loader."""
        if self._elastic is not None:
            self._elastic.share_batches(loader)
        self.contents.use(loader)

    # --- registering and resuming
    # --------------------------------------------------------------------------------------------

    def register(self, name: str, thing: Any, *, per_rank: bool = False) -> None:
        """See :meth:`Run.register`."""
        if self.attempt.number is not None:
            raise UsageError(
                f"register({name!r}) comes too late: the run has been resumed already, by resume() "
                "or a loop, or the first look at run.step or run.epoch"
            )
        self._add(name, thing, per_rank=per_rank)

    def _add(self, name: str, thing: Any, *, per_rank: bool = False) -> None:
        if self._elastic is not None and (per_rank or isinstance(thing, rng.KINDS)):
            self._elastic.require_no_order(name)
        self.contents.add(name, thing, per_rank=per_rank)
        self.watch.add(thing)

    def resume(self) -> bool:
        """See :meth:`Run.resume`."""
        if self._resumed_unasked is not None:  # the script has looked at run.step before
            resumed, self._resumed_unasked = self._resumed_unasked, None
            return resumed
        if self.has_begun:
            raise UsageError("resume() was called already; a run goes on once")
        if self.attempt.number is not None:
            raise UsageError(_COULD_NOT_RESUME)
        return self._begin(may_load=True, seen="")

    def require_begun(self, seen: str, *, may_load: bool = True) -> None:
        """Where the loop begins without a call of :meth:`resume`, the run is resumed here if its
        state is still what the script has made; in the middle of a loop it would be too late.

        Raises:
            UsageError: a checkpoint is committed, which the loop would begin without.
        """
        if self.has_begun:
            return
        if self._is_closed or self.attempt.number is not None:
            if may_load:  # an error that is being handled may look at the step
                return
            raise UsageError(
                f"{seen} and the run is closed; make another Run(...)"
                if self._is_closed
                else f"{seen} and {_COULD_NOT_RESUME}"
            )
        may_load = may_load and not self.watch.may_have_trained
        resumed = self._begin(may_load=may_load, seen=seen)
        if may_load:
            self._resumed_unasked = resumed
        else:
            self.rank_group.log(
                f"{seen} and run.resume() was not called: this attempt begins at step 0, and the "
                "next one could not go on. Call it before the loop, and begin that at run.step"
            )

    def _begin(self, *, may_load: bool, seen: str) -> bool:
        if self._is_own_loop:  # a framework's adapter does so itself
            self.contents.remember()
        if self._elastic is not None:
            return self._elastic.begin(may_load=may_load, seen=seen)
        return self.claim(may_load=may_load, seen=seen)

    def claim(self, *, may_load: bool, seen: str) -> bool:
        """Claim the folder, for all ranks, and resume; whether there was something to resume from.

        Args:
            may_load: the objects are still as the script has made them.
            seen: by what the run begins, for messages.
        """
        rank_group = self.rank_group
        try:
            rank_group.gather()
        except RanksError as error:
            self._leave_unsaved(error, step=0)
        with self.leaving_when_stale(), self.store.holding():
            resumed = self._go_on(may_load=may_load, seen=seen)
        self.watch.begin(self.cursor.step, in_loop=not may_load)
        self.contents.script.follow_frozen()
        self.contents.gradients.begin()
        self.has_begun = True
        return resumed

    def _go_on(self, *, may_load: bool, seen: str) -> bool:
        rank_group = self.rank_group
        require_one_folder(rank_group, self.dir)
        entered = rank_group.decide(
            "enter",
            lambda: enter(self.dir, fence=self.fence, store=self.store, anew=self._begins_anew),
        )
        if (step := entered["finished"]) is not None:
            if self.on_finished(step):
                return True
            rank_group.log(
                f"this run has finished at step {step}; nothing to do ({self.dir.root}). To train "
                f"it longer, remove {self.dir.finished_json.name} there",
                log=notice,
            )
            self.leave()
            raise ExitForRequeue.finished()
        self.fence.hold(entered["claim"])
        found, state = self._newest(load=may_load)
        if found is not None and not may_load:
            raise UsageError(
                f"{seen} and the run was not resumed, but step {found.step} is "
                f"committed ({found.path}): the loop would train from 0 again. Call "
                "run.resume() before the loop, and begin that at run.step; to begin anew, give "
                "another directory= or Run(resume=False)"
            )
        begins_at = 0 if found is None else found.step
        try:
            number = rank_group.decide("attempt", lambda: self.attempt.enter(begins_at))
        except RunEnded as error:
            rank_group.log(str(error))
            self.contents.trackers.leave(FAILED)
            self.leave()
            raise ExitForRequeue.must_not_run_again() from error
        self.attempt.begin(number, begins_at)
        if found is None:
            rank_group.log(f"a new run, step 0 ({self.dir.root})", log=notice)
            return False
        self._take_over(found, state)
        where = f"step {self.cursor.step} ({found.path})"
        rank_group.log(f"attempt {number} resumes from {where}", log=notice)
        return True

    def load_newest(self) -> bool:
        """Load the newest checkpoint into the objects; whether there is one."""
        found, state = self._newest(load=True)
        if found is not None:
            self._take_over(found, state)
        return found is not None

    def _newest(self, *, load: bool) -> tuple[Checkpoint | None, State]:
        return self.contents.load_newest(
            self.store, fence=self.fence, origin=self._origin, load=load
        )

    def _take_over(self, found: Checkpoint, state: State) -> None:
        """Put a loaded state into the objects."""
        self.rank_group.log(*self.contents.differences(found.manifest, state))
        self.saves.continue_from(found)
        self.contents.restore(state, source=str(found.path))

    # --- safe points
    # --------------------------------------------------------------------------------------------

    def safe_point(self) -> None:
        """See :meth:`Run.safe_point`."""
        self.require_begun("a safe point was reached", may_load=False)
        self.saves.unchanged = False
        self.contents.gradients.end_step()
        if self.watch.on:
            self.watch.at_safe_point(self.cursor.step)
        stop = self._arrive()
        if self.attempt.note_step(self.cursor.step):
            samples = self.samples_per_step()
            self.attempt.record(EventKind.FIRST_STEP, samples_per_step=samples)
            self.contents.trackers.keep()
            self.saves.check(is_first_here=self._world.local_rank == 0)
        if stop is not None:
            self._stop(stop)
        try:
            self.saver.poll()
        except StaleAttempt as error:
            self._leave_stale(error)
        asked = None if self._elastic is None else self._elastic.takes_save()
        if self.saves.is_due() if asked is None else asked:
            self.saves.save_periodically()

    def check_first_step(self) -> None:
        """Behind the first step of a loop: refuse what a resumed run would lack.

        Raises:
            UsageError: the first such thing, with what to do.
        """
        remedies, self.first_step.remedies = self.first_step.remedies, None
        if remedies is not None:
            self.contents.require_all_given(self.first_step, remedies)

    def check_stop(self) -> None:
        """See :meth:`Run.check_stop`."""
        self.saves.unchanged = False
        self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """As :meth:`check_stop`, where nobody but the run has had control since the last save."""
        stop = self._arrive()
        if stop is not None:
            self._stop(stop)

    def _arrive(self) -> StopRequest | None:
        """This rank is at a safe point: the stop that is obeyed here. Exit where one is wanted and
        the ranks cannot reach one safe point together."""
        if self._elastic is not None:
            self._elastic.announce_stop()
            return None
        try:
            return self.rank_group.arrive()
        except RanksError as error:
            self._leave_unsaved(error, step=self.cursor.completed_step())

    def _stop(self, request: StopRequest) -> NoReturn:
        """Save for a stop, have the job requeued, and exit."""
        with self.leaving_when_stale():
            step = self.cursor.completed_step()
            try:
                window = self.stopping.agree_on_window(request, step=step)
                saved = "the run had not begun, and nothing was saved"
                if self.has_begun or self.saves.refused:  # else the newest checkpoint may be ahead
                    saved = self.saves.save_by(window.deadline_mono_s)
                leaving = self.stopping.leave(window, saved, step=step)
            except RanksError as error:  # a rank died just now
                self._leave_unsaved(error, step=step)
            self.contents.trackers.leave(leaving.code)
            raise leaving

    def _leave_unsaved(self, error: RanksError, *, step: int) -> NoReturn:
        leaving = self.stopping.leave_unsaved(error, self.controller.stop_request, step=step)
        self.contents.trackers.leave(leaving.code)
        raise leaving from error

    # --- saves
    # --------------------------------------------------------------------------------------------

    def save(self, *, kind: str = "manual") -> Saved:
        """See :meth:`Run.save`."""
        self.require_begun("save() was called", may_load=False)
        step = self.cursor.completed_step()
        if self._elastic is not None and (reason := self._elastic.defers_save(step)):
            return Saved(step=step, is_committed=False, checkpoint=None, reason=reason)
        if self.saves.evaluation is not None:
            raise UsageError(
                "run.save() within run.evaluation(), which the next attempt begins anew from what "
                "was saved before it; save behind the block"
            )
        saved = self.save_as_begun(kind=kind)
        self.saves.restart_clock()
        return saved

    def save_as_begun(self, *, kind: str = "manual") -> Saved:
        """Save now; within an evaluation, the state from its beginning."""
        with self.leaving_when_stale():
            return self.saves.save(kind=kind)

    def save_behind_batches(self, *, since: int) -> None:
        """The state behind the last batch, to which a stop in what follows comes back. Nothing is
        to be saved where nothing was trained ``since`` this step, or the last safe point did it."""
        if self._elastic is None or self._elastic.saves_behind_batches():
            self.saver.wait()
            is_saved = self.cursor.step == self.saver.durable_step and (
                self.cursor.step == since or (self.saves.unchanged and self.saver.is_durable)
            )
            if not is_saved:
                self.save()
        self.saves.behind_batches = True

    def count_step_left_early(self) -> None:
        """A loop that was left in the body of its last step (``break``) has trained that step."""
        if self._elastic is not None:
            self._elastic.drop_step_left()
        if self.cursor.step_has_begun and self.cursor.step_is_full:
            self.cursor.count_step()

    # --- the end
    # --------------------------------------------------------------------------------------------

    def finish(self, *, is_saved: bool | None = None, rest_is_redone: bool = True) -> None:
        """See :meth:`Run.finish`.

        Args:
            is_saved: the last step is, or is not to be; None: look.
            rest_is_redone: a restart repeats what follows the training, until a process has done
                it.
        """
        self.require_begun("the run is to be finished", may_load=False)
        if self._elastic is not None:
            self._elastic.wait_for_finish()
        if self._elastic is None or self._elastic.is_first:
            self._finish(is_saved=is_saved, rest_is_redone=rest_is_redone)
        else:
            self.attempt.record(EventKind.RUN_FINISHED)
            self.leave()
        if self._elastic is not None:
            self._elastic.remain()

    def _finish(self, *, is_saved: bool | None, rest_is_redone: bool) -> None:
        self.saver.wait()
        self.cursor.restore_rng()  # for what follows, where there was nothing left to train
        self.count_step_left_early()
        self.rank_group.exchange("finish", self.cursor.step)
        if is_saved is None:
            is_saved = self.cursor.step == (self.saver.durable_step or 0)
        if not is_saved:
            try:
                self.save()
            except SaveFailed as error:
                self.rank_group.log(f"{error}. A restart trains on from there")
        self.attempt.record(EventKind.RUN_FINISHED)

        def write() -> None:
            self.fence.check("the end of the run")
            self.attempt.end("finished", step=self.cursor.step)
            if rest_is_redone:
                others = (lambda: True) if self._elastic is None else self._elastic.all_are_done
                finish_at_good_end(self.dir, step=self.cursor.step, fence=self.fence, others=others)
            else:
                write_finished(self.dir, step=self.cursor.step)

        with self.leaving_when_stale():
            self.rank_group.decide("finish", write)
        self.attempt.record_end("finished")
        self.leave()

    def fail(self, error: BaseException) -> None:
        """The training ends with an exception, or with the exit of a stop.

        Raises:
            ExitForRequeue: in the middle of a stop, ``error`` came of the death of another rank.
        """
        if isinstance(error, ExitForRequeue):
            return
        if isinstance(error, Exception):
            self._leave_if_cut_short(error)
        if self.rank_group.rank == 0:
            with contextlib.suppress(StaleAttempt):  # the newer one writes the ledger
                self.attempt.end("error", step=self.cursor.step)
        self.attempt.record_end("error")
        self.close()

    def close(self) -> None:
        """See :meth:`Run.close`."""
        self._is_closed = True
        self.stopping.stand_down()
        self.watch.close()
        self.first_step.close()
        try:
            self.saver.close()
        finally:
            if installation.is_installed():
                self.controller.release_stops()
                if self._installed_here:
                    installation.uninstall()
            if self._elastic is not None:
                self._elastic.close()

    def leave(self) -> None:
        """Done, together with the others."""
        self.rank_group.part()
        self.close()

    @contextlib.contextmanager
    def leaving_when_stale(self) -> Iterator[None]:
        """Exit once a newer attempt has replaced this one.

        Raises:
            ExitForRequeue: in the place of StaleAttempt.
        """
        try:
            yield
        except StaleAttempt as error:
            self.rank_group.log(f"this attempt ends: {error}")
            self.saver.give_up()
            self.contents.trackers.leave(RUN_AGAIN)  # the newer one has them open
            with contextlib.suppress(HydroslurmError):
                self.leave()
            raise ExitForRequeue.must_not_run_again() from error

    def _leave_stale(self, error: StaleAttempt) -> None:
        """A newer attempt has begun. Ranks hear of it at different steps, and one that simply left
        would leave the others in a collective: they stop together, as for a signal."""
        if self.rank_group.world_size == 1:
            with self.leaving_when_stale():
                raise error
        self.rank_group.log(str(error))
        self.controller.request_stop()

    def _leave_if_cut_short(self, error: Exception) -> None:
        """A rank that died in the middle of a stop makes the collectives of the others fail. That
        is no error of the program: within the grace its status would end the job.

        Raises:
            ExitForRequeue: as of a stop that nothing could be saved at.
        """
        if self.controller.stop_request is None or self.attempt.number is None:
            return
        if (broken := self.rank_group.broken()) is not None:
            warning(f"while the ranks were about to stop: {type(error).__name__}: {error}")
            self._leave_unsaved(broken, step=self.cursor.step)
