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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.census import MOVED, Unkept
from hydroslurm.checkpoint.newest import Found, Load, newest_good
from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, Retention, State
from hydroslurm.coordination.world import World
from hydroslurm.core import memory
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import ExitForRequeue
from hydroslurm.core.rundir import GENERATION_ENV
from hydroslurm.elastic.folder import ELASTIC_ENV
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
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller, StopRequest
from hydroslurm.slurm import run_folders
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.arguments import Cadence, controller_for, fence_of, run_directory
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
from hydroslurm.training.checks import (
    FirstStep,
    FolderWatch,
    LoopWatch,
    Remedies,
    closed,
    opened,
    own_loop,
    recompiles,
    require_place,
)
from hydroslurm.training.contents import Contents, largest
from hydroslurm.training.cursor import Cursor
from hydroslurm.training.gradients import STATIC_GRAPH, BucketOrders, Gradients
from hydroslurm.training.objects import Composition, Objects, OutgrownState, require_registrable
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.reporting import SaveRecorder, notice, warning
from hydroslurm.training.requeue import StopHandler
from hydroslurm.training.resuming import differences, enter, load_for, require_one_folder
from hydroslurm.training.stopping import Stopping

if TYPE_CHECKING:
    from typing_extensions import Self

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


class Run:
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
            share; default: the run folder of this training in its job (``hydroslurm-runs/JOBID``,
            ``JOBID.2`` ...), and for a further run of one process ``fit-N`` in it.
        every_steps, every_s: how often to save in the background while training; every 600 s when
            neither is given, never when both are 0. A save in the background needs memory for a
            copy of the state: where a limit leaves too little, the training waits for each save.
        keep: how many periodic checkpoints to keep, at least 2; two of stops are kept in addition.
        extra: more objects by name, each with ``state_dict`` and ``load_state_dict``. They are
            loaded in this order, before model, optimizer, scheduler and scaler, so that they can
            rebuild what was added to those while training, such as a parameter group.
        on_save_error: ``warn`` continues when a periodic save fails, ``fail`` raises SaveFailed at
            the next safe point.
        limits: how often the run may be restarted.
        elastic: the run's members may come and go while it trains (docs/elastic.md). Default:
            whether this process was started as one of an elastic run.
        resume: False starts at step 0 and sets aside what is committed in the folder. A restart of
            the same job still resumes, from what its first start has saved.

    Raises:
        UsageError: a wrong argument; no directory outside of a job; another Run is open in this
            process, or has finished in this folder in this process; not the main thread.
        InstallError, GateError: as :func:`hydroslurm.install`.
    """

    _is_elastic = False
    """Whether its members may come and go."""

    def __new__(cls, *_: Any, elastic: bool | None = None, **arguments: Any) -> Self:
        """One whose members come and go is of a class of its own."""
        environ = arguments.get("environ") or os.environ
        # below the agent of a member the ranks are started anew for each generation
        is_restarted = bool(environ.get(GENERATION_ENV))
        asked = elastic or (elastic is None and environ.get(ELASTIC_ENV))
        if cls is Run and asked and not is_restarted:
            from hydroslurm.training.elastic_run import ElasticRun

            return cast("Self", super().__new__(ElasticRun))
        if elastic is None and environ.get(ELASTIC_ENV) and not cls._is_elastic:
            raise UsageError(
                f"this is a member of an elastic job, and {cls.__name__} trains with a fixed "
                "number of ranks: each member would train alone. Set `engine: restart` in "
                "`elastic:`, which starts its ranks anew at each change, put hydroslurm.Run around "
                "a loop of your own, or leave `elastic:` out of the job spec"
            )
        return super().__new__(cls)

    _keep_epochs: int | None = None
    """How many checkpoints of kind ``epoch`` stay, which only a job makes; None: all of them."""

    _remedies: Remedies | None = None
    """For what the first step uses and the run lacks, as long as somebody looks."""

    _moved = False
    """A safe point has put the run elsewhere: the batches that follow are opened anew."""

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
        on_save_error: Literal["warn", "fail"] = "warn",
        limits: Limits | None = None,
        resume: bool = True,
        elastic: bool | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        del elastic  # made an ElasticRun of this, which knows
        require_place()
        environ = os.environ if environ is None else environ
        allocation = Allocation.from_environ(environ)
        self._cadence = Cadence.of(every_steps, every_s, environ)
        self.dir = run_directory(directory, environ)
        if directory is None:  # a script makes the same runs, in the same order, in each attempt
            run_folders.warn_of_doubt(self.dir)
            self.dir = next_unfinished(self.dir).claim()
        require_unfinished(self.dir)
        self._folder = FolderWatch(self.dir.root)
        self._step = 0
        self._epoch = 0
        self._generation = int(environ.get(GENERATION_ENV) or 0)
        self._begins_anew = not resume and not (allocation and allocation.restart_count)
        self._has_begun = self._is_closed = False
        self._resumed_unasked: bool | None = None
        self._watch = LoopWatch()
        self._model = model
        self._objects = Objects()
        self._cursor = Cursor()
        self._first_step = FirstStep()
        self._gradients = Gradients(self._objects.by_name)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        present = {name: thing for name, thing in named.items() if thing is not None}
        for name, thing in [*present.items(), *(extra or {}).items()]:
            self._add(name, thing)
        self._saves = Saves()
        self._last_save_s = time.monotonic()
        self._fence = fence_of(self.dir, allocation)
        self._controller, self._installed_here = self._install(environ)
        self._world = World.from_environ(environ)
        self._rank_group = RankGroup(self._controller)
        self._contents = Contents()
        self._bucket_orders = BucketOrders(
            self._objects.as_given, world_size=self._rank_group.world_size
        )
        self._store = CheckpointStore(
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
        opened(self, self._controller)

    @property
    def generation(self) -> int:
        """How often the members of an elastic run have changed, from 1; 0 for all others."""
        return self._generation

    def _install(self, environ: Mapping[str, str]) -> tuple[Controller, bool]:
        """The controller of this process, and whether it was installed for this run."""
        return controller_for(self.dir, environ)

    def _make_saver(self, *, keep: int, on_save_error: Literal["warn", "fail"]) -> Saver:
        return Saver(
            self._store,
            retention=Retention(keep, keep_epochs=self._keep_epochs),
            on_save_error=on_save_error,
            exempt=self._controller.exempt,
            tell=SaveRecorder(self._controller),
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
        stopping = Stopping(
            self._rank_group, attempt=self._attempt, saver=self._saver, stop_handler=stop_handler
        )
        self._controller.claim_stops(stopping.note_request)
        return stopping

    def _use(self, loader: Any) -> None:
        rank_group = self._rank_group
        self._cursor.use(loader, rank=rank_group.rank, world_size=rank_group.world_size)

    # --- where it is
    # --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Training steps completed. Settable, for loops that do not use :meth:`batches`.

        A script that reads it wants to know where to resume, so the first read resumes the run if
        :meth:`resume` was not called: with several ranks, read it on all of them.

        Raises:
            UsageError: the run was not resumed, a checkpoint is committed, and something may have
                been trained since; or it was set before the run was resumed.
        """
        self._require_begun("run.step was read")
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._require_begun("run.step was set", may_load=False)
        self._saves.behind_batches = False
        self._step = step

    @property
    def epoch(self) -> int:
        """The epoch that is being trained, from 0; as :attr:`step`."""
        self._require_begun("run.epoch was read")
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._require_begun("run.epoch was set", may_load=False)
        self._saves.behind_batches = False
        self._epoch = epoch

    # --- registering and resuming
    # --------------------------------------------------------------------------------------------

    def register(self, name: str, thing: Any, *, per_rank: bool = False) -> None:
        """Save one more object, like those in ``extra``; before :meth:`resume`.

        Args:
            thing: an object with ``state_dict`` and ``load_state_dict``, or a random generator
                (``torch.Generator``, ``random.Random``, NumPy's ``Generator`` or ``RandomState``).
            per_rank: each rank saves its own, such as an environment. Else the object is the same
                on all ranks. Generators are always per rank.

        Raises:
            UsageError: the run has begun, the name is taken, or it has no state.
        """
        if self._attempt.number is not None:
            raise UsageError(
                f"register({name!r}) comes too late: the run has been resumed already, by resume() "
                "or a loop, or the first look at run.step or run.epoch"
            )
        self._add(name, thing, per_rank=per_rank)

    def resume(self) -> bool:
        """Resume from the newest committed checkpoint; False when there is none.

        A run that has finished exits with status 0 here; one that must not continue (a limit is
        spent, or attempts make no progress) with 93. From here on the folder belongs to this
        attempt: an older one that is still alive can neither save nor remove anything there, and
        exits with 93 when it tries. :meth:`batches` and the first read of :attr:`step` or
        :attr:`epoch` call it if it was not called before.

        Raises:
            RunFolderError: the folder is another training's: of another script, or of this start of
                the job, where it still runs.
            StateMismatch: the checkpoint belongs to other objects; names the keys.
            UsageError: called twice.
        """
        if self._resumed_unasked is not None:  # the script has looked at run.step before
            resumed, self._resumed_unasked = self._resumed_unasked, None
            return resumed
        if self._has_begun:
            raise UsageError("resume() was called already; a run goes on once")
        if self._attempt.number is not None:
            raise UsageError(_COULD_NOT_RESUME)
        return self._begin(may_load=True, seen="")

    def _require_begun(self, seen: str, *, may_load: bool = True) -> None:
        """Where the loop begins without a call of :meth:`resume`, the run is resumed here if its
        state is still what the script has made; in the middle of a loop it would be too late.

        Raises:
            UsageError: a checkpoint is committed, which the loop would begin without.
        """
        if self._has_begun:
            return
        if self._is_closed or self._attempt.number is not None:
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
            self._log_once(
                f"{seen} and run.resume() was not called: this attempt begins at step 0, and the "
                "next one could not go on. Call it before the loop, and begin that at run.step"
            )

    def _begin(self, *, may_load: bool, seen: str) -> bool:
        self._remember_script()
        rank_group = self._rank_group
        try:
            rank_group.gather()
        except RanksError as error:
            raise self._stopping.leave_unsaved(
                error, self._controller.stop_request, step=0
            ) from error
        with self._leaving_when_stale(), self._store.pins.holding():
            resumed = self._go_on(may_load=may_load, seen=seen)
        self._watch.begin(self._step, in_loop=not may_load)
        self._contents.follow_frozen()
        self._gradients.begin()
        self._has_begun = True
        return resumed

    def _go_on(self, *, may_load: bool, seen: str) -> bool:
        rank_group = self._rank_group
        require_one_folder(rank_group, self.dir)
        entered = rank_group.decide(
            "enter",
            lambda: enter(self.dir, fence=self._fence, store=self._store, anew=self._begins_anew),
        )
        if (step := entered["finished"]) is not None:
            return self._go_on_finished(step)
        self._fence.hold(entered["claim"])
        newest = self._load_newest() if may_load else None
        if not may_load and (found := self._newest(None)) is not None:
            raise UsageError(
                f"{seen} and the run was not resumed, but step {found.checkpoint.step} is "
                f"committed ({found.checkpoint.path}): the loop would train from 0 again. Call "
                "run.resume() before the loop, and begin that at run.step; to begin anew, give "
                "another directory= or Run(resume=False)"
            )
        begins_at = newest[0].checkpoint.step if newest else 0
        try:
            number = rank_group.decide("attempt", lambda: self._attempt.enter(begins_at))
        except RunEnded as error:
            self._log_once(str(error))
            self._leave()
            raise ExitForRequeue.must_not_run_again() from error
        self._attempt.begin(number, begins_at)
        if newest is None:
            self._log_once(f"a new run, step 0 ({self.dir.root})", notice)
            return False
        self._take_over(*newest)
        where = newest[0].checkpoint.path
        self._log_once(f"attempt {number} resumes from step {self._step} ({where})", notice)
        return True

    def _go_on_finished(self, step: int) -> bool:
        """Leave: the process that finished the run has also done what follows the training."""
        self._log_once(
            f"this run has finished at step {step}; nothing to do ({self.dir.root}). To train "
            f"it longer, remove {self.dir.finished_json.name} there",
            notice,
        )
        self._leave()
        raise ExitForRequeue.finished()

    def _load_newest(self) -> tuple[Found, State] | None:
        """Load the checkpoint that all ranks resume from."""
        loaded: list[State] = []

        def load(candidate: Found) -> None:
            loaded.clear()  # of one that another rank has rejected
            loaded.append(load_for(self._rank_group, candidate, like=self._objects.templates()))

        found = self._newest(load)
        return None if found is None else (found, loaded[0])

    def _take_over(self, found: Found, state: State) -> None:
        """Put a loaded state into the objects."""
        for message in differences(
            self._rank_group, found, state, objects=self._objects, loading=self._cursor.loading
        ):
            self._log_once(message)
        self._saves.periodic_step = found.checkpoint.step
        self._saver.continues_from(found.checkpoint)
        self._apply(state, source=str(found.checkpoint.path))

    # --- loops
    # --------------------------------------------------------------------------------------------

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

    # --- between two steps
    # --------------------------------------------------------------------------------------------

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
        self._require_begun("a safe point was reached", may_load=False)
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
        self._require_begun("an evaluation begins")
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
        self._require_begun("save() was called", may_load=False)
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

    # --- how it ends
    # --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Declare the training done: save its last step unless that is saved already, and close.
        The marker that makes a restart exit at once is written when this process exits with status
        0: see :class:`Run`.

        Raises:
            AgreementFailed: a rank has failed before it was done, so that the run is not finished.
            UsageError: the run was not resumed, and a checkpoint is committed.
        """
        self._require_begun("the run is to be finished", may_load=False)
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
        closed(self)
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

    # --- inside: the beginning
    # --------------------------------------------------------------------------------------------

    def _remember_script(self) -> None:
        """How its objects are by now the script makes them in each attempt."""
        self._contents = Contents(
            self._objects.by_name, saved=self._saved_apart, world_size=self._rank_group.world_size
        )
        self._contents.note()
        self._objects.note()

    def _saved_apart(self) -> list[Any]:
        """What has a place of its own in a checkpoint: the loader, and registered generators."""
        registered = self._cursor.registered.by_name().values()
        return [self._cursor.loader, *(one for one in registered if isinstance(one, rng.KINDS))]

    def _add(self, name: str, thing: Any, *, per_rank: bool = False) -> None:
        own = self._cursor.registered
        require_registrable(name, thing, taken=(*self._objects.names(), *own.names()))
        if per_rank or isinstance(thing, rng.KINDS):
            own.add(name, thing)
        else:
            self._objects.add(name, thing)
        self._watch.add(thing)

    def _newest(self, load: Load | None) -> Found | None:
        """What the run resumes from; loads it."""
        try:
            return newest_good(self._store, topic="resume", load=load)
        except (CheckpointError, OSError):
            self._fence.check(f"loading from {self._store.directory}")  # a newer one removed it
            raise

    @contextlib.contextmanager
    def _leaving_when_stale(self) -> Iterator[None]:
        """Exit once a newer attempt has replaced this one.

        Raises:
            ExitForRequeue: in the place of StaleAttempt.
        """
        try:
            yield
        except StaleAttempt as error:
            self._log_once(f"this attempt ends: {error}")
            self._saver.give_up()
            with contextlib.suppress(HydroslurmError):
                self._leave()
            raise ExitForRequeue.must_not_run_again() from error

    def _leave(self) -> None:
        """Done, together with the others."""
        self._rank_group.part()
        self.close()

    def _log_once(self, message: str, log: Callable[[str], None] = warning) -> None:
        """One rank speaks for all."""
        if self._rank_group.rank == 0:
            log(message)

    def _apply(self, state: State, *, source: str) -> None:
        for message in self._objects.load(state.shared, source=source):
            self._log_once(message)
        counters = state.own["counters"]
        self._step, self._epoch = counters["step"], counters["epoch"]
        self._apply_own(state.own)

    def _apply_own(self, own: Mapping[str, Any]) -> None:
        """Put what this rank has saved for itself in its place."""
        self._contents.restore(own.get("script", {}), new_rank=own.get("new_rank"))
        self._bucket_orders.load(own.get("bucket_orders", ()))
        self._gradients.load_state_dict(own.get("gradients", {}))
        self._cursor.load(own)

    # --- inside: loops
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

    # --- inside: saves and stops
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
        if message := recompiles(self._model, self._cursor.loader):
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
        """Save for a stop, have the job requeued, and exit."""
        step = self._completed_step()
        with self._leaving_when_stale():
            try:
                window = self._stopping.agree_on_window(request, step=step)
                saved = self._save_by(window.deadline_mono_s)
                leaving = self._stopping.leave(window, saved, step=step)
            except RanksError as error:  # a rank died just now
                leaving = self._stopping.leave_unsaved(error, request, step=step)
            raise leaving

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
        if not self._has_begun:  # the newest checkpoint may be ahead
            return "the run had not begun, and nothing was saved"
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
        by_step = self._cadence.is_due_by_step(self._step)
        if self._rank_group.world_size == 1:
            return by_step or self._cadence.is_due_by_clock(self._last_save_s)
        called = self._rank_group.takes_save()
        if self._rank_group.rank == 0 and self._cadence.is_due_by_clock(self._last_save_s):
            self._rank_group.call_save()
        return called or by_step

    # --- inside: the end
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
            finish_at_good_end(self.dir, step=self._step, fence=self._fence, others=others)
        else:
            write_finished(self.dir, step=self._step)
