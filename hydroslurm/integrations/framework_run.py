"""The Run of a loop that belongs to a framework.

What every adapter needs and no framework has: the state is handed over when the framework asks for
it, each rank has a state of its own beside the shared one, and loaders keep their positions.
Saves, commits, stops, requeues and reports are those of :class:`hydroslurm.training.run.Run`.

An adapter makes one, calls :meth:`FrameworkRun.resume`, and, if there was something to resume from,
gives :attr:`FrameworkRun.loaded` to the framework and :meth:`FrameworkRun.hold` its loaders. When
all is built and the next thing to happen is the first step, it calls :meth:`FrameworkRun.begin`.
Behind each optimizer step it calls :meth:`FrameworkRun.complete_step`, and at the end
:meth:`FrameworkRun.finish`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint.store import State
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import StateMismatch
from hydroslurm.integrations.held_loader import HeldLoader
from hydroslurm.training.arguments import run_directory
from hydroslurm.training.checks import Remedies
from hydroslurm.training.contents import Contents
from hydroslurm.training.gradients import BucketOrders, Gradients, Models
from hydroslurm.training.objects import Stateful
from hydroslurm.training.run import Run

_fits: Counter[Path] = Counter()
"""How many trainings this process has begun in a folder; each has one of its own."""


class FrameworkRun(Run):
    """See the module.

    Args:
        name: of the framework; the state is saved under it.
        capture: makes the state that all ranks share: tensors and plain values, nested.
        options: those of a Run.

    Attributes:
        own: what each rank saves for itself, by name. It is loaded by :meth:`begin`.
        loaded: the framework's state as it was saved, until :meth:`begin`; None for a new run.
        trains: whether :meth:`begin` was called.
    """

    def __init__(
        self,
        name: str,
        capture: Callable[[], Mapping[str, Any]],
        *,
        directory: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._framework = name
        self._capture = capture
        self.loaded: Mapping[str, Any] | None = None
        self._frozen: Mapping[str, Any] | None = None
        self._is_unchanged: Callable[[], bool] = lambda: False
        self.own: dict[str, Stateful] = {}
        self._models: Models = tuple
        self._loaders: dict[str, HeldLoader] = {}
        self._pending: Mapping[str, Any] | None = None
        self.trains = False
        self._resumed_at = -1
        super().__init__(
            extra={name: self},
            directory=directory,
            environ=environ,
            **options,
        )

    # --- how it begins
    # --------------------------------------------------------------------------------------------

    @property
    def own_loaded(self) -> Mapping[str, Any]:
        """What this rank has saved for itself, by name, until :meth:`begin`."""
        own: Mapping[str, Any] = (self._pending or {}).get("own", {})
        return own

    def hold(
        self,
        loader: Any,
        *,
        name: str,
        epoch: Callable[[], int],
        fetched_ahead: Callable[[], int] | None = None,
    ) -> HeldLoader:
        """The position in this loader: it is saved, and resumed where it was saved under this name.
        Arguments as in :class:`HeldLoader`; a name that was given before is that of a loader which
        has been replaced.

        Raises:
            UsageError: as :func:`hydroslurm.data.position.position_of`.
        """
        group = self._rank_group
        held = HeldLoader(
            loader,
            epoch=epoch,
            fetched_ahead=fetched_ahead,
            rank=group.rank,
            world_size=group.world_size,
            resumed=(self._pending or {}).get("loaders", {}).get(name),
        )
        self._loaders[name] = held
        return held

    def follow(self, models: Models) -> None:
        """Sum the gradients of these models in one order in all attempts; before
        :meth:`remember`, which saves what each rank has of them beside the shared state."""
        self._models = models
        self._bucket_orders = BucketOrders(models, world_size=self._rank_group.world_size)
        self._gradients = Gradients(lambda: {str(n): one for n, one in enumerate(models())})

    def remember(self, roots: Callable[[], Mapping[str, Any]], **options: Any) -> None:
        """Save what changes from now on in the script's own objects, and in how the modules of the
        models that are followed are set; before :meth:`begin`. Of several ranks each has buffers of
        its own: they see other batches, and their BatchNorm other statistics. FSDP never compares
        them, and DDP only where it trains, not in an evaluation.

        Args:
            roots, options: as of :class:`Contents`.
        """
        world_size = self._rank_group.world_size
        self._contents = Contents(
            lambda: {f"model {n}" if n else "model": one for n, one in enumerate(self._models())},
            roots,
            world_size=world_size,
            all_buffers=world_size > 1,
            **options,
        )
        self._contents.note()

    @property
    def contents(self) -> Contents:
        """What the script's objects have counted since :meth:`remember`."""
        return self._contents

    def enter_loop(self) -> None:
        """The script iterates in a loop of its own: its variables count, and those that were saved
        are put back."""
        self._contents.enter_loop()
        self._contents.restore_waiting()

    def check_first_step(self, remedies: Remedies) -> None:
        """Find out at the first step of this attempt what the script uses and a resumed run would
        lack: for a framework that leaves the loop to it, and hands batches out within :meth:`body`.
        """
        self._remedies = remedies

    def begin(self) -> None:
        """All is built, iterators included, and the first step comes next: the random numbers and
        each rank's own state are put back, and from here on there is something to save.

        Raises:
            StateMismatch: an own state that nobody takes, or that does not fit.
        """
        pending, self._pending = self._pending, None
        self.loaded = None
        self.trains = True
        if pending is not None:
            self._put_back(pending)
        self._gradients.begin()
        self._contents.begin()

    def _put_back(self, pending: Mapping[str, Any]) -> None:
        known = {*self.own, *self._cursor.registered.names()}
        for name in (*pending["own"], *pending.get("registered", {})):
            if name not in known:
                raise StateMismatch(
                    f"the checkpoint has a state of {name!r} for this rank, which this script does "
                    "not have any more; begin anew with another directory="
                )
        for name, state in pending["own"].items():
            self.own[name].load_state_dict(state)
        self._apply_own(pending)
        self._cursor.restore_rng()  # nothing is left to open

    # --- on the way
    # --------------------------------------------------------------------------------------------

    def body(self) -> AbstractContextManager[None]:
        """Around what the script does with a batch."""
        return self._body()

    @contextlib.contextmanager
    def handing_out(self) -> Iterator[None]:
        """Around the fetching of a batch within :meth:`body` whose position is saved."""
        self._first_step.passes_over = True
        try:
            yield
        finally:
            self._first_step.passes_over = False

    def complete_step(self, step: int, *, epoch: int) -> None:
        """An optimizer step is complete, and the state is consistent: a safe point.

        Args:
            step: optimizer steps so far; it has to be larger than at the last call.

        Raises:
            SystemExit, SaveFailed, UnsavableState: as :meth:`Run.safe_point`.
            UsageError: as :meth:`check_first_step` wants it.
        """
        if self._remedies is not None:
            self._require_all_given(self._remedies)
        self._step, self._epoch = step, epoch
        self._saves.behind_batches = False
        self.safe_point()

    def count_step_left(self) -> None:
        """A loop was left in the body of a step that is trained: it counts, with no safe point."""
        self._step += 1

    def begin_evaluation(self, fingerprint: Callable[[], object]) -> None:
        """What follows does not change what is saved, and is repeated after a stop within it; see
        :meth:`Run.evaluation`.

        Args:
            fingerprint: of the weights that are evaluated, which are part of the state; it is made
                twice, and equal on all ranks if they are to leave together.
        """
        self._frozen = self._capture()  # tensors are not copied
        before = fingerprint()
        self._is_unchanged = functools.cache(lambda: before == fingerprint())
        self._saves.evaluation = self._own_state()

    def end_evaluation(self) -> None:
        """The evaluation is over, if there was one."""
        if self._saves.evaluation is not None:
            self._saves.evaluation = None
            self._frozen = None
            self._is_unchanged = lambda: False

    def check_evaluation(self) -> None:
        """Within an evaluation: leave if a stop was requested, with the state of its beginning.

        A framework or a callback that has put other weights in the model's place by the first call
        (an average of them) puts them back at the end: the stop waits for that. Outside of an
        evaluation nothing is known of the state, and the stop waits for the next safe point.

        Raises:
            SystemExit: as :meth:`Run.safe_point`.
        """
        may_leave = not self.trains or self._saves.behind_batches or self._is_unchanged()
        if may_leave:
            self.check_stop()

    def end_steps(self) -> None:
        """The last step is done: what follows is repeated if the attempt ends within it, from the
        state of now, or that of the beginning of the current evaluation.

        Raises:
            SaveFailed: it is not committed.
        """
        if self._saves.evaluation is None:
            self._save_behind_batches(since=self._resumed_at)
            return
        with self._leaving_when_stale():
            step = self._completed_step()
            self._saver.save(
                self._state(), step=step, epoch=self._epoch, kind="manual", meta=self._made_of()
            )
        self._saves.began()
        self._saves.behind_batches = True

    def finish(self) -> None:
        if self._pending is not None:  # there was nothing left to train
            self.begin()
            self._saves.unchanged = True
        self.end_evaluation()
        super().finish()

    def state_dict(self) -> Mapping[str, Any]:
        """What is saved of the framework: what was loaded, until the training has begun; within an
        evaluation what was there when it began; else what is there now."""
        return self._frozen or self.loaded or self._capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As a checkpoint has it."""
        self.loaded = state

    # --- Run's seams
    # --------------------------------------------------------------------------------------------

    def _given(self) -> tuple[dict[str, Any], dict[str, Any]]:
        objects, states = super()._given()
        del objects[self._framework]
        own = {name: thing.state_dict() for name, thing in self.own.items()}
        return {**objects, **self.own}, {**states, **own}

    def _remember_script(self) -> None:
        """The framework's adapter does, by :meth:`remember`."""

    def _samples_of_step(self) -> int | None:
        found = [held.samples_taken() for held in self._loaders.values()]
        known = [one for one in found if one is not None]
        return sum(known) * self._rank_group.world_size or None

    def _apply(self, state: State, *, source: str) -> None:
        self._objects.load(state.shared, source=source)
        counters = state.own["counters"]
        self._step, self._epoch = counters["step"], counters["epoch"]
        self._pending = state.own
        self._resumed_at = self._step

    def _own_state(self) -> Mapping[str, Any]:
        if self._pending is not None:
            return self._pending
        return {
            **super()._own_state(),
            "loaders": {name: held.state() for name, held in self._loaders.items()},
            "own": {name: thing.state_dict() for name, thing in self.own.items()},
        }

    def _save_by(self, deadline_mono_s: float) -> str:
        if self.trains or not self._has_begun:
            return super()._save_by(deadline_mono_s)
        where = f"step {self._step} is committed" if self._pending else "nothing was saved"
        return f"the training had not begun in this attempt; {where}"


def replace(undo: ExitStack, thing: Any, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Have a framework's object call ours, with its own as the first argument, until ``undo`` is
    closed. Returns its own."""
    own: Callable[..., Any] = getattr(thing, name)
    had = name in vars(thing)
    setattr(thing, name, functools.partial(ours, own))
    if had:  # somebody else has put theirs there
        undo.callback(setattr, thing, name, own)
    else:
        undo.callback(delattr, thing, name)
    return own


def directory_of_fit(given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> RunDir:
    """Where the n-th training of this process keeps its state: the folder that was given, or that
    of the job, and ``fit-N`` in it from the second on. A script makes the same trainings, in the
    same order, in each attempt.

    Raises:
        UsageError, RunFolderError: as :func:`hydroslurm.training.arguments.run_directory`.
    """
    found = run_directory(given, environ)
    _fits[found.root] += 1
    number = _fits[found.root]
    return found if number == 1 else run_directory(found.root / f"fit-{number}", environ)
