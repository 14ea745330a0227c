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

if TYPE_CHECKING:  # by both names: a type checker takes them for exported
    from hydroslurm import data as data
    from hydroslurm.compat.job import Job as Job
    from hydroslurm.compat.job import LocalSession as LocalSession
    from hydroslurm.compat.job import Task as Task
    from hydroslurm.compat.job import TaskGroup as TaskGroup
    from hydroslurm.compat.job import epoch_limiter as epoch_limiter
    from hydroslurm.compat.jobrunner import JobRunner as JobRunner
    from hydroslurm.compat.manager import CheckpointManager as CheckpointManager
    from hydroslurm.compat.manager import MultiNodeCheckpointManager as MultiNodeCheckpointManager
    from hydroslurm.compat.suspend import go_suspend as go_suspend
    from hydroslurm.compat.suspend import receive_suspend_command as receive_suspend_command
    from hydroslurm.coordination.rendezvous import set_torch_environment as set_torch_environment
    from hydroslurm.errors import HydroslurmError as HydroslurmError
    from hydroslurm.errors import UsageError as UsageError
    from hydroslurm.gate.hooks import BaseOpHook as BaseOpHook
    from hydroslurm.gate.hooks import ExecutionOpHook as ExecutionOpHook
    from hydroslurm.gate.hooks import register_ophooks_recursively as register_ophooks_recursively
    from hydroslurm.gate.signals import SignalPlan as SignalPlan
    from hydroslurm.integrations.fused.modules import optimize_modules as optimize_modules
    from hydroslurm.integrations.fused.modules import optimize_optimizer as optimize_optimizer
    from hydroslurm.integrations.fused.rewriters import register_rewriter as register_rewriter
    from hydroslurm.jobs.launch.executor import Executor as Executor
    from hydroslurm.jobs.launch.rank import preemptible as preemptible
    from hydroslurm.runtime.client import send_signal as send_signal
    from hydroslurm.runtime.controller import Controller as Controller
    from hydroslurm.runtime.engine import Engine as Engine
    from hydroslurm.runtime.engine import od_execution_wrapper as od_execution_wrapper
    from hydroslurm.runtime.install import controller as controller
    from hydroslurm.runtime.install import install as install
    from hydroslurm.runtime.install import installed as installed
    from hydroslurm.runtime.install import is_installed as is_installed
    from hydroslurm.runtime.install import nvtx_mark as nvtx_mark
    from hydroslurm.runtime.install import set_step as set_step
    from hydroslurm.runtime.install import uninstall as uninstall
    from hydroslurm.training.attempts import Limits as Limits
    from hydroslurm.training.run import Run as Run

__version__ = "0.1.0"

_HOME = {
    "send_signal": "hydroslurm.runtime.client",
    "HydroslurmError": "hydroslurm.errors",
    "UsageError": "hydroslurm.errors",
    "Executor": "hydroslurm.jobs.launch.executor",
    "optimize_modules": "hydroslurm.integrations.fused.modules",
    "optimize_optimizer": "hydroslurm.integrations.fused.modules",
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
    "LocalSession": "hydroslurm.compat.job",
    "epoch_limiter": "hydroslurm.compat.job",
    "Task": "hydroslurm.compat.job",
    "TaskGroup": "hydroslurm.compat.job",
    "Run": "hydroslurm.training.run",
    "go_suspend": "hydroslurm.compat.suspend",
    "receive_suspend_command": "hydroslurm.compat.suspend",
}
"""Name -> the module that has it."""

__all__ = sorted([*_HOME, "data"])


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
