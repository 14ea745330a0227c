"""The check of a job's nodes before its ranks start.

``python -m ... RUN_FOLDER [COMMAND ...]`` checks the node that it runs on, and becomes the command.
With ``--job`` in front it is a line of a script's batch script.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.core.files import clean, read_end
from hydroslurm.core.module_command import module_command
from hydroslurm.core.rundir import RunDir
from hydroslurm.jobs.plan import RunLimits
from hydroslurm.jobs.supervisor.bad_nodes import leave
from hydroslurm.jobs.supervisor.conditions import add_condition
from hydroslurm.jobs.supervisor.exit_policy import format_status
from hydroslurm.jobs.supervisor.job_step import TaskExits, last_error, start_step
from hydroslurm.runtime.autoload import PREEMPT_ENV, say
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import SlurmClient, open_client

WITHIN_S = 120.0
"""How long the check may take."""
CLOCKS_APART_S = 5.0
"""How far the clock of a node may be from the others'."""
_LAST_LINES = 3


def check_job(
    command: Sequence[str], run: RunDir, client: SlurmClient, allocation: Allocation,
    *, folder: str = ".", most: int = RunLimits.max_excluded_nodes,
) -> tuple[int, str]:  # fmt: skip
    """Check the nodes of the job that this process runs in, and have it requeued without those that
    fail.

    Args:
        command: what has to succeed on each node after the built-in checks; may be empty.
        folder: where it runs.
        most: how many nodes the job may leave out.

    Returns:
        The exit status for the batch script, 0 if the ranks may start, and why.
    """
    bad = _check_nodes(command, run, allocation.nodes, folder)
    if not bad:
        return 0, ""
    message = "; ".join(f"{node}: {why}" for node, why in list(bad.items())[:4])
    if not (why_not := leave(bad, run, client, allocation, most=most)):
        return RUN_AGAIN, message
    message += f"; the job cannot leave it: {why_not}"
    add_condition(run.conditions_jsonl, "Failed", reason="PreflightFailed", message=message)
    return MUST_NOT_RUN_AGAIN, message


def _check_nodes(
    command: Sequence[str], run: RunDir, nodes: Sequence[str], folder: str
) -> dict[str, str]:
    """Run the check on all nodes at once, as a job step; return node -> why it fails."""
    said = run.logs / "srun-preflight.log"
    said.unlink(missing_ok=True)
    step = start_step(
        ["srun", "-v", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
         "--kill-on-bad-exit=0", "--wait=0", "--open-mode=truncate",
         f"--output={str(run.logs).replace('%', '%%')}/preflight-%t.log",
         *node_command(command, run, folder)],
        environ={name: text for name, text in os.environ.items() if name != PREEMPT_ENV},
        log=said,
    )  # fmt: skip
    in_time = step.wait(WITHIN_S)
    step.end()
    exits = TaskExits(said)
    exits.look()
    if exits.step_id is None or (in_time and (step.status or 0) < 0):
        say(f"the nodes were not checked: {last_error(said)}")
        return {}
    bad, ahead_s = {}, {}
    for number, node in enumerate(nodes):
        status = exits.statuses.get(number)
        text = b""
        with contextlib.suppress(OSError):
            text = read_end(run.logs / f"preflight-{number}.log", most_bytes=1 << 20)
        clock, *lines = [
            clean(line, most=200) for line in text.decode(errors="replace").split("\n")
        ]
        if status == 0:
            with contextlib.suppress(ValueError):  # the command may write there, too
                ahead_s[node] = float(clock)
        elif status != 128 + signal.SIGTERM:  # a preemption has ended it
            how = "no end" if status is None else f"exit status {format_status(status)}"
            late = "" if in_time else f" within {WITHIN_S:.0f} s"
            bad[node] = "; ".join(
                [f"preflight: {how}{late}", *filter(None, lines[-_LAST_LINES - 1 :])]
            )
    return bad | wrong_clocks(ahead_s)


def wrong_clocks(ahead_s: Mapping[str, float]) -> dict[str, str]:
    """The nodes whose clocks are far from the others', by how far each is ahead of the file
    system's: so it does not matter when they have begun."""
    middle_s = sorted(ahead_s.values())[(len(ahead_s) - 1) // 2] if ahead_s else 0.0
    return {
        node: f"preflight: its clock is {one_s - middle_s:+.0f} s from the other nodes'"
        for node, one_s in ahead_s.items()
        if abs(one_s - middle_s) > CLOCKS_APART_S
    }


def node_command(command: Sequence[str], run: RunDir, folder: str) -> list[str]:
    """The rest of an srun command that checks a node."""
    module = "hydroslurm.jobs.supervisor.preflight"
    return [f"--chdir={folder}", *module_command(sys.executable, module, str(run.root), *command)]


def check_node(root: Path, environ: Mapping[str, str]) -> str:
    """Why ranks cannot train on this node; "" if nothing is found. First prints how far its clock
    is ahead of the file system's, in seconds."""
    data = os.urandom(1 << 16)
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix="preflight-") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            print(f"{time.time() - os.fstat(file.fileno()).st_mtime:.3f}", flush=True)
            if Path(file.name).read_bytes() != data:
                return f"a file in {root} holds other bytes than were written"
    except OSError as error:
        return f"no file in {root} can be written and read: {error.strerror}"
    wanted_mib = int(environ.get("SLURM_MEM_PER_NODE") or 0)
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_mib = int(lines["MemAvailable"].split()[0]) >> 10
    if free_mib < wanted_mib:
        return f"{free_mib} MiB of memory are free, and the job has asked for {wanted_mib} MiB"
    return _gpu_problem(environ)


def _gpu_problem(environ: Mapping[str, str]) -> str:
    """Whether the job's GPUs answer and are idle, by nvidia-smi, which is NVML's program."""
    wanted = int(environ.get("SLURM_GPUS_ON_NODE") or 0)
    if not wanted or shutil.which("nvidia-smi") is None:
        return ""
    own = [f"--id={ids}"] if (ids := environ.get("CUDA_VISIBLE_DEVICES")) else []
    gpus, busy = (
        subprocess.run(
            ["nvidia-smi", *own, "--format=csv,noheader", f"--query-{what}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        ).stdout.strip()
        for what in ("gpu=uuid", "compute-apps=gpu_uuid,pid,used_memory")
    )  # fmt: skip
    if (found := sum(line.startswith("GPU-") for line in gpus.splitlines())) < wanted:
        return f"{found} of {wanted} GPUs answer: {clean(gpus)}"
    return f"a GPU is in use: {clean(busy)}" if busy else ""


def main(arguments: list[str]) -> int:
    if arguments[0] == "--job":
        signal.signal(signal.SIGTERM, lambda *_: None)  # comes while the requeue is under way
        allocation = Allocation.from_environ(os.environ)
        assert allocation is not None, "this is a line of a batch script"
        run, client = RunDir(Path(arguments[1])), open_client(environ=os.environ)
        status, message = check_job(arguments[2:], run, client, allocation)
        if status:
            say(message)
        return status
    root, *command = arguments
    problem = check_node(Path(root), os.environ)
    if command and not problem:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            problem = f"{command[0]} cannot be run: {error.strerror}"
    if problem:
        print(f"hydroslurm: preflight failed: {problem}")
    return bool(problem)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
