"""A closed gate that lets ranks on to a collective, with real process groups; who refuses to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forkedranks import start, wait_for_end
from processes import Child
from zygote import forked_program

from hydroslurm.errors import InstallError
from hydroslurm.gate.native_gate import NativeGate

PROGRAM = Path(__file__).parent / "ranks_at_collectives.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with forked_program(PROGRAM, tmp_path_factory.mktemp("ranks")) as program:
        program.expect("ready")
        yield program


@pytest.mark.parametrize("scene", ["ddp", "fsdp", "functional_and_two_groups", "both_ways"])
def test_ranks_meet_at_one_collective(ranks: Child, scene: str, tmp_path: Path) -> None:
    """Two ranks that are paused anywhere are let through to the same collective: the numbers that
    torch keeps are equal and what was asked for to the one, none is in flight, and both go on."""
    start(ranks, 2, scene=scene, meet=str(tmp_path / "meet"))
    assert wait_for_end(ranks, 2) == {0: 0, 1: 0}, str(ranks)


def test_let_through_wants_a_number_and_a_started_gate() -> None:
    """A negative number, one that is no 64-bit number, and a gate that does not run are refused."""
    gate = NativeGate()
    with pytest.raises(InstallError, match="not started"):
        gate.let_through(1)
    with pytest.raises(InstallError, match="not started"):
        gate.hold_here()
    gate.start([])
    for n in (-1, 1 << 40, 1 << 70, -(1 << 70)):
        with pytest.raises(InstallError, match=str(n)):
            gate.let_through(n)
    gate.let_through(3)
    gate.let_through(0)
    gate.hold_here()
    assert gate.status().allowance == 0
    gate.stop()
    assert gate.wait_events(0) == []
