"""``CheckpointManager``: where a job's checkpoints are, and what is in them.

<directory>/checkpoints/           of the Run: periodic ones and those of stops, few of them
<directory>/epochs/                one per epoch, 0 is the one after ``init``; all of them stay
<directory>/from-epoch-000000003/  the same again, of a job that went back to epoch 3

The two kinds have folders of their own because a step can have one of each: the periodic save
behind the last step of an epoch still belongs within it, and resumes there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hydroslurm import jobfolder
from hydroslurm.checkpoint.contents import SHARED_JSON
from hydroslurm.checkpoint.parts import check_file
from hydroslurm.checkpoint.peers import Peers
from hydroslurm.checkpoint.reader import read_metadata
from hydroslurm.checkpoint.storage import AnyonesStorage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State
from hydroslurm.checkpoint.tiers import Found, Tier
from hydroslurm.checkpoint.writer import METADATA
from hydroslurm.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, UsageError
from hydroslurm.fence import Fence
from hydroslurm.rundir import RunDir
from hydroslurm.session.lives import Limits
from hydroslurm.session.objects import Objects

if TYPE_CHECKING:
    from hydroslurm.session.run import Run


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that is not loaded: its shape, and its type as torch writes it."""

    shape: tuple[int, ...]
    dtype: str


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


class CheckpointManager:
    """The checkpoints of one run: how a JobRunner makes them, and how anybody reads them.

    Touches no disk before it is asked for something, and can be pickled. Where a checkpoint has to
    be chosen, it is by ``epoch``, the one made after so many epochs (0: after ``init``), or by
    ``step``, of any kind; the newest when neither is given.

    Args:
        directory: of the run, on a file system that all nodes share, or a Run; default: the run
            folder of the job in which it is used.
        keep: how many epochs stay; all of them when None.
        every_steps, every_s, fast_directory, limits: as of :class:`hydroslurm.Run`.
        on_save_error: ``warn`` goes on when the checkpoint of an epoch cannot be written, ``fail``
            raises SaveFailed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Run | None = None,
        *,
        keep: int | None = None,
        every_steps: int | None = None,
        every_s: float | None = None,
        fast_directory: str | os.PathLike[str] | None = None,
        on_save_error: Literal["warn", "fail"] = "warn",
        limits: Limits | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep}: wanted 1 or more epochs, or None for all")
        if on_save_error not in ("warn", "fail"):
            raise UsageError(f'on_save_error={on_save_error!r}: wanted "warn" or "fail"')
        self._root = _root_of(directory)
        self.keep = keep
        self.every_steps = every_steps
        self.every_s = every_s
        self.fast_directory = None if fast_directory is None else Path(fast_directory).absolute()
        self.on_save_error: Literal["warn", "fail"] = on_save_error
        self.limits = limits

    @property
    def directory(self) -> Path:
        """Of the run.

        Raises:
            UsageError: none was given, and this is no Slurm job.
        """
        if self._root is not None:
            return self._root
        found = jobfolder.from_environment(os.environ)
        if found is None:
            raise UsageError(
                "this process is in no Slurm job, so that there is no run folder; give one: "
                'CheckpointManager("runs/my-run")'
            )
        return found.root.absolute()

    def branch(self, epoch: int) -> CheckpointManager:
        """The manager of a job that went back to an epoch of this one, in a folder of its own."""
        root = RunDir(self.directory).from_epoch(epoch).root
        fast = None if self.fast_directory is None else self.fast_directory / root.name
        return type(self)(
            root,
            keep=self.keep,
            every_steps=self.every_steps,
            every_s=self.every_s,
            fast_directory=fast,
            on_save_error=self.on_save_error,
            limits=self.limits,
        )

    # --- which there are
    # --------------------------------------------------------------------------------------------

    def epoch_store(
        self, *, peers: Peers | None = None, fence: Fence | None = None
    ) -> CheckpointStore:
        """The checkpoints that were made after epochs; with peers and a fence, to make more."""
        return CheckpointStore(RunDir(self.directory).epochs, peers=peers, fence=fence)

    def step_store(self) -> CheckpointStore:
        """The Run's own."""
        return CheckpointStore(RunDir(self.directory).checkpoints)

    def committed(self) -> tuple[Checkpoint, ...]:
        """All that are there, oldest first. Whether their files are good is not looked at."""
        found = [one for store in self._all_stores() for one in store.committed()]
        return tuple(sorted(found, key=age))

    def epochs(self) -> tuple[int, ...]:
        """The epochs that have a checkpoint, in order."""
        return tuple(one.epoch for one in self._all_stores()[1].committed())

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
        stores = self._all_stores()[1 if epoch is not None else 0 :]
        found = [
            Found(Tier.DURABLE, store, one)
            for store in stores
            for one in store.committed()
            if (epoch is None or one.epoch == epoch) and (step is None or one.step == step)
        ]
        if not found:
            raise CheckpointMissing(self._missing(epoch, step))
        return max(found, key=lambda one: age(one.checkpoint))

    # --- what is in them
    # --------------------------------------------------------------------------------------------

    def metadata(self, *, epoch: int | None = None, step: int | None = None) -> Metadata:
        """What a checkpoint holds; reads two small files of it, and no tensor.

        Raises:
            CheckpointMissing, UsageError: as :meth:`find`.
            CheckpointCorrupt: one of the two is not what was written.
        """
        one = self.find(epoch=epoch, step=step).checkpoint
        storage = AnyonesStorage()
        for name in (SHARED_JSON, METADATA):
            if name not in one.manifest.files:
                raise CheckpointCorrupt(f"{one.path} has no {name}")
            check_file(one.path / name, one.manifest.files[name], storage=storage)
        index = read_metadata(one.path, storage=storage).state_dict_metadata
        tensors = {
            key: TensorInfo(tuple(found.size), str(found.properties.dtype))
            for key, found in index.items()
            if isinstance(found, TensorStorageMetadata)
        }
        return Metadata(one, tuple(json.loads((one.path / SHARED_JSON).read_text())), tensors)

    def names(self, *, epoch: int | None = None, step: int | None = None) -> tuple[str, ...]:
        """The objects whose state is in a checkpoint. What a job will save: ``job.names()``."""
        return self.metadata(epoch=epoch, step=step).names

    def load(self, *, epoch: int | None = None, step: int | None = None) -> State:
        """A whole state, verified, on the CPU.

        Raises:
            CheckpointMissing, UsageError: as :meth:`find`.
            CheckpointCorrupt: a file of it is not what was written.
        """
        found = self.find(epoch=epoch, step=step)
        return found.store.load(found.checkpoint)

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

    def _all_stores(self) -> tuple[CheckpointStore, CheckpointStore]:
        """Of steps and of epochs, to read from: whoever asks for one means it, also when it is a
        colleague's. A job that resumes believes its own only: :meth:`epoch_store`."""
        run = RunDir(self.directory)
        steps, epochs = (
            CheckpointStore(folder, storage=AnyonesStorage())
            for folder in (run.checkpoints, run.epochs)
        )
        return steps, epochs

    def _missing(self, epoch: int | None, step: int | None) -> str:
        wanted = "at all" if step is None else f"of step {step}"
        wanted = wanted if epoch is None else f"of epoch {epoch}"
        steps = sorted({one.step for one in self.committed()})
        return (
            f"there is no checkpoint {wanted} in {self.directory}; there are epochs "
            f"{_listed(self.epochs())}, and steps {_listed(steps)}"
        )


def age(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Orders the checkpoints of a run. Of the same step in the same epoch, either one is a state to
    go on from; the later one has more behind it."""
    found = checkpoint.manifest
    return found.step, found.epoch, found.created_epoch_ns


def _root_of(directory: Any) -> Path | None:
    if directory is None:
        return None
    if isinstance(found := getattr(directory, "dir", None), RunDir):
        return found.root.absolute()
    return Path(directory).absolute()


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
