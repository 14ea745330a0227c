"""A Trainer whose weights FSDP2 shards over the ranks: each rank saves the shards that it has.

Weights and optimizer states are DTensors, which a Run saves as such and loads with another number
of ranks too. So they have to be there when the run is resumed, and that is before ``train()``: the
model and the optimizer are made and sharded then, as by transformers itself for an ``evaluate()``
that comes before, and ``train()`` finds them ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hydroslurm.errors import UsageError
from hydroslurm.integrations.framework_run import FrameworkRun
from hydroslurm.integrations.handed import fingerprint
from hydroslurm.training.objects import bare


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
    """The model and the optimizer of one ``train()``: made and sharded here, part of the run."""

    def __init__(self, trainer: Any, run: FrameworkRun) -> None:
        """Raises:
        UsageError: the optimizer has other parameters than the model: those of before.
        """
        self._trainer = trainer
        if trainer.optimizer is None or not _is_prepared(trainer.optimizer):
            trainer.create_optimizer()
            trainer.model, trainer.optimizer = trainer.accelerator.prepare(
                trainer.model, trainer.optimizer
            )
            trainer.model_wrapped = trainer.model
        self._prepared = (trainer.model, trainer.optimizer)
        self._settings: list[dict[str, Any]] = []
        _require_own(trainer)
        run.share("model", bare(trainer.model))
        run.share("optimizer", trainer.optimizer.optimizer)

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
        """Of all weights, equal on all ranks; see :func:`hydroslurm.integrations.handed.
        fingerprint`. A collective."""
        here = sum(fingerprint(bare(self._trainer.model).state_dict()).values()) % 2**48
        accelerator = self._trainer.accelerator
        total = torch.tensor(here, dtype=torch.int64, device=accelerator.device)
        return int(accelerator.reduce(total, reduction="sum"))


def _is_prepared(optimizer: Any) -> bool:
    return type(optimizer).__name__ == "AcceleratedOptimizer"


def _require_own(trainer: Any) -> None:
    mine = {id(one) for one in trainer.model.parameters()}
    groups = trainer.optimizer.param_groups
    if strange := sum(id(one) not in mine for group in groups for one in group["params"]):
        raise UsageError(
            f"{strange} parameters of the optimizer are not the sharded model's; make it of "
            "trainer.model, or let the Trainer make it"
        )
