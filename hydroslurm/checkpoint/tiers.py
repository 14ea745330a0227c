"""The two places a checkpoint can be in, and what each of them promises."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import Enum

from hydroslurm.checkpoint import commit
from hydroslurm.checkpoint.catalog import Problem
from hydroslurm.checkpoint.storage import LocalStorage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
from hydroslurm.errors import CheckpointCorrupt, CheckpointError


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

LOOKS = 3
"""At a folder in which another process removes what has just been listed."""

FAST_KEEP = 1
"""Checkpoints of each kind that stay on the fast tier, two in all at least as in every store. It
is there to be quick and is small, and older states are on the durable one."""

FAST_AT_MOST = 3
"""Checkpoints that are there at one time: those two, and the one that is being written."""


@dataclass(frozen=True)
class Found:
    """A checkpoint and the store that can load it."""

    tier: Tier
    store: CheckpointStore
    checkpoint: Checkpoint


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


def newest_over(*, durable: CheckpointStore, fast: CheckpointStore | None = None) -> Found | None:
    """The newest committed checkpoint of both tiers that is whole, or None when there is none.

    Of the same save on both, the fast one: it loads sooner. One that is not whole costs a
    RuntimeWarning that names it and what is used instead. The fast folder must belong to this run
    alone: what lies there is taken for its own.

    Raises:
        CheckpointCorrupt: there are some, and none is whole: starting over must be a decision.
    """
    for _ in range(LOOKS - 1):
        found, vanished = _look(durable, fast, is_last=False)
        if not vanished:
            return found
    return _look(durable, fast, is_last=True)[0]


def _look(
    durable: CheckpointStore, fast: CheckpointStore | None, *, is_last: bool
) -> tuple[Found | None, bool]:
    """What is found, and whether others have removed what was listed before it was read: then there
    are newer ones by now. At the last look that is an error as any other."""
    stores = {Tier.DURABLE: durable} | ({} if fast is None else {Tier.FAST: fast})
    seen = [(tier, store, one) for tier, store in stores.items() for one in _list(tier, store)]
    unreadable = [one for _, _, one in seen if isinstance(one, Problem)]
    if not is_last and not all(one.path.is_dir() for one in unreadable):
        return None, True
    found = [Found(tier, store, one) for tier, store, one in seen if isinstance(one, Checkpoint)]
    found.sort(key=lambda one: (one.checkpoint.key, one.tier is Tier.FAST), reverse=True)
    broken: list[str] = []
    for one in found:
        try:
            one.store.verify(one.checkpoint)
        except (CheckpointError, OSError) as error:
            if not is_last and not one.checkpoint.path.is_dir():
                return None, True
            broken.append(f"{one.checkpoint.path} ({error})")
            continue
        newer = [other for other in unreadable if other.key >= one.checkpoint.key]
        broken += [f"{other.path} ({other.error})" for other in newer]
        _warn(broken, f"continues from {one.checkpoint.path}")
        return one, False
    broken += [f"{other.path} ({other.error})" for other in unreadable]
    if broken:
        raise CheckpointCorrupt(
            f"no checkpoint of this run can be loaded: {', '.join(broken)}. Remove the folders to "
            "start from the beginning"
        )
    return None, False


def _list(tier: Tier, store: CheckpointStore) -> list[Checkpoint | Problem]:
    """All of one tier, with one look: what goes between two would be in neither list. A fast tier
    that cannot be read is as good as an empty one; a durable one is not."""
    try:
        return store.look()
    except (CheckpointError, OSError) as error:
        if tier is Tier.DURABLE:
            raise
        _warn([f"the fast tier ({error})"], "looks at the durable one only")
        return []


def _warn(broken: list[str], instead: str) -> None:
    if broken:
        warnings.warn(
            f"hydroslurm cannot use {', '.join(broken)}; the run {instead}",
            RuntimeWarning,
            stacklevel=3,
        )
