"""Environment variables that a TrainingJob's supervisor sets for its ranks, and a Run reads."""

from __future__ import annotations

SUPERVISED_ENV = "HYDROSLURM_SUPERVISED"
"""1: somebody else counts the failures of this job."""
SAVE_EVERY_ENV = "HYDROSLURM_SAVE_EVERY_S"
"""Seconds between two saves, above what the script says."""
ATTEMPT_ENV = "HYDROSLURM_ATTEMPT"
"""The number of this attempt, from 1. A Run takes it for its own where no later one is recorded."""
ATTEMPTS_ENV = "HYDROSLURM_ATTEMPTS_WITHOUT_PROGRESS"
"""How many attempts in a row may begin at the same step, above what the script says."""
