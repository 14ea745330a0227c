"""The objects of a run by name: what they hand over to be saved, and how they get it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from hydroslurm.checkpoint.layout import check_layout
from hydroslurm.checkpoint.reshard import like_of
from hydroslurm.checkpoint.skeleton import split
from hydroslurm.checkpoint.store import State
from hydroslurm.errors import StateMismatch, UsageError
from hydroslurm.runtime.engine import Engine


@runtime_checkable
class Stateful(Protocol):
    """What can be registered: torch's own protocol of modules, optimizers and schedulers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Objects:
    """The registered objects, in order of their registration."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}

    def add(self, name: str, thing: Any) -> None:
        """Register one object.

        Raises:
            UsageError: no ``state_dict``/``load_state_dict``, or a name that is taken.
        """
        if name in self._objects:
            raise UsageError(f"{name!r} is registered already; give the second object its own name")
        if not isinstance(thing, Stateful):
            raise UsageError(
                f"{name!r} is a {type(thing).__name__} without state_dict() and load_state_dict(); "
                "only objects that have both can be saved. Wrap it in one that has"
            )
        self._objects[name] = bare(thing)

    def names(self) -> tuple[str, ...]:
        return tuple(self._objects)

    def states(self) -> dict[str, Any]:
        """Name -> state_dict. Tensors are the objects' own: copy, or save, before they change."""
        return {name: thing.state_dict() for name, thing in self._objects.items()}

    def templates(self) -> dict[str, Any]:
        """Name -> how its tensors lie over the ranks, for those that are sharded."""
        return {name: like_of(thing) for name, thing in self._objects.items()}

    def load(self, states: Mapping[str, Any], *, source: str) -> None:
        """Give every object its state back.

        Raises:
            StateMismatch: one is missing in the checkpoint, or does not fit; names the keys.
        """
        missing = [name for name in self._objects if name not in states]
        if missing:
            raise StateMismatch(
                f"{source} has no state for {', '.join(missing)}; it has "
                f"{', '.join(states) or 'nothing'}. Was it written by another script, or before "
                "these objects were registered? Use another directory= to start anew"
            )
        for name, thing in self._objects.items():
            self._load_one(name, thing, states[name], source)

    def _load_one(self, name: str, thing: Stateful, state: Any, source: str) -> None:
        if isinstance(state, Mapping) and _is_module(thing):
            # torch's own complaint comes after it has copied what did fit
            check_layout(name, state, thing.state_dict())
        try:
            thing.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise StateMismatch(
                f"{source} does not fit {name!r} ({type(thing).__name__}): {error}"
            ) from error


def require_savable(state: State) -> None:
    """Find out at the first step, and not at the first preemption, that a state cannot be saved.

    Raises:
        UnsavableState: names the place and the type.
    """
    for part in (state.shared, state.own):
        for name, tree in part.items():
            split(tree, prefix=name)


def bare(thing: Any) -> Any:
    """The object without its wrappers, so that a run may change between plain, pausable, compiled
    and DistributedDataParallel: all of them put a prefix before the names of the weights."""
    seen = 0
    while seen < 8:
        inner = _inside(thing)
        if inner is None:
            return thing
        thing, seen = inner, seen + 1
    return thing


def _inside(thing: Any) -> Any | None:
    kind = type(thing).__name__
    if isinstance(thing, Engine) or kind in ("DistributedDataParallel", "DataParallel"):
        return thing.module
    if kind == "OptimizedModule":  # torch.compile
        return thing._orig_mod
    return None


def _is_module(thing: Any) -> bool:
    import torch

    return isinstance(thing, torch.nn.Module)
