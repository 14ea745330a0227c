"""HFAI's names for its integration with PyTorch Lightning.

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
a batch. ``from hydroslurm.compat import hfai`` also has them as ``hfai.pl.nn_to_hfai(model)`` and
``hfai.client.go_suspend()``.
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
"""Arguments of Lightning 1's Trainer -> their replacements in Lightning 2."""


def nn_to_hfai(model: Any) -> Any:
    """Replace modules of the model by PyTorch's fused ones, where these are equal and faster: they
    are compared on the first training batch, and replaced after the first step.

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
    """A ModelCheckpoint that also saves when the job has to stop, and then exits with it requeued.

    The file is Lightning's own, without random numbers or position in the data, so training after
    it differs from an undisturbed run. With
    :class:`hydroslurm.integrations.lightning.Preemptible` it does not. With one of those in the
    same Trainer, this is only a ModelCheckpoint.

    It obeys a stop after a training batch that completed an optimizer step, after the module's own
    ``on_train_batch_end``, and at each batch of a validation, which the next attempt starts over
    (with Lightning 2.6; an older one skips it).

    Args:
        dirpath: where the checkpoints go; on a file system that all nodes share.
        options: those of ModelCheckpoint.

    Raises:
        UsageError: Lightning is not installed.

    Attributes:
        CHECKPOINT_NAME_SUSPEND: name of a stop's file, without ``.ckpt``. It is removed at the end
            of ``fit()``, so that the next one starts over.
    """

    CHECKPOINT_NAME_SUSPEND = "suspended"
    dirpath: str | None
    _validates_next = False
    """Whether the file being saved is a stop's, with a validation still to be done."""

    def __init__(self, dirpath: str | os.PathLike[str], **options: Any) -> None:
        _import_lightning()
        super().__init__(dirpath=dirpath, **options)  # type: ignore[call-arg]
        self._give_back: Callable[[], None] | None = None

    @property
    def suspended(self) -> Path:
        """Path of a stop's file, which need not exist."""
        return Path(self.dirpath or "") / f"{self.CHECKPOINT_NAME_SUSPEND}.ckpt"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        ours = any(isinstance(callback, Preemptible) for callback in trainer.callbacks)
        if stage == "fit" and not ours:
            self._give_back = signals_stand_down(trainer)
            receive_suspend_command()  # take the signals before there are workers

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(  # type: ignore[misc]
            trainer, pl_module, outputs, batch, batch_idx
        )
        if self._give_back is None or trainer.fit_loop._should_accumulate():
            return
        if receive_suspend_command():
            # Lightning would call it after its callbacks, but this one does not return
            package, _, _ = type(trainer.fit_loop).__module__.partition(".loops.")
            hooks = importlib.import_module(f"{package}.trainer.call")
            hooks._call_lightning_module_hook(
                trainer, "on_train_batch_end", outputs, batch, batch_idx
            )
            fit = trainer.fit_loop
            self._save(trainer, validates=fit.epoch_loop._should_check_val_fx(fit._data_fetcher))
            go_suspend()

    def on_validation_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Obey a stop within a validation, unless a callback has replaced the weights."""
        if self._give_back is None or any(_averages(callback) for callback in trainer.callbacks):
            return
        if (
            trainer.sanity_checking or not trainer.fit_loop._should_accumulate()
        ) and receive_suspend_command():
            if not trainer.sanity_checking:  # which comes before any training
                self._save(trainer, validates=True)
            go_suspend()

    def _save(self, trainer: Any, *, validates: bool) -> None:
        """Save, and rename a complete file: Lightning may copy it from another file system, and be
        killed meanwhile at the end of the grace."""
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
    """Mark the file as saved in a validation's first batch: then Lightning does that validation,
    which it would otherwise skip."""
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
    """Import one of the packages, unless the script has: its code is the base of a checkpoint."""
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
    """Explain the replacement of a Trainer argument that Lightning 1 had."""
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
    """Explain what exists to anyone who looks for other names of HFAI's."""
    raise AttributeError(
        f"hydroslurm.compat.hfai has no {name!r}; it has HFAIEnvironment, ModelCheckpointHF, "
        "nn_to_hfai, receive_suspend_command and go_suspend"
    )
