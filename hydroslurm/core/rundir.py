"""The only module that spells paths inside a run folder.

<run folder>/
  job.sbatch, submission.json  what was submitted (an intent line before sbatch, the id after)
  job.yaml, plan.json          of a TrainingJob: the resolved spec, and what each task runs
  conditions.jsonl             what became of it, and when
  starts.jsonl                 each start of its replicas, and how it ended
  active.json                  how long it has held its nodes
  tensorboard.json             where its TensorBoard answers, while it does
  scratch/worker-2/            a replica's own, removed by cleanPolicy All
  events/rank-00000.jsonl      everything that happened, both clocks, in order
  events/rank-00000.json       where it is now: replaced at changes and every few seconds
  events/rank-00000.vacate       that a pause is to free the device: see vacate/request.py
  events/agent-00000.jsonl     the same of a node's agent, above torchrun's ranks
  events/told-123              job 123 was warned that nothing saves its work
  checkpoints/step-000001234/  what was saved; there from its commit on, and not before
  checkpoints/step-000001234.2/  the same step, saved again: the newer one
  job.json                     of a default folder (run_folders.py): its job and its command line
  start-0.json, start-0.2.json  who has taken it in the job's first start, one after the other
  claim.json                   the newest attempt: no older one writes here any more
  attempts.jsonl               one line when an attempt begins, one when it ends, and why
  finished.json                the training is done, and its process ended well: a restart leaves
  fused/rank-00000.json        which modules this rank replaced by fused ones
  logs/                        submitit's files and stdout/stderr per task, appended over requeues
  profile/                     nsys reports: rank-0-restart-0.nsys-rep
  report/                      figures.json, timeline.png, histograms.png, report.html, trace.json
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import RunFolderError, UntrustedFile

RUN_DIR_ENV = "HYDROSLURM_RUN_DIR"
"""Environment variable that names the run folder to a rank."""
RUN_OF_ENV = "HYDROSLURM_RUN_OF"
"""Environment variable, ``JOBID:FOLDER``: whose that folder is, where we have named it. A job that
is submitted from inside inherits both."""

# what the supervisor of a TrainingJob tells its ranks
SUPERVISED_ENV = "HYDROSLURM_SUPERVISED"
"""1: the supervisor counts the failures of this job."""
SAVE_EVERY_ENV = "HYDROSLURM_SAVE_EVERY_S"
"""Seconds between two saves, above what the script says."""
ATTEMPT_ENV = "HYDROSLURM_ATTEMPT"
"""The number of this attempt, from 1. A Run takes it for its own where no later one is recorded."""
ATTEMPTS_ENV = "HYDROSLURM_ATTEMPTS_WITHOUT_PROGRESS"
"""How many attempts in a row may begin at the same step, above what the script says."""

# what the agent of a member of an elastic run tells its workers
ELASTIC_ENV = "HYDROSLURM_ELASTIC"
"""The run folder of the elastic run that this process is to train in."""
GENERATION_ENV = "HYDROSLURM_GENERATION"
"""The generation that they are started for, from 1. They stop and save for the next one: nobody
requeues their job, and the coordinator counts what goes wrong."""

_NAMED = re.compile(r"(?:^|\s)hydroslurm:(/\S.*)$")
_MEMBER_OF = re.compile(r"(?:^|\s)hydroslurm-member:(/\S.*)$")
_RANK_FILE = re.compile(r"rank-([0-9]{5,7})\.jsonl?")


class Rooted(Protocol):
    """Has a folder."""

    @property
    def root(self) -> Path: ...


class Below:
    """Declares the path of this name below an object's ``root``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Rooted, _: type[Rooted]) -> Path:
        return owner.root / self._name


@dataclass(frozen=True)
class RunDir:
    """The paths of one run. Making the value touches no disk."""

    root: Path

    submission_json = Below("submission.json")
    job_sbatch = Below("job.sbatch")
    janitor_sbatch = Below("janitor.sbatch")
    """Of the job that cleans up after a TrainingJob."""
    job_yaml = Below("job.yaml")
    plan_json = Below("plan.json")
    conditions_jsonl = Below("conditions.jsonl")
    starts_jsonl = Below("starts.jsonl")
    active_json = Below("active.json")
    tensorboard_json = Below("tensorboard.json")
    tensorboard_log = Below("logs/tensorboard.log")
    scratch = Below("scratch")
    events = Below("events")
    elastic = Below("elastic")
    """Of an elastic run: what its coordinator keeps, see :mod:`hydroslurm.elastic.folder`."""
    checkpoints = Below("checkpoints")
    job_json = Below("job.json")
    """The job that a default folder belongs to."""
    claim_json = Below("claim.json")
    """Which attempt holds the folder."""
    attempts_jsonl = Below("attempts.jsonl")
    finished_json = Below("finished.json")
    logs = Below("logs")
    report = Below("report")
    profile = Below("profile")
    """Reports of nsys, one per rank and attempt."""
    timeline_png = Below("report/timeline.png")
    histograms_png = Below("report/histograms.png")
    report_html = Below("report/report.html")
    trace_json = Below("report/trace.json")
    """For ui.perfetto.dev."""
    figures_json = Below("report/figures.json")

    def srun_log(self, attempt: int) -> Path:
        """srun's own output in one attempt."""
        return self.logs / f"srun-{attempt:06d}.log"

    def task_log(self, task: int) -> Path:
        """Output of one task of a TrainingJob, over all attempts."""
        return self.logs / f"task-{task}.log"

    def from_epoch(self, epoch: int) -> RunDir:
        """The run of a job that went back to an epoch of this one."""
        return RunDir(self.root / f"from-epoch-{epoch:09d}")

    def numbered(self, number: int) -> RunDir:
        """Of a job's first default folder: that of its n-th training."""
        return self if number == 1 else RunDir(self.root.with_name(f"{self.root.name}.{number}"))

    def start_json(self, restart_count: int, holder: int) -> Path:
        """The n-th training that has taken a default folder in one start of its job."""
        number = "" if holder == 1 else f".{holder}"
        return self.root / f"start-{restart_count}{number}.json"

    def fused(self, rank: int) -> Path:
        """The choices of optimize_modules() on this rank."""
        return self.root / "fused" / f"rank-{rank:05d}.json"

    def rank_events(self, rank: int) -> Path:
        return self.events / f"rank-{rank:05d}.jsonl"

    def rank_event_files(self) -> dict[int, Path]:
        """Rank -> event file, for those that exist, in order of rank.

        Raises:
            OSError: the folder is there, and cannot be listed.
        """
        return {rank: Path(name) for rank, name in self._rank_names(".jsonl").items()}

    def rank_status(self, rank: int) -> Path:
        return self.events / f"rank-{rank:05d}.json"

    def rank_status_names(self) -> dict[int, str]:
        """Rank -> path of its status file; as :meth:`rank_event_files`, for those who read many."""
        return self._rank_names(".json")

    def _rank_names(self, suffix: str) -> dict[int, str]:
        events = str(self.events)
        try:
            names = [entry.name for entry in os.scandir(events)]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {
            int(match[1]): f"{events}/{name}"
            for name in names
            if name.endswith(suffix) and (match := _RANK_FILE.fullmatch(name))
        }
        return dict(sorted(found.items()))

    def told(self, job_id: int) -> Path:
        """Exists once a job was warned of what a preemption would cost."""
        return self.events / f"told-{job_id}"

    def agent_events(self, node: int) -> Path:
        """Of ``hydroslurm agent`` on one node."""
        return self.events / f"agent-{node:05d}.jsonl"

    def create(self) -> RunDir:
        """Make the folder and its parts, readable by the owner only (0700).

        Raises:
            RunFolderError: when one of them cannot be made, or is not ours: as :meth:`check`.
        """
        try:
            _make_folder(self.root, mode=0o700)
            for part in (self.events, self.logs):
                part.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"cannot make the run folder {self.root}: {_reason(self.root, error)}. "
                f"Name one that every node can write, by hydroslurm submit --folder, {RUN_DIR_ENV} "
                "or Run(directory=...)"
            ) from error
        self.check()
        return self

    def claim(self, *, mode: int = 0o700) -> RunDir:
        """Make the folder without its parts, if possible, and check that it is ours.

        Args:
            mode: 0o775 for one that the user has named, whose umask then says who may look.

        Raises:
            RunFolderError: as :meth:`check`.
        """
        with contextlib.suppress(OSError):  # who writes there first has the better message
            _make_folder(self.root, mode=mode)
        self.check()
        return self

    def check(self) -> None:
        """Require that what is there of it is ours, so that a rank may obey it.

        The name of a default folder can be guessed, and made beforehand where the working directory
        is everybody's: with a ``finished.json`` that ends the job, checkpoints to resume, or links
        that lead our writing elsewhere.

        Raises:
            RunFolderError: the folder or a part of it is somebody else's, or anybody could replace
                it; a group's folders above it are taken (:func:`check_trusted`, ``shared``).
        """
        for part in (self.root, self.events, self.logs, self.checkpoints):
            try:
                check_trusted(part, what="the run folder", shared=True)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise RunFolderError(
                    f"the run folder {self.root}: {_reason(part, error)}"
                ) from error
            except UntrustedFile as error:
                raise RunFolderError(
                    f"{error}. {RUN_DIR_ENV} or Run(directory=...) names another run folder"
                ) from error


def _reason(path: Path, error: OSError) -> str:
    """Why a folder cannot be there: above all the file that is in its place."""
    file = next((one for one in (path, *path.parents) if one.is_file()), None)
    return f"{error.strerror}" if file is None else f"{file} is a file; wanted a folder"


def _make_folder(path: Path, *, mode: int) -> None:
    """With those above it: a group's where the umask says so, and never everybody's."""
    try:
        path.mkdir(mode=mode, exist_ok=True)
    except FileNotFoundError:
        _make_folder(path.parent, mode=0o775)
        path.mkdir(mode=mode, exist_ok=True)


def of_job(job_id: int, *, work_dir: Path, comment: str = "") -> RunDir:
    """The run folder of a Slurm job: the one its comment names, else the default below its working
    directory.

    ``hydroslurm submit`` writes the comment; a job started by srun alone uses the default.
    """
    named = _NAMED.search(_last_line(comment))
    if named:
        return RunDir(Path(named[1]))
    return RunDir(work_dir / "hydroslurm-runs" / str(job_id))


def _last_line(comment: str) -> str:
    """A hostile comment may have thousands of places where a name could begin. Within the last line
    the first of them reaches the end, so the search takes one pass."""
    return comment.removesuffix("\n").rpartition("\n")[2]


def is_named(comment: str) -> bool:
    """Whether a job's comment names its run folder."""
    return _NAMED.search(_last_line(comment)) is not None


def comment_for(run_dir: RunDir) -> str:
    """The job comment from which :func:`of_job` finds the run folder again."""
    return f"hydroslurm:{run_dir.root}"


def comment_for_members(run_dir: RunDir) -> str:
    """The job comment of an elastic run's members. Verbs that do not know it see jobs without a run
    folder and leave them alone: if one member were paused, the others would wait for it."""
    return f"hydroslurm-member:{run_dir.root}"


def elastic_run_of(comment: str) -> RunDir | None:
    """The run that :func:`comment_for_members` names; None of any other job."""
    named = _MEMBER_OF.search(_last_line(comment))
    return RunDir(Path(named[1])) if named else None


def variables_of(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that name this run folder to the ranks of this job, but not to jobs that they
    submit."""
    return {RUN_DIR_ENV: str(root), RUN_OF_ENV: f"{environ.get('SLURM_JOB_ID', '')}:{root}"}


def named_in(environ: Mapping[str, str]) -> str | None:
    """The run folder that ``HYDROSLURM_RUN_DIR`` names, unless it is that of the job that has
    submitted this one."""
    named, job_id = environ.get(RUN_DIR_ENV), environ.get("SLURM_JOB_ID", "")
    of, _, folder = environ.get(RUN_OF_ENV, "").partition(":")
    is_inherited = folder == named and job_id not in ("", of)
    return None if is_inherited else named


def from_environment(environ: Mapping[str, str]) -> RunDir | None:
    """The run folder of this rank, or None when the process belongs to no run.

    ``HYDROSLURM_RUN_DIR`` wins; in a Slurm job without it, the default of :func:`of_job`, which
    another job of that number may have made: :func:`run_folders.from_environment` checks.
    """
    named = named_in(environ)
    if named:
        return RunDir(Path(named))
    job_id, submit_dir = environ.get("SLURM_JOB_ID"), environ.get("SLURM_SUBMIT_DIR")
    if job_id and submit_dir and job_id.isdecimal():
        return of_job(int(job_id), work_dir=Path(submit_dir))
    return None
