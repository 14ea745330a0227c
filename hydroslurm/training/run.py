"""``Run``: makes a training loop survive preemption.

    run = hydroslurm.Run(model=model, optimizer=optimizer, loader=loader, directory="runs/a")
    for batch in run.batches(epochs=10):
        ...

The public interface to a :class:`~hydroslurm.training.session.Session`, for a loop of one's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, final

from hydroslurm.checkpoint.saver import Saved
from hydroslurm.core.rundir import ELASTIC_ENV, GENERATION_ENV, RunDir
from hydroslurm.training.attempts import Limits
from hydroslurm.training.loop import Loop
from hydroslurm.training.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self


@final
class Run:
    """One training over all its attempts: saved, stopped, requeued and resumed.

    Takes over SIGTERM and the warning signal (see :meth:`Controller.claim_stops`); both mean:
    continue to the next safe point, save, and exit. Installs pausing if that was not done yet.

    A process has one at a time, used from the main thread. As a context manager it also finishes
    the run: a restart of a finished run exits at once, with status 0.

    A run has finished when its block has ended and its process exits with status 0 (with several
    ranks, that of rank 0). If anything ends the process in between (SIGTERM, an exception, a node
    failure), the next start resumes at the last step, trains nothing, and repeats what follows the
    loop, inside the block and after it, until that has completed once. So write an export under
    another name and rename it.

    With several ranks, each makes the same calls: all load, save and stop together at one step,
    whichever of them was signalled. Each saves its shard, its random numbers and its position in
    the data; a run may resume with another number of ranks. They find each other by the variables
    of Slurm or torchrun.

    Args:
        model, optimizer, scheduler, scaler: what is saved under these names; all optional.
        loader: what :meth:`batches` iterates: a DataLoader, torchdata's StatefulDataLoader, or any
            iterable (see :func:`hydroslurm.data.position.position_of`).
        directory: where the run keeps its checkpoints and attempts, on a file system that all nodes
            share; default: the run folder of this training in its job (``hydroslurm-runs/JOBID``,
            ``JOBID.2`` ...), and for a further run of one process ``fit-N`` in it.
        every_steps, every_s: how often to save in the background while training; every 600 s when
            neither is given, never when both are 0. A run that loses work often saves more often
            than ``every_s``. A save in the background needs memory for a copy of the state: where a
            limit leaves too little, the training waits for each save.
        keep: how many periodic checkpoints to keep, at least 2; two of stops are kept in addition.
        extra: more objects by name, each with ``state_dict`` and ``load_state_dict``. They are
            loaded in this order, before model, optimizer, scheduler and scaler, so that they can
            rebuild what was added to those while training, such as a parameter group.
        on_save_error: ``warn`` continues when a periodic save fails, ``fail`` raises SaveFailed at
            the next safe point.
        limits: how often the run may be restarted.
        elastic: the run's members may come and go while it trains (docs/elastic.md). Default:
            whether this process was started as one of an elastic run.
        resume: False starts at step 0 and sets aside what is committed in the folder. A restart of
            the same job still resumes, from what its first start has saved.

    Raises:
        UsageError: a wrong argument; no directory outside of a job; another Run is open in this
            process, or has finished in this folder in this process; not the main thread.
        InstallError, GateError: as :func:`hydroslurm.install`.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        directory: str | os.PathLike[str] | None = None,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 2,
        extra: Mapping[str, Any] | None = None,
        on_save_error: Literal["warn", "fail"] = "warn",
        limits: Limits | None = None,
        resume: bool = True,
        elastic: bool | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        present = {name: thing for name, thing in named.items() if thing is not None}
        self._elastic = None
        # below the agent of a member the ranks are started anew for each generation
        self._generation = int(environ.get(GENERATION_ENV) or 0)
        is_asked = elastic or (elastic is None and environ.get(ELASTIC_ENV))
        if is_asked and not self._generation:
            from hydroslurm.training.elastic_rank import ElasticRank

            self._elastic = ElasticRank(model, environ)
            directory = self._elastic.run_folder if directory is None else directory
        self._session = Session(
            [*present.items(), *(extra or {}).items()],
            owner="Run" if elastic is None and self._elastic is None else "",
            loader=loader,
            directory=directory,
            every_steps=every_steps,
            every_s=every_s,
            keep=keep,
            on_save_error=on_save_error,
            limits=limits,
            resume=resume,
            elastic=self._elastic,
            environ=environ,
        )
        self._loop = Loop(self._session, elastic=self._elastic)

    @property
    def dir(self) -> RunDir:
        """The run's folder."""
        return self._session.dir

    @property
    def generation(self) -> int:
        """How often the members of an elastic run have changed, from 1; 0 for all others."""
        return self._generation if self._elastic is None else self._elastic.generation

    # --- where it is
    # --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Training steps completed. Settable, for loops that do not use :meth:`batches`.

        A script that reads it wants to know where to resume, so the first read resumes the run if
        :meth:`resume` was not called: with several ranks, read it on all of them.

        Raises:
            UsageError: the run was not resumed, a checkpoint is committed, and something may have
                been trained since; or it was set before the run was resumed.
        """
        self._session.require_begun("run.step was read")
        return self._session.cursor.step

    @step.setter
    def step(self, step: int) -> None:
        self._session.require_begun("run.step was set", may_load=False)
        self._session.saves.behind_batches = False
        self._session.cursor.step = step

    @property
    def epoch(self) -> int:
        """The epoch that is being trained, from 0; as :attr:`step`."""
        self._session.require_begun("run.epoch was read")
        return self._session.cursor.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._session.require_begun("run.epoch was set", may_load=False)
        self._session.saves.behind_batches = False
        self._session.cursor.epoch = epoch

    # --- registering and resuming
    # --------------------------------------------------------------------------------------------

    def register(self, name: str, thing: Any, *, per_rank: bool = False) -> None:
        """Save one more object, like those in ``extra``; before :meth:`resume`.

        Args:
            thing: an object with ``state_dict`` and ``load_state_dict``, or a random generator
                (``torch.Generator``, ``random.Random``, NumPy's ``Generator`` or ``RandomState``).
            per_rank: each rank saves its own, such as an environment. Else the object is the same
                on all ranks. Generators are always per rank.

        Raises:
            UsageError: the run has begun, the name is taken, or it has no state.
        """
        self._session.register(name, thing, per_rank=per_rank)

    def resume(self) -> bool:
        """Resume from the newest committed checkpoint; False when there is none.

        A run that has finished exits with status 0 here; one that must not continue (a limit is
        spent, or attempts make no progress) with 93. From here on the folder belongs to this
        attempt: an older one that is still alive can neither save nor remove anything there, and
        exits with 93 when it tries. :meth:`batches` and the first read of :attr:`step` or
        :attr:`epoch` call it if it was not called before.

        Raises:
            RunFolderError: the folder is another training's: of another script, or of this start of
                the job, where it still runs.
            StateMismatch: the checkpoint belongs to other objects; names the keys.
            UsageError: called twice.
        """
        return self._session.resume()

    # --- loops
    # --------------------------------------------------------------------------------------------

    def batches(self, *, epochs: int, accumulate: int = 1, check: bool = True) -> Iterator[Any]:
        """Yield the remaining batches of ``epochs`` epochs; each is one step.

        Each is followed by a safe point. Leaving the loop early leaves the run where it is.

        At the end the state is saved as one of the last epoch, with all its batches used. What
        follows in the script (an evaluation, ``scheduler.step()``) belongs to that epoch until the
        next :meth:`batches` or :meth:`save`: if the attempt ends there, the next one resumes after
        the last batch and does it once, from the same state.

        Args:
            accumulate: batches per step. Safe points follow only complete steps. A loop that leaves
                it at 1 and adds gradients up itself has them saved.
            check: as of :meth:`steps`.

        Raises:
            UsageError: there is no loader; or as :meth:`steps`.
        """
        return self._loop.batches(epochs=epochs, accumulate=accumulate, check=check)

    def shards(self, batch: Any) -> Iterator[Any]:
        """Yield the parts of a batch that each have a forward and a backward of their own: the
        batch itself, or with ``summation: fixed_order`` in an elastic run this rank's shards.

            for batch in run.batches(epochs=10):
                optimizer.zero_grad()
                for x, y in run.shards(batch):
                    loss_of(model(x), y).backward()
                optimizer.step()

        The loss is the mean over the shard's samples. Behind the loop the gradients are those of
        the mean over all samples of the step. Random numbers are those of the shard in the loop,
        and the same on all ranks outside. A rank may have no shard in the last step of an epoch.
        """
        return iter((batch,)) if self._elastic is None else self._elastic.shards(batch)

    def steps(self, total: int, *, check: bool = True) -> Iterator[int]:
        """Yield the numbers of the steps that are left, from :attr:`step` to ``total - 1``: for
        loops that fetch their own batches.

            for step in run.steps(10_000):
                x, y = get_batch()
                ...

        Each is followed by a safe point, so the body is one whole step: with its batches, all of
        its accumulation, and the optimizers' steps. Variables of the loop and what hangs in them
        come back by themselves, random generators and a batch that was fetched ahead as well; an
        iterator does not (docs/own-loop.md).

        At the end the state is saved; what follows the loop is repeated if the attempt ends there,
        as with :meth:`batches`. A step that was left with ``break`` counts as trained.

        Args:
            total: how many steps the run has, those of earlier attempts included.
            check: whether to look, at the first step of each attempt, for optimizers, schedulers,
                weights, scalers and iterators that are used and not saved.

        Raises:
            UsageError: one was found; or the loop is within another one.
        """
        return self._loop.steps(total, check=check)

    # --- between two steps
    # --------------------------------------------------------------------------------------------

    def safe_point(self) -> None:
        """Declare a step complete and the state consistent: save if a save is due, and exit if a
        stop was requested. :meth:`batches` calls it; your own loop does so once per step.

        In the body of a loop over :meth:`batches`, call it, :meth:`check_stop` and :meth:`save`
        only after the batch was trained: a batch counts as used once it was handed out.

        Raises:
            SystemExit: the run was saved and exits (75, or 143 when it was cancelled).
            SaveFailed: an earlier save failed, with ``on_save_error="fail"``.
            UnsavableState: at the first step of an attempt; the state holds something that only
                pickling could save.
            UsageError: the run was not resumed, and a checkpoint is committed; or the optimizer
                steps, and nobody counts.
        """
        self._session.safe_point()

    def check_stop(self) -> None:
        """Exit if a stop was requested: for long work between two safe points, which a stop would
        otherwise wait for.

        This saves the state as it is now, and the next attempt resumes from ``run.step`` and
        ``run.epoch``; it does not repeat what follows this call. Two places are exact: after a
        loop over :meth:`batches` nothing is saved and all that follows the loop is repeated; and
        within :meth:`evaluation`.

        Raises:
            SystemExit: as :meth:`safe_point`.
        """
        self._session.check_stop()

    def evaluation(self) -> AbstractContextManager[None]:
        """A block that a stop cuts off and the next attempt repeats, such as an evaluation.

            for batch in run.batches(epochs=run.epoch + 1):
                ...
            with run.evaluation():
                for batch in test_loader:
                    run.check_stop()
                    ...
            scheduler.step()

        A stop is obeyed where the block begins and at each :meth:`check_stop` in it, with the state
        and the random numbers from its beginning. The block must not change anything that is saved;
        what does (``scheduler.step()``) belongs after it and is then done once. With your own loop
        the script has to return here from ``run.step`` and ``run.epoch`` as they are here: count
        the epoch after the block.

        Raises:
            SystemExit: as :meth:`safe_point`.
            UsageError: in the body of a loop over :meth:`batches`, to which no attempt can return;
                within another such block.
        """
        return self._loop.evaluation()

    @property
    def stop_requested(self) -> bool:
        """Whether one of the next safe points will be the last. Some ranks know this sooner than
        others, so do not leave a loop by it that all ranks have to leave together."""
        return self._session.rank_group.stop_wanted()

    def request_stop(self) -> None:
        """Request a stop from inside the program: save, requeue and exit at the next safe point."""
        self._session.controller.request_stop()

    def save(self, *, kind: str = "manual") -> Saved:
        """Save now; return when the checkpoint is committed.

        Raises:
            SaveFailed: it is not; what was committed before is whole.
            UnsavableState: the state holds something that cannot be saved.
            UsageError: as :meth:`safe_point`; or within :meth:`evaluation`.
        """
        return self._session.save(kind=kind)

    # --- how it ends
    # --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Declare the training done: save its last step unless that is saved already, and close.
        The marker that makes a restart exit at once is written when this process exits with status
        0: see :class:`Run`.

        Raises:
            AgreementFailed: a rank has failed before it was done, so that the run is not finished.
            UsageError: the run was not resumed, and a checkpoint is committed.
        """
        self._session.finish()

    def close(self) -> None:
        """Wait for a save in flight and restore the signal handlers; no other cleanup is needed."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._session.fail(error)
