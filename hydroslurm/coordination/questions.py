"""The agreements that this rank waits for, over one hub and the next."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydroslurm.errors import AgreementFailed, HubLost, RanksError, UsageError

_SLICE_S = 0.5
_BEGUN_MOST = 16
"""Of what takes several agreements, such as a save, no more is under way at a time."""


@dataclass
class _Question:
    """One that was asked, and what came of it."""

    decided: threading.Event = field(default_factory=threading.Event)
    values: Mapping[int, Any] = field(default_factory=dict)
    failure: RanksError | None = None


class Questions:
    """Asked by any thread, answered by the one that hears the hub.

    What takes several agreements (``save/3/open``, ``save/3/commit``) and was begun at a hub that
    is gone is over for all: a rank that has heard so does not come to the rest of it, and one that
    has not must not wait for it there.

    Attributes:
        cut_off: what this rank had begun at hubs that are gone.
    """

    def __init__(self, *, send: Callable[[Any], None], lost: Callable[[], HubLost | None]) -> None:
        """
        Args:
            send: to the hub, now or when it is found; raises HubLost.
            lost: why there will be no hub any more, None while there may be one.
        """
        self.cut_off: frozenset[str] = frozenset()
        self._send = send
        self._lost = lost
        self._lock = threading.Lock()
        self._open: dict[str, _Question] = {}
        self._begun: collections.deque[str] = collections.deque(maxlen=_BEGUN_MOST)

    def __contains__(self, topic: str) -> bool:
        """Whether it is being asked."""
        return topic in self._open

    def ask(
        self,
        topic: str,
        value: Any,
        *,
        timeout_s: float | None,
        cancel: threading.Event | None,
        among: Sequence[int] | None,
    ) -> Mapping[int, Any]:
        """Everybody's values; see :meth:`hydroslurm.coordination.client.Ranks.agree`."""
        self._begin(_whole(topic))
        question = _Question()
        with self._lock:
            if topic in self._open:
                raise UsageError(f"{topic!r} is being agreed on already; a topic is used once")
            self._open[topic] = question
        circle = None if among is None else sorted(among)
        try:
            self._send({"do": "agree", "topic": topic, "value": value, "among": circle})
            self._wait(topic, question, timeout_s=timeout_s, cancel=cancel)
        finally:
            with self._lock:
                self._open.pop(topic, None)
        if question.failure is not None:
            raise question.failure
        return question.values

    # --- for the thread that hears the hub
    # --------------------------------------------------------------------------------------------

    def agreed(self, message: Mapping[str, Any]) -> None:
        """All values are there."""
        values = {int(rank): value for rank, value in message["values"]}
        self._answer(message["topic"], values=values)

    def failed(self, message: Mapping[str, Any]) -> None:
        """Ranks are gone, or have given up."""
        self._answer(message["topic"], failure=_failure(message))

    def interrupt(self, error: HubLost) -> None:
        """Between two hubs nothing is decided: what is being asked fails."""
        self.cut_off = frozenset(one for one in self._begun if not one.startswith("run/"))
        self._begun.clear()
        self.fail(error)

    def meet(self, cut_off: Iterable[Iterable[str]]) -> None:
        """All ranks are at one hub: what one of them had begun at the last one is over."""
        self.cut_off = self.cut_off.union(*cut_off)
        with self._lock:
            over = [one for topic, one in self._open.items() if _whole(topic) in self.cut_off]
        for question in over:
            _decide(question, failure=_is_cut_off("it was begun"))

    def fail(self, error: HubLost) -> None:
        """All that is being asked fails."""
        with self._lock:
            questions = list(self._open.values())
        for question in questions:
            _decide(question, failure=question.failure or error)

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _begin(self, whole: str) -> None:
        if whole in self.cut_off:
            raise _is_cut_off(f"{whole} was begun")
        if whole not in self._begun:
            self._begun.append(whole)

    def _wait(
        self,
        topic: str,
        question: _Question,
        *,
        timeout_s: float | None,
        cancel: threading.Event | None,
    ) -> None:
        """Until it is decided. The hub answers a withdrawal too, which may come too late."""
        waited_s, withdrawn = 0.0, False
        slice_s = _SLICE_S if cancel is None else 0.02
        while not question.decided.is_set():
            if (lost := self._lost()) is not None:
                raise lost
            left_s = slice_s if timeout_s is None else min(slice_s, max(0.0, timeout_s - waited_s))
            begin_s = time.monotonic()
            question.decided.wait(left_s if not withdrawn else _SLICE_S)
            # a slice that took long was one in which this process was stopped
            waited_s += min(time.monotonic() - begin_s, 2 * slice_s)
            given_up = cancel is not None and cancel.is_set()
            late = timeout_s is not None and waited_s >= timeout_s
            if (given_up or late) and not withdrawn and not question.decided.is_set():
                withdrawn = True
                self._send({"do": "withdraw", "topic": topic})

    def _answer(
        self,
        topic: str,
        *,
        values: Mapping[int, Any] | None = None,
        failure: RanksError | None = None,
    ) -> None:
        with self._lock:
            question = self._open.get(topic)
        if question is not None:
            question.values = values or {}
            _decide(question, failure=failure)


def _decide(question: _Question, *, failure: RanksError | None) -> None:
    question.failure = failure
    question.decided.set()


def _whole(topic: str) -> str:
    """What an agreement is a part of: ``save/3`` of ``save/3/open``."""
    return "/".join(topic.split("/")[:2])


def _is_cut_off(what: str) -> HubLost:
    return HubLost(f"what connects the ranks of this job was lost since {what}")


def _failure(message: Mapping[str, Any]) -> AgreementFailed:
    missing, withdrawn = tuple(message["missing"]), tuple(message["withdrawn"])
    parts = []
    if missing:
        parts.append(f"gone: rank {', '.join(map(str, missing))}")
    if withdrawn:
        parts.append(f"given up: rank {', '.join(map(str, withdrawn))}")
    if message.get("words"):
        parts.append(str(message["words"]))
    return AgreementFailed(
        f"not all ranks took part in {message['topic']!r}: {'; '.join(parts)}",
        missing=missing,
        withdrawn=withdrawn,
    )
