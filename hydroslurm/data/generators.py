"""The random generators that a loader, its samplers and its data set hold for themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Sampler

from hydroslurm.checkpoint import rng
from hydroslurm.data import epochs
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
    holders |= {f"sampler {n}": sampler for n, sampler in enumerate(epochs.samplers(loader))}
    found = {place: getattr(holder, "generator", None) for place, holder in holders.items()}
    return {place: g for place, g in found.items() if isinstance(g, torch.Generator)}


def _attributes(loader: Any) -> Iterator[tuple[str, rng.Generator]]:
    """What other samplers and data sets keep, such as a ``random.Random``."""
    holders = [(f"sampler {n}", one) for n, one in enumerate(epochs.samplers(loader))]
    data = getattr(loader, "dataset", None)
    for depth in range(_DEEPEST):
        if data is None:
            break
        holders.append((f"data set {depth}", data))
        data = getattr(data, "dataset", None)
    for place, holder in holders:
        for name, one in own_generators(holder):
            yield f"{place}.{name}", one
