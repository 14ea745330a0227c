"""The agreements that this rank waits for, across coordinators: one that is killed is replaced."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeAlias

from hydroslurm.coordination.authentication import LIMIT_DEPTH, pack
from hydroslurm.coordination.messages import MAX_COLLECTORS, Message, Runs, ranks_of, runs_of
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.files import parse_json
from hydroslurm.errors import AgreementFailed, CoordinatorLost, RanksError, UsageError

_POLL_S = 0.5
_MOST_STARTED = 16
"""No more operations of several agreements, such as saves, are under way at a time."""


_Pending: TypeAlias = "futures.Future[Mapping[int, Any]]"
"""One agreement that was asked for."""


class PendingAgreements:
    """Requested by any thread, resolved by the channel's thread.

    If the coordinator dies, every operation of several agreements (``save/3/open``,
    ``save/3/commit``) that began with it is aborted on all ranks: a rank that has noticed takes no
    further part, and one that has not must not wait for it.

    Attributes:
        cut_off: aborted operations: this rank began them with coordinators that are gone.
    """

    def __init__(
        self,
        *,
        world_size: int,
        send: Callable[[Any], None],
        lost: Callable[[], CoordinatorLost | None],
    ) -> None:
        """
        Args:
            world_size: how many ranks there are.
            send: to the coordinator, now or once it is found; raises CoordinatorLost.
            lost: why there will be no coordinator any more, None while there may be one.
        """
        self.cut_off: frozenset[str] = frozenset()
        self._world_size = world_size
        self._send = send
        self._lost = lost
        self._lock = threading.Lock()
        self._open: dict[str, _Pending] = {}
        self._started: collections.deque[str] = collections.deque(maxlen=_MOST_STARTED)

    def agree(
        self,
        topic: str,
        value: Any,
        *,
        timeout_s: float | None = None,
        cancel: threading.Event | None = None,
        among: Sequence[int] | None = None,
        collect_at: Collection[int] | None = None,
    ) -> Mapping[int, Any]:
        """Submit a value and get everybody's; see :class:`hydroslurm.checkpoint.peers.Peers`.

        Raises:
            AgreementFailed: a rank has died, left or given up: the same for all.
            CoordinatorLost: nothing connects the ranks any more.
            UsageError: this rank waits for that topic already.
        """
        message = self._message(topic, value, among=among, collect_at=collect_at)
        self._start(_operation_of(topic))
        pending: _Pending = futures.Future()
        with self._lock:
            if topic in self._open:
                raise UsageError(f"{topic!r} is being agreed on already; a topic is used once")
            self._open[topic] = pending
        try:
            self._send(message)
            self._wait(topic, pending, timeout_s=timeout_s, cancel=cancel)
        finally:
            with self._lock:
                self._open.pop(topic, None)
        return pending.result()

    # --- for the channel's thread

    def agreed(self, message: Mapping[str, Any]) -> None:
        """All values have arrived."""
        topic = message["topic"]
        try:
            self._resolve(topic, values_of(message))
        except ValueError as error:  # of one rank, whose value the coordinator does not read
            reason = f"a value of {topic!r} cannot be read: {error}"
            self._resolve(topic, AgreementFailed(reason))

    def failed(self, message: Mapping[str, Any]) -> None:
        """Ranks are gone, or have given up."""
        self._resolve(message["topic"], _failure(message))

    def interrupt(self, error: CoordinatorLost) -> None:
        """Fail everything pending: nothing is decided between two coordinators."""
        self.cut_off = frozenset(one for one in self._started if not one.startswith("run/"))
        self._started.clear()
        self.fail(error)

    def reconnected(self, cut_off: Iterable[str]) -> None:
        """All ranks have joined one coordinator: what any of them had started at the last one is
        over."""
        self.cut_off = self.cut_off.union(cut_off)
        with self._lock:
            over = [
                one for topic, one in self._open.items() if _operation_of(topic) in self.cut_off
            ]
        for pending in over:
            _decide(pending, _is_cut_off("it was started"))

    def fail(self, error: CoordinatorLost) -> None:
        """Fail everything pending."""
        with self._lock:
            waiting = list(self._open.values())
        for pending in waiting:
            _decide(pending, error)

    # --- inside

    def _message(
        self,
        topic: str,
        value: Any,
        *,
        among: Sequence[int] | None,
        collect_at: Collection[int] | None,
    ) -> Message:
        everybody = among is None or len(set(among)) == self._world_size
        if collect_at is not None and len(collect_at) > MAX_COLLECTORS:
            raise UsageError(
                f"{topic!r} is collected at {len(collect_at)} ranks, and at most {MAX_COLLECTORS} "
                "may; leave collect_at out to tell all"
            )
        return {
            "type": "agree",
            "topic": topic,
            "value": pack(value).decode(),
            "among": None if everybody or among is None else runs_of(set(among)),
            "collect_at": None if collect_at is None else sorted(collect_at),
        }

    def _start(self, operation: str) -> None:
        if operation in self.cut_off:
            raise _is_cut_off(f"{operation} was started")
        if operation not in self._started:
            self._started.append(operation)

    def _wait(
        self,
        topic: str,
        pending: _Pending,
        *,
        timeout_s: float | None,
        cancel: threading.Event | None,
    ) -> None:
        """Until it is decided. The coordinator answers a withdrawal too, which may be too late."""
        waited_s, withdrawn = 0.0, False
        poll_s = _POLL_S if cancel is None else 0.02
        clock = AwakeClock(_POLL_S)
        begin_s = clock.now_s()
        while not pending.done():
            if (lost := self._lost()) is not None:
                raise lost
            left_s = poll_s if timeout_s is None else min(poll_s, max(0.0, timeout_s - waited_s))
            futures.wait((pending,), left_s if not withdrawn else _POLL_S)
            waited_s = clock.now_s() - begin_s
            given_up = cancel is not None and cancel.is_set()
            late = timeout_s is not None and waited_s >= timeout_s
            if (given_up or late) and not withdrawn and not pending.done():
                withdrawn = True
                self._send({"type": "withdraw", "topic": topic})

    def _resolve(self, topic: str, outcome: Mapping[int, Any] | RanksError) -> None:
        with self._lock:
            pending = self._open.get(topic)
        if pending is not None:
            _decide(pending, outcome)


def values_of(message: Mapping[str, Any]) -> dict[int, Any]:
    """The values of an agreement, in rank order. Ranks that have submitted the same share one
    object.

    Raises:
        ValueError: one is not JSON.
    """
    values: dict[int, Any] = {}
    for text, runs in message["values"]:
        values |= dict.fromkeys(ranks_of(runs), parse_json(text, max_depth=LIMIT_DEPTH))
    return dict(sorted(values.items()))


def _decide(pending: _Pending, outcome: Mapping[int, Any] | RanksError) -> None:
    """The first decision counts; all of them are made in one thread."""
    if pending.done():
        return
    if isinstance(outcome, RanksError):
        pending.set_exception(outcome)
    else:
        pending.set_result(outcome)


def _operation_of(topic: str) -> str:
    """What an agreement is a part of: ``save/3`` for ``save/3/open``."""
    return "/".join(topic.split("/")[:2])


def _is_cut_off(what: str) -> CoordinatorLost:
    return CoordinatorLost(f"what connects the ranks of this job was lost since {what}")


def _failure(message: Mapping[str, Any]) -> AgreementFailed:
    missing, withdrawn = ranks_of(message["missing"]), ranks_of(message["withdrawn"])
    parts = []
    if missing:
        parts.append(f"gone: rank {_told(message['missing'])}")
    if withdrawn:
        parts.append(f"given up: rank {_told(message['withdrawn'])}")
    if message.get("message"):
        parts.append(str(message["message"]))
    return AgreementFailed(
        f"not all ranks took part in {message['topic']!r}: {'; '.join(parts)}",
        missing=tuple(missing),
        withdrawn=tuple(withdrawn),
    )


def _told(runs: Runs) -> str:
    """``3, 5-8``."""
    return ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)
