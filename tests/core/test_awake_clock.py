"""The clock by which detectors judge others."""

from __future__ import annotations

import time

import pytest

from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.jobs.agent import workers
from hydroslurm.jobs.supervisor.job_step import RunningStep


class Time:
    """Time that passes in sleeps alone; the process is stopped in the second one."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sleeps = 0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now_s += 3600.0 if self.sleeps == 2 else seconds


def test_time_in_which_it_was_not_read_does_not_count() -> None:
    """Neither a stop, however long, nor one after the other; who is only slow goes on slowly."""
    passed = Time()
    clock = AwakeClock(1.0, monotonic=passed.monotonic)
    for _ in range(10):
        passed.now_s += 1.9
        clock.now_s()
    assert (round(clock.now_s(), 6), clock.absences) == (119.0, 0)
    for absences in (1, 2):
        passed.now_s += 3600.0
        assert (round(clock.now_s(), 6), clock.absences) == (119.0 + absences, absences)
    passed.now_s += 0.5
    assert round(clock.now_s(), 6) == 121.5


def test_whoever_was_stopped_gives_the_others_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor waits for ranks that save, and an agent for a worker that imports, for an hour
    in which all of them were suspended: neither ends them when it wakes up."""
    passed = Time()
    monkeypatch.setattr(time, "monotonic", passed.monotonic)
    monkeypatch.setattr(time, "sleep", passed.sleep)

    class Step(RunningStep):
        def has_ended(self) -> bool:
            return passed.now_s > 3702.0

    assert Step(1, 1).wait(3.0)
    killed: list[int] = []
    monkeypatch.setattr(workers, "catches", lambda *_: False)
    monkeypatch.setattr(workers, "send_group", lambda pid, _: killed.append(pid))
    of_node = workers.Workers(None)
    of_node.start({0: 1 << 30})
    of_node.ask("stop")
    passed.now_s += 3600.0
    of_node.look()
    assert not killed
    for _ in range(11):
        passed.now_s += 1.0
        of_node.look()
    assert killed == [1 << 30]
