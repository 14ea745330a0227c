"""Submit a TrainingJob: its run folder, its batch script, and a second job that cleans up after it.

    run folder/
      job.yaml      the resolved spec
      plan.json     what each task runs (holds the environment: 0600, in a folder of 0700)
      conditions.jsonl, starts.jsonl how it went: see hydroslurm.jobs.supervisor

The batch script (:mod:`hydroslurm.jobs.launch.scripts`) runs the supervisor, without srun; the
supervisor starts the job step with the ranks. No string of the spec is part of a shell command:
what sbatch gets is checked to be one harmless word, and the tasks read all the rest from plan.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hydroslurm.core.files import fsync_together, write_atomically
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import LaunchError, MaybeSubmitted, RunFolderError
from hydroslurm.jobs.images import Runtime, find_runtime, no_runtime
from hydroslurm.jobs.launch.sbatch import new_submission, refuse_hopeless, submit_script
from hydroslurm.jobs.launch.scripts import janitor_script, job_script
from hydroslurm.jobs.layout import plan_job
from hydroslurm.jobs.plan import Plan, Submission, write_submission
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.spec.reading import JobSpec, dumps
from hydroslurm.jobs.supervisor.conditions import (
    Condition,
    add_condition,
    final_condition,
    read_conditions,
)

_LOOK_S = 0.5


@dataclass(frozen=True)
class SubmittedJob:
    """A TrainingJob that Slurm has accepted.

    Attributes:
        job_id: Slurm's.
        run: its run folder.
        notes: sentences for the user.
    """

    job_id: int
    run: RunDir
    notes: tuple[str, ...]


def plan_for(spec: JobSpec, *, environ: Mapping[str, str]) -> tuple[Plan, tuple[str, ...]]:
    """The plan for this cluster, and what the user should know about it.

    Raises:
        LaunchError: there is an image, but nothing to run it with.
        UsageError: as :func:`plan_job`.
    """
    images = sorted({one.template.image for one in spec.job.replica_specs if one.template.image})
    runtime = find_runtime(environ) if images else None
    left_out = list(spec.meaningless)
    if images and runtime is None:
        if not spec.is_manifest:
            raise no_runtime(images[0])
        left_out.append(
            f"image {', '.join(images)} (this cluster cannot run containers; the commands run on "
            f"the nodes, with {sys.executable})"
        )
    plan = plan_job(
        spec.job, folder=spec.folder, python=sys.executable, use_images=runtime is not None
    )
    if runtime is Runtime.PYXIS and len({task.image for task in plan.tasks}) > 1:
        raise LaunchError("with pyxis, all replicas of a job need the same image")
    if runtime is not None:
        plan = replace(plan, runtime=runtime.value)
    if not left_out:
        return plan, ()
    listed = "".join(f"\n  {one}" for one in left_out)
    return plan, (f"these fields have no effect on this Slurm and are ignored:{listed}",)


def submit_job(spec: JobSpec, *, folder: Path, environ: Mapping[str, str]) -> SubmittedJob:
    """Submit a job.

    Args:
        spec: what to run.
        folder: where its run folder is created; all nodes must see it.

    Raises:
        LaunchError: sbatch refused it, it could never start, or an image cannot be run; no run
            folder is left.
        MaybeSubmitted: sbatch did not confirm it; the run folder holds the request.
        RunFolderError: the run folder cannot be created.
        UsageError: members of an elastic job could not come and go here.
    """
    if spec.job.elastic is not None:  # all others are submitted sooner without these imports
        from hydroslurm.jobs.launch import elastic_job

        spec = elastic_job.of_one_member(spec)
    plan, notes = plan_for(spec, environ=environ)
    if spec.job.elastic is not None:
        notes = (*notes, *elastic_job.check(spec, plan, folder.absolute(), environ=environ))
    with new_submission(folder.absolute(), spec.job.name) as run:
        if spec.job.elastic is not None:
            plan = elastic_job.prepare(spec.job, plan, run)
        intent = _intent(spec.job, plan)
        _record(run, spec, plan, intent)
        try:
            job_id = _submit(job_script(spec.job, plan, run), run.job_sbatch, run)
        except MaybeSubmitted as error:
            add_condition(
                run.conditions_jsonl, "Failed", reason="SubmissionRefused", message=str(error)
            )
            raise
    try:
        write_submission(run, replace(intent, job_id=str(job_id)))
        add_condition(run.conditions_jsonl, "Queued", reason="Pending", message=f"as job {job_id}")
    except RunFolderError as error:
        notes = (*notes, f"Slurm has job {job_id}, but its run folder does not say so: {error}")
    janitor = None
    try:
        janitor = _submit(janitor_script(spec.job, run, job_id), run.janitor_sbatch, run)
    except (LaunchError, RunFolderError) as error:
        notes = (*notes, f"the job that cleans up after it could not be submitted: {error}")
    else:
        notes = (*notes, f"job {janitor} cleans up after it, however it ends")
    refuse_hopeless(job_id, run, janitor_id=janitor)
    return SubmittedJob(job_id, run, notes)


def wait_for_end(job: SubmittedJob) -> Condition:
    """Wait until a job has Succeeded or Failed, over its requeues.

    Reads only the run folder: the supervisor writes how the job ended, or the janitor if that could
    not.
    """
    while True:
        found = final_condition(read_conditions(job.run.conditions_jsonl))
        if found is not None:
            return found
        time.sleep(_LOOK_S)


def _intent(job: TrainingJob, plan: Plan) -> Submission:
    is_elastic = job.elastic is not None
    return Submission(
        job.name,
        f"TrainingJob of {len(plan.tasks)} tasks{' a member' if is_elastic else ''}",
        replicas=job.members if is_elastic else job.replicas,
        backoff_limit=job.run_policy.backoff_limit,
    )


def _record(run: RunDir, spec: JobSpec, plan: Plan, intent: Submission) -> None:
    """Write what the job needs to run, and what finds it again; durable when this returns. Not the
    batch script: sbatch has its own copy.

    Raises:
        RunFolderError: the run folder cannot be written.
    """
    _write(run.job_yaml, dumps(_resolved(spec)))
    _write(run.plan_json, plan.dumps())
    write_submission(run, intent, durable=False)
    log, where = run.conditions_jsonl, str(spec.folder)
    add_condition(log, "Created", reason="Submitted", message=where, durable=False)
    if spec.job.preemption.checkpoint_directory is not None:
        _link_checkpoints(run, spec.folder / spec.job.preemption.checkpoint_directory)
    try:
        fsync_together((run.job_yaml, run.plan_json, run.submission_json, log, run.root))
    except OSError as error:
        raise RunFolderError(f"cannot write {run.root}: {error.strerror}") from error


def _resolved(spec: JobSpec) -> TrainingJob:
    """The job without paths relative to the folder of the spec, which the supervisor does not
    know."""
    board = spec.job.tensorboard
    if board is None:
        return spec.job
    absolute = str(spec.folder / board.log_directory)
    board = board.model_copy(update={"log_directory": absolute})
    return spec.job.model_copy(update={"tensorboard": board})


def _submit(script: str, path: Path, run: RunDir) -> int:
    _write(path, script)
    return submit_script(path, run)


def _link_checkpoints(run: RunDir, directory: Path) -> None:
    """Keep checkpoints elsewhere; a later job with the same folder resumes from them."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        run.checkpoints.symlink_to(directory)
    except OSError as error:
        raise RunFolderError(
            f"preemption.checkpointDirectory {directory} cannot be used: {error.strerror}"
        ) from error


def _write(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error
