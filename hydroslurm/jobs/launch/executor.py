"""The executor that a submitit user knows, for jobs that can be paused.

    executor = hydroslurm.Executor("hydroslurm-runs")
    executor.update_parameters(partition="low", timeout_min=60, nodes=2, tasks_per_node=1)
    job = executor.submit(train, 3)
    job.run_dir            # events, logs, report
    job.result()           # as with submitit

submitit writes the batch script, pickles the callable and starts every rank as a direct srun task,
which Slurm's signals need. We add a run folder per job, install pausing before the user's code, and
move submitit's preemption signal to SIGURG: USR1 and USR2 mean pause and resume here, and SIGURG
harms no process that does not handle it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

import submitit
from submitit.core import utils as submitit_utils
from submitit.core.core import PicklingExecutor
from submitit.core.plugins import get_executors
from submitit.core.utils import JobPaths
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from hydroslurm.core import rundir
from hydroslurm.core.proc import module_command
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import MaybeSubmitted, RunFolderError, SlurmMissing, UsageError
from hydroslurm.jobs.launch.rank import SUBMITIT_SIGNAL, InRank, Script
from hydroslurm.jobs.launch.sbatch import (
    new_run,
    new_submission,
    refuse_hopeless,
    submit_script,
)
from hydroslurm.jobs.launch.scripts import in_option_line, last_line
from hydroslurm.jobs.plan import Submission, write_submission
from hydroslurm.jobs.spec.sections import check_options
from hydroslurm.runtime.autoload import PREEMPT_ENV

_SET_BY_US = ("comment", "signal", "array")
"""Parameters of sbatch. Elements of an array of one's own would share the run folder: map_array
gives each its own."""
_NO_SLURM = (
    "no srun on the PATH, so there is no Slurm to submit to from here. Log in to a submit host, "
    "try a private one (hydroslurm cluster up), or run it on this machine: hydroslurm run -- "
    'python train.py, in Python Executor(folder, cluster="local")'
)


Cluster = Literal["slurm", "local", "debug"]


class Executor(SlurmExecutor):
    """Submits callables and scripts through submitit, each with a run folder of its own.

    Args:
        folder: for the run folders; on a file system that all nodes share. May contain submitit's
            ``%j`` (``logs/%j``): run folders then go into the part before it, and this path of each
            job is a link to its logs.
        max_num_timeout, max_pickle_size_gb: as for submitit.
        python: the interpreter of the ranks; default: the running one.
        cluster: ``slurm``, or as for submitit's AutoExecutor: ``local`` for processes on this
            machine, ``debug`` for this process, at the time the result is requested.

    Raises:
        SlurmMissing: no srun on the PATH.
        UsageError: no such cluster.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        *,
        cluster: Cluster = "slurm",
    ) -> None:
        self.preflight: str | None = None
        """A shell command that has to succeed on each node before the ranks start, after the
        built-in checks; None: nothing is checked."""
        path = Path(folder).expanduser().absolute()
        options: dict[str, Any] = {
            "max_num_timeout": max_num_timeout,
            "max_pickle_size_gb": max_pickle_size_gb,
            "python": python,
        }
        self._auto: submitit.AutoExecutor | None = None
        if cluster != "slurm":
            if cluster not in ("local", "debug"):
                raise UsageError(f'cluster={cluster!r}: wanted "slurm", "local" or "debug"')
            prefixed = {f"local_{name}": value for name, value in options.items()}
            self._auto = submitit.AutoExecutor(path, cluster=cluster, **prefixed)
            PicklingExecutor.__init__(self, path, max_num_timeout, max_pickle_size_gb)
            return
        if shutil.which("srun") is None:
            raise SlurmMissing(_NO_SLURM)
        super().__init__(path, **options)

    def update_parameters(self, **parameters: Any) -> None:
        """Set sbatch's parameters by submitit's names (``timeout_min``, ``nodes``,
        ``tasks_per_node``, ``mem_gb``, ``partition`` or ``slurm_partition`` ...).

        Raises:
            UsageError: an unknown name, one that hydroslurm sets itself, or a value that no job can
                have.
        """
        plain = {
            name.removeprefix("slurm_"): value
            for name, value in parameters.items()
            if name.partition("_")[0] not in ("local", "debug")
        }
        check_options(plain)
        general = set(self._equivalence_dict()) & plain.keys()
        plain |= self._convert_parameters({name: plain.pop(name) for name in general})
        if plain.get("use_srun") is False:
            raise UsageError(
                "use_srun=False is not possible: Slurm signals job steps, and without srun there "
                "is none"
            )
        for name in {**plain, **(plain.get("additional_parameters") or {})}:
            if name in _SET_BY_US:
                raise UsageError(f"{name!r} is set by hydroslurm, which needs it; omit it")
        try:
            super().update_parameters(**plain)
        except (ValueError, TypeError, NameError) as error:
            raise UsageError(str(error)) from error
        if self._auto is not None:
            _update(self._auto, parameters)

    def submit_script(self, script: str, *arguments: str, module: bool = False) -> PausableJob:
        """Submit a Python script, or with ``module`` a module, unmodified.

        Raises:
            UsageError: there is no such script.
            LaunchError: sbatch refused the job, or it could never start.
        """
        job = self.submit(_script(script, arguments, is_module=module))
        assert isinstance(job, PausableJob)
        return job

    def render_script(self, script: str, *arguments: str, module: bool = False) -> str:
        """The batch script that :meth:`submit_script` would hand to sbatch. Writes nothing.

        Raises:
            UsageError: there is no such script.
        """
        name = self.parameters.get("job_name") or _name_of(
            _script(script, arguments, is_module=module)
        )
        run = RunDir(JobPaths.get_first_id_independent_folder(self.folder) / "RUN_FOLDER")
        inner = self._with_files_in(run, name, is_array=False)
        return str(inner._make_submission_file_text(inner._submitit_command_str, "JOB"))

    @classmethod
    def name(cls) -> str:
        """submitit's name for this kind of cluster; its ranks look for it in their environment."""
        return "slurm"

    # --- what submitit calls

    def _internal_process_submissions(
        self, delayed_submissions: list[submitit_utils.DelayedSubmission]
    ) -> list[submitit.Job[Any]]:
        if not delayed_submissions:
            return []
        if self._auto is not None:
            return [self._run_here(self._auto, delayed) for delayed in delayed_submissions]
        is_array = len(delayed_submissions) > 1
        name = self._job_name(delayed_submissions[0])
        with new_submission(JobPaths.get_first_id_independent_folder(self.folder), name) as run:
            intent = Submission(name, _describe(delayed_submissions[0]))
            write_submission(run, intent)
            for delayed in delayed_submissions:
                delayed.function = InRank(delayed.function, run.root, is_array=is_array)
            job_id, found = self._submit_into(run, name, delayed_submissions)
        try:
            write_submission(run, replace(intent, job_id=job_id))
            shutil.copyfile(run.job_sbatch, found[0].paths.submission_file)
            self._lead_to(found)
        except (OSError, RunFolderError) as error:
            warnings.warn(
                f"hydroslurm: Slurm has job {job_id}, but its run folder does not say so: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
        refuse_hopeless(int(job_id), run)
        return found

    def _job_name(self, delayed: submitit_utils.DelayedSubmission) -> str:
        return self.parameters.get("job_name") or _name_of(delayed.function)

    def _run_here(
        self, auto: submitit.AutoExecutor, delayed: submitit_utils.DelayedSubmission
    ) -> submitit.Job[Any]:
        """Run one call by submitit on this machine, with its files in the run folder."""
        folder = JobPaths.get_first_id_independent_folder(self.folder)
        run = new_run(folder, self._job_name(delayed))
        delayed.function = InRank(delayed.function, run.root)
        inner = copy(auto._executor)
        inner.folder = run.logs
        with submitit_utils.environment_variables(
            **{
                "SUBMITIT_PREEMPT_SIGNAL": SUBMITIT_SIGNAL,
                PREEMPT_ENV: os.environ.get(PREEMPT_ENV) or "pause",
                rundir.RUN_DIR_ENV: run.root,
            }
        ):
            (job,) = inner._internal_process_submissions([delayed])
        job.run_dir = run  # type: ignore[attr-defined] # as a PausableJob has it
        self._lead_to([job])
        return job

    def _lead_to(self, jobs: Sequence[submitit.Job[Any]]) -> None:
        """Link a job's folder of submitit's to the run folder, where the path has ``%j``."""
        for job in jobs:
            link = JobPaths(self.folder, job.job_id).folder
            if link == self.folder:
                continue
            link.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # an array's second task, or a reused job id
                link.symlink_to(job.paths.folder)

    def _submit_into(
        self, run: RunDir, name: str, delayed: list[submitit_utils.DelayedSubmission]
    ) -> tuple[str, list[submitit.Job[Any]]]:
        """Submit submitit's batch script, with its files in the run folder; returns the id that
        Slurm has given, and the job of each call.

        submitit's own way to sbatch has no words for what goes wrong there.

        Raises:
            LaunchError, MaybeSubmitted, SlurmMissing: as :func:`submit_script`.
            UsageError: the calls are larger than ``max_pickle_size_gb``.
        """
        is_array = len(delayed) > 1
        inner = self._with_files_in(run, name, is_array=is_array)
        if is_array:
            inner.parameters["map_count"] = len(delayed)
        pickles = [run.logs / f"call-{number}.pkl" for number in range(len(delayed))]
        for call, pickle in zip(delayed, pickles, strict=True):
            call.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            call.dump(pickle)
        size_gb = sum(pickle.stat().st_size for pickle in pickles) / 2**30
        if size_gb > self.max_pickle_size_gb:
            raise UsageError(
                f"the functions and their arguments take {size_gb:.2f} GB as pickles, more than "
                f"max_pickle_size_gb={self.max_pickle_size_gb:g}; load large data in the job, or "
                "raise the limit"
            )
        run.job_sbatch.write_text(inner._make_submission_file_text(inner._submitit_command_str, ""))
        job_id = str(submit_script(run.job_sbatch, run))
        names = [f"{job_id}_{number}" for number in range(len(delayed))] if is_array else [job_id]
        tasks = list(range(inner._num_tasks()))
        jobs: list[submitit.Job[Any]] = [PausableJob(run.logs, each, tasks) for each in names]
        try:
            for job, pickle in zip(jobs, pickles, strict=True):
                pickle.rename(job.paths.submitted_pickle)
        except OSError as error:
            raise MaybeSubmitted(
                f"Slurm has the job, as {job_id}, and it would not find its function: {error}. "
                f"`scancel {job_id}` takes it back"
            ) from error
        return job_id, jobs

    def _with_files_in(self, run: RunDir, name: str, *, is_array: bool) -> Executor:
        """A copy whose jobs have their files in the run folder, and our lines in their script."""
        inner = copy(self)
        inner.folder = run.logs
        inner.parameters = {
            **self.parameters,
            "job_name": in_option_line(name),
            "comment": rundir.comment_for(RunDir(run.root / "%a") if is_array else run),
            "setup": [
                *(self.parameters.get("setup") or []),
                f"export SUBMITIT_PREEMPT_SIGNAL={SUBMITIT_SIGNAL}",
                # install pausing before InRank runs: unpickling the function may import torch
                f'export {PREEMPT_ENV}="${{{PREEMPT_ENV}:-pause}}"',
                f"export {rundir.RUN_DIR_ENV}={shlex.quote(str(run.root))}"
                + ('/"$SLURM_ARRAY_TASK_ID"' if is_array else ""),
                *([] if self.preflight is None else [_preflight_line(self.preflight, run)]),
            ],
            "teardown": ["status=$?", *(self.parameters.get("teardown") or []), last_line()],
            "additional_parameters": {
                **(self.parameters.get("additional_parameters") or {}),
                "signal": f"{SUBMITIT_SIGNAL}@{self.parameters.get('signal_delay_s', 90)}",
            },
        }
        return inner


def _preflight_line(command: str, run: RunDir) -> str:
    given = ["bash", "-c", command] if command else []
    words = module_command(sys.executable, "hydroslurm.jobs.supervisor.bad_nodes", str(run.root))
    return f"{shlex.join([*words, *given])} || {{ status=$?; {last_line()}; }}"


def _update(auto: submitit.AutoExecutor, parameters: Mapping[str, Any]) -> None:
    """Set what submitit's AutoExecutor accepts; parameters for Slurm alone have no effect."""
    clusters, named = get_executors(), {}
    for name, value in parameters.items():
        is_its = name in auto._valid_parameters() or name.partition("_")[0] in clusters
        named[name if is_its else f"slurm_{name}"] = value
    try:
        auto.update_parameters(**named)
    except (AssertionError, ValueError, NameError) as error:
        raise UsageError(str(error)) from error


def _script(script: str, arguments: Sequence[str], *, is_module: bool) -> Script:
    if not is_module and not (Path(script).is_file() and os.access(script, os.R_OK)):
        raise UsageError(
            f"there is no script {script!r}; give the path of a Python file that you may read, "
            "or -m for a module"
        )
    if is_module and not _has_module(script):
        raise UsageError(f"{sys.executable} has no module {script!r}")
    target = script if is_module else str(Path(script).absolute())
    return Script(target, tuple(arguments), is_module=is_module)


def _has_module(name: str) -> bool:
    """Whether ``python -m`` would find it here; nothing of it is imported."""
    package, *_ = name.split(".")
    if package in sys.builtin_module_names:
        return True
    return PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is not None


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "name", None) or getattr(function, "__name__", None)
    return str(name or type(function).__name__)


def _describe(delayed: submitit_utils.DelayedSubmission) -> str:
    if isinstance(delayed.function, Script):
        script = delayed.function
        return shlex.join(
            ["python", *(["-m"] if script.is_module else []), script.target, *script.arguments]
        )
    arguments: Sequence[str] = [repr(a) for a in delayed.args] + [
        f"{k}={v!r}" for k, v in delayed.kwargs.items()
    ]
    return f"{_name_of(delayed.function)}({', '.join(arguments)})"


class _Watcher(SlurmInfoWatcher):
    """submitit's poll of sacct, which by itself takes a suspended job for an ended one.

    Always asks the Slurm that its jobs were submitted to, whatever ``SLURM_CONF`` is by then: two
    clusters use the same job ids.
    """

    def __init__(self, slurm_conf: str | None) -> None:
        super().__init__(delay_s=600)
        self._slurm_conf = slurm_conf

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        suspended = self.get_state(job_id, mode=mode).upper().startswith("SUSPENDED")
        return not suspended and super().is_done(job_id, mode="cache")

    def _make_command(self) -> list[str] | None:
        command: list[str] | None = super()._make_command()
        if command is None or self._slurm_conf is None:
            return command
        return ["env", f"SLURM_CONF={self._slurm_conf}", *command]


class PausableJob(SlurmJob[Any]):
    """submitit's job handle that knows the run folder and waits through suspensions."""

    watcher = _Watcher(None)

    def __init__(
        self, folder: str | os.PathLike[str], job_id: str, tasks: Sequence[int] = (0,)
    ) -> None:
        """For a job submitted by this or another process: ``folder`` is its executor's, or the one
        with submitit's files."""
        script = JobPaths(Path(folder), job_id).submission_file
        if not script.exists():  # in the newest run folder of that job: ids are reused
            script = max(Path(folder).glob(f"*/logs/{script.name}"), default=Path(folder, "none"))
        logs = script.resolve().parent  # past the link of a path with %j
        super().__init__(logs, job_id, tasks)
        self.run_dir = RunDir(logs.parent / job_id.partition("_")[2])

    def _interrupt(self, timeout: bool = False) -> None:
        """Like submitit's, but with our signals: the SIGUSR2 that submitit sends would resume a
        paused job."""
        for name in (SUBMITIT_SIGNAL,) if timeout else ("TERM", SUBMITIT_SIGNAL):
            subprocess.check_call(["scancel", self.job_id, "--signal", name])

    def _register_in_watcher(self) -> None:
        """Called by submitit's constructor, once."""
        conf = os.environ.get("SLURM_CONF")
        if conf is not None:
            self.watcher = _WATCHERS.setdefault(conf, _Watcher(conf))
        super()._register_in_watcher()


_WATCHERS: dict[str, _Watcher] = {}
"""SLURM_CONF -> the watcher of that Slurm, shared by its jobs like submitit's."""
