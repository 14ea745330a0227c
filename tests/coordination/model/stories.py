"""What ranks train in a model: collectives, on groups that may cross."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

Groups = Mapping[str, tuple[int, ...]]
Programs = tuple[tuple[str, ...], ...]

GROUPS = {"w": (0, 1, 2), "a": (0, 1), "b": (1, 2), "c": (0, 2)}
"""All, and three that cross; in a program a capital message is an asynchronous collective."""
FOUR = {"w": (0, 1, 2, 3), "r": (0, 1), "s": (2, 3), "x": (0, 2), "y": (1, 3)}
"""Rows and columns."""


def programs_of(story: str, groups: Groups, *, ranks: int) -> Programs:
    """Each rank's part in collectives that are held one after the other. Programs that hang by
    themselves are not among them, and all others are."""
    return tuple(
        tuple(key for key in story if rank in groups[key.lower()]) for rank in range(ranks)
    )


def stories(length: int) -> list[str]:
    """Sequences of groups of three ranks, one of those that differ by the ranks' names only."""
    names = ["abc", "acb", "bac", "bca", "cab", "cba"]
    chosen = {}
    for keys in product("wabc", repeat=length):
        story = "".join(keys)
        alike = min(story.translate(str.maketrans("abc", other)) for other in names)
        chosen.setdefault(alike, alike)
    return list(chosen)
