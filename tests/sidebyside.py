"""Which tests run at the same time, when pytest has several workers.

A module, or a folder, stays in one worker. Modules on Slurm wait most of their time: they are
spread over the whole run, so that the other workers compute meanwhile.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

FOLDERS = ("tests/integrations/", "tests/integration/manyranks/", "tests/integration/trainingjob/")
"""Whose modules share what is dear: processes with a framework loaded, or jobs side by side."""


def scope_of(nodeid: str) -> str:
    """The module, or the folder, that stays in one worker."""
    whole = (folder for folder in FOLDERS if nodeid.startswith(folder))
    return next(whole, nodeid.partition("::")[0])


class ByModule(LoadScopeScheduling):
    """Hands out whole modules, in the order of :func:`in_turn`."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def in_turn(items: list[pytest.Item]) -> None:
    """Spread what runs on Slurm evenly among the rest, the longest first."""
    every = list(dict.fromkeys(scope_of(item.nodeid) for item in items))
    on_slurm = {scope_of(item.nodeid) for item in items if item.get_closest_marker("slurm")}
    waiting = sorted((one for one in every if one in on_slurm), key=lambda one: one not in FOLDERS)
    computing = [one for one in every if one not in on_slurm]
    turn = {
        scope: (number / len(scopes), scopes is computing)
        for scopes in (waiting, computing)
        for number, scope in enumerate(scopes)
    }
    items.sort(key=lambda item: turn[scope_of(item.nodeid)])
