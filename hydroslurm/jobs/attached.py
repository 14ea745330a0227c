"""What ``hydroslurm attach`` starts on the node of a task: a command in the task's folder, with the
task's environment.

    python -m hydroslurm.jobs.attached PLAN TASK COMMAND...       of a job with a spec
    python -m hydroslurm.jobs.attached --process PID COMMAND...   beside any other rank
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from hydroslurm.core.proc import START_TICKS, environ_of, pids, stat_of
from hydroslurm.core.rundir import RUN_DIR_ENV, RUN_OF_ENV
from hydroslurm.errors import LaunchError
from hydroslurm.jobs.plan import read_plan
from hydroslurm.jobs.task import REPLICA_ENV, as_run, become, enter, task_environ
from hydroslurm.runtime.autoload import PREEMPT_ENV

PROCESS = "--process"
"""In the place of a plan; behind it stands the process that the rank has said it is, or 0."""
_OF_THE_TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES")
_OF_THE_RUN = (PREEMPT_ENV, RUN_DIR_ENV, RUN_OF_ENV)
"""A second process with them, beside a rank that runs, would write into that rank's events."""


def main(arguments: list[str]) -> int:
    """Become the command."""
    if arguments[0] == PROCESS:
        return _beside_process(int(arguments[1]), arguments[2:])
    plan_file, number = Path(arguments[0]), int(arguments[1])
    try:
        plan = read_plan(plan_file)
        task = plan.tasks[number]
    except (LaunchError, IndexError) as error:
        print(f"hydroslurm: {plan_file}: no plan for task {number}: {error!r}", file=sys.stderr)
        return 1
    environ = environ_of_task(number, task.replica, job_id=os.environ["SLURM_JOB_ID"])
    if environ is None:
        print(
            f"hydroslurm: {task.replica} has no process here now; this one has the variables of "
            "its spec, and is rank 0 of 1",
            file=sys.stderr,
        )
        environ = task_environ(task, os.environ, root=plan_file.parent)
    environ |= {name: os.environ[name] for name in _OF_THE_TERMINAL if name in os.environ}
    if not plan.is_debug:
        environ = {name: value for name, value in environ.items() if name not in _OF_THE_RUN}
    _outlive_pauses()
    try:
        enter(task)
        become(*as_run(plan, task, arguments[2:], environ, root=plan_file.parent))
    except (OSError, LaunchError) as error:
        return _cannot(arguments[2], error)


def _beside_process(pid: int, command: list[str]) -> int:
    """Where a rank is, and with the environment that its program was started with."""
    try:
        environ = environ_of(pid)
        if environ.get("SLURM_JOB_ID") != os.environ["SLURM_JOB_ID"]:
            raise ProcessLookupError(f"process {pid} is another job's by now")
        os.chdir(f"/proc/{pid}/cwd")
    except OSError:
        message = "the rank has no process here now; this one has the variables of its own job step"
        print(f"hydroslurm: {message}", file=sys.stderr)
        environ = dict(os.environ)
        with contextlib.suppress(OSError):
            os.chdir(environ.get("SLURM_SUBMIT_DIR", "/"))
    environ |= {name: os.environ[name] for name in _OF_THE_TERMINAL if name in os.environ}
    _outlive_pauses()
    try:
        become(command, {name: environ[name] for name in environ.keys() - set(_OF_THE_RUN)})
    except OSError as error:
        return _cannot(command[0], error)


def _outlive_pauses() -> None:
    """A pause by its owner (scancel --signal=USR1) reaches all job steps, and would end a shell."""
    for signo in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signo, signal.SIG_IGN)


def _cannot(program: str, error: Exception) -> int:
    print(f"hydroslurm: {program} cannot be started: {error}", file=sys.stderr)
    return 127 if isinstance(error, FileNotFoundError) else 126


def environ_of_task(number: int, replica: str, *, job_id: str) -> dict[str, str] | None:
    """The environment that the task's program was started with on this node; None where it does
    not run. Of the program and its children the oldest is the program."""
    wanted = {"SLURM_JOB_ID": job_id, "SLURM_PROCID": str(number), REPLICA_ENV: replica}
    found: list[tuple[int, dict[str, str]]] = []
    for pid in pids():
        with contextlib.suppress(OSError):
            environ = environ_of(pid)
            if all(environ.get(name) == value for name, value in wanted.items()):
                found.append((int(stat_of(pid)[START_TICKS]), environ))
    return min(found, key=lambda one: one[0])[1] if found else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
