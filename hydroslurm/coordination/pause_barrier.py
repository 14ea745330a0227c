"""This rank's side of a pause of all ranks: held, counted, let through, until nobody is behind.

The gate of a rank that is signalled closes at once, in microseconds and alone; what is here follows
within milliseconds, and makes the others stand where the same collectives are behind all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hydroslurm.coordination import collectives
from hydroslurm.core.events import EventKind
from hydroslurm.errors import HubLost
from hydroslurm.gate.protocol import (
    Action,
    Cause,
    Gate,
    GateEvent,
    GateState,
)

AGREE_S = 1.5
"""After so long without an answer it is written down that a suspend may find collectives in flight:
Slurm's SIGSTOP comes 2 s after SIGTSTP."""

LOOK_AGAIN_S = 0.05
"""At a gate that has not come to rest, should its event be missed."""

Tell = Callable[[EventKind, Mapping[str, object]], None]


@dataclass(frozen=True)
class _Wanted:
    """A round for which this rank has not told its numbers."""

    round: int
    exact: bool
    not_before_s: float


class Parking:
    """Between the gate (events, in the controller's thread) and the hub (messages, in the link's).

    Args:
        send: to the hub.
        tell: writes an event of this rank.
        wake: has :attr:`due_s` looked at again.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        send: Callable[[Any], None],
        tell: Tell,
        wake: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._send = send
        self._tell = tell
        self._wake = wake
        self._lock = threading.Lock()
        self._own = False
        self._pause = 0
        self._wanted: _Wanted | None = None
        self._held_s = 0.0
        self._undecided = False
        self._let_through = 0
        self._look_s = 0.0

    # --- the gate's side
    # --------------------------------------------------------------------------------------------

    def see(self, event: GateEvent) -> None:
        """The gate has moved."""
        kind = event.kind
        if kind is EventKind.STOP_REQUESTED:
            self._own_causes(Cause(0))
        elif kind in (
            EventKind.GATE_CLOSED,
            EventKind.RESUMED,
            EventKind.CAUSES_CHANGED,
        ):
            self._own_causes(event.causes)
        if kind in (EventKind.PARKED, EventKind.LATE_OPERATOR_HELD):
            self._publish()

    def catch_up(self) -> None:
        """The hub is there: tell it when this rank is paused already."""
        self._own_causes(self._gate.status().causes)

    def _own_causes(self, causes: Cause) -> None:
        own = bool(causes & ~Cause.PEERS)
        with self._lock:
            if own == self._own:
                return
            self._own = own
        self._try_send({"do": "pause" if own else "resume"})

    # --- the hub's side
    # --------------------------------------------------------------------------------------------

    def hear(self, message: Mapping[str, Any]) -> None:
        """A message about a pause."""
        say = message["say"]
        if say == "release":
            self._release()
            return
        if say == "hold":
            with self._lock:
                self._pause, self._let_through = message["pause"], 0
                self._held_s, self._undecided = time.monotonic(), True
            self._request(Action.PAUSE)
        if message["pause"] != self._pause:
            return
        if say == "all_parked":
            self._all_parked(message)
            return
        if say == "pass":
            self._pass(int(message["n"]))
        elif say == "count" and self._gate.status().allowance:
            self._gate.hold_here()  # nobody is behind: what is left would take this rank ahead
        not_before_s = time.monotonic() + message["wait_ms"] / 1e3
        with self._lock:
            self._wanted = _Wanted(message["round"], message["exact"], not_before_s)
            self._look_s = not_before_s
        self._publish()

    @property
    def due_s(self) -> float | None:
        """When :meth:`tick` is wanted."""
        with self._lock:
            times = [self._look_s] if self._wanted else []
            if self._undecided:
                times.append(self._held_s + AGREE_S)
        return min(times, default=None)

    def tick(self) -> None:
        """Something is due."""
        with self._lock:
            late = self._undecided and time.monotonic() - self._held_s >= AGREE_S
            if late:
                self._undecided = False
        if late:
            if self._gate.stops_at_collectives:
                self._gate.hold_here()  # one that comes to no collective would train on
            in_flight = collectives.in_flight()
            self._tell(
                EventKind.AGREEMENT_FAILED,
                {
                    "what": "park",
                    "in_flight": in_flight,
                    "words": (
                        f"the ranks did not come to one collective within {AGREE_S:g} s; a suspend "
                        "may find one in flight, which then needs a time-out longer than the "
                        "suspend"
                    ),
                },
            )
        self._publish()

    def lose(self) -> None:
        """The hub is gone: nobody would ever let this rank go on. Another one hears of a pause of
        this rank's own by :meth:`catch_up`."""
        with self._lock:
            self._own = False
        self._release()

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _pass(self, n: int) -> None:
        """Only what is missing: a rank that waits for its data may have an allowance left."""
        more = n - self._gate.status().allowance
        if more > 0 and self._gate.stops_at_collectives:
            self._gate.let_through(more)
            self._let_through += more

    def _publish(self) -> None:
        """Tell the numbers of the round that is wanted, if this rank is at rest."""
        with self._lock:
            wanted = self._wanted
            if wanted is None:
                return
            if time.monotonic() < wanted.not_before_s:
                self._wake()
                return
            if self._gate.status().state in (GateState.PARKING, GateState.RUNNING):
                self._look_s = time.monotonic() + LOOK_AGAIN_S  # the gate's event is sooner
                return
            self._wanted = None
            pause = self._pause
        self._try_send(
            {
                "do": "counts",
                "pause": pause,
                "round": wanted.round,
                "groups": _numbers(exact=wanted.exact),
                # the exact number takes 20 ms and more
                "in_flight": 0 if collectives.are_complete() else collectives.in_flight(),
                "allowance": self._gate.status().allowance,
            }
        )

    def _all_parked(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._wanted = None
            self._undecided = False
            took_s = time.monotonic() - self._held_s
        self._tell(
            EventKind.ALL_PARKED,
            {
                "of_ranks": message["of_ranks"],
                "in_flight": message["in_flight"],
                "rounds": message["rounds"],
                "let_through": self._let_through,
                "agreed_us": took_s * 1e6,
            },
        )

    def _release(self) -> None:
        with self._lock:
            self._wanted = None
            self._undecided = False
        self._request(Action.RESUME)

    def _request(self, action: Action) -> None:
        try:
            self._gate.request(action, Cause.PEERS)
        except RuntimeError:  # not running any more: this rank is leaving
            return

    def _try_send(self, message: Any) -> None:
        try:
            self._send(message)
        except HubLost:
            return  # told by the link


def _numbers(*, exact: bool) -> dict[str, Any]:
    """Key of a process group -> its ranks, and how many collectives this rank has issued on it."""
    groups = collectives.groups()
    issued = {key: one.issued for key, one in groups.items()}
    if exact:
        issued |= collectives.issued_exact() or {}
    return {key: [list(one.ranks), issued[key]] for key, one in groups.items()}
