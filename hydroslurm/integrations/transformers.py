"""Hugging Face: ``trainer.train()`` keeps the whole promise, without a line in the script.

With ``srun --preempt=requeue``, ``HYDROSLURM_PREEMPT=requeue`` or a job spec, every Trainer of the
process is made preemptible when ``transformers.trainer`` is imported, those of TRL too. To say
more, or where that was not asked for:

    trainer = make_preemptible(Trainer(...), directory="runs/a", every_steps=500)
    trainer.train()
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hydroslurm.training.rank_group import notice, warning

T = TypeVar("T")

_OPTIONS = "_hydroslurm_options"
_TRAINS = "_hydroslurm_trains"


def make_preemptible(trainer: T, **options: Any) -> T:
    """Make each ``train()`` of this Trainer preemptible: it is stopped between two optimizer steps
    or within an evaluation, saved, requeued and resumed, bit for bit.

    Nothing else is to be given: no ``resume_from_checkpoint``, no ``save_strategy``. Saved are the
    model, the optimizer, the scheduler, the scaler, the Trainer's state, those of its callbacks
    that have one, what the Trainer counts and averages between two logs, the random numbers of
    each rank, and the position in the training data. A second call replaces the options.

    Args:
        options: those of :class:`hydroslurm.Run`: ``directory``, ``every_steps``, ``every_s``,
            ``keep``, ``on_save_error``, ``limits``, ``resume``.

    Returns:
        The same trainer.

    Raises:
        UsageError: this transformers is not known, or the model is sharded in a way that is not
            supported; at ``train()``: tasks of Slurm that train alone each, or no folder to save
            into. The trainer is as it was.
    """
    from hydroslurm.integrations.transformers_train import require_known_trainer

    require_known_trainer(trainer)
    _stand_down_jit(trainer)
    if _OPTIONS not in vars(trainer):
        own = trainer.train  # type: ignore[attr-defined]
        trainer.train = functools.partial(_train, own, trainer)  # type: ignore[attr-defined]
    setattr(trainer, _OPTIONS, options)
    return trainer


def install(module: Any) -> None:
    """Make all Trainers preemptible. For the import hook of :mod:`hydroslurm.runtime.autoload`.

    Args:
        module: ``transformers.trainer``.
    """
    kind = module.Trainer
    begin, train = kind.__init__, kind.train
    if hasattr(train, _TRAINS):
        return

    @functools.wraps(begin)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        _stand_down_jit(self)

    @functools.wraps(train)
    def preemptible_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _train(functools.partial(train, self), self, *args, **kwargs)

    setattr(preemptible_train, _TRAINS, True)
    kind.__init__, kind.train = __init__, preemptible_train


def _train(own: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``train()``, but for one that is called from another of the same trainer."""
    if vars(trainer).get(_TRAINS):
        return own(*args, **kwargs)
    given = (
        dict(zip(("resume_from_checkpoint", "trial", "ignore_keys_for_eval"), args, strict=False))
        | kwargs
    )
    if given.get("trial") is not None:
        warning("a trial of a search for hyperparameters is not preemptible: it trains as it would")
        return own(**given)
    from hydroslurm.integrations.transformers_train import Train

    setattr(trainer, _TRAINS, True)
    try:
        options: Mapping[str, Any] = vars(trainer).get(_OPTIONS, {})
        return Train(trainer, options=options).call(own, given)
    finally:
        delattr(trainer, _TRAINS)


def _stand_down_jit(trainer: Any) -> None:
    """Take back SIGTERM from transformers' own checkpoint at SIGTERM. That one may save in the
    middle of a step, at another one on each rank, and leaves with status 0."""
    for callback in trainer.callback_handler.callbacks:
        manager = getattr(callback, "jit_manager", None)
        if manager is None:
            continue
        if signal.getsignal(signal.SIGTERM) == manager._sigterm_handler:
            before = manager._original_sigterm_handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        callback.jit_manager = None
        if trainer.is_world_process_zero():
            notice(
                "enable_jit_checkpoint of transformers stands down: hydroslurm stops, saves, "
                "requeues and resumes this training"
            )
