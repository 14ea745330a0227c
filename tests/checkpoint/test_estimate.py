"""How long a save is expected to take."""

from __future__ import annotations

from pathlib import Path

from hydroslurm.checkpoint.deadline import Pace
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.store import Checkpoint


def saved(seconds: float, state_bytes: int) -> Checkpoint:
    manifest = Manifest(
        step=1,
        epoch=0,
        kind="periodic",
        created_epoch_ns=0,
        save_s=seconds,
        state_bytes=state_bytes,
        files={},
    )
    return Checkpoint(Path("nowhere"), manifest)


def test_assumed_then_earlier_attempts_then_this_one() -> None:
    """What is nearer replaces what is farther away."""
    assert Pace().expect_s(10**8) == 2.0
    pace = Pace([saved(5.0, 10**8)])
    assert pace.expect_s(10**8) == 5.0
    pace.add(3.0, state_bytes=10**8)
    assert pace.expect_s(10**8) == 3.0


def test_the_slowest_of_the_last_counts() -> None:
    """One slow save is remembered for five, and forgotten then."""
    pace = Pace()
    for seconds in (9.0, 1.0, 1.0, 1.0, 1.0):
        pace.add(seconds, state_bytes=10)
    assert pace.expect_s(10) == 9.0
    pace.add(1.0, state_bytes=10)
    assert pace.expect_s(10) == 1.0


def test_another_size() -> None:
    """Twice the bytes take twice as long; a save of next to nothing says little about a large one;
    a smaller state is not expected to be faster."""
    pace = Pace()
    pace.add(1.0, state_bytes=10**9)
    assert pace.expect_s(2 * 10**9) == 2.0
    assert pace.expect_s(10) == 1.0
    tiny = Pace()
    tiny.add(0.5, state_bytes=10)
    assert tiny.expect_s(10**8) < 2.0
