"""Brings one state to the tiers: writes, copies, keeps few, measures and tells."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydroslurm.checkpoint.catalog import EPOCH
from hydroslurm.checkpoint.estimate import DURABLE_ASSUMED, FAST_ASSUMED, Estimate, Pace
from hydroslurm.checkpoint.memory import Room, is_kept_in_memory, room
from hydroslurm.checkpoint.outcome import SaveEvent, SaveEventKind
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
from hydroslurm.checkpoint.tiers import FAST_AT_MOST, FAST_KEEP, Tier
from hydroslurm.checkpoint.write_plan import WritePlan
from hydroslurm.errors import CheckpointError, SaveAbandoned, SaveFailed, UsageError


@dataclass(frozen=True)
class SaveRequest:
    """What is to be saved, without the state itself.

    Attributes:
        topic: for a save of several ranks.
        state: the states that a saver was given are numbered from 1, because two of one step need
            not be the same. 0: what the run continues from.
        again: this state is saved also where a checkpoint of this step is there already.
    """

    step: int
    kind: str
    epoch: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)
    state_bytes: int = 0
    topic: str | None = None
    state: int = 0
    again: bool = True


@dataclass(frozen=True)
class Durability:
    """The safest tier that has a state (None: none has), the checkpoint, or the newest durable one,
    and how many steps are not durable."""

    tier: Tier | None
    checkpoint: Checkpoint | None
    steps_at_risk: int


class TieredWriter:
    """The tiers of one rank, as a save sees them. Safe to use from several threads."""

    def __init__(
        self,
        durable: CheckpointStore,
        *,
        fast: CheckpointStore | None,
        keep: int,
        keep_stop: int,
        keep_epochs: int | None = None,
        tell: Callable[[SaveEvent], None] | None,
        room: Callable[[], Room] = room,
    ) -> None:
        if keep < 1 or keep_stop < 0:
            raise UsageError(
                f"keep={keep}, keep_stop={keep_stop}: wanted keep >= 1, keep_stop >= 0"
            )
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stores = {Tier.DURABLE: durable} | ({} if fast is None else {Tier.FAST: fast})
        self._keep = {
            Tier.DURABLE: (keep, keep_stop, keep_epochs),
            Tier.FAST: (FAST_KEEP, FAST_KEEP, FAST_KEEP),
        }
        self._tell = tell
        self._room = room
        self._fast_is_memory = fast is not None and is_kept_in_memory(fast.directory.absolute())
        self._pruning = threading.Lock()
        earlier = sorted(durable.committed(), key=lambda one: one.manifest.created_epoch_ns)
        # a checkpoint that was copied from a fast tier says how long it took there
        self._pace = {
            Tier.DURABLE: Pace(
                DURABLE_ASSUMED, earlier if fast is None else (), syncs=durable.syncs
            ),
            Tier.FAST: Pace(FAST_ASSUMED, syncs=None if fast is None else fast.syncs),
        }
        self._state_bytes = earlier[-1].manifest.state_bytes if earlier else 0
        self._newest: dict[Tier, tuple[int, Checkpoint]] = {}

    @property
    def has_fast(self) -> bool:
        return Tier.FAST in self._stores

    def continues_from(self, checkpoint: Checkpoint) -> None:
        """This attempt resumes from a checkpoint on the durable tier."""
        self._newest[Tier.DURABLE] = 0, checkpoint

    def durable_step(self) -> int | None:
        """The newest step that is committed on the durable tier: by this attempt, or the one that
        it resumes from."""
        newest = self._newest.get(Tier.DURABLE)
        return None if newest is None else newest[1].manifest.step

    def is_durable(self, state: int) -> bool:
        """Whether the state of this number, or a later one, is committed on the durable tier."""
        newest = self._newest.get(Tier.DURABLE)
        return newest is not None and newest[0] >= state

    def durability(self, request: SaveRequest) -> Durability:
        """How safe a state is at this moment."""
        risk = request.step - (self.durable_step() or 0)
        for tier in (Tier.DURABLE, Tier.FAST):
            state, newest = self._newest.get(tier, (-1, None))
            if state == request.state:
                return Durability(tier, newest, risk)
        return Durability(None, self._newest.get(Tier.DURABLE, (-1, None))[1], risk)

    def estimate(self, size_bytes: int | None = None) -> Estimate:
        """What saving a state of this size is expected to take; None: of the last one's size."""
        size_bytes = self._state_bytes if size_bytes is None else size_bytes
        return Estimate(
            state_bytes=size_bytes,
            durable=self._pace[Tier.DURABLE].expect(size_bytes),
            fast=self._pace[Tier.FAST].expect(size_bytes) if self.has_fast else None,
        )

    def memory_to_come_bytes(self, size_bytes: int) -> int:
        """What the fast tier will still take of this job's memory with states of this size: nothing
        where it lies on a disk."""
        if not self._fast_is_memory:
            return 0
        there = self._stores[Tier.FAST].committed()
        return max(0, FAST_AT_MOST * size_bytes - sum(one.manifest.state_bytes for one in there))

    def take_problems(self) -> list[str]:
        """What went wrong beside the point since the last call, in words: a fast tier that is full,
        an old checkpoint that cannot be removed. No save was lost by it."""
        taken = []
        while not self._problems.empty():
            taken.append(self._problems.get())
        return taken

    def to_all(
        self, plan: WritePlan, request: SaveRequest, *, cancel: threading.Event | None
    ) -> None:
        """Commit on the fast tier, if there is one and it can, then on the durable one.

        Raises:
            CheckpointError: the durable tier could not be written; it is as it was.
        """
        source = self.to_fast(plan, request, cancel=cancel)
        if source is None or not self.adopt(source, request, cancel=cancel):
            self.to_durable(plan, request, cancel=cancel)

    def to_fast(
        self, plan: WritePlan, request: SaveRequest, *, cancel: threading.Event | None = None
    ) -> Checkpoint | None:
        """Commit on the fast tier; None when there is none or it failed, which is a problem and no
        error. The end of an epoch is kept for later, not for a quick resume: it has no place there.
        """
        if not self.has_fast or request.kind == EPOCH:
            return None
        try:
            # one name for both tiers, by which the newer one of two is found over them
            least = self._store(Tier.DURABLE).next_number(request.step)
            self._check_memory(request)
            return self._commit(
                Tier.FAST,
                request,
                lambda store, written: _write(store, plan, request, cancel, written, least=least),
            )
        except SaveAbandoned:
            raise
        except (CheckpointError, OSError) as error:
            self._problems.put(f"the fast tier did not take step {request.step}: {error}")
            return None

    def _check_memory(self, request: SaveRequest) -> None:
        """A fast tier in memory that grows beyond the job's limit would be the end of the job."""
        if self._fast_is_memory:
            room = self._room()
            if request.state_bytes > room.free_bytes:
                raise SaveFailed(
                    f"it lies in memory, where {request.state_bytes / 1e6:,.0f} MB more would be "
                    f"too much: {room.free_bytes / 1e6:,.0f} MB may be taken ({room.message})"
                )

    def to_durable(
        self, plan: WritePlan, request: SaveRequest, *, cancel: threading.Event | None
    ) -> None:
        """Commit on the durable tier.

        Raises:
            CheckpointError: it could not be written; it is as it was.
        """
        self._commit(
            Tier.DURABLE,
            request,
            lambda store, written: _write(store, plan, request, cancel, written),
        )

    def adopt(
        self, source: Checkpoint, request: SaveRequest, *, cancel: threading.Event | None
    ) -> bool:
        """Copy what is committed on the fast tier to the durable one; False when that failed, which
        is a problem and no error."""
        try:
            self._commit(
                Tier.DURABLE,
                request,
                lambda store, written: store.adopt(source, cancel=cancel, written=written),
            )
        except SaveAbandoned:
            raise
        except (CheckpointError, OSError) as error:
            self._problems.put(f"step {request.step} was not copied from the fast tier: {error}")
            return False
        return True

    def prune(self) -> None:
        """Remove what need not be kept, on all tiers. What cannot be removed is a problem and no
        error."""
        with self._pruning:  # two at once would not find what the other removes
            for tier, (keep, keep_stop, keep_epochs) in self._keep.items():
                if tier not in self._stores:
                    continue
                try:
                    self._store(tier).prune(keep=keep, keep_stop=keep_stop, keep_epochs=keep_epochs)
                except (CheckpointError, OSError, RuntimeWarning) as error:
                    self._problems.put(f"old checkpoints on the {tier.value} tier stay: {error}")

    def tell(
        self,
        kind: SaveEventKind,
        request: SaveRequest,
        *,
        tier: Tier | None = None,
        seconds: float = 0.0,
        reason: str = "",
    ) -> None:
        """Hand an event on. An error of the receiver is a problem and no error."""
        if self._tell is None:
            return
        event = SaveEvent(
            kind,
            mono_ns=time.monotonic_ns(),
            step=request.step,
            save_kind=request.kind,
            tier=tier,
            state_bytes=request.state_bytes,
            seconds=seconds,
            reason=reason,
        )
        try:
            self._tell(event)
        except Exception as error:
            self._problems.put(f"{kind.value} was not recorded: {type(error).__name__}: {error}")

    def _commit(
        self,
        tier: Tier,
        request: SaveRequest,
        write: Callable[[CheckpointStore, Callable[[], None]], Checkpoint],
    ) -> Checkpoint:
        begin, syncs = time.monotonic(), self._stores[tier].syncs
        syncs_before = syncs.count

        def written() -> None:
            seconds = time.monotonic() - begin
            self.tell(SaveEventKind.WRITTEN, request, tier=tier, seconds=seconds)

        try:
            checkpoint = write(self._store(tier), written)
        except BaseException as error:
            given_up = isinstance(error, SaveAbandoned)
            kind = SaveEventKind.ABANDONED if given_up else SaveEventKind.FAILED
            self.tell(kind, request, tier=tier, seconds=time.monotonic() - begin, reason=str(error))
            raise
        seconds = time.monotonic() - begin
        before = self._newest.get(tier)
        if before is None or before[0] <= request.state:  # one given up can still come late
            self._newest[tier] = request.state, checkpoint
        self._pace[tier].add(
            seconds, state_bytes=request.state_bytes, syncs=syncs.count - syncs_before
        )
        self._state_bytes = request.state_bytes
        self.tell(SaveEventKind.COMMITTED, request, tier=tier, seconds=seconds)
        return checkpoint

    def _store(self, tier: Tier) -> CheckpointStore:
        """One of its own for every use: a store is for one thread, and around a stop a save that
        was given up can still be in it."""
        return copy.copy(self._stores[tier])


def _write(
    store: CheckpointStore,
    plan: WritePlan,
    request: SaveRequest,
    cancel: threading.Event | None,
    written: Callable[[], None],
    *,
    least: int = 1,
) -> Checkpoint:
    return store.write(
        plan,
        step=request.step,
        epoch=request.epoch,
        kind=request.kind,
        meta=request.meta,
        cancel=cancel,
        topic=request.topic,
        written=written,
        again=request.again,
        least=least,
    )
