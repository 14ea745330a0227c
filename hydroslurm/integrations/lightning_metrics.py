"""What Lightning has logged in an epoch that is not over: means and metrics go on where they were.

Lightning's checkpoints leave it out, so that an epoch's mean after a restart is that of its rest.
Each rank has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_OF_RESULT = ("value", "cumulated_batch_size", "_forward_cache", "_update_count")


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
                key: _plain(result, _OF_RESULT)
                for key, result in self._trainer.fit_loop.epoch_loop._results.items()
                if result.is_tensor and not result.has_reset
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
        _fill_in(self._trainer.fit_loop.epoch_loop._results, dict(state["results"]))

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        """The metrics that hang in the module, by name."""
        for name, module in self._trainer.lightning_module.named_modules():
            if hasattr(module, "_defaults") and hasattr(module, "_update_count"):
                yield name, module


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


def _fill_in(results: Any, saved: dict[str, Any]) -> None:
    """Have each value that is logged for the first time go on from what was saved. Lightning makes
    the entries itself, with what the script says about them in its call."""
    kind: Any = type(results)
    if not saved:
        return

    class _Resumed(kind):  # type: ignore[misc]
        def __setitem__(self, key: str, result: Any) -> None:
            super().__setitem__(key, result)
            if result.is_tensor and key in saved:
                _set(result, saved.pop(key))
            if not saved:
                results.__class__ = kind

    results.__class__ = _Resumed
