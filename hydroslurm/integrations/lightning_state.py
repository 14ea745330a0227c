"""What a Lightning fit has that no checkpoint of Lightning's holds: what the script's module and
callbacks keep, and what was logged in an epoch that is not over, so that its means and metrics go
on where they were. Each rank has its own.

The script may make another loader for each epoch, by what it has counted, by the epoch, or by
chance. An attempt that resumes within one asks for that loader again, in the state in which the
first one was asked for.

Lightning ends an epoch, and validates, by a number of batches that it asks the loaders for once.
The rest of an epoch is more batches for fewer ranks, and fewer for more: by the whole epoch's
number it would leave samples out, or come to the end and not know it. So for that one epoch the
loaders' lengths are the batches that were used and those that are left, and from the next one on
the numbers are what they are for this number of ranks.

Imports nothing of Lightning: the same code serves ``lightning`` and ``pytorch_lightning``.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.census import Variables
from hydroslurm.checkpoint.known import reason
from hydroslurm.checkpoint.plain import is_plain, plain, tensors_in
from hydroslurm.integrations.framework_run import FrameworkRun
from hydroslurm.integrations.held_loader import HeldLoader

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_VALUES = ("value", "cumulated_batch_size", "_forward_cache", "_update_count")
_SAID = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph",
    "add_dataloader_idx", "dataloader_idx", "metric_attribute",
)  # fmt: skip
"""Of a call of ``self.log()``, what is plain."""
_REDUCTIONS = {
    f"{'torch' if kind is torch else 'builtins'}.{name}": getattr(kind, name)
    for kind, names in ((torch, ("mean", "sum", "max", "min")), (builtins, ("sum", "max", "min")))
    for name in names
}


def roots_of(trainer: Any) -> dict[str, Any]:
    """The script's callbacks and its data module, by name. Of a callback that has a state of its
    own only what that would hardly have: numbers and texts."""
    found: dict[str, Any] = {}
    for number, one in enumerate(trainer.callbacks):
        if not reason(one):
            saves = not type(one).state_dict.__qualname__.startswith("Callback.")
            name = f"callback {number} {type(one).__name__}"
            found[name] = Variables(_words(one), one.__setattr__) if saves else one
    if (data := trainer.datamodule) is not None and not reason(data):
        found["datamodule"] = data
    return found


def without_of(trainer: Any) -> dict[str, Any]:
    """The attributes that Lightning puts into a module and a data module."""
    kinds = {
        "model": (trainer.lightning_module, "LightningModule"),
        "datamodule": (trainer.datamodule, "LightningDataModule"),
    }
    return {
        name: vars(next(kind for kind in type(one).__mro__ if kind.__name__ == base)())
        for name, (one, base) in kinds.items()
        if one is not None
    }


def _words(thing: Any) -> dict[str, Any]:
    found = {name: value for name, value in vars(thing).items() if is_plain(value)}
    return {name: value for name, value in found.items() if next(tensors_in(value), None) is None}


class RankMetrics:
    """The logged values of one trainer's training loop. What its module's torchmetrics have counted
    comes back as all else that the module has (:mod:`hydroslurm.checkpoint.census`)."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        connector = self._trainer._logger_connector
        return {
            "first_loop_iter": connector._first_loop_iter,
            "current_fx": connector._current_fx,
            "shown": {name: dict(getattr(connector, name)) for name in _SHOWN},
            "results": {
                key: saved
                for key, result in self._trainer.fit_loop.epoch_loop._results.items()
                if not result.has_reset and (saved := _of_result(result)) is not None
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        connector = self._trainer._logger_connector
        connector._first_loop_iter = state["first_loop_iter"]
        connector._current_fx = state["current_fx"]
        for name, shown in state["shown"].items():
            getattr(connector, name).update(shown)
        results = self._trainer.fit_loop.epoch_loop._results
        for key, saved in state["results"].items():
            results[key] = self._result(results, saved)

    def _result(self, results: Any, saved: Mapping[str, Any]) -> Any:
        """The entry of a logged value, as ``self.log()`` with the same arguments would make it."""
        kinds = sys.modules[type(results).__module__]
        meta = kinds._Metadata(**saved["said"], reduce_fx=_REDUCTIONS[saved["reduction"]])
        meta.sync = kinds._Sync(fn=self._trainer.strategy.reduce, **saved["sync"])
        result = kinds._ResultMetric(meta, saved["is_tensor"])
        result.to(self._trainer.strategy.root_device)
        if not saved["is_tensor"]:
            modules = self._trainer.lightning_module.named_modules()
            result.value = dict(modules).get(meta.metric_attribute)
        for name, value in saved["values"].items():
            now = getattr(result, name, None)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                value = value.to(now.device)
            setattr(result, name, value)
        return result


def _of_result(result: Any) -> dict[str, Any] | None:
    """One logged value; None where it hangs on something that cannot be saved."""
    meta, sync = result.meta, result.meta.sync
    reduction = next((name for name, one in _REDUCTIONS.items() if one is meta.reduce_fx), None)
    if reduction is None or sync.group is not None:
        return None
    if not result.is_tensor and meta.metric_attribute is None:
        return None
    return {
        "said": {name: getattr(meta, name) for name in _SAID},
        "reduction": reduction,
        "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_op": sync.op},
        "is_tensor": result.is_tensor,
        "values": _values(result, _VALUES if result.is_tensor else _VALUES[1:]),
    }


def _values(result: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Copies of these attributes, as far as they are there: metrics change theirs in place."""
    found = {name: getattr(result, name) for name in names if hasattr(result, name)}
    return {name: plain(one) for name, one in found.items() if isinstance(one, (torch.Tensor, int))}


# --- a resumed epoch
# ------------------------------------------------------------------------------------------------

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
            script = self._run.contents.state()
            self._seen = {"epoch": progress.processed, "rng": rng.capture(), "script": script}
            return own()
        self._seen = saved
        rng.restore(saved["rng"])
        self._run.contents.restore(saved["script"])
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
        if loader.count_rest():
            self._epoch = self._trainer.fit_loop.epoch_progress.current.processed
            self._loaders.append(loader)

    def leave_behind(self) -> None:
        """At the beginning of each epoch: behind the resumed one all lengths are whole ones."""
        loop = self._trainer.fit_loop
        if self._epoch is None or loop.epoch_progress.current.processed == self._epoch:
            return
        self._epoch = None
        for loader in self._loaders:
            loader.count_whole()
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
