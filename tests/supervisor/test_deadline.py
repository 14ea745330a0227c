"""Which seconds count against activeDeadlineSeconds."""

from __future__ import annotations

from pathlib import Path

from hydroslurm.jobs.supervisor.attempts import LONGEST_TICK_S, ActiveTime


class Clock:
    """A clock that is set by hand, seconds."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_time_without_ticks_was_not_spent_running(tmp_path: Path) -> None:
    """Suspended with its ranks, the supervisor cannot tick; that time is left out."""
    clock = Clock()
    active = ActiveTime(tmp_path / "active.json", clock=clock)
    for _ in range(10):
        clock.now_s += 0.5
        active.tick()
    clock.now_s += 3600.0
    assert active.tick() == 5.0 + LONGEST_TICK_S


def test_it_counts_on_in_the_next_life(tmp_path: Path) -> None:
    """What a supervisor has written is where the next begins; the time between them is not."""
    clock = Clock()
    first = ActiveTime(tmp_path / "active.json", clock=clock)
    clock.now_s += 1.5
    first.tick()
    first.write()
    clock.now_s = 7.0
    second = ActiveTime(tmp_path / "active.json", clock=clock)
    clock.now_s += 1.0
    assert second.tick() == 2.5


def test_a_file_that_cannot_be_read_counts_for_nothing(tmp_path: Path) -> None:
    """Torn, or of another kind: the count begins anew, and the job goes on."""
    path = tmp_path / "active.json"
    path.write_text('{"active_s": ')
    assert ActiveTime(path).seconds == 0.0
    assert ActiveTime(tmp_path / "no" / "such" / "folder").tick() < 60.0
