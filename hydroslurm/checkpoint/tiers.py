"""The two places a checkpoint can be in, and what each of them promises."""

from __future__ import annotations

import warnings
from enum import Enum

from hydroslurm.checkpoint import commit
from hydroslurm.checkpoint.storage import LocalStorage
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.errors import CheckpointError


class Tier(str, Enum):
    """Where a checkpoint lies. The value is the word in events and messages."""

    DURABLE = "durable"
    FAST = "fast"

    @property
    def promise(self) -> str:
        """What a commit there survives, in words."""
        return _PROMISES[self]


_PROMISES = {
    Tier.DURABLE: "survives whatever its file system survives, on any node that mounts it",
    Tier.FAST: (
        "survives the death of the process, and a requeue to the same node for as long as its "
        "folder lives there; /dev/shm goes with a reboot, and with the job where the site gives "
        "each job its own. It counts as the job's memory"
    ),
}

FAST_KEEP = 1
"""Checkpoints of each kind that stay on the fast tier, two in all at least as in every store. It
is there to be quick and is small, and older states are on the durable one."""

FAST_AT_MOST = 3
"""Checkpoints that are there at one time: those two, and the one that is being written."""


def clear_fast(*, durable: CheckpointStore, fast: CheckpointStore | None) -> None:
    """Remove from the fast tier what the durable one has too, and what dead saves left there: for a
    run that has finished. In memory it would stay until the node is started again.

    For the attempt that holds the run. What cannot be removed stays, with a warning.
    """
    if fast is None:
        return
    storage = LocalStorage()
    try:
        kept = {one.key for one in durable.committed()}
        for one in fast.committed():
            if one.key in kept:
                commit.remove(one.path, storage=storage)
        commit.remove_leftovers(fast.directory, storage=storage)
        if not storage.listdir(fast.directory):
            storage.rmdir(fast.directory)
    except FileNotFoundError:
        return
    except (CheckpointError, OSError) as error:
        warnings.warn(
            f"hydroslurm: the run has finished, and its fast tier could not be removed ({error}). "
            f"What is in {fast.directory} takes its place there, in memory as well",
            RuntimeWarning,
            stacklevel=2,
        )
