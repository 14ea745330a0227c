"""HFAI's names for what its integration with PyTorch Lightning offers.

    from hydroslurm.compat.hfai import HFAIEnvironment, ModelCheckpointHF, nn_to_hfai

    checkpoint = ModelCheckpointHF(dirpath="checkpoints")
    environment = HFAIEnvironment()
    trainer = Trainer(strategy="ddp_bind_numa", plugins=[environment], callbacks=[checkpoint])
    suspended = Path("checkpoints", f"{checkpoint.CHECKPOINT_NAME_SUSPEND}.ckpt")
    trainer.fit(nn_to_hfai(model), data, ckpt_path=suspended if suspended.exists() else None)

Importing this registers the strategies in Lightning's packages, whichever is imported, before or
after. The environment is
:class:`hydroslurm.integrations.lightning_strategies.HydroslurmEnvironment`, the checkpoint a
:class:`PreemptionCheckpoint`; ``nn_to_hfai(model)`` is :func:`hydroslurm.optimize_modules` without
a batch. ``from hydroslurm.compat import hfai`` has them as ``hfai.pl.nn_to_hfai(model)`` and
``hfai.client.go_suspend()``, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hydroslurm.compat.suspend import go_suspend, receive_suspend_command
from hydroslurm.errors import UsageError
from hydroslurm.integrations.fused.modules import optimize_modules
from hydroslurm.integrations.lightning import Preemptible
from hydroslurm.integrations.lightning_fit import signals_stand_down
from hydroslurm.integrations.lightning_strategies import (
    PACKAGES,
    HydroslurmEnvironment,
    LightningBase,
    add_lightning_base,
)
from hydroslurm.runtime import autoload

HFAIEnvironment = HydroslurmEnvironment
_REMOVED = {
    "gpus": 'accelerator="gpu", devices={value!r}',
    "num_processes": 'accelerator="cpu", devices={value!r}',
    "auto_select_gpus": 'accelerator="gpu", devices="auto"',
    "resume_from_checkpoint": "trainer.fit(model, data, ckpt_path={value!r})",
    "checkpoint_callback": "enable_checkpointing={value!r}",
    "progress_bar_refresh_rate": "enable_progress_bar=True or False",
    "weights_summary": "enable_model_summary=True or False",
    "replace_sampler_ddp": "use_distributed_sampler={value!r}",
}
"""Arguments of a Trainer of Lightning 1 -> what Lightning 2 has instead."""


def nn_to_hfai(model: Any) -> Any:
    """Have modules of the model replaced by what PyTorch has fused, where it is equal and faster:
    they are compared on the first batch that is trained, and replaced behind the first step.

    Args:
        model: before it is wrapped.

    Returns:
        The same model.

    Raises:
        UsageError: as :func:`hydroslurm.optimize_modules`.
    """
    optimize_modules(model)
    return model


class PreemptionCheckpoint(LightningBase):
    """A ModelCheckpoint that also saves when the job has to go, and leaves with it requeued.

    The file is Lightning's own: it has no random numbers and no position in the data, so what is
    trained after it differs from a run that was left alone. With
    :class:`hydroslurm.integrations.lightning.Preemptible` it does not. With one of those in the
    same Trainer, this is a ModelCheckpoint and no more.

    A stop is obeyed behind a training batch that completed an optimizer step, after the module's
    own ``on_train_batch_end``, and at each batch of a validation, which the next attempt begins
    anew (with Lightning 2.6; an older one leaves it out).

    Args:
        dirpath: where the checkpoints go; on a file system that all nodes share.
        options: those of ModelCheckpoint.

    Raises:
        UsageError: Lightning is not installed.

    Attributes:
        CHECKPOINT_NAME_SUSPEND: name of the file of a stop, without ``.ckpt``. It is removed once
            ``fit()`` has come to its end, so that the next one begins anew.
    """

    CHECKPOINT_NAME_SUSPEND = "suspended"
    dirpath: str | None
    _validates_next = False
    """What is being saved is the file of a stop with a validation still to be done."""

    def __init__(self, dirpath: str | os.PathLike[str], **options: Any) -> None:
        _import_lightning()
        super().__init__(dirpath=dirpath, **options)  # type: ignore[call-arg]
        self._give_back: Callable[[], None] | None = None

    @property
    def suspended(self) -> Path:
        """The file of a stop; it need not be there."""
        return Path(self.dirpath or "") / f"{self.CHECKPOINT_NAME_SUSPEND}.ckpt"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        ours = any(isinstance(one, Preemptible) for one in trainer.callbacks)
        if stage == "fit" and not ours:
            self._give_back = signals_stand_down(trainer)
            receive_suspend_command()  # takes the signals, before there are workers

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(  # type: ignore[misc]
            trainer, pl_module, outputs, batch, batch_idx
        )
        if self._give_back is None or trainer.fit_loop._should_accumulate():
            return
        if receive_suspend_command():
            # Lightning would call it after its callbacks, of which this one does not return
            package, _, _ = type(trainer.fit_loop).__module__.partition(".loops.")
            hooks = importlib.import_module(f"{package}.trainer.call")
            hooks._call_lightning_module_hook(
                trainer, "on_train_batch_end", outputs, batch, batch_idx
            )
            fit = trainer.fit_loop
            self._save(trainer, validates=fit.epoch_loop._should_check_val_fx(fit._data_fetcher))
            go_suspend()

    def on_validation_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Within a validation nothing changes, unless a callback has put other weights in place."""
        if self._give_back is None or any(_averages(one) for one in trainer.callbacks):
            return
        if (
            trainer.sanity_checking or not trainer.fit_loop._should_accumulate()
        ) and receive_suspend_command():
            if not trainer.sanity_checking:  # before which nothing was trained
                self._save(trainer, validates=True)
            go_suspend()

    def _save(self, trainer: Any, *, validates: bool) -> None:
        """Under its name the file is whole: Lightning may copy it there from another file system,
        and be killed at the end of the grace meanwhile."""
        self._validates_next = validates
        trainer.save_checkpoint(self._new)  # all ranks; it ends with a barrier
        if trainer.is_global_zero:
            self._new.replace(self.suspended)

    @property
    def _new(self) -> Path:
        return self.suspended.with_name(f"{self.CHECKPOINT_NAME_SUSPEND}.new.ckpt")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)  # type: ignore[misc]
        if self._validates_next:
            _begin_with_validation(checkpoint["loops"]["fit_loop"])

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave_fit()
        super().on_exception(trainer, pl_module, exception)  # type: ignore[misc]

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave_fit()
        super().on_fit_end(trainer, pl_module)  # type: ignore[misc]

    def _leave_fit(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)  # type: ignore[misc]
        if trainer.is_global_zero:
            for path in (self.suspended, self._new):
                path.unlink(missing_ok=True)


def _averages(callback: Any) -> bool:
    return any("WeightAveraging" in kind.__name__ for kind in type(callback).__mro__)


def _begin_with_validation(fit_loop: dict[str, Any]) -> None:
    """Have Lightning take the file for one that was made in the first batch of a validation: it
    does the validation then, and would leave it out of one that was made before."""
    trained = fit_loop["epoch_loop.batch_progress"]
    validated = fit_loop["epoch_loop.val_loop.batch_progress"]
    for part in ("total", "current"):
        trained[part]["completed"] = trained[part]["processed"]
        done = validated[part]["completed"] if part == "total" else 0
        began = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
        validated[part].update(began)


add_lightning_base(PreemptionCheckpoint, "ModelCheckpoint")
ModelCheckpointHF = PreemptionCheckpoint


def _import_lightning() -> None:
    """Import one of the packages, unless the script has: a checkpoint is made of its code."""
    if any(package in sys.modules for package in PACKAGES):
        return
    for package in PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(package)
            return
    raise UsageError(
        "ModelCheckpointHF is a ModelCheckpoint of Lightning, which this Python does not have: pip "
        "install lightning"
    )


def _explain_removed(package: ModuleType) -> None:
    """Say what to write for an argument of a Trainer that Lightning 1 had."""
    trainer = package.Trainer
    create = trainer.__init__
    removed = _REMOVED.keys() - inspect.signature(create).parameters.keys()

    @functools.wraps(create)
    def create_or_explain(self: Any, *args: Any, **options: Any) -> None:
        for name in sorted(removed & options.keys()):
            value = options[name]
            raise UsageError(
                f"Trainer({name}={value!r}) is of Lightning 1, and this is {package.__name__} "
                f"{package.__version__}. Write {_REMOVED[name].format(value=value)}"
            )
        create(self, *args, **options)

    trainer.__init__ = create_or_explain


for _package in PACKAGES:
    autoload.when_imported(_package, _explain_removed)

pl = client = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    """Whoever looks for something else of HFAI's learns what there is."""
    raise AttributeError(
        f"hydroslurm.compat.hfai has no {name!r}; it has HFAIEnvironment, ModelCheckpointHF, "
        "nn_to_hfai, receive_suspend_command and go_suspend"
    )
