"""A batch that a framework has fetched ahead of the step that uses it, as a value to be saved.

A batch is saved itself where it is sure to come back as it was: whoever made it is known to make
nothing but tensors on the CPU and plain values. Any other is fetched again by the next attempt, for
which the random numbers have to be noted before each batch; that takes some 50 microseconds.
"""

from __future__ import annotations

import sys
from collections import UserDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from hydroslurm.checkpoint.tree import encode
from hydroslurm.errors import StateMismatch, UnsavableState

MOST_BYTES = 64 * 2**20
"""Of a first batch. Noting random numbers costs nothing beside the fetching of a larger one."""

_KNOWN = ("transformers", "trl")
"""Packages whose collators make batches of tensors, all in the same form."""


def is_saved(loader: Any, first: Any) -> bool:
    """Whether the batches of this loader are saved; all are, or none.

    Args:
        first: one of them.
    """
    if not _has_known_collator(loader):
        return False
    try:
        state = packed(first)
    except UnsavableState:
        return False
    return sum(one.nbytes for one in _tensors(state)) <= MOST_BYTES


def packed(batch: Any) -> dict[str, Any]:
    """What is saved of a batch, of which nothing is copied; :func:`unpacked` gives it back.

    Raises:
        UnsavableState: it would not come back as it is.
    """
    state: dict[str, Any] = {"batch": batch, "class": None}
    if isinstance(batch, UserDict):
        state = {"batch": batch.data, "class": [type(batch).__module__, type(batch).__qualname__]}
        if _class_of(state) is not type(batch) or not _is_of_data(batch):
            raise UnsavableState(
                f"a batch is a {type(batch).__name__}, which cannot be made anew from its items"
            )
    encode(state, prefix="batch")
    for one in _tensors(state):
        if one.device.type != "cpu" or one.requires_grad or type(one) is not torch.Tensor:
            raise UnsavableState(
                f"a batch holds a {type(one).__name__} on {one.device} (requires_grad="
                f"{one.requires_grad}); only plain tensors on the CPU come back as they were"
            )
    return state


def unpacked(state: Mapping[str, Any]) -> Any:
    """The batch.

    Raises:
        StateMismatch: its class is not there any more.
    """
    if state["class"] is None:
        return state["batch"]
    kind = _class_of(state)
    if kind is None:
        raise StateMismatch(
            f"the batch that was fetched ahead is a {'.'.join(state['class'])}, which this process "
            "does not have; resume with the same versions of the packages, or begin anew with "
            "another directory="
        )
    return kind(state["batch"])


def _has_known_collator(loader: Any) -> bool:
    if not isinstance(loader, DataLoader):
        return False
    collate: Any = loader.collate_fn
    if type(collate).__name__ == "RemoveColumnsCollator":  # transformers' own, around another
        collate = collate.data_collator
    module = getattr(collate, "__module__", None) or ""
    return collate is default_collate or module.partition(".")[0] in _KNOWN


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All of them in a value that a checkpoint can hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple, deque)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _class_of(state: Mapping[str, Any]) -> type | None:
    """A dictionary's class, if it is a UserDict of a module that is loaded: no others are made."""
    module, name = state["class"]
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, UserDict) else None


def _is_of_data(batch: UserDict[Any, Any]) -> bool:
    """Whether its items are all there is to it."""
    try:
        made = type(batch)(batch.data)
    except (TypeError, ValueError):
        return False
    return {**vars(made), "data": None} == {**vars(batch), "data": None}
