"""HFAI's names for what its integration with PyTorch Lightning offers.

    from hydroslurm.compat.hfai import HFAIEnvironment, ModelCheckpointHF, nn_to_hfai

    checkpoint = ModelCheckpointHF(dirpath="checkpoints")
    environment = HFAIEnvironment()
    trainer = Trainer(strategy="ddp_bind_numa", plugins=[environment], callbacks=[checkpoint])
    suspended = Path("checkpoints", f"{checkpoint.CHECKPOINT_NAME_SUSPEND}.ckpt")
    trainer.fit(nn_to_hfai(model), data, ckpt_path=suspended if suspended.exists() else None)

The environment is :class:`hydroslurm.integrations.lightning_strategies.HydroslurmEnvironment`, the
checkpoint a :class:`PreemptionCheckpoint`, and importing this registers the strategies.
``model = nn_to_hfai(model)`` is :func:`hydroslurm.optimize_modules` without a batch.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydroslurm.compat.suspend import go_suspend, receive_suspend_command
from hydroslurm.integrations import lightning_strategies
from hydroslurm.integrations.fused.modules import optimize_modules
from hydroslurm.integrations.lightning import _Preemptible
from hydroslurm.integrations.lightning_known import signals_stand_down

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


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


class _PreemptionCheckpoint:
    """A ModelCheckpoint that also saves when the job has to go, and leaves with it requeued.

    The file is Lightning's own: it has no random numbers and no position in the data, so what is
    trained after it differs from a run that was left alone. With
    :class:`hydroslurm.integrations.lightning.Preemptible` it does not. With one of those in the
    same Trainer, this is a ModelCheckpoint and no more.

    A stop is obeyed behind a training batch that completed an optimizer step, and not within a
    validation. The module's own ``on_train_batch_end`` is not called for that batch any more.

    Args:
        dirpath: where the checkpoints go; on a file system that all nodes share.
        options: those of ModelCheckpoint.

    Attributes:
        CHECKPOINT_NAME_SUSPEND: name of the file of a stop, without ``.ckpt``. It is removed once
            ``fit()`` has come to its end, so that the next one begins anew.
    """

    CHECKPOINT_NAME_SUSPEND = "suspended"
    dirpath: str | None

    def __init__(self, dirpath: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(dirpath=dirpath, **options)  # type: ignore[call-arg]
        self._give_back: Callable[[], None] | None = None

    @property
    def suspended(self) -> Path:
        """The file of a stop; it need not be there."""
        return Path(self.dirpath or "") / f"{self.CHECKPOINT_NAME_SUSPEND}.ckpt"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        ours = any(isinstance(one, _Preemptible) for one in trainer.callbacks)
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
            self._save(trainer)
            go_suspend()

    def _save(self, trainer: Any) -> None:
        """Under its name the file is whole: Lightning may copy it there from another file system,
        and be killed at the end of the grace meanwhile."""
        new = self.suspended.with_name(f"{self.CHECKPOINT_NAME_SUSPEND}.new.ckpt")
        trainer.save_checkpoint(new)  # all ranks; it ends with a barrier
        if trainer.is_global_zero:
            new.replace(self.suspended)

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
            self.suspended.unlink(missing_ok=True)


@functools.cache
def _class_for(package: str) -> Any:
    """The callback for one of the two packages, whose classes differ."""
    base = importlib.import_module(f"{package}.callbacks").ModelCheckpoint
    within = {"__doc__": _PreemptionCheckpoint.__doc__, "__module__": __name__}
    return type("PreemptionCheckpoint", (_PreemptionCheckpoint, base), within)


def __getattr__(name: str) -> Any:
    """Of the Lightning that the script has imported."""
    if name == "HFAIEnvironment":
        return lightning_strategies.HydroslurmEnvironment
    if name in ("PreemptionCheckpoint", "ModelCheckpointHF"):
        return _class_for(next((one for one in _PACKAGES if one in sys.modules), _PACKAGES[0]))
    raise AttributeError(
        f"hydroslurm.compat.hfai has no {name!r}; it has HFAIEnvironment, ModelCheckpointHF, "
        "PreemptionCheckpoint and nn_to_hfai"
    )
