"""A resumed epoch of Lightning: the loader that it had begun with, and how many batches Lightning
expects of it where another number of ranks had begun it.

The script may make another loader for each epoch, by what it has counted, by the epoch, or by
chance. An attempt that resumes within one asks for that loader again, in the state in which the
first one was asked for.

Lightning ends an epoch, and validates, by a number of batches that it asks the loaders for once.
The rest of an epoch is more batches for fewer ranks, and fewer for more: by the whole epoch's
number it would leave samples out, or come to the end and not know it. So for that one epoch the
loaders' lengths are the batches that were used and those that are left, and from the next one on
the numbers are what they are for this number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hydroslurm.checkpoint import rng
from hydroslurm.integrations.framework_run import FrameworkRun
from hydroslurm.integrations.held_loader import HeldLoader, count_rest, count_whole

_OF_SEVERAL: dict[str, Callable[[Any], Any]] = {
    "max_size_cycle": max,
    "max_size": max,
    "min_size": min,
    "sequential": sum,
}


class LoaderRequest:
    """What the script saw when it was asked for the training loader: the epoch, the random numbers,
    and what it had counted. Saved for each rank."""

    def __init__(self, trainer: Any, run: FrameworkRun) -> None:
        self._trainer, self._run = trainer, run
        self._seen: Mapping[str, Any] = {}

    def ask(self, own: Callable[[], Any]) -> Any:
        """In the place of the source's own: the loaders that the script makes."""
        progress = self._trainer.fit_loop.epoch_progress.current
        saved = self._run.own_loaded.get("request")
        if not saved:
            script = self._run.script_now()
            self._seen = {"epoch": progress.processed, "rng": rng.capture(), "script": script}
            return own()
        self._seen = saved
        rng.restore(saved["rng"])
        self._run.put_script(saved["script"])
        epoch, progress.processed = progress.processed, saved["epoch"]
        try:
            return own()
        finally:
            progress.processed = epoch

    def state_dict(self) -> Mapping[str, Any]:
        return self._seen

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is left to do: it was needed before."""


class ResumedEpoch:
    """How many batches are expected. One resumed fit's."""

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
