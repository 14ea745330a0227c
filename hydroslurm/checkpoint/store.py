"""The checkpoints of a run: list, verify, load, prune, and find the newest good one."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.checksummed_file import check_file, require_size
from hydroslurm.checkpoint.deadline import TimedSyncs
from hydroslurm.checkpoint.frozen import FrozenFiles
from hydroslurm.checkpoint.manifest import (
    EPOCH,
    Checkpoint,
    Problem,
    as_told,
    read_again,
    read_manifest,
)
from hydroslurm.checkpoint.peers import PATIENCE_S, SOLO, Peers, parsed
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.write_plan import State
from hydroslurm.core.fence import Fence
from hydroslurm.core.garbage import without_gc
from hydroslurm.errors import CheckpointCorrupt, CheckpointError, SaveFailed, UsageError

if TYPE_CHECKING:
    from hydroslurm.checkpoint.reader import CheckpointFiles

__all__ = ["Checkpoint", "CheckpointStore", "Retention", "State", "newest_good"]


STOP = "stop"
"""The kind of checkpoint that retention counts apart: periodic saves that follow a preemption must
not push out the emergency one at once, nor a series of preemptions all the periodic ones."""

LEAST_KEPT = 2
"""One to load, and one to fall back to."""

_REMEMBERED = 64
"""Checkpoints that need not be verified again: more than are asked for, and not all of a job's."""


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay, at least two of all.

    Attributes:
        keep: of all other kinds. keep_stop: of kind "stop".
        keep_epochs: of kind "epoch"; None: all of them.

    Raises:
        UsageError: such numbers cannot be kept.
    """

    keep: int = 2
    keep_stop: int = 2
    keep_epochs: int | None = None

    def __post_init__(self) -> None:
        if self.keep < 1 or self.keep_stop < 0 or self.keep_epochs == 0:
            raise UsageError(
                f"{self}: wanted keep >= 1, keep_stop >= 0, and keep_epochs >= 1, or None for all"
            )

    def beyond(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints to remove, oldest first like ``checkpoints`` itself."""
        epochs = len(checkpoints) if self.keep_epochs is None else self.keep_epochs
        left = {STOP: self.keep_stop, EPOCH: epochs, "": self.keep}
        rest = list[Checkpoint]()
        for one in reversed(checkpoints):
            kind = one.kind if one.kind in left else ""
            left[kind] -= 1
            if left[kind] < 0:
                rest.append(one)
        spared = max(0, LEAST_KEPT - (len(checkpoints) - len(rest)))
        return rest[spared:][::-1]


class CheckpointStore:
    """One folder of checkpoints. Any number of processes may use a folder at the same time, even
    for the same step. So may the threads of one: around a stop, a save that was given up may still
    be writing beside the next one. Loading is for one thread at a time.

    Attributes:
        peers: the ranks that save together; ``SOLO`` for one that saves alone.
        patience_s: how long a save waits for the peers at each agreement.
        frozen: the files of what is frozen. It wants to be told of a checkpoint of this folder that
            is older than any that is written from now on (``note``).
        syncs: how long the disk takes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        storage: Storage | None = None,
        peers: Peers | None = None,
        fence: Fence | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Touches no disk; the first save makes the folder.

        Args:
            peers: the ranks that save together, into a folder that all of them see; None: alone.
            fence: of the run that the folder belongs to; a newer attempt of the run ends all
                writing.
        """
        self.directory = directory
        self.syncs = TimedSyncs(Storage() if storage is None else storage)
        self.storage = cast("Storage", self.syncs)
        self.peers = SOLO if peers is None or peers.world_size == 1 else peers
        self._fence = fence
        self.patience_s = patience_s
        self.frozen = FrozenFiles(self.peers.rank, self.storage)
        self._held: dict[Path, Path] | None = None
        self._good = deque[tuple[Path, int]](maxlen=_REMEMBERED)

    def look(self) -> list[Checkpoint | Problem]:
        """Everything named like a checkpoint, oldest first. Reads manifests only.

        Raises:
            CheckpointError: the folder cannot be listed; one that does not exist is empty.
        """
        try:
            names = self.storage.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be listed: {error.strerror}") from error
        found = list[Checkpoint | Problem]()
        for key, name in sorted((key, name) for name in names if (key := folders.key_of(name))):
            path = self.directory / name
            try:
                read = read_manifest(path, storage=self.storage)
                if read.step != key[0]:
                    raise CheckpointCorrupt(f"{path} holds step {read.step}: it was renamed")
                found.append(Checkpoint(path, read))
            except CheckpointError as error:
                found.append(Problem(path, key, error))
        return found

    def committed(self) -> tuple[Checkpoint, ...]:
        """All committed checkpoints, oldest first. Reads manifests only."""
        return tuple(one for one in self.look() if isinstance(one, Checkpoint))

    def problems(self) -> Mapping[Path, CheckpointError]:
        """Folders named like a checkpoint whose manifest cannot be read."""
        return {one.path: one.error for one in self.look() if isinstance(one, Problem)}

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Nobody's retention removes what is pinned or verified within this context before its end:
        for the time between choosing a checkpoint and having loaded it."""
        if self._held is not None:  # within another one, which lasts longer
            yield
            return
        self._held = {}
        try:
            yield
        finally:
            held, self._held = self._held, None
            for pin in held.values():
                with suppress(OSError):
                    self.storage.rmdir(pin)

    def pin(self, path: Path) -> None:
        """Keep a checkpoint until the end of :meth:`holding`; outside of that context this does
        nothing. A process that may only read the folder cannot pin, and takes the chance."""
        if self._held is None or path in self._held or folders.key_of(path.name) is None:
            return
        pin = folders.pin(path)
        with suppress(OSError):
            self.storage.mkdir(pin)
            self._held[path] = pin

    def verify(self, checkpoint: Checkpoint) -> None:
        """Find out whether it can be loaded: compare the sizes of all files, read what describes
        the state as a load does, then read the rest.

        Raises:
            CheckpointCorrupt: names the first file that is not what was written, or says what
                cannot be put together.
            CheckpointTooNew: a newer release has meanwhile replaced its manifest.
        """
        self.pin(checkpoint.path)
        with suppress(ValueError):
            self._good.remove(_key(checkpoint))
        files = self.files_of(checkpoint)
        entries = sorted(files.entries.items())
        for name, entry in entries:
            require_size(checkpoint.path / name, entry, storage=self.storage)
        files.check()
        for name, entry in entries:
            check_file(checkpoint.path / name, entry, storage=self.storage)
        self.trust(checkpoint)

    def check_sizes(self, checkpoint: Checkpoint) -> None:
        """Compare the sizes of its files only.

        Raises:
            CheckpointCorrupt: names the first file that is missing or has another size.
            CheckpointError: someone else may have written one.
        """
        for name, entry in checkpoint.manifest.files.items():
            require_size(checkpoint.path / name, entry, storage=self.storage)

    def trust(self, checkpoint: Checkpoint) -> None:
        """Remember a checkpoint that was just written, or found by all ranks, as good."""
        if _key(checkpoint) not in self._good:
            self._good.append(_key(checkpoint))

    def is_good(self, checkpoint: Checkpoint) -> bool:
        """Whether it verifies. What this process has written or verified is not read again: a stop
        waits for this."""
        if _key(checkpoint) in self._good:
            return True
        try:
            self.verify(checkpoint)
        except CheckpointError:
            return False
        return True

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        only: Collection[str] | None = None,
        like: Mapping[str, Any] | None = None,
    ) -> State:
        """Read a state, and compare what is read with what was written; its tensors are on the CPU
        and belong to the caller.

        It may have been saved by another number of ranks. Its ``own`` is what the same rank saved;
        empty for a rank that had no part in the save.

        Args:
            only: names of ``shared`` and ``own`` to read; all of them when None.
            like: name -> a tree whose DTensors say how tensors are laid out over today's ranks
                (see ``tree.tensor_keys``). The other tensors come back whole.

        Raises:
            CheckpointCorrupt: a file is not what was written.
            CheckpointError: someone else may have written one.
            CheckpointMissing: a name in ``only`` was not saved; says what was.
        """
        with self.holding(), without_gc():
            self.pin(checkpoint.path)
            return self.files_of(checkpoint).state(rank=self.peers.rank, only=only, like=like)

    def load_own(self, checkpoint: Checkpoint, rank: int) -> Mapping[str, Any]:
        """The ``own`` of any rank that took part in the save.

        Raises:
            CheckpointMissing: no such rank took part in the save.
            CheckpointCorrupt, CheckpointError: as :meth:`load`.
        """
        return self.files_of(checkpoint).own(rank=rank)

    def files_of(self, checkpoint: Checkpoint) -> CheckpointFiles:
        """The files of a checkpoint, to be read and verified one by one.

        Raises:
            CheckpointCorrupt: it is gone or is another one.
            CheckpointError: someone else may have written it.
        """
        from hydroslurm.checkpoint.reader import CheckpointFiles  # a new run reads none

        files = read_again(checkpoint, storage=self.storage).files
        return CheckpointFiles(checkpoint.path, files, storage=self.storage)

    def revoke_others(self) -> None:
        """End all saves of other processes (see ``folders.revoke``). For an attempt that has
        claimed the run folder.

        Raises:
            SaveFailed: one of their folders cannot be removed.
        """
        try:
            folders.revoke(self.directory, storage=self.storage)
        except OSError as error:
            raise SaveFailed(
                f"unfinished saves of an earlier attempt in {self.directory} cannot be removed: "
                f"{error.strerror or error}. They may be written to still"
            ) from error

    def prune(self, retention: Retention) -> tuple[Path, ...]:
        """Remove older checkpoints and what killed saves left. Call it after a commit. The newest
        good one always stays. A failure is a RuntimeWarning.

        Returns:
            The checkpoints that were removed. With peers, only rank 0 removes any.
        """
        if self.peers.rank != 0:
            return ()
        removed: list[Path] = []
        what = f"removing old checkpoints of {self.directory}"
        try:
            there = self.committed()
            newest_good = next((one for one in reversed(there) if self.is_good(one)), None)
            for one in () if newest_good is None else retention.beyond(there):
                self.check_fence(what)
                if one != newest_good and not self._is_pinned(one):
                    folders.remove(one.path, storage=self.storage)
                    removed.append(one.path)
            self.check_fence(what)
            folders.remove_leftovers(self.directory, storage=self.storage)
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"hydroslurm: old checkpoints in {self.directory} could not be removed ({error}); "
                "new ones are not affected, but the disk will fill up",
                RuntimeWarning,
                stacklevel=2,
            )
        return tuple(removed)

    def _is_pinned(self, checkpoint: Checkpoint) -> bool:
        """Whether somebody is loading it. A pin of a dead process is a leftover."""
        now_epoch_s = time.time()
        for name in self.storage.listdir(self.directory):
            if folders.pinned(name) == checkpoint.path.name:
                with suppress(FileNotFoundError):  # loaded just now
                    if not folders.is_leftover(self.directory / name, now_epoch_s=now_epoch_s):
                        return True
        return False

    def check_fence(self, what: str) -> None:
        """Raise StaleAttempt if a newer attempt owns the run: ``what`` must not be done."""
        if self._fence is not None:
            self._fence.check(what)


def _key(checkpoint: Checkpoint) -> tuple[Path, int]:
    return checkpoint.path, checkpoint.manifest.created_epoch_ns


Load = Callable[[Checkpoint], object]
"""Loads a candidate, which verifies what this rank needs of it. It raises CheckpointError or
OSError for one that cannot be used."""


def newest_good(
    store: CheckpointStore,
    *,
    topic: str = "newest",
    load: Load | None = None,
) -> Checkpoint | None:
    """The newest committed checkpoint that is good, the same on all ranks; None when there is none
    at all.

    What is newer and cannot be used costs one RuntimeWarning, on rank 0, that says why and names
    what is used instead.

    With several ranks every one calls it. Rank 0 proposes, each loads what it needs or, without
    ``load``, verifies all files, and a candidate that one rank rejects is rejected by
    all.

    Args:
        store: of all ranks, with its peers.
        topic: begins those of the ranks' agreements; used once per job.
        load: keeps what it has loaded last for the caller; nothing of it may be used before this
            function has returned.

    Raises:
        CheckpointCorrupt: there are some, and none is good: starting over must be a decision.
        CheckpointError: the store cannot be listed.
        AgreementFailed, CoordinatorLost: a rank is gone.
    """
    rejected: dict[Path, str] = {}  # what cannot be used, and why
    for turn in itertools.count():
        checkpoint = _proposed(store, f"{topic}/{turn}", rejected)
        if checkpoint is None:
            return None
        complaint = None
        try:
            if load is None:
                store.verify(checkpoint)
            else:
                load(checkpoint)
        except (CheckpointError, OSError) as error:
            complaint = str(error)
        bad = complaint
        if store.peers.world_size > 1:
            verdicts = store.peers.agree(f"{topic}/{turn}/verdict", complaint).items()
            bad = "; ".join(f"rank {rank}: {why}" for rank, why in verdicts if why is not None)
        if bad:
            rejected[checkpoint.path] = bad
            continue
        store.trust(checkpoint)
        if rejected and store.peers.rank == 0:
            warnings.warn(
                f"hydroslurm cannot use {', '.join(_reasons(rejected))}; the run continues from "
                f"{checkpoint.path}",
                RuntimeWarning,
                stacklevel=2,
            )
        return checkpoint
    raise AssertionError("the candidates come to an end")


@dataclass(frozen=True)
class _Proposal:
    """Rank 0's: a checkpoint by its name and the summary of its manifest, or why there is none."""

    name: str = ""
    manifest: str = ""
    rejected: tuple[str, ...] = ()
    failed: str = ""


def _proposed(store: CheckpointStore, topic: str, rejected: dict[Path, str]) -> Checkpoint | None:
    """The next candidate of rank 0, on all ranks; None when there is nothing at all."""
    mine, proposal = None, _Proposal()
    if store.peers.rank == 0:
        try:
            mine = _next(store, rejected)
        except (CheckpointError, OSError) as error:
            proposal = _Proposal(failed=str(error))
        else:
            proposal = _Proposal(rejected=_reasons(rejected))
            if mine is not None:
                proposal = _Proposal(mine.path.name, mine.manifest.summary().to_json())
    told = parsed(_Proposal, store.peers.agree(topic, asdict(proposal))[0], rank=0)
    if told.failed:
        raise CheckpointError(told.failed)
    if mine is not None:
        return mine
    if told.name:
        if folders.key_of(told.name) is None:
            raise CheckpointError(
                f"rank 0 names {told.name[:80]!r}, which is no checkpoint's name; expected one "
                f"such as step-000000084, in {store.directory}"
            )
        return as_told(told.manifest, store.directory / told.name)
    if told.rejected:
        raise CheckpointCorrupt(
            f"no checkpoint of this run can be loaded: {', '.join(told.rejected)}. Remove the "
            "folders to start from the beginning"
        )
    return None


def _next(store: CheckpointStore, rejected: dict[Path, str]) -> Checkpoint | None:
    """The newest one that is not rejected, kept from retention; None if there is none. What another
    process has removed meanwhile was followed by something newer, and is forgotten."""
    while True:
        found = store.look()
        for gone in rejected.keys() - {one.path for one in found}:
            del rejected[gone]
        left = (one for one in reversed(found) if one.path not in rejected)
        newest = next(left, None)
        if not isinstance(newest, Problem):
            if newest is not None:
                store.pin(newest.path)
            return newest
        rejected[newest.path] = str(newest.error)  # if it is still there


def _reasons(rejected: Mapping[Path, str]) -> tuple[str, ...]:
    return tuple(f"{path} ({why})" for path, why in rejected.items())
