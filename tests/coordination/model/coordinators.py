"""The real coordinator of the coordinator, with a number for everything that can stand in it.

A model's state has to be hashable and is gone back to; a Book is neither. So each content of one is
kept once, under a number, and what an event makes of it is worked out once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from hydroslurm.coordination.state import CoordinatorState

Outbox = tuple[tuple[int, tuple[Any, ...]], ...]
Event = tuple[Any, ...]


class Coordinators:
    """All contents that a coordinator was seen with.

    Args:
        make: a new coordinator.
        write: a rank's message out of the model's own, which is hashable.
        read: a message as the model has it; None: no rank of the model minds it.
        tidy: takes out of a coordinator what makes no difference to what follows.
    """

    def __init__(
        self,
        make: Callable[[], CoordinatorState],
        *,
        write: Callable[[tuple[Any, ...]], dict[str, Any]],
        read: Callable[[dict[str, Any]], tuple[Any, ...] | None],
        tidy: Callable[[CoordinatorState], None] = lambda _: None,
    ) -> None:
        self._write, self._read, self._tidy = write, read, tidy
        self._coordinators: list[CoordinatorState] = []
        self._numbers: dict[Any, int] = {}
        self._known: dict[tuple[int, Event], tuple[int, Outbox]] = {}
        self.new = self._keep(make())

    def __getitem__(self, number: int) -> CoordinatorState:
        return self._coordinators[number]

    def after(self, number: int, event: Event) -> tuple[int, Outbox]:
        """The coordinator after an event, and the outbox to be sent.

        Args:
            event: ``("join", rank)``, ``("gone", rank)`` or ``("handle", rank, ...)`` with the
                model's message.
        """
        known = self._known.get((number, event))
        if known is None:
            known = self._known[number, event] = self._work_out(number, event)
        return known

    def _work_out(self, number: int, event: Event) -> tuple[int, Outbox]:
        coordinator = pickle.loads(
            pickle.dumps(self._coordinators[number])
        )  # a copy, five times as fast as copy's
        kind, rank, *rest = event
        if kind == "join":
            may_join = coordinator.why_not(rank, coordinator.world_size) is None
            outbox = coordinator.join(rank, ()) if may_join else []
        elif kind == "gone":
            outbox = coordinator.gone(rank)
        elif rank in coordinator.present:
            outbox = coordinator.handle(rank, self._write(tuple(rest)))
        else:
            outbox = []
        read = ((to, self._read(message)) for to, message in outbox)
        return self._keep(coordinator), tuple(
            (to, message) for to, message in read if message is not None
        )

    def _keep(self, coordinator: CoordinatorState) -> int:
        self._tidy(coordinator)
        number = self._numbers.setdefault(_frozen(coordinator), len(self._coordinators))
        if number == len(self._coordinators):
            self._coordinators.append(coordinator)
        return number


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((repr(key), _frozen(one)) for key, one in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(one) for one in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if hasattr(value, "__dict__"):
        return (type(value).__name__, _frozen(vars(value)))
    return value
