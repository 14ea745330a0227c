"""Saves the state of a run: in the background, synchronously, or before a deadline."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from hydroslurm.checkpoint.deadline import (
    FOREVER_S,
    InFlight,
    Pace,
    Situation,
    choose,
    of_all_ranks,
    remaining_s,
)
from hydroslurm.checkpoint.frozen import with_fingerprint
from hydroslurm.checkpoint.host_memory import Staging
from hydroslurm.checkpoint.manifest import EPOCH
from hydroslurm.checkpoint.peers import SaveSkipped
from hydroslurm.checkpoint.save import Save, SaveRequest, write_checkpoint
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, Retention, State
from hydroslurm.checkpoint.write_plan import WritePlan, divide
from hydroslurm.core.events import EventKind
from hydroslurm.core.garbage import without_gc
from hydroslurm.core.memory import Room, room
from hydroslurm.core.threads import thread
from hydroslurm.errors import (
    AgreementFailed,
    CheckpointError,
    RanksError,
    SaveAbandoned,
    SaveFailed,
    StaleAttempt,
    UnsavableState,
    UsageError,
)

_NO_META: Mapping[str, Any] = {}
_TWO_OF_EACH = Retention()

GIVEN_UP_S = 1.0
"""The longest wait for a save that was given up before the next one begins beside it. It ends
between two writes; a hanging disk or a long fsync holds it up."""


@dataclass(frozen=True)
class SaveEvent:
    """One thing that happened to one save.

    Attributes:
        kind: what happened: one of ``SAVE_...``.
        mono_ns: when, CLOCK_MONOTONIC, nanoseconds.
        step: whose state it is.
        save_kind: ``periodic``, ``stop``, ``manual`` or ``epoch``.
        state_bytes: size of its tensors.
        seconds: of SAVE_STAGED, how long the training stalled; of SAVE_WRITTEN, how long until this
            rank's part was on the disk, so that only the commit was left; of SAVE_COMMITTED,
            SAVE_FAILED and SAVE_ABANDONED, how long it took; else 0.
        reason: why it was skipped, failed, given up or not copied; for people.
    """

    kind: EventKind
    mono_ns: int
    step: int
    save_kind: str
    state_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Saved:
    """What has become of a save by the time its caller continues.

    Attributes:
        step: whose state was to be saved.
        is_committed: that state is committed. If not, the last good checkpoint stays.
        checkpoint: the newest one, if any: of that state if it is committed.
        reason: what was chosen and what came of it, for people.
    """

    step: int
    is_committed: bool
    checkpoint: Checkpoint | None
    reason: str


class Saver:
    """The saves of one rank. For the training thread; a forked child cannot use it.

    One save runs at a time. A save in the background writes a copy, so the caller may change the
    state as soon as a method returns. Without memory for a copy, the state itself is written while
    the caller waits.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        retention: Retention = _TWO_OF_EACH,
        on_save_error: Literal["warn", "fail"] = "warn",
        exempt: Callable[[], AbstractContextManager[None]] = nullcontext,
        tell: Callable[[SaveEvent], None] | None = None,
        room: Callable[[], Room] = room,
    ) -> None:
        """Reads the manifests of earlier attempts to learn how long a save takes here.

        Args:
            store: where checkpoints are kept. All of its ranks make the same calls at the same
                steps.
            retention: applied after each commit.
            on_save_error: what :meth:`poll` does about a save that failed in the background.
            exempt: makes the context in which no pause holds a thread.
            tell: receives every event, from any thread.
            room: says how much memory copies may take.
        """
        if on_save_error not in ("warn", "fail"):
            raise UsageError(f'on_save_error is {on_save_error!r}; it must be "warn" or "fail"')
        self._store = store
        self._retention = retention
        self._on_save_error = on_save_error
        self._exempt = exempt
        self._tell = tell
        self._staging = Staging(exempt=exempt, room=room)
        self._owner_pid = os.getpid()
        self._rounds = 0
        self._state = 0
        self._saves: list[BackgroundSave] = []  # under way, or not reported yet
        self._problems: deque[str] = deque()
        self._pruning = threading.Lock()
        self._earlier = sorted(store.committed(), key=lambda one: one.manifest.created_epoch_ns)
        self._pace = Pace(self._earlier, syncs=store.syncs)
        self._state_bytes = self._earlier[-1].manifest.state_bytes if self._earlier else 0
        self._newest: tuple[int, Checkpoint] | None = None

    def reserve(self, state: State) -> str:
        """Allocate the memory for the copies of :meth:`start` in the background.

        Worth doing once, after the first step, when the optimizer has its state: otherwise the
        first save stalls several times longer than the others.

        Returns:
            Why there is no memory for copies; empty if there is.
        """
        self._check_ours()
        if self._current() is None:
            self._staging.reserve(self._divide(state))
        return self._staging.refused

    def start(
        self,
        state: State,
        *,
        step: int,
        epoch: int = 0,
        kind: str = "periodic",
        meta: Mapping[str, Any] = _NO_META,
    ) -> float:
        """Copy the state and save the copy in the background; without memory for a copy, save.

        While a save is under way on any rank, this one is skipped, with an event: a disk that
        cannot keep up must not hold up the training. The ranks agree on that in the background too:
        none waits here for another one.

        Returns:
            How long the training stalled, in seconds; 0.0 if no save was started.

        Raises:
            UnsavableState: the state holds what cannot be saved. Of several ranks, :meth:`poll`
                raises it on all.
        """
        begin_s = time.monotonic()
        request = self._next_request(step, kind, epoch, meta)
        under_way = self._current()
        if under_way is not None:
            busy = SaveSkipped(f"the save of step {under_way.step} is still under way")
            if self._is_solo:
                self._emit(EventKind.SAVE_SKIPPED, request, reason=str(busy))
            else:
                self._launch(busy, request)
            return 0.0
        try:
            with without_gc():
                plan, request = self._planned(state, request)
                self._emit(EventKind.SAVE_STARTED, request)
                staged = self._stage(plan, request)
        except BaseException as error:  # of which the others must hear
            if self._is_solo:
                raise
            self._launch(error, request)
            if not isinstance(error, Exception):
                raise
            return 0.0
        save = self._launch(staged, request)
        if staged is plan:
            save.see_through()
        return time.monotonic() - begin_s

    def save(
        self,
        state: State,
        *,
        step: int,
        epoch: int = 0,
        kind: str = "manual",
        meta: Mapping[str, Any] = _NO_META,
    ) -> Saved:
        """Save, and return once it is committed. A save under way is waited for first. An epoch is
        not saved again where the newest checkpoint of this store is of its end.

        Raises:
            UnsavableState: the state holds what cannot be saved.
            SaveFailed: it could not be written; earlier checkpoints are intact.
        """
        request = self._next_request(step, kind, epoch, meta)
        self.wait()
        newest = None if self._newest is None else self._newest[1]
        at = None if newest is None else (newest.path.parent, newest.step, newest.kind)
        if kind == EPOCH and at == (self._store.directory, step, kind):
            return Saved(step, True, newest, f"step {step} is committed already")
        try:
            plan, request = self._planned(state, request)
        except BaseException as error:
            self._refuse(error, request)
            raise
        self._emit(EventKind.SAVE_STARTED, request)
        save = self._launch(plan, request)
        save.see_through()
        if save.failure is None:
            return self._saved(request)
        self._saves.remove(save)
        if isinstance(save.failure, (CheckpointError, StaleAttempt)):
            raise save.failure
        raise SaveFailed(
            f"step {step} was not saved: {type(save.failure).__name__}: {save.failure}"
        ) from save.failure

    def save_by(
        self,
        state: State | Callable[[], State],
        *,
        step: int,
        epoch: int = 0,
        deadline_mono_s: float,
        kind: str = "stop",
        meta: Mapping[str, Any] = _NO_META,
        unchanged: bool = False,
    ) -> Saved:
        """Save for a stop whatever can still be committed in time (see ``deadline.choose``).

        Returns when the step is committed, when that has failed, or at the deadline
        (``time.monotonic()``), even if the disk hangs: a background thread writes. A failed save
        does not raise; it is reported in ``Saved.reason``, and the rest of the grace belongs to the
        caller.

        No copy is made, which would be one more than was reserved: until a save that goes on
        beyond the deadline has ended (:meth:`wait`, :meth:`close`), the state must not change.

        Args:
            unchanged: the state is certainly that of the newest save, or the one that the run
                resumed from: do not save it again. The same on all ranks.

        Raises:
            UnsavableState: a rank's state holds what cannot be saved. A save under way was waited
                for.
        """

        def left_s() -> float:
            return min(FOREVER_S, deadline_mono_s - time.monotonic())

        request = replace(self._next_request(step, kind, epoch, meta), open_s=max(0.0, left_s()))
        try:
            now = state() if callable(state) else state
            plan, request = self._planned(now, request, unchanged=unchanged)
        except BaseException as error:
            self.wait(timeout_s=left_s())
            self._refuse(error, request)
            raise
        if self._is_solo and self.is_durable:
            return self._saved(request, f"step {step} is committed already")
        save = self._launch(plan, request, by_mono_s=deadline_mono_s)
        save.see_through(left_s())
        if save.failure is not None:
            self.wait(timeout_s=left_s())  # an older state is better than none
            if isinstance(save.failure, UnsavableState):
                self._saves.remove(save)
                raise save.failure
        return self._saved(request, save.reason, save)

    def give_up(self) -> None:
        """Abandon the save under way: stop waiting for ranks that will not come."""
        if self._ours:
            for save in self._saves:
                save.give_up()

    def poll(self) -> None:
        """Report each failure in the background since the last call once.

        Warnings:
            RuntimeWarning: a save failed and ``on_save_error`` is "warn"; or something minor did,
                such as the removal of an old checkpoint.

        Raises:
            SaveFailed: a save failed and ``on_save_error`` is "fail".
            StaleAttempt: a newer attempt has begun.
            UnsavableState: the state of a rank holds what cannot be saved.
        """
        # nearly always there is nothing, and this comes at every step: no call, no getpid()
        if not (self._saves or self._problems) or not self._ours:
            return
        failures = self._take_failures()
        while self._problems:
            _warn(self._problems.popleft())
        for failure in failures:
            if isinstance(failure, (StaleAttempt, UnsavableState)):
                raise failure
        if not failures:
            return
        message = (
            f"a save in the background failed: {'; '.join(map(str, failures))}. What was committed "
            "before is whole"
        )
        if self._on_save_error == "fail":
            raise SaveFailed(message) from failures[0]
        _warn(f"{message}, the training goes on, and the next save is tried as usual")

    def wait(self, *, timeout_s: float | None = None) -> bool:
        """Wait until no save is under way; whether that is so within the timeout."""
        if not self._ours:
            return True
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        ended = [
            save.join(None if end_s is None else end_s - time.monotonic()) for save in self._saves
        ]
        return all(ended)

    def close(self) -> None:
        """Wait for the save under way, then report like :meth:`poll`."""
        if not self._ours:
            return
        self._staging.join()
        self.wait()
        self.poll()

    def expect_s(self) -> float:
        """How long saving a state of the last one's size should take, in seconds."""
        return self._pace.expect_s(self._state_bytes)

    @property
    def durable_step(self) -> int | None:
        """The newest step that this attempt has committed, or else the one that it resumed
        from."""
        return None if self._newest is None else self._newest[1].manifest.step

    @property
    def is_durable(self) -> bool:
        """Whether the state that was passed last is committed."""
        return self._has(self._state)

    def continues_from(self, checkpoint: Checkpoint) -> None:
        """Note what the state was loaded from: there is nothing to save until it changes, and what
        is frozen in it need not be saved again."""
        self._newest = 0, checkpoint
        # a newer one that was passed over is damaged, and may share what is with an older one
        passed_over = any(one.key > checkpoint.key for one in self._earlier)
        for one in self._earlier:
            if one.key == checkpoint.key or not passed_over:
                self._store.frozen.note(one)
        self._earlier.clear()

    @property
    def _ours(self) -> bool:
        return os.getpid() == self._owner_pid

    def _check_ours(self) -> None:
        if not self._ours:
            raise UsageError(
                f"this Saver belongs to process {self._owner_pid}, from which this one, "
                f"{os.getpid()}, was forked; only the process that trains can save"
            )

    @property
    def _is_solo(self) -> bool:
        return self._store.peers.world_size == 1

    def _next_request(
        self, step: int, kind: str, epoch: int, meta: Mapping[str, Any]
    ) -> SaveRequest:
        """All ranks make their calls in the same order, which numbers the topics."""
        self._check_ours()
        self._rounds += 1
        return SaveRequest(step, kind, epoch, meta, topic=f"save/{self._rounds}")

    def _divide(self, state: State) -> WritePlan:
        """The one walk over the state that a save makes; raises UnsavableState."""
        peers = self._store.peers
        return divide(state, rank=peers.rank, world_size=peers.world_size)

    def _planned(
        self, state: State, request: SaveRequest, *, unchanged: bool = False
    ) -> tuple[WritePlan, SaveRequest]:
        """What is to be written, with whether what is frozen has to be; raises UnsavableState."""
        plan = self._divide(state)
        is_stored = True
        if plan.frozen:
            plan = with_fingerprint(plan)
            is_stored = self._store.frozen.have(plan)
        plan = replace(plan, is_stored=is_stored)
        if not unchanged:
            self._state += 1
        return plan, replace(request, state_bytes=plan.state_bytes, state=self._state)

    def _refuse(self, error: BaseException, request: SaveRequest) -> None:
        """Tell the other ranks why this one cannot save."""
        if not self._is_solo:
            with suppress(CheckpointError, RanksError):
                write_checkpoint(self._store, error, request)

    def _stage(self, plan: WritePlan, request: SaveRequest) -> WritePlan:
        """A copy; ``plan`` itself where there is no memory for one."""
        begin_s = time.monotonic()
        copied = self._staging.copy(plan)
        if copied is None:
            self._emit(EventKind.SAVE_NOT_COPIED, request, reason=self._staging.refused)
            return plan
        self._emit(EventKind.SAVE_STAGED, request, seconds=time.monotonic() - begin_s)
        return copied

    # --- the saves under way: more than one only around a stop

    def _current(self) -> BackgroundSave | None:
        """The youngest one that is under way."""
        found = (save for save in reversed(self._saves) if save.running and save.writes)
        return next(found, None)

    def _launch(
        self,
        plan: WritePlan | BaseException,
        request: SaveRequest,
        *,
        by_mono_s: float | None = None,
    ) -> BackgroundSave:
        """Save in the background, by a deadline if there is one; or only tell the other ranks there
        why this one cannot."""
        writes = isinstance(plan, WritePlan)
        self._saves = [one for one in self._saves if not one.join(0) or one.failure is not None]
        write = partial(self._write, plan, request, by_mono_s, self._current())
        save = BackgroundSave(
            partial(self._work, write),
            request.step,
            request.state,
            self._pace.expect_s(request.state_bytes) if writes else 0.0,
            writes,
        )
        self._saves.append(save)
        return save

    def _work(self, write: Callable[[BackgroundSave], None], background: BackgroundSave) -> None:
        """Save, then apply retention, for which no stop waits."""
        with self._exempt():
            write(background)
            background.ended.set()
            if background.writes:
                self._prune()

    def _write(
        self,
        plan: WritePlan | BaseException,
        request: SaveRequest,
        by_mono_s: float | None,
        flight: BackgroundSave | None,
        background: BackgroundSave,
    ) -> None:
        """Commit a state; measure and report it.

        Raises:
            CheckpointError: it could not be written; the store is unchanged.
        """
        begun_s = time.monotonic()

        def written(since_s: float) -> None:
            nonlocal begun_s
            begun_s = since_s
            self._emit(EventKind.SAVE_WRITTEN, request, seconds=time.monotonic() - begun_s)

        save = Save(self._store, request, background.cancel)
        try:
            if by_mono_s is None:
                save.open(plan)
                background.opened.set()
            else:
                if flight is not None:  # of two saves of one step the later has the higher number
                    flight.opened.wait(request.open_s)
                now = self._situation(request, by_mono_s, flight)
                now = of_all_ranks(save.open(plan, now))
                background.opened.set()
                background.reason = self._make_way(request, now, flight)
                if self._has(request.state):  # so have all: they agreed on the commit, and saw it
                    save.discard()
                    return
                begun_s = time.monotonic()
            checkpoint = save.write(written)
        except SaveSkipped as skipped:
            self._emit(EventKind.SAVE_SKIPPED, request, reason=str(skipped))
            return
        except BaseException as error:
            given_up = isinstance(error, SaveAbandoned)
            kind = EventKind.SAVE_ABANDONED if given_up else EventKind.SAVE_FAILED
            self._emit(kind, request, seconds=time.monotonic() - begun_s, reason=str(error))
            raise
        seconds = time.monotonic() - begun_s
        # a save that was given up can come late
        if self._newest is None or self._newest[0] <= request.state:
            self._newest = request.state, checkpoint
        self._pace.add(seconds, state_bytes=request.state_bytes)
        self._state_bytes = request.state_bytes
        self._emit(EventKind.SAVE_COMMITTED, request, seconds=seconds)

    def _situation(
        self, request: SaveRequest, by_mono_s: float, flight: BackgroundSave | None
    ) -> Situation:
        """What this rank knows before a deadline."""
        return Situation(
            left_s=min(FOREVER_S, by_mono_s - time.monotonic()),
            save_s=self._pace.expect_s(request.state_bytes),
            in_flight=None if flight is None else flight.status(request.state),
            committed_step=self.durable_step,
            is_committed=self._has(request.state),
        )

    def _make_way(self, request: SaveRequest, now: Situation, flight: BackgroundSave | None) -> str:
        """Wait for the save in flight or give it up; what was chosen, for people."""
        choice = choose(request.step, now)
        self._emit(EventKind.SAVE_STARTED, request, reason=choice.reason)
        if flight is not None and not flight.wait(choice.wait_s):
            if choice.give_up:  # it may fail because another rank has given it up first
                flight.give_up()
                flight.wait(min(GIVEN_UP_S, now.left_s / 10))
            else:
                flight.wait()
        return choice.reason

    def _has(self, state: int) -> bool:
        """Whether the state of this number, or a later one, is committed."""
        return self._newest is not None and self._newest[0] >= state

    def _prune(self) -> None:
        """Apply retention. What cannot be removed is only a problem."""
        with self._pruning:  # two at once would trip over each other's removals
            try:
                self._store.prune(self._retention)
            except (CheckpointError, OSError, RuntimeWarning) as error:
                self._problems.append(f"old checkpoints stay: {error}")

    def _take_failures(self) -> list[BaseException]:
        """Of the saves that ended; each is given once. None is that a save was given up, or that
        another rank was quicker to give it up."""
        ended = [save for save in self._saves if save.join(0)]
        self._saves = [save for save in self._saves if save not in ended]
        return [
            save.failure
            for save in ended
            if save.failure is not None
            and not isinstance(save.failure, SaveAbandoned)
            and not (save.cancel.is_set() and isinstance(save.failure.__cause__, AgreementFailed))
        ]

    def _emit(
        self,
        kind: EventKind,
        request: SaveRequest,
        *,
        seconds: float = 0.0,
        reason: str = "",
    ) -> None:
        """Tell of an event. An error of the receiver is only a problem."""
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
            self._problems.append(f"{kind.value} was not recorded: {type(error).__name__}: {error}")

    def _saved(
        self,
        request: SaveRequest,
        chosen: str = "",
        save: BackgroundSave | None = None,
    ) -> Saved:
        """The outcome; it reports a failure of the save, so that ``poll`` does not."""
        failure = None
        if save is not None and not save.running and save.failure is not None:
            failure = save.failure
            self._saves.remove(save)
        newest = None if self._newest is None else self._newest[1]
        step, is_committed = request.step, self.is_durable
        came = f"step {step} is committed"
        if not is_committed:
            why = (
                "the save is still under way" if failure is None else f"the save failed ({failure})"
            )
            came = f"step {step} is not committed: {why}; "
            if newest is None:
                came += "nothing is committed"
            elif newest.step == step:
                came += f"what is kept is an earlier save of this step ({newest.path})"
            else:
                came += f"step {newest.step} is committed"
        return Saved(step, is_committed, newest, f"{came}; {chosen}" if chosen else came)


@dataclass(eq=False)
class BackgroundSave:
    """Runs one save beside the training, and keeps how it ended.

    An interpreter that shuts down waits for its thread, so that a process which simply ends has its
    last save committed. A save needs no executor, all of which are closed by then. The thread lives
    as long as the save: none is left idle in a process that forks.

    Attributes:
        work: does the save of state number ``state``, of this step.
        expected_s: how long it should take.
        writes: False if this rank only tells the others that it cannot take part.
        reason: of a stop, what was chosen, for people.
        opened: set once its folder has a name, or it has ended.
        ended: set once the checkpoint is committed or the save has failed, which may be before the
            work returns: removing an old checkpoint of some GB takes longer than a stop may have.
    """

    work: Callable[[BackgroundSave], None]
    step: int
    state: int
    expected_s: float
    writes: bool
    failure: BaseException | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        """Begin at once."""
        self.ended, self.opened = threading.Event(), threading.Event()
        self.cancel = threading.Event()
        self._begin_s = time.monotonic()
        name = f"hydroslurm-save-{self.step}"
        self._thread = thread(self._run, name=name, daemon=False)
        self._thread.start()

    @property
    def running(self) -> bool:
        return not self.ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, after waiting so long at the most."""
        return self.ended.wait(_bounded(timeout_s))

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether its thread is over, after waiting so long at the most."""
        self._thread.join(_bounded(timeout_s))
        return not self._thread.is_alive()

    def see_through(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, and without a timeout until its thread is over. If a signal
        handler raises meanwhile, it is given up and waited for: before that the state that it
        writes is not the caller's own."""
        try:
            if timeout_s is None:
                self.join()
            else:
                self.wait(timeout_s)
        except BaseException:
            self.give_up()
            self.join()
            raise

    def give_up(self) -> None:
        """Ask it to end early; a write or fsync that the kernel is busy with is not interrupted."""
        self.cancel.set()

    def status(self, state: int) -> InFlight:
        """Its step, what it still needs, and whether it writes the state of this number."""
        elapsed_s = time.monotonic() - self._begin_s
        rest_s = remaining_s(expected_s=self.expected_s, elapsed_s=elapsed_s)
        return InFlight(self.step, rest_s, is_this=self.state == state)

    def _run(self) -> None:
        try:
            self.work(self)
        except BaseException as error:  # kept for the training thread, which reports it
            self.failure = error
        finally:
            self.opened.set()
            self.ended.set()


def _bounded(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX)


def _warn(text: str) -> None:
    warnings.warn(f"hydroslurm: {text}", RuntimeWarning, stacklevel=3)
