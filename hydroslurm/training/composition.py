"""What a run is made of, recorded in its manifests, so that a later attempt can report changes.

A change that would make the resume wrong is an error, raised before anything is loaded. One that a
user may make, and that only costs bitwise equality, is one line in the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.errors import StateMismatch

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
        found: Any = manifest.meta.get(_META)
        try:
            classes = {str(name): str(kind) for name, kind in found["classes"].items()}
            loader = Loading(**found["loader"])
        except (TypeError, KeyError, AttributeError):  # before there was such an entry
            return cls()
        return cls(classes, loader)


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
