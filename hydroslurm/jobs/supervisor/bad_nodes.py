"""Bad nodes: which failures are a node's fault, how a job leaves such a node, and the check of all
its nodes before the ranks start. One rule for jobs of a fixed size, scripts and elastic jobs.

``python -m ... --node RUN_FOLDER [COMMAND ...]`` checks the node that it runs on, and becomes the
command. Without ``--node`` it is a line of a script's batch script and checks all nodes of the job.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.core.fence import process_began_epoch_s
from hydroslurm.core.files import clean, read_end
from hydroslurm.core.proc import module_command
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import SlurmError
from hydroslurm.jobs.plan import RunLimits
from hydroslurm.jobs.supervisor.conditions import add_condition, read_conditions
from hydroslurm.jobs.supervisor.exit_policy import ExitDecision, format_status
from hydroslurm.jobs.supervisor.job_step import TaskExits, last_error, start_step
from hydroslurm.runtime.autoload import PREEMPT_ENV, say
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import SlurmClient, open_client
from hydroslurm.slurm.programs import sbatch
from hydroslurm.slurm.stops import requeue

NODE = "--node"
WITHIN_S = 120.0
"""How long the check of all nodes may take."""
CLOCK_OFF_S = 5.0
"""How far a node's clock may be from that of the file system."""
IN_A_ROW = 2
"""So many failures in a row on one node, and none elsewhere, are that node's fault."""
NODE_EXCLUDED = "NodeExcluded"
"""The reason of the condition that names a node which is left out."""
_OF_THE_NODE = re.compile(
    r"uncorrectable (?:\w+ )?ECC|\bXid\b|fallen off the bus|GPU is lost|NVLink error"
    r"|no CUDA-capable device|CUDA-capable device\(s\) is/are busy|system not yet initialized"
    r"|ncclSystemError|unhandled system error|hydroslurm: preflight failed"
    r"|No space left on device: b?'/(?:tmp|var/tmp|dev/shm|scratch|local)\b",
    re.IGNORECASE,
)
"""What is a node's fault where no other node says it. ENOSPC counts on its own disks alone."""


def cause_in(lines: Iterable[bytes]) -> str:
    """The last line that tells of a fault of the node; "" if there is none."""
    texts = (line.decode(errors="replace").strip() for line in lines)
    found = [text for text in texts if _OF_THE_NODE.search(text)]
    return clean(found[-1], most=200) if found else ""


def blamed(ends: Sequence[ExitDecision | None], *, in_a_row: int = IN_A_ROW) -> dict[str, str]:
    """The nodes that the last of these ends is blamed on, each with the reason. Pure.

    A script's bug fails on one node after the other, so a failure without a plain cause is blamed
    on a node only while no other node has failed in the same row.

    Args:
        ends: of attempts or members, oldest first; None for one without failure, which ends a row.
    """
    row = [end for end in takewhile(lambda end: end is not None, reversed(ends)) if end]
    if not row:
        return {}
    if row[0].cause:
        return dict.fromkeys(row[0].failed_on, row[0].cause)
    nodes = {node for end in row for node in end.failed_on}
    count = len(list(takewhile(lambda end: end.failed_on, row)))
    why = f"{count} failures in a row there, and none elsewhere; the last: {row[0].message}"
    return dict.fromkeys(nodes, why) if len(nodes) == 1 and count >= in_a_row else {}


def leave(
    bad: Mapping[str, str], run: RunDir, client: SlurmClient, allocation: Allocation, *, most: int
) -> str:
    """Requeue the job of this process without some of its nodes; return why it must not, or "".

    Slurm changes ExcNodeList of waiting jobs only, and does not start this one before this process
    has ended. Where Slurm does not answer, the batch script requeues the job for status 75.

    Args:
        bad: node -> why.
        most: how many nodes the job may leave out.

    Raises:
        StaleAttempt: Slurm has started the job again since.
        RunFolderError: the run folder cannot be written.
    """
    earlier = [one for one in read_conditions(run.conditions_jsonl) if one.reason == NODE_EXCLUDED]
    starts = [one.restart_count + 1 for one in earlier]
    is_elsewhere = len(allocation.nodes) > 1 or allocation.restart_count in starts
    if len(bad) == len(allocation.nodes) and is_elsewhere:
        return "it fails on every node, so that none is to blame"
    if len(earlier) + len(bad) > most:
        return f"runPolicy.maxExcludedNodes is {most}, and {len(earlier)} are left out already"
    try:
        job = client.job(allocation.job_id)
        before = job.excluded_nodes
        names = ",".join(filter(None, [before, *bad]))
        # what Slurm checks of a submission counts constraints and nodes that are down, too
        tried = sbatch(run.job_sbatch, "--test-only", f"--exclude={names}")
        if tried.returncode != 0:
            return f"the job could not start elsewhere: {tried.stderr.strip()}"
        for node, why in bad.items():
            message = (
                f"node {node} is left out from now on: {why}. While the job waits, `scontrol "
                f"update JobId={job.id} ExcNodeList={before}` undoes it"
            )
            count = allocation.restart_count
            add_condition(
                run.conditions_jsonl, "Restarting", reason=NODE_EXCLUDED, message=message,
                restart_count=count,
            )  # fmt: skip
        requeue(client, allocation, began_epoch_s=process_began_epoch_s(), job=job)
        client.exclude_nodes(job, names)
    except SlurmError as error:
        say(f"the job may start on {', '.join(bad)} again: {error}")
    return ""


# --- the check before an attempt


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
    bad = _failing_nodes(command, run, allocation.nodes, folder)
    if not bad:
        return 0, ""
    message = "; ".join(f"{node}: {why}" for node, why in list(bad.items())[:4])
    if not (why_not := leave(bad, run, client, allocation, most=most)):
        return RUN_AGAIN, f"{message}. The job goes back into the queue, without {', '.join(bad)}"
    message += f"; the job ends: {why_not}"
    add_condition(run.conditions_jsonl, "Failed", reason="PreflightFailed", message=message)
    return MUST_NOT_RUN_AGAIN, message


def _failing_nodes(
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
    bad = {}
    for number, node in enumerate(nodes):
        status = exits.statuses.get(number)
        if status in (0, 128 + signal.SIGTERM):  # a preemption has ended it
            continue
        late = f"no end within {WITHIN_S:.0f} s"
        how = late if status is None else f"exit status {format_status(status)}"
        text = b""
        with contextlib.suppress(OSError):
            text = read_end(run.logs / f"preflight-{number}.log", most_bytes=1 << 16)
        last = text.decode(errors="replace").strip().splitlines()[-3:]
        bad[node] = "; ".join([f"preflight: {how}", *(clean(line, most=200) for line in last)])
    return bad


def node_command(command: Sequence[str], run: RunDir, folder: str) -> list[str]:
    """The rest of an srun command that checks a node."""
    module = "hydroslurm.jobs.supervisor.bad_nodes"
    words = module_command(sys.executable, module, NODE, str(run.root), *command)
    return [f"--chdir={folder}", *words]


def check_node(root: Path, environ: Mapping[str, str]) -> str:
    """Why ranks cannot train on this node; "" if nothing is found."""
    data = os.urandom(1 << 16)
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix="preflight-") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            ahead_s = time.time() - os.fstat(file.fileno()).st_mtime
            if Path(file.name).read_bytes() != data:
                return f"a file in {root} holds other bytes than were written"
    except OSError as error:
        return f"no file in {root} can be written and read: {error.strerror}"
    if abs(ahead_s) > CLOCK_OFF_S:
        return f"its clock is {ahead_s:+.0f} s from that of the file system of {root}"
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
    if arguments[0] == NODE:
        return _become(Path(arguments[1]), arguments[2:])
    signal.signal(signal.SIGTERM, lambda *_: None)  # comes while the requeue is under way
    allocation = Allocation.from_environ(os.environ)
    assert allocation is not None, "this is a line of a batch script"
    run, client = RunDir(Path(arguments[0])), open_client(environ=os.environ)
    status, message = check_job(arguments[1:], run, client, allocation)
    if status:
        say(message)
    return status


def _become(root: Path, command: list[str]) -> int:
    """Check this node, then exec the command, if there is one."""
    problem = check_node(root, os.environ)
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
