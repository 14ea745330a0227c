"""Where the first node is reached whose name nobody can look up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hydroslurm.coordination import network
from hydroslurm.coordination.network import located, rendezvous_environment, set_master_addr
from hydroslurm.coordination.world import World
from hydroslurm.errors import CoordinatorLost

NOWHERE = World(rank=1, world_size=2, host="no-such-node.invalid")


@pytest.fixture(autouse=True)
def _no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody to ask, and nothing remembered."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    network._look_up.cache_clear()
    yield
    network._look_up.cache_clear()


def test_a_name_that_leads_nowhere() -> None:
    """It is an error that says what was seen, and what to set; the first rank listens all the same,
    for others may find it."""
    environ: dict[str, str] = {}
    for ask in (lambda: set_master_addr(NOWHERE, environ), lambda: located(NOWHERE)):
        with pytest.raises(CoordinatorLost) as raised:
            ask()
        for words in ("no-such-node.invalid does not resolve here", "SLURM_CONF", "MASTER_ADDR"):
            assert words in str(raised.value)
    assert environ == {}
    assert located(replace(NOWHERE, rank=0)).host == NOWHERE.host


def test_what_a_person_has_set_is_not_looked_up() -> None:
    """Nor is the node of a process that is alone."""
    environ = {"MASTER_ADDR": "10.0.0.9"}
    assert set_master_addr(NOWHERE, environ) == NOWHERE
    assert set_master_addr(replace(NOWHERE, rank=0, world_size=1), {}).host == NOWHERE.host
    assert environ == {"MASTER_ADDR": "10.0.0.9"}


def test_the_meeting_place() -> None:
    """On one machine gloo is told which interface to take."""
    assert rendezvous_environment("10.0.0.7") == {"MASTER_ADDR": "10.0.0.7"}
    assert rendezvous_environment("127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"
