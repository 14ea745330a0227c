"""``JobRunner``: runs a job, over all its attempts.

runner = hydroslurm.JobRunner(job, hydroslurm.CheckpointManager("runs/a", keep=5))
runner.run()                                     # in this process
hydroslurm.Executor("runs").submit(runner)       # on the cluster, requeued as often as it takes
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from hydroslurm.checkpoint.newest import Found
from hydroslurm.compat.job import Job
from hydroslurm.compat.jobrun import JobRun
from hydroslurm.compat.manager import CheckpointManager
from hydroslurm.compat.tasks import Client, LocalSession, TaskGroup
from hydroslurm.core import rundir
from hydroslurm.errors import SaveFailed, UsageError
from hydroslurm.training.reporting import warning


class JobRunner:
    """Runs a :class:`Job`: download, build, then init or the newest checkpoint, epochs, exit.

    A checkpoint is committed after ``init`` (epoch 0) and after each epoch, before a stop signal
    ends the loop. A stop (SIGTERM, the warning before the time limit) takes effect at the next
    safe point, even in the middle of an epoch, and the next attempt resumes there. Once ``exit`` is
    done, further attempts only build the objects and load the last epoch, for the code after the
    runner. Where that epoch cannot be loaded, the process ends with status 0 and says why.

    Can be pickled until it runs. Main thread only, one per process at a time.

    Args:
        job: what to run.
        checkpoint_manager: where its checkpoints are. None saves nothing: after a stop the next
            attempt starts over.
        resume_from_epoch: go back to the checkpoint of this epoch, and continue training in a
            separate folder, ``<directory>/from-epoch-<n>``. Existing checkpoints stay untouched,
            and a requeue continues the new branch instead of going back again. Stop signals are
            evaluated first, so a finished job can be trained further.

    Raises:
        UsageError: ``resume_from_epoch`` without a manager, or below 0.
    """

    def __init__(
        self,
        job: Job,
        checkpoint_manager: CheckpointManager | None = None,
        resume_from_epoch: int | None = None,
    ) -> None:
        if resume_from_epoch is not None and (checkpoint_manager is None or resume_from_epoch < 0):
            raise UsageError(
                f"resume_from_epoch={resume_from_epoch}: wanted 0 or more, and a "
                "checkpoint_manager that has this epoch"
            )
        self.job = job
        self.checkpoint_manager = checkpoint_manager
        self.resume_from_epoch = resume_from_epoch

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    def __call__(self, client: Client | None = None) -> int:
        """As :meth:`run`: for executors, which call what they are given.

        A client, as in Caffe2, runs each group and each of the manager's ``init``, ``save`` and
        ``load``, in Caffe2's order, and a job that went back to an epoch trains at least one more.

        Raises:
            UsageError: the client has no ``run()``; and what :meth:`run` raises.
        """
        if client is None:
            return self.run()
        if not callable(getattr(client, "run", None)):
            raise UsageError(
                f"{type(client).__name__} has no run(); wanted a client, such as "
                "hydroslurm.LocalSession(), or nothing"
            )
        return self._run(client, at_least_one=True)

    train = __call__
    """What later versions of Caffe2 call it."""

    def run(self) -> int:
        """Run the job to its end; returns the number of completed epochs.

        Exceptions of the job's functions propagate unchanged; what failed, where, and what a
        restart does is in the log, and from Python 3.11 on in the exception's notes.

        Raises:
            SystemExit: the job was stopped (75: run the same command again to resume, 143: it was
                cancelled, 93: it must not continue).
            CheckpointMissing: ``resume_from_epoch`` has no checkpoint; lists those that exist.
            StateMismatch: the checkpoint belongs to other objects; names the keys.
            SaveFailed: an epoch could not be saved, with ``on_save_error="fail"``.
            UsageError: the job has no epoch, would never end, or is already running.
        """
        return self._run(LocalSession(), at_least_one=False)

    def _run(self, client: Client, *, at_least_one: bool) -> int:
        self.job.check()
        manager, origin = self._branch()
        with ExitStack() as stack:
            directory: Path | None = manager.directory if manager else None
            if directory is not None:
                _require_one_job(directory, self.job)
            elif rundir.from_environment(os.environ) is None:
                directory = stack.enter_context(_folder_for_now())
            run = JobRun(manager, directory=directory, origin=origin)
            stack.enter_context(run)  # writes the marker of a finished run at its end
            stack.enter_context(self.job.running(run))
            retrieved = None if origin is None else self.resume_from_epoch
            JobAttempt(self.job, run, self.checkpoint_manager, client, at_least_one).run(retrieved)
        if manager is not None:
            _done[manager.directory] = self.job.signature()
        return run.epoch

    def _branch(self) -> tuple[CheckpointManager | None, Found | None]:
        """The manager of this run, and what it starts from while it has no checkpoint."""
        manager, epoch = self.checkpoint_manager, self.resume_from_epoch
        if manager is None or epoch is None:
            return manager, None
        branch = manager.branch(epoch)
        if branch.committed():
            return branch, None
        return branch, manager.find(epoch=epoch)


_done: dict[Path, tuple[str, ...]] = {}
"""Directory -> signature of the job that this process has finished, or found finished, there."""


def _require_one_job(directory: Path, job: Job) -> None:
    """Refuse the second of two jobs in one directory: it would get what the first has trained.

    Raises:
        UsageError: another job is done there.
    """
    if _done.get(directory, job.signature()) != job.signature():
        raise UsageError(
            f"this process has finished another job in {directory}, and a directory belongs to one "
            f'job. Give {job!r} its own: CheckpointManager("{directory}/second")'
        )


@contextmanager
def _folder_for_now() -> Iterator[Path]:
    """A run folder that goes with the run.

    After a stop the installation lives on until the process ends, and its threads still write here:
    a file that came during the removal once replaced the exit status 75 by an error's. So what
    cannot be removed yet goes at exit: ours was registered first, and runs behind the uninstalling.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        yield Path(folder)


class JobAttempt:
    """One attempt of a job: a client runs its groups in order."""

    def __init__(
        self,
        job: Job,
        run: JobRun,
        manager: CheckpointManager | None,
        client: Client,
        at_least_one: bool,
    ) -> None:
        """``at_least_one``: after going back to an epoch, train one more in any case."""
        self._job = job
        self._run = run
        self._manager = manager
        self._client = client
        self._at_least_one = at_least_one
        self._has_just_loaded = False

    def run(self, retrieved: int | None) -> None:
        """``retrieved``: the epoch to go back to."""
        job, run = self._job, self._run
        nothing = "nothing was trained in this attempt"
        self._group(job.fetch_group, f"what was fetched stays; {nothing}")
        self._group(job.build_group, nothing)
        run.take({name: job[name] for name in job.names()}, job.loader)
        job.seal()
        if not self._resume(retrieved):
            self._group(
                job.init_group,
                "an interrupted init leaves nothing behind; the next attempt starts it over",
            )
            self._init_manager(None)
        elif run.is_finished:
            return
        elif run.begins_at_origin and self._at_least_one:
            run.agree_to_end(False)
        elif run.begins_at_origin:
            self._ask_stop_signals()
        self._epochs()
        for name, group in ("download", job.download_group), ("exit", job.exit_group):
            if not run.is_committed:  # a stop within it saves the last epoch
                self._hand_over(group, partial(self._call_all, group))
                continue
            again = f"the next attempt starts the {name} group over"
            self._group(group, f"the last epoch is committed; {again}")

    def _resume(self, retrieved: int | None) -> bool:
        """Load a checkpoint if there is one; return whether there was."""
        if retrieved is None and self._run.newest_committed() is None:
            self._load()  # may exit: the run has finished, or must not continue
            return self._has_just_loaded
        self._init_manager(retrieved)
        TaskGroup("load" if retrieved is None else f"load({retrieved})").run_by(
            self._client, self._load
        )
        return self._has_just_loaded

    def _load(self) -> None:
        self._has_just_loaded = self._run.resume()
        signals = self._job.signal_outputs()
        for place, value in self._run.progress.outputs.items():
            if place in signals:  # its function has run and is not called again
                signals[place].set(value)

    def _init_manager(self, retrieved: int | None) -> None:
        if self._manager is not None:
            nodes = self._job.nodes_to_checkpoint()
            self._client.run(self._manager.init(nodes, retrieve_from_epoch=retrieved))

    def _group(self, group: TaskGroup, why_unsaved: str) -> None:
        """Run the functions of any group but the epoch group. A stop inside saves nothing."""
        with self._run.unsaved(why_unsaved):
            self._hand_over(group, partial(self._call_all, group))

    def _hand_over(self, group: TaskGroup, walk: Callable[[], None]) -> None:
        """Let the client run a group, except empty ones that Caffe2 does not have."""
        job = self._job
        if group.tasks() or group in (job.init_group, job.epoch_group, job.exit_group):
            group.run_by(self._client, walk)

    def _call_all(self, group: TaskGroup) -> None:
        for part in group.tasks():
            self._run.check_stop()
            with self._explained(f"{part.name} of the {group.name} group"):
                part(self._job)

    def _epochs(self) -> None:
        progress = self._run.progress
        while True:
            if not progress.begun:
                self._save_epoch()
                if progress.ended:
                    return
                self._check_stop_between()
                self._run.begin_epoch()
            self._hand_over(self._job.epoch_group, self._epoch)
            self._has_just_loaded = False
            self._run.end_epoch()
            self._ask_stop_signals()
            self._run.check_stop()  # saves as far as the remaining time allows

    def _epoch(self) -> None:
        """Run the rest of an epoch."""
        job, run = self._job, self._run
        signals = job.signal_outputs()
        for number, part in enumerate(job.epoch_group.tasks()):
            if number < run.progress.done:
                continue
            run.check_stop()
            with self._explained(f"{part.name} of the epoch group, in epoch {run.epoch},"):
                part(job)
            if str(number) in signals:
                run.progress.outputs[str(number)] = signals[str(number)]()
            run.end_part()

    def _ask_stop_signals(self) -> None:
        with self._explained(f"a stop signal after epoch {self._run.epoch - 1}"):
            self._run.agree_to_end(self._job.ask_stop_signals())

    def _save_epoch(self) -> None:
        """Save the completed epoch, as far as that is possible and wanted."""
        run = self._run
        with self._explained(f"saving the checkpoint of epoch {run.epoch}"):
            try:
                if self._manager is not None and not self._has_just_loaded:
                    self._client.run(self._manager.save(run.epoch))
                elif run.saves:  # already there, unless the run has just gone back to it
                    run.save_epoch(run.epoch)
                self._has_just_loaded = False
            except SaveFailed as error:
                if run.fails_on_save_error:
                    raise
                warnings.warn(
                    f"hydroslurm: the checkpoint of epoch {run.epoch} was not saved: {error}. The "
                    "training continues",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _check_stop_between(self) -> None:
        if not self._run.is_committed:
            self._run.check_stop()
            return
        with self._run.unsaved(f"epoch {self._run.epoch} is committed already"):
            self._run.check_stop()

    # --- messages
    # --------------------------------------------------------------------------------------------

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Log what an exception means for the run."""
        try:
            yield
        except Exception as error:
            message = f"{what} failed with {type(error).__name__}: {error}. {self._outlook()}"
            if hasattr(error, "add_note"):
                error.add_note(f"hydroslurm: {message}")
            warning(message)
            raise

    def _outlook(self) -> str:
        """What is committed, and what a restart will do with it."""
        if not self._run.saves:
            return "Nothing is saved without a checkpoint_manager: a restart starts over"
        newest = self._run.newest_committed()
        if newest is None:
            return "No checkpoint is committed yet: a restart starts over, with init"
        where = f"The checkpoint of step {newest.step} ({newest.path}) is committed"
        if self._run.progress.ended and self._run.epoch == newest.epoch:
            return f"{where}: a restart runs the exit group again"
        return f"{where}: a restart resumes from there, in epoch {newest.epoch}, without init"
