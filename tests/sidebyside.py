"""Which tests run at the same time, when pytest has several workers (``make test``: two).

A module, or a folder, stays in one worker, with the clusters that it shares. Nearly half of the
modules wait for Slurm most of their time; while one does, the other worker computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

FOLDERS = ("tests/manyranks/", "tests/trainingjob/")
"""Whose jobs run side by side in any case, for all modules of the folder."""


class ByModule(LoadScopeScheduling):
    """Hands out whole modules, in the order of :func:`in_turn`."""

    def _split_scope(self, nodeid: str) -> str:
        whole = (folder for folder in FOLDERS if nodeid.startswith(folder))
        return next(whole, nodeid.partition("::")[0])


def in_turn(items: list[pytest.Item]) -> None:
    """The longest first; beside it those that do not look at Slurm's clock; then the rest."""
    on_slurm = {item.path for item in items if item.get_closest_marker("slurm")}

    def turn(path: Path) -> int:
        return 0 if path.parent.name == "manyranks" else 1 + (path in on_slurm)

    items.sort(key=lambda item: turn(item.path))
