"""What a script keeps beside its model that has a state of its own: a reference model that follows,
an average of the weights in a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint.tree import encode
from hydroslurm.errors import StateMismatch, UnsavableState
from hydroslurm.integrations.handed import fingerprint
from hydroslurm.training.attributes import is_of_library
from hydroslurm.training.objects import Stateful, bare
from hydroslurm.training.reporting import notice


class Companions:
    """Those of them that have changed since the training began; of what is no module, all.

    Args:
        find: the objects, with names that are the same in each attempt; asked anew each time.
        say: tells the user of one whose state cannot be saved.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[tuple[str, Any]]],
        *,
        say: Callable[[str], None] = notice,
    ) -> None:
        self._find, self._say = find, say
        self._before: dict[str, Any] = {}
        self._restored: frozenset[str] = frozenset()
        self._is_fit: dict[str, bool] = {}

    def remember(self) -> None:
        """Modules that do not change from now on are as the script makes them."""
        self._before = {
            name: fingerprint(one.state_dict())
            for name, one in self._find()
            if isinstance(one, torch.nn.Module)
        }

    def state_dict(self) -> dict[str, Any]:
        states = {name: one.state_dict() for name, one in self._find()}
        return {
            name: state
            for name, state in states.items()
            if name in self._restored or self._has_changed(name, state)
            if self._is_savable(name, state)
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Raises:
        StateMismatch: one is not there, or does not fit.
        """
        here = dict(self._find())
        self._restored = frozenset(states)
        for name, state in states.items():
            try:
                here[name].load_state_dict(state)
            except (KeyError, RuntimeError, ValueError, TypeError) as error:
                raise StateMismatch(
                    f"the checkpoint has the state of {name}, which this script does not have, or "
                    f"in another form: {error}; begin anew with another directory="
                ) from error

    def _has_changed(self, name: str, state: Any) -> bool:
        return name not in self._before or fingerprint(state) != self._before[name]

    def _is_savable(self, name: str, state: Any) -> bool:
        if name not in self._is_fit:
            try:
                encode(state, prefix=name)
                self._is_fit[name] = True
            except UnsavableState as error:
                self._is_fit[name] = False
                self._say(f"{name} is not saved, and the next attempt begins without it: {error}")
        return self._is_fit[name]


def held_by(holders: Mapping[str, Any], *, known: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The objects with a state in the attributes of these, each once.

    Args:
        holders: by name.
        known: what is saved in another way, and what is in it.
    """
    seen = {id(part) for one in known for part in _parts(one)}
    for holder, thing in holders.items():
        for name, value in list(vars(thing).items()):
            is_module = isinstance(value, torch.nn.Module)
            if not is_module and (is_of_library(value) or not isinstance(value, Stateful)):
                continue
            if isinstance(value, type) or id(bare(value)) in seen:
                continue
            seen.add(id(bare(value)))
            yield f"{holder}.{name}", bare(value)


def _parts(thing: Any) -> Iterator[Any]:
    yield thing
    if isinstance(thing, torch.nn.Module):
        yield from thing.modules()
