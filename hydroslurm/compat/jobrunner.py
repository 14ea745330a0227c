"""``JobRunner``: carries a job out over all its lives.

runner = hydroslurm.JobRunner(job, hydroslurm.CheckpointManager("runs/a", keep=5))
runner.run()                                     # in this process
hydroslurm.Executor("runs").submit(runner)       # on the cluster, requeued as often as it takes
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hydroslurm.checkpoint.tiers import Found
from hydroslurm.compat.job import Job
from hydroslurm.compat.joblife import JobLife
from hydroslurm.compat.jobrun import JobRun
from hydroslurm.compat.manager import CheckpointManager
from hydroslurm.compat.parts import LocalSession
from hydroslurm.compat.tasks import Client
from hydroslurm.core import rundir
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import UsageError
from hydroslurm.training import finished
from hydroslurm.training.notice import notice


class JobRunner:
    """Runs a :class:`Job`: download, build, then init or the newest checkpoint, epochs, exit.

    A checkpoint is committed after ``init`` (epoch 0) and after each epoch, before a stop signal
    ends the loop. A stop (SIGTERM, the warning before the time limit) is obeyed at the next safe
    point, also in the middle of an epoch, and the next life goes on from there. Once ``exit`` is
    done, a further life leaves at once.

    Can be pickled until it runs. Main thread only, one at a time in a process.

    Args:
        job: what to run.
        checkpoint_manager: where its checkpoints are. None saves nothing: a life that was stopped
            is followed by one that begins anew.
        resume_from_epoch: go back to the checkpoint of this epoch, and train on in a folder of its
            own, ``<directory>/from-epoch-<n>``. What was there before stays as it is, and a requeue
            goes on with the new branch instead of going back again. Stop signals are asked first,
            so that this trains a finished job further.

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
        """The job's."""
        return self.job.name

    def __call__(self, client: Client | None = None) -> int:
        """As :meth:`run`: for executors, which call what they are given.

        With a client, as in Caffe2: it is handed each group, and each of the manager's ``init``,
        ``save`` and ``load``, in Caffe2's order, and a job that went back to an epoch trains at
        least one more.

        Raises:
            UsageError: it has no ``run()``; and what :meth:`run` raises.
        """
        if client is None:
            return self.run()
        if not callable(getattr(client, "run", None)):
            raise UsageError(
                f"{type(client).__name__} has no run(); wanted a client, such as "
                "hydroslurm.LocalSession(), or nothing"
            )
        return self._run(client, at_least_one=True)

    def run(self) -> int:
        """Run the job to its end; returns how many epochs are done.

        What a function of the job raises comes out of here as it is; what failed, where, and what a
        restart does is in the log, and from Python 3.11 on in the exception's notes.

        Raises:
            SystemExit: the job was stopped and leaves (75: the same command continues, 143: it was
                cancelled, 93: it must not go on).
            CheckpointMissing: of ``resume_from_epoch``; says which epochs there are.
            StateMismatch: the checkpoint belongs to other objects; names the keys.
            SaveFailed: of an epoch, with ``on_save_error="fail"``.
            UsageError: the job has no epoch, or would never end; it runs already.
        """
        return self._run(LocalSession(), at_least_one=False)

    def _run(self, client: Client, *, at_least_one: bool) -> int:
        self.job.check()
        manager, origin = self._branch()
        if manager is not None and (done := finished.read(RunDir(manager.directory))) is not None:
            notice(f"this job has finished at step {done.step}; nothing to do {manager.directory}")
            return manager.last_epoch() or 0
        with ExitStack() as stack:
            directory: Path | None = manager.directory if manager else None
            if manager is None and rundir.from_environment(os.environ) is None:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            run = JobRun(manager, directory=directory, origin=origin)
            stack.enter_context(run)  # once all is done it writes the marker
            stack.enter_context(self.job.running(run))
            retrieved = None if origin is None else self.resume_from_epoch
            JobLife(self.job, run, self.checkpoint_manager, client, at_least_one).live(retrieved)
            return run.epoch

    def _branch(self) -> tuple[CheckpointManager | None, Found | None]:
        """The manager of this run, and what it begins from when it has nothing of its own yet."""
        manager, epoch = self.checkpoint_manager, self.resume_from_epoch
        if manager is None or epoch is None:
            return manager, None
        branch = manager.branch(epoch)
        if branch.committed():
            return branch, None
        return branch, manager.find(epoch=epoch)
