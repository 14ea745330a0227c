"""Which fits of Lightning can be made preemptible, and how their ranks find each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hydroslurm.coordination.world import World
from hydroslurm.errors import UsageError
from hydroslurm.training.reporting import notice

_PARTS = {
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


_UNKNOWN = ("DeepSpeedStrategy", "XLAFSDPStrategy")
"""They shard the state in ways of their own."""


def require_known(trainer: Any) -> None:
    """Whether this is a Lightning whose loops are known, and a strategy whose state is.

    Raises:
        UsageError: names what is not there, or the strategy.
    """
    kind = type(trainer.strategy)
    if any(one.__name__ in _UNKNOWN for one in kind.__mro__):
        raise UsageError(
            f"Lightning's {kind.__name__} shards the state in a way that hydroslurm cannot save. "
            'Train with strategy="ddp" or "fsdp", or with ModelParallelStrategy; or unset '
            "HYDROSLURM_PREEMPT and save with Lightning"
        )
    for path, names in _PARTS.items():
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


def environ_of(trainer: Any) -> Mapping[str, str]:
    """The variables by which the ranks of this trainer find each other: those of Slurm or torchrun,
    or, where Lightning has started its own processes, what it knows.

    Raises:
        UsageError: Slurm has started several tasks, and each trains alone.
    """
    world = World.from_environ(os.environ)
    if world.world_size == trainer.world_size:
        return os.environ
    if world.world_size > 1:
        raise UsageError(
            f"{world.world_size} tasks were started, and Lightning trains with "
            f"{trainer.world_size}: give Trainer(devices=TASKS_PER_NODE, num_nodes=NODES), and "
            'strategy="ddp"'
        )
    if "spawn" in str(getattr(trainer.strategy.launcher, "_start_method", "")):
        raise UsageError(
            "the ranks of this strategy are children of one process, which does not pass a stop on "
            'to them; use strategy="ddp", with srun, torchrun or by itself'
        )
    size = trainer.world_size // max(1, trainer.num_nodes)
    return {
        **os.environ,
        "RANK": str(trainer.global_rank),
        "WORLD_SIZE": str(trainer.world_size),
        "LOCAL_RANK": str(trainer.local_rank),
        "LOCAL_WORLD_SIZE": str(size),
    }
