"""This rank's side of a pause of all ranks: hold, report counts, let collectives through.

The gate of a rank that is signalled closes at once, within microseconds and without the others.
What is here follows within milliseconds and parks the others where the same collectives are behind
all of them. What the coordinator makes of the reports: :mod:`hydroslurm.coordination.pause_state`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydroslurm.coordination import collectives
from hydroslurm.coordination.messages import runs_of
from hydroslurm.core.events import EventKind
from hydroslurm.errors import CoordinatorLost
from hydroslurm.gate.protocol import Action, Cause, GateEvent, GateState

if TYPE_CHECKING:
    from hydroslurm.gate.native_gate import NativeGate

AGREE_S = 1.5
"""After this long without an agreement an event says that a suspend may find collectives in flight:
Slurm's SIGSTOP comes 2 s after SIGTSTP."""

RECHECK_S = 0.05
"""When to check a gate again that has not come to rest, in case its event was missed."""

Emit = Callable[[EventKind, Mapping[str, object]], None]

_CHANGES_CAUSES = (EventKind.GATE_CLOSED, EventKind.RESUMED, EventKind.CAUSES_CHANGED)


@dataclass(frozen=True)
class _RequestedRound:
    """A round that this rank has not reported its counts for."""

    pause: int
    number: int
    exact: bool
    not_before_s: float


class PauseBarrier:
    """Between the gate (events, in the controller's thread) and the coordinator (messages, in the
    channel's thread).

    Args:
        send: sends a message to the coordinator.
        emit: writes an event of this rank.
        wake: has :attr:`due_s` read again.
    """

    def __init__(
        self,
        gate: NativeGate,
        *,
        send: Callable[[Any], None],
        emit: Emit,
        wake: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._send = send
        self._emit = emit
        self._wake = wake
        self._lock = threading.Lock()
        self._report_lock = threading.Lock()
        self._reported: dict[str, int] | None = None
        self._has_own_cause = False
        self._pause = 0
        self._requested: _RequestedRound | None = None
        self._held_s = 0.0
        self._undecided = False
        self._let_through = 0
        self._recheck_s = 0.0

    # --- the gate's side

    def on_gate_event(self, event: GateEvent) -> None:
        """The gate has moved."""
        kind = event.kind
        if kind is EventKind.STOP_REQUESTED:
            self._report_causes(Cause(0))
        elif kind in _CHANGES_CAUSES:
            self._report_causes(event.causes)
        if kind in (EventKind.PARKED, EventKind.LATE_OPERATOR_HELD):
            self._report_counts()

    def catch_up(self) -> None:
        """Tell a coordinator that was just joined whether this rank is paused already."""
        self._report_causes(self._gate.status().causes)

    def _report_causes(self, causes: Cause) -> None:
        own = bool(causes & ~(Cause.PEERS | Cause.VACATED))
        with self._lock:
            if own == self._has_own_cause:
                return
            self._has_own_cause = own
        self._try_send({"type": "pause" if own else "resume"})

    # --- the coordinator's side

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Act on a message about a pause."""
        kind = message["type"]
        if kind == "describe":
            groups = {key: runs_of(one.ranks) for key, one in collectives.groups().items()}
            wanted = {key: groups[key] for key in message["groups"] if key in groups}
            self._try_send({"type": "members", "groups": wanted})
            return
        if kind == "release":
            self._release()
            return
        if kind == "hold":
            with self._report_lock:
                self._reported = None
            with self._lock:
                self._pause, self._let_through = message["pause"], 0
                self._held_s, self._undecided = time.monotonic(), True
            self._request(Action.PAUSE)
        if message["pause"] != self._pause:
            return
        if kind == "all_parked":
            self._all_parked(message)
            return
        if kind == "let_through":
            self._let_collectives_through(int(message["n"]))
        elif kind == "count" and self._gate.status().allowance:
            self._gate.hold_here()  # nobody is behind: the rest would take this rank ahead
        not_before_s = time.monotonic() + message["wait_ms"] / 1e3
        with self._lock:
            self._requested = _RequestedRound(
                self._pause, message["round"], exact=message["exact"], not_before_s=not_before_s
            )
            self._recheck_s = not_before_s
        self._report_counts()

    @property
    def due_s(self) -> float | None:
        """When :meth:`tick` is due (``time.monotonic()``), None for not at all."""
        with self._lock:
            times = [self._recheck_s] if self._requested else []
            if self._undecided:
                times.append(self._held_s + AGREE_S)
        return min(times, default=None)

    def tick(self) -> None:
        """Do what has become due."""
        with self._lock:
            took_s = time.monotonic() - self._held_s
            if self._undecided and took_s > 2 * AGREE_S:  # SIGSTOP came in between
                self._held_s, took_s = time.monotonic(), 0.0
            late = self._undecided and took_s >= AGREE_S
            if late:
                self._undecided = False
        if late:
            self._gate.hold_here()  # a rank that reaches no collective would train on
            in_flight = collectives.in_flight()
            self._emit(
                EventKind.AGREEMENT_FAILED,
                {
                    "what": "park",
                    "in_flight": in_flight,
                    "message": (
                        f"the ranks did not come to one collective within {AGREE_S:g} s; a suspend "
                        "may find one in flight, which then needs a time-out longer than the "
                        "suspend"
                    ),
                },
            )
        self._report_counts()

    def lose(self) -> None:
        """The coordinator is gone and would never release this rank. The next one learns of this
        rank's own pause from :meth:`catch_up`."""
        with self._lock:
            self._has_own_cause = False
        self._release()

    # --- inside

    def _let_collectives_through(self, n: int) -> None:
        """Only what is missing: a rank that waits for its data may have an allowance left."""
        more = n - self._gate.status().allowance
        if more > 0:
            self._gate.let_through(more)
            self._let_through += more

    def _report_counts(self) -> None:
        """Send the counts of the requested round, if this rank is at rest."""
        # one after the other: what a report leaves out is in the one that was sent before it
        with self._report_lock:
            requested = self._take_requested()
            if requested is None:
                return
            before, groups = self._reported, _counts_by_group(exact=requested.exact)
            self._reported = groups
            self._try_send(
                {
                    "type": "counts",
                    "pause": requested.pause,
                    "round": requested.number,
                    "groups": None if groups == before else groups,
                    # the exact number takes 20 ms and more
                    "in_flight": 0 if collectives.are_complete() else collectives.in_flight(),
                    "allowance": self._gate.status().allowance,
                }
            )

    def _take_requested(self) -> _RequestedRound | None:
        """The requested round, which is then not requested any more; None before it is due, and
        while threads of this rank still run."""
        with self._lock:
            requested = self._requested
            if requested is None:
                return None
            if time.monotonic() < requested.not_before_s:
                self._wake()
                return None
            if self._gate.status().state in (GateState.PARKING, GateState.RUNNING):
                self._recheck_s = time.monotonic() + RECHECK_S  # the gate's event is sooner
                return None
            self._requested = None
            return requested

    def _all_parked(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._requested = None
            self._undecided = False
            took_s = time.monotonic() - self._held_s
        self._emit(
            EventKind.ALL_PARKED,
            {
                "parking": f"{message['pause']}-{message['round']}",
                "of_ranks": message["of_ranks"],
                "in_flight": message["in_flight"],
                "rounds": message["rounds"],
                "let_through": self._let_through,
                "agreed_us": took_s * 1e6,
            },
        )

    def _release(self) -> None:
        with self._lock:
            self._requested = None
            self._undecided = False
        self._request(Action.RESUME)

    def _request(self, action: Action) -> None:
        with contextlib.suppress(RuntimeError):  # not running any more: this rank is leaving
            self._gate.request(action, Cause.PEERS)

    def _try_send(self, message: Any) -> None:
        with contextlib.suppress(CoordinatorLost):  # the channel reports it
            self._send(message)


def _counts_by_group(*, exact: bool) -> dict[str, int]:
    """Key of a process group -> how many collectives this rank has issued on it."""
    issued = {key: one.issued for key, one in collectives.groups().items()}
    if exact:
        told = collectives.issued_exact() or {}
        issued |= {key: told[key] for key in issued.keys() & told.keys()}
    return issued
