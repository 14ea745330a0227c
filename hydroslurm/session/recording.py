"""What the saver tells, as events of the run."""

from __future__ import annotations

from hydroslurm.checkpoint.outcome import SaveEvent
from hydroslurm.events import EventKind
from hydroslurm.runtime.controller import Controller


def record_save(controller: Controller, event: SaveEvent) -> None:
    """Write one event of a save into the rank's log; from any thread."""
    controller.record(
        EventKind(event.kind.value),
        {
            "checkpoint_step": event.step,
            "save_kind": event.save_kind,
            "tier": event.tier.value if event.tier else None,
            "state_bytes": event.state_bytes,
            "seconds": event.seconds,
            "reason": event.reason,
        },
        mono_ns=event.mono_ns,
    )
