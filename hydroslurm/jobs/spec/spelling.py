"""Find what a misspelt name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(name: str, valid: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """The valid name with the closest spelling, ignoring case, dashes and underscores, or with the
    same letters in another order; None when none is close.

    Args:
        cutoff: the least similarity, from 0 to 1.
    """
    plain, bare = {_bare(one): one for one in valid}, _bare(name)[:60]
    near = difflib.get_close_matches(bare, list(plain), n=1, cutoff=cutoff)
    near = near or [one for one in plain if sorted(one) == sorted(bare)]
    return plain[near[0]] if near else None


def _bare(name: str) -> str:
    """The same for envName, env_name and ENV-NAME."""
    return name.lower().replace("_", "").replace("-", "")
