"""accelerate: a loop of one's own keeps the whole promise, with two lines changed.

    from hydroslurm.integrations.accelerate import epochs, prepare

    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)
    for epoch in epochs(accelerator, 3):
        for batch in loader:
            with accelerator.accumulate(model):
                ...

:func:`prepare` stands in the place of ``accelerator.prepare()``, and resumes. A safe point lies
behind each batch at which accelerate has synchronised the gradients, where the loop asks for the
next one: what the loop did with the batch is done. A resumed loop goes on in its epoch behind the
last such batch; what follows the batches of an epoch is repeated if the attempt ended within it.

The loader whose batch comes first in a step leads: where the loop asks it for the next one, the
step is done. Others that are trained from are asked within a step, and may be anywhere in an epoch
of their own when it ends: each of these has a position. One that is iterated without gradients, or
while all models are in evaluation mode, has none, and costs nothing.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from hydroslurm.checkpoint import rng
from hydroslurm.errors import UsageError
from hydroslurm.integrations.accelerate_loader import PreparedLoader
from hydroslurm.integrations.framework import (
    FrameworkSession,
    directory_of_fit,
    environ_of,
    replace,
)
from hydroslurm.integrations.held_loader import StandIn
from hydroslurm.training.checks import Remedies
from hydroslurm.training.objects import Stateful, bare

_LOOP = "_hydroslurm_loop"
_KEY = "loop"
_NONE = object()
_EARLY_STEPS = 100
_LOOKED_AT = 8
"""Weights, spread over the models, by which it is seen that an optimizer has stepped."""

_GIVE = "Give it to prepare(accelerator, ..., {})."
_REGISTER = "accelerator.register_for_checkpointing({}) before prepare()"
_REMEDIES = Remedies(
    optimizer=_GIVE.format("optimizer"),
    scheduler=_GIVE.format("scheduler"),
    scaler=(
        'Accelerator(mixed_precision="fp16") has one that is saved; for one of your own: '
        f"{_REGISTER.format('scaler')}."
    ),
    weights=(
        "Give the module that has them to prepare(accelerator, ..., module); "
        "torch.nn.ParameterList([tensor]) for a tensor that belongs to none."
    ),
    batches=(
        "Give the loader to prepare(accelerator, ..., loader), and iterate what that returns."
    ),
    unchecked="prepare(accelerator, ..., check=False)",
)


def prepare(accelerator: Any, *objects: Any, check: bool = True, **options: Any) -> Any:
    """``accelerator.prepare()`` for a training that can be stopped, requeued and resumed, bit for
    bit. Returns the prepared objects in the same order; a single one by itself.

    Saved are all of them that have a state, the objects given to
    ``accelerator.register_for_checkpointing()`` before, the gradient scaler, the random numbers of
    each rank, and the position in the training data.

    The first step of each attempt is watched, as that of :meth:`hydroslurm.Run.batches`: the run
    ends there, with what to do, if it uses what is not saved.

    Args:
        objects: models, optimizers, schedulers and loaders; random generators of the script's own,
            which are handed back as they are. Each loader that is trained from has a position; one
            for validation begins anew each time, as the script iterates it.
        check: whether the first step is watched.
        options: those of :class:`hydroslurm.Run`: ``directory``, ``every_steps``, ``every_s``,
            ``keep``, ``on_save_error``, ``limits``, ``resume``.

    Raises:
        UsageError: no loader was given; an accelerator that was given before; a sharded model;
            tasks of Slurm that train alone each; no folder to save into.
        StateMismatch: what was saved does not fit these objects.
    """
    if hasattr(accelerator, _LOOP):
        raise UsageError(
            "prepare() was called for this accelerator before; give it all objects in one call"
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise UsageError(
            f"an Accelerator with {kind} cannot be made preemptible yet; wanted a single device or "
            "DistributedDataParallel"
        )
    loop = Loop(accelerator, check=check, options=options)
    setattr(accelerator, _LOOP, loop)
    return loop.prepare(objects)


def epochs(accelerator: Any, count: int) -> Iterator[int]:
    """The epochs that are left of ``count``, for a loop over the loader in each. The run is
    finished behind the last one; a loop that is left before that calls
    ``accelerator.end_training()``.

    Raises:
        UsageError: :func:`prepare` was not called for this accelerator.
    """
    return _loop_of(accelerator).epochs(count)


def completed_steps(accelerator: Any) -> int:
    """Optimizer steps that were made in all attempts: where a loop that counts them begins.

    Raises:
        UsageError: as :func:`epochs`.
    """
    return _loop_of(accelerator).run.step


@dataclass(eq=False)
class Iteration:
    """One way through a loader.

    Attributes:
        resumes: it goes on where one was saved.
        may_lead: its batches are trained on. is_held: it has a position.
        batches: what the script has; None once it has it no more.
    """

    loader: PreparedLoader
    resumes: bool
    may_lead: bool = False
    is_held: bool = False
    batches: Callable[[], Any] = lambda: None


class Loop:
    """The training of one accelerator; see the module.

    Attributes:
        run: the Run.
    """

    def __init__(self, accelerator: Any, *, check: bool, options: Mapping[str, Any]) -> None:
        self._accelerator = accelerator
        self._checks = check
        self._is_finished = False
        environ = environ_of(rank=accelerator.process_index, world_size=accelerator.num_processes)
        place = directory_of_fit(options.get("directory"), environ).root
        self._models: list[Any] = []
        self.run = FrameworkSession(
            "accelerate",
            dict,
            lambda: {str(n): model for n, model in enumerate(self._models)},
            environ=environ,
            **{**options, "directory": place},
        )
        self._loaders: list[PreparedLoader] = []
        self._saved: Mapping[str, Any] | None = None
        self._at_safe_point: dict[str, Any] = {}
        self._began_at = 0
        self._epoch: int | None = None
        self._is_last_epoch = self._is_entered = False
        self._leading: PreparedLoader | None = None
        self._led: list[int] = []  # the epoch, until another one of the same chain() did
        self._handed_out: list[Iteration] = []  # to train on in this step, the first one first
        self._weights: list[torch.Tensor] = []
        self._say = cache(self.run.log)  # each message once

    def prepare(self, objects: tuple[Any, ...]) -> Any:
        generators = [one for one in objects if isinstance(one, rng.KINDS)]
        for number, generator in enumerate(generators):
            self.run.session.register(f"generator {number}", generator)
        made = self._accelerator.prepare(*objects)
        prepared = list(made) if len(objects) > 1 else [made]
        places = [place for place, one in enumerate(prepared) if _is_loader(one)]
        if not places:
            raise UsageError("prepare() needs the loader that the training iterates; give it, too")
        self._share(prepared)
        self._models = [one for one in prepared if hasattr(one, "named_buffers")]
        # the script's own, through which its data sets are found: in accelerate's stand ours
        loaders = [one[place] for place in places for one in (objects, prepared)]
        self.run.contents.remember(saved=lambda: [*loaders, *generators])
        self.run.resume()
        self._saved = self.run.own_loaded.get(_KEY) or None
        self._at_safe_point = dict(self._saved or {})
        self._began_at = self.run.step
        self.run.contents.noted[_KEY] = lambda: self._at_safe_point
        for place in places:
            prepared[place] = self._take(prepared[place])
        if self._checks:
            self.run.session.first_step.remedies = _REMEDIES
        self._follow_accelerator()
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def epochs(self, count: int) -> Iterator[int]:
        for epoch in range(self.run.session.cursor.epoch, count):
            self._epoch, self._is_last_epoch = epoch, epoch + 1 == count
            self._is_entered = False
            self._leading, self._led = None, []
            self._handed_out.clear()
            weights = [weight for model in self._models for weight in model.parameters()]
            trained = [one for one in weights if one.requires_grad]
            self._weights = trained[:: max(1, len(trained) // _LOOKED_AT)]
            yield epoch
        self.finish()

    def finish(self) -> None:
        """The training is done."""
        if not self._is_finished:
            self._is_finished = True
            self._epoch = None
            self.run.finish()

    def _follow_accelerator(self) -> None:
        def end(own: Callable[[], None]) -> None:
            self.finish()
            own()

        undo = ExitStack()  # stays open: an accelerator trains once
        replace(undo, self._accelerator, "end_training", end)
        replace(undo, self._accelerator, "save_state", self.run.save_too)

    def _share(self, prepared: list[Any]) -> None:
        """All of them that have a state are the run's, in one order in all attempts."""
        extra = getattr(self._accelerator, "_custom_objects", [])
        scaler = getattr(self._accelerator, "scaler", None)
        found = [one for one in prepared if not _is_loader(one) and isinstance(one, Stateful)]
        things = [*found, *extra, *([] if scaler is None else [scaler])]
        for number, thing in enumerate(map(_unwrapped, things)):
            self.run.session.register(f"{number} {type(thing).__name__}", thing)

    def _take(self, own: Any) -> StandIn:
        """What the script is given in this loader's place, of which nothing happens before it asks
        for a batch.

        Raises:
            UsageError: this accelerate is not known.
        """
        _require_known(own, self._accelerator.gradient_state)
        number = len(self._loaders)
        loader = PreparedLoader(self.run, own, name=str(number), number=number)
        self._loaders.append(loader)
        each = (self._saved or {}).get("each", ())
        saved = each[number] if number < len(each) else None
        if saved is not None and saved["is_held"]:
            loader.hold()
            loader.resumes = saved["is_under_way"]
        return StandIn(own, iterate=partial(self._iterate, loader))

    # --- one iteration
    # --------------------------------------------------------------------------------------------

    def _iterate(self, loader: PreparedLoader) -> Iterator[Any]:
        one = Iteration(loader, resumes=loader.resumes)
        if one.resumes:  # as it is made: it may be dropped before it begins, and is over then
            loader.resumes, loader.current = False, one
        batches = self._batches(one)
        one.batches = weakref.ref(batches)
        return batches

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
                    self.run.enter_loop()
            else:
                self._require_kept(one)
                with self.run.handing_out():
                    batch = next(source, _NONE)
            is_first = one.may_lead and not self._handed_out
            if batch is _NONE:
                if is_first and self._is_last_epoch and self._leading is one.loader:
                    self.run.end_steps()
                break
            if one.may_lead:
                self._handed_out.append(one)
            if is_first:
                yield from self._step(one, batch)
            else:
                yield batch
                if one in self._handed_out:
                    self._handed_out.remove(one)

    def _step(self, one: Iteration, batch: Any) -> Iterator[Any]:
        """The first batch of a step, or of a part of one whose gradients are accumulated."""
        before = self._updates()
        try:
            with self.run.session.first_step.watched():
                yield batch
        except GeneratorExit:  # the loop was left
            if self._leading in (None, one.loader) and self._updates() != before:
                self.run.session.cursor.step += 1  # no safe point
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
            self.run.complete_step(self.run.step + 1, epoch=self._epoch)
        elif self._leading is not None and has_stepped:
            self._say(
                f"{_name(one.loader)} is trained from behind the batches of another one in the "
                "same epoch: a stop waits for the next epoch, and a restart repeats this part. One "
                "loop over itertools.chain() of both stops at each step"
            )

    def _begin(self, one: Iteration) -> None:
        """The script asks for its first batch."""
        loader, run = one.loader, self.run
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
        if not loader.is_held:
            loader.hold()

    def _has_led(self, one: Iteration) -> bool:
        """Whether a resumed epoch is behind all batches of this one, the first of a chain()."""
        saved, loader = self._saved, one.loader
        if saved is None or self.run.trains or not self._trains_from(loader, one):
            return False
        return loader.number in saved["led"] and loader.number != saved["leading"]

    def _first_batch(self, one: Iteration) -> tuple[Any, Iterator[Any]]:
        loader, state = one.loader, self._accelerator.gradient_state
        if one.is_held and not one.resumes:
            loader.begin_anew()
        if one.resumes and not loader.is_left:
            loader.own.iteration += 1  # as accelerate does behind the last batch
            loader.own.end()
            return _NONE, iter(())
        under_way = list(state.dataloader_references)
        with self.run.handing_out() if one.is_held else loader.set_aside():
            source = iter(loader.to_iterate if one.is_held else loader.own)
            batch = next(source, _NONE)
        if one.resumes:
            loader.is_iterated()
            if batch is not _NONE:  # it was among them when it was saved
                state.dataloader_references = under_way
        return batch, source

    def _trains_from(self, loader: PreparedLoader, one: Iteration) -> bool:
        """Whether the batches of an iteration that begins now are trained on. A script may put its
        models into training mode only when it has the batch."""
        if self._epoch is None or not torch.is_grad_enabled():
            return False
        is_known = loader.number == 0 or loader.is_held
        is_free = loader.current in (None, one) or not _is_under_way(loader)
        return (is_known and is_free) or self._is_training()

    def _is_training(self) -> bool:
        return not self._models or any(one.training for one in self._models)

    def _updates(self) -> int:
        return sum(one._version for one in self._weights)

    # --- what is found at the first steps
    # --------------------------------------------------------------------------------------------

    def _require_alone(self, one: Iteration) -> None:
        if one.loader.current is not one and _is_under_way(one.loader):
            self._refuse(
                f"{_name(one.loader)} is iterated twice at a time, and it has one position: give "
                "prepare() a loader for each"
            )
        if self._is_early and _is_held_by(one, itertools.cycle):
            self._refuse(
                f"itertools.cycle() keeps the batches of {_name(one.loader)}, and hands them out "
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
        if self._epoch is not None and self.run.trains:
            self._refuse(
                f"a batch of {_name(one.loader)} was fetched before the first step, or while all "
                "models were in evaluation mode, and one is trained on now from the same iterator: "
                "a resumed run would fetch that first one again. Fetch it in the step that uses "
                "it, within epochs(), behind model.train()"
            )

    @property
    def _is_early(self) -> bool:
        return self._checks and self.run.step < self._began_at + _EARLY_STEPS

    def _refuse(self, message: str) -> None:
        """
        Raises:
            UsageError: in the first steps of an attempt; later that would cost too much.
        """
        if self._is_early:
            raise UsageError(f"{message}. To do without: prepare(accelerator, ..., check=False)")
        if self._checks:
            self._say(message)

    # --- the state
    # --------------------------------------------------------------------------------------------

    def _begin_run(self) -> None:
        """The first step comes next: each loader is where it was."""
        saved = self._saved
        if saved is None:
            self.run.begin()
            return
        for loader, each in zip(self._loaders, saved["each"], strict=False):
            if loader.is_held and each["is_under_way"]:
                loader.is_left = loader.open()
        self.run.begin()
        self._leading, self._led = self._loaders[saved["leading"]], list(saved["led"])
        for loader, each in zip(self._loaders, saved["each"], strict=False):
            loader.own.iteration = each["iteration"]
            loader.own.end_of_dataloader, loader.own.remainder = each["end"], each["remainder"]
        found = [None if number is None else self._loaders[number].own for number in saved["open"]]
        self._accelerator.gradient_state.dataloader_references = found

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
                    "is_held": one.is_held,
                    "is_under_way": _is_under_way(one),
                    "iteration": one.iteration,
                    "end": bool(one.own.end_of_dataloader),
                    "remainder": int(one.own.remainder),
                }
                for one in self._loaders
            ],
        }


_OF_ACCELERATE = ("iteration", "end_of_dataloader", "remainder", "end", "base_dataloader")
"""What is used of a loader that accelerate (1.10 to 1.15) has prepared."""


def _require_known(loader: Any, state: Any) -> None:
    """Whether this is what is known of accelerate's loaders, and of its state of gradients.

    Raises:
        UsageError: names what is not there.
    """
    missing = [f"{type(loader).__name__}.{n}" for n in _OF_ACCELERATE if not hasattr(loader, n)]
    if not hasattr(state, "dataloader_references"):
        missing.append("GradientState.dataloader_references")
    if missing:
        version = sys.modules["accelerate"].__version__
        raise UsageError(
            f"accelerate {version} has no {', '.join(missing)}; hydroslurm knows 1.10 to 1.15. "
            "Install one of those, or save and resume with accelerate"
        )


def _loop_of(accelerator: Any) -> Loop:
    loop: Loop | None = getattr(accelerator, _LOOP, None)
    if loop is None:
        raise UsageError(
            "there is no run of this accelerator: call hydroslurm.integrations.accelerate."
            "prepare(accelerator, model, optimizer, loader, ...) in place of accelerator.prepare()"
        )
    return loop


def _unwrapped(thing: Any) -> Any:
    """A scheduler of torch's shows whose it is, accelerate's around it does not."""
    return thing.scheduler if type(thing).__name__ == "AcceleratedScheduler" else bare(thing)


def _name(loader: PreparedLoader) -> str:
    """As a person counts them."""
    return f"loader {loader.number + 1} of those that prepare() was given"


def _is_under_way(loader: PreparedLoader) -> bool:
    """Whether an iteration that has a position is not at its end, and the script still has it; one
    that a resumed script is still to make, too."""
    batches = None if loader.current is None else loader.current.batches()
    return loader.resumes or (batches is not None and batches.gi_frame is not None)


def _is_loader(thing: Any) -> bool:
    return isinstance(thing, torch.utils.data.DataLoader)


def _is_held_by(one: Iteration, kind: type) -> bool:
    """Whether this iterator of the standard library's goes through the batches."""
    return any(isinstance(holder, kind) for holder in gc.get_referrers(one.batches()))
