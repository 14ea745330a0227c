"""The job step with all tasks of an attempt: start it, wait for it, end it.

srun's output goes to a file in the run folder instead of a pipe: a restarted supervisor finds it
there, and the step keeps running meanwhile. It also says how the tasks have ended: srun itself ends
with the highest status of all of them, and accounting keeps no more. Its messages name each one::

    srun: launch/slurm: _task_finish: n1: task 0: Completed      (with -v only)
    srun: error: n2: task 1: Exited with exit code 3
    srun: error: n[1-2]: tasks 0-1,3: Killed
    srun: error: n1: task 0: Segmentation fault (core dumped)

Before that it waits for its job step, or says which one it is::

    srun: Job 3 step creation temporarily disabled, retrying (Requested nodes are busy)
    srun: launching StepId=3.1 on host n1, 1 tasks: 0            (with -v only)

Source: Slurm's ``src/srun/libsrun/launch.c`` and ``src/api/step_launch.c``; seen on 22.05.8.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydroslurm.coordination.network import rendezvous_environment
from hydroslurm.coordination.secret import new_key
from hydroslurm.coordination.world import KEY_ENV
from hydroslurm.core import registry
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.files import new_lines, open_regular
from hydroslurm.core.proc import module_command
from hydroslurm.core.rundir import RunDir, variables_of
from hydroslurm.jobs.images import Runtime, pyxis_options
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.supervisor.exit_policy import (
    Action,
    ExitDecision,
    decide_exit,
    srun_was_killed,
)


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
    killed = not ends.statuses if step.status is None else step.status < 0
    if killed and ends.step_id is not None:
        return srun_was_killed(None if step.status is None else -step.status)
    if not ends.statuses:
        message = f"srun has started no task: {last_error(ends.path)}"
        return ExitDecision(Action.RESTART, None, LOST, True, "StepFailed", message)
    ends.fill_in(len(plan.tasks), step.status or LOST)
    return decide_exit(
        plan, ends.statuses, earlier_restarts=earlier_restarts, unrequested=ends.unrequested
    )


def srun_command(plan: Plan, run: RunDir) -> list[str]:
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
        f"--output={str(run.logs).replace('%', '%%')}/task-%t.log",
        *container_options(plan, run.root),
        *module_command(
            "python3" if plan.runtime == Runtime.PYXIS else sys.executable,
            "hydroslurm.jobs.task",
            str(run.plan_json),
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


# --- how its tasks end

LOST = 1
"""The status of a task that srun said nothing of when it ended badly itself."""

_ENDED = re.compile(
    # "error: ", "launch/slurm: _task_finish: ": releases differ in what stands here
    r"srun: (?:[\w/]+: )*(?P<nodes>[^\s:]+): tasks? (?P<tasks>[0-9,-]+): (?P<how>\S.*?)"
    r"(?: \(core dumped\))?\s*"
)
_WAITS = re.compile(r"srun: Job \d+ step creation \w+ disabled, retrying \((.*)\)\s*")
_LAUNCHES = re.compile(r"srun: (?:[\w/]+: )*launching StepId=[\d+]+\.(\d+) on .*")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_OUT_OF_MEMORY = re.compile(r"out of memory|oom", re.IGNORECASE)
_SIGNALS = {
    name: int(number)
    for number in signal.valid_signals()
    if (name := signal.strsignal(number)) is not None
}


@dataclass
class TaskExits:
    """Which tasks have ended, and how, according to srun's output so far.

    Attributes:
        statuses: task -> status, the first to end first.
        unrequested: those whose status asks for a requeue, although nobody had asked them to stop.
        step_id: of the job step, once srun has printed it.
        waits: why there is no job step yet, in Slurm's words, while srun waits for one.
    """

    path: Path
    statuses: dict[int, int] = field(default_factory=dict)
    unrequested: frozenset[int] = frozenset()
    step_id: int | None = None
    waits: str | None = None
    _clock: AwakeClock = field(default_factory=AwakeClock)
    _offset: int = 0

    def __post_init__(self) -> None:
        self._since_s = self._now_s = self._clock.now_s()

    def look(self) -> None:
        """Read what is new."""
        self._now_s = self._clock.now_s()
        for line in self._new_lines():
            if waits := _WAITS.fullmatch(line):
                self.waits = waits[1]
            if launched := _LAUNCHES.fullmatch(line):
                self.step_id, self.waits = int(launched[1]), None
            for task, status in task_ends(line):
                self.statuses.setdefault(task, status)

    def _new_lines(self) -> Iterator[str]:
        before = -1
        while before != self._offset:
            before = self._offset
            lines, self._offset = new_lines(self.path, before)
            yield from (line.decode(errors="replace") for line in lines)

    @property
    def waited_s(self) -> float:
        """How long srun has waited for a job step; 0 unless it says that it waits, which 22.05 does
        only after 10 s or 2 min."""
        return 0.0 if self.waits is None else self._now_s - self._since_s

    def fill_in(self, tasks: int, status: int) -> None:
        """srun has ended: record this status for the tasks that it did not report."""
        for task in range(tasks):
            self.statuses.setdefault(task, status)


def last_error(log: Path) -> str:
    """The last error line of srun."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return str(error)
    found = [line for line in lines if line.startswith(("srun: error: ", "srun: fatal: "))]
    return found[-1] if found else f"see {log}"


def task_ends(line: str) -> Iterator[tuple[int, int]]:
    """The tasks that a line says have ended, each with its status: 0 to 255, and 128 + N for one
    that died of signal N. Nothing for any other line."""
    match = _ENDED.fullmatch(line.rstrip("\n"))
    status = None if match is None else _status(match["how"])
    if match is not None and status is not None:
        for task in _numbers(match["tasks"]):
            yield task, status


def _status(how: str) -> int | None:
    if how == "Completed":
        return 0
    exited = _EXITED.fullmatch(how)
    if exited is not None:
        return int(exited[1])
    if _OUT_OF_MEMORY.search(how):
        return 128 + signal.SIGKILL
    number = _SIGNALS.get(how)
    return None if number is None else 128 + number


def _numbers(text: str) -> Iterator[int]:
    """``0-2,5``"""
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() or not dash):
            yield from range(int(first), int(last or first) + 1)
