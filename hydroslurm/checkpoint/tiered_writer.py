"""Writes one state to the fast and the durable tier: commits, copies, prunes, measures, reports."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydroslurm.checkpoint.catalog import EPOCH
from hydroslurm.checkpoint.estimate import DURABLE_ASSUMED, FAST_ASSUMED, Estimate, Pace
from hydroslurm.checkpoint.outcome import SaveEvent, SaveEventKind
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
from hydroslurm.checkpoint.tiers import FAST_AT_MOST, FAST_KEEP, Tier
from hydroslurm.checkpoint.write_plan import WritePlan
from hydroslurm.core.memory import Room, is_kept_in_memory, room
from hydroslurm.errors import CheckpointError, SaveAbandoned, SaveFailed, UsageError


@dataclass(frozen=True)
class SaveRequest:
    """What is to be saved, without the state itself.

    Attributes:
        topic: of the ranks' agreements about this save.
        state: a saver numbers the states that it is given from 1, because two of one step can
            differ. 0 is what the run resumed from.
        again: save this state even if a checkpoint of this step exists.
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
    """How safe a state is.

    Attributes:
        tier: the safest one that has this state; None: none has.
        checkpoint: of this state on that tier; without one, the newest durable checkpoint.
        steps_at_risk: steps since the newest durable checkpoint.
    """

    tier: Tier | None
    checkpoint: Checkpoint | None
    steps_at_risk: int


class TieredWriter:
    """Saves to the tiers of one rank. Thread-safe."""

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
        self.problems: deque[str] = deque()
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
        self._earlier = {Tier.DURABLE: earlier} | (
            {} if fast is None else {Tier.FAST: list(fast.committed())}
        )
        self._state_bytes = earlier[-1].manifest.state_bytes if earlier else 0
        self._newest: dict[Tier, tuple[int, Checkpoint]] = {}

    @property
    def has_fast(self) -> bool:
        return Tier.FAST in self._stores

    def continues_from(self, checkpoint: Checkpoint, tier: Tier) -> None:
        """Note what this attempt resumes from."""
        if tier is Tier.DURABLE:
            self._newest[tier] = 0, checkpoint
        for place, earlier in self._earlier.items():
            # a newer one that was passed over is damaged, and may share what is with an older one
            passed_over = any(one.key > checkpoint.key for one in earlier)
            verified = [checkpoint] if place is tier else []
            for one in verified if passed_over else earlier:
                self._stores[place].continues_from(one)
        self._earlier.clear()

    def has_frozen(self, plan: WritePlan) -> bool:
        """Whether what is frozen in a state need not be written to any tier."""
        return all(store.has_frozen(plan) for store in self._stores.values())

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
        """How safe a state is right now."""
        risk = request.step - (self.durable_step() or 0)
        for tier in (Tier.DURABLE, Tier.FAST):
            state, newest = self._newest.get(tier, (-1, None))
            if state == request.state:
                return Durability(tier, newest, risk)
        return Durability(None, self._newest.get(Tier.DURABLE, (-1, None))[1], risk)

    def estimate(self, size_bytes: int | None = None) -> Estimate:
        """How long saving a state of this size should take; None: of the last one's size."""
        size_bytes = self._state_bytes if size_bytes is None else size_bytes
        return Estimate(
            state_bytes=size_bytes,
            durable=self._pace[Tier.DURABLE].expect(size_bytes),
            fast=self._pace[Tier.FAST].expect(size_bytes) if self.has_fast else None,
        )

    def memory_to_come_bytes(self, size_bytes: int) -> int:
        """How much more of this job's memory the fast tier will take with states of this size; 0 if
        it is on a disk."""
        if not self._fast_is_memory:
            return 0
        there = self._stores[Tier.FAST].committed()
        return max(0, FAST_AT_MOST * size_bytes - sum(one.manifest.state_bytes for one in there))

    def take_problems(self) -> list[str]:
        """Messages about what went wrong since the last call without costing a save: a full fast
        tier, an old checkpoint that cannot be removed."""
        taken = []
        while self.problems:
            taken.append(self.problems.popleft())
        return taken

    def to_all(
        self, plan: WritePlan, request: SaveRequest, *, cancel: threading.Event | None
    ) -> None:
        """Commit on the fast tier if possible, then on the durable one.

        Raises:
            CheckpointError: the durable tier could not be written and is unchanged.
        """
        source = self.to_fast(plan, request, cancel=cancel)
        if source is None or not self.adopt(source, request, cancel=cancel):
            self.to_durable(plan, request, cancel=cancel)

    def to_fast(
        self, plan: WritePlan, request: SaveRequest, *, cancel: threading.Event | None = None
    ) -> Checkpoint | None:
        """Commit on the fast tier; None if there is none or it failed, which is only a problem.
        Epoch checkpoints are kept for later, not for a quick resume, so they skip this tier."""
        if not self.has_fast or request.kind == EPOCH:
            return None
        try:
            # the same name on both tiers: the search for the newest compares names across them
            least = self._store(Tier.DURABLE).next_number(request.step)
            self._check_memory(request)
            return self._write(Tier.FAST, plan, request, cancel=cancel, least=least)
        except SaveAbandoned:
            raise
        except (CheckpointError, OSError) as error:
            self.problems.append(f"the fast tier did not take step {request.step}: {error}")
            return None

    def _check_memory(self, request: SaveRequest) -> None:
        """The kernel would kill a job whose fast tier outgrows its memory limit."""
        if self._fast_is_memory:
            room = self._room()
            if request.state_bytes > room.free_bytes:
                raise SaveFailed(
                    f"it lies in memory, and {request.state_bytes / 1e6:,.0f} MB more would be too "
                    f"much: {room.free_bytes / 1e6:,.0f} MB may be taken ({room.message})"
                )

    def to_durable(
        self, plan: WritePlan, request: SaveRequest, *, cancel: threading.Event | None
    ) -> None:
        """Commit on the durable tier.

        Raises:
            CheckpointError: it could not be written and is unchanged.
        """
        self._write(Tier.DURABLE, plan, request, cancel=cancel)

    def adopt(
        self, source: Checkpoint, request: SaveRequest, *, cancel: threading.Event | None
    ) -> bool:
        """Copy a checkpoint of the fast tier to the durable one; False if that failed, which is
        only a problem."""
        try:
            self._commit(
                Tier.DURABLE,
                request,
                lambda store, written: store.adopt(source, cancel=cancel, written=written),
            )
        except SaveAbandoned:
            raise
        except (CheckpointError, OSError) as error:
            self.problems.append(f"step {request.step} was not copied from the fast tier: {error}")
            return False
        return True

    def prune(self) -> None:
        """Apply retention on all tiers. What cannot be removed is only a problem."""
        with self._pruning:  # two at once would trip over each other's removals
            for tier, (keep, keep_stop, keep_epochs) in self._keep.items():
                if tier not in self._stores:
                    continue
                try:
                    self._store(tier).prune(keep=keep, keep_stop=keep_stop, keep_epochs=keep_epochs)
                except (CheckpointError, OSError, RuntimeWarning) as error:
                    self.problems.append(f"old checkpoints on the {tier.value} tier stay: {error}")

    def tell(
        self,
        kind: SaveEventKind,
        request: SaveRequest,
        *,
        tier: Tier | None = None,
        seconds: float = 0.0,
        reason: str = "",
    ) -> None:
        """Emit an event. An error of the receiver is only a problem."""
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
            self.problems.append(f"{kind.value} was not recorded: {type(error).__name__}: {error}")

    def _write(
        self,
        tier: Tier,
        plan: WritePlan,
        request: SaveRequest,
        *,
        cancel: threading.Event | None,
        least: int = 1,
    ) -> Checkpoint:
        return self._commit(
            tier,
            request,
            lambda store, written: store.write(
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
            ),
        )

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
        if before is None or before[0] <= request.state:  # a save that was given up can come late
            self._newest[tier] = request.state, checkpoint
        self._pace[tier].add(
            seconds, state_bytes=request.state_bytes, syncs=syncs.count - syncs_before
        )
        self._state_bytes = request.state_bytes
        self.tell(SaveEventKind.COMMITTED, request, tier=tier, seconds=seconds)
        return checkpoint

    def _store(self, tier: Tier) -> CheckpointStore:
        """A copy for each use: a store is for one thread, and around a stop a save that was given
        up may still be using its own."""
        return copy.copy(self._stores[tier])
