"""One finding of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How bad it is: ``loss`` means that training steps would be lost here."""

    OK = "ok"
    NOTE = "note"
    RISK = "risk"
    LOSS = "loss"


@dataclass(frozen=True)
class Finding:
    """One thing that a person has to know.

    Attributes:
        key: names the finding to programs; stays the same over releases.
        title: a few words. explanation: a sentence or two.
        fix: the line of slurm.conf, sbatch or a command that would change it; empty for none.
    """

    key: str
    severity: Severity
    title: str
    explanation: str
    fix: str = ""
