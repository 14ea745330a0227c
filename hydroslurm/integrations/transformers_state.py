"""What a rank's Trainer knows of its loop, beside TrainerState: where it is in the epoch, what is
still to be done behind the step, running averages, callbacks, and other modules than its model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint.tree import is_dtensor
from hydroslurm.integrations.framework_state import held_by
from hydroslurm.training.attributes import Attributes, is_of_library, of_modules
from hydroslurm.training.objects import bare
from hydroslurm.training.plain import equal, plain

_AT_STEP = ("should_save", "should_evaluate", "should_log")
_FLAGS = ("should_training_stop", "should_epoch_stop", *_AT_STEP)
_MADE_BY_TRAIN = ("model_wrapped", "optimizer", "lr_scheduler")
"""Attributes that train() fills, and that are saved in another way or made anew."""


class LoopState:
    """One rank's part of the state of a ``train()``.

    Attributes:
        epoch, steps_in_epoch: that is being trained; optimizer steps so far in it.
        grad_norm, learning_rate: of the last step; a log at the end of the epoch has them.
        loss: sum of the losses since the last log, of this rank, where it is no attribute of the
            Trainer's.
        is_training: whether the model was in the mode in which it is trained. TRL's trainers ask
            for that to know what they log.
        is_followed: what was to be done behind the last step is done. What is to be done at the end
            of the epoch is found out again when that is repeated.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.epoch = -1
        self.steps_in_epoch = 0
        self.grad_norm: Any = None
        self.learning_rate: float | None = None
        self.loss: Any = None
        self.is_training = True
        self.is_followed = False
        self._flags: Mapping[str, bool] = {}
        self._args_before: dict[str, Mapping[str, Any]] = {}

    def remember(self) -> None:
        """Arguments of callbacks that will not have changed from now on are not saved."""
        self._args_before = {n: dict(_args_of(one)) for n, one in self._exportable()}

    def count_step(
        self, *, epoch: int, loss: Any, grad_norm: Any, learning_rate: float | None
    ) -> None:
        """An optimizer step is complete."""
        if epoch != self.epoch:
            self.epoch, self.steps_in_epoch = int(epoch), 0
        self.steps_in_epoch += 1
        self.is_followed = False
        if is_dtensor(grad_norm):  # now, when all ranks are here: what waits is no rank's own state
            grad_norm = grad_norm.full_tensor()
        self.loss, self.grad_norm, self.learning_rate = loss, grad_norm, learning_rate

    def give_back_control(self) -> None:
        """What was still to be done behind the step, and whether the training is over. Later than
        the rest: the Trainer resets it when an epoch begins."""
        for name, value in self._flags.items():
            setattr(self._trainer.control, name, value)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "steps_in_epoch": self.steps_in_epoch,
            "is_followed": self.is_followed,
            "grad_norm": plain(self.grad_norm),
            "learning_rate": plain(self.learning_rate),
            "loss": plain(self.loss),
            "is_training": bool(self._trainer.model.training),
            "flags": self._flags_now(),
            "callbacks": {n: self._exported(n, one) for n, one in self._exportable()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.steps_in_epoch = state["epoch"], state["steps_in_epoch"]
        self.grad_norm, self.learning_rate = state["grad_norm"], state["learning_rate"]
        self.loss, self.is_training = state["loss"], state["is_training"]
        self._flags = state["flags"]
        self.is_followed = state["is_followed"]
        for n, callback in self._exportable():
            saved = state["callbacks"].get(n, {})
            if saved.get("args"):
                made = type(callback)(**{**_args_of(callback), **saved["args"]})
                vars(callback).update(vars(made))
            for name, value in saved.get("attributes", {}).items():
                setattr(callback, name, value)

    def _flags_now(self) -> dict[str, bool]:
        flags = {name: bool(getattr(self._trainer.control, name)) for name in _FLAGS}
        return flags | dict.fromkeys(_AT_STEP if self.is_followed else (), False)

    def _exported(self, number: str, callback: Any) -> dict[str, Any]:
        """Of its arguments those that have changed since the script has given them."""
        before = self._args_before.get(number, {})
        args = {
            name: value
            for name, value in _args_of(callback).items()
            if name not in before or not equal(value, before[name])
        }
        return {"args": args, "attributes": callback.state().get("attributes", {})}

    def _exportable(self) -> list[tuple[str, Any]]:
        """The callbacks that have a state to save, numbered; a script makes the same ones in each
        attempt."""
        kind = sys.modules["transformers.trainer_callback"].ExportableState
        callbacks = self._trainer.callback_handler.callbacks
        return [(str(n), one) for n, one in enumerate(c for c in callbacks if isinstance(c, kind))]


def attributes_of(trainer: Any) -> dict[str, Attributes]:
    """Those of the script's modules and callbacks, but for callbacks that export a state, and of
    the Trainer itself.

    The Trainer and its subclasses count and average in attributes: the losses and tokens since the
    last log, floating-point operations, TRL's metrics. TRL's trainer by rewards keeps the
    completions that it has generated for several steps like that.
    """

    def device() -> torch.device:
        return trainer.args.device  # type: ignore[no-any-return]

    callbacks = {
        f"callback {number} {type(one).__name__}": Attributes(one, device=device)
        for number, one in _silent_callbacks(trainer)
    }
    own = Attributes(trainer, without=_MADE_BY_TRAIN, flags=False, device=device)
    return {**of_modules(bare(trainer.model)), **callbacks, "trainer": own}


def companions_of(trainer: Any) -> Iterator[tuple[str, Any]]:
    """What those keep that has a state, such as an average of the weights."""
    holders = {
        f"{type(one).__name__} (callback {number})": one
        for number, one in _silent_callbacks(trainer)
    }
    known = [bare(trainer.model), trainer, trainer.optimizer, trainer.lr_scheduler]
    known += trainer.callback_handler.callbacks
    return held_by(holders, known=[*known, *(module for _, module in other_modules(trainer))])


def _silent_callbacks(trainer: Any) -> Iterator[tuple[int, Any]]:
    """The script's callbacks that export no state, each with its place among all."""
    kind = sys.modules["transformers.trainer_callback"].ExportableState
    for number, one in enumerate(trainer.callback_handler.callbacks):
        if not is_of_library(one) and not isinstance(one, kind):
            yield number, one


def _args_of(callback: Any) -> Mapping[str, Any]:
    """What it exports of its arguments. Both parts of a state may be left out: transformers takes
    them as empty."""
    args: Mapping[str, Any] = callback.state().get("args", {})
    return args


def other_modules(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The modules of a Trainer beside the model that it trains, such as a reference model that
    follows the model."""
    model = bare(trainer.model)
    for name, value in vars(trainer).items():
        if isinstance(value, torch.nn.Module) and bare(value) is not model:
            yield name, bare(value)
