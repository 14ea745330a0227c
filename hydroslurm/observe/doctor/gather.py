"""Collect the facts for a diagnosis from Slurm and a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hydroslurm.checkpoint.storage import AnyonesStorage
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.files import clean
from hydroslurm.core.jobid import JobId
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import CheckpointError, UntrustedFile, UsageError
from hydroslurm.observe.doctor.facts import Facts, SaveFacts, Saver, VacateFacts
from hydroslurm.observe.doctor.script import ScriptOptions, read_script
from hydroslurm.observe.find import find_job
from hydroslurm.observe.job import JobView
from hydroslurm.observe.training import Training, ranks_dir_of
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.munge import Munge, MungeError, socket_of
from hydroslurm.slurm.policy import find_partition, site_policy
from hydroslurm.slurm.stops import requested_warnings
from hydroslurm.slurm.values import Job, JobState
from hydroslurm.training.cadence import Cadence


def gather(
    client: SlurmClient,
    *,
    job_id: JobId | None = None,
    partition: str = "",
    qos: str = "",
    script: ScriptOptions | None = None,
    run: Path | None = None,
) -> Facts:
    """Collect what Slurm and a run folder say about a job, or about a partition for a planned one.

    Args:
        partition: "" for the default one; not together with a job.
        script: of a planned job; an existing job's comes from Slurm, if readable.
        run: the run folder; None: that of the job.

    Raises:
        SlurmError: Slurm did not answer.
        UsageError: the partition is unknown, a job is combined with what it has itself, or the id
            means all elements of an array.
    """
    if job_id is not None and script is not None:
        raise UsageError("give either a job or --script: a job has its own")
    if job_id is not None and (partition or qos):
        raise UsageError("give either a job or --partition and --qos: a job has its own")
    job = None if job_id is None else find_job(client, job_id)
    config = client.config()
    partitions = client.partitions()
    chosen = find_partition(partitions, job.partition if job else partition)
    by_qos = config.preempt_type == "preempt/qos"
    qoses = client.qoses() if by_qos else None
    name = (job.qos if job else qos) or ("normal" if by_qos else "")
    policy = site_policy(config, chosen, partitions=partitions, qos=name, qoses=qoses, job=job)
    folder = None if run is None else RunDir(run)
    if job is not None:
        read = () if folder is None else (Training(folder).read(),)
        view = JobView(folder or ranks_dir_of(job), job, followed=read)
        folder = view.run
    return Facts(
        config=config,
        policy=policy,
        partition=chosen,
        qos=name,
        job=job,
        script=_script_of(client, job) if job else script,
        untrusted=why_untrusted(run, shared=True),
        shared=why_untrusted(run, shared=False),
        saver=Saver.UNKNOWN if job is None else saver_of(view),
        save=None if folder is None else last_save(folder.root),
        vacate=slowest_vacate(folder),
    )


def slowest_vacate(run: RunDir | None) -> VacateFacts | None:
    """Return the slowest vacate among a run's ranks; None if none has vacated."""
    moves: list[tuple[float, int]] = []
    try:
        for path in run.rank_event_files().values() if run is not None else ():
            for event in read_events(path, kinds=(EventKind.VACATED,)):
                moved_bytes, took_s = event.data.get("moved_bytes"), event.data.get("moved_s")
                if moved_bytes and took_s:
                    moves.append((moved_bytes / took_s, moved_bytes))
    except OSError:
        return None
    if not moves:
        return None
    rate = min(moves)[0]
    return VacateFacts(
        device_bytes=max(size_bytes for _, size_bytes in moves),
        bytes_per_s=rate,
        source=f"the slowest of {len(moves)} in its events",
    )


def saver_of(view: JobView) -> Saver:
    """Return what would save a job at a stop. A Run of an earlier attempt counts, since this one
    may not have reached it yet."""
    if view.saver:
        return Saver.RUN if view.saver == "attempt_began" else Saver.TWO_CALLS
    is_unread = view.problem is not None or any(view.silent)
    if is_unread or view.job.state not in (JobState.RUNNING, JobState.SUSPENDED):
        return Saver.UNKNOWN
    here = any(rank.job_id == view.job.job_id for rank in view.present)
    return Saver.NO_RUN if here else Saver.NOBODY


def why_no_munge(environ: Mapping[str, str]) -> str:
    """Explain why ranks on this machine get no key from MUNGE; empty if they do."""
    try:
        Munge(socket_of(environ)).encode(b"")
    except MungeError as error:
        return str(error)
    return ""


def why_untrusted(run: Path | None, *, shared: bool) -> str:
    """Explain why a run folder is not trusted; empty if it is. ``shared``: by the rules for jobs,
    which allow shared parent folders."""
    try:
        if run is not None:
            check_trusted(run, what="the run folder", shared=shared)
    except OSError as error:
        return str(error)
    except UntrustedFile as error:
        return str(error).partition(" is not used: ")[2]
    return ""


def read_file(path: Path) -> ScriptOptions:
    """Read the batch script of a planned job.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return read_script(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--script {path}: {error}; wanted a batch script") from error


def last_save(run: Path) -> SaveFacts | None:
    """Return how long a run's newest committed checkpoint took to save; None without one.

    Skips what cannot be read: `hydroslurm checkpoint verify` reports it.
    """
    store = CheckpointStore(RunDir(run).checkpoints, storage=AnyonesStorage())
    try:
        newest = next(reversed(store.committed()), None)
    except CheckpointError:
        return None
    if newest is None:
        return None
    return SaveFacts(
        save_s=newest.manifest.save_s,
        state_bytes=newest.manifest.state_bytes,
        source=clean(f"the {newest.kind} checkpoint of step {newest.step}"),
        cadence=Cadence.of(newest.manifest.meta),
    )


def _script_of(client: SlurmClient, job: Job) -> ScriptOptions | None:
    text = None if job.is_batch is False else client.batch_script(job)
    if text is None:
        return None
    known = [warning for warning in requested_warnings(client, job, {}) if warning.signal]
    return replace(read_script(text), warning=known[0] if known else None)
