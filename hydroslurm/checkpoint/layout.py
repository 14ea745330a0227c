"""When a checkpoint belongs to other classes: name the keys that differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hydroslurm.errors import StateMismatch

SHOWN = 5
"""Keys named per kind of difference; the rest is counted."""


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
    parts = [
        _named("only the checkpoint has", [repr(k) for k in saved if k not in target]),
        _named("the checkpoint lacks", [repr(k) for k in target if k not in saved]),
        _named("other shapes:", _reshaped(saved, target)),
        _named("other dtypes:", _recast(saved, target)),
    ]
    return "; ".join(part for part in parts if part) or None


def _reshaped(saved: Mapping[Any, Any], target: Mapping[Any, Any]) -> list[str]:
    both = [(key, _shape(saved[key]), _shape(target[key])) for key in saved if key in target]
    return [
        f"{key!r} is {list(ours)} in the checkpoint and {list(theirs)} here"
        for key, ours, theirs in both
        if ours is not None and theirs is not None and ours != theirs
    ]


def _recast(saved: Mapping[Any, Any], target: Mapping[Any, Any]) -> list[str]:
    """torch would round, without a word."""
    both = [(key, _dtype(saved[key]), _dtype(target[key])) for key in saved if key in target]
    return [
        f"{key!r} is {ours} in the checkpoint and {theirs} here"
        for key, ours, theirs in both
        if ours is not None and theirs is not None and ours != theirs
    ]


def _shape(value: Any) -> tuple[int, ...] | None:
    try:
        shape = getattr(value, "shape", None)
    except RuntimeError:  # of a lazy layer that has seen no batch: it takes any
        return None
    return None if shape is None else tuple(shape)


def _dtype(value: Any) -> str | None:
    dtype = getattr(value, "dtype", None)
    return None if dtype is None else str(dtype)


def _named(what: str, names: Collection[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(list(names)[:SHOWN])
    rest = len(names) - SHOWN
    return f"{what} {shown}" + (f" and {rest} more" if rest > 0 else "")
