"""The objects of a run by name: what they hand over to be saved, and how they get it back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.layout import check_layout
from hydroslurm.checkpoint.tree import like_of
from hydroslurm.errors import CheckpointError, StateMismatch, UnsavableState, UsageError
from hydroslurm.runtime.engine import Engine
from hydroslurm.training.composition import changed_class, class_name
from hydroslurm.training.readback import load_module, load_optimizer, lost

_FIXED = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, GradScaler)
"""Classes whose objects make nothing new when they are loaded."""
_LOADED_LAST = ("model", "optimizer", "scheduler", "scaler")
"""The arguments of a Run. What is registered besides may rebuild what these are loaded into."""


class OutgrownState(UnsavableState):
    """Objects have grown while they were trained, and no later attempt could load their state."""


@runtime_checkable
class Stateful(Protocol):
    """What can be registered: torch's own protocol of modules, optimizers and schedulers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Objects:
    """The registered objects, in order of their registration."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._given: list[Any] = []
        self._forms: dict[str, dict[str, Any]] = {}

    def add(self, name: str, thing: Stateful) -> None:
        """Register one object that :func:`require_registrable` has let pass."""
        self._objects[name] = bare(thing)
        self._given.append(thing)

    def by_name(self) -> dict[str, Stateful]:
        """The objects, without wrappers around them."""
        return dict(self._objects)

    def as_given(self) -> list[Any]:
        """The objects, with the wrappers around them."""
        return self._given

    def names(self) -> tuple[str, ...]:
        return tuple(self._objects)

    def states(self) -> dict[str, Any]:
        """Name -> state_dict. Tensors are the objects' own: copy, or save, before they change."""
        return {name: thing.state_dict() for name, thing in self._objects.items()}

    def templates(self) -> dict[str, Any]:
        """Name -> how its tensors lie over the ranks, for those that are sharded."""
        return {name: like_of(thing) for name, thing in self._objects.items()}

    def classes(self) -> dict[str, str]:
        """Name -> the class of the object."""
        return {name: class_name(thing) for name, thing in self._objects.items()}

    def changes(self, states: Mapping[str, Any], *, classes: Mapping[str, str]) -> Iterator[str]:
        """Say which objects are others than those that were saved, each in a sentence.

        Args:
            classes: of those that were saved.

        Raises:
            StateMismatch: one of them cannot go on with what was saved.
        """
        for name, thing in self._objects.items():
            if name in states:
                message = changed_class(name, thing, states[name], was=classes.get(name))
                if message is not None:
                    yield message
        if forgotten := [name for name in states if name not in self._objects]:
            yield (
                f"the checkpoint has a state for {', '.join(forgotten)}, which this run does not "
                "have: it is left out, of what is saved from now on too"
            )

    def note(self) -> None:
        """The objects are as the script makes them in each attempt."""
        self._forms = {name: _form(thing) for name, thing in self._objects.items()}

    def require_resumable(self, states: Mapping[str, Any]) -> None:
        """Whether the objects that the script makes can be given these states.

        Raises:
            OutgrownState: one of them has other weights than it had, and no other object could make
                it so before it is loaded.
        """
        if not all(isinstance(thing, _FIXED) for thing in self._objects.values()):
            return
        for name, before in self._forms.items():
            if not before:  # lazy, or without weights
                continue
            now = _form(self._objects[name], states[name])
            more = [
                key for key in now if before.get(key, now[key]) != now[key] or key not in before
            ]
            less = [key for key in before if key not in now]
            if more or less:
                listed = ", ".join([*(f"+ {key}" for key in more), *(f"- {key}" for key in less)])
                raise OutgrownState(
                    f"{name!r} is not what the script has made when this attempt began ({listed}), "
                    "so that no later attempt could load it. Make it so before Run(...), or "
                    "register an object in extra= whose load_state_dict() makes it so: that is "
                    "loaded first"
                )

    def uninitialised(self) -> str | None:
        """The first weight without values: of a lazy layer that has seen no batch."""
        return next(
            (
                f"{name}.{key}"
                for name, thing in self._objects.items()
                if isinstance(thing, torch.nn.Module)
                for key, value in thing.state_dict().items()
                if is_lazy(value)
            ),
            None,
        )

    def load(self, states: Mapping[str, Any], *, source: str) -> list[str]:
        """Give every object its state back: in order of their registration, but the model, the
        optimizer, the scheduler and the scaler of a Run after all others.

        Returns:
            A sentence about each object that is not what was saved.

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
        for name in sorted(self._objects, key=lambda name: name in _LOADED_LAST):
            self._load_one(name, self._objects[name], states[name], source)
        sentences = (lost(name, thing, states[name]) for name, thing in self._objects.items())
        return [sentence for sentence in sentences if sentence is not None]

    def _load_one(self, name: str, thing: Stateful, state: Any, source: str) -> None:
        try:
            if isinstance(thing, torch.nn.Module) and isinstance(state, dict):
                # torch's own complaint comes after it has copied what did fit
                check_layout(name, state, thing.state_dict())
                load_module(name, thing, state)
            elif isinstance(thing, torch.optim.Optimizer) and isinstance(state, dict):
                load_optimizer(thing, state)
            else:
                thing.load_state_dict(state)
        except CheckpointError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            message = f"{source} does not fit {name!r} ({type(thing).__name__}): {error}"
            raise StateMismatch(message + _advice(thing, error)) from error


def require_registrable(name: str, thing: Any, *, taken: Collection[str]) -> None:
    """Whether this object has a state that can be saved under this name.

    Raises:
        UsageError: it has not, or another object has the name.
    """
    if name in taken:
        raise UsageError(f"{name!r} is already registered; give the second object its own name")
    if isinstance(thing, (Stateful, *rng.KINDS)):
        return
    kind = type(thing).__name__
    if isinstance(thing, (DataLoader, Iterator)):
        raise UsageError(
            f"{name!r} is a {kind}, which has no position that can be saved. Let the run hand out "
            "its batches: Run(loader=loader) and `for batch in run.batches(epochs=...)`; or have a "
            "get_batch(step) choose the samples by the number of the step"
        )
    raise UsageError(
        f"{name!r} is a {kind} without state_dict() and load_state_dict(); "
        "only objects that have both can be saved. Wrap it in one that does"
    )


def bare(thing: Any) -> Any:
    """The object without its wrappers, so that a run may change between plain, pausable, compiled
    and DistributedDataParallel: all of them put a prefix before the names of the weights."""
    seen = 0
    while seen < 8:
        inner = inside(thing)
        if inner is None:
            return thing
        thing, seen = inner, seen + 1
    return thing


def inside(thing: Any) -> Any | None:
    """What a wrapper is around; None of anything else."""
    kind = type(thing).__name__
    if isinstance(thing, Engine) or kind in ("DistributedDataParallel", "DataParallel"):
        return thing.module
    if kind == "OptimizedModule":  # torch.compile
        return thing._orig_mod
    return None


def _form(thing: Any, state: Any = None) -> dict[str, Any]:
    """The names and shapes of an object's weights, as far as they are known."""
    state = thing.state_dict() if state is None else state
    if isinstance(thing, torch.optim.Optimizer) and isinstance(state, dict):
        groups = state.get("param_groups", ())
        return {f"group {n}": len(one.get("params", ())) for n, one in enumerate(groups)}
    if not isinstance(thing, torch.nn.Module) or any(map(is_lazy, thing.parameters())):
        return {}
    tensors = (item for item in state.items() if isinstance(item[1], torch.Tensor))
    return {key: tuple(one.shape) for key, one in tensors}


def _advice(thing: Any, error: Exception) -> str:
    if not isinstance(thing, torch.optim.Optimizer) or "parameter group" not in str(error):
        return ""
    return (
        ". Parameter groups that are added while training have to be there before: add them again "
        "in the load_state_dict() of an object in extra=, which is loaded first"
    )
