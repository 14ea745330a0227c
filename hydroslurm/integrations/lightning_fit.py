"""One ``trainer.fit()`` of Lightning, made preemptible.

The safe point lies behind a training batch that completed an optimizer step, before what may follow
it: validation, the end of the epoch. A resumed fit enters Lightning's loops as a restart in the
middle of an epoch, and its first turn trains nothing: it does what follows that batch. So nothing
depends on what Lightning's own restarts make of the end of an epoch, of validation or of a loader
that is one batch ahead.

Knows Lightning's loops by their attributes (2.4 to 2.6), and imports nothing of it: the same code
serves ``lightning`` and ``pytorch_lightning``.
"""

from __future__ import annotations

import builtins
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.census import copied
from hydroslurm.checkpoint.walk import Variables, arrays_in, is_plain, reason
from hydroslurm.core.exitcodes import ExitForRequeue
from hydroslurm.errors import StateMismatch, UsageError
from hydroslurm.integrations.framework import (
    FrameworkSession,
    fingerprint_of_all,
    is_launched,
    replace,
)
from hydroslurm.integrations.held_loader import HeldLoader
from hydroslurm.training.loggers import Loggers
from hydroslurm.training.rank_group import notice
from hydroslurm.training.script import fingerprint

if TYPE_CHECKING:
    from hydroslurm.integrations.lightning_shards import Distributed, FlatShards

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
            saves = not type(one).state_dict.__qualname__.startswith("Callback.")
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
    found = {name: value for name, value in vars(thing).items() if is_plain(value)}
    return {name: value for name, value in found.items() if not arrays_in(value)}


class RankMetrics:
    """The logged values of one trainer's training loop. What its module's torchmetrics have counted
    comes back as all else that the module has (:mod:`hydroslurm.checkpoint.census`)."""

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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        connector = self._trainer._logger_connector
        connector._first_loop_iter = state["first_loop_iter"]
        connector._current_fx = state["current_fx"]
        for name, shown in state["shown"].items():
            getattr(connector, name).update(shown)
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
            modules = self._trainer.lightning_module.named_modules()
            result.value = dict(modules).get(meta.metric_attribute)
        for name, value in saved["values"].items():
            now = getattr(result, name, None)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                value = value.to(now.device)
            setattr(result, name, value)
        return result


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
        "values": _values(result, _VALUES if result.is_tensor else _VALUES[1:]),
    }


def _values(result: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Copies of these attributes, as far as they are there: metrics change theirs in place."""
    found = {name: getattr(result, name) for name in names if hasattr(result, name)}
    return {
        name: copied(one) for name, one in found.items() if isinstance(one, (torch.Tensor, int))
    }


_OF_SEVERAL: dict[str, Callable[[Any], Any]] = {
    "max_size_cycle": max,
    "max_size": max,
    "min_size": min,
    "sequential": sum,
}


class LoaderRequest:
    """What the script saw when it was asked for the training loader: the epoch, the random numbers,
    and what it had counted. Saved for each rank."""

    def __init__(self, trainer: Any, run: FrameworkSession) -> None:
        self._trainer, self._run = trainer, run
        self.seen: Mapping[str, Any] = {}

    def ask(self, own: Callable[[], Any]) -> Any:
        """In the place of the source's own: the loaders that the script makes."""
        progress = self._trainer.fit_loop.epoch_progress.current
        saved = self._run.own_loaded.get("request")
        if not saved:
            script = self._run.contents.script.state_dict()
            self.seen = {"epoch": progress.processed, "rng": rng.capture(), "script": script}
            return own()
        self.seen = saved
        rng.restore(saved["rng"])
        self._run.contents.script.restore(saved["script"])
        epoch, progress.processed = progress.processed, saved["epoch"]
        try:
            return own()
        finally:
            progress.processed = epoch


_HYPER_PARAMETERS = ("hyper_parameters", "hparams_name", "hparams_type")
"""Of a checkpoint of Lightning's: what the script gives anew, of any type."""
_FINDERS = ("LearningRateFinder", "BatchSizeFinder")
"""Callbacks that train a while when a fit begins, for a setting that a resumed fit has already."""
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class Fit:
    """See the module.

    Args:
        trainer: in its ``setup`` hook: the process group is there, nothing is restored yet.
        callback: of this fit. Lightning's tuner runs the same loops without it.
        directory: of the run.
        loggers: what was made of them before they were opened.
        options: of the Run.

    Raises:
        UsageError: this Lightning does not have what is needed, or its ranks are not Slurm's.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        callback: Any,
        directory: Path,
        loggers: Loggers,
        options: Mapping[str, Any],
    ) -> None:
        require_known_lightning(trainer)
        self._trainer = trainer
        self._callback = callback
        self._undo = ExitStack()
        self._replace = partial(replace, self._undo)
        self._max_steps: int | None = None
        self._ended = self._is_finished = False
        self._new_loaders: list[Any] = []
        # what trainer.global_step and current_epoch come down to, by way of ten properties
        loop, self._step = trainer.fit_loop, 0
        self._epochs = loop.epoch_progress.current
        automatic = loop.epoch_loop.automatic_optimization
        self._automatic_steps = automatic.optim_progress.optimizer.step.total
        self._manual_steps = loop.epoch_loop.manual_optimization.optim_step_progress.total
        self._resumed_epoch: int | None = None  # that other ranks had begun
        self._resumed_loaders: list[HeldLoader] = []
        self._shards = shards_of(trainer)
        self.run = FrameworkSession(
            "lightning",
            self._capture,
            lambda: {"model": trainer.model},
            directory=directory,
            environ=environ_of_lightning(trainer),
            **options,
        )
        self._request = LoaderRequest(trainer, self.run)
        self.run.contents.parts.update(metrics=RankMetrics(trainer), loggers=loggers)
        self.run.contents.noted["request"] = lambda: self._request.seen
        self.run.contents.remember(lambda: roots_of(trainer), without=without_of(trainer))
        self._loggers = loggers

    def start(self) -> None:
        """Resume, if there is something, and take the places at which the fit is to be led."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        self._loggers.opened()
        if any(type(one).__name__ == "ModelPruning" for one in trainer.callbacks):
            self.run.log(
                "ModelPruning puts no masks into a checkpoint: an epoch that is resumed trains the "
                "pruned weights, too, until its end"
            )
        if self._shards is not None:  # of a model that the strategy is still to make
            self._replace(trainer._checkpoint_connector, "resume_start", self._resume_shards)
        elif self.run.resume():
            self._replace(trainer._checkpoint_connector, "resume_start", self._resume_start)
            self._watch_restoring()
            for callback in trainer.callbacks:
                if any(kind.__name__ in _FINDERS for kind in type(callback).__mro__):
                    self._replace(callback, "on_fit_start", lambda *_: None)
        if loop._data_source.is_module():
            self._replace(loop._data_source, "dataloader", self._ask_for_loader)
        self._undo.callback(signals_stand_down(trainer))
        self._replace(loop, "setup_data", self._setup_data)
        self._replace(loop, "on_run_start", self._on_run_start)
        self._replace(loop, "on_run_end", self._on_run_end)
        self._replace(loop.epoch_loop, "advance", self._advance)
        self._replace(loop.epoch_loop.val_loop, "run", self._validate)
        self._replace(trainer, "save_checkpoint", self.run.save_too)

    def end(self) -> None:
        """After the fit: the training is done, also where nothing was left of it."""
        self._undo.close()
        if not self._is_finished:
            self.run.finish()

    def fail(self, error: BaseException) -> None:
        """The fit ends with an exception."""
        self._undo.close()
        if isinstance(error, ExitForRequeue):
            self._loggers.leave(error.code)
        elif not self._is_finished:
            self.run.session.fail(error)

    # --- in the place of Lightning's own
    # --------------------------------------------------------------------------------------------

    def _resume_shards(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """The strategy has sharded the model, and made the optimizers."""
        assert self._shards is not None
        self._shards.join(self.run)
        if not self.run.resume():
            own(*args, **kwargs)
            return
        self._watch_restoring()
        self._resume_start(own, *args, **kwargs)
        # now, for hooks that come before the first step; the run does it again there
        self._shards.put_back(self.run)

    def _watch_restoring(self) -> None:
        for restore in ("restore_model", "restore_training_state"):
            self._replace(self._trainer._checkpoint_connector, restore, self._restore)

    def _resume_start(self, own: Callable[..., Any], path: Any = None, *_: Any, **__: Any) -> None:
        """The checkpoint that Lightning goes on from is ours."""
        del own
        loaded = self.run.loaded
        assert loaded is not None
        if path:
            self.run.log(
                f"this run goes on from its own step {self.run.step}; ckpt_path={os.fspath(path)!r}"
                " is where it began"
            )
        self._trainer._checkpoint_connector._loaded_checkpoint = dict(loaded["checkpoint"])

    def _restore(self, own: Callable[..., Any]) -> None:
        """Lightning loads what we have saved.

        Raises:
            StateMismatch: the script makes something else now.
        """
        try:
            own()
        except (RuntimeError, ValueError, KeyError, TypeError, IndexError) as error:
            kind = type(self._trainer.lightning_module).__name__
            raise StateMismatch(
                f"step {self.run.step} of this run does not fit the model ({kind}), or its "
                f"optimizers: {error}. Begin anew with another directory="
            ) from error

    def _setup_data(self, own: Callable[..., Any]) -> None:
        """The loaders that are made here keep their positions."""
        loop, loaded = self._trainer.fit_loop, self.run.loaded
        if self._callback not in self._trainer.callbacks:
            own()
            return
        if loaded is not None and loop._combined_loader is None:
            self._enter(loaded)
        before = loop._combined_loader
        self._leave_resumed_epoch()
        self._new_loaders = []
        with self._holding():
            own()
        if loaded is not None and loop._combined_loader is not before:
            loop._last_train_dl_reload_epoch = loaded["reloaded_at"]

    def _leave_resumed_epoch(self) -> None:
        """At the beginning of each epoch: behind the resumed one all lengths are whole ones.

        Lightning ends an epoch, and validates, by a number of batches that it asks the loaders for
        once. The rest of an epoch is more batches for fewer ranks, and fewer for more: by the whole
        epoch's number it would leave samples out, or come to the end and not know it.
        """
        loop = self._trainer.fit_loop
        if self._resumed_epoch in (None, self._epochs.processed):
            return
        self._resumed_epoch = None
        for loader in self._resumed_loaders:
            loader.count_whole()
        combined = loop._combined_loader
        combined.limits = [
            self._limit(len(one)) if hasattr(one, "__len__") else limit
            for one, limit in zip(combined.flattened, combined.limits, strict=True)
        ]
        loop.max_batches = _OF_SEVERAL[combined._mode](combined.limits)
        interval = self._trainer.val_check_interval
        if isinstance(interval, float) and self._trainer.val_check_batch is not None:
            self._trainer.val_check_batch = max(1, int(loop.max_batches * interval))

    def _limit(self, batches: int) -> int:
        """Lightning's _parse_num_batches."""
        wanted = self._trainer.limit_train_batches
        return min(batches, wanted) if isinstance(wanted, int) else int(batches * wanted)

    def _enter(self, loaded: Mapping[str, Any]) -> None:
        """Let the loop be entered: what follows the last batch of all is still to be done."""
        if loaded["ended"]:
            self._trainer.should_stop = loaded["should_stop"]
            return
        epoch_loop = self._trainer.fit_loop.epoch_loop
        self._max_steps, epoch_loop.max_steps = epoch_loop.max_steps, -1
        warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)

    def _ask_for_loader(self, own: Callable[[], Any]) -> Any:
        is_tuner = self._callback not in self._trainer.callbacks
        return own() if is_tuner else self._request.ask(own)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        strategy = self._trainer.strategy
        process = strategy.process_dataloader

        def hold(loader: Any) -> Any:
            held = self.run.hold(
                process(loader),
                name=str(len(self._new_loaders)),
                epoch=lambda: self._trainer.fit_loop.epoch_progress.current.processed,
                fetched_ahead=None if _has_length(loader) else self._fetched_ahead,
            )
            if _is_behind_epoch(self.run.loaded):
                held.leave_resumed()
            if held.count_rest():  # before Lightning asks for its length
                self._resumed_epoch = self._epochs.processed
                self._resumed_loaders.append(held)
            self._new_loaders.append(held.stand_in)
            return held.stand_in

        strategy.process_dataloader = hold
        try:
            yield
        finally:
            del strategy.process_dataloader

    def _on_run_start(self, own: Callable[..., Any]) -> None:
        """A fit that had come to its end, and is told to train longer now, begins with the next
        epoch: nothing is left of the batch that it was saved at."""
        own()
        loaded = self.run.loaded
        if loaded is not None and loaded["ended"] and self._callback in self._trainer.callbacks:
            self._begin(loaded)
            if _is_behind_epoch(loaded) and not all(map(_has_length, self._new_loaders)):
                iter(self._trainer.fit_loop._data_fetcher)  # it has fetched with other numbers

    def _fetched_ahead(self) -> int:
        """Without a length, Lightning fetches a batch ahead, to know which one is the last."""
        return len(getattr(self._trainer.fit_loop._data_fetcher, "batches", ()))

    def _advance(self, own: Callable[..., Any], fetcher: Any) -> None:
        """One batch; in a resumed fit the first turn is the rest of the batch it was saved at."""
        if self._callback not in self._trainer.callbacks:
            own(fetcher)
            return
        if not self.run.trains:
            loaded = self.run.loaded
            self._begin(loaded)
            if loaded is not None:
                self._go_on(loaded)
                return
        own(fetcher)
        step = self._automatic_steps.completed or self._manual_steps.completed
        if step > self._step:
            self._step = step
            self.run.complete_step(step, epoch=self._epochs.processed)

    def _begin(self, loaded: Mapping[str, Any] | None) -> None:
        self.run.begin()
        self._step = self.run.step
        if loaded is not None:
            self._trainer.accumulate_grad_batches = loaded["accumulate"]

    def _go_on(self, loaded: Mapping[str, Any]) -> None:
        """From here on this is no restart to Lightning."""
        trainer, epoch_loop = self._trainer, self._trainer.fit_loop.epoch_loop
        if self._max_steps is not None:
            epoch_loop.max_steps, self._max_steps = self._max_steps, None
        trainer.should_stop = loaded["should_stop"]
        trainer.fit_loop._restarting = False  # its setter makes it True with max_steps
        epoch_loop.restarting = False
        if hasattr(epoch_loop.val_loop, "reset_restart_stage"):  # since 2.5
            epoch_loop.val_loop.reset_restart_stage()
        for callback in trainer.callbacks:
            if type(callback).__name__ == "StochasticWeightAveraging":
                self._begin_averaging(callback, loaded["checkpoint"])

    def _begin_averaging(self, callback: Any, checkpoint: Mapping[str, Any]) -> None:
        """Lightning's averaging puts its scheduler in place when an epoch begins, which a restart
        within one leaves out; the learning rates and the weights stay as they were saved."""
        trainer = self._trainer
        callback.on_train_epoch_start(trainer, trainer.lightning_module)
        trainer.strategy.load_model_state_dict(checkpoint, strict=True)
        for optimizer, saved in zip(
            trainer.optimizers, checkpoint["optimizer_states"], strict=True
        ):
            for group, was in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({name: value for name, value in was.items() if name != "params"})

    def _validate(self, own: Callable[..., Any]) -> Any:
        """A stop may cut the validation off; the next attempt begins it anew."""
        if self._callback not in self._trainer.callbacks or not self._is_exact_here():
            return own()
        self.run.begin_evaluation(self._fingerprint)
        try:
            return own()
        finally:
            self.run.end_evaluation()

    def _fingerprint(self) -> object:
        if self._shards is not None:
            strategy = self._trainer.strategy
            return fingerprint_of_all(
                self._shards.weights(),
                device=strategy.root_device,
                add=lambda total: strategy.reduce(total, reduce_op="sum"),
            )
        return fingerprint(self._trainer.lightning_module.state_dict())

    def _is_exact_here(self) -> bool:
        """Not while gradients are being accumulated, which are not saved."""
        return self.run.trains and not self._trainer.fit_loop._should_accumulate()

    def _on_run_end(self, own: Callable[..., Any]) -> None:
        """All that belongs to the training is done."""
        own()
        if self._callback in self._trainer.callbacks:
            self._ended = True
            self.run.session.check_stop()
            self.run.finish()
            self._is_finished = True

    # --- the state
    # --------------------------------------------------------------------------------------------

    def _capture(self) -> Mapping[str, Any]:
        trainer = self._trainer
        with nullcontext() if self._shards is None else self._shards.nothing_gathered():
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
        for name in [one for one in checkpoint if one.endswith(_HYPER_PARAMETERS)]:
            del checkpoint[name]
        return {
            "checkpoint": checkpoint,
            "ended": self._ended,
            "should_stop": trainer.should_stop,
            "accumulate": trainer.accumulate_grad_batches,
            "reloaded_at": trainer.fit_loop._last_train_dl_reload_epoch,
        }


def _is_behind_epoch(loaded: Mapping[str, Any] | None) -> bool:
    """Whether a fit was saved at its end, and that is the end of an epoch, too: with ``max_steps``
    it need not be."""
    if loaded is None or not loaded["ended"]:
        return False
    progress = loaded["checkpoint"]["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    return bool(progress["is_last_batch"])


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def shards_of(trainer: Any) -> FlatShards | Distributed | None:
    """How the strategy of this trainer shards; None where each rank has all of the state."""
    names = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    if names.isdisjoint(("FSDPStrategy", "ModelParallelStrategy")):
        return None
    from hydroslurm.integrations.lightning_shards import Distributed, FlatShards

    return FlatShards(trainer) if "FSDPStrategy" in names else Distributed(trainer)


# --- what of Lightning is known
# ------------------------------------------------------------------------------------------------

_OF_LIGHTNING = {
    "fit_loop": (
        "setup_data", "run", "on_run_start", "on_run_end", "_should_accumulate", "epoch_progress",
        "max_batches", "_data_source", "_combined_loader", "_data_fetcher", "_restarting",
        "_last_train_dl_reload_epoch",
    ),
    "fit_loop.epoch_loop": (
        "advance", "val_loop", "batch_progress", "max_steps", "restarting", "_results",
        "_batches_that_stepped",
    ),
    "fit_loop.epoch_loop.automatic_optimization": ("optim_progress",),
    "fit_loop.epoch_loop.manual_optimization": ("optim_step_progress",),
    "fit_loop.epoch_loop.val_loop": ("run",),
    "strategy": ("process_dataloader",),
    "_logger_connector": ("_first_loop_iter", "_current_fx", *_SHOWN),
    "_accelerator_connector": ("cluster_environment",),
    "_signal_connector": ("register_signal_handlers",),
    "_checkpoint_connector": (
        "resume_start", "restore_model", "restore_training_state", "dump_checkpoint",
        "_loaded_checkpoint",
    ),
}  # fmt: skip
"""All that is used of Lightning's inside (2.4 to 2.6), from the trainer on."""
_UNKNOWN_STRATEGIES = ("DeepSpeedStrategy", "XLAFSDPStrategy")
"""They shard the state in ways of their own."""


def require_known_lightning(trainer: Any) -> None:
    """Whether this is a Lightning whose loops are known, and a strategy whose state is.

    Raises:
        UsageError: names what is not there, or the strategy.
    """
    kind = type(trainer.strategy)
    if any(one.__name__ in _UNKNOWN_STRATEGIES for one in kind.__mro__):
        raise UsageError(
            f"Lightning's {kind.__name__} shards the state in a way that hydroslurm cannot save. "
            'Train with strategy="ddp" or "fsdp", or with ModelParallelStrategy; or unset '
            "HYDROSLURM_PREEMPT and save with Lightning"
        )
    for path, names in _OF_LIGHTNING.items():
        thing = trainer
        for part in path.split("."):
            thing = getattr(thing, part, None)
        missing = [f"trainer.{path}.{name}" for name in names if not hasattr(thing, name)]
        if missing:
            raise UsageError(
                f"this Lightning ({type(trainer).__module__.partition('.')[0]}) has no "
                f"{', '.join(missing)}; hydroslurm knows 2.4 to 2.6. The trainer is as it was. "
                "Install one of those, or unset HYDROSLURM_PREEMPT"
            )


IN_FIT = "in this fit: hydroslurm stops, saves, requeues and resumes it"
OUTSIDE = (
    "here: it would let a stop pass until the end. SIGTERM ends this process, and the next attempt "
    "repeats what follows the last fit"
)


def signals_stand_down(trainer: Any, *, why: str = IN_FIT) -> Callable[[], None]:
    """Keep Lightning from putting a handler over SIGTERM, and from requeueing by itself, in what
    begins. Returns what gives that back."""
    cluster = trainer._accelerator_connector.cluster_environment
    both = " and its auto-requeue stand" if getattr(cluster, "auto_requeue", False) else " stands"

    def stand_down() -> None:
        if trainer.is_global_zero:
            notice(f"Lightning's own SIGTERM handler{both} down {why}")

    connector = trainer._signal_connector
    connector.register_signal_handlers = stand_down

    def give_back() -> None:
        vars(connector).pop("register_signal_handlers", None)

    return give_back


def environ_of_lightning(trainer: Any) -> Mapping[str, str]:
    """The variables by which the ranks of this trainer find each other: those of Slurm or torchrun,
    or, where Lightning has started its own processes, what it knows.

    Raises:
        UsageError: Slurm has started several tasks, and each trains alone.
    """
    size = trainer.world_size
    if is_launched(
        size,
        f"Lightning trains with {size}: give Trainer(devices=TASKS_PER_NODE, num_nodes=NODES), and "
        'strategy="ddp"',
    ):
        return os.environ
    if "spawn" in str(getattr(trainer.strategy.launcher, "_start_method", "")):
        raise UsageError(
            "the ranks of this strategy are children of one process, which does not pass a stop on "
            'to them; use strategy="ddp", with srun, torchrun or by itself'
        )
    return {
        **os.environ,
        "RANK": str(trainer.global_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(trainer.local_rank),
        "LOCAL_WORLD_SIZE": str(size // max(1, trainer.num_nodes)),
    }
