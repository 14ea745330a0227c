"""What a run tells the people who read its log: few lines, on stderr, through ``logging``."""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("hydroslurm")


def notice(text: str) -> None:
    """One line of news at level INFO.

    A program that has set up logging gets it there. One that has not would see nothing below
    WARNING, and a job's log must say where it went on from, so that a handler of our own on stderr
    takes its place.
    """
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("hydroslurm: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
    LOGGER.info(text)
