"""What each rank of a run registers and saves for itself: random generators, environments."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from hydroslurm.checkpoint import rng
from hydroslurm.errors import StateMismatch, UsageError


class PerRank:
    """Objects by name, whose state differs from rank to rank."""

    def __init__(self) -> None:
        self._generators: dict[str, rng.Generator] = {}
        self._objects: dict[str, Any] = {}

    def add(self, name: str, thing: Any) -> None:
        """Register a generator, or an object with ``state_dict`` and ``load_state_dict``.

        Raises:
            UsageError: a generator that has no state.
        """
        if isinstance(thing, random.SystemRandom):
            raise UsageError(
                f"{name!r} is a SystemRandom, which draws from the operating system and has no "
                "state to resume from; use random.Random(seed)"
            )
        if isinstance(thing, rng.KINDS):
            self._generators[name] = thing
        else:
            self._objects[name] = thing

    def names(self) -> tuple[str, ...]:
        return (*self._objects, *self._generators)

    def by_name(self) -> dict[str, Any]:
        """The objects and the generators."""
        return {**self._objects, **self._generators}

    def states(self) -> dict[str, Any]:
        """Name -> state, as it is now."""
        return {
            **{name: thing.state_dict() for name, thing in self._objects.items()},
            **{name: rng.state_of(one) for name, one in self._generators.items()},
        }

    def load(self, states: Mapping[str, Any]) -> None:
        """Give the objects their states; the generators have theirs from :meth:`rewind`.

        Raises:
            StateMismatch: one is missing, or does not fit.
        """
        if missing := [name for name in self.names() if name not in states]:
            raise StateMismatch(
                f"the checkpoint has no state of this rank for {', '.join(missing)}; it has "
                f"{', '.join(states) or 'none'}. Was it written before they were registered? Use "
                "another directory= to start anew"
            )
        for name, thing in self._objects.items():
            try:
                thing.load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise _misfit(name, thing, error) from error

    def rewind(self, states: Mapping[str, Any], *, new_rank: int | None = None) -> None:
        """Put the generators back.

        Args:
            new_rank: the states are of rank 0, and this rank, which had none, begins streams of
                its own from them.

        Raises:
            StateMismatch: a state is of another kind of generator.
        """
        for name, one in self._generators.items():
            try:
                rng.set_state(one, states[name])
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise _misfit(name, one, error) from error
            if new_rank is not None:
                rng.diverge(one, new_rank)


def _misfit(name: str, thing: Any, error: Exception) -> StateMismatch:
    return StateMismatch(
        f"the checkpoint's state of {name!r} does not fit a {type(thing).__name__}: {error}"
    )
