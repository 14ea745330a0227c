"""One ``train()`` of a Hugging Face Trainer, made preemptible.

The safe point lies behind an optimizer step and the callbacks of its end, before what may follow
it: a log, an evaluation, a checkpoint of the Trainer's own, the end of the epoch. A resumed train()
enters the loop at that step; its first turn trains nothing, and does what follows the step. So
nothing depends on what the Trainer's own resume makes of the end of an epoch, of running averages,
or of accelerate, whose loaders fetch one batch ahead.

Of a model that is sharded (FSDP2), weights and optimizer states are DTensors: each rank writes its
shards, nothing is gathered, and another number of ranks may load them.

Knows transformers' loop by the methods that it calls (4.57 to 5), and imports nothing of it.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hydroslurm.checkpoint.census import copied
from hydroslurm.checkpoint.tree import is_dtensor
from hydroslurm.checkpoint.walk import ENTERED, KNOWN, reason
from hydroslurm.errors import StateMismatch, UsageError
from hydroslurm.integrations.accelerate_loader import PreparedLoader
from hydroslurm.integrations.framework import (
    FrameworkSession,
    directory_of_fit,
    environ_of,
    fingerprint_of_all,
    replace,
)
from hydroslurm.training.contents import Contents
from hydroslurm.training.loggers import continue_callbacks, hide_from_board
from hydroslurm.training.objects import bare
from hydroslurm.training.script import fingerprint

_STATE_FILE = "trainer_state.json"
_AT_STEP = ("should_save", "should_evaluate", "should_log")
_FLAGS = ("should_training_stop", "should_epoch_stop", *_AT_STEP)
_BEGAN_AT = ("_initial_global_step", "_initial_num_input_tokens_seen")
"""Where this train() began; the Trainer takes the step of a resume for that."""
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
            "grad_norm": copied(self.grad_norm),
            "learning_rate": copied(self.learning_rate),
            "loss": copied(self.loss),
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


def remember(trainer: Any, contents: Contents) -> None:
    """Have a run save what the Trainer and the script's callbacks keep, and those callbacks of
    transformers that export a state. Flags of the Trainer say where train() is, which sets them.

    The Trainer and its subclasses count and average in attributes: the losses and tokens since the
    last log, floating-point operations, TRL's metrics. TRL's trainer by rewards keeps the
    completions that it has generated for several steps like that.
    """
    flags = [name for name, value in vars(trainer).items() if isinstance(value, (bool, str))]
    kinds = [type(one) for one in _roots_of(trainer).values()]
    contents.remember(
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


class Train:
    """See the module.

    Args:
        trainer: as it is at the beginning of ``train()``; the process group is there.
        options: of the Run.

    Raises:
        UsageError: as :func:`require_known_trainer` and :func:`environ_of`.
    """

    def __init__(self, trainer: Any, *, options: Mapping[str, Any]) -> None:
        require_known_trainer(trainer)
        self._trainer = trainer
        self._undo = ExitStack()
        self._replace = partial(replace, self._undo, trainer)
        self._loader: PreparedLoader | None = None
        self._steps_per_epoch = 1
        self._ended = self._is_opened = False
        self._was_to_end_at: int | None = None
        self._exhausted: Any = None
        args = trainer.args
        environ = environ_of(rank=args.process_index, world_size=args.world_size)
        place = directory_of_fit(options.get("directory"), environ).root
        self.run = FrameworkSession(
            "transformers",
            self._capture,
            lambda: {"model": trainer.model_wrapped},
            environ=environ,
            **{**options, "directory": place},
        )
        continue_callbacks(trainer, place, anew=options.get("resume") is False)
        self._loop = LoopState(trainer)
        self.run.contents.parts["loop"] = self._loop
        self._sharded = Sharded(trainer, self.run) if is_sharded(trainer) else None
        self._modules = OtherModules(lambda: other_modules(trainer))

    def call(self, own: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Run ``own``, the Trainer's train(), with these arguments."""
        self._modules.remember()
        self._ignore_keys = given.get("ignore_keys_for_eval")
        try:
            with self._undo, tempfile.TemporaryDirectory(prefix="hydroslurm-") as folder:
                if self.run.resume():
                    if given.get("resume_from_checkpoint"):
                        self.run.log(
                            f"this run goes on from its own step {self.run.step}; "
                            f"resume_from_checkpoint={given['resume_from_checkpoint']!r} is left "
                            "out"
                        )
                    self._resume_from(Path(folder))
                    given = {**given, "resume_from_checkpoint": folder}
                self._take_places()
                result = own(**given)
        except BaseException as error:
            self.run.session.fail(error)
            raise
        self.run.finish()
        return result

    def _resume_from(self, folder: Path) -> None:
        """Have the Trainer resume from this folder, in which there is nothing but its own state:
        what it would load from there comes from the run."""
        args, loaded = self._trainer.args, self._loaded
        followed = self.run.own_loaded["loop"]["is_followed"]
        hide_from_board(self._trainer, self.run.step + followed)
        self._was_to_end_at = json.loads(loaded["state"])["max_steps"]
        (folder / _STATE_FILE).write_text(loaded["state"])
        self._replace("_load_from_checkpoint", self._load_model)
        self._replace("_load_optimizer_and_scheduler", self._load_optimizer)
        self._replace("_load_scaler", lambda *_: self._load("scaler", self._scaler))
        self._replace("_load_callback_state", lambda _: self._enter(self._steps_per_epoch))
        self._replace("_load_rng_state", lambda *_: None)  # the Run does
        # the Trainer is to find its place in the epoch, of which our loader knows
        self._undo.callback(setattr, args, "ignore_data_skip", args.ignore_data_skip)
        args.ignore_data_skip = False

    # --- the state
    # --------------------------------------------------------------------------------------------

    def _capture(self) -> Mapping[str, Any]:
        """The state now, between two steps."""
        trainer = self._trainer
        scaler = self._scaler
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

    @property
    def _scaler(self) -> Any:
        return self._trainer.accelerator.scaler

    @property
    def _loaded(self) -> Mapping[str, Any]:
        assert self.run.loaded is not None
        return self.run.loaded

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
                f"step {self.run.step} of this run does not fit the {name} "
                f"({type(thing).__name__}): {error}"
            ) from error

    def _enter(self, per_epoch: int) -> None:
        """Tell the Trainer the step that brings it into the epoch that was being trained, at the
        step behind which it was saved; in front of it, where that was the last one of the epoch."""
        state, loop = self._trainer.state, self.run.own_loaded["loop"]
        step = state.global_step
        state.global_step = loop["epoch"] * per_epoch + min(loop["steps_in_epoch"], per_epoch - 1)

        def init_training_references(*args: Any, **kwargs: Any) -> None:
            del state.init_training_references
            state.global_step = step
            state.init_training_references(*args, **kwargs)

        state.init_training_references = init_training_references

    # --- in the place of the Trainer's own
    # --------------------------------------------------------------------------------------------

    def _take_places(self) -> None:
        self._replace("set_initial_training_values", self._set_initial_training_values)
        if self._sharded is not None:
            self._replace("_prepare_for_training", self._sharded.prepare_for_training)
        self._replace("get_train_dataloader", self._get_train_dataloader)
        self._replace("get_batch_samples", self._get_batch_samples)
        self._log_evaluate_save = self._replace("_maybe_log_save_evaluate", self._follow_step)
        self._replace("_save_checkpoint", self.run.save_too)
        self._replace("_evaluate", self._evaluate)
        self._replace("prediction_step", self._prediction_step)
        module = _module_of(self._trainer)
        skip = module.skip_first_batches
        module.skip_first_batches = lambda loader, count=0: self._skip(skip, loader, count)
        self._undo.callback(setattr, module, "skip_first_batches", skip)

    def _set_initial_training_values(self, own: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        remember(self._trainer, self.run.contents)  # a model_init has made its model by now
        values = own(*args, **kw)
        if self._loader is not None and self.run.loaded is not None:
            values = self._resized(list(values), self._loader)
        self._steps_per_epoch = values[1]
        return values

    def _resized(self, values: list[Any], loader: PreparedLoader) -> list[Any]:
        """The Trainer's numbers for the rest of an epoch that another number of ranks had begun:
        its steps and batches, and where the training ends, if it goes by epochs."""
        if not loader.held.count_rest():
            return values
        batches = len(loader.held.stand_in)
        args, loop = self._trainer.args, self.run.own_loaded["loop"]
        whole, usual = values[1], values[5]
        steps = -(-batches // args.gradient_accumulation_steps)
        values[1], values[5] = steps, batches
        if args.max_steps <= 0:
            left = steps - loop["steps_in_epoch"]
            epochs_left = args.num_train_epochs - loop["epoch"] - 1
            values[6] = self.run.step + left + math.ceil(epochs_left * whole)

        def run_epoch(own: Callable[..., Any], **given: Any) -> Any:
            if given["epoch"] != loop["epoch"]:
                given |= {"steps_in_epoch": usual, "num_update_steps_per_epoch": whole}
            return own(**given)

        # transformers 4 asks the loader for its length in each epoch
        if hasattr(self._trainer, "_run_epoch"):
            self._replace("_run_epoch", run_epoch)
        return values

    def _get_train_dataloader(self, own: Callable[..., Any]) -> Any:
        self._loader = PreparedLoader(self.run, own())
        self._loader.hold()
        return self._loader.to_iterate

    def _skip(self, own: Callable[..., Any], loader: Any, count: int) -> Any:
        """Of a resumed run the loader knows where it is. A checkpoint of the Trainer's own tells
        how many batches to leave out: they are, in a way that keeps the position."""
        if self._loader is None or loader is not self._loader.to_iterate:
            return own(loader, count)
        if self.run.loaded is None:
            self._loader.held.skip(count)
        return loader

    def _get_batch_samples(self, own: Callable[..., Any], batches: Any, *args: Any) -> Any:
        """The batches of one step; a resumed run first does what is left of its last one."""
        if not self.run.trains:
            assert self._loader is not None
            resumed = self.run.loaded is not None
            if resumed:
                self._is_opened = self._loader.open()
                self._exhausted = None if self._is_opened else batches
            else:
                self._begin_anew()
            self.run.begin()
            if resumed:
                self._follow_resumed_step()
                self._keep_control()
        control = self._trainer.control
        is_over = control.should_epoch_stop or control.should_training_stop
        if is_over or batches is self._exhausted:
            return [], None
        found = own(batches, *args)
        if self._is_opened:
            assert self._loader is not None
            self._is_opened = False
            self._loader.is_iterated()
        return found

    def _keep_control(self) -> None:
        """An epoch of one step only looks like one without data to the loop, which trained nothing
        in it, and would end there."""
        handler, control = self._trainer.callback_handler, self._trainer.control
        if self._loop.steps_in_epoch < self._steps_per_epoch or self._steps_per_epoch > 1:
            return
        own, stop = handler.on_epoch_end, control.should_training_stop

        def on_epoch_end(args: Any, state: Any, control: Any) -> Any:
            del handler.on_epoch_end
            control.should_training_stop = stop
            return own(args, state, control)

        handler.on_epoch_end = on_epoch_end

    def _begin_anew(self) -> None:
        """The Trainer may go on from a checkpoint of its own."""
        step, per_epoch = self._trainer.state.global_step, self._steps_per_epoch
        self._loop.epoch = step // per_epoch
        if not self._trainer.args.ignore_data_skip:
            self._loop.steps_in_epoch = step % per_epoch

    def _follow_resumed_step(self) -> None:
        loop = self._loop
        tensor = _loss_in_loop(self._trainer)
        if tensor is not None and loop.loss is not None:
            loop.loss = tensor.copy_(loop.loss)
        loop.give_back_control()
        if self._was_to_end_at == self.run.step < self._trainer.state.max_steps:
            self._trainer.control.should_training_stop = False  # it is told to train longer now
        model, now_s = self._trainer.model_wrapped, time.time()
        model.train(loop.is_training)
        self._log_evaluate_save(
            tensor,
            loop.grad_norm,
            model,
            None,
            loop.epoch,
            self._ignore_keys,
            now_s,
            learning_rate=loop.learning_rate,
        )
        self._step_is_followed()

    def _follow_step(
        self,
        own: Callable[..., Any],
        loss: Any,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: Any,
        ignore_keys: Any,
        start_time: Any,
        learning_rate: Any = None,
    ) -> None:
        """Log, evaluate and save, behind a step or at the end of an epoch."""
        step, loop = self._trainer.state.global_step, self._loop
        if not self.run.trains:
            own(loss, grad_norm, model, trial, epoch, ignore_keys, start_time, learning_rate)
            return
        if step > self.run.step:
            loop.count_step(
                epoch=epoch, loss=loss, grad_norm=grad_norm, learning_rate=learning_rate
            )
            self.run.complete_step(step, epoch=int(epoch))
            own(loss, grad_norm, model, trial, epoch, ignore_keys, start_time, learning_rate)
            self._step_is_followed()
            return
        if self._loader is not None:
            self._loader.held.count_whole()
        if grad_norm is None and learning_rate is None and loop.epoch == epoch:
            grad_norm, learning_rate = loop.grad_norm, loop.learning_rate  # of before the stop
        own(loss, grad_norm, model, trial, epoch, ignore_keys, start_time, learning_rate)
        if self._trainer.control.should_training_stop:
            self._end()  # if by an evaluation, that is repeated
        self.run.end_evaluation()

    def _step_is_followed(self) -> None:
        """What was to be done behind the step is done."""
        self.run.end_evaluation()
        self._loop.is_followed = True
        if self._trainer.control.should_training_stop:
            self._end()

    def _end(self) -> None:
        """What follows the last step is repeated, if the attempt ends within it."""
        if self.run.trains and not self._ended:
            self._ended = True
            self.run.end_steps()

    def _evaluate(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A stop may cut the evaluation off; the next attempt begins it anew."""
        if not self.run.trains:
            # eval_on_start: at the start of the training, not of each attempt
            return {} if self.run.loaded is not None else own(*args, **kwargs)
        model = bare(self._trainer.model)
        self.run.begin_evaluation(
            self._sharded.fingerprint
            if self._sharded is not None
            else lambda: fingerprint(model.state_dict())
        )
        return own(*args, **kwargs)

    def _prediction_step(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.run.check_evaluation()
        return own(*args, **kwargs)


def _module_of(trainer: Any) -> Any:
    """``transformers.trainer``, whatever the trainer's class is made from."""
    for kind in type(trainer).__mro__:
        if kind.__module__ == "transformers.trainer":
            return sys.modules[kind.__module__]
    raise AssertionError(f"{type(trainer).__name__} is no Trainer")


def _loss_in_loop(trainer: Any) -> torch.Tensor | None:
    """The tensor in which the Trainer adds up losses until it logs them. It is an attribute since
    5.1, and a variable of the loop before that: there it is found by looking at who called us."""
    if isinstance(found := getattr(trainer, "_tr_loss", None), torch.Tensor):
        return found
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_inner_training_loop":
        frame = frame.f_back
    found = None if frame is None else frame.f_locals.get("tr_loss")
    return found if isinstance(found, torch.Tensor) else None


# --- weights that are sharded over the ranks
# ------------------------------------------------------------------------------------------------


def is_sharded(trainer: Any) -> bool:
    """Whether it trains with FSDP, of any version."""
    return bool(getattr(trainer, "is_fsdp_enabled", False))


def why_not(trainer: Any) -> str | None:
    """What keeps this sharded Trainer from being made preemptible."""
    if getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        return 'FSDP of version 1 (fsdp_config={"version": 2} makes it FSDP2)'
    if not hasattr(trainer, "_prepare_for_training"):
        return "FSDP before transformers 5"
    return "FSDP and model_init" if trainer.model_init is not None else None


class Sharded:
    """The model and the optimizer of one ``train()``: part of the run, so they have to be there
    when it is resumed, and that is before ``train()``. They are made and sharded here, as by
    transformers itself for an ``evaluate()`` that comes before, and ``train()`` finds them ready.
    """

    def __init__(self, trainer: Any, run: FrameworkSession) -> None:
        """Raises:
        UsageError: the optimizer has other parameters than the model: those of before.
        """
        self._trainer = trainer
        if type(trainer.optimizer).__name__ != "AcceleratedOptimizer":
            trainer.create_optimizer()
            trainer.model, trainer.optimizer = trainer.accelerator.prepare(
                trainer.model, trainer.optimizer
            )
            trainer.model_wrapped = trainer.model
        self._prepared = (trainer.model, trainer.optimizer)
        self._settings: list[dict[str, Any]] = []
        _require_own(trainer)
        run.session.register("model", bare(trainer.model))
        run.session.register("optimizer", trainer.optimizer.optimizer)

    def prepare_for_training(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, to which what is prepared is not given to accelerate once more: that
        would find a parameter by the address of its shard, which all empty shards share."""
        accelerator, (model, optimizer) = self._trainer.accelerator, self._prepared
        prepare = accelerator.prepare
        self._settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

        def unless_prepared(*given: Any, **options: Any) -> Any:
            if not all(one is model or one is optimizer for one in given):
                return prepare(*given, **options)
            return given if len(given) > 1 else given[0]

        accelerator.prepare = unless_prepared
        # the loop has had accelerate forget what it had prepared
        accelerator._models.append(model)
        accelerator._optimizers.append(optimizer)
        try:
            return own(*args, **kwargs)
        finally:
            del accelerator.prepare

    def put_settings_back(self) -> None:
        """Learning rates as they were loaded: the scheduler was made behind that, and has set its
        first one."""
        groups = self._trainer.optimizer.param_groups
        for group, settings in zip(groups, self._settings, strict=True):
            group.update(settings)

    def fingerprint(self) -> int:
        """Of all weights, equal on all ranks. A collective."""
        accelerator = self._trainer.accelerator
        return fingerprint_of_all(
            bare(self._trainer.model).state_dict(),
            device=accelerator.device,
            add=lambda total: accelerator.reduce(total, reduction="sum"),
        )


def _require_own(trainer: Any) -> None:
    mine = {id(one) for one in trainer.model.parameters()}
    groups = trainer.optimizer.param_groups
    if strange := sum(id(one) not in mine for group in groups for one in group["params"]):
        raise UsageError(
            f"{strange} parameters of the optimizer are not the sharded model's; make it of "
            "trainer.model, or let the Trainer make it"
        )


# --- what of transformers is known
# ------------------------------------------------------------------------------------------------

_OF_TRAINER = (
    "set_initial_training_values",
    "get_train_dataloader",
    "get_batch_samples",
    "prediction_step",
    "_maybe_log_save_evaluate",
    "_evaluate",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_callback_state",
    "_load_rng_state",
)
"""What is used of a Trainer's inside (4.57 to 5)."""


def require_known_trainer(trainer: Any) -> None:
    """Whether this is a Trainer whose loop is known, and a training that can be saved.

    Raises:
        UsageError: names what is not there, or what is not supported.
    """
    module = _module_of(trainer)
    missing = [f"Trainer.{name}" for name in _OF_TRAINER if not hasattr(trainer, name)]
    if not hasattr(module, "skip_first_batches"):
        missing.append("transformers.trainer.skip_first_batches")
    if missing:
        version = sys.modules["transformers"].__version__
        raise UsageError(
            f"transformers {version} has no {', '.join(missing)}; hydroslurm knows 4.57 to 5. The "
            "trainer is as it was. Install one of those, or unset HYDROSLURM_PREEMPT"
        )
    found = {
        "DeepSpeed": getattr(trainer, "is_deepspeed_enabled", False),
        "XLA's FSDP": getattr(trainer, "is_fsdp_xla_enabled", False),
        "tensor parallelism": getattr(trainer, "is_tp_enabled", False),
        "auto_find_batch_size": trainer.args.auto_find_batch_size,
    }
    odd = [name for name, is_on in found.items() if is_on]
    if is_sharded(trainer) and (reason := why_not(trainer)):
        odd.append(reason)
    if odd:
        raise UsageError(
            f"a Trainer with {' and '.join(odd)} cannot be made preemptible yet; wanted one on a "
            "single device, with DistributedDataParallel or FSDP2, and a fixed batch size. The "
            "trainer is as it was. Change that, or unset HYDROSLURM_PREEMPT"
        )
