"""Which nodes failures are blamed on, and how a job leaves such nodes. One rule for jobs of a fixed
size, elastic jobs and preflight checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from hydroslurm.core.fence import process_began_epoch_s
from hydroslurm.core.files import clean
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import SlurmError
from hydroslurm.jobs.supervisor.conditions import add_condition, read_conditions
from hydroslurm.jobs.supervisor.exit_policy import ExitDecision
from hydroslurm.runtime.autoload import say
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.programs import sbatch
from hydroslurm.slurm.stops import requeue

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
        before = client.excluded_nodes(job)
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
