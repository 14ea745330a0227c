"""The objects of a run by name, and what a run is made of: what its manifests record, so that a
later attempt can report changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.tree import like_of
from hydroslurm.errors import UnsavableState, UsageError
from hydroslurm.runtime.engine import Engine

Models = Callable[[], Mapping[str, Any]]
"""The models that are trained, by name, as DDP has wrapped them; asked for once they exist. What is
no module is passed over."""
_FIXED = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, GradScaler)
"""Classes whose objects make nothing new when they are loaded."""


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
        self._given: dict[str, Any] = {}
        self._forms: dict[str, dict[str, Any]] = {}

    def add(self, name: str, thing: Stateful) -> None:
        """Register one object that :func:`require_registrable` has let pass."""
        self._objects[name], self._given[name] = bare(thing), thing

    def by_name(self) -> dict[str, Stateful]:
        """The objects, without wrappers around them."""
        return dict(self._objects)

    def as_given(self) -> dict[str, Any]:
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


def modules_in(things: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """Those that are modules, without their wrappers."""
    found = {name: bare(thing) for name, thing in things.items()}
    return {name: one for name, one in found.items() if isinstance(one, torch.nn.Module)}


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
    if isinstance(thing, torch.optim.Optimizer):
        state = thing.state_dict() if state is None else state
        groups = state.get("param_groups", ()) if isinstance(state, dict) else ()
        return {f"group {n}": len(one.get("params", ())) for n, one in enumerate(groups)}
    if not isinstance(thing, torch.nn.Module) or any(map(is_lazy, thing.parameters())):
        return {}
    state = thing.state_dict() if state is None else state
    tensors = (item for item in state.items() if isinstance(item[1], torch.Tensor))
    return {key: tuple(one.shape) for key, one in tensors}


# --- what a run is made of
# ------------------------------------------------------------------------------------------------

_META = "made_of"
"""The name in a manifest's ``meta``."""


@dataclass(frozen=True)
class Loading:
    """How a loader makes batches; None for what it does not say.

    Attributes:
        sampler: the name of its class. batch_size: of this rank. samples: in the data set.
    """

    sampler: str | None = None
    batch_size: int | None = None
    samples: int | None = None

    @classmethod
    def of(cls, loader: Any) -> Loading:
        """Look at a DataLoader, or one like it."""
        batches = getattr(loader, "batch_sampler", None)
        batch_size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)
        # a batch sampler of the user's own stands in for the sampler
        sampler = getattr(batches if batch_size is None else loader, "sampler", batches)
        samples = None
        with contextlib.suppress(Exception):  # a stream has no length, and says so in many ways
            samples = len(loader.dataset)
        return cls(None if sampler is None else type(sampler).__name__, batch_size, samples)

    def batch_of(self, ranks: int) -> int | None:
        """The samples of a step of so many ranks."""
        return None if self.batch_size is None else self.batch_size * ranks


@dataclass(frozen=True)
class Composition:
    """The objects' classes, by the names they are saved under, and the first rank's loader."""

    classes: Mapping[str, str] = field(default_factory=dict)
    loader: Loading = field(default_factory=Loading)

    def to_meta(self) -> dict[str, Any]:
        """For a manifest."""
        return {_META: asdict(self)}

    @classmethod
    def of(cls, manifest: Manifest) -> Composition:
        """What the writer of a checkpoint was made of; empty where that is not known."""
        try:
            return msgspec.convert(manifest.meta.get(_META), cls)
        except msgspec.ValidationError:
            return cls()


def class_name(thing: Any) -> str:
    """As in ``torch.optim.sgd.SGD``; of a lazy layer what it becomes with its first batch."""
    kind = getattr(thing, "cls_to_become", None) or type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
