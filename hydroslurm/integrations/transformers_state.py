"""What a rank's Trainer knows of its loop, beside TrainerState: where it is in the epoch, what is
still to be done behind the step, running averages, callbacks, and other modules than its model."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint.tree import is_dtensor
from hydroslurm.errors import StateMismatch
from hydroslurm.integrations.handed import fingerprint
from hydroslurm.training.objects import bare

_AT_STEP = ("should_save", "should_evaluate", "should_log")
_FLAGS = ("should_training_stop", "should_epoch_stop", *_AT_STEP)
_NUMBERS = (int, float, torch.Tensor)
_MADE_BY_TRAIN = ("model_wrapped", "optimizer", "lr_scheduler")
"""Attributes that train() fills, and that are saved in another way or made anew."""


class LoopState:
    """One rank's part of the state of a ``train()``.

    The Trainer and its subclasses count and average in attributes: the losses and tokens since the
    last log, floating-point operations, TRL's metrics. All attributes that hold numbers or tensors,
    or lists and dictionaries of them, and have changed since the training began, are saved. TRL's
    trainer by rewards keeps the completions that it has generated for several steps like that.

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
        self._before: dict[str, Any] = {}
        self._empty: set[str] = set()
        self._args_before: dict[str, Mapping[str, Any]] = {}
        self._restored: frozenset[str] = frozenset()

    def remember(self) -> None:
        """Attributes that will not have changed from now on are not saved."""
        attributes = vars(self._trainer)
        self._before = {
            name: _plain(value) for name, value in attributes.items() if _is_counter(value)
        }
        self._args_before = {n: dict(_args_of(one)) for n, one in self._exportable()}
        empty = {name for name, value in attributes.items() if value is None}
        self._empty = (self._before.keys() | empty) - set(_MADE_BY_TRAIN)

    def unsaved(self) -> list[str]:
        """What the attributes that could have been saved when the training began hold now, if they
        cannot be any more, each in words."""
        now = vars(self._trainer)
        return [
            f"{type(self._trainer).__name__}.{name} ({type(now[name]).__name__})"
            for name in sorted(self._empty & now.keys())
            if now[name] is not None and not isinstance(now[name], (bool, str))
            if not _is_counter(now[name])
        ]

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
        trainer = self._trainer
        changed = {
            name: value
            for name, value in vars(trainer).items()
            if _is_counter(value)
            and (name in self._restored or not _equal(value, self._before.get(name)))
        }
        return {
            "epoch": self.epoch,
            "steps_in_epoch": self.steps_in_epoch,
            "is_followed": self.is_followed,
            "grad_norm": _plain(self.grad_norm),
            "learning_rate": _plain(self.learning_rate),
            "loss": _plain(self.loss),
            "is_training": bool(trainer.model.training),
            "flags": self._flags_now(),
            "attributes": {name: _plain(value) for name, value in changed.items()},
            "on_device": sorted(
                name
                for name, value in changed.items()
                if any(one.device.type != "cpu" for one in _tensors(value))
            ),
            "callbacks": {n: self._exported(n, one) for n, one in self._exportable()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.steps_in_epoch = state["epoch"], state["steps_in_epoch"]
        self.grad_norm, self.learning_rate = state["grad_norm"], state["learning_rate"]
        self.loss, self.is_training = state["loss"], state["is_training"]
        self._flags = state["flags"]
        self.is_followed = state["is_followed"]
        self._restored = frozenset(state["attributes"])
        for name, value in state["attributes"].items():
            here = getattr(self._trainer, name, None)
            device = self._trainer.args.device if name in state["on_device"] else None
            setattr(self._trainer, name, _put(here, value, device=device))
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
            if name not in before or not _equal(value, before[name])
        }
        return {"args": args, "attributes": callback.state().get("attributes", {})}

    def _exportable(self) -> list[tuple[str, Any]]:
        """The callbacks that have a state to save, numbered; a script makes the same ones in each
        attempt."""
        kind = sys.modules["transformers.trainer_callback"].ExportableState
        callbacks = self._trainer.callback_handler.callbacks
        return [(str(n), one) for n, one in enumerate(c for c in callbacks if isinstance(c, kind))]


def _args_of(callback: Any) -> Mapping[str, Any]:
    """What it exports of its arguments. Both parts of a state may be left out: transformers takes
    them as empty."""
    args: Mapping[str, Any] = callback.state().get("args", {})
    return args


def _is_counter(value: Any, *, depth: int = 0) -> bool:
    """Whether it is a number or a tensor, or a container of such, also of strings and None."""
    if isinstance(value, bool):
        return depth > 0
    if isinstance(value, _NUMBERS):
        return True
    if depth and (value is None or isinstance(value, str)):
        return True
    if depth > 4:
        return False
    if isinstance(value, Mapping):
        return all(
            isinstance(key, str) and _is_counter(one, depth=depth + 1) for key, one in value.items()
        )
    if isinstance(value, (list, tuple, deque)):
        return all(_is_counter(one, depth=depth + 1) for one in value)
    return False


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, type(one)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)


def _plain(value: Any) -> Any:
    """A copy of tensors, numbers and plain containers."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(value)  # numpy's are floats too
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All of them in a counter."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple, deque)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _put(here: Any, value: Any, *, device: torch.device | None) -> Any:
    """The saved value in the form of what is here: the same containers, the same tensor.

    Args:
        device: for tensors that are not here yet.
    """
    if isinstance(value, torch.Tensor):
        if not isinstance(here, torch.Tensor):
            return value if device is None else value.to(device)
        if here.shape == value.shape and here.dtype == value.dtype and not here.requires_grad:
            return here.copy_(value)
        return value.to(here.device)
    if isinstance(here, dict) and isinstance(value, Mapping):
        # a key that is not here yet has what a defaultdict makes for it, such as a bounded deque
        make = getattr(here, "default_factory", None) if isinstance(here, defaultdict) else None
        made = {
            key: _put(here[key] if key in here else make and make(), one, device=device)
            for key, one in value.items()
        }
        here.clear()
        here.update(made)
        return here
    if isinstance(value, list):
        of_tensors = [_put(None, one, device=device) for one in value]
        if isinstance(here, deque):
            return deque(of_tensors, maxlen=here.maxlen)
        return tuple(of_tensors) if isinstance(here, tuple) else of_tensors
    if isinstance(value, Mapping):
        return {key: _put(None, one, device=device) for key, one in value.items()}
    return value


class OtherModules:
    """The modules of a Trainer beside the model that it trains, of which those that have changed
    since the training began are saved, such as a reference model that follows the model."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before: dict[str, Any] = {}
        self._restored: frozenset[str] = frozenset()

    def remember(self) -> None:
        """Modules that do not change from now on are as the script makes them."""
        self._before = {name: fingerprint(one.state_dict()) for name, one in self._modules()}

    def state_dict(self) -> dict[str, Any]:
        states = {name: one.state_dict() for name, one in self._modules()}
        return {
            name: state
            for name, state in states.items()
            if name in self._restored or fingerprint(state) != self._before.get(name)
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Raises:
        StateMismatch: one is not there, or does not fit.
        """
        modules = dict(self._modules())
        self._restored = frozenset(states)
        for name, state in states.items():
            try:
                modules[name].load_state_dict(state)
            except (KeyError, RuntimeError) as error:
                raise StateMismatch(
                    f"the checkpoint has the weights of a {name}, which this Trainer does not "
                    f"have, or in another form: {error}; begin anew with another directory="
                ) from error

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        model = bare(self._trainer.model)
        for name, value in vars(self._trainer).items():
            if isinstance(value, torch.nn.Module) and bare(value) is not model:
                yield name, bare(value)
