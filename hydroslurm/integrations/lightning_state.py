"""What a script's Lightning module and callbacks have that no checkpoint of Lightning's holds.

Imports nothing of Lightning: the same code serves ``lightning`` and ``pytorch_lightning``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hydroslurm.integrations.companions import held_by
from hydroslurm.training.attributes import Attributes, is_of_library, of_modules


def attributes_of(trainer: Any) -> dict[str, Attributes]:
    """By name, of the module, those in it, and the callbacks."""
    return {**_of_module(trainer.lightning_module), **_of_callbacks(trainer)}


def companions_of(trainer: Any) -> Iterator[tuple[str, Any]]:
    """What the script's callbacks and its module keep that has a state, such as an average of the
    weights. A callback with a state of its own sees to that itself."""
    module, callbacks = trainer.lightning_module, trainer.callbacks
    holders = {
        f"{type(one).__name__} (callback {number})": one
        for number, one in enumerate(callbacks)
        if not is_of_library(one) and _base_of(type(one).state_dict) == "Callback"
    }
    known = [module, trainer, trainer.datamodule, *callbacks, *trainer.optimizers]
    return held_by({**holders, type(module).__name__: module}, known=known)


def _of_module(module: Any) -> dict[str, Attributes]:
    """What the script's module and those in it have in attributes of their own."""
    base = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    return of_modules(module, without=vars(base()))


def _of_callbacks(trainer: Any) -> dict[str, Attributes]:
    """What the script's callbacks have in attributes. Weights that one saves by itself are not
    saved once more, by each rank."""
    return {
        f"callback {number} {type(one).__name__}": Attributes(
            one,
            tensors=_base_of(type(one).state_dict) == "Callback",
            device=lambda: trainer.strategy.root_device,
        )
        for number, one in enumerate(trainer.callbacks)
        if not is_of_library(one)
    }


def _base_of(method: Callable[..., Any]) -> str:
    """The class that has defined this method."""
    return method.__qualname__.partition(".")[0]
