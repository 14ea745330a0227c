"""What an elastic job is on Slurm: a small job for its coordinator, and arrays of one-node elements
that the coordinator submits.

    run folder/elastic/
      members.sbatch, base.sbatch   of an element: anywhere, and where the spec's base says
      options.json, key             for the coordinator, see hydroslurm.elastic.folder
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from hydroslurm.core.files import read_regular, write_atomically
from hydroslurm.core.rundir import RunDir
from hydroslurm.elastic.autoscale import AutoscalePolicy
from hydroslurm.elastic.folder import CoordinatorOptions, ElasticFolder
from hydroslurm.elastic.roster import Size
from hydroslurm.errors import RunFolderError, UsageError
from hydroslurm.jobs.launch.scripts import base_of, member_script
from hydroslurm.jobs.layout import ranks_of_agent
from hydroslurm.jobs.plan import ElasticPlan, Plan
from hydroslurm.jobs.spec.job import TrainingJob, of_restart
from hydroslurm.jobs.spec.reading import JobSpec
from hydroslurm.jobs.spec.source import path_text
from hydroslurm.slurm.client import open_client
from hydroslurm.slurm.policy import PreemptAction, find_partition, site_policy
from hydroslurm.slurm.programs import sbatch
from hydroslurm.slurm.values import Job, JobState

BESIDE = 2
"""Jobs beside the members: the coordinator's, and the one that cleans up."""
_NEVER_TAKEN = re.compile(
    r"(QOS|Assoc)\w*Limit|violates accounting/QOS policy|Invalid job array specification"
    r"|Invalid (qos|account|partition)|has exceeded"
)
"""What no time will heal; a partition that is down at the moment is no reason to refuse a job."""
_FIXES_OF_REFUSALS = (
    ("array", "lower elastic.size (MaxArraySize), and `hydroslurm scale` the job once it runs"),
    ("Invalid qos", "name another scheduler.qos (`sacctmgr show assoc user=$USER format=qos`)"),
    ("Invalid partition", "name another scheduler.partition (`sinfo -s`)"),
    ("Invalid account", "name another scheduler.account (`sacctmgr show assoc user=$USER`)"),
    (
        "",
        "lower elastic.size or spares, wait until jobs of yours have ended (`squeue --me`), or "
        "name another scheduler.qos or partition",
    ),
)


def of_one_member(spec: JobSpec) -> JobSpec:
    """The spec whose plan is that of one member, its engine chosen; any other spec as it is.

    Raises:
        UsageError: no engine does what it asks for.
    """
    if spec.job.elastic is None:
        return spec
    engine, why = choose_engine(spec)
    elastic = spec.job.elastic.of_agents() if engine == "restart" else spec.job.elastic
    elastic = elastic.model_copy(update={"size": spec.job.members, "engine": engine})
    one = spec.job.replica_specs[0].model_copy(update={"replicas": 1})
    job = spec.job.model_copy(update={"replica_specs": (one,), "elastic": elastic})
    if engine == "restart" and (wrong := list(of_restart(job, elastic))):
        listed = "; ".join(f"{path_text(one.path)}: {one.message}" for one in wrong)
        raise UsageError(f"engine: restart ({why}), and {listed}")
    return replace(spec, job=job, engine_why=why)


def choose_engine(spec: JobSpec) -> tuple[str, str]:
    """The engine of an elastic job, and why it is that, if that needs to be said.

    Raises:
        UsageError: the script shards its model, and the spec asks for an engine that cannot.
    """
    job = spec.job
    assert job.elastic is not None
    asked = job.elastic.engine
    name, sharding = _sharding_of(spec)
    if asked == "in_place" and sharding:
        raise UsageError(
            f"elastic.engine: {asked}, and {name} shards its model ({sharding}), so that no rank "
            "could give its weights to another: say engine: restart, which saves and starts the "
            "ranks again, train with DistributedDataParallel, or shard within each member with "
            "hydroslurm.elastic.State"
        )
    if asked != "auto":
        return asked, "the spec names it"
    if job.torchrun_config.enable:
        return "restart", "torchrunConfig.enable has agents that start the ranks"
    if sharding:
        return "restart", f"{name} shards its model ({sharding}): its weights are nowhere whole"
    return "in_place", ""


_SHARDING = re.compile(r"\b(?:fully_shard|FullyShardedDataParallel)\b")
_SHARDS_IN_MEMBERS = re.compile(r"\belastic\.State\b")
_SCRIPT_BYTES = 1 << 20


def _sharding_of(spec: JobSpec) -> tuple[str, str]:
    """The name of the Python script of a member, and by what it shards its model; "" if it does
    not, if each member has it whole, or if it cannot be read: a script that imports its model is
    not seen through."""
    template = spec.job.replica_specs[0].template
    words = (*template.command, *template.args)
    name = next((word for word in words if word.endswith(".py")), "")
    if not name:
        return "", ""
    try:
        path = spec.folder / (template.working_directory or "") / name
        text = read_regular(path, limit_bytes=_SCRIPT_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return name, ""
    code = "\n".join(line.partition("#")[0] for line in text.splitlines())
    found = None if _SHARDS_IN_MEMBERS.search(code) else _SHARDING.search(code)
    return name, found[0] if found else ""


def check(
    spec: JobSpec, plan: Plan, folder: Path, *, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Check that members could come and go here, before anything is submitted; return what the user
    should know.

    Args:
        spec: of one member, its engine chosen.
        folder: where its run folder will be.

    Raises:
        UsageError: they could not; the message says what to change.
        SlurmError: Slurm cannot be asked.
    """
    job = spec.job
    assert job.elastic is not None
    client = open_client(environ=environ)
    config, partitions = client.config(), client.partitions()
    notes = [f"engine: {job.elastic.engine} ({spec.engine_why})"] if spec.engine_why else []
    for name in _partitions_of(job):
        where = (
            find_partition(partitions, name)
            if name
            else next((one for one in partitions if one.is_default), None)
        )
        if where is None:
            continue
        planned = Job(job_id=0, state=JobState.PENDING, partition=where.name, is_batch=True)
        policy = site_policy(config, where, partitions=partitions, qoses=None, job=planned)
        if policy.action is PreemptAction.PAUSE:
            notes.append(
                f"partition {where.name} suspends preempted jobs ({policy.action_why}): a member "
                "that is suspended leaves, another one is submitted, and its own job is cancelled. "
                f"Where a step takes longer than the {config.suspend_grace_time_s:g} s until Slurm "
                "stops it, that step is repeated"
            )
        if len(where.nodes) < job.elastic.min:
            raise UsageError(
                f"elastic.min: {job.elastic.min} members of one node each, and partition "
                f"{where.name} has {len(where.nodes)} nodes; lower min, or name another partition"
            )
        wanted = job.members + job.elastic.spares
        if len(where.nodes) < wanted:
            notes.append(
                f"partition {where.name} has {len(where.nodes)} nodes: not all of {wanted} members "
                f"({job.elastic.spares} of them spares) can run there at once"
            )
    return (*notes, *_try_members(job, plan, folder, environ))


def _try_members(
    job: TrainingJob, plan: Plan, folder: Path, environ: Mapping[str, str]
) -> list[str]:
    """Check that Slurm would take the members and what runs beside them.

    The coordinator submits them later, one array after the other, where nobody looks. ``sbatch
    --test-only`` puts a submission through the same checks as a real one (seen on 22.05.8:
    ``QOSMaxSubmitJobPerUserLimit`` counts the user's other jobs, too) and keeps nothing of it.

    Raises:
        UsageError: it would not; the message has Slurm's words and says what to change.
        SlurmError: sbatch cannot be run.
    """
    elastic = job.elastic
    assert elastic is not None
    base = base_of(elastic)
    inside = elastic.min if base else 0
    extra = job.members + elastic.spares - inside
    notes: list[str] = []
    groups = [(base, inside + BESIDE), ({}, extra)] if base else [({}, extra + BESIDE)]
    for where, count in groups:
        said = _refusal(job, plan, folder, where, count, environ)
        if not said:
            continue
        if not _NEVER_TAKEN.search(said):
            notes.append(f"Slurm would not take the members now, it will be asked again: {said}")
            continue
        fix = next(fix for word, fix in _FIXES_OF_REFUSALS if word in said)
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
    return notes


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


def _partitions_of(job: TrainingJob) -> list[str]:
    """By name, "" for the default one."""
    assert job.elastic is not None
    named = [job.scheduler.partition or "", job.elastic.base.partition or ""]
    return list(dict.fromkeys(one for text in filter(None, named) for one in text.split(","))) or [
        ""
    ]


def prepare(job: TrainingJob, plan: Plan, run: RunDir) -> Plan:
    """Write what the coordinator needs; return the plan that it reads.

    Args:
        job: of one member, its engine chosen.

    Raises:
        RunFolderError: it cannot be written.
    """
    elastic = job.elastic
    assert elastic is not None
    folder = ElasticFolder(run=run.root)
    size = Size(min=elastic.min, max=elastic.max, wanted=job.members, spares=elastic.spares)
    has_base = bool(base_of(elastic))
    try:
        folder.make_key()
        options = CoordinatorOptions(
            batch=elastic.batch,
            ranks_each=ranks_of_agent(job, job.replica_specs[0].template) if job.has_agent else 1,
            summation=elastic.summation,
            engine="restart" if elastic.engine == "restart" else "in_place",
            averaging_every=elastic.averaging.every if elastic.averaging else 0,
            lr=elastic.lr,
            lr_warmup_steps=elastic.lr_warmup_steps,
            size=size,
            autoscale=_autoscale_of(job),
        )
        folder.write_options(options)
        for name, where in (("members", {}), ("base", base_of(elastic))):
            if name == "members" or has_base:
                script = member_script(job, plan, run, where)
                write_atomically(folder.root / f"{name}.sbatch", script, durable=True)
    except OSError as error:
        raise RunFolderError(f"cannot write {folder.root}: {error.strerror}") from error
    made = ElasticPlan(elastic.min if has_base else 0, elastic.exclude_after_failures)
    return replace(plan, elastic=made)


def _autoscale_of(job: TrainingJob) -> AutoscalePolicy | None:
    """The rules of autoscaling; None: people choose the size."""
    assert job.elastic is not None
    if job.elastic.autoscale is None:
        return None
    rules = job.elastic.autoscale.model_dump()
    rules["partition"] = rules["partition"] or job.scheduler.partition or ""
    return msgspec.convert(rules, AutoscalePolicy)
