"""Which tests run at the same time, when pytest has several workers (``make test``: two).

A module, or a folder, stays in one worker, with the clusters that it shares. Nearly half of the
modules wait for Slurm most of their time; while one does, the other computes.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

FOLDERS = ("tests/integration/manyranks/", "tests/integration/trainingjob/")
"""Whose jobs run side by side in any case, for all modules of the folder."""


class ByModule(LoadScopeScheduling):
    """Hands out whole modules, in the order of :func:`in_turn`."""

    def _split_scope(self, nodeid: str) -> str:
        whole = (folder for folder in FOLDERS if nodeid.startswith(folder))
        return next(whole, nodeid.partition("::")[0])


FIRST = (
    "tests/integration/manyranks/",
    "tests/training/test_preemptions.py",
    "tests/integration/trainingjob/",
)
"""What takes longest: the first computes all the time, the others wait most of it."""


def in_turn(items: list[pytest.Item]) -> None:
    """The longest first; then those that do not look at Slurm's clock; then the rest."""
    on_slurm = {item.path for item in items if item.get_closest_marker("slurm")}

    def turn(item: pytest.Item) -> int:
        for number, start in enumerate(FIRST):
            if item.nodeid.startswith(start):
                return number
        return len(FIRST) + (item.path in on_slurm)

    items.sort(key=turn)
