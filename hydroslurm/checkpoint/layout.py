"""Names the keys by which a checkpoint and the object that it is loaded into differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
    shown = ", ".join(list(names)[:SHOWN])
    rest = len(names) - SHOWN
    return f"{what} {shown}" + (f" and {rest} more" if rest > 0 else "")
