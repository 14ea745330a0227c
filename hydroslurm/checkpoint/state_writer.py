"""Writes states to the store of one rank: commits, prunes, measures, reports."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydroslurm.checkpoint.estimate import Pace
from hydroslurm.checkpoint.outcome import SaveEvent, SaveEventKind
from hydroslurm.checkpoint.retention import check_counts
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
from hydroslurm.checkpoint.write_plan import WritePlan
from hydroslurm.errors import CheckpointError, SaveAbandoned


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


class StateWriter:
    """Writes the states of one rank. Thread-safe."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        keep: int,
        keep_stop: int,
        keep_epochs: int | None = None,
        tell: Callable[[SaveEvent], None] | None,
    ) -> None:
        check_counts(keep=keep, keep_stop=keep_stop, keep_epochs=keep_epochs)
        self.problems: deque[str] = deque()
        self._store = store
        self._prune = functools.partial(
            store.prune, keep=keep, keep_stop=keep_stop, keep_epochs=keep_epochs
        )
        self._tell = tell
        self._pruning = threading.Lock()
        self._earlier = sorted(store.committed(), key=lambda one: one.manifest.created_epoch_ns)
        self._pace = Pace(self._earlier, syncs=store.syncs)
        self._state_bytes = self._earlier[-1].manifest.state_bytes if self._earlier else 0
        self._newest: tuple[int, Checkpoint] | None = None

    def continues_from(self, checkpoint: Checkpoint) -> None:
        """Note what this attempt resumes from."""
        self._newest = 0, checkpoint
        # a newer one that was passed over is damaged, and may share what is with an older one
        passed_over = any(one.key > checkpoint.key for one in self._earlier)
        for one in self._earlier:
            if one.key == checkpoint.key or not passed_over:
                self._store.frozen.note(one)
        self._earlier.clear()

    @property
    def newest(self) -> Checkpoint | None:
        """The newest checkpoint: by this attempt, or the one that it resumes from."""
        return None if self._newest is None else self._newest[1]

    def durable_step(self) -> int | None:
        """The step of the newest checkpoint."""
        return None if self.newest is None else self.newest.step

    def is_durable(self, state: int) -> bool:
        """Whether the state of this number, or a later one, is committed."""
        return self._newest is not None and self._newest[0] >= state

    def expect_s(self, size_bytes: int | None = None) -> float:
        """How long saving a state of this size should take; None: of the last one's size."""
        return self._pace.expect_s(self._state_bytes if size_bytes is None else size_bytes)

    def take_problems(self) -> list[str]:
        """Messages about what went wrong since the last call without costing a save, such as an old
        checkpoint that cannot be removed."""
        taken = []
        while self.problems:
            taken.append(self.problems.popleft())
        return taken

    def write(
        self, plan: WritePlan, request: SaveRequest, *, cancel: threading.Event | None
    ) -> None:
        """Commit a state.

        Raises:
            CheckpointError: it could not be written; the store is unchanged.
        """
        begin, syncs = time.monotonic(), self._store.syncs
        syncs_before = syncs.count

        def written() -> None:
            self.tell(SaveEventKind.WRITTEN, request, seconds=time.monotonic() - begin)

        try:
            checkpoint = self._store.write(
                plan,
                step=request.step,
                epoch=request.epoch,
                kind=request.kind,
                meta=request.meta,
                cancel=cancel,
                topic=request.topic,
                written=written,
                again=request.again,
            )
        except BaseException as error:
            given_up = isinstance(error, SaveAbandoned)
            kind = SaveEventKind.ABANDONED if given_up else SaveEventKind.FAILED
            self.tell(kind, request, seconds=time.monotonic() - begin, reason=str(error))
            raise
        seconds = time.monotonic() - begin
        # a save that was given up can come late
        if self._newest is None or self._newest[0] <= request.state:
            self._newest = request.state, checkpoint
        self._pace.add(seconds, state_bytes=request.state_bytes, syncs=syncs.count - syncs_before)
        self._state_bytes = request.state_bytes
        self.tell(SaveEventKind.COMMITTED, request, seconds=seconds)

    def prune(self) -> None:
        """Apply retention. What cannot be removed is only a problem."""
        with self._pruning:  # two at once would trip over each other's removals
            try:
                self._prune()
            except (CheckpointError, OSError, RuntimeWarning) as error:
                self.problems.append(f"old checkpoints stay: {error}")

    def tell(
        self,
        kind: SaveEventKind,
        request: SaveRequest,
        *,
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
            state_bytes=request.state_bytes,
            seconds=seconds,
            reason=reason,
        )
        try:
            self._tell(event)
        except Exception as error:
            self.problems.append(f"{kind.value} was not recorded: {type(error).__name__}: {error}")
