"""What a run reports: lines for people on stderr, and its saves as events and NVTX ranges."""

from __future__ import annotations

import logging
import sys

from hydroslurm.checkpoint.saver import SaveEvent
from hydroslurm.core.events import EventKind
from hydroslurm.gate.marks import Range
from hydroslurm.runtime.controller import Controller

LOGGER = logging.getLogger("hydroslurm")
_OVER = (EventKind.SAVE_COMMITTED, EventKind.SAVE_FAILED, EventKind.SAVE_ABANDONED)


def notice(text: str) -> None:
    """Log one line of normal progress, at level INFO."""
    _log(logging.INFO, text)


def warning(text: str) -> None:
    """Log one line that somebody has to see: it shows after ``logging.basicConfig()``, too."""
    _log(logging.WARNING, text)


def _log(level: int, text: str) -> None:
    """A program that has set up logging gets it there. Without any handler Python would drop
    everything below WARNING, and a job's log must say where the run resumed from, so one of our own
    on stderr takes its place.
    """
    LOGGER.disabled = False  # dictConfig() disables the loggers that it does not name
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("hydroslurm: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
    LOGGER.log(level, text)


class SaveRecorder:
    """Gets the events of one saver, from whatever thread, and writes them into the rank's log."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._saving: dict[tuple[int, str], int] = {}
        self._committing: dict[tuple[int, str], int] = {}

    def __call__(self, event: SaveEvent) -> None:
        self._mark(event)
        self._controller.record(
            event.kind,
            {
                "checkpoint_step": event.step,
                "save_kind": event.save_kind,
                "state_bytes": event.state_bytes,
                "seconds": event.seconds,
                "reason": event.reason,
            },
            mono_ns=event.mono_ns,
        )

    def _mark(self, event: SaveEvent) -> None:
        marks = self._controller.marks
        if not marks.emitting:
            return
        save = event.step, event.save_kind  # the stop's may be beside a periodic one of its step
        if event.kind is EventKind.SAVE_STARTED:
            self._saving[save] = marks.begin(Range.SAVING, event.step)
        elif event.kind is EventKind.SAVE_WRITTEN:
            self._committing[save] = marks.begin(Range.COMMITTING, event.step)
        elif event.kind in _OVER:
            marks.end_once(self._committing, save)
            marks.end_once(self._saving, save)
