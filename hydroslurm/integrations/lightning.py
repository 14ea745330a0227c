"""Lightning: ``trainer.fit()`` keeps the whole promise, without a line in the script.

With ``srun --preempt=requeue``, ``HYDROSLURM_PREEMPT=requeue`` or a job spec, every Trainer gets
the callback :class:`Preemptible` by itself (entry points ``lightning.pytorch.callbacks_factory``
and ``pytorch_lightning.callbacks_factory``). To say more, or where that was not asked for:

    trainer = Trainer(callbacks=[Preemptible(directory="runs/a", every_steps=500)])
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from hydroslurm.integrations.lightning_strategies import LightningBase, add_lightning_base
from hydroslurm.runtime import autoload


class Preemptible(LightningBase):
    """Makes each ``fit()`` of its Trainer preemptible: it is stopped between two optimizer steps or
    within a validation, saved, requeued and resumed, bit for bit.

    Nothing else is to be given: no ``ckpt_path``, and no ``ModelCheckpoint`` for this. Saved are
    the checkpoint that Lightning itself would write (model, optimizers, schedulers, precision,
    loops, callbacks, what the hooks add), the random numbers of each rank, the position in each
    training loader, and what was logged in the epoch so far.

    Args:
        options: those of :class:`hydroslurm.Run`: ``directory``, ``every_steps``, ``every_s``,
            ``keep``, ``on_save_error``, ``limits``, ``resume``.

    Raises:
        UsageError: at ``fit()``: a strategy that starts its ranks by spawn, or that is not known;
            tasks of Slurm that train alone each; a Lightning that is not known; no folder to save
            into.
    """

    _is_asked = True
    """By the script, not by a variable."""

    # Lightning names each hook of each callback to its profiler before it calls it, which takes 3
    # microseconds; one that is None is passed over. These come at each step, and we need none.
    on_train_batch_start = on_train_batch_end = None
    on_before_backward = on_after_backward = None
    on_before_optimizer_step = on_before_zero_grad = None

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._directory = options.pop("directory", None)
        self._options: Mapping[str, Any] = options
        self._log: Any = None
        self._fit: Any = None
        self._make: Callable[[], Any] | None = None
        self._give_back: Callable[[], None] | None = None

    def __reduce__(self) -> Any:
        return functools.partial(type(self), directory=self._directory, **self._options), ()

    @property
    def log(self) -> Any:
        """As of any callback. Lightning sets it when a fit begins, before it opens its loggers,
        which is when they have to be told that this is the run that they have seen before."""
        return self._log

    @log.setter
    def log(self, log: Any) -> None:
        self._log = log
        trainer = getattr(getattr(log, "__self__", None), "_trainer", None)
        if trainer is not None and trainer.state.fn == "fit" and self._is_wanted(trainer):
            self._prepare(trainer)

    def _prepare(self, trainer: Any) -> None:
        from hydroslurm.integrations.framework import directory_of_fit
        from hydroslurm.integrations.lightning_fit import Fit
        from hydroslurm.training.loggers import Loggers

        folder = directory_of_fit(self._directory, os.environ).root
        loggers = Loggers(trainer, folder, anew=self._options.get("resume") is False)
        self._make = lambda: Fit(
            trainer,
            callback=self,
            directory=folder,
            loggers=loggers,
            options=self._options,
        )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        del pl_module
        if not self._is_wanted(trainer):
            return
        if stage != "fit":  # of test(), predict() or validate()
            from hydroslurm.integrations.lightning_fit import OUTSIDE, signals_stand_down

            self._give_back = signals_stand_down(trainer, why=OUTSIDE)
            return
        if self._make is None:  # nobody has set the log
            self._prepare(trainer)
        make, self._make = self._make, None
        assert make is not None
        self._fit = make()
        self._fit.start()

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        if self._fit is not None:
            self._fit.run.check_evaluation()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        del trainer, pl_module
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        del trainer, pl_module, stage
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.fail(exception)

    def _is_wanted(self, trainer: Any) -> bool:
        """One that came by itself gives way to one that the script has made."""
        if trainer.fast_dev_run:
            return False
        ours = [one for one in trainer.callbacks if isinstance(one, Preemptible)]
        chosen = max(ours, key=lambda one: (one._is_asked, -ours.index(one)))
        return chosen is self


add_lightning_base(Preemptible, "Callback")


def callbacks() -> list[Any]:
    """For Lightning's entry points: the callback, if preemption with a requeue was asked for."""
    if os.environ.get(autoload.PREEMPT_ENV, "").strip().lower() != "requeue":
        return []
    made = Preemptible()
    made._is_asked = False
    return [made]


legacy_callbacks = callbacks
"""Of the entry point for ``pytorch_lightning``."""
