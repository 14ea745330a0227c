"""examples/timed_pause.py and examples/scheduler.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hydroslurm.report.reading import read_history


def test_timed_pause(run: Callable[..., str], tmp_path: Path) -> None:
    """Two pauses from within, of the length asked for, both in the events and in the table."""
    options = ["--after", "0.1", "--hold", "0.3", "--times", "2", "--run-dir", str(tmp_path)]
    output = run("timed_pause.py", *options)
    first, second = read_history(tmp_path).pauses
    for pause in (first, second):
        assert pause.causes == ("api",)
        assert pause.complete
        assert pause.parked_s is not None
        assert pause.parked_s >= 0.29
        assert pause.step is not None
    assert "pause 2: running again" in output
    assert "signal → parked (µs)" in output


def test_scheduler(run: Callable[..., str]) -> None:
    """The long training is parked before the urgent one trains, and goes on after it has ended."""
    output = run("scheduler.py", "--low-steps", "400", "--urgent-steps", "20")
    events = ["low │ trains", "parked after", "urgent │ trains", "urgent │ ended, accuracy"]
    events += ["running again after", "low │ ended, accuracy"]
    squeezed = " ".join(output.replace("┃", "│").split())
    places = [squeezed.find(event) for event in events]
    assert -1 not in places, output
    assert places == sorted(places)
