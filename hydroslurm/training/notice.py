"""The few lines that a run logs for people: on stderr, through ``logging``."""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("hydroslurm")


def notice(text: str) -> None:
    """Log one line at level INFO.

    A program that has set up logging gets it there. Without any handler Python would drop
    everything below WARNING, and a job's log must say where the run resumed from, so one of our own
    on stderr takes its place.
    """
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("hydroslurm: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
    LOGGER.info(text)
