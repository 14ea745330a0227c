"""What Slurm would say to the members of an elastic job, before anything is submitted.

Its coordinator submits them later, one array after the other, where nobody looks. ``sbatch
--test-only`` puts a submission through the same checks as a real one (seen on 22.05.8:
``QOSMaxSubmitJobPerUserLimit`` counts the user's other jobs, too) and keeps nothing of it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import UsageError
from hydroslurm.jobs.launch.elastic_job import member_script
from hydroslurm.jobs.launch.job_script import base_of
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.slurm.programs import sbatch

BESIDE = 2
"""Jobs beside the members: the coordinator's, and the one that cleans up."""
_REFUSED = re.compile(
    r"(QOS|Assoc)\w*Limit|violates accounting/QOS policy|Invalid job array specification"
    r"|Invalid (qos|account|partition)|has exceeded"
)
"""What no time will heal; a partition that is down at the moment is no reason to refuse a job."""
_FIXES = (
    ("array", "lower elastic.size, and `hydroslurm scale` the job once it runs"),
    ("Invalid qos", "name another scheduler.qos (`sacctmgr show assoc user=$USER format=qos`)"),
    ("Invalid partition", "name another scheduler.partition (`sinfo -s`)"),
    ("Invalid account", "name another scheduler.account (`sacctmgr show assoc user=$USER`)"),
    (
        "",
        "lower elastic.size or spares, wait until jobs of yours have ended (`squeue --me`), or "
        "name another scheduler.qos or partition",
    ),
)


def try_members(
    job: TrainingJob, plan: Plan, folder: Path, *, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Check that Slurm would take the members and what runs beside them; returns what the user
    should know.

    Raises:
        UsageError: it would not; the message has Slurm's words and says what to change.
        SlurmError: sbatch cannot be run.
    """
    elastic = job.elastic
    assert elastic is not None
    base = base_of(elastic)
    inside = elastic.min if base else 0
    extra = job.members + elastic.spares - inside
    notes = []
    groups = [(base, inside + BESIDE), ({}, extra)] if base else [({}, extra + BESIDE)]
    for where, count in groups:
        said = _refusal(job, plan, folder, where, count, environ)
        if not said:
            continue
        if not _REFUSED.search(said):
            notes.append(f"Slurm would not take the members now, it will be asked again: {said}")
            continue
        fix = next(fix for word, fix in _FIXES if word in said)
        raise UsageError(
            f"elastic: {job.members} members ({elastic.spares} spares, and {BESIDE} jobs beside "
            f"them) cannot be submitted here. Slurm says: {said}. So {fix}"
        )
    # limits may be those of one partition: whether both arrays share them is Slurm's to know
    together = job.members + elastic.spares + BESIDE
    for count, wanted in (
        (together, job.members),
        (together + elastic.max - job.members, elastic.max),
    ):
        if not notes and (said := _refusal(job, plan, folder, {}, count, environ)):
            notes.append(
                f"{wanted} members may be too many here, and some of them wait outside of the "
                f"queue. Slurm says of {count} jobs like theirs: {said}"
            )
    return tuple(notes)


def _refusal(
    job: TrainingJob,
    plan: Plan,
    folder: Path,
    where: dict[str, Any],
    count: int,
    environ: Mapping[str, str],
) -> str:
    """Slurm's words against so many elements, "" if it would take them."""
    if count < 1:
        return ""
    script = member_script(job, plan, RunDir(folder / "trial"), where)
    with tempfile.NamedTemporaryFile("w", prefix="hydroslurm-", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        done = sbatch(Path(file.name), "--test-only", f"--array=0-{count - 1}", environ=environ)
    if done.returncode == 0:
        return ""
    lines = [line.split("error: ")[-1].strip() for line in done.stderr.splitlines()]
    return ": ".join(line.removeprefix("allocation failure: ") for line in lines if line)
