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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint.manifest import EPOCH
from hydroslurm.checkpoint.saver import Saved
from hydroslurm.checkpoint.store import Checkpoint
from hydroslurm.compat.job import Client, Job, LocalSession, TaskGroup, group_of
from hydroslurm.compat.manager import CheckpointManager
from hydroslurm.core import rundir
from hydroslurm.errors import CheckpointError, SaveFailed, UsageError
from hydroslurm.training.loop import Loop
from hydroslurm.training.rank_group import notice, warning
from hydroslurm.training.session import Session


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
    """Name in later versions of Caffe2."""

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
        job, manager, epoch = self.job, self.checkpoint_manager, self.resume_from_epoch
        job.check()
        with ExitStack() as stack:
            directory: Path | None = None
            origin: Checkpoint | None = None
            if manager is not None:
                branch = manager if epoch is None else manager.branch(epoch)
                if epoch is not None and not branch.committed():
                    origin = manager.find(epoch=epoch)
                directory = branch.directory
                if _done.get(directory, job.signature()) != job.signature():
                    raise UsageError(
                        f"this process has finished another job in {directory}, and a directory "
                        f"belongs to one job. Give {job!r} its own: "
                        f'CheckpointManager("{directory}/second")'
                    )
            elif rundir.from_environment(os.environ) is None:
                # After a stop the installation lives on until the process ends, and its threads
                # still write there: a file created during the removal once replaced exit status 75
                # by an error's. So anything left is removed at exit: this hook is registered first,
                # and so runs after the uninstalling.
                temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
                directory = Path(stack.enter_context(temporary))
                atexit.register(shutil.rmtree, directory, ignore_errors=True)
            run = JobRun(self, client, directory=directory, origin=origin)
            run.live(at_least_one=at_least_one)
        if manager is not None and directory is not None:
            _done[directory] = job.signature()
        return run.epoch


_done: dict[Path, tuple[str, ...]] = {}
"""Directory -> signature of the job that this process finished, or found finished, there: a second
one would get the first one's training."""


PROGRESS = "hydroslurm.job"
"""The name under which a job's progress is saved beside its objects."""


@dataclass
class Progress:
    """A job's progress within an epoch; saved with its objects.

    Attributes:
        begun: within an epoch. False: between two.
        done: how many functions of the epoch group have run.
        first_step: step at which the epoch began.
        ended: a stop signal was true after the last epoch.
        outputs: index of a function of the epoch group that has run -> whether its output, a stop
            signal, is true.
    """

    begun: bool = False
    done: int = 0
    first_step: int = 0
    ended: bool = False
    outputs: dict[str, bool] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        """Begin an epoch."""
        self.begun, self.done, self.outputs, self.first_step = True, 0, {}, step

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class JobRun:
    """The value of ``job.run``: one attempt of a job, whose groups a client runs in order.

    Attributes:
        epoch: the current epoch, from 0; between two, the number of completed epochs.
        is_built: the objects are there, and nothing more can be registered.
    """

    def __init__(
        self,
        runner: JobRunner,
        client: Client,
        *,
        directory: Path | None,
        origin: Checkpoint | None,
    ) -> None:
        """``origin``: the starting point while the run has no checkpoint of its own."""
        self._job, self._client, self._manager = runner.job, client, runner.checkpoint_manager
        self._retrieved = runner.resume_from_epoch if origin else None
        options = self._manager or CheckpointManager(every_steps=0, every_s=0)
        self._progress = Progress()
        self._session = Session(
            (),
            owner="JobRunner",
            directory=directory,
            keep_epochs=options.keep,
            origin=origin,
            **options.run_options,
        )
        self._session.on_finished = self._load_finished
        if self._manager is None:
            nothing = "nothing is saved, because the JobRunner has no checkpoint_manager"
            self._session.saves.refused = nothing
        self._session.contents.objects.add(PROGRESS, self._progress)
        self.is_built = self._resumed = False
        self._epoch_is_committed = False  # the completed one
        self._was_finished = False  # before this attempt, which has loaded the last epoch

    # --- for the functions of a job
    # --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Training steps completed. Settable, for loops without :meth:`epoch_batches`."""
        return self._session.cursor.step

    @step.setter
    def step(self, step: int) -> None:
        self._session.cursor.step = step

    @property
    def epoch(self) -> int:
        return self._session.cursor.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._session.cursor.epoch = epoch

    def safe_point(self) -> None:
        """As :meth:`Run.safe_point`."""
        self._session.safe_point()

    def check_stop(self) -> None:
        """As :meth:`Run.check_stop`."""
        self._session.check_stop()

    @property
    def stop_requested(self) -> bool:
        """As :attr:`Run.stop_requested`."""
        return self._session.rank_group.stop_wanted()

    def request_stop(self) -> None:
        """As :meth:`Run.request_stop`."""
        self._session.controller.request_stop()

    def epoch_batches(self, *, accumulate: int = 1) -> Iterator[Any]:
        """Yield the remaining batches of this epoch; each is one step, followed by a safe point.

        Call it once per function, which may leave the loop early. An attempt that resumes in the
        middle of an epoch restores the RNG state here.

        Args:
            accumulate: as in :meth:`Run.batches`.

        Raises:
            UsageError: the job has no loader, or this is the second call in one function.
        """
        if self._session.cursor.position is None:
            raise UsageError("epoch_batches() needs a loader; set job.loader in the build group")
        if accumulate < 1:
            raise UsageError(f"epoch_batches(accumulate={accumulate}): wanted 1 or more")
        if self._session.cursor.in_epoch:
            raise UsageError(
                "this function has already iterated over its batches, and a stop in a second pass "
                "could not be resumed; make that pass a function of its own in the epoch group"
            )
        yield from Loop(self._session).batches_left(accumulate)

    def batches(self, **_: Any) -> Iterator[Any]:
        """Not available in a job, which counts its epochs itself.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "run.batches() counts epochs, and so does a job; use job.run.epoch_batches(), and "
            "epoch_limiter() for their number"
        )

    def save(self, *, kind: str = "manual") -> Saved:
        """As :meth:`Run.save`; refused where the state cannot be resumed from.

        Raises:
            UsageError: in ``download``, ``build``, ``init`` and ``exit``, and without a manager.
        """
        refused = self._session.saves.refused
        if refused is not None:
            raise UsageError(f"save() does nothing here: {refused}")
        return self._session.save(kind=kind)

    # --- the job
    # --------------------------------------------------------------------------------------------

    def live(self, *, at_least_one: bool) -> None:
        """Run the job to its end, and finish the run; or record the error that ends it.

        The exit group belongs to the run. So its end counts at once if the last epoch is committed:
        a restart has that for the code after the JobRunner.
        """
        session = self._session
        try:
            with self._job.running(self):
                self._train(at_least_one=at_least_one)
        except BaseException as error:
            session.fail(error)
            raise
        if self._was_finished:
            session.cursor.restore_rng()
            session.leave()
        else:
            is_committed = self._epoch_is_committed
            is_saved = is_committed or self._manager is None
            session.finish(is_saved=is_saved, rest_is_redone=not is_committed)

    def _train(self, *, at_least_one: bool) -> None:
        """``at_least_one``: after going back to an epoch, train one more in any case."""
        job, progress = self._job, self._progress
        nothing = "nothing was trained in this attempt"
        self._call(job.fetch_group, unsaved=f"what was fetched stays; {nothing}")
        self._call(job.build_group, unsaved=nothing)
        for name in job.names():
            self._session.contents.objects.add(name, job[name])
        if job.loader is not None:
            self._session.use(job.loader)
        self.is_built = True
        resumed = self._resume()
        if self._was_finished:
            return
        if not resumed:
            again = "an interrupted init leaves nothing behind; the next attempt starts it over"
            self._call(job.init_group, unsaved=again)
            self._init_manager()
        elif self._retrieved is not None:
            self._agree_to_end(lambda: not at_least_one and job.ask_stop_signals())
        if not progress.begun:
            self._save_completed(by_client=not resumed)
        while not progress.ended:
            if not progress.begun:
                committed = f"epoch {self.epoch} is committed already"
                with self._without_saves(committed if self._epoch_is_committed else None):
                    self.check_stop()
                progress.begin(self.step)
                self._epoch_is_committed = False
            self._call(job.epoch_group)
            if self.step == progress.first_step:  # its step identifies a checkpoint
                self.step += 1
                self._session.controller.step = self.step
            self.epoch += 1
            progress.begun, progress.done = False, 0
            self._agree_to_end(job.ask_stop_signals)
            self.check_stop()  # saves as far as the remaining time allows
            self._save_completed(by_client=True)
        for name, group in ("download", job.download_group), ("exit", job.exit_group):
            again = f"the last epoch is committed; the next attempt starts the {name} group over"
            # where it is not, a stop within the group saves it
            self._call(group, unsaved=again if self._epoch_is_committed else None)

    def _resume(self) -> bool:
        """Load a checkpoint if there is one; return whether there was."""
        name = "load" if self._retrieved is None else f"load({self._retrieved})"
        load = group_of(self._load, name)
        if self._retrieved is None and self._newest_committed() is None:
            load()  # may exit: the run has finished, or must not continue
        else:
            self._init_manager()
            self._client.run(load)
        return self._resumed

    def _load(self) -> None:
        self._resumed = self._session.resume()
        if self._resumed:
            self._session.cursor.restore_between()
        signals = self._job.signal_outputs()
        for place, value in self._progress.outputs.items():
            if place in signals:  # its function has run and is not called again
                signals[place].set(value)

    def _init_manager(self) -> None:
        if self._manager is not None:
            nodes = self._job.nodes_to_checkpoint()
            self._client.run(self._manager.init(nodes, retrieve_from_epoch=self._retrieved))

    def _call(self, group: TaskGroup, *, unsaved: str | None = None) -> None:
        """Let the client run a group, except empty ones that Caffe2 does not have.

        Args:
            unsaved: why a stop within it saves nothing.
        """
        job = self._job
        if group.tasks() or group in (job.init_group, job.epoch_group, job.exit_group):
            with self._without_saves(unsaved):
                self._client.run(group)

    def walk(self, group: TaskGroup) -> None:
        """Call the functions of a group, those of an epoch that have not run."""
        job, progress, cursor = self._job, self._progress, self._session.cursor
        in_epoch = group is job.epoch_group
        signals = job.signal_outputs()
        for number, task in enumerate(group.tasks()):
            if in_epoch and number < progress.done:
                continue
            self.check_stop()
            where = f"epoch group, in epoch {self.epoch}," if in_epoch else f"{group.name} group"
            with self._explained(f"{task.name} of the {where}"):
                task(job)
            if not in_epoch:
                continue
            if (place := str(number)) in signals:
                progress.outputs[place] = task.ends_job()
            cursor.restore_rng()
            if cursor.step_has_begun:  # it left its loop early, with a batch trained on
                cursor.count_step()
            cursor.in_epoch = False  # the next one may iterate over the data again
            progress.done += 1

    def _agree_to_end(self, ask: Callable[[], bool]) -> None:
        """Agree on whether a stop signal is true: the first rank decides for all."""
        with self._explained(f"a stop signal after epoch {self.epoch - 1}"):
            answers = self._session.rank_group.exchange("stop signals", ask())
            self._progress.ended = bool(answers[min(answers)])

    # --- saves
    # --------------------------------------------------------------------------------------------

    def save_epoch(self, epoch: int) -> None:
        """Commit the checkpoint of the completed epoch; an existing intact one is kept. Without a
        manager nothing is.

        Raises:
            SaveFailed, UnsavableState: as :meth:`Run.save`.
            UsageError: ``epoch`` is not the completed one.
        """
        if epoch != self.epoch or self._progress.begun:
            within = f"within epoch {self.epoch}" if self._progress.begun else f"epoch {self.epoch}"
            raise UsageError(
                f"save({epoch}): the run is at {within}; between two saves of its JobRunner, "
                "job.run.save() saves the current state"
            )
        if self._manager is not None:
            self._session.save(kind=EPOCH)
            with self._session.leaving_when_stale():
                self._session.saver.poll()
            self._epoch_is_committed = True

    def _save_completed(self, *, by_client: bool) -> None:
        """Save the completed epoch, as far as that is possible and wanted.

        Args:
            by_client: it runs the manager's ``save``. Not for one that was just loaded, which is
                there already unless the run has gone back to it.
        """
        manager = self._manager
        if manager is None:
            return
        with self._explained(f"saving the checkpoint of epoch {self.epoch}"):
            try:
                if by_client:
                    self._client.run(manager.save(self.epoch))
                else:
                    self.save_epoch(self.epoch)
            except SaveFailed as error:
                if manager.on_save_error == "fail":
                    raise
                warnings.warn(
                    f"hydroslurm: the checkpoint of epoch {self.epoch} was not saved: {error}. The "
                    "training continues",
                    RuntimeWarning,
                    stacklevel=2,
                )

    @contextmanager
    def _without_saves(self, why: str | None) -> Iterator[None]:
        """Disable saving inside, if there is a reason: a stop exits with it as its message, and
        periodic saves are off. For a state that cannot be resumed from, or is already saved."""
        saves = self._session.saves
        before = saves.refused
        saves.refused = before or why
        try:
            yield
        finally:
            saves.refused = before

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
        """Say what is committed, and how a restart will use it."""
        if self._manager is None:
            return "Nothing is saved without a checkpoint_manager: a restart starts over"
        newest = self._newest_committed()
        if newest is None:
            return "No checkpoint is committed yet: a restart starts over, with init"
        where = f"The checkpoint of step {newest.step} ({newest.path}) is committed"
        if self._progress.ended and self.epoch == newest.epoch:
            return f"{where}: a restart runs the exit group again"
        return f"{where}: a restart resumes from there, in epoch {newest.epoch}, without init"

    def _newest_committed(self) -> Checkpoint | None:
        """The newest checkpoint by its manifest, after the save in flight has ended."""
        self._session.saver.wait()
        if self._manager is None:
            return None
        try:
            return next(reversed(self._session.store.committed()), None)
        except CheckpointError:  # called while reporting another error
            return None

    def _load_finished(self, step: int) -> bool:
        """Load the last epoch, for the code after the JobRunner: it may not have run yet, and must
        not work on untrained objects. Return whether it exists."""
        session = self._session
        is_loaded = self._manager is not None and session.load_newest()
        if is_loaded and self.step == step and self._progress.ended:
            self._was_finished = True
            session.rank_group.log(
                f"this job has finished at step {step}; it is loaded ({session.dir.root})",
                log=notice,
            )
            return True
        has = f"no checkpoint after step {self.step}" if is_loaded else "no checkpoint"
        session.rank_group.log(
            f"{session.dir.checkpoints} has {has}: what follows the JobRunner would not have what "
            f"was trained until step {step}, so the process ends here"
        )
        return False
