"""Whose samples: the rank that a loop is, among how many."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from hydroslurm.errors import UsageError


@dataclass(frozen=True)
class Share:
    """One rank's part of what all ranks do together."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank must be in 0..world_size-1, not {self.rank} of {self.world_size}"
            )


def share_given(rank: int | None, world_size: int | None) -> Share | None:
    """The share that a caller has named; None when neither number was given.

    Raises:
        UsageError: only one of the two, or a rank outside of the world.
    """
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise UsageError(
            f"rank={rank}, world_size={world_size}: wanted both of them, or neither to follow "
            "torch.distributed"
        )
    return Share(rank, world_size)


def share_of_process() -> Share | None:
    """This process in torch.distributed's default group; None where that is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return Share(dist.get_rank(), dist.get_world_size())


def world_size_now(given: Share | None) -> int:
    """The ranks of a loop that was told its share, or else follows torch.distributed."""
    return (given or share_of_process() or Share()).world_size
