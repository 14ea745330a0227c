"""The status file of a rank whose events a test writes by hand."""

from __future__ import annotations

from pathlib import Path

from hydroslurm.core.events import read_events
from hydroslurm.core.files import write_atomically
from hydroslurm.core.status import fold, status_of


def write_status(log: Path) -> None:
    """Fold the events of a log into the status beside it, as the rank would have."""
    status = fold(read_events(log))
    if status is not None:
        write_atomically(status_of(log), status.to_json())
