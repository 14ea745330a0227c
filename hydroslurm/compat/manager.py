"""``CheckpointManager``: where a job's checkpoints are.

<directory>/checkpoints/           one of kind ``epoch`` after each, 0 being the one after ``init``;
                                   a few of other kinds: periodic ones and those of stops
<directory>/from-epoch-000000003/  the same for a job that went back to epoch 3

A step can have both: the periodic save after the last step of an epoch still belongs to that epoch,
and resumes within it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydroslurm.checkpoint.manifest import EPOCH
from hydroslurm.checkpoint.storage import AnyonesStorage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State
from hydroslurm.compat.job import Job, TaskGroup, group_of
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import CheckpointError, CheckpointMissing, UsageError
from hydroslurm.slurm import run_folders
from hydroslurm.training.attempts import Limits
from hydroslurm.training.objects import bare
from hydroslurm.training.readback import read_back
from hydroslurm.training.run import Run


@dataclass(frozen=True)
class LoadedState(State):
    """A loaded state. Calling it, as a client does, restores the objects from it.

    Attributes:
        source: the checkpoint, for messages.
        objects: called to get the objects.
    """

    source: str
    objects: Callable[[], Mapping[str, Any]]

    def __call__(self) -> None:
        objects = {name: bare(thing) for name, thing in self.objects().items()}
        read_back(objects, self.shared, source=self.source)


class CheckpointManager:
    """The checkpoints of one run: how a JobRunner makes them, and how others read them.

    Does not touch the disk until used, and can be pickled. A checkpoint is selected by ``epoch``,
    the one made after that many epochs (0: after ``init``), or by ``step``, of any kind; the newest
    when neither is given.

    Args:
        directory: the run's, on a file system that all nodes share, or a Run; default: the run
            folder of the job in which it is used.
        db_type: Caffe2's database type, ignored: a checkpoint is a folder here.
        keep: how many epochs to keep; all of them when None.
        every_steps, every_s, limits: as in :class:`hydroslurm.Run`.
        on_save_error: if the checkpoint of an epoch cannot be written, ``warn`` continues and
            ``fail`` raises SaveFailed.
    """

    _takes_several_nodes = False

    def __init__(
        self,
        directory: str | os.PathLike[str] | Run | None = None,
        db_type: str | None = None,  # noqa: ARG002 - Caffe2's second argument
        *,
        keep: int | None = None,
        every_steps: int | None = None,
        every_s: float | None = None,
        on_save_error: Literal["warn", "fail"] = "warn",
        limits: Limits | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep}: wanted 1 or more epochs, or None for all")
        if on_save_error not in ("warn", "fail"):
            raise UsageError(f'on_save_error={on_save_error!r}: wanted "warn" or "fail"')
        root = directory.dir.root if isinstance(directory, Run) else directory
        self._root = None if root is None else Path(root).absolute()
        self.keep = keep
        self.on_save_error = on_save_error
        self.run_options: dict[str, Any] = {
            "every_steps": every_steps,
            "every_s": every_s,
            "on_save_error": on_save_error,
            "limits": limits,
        }
        self._objects: Mapping[str, Any] | None = None

    @property
    def directory(self) -> Path:
        """The run's directory.

        Raises:
            UsageError: none was given, and this is not a Slurm job.
        """
        if self._root is not None:
            return self._root
        run_dir = run_folders.from_environment(os.environ)
        if run_dir is None:
            raise UsageError(
                "this process is not in a Slurm job, so there is no run folder; give one: "
                'CheckpointManager("runs/my-run")'
            )
        return run_dir.root.absolute()

    def branch(self, epoch: int) -> CheckpointManager:
        """The manager for a job that went back to an epoch of this one, in a separate folder."""
        branch = copy.copy(self)
        branch._root = RunDir(self.directory).from_epoch(epoch).root
        return branch

    # --- for a client to run, as Caffe2's
    # --------------------------------------------------------------------------------------------

    def init(
        self, nodes: Collection[str] | None = None, retrieve_from_epoch: int | None = None
    ) -> TaskGroup:
        """Return the task that fixes which objects are saved and loaded: all those the current job
        has registered by then. ``nodes``: as in ``job.nodes_to_checkpoint()``; all ranks take part.

        Args:
            retrieve_from_epoch: the epoch to load next, which has to have a checkpoint.

        Raises:
            UsageError: more than one node; a :class:`MultiNodeCheckpointManager` takes several.
        """
        if nodes is not None and len(nodes) > 1 and not self._takes_several_nodes:
            raise UsageError(
                f"{type(self).__name__}.init({', '.join(nodes)}): wanted one node; for several use "
                "MultiNodeCheckpointManager"
            )

        def settle() -> None:
            job = Job.current()
            if retrieve_from_epoch is not None:
                self.find(epoch=retrieve_from_epoch)
            self._objects = {name: job[name] for name in job.names()}

        return group_of(settle, f"init({'' if nodes is None else ', '.join(nodes)})")

    def blob_list(self) -> tuple[str, ...]:
        """Return the names of the saved objects.

        Raises:
            UsageError: :meth:`init` has not been run.
        """
        if self._objects is None:
            raise UsageError("blob_list() comes after client.run(manager.init(nodes))")
        return tuple(self._objects)

    def save(self, epoch: int) -> TaskGroup:
        """Return the task that commits an epoch's checkpoint, for a JobRunner's client.

        Running it raises what :meth:`Run.save` does, and UsageError if the current job is not
        running or the epoch is not the completed one.
        """
        return group_of(lambda: Job.current().run.save_epoch(epoch), f"save({epoch})")

    def objects(self) -> Mapping[str, Any]:
        """Return the objects fixed by :meth:`init`, by name."""
        if not self._objects:
            raise UsageError(
                "nothing to load into yet: run client.run(manager.init(nodes)) first, inside `with "
                "job:`, or a JobRunner with this manager"
            )
        return self._objects

    # --- existing checkpoints
    # --------------------------------------------------------------------------------------------

    def committed(self) -> tuple[Checkpoint, ...]:
        """Return all committed checkpoints, oldest first, without checking their files."""
        return self._store().committed()

    def epochs(self) -> tuple[int, ...]:
        """Return the epochs that have a checkpoint, in order."""
        return tuple(c.epoch for c in self.committed() if c.kind == EPOCH)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Return the newest epoch that has a checkpoint, None if there is none; or ``user_epoch``
        if that has one.

        Raises:
            CheckpointMissing: ``user_epoch`` has none; the message lists those that have.
        """
        if user_epoch is not None:
            return self.find(epoch=user_epoch).epoch
        return max(self.epochs(), default=None)

    def cp_accessible(self, epoch: int) -> bool:
        """Whether this epoch has a loadable checkpoint. Reads all of it."""
        try:
            self._store().verify(self.find(epoch=epoch))
        except CheckpointError:
            return False
        return True

    def find(self, *, epoch: int | None = None, step: int | None = None) -> Checkpoint:
        """Return a checkpoint by epoch or step, by default the newest.

        Raises:
            CheckpointMissing: there is none; the message lists the existing ones.
            UsageError: both ``epoch`` and ``step`` were given.
        """
        if epoch is not None and step is not None:
            raise UsageError(
                f"epoch={epoch} and step={step}: a checkpoint is chosen by one of them"
            )
        matching = [
            c
            for c in self.committed()
            if (epoch is None or (c.kind, c.epoch) == (EPOCH, epoch))
            and (step is None or c.step == step)
        ]
        if not matching:
            wanted = "at all" if step is None else f"of step {step}"
            wanted = wanted if epoch is None else f"of epoch {epoch}"
            steps = sorted({c.step for c in self.committed()})
            raise CheckpointMissing(
                f"there is no checkpoint {wanted} in {self.directory}; there are epochs "
                f"{_listed(self.epochs())}, and steps {_listed(steps)}"
            )
        return matching[-1]

    def load(self, epoch: int | None = None, *, step: int | None = None) -> LoadedState:
        """Load and verify a whole state, on the CPU. A client that runs it restores the job's
        objects from it: ``session.run(manager.load(3))``.

        Raises:
            CheckpointMissing, UsageError: as :meth:`find`.
            CheckpointCorrupt: one of its files has changed.
        """
        checkpoint = self.find(epoch=epoch, step=step)
        state = self._store().load(checkpoint)
        return LoadedState(state.shared, state.own, str(checkpoint.path), self.objects)

    def _store(self) -> CheckpointStore:
        """Return the store to read from. Explicit requests may read a colleague's checkpoints; a
        job that resumes trusts only its own."""
        return CheckpointStore(RunDir(self.directory).checkpoints, storage=AnyonesStorage())


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


class MultiNodeCheckpointManager(CheckpointManager):
    """As :class:`CheckpointManager`, for several nodes.

    The number of ranks may change between two attempts of a job: shared state is resharded, and the
    sample order continues where all of them together had stopped.
    """

    _takes_several_nodes = True
