"""One job step with all tasks of an attempt: start it, see its tasks end, end it.

srun's output goes to a file in the run folder and not to a pipe: a supervisor that is killed and
restarted finds it there, and the step keeps running meanwhile.
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
from hydroslurm.core.files import open_regular
from hydroslurm.core.rundir import (
    ATTEMPTS_ENV,
    RUN_DIR_ENV,
    SAVE_EVERY_ENV,
    SUPERVISED_ENV,
    RunDir,
)
from hydroslurm.jobs.images import Runtime, pyxis_options
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.supervisor.exit_policy import (
    Action,
    ExitDecision,
    decide_exit,
    srun_was_killed,
)
from hydroslurm.jobs.supervisor.task_exits import LOST, TaskExits, last_error
from hydroslurm.runtime.autoload import PREEMPT_ENV


@dataclass
class RunningStep:
    """The process that has a job step; a child of ours, or of a supervisor that is no more."""

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
        """srun's own, where it was our child and has ended."""
        return None if self.child is None else self.child.returncode

    def wait(self, until_mono_s: float, poll_s: float = 0.05) -> bool:
        """Whether it has ended by then."""
        while not self.has_ended():
            if time.monotonic() > until_mono_s:
                return False
            time.sleep(poll_s)
        return True

    def end(self, patience_s: float = 30.0) -> None:
        """End its tasks, at once: srun makes a SIGKILL of a SIGTERM. Ranks that listen to SIGTERM
        would take that for a stop of the job, save, and have it requeued."""
        self._signal(signal.SIGTERM)
        if not self.wait(time.monotonic() + patience_s):
            self._signal(signal.SIGKILL)

    def _signal(self, signo: signal.Signals) -> None:
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signo)


def after_srun(plan: Plan, step: RunningStep, ends: TaskExits) -> ExitDecision:
    """What follows when srun has ended, and nothing that it has said of its tasks decides."""
    # the one of another supervisor has no status; what ends by itself names its tasks
    killed = not ends.order if step.status is None else step.status < 0
    if killed and ends.step_id is not None:
        return srun_was_killed(None if step.status is None else -step.status)
    if not ends.order:
        message = f"srun has started no task: {last_error(ends.path)}"
        return ExitDecision(Action.RESTART, None, LOST, True, "StepFailed", message)
    ends.fill_in(len(plan.tasks), step.status or LOST)
    return decide_exit(plan, ends.statuses, ends.order)


def srun_command(plan: Plan, *, plan_file: Path, logs: Path, python: str) -> list[str]:
    """The command that starts all tasks of a plan."""
    # SLURM_HOSTFILE names the nodes of an uneven plan: from 25.11 on srun refuses --nodes beside it
    layout = ["--distribution=arbitrary"]
    if plan.is_even:
        layout = [f"--nodes={plan.nodes}", f"--ntasks-per-node={plan.tasks_per_node[0]}"]
    return [
        "srun",
        "-v",  # names each task that ends well, too
        *layout,
        f"--ntasks={len(plan.tasks)}",
        f"--cpus-per-task={plan.cpus_per_task}",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--export=ALL",
        "--unbuffered",
        "--open-mode=append",
        f"--output={str(logs).replace('%', '%%')}/task-%t.log",
        *_container(plan, plan_file.parent),
        "python3" if plan.runtime == Runtime.PYXIS else python,
        "-m",
        "hydroslurm.jobs.task",
        str(plan_file),
    ]


def _container(plan: Plan, root: Path) -> list[str]:
    """Of pyxis; all tasks of a job step have the same image there."""
    task = next((task for task in plan.tasks if task.image), None)
    if task is None or task.image is None or plan.runtime != Runtime.PYXIS:
        return []
    there = Path(task.working_directory)
    folders = [root, *([there] if there.is_dir() else [])]
    return pyxis_options(task.image, folders=folders, working_directory=str(there))


def host_list(plan: Plan, nodes: Sequence[str]) -> str:
    """SLURM_HOSTFILE: the node of each task, a line each."""
    return "".join(f"{nodes[task.node]}\n" for task in plan.tasks)


def rank_variables(job: TrainingJob) -> dict[str, str]:
    """What the ranks are told of the spec's ``preemption`` by their environment."""
    wanted = job.preemption
    made = {PREEMPT_ENV: "requeue" if wanted.mode == "requeue" else "pause", SUPERVISED_ENV: "1"}
    if wanted.save_every_seconds is not None:
        made[SAVE_EVERY_ENV] = str(wanted.save_every_seconds)
    if wanted.attempts_without_progress is not None:
        made[ATTEMPTS_ENV] = str(wanted.attempts_without_progress)
    return made


def step_variables(
    run: RunDir, job: TrainingJob, plan: Plan, *, nodes: Sequence[str], address: str
) -> dict[str, str]:
    """What srun and the ranks of one attempt are told beside the job's own environment; writes the
    list of hosts into the run folder. ``address``: of the first node."""
    hosts = run.root / "hosts"
    hosts.write_text(host_list(plan, nodes), encoding="utf-8")
    return {
        **rendezvous_environment(address),
        **({} if plan.is_even else {"SLURM_HOSTFILE": str(hosts)}),
        **rank_variables(job),
        KEY_ENV: new_key(),
        RUN_DIR_ENV: str(run.root),
    }


def start_step(command: Sequence[str], *, environ: Mapping[str, str], log: Path) -> RunningStep:
    """Start srun, with its output going to ``log``.

    Raises:
        OSError: there is no srun, or something else than a file is in the place of the log.
    """
    handle = open_regular(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(handle, "ab", buffering=0) as output:
        child = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    return RunningStep(child.pid, registry.start_ticks(child.pid) or 0, child)


def python_of() -> str:
    """The interpreter that runs this, by the name it was started by: one of a virtual environment
    is a link whose place tells which."""
    return sys.executable or os.path.realpath("/proc/self/exe")
