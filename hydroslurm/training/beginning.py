"""How a run begins: it claims its folder and resumes from the newest checkpoint there.

The first part of :class:`~hydroslurm.training.run.Run`. A loop that forgets to resume is resumed
where that is still possible, and stopped where it would train from 0 over what is committed.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.newest import Found, Load, newest_good
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, State
from hydroslurm.core.exitcodes import ExitForRequeue
from hydroslurm.core.fence import Fence
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import (
    CheckpointError,
    HydroslurmError,
    RanksError,
    RunEnded,
    StaleAttempt,
    UsageError,
)
from hydroslurm.runtime.controller import Controller
from hydroslurm.training.attempts import CurrentAttempt
from hydroslurm.training.contents import Contents
from hydroslurm.training.cursor import Cursor
from hydroslurm.training.ddp_buckets import BucketOrders
from hydroslurm.training.gradients import Gradients
from hydroslurm.training.objects import Objects, require_registrable
from hydroslurm.training.oversights import LoopWatch
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.reporting import notice, warning
from hydroslurm.training.resuming import differences, enter, load_for, require_one_folder
from hydroslurm.training.stopping import Stopping

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


class Beginning(ABC):
    """Base of Run, whose constructor makes what it needs."""

    dir: RunDir
    _begins_anew: bool
    _rank_group: RankGroup
    _controller: Controller
    _cursor: Cursor
    _epoch: int
    _fence: Fence
    _gradients: Gradients
    _has_begun: bool
    _is_closed: bool
    _attempt: CurrentAttempt
    _bucket_orders: BucketOrders
    _objects: Objects
    _resumed_unasked: bool | None
    _saver: Saver
    _saves: Saves
    _contents: Contents
    _step: int
    _store: CheckpointStore
    _stopping: Stopping
    _watch: LoopWatch

    @abstractmethod
    def close(self) -> None:
        """Wait for a save in flight and give the signals back."""

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
        if not self._has_begun:
            self._begin_unasked("run.step was read")
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if not self._has_begun:
            self._begin_unasked("run.step was set", may_load=False)
        self._saves.behind_batches = False
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

    def _begin_unasked(self, seen: str, *, may_load: bool = True) -> None:
        """The loop begins without a call of :meth:`resume`. The run is resumed here if its state is
        still what the script has made; in the middle of a loop it would be too late.

        Raises:
            UsageError: a checkpoint is committed, which the loop would begin without.
        """
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

    # --- inside
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
        self._contents.restore(state.own.get("script", {}), new_rank=state.own.get("new_rank"))
        self._bucket_orders.load(state.own.get("bucket_orders", ()))
        self._gradients.load_state_dict(state.own.get("gradients", {}))
        self._cursor.load(state.own)
