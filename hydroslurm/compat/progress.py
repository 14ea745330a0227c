"""How far a job is within an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PROGRESS = "hydroslurm.job"
"""The name under which a job's progress is saved beside its objects."""


@dataclass
class Progress:
    """How far a job is within an epoch; saved with its objects.

    Attributes:
        begun: within an epoch. False: between two.
        done: functions of the epoch group that are behind.
        first_step: at which the epoch began.
        ended: a stop signal was true after the last epoch.
        outputs: place of a function of the epoch that is behind -> whether what it returned, a
            stop signal, is true.
    """

    begun: bool = False
    done: int = 0
    first_step: int = 0
    ended: bool = False
    outputs: dict[str, bool] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.outputs = {}  # which older checkpoints have not
        for name, value in state.items():
            setattr(self, name, value)
