"""What is saved of a Hugging Face Trainer, and how it gets that back: of each rank where it is in
the epoch, what is still to be done after the step, and running averages; of all together
what its own checkpoint would have, and other modules than its model.

A Trainer resumes from a folder: it is given one with nothing in it but its own state, and what it
would load from there comes from the checkpoint of the run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hydroslurm.checkpoint.known import ENTERED, KNOWN, reason
from hydroslurm.checkpoint.plain import plain
from hydroslurm.checkpoint.tree import is_dtensor
from hydroslurm.errors import StateMismatch
from hydroslurm.integrations.framework_run import FrameworkRun
from hydroslurm.integrations.sharded import Sharded
from hydroslurm.training.contents import fingerprint
from hydroslurm.training.objects import bare

_STATE_FILE = "trainer_state.json"
_AT_STEP = ("should_save", "should_evaluate", "should_log")
_FLAGS = ("should_training_stop", "should_epoch_stop", *_AT_STEP)
_BEGAN_AT = ("_initial_global_step", "_initial_num_input_tokens_seen")
"""Where this train() began; the Trainer takes the step of a resume for that."""
_MADE_BY_TRAIN = ("model_wrapped", "optimizer", "lr_scheduler")
"""Attributes that train() fills, and that are saved in another way or made anew."""
Replace = Callable[[str, Callable[..., Any]], object]
"""Puts a method in the place of the Trainer's own of this name, which is its first argument."""


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
            "began_at": {n: int(getattr(self._trainer, n, 0)) for n in _BEGAN_AT},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.steps_in_epoch = state["epoch"], state["steps_in_epoch"]
        self.grad_norm, self.learning_rate = state["grad_norm"], state["learning_rate"]
        self.loss, self.is_training = state["loss"], state["is_training"]
        self._flags = state["flags"]
        self.is_followed = state["is_followed"]
        for name, count in state.get("began_at", {}).items():
            setattr(self._trainer, name, count)

    def _flags_now(self) -> dict[str, bool]:
        flags = {name: bool(getattr(self._trainer.control, name)) for name in _FLAGS}
        return flags | dict.fromkeys(_AT_STEP if self.is_followed else (), False)


class OtherModules:
    """Modules beside the model that all ranks have alike, such as a reference model that follows
    it. Saved are those that have changed since the training began.

    Args:
        find: the modules, with names that are the same in each attempt; asked anew each time.
    """

    def __init__(self, find: Callable[[], Iterable[tuple[str, torch.nn.Module]]]) -> None:
        self._find = find
        self._before: dict[str, Any] = {}
        self._restored: frozenset[str] = frozenset()

    def remember(self) -> None:
        """Those that do not change from now on are as the script makes them."""
        self._before = {name: fingerprint(one.state_dict()) for name, one in self._find()}

    def state_dict(self) -> dict[str, Any]:
        states = {name: one.state_dict() for name, one in self._find()}
        return {
            name: state
            for name, state in states.items()
            if name in self._restored or fingerprint(state) != self._before.get(name)
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Raises:
        StateMismatch: one is not there, or does not fit.
        """
        here = dict(self._find())
        self._restored = frozenset(states)
        for name, state in states.items():
            try:
                here[name].load_state_dict(state)
            except (KeyError, RuntimeError, ValueError, TypeError) as error:
                raise StateMismatch(
                    f"the checkpoint has the state of {name}, which this script does not have, or "
                    f"in another form: {error}; begin anew with another directory="
                ) from error


class TrainerCheckpoint:
    """Of one ``train()``.

    Args:
        run: of this training, which saves what :meth:`capture` returns.
        sharded: of a model that is sharded; it is saved and loaded as such.
    """

    def __init__(
        self,
        trainer: Any,
        run: FrameworkRun,
        *,
        sharded: Sharded | None,
    ) -> None:
        self._trainer, self._run, self._sharded = trainer, run, sharded
        self._modules = OtherModules(lambda: other_modules(trainer))

    def remember(self) -> None:
        """Other modules than the model that will not have changed from now on are not saved."""
        self._modules.remember()

    def capture(self) -> Mapping[str, Any]:
        """The state now, between two steps."""
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        state = {
            "modules": self._modules.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "state": json.dumps(asdict(trainer.state)),
        }
        if self._sharded is None:
            state["model"] = bare(trainer.model).state_dict()
            state["optimizer"] = trainer.optimizer.state_dict()
        return state

    def resume_from(
        self, folder: Path, replace: Replace, *, steps_per_epoch: Callable[[], int]
    ) -> None:
        """Have the Trainer resume from this empty folder.

        Args:
            steps_per_epoch: known when the Trainer enters its loop.
        """
        (folder / _STATE_FILE).write_text(self._loaded["state"])
        replace("_load_from_checkpoint", self._load_model)
        replace("_load_optimizer_and_scheduler", self._load_optimizer)
        replace("_load_scaler", lambda *_: self._load("scaler", self._trainer.accelerator.scaler))
        replace("_load_callback_state", lambda _: self._enter(steps_per_epoch()))
        replace("_load_rng_state", lambda *_: None)  # the Run does

    @property
    def _loaded(self) -> Mapping[str, Any]:
        assert self._run.loaded is not None
        return self._run.loaded

    def _load_model(self, own: Any, path: Any, model: Any = None) -> None:
        del own, path, model
        if self._sharded is None:  # else resuming has done it
            self._load("model", bare(self._trainer.model))
        self._modules.load_state_dict(self._loaded["modules"])

    def _load_optimizer(self, own: Any, path: Any) -> None:
        del own, path
        if self._sharded is None:
            self._load("optimizer", self._trainer.optimizer)
        self._load("scheduler", self._trainer.lr_scheduler)
        if self._sharded is not None:
            self._sharded.put_settings_back()

    def _load(self, name: str, thing: Any) -> None:
        state = self._loaded[name]
        if (thing is None) != (state is None):
            here, there = ("none", "one") if thing is None else ("one", "none")
            raise StateMismatch(
                f"the checkpoint has {there} for the {name}, and this Trainer {here}; begin anew "
                "with another directory="
            )
        if state is None:
            return
        try:
            thing.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise StateMismatch(
                f"step {self._run.step} of this run does not fit the {name} "
                f"({type(thing).__name__}): {error}"
            ) from error

    def _enter(self, per_epoch: int) -> None:
        """Tell the Trainer the step that brings it into the epoch that was being trained, at the
        step behind which it was saved; in front of it, where that was the last one of the epoch."""
        state, loop = self._trainer.state, self._run.own_loaded["loop"]
        step = state.global_step
        state.global_step = loop["epoch"] * per_epoch + min(loop["steps_in_epoch"], per_epoch - 1)

        def init_training_references(*args: Any, **kwargs: Any) -> None:
            del state.init_training_references
            state.global_step = step
            state.init_training_references(*args, **kwargs)

        state.init_training_references = init_training_references


def remember(trainer: Any, run: FrameworkRun) -> None:
    """Have a run save what the Trainer and the script's callbacks keep, and those callbacks of
    transformers that export a state. Flags of the Trainer say where train() is, which sets them.

    The Trainer and its subclasses count and average in attributes: the losses and tokens since the
    last log, floating-point operations, TRL's metrics. TRL's trainer by rewards keeps the
    completions that it has generated for several steps like that.
    """
    flags = [name for name, value in vars(trainer).items() if isinstance(value, (bool, str))]
    kinds = [type(one) for one in _roots_of(trainer).values()]
    run.remember(
        lambda: _roots_of(trainer),
        saved=lambda: [one for _, one in other_modules(trainer)],
        known={**KNOWN, **{f"{one.__module__}.{one.__qualname__}": ENTERED for one in kinds}},
        without={"trainer": {*_MADE_BY_TRAIN, *flags}},
    )


def _roots_of(trainer: Any) -> dict[str, Any]:
    exports = sys.modules["transformers.trainer_callback"].ExportableState
    callbacks = {
        f"callback {number} {type(one).__name__}": one
        for number, one in enumerate(trainer.callback_handler.callbacks)
        if isinstance(one, exports) or not reason(one)
    }
    return {**callbacks, "trainer": trainer}


def other_modules(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The modules of a Trainer beside the model that it trains, such as a reference model that
    follows the model."""
    model = bare(trainer.model)
    for name, value in vars(trainer).items():
        if isinstance(value, torch.nn.Module) and bare(value) is not model:
            yield name, bare(value)
