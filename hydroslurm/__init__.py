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
    from hydroslurm.client import send_signal
    from hydroslurm.errors import HydroslurmError, UsageError
    from hydroslurm.launch.executor import Executor
    from hydroslurm.launch.preemptible import preemptible
    from hydroslurm.runtime.controller import Controller
    from hydroslurm.runtime.engine import Engine, od_execution_wrapper
    from hydroslurm.runtime.install import (
        controller,
        install,
        installed,
        is_installed,
        set_step,
        uninstall,
    )
    from hydroslurm.runtime.rendezvous import set_torch_environment
    from hydroslurm.runtime.signals import SignalPlan
    from hydroslurm.session.buckets import settle_buckets
    from hydroslurm.session.job import Job
    from hydroslurm.session.jobrunner import JobRunner
    from hydroslurm.session.lives import Limits
    from hydroslurm.session.manager import CheckpointManager
    from hydroslurm.session.multinode import MultiNodeCheckpointManager
    from hydroslurm.session.parts import LocalSession, epoch_limiter
    from hydroslurm.session.run import Run
    from hydroslurm.session.suspend import go_suspend, receive_suspend_command
    from hydroslurm.session.tasks import Task, TaskGroup

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "Controller",
    "Engine",
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
    "od_execution_wrapper",
    "preemptible",
    "receive_suspend_command",
    "send_signal",
    "set_step",
    "set_torch_environment",
    "settle_buckets",
    "uninstall",
]

_HOME = {
    "send_signal": "hydroslurm.client",
    "HydroslurmError": "hydroslurm.errors",
    "UsageError": "hydroslurm.errors",
    "Executor": "hydroslurm.launch.executor",
    "preemptible": "hydroslurm.launch.preemptible",
    "Controller": "hydroslurm.runtime.controller",
    "Engine": "hydroslurm.runtime.engine",
    "od_execution_wrapper": "hydroslurm.runtime.engine",
    "controller": "hydroslurm.runtime.install",
    "install": "hydroslurm.runtime.install",
    "installed": "hydroslurm.runtime.install",
    "is_installed": "hydroslurm.runtime.install",
    "set_step": "hydroslurm.runtime.install",
    "uninstall": "hydroslurm.runtime.install",
    "SignalPlan": "hydroslurm.runtime.signals",
    "set_torch_environment": "hydroslurm.runtime.rendezvous",
    "settle_buckets": "hydroslurm.session.buckets",
    "Limits": "hydroslurm.session.lives",
    "Job": "hydroslurm.session.job",
    "JobRunner": "hydroslurm.session.jobrunner",
    "CheckpointManager": "hydroslurm.session.manager",
    "MultiNodeCheckpointManager": "hydroslurm.session.multinode",
    "LocalSession": "hydroslurm.session.parts",
    "epoch_limiter": "hydroslurm.session.parts",
    "Task": "hydroslurm.session.tasks",
    "TaskGroup": "hydroslurm.session.tasks",
    "Run": "hydroslurm.session.run",
    "go_suspend": "hydroslurm.session.suspend",
    "receive_suspend_command": "hydroslurm.session.suspend",
}


def __getattr__(name: str) -> Any:
    if name == "data":  # a room, as the messages name it: hydroslurm.data.ResumableSampler
        return importlib.import_module("hydroslurm.data")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(
            f"module 'hydroslurm' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
