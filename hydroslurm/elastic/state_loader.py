"""A DataLoader that is part of an elastic :class:`~hydroslurm.elastic.state.State`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from hydroslurm.data.position import position_of
from hydroslurm.errors import UsageError


class StateLoader:
    """Gives what is left of an epoch, to each rank its share; a batch that was given is used.

    Args:
        loader: with a :class:`~hydroslurm.data.ResumableSampler`, and with workers or without.
        epoch: says which one is to be gone through.

    Raises:
        UsageError: another sampler, whose order not all members could take up.
    """

    def __init__(self, loader: DataLoader[Any], *, epoch: Callable[[], int]) -> None:
        self._loader = loader
        self._epoch = epoch
        self._position = position_of(loader, shield=(signal.SIGTERM,))
        if self._position.name != "sampler":
            raise UsageError(
                "an elastic State was given a DataLoader whose sampler is a "
                f"{type(loader.sampler).__name__}: no other number of ranks could go on within its "
                "epochs. Give it sampler=hydroslurm.data.ResumableSampler(dataset), in the place "
                "of shuffle= or a DistributedSampler"
            )
        self._loaded: Mapping[str, Any] | None = None
        self._ended: int | None = None

    def __len__(self) -> int:
        """The batches of this rank in a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch()
        if epoch == self._ended:
            raise UsageError(
                f"epoch {epoch} is over, and state.epoch says {epoch} still: go by it, as in "
                "`for state.epoch in range(state.epoch, epochs):`"
            )
        state, self._loaded = self._loaded, None
        if state is not None and state["epoch"] == epoch:
            yield from self._position.resume_epoch(state)
        else:
            yield from self._position.begin_epoch(epoch)
        self._ended = epoch

    def state_dict(self) -> Mapping[str, Any]:
        """The place between two batches."""
        return self._position.state_dict() if self._loaded is None else self._loaded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iterator begin there, if it is for the same epoch."""
        self._loaded, self._ended = state, None
