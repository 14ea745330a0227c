"""Where a training loop is in its data, in the middle of an epoch, with workers.

Three strategies behind one interface; :func:`position_of` chooses:

=========== ====================================== ===========================================
name        for                                    a resume costs
=========== ====================================== ===========================================
"stateful"  a loader with state_dict and           nothing (torchdata's StatefulDataLoader)
            load_state_dict
"sampler"   a plain DataLoader whose sampler is a  nothing: the order is computed, not replayed
            :class:`ResumableSampler`
"replay"    anything else that can be iterated     the batches of the epoch so far once more
=========== ====================================== ===========================================

Bit for bit: the batches after a resume are those of an uninterrupted run. Random augmentation:
without workers always (it draws from the global generators, which the session restores after the
iterator exists); with workers by "replay" always, by the other two if the data set is a
:class:`~hydroslurm.data.seeding.SeededDataset` (workers start anew there). Not covered: a loader
whose choice *which* samples come draws from the global generators between batches.

Several ranks: each has a position of its own. A "sampler" position is the same on all of them,
because it counts the samples that all have consumed: any number of ranks can go on from any one of
them, each to its new share of what is left, with batches of another size if that keeps the global
batch. So can a "replay" position of torch's DistributedSampler and of what accelerate has prepared
(:mod:`hydroslurm.data.shared_order`). The others can be resumed inside an epoch by the same rank of
the same number only. A rank that had no part in the save takes rank 0's position, generators
included.

Making an iterator draws: DataLoader takes a base seed for its workers from ``loader.generator``, or
else from torch's global generator (persistent workers: once, not in each epoch), RandomSampler a
seed or a permutation from its own, or else from the global one, when its first batch is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from hydroslurm.data import epochs
from hydroslurm.data.loader_state import LoaderState
from hydroslurm.data.sampler import share_given
from hydroslurm.data.strategies import ReplayPosition, SamplerPosition, StatefulPosition, countable
from hydroslurm.errors import UsageError


class LoaderPosition(Protocol):
    """The position of one training loop in one loader."""

    name: str
    loader_state: LoaderState
    """What changes in the loader beside."""

    def begin_epoch(self, epoch: int) -> Iterator[Any]:
        """Start an epoch; tells the samplers and the data set which one it is."""

    def resume_epoch(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """Go on after the last batch that was handed out. The caller restores the global RNG
        *after* this and before the first ``next()``.

        A state from before the first epoch gives an iterator that begins the epoch with its first
        ``next()``; one from after an epoch's last batch gives an iterator that is at its end.

        Raises:
            StateMismatch: the loader is not built as it was, or an epoch that another number of
            ranks had begun can be resumed by that number only.
        """

    def batches_of_epoch(self, state: Mapping[str, Any]) -> int | None:
        """How many batches the epoch has that this state lies in: those that were used and those
        that are left for this number of ranks. None: as many as any other epoch."""

    def without_newest(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of before the last batch was handed out, for another number of ranks: none of
        them has used it."""

    def left_behind(self) -> Mapping[str, Any] | None:
        """Between two epochs: the end of the last one, to be resumed before the next one begins,
        where workers go on with what they have."""

    def state_dict(self) -> dict[str, Any]:
        """The position between two batches: each batch that was handed out counts as used.
        Plain values and tensors only; ``epoch``, ``batches`` and ``world_size`` are in it."""


def position_of(
    loader: Any,
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> LoaderPosition:
    """The cheapest exact way to hold a position in this loader.

    Args:
        rank, world_size: of the loop; default: torch.distributed's where that is initialised when
            an epoch begins. A ResumableSampler that was given a rank keeps it; one that was not
            takes this one where torch.distributed is not initialised.

    Raises:
        UsageError: the loader hands out batches in the order in which workers finish
            (``in_order=False``), so that nobody can say which ones were used; or it cannot be
            iterated; or only one of ``rank`` and ``world_size`` was given.
    """
    share = share_given(rank, world_size)
    if share is not None:
        epochs.tell(loader, share)
    if not hasattr(loader, "__iter__"):
        raise UsageError(f"a loader that can be iterated is wanted, not {type(loader).__name__}")
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise UsageError(
            "a DataLoader with in_order=False gives batches as workers finish them, which differs "
            "from run to run and cannot be resumed; leave in_order at True"
        )
    if all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        return StatefulPosition(loader, share=share)
    if (indexes := countable(loader)) is not None:
        return SamplerPosition(loader, indexes, share=share)
    return ReplayPosition(loader, share=share)
