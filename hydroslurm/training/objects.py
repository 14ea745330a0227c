"""The objects of a run by name: what they hand over to be saved, and how they get it back.

What a run is made of is recorded in its manifests, so that a later attempt can report changes. A
change that would make the resume wrong is an error, raised before anything is loaded. One that a
user may make, and that only costs bitwise equality, is one line in the log.
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
from hydroslurm.errors import CheckpointError, StateMismatch, UnsavableState, UsageError
from hydroslurm.runtime.engine import Engine

Models = Callable[[], Mapping[str, Any]]
"""The models that are trained, by name, as DDP has wrapped them; asked for once they exist. What is
no module is passed over."""
_FIXED = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, GradScaler)
"""Classes whose objects make nothing new when they are loaded."""
_LOADED_LAST = ("model", "optimizer", "scheduler", "scaler")
"""The arguments of a Run. What is registered besides may rebuild what these are loaded into."""
_SHOWN = 5
"""Keys named per kind of difference; the rest is counted."""


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
        from hydroslurm.training.readback import lost  # only a resumed run needs it

        for name in sorted(self._objects, key=lambda name: name in _LOADED_LAST):
            self._load_one(name, self._objects[name], states[name], source)
        sentences = (lost(name, thing, states[name]) for name, thing in self._objects.items())
        return [sentence for sentence in sentences if sentence is not None]

    def _load_one(self, name: str, thing: Stateful, state: Any, source: str) -> None:
        from hydroslurm.training.readback import load_module, load_optimizer

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


def _advice(thing: Any, error: Exception) -> str:
    if not isinstance(thing, torch.optim.Optimizer) or "parameter group" not in str(error):
        return ""
    return (
        ". Parameter groups that are added while training have to be there before: add them again "
        "in the load_state_dict() of an object in extra=, which is loaded first"
    )


# --- what a run is made of
# ------------------------------------------------------------------------------------------------

_META = "made_of"
"""The name in a manifest's ``meta``."""

_NO_OPTIONS = frozenset({"params", "param_names"})


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


def changed_class(name: str, thing: Any, state: Any, *, was: str | None) -> str | None:
    """Say that an object is of another class than the one that was saved. That it was renamed or
    moved is nobody's business; for a module its keys, shapes and dtypes count.

    Raises:
        StateMismatch: an optimizer or a scheduler of another kind; both would take a part of what
            was saved for theirs, and fail later or train in another way.
    """
    now = class_name(thing)
    if was is None or was.rpartition(".")[2] == now.rpartition(".")[2]:
        return None
    ours, theirs = _options(thing, state)
    if ours != theirs:
        raise StateMismatch(
            f"{name!r} was a {was}, and is a {now}: the checkpoint has {_listed(theirs - ours)}, "
            f"it wants {_listed(ours - theirs)}. Make it as it was. To change it on purpose, begin "
            "anew with the weights of `hydroslurm checkpoint export --only model`, in another "
            "directory= or by Run(resume=False)"
        )
    return f"{name!r} was a {was}, and is a {now}; what was saved fits it, and is loaded"


def changes(manifest: Manifest, now: Loading, *, world_size: int, data: Any) -> Iterator[str]:
    """Report how the batches differ from those of the attempt that saved.

    Args:
        data: the saved position; None between two epochs.

    Raises:
        StateMismatch: the position is inside an epoch, and nobody could say which of its samples
            were seen.
    """
    was, ranks = Composition.of(manifest).loader, manifest.world_size
    if ranks != world_size:
        yield (
            f"step {manifest.step} was saved by {_ranks(ranks)}, and goes on with "
            f"{_ranks(world_size)}: the bits differ from those of a run that kept its ranks"
        )
    differing = [
        f"{message} was {before!r}, and is {after!r}"
        for message, before, after in (
            ("the loader's batch_size", was.batch_size, now.batch_size)
            if ranks == world_size
            else ("the batch of all ranks", was.batch_of(ranks), now.batch_of(world_size)),
            ("the length of its data set", was.samples, now.samples),
            ("the class of its sampler", was.sampler, now.sampler),
        )
        if None not in (before, after) and before != after
    ]
    if not differing:
        return
    said = "; ".join(differing)
    if ranks == world_size and _is_counted_in_batches(data):
        raise StateMismatch(
            f"{said}: the run was stopped inside epoch {data['epoch']}, behind batch "
            f"{data['batches']}, and which samples those were cannot be told with another loader. "
            "Make it as it was; to change it on purpose do so between two epochs, or give it "
            "sampler=hydroslurm.data.ResumableSampler(dataset) from the beginning, which counts "
            "samples and takes another batch_size"
        )
    yield f"{said}: from here on the steps are not those of a run that was left as it was"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _is_counted_in_batches(data: Any) -> bool:
    return (
        isinstance(data, Mapping)
        and bool(data.get("begun"))
        and not data.get("finished")
        and data.get("strategy") != "sampler"
    )


def _options(thing: Any, state: Any) -> tuple[set[str], set[str]]:
    """The names by which kinds of optimizers and schedulers are told apart: here, and as saved."""
    if isinstance(thing, torch.optim.Optimizer):
        with contextlib.suppress(TypeError, KeyError, IndexError, AttributeError):
            groups = thing.param_groups[0], state["param_groups"][0]
            return set(groups[0]) - _NO_OPTIONS, set(groups[1]) - _NO_OPTIONS
    elif isinstance(thing, LRScheduler) and isinstance(state, Mapping):
        return set(thing.state_dict()), set(state)
    return set(), set()


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing else"


def check_layout(name: str, saved: Mapping[Any, Any], target: Mapping[Any, Any]) -> None:
    """Compare a saved state_dict with the one of the object that it is to be loaded into.

    Raises:
        StateMismatch: keys, shapes or dtypes differ.
    """
    message = compare(saved, target)
    if message:
        raise StateMismatch(
            f"the checkpoint's {name!r} belongs to another {name}: {message}. Load it into the "
            "class that it was saved from, or take what fits with "
            f"`hydroslurm checkpoint export --only {name}`"
        )


def compare(saved: Mapping[Any, Any], target: Mapping[Any, Any]) -> str | None:
    """What differs between two state_dicts in one sentence, None when nothing does."""
    both = [(key, saved[key], target[key]) for key in saved if key in target]
    parts = [
        _named("only the checkpoint has", [repr(key) for key in saved if key not in target]),
        _named("the checkpoint lacks", [repr(key) for key in target if key not in saved]),
        _named("other shapes:", _different(both, _shape)),
        _named("other dtypes:", _different(both, _dtype)),  # which torch would cast silently
    ]
    return "; ".join(part for part in parts if part) or None


def _different(both: list[tuple[Any, Any, Any]], attribute: Callable[[Any], object]) -> list[str]:
    """The keys whose values, saved and now, have different attributes."""
    found = [(key, attribute(saved), attribute(target)) for key, saved, target in both]
    return [
        f"{key!r} is {saved} in the checkpoint and {target} here"
        for key, saved, target in found
        if saved is not None and target is not None and saved != target
    ]


def _shape(value: Any) -> list[int] | None:
    try:
        shape = getattr(value, "shape", None)
    except RuntimeError:  # of a lazy layer that has seen no batch: it takes any
        return None
    return None if shape is None else list(shape)


def _dtype(value: Any) -> str | None:
    dtype = getattr(value, "dtype", None)
    return None if dtype is None else str(dtype)


def _named(what: str, names: Collection[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(list(names)[:_SHOWN])
    rest = len(names) - _SHOWN
    return f"{what} {shown}" + (f" and {rest} more" if rest > 0 else "")
