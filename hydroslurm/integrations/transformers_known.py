"""Which Trainers can be made preemptible, and how their ranks find each other."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from hydroslurm.coordination.world import World
from hydroslurm.errors import UsageError
from hydroslurm.integrations.transformers_sharded import is_sharded, why_not

_USED = (
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
"""What is used of a Trainer's inside."""


def require_known(trainer: Any) -> None:
    """Whether this is a Trainer whose loop is known, and a training that can be saved.

    Raises:
        UsageError: names what is not there, or what is not supported.
    """
    module = importlib.import_module("transformers.trainer")
    missing = [f"Trainer.{name}" for name in _USED if not hasattr(trainer, name)]
    if not hasattr(module, "skip_first_batches"):
        missing.append("transformers.trainer.skip_first_batches")
    if missing:
        version = getattr(importlib.import_module("transformers"), "__version__", "?")
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


def environ_of(args: Any) -> Mapping[str, str]:
    """The variables by which the ranks of a training find each other: Slurm's or torchrun's.

    Args:
        args: TrainingArguments, or an Accelerator's state; with ``world_size`` and
            ``process_index``.

    Raises:
        UsageError: Slurm has started several tasks, and each trains alone.
    """
    world = World.from_environ(os.environ)
    if world.world_size == args.world_size:
        return os.environ
    if world.world_size > 1:
        raise UsageError(
            f"{world.world_size} tasks were started, and each trains with a world size of "
            f"{args.world_size}: accelerate looks for RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR "
            "and MASTER_PORT. Call hydroslurm.set_torch_environment() before anything else, or "
            "start one task per node: srun --ntasks-per-node=1 hydroslurm agent -- "
            "--nproc-per-node=N train.py"
        )
    raise UsageError(
        f"this is rank {args.process_index} of {args.world_size}, but neither srun nor torchrun "
        "has started it: there is no way to agree with the other ranks on a stop. Use one of those"
    )
