"""hydroslurm makes a PyTorch training job on Slurm preemptible.

    import hydroslurm
    model = hydroslurm.od_execution_wrapper(model)     # pausable at every operator: one line
    hydroslurm.install()                               # the same without a model
    hydroslurm.send_signal(pid, "pause")               # from another process of this machine
    hydroslurm.Executor("runs").submit(train, 3)       # through submitit, pausable from the start
    hydroslurm.Run(model=model, optimizer=optimizer, loader=loader)   # stopped, requeued, continued

Names are imported when they are first used: ``import hydroslurm`` loads neither torch nor anything
of Slurm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydroslurm import data
    from hydroslurm.compat.job import Job
    from hydroslurm.compat.jobrunner import JobRunner
    from hydroslurm.compat.manager import CheckpointManager, MultiNodeCheckpointManager
    from hydroslurm.compat.suspend import go_suspend, receive_suspend_command
    from hydroslurm.compat.tasks import LocalSession, Task, TaskGroup, epoch_limiter
    from hydroslurm.coordination.rendezvous import set_torch_environment
    from hydroslurm.errors import HydroslurmError, UsageError
    from hydroslurm.gate.hooks import (
        BaseOpHook,
        ExecutionOpHook,
        register_ophooks_recursively,
    )
    from hydroslurm.gate.signals import SignalPlan
    from hydroslurm.integrations.fused.modules import optimize_modules
    from hydroslurm.integrations.fused.optimizers import optimize_optimizer
    from hydroslurm.integrations.fused.rewriters import register_rewriter
    from hydroslurm.jobs.launch.executor import Executor
    from hydroslurm.jobs.launch.rank import preemptible
    from hydroslurm.runtime.client import send_signal
    from hydroslurm.runtime.controller import Controller
    from hydroslurm.runtime.engine import Engine, od_execution_wrapper
    from hydroslurm.runtime.install import (
        controller,
        install,
        installed,
        is_installed,
        nvtx_mark,
        set_step,
        uninstall,
    )
    from hydroslurm.training.attempts import Limits
    from hydroslurm.training.run import Run

__version__ = "0.1.0"

__all__ = [
    "BaseOpHook",
    "CheckpointManager",
    "Controller",
    "Engine",
    "ExecutionOpHook",
    "Executor",
    "HydroslurmError",
    "Job",
    "JobRunner",
    "Limits",
    "LocalSession",
    "MultiNodeCheckpointManager",
    "Run",
    "SignalPlan",
    "Task",
    "TaskGroup",
    "UsageError",
    "controller",
    "data",
    "epoch_limiter",
    "go_suspend",
    "install",
    "installed",
    "is_installed",
    "nvtx_mark",
    "od_execution_wrapper",
    "optimize_modules",
    "optimize_optimizer",
    "preemptible",
    "receive_suspend_command",
    "register_ophooks_recursively",
    "register_rewriter",
    "send_signal",
    "set_step",
    "set_torch_environment",
    "uninstall",
]

_HOME = {
    "send_signal": "hydroslurm.runtime.client",
    "HydroslurmError": "hydroslurm.errors",
    "UsageError": "hydroslurm.errors",
    "Executor": "hydroslurm.jobs.launch.executor",
    "optimize_modules": "hydroslurm.integrations.fused.modules",
    "optimize_optimizer": "hydroslurm.integrations.fused.optimizers",
    "register_rewriter": "hydroslurm.integrations.fused.rewriters",
    "preemptible": "hydroslurm.jobs.launch.rank",
    "Controller": "hydroslurm.runtime.controller",
    "Engine": "hydroslurm.runtime.engine",
    "od_execution_wrapper": "hydroslurm.runtime.engine",
    "controller": "hydroslurm.runtime.install",
    "install": "hydroslurm.runtime.install",
    "installed": "hydroslurm.runtime.install",
    "is_installed": "hydroslurm.runtime.install",
    "nvtx_mark": "hydroslurm.runtime.install",
    "set_step": "hydroslurm.runtime.install",
    "uninstall": "hydroslurm.runtime.install",
    "SignalPlan": "hydroslurm.gate.signals",
    "BaseOpHook": "hydroslurm.gate.hooks",
    "ExecutionOpHook": "hydroslurm.gate.hooks",
    "register_ophooks_recursively": "hydroslurm.gate.hooks",
    "set_torch_environment": "hydroslurm.coordination.rendezvous",
    "Limits": "hydroslurm.training.attempts",
    "Job": "hydroslurm.compat.job",
    "JobRunner": "hydroslurm.compat.jobrunner",
    "CheckpointManager": "hydroslurm.compat.manager",
    "MultiNodeCheckpointManager": "hydroslurm.compat.manager",
    "LocalSession": "hydroslurm.compat.tasks",
    "epoch_limiter": "hydroslurm.compat.tasks",
    "Task": "hydroslurm.compat.tasks",
    "TaskGroup": "hydroslurm.compat.tasks",
    "Run": "hydroslurm.training.run",
    "go_suspend": "hydroslurm.compat.suspend",
    "receive_suspend_command": "hydroslurm.compat.suspend",
}


def __getattr__(name: str) -> Any:
    if name in ("data", "elastic", "numa", "parallel"):  # rooms, as the messages name them
        return importlib.import_module(f"hydroslurm.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(
            f"module 'hydroslurm' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
