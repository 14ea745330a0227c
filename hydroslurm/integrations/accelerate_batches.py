"""The loaders of a loop with accelerate, as the script iterates them.

The loader whose batch comes first in a step leads: where the loop asks it for the next one, the
step is done. Others that are trained from are asked within a step, and may be anywhere in an epoch
of their own when it ends: each of these has a position. One that is iterated without gradients, or
while all models are in evaluation mode, has none, and costs nothing.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hydroslurm.errors import UsageError
from hydroslurm.integrations.accelerate_loader import (
    CountedLoader,
    HeldTrainLoader,
    Iteration,
    Loader,
    ScriptLoader,
    require_known,
)
from hydroslurm.integrations.framework_run import FrameworkRun
from hydroslurm.training.reporting import warning

_NONE = object()
_KEY = "loaders"
_EARLY_STEPS = 100
_LOOKED_AT = 8
"""Weights, spread over the models, by which it is seen that an optimizer has stepped."""


class Loaders:
    """See the module.

    Args:
        run: resumed already, if there was something to resume from.
        models: those that are trained.
        checks: whether a loop whose positions cannot be kept ends in its first steps.
    """

    def __init__(
        self, run: FrameworkRun, accelerator: Any, models: list[Any], *, checks: bool
    ) -> None:
        self._run, self._accelerator, self._models, self._checks = run, accelerator, models, checks
        self._loaders: list[Loader] = []
        self._saved: Mapping[str, Any] | None = run.own_loaded.get(_KEY) or None
        self._at_safe_point = dict(self._saved or {})
        self._began_at = run.step
        self._epoch: int | None = None
        self._is_last_epoch = self._is_entered = False
        self._leading: Loader | None = None
        self._led: list[int] = []  # the epoch, until another one of the same chain() did
        self._handed_out: list[Iteration] = []  # to train on in this step, the first one first
        self._weights: list[torch.Tensor] = []
        self._told: set[str] = set()
        run.own[_KEY] = self

    def take(self, own: Any) -> ScriptLoader:
        """What the script is given in this loader's place.

        Raises:
            UsageError: this accelerate is not known.
        """
        require_known(own, self._accelerator.gradient_state)
        loader = Loader(own, len(self._loaders))
        self._loaders.append(loader)
        each = (self._saved or {}).get("each", ())
        saved = each[loader.number] if loader.number < len(each) else None
        if saved is None or not saved["is_held"]:
            CountedLoader(self._run, own, name=str(loader.number))
        else:
            self._hold(loader)
            loader.resumes = saved["is_under_way"]
        return ScriptLoader(loader, self.iterate)

    def begin_epoch(self, epoch: int, *, is_last: bool) -> None:
        """The loop is in an epoch; the loader that is trained from first will lead it."""
        self._epoch, self._is_last_epoch = epoch, is_last
        self._is_entered = False
        self._leading, self._led = None, []
        self._handed_out.clear()
        trained = [one for model in self._models for one in model.parameters() if one.requires_grad]
        self._weights = trained[:: max(1, len(trained) // _LOOKED_AT)]

    def leave_epochs(self) -> None:
        """No epoch is left."""
        self._epoch = None

    def iterate(self, loader: Loader) -> Iterator[Any]:
        """What the script iterates, of which nothing happens before it asks for a batch."""
        one = Iteration(loader)
        batches = self._batches(one)
        one.batches = weakref.ref(batches)
        return batches

    # --- one iteration
    # --------------------------------------------------------------------------------------------

    def _batches(self, one: Iteration) -> Iterator[Any]:
        source: Iterator[Any] | None = None
        while True:
            if source is None:
                if self._has_led(one):
                    break
                self._begin(one)
                batch, source = self._first_batch(one)
                if one.may_lead and not self._is_entered:
                    self._is_entered = True
                    self._run.enter_loop()
            else:
                self._require_kept(one)
                with self._run.handing_out():
                    batch = next(source, _NONE)
            is_first = one.may_lead and not self._handed_out
            if batch is _NONE:
                if is_first and self._is_last_epoch and self._leading is one.loader:
                    self._run.end_steps()
                break
            if one.may_lead:
                self._handed_out.append(one)
            if is_first:
                yield from self._step(one, batch)
            else:
                yield batch
                if one in self._handed_out:
                    self._handed_out.remove(one)
        one.ended = True

    def _step(self, one: Iteration, batch: Any) -> Iterator[Any]:
        """The first batch of a step, or of a part of one whose gradients are accumulated."""
        before = self._updates()
        try:
            with self._run.body():
                yield batch
        except GeneratorExit:  # the loop was left
            if self._leading in (None, one.loader) and self._updates() != before:
                self._run.count_step_left()
            raise
        finally:
            self._handed_out.clear()  # all is used
        if not self._accelerator.sync_gradients:
            return
        has_stepped = self._updates() != before
        if self._leading is None and (has_stepped or one.loader.number == 0):
            self._leading = one.loader
        if self._leading is one.loader:
            self._at_safe_point = self._state()
            assert self._epoch is not None
            self._run.complete_step(self._run.step + 1, epoch=self._epoch)
        elif self._leading is not None and has_stepped:
            self._say(
                f"{one.loader.name} is trained from behind the batches of another one in the same "
                "epoch: a stop waits for the next epoch, and a restart repeats this part. One loop "
                "over itertools.chain() of both stops at each step"
            )

    def _begin(self, one: Iteration) -> None:
        """The script asks for its first batch."""
        loader, run = one.loader, self._run
        one.may_lead = self._trains_from(loader, one)
        led_before = self._saved is None or self._saved["leading"] == loader.number
        if one.may_lead and not self._handed_out and not run.trains and led_before:
            self._begin_run()
            if one.resumes and _is_held_by(one, enumerate):
                self._say(
                    "this attempt resumes inside an epoch, and enumerate() counts its batches from "
                    "0 again. What goes by a number is to go by that of all attempts: count from "
                    "completed_steps(accelerator)"
                )
        led = self._leading
        is_behind = one.may_lead and not self._handed_out and led is not None and led is not loader
        if led is not None and is_behind and _is_held_by(one, itertools.chain):
            self._led.append(led.number)
            self._leading = loader
        if one.resumes and not run.trains:  # the script has it for something else
            one.resumes, loader.resumes, loader.current = False, True, None
        one.is_held = one.resumes or (one.may_lead and run.trains)
        if not one.is_held:
            return
        self._require_alone(one)
        loader.current = one
        if loader.held is None:
            self._hold(loader)

    def _has_led(self, one: Iteration) -> bool:
        """Whether a resumed epoch is behind all batches of this one, the first of a chain()."""
        saved, loader = self._saved, one.loader
        if saved is None or self._run.trains or not self._trains_from(loader, one):
            return False
        return loader.number in saved["led"] and loader.number != saved["leading"]

    def _first_batch(self, one: Iteration) -> tuple[Any, Iterator[Any]]:
        loader, held, state = one.loader, one.loader.held, self._accelerator.gradient_state
        if one.is_held and not one.resumes:
            assert held is not None
            held.begin_anew()
        if one.resumes and not loader.is_left:
            loader.own.iteration += 1  # as accelerate does behind the last batch
            loader.own.end()
            return _NONE, iter(())
        under_way = list(state.dataloader_references)
        with contextlib.ExitStack() as stack:
            if held is not None and not one.is_held:
                stack.enter_context(held.set_aside())
            if one.is_held:
                stack.enter_context(self._run.handing_out())
            source = iter(loader.own if held is None or not one.is_held else held.to_iterate)
            batch = next(source, _NONE)
        if one.resumes:
            assert held is not None
            held.is_iterated()
            if batch is not _NONE:  # it was among them when it was saved
                _set_references(state, under_way)
        return batch, source

    def _trains_from(self, loader: Loader, one: Iteration) -> bool:
        """Whether the batches of an iteration that begins now are trained on. A script may put its
        models into training mode only when it has the batch."""
        if self._epoch is None or not torch.is_grad_enabled():
            return False
        is_known = loader.number == 0 or loader.held is not None
        is_free = loader.current in (None, one) or not loader.is_under_way
        return (is_known and is_free) or self._is_training()

    def _is_training(self) -> bool:
        return not self._models or any(one.training for one in self._models)

    def _updates(self) -> int:
        return sum(one._version for one in self._weights)

    def _hold(self, loader: Loader) -> None:
        loader.held = HeldTrainLoader(self._run, loader.own, name=str(loader.number))

    # --- what is found at the first steps
    # --------------------------------------------------------------------------------------------

    def _require_alone(self, one: Iteration) -> None:
        if one.loader.current is not one and one.loader.is_under_way:
            self._refuse(
                f"{one.loader.name} is iterated twice at a time, and it has one position: give "
                "prepare() a loader for each"
            )
        if self._is_early and _is_held_by(one, itertools.cycle):
            self._refuse(
                f"itertools.cycle() keeps the batches of {one.loader.name}, and hands them out "
                "again: a resumed run would have those that were left when it was stopped. Write "
                "`def endless(loader): while True: yield from loader`, and iterate endless(loader)"
            )

    def _require_kept(self, one: Iteration) -> None:
        """One that was not held from its beginning is not to be trained from."""
        if one.is_held or not torch.is_grad_enabled() or not self._is_training():
            return
        if self._epoch is None and one.loader.number == 0:
            raise UsageError(
                "the training loader is iterated outside of hydroslurm.integrations.accelerate."
                "epochs(accelerator, N), so that a resumed run could not tell which epoch it is "
                "in: write `for epoch in epochs(accelerator, N):` around the loop"
            )
        if self._epoch is not None and self._run.trains:
            self._refuse(
                f"a batch of {one.loader.name} was fetched before the first step, or while all "
                "models were in evaluation mode, and one is trained on now from the same iterator: "
                "a resumed run would fetch that first one again. Fetch it in the step that uses "
                "it, within epochs(), behind model.train()"
            )

    @property
    def _is_early(self) -> bool:
        return self._checks and self._run.step < self._began_at + _EARLY_STEPS

    def _refuse(self, message: str) -> None:
        """
        Raises:
            UsageError: in the first steps of an attempt; later that would cost too much.
        """
        if self._is_early:
            raise UsageError(f"{message}. To do without: prepare(accelerator, ..., check=False)")
        if self._checks:
            self._say(message)

    def _say(self, message: str) -> None:
        if message not in self._told and self._accelerator.is_main_process:
            self._told.add(message)
            warning(message)

    # --- the state
    # --------------------------------------------------------------------------------------------

    def _begin_run(self) -> None:
        """The first step comes next: each loader is where it was."""
        saved = self._saved
        if saved is None:
            self._run.begin()
            return
        for loader, each in zip(self._loaders, saved["each"], strict=False):
            if loader.held is not None and each["is_under_way"]:
                loader.is_left = loader.held.open()
        self._run.begin()
        self._leading, self._led = self._loaders[saved["leading"]], list(saved["led"])
        for loader, each in zip(self._loaders, saved["each"], strict=False):
            loader.own.iteration = each["iteration"]
            loader.own.end_of_dataloader, loader.own.remainder = each["end"], each["remainder"]
        found = [None if number is None else self._loaders[number].own for number in saved["open"]]
        _set_references(self._accelerator.gradient_state, found)

    def _state(self) -> dict[str, Any]:
        """At a safe point."""
        numbers = {id(None): None, **{id(one.own): one.number for one in self._loaders}}
        references = self._accelerator.gradient_state.dataloader_references
        return {
            "leading": None if self._leading is None else self._leading.number,
            "led": list(self._led),
            "open": [numbers[id(one)] for one in references if id(one) in numbers],
            "each": [
                {
                    "is_held": one.held is not None,
                    "is_under_way": one.is_under_way,
                    "iteration": int(getattr(one.own, "iteration", 0)),
                    "end": bool(one.own.end_of_dataloader),
                    "remainder": int(one.own.remainder),
                }
                for one in self._loaders
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        return self._at_safe_point

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is left to do: it was needed before."""


def _is_held_by(one: Iteration, kind: type) -> bool:
    """Whether this iterator of the standard library's goes through the batches."""
    return any(isinstance(holder, kind) for holder in gc.get_referrers(one.batches()))


def _set_references(state: Any, loaders: list[Any]) -> None:
    """Which loaders are being iterated, the newest one last: its end is where accelerate steps."""
    state.dataloader_references = loaders
    if not isinstance(getattr(type(state), "active_dataloader", None), property):  # before 1.4
        state.active_dataloader = loaders[-1]
