"""What a Lightning fit has that no checkpoint of Lightning's holds: what the script's module and
callbacks keep, and what was logged in an epoch that is not over, so that its means and metrics go
on where they were. Each rank has its own.

Imports nothing of Lightning: the same code serves ``lightning`` and ``pytorch_lightning``.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint.census import Variables
from hydroslurm.checkpoint.known import reason
from hydroslurm.checkpoint.plain import is_plain, tensors_in

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
            saves = _base_of(type(one).state_dict) != "Callback"
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
    plain = {name: value for name, value in vars(thing).items() if is_plain(value)}
    return {name: value for name, value in plain.items() if next(tensors_in(value), None) is None}


def _base_of(method: Callable[..., Any]) -> str:
    """The class that has defined this method."""
    return method.__qualname__.partition(".")[0]


class RankMetrics:
    """The logged values of one trainer's training loop, and its module's torchmetrics."""

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
            "metrics": {
                name: _plain(metric, (*metric._defaults, "_update_count"))
                for name, metric in self._metrics()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        connector = self._trainer._logger_connector
        connector._first_loop_iter = state["first_loop_iter"]
        connector._current_fx = state["current_fx"]
        for name, shown in state["shown"].items():
            getattr(connector, name).update(shown)
        for name, metric in self._metrics():
            _set(metric, state["metrics"].get(name, {}))
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
            result.value = dict(self._metrics()).get(meta.metric_attribute)
        _set(result, saved["values"])
        return result

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        """The metrics that hang in the module, by name."""
        for name, module in self._trainer.lightning_module.named_modules():
            if hasattr(module, "_defaults") and hasattr(module, "_update_count"):
                yield name, module


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
        "values": _plain(result, _VALUES if result.is_tensor else _VALUES[1:]),
    }


def _plain(thing: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Copies of these attributes, as far as they are there: metrics change theirs in place."""
    found = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    return {name: _copied(value) for name, value in found.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, torch.Tensor) for one in value)
    return isinstance(value, (torch.Tensor, int))


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _set(thing: Any, values: Mapping[str, Any]) -> None:
    """Give an object its attributes back, each on the device on which it has them."""
    for name, value in values.items():
        now = getattr(thing, name, None)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
            value = value.to(now.device)
        elif isinstance(value, list):
            value = [one.to(thing.device) for one in value]
        setattr(thing, name, value)
