"""``python -m hydroslurm.jobs.task PLAN``: what srun starts for each task of a TrainingJob.

It becomes the task's program by exec, so that the rank is the process that Slurm signals; with
proctrack/cgroup no other process gets signals. There is no shell in between. Every rank waits for
this process, so that it imports what all tasks need and nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hydroslurm.coordination.world import World, key_from, set_torch_variables
from hydroslurm.errors import LaunchError
from hydroslurm.jobs.plan import Plan, TaskPlan, read_plan
from hydroslurm.runtime import autoload

SCRATCH_ENV = "HYDROSLURM_SCRATCH"
"""Environment variable: this replica's own folder in the run folder, removed by cleanPolicy All."""
REPLICA_ENV = "HYDROSLURM_REPLICA"
"""Environment variable: such as ``worker-2``."""


def main(arguments: list[str]) -> int:
    """Become the task that SLURM_PROCID names."""
    plan_file = Path(arguments[0])
    try:
        plan = read_plan(plan_file)
        number = int(os.environ["SLURM_PROCID"])
        task = plan.tasks[number]
    except (LaunchError, ValueError, KeyError, IndexError) as error:
        print(f"hydroslurm: {plan_file}: no plan for this task: {error!r}", file=sys.stderr)
        return 1
    environ = task_environ(task, os.environ, root=plan_file.parent)
    if autoload.is_asked(environ):
        autoload.hold(autoload.killing(environ))
    else:
        # the autoload hook of this Python has blocked them, as the job's environment asked for it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, autoload.killing(environ))
    try:
        Path(environ[SCRATCH_ENV]).mkdir(mode=0o700, parents=True, exist_ok=True)
        enter(task)
        for step in task.init:
            status = _run_init(*as_run(plan, task, step.argv, environ, root=plan_file.parent))
            if status:
                print(
                    f"hydroslurm: init step {step.name!r} of {task.replica} failed with status "
                    f"{status}; the replica is not started",
                    file=sys.stderr,
                )
                return status
        argv, its_environ = as_run(plan, task, task.argv, environ, root=plan_file.parent)
        if plan.is_debug:
            if status := _run_debugged(argv, its_environ, signals=autoload.killing(environ)):
                return status
            argv, its_environ = ("sleep", "infinity"), environ
        become(argv, its_environ)
    except (OSError, LaunchError) as error:
        print(f"hydroslurm: {task.replica} cannot be started: {error}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def task_environ(task: TaskPlan, environ: Mapping[str, str], *, root: Path) -> dict[str, str]:
    """The environment of a task: the job's, overridden by ours, overridden by the spec's.
    torch.distributed's variables are set for a rank; for an agent torchrun sets them."""
    made = dict(environ)
    # as torchrun does: output is in the log at once, even if the rank is killed
    made.setdefault("PYTHONUNBUFFERED", "1")
    made[REPLICA_ENV] = task.replica
    made[SCRATCH_ENV] = str(root / "scratch" / task.replica)
    if not task.is_agent:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
            made.pop(name, None)  # left over from the shell that called sbatch
        set_torch_variables(made, World.from_environ(made), key_from(made))
    made.update(task.env)
    return made


def enter(task: TaskPlan) -> None:
    """Go to the task's working directory.

    Raises:
        OSError: there is none; one of a container may be in the image only.
    """
    if task.image is None or Path(task.working_directory).is_dir():
        os.chdir(task.working_directory)


def as_run(
    plan: Plan, task: TaskPlan, argv: Sequence[str], environ: Mapping[str, str], *, root: Path
) -> tuple[Sequence[str], Mapping[str, str]]:
    """The command and environment to run: the same, or wrapped for Apptainer. With pyxis this
    process is already in the container.

    Raises:
        LaunchError: this node has no Apptainer, or a path cannot be bound.
    """
    if task.image is None:
        return argv, environ
    from hydroslurm.jobs.images import (
        Runtime,
        contained_argv,
        contained_environ,
        find_program,
        no_runtime,
    )

    if plan.runtime != Runtime.APPTAINER:
        return argv, environ
    program = find_program(environ)
    if program is None:
        raise no_runtime(task.image, f"node {environ.get('SLURMD_NODENAME', '')}")
    there = Path(task.working_directory)
    wrapped = contained_argv(
        argv,
        image=task.image,
        program=program,
        folders=[root, *([there] if there.is_dir() else [])],
        working_directory=task.working_directory,
        has_gpus=plan.gpus_per_node > 0,
    )
    return wrapped, contained_environ(environ, os.environ, program=program)


def _run_init(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    import subprocess

    done = subprocess.run(argv, env=dict(environ), stdin=subprocess.DEVNULL)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _run_debugged(
    argv: Sequence[str], environ: Mapping[str, str], *, signals: frozenset[int]
) -> int:
    """Run a command of debug mode; returns its status. The task has to outlive one that ends with
    0: what that has left running, as sshd does, would be killed with it. ``signals``: those that a
    pause sends, which kill nothing from here on."""
    import subprocess

    from hydroslurm.core.proc import adopt_orphans

    # a daemon stays a child of this task: with proctrack/linuxproc Slurm finds it no other way
    adopt_orphans()
    child = subprocess.Popen(argv, env=dict(environ))
    for signo in (signal.SIGTERM, signal.SIGINT, *signals):
        signal.signal(signo, lambda number, _: child.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    status = child.wait()
    for signo in signals:
        signal.signal(signo, signal.SIG_IGN)
    return status if status >= 0 else 128 - status


def become(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Exec; never returns.

    Raises:
        OSError: there is no such program.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(argv[0], list(argv), dict(environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
