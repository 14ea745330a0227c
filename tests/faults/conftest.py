"""What fault rounds are played with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.rounds import Player, players


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    """One crew for the rounds of a module, and the runs that were left alone, to compare with."""
    with players(tmp_path_factory.mktemp("faults")) as made:
        yield made
