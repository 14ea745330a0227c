"""What the supervisor of a TrainingJob tells its ranks: environment variables that it sets and a
Run reads."""

from __future__ import annotations

SUPERVISED_ENV = "HYDROSLURM_SUPERVISED"
"""1: somebody else counts the failures of this job."""
SAVE_EVERY_ENV = "HYDROSLURM_SAVE_EVERY_S"
"""Seconds between two saves, above what the script says."""
ATTEMPTS_ENV = "HYDROSLURM_ATTEMPTS_WITHOUT_PROGRESS"
"""How many lives in a row may begin at the same step, above what the script says."""
