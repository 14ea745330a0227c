"""Which trainings of a framework can be made preemptible, and how their ranks find each other."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from hydroslurm.coordination.world import World
from hydroslurm.errors import UsageError
from hydroslurm.integrations.sharded import is_sharded, why_not
from hydroslurm.training.reporting import notice

_OF_LIGHTNING = {
    "fit_loop": (
        "setup_data", "run", "on_run_start", "on_run_end", "_should_accumulate", "epoch_progress",
    ),
    "fit_loop.epoch_loop": ("advance", "val_loop", "batch_progress", "max_steps"),
    "fit_loop.epoch_loop.automatic_optimization": ("optim_progress",),
    "fit_loop.epoch_loop.manual_optimization": ("optim_step_progress",),
    "fit_loop.epoch_loop.val_loop": ("run",),
    "strategy": ("process_dataloader",),
    "_signal_connector": ("register_signal_handlers",),
    "_checkpoint_connector": (
        "resume_start", "restore_model", "restore_training_state", "dump_checkpoint",
        "_loaded_checkpoint",
    ),
}  # fmt: skip
"""What is used of Lightning's inside, from the trainer on."""
_UNKNOWN_STRATEGIES = ("DeepSpeedStrategy", "XLAFSDPStrategy")
"""They shard the state in ways of their own."""
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
"""What is used of a Trainer's inside."""
_OF_ACCELERATE = ("iteration", "end_of_dataloader", "remainder", "end", "base_dataloader")
"""What is used of a loader that accelerate has prepared."""


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


def require_known_trainer(trainer: Any) -> None:
    """Whether this is a Trainer whose loop is known, and a training that can be saved.

    Raises:
        UsageError: names what is not there, or what is not supported.
    """
    module = importlib.import_module("transformers.trainer")
    missing = [f"Trainer.{name}" for name in _OF_TRAINER if not hasattr(trainer, name)]
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


def require_known_accelerate(loader: Any, state: Any) -> None:
    """Whether this is what is known of accelerate's loaders, and of its state of gradients.

    Raises:
        UsageError: names what is not there.
    """
    missing = [f"{type(loader).__name__}.{n}" for n in _OF_ACCELERATE if not hasattr(loader, n)]
    if not hasattr(state, "dataloader_references"):
        missing.append("GradientState.dataloader_references")
    if missing:
        version = getattr(importlib.import_module("accelerate"), "__version__", "?")
        raise UsageError(
            f"accelerate {version} has no {', '.join(missing)}; hydroslurm knows 1.10 to 1.15. "
            "Install one of those, or save and resume with accelerate"
        )


def environ_of_lightning(trainer: Any) -> Mapping[str, str]:
    """The variables by which the ranks of this trainer find each other: those of Slurm or torchrun,
    or, where Lightning has started its own processes, what it knows.

    Raises:
        UsageError: Slurm has started several tasks, and each trains alone.
    """
    size = trainer.world_size
    if _is_launched(
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


def environ_of(*, rank: int, world_size: int) -> Mapping[str, str]:
    """The variables by which the ranks of a training with accelerate find each other: Slurm's or
    torchrun's.

    Raises:
        UsageError: Slurm has started several tasks, and each trains alone.
    """
    if not _is_launched(
        world_size,
        f"each trains with a world size of {world_size}: accelerate looks for RANK, WORLD_SIZE, "
        "LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Call hydroslurm.set_torch_environment() before "
        "anything else, or start one task per node: srun --ntasks-per-node=1 hydroslurm agent -- "
        "--nproc-per-node=N train.py",
    ):
        raise UsageError(
            f"this is rank {rank} of {world_size}, but neither srun nor torchrun has started it: "
            "there is no way to agree with the other ranks on a stop. Use one of those"
        )
    return os.environ


def _is_launched(world_size: int, seen: str) -> bool:
    """Whether srun or torchrun has started all of these ranks.

    Args:
        seen: of what they have started instead, what the training knows, and what to do.

    Raises:
        UsageError: they have started several ranks, but not this number.
    """
    launched = World.from_environ(os.environ).world_size
    if launched not in (1, world_size):
        raise UsageError(f"{launched} tasks were started, and {seen}")
    return launched == world_size
