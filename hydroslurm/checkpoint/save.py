"""One save, by one rank or by several: what each of them writes, and what they agree on.

    open      rank 0 has made the temporary folder, or which cannot save now, and why
    written   every rank has its part on the disk, or which have not, and why
    commit    the checkpoint is there; asked again, of those that are left, when a rank dies

An agreement has one outcome for all, so that all ranks return, or raise, the same. Between
``written`` and ``commit`` the first rank that is left does the committing: from ``written`` on, the
deaths of three ranks do not lose the checkpoint. Only the first four ranks hear what each of the
others has written: with thousands of ranks, telling everybody would be gigabytes. What is still to
be written then follows from the parts and from what was agreed, byte for byte, so that any rank can
do it, again after one that died half-way, and even beside one that is only thought to be dead: the
manifest comes into its place by a rename, and who comes second puts the same bytes there, or finds
the folder moved.

A rank that saves alone goes the same way. It has nobody to agree with, and leaves out the fsync of
the folder that the others' parts need before they are acknowledged.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hydroslurm.checkpoint import commit, folders, manifest
from hydroslurm.checkpoint.catalog import Checkpoint, as_told, read_manifest
from hydroslurm.checkpoint.frozen import with_fingerprint
from hydroslurm.checkpoint.manifest import FileEntry, Manifest
from hydroslurm.checkpoint.save_round import (
    KEPT,
    SaveRound,
    failed,
    gone,
    parsed,
    raise_failures,
    why,
)
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.checkpoint.write_plan import State, WritePlan, divide
from hydroslurm.checkpoint.writer import manifest_of, write_part
from hydroslurm.core.garbage import without_gc
from hydroslurm.errors import AgreementFailed, CheckpointError, RanksError, SaveFailed, StaleAttempt

COMMITTERS = 4
"""Ranks that can commit. When all of them die, the coordinator, which is beside rank 0, is most
likely gone as well, and nobody could agree on who goes on."""

ATTEMPTS = 3
"""At committing while others do the same."""

TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
"""What rename reports when a folder with files in it has the name."""


@dataclass(frozen=True)
class SaveRequest:
    """What is to be saved, without the state itself.

    Attributes:
        meta: plain JSON values for the manifest; with peers, rank 0's count.
        topic: of this save in the peers' agreements, used once; made of the step and the kind when
            empty, so that the same save cannot be tried twice.
        state_bytes: of all ranks. state: a saver numbers the states that it is given from 1,
            because two of one step can differ; 0 is what the run resumed from. Both are the
            saver's own.
    """

    step: int
    kind: str
    epoch: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)
    topic: str = ""
    state_bytes: int = 0
    state: int = 0


def write_checkpoint(
    store: CheckpointStore,
    state: State | WritePlan | BaseException,
    request: SaveRequest,
    *,
    cancel: threading.Event | None = None,
    written: Callable[[float], None] | None = None,
) -> Checkpoint:
    """Save; returns when the checkpoint is committed and durable.

    A step can be saved again: the new checkpoint becomes the newer one, and the old one stays.
    ``state`` must not change meanwhile. With peers, every rank calls this for the same step, and
    all of them return or raise the same.

    Args:
        state: or its write plan; or, of several ranks, why this one cannot save: the others hear
            of it.
        cancel: checked between chunks; setting it ends the save before its commit.
        written: called when this rank's part is on the disk, before the commit, with the moment
            (``time.monotonic()``) at which the ranks had begun. It must not raise.

    Raises:
        UnsavableState: nothing was written.
        SaveSkipped: a rank still saves another step; nothing was written.
        SaveAbandoned: ``cancel`` was set. Earlier checkpoints are intact.
        SaveFailed: an I/O call failed, or a rank is gone. Earlier checkpoints are intact.
        StaleAttempt: a newer attempt owns the run folder. Earlier checkpoints are intact.
    """
    step, kind = request.step, request.kind
    header = manifest.begun(
        step=step,
        epoch=request.epoch,
        kind=kind,
        meta=request.meta,
        torch_version=torch.__version__,
    )
    return _Save(store, round_of(store, request, cancel=cancel), written).write(state, header)


def round_of(
    store: CheckpointStore, request: SaveRequest, *, cancel: threading.Event | None = None
) -> SaveRound:
    """The agreements of one save."""
    topic = request.topic or f"save/{request.step}/{request.kind}"
    return SaveRound(
        store.peers, topic, step=request.step, timeout_s=store.patience_s, cancel=cancel
    )


@dataclass(frozen=True)
class _Place:
    """Where a save goes: its temporary folder, its final name, and the manifest as it was agreed on
    at the beginning, without files."""

    folder: Path
    target: Path
    header: Manifest


@dataclass(frozen=True)
class _Opened:
    """The answer of a rank that begins: the digest of its layout. Rank 0 adds the folder that it
    has made, and the manifest."""

    layout: str
    name: str = ""
    manifest: str = ""


@dataclass(frozen=True)
class _Committed:
    """The answer of the rank that has committed: the summary of the manifest."""

    manifest: str


class _Save:
    """One save, as one of its ranks sees it."""

    def __init__(
        self,
        store: CheckpointStore,
        save_round: SaveRound,
        written: Callable[[float], None] | None,
    ) -> None:
        self.store, self.storage, self.directory = store, store.storage, store.directory
        self.round = save_round
        self.rank = save_round.peers.rank
        self.written = written
        self.begun_s = time.monotonic()

    def write(self, state: State | WritePlan | BaseException, header: Manifest) -> Checkpoint:
        """Save; ``header`` is the manifest without files, of which rank 0's counts."""
        world_size = self.round.peers.world_size
        with self._failing_as_save():
            try:
                plan = state
                if isinstance(plan, BaseException):
                    raise plan
                if isinstance(plan, State):
                    plan = divide(plan, rank=self.rank, world_size=world_size)
                plan = with_fingerprint(plan)
            except BaseException as error:
                self.round.settle("open", problem=error)
                raise
            layout = "" if self.round.is_solo else plan.digest
            place = self._open(replace(header, world_size=world_size), layout)
            self.begun_s = time.monotonic()  # a rank may have waited long for the others
            with self._removing(place.folder):
                answers, mine = self._write(place.folder, plan)
            committed = self._commit(place, lambda: self._describe(place, answers, plan))
            self.store.trust(committed)
            self.store.frozen.note(committed, files=mine, fingerprint=plan.fingerprint)
            return committed

    def _open(self, header: Manifest, layout: str) -> _Place:
        """Where the checkpoint goes."""
        if self.round.is_solo:
            return self._choose(header)
        answer, folder, problem = _Opened(layout), None, None
        if self.rank == 0:
            try:
                folder = self._choose(header).folder
                answer = _Opened(layout, folder.name, header.to_json())
            except Exception as error:
                problem = error
        with self._removing(folder):
            told = self.round.settle("open", asdict(answer), problem=problem)
            answers = {rank: parsed(_Opened, one, rank=rank) for rank, one in told.items()}
            first = answers[0].layout
            other = [rank for rank, one in answers.items() if one.layout != first]
            if other:
                raise SaveFailed(
                    f"{self.round.not_saved} rank 0 holds {first}, rank {other[0]} "
                    f"{answers[other[0]].layout}. What is registered for saving must have the same "
                    "keys and shapes on all ranks"
                )
        return self._chosen_by_rank_0(answers[0])

    def _choose(self, header: Manifest) -> _Place:
        """The place under the next number of this step."""
        self.store.check_fence(f"the save of step {self.round.step}")
        target = self._next_target()
        folder = folders.temporary(target, joint=not self.round.is_solo)
        commit.make_dirs(self.directory, storage=self.storage)
        self.storage.mkdir(folder)
        return _Place(folder, target, header)

    def _next_target(self) -> Path:
        step, names = self.round.step, list[str]()
        with contextlib.suppress(FileNotFoundError):
            names = self.storage.listdir(self.directory)
        return folders.of_step(self.directory, step, folders.newest_number(names, step) + 1)

    def _chosen_by_rank_0(self, told: _Opened) -> _Place:
        """What lies in the folder is removed when the save fails: so its name must be one that only
        a save can have chosen."""
        final = folders.target_of(told.name, self.round.step)
        if final is None:
            raise SaveFailed(
                f"{self.round.not_saved} rank 0 names the folder {told.name[:80]!r}, which is none "
                f"for a save of this step in {self.directory}"
            )
        path = self.directory / told.name
        return _Place(path, path.parent / final, Manifest.from_json(told.manifest, where=path))

    def _write(
        self, folder: Path, plan: WritePlan
    ) -> tuple[Mapping[int, Any], Mapping[str, FileEntry]]:
        """Write this rank's part; what all ranks say that they have written, and this one's
        files."""
        alone = self.round.is_solo
        answer: dict[str, Any] = {}
        files: Mapping[str, FileEntry] = {}
        problem: BaseException | None = None
        try:
            mine = write_part(
                folder,
                plan,
                storage=self.storage,
                stored=self.store.frozen,
                cancel=self.round.cancel,
            )
            if not alone:
                self.storage.fsync_dir(folder)
            if self.written is not None:
                self.written(self.begun_s)
            files = mine.files
            took_s = round(time.monotonic() - self.begun_s, 6)
            answer = asdict(replace(mine, took_s=took_s))
        except BaseException as error:
            problem = self._explained(error)
        try:
            answers = self.round.settle(
                "written", answer, problem=problem, collect_at=self._committers()
            )
        except CheckpointError as error:
            if problem is None or isinstance(problem, Exception):
                raise
            raise problem from error.__cause__  # such as an interrupt, which is for this rank only
        return answers, files

    def _commit(self, place: _Place, describe: Callable[[], Manifest]) -> Checkpoint:
        """Have the checkpoint committed by the first of the ranks that are left."""
        if self.round.is_solo:
            with self._removing(place.folder):
                return self._finish(place, describe)
        left = list(range(self.round.peers.world_size))
        for attempt in range(len(left)):
            mine, answer = None, None
            if self.rank == left[0]:
                try:
                    mine = self._finish(place, describe)
                    answer = asdict(_Committed(mine.manifest.summary().to_json()))
                except Exception as error:
                    answer = failed(self._explained(error))
            try:
                answers = self.round.agree(f"commit/{attempt}", answer, among=left)
            except RanksError as error:
                lost = gone(error)
                left = [rank for rank in left if rank not in lost]
                one_knows = isinstance(error, AgreementFailed) and not error.withdrawn
                nobody_can = not left or left[0] not in self._committers()
                if not lost or not one_knows or self.rank not in left or nobody_can:
                    raise SaveFailed(
                        f"all ranks have written step {self.round.step}, but whether it was "
                        f"committed is not known here: {why(error)}. {KEPT}"
                    ) from error
                continue
            with self._removing(place.folder):
                raise_failures(answers, self.round.not_saved)
            told = parsed(_Committed, answers[left[0]], rank=left[0])
            return mine or as_told(told.manifest, place.target)
        raise AssertionError("this rank is left at least")

    def _finish(self, place: _Place, describe: Callable[[], Manifest]) -> Checkpoint:
        """Commit, unless another rank has done that.

        Args:
            describe: writes what is still missing into the folder, the manifest last.

        Raises:
            OSError: a call failed. CheckpointCorrupt: a part is not what its rank has acknowledged.
        """
        for attempt in range(ATTEMPTS):
            there = None if self.round.is_solo else self._committed(place)
            try:
                if there is None:
                    there = describe()
                    self.store.check_fence(f"the save of step {self.round.step}")
                    self.storage.rename(place.folder, place.target)
                break
            except OSError as error:
                if attempt == ATTEMPTS - 1:
                    raise
                if error.errno in TAKEN and self.round.is_solo:
                    place = replace(place, target=self._next_target())
                elif not isinstance(error, FileNotFoundError):
                    raise  # else somebody has moved the folder, or took our draft away
        assert there is not None
        # who renamed it may have been killed before its last call
        self.storage.fsync_dir(self.directory)
        return Checkpoint(place.target, there)

    def _committed(self, place: _Place) -> Manifest | None:
        """The manifest of this very save under the final name, committed by another rank."""
        try:
            found = read_manifest(place.target, storage=self.storage)
        except CheckpointError:
            return None
        is_ours = found.created_epoch_ns == place.header.created_epoch_ns
        return found if is_ours else None

    def _describe(self, place: _Place, answers: Mapping[int, Any], plan: WritePlan) -> Manifest:
        """Write the manifest into the folder, from what the ranks say that they have written."""
        commit.remove_drafts(place.folder, storage=self.storage)
        with without_gc():  # in a training it stops all threads for a fifth of a second
            described = manifest_of(answers, place.header, whole_tally=plan.whole_tally)
        data, rank = described.to_json().encode(), self.rank
        commit.put(place.folder, manifest.NAME, data, rank=rank, storage=self.storage)
        return described

    def _committers(self) -> range:
        return range(min(COMMITTERS, self.round.peers.world_size))

    def _explained(self, error: BaseException) -> BaseException:
        """An I/O error may be that a newer attempt has taken the folder away."""
        if isinstance(error, OSError):
            with contextlib.suppress(OSError):
                try:
                    self.store.check_fence(f"the save of step {self.round.step}")
                except StaleAttempt as stale:
                    return stale
        return error

    @contextlib.contextmanager
    def _failing_as_save(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            explained = self._explained(error)
            if explained is error:
                where = f" ({error.filename})" if error.filename else ""
                explained = SaveFailed(
                    f"step {self.round.step} could not be saved to {self.directory}: "
                    f"{error.strerror or error}{where}. {KEPT}"
                )
            raise explained from error

    @contextlib.contextmanager
    def _removing(self, folder: Path | None) -> Iterator[None]:
        """Remove the folder when nothing comes of it, by agreement of all ranks. All of them do:
        the last one that was still writing into it leaves nothing behind.

        Not when this rank has lost the others: they may be about to commit it.
        """
        try:
            yield
        except BaseException as error:
            decided = isinstance(error, (CheckpointError, StaleAttempt)) and (
                not isinstance(error.__cause__, RanksError)
                or isinstance(error.__cause__, AgreementFailed)
            )
            if folder is not None and (decided or self.round.is_solo):
                with contextlib.suppress(OSError):
                    commit.remove_tree(folder, storage=self.storage)
            raise
