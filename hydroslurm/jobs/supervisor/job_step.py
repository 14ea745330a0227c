"""The job step with all tasks of an attempt: start it, wait for it, end it.

srun's output goes to a file in the run folder instead of a pipe: a restarted supervisor finds it
there, and the step keeps running meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.coordination.network import rendezvous_environment
from hydroslurm.coordination.secret import new_key
from hydroslurm.coordination.world import KEY_ENV
from hydroslurm.core import registry
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.files import open_regular
from hydroslurm.core.module_command import module_command
from hydroslurm.core.rundir import RunDir, variables_of
from hydroslurm.jobs.images import Runtime, pyxis_options
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.supervisor.exit_policy import (
    Action,
    ExitDecision,
    decide_exit,
    srun_was_killed,
)
from hydroslurm.jobs.supervisor.task_exits import LOST, TaskExits, last_error


@dataclass
class RunningStep:
    """The srun process of a job step: our child, or that of a supervisor that was killed."""

    pid: int
    started: int
    child: subprocess.Popen[bytes] | None = None

    def has_ended(self) -> bool:
        """Whether srun is gone."""
        if self.child is not None:
            return self.child.poll() is not None
        return registry.start_ticks(self.pid) != self.started

    @property
    def status(self) -> int | None:
        """srun's own exit status, if it was our child and has ended."""
        return None if self.child is None else self.child.returncode

    def wait(self, within_s: float, poll_s: float = 0.05) -> bool:
        """Whether it has ended within that time."""
        clock = AwakeClock()
        until_s = clock.now_s() + within_s
        while not self.has_ended():
            if clock.now_s() > until_s:
                return False
            time.sleep(poll_s)
        return True

    def end(self, patience_s: float = 30.0) -> None:
        """Kill its tasks: srun turns a SIGTERM into SIGKILL. Ranks would take a SIGTERM of their
        own for a stop of the job, save, and have it requeued."""
        self._signal(signal.SIGTERM)
        if not self.wait(patience_s):
            self._signal(signal.SIGKILL)

    def _signal(self, signo: signal.Signals) -> None:
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signo)


def after_srun(
    plan: Plan, step: RunningStep, ends: TaskExits, *, earlier_restarts: int
) -> ExitDecision:
    """What to do when srun has ended, and the exits that it reported decide nothing."""
    # another supervisor's srun has no status here; one that ends by itself names its tasks
    killed = not ends.order if step.status is None else step.status < 0
    if killed and ends.step_id is not None:
        return srun_was_killed(None if step.status is None else -step.status)
    if not ends.order:
        message = f"srun has started no task: {last_error(ends.path)}"
        return ExitDecision(Action.RESTART, None, LOST, True, "StepFailed", message)
    ends.fill_in(len(plan.tasks), step.status or LOST)
    return decide_exit(
        plan,
        ends.statuses,
        ends.order,
        earlier_restarts=earlier_restarts,
        unrequested=ends.unrequested,
    )


def srun_command(plan: Plan, *, plan_file: Path, logs: Path, python: str) -> list[str]:
    """The command that starts all tasks of a plan."""
    # SLURM_HOSTFILE names the nodes of an uneven plan: since 25.11 srun refuses --nodes with it
    layout = ["--distribution=arbitrary"]
    if plan.is_even:
        layout = [f"--nodes={plan.nodes}", f"--ntasks-per-node={plan.tasks_per_node[0]}"]
    return [
        "srun",
        "-v",  # also names each task that succeeds
        *layout,
        f"--ntasks={len(plan.tasks)}",
        f"--cpus-per-task={plan.cpus_per_task}",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--export=ALL",
        "--unbuffered",
        "--open-mode=append",
        f"--output={str(logs).replace('%', '%%')}/task-%t.log",
        *container_options(plan, plan_file.parent),
        *module_command(
            "python3" if plan.runtime == Runtime.PYXIS else python,
            "hydroslurm.jobs.task",
            str(plan_file),
        ),
    ]


def container_options(plan: Plan, root: Path) -> list[str]:
    """srun's options for the image of a plan: pyxis's, which runs all tasks of a step in one."""
    task = next((task for task in plan.tasks if task.image), None)
    if task is None or task.image is None or plan.runtime != Runtime.PYXIS:
        return []
    there = Path(task.working_directory)
    folders = [root, *([there] if there.is_dir() else [])]
    return pyxis_options(task.image, folders=folders, working_directory=str(there))


def host_list(plan: Plan, nodes: Sequence[str]) -> str:
    """The content of SLURM_HOSTFILE: the node of each task, one per line."""
    return "".join(f"{nodes[task.node]}\n" for task in plan.tasks)


def step_variables(
    run: RunDir,
    plan: Plan,
    *,
    nodes: Sequence[str],
    address: str,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """What srun and the ranks of an attempt get in addition to the job's environment, which is
    ``environ``. Writes the host list into the run folder. ``address``: of the first node."""
    hosts = run.root / "hosts"
    hosts.write_text(host_list(plan, nodes), encoding="utf-8")
    return {
        **rendezvous_environment(address),
        **({} if plan.is_even else {"SLURM_HOSTFILE": str(hosts)}),
        **dict(plan.rank_env),
        KEY_ENV: new_key(),
        **variables_of(run.root, environ),
    }


def start_step(command: Sequence[str], *, environ: Mapping[str, str], log: Path) -> RunningStep:
    """Start srun with its output appended to ``log``.

    Raises:
        OSError: there is no srun, or the log is not a regular file.
    """
    handle = open_regular(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(handle, "ab", buffering=0) as output:
        child = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    return RunningStep(child.pid, registry.start_ticks(child.pid) or 0, child)


def python_of() -> str:
    """This interpreter by the name it was started by: for a virtual environment that is a link,
    whose location matters."""
    return sys.executable or os.path.realpath("/proc/self/exe")
