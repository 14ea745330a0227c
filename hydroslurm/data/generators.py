"""The random generators of a loader, its samplers and its data set, and warnings about those that
a resume cannot restore."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from hydroslurm.checkpoint import rng
from hydroslurm.data import epochs
from hydroslurm.data.seeding import SeededDataset
from hydroslurm.errors import StateMismatch

_DEEPEST = 8
"""Data sets within data sets that are looked into, as in Subset."""


def generator_states(loader: Any) -> dict[str, Any]:
    """The states of a loader's generators, by their place."""
    found = {place: one.get_state() for place, one in _generators(loader).items()}
    return found | {place: rng.state_of(one) for place, one in _attributes(loader)}


def set_generator_states(loader: Any, states: Mapping[str, Any]) -> None:
    """Put a loader's generators back.

    Raises:
        StateMismatch: the loader holds generators in other places than it did, or of other kinds.
    """
    here = _generators(loader)
    there = {place for place in states if "." not in place}
    if here.keys() != there:
        raise StateMismatch(
            f"the loader had generators of its own at {sorted(there)} and now has them at "
            f"{sorted(here)}; build it as before"
        )
    for place in there:
        here[place].set_state(states[place])
    for place, one in _attributes(loader):
        if place not in states:  # made since, or by a release that did not look there
            continue
        try:
            rng.set_state(one, states[place])
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise StateMismatch(
                f"the generator at {place} is a {type(one).__name__}, for which the saved state is "
                f"none ({error}); build the loader as before"
            ) from error


def own_generators(holder: Any) -> Iterator[tuple[str, rng.Generator]]:
    """The generators among the attributes of a sampler or a data set, but for the one that torch's
    samplers draw from."""
    for name, one in getattr(holder, "__dict__", {}).items():
        known = isinstance(holder, Sampler) and name == "generator"
        if known and isinstance(one, torch.Generator):
            continue
        if isinstance(one, rng.KINDS) and not isinstance(one, random.SystemRandom):
            yield name, one


def _generators(loader: Any) -> dict[str, torch.Generator]:
    """What torch's own classes draw from."""
    holders = {"loader": loader}
    holders |= {f"sampler {n}": sampler for n, sampler in enumerate(_samplers(loader))}
    found = {place: getattr(holder, "generator", None) for place, holder in holders.items()}
    return {place: g for place, g in found.items() if isinstance(g, torch.Generator)}


def _samplers(loader: Any) -> list[Any]:
    """Those that hold a generator: what is around them is not the same for any number of ranks."""
    return [
        one
        for one in epochs.samplers(loader)
        if isinstance(getattr(one, "generator", None), torch.Generator)
        or next(own_generators(one), None) is not None
    ]


def _attributes(loader: Any) -> Iterator[tuple[str, rng.Generator]]:
    """What other samplers and data sets keep, such as a ``random.Random``."""
    holders = [(f"sampler {n}", one) for n, one in enumerate(_samplers(loader))]
    data = getattr(loader, "dataset", None)
    for depth in range(_DEEPEST):
        if data is None:
            break
        holders.append((f"data set {depth}", data))
        data = getattr(data, "dataset", None)
    for place, holder in holders:
        for name, one in own_generators(holder):
            yield f"{place}.{name}", one


def warn_of_unseeded_workers(loader: Any) -> None:
    """Say that random augmentation in workers starts anew with a resume, where it does.

    Nobody can see whether a data set draws random numbers; one that does not is right without
    the wrapper, and may keep it to be rid of the warning.
    """
    dataset = getattr(loader, "dataset", None)
    if not getattr(loader, "num_workers", 0) or isinstance(dataset, SeededDataset):
        return
    advice = (
        "seed in its __iter__ from a counter that its state_dict() keeps"
        if isinstance(dataset, IterableDataset)
        else "wrap it: SeededDataset(dataset)"
    )
    warnings.warn(
        f"{type(dataset).__name__} is read by {loader.num_workers} workers, whose random numbers "
        "start anew when the run is resumed inside an epoch. If it augments at random, a resumed "
        f"run will differ from an uninterrupted one; {advice}",
        stacklevel=4,
    )


def warn_of_samplers_begun_anew(loader: Any) -> None:
    """Say that other samples come with a resume, where StatefulDataLoader iterates a sampler that
    draws from a generator of its own: it does so several times, and keeps the last order."""
    for sampler in epochs.samplers(loader):
        drawn_from = [name for name, _ in own_generators(sampler)]
        if drawn_from and not callable(getattr(sampler, "load_state_dict", None)):
            name = type(sampler).__name__
            warnings.warn(
                f"{name} draws from {name}.{drawn_from[0]} and has no state_dict(): resumed inside "
                f"an epoch, {type(loader).__name__} takes its samples in another order, so that "
                "some come twice and others never. A plain DataLoader with it, or "
                "sampler=hydroslurm.data.ResumableSampler(dataset), goes on with the same samples",
                stacklevel=4,
            )
