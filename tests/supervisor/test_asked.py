"""Whether ranks were asked to stop, as their events tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.events import Event, EventKind, EventLog
from hydroslurm.supervisor.asked import was_asked_to_stop


@pytest.mark.parametrize(
    ("kind", "meaning", "asked"),
    [
        (EventKind.STOP_REQUESTED, None, True),
        (EventKind.REQUEUE_ASKED, None, True),
        (EventKind.SIGNAL_PASSED_ON, "stop", True),
        (EventKind.SIGNAL_PASSED_ON, "user_pause", False),
        (EventKind.PARKED, None, False),
    ],
)
def test_who_asked(tmp_path: Path, kind: EventKind, meaning: str | None, asked: bool) -> None:
    """Any rank's or agent's word counts, of this attempt only."""
    assert not was_asked_to_stop(tmp_path / "none", since_epoch_ns=0)
    (tmp_path / "rank-00000.jsonl").write_text("torn")
    log = EventLog(tmp_path / "rank-00001.jsonl")
    log.append(Event(kind, 5, 1000, rank=1, data={} if meaning is None else {"meaning": meaning}))
    log.close()
    assert was_asked_to_stop(tmp_path, since_epoch_ns=1000) is asked
    assert not was_asked_to_stop(tmp_path, since_epoch_ns=1001)
