"""One save, by one rank or by several: what each of them writes, and what they agree on.

    open      rank 0 has made the temporary folder, or which cannot save now, and why; before a
              deadline also what each rank knows of its save in flight, its disk and its time
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

What a rank writes:

    part-00000.safetensors  its tensors and pieces of tensors
    part-00000.json         the index of that file, and what only that rank has
    frozen-00000.safetensors, frozen-00000.json
                            the same of its tensors that are frozen, if there are any
    shared.json             what all ranks share, tensors as references; rank 0 writes it

Nothing is written that is about the parts of all ranks: a commit takes the same time for one rank
and for thousands. A rank that saves alone goes the same way. It has nobody to agree with, and
leaves out the fsync of the folder that the others' parts need before they are acknowledged.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

from hydroslurm.checkpoint import folders, manifest
from hydroslurm.checkpoint.checksummed_file import ChecksummedFile, FileEntry, write_whole
from hydroslurm.checkpoint.deadline import Situation
from hydroslurm.checkpoint.frozen import FrozenFiles, with_fingerprint
from hydroslurm.checkpoint.host_memory import packed
from hydroslurm.checkpoint.manifest import Checkpoint, Manifest, as_told, read_manifest
from hydroslurm.checkpoint.peers import (
    KEPT,
    failed,
    gone,
    parsed,
    raise_failures,
    why,
)
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.checkpoint.tensor_file import (
    SHARED_JSON,
    files_of_part,
    frozen_part,
    index_text,
)
from hydroslurm.checkpoint.write_plan import TALLY_MODULUS, State, WritePlan, divide
from hydroslurm.core.decoding import Count, Seconds
from hydroslurm.core.garbage import without_gc
from hydroslurm.errors import (
    AgreementFailed,
    CheckpointError,
    RanksError,
    SaveAbandoned,
    SaveFailed,
    StaleAttempt,
)

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
        open_s: the longest to wait for the others to begin, in seconds.
        state_bytes: of all ranks. state: a saver numbers the states that it is given from 1,
            because two of one step can differ; 0 is what the run resumed from. Both are the
            saver's own.
    """

    step: int
    kind: str
    epoch: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)
    topic: str = ""
    open_s: float = math.inf
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
    save = Save(store, request, cancel)
    save.open(state)
    return save.write(written)


@dataclass(frozen=True)
class _Place:
    """Where a save goes: its temporary folder, its final name, and the manifest as it was agreed on
    at the beginning, without files."""

    folder: Path
    target: Path
    header: Manifest


@dataclass(frozen=True)
class _Opened:
    """The answer of a rank that begins: the digest of its layout, and what it knows before a
    deadline. Rank 0 adds the folder that it has made, and the manifest."""

    layout: str
    name: str = ""
    manifest: str = ""
    situation: Situation | None = None


class Save:
    """One save, as one of its ranks sees it: :meth:`open`, then :meth:`write` or :meth:`discard`.
    They raise as :func:`write_checkpoint`."""

    _place: _Place
    _plan: WritePlan

    def __init__(
        self, store: CheckpointStore, request: SaveRequest, cancel: threading.Event | None
    ) -> None:
        self.store, self.storage, self.directory = store, store.storage, store.directory
        self.request, self.rank = request, store.peers.rank
        self.peers, self.step, self.cancel = store.peers, request.step, cancel
        self.is_solo = self.peers.world_size == 1
        self.topic = request.topic or f"save/{request.step}/{request.kind}"

    def open(
        self, state: State | WritePlan | BaseException, situation: Situation | None = None
    ) -> list[Situation]:
        """Begin with all ranks; the situations of all of them, if they have any."""
        place, answer, problem = None, _Opened("", situation=situation), None
        with self._failing_as_save():
            try:
                self._plan = self._planned(state)
                answer = replace(answer, layout="" if self.is_solo else self._plan.digest)
                if self.rank == 0:
                    place = self._choose()
                    header = place.header.to_json()
                    answer = replace(answer, name=place.folder.name, manifest=header)
            except BaseException as error:
                problem = error
            with self._removing(None if place is None else place.folder):
                told = self._settle(
                    "open", asdict(answer), problem=problem, timeout_s=self.request.open_s
                )
                answers = {rank: parsed(_Opened, one, rank=rank) for rank, one in told.items()}
                first = answers[0].layout
                other = [rank for rank, one in answers.items() if one.layout != first]
                if other:
                    raise SaveFailed(
                        f"{self._not_saved} rank 0 holds {first}, rank {other[0]} "
                        f"{answers[other[0]].layout}. What is registered for saving must have the "
                        "same keys and shapes on all ranks"
                    )
            self._place = place or self._chosen_by_rank_0(answers[0])
        return [one.situation for one in answers.values() if one.situation is not None]

    def discard(self) -> None:
        """Write nothing."""
        with contextlib.suppress(OSError):
            folders.remove_tree(self._place.folder, storage=self.storage)

    def write(self, written: Callable[[float], None] | None = None) -> Checkpoint:
        """Write this rank's part, and commit the checkpoint when all have written theirs."""
        begun_s = time.monotonic()  # a rank may have waited long for the others
        folder, plan, storage = self._place.folder, self._plan, self.storage
        part, problem = None, None
        with self._failing_as_save():
            with self._removing(folder):
                try:
                    part = write_part(
                        folder,
                        plan,
                        storage=storage,
                        stored=self.store.frozen,
                        cancel=self.cancel,
                    )
                    if not self.is_solo:
                        storage.fsync_dir(folder)
                    part = replace(part, took_s=round(time.monotonic() - begun_s, 6))
                    if written is not None:
                        written(begun_s)
                except BaseException as error:
                    problem = self._explained(error)
                parts = self._agree_on_parts(part, problem)
            committed = self._commit(parts)
        assert part is not None
        self.store.trust(committed)
        self.store.frozen.note(committed, files=part.files, fingerprint=plan.fingerprint)
        return committed

    def _planned(self, state: State | WritePlan | BaseException) -> WritePlan:
        if isinstance(state, BaseException):
            raise state
        if isinstance(state, State):
            state = divide(state, rank=self.rank, world_size=self.peers.world_size)
        return with_fingerprint(state)

    def _choose(self) -> _Place:
        """The place under the next number of this step, with a new temporary folder."""
        header = manifest.begun(
            step=self.request.step,
            epoch=self.request.epoch,
            kind=self.request.kind,
            meta=self.request.meta,
            world_size=self.peers.world_size,
        )
        self._check_fence()
        target = self._next_target()
        folder = folders.temporary(target, joint=not self.is_solo)
        folders.make_dirs(self.directory, storage=self.storage)
        self.storage.mkdir(folder)
        return _Place(folder, target, header)

    def _next_target(self) -> Path:
        step, names = self.step, list[str]()
        with contextlib.suppress(FileNotFoundError):
            names = self.storage.listdir(self.directory)
        return folders.of_step(self.directory, step, folders.newest_number(names, step) + 1)

    def _chosen_by_rank_0(self, told: _Opened) -> _Place:
        """What lies in the folder is removed when the save fails: so its name must be one that only
        a save can have chosen."""
        final = folders.target_of(told.name, self.step)
        if final is None:
            raise SaveFailed(
                f"{self._not_saved} rank 0 names the folder {told.name[:80]!r}, which is none "
                f"for a save of this step in {self.directory}"
            )
        path = self.directory / told.name
        return _Place(path, path.parent / final, Manifest.from_json(told.manifest, where=path))

    def _agree_on_parts(
        self, part: Part | None, problem: BaseException | None
    ) -> Mapping[int, Any]:
        """What all ranks say that they have written."""
        answer = None if part is None else asdict(part)
        try:
            return self._settle("written", answer, problem=problem, collect_at=self._committers())
        except CheckpointError as error:
            if problem is None or isinstance(problem, Exception):
                raise
            raise problem from error.__cause__  # such as an interrupt, which is for this rank only

    def _commit(self, parts: Mapping[int, Any]) -> Checkpoint:
        """Have the checkpoint committed by the first of the ranks that are left."""
        if self.is_solo:
            with self._removing(self._place.folder):
                return self._finish(parts)
        left = list(range(self.peers.world_size))
        for attempt in range(len(left)):
            mine: Checkpoint | None = None
            answer: Any = None
            if self.rank == left[0]:
                try:
                    mine = self._finish(parts)
                    answer = mine.manifest.summary().to_json()
                except Exception as error:
                    answer = failed(self._explained(error))
            try:
                answers = self._agree(f"commit/{attempt}", answer, among=left)
            except RanksError as error:
                lost = gone(error)
                left = [rank for rank in left if rank not in lost]
                one_knows = isinstance(error, AgreementFailed) and not error.withdrawn
                nobody_can = not left or left[0] not in self._committers()
                if not lost or not one_knows or self.rank not in left or nobody_can:
                    raise SaveFailed(
                        f"all ranks have written step {self.step}, but whether it was "
                        f"committed is not known here: {why(error)}. {KEPT}"
                    ) from error
                continue
            with self._removing(self._place.folder):
                raise_failures(answers, self._not_saved)
            summary = parsed(str, answers[left[0]], rank=left[0])
            return mine or as_told(summary, self._place.target)
        raise AssertionError("this rank is left at least")

    def _finish(self, parts: Mapping[int, Any]) -> Checkpoint:
        """Write the manifest from what the ranks say that they have written, and give the folder
        its name, unless another rank has done that.

        Raises:
            OSError: a call failed. SaveFailed: an answer is none.
        """
        place, whole_tally = self._place, self._plan.whole_tally
        for attempt in range(ATTEMPTS):
            there = None if self.is_solo else self._committed(place)
            try:
                if there is None:
                    folders.remove_drafts(place.folder, storage=self.storage)
                    with without_gc():  # in a training it stops all threads for a fifth of a second
                        there = manifest_of(parts, place.header, whole_tally=whole_tally)
                    data = there.to_json().encode()
                    folders.put(
                        place.folder, manifest.NAME, data, rank=self.rank, storage=self.storage
                    )
                    self._check_fence()
                    self.storage.rename(place.folder, place.target)
                break
            except OSError as error:
                if attempt == ATTEMPTS - 1:
                    raise
                if error.errno in TAKEN and self.is_solo:
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

    def _agree(
        self,
        what: str,
        value: Any,
        *,
        timeout_s: float = math.inf,
        among: Sequence[int] | None = None,
        collect_at: Collection[int] | None = None,
    ) -> Mapping[int, Any]:
        """As :meth:`Peers.agree`, within the store's patience; raises RanksError."""
        return self.peers.agree(
            f"{self.topic}/{what}",
            value,
            timeout_s=min(self.store.patience_s, max(0.0, timeout_s)),
            cancel=self.cancel,
            among=among,
            collect_at=collect_at,
        )

    def _settle(
        self,
        what: str,
        answer: Mapping[str, Any] | None = None,
        *,
        problem: BaseException | None = None,
        timeout_s: float = math.inf,
        collect_at: Collection[int] | None = None,
    ) -> Mapping[int, Any]:
        """The answers of all ranks.

        Args:
            problem: why this rank has failed, instead of an answer; told to all.
            collect_at: the only ranks that get this rank's answer; see :meth:`Peers.agree`.

        Raises:
            SaveFailed, UnsavableState, SaveAbandoned, StaleAttempt: a rank has failed or is gone;
                the same on all ranks. In a world of one, ``problem`` itself.
        """
        value = answer
        if problem is not None:
            if self.is_solo:
                raise problem
            value, collect_at = failed(problem), None
        try:
            answers = self._agree(what, value, timeout_s=timeout_s, collect_at=collect_at)
        except RanksError as error:
            canceled = self.cancel is not None and self.cancel.is_set()
            kind = SaveAbandoned if canceled and not gone(error) else SaveFailed
            raise kind(f"{self._not_saved} {why(error)}. {KEPT}") from error
        raise_failures(answers, self._not_saved)
        return answers

    @property
    def _not_saved(self) -> str:
        return f"step {self.step} was not saved:"

    def _committers(self) -> range:
        return range(min(COMMITTERS, self.peers.world_size))

    def _check_fence(self) -> None:
        self.store.check_fence(f"the save of step {self.step}")

    def _explained(self, error: BaseException) -> BaseException:
        """An I/O error may be that a newer attempt has taken the folder away."""
        if isinstance(error, OSError):
            with contextlib.suppress(OSError):
                try:
                    self._check_fence()
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
                    f"step {self.step} could not be saved to {self.directory}: "
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
            if folder is not None and (decided or self.is_solo):
                with contextlib.suppress(OSError):
                    folders.remove_tree(folder, storage=self.storage)
            raise


@dataclass(frozen=True)
class Part:
    """What one rank has written, as the rank that commits needs it.

    Attributes:
        files: name -> entry.
        tally: of the values in its pieces of what the ranks share (``write_plan.tally_of``).
        state_bytes: of its tensors that it has written, as they are in memory.
        took_s: since the save began.
    """

    files: dict[str, FileEntry]
    tally: Count
    state_bytes: Count
    took_s: Seconds = 0.0

    @classmethod
    def from_answer(cls, answer: Any, *, rank: int) -> Part:
        """Of another rank; SaveFailed if it names other files than such a rank writes."""
        part = parsed(cls, answer, rank=rank)
        expected = {*files_of_part(rank), *([] if rank else [SHARED_JSON])}
        if set(part.files) not in (expected, expected.union(files_of_part(frozen_part(rank)))):
            raise SaveFailed(
                f"rank {rank} says that it has written {sorted(part.files)!r:.200}; expected "
                f"{sorted(expected)}"
            )
        return part


def manifest_of(answers: Mapping[int, Any], header: Manifest, *, whole_tally: int) -> Manifest:
    """The manifest of a save whose parts are all on the disk.

    Args:
        answers: rank -> what it has written, unchecked.
        whole_tally: of all values of the tensors that the ranks share.

    Raises:
        SaveFailed: an answer is none, or the pieces of the shared tensors do not make up the whole.
    """
    parts = [Part.from_answer(one, rank=rank) for rank, one in sorted(answers.items())]
    if sum(part.tally for part in parts) % TALLY_MODULUS != whole_tally:
        raise SaveFailed(
            f"the pieces that {len(parts)} ranks have written do not make up the "
            "tensors that they share: they do not hold the same ones. Is every DTensor laid "
            "out over one mesh of all ranks?"
        )
    files = {name: entry for part in parts for name, entry in part.files.items()}
    return replace(
        header,
        files=files,
        save_s=max(part.took_s for part in parts),
        state_bytes=sum(part.state_bytes for part in parts),
    )


def write_part(
    folder: Path,
    plan: WritePlan,
    *,
    storage: Storage,
    stored: FrozenFiles,
    cancel: Event | None = None,
) -> Part:
    """Write and fsync what is this rank's into an existing folder.

    Args:
        stored: has what need not be written again.

    Raises:
        OSError: a call failed. SaveAbandoned: ``cancel`` was set. CheckpointCorrupt: what is stored
            is not what was written.
    """
    parts = list[Part]()
    numbers = [plan.rank]
    if plan.frozen_pieces:
        linked = stored.put(folder, plan, cancel=cancel)
        parts.append(Part(linked, 0, 0))
        numbers = [plan.rank] if linked else [frozen_part(plan.rank), plan.rank]
    for number in numbers:
        is_own = number == plan.rank
        with without_gc():
            laid = plan.laid if is_own else plan.laid_frozen
        tensors = plan.tensors if is_own else plan.frozen
        assert tensors is not None, "nothing that is stored is copied"
        index_name, name = files_of_part(number)
        with ChecksummedFile(folder / name, storage=storage, cancel=cancel) as file:
            file.write(laid.header)
            for data in packed(tensors[place] for place in laid.order):
                file.write(data)
            # while the disk takes the tensors
            with without_gc():
                texts = {
                    index_name: index_text(
                        laid,
                        rank=number,
                        own=plan.own if is_own else {},
                        blocks=file.blocks,
                        fingerprint="" if is_own else plan.fingerprint,
                    )
                }
                if number == 0:
                    texts[SHARED_JSON] = shared_text(plan)
                tally = plan.tally if is_own else 0
            files = {name: file.finish()}
        for text_name, text in texts.items():
            files[text_name] = write_whole(folder / text_name, text, storage=storage)
        parts.append(Part(files, tally, files[name].size_bytes - len(laid.header)))
    return Part(
        {name: entry for part in parts for name, entry in part.files.items()},
        tally=sum(part.tally for part in parts),
        state_bytes=sum(part.state_bytes for part in parts),
    )


def shared_text(plan: WritePlan) -> tuple[bytes, ...]:
    """What all ranks share, in pieces: the state, and its tensors, by key: shape, dtype, and the
    rank that has written it, or null for one that is in pieces."""
    state = json.dumps(plan.shared, allow_nan=False, separators=(",", ":"))
    tensors = json.dumps(plan.shared_tensors, separators=(",", ":"))
    return b'{"state":', state.encode(), b',"tensors":', tensors.encode(), b"}"
