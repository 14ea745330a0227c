"""One save by several ranks: three agreements, and what each of them decides.

    open      rank 0 has made the temporary folder, or there is a good checkpoint that will do
    written   every rank has its part on the disk, or which have not, and why
    commit    the checkpoint is there; asked again, of those that are left, when a rank dies

An agreement has one outcome for all, so that all ranks return, or raise, the same. Between
``written`` and ``commit`` the first rank that is left does the committing: from ``written`` on, no
single death loses the checkpoint. What is still to be written then follows from the parts and from
what was agreed, byte for byte, so that any rank can do it, again after one that died half-way, and
even beside one that is only thought to be dead: every file comes into its place by a rename, and
who comes second puts the same bytes there, or finds the folder moved.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint import commit, folders, manifest
from hydroslurm.checkpoint.catalog import Checkpoint, read_manifest
from hydroslurm.checkpoint.checking import Checker
from hydroslurm.checkpoint.checksummed_file import compare, hashing, read_whole, write_whole
from hydroslurm.checkpoint.manifest import FileEntry, Manifest
from hydroslurm.checkpoint.save_round import (
    KEPT,
    SaveRound,
    checked,
    failed,
    gone,
    raise_failures,
    why,
)
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.write_plan import State, WritePlan, plan_of
from hydroslurm.checkpoint.writer import (
    METADATA,
    PartIndex,
    metadata_of,
    part_json,
    pickled,
    write_index,
    write_part,
)
from hydroslurm.errors import AgreementFailed, CheckpointError, RanksError, SaveFailed, StaleAttempt

DRAFT = ".tmp"
"""Ends the names of files that are not in their place yet."""


@dataclass(frozen=True)
class Acknowledged:
    """A joint save of which every rank's part is on the disk.

    Attributes:
        folder: its temporary folder. target: its final name.
        header: the manifest as it was agreed at the beginning, without files.
        indexes: rank -> the entry of its part's index.
        save_s: how long the slowest rank took.
    """

    folder: Path
    target: Path
    header: Manifest
    indexes: Mapping[int, FileEntry]
    save_s: float


class JointSave:
    """One save, as one of its ranks sees it."""

    def __init__(
        self,
        directory: Path,
        save_round: SaveRound,
        *,
        storage: Storage,
        checker: Checker,
        chunk_bytes: int,
        may_commit: Callable[[], None],
        written: Callable[[], None] | None = None,
        again: bool = False,
    ) -> None:
        self._directory = directory
        self._round = save_round
        self._storage = storage
        self._checker = checker
        self._chunk_bytes = chunk_bytes
        self._may_commit = may_commit
        self._written = written
        self._rank = save_round.peers.rank
        self._again = again

    def run(self, state: State | WritePlan, header: Manifest) -> Checkpoint:
        """Save; the committed checkpoint, or one of this step that was there before, where that
        will do.

        Args:
            header: the manifest without files; rank 0's is the one that counts.

        Raises:
            SaveFailed, SaveAbandoned, UnsavableState: on all ranks.
        """
        begun_s = time.monotonic()
        world_size = self._round.peers.world_size
        try:
            plan = plan_of(state, rank=self._rank, world_size=world_size)
        except Exception as error:
            self._round.agree_before_commit("open", failed(error))
            raise
        opened = self._open(plan, replace(header, world_size=world_size))
        if isinstance(opened.get("there"), str):
            return self._there(opened)
        folder, target, header = self._opened(opened)
        with self._removing(folder):
            answers = self._write(folder, plan, begun_s=begun_s)
        acknowledged = Acknowledged(
            folder=folder,
            target=target,
            header=header,
            indexes={rank: _index_of(rank, one) for rank, one in answers.items()},
            save_s=max(one["took_s"] for one in answers.values()),
        )
        return self._checkpoint(target, self._commit(acknowledged))

    def _open(self, plan: WritePlan, header: Manifest) -> Mapping[str, Any]:
        answer: dict[str, Any] = {"layout": plan.layout}
        folder = None
        if self._rank == 0:
            try:
                self._may_commit()
                target, found = self._checker.place_for(
                    self._directory, self._round.step, again=self._again, kind=header.kind
                )
                if found is None:
                    folder = folders.joint_temporary(target)
                    answer |= self._propose(folder, header)
                else:
                    answer |= self._spared_by(found)
            except Exception as error:
                answer = failed(error)
        with self._removing(folder):
            answers = self._round.agree_before_commit("open", answer)
            layouts = {
                rank: checked(one, rank=rank, layout=str)["layout"] for rank, one in answers.items()
            }
            other = [rank for rank, layout in layouts.items() if layout != layouts[0]]
            if other:
                raise SaveFailed(
                    f"{self._round.not_saved} rank 0 holds {layouts[0]}, rank {other[0]} "
                    f"{layouts[other[0]]}. What is registered for saving must have the same keys "
                    "and shapes on all ranks"
                )
        opened: Mapping[str, Any] = answers[0]
        return opened

    def _opened(self, answer: Mapping[str, Any]) -> tuple[Path, Path, Manifest]:
        """The folder that rank 0 has made, what it will be called, and the manifest that it begins.
        What lies in the folder is removed when the save fails: so it is one that only a save can
        have made."""
        told = checked(answer, rank=0, folder=str, header=str)
        name = folders.target_of(told["folder"], self._round.step)
        if name is None:
            raise self._misnamed(told["folder"])
        folder = self._directory / told["folder"]
        return folder, self._directory / name, Manifest.from_json(told["header"], where=folder)

    def _there(self, answer: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint that rank 0 has found."""
        told = checked(answer, rank=0, there=str, name=str)
        if folders.step_of(told["name"]) != self._round.step:
            raise self._misnamed(told["name"])
        return self._checkpoint(self._directory / told["name"], told["there"])

    def _misnamed(self, name: str) -> SaveFailed:
        return SaveFailed(
            f"{self._round.not_saved} rank 0 names the folder {name[:80]!r}, which is none for a "
            f"save of this step in {self._directory}"
        )

    def _propose(self, folder: Path, header: Manifest) -> dict[str, Any]:
        """The folder for a new checkpoint, made."""
        commit.make_dirs(self._directory, storage=self._storage)
        self._storage.mkdir(folder)
        self._storage.fsync_dir(self._directory)
        return {"folder": folder.name, "header": header.to_json()}

    def _spared_by(self, found: Checkpoint) -> dict[str, Any]:
        """The checkpoint that is there."""
        self._storage.fsync_dir(self._directory)
        return {"there": found.manifest.to_json(), "name": found.path.name}

    def _write(self, folder: Path, plan: WritePlan, *, begun_s: float) -> Mapping[int, Any]:
        """Write this rank's part, and hear of the others'."""
        stray: BaseException | None = None
        try:
            with hashing() as hasher:
                index = write_part(
                    folder,
                    plan,
                    storage=self._storage,
                    hasher=hasher,
                    cancel=self._round.cancel,
                    chunk_bytes=self._chunk_bytes,
                )
                entry = write_index(folder, index, storage=self._storage, hasher=hasher)
            if self._written is not None:
                self._written()
            took_s = round(time.monotonic() - begun_s, 6)
            answer = {"index": [entry.size_bytes, entry.checksum], "took_s": took_s}
        except BaseException as error:
            stray = None if isinstance(error, Exception) else error
            answer = self._failed(error)
        try:
            return self._round.agree_before_commit("written", answer)
        except CheckpointError as error:
            raise stray or error from error.__cause__

    def _commit(self, acknowledged: Acknowledged) -> str:
        """The manifest of what is committed, by the first of the ranks that are left."""
        left = list(range(self._round.peers.world_size))
        for attempt in range(len(left)):
            answer = self._finish(acknowledged) if self._rank == left[0] else None
            try:
                answers = self._round.agree(f"commit/{attempt}", answer, among=left)
            except RanksError as error:
                lost = gone(error)
                left = [rank for rank in left if rank not in lost]
                one_knows = isinstance(error, AgreementFailed) and not error.withdrawn
                if not lost or not one_knows or self._rank not in left:
                    raise self._not_known(error) from error
                continue
            with self._removing(acknowledged.folder):
                raise_failures(answers, self._round.not_saved)
            return str(checked(answers[left[0]], rank=left[0], manifest=str)["manifest"])
        raise AssertionError("this rank is left at least")

    def _finish(self, acknowledged: Acknowledged) -> dict[str, Any]:
        try:
            found = _finish(
                acknowledged,
                rank=self._rank,
                is_good=self._checker.is_good,
                may_commit=self._may_commit,
                storage=self._storage,
            )
        except Exception as error:
            return self._failed(error)
        return {"manifest": found.to_json()}

    def _failed(self, error: BaseException) -> dict[str, Any]:
        """An I/O error may be that a newer attempt has taken the folder away."""
        if isinstance(error, OSError):
            with contextlib.suppress(OSError):
                try:
                    self._may_commit()
                except StaleAttempt as stale:
                    error = stale
        return failed(error)

    def _not_known(self, error: RanksError) -> SaveFailed:
        return SaveFailed(
            f"all ranks have written step {self._round.step}, but whether it was committed is "
            f"not known here: {why(error)}. {KEPT}"
        )

    def _checkpoint(self, target: Path, text: str) -> Checkpoint:
        found = Checkpoint(target, Manifest.from_json(text, where=target))
        self._checker.trust(found)
        return found

    @contextlib.contextmanager
    def _removing(self, folder: Path | None) -> Iterator[None]:
        """Remove the folder when the ranks have agreed that nothing comes of it. All of them do:
        the last one that was still writing into it leaves nothing behind.

        Not when this rank has lost the others: they may be about to commit it.
        """
        try:
            yield
        except (CheckpointError, StaleAttempt) as error:
            decided = not isinstance(error.__cause__, RanksError) or isinstance(
                error.__cause__, AgreementFailed
            )
            if folder is not None and decided:
                with contextlib.suppress(OSError):
                    commit.remove_tree(folder, storage=self._storage)
            raise


def _index_of(rank: int, answer: Any) -> FileEntry:
    told = checked(answer, rank=rank, index=list, took_s=(int, float))
    size_bytes, checksum = (told["index"] + [None, None])[:2]
    if not (type(size_bytes) is int and size_bytes >= 0 and isinstance(checksum, str)):
        raise SaveFailed(f"rank {rank} names no index that it has written: {told['index']!r:.80}")
    return FileEntry(size_bytes, checksum)


def _finish(
    save: Acknowledged,
    *,
    rank: int,
    is_good: Callable[[Checkpoint], bool],
    may_commit: Callable[[], None],
    storage: Storage,
) -> Manifest:
    """Commit, unless that has been done already; the manifest of what is there then.

    Args:
        may_commit: called before each try, which it can prevent by raising.

    Raises:
        OSError: a call failed. CheckpointCorrupt: a part is not what its rank has acknowledged.
    """
    there = _committed(save, is_good=is_good, storage=storage)
    for attempt in range(commit.ATTEMPTS):
        if there is not None:
            break
        may_commit()
        try:
            there = _move(save, rank=rank, is_good=is_good, storage=storage)
        except FileNotFoundError:  # somebody else has moved the folder, or took our draft away
            there = _committed(save, is_good=is_good, storage=storage)
            if there is None and attempt == commit.ATTEMPTS - 1:
                raise
    assert there is not None
    # who renamed it may have been killed before its last call
    storage.fsync_dir(save.target.parent)
    return there


def _move(
    save: Acknowledged, *, rank: int, is_good: Callable[[Checkpoint], bool], storage: Storage
) -> Manifest:
    described = _describe(save, rank=rank, storage=storage)
    ours = commit.move_into_place(
        save.folder,
        save.target,
        is_whole=lambda: _committed(save, is_good=is_good, storage=storage) is not None,
        storage=storage,
    )
    if ours:
        return described
    with contextlib.suppress(OSError):
        commit.remove_tree(save.folder, storage=storage)
    return read_manifest(save.target, storage=storage)


def _committed(
    save: Acknowledged, *, is_good: Callable[[Checkpoint], bool], storage: Storage
) -> Manifest | None:
    """The manifest under the final name: of this very save, or of a good checkpoint."""
    try:
        found = read_manifest(save.target, storage=storage)
    except CheckpointError:
        return None
    ours = found.created_epoch_ns == save.header.created_epoch_ns
    return found if ours or is_good(Checkpoint(save.target, found)) else None


def _describe(save: Acknowledged, *, rank: int, storage: Storage) -> Manifest:
    """Write DCP's index and the manifest into the folder, from what the parts say."""
    _remove_drafts(save.folder, storage=storage)
    indexes = [_read_index(save, one, storage=storage) for one in sorted(save.indexes)]
    files = {name: entry for index in indexes for name, entry in index.files.items()}
    files |= {part_json(one): entry for one, entry in save.indexes.items()}
    with hashing() as hasher:

        def put(name: str, data: bytes) -> FileEntry:
            draft = save.folder / f"{name}.{rank}{DRAFT}"
            entry = write_whole(draft, data, storage=storage, hasher=hasher)
            storage.rename(draft, save.folder / name)
            storage.fsync_dir(save.folder)
            return entry

        files[METADATA] = put(METADATA, pickled(metadata_of(indexes)))
        described = replace(
            save.header,
            files=files,
            save_s=save.save_s,
            state_bytes=sum(chunk.value_bytes for index in indexes for chunk in index.chunks),
        )
        put(manifest.NAME, described.to_json().encode())
    return described


def _read_index(save: Acknowledged, rank: int, *, storage: Storage) -> PartIndex:
    path = save.folder / part_json(rank)
    text = read_whole(path, storage=storage)
    compare(path, save.indexes[rank], FileEntry(len(text), manifest.checksum(text)))
    return PartIndex.from_json(text, where=path)


def _remove_drafts(folder: Path, *, storage: Storage) -> None:
    """Of an earlier attempt of this rank, and of ranks that died. One that is alive after all comes
    back to look whether its work is done."""
    for name in storage.listdir(folder):
        if name.endswith(DRAFT):
            with contextlib.suppress(FileNotFoundError):
                storage.unlink(folder / name)
