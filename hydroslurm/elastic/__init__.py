"""Elastic runs: nodes come and go while the training goes on in the same processes.

A run's members are single nodes, each with its ranks. A coordinator that belongs to no member says
who trains together: one *generation* after the other. See docs/elastic.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydroslurm.elastic.state import State, run

__all__ = ["State", "run"]


def __getattr__(name: str) -> Any:
    """Imported when first used: the coordinator needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'hydroslurm.elastic' has no attribute {name!r}")
    from hydroslurm.elastic import state

    return getattr(state, name)
