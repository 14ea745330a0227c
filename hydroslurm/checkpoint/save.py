"""One save, by one rank or by several: what each of them writes, and what they agree on.

    open      rank 0 has made the temporary folder, or there is a good checkpoint that will do
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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint import commit, folders, manifest
from hydroslurm.checkpoint.catalog import Checkpoint, as_told, read_manifest
from hydroslurm.checkpoint.checking import Checker
from hydroslurm.checkpoint.frozen import FrozenFiles, with_fingerprint
from hydroslurm.checkpoint.manifest import FileEntry, Manifest
from hydroslurm.checkpoint.parts import Parts
from hydroslurm.checkpoint.planner import plan_of
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
from hydroslurm.checkpoint.write_plan import State, WritePlan
from hydroslurm.checkpoint.writer import write_part
from hydroslurm.core.garbage import without_gc
from hydroslurm.errors import AgreementFailed, CheckpointError, RanksError, SaveFailed, StaleAttempt

COMMITTERS = 4
"""Ranks that can commit. When all of them die, the coordinator, which is beside rank 0, is most
likely gone as well, and nobody could agree on who goes on."""


@dataclass(frozen=True)
class Place:
    """Where a save goes: its temporary folder, its final name, and the manifest as it was agreed on
    at the beginning, without files."""

    folder: Path
    target: Path
    header: Manifest


class Save:
    """One save, as one of its ranks sees it."""

    def __init__(
        self,
        directory: Path,
        save_round: SaveRound,
        *,
        storage: Storage,
        checker: Checker,
        stored: FrozenFiles,
        chunk_bytes: int,
        may_commit: Callable[[], None],
        written: Callable[[], None] | None = None,
        again: bool = False,
    ) -> None:
        """
        Args:
            stored: of this directory.
            may_commit: prevents the commit by raising StaleAttempt.
            written, again: see ``CheckpointStore.write``.
        """
        self._begun_s = time.monotonic()
        self._directory = directory
        self._round = save_round
        self._rank = save_round.peers.rank
        self._committers = range(min(COMMITTERS, save_round.peers.world_size))
        self._storage = storage
        self._checker = checker
        self._stored = stored
        self._chunk_bytes = chunk_bytes
        self._may_commit = may_commit
        self._written = written
        self._again = again

    def write(self, state: State | WritePlan, header: Manifest) -> Checkpoint:
        """Save; the committed checkpoint, or one of this step that was there before, where that
        will do.

        Args:
            header: the manifest without files; rank 0's is the one that counts.

        Raises:
            SaveFailed, SaveAbandoned, UnsavableState, StaleAttempt: on all ranks.
        """
        world_size = self._round.peers.world_size
        with self._failing_as_save():
            try:
                plan = plan_of(state, rank=self._rank, world_size=world_size)
                plan = with_fingerprint(plan)
            except Exception as error:
                self._round.settle("open", problem=error)
                raise
            layout = "" if self._round.is_solo else plan.layout.digest
            place = self._open(replace(header, world_size=world_size), layout)
            if isinstance(place, Checkpoint):
                return place
            with self._removing(place.folder):
                parts, mine = self._write(place.folder, plan)
            committed = self._commit(place, lambda: self._describe(place, parts))
            if _is_of(place, committed.manifest):
                self._stored.note(committed, files=mine, fingerprint=plan.fingerprint)
            return committed

    def _open(self, header: Manifest, layout: str) -> Place | Checkpoint:
        """Where the checkpoint goes, or one that is there and will do."""
        if self._round.is_solo:
            return self._choose(header)
        answer: dict[str, Any] = {"layout": layout}
        folder, problem = None, None
        if self._rank == 0:
            try:
                chosen = self._choose(header)
                if isinstance(chosen, Place):
                    folder = chosen.folder
                    self._make_inner(folder, folders.inner_folders(header.world_size))
                self._storage.fsync_dir(self._directory)
                answer |= _told(chosen)
            except Exception as error:
                problem = error
        with self._removing(folder):
            answers = self._round.settle("open", answer, problem=problem)
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
        return self._chosen_by_rank_0(answers[0])

    def _choose(self, header: Manifest) -> Place | Checkpoint:
        self._may_commit()
        target, there = self._checker.place_for(
            self._directory,
            self._round.step,
            again=self._again,
            kind=header.kind,
        )
        if there is not None:
            # who committed it may have been killed before its last call
            self._storage.fsync_dir(self._directory)
            return there
        folder = folders.temporary(target, joint=not self._round.is_solo)
        commit.make_dirs(self._directory, storage=self._storage)
        self._storage.mkdir(folder)
        return Place(folder, target, header)

    def _make_inner(self, folder: Path, names: Iterable[str]) -> None:
        for name in names:
            self._storage.mkdir(folder / name)

    def _chosen_by_rank_0(self, answer: Mapping[str, Any]) -> Place | Checkpoint:
        """What lies in the folder is removed when the save fails: so its name must be one that only
        a save can have chosen."""
        told = checked(answer, rank=0, name=str, manifest=str)
        name, step = told["name"], self._round.step
        final = folders.target_of(name, step)
        if final is None and folders.step_of(name) != step:
            raise SaveFailed(
                f"{self._round.not_saved} rank 0 names the folder {name[:80]!r}, which is none for "
                f"a save of this step in {self._directory}"
            )
        path = self._directory / name
        if final is None:
            return self._trusted(as_told(told, path))
        return Place(path, path.parent / final, Manifest.from_json(told["manifest"], where=path))

    def _write(self, folder: Path, plan: WritePlan) -> tuple[Parts, Mapping[str, FileEntry]]:
        """Write this rank's part, and hear of the others'; with this rank's files."""
        alone = self._round.is_solo
        answer: dict[str, Any] = {}
        files: Mapping[str, FileEntry] = {}
        problem: BaseException | None = None
        try:
            mine = write_part(
                folder,
                plan,
                storage=self._storage,
                stored=self._stored,
                cancel=self._round.cancel,
                chunk_bytes=self._chunk_bytes,
            )
            if not alone:  # names of inner folders become durable with the manifest's
                for path in {(folder / name).parent for name in mine.files}:
                    self._storage.fsync_dir(path)
            if self._written is not None:
                self._written()
            files = mine.files
            answer = {**mine.to_answer(), "took_s": self._took_s()}
        except BaseException as error:
            problem = self._explained(error)
        try:
            answers = self._round.settle(
                "written", answer, problem=problem, collect_at=self._committers
            )
        except CheckpointError as error:
            if problem is None or isinstance(problem, Exception):
                raise
            raise problem from error.__cause__  # such as an interrupt, which is for this rank only
        return Parts(answers, plan.layout.whole_tally), files

    def _commit(self, place: Place, describe: Callable[[], Manifest]) -> Checkpoint:
        """Have the checkpoint committed by the first of the ranks that are left."""
        if self._round.is_solo:
            with self._removing(place.folder):
                return self._trusted(Checkpoint(place.target, self._finish(place, describe)))
        left = list(range(self._round.peers.world_size))
        for attempt in range(len(left)):
            mine, answer = None, None
            if self._rank == left[0]:
                try:
                    mine = Checkpoint(place.target, self._finish(place, describe))
                    answer = {"manifest": mine.manifest.summary().to_json()}
                except Exception as error:
                    answer = failed(self._explained(error))
            try:
                answers = self._round.agree(f"commit/{attempt}", answer, among=left)
            except RanksError as error:
                lost = gone(error)
                left = [rank for rank in left if rank not in lost]
                one_knows = isinstance(error, AgreementFailed) and not error.withdrawn
                nobody_can = not left or left[0] not in self._committers
                if not lost or not one_knows or self._rank not in left or nobody_can:
                    raise SaveFailed(
                        f"all ranks have written step {self._round.step}, but whether it was "
                        f"committed is not known here: {why(error)}. {KEPT}"
                    ) from error
                continue
            with self._removing(place.folder):
                raise_failures(answers, self._round.not_saved)
            told = checked(answers[left[0]], rank=left[0], manifest=str)
            return self._trusted(mine or as_told(told, place.target))
        raise AssertionError("this rank is left at least")

    def _finish(self, place: Place, describe: Callable[[], Manifest]) -> Manifest:
        """Commit, unless another rank has done that; the manifest of what is there then.

        Args:
            describe: writes what is still missing into the folder, the manifest last.

        Raises:
            OSError: a call failed. CheckpointCorrupt: a part is not what its rank has acknowledged.
        """
        there = None if self._round.is_solo else self._committed(place)
        for attempt in range(commit.ATTEMPTS):
            if there is not None:
                break
            try:
                described = describe()
                self._may_commit()
                ours = commit.move_into_place(
                    place.folder,
                    place.target,
                    is_whole=lambda: self._committed(place) is not None,
                    storage=self._storage,
                )
                if not ours:
                    with contextlib.suppress(OSError):
                        commit.remove_tree(place.folder, storage=self._storage)
                there = described if ours else read_manifest(place.target, storage=self._storage)
            except FileNotFoundError:  # somebody else has moved the folder, or took our draft away
                there = self._committed(place)
                if there is None and attempt == commit.ATTEMPTS - 1:
                    raise
        assert there is not None
        # who renamed it may have been killed before its last call
        self._storage.fsync_dir(self._directory)
        return there

    def _committed(self, place: Place) -> Manifest | None:
        """The manifest under the final name: of a good checkpoint, or of this very save, committed
        by another rank."""
        try:
            found = read_manifest(place.target, storage=self._storage)
        except CheckpointError:
            return None
        ours = _is_of(place, found) and not self._round.is_solo
        return found if ours or self._checker.is_good(Checkpoint(place.target, found)) else None

    def _describe(self, place: Place, parts: Parts) -> Manifest:
        """Write the manifest into the folder, from what the parts say."""
        commit.remove_drafts(place.folder, storage=self._storage)
        save_s = self._took_s() if self._round.is_solo else None
        with without_gc():  # in a training it stops all threads for a fifth of a second
            described = parts.described(place.header, save_s=save_s)
        self._put_manifest(place.folder, described)
        return described

    def _put_manifest(self, folder: Path, described: Manifest) -> None:
        data = described.to_json().encode()
        commit.put(folder, manifest.NAME, data, rank=self._rank, storage=self._storage)

    def _trusted(self, checkpoint: Checkpoint) -> Checkpoint:
        """What was just committed, or found to be good by rank 0."""
        self._checker.trust(checkpoint)
        return checkpoint

    def _took_s(self) -> float:
        return round(time.monotonic() - self._begun_s, 6)

    def _explained(self, error: BaseException) -> BaseException:
        """An I/O error may be that a newer attempt has taken the folder away."""
        if isinstance(error, OSError):
            with contextlib.suppress(OSError):
                try:
                    self._may_commit()
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
                    f"step {self._round.step} could not be saved to {self._directory}: "
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
            if folder is not None and (decided or self._round.is_solo):
                with contextlib.suppress(OSError):
                    commit.remove_tree(folder, storage=self._storage)
            raise


def _is_of(place: Place, found: Manifest) -> bool:
    """Whether a manifest is that of the save that goes there."""
    return found.created_epoch_ns == place.header.created_epoch_ns


def _told(chosen: Place | Checkpoint) -> dict[str, str]:
    """What rank 0 has chosen, for the others."""
    if isinstance(chosen, Place):
        return {"name": chosen.folder.name, "manifest": chosen.header.to_json()}
    return {"name": chosen.path.name, "manifest": chosen.manifest.summary().to_json()}
