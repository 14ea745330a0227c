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
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, final

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.census import MOVED, Unkept
from hydroslurm.checkpoint.saver import Saved, Saver
from hydroslurm.checkpoint.storage import AnyonesStorage
from hydroslurm.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    Load,
    Retention,
    State,
    newest_good,
)
from hydroslurm.coordination.world import World
from hydroslurm.core import memory, rundir
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import FAILED, RUN_AGAIN, ExitForRequeue
from hydroslurm.core.rundir import ELASTIC_ENV, GENERATION_ENV
from hydroslurm.errors import (
    CheckpointError,
    HydroslurmError,
    RanksError,
    RunEnded,
    SaveFailed,
    StaleAttempt,
    UnsavableState,
    UsageError,
)
from hydroslurm.runtime import autoload
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller, StopRequest
from hydroslurm.slurm import run_folders
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.attempts import (
    CurrentAttempt,
    Limits,
    finish_at_good_end,
    least_number,
    limits_of,
    losses,
    next_unfinished,
    require_unfinished,
    write_finished,
)
from hydroslurm.training.cadence import Cadence, cadence_of
from hydroslurm.training.checks import (
    FirstStep,
    LoopWatch,
    Remedies,
    recompiles,
)
from hydroslurm.training.claim import (
    differences,
    enter,
    fence_of,
    load_for,
    require_one_folder,
    run_directory,
)
from hydroslurm.training.contents import Contents, largest
from hydroslurm.training.cursor import Cursor
from hydroslurm.training.gradients import STATIC_GRAPH, BucketOrders, Gradients
from hydroslurm.training.objects import Composition, Objects, OutgrownState, require_registrable
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.reporting import SaveRecorder, notice, warning
from hydroslurm.training.requeue import StopHandler
from hydroslurm.training.stopping import Stopping
from hydroslurm.training.trackers import Trackers

if TYPE_CHECKING:
    from hydroslurm.training.elastic_rank import ElasticRank

_COULD_NOT_RESUME = (
    "the checkpoint of this run could not be loaded: it does not train from 0 in its place. Mend "
    "what resume() has said; to begin anew, give another directory= or Run(resume=False)"
)


@dataclass
class Saves:
    """How the newest save of a run relates to its current state. Certain only as long as nothing
    but the run itself has had control since.

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
        refused: why a stop saves nothing now, for its message; periodic saves are off, too. None
            while the state can be resumed from.
    """

    unchanged: bool = False
    periodic_step: int | None = None
    behind_batches: bool = False
    evaluation: Mapping[str, Any] | None = None
    in_body: bool = False
    refused: str | None = None

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


class Adapter(Protocol):
    """What a framework's adapter adds to a session. The adapter calls :meth:`Session.remember` and
    :meth:`Session.put_back` itself, when the framework has built what they need.

    Attributes:
        pending: this rank's own state as it was loaded, until the training begins.
    """

    pending: Mapping[str, Any] | None

    def own_states(self) -> Mapping[str, Any]:
        """What this rank saves besides, by key."""

    def samples_per_step(self) -> int | None:
        """Of all ranks together; None where the loaders do not say."""


@final
class Session:
    """See the module.

    Args:
        objects: what is saved, each with its name. They are loaded in this order, but for model,
            optimizer, scheduler and scaler, which come last.
        owner: who trains with a fixed number of ranks, for messages; with ``elastic``, nobody.
        keep_epochs: how many checkpoints of kind ``epoch`` stay; None: all of them.
        origin: what to start from while the run has no checkpoint of its own.
        adapter: of the framework that owns the loop.
        elastic: the run's members may come and go.
        others: those of :class:`hydroslurm.training.run.Run`.

    Attributes:
        step, epoch: completed steps, and the epoch that is being trained, from 0.
        has_begun: the run was resumed, or has begun anew.
        moved: a safe point has put the run elsewhere: the batches that follow are opened anew.
        on_finished: asked with the step of a run that has finished before: whether to go on to what
            follows the training, instead of ending the process.
        remedies: for what the first step uses and the run lacks, as long as it is looked for.
    """

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
        adapter: Adapter | None = None,
        elastic: ElasticRank | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        if owner and environ.get(ELASTIC_ENV):
            raise UsageError(
                f"this is a member of an elastic job, and {owner} trains with a fixed number of "
                "ranks: each member would train alone. Set `engine: restart` in `elastic:`, which "
                "starts its ranks anew at each change, put hydroslurm.Run around a loop of your "
                "own, or leave `elastic:` out of the job spec"
            )
        _require_place()
        allocation = Allocation.from_environ(environ)
        self._cadence = cadence_of(every_steps, every_s, environ)
        self.dir = run_directory(directory, environ)
        if directory is None:  # a script makes the same runs, in the same order, in each attempt
            run_folders.warn_of_doubt(self.dir)
            self.dir = next_unfinished(self.dir).claim()
        require_unfinished(self.dir)
        self._folder = _identity(self.dir.root)
        self._adapter, self._elastic, self._origin = adapter, elastic, origin
        self.step = self.epoch = 0
        self._generation = int(environ.get(GENERATION_ENV) or 0)
        self._begins_anew = not resume and not (allocation and allocation.restart_count)
        self.has_begun = self.moved = self._is_closed = False
        self._resumed_unasked: bool | None = None
        self.on_finished: Callable[[int], bool] = lambda _: False
        self.remedies: Remedies | None = None
        self.watch = LoopWatch()
        self.objects = Objects()
        self.cursor = Cursor()
        self.first_step = FirstStep()
        self.gradients = Gradients(self.objects.by_name)
        self._model = dict(objects).get("model")
        for name, thing in objects:
            self._add(name, thing)
        self.saves = Saves()
        self.last_save_s = time.monotonic()
        self.fence = fence_of(self.dir, allocation)
        self.controller, self._installed_here = (
            elastic.install(environ) if elastic is not None else self._install(environ)
        )
        self._world = World.from_environ(environ)
        self.rank_group = RankGroup(self.controller)
        self._trackers = Trackers(
            self.dir.root, anew=self._begins_anew, is_first=self.rank_group.rank == 0
        )
        self.contents = Contents()
        self.bucket_orders = BucketOrders(
            self.objects.as_given, world_size=self.rank_group.world_size
        )
        self.store = CheckpointStore(
            self.dir.checkpoints, peers=self.rank_group.peers, fence=self.fence
        )
        with contextlib.ExitStack() as undo:
            if self._installed_here:
                undo.callback(installation.uninstall)
            if loader is not None:
                self.use(loader)
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
            stop_handler = StopHandler(
                allocation,
                self.controller,
                environ=environ,
                fence=self.fence,
                reads_ahead=self.rank_group.rank == 0,
            )
            self.stopping = Stopping(
                self.rank_group, attempt=self.attempt, saver=self.saver, stop_handler=stop_handler
            )
            self.controller.claim_stops(self.stopping.note_request)
            undo.pop_all()
        global _newest
        self._pid, _newest = os.getpid(), weakref.ref(self)
        if elastic is not None:
            elastic.join(self)

    def _install(self, environ: Mapping[str, str]) -> tuple[Controller, bool]:
        """The controller of this process, and whether it was installed for this run."""
        before = installation.controller() if installation.is_installed() else None
        if before is not None and not installation.gives_way():
            return before, False
        # a pause that comes after the run must not end what has ended well
        autoload.keep_alive(autoload.killing(environ))
        of_job = rundir.from_environment(environ) is not None
        made = installation.install(run_dir=None if of_job else self.dir.root, environ=environ)
        return made, made is not before

    @property
    def is_open(self) -> bool:
        """Not closed yet, nor forked from another process, nor without the signals' handlers."""
        is_here = not self._is_closed and self._pid == os.getpid()
        return (
            is_here and installation.is_installed() and installation.controller() is self.controller
        )

    @property
    def generation(self) -> int:
        """How often the members of an elastic run have changed, from 1; 0 for all others."""
        return self._generation if self._elastic is None else self._elastic.generation

    def use(self, loader: Any) -> None:
        """Take batches from this loader."""
        if self._elastic is not None:
            self._elastic.share_batches(loader)
        self.cursor.use(loader, rank=self.rank_group.rank, world_size=self.rank_group.world_size)

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
        own = self.cursor.registered
        require_registrable(name, thing, taken=(*self.objects.names(), *own.names()))
        if per_rank or isinstance(thing, rng.KINDS):
            if self._elastic is not None:
                self._elastic.require_no_order(name)
            own.add(name, thing)
        else:
            self.objects.add(name, thing)
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
            self.log_once(
                f"{seen} and run.resume() was not called: this attempt begins at step 0, and the "
                "next one could not go on. Call it before the loop, and begin that at run.step"
            )

    def _begin(self, *, may_load: bool, seen: str) -> bool:
        if self._adapter is None:  # else it does so itself
            self._remember_script()
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
            raise self.stopping.leave_unsaved(
                error, self.controller.stop_request, step=0
            ) from error
        with self.leaving_when_stale(), self.store.holding():
            resumed = self._go_on(may_load=may_load, seen=seen)
        self.watch.begin(self.step, in_loop=not may_load)
        self.contents.follow_frozen()
        self.gradients.begin()
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
            return self._go_on_finished(step)
        self.fence.hold(entered["claim"])
        newest = self._load_newest() if may_load else None
        if not may_load and (found := self._newest(None)) is not None:
            raise UsageError(
                f"{seen} and the run was not resumed, but step {found.step} is "
                f"committed ({found.path}): the loop would train from 0 again. Call "
                "run.resume() before the loop, and begin that at run.step; to begin anew, give "
                "another directory= or Run(resume=False)"
            )
        begins_at = newest[0].step if newest else 0
        try:
            number = rank_group.decide("attempt", lambda: self.attempt.enter(begins_at))
        except RunEnded as error:
            self.log_once(str(error))
            self._trackers.leave(FAILED)
            self.leave()
            raise ExitForRequeue.must_not_run_again() from error
        self.attempt.begin(number, begins_at)
        if newest is None:
            self.log_once(f"a new run, step 0 ({self.dir.root})", notice)
            return False
        self._take_over(*newest)
        where = newest[0].path
        self.log_once(f"attempt {number} resumes from step {self.step} ({where})", notice)
        return True

    def _go_on_finished(self, step: int) -> bool:
        """Leave, where the process that finished the run has also done what follows the training.

        Raises:
            ExitForRequeue: with status 0.
        """
        if self.on_finished(step):
            return True
        self.log_once(
            f"this run has finished at step {step}; nothing to do ({self.dir.root}). To train "
            f"it longer, remove {self.dir.finished_json.name} there",
            notice,
        )
        self.leave()
        raise ExitForRequeue.finished()

    def load_newest(self) -> bool:
        """Load the newest checkpoint into the objects; whether there is one."""
        newest = self._load_newest()
        if newest is not None:
            self._take_over(*newest)
        return newest is not None

    def _load_newest(self) -> tuple[Checkpoint, State] | None:
        """Load the checkpoint that all ranks resume from."""
        loaded: list[State] = []

        def load(candidate: Checkpoint) -> None:
            loaded.clear()  # of one that another rank has rejected
            store = self.store
            if candidate is self._origin:  # of another run, which somebody has named
                other = candidate.path.parent
                store = CheckpointStore(other, storage=AnyonesStorage(), peers=store.peers)
            templates = self.objects.templates()
            loaded.append(load_for(self.rank_group, store, candidate, like=templates))

        found = self._newest(load)
        return None if found is None else (found, loaded[0])

    def _newest(self, load: Load | None) -> Checkpoint | None:
        """What the run resumes from; loads it."""
        try:
            found = newest_good(self.store, topic="resume", load=load)
        except (CheckpointError, OSError):
            self.fence.check(f"loading from {self.store.directory}")  # a newer one removed it
            raise
        if found is None and self._origin is not None:
            if load is not None:
                load(self._origin)
            return self._origin
        return found

    def _take_over(self, found: Checkpoint, state: State) -> None:
        """Put a loaded state into the objects."""
        objects, loading = self.objects, self.cursor.loading
        for message in differences(
            self.rank_group, found.manifest, state, objects=objects, loading=loading
        ):
            self.log_once(message)
        self.saves.periodic_step = found.step
        self.saver.continues_from(found)
        self._space_saves(stall_s=Cadence.of(found.manifest.meta).stall_s)
        self.apply(state, source=str(found.path))

    def apply(self, state: State, *, source: str) -> None:
        """Give the objects their states, and put the run where it was."""
        lost = self.objects.load(state.shared, source=source)
        counters = state.own["counters"]
        self.step, self.epoch = counters["step"], counters["epoch"]
        if self._adapter is not None:
            self._adapter.pending = state.own
            return
        for message in lost:
            self.log_once(message)
        self.put_back(state.own)

    def put_back(self, own: Mapping[str, Any]) -> None:
        """Put what this rank has saved for itself in its place."""
        self.contents.restore(own.get("script", {}), new_rank=own.get("new_rank"))
        self.bucket_orders.load(own.get("bucket_orders", ()))
        self.gradients.load_state_dict(own.get("gradients", {}))
        self._trackers.load_state_dict(own.get("trackers", {}))
        self.cursor.load(own)

    def _remember_script(self) -> None:
        """How its objects are by now the script makes them in each attempt."""
        self.contents = Contents(
            self.objects.by_name, saved=self._saved_apart, world_size=self.rank_group.world_size
        )
        self.contents.note()
        self.objects.note()

    def _saved_apart(self) -> list[Any]:
        """What has a place of its own in a checkpoint: the loader, and registered generators."""
        registered = self.cursor.registered.by_name().values()
        return [self.cursor.loader, *(one for one in registered if isinstance(one, rng.KINDS))]

    # --- the steps of a loop
    # --------------------------------------------------------------------------------------------

    def begin_loop(self, name: str, remedies: Remedies | None) -> None:
        """A loop of this name begins; resume, if nobody has.

        Args:
            remedies: for what its first step uses and the run lacks; None: that is not looked for.

        Raises:
            UsageError: within the body of another loop.
        """
        if self.saves.in_body:
            raise UsageError(
                f"run.{name}() in the body of a loop over run.batches() or run.steps(): both would "
                "count the same steps. Make one loop, or one behind the other"
            )
        self.saves.behind_batches = self.saves.unchanged = False
        if not self.has_begun:
            self.saves.unchanged = self.resume()
        self.gradients.begin()
        self.contents.enter_loop()
        self.watch.close()  # it is we who count
        self.count_step_left_early()
        if self._elastic is not None:
            self._elastic.begin_loop()
        self.remedies = remedies

    def one_step(self) -> Iterator[int]:
        """Yield the number of the next step of a loop that fetches its own batches; its safe point
        follows."""
        if self._elastic is not None:
            self._elastic.keep_once()
        self.cursor.hand_out_step()
        with self.body():
            yield self.step
        self._end_step()

    def batches_left(self, accumulate: int) -> Iterator[Any]:
        """Yield the batches that are left of this epoch; a safe point follows each step."""
        if self._elastic is None:
            return self.batches_until_moved(accumulate)
        return self._elastic.batches_left(accumulate)

    def batches_until_moved(self, accumulate: int) -> Iterator[Any]:
        """As :meth:`batches_left`, until a safe point has put the run elsewhere."""
        for batch in self.cursor.batches(self.epoch, accumulate=accumulate):
            self.contents.restore_waiting()
            with self.body():
                yield batch
            if self.cursor.step_is_full:
                self._end_step()
                if self.moved:
                    return
        if self.cursor.step_has_begun:  # the last step of an epoch may have fewer batches
            self._end_step()

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """What the script does with a step, or with one of its batches."""
        self.saves.in_body = True
        if self.remedies is not None:
            self.first_step.open()
        try:
            yield
        finally:
            self.first_step.close()
            self.saves.in_body = False
            self.saves.unchanged = False

    def _end_step(self) -> None:
        self.require_all_given()
        if self._elastic is not None:
            self._elastic.complete_step()
            return
        self.cursor.count_step()
        self.step += 1
        self.safe_point()

    def require_all_given(self) -> None:
        """Find out at the first step of a loop what a resumed run would lack.

        Raises:
            UsageError: the first such thing, with what to do.
        """
        remedies, self.remedies = self.remedies, None
        if remedies is None:
            return
        own = self.cursor.registered
        message = self.first_step.missing(
            {**self.objects.by_name(), **own.by_name()},
            {**self.objects.states(), **own.states()},
            remedies,
        )
        self.first_step.forget()
        for one in self.contents.unkept() if message is None else ():
            if one.why == MOVED:
                message = f"{one}. {remedies.batches} If that does no harm: {remedies.unchecked}"
            else:
                self._say([one])
        self.contents.accept_optimizers()
        if message is not None:
            raise UsageError(message)

    def save_behind_batches(self, *, since: int) -> None:
        """The state behind the last batch, to which a stop in what follows comes back. Nothing is
        to be saved where nothing was trained ``since`` this step, or the last safe point did it."""
        if self._elastic is None or self._elastic.saves_behind_batches():
            self.saver.wait()
            is_saved = self.step == self.saver.durable_step and (
                self.step == since or (self.saves.unchanged and self.saver.is_durable)
            )
            if not is_saved:
                self.save()
        self.saves.behind_batches = True

    # --- safe points
    # --------------------------------------------------------------------------------------------

    def safe_point(self) -> None:
        """See :meth:`Run.safe_point`."""
        self.require_begun("a safe point was reached", may_load=False)
        self.saves.unchanged = False
        self.gradients.end_step()
        if self.watch.on:
            self.watch.at_safe_point(self.step)
        stop = self._arrive()
        if self.attempt.note_step(self.step):
            self._check_first_step()
        if stop is not None:
            self._stop(stop)
        try:
            self.saver.poll()
        except StaleAttempt as error:
            self._leave_stale(error)
        if self._is_due():
            self._save_periodically()

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
            request, step = self.controller.stop_request, self.completed_step()
            leaving = self.stopping.leave_unsaved(error, request, step=step)
            self._trackers.leave(leaving.code)
        raise leaving

    def _stop(self, request: StopRequest) -> NoReturn:
        """Save for a stop, have the job requeued, and exit."""
        step = self.completed_step()
        with self.leaving_when_stale():
            try:
                window = self.stopping.agree_on_window(request, step=step)
                saved = self._save_by(window.deadline_mono_s)
                leaving = self.stopping.leave(window, saved, step=step)
            except RanksError as error:  # a rank died just now
                leaving = self.stopping.leave_unsaved(error, request, step=step)
            self._trackers.leave(leaving.code)
            raise leaving

    def _check_first_step(self) -> None:
        """Record it, with what can be known once the optimizer has its own state.

        Raises:
            UnsavableState: the state holds something that could be saved by pickling only.
        """
        counts = self.cursor if self._adapter is None else self._adapter
        self.attempt.record(EventKind.FIRST_STEP, samples_per_step=counts.samples_per_step())
        self._trackers.keep()
        self._say(self.contents.unkept())
        if self.bucket_orders.has_static_graph():
            self.log_once(STATIC_GRAPH)
        if message := recompiles(self._model, self.cursor.loader):
            self.log_once(message)
        state = self._state()
        if most := largest(state.own.get("script", {})):
            self.log_once(
                f"{most}: each rank saves them with each checkpoint, as the next step may need "
                "them. Where none does, set them to None behind their use"
            )
        refused = self.saver.reserve(state)  # plans a save of it: what cannot be saved is named
        if refused and self._world.local_rank == 0:  # one rank speaks for those of its node
            warning(
                f"{refused}. So each save holds the training up until it is written. More memory "
                "(--mem) spares that"
            )

    def _say(self, lost: Iterable[Unkept]) -> None:
        for one in lost:
            self.log_once(str(one))

    def _is_due(self) -> bool:
        """Whether to save behind this step. All ranks save at one step, and each has a clock of its
        own: the first one's counts, and calls for a save at one of the next steps."""
        if self.saves.refused is not None:
            return False
        if self._elastic is not None and (answer := self._elastic.takes_save()) is not None:
            return answer
        every = self._cadence.every_steps
        by_step = bool(every) and self.step % every == 0
        if self.rank_group.world_size == 1:
            return by_step or self._cadence.is_due_by_clock(self.last_save_s)
        called = self.rank_group.takes_save()
        if self.rank_group.rank == 0 and self._cadence.is_due_by_clock(self.last_save_s):
            self.rank_group.call_save()
        return called or by_step

    # --- saves
    # --------------------------------------------------------------------------------------------

    def save(self, *, kind: str = "manual") -> Saved:
        """See :meth:`Run.save`."""
        self.require_begun("save() was called", may_load=False)
        step = self.completed_step()
        if self._elastic is not None and (reason := self._elastic.defers_save(step)):
            return Saved(step=step, is_committed=False, checkpoint=None, reason=reason)
        if self.saves.evaluation is not None:
            raise UsageError(
                "run.save() within run.evaluation(), which the next attempt begins anew from what "
                "was saved before it; save behind the block"
            )
        saved = self.save_as_begun(kind=kind)
        self.last_save_s = time.monotonic()
        return saved

    def save_as_begun(self, *, kind: str = "manual") -> Saved:
        """Save now; within an evaluation, the state from its beginning."""
        with self.leaving_when_stale():
            saved = self.saver.save(
                self._state(),
                step=self.completed_step(),
                epoch=self.epoch,
                kind=kind,
                meta=self.made_of(),
            )
        self.saves.began()
        return saved

    def _save_periodically(self) -> None:
        self.last_save_s = time.monotonic()
        step = self.completed_step()
        if self.saves.takes_periodic(step):
            took_s = self.saver.start(
                self._state(), step=step, epoch=self.epoch, meta=self.made_of()
            )
            if took_s > 0:
                self.saves.began(periodic_step=step)
                self._space_saves(stall_s=time.monotonic() - self.last_save_s)

    def _space_saves(self, *, stall_s: float) -> None:
        """Follow what a save costs and how often this run loses work. With several ranks it is the
        first one's clock that calls for a save, so its measurements count."""
        before, save_s = self._cadence, self.saver.expect_s()
        lost, ran_s = losses(self.attempt.history, now_epoch_ns=time.time_ns())
        self._cadence = replace(before, stall_s=stall_s, save_s=save_s, losses=lost, ran_s=ran_s)
        if self._cadence.interval_s < before.interval_s == before.every_s:
            self.log_once(self._cadence.reason(), notice)

    def _save_by(self, deadline_mono_s: float) -> str:
        """Save for a stop; return what came of it, as a message."""
        if self.saves.refused is not None:
            return self.saves.refused
        if not self.has_begun:  # the newest checkpoint may be ahead
            return "the run had not begun, and nothing was saved"
        if self.saves.behind_batches:
            return (
                f"step {self.step} is committed as it was behind its last batch, and what follows "
                "the loop over batches() is done anew"
            )
        step = self.completed_step()
        try:
            return self.saver.save_by(
                self._state,
                step=step,
                epoch=self.epoch,
                deadline_mono_s=deadline_mono_s,
                meta=self.made_of(),
                unchanged=self.saves.unchanged,
            ).reason
        except OutgrownState as error:
            return f"nothing was saved, and the next attempt goes on from an older step: {error}"
        except UnsavableState as error:
            if self.objects.uninitialised() is None:
                raise
            return f"nothing was saved, and nothing is lost: {error}"

    def _state(self) -> State:
        looks = self._folder is not None and self.rank_group.rank == 0
        if looks and _identity(self.dir.root) != self._folder:
            self._folder = None  # saves make a missing one anew; it is said once
            warning(
                f"{self.dir.root} was renamed or removed while this run trains. It is made anew, "
                "and what is saved from now on goes there; what was saved before is not in it. Let "
                "a folder be until its run has ended"
            )
        own = self.saves.evaluation or self.own_state()
        states = self.objects.states()
        self.objects.require_resumable(states)
        return State(shared=states, own=own, frozen=self.contents.frozen())

    def own_state(self) -> Mapping[str, Any]:
        """What this rank saves for itself, as it is now."""
        if self._adapter is None:
            return self.with_script(self.position())
        if self._adapter.pending is not None:
            return self._adapter.pending
        return {**self.with_script(self.position()), **self._adapter.own_states()}

    def position(self) -> Mapping[str, Any]:
        """Where this rank is, with what belongs to that place."""
        own = self.cursor.state(step=self.completed_step(), epoch=self.epoch)
        more = {
            "bucket_orders": self.bucket_orders.state(),
            "gradients": self.gradients.state_dict(),
            "trackers": self._trackers.state_dict(),
        }
        return {**own, **{name: state for name, state in more.items() if state}}

    def with_script(self, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """With what no ``state_dict()`` has, as far as the script has changed it."""
        state = self.contents.state()
        self._say(self.contents.take_lost())
        return {**own, "script": state} if state else own

    def made_of(self) -> dict[str, Any]:
        """What the run consists of and how often it saves, for the manifest."""
        made_of = Composition(self.objects.classes(), self.cursor.loading).to_meta()
        return {**made_of, "cadence": asdict(self._cadence)}

    def completed_step(self) -> int:
        """The step that the state stands for; see :meth:`Cursor.completed`."""
        return self.cursor.completed(self.step)

    def count_step_left_early(self) -> None:
        """A loop that was left in the body of its last step (``break``) has trained that step."""
        if self._elastic is not None:
            self._elastic.drop_step_left()
        if self.cursor.step_has_begun and self.cursor.step_is_full:
            self.cursor.count_step()
            self.step += 1

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
        self.rank_group.exchange("finish", self.step)
        if is_saved is None:
            is_saved = self.step == (self.saver.durable_step or 0)
        if not is_saved:
            try:
                self.save()
            except SaveFailed as error:
                self.log_once(f"{error}. A restart trains on from there")
        self.attempt.record(EventKind.RUN_FINISHED)

        def write() -> None:
            self.fence.check("the end of the run")
            self.attempt.end("finished", step=self.step)
            if rest_is_redone:
                others = (lambda: True) if self._elastic is None else self._elastic.all_are_done
                finish_at_good_end(self.dir, step=self.step, fence=self.fence, others=others)
            else:
                write_finished(self.dir, step=self.step)

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
                self.attempt.end("error", step=self.step)
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
            self.log_once(f"this attempt ends: {error}")
            self.saver.give_up()
            self._trackers.leave(RUN_AGAIN)  # the newer one has them open
            with contextlib.suppress(HydroslurmError):
                self.leave()
            raise ExitForRequeue.must_not_run_again() from error

    def _leave_stale(self, error: StaleAttempt) -> None:
        """A newer attempt has begun. Ranks hear of it at different steps, and one that simply left
        would leave the others in a collective: they stop together, as for a signal."""
        if self.rank_group.world_size == 1:
            with self.leaving_when_stale():
                raise error
        self.log_once(str(error))
        self.controller.request_stop()

    def _leave_if_cut_short(self, error: Exception) -> None:
        """A rank that died in the middle of a stop makes the collectives of the others fail. That
        is no error of the program: within the grace its status would end the job.

        Raises:
            ExitForRequeue: as of a stop that nothing could be saved at.
        """
        request = self.controller.stop_request
        if request is None or self.attempt.number is None:
            return
        broken = self.rank_group.broken()
        if broken is None:
            return
        warning(f"while the ranks were about to stop: {type(error).__name__}: {error}")
        raise self.stopping.leave_unsaved(broken, request, step=self.step) from error

    def log_once(self, message: str, log: Callable[[str], None] = warning) -> None:
        """One rank speaks for all."""
        if self.rank_group.rank == 0:
            log(message)


def _identity(root: Path) -> tuple[int, int] | None:
    """What tells a folder from another one in its place."""
    try:
        found = root.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


_newest: weakref.ref[Session] | None = None
"""Of this process, which has one open at a time."""


def _require_place() -> None:
    """Whether a Session may be made here and now.

    Raises:
        UsageError: not in the main thread; or another one is open, which is named.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise UsageError(
            f"Run(...) was called in thread {thread.name!r}; wanted the main thread, where Python "
            "handles the signals that stop a run. Make it there, train there, and leave the other "
            "work to threads"
        )
    other = None if _newest is None else _newest()
    if other is not None and other.is_open:
        raise UsageError(
            f"this process has a Run already, in {other.dir.root}, which is not closed: both would "
            "answer one SIGTERM, and the process can leave once. Put what belongs together into "
            "one, Run(extra={name: object}); of two in sequence close() the first"
        )
