"""Elastic runs: nodes come and go while the training goes on in the same processes.

A run's members are single nodes, each with its ranks. The coordinator, which is not a member,
decides who trains together; each such group is a *generation*. See docs/elastic.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydroslurm.elastic.state import State, run

__all__ = ["State", "run"]


def __getattr__(name: str) -> Any:
    """Import on first use: the coordinator needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'hydroslurm.elastic' has no attribute {name!r}")
    from hydroslurm.elastic import state

    return getattr(state, name)
