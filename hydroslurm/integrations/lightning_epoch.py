"""How many batches Lightning expects of an epoch that another number of ranks had begun.

Lightning ends an epoch, and validates, by a number of batches that it asks the loaders for once.
The rest of an epoch is more batches for fewer ranks, and fewer for more: by the whole epoch's
number it would leave samples out, or come to the end and not know it. So for that one epoch the
loaders' lengths are the batches that were used and those that are left, and from the next one on
the numbers are what they are for this number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydroslurm.integrations.held_loader import HeldLoader, count_rest, count_whole

_OF_SEVERAL: dict[str, Callable[[Any], Any]] = {
    "max_size_cycle": max,
    "max_size": max,
    "min_size": min,
    "sequential": sum,
}


class ResumedEpoch:
    """See the module. One resumed fit's."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._epoch: int | None = None
        self._loaders: list[HeldLoader] = []

    def hold(self, loader: HeldLoader) -> None:
        """Before Lightning asks for this loader's length."""
        if count_rest(loader):
            self._epoch = self._trainer.fit_loop.epoch_progress.current.processed
            self._loaders.append(loader)

    def leave_behind(self) -> None:
        """At the beginning of each epoch: behind the resumed one all lengths are whole ones."""
        loop = self._trainer.fit_loop
        if self._epoch is None or loop.epoch_progress.current.processed == self._epoch:
            return
        self._epoch = None
        for loader in self._loaders:
            count_whole(loader)
        combined = loop._combined_loader
        combined.limits = [
            self._limit(len(one)) if hasattr(one, "__len__") else limit
            for one, limit in zip(combined.flattened, combined.limits, strict=True)
        ]
        loop.max_batches = _OF_SEVERAL[combined._mode](combined.limits)
        interval = self._trainer.val_check_interval
        if isinstance(interval, float) and self._trainer.val_check_batch is not None:
            self._trainer.val_check_batch = max(1, int(loop.max_batches * interval))

    def _limit(self, batches: int) -> int:
        """Lightning's _parse_num_batches."""
        wanted = self._trainer.limit_train_batches
        return min(batches, wanted) if isinstance(wanted, int) else int(batches * wanted)
