"""The name that was meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(name: str, valid: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """The valid name that is spelt most alike, whatever its case and its dashes; None when none
    is like it.

    Args:
        cutoff: how alike, from 0 to 1.
    """
    plain = {_bare(one): one for one in valid}
    near = difflib.get_close_matches(_bare(name)[:60], list(plain), n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def _bare(name: str) -> str:
    """The same for envName, env_name and ENV-NAME."""
    return name.lower().replace("_", "").replace("-", "")
