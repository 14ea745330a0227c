"""What is saved of a Hugging Face Trainer for all ranks, and how it gets that back.

A Trainer resumes from a folder: it is given one with nothing in it but its own state, and what it
would load from there comes from the checkpoint of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydroslurm.errors import StateMismatch
from hydroslurm.integrations.framework_run import FrameworkRun
from hydroslurm.integrations.framework_state import Companions
from hydroslurm.integrations.sharded import Sharded
from hydroslurm.integrations.transformers_state import companions_of, other_modules
from hydroslurm.training.objects import bare

_STATE_FILE = "trainer_state.json"

Replace = Callable[[str, Callable[..., Any]], object]
"""Puts a method in the place of the Trainer's own of this name, which is its first argument."""


class TrainerCheckpoint:
    """Of one ``train()``.

    Args:
        run: of this training, which saves what :meth:`capture` returns.
        sharded: of a model that is sharded; it is saved and loaded as such.
        say: tells the user what is not saved.
    """

    def __init__(
        self,
        trainer: Any,
        run: FrameworkRun,
        *,
        sharded: Sharded | None,
        say: Callable[[str], None],
    ) -> None:
        self._trainer, self._run, self._sharded = trainer, run, sharded
        self._modules = Companions(lambda: other_modules(trainer))
        self._companions = Companions(
            lambda: () if sharded is not None else companions_of(trainer), say=say
        )

    def remember(self) -> None:
        """Other modules than the model that will not have changed from now on are not saved."""
        self._modules.remember()
        self._companions.remember()

    def capture(self) -> Mapping[str, Any]:
        """The state now, between two steps."""
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        state = {
            "modules": self._modules.state_dict(),
            "companions": self._companions.state_dict(),
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

    def load_companions(self, loaded: Mapping[str, Any]) -> None:
        """Behind all else, when the training begins; ``loaded`` as it was captured."""
        self._companions.load_state_dict(loaded["companions"])

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
