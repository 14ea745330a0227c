"""The Session of a loop that belongs to a framework.

What every adapter needs and no framework has: the state is handed over when the framework asks for
it, each rank has a state of its own beside the shared one, and loaders keep their positions.
Saves, commits, stops, requeues and reports are the :class:`~hydroslurm.training.session.Session`'s.

An adapter makes one, calls :meth:`resume`, and, if there was something to resume from, gives
:attr:`loaded` to the framework and :meth:`hold` its loaders. When all is built and the next thing
to happen is the first step, it calls :meth:`begin`. Behind each optimizer step it calls
:meth:`complete_step`, and at the end :meth:`finish`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hydroslurm.coordination.world import World
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import UsageError
from hydroslurm.integrations.held_loader import HeldLoader
from hydroslurm.training.claim import run_directory
from hydroslurm.training.objects import Models
from hydroslurm.training.script import fingerprint
from hydroslurm.training.session import Session

_fits: Counter[Path] = Counter()
"""How many trainings this process has begun in a folder; each has one of its own."""


class FrameworkSession:
    """See the module.

    Args:
        name: of the framework; the state is saved under it.
        capture: makes the state that all ranks share: tensors and plain values, nested.
        models: those that are trained, by name, once they are there.
        options: of the Session.

    Attributes:
        session: the one that this holds.
        contents: its session's. log: logs a line, once for all ranks.
        loaded: the framework's state as it was saved, until :meth:`begin`; None for a new run.
        trains: whether :meth:`begin` was called.
    """

    def __init__(
        self,
        name: str,
        capture: Callable[[], Mapping[str, Any]],
        models: Models,
        **options: Any,
    ) -> None:
        self._capture = capture
        self.loaded: Mapping[str, Any] | None = None
        self._is_unchanged: Callable[[], bool] = lambda: False
        self._loaders: dict[str, HeldLoader] = {}
        self.trains = False
        self._resumed_at = -1
        self.session = Session([(name, self)], owner=name, models=models, **options)
        self.contents, self.log = self.session.contents, self.session.rank_group.log
        self.contents.noted["loaders"] = lambda: {
            name: held.state() for name, held in self._loaders.items()
        }
        self.session.samples_per_step = self._samples_per_step

    # --- how it begins
    # --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self.session.cursor.step

    def resume(self) -> bool:
        """Load the newest checkpoint, as :meth:`Run.resume`; whether there is one."""
        resumed = self.session.resume()
        if resumed:
            self._resumed_at = self.step
        where = f"step {self.step} is committed" if resumed else "nothing was saved"
        self.session.saves.refused = f"the training had not begun in this attempt; {where}"
        return resumed

    @property
    def own_loaded(self) -> Mapping[str, Any]:
        """What this rank has saved for itself, by name, until :meth:`begin`."""
        return self.contents.pending or {}

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
        group = self.session.rank_group
        held = HeldLoader(
            loader,
            epoch=epoch,
            fetched_ahead=fetched_ahead,
            rank=group.rank,
            world_size=group.world_size,
            resumed=self.own_loaded.get("loaders", {}).get(name),
        )
        self._loaders[name] = held
        return held

    def enter_loop(self) -> None:
        """The script iterates in a loop of its own: its variables count, and those that were saved
        are put back."""
        self.contents.script.enter_loop()
        self.contents.script.restore_waiting()

    def begin(self) -> None:
        """All is built, iterators included, and the first step comes next: the random numbers and
        each rank's own state are put back, and from here on there is something to save.

        Raises:
            StateMismatch: an own state that nobody takes, or that does not fit.
        """
        self.loaded = self.session.saves.refused = None
        self.trains = True
        self.contents.begin()

    # --- on the way
    # --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def handing_out(self) -> Iterator[None]:
        """Around the fetching of a batch, in the body of a step, whose position is saved."""
        self.session.first_step.passes_over = True
        try:
            yield
        finally:
            self.session.first_step.passes_over = False

    def complete_step(self, step: int, *, epoch: int) -> None:
        """An optimizer step is complete, and the state is consistent: a safe point.

        Args:
            step: optimizer steps so far; it has to be larger than at the last call.

        Raises:
            SystemExit, SaveFailed, UnsavableState: as :meth:`Run.safe_point`.
            UsageError: the script uses what a resumed run would lack, and the session has remedies.
        """
        self.session.check_first_step()
        self.session.cursor.step, self.session.cursor.epoch = step, epoch
        self.session.saves.behind_batches = False
        self.session.safe_point()

    def save_too(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Write the framework's own checkpoint, and save the run at the next safe points, too:
        attempts resume from the run's state only, and a crash must not cost more steps than it
        would without hydroslurm. With ``every_s=0`` nothing is saved for that."""
        written = own(*args, **kwargs)
        self.session.saves.make_due()
        return written

    def begin_evaluation(self, fingerprint: Callable[[], object]) -> None:
        """What follows does not change what is saved, and is repeated after a stop within it; see
        :meth:`Run.evaluation`.

        Args:
            fingerprint: of the weights that are evaluated, which are part of the state; it is made
                twice, and equal on all ranks if they are to leave together.
        """
        self.session.saves.evaluation = self.contents.capture()
        before = fingerprint()
        self._is_unchanged = functools.cache(lambda: before == fingerprint())

    def end_evaluation(self) -> None:
        """The evaluation is over, if there was one."""
        self.session.saves.evaluation = None
        self._is_unchanged = lambda: False

    def check_evaluation(self) -> None:
        """Within an evaluation: leave if a stop was requested, with the state of its beginning.

        A framework or a callback that has put other weights in the model's place by the first call
        (an average of them) puts them back at the end: the stop waits for that. Outside of an
        evaluation nothing is known of the state, and the stop waits for the next safe point.

        Raises:
            SystemExit: as :meth:`Run.safe_point`.
        """
        behind = self.session.saves.behind_batches
        if not self.trains or behind or self._is_unchanged():
            self.session.check_stop()

    def end_steps(self) -> None:
        """The last step is done: what follows is repeated if the attempt ends within it, from the
        state of now, or that of the beginning of the current evaluation.

        Raises:
            SaveFailed: it is not committed.
        """
        session = self.session
        if session.saves.evaluation is None:
            session.save_behind_batches(since=self._resumed_at)
        else:
            session.save_as_begun()
            session.saves.behind_batches = True

    def finish(self) -> None:
        """The training is done; see :meth:`Run.finish`."""
        if self.contents.pending is not None:  # there was nothing left to train
            self.begin()
            self.session.saves.unchanged = True
        self.end_evaluation()
        self.session.finish()

    # --- what the session asks for
    # --------------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any]:
        """What is saved of the framework: what was loaded, until the training has begun."""
        return self.loaded or self._capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As a checkpoint has it."""
        self.loaded = state

    def _samples_per_step(self) -> int | None:
        """Of all ranks together; None where no loader says."""
        counts = [held.samples_taken() for held in self._loaders.values()]
        known = [count for count in counts if count is not None]
        return sum(known) * self.session.rank_group.world_size or None


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
        UsageError, RunFolderError: as :func:`hydroslurm.training.claim.run_directory`.
    """
    found = run_directory(given, environ)
    _fits[found.root] += 1
    number = _fits[found.root]
    return found if number == 1 else run_directory(found.root / f"fit-{number}", environ)


def environ_of(*, rank: int, world_size: int) -> Mapping[str, str]:
    """The variables by which the ranks of a training with accelerate find each other: Slurm's or
    torchrun's.

    Raises:
        UsageError: Slurm has started several tasks, and each trains alone.
    """
    if not is_launched(
        world_size,
        f"each trains with a world size of {world_size}: accelerate looks for RANK, WORLD_SIZE, "
        "LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Call hydroslurm.set_torch_environment() before "
        "anything else, or start one task per node: srun --ntasks-per-node=1 hydroslurm agent -- "
        "--nproc-per-node=N train.py",
    ):
        raise UsageError(
            f"this is rank {rank} of {world_size}, but neither srun nor torchrun has started it: "
            "there is no way to agree with the other ranks on a stop. Use one of those"
        )
    return os.environ


def is_launched(world_size: int, seen: str) -> bool:
    """Whether srun or torchrun has started all of these ranks.

    Args:
        seen: of what they have started instead, what the training knows, and what to do.

    Raises:
        UsageError: they have started several ranks, but not this number.
    """
    launched = World.from_environ(os.environ).world_size
    if launched not in (1, world_size):
        raise UsageError(f"{launched} tasks were started, and {seen}")
    return launched == world_size


def fingerprint_of_all(
    weights: Mapping[str, Any], *, device: torch.device, add: Callable[[torch.Tensor], Any]
) -> int:
    """As :func:`hydroslurm.training.contents.fingerprint`, over all ranks: so that all
    see a change that only some of them have a part of.

    Args:
        add: the collective that adds up a tensor of all ranks.
    """
    here = sum(fingerprint(weights).values()) % 2**48
    return int(add(torch.tensor(here, dtype=torch.int64, device=device)))
