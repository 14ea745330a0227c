"""``MultiNodeCheckpointManager``: the checkpoints of a job of many ranks, by Caffe2's name.

Saving needs nothing more than a :class:`CheckpointManager`: a JobRunner of several ranks makes
joint checkpoints, one folder for all, committed when every part is durable. What is added here is
the look at single ranks: who had a part, and what was that rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydroslurm.compat.manager import CheckpointManager
from hydroslurm.errors import CheckpointMissing


class MultiNodeCheckpointManager(CheckpointManager):
    """As :class:`CheckpointManager`; also reads what single ranks have saved of their own.

    The number of ranks may change between two lives of a job: what they have in common is laid out
    anew, and the order of the samples goes on where all of them together were.
    """

    def world_size(self, *, epoch: int | None = None, step: int | None = None) -> int:
        """How many ranks have made a checkpoint together.

        Raises:
            CheckpointMissing, UsageError: as :meth:`find`.
        """
        return self.find(epoch=epoch, step=step).checkpoint.manifest.world_size

    def load_own(
        self, rank: int, *, epoch: int | None = None, step: int | None = None
    ) -> Mapping[str, Any]:
        """What one rank has saved besides what all have in common: its random numbers, its counters
        and its place in the data. Verified.

        Raises:
            CheckpointMissing: no such checkpoint, or no such rank in it; says how many there were.
            CheckpointCorrupt: a file of it is not what was written.
        """
        found = self.find(epoch=epoch, step=step)
        size = found.checkpoint.manifest.world_size
        if not 0 <= rank < size:
            raise CheckpointMissing(
                f"{found.checkpoint.path} was made by {size} ranks, 0 to {size - 1}; there is no "
                f"rank {rank} in it"
            )
        found.store.verify(found.checkpoint)
        return found.store.load_own(found.checkpoint, rank)
