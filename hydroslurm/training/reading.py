"""What a run's checkpoints are and hold, for anybody who asks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint.catalog import EPOCH
from hydroslurm.checkpoint.newest import Found
from hydroslurm.checkpoint.reader import tensors_of
from hydroslurm.checkpoint.storage import AnyonesStorage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import CheckpointError, CheckpointMissing, UsageError
from hydroslurm.training.objects import Objects


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that is not loaded: its shape, and its type as torch writes it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class LoadedState(State):
    """A state that was read. Called, as a client does, it gives these objects theirs from it.

    Attributes:
        source: the checkpoint, for messages.
        objects: of whom, asked when it is called.
    """

    source: str
    objects: Callable[[], Mapping[str, Any]]

    def __call__(self) -> None:
        wanted = Objects()
        for name, thing in self.objects().items():
            wanted.add(name, thing)
        wanted.load(self.shared, source=self.source)


@dataclass(frozen=True)
class Metadata:
    """What a checkpoint holds, without its tensors.

    Attributes:
        names: of the objects.
        tensors: key -> shape and type. Keys are as in ``shared/model.fc.weight``, or begin with the
            rank whose own they are.
    """

    checkpoint: Checkpoint
    names: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def epoch(self) -> int:
        """Epochs that were done."""
        return self.checkpoint.epoch


class CheckpointReader:
    """The checkpoints of one run, to be looked at and read."""

    @property
    def directory(self) -> Path:
        """Of the run."""
        raise NotImplementedError

    def objects(self) -> Mapping[str, Any]:
        """Those that get their state from one that a client runs."""
        raise NotImplementedError

    # --- which there are
    # --------------------------------------------------------------------------------------------

    def committed(self) -> tuple[Checkpoint, ...]:
        """All that are there, oldest first. Whether their files are good is not looked at."""
        return self._store().committed()

    def epochs(self) -> tuple[int, ...]:
        """The epochs that have a checkpoint, in order."""
        return tuple(one.epoch for one in self.committed() if one.kind == EPOCH)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The newest epoch that has a checkpoint, None when there is none; or ``user_epoch``, when
        that one has.

        Raises:
            CheckpointMissing: ``user_epoch`` has none; says which have.
        """
        if user_epoch is not None:
            return self.find(epoch=user_epoch).checkpoint.epoch
        return max(self.epochs(), default=None)

    def cp_accessible(self, epoch: int) -> bool:
        """Whether there is a checkpoint of this epoch that can be loaded. Reads all of it."""
        try:
            found = self.find(epoch=epoch)
            found.store.verify(found.checkpoint)
        except CheckpointError:
            return False
        return True

    def find(self, *, epoch: int | None = None, step: int | None = None) -> Found:
        """A checkpoint, and the store that loads it.

        Raises:
            CheckpointMissing: there is none; says which there are.
            UsageError: both ``epoch`` and ``step`` were given.
        """
        if epoch is not None and step is not None:
            raise UsageError(
                f"epoch={epoch} and step={step}: a checkpoint is chosen by one of them"
            )
        store = self._store()
        found = [
            one
            for one in store.committed()
            if (epoch is None or (one.kind, one.epoch) == (EPOCH, epoch))
            and (step is None or one.step == step)
        ]
        if not found:
            raise CheckpointMissing(self._missing(epoch, step))
        return Found(store, found[-1])

    # --- what is in them
    # --------------------------------------------------------------------------------------------

    def metadata(self, *, epoch: int | None = None, step: int | None = None) -> Metadata:
        """What a checkpoint holds; reads the small files of it, and no tensor.

        Raises:
            CheckpointMissing, UsageError: as :meth:`find`.
            CheckpointCorrupt: one of them is not what was written.
        """
        found = self.find(epoch=epoch, step=step)
        files = found.store.files_of(found.checkpoint)
        tensors = {
            key: TensorInfo(shape, str(dtype)) for key, (shape, dtype) in tensors_of(files).items()
        }
        return Metadata(found.checkpoint, tuple(files.shared().state), tensors)

    def names(self, *, epoch: int | None = None, step: int | None = None) -> tuple[str, ...]:
        """The objects whose state is in a checkpoint. What a job will save: ``job.names()``."""
        return self.metadata(epoch=epoch, step=step).names

    def load(self, epoch: int | None = None, *, step: int | None = None) -> LoadedState:
        """A whole state, verified, on the CPU. A client that runs it gives the objects of the job
        their state from it: ``session.run(manager.load(3))``.

        Raises:
            CheckpointMissing, UsageError: as :meth:`find`.
            CheckpointCorrupt: a file of it is not what was written.
        """
        found = self.find(epoch=epoch, step=step)
        state = found.store.load(found.checkpoint)
        return LoadedState(state.shared, state.own, str(found.checkpoint.path), self.objects)

    def load_partial(
        self, names: Collection[str], *, epoch: int | None = None, step: int | None = None
    ) -> dict[str, Any]:
        """Name -> state_dict of some objects; the tensors of the others are not read into memory.

        Raises:
            CheckpointMissing: no such checkpoint, or no such name in it; says what there is.
            CheckpointCorrupt: a file of it is not what was written.
        """
        found = self.find(epoch=epoch, step=step)
        state = found.store.load(found.checkpoint, only=names)
        return {**state.own, **state.shared}

    def load_into(
        self, objects: Mapping[str, Any], *, epoch: int | None = None, step: int | None = None
    ) -> Checkpoint:
        """Give some objects, by name, the state that they have in a checkpoint; returns which.

        Raises:
            StateMismatch: one does not fit; names the keys.
            CheckpointMissing, CheckpointCorrupt: as :meth:`load_partial`.
        """
        found = self.find(epoch=epoch, step=step)
        state = found.store.load(found.checkpoint, only=tuple(objects))
        wanted = Objects()
        for name, thing in objects.items():
            wanted.add(name, thing)
        wanted.load(state.shared, source=str(found.checkpoint.path))
        return found.checkpoint

    def _store(self) -> CheckpointStore:
        """To read from: whoever asks for a checkpoint means it, also when it is a colleague's. A
        job that resumes believes its own only."""
        require_one_store(self.directory)
        return CheckpointStore(RunDir(self.directory).checkpoints, storage=AnyonesStorage())

    def _missing(self, epoch: int | None, step: int | None) -> str:
        wanted = "at all" if step is None else f"of step {step}"
        wanted = wanted if epoch is None else f"of epoch {epoch}"
        steps = sorted({one.step for one in self.committed()})
        return (
            f"there is no checkpoint {wanted} in {self.directory}; there are epochs "
            f"{_listed(self.epochs())}, and steps {_listed(steps)}"
        )


def require_one_store(directory: Path) -> None:
    """Refuse a run folder in which an older version has kept epochs apart.

    Raises:
        CheckpointError: there are such epochs.
    """
    old = directory / "epochs"
    if any(old.glob("step-*")):
        raise CheckpointError(
            f"{old} holds epochs of an older version of hydroslurm, which this one does not read: "
            f"it keeps them in {RunDir(directory).checkpoints}. Give another directory, or move "
            "that folder away"
        )


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
