"""``Run``: makes a training loop survive preemption.

    run = hydroslurm.Run(model=model, optimizer=optimizer, loader=loader, directory="runs/a")
    for batch in run.batches(epochs=10):
        ...

Safe points lie between two steps. Only there is the state consistent, so that is where periodic
saves begin and stops are obeyed. As long as nothing was requested, a safe point exchanges and
synchronises nothing: it costs two attribute reads and, with ``every_s``, a clock. The same holds
for several ranks: they learn of a stop outside the loop, and agree on one safe point (see
:mod:`hydroslurm.training.rank_group`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.coordination.world import World
from hydroslurm.core import memory
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import ExitForRequeue
from hydroslurm.core.rundir import GENERATION_ENV
from hydroslurm.elastic.folder import ELASTIC_ENV
from hydroslurm.errors import SaveFailed, StaleAttempt, UsageError
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller
from hydroslurm.slurm import run_folders
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training import finished, oversights
from hydroslurm.training.arguments import (
    Cadence,
    controller_for,
    fence_of,
    run_directory,
)
from hydroslurm.training.attempts import CurrentAttempt, Limits, least_number, limits_of
from hydroslurm.training.beginning import Saves
from hydroslurm.training.checks import FirstStep
from hydroslurm.training.contents import Contents
from hydroslurm.training.cursor import Cursor
from hydroslurm.training.ddp_buckets import BucketOrders
from hydroslurm.training.gradients import Gradients
from hydroslurm.training.looping import Looping
from hydroslurm.training.objects import Objects
from hydroslurm.training.oversights import FolderWatch, LoopWatch
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.reporting import SaveRecorder, warning
from hydroslurm.training.requeue import StopHandler
from hydroslurm.training.stopping import Stopping

if TYPE_CHECKING:
    from typing_extensions import Self


class Run(Looping):
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
            neither is given, never when both are 0. A save in the background needs memory for a
            copy of the state: where a limit leaves too little, the training waits for each save.
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

    _is_elastic = False
    """Whether its members may come and go."""

    def __new__(cls, *_: Any, elastic: bool | None = None, **arguments: Any) -> Self:
        """One whose members come and go is of a class of its own."""
        environ = arguments.get("environ") or os.environ
        # below the agent of a member the ranks are started anew for each generation
        is_restarted = bool(environ.get(GENERATION_ENV))
        asked = elastic or (elastic is None and environ.get(ELASTIC_ENV))
        if cls is Run and asked and not is_restarted:
            from hydroslurm.training.elastic_run import ElasticRun

            return cast("Self", super().__new__(ElasticRun))
        if elastic is None and environ.get(ELASTIC_ENV) and not cls._is_elastic:
            raise UsageError(
                f"this is a member of an elastic job, and {cls.__name__} trains with a fixed "
                "number of ranks: each member would train alone. Set `engine: restart` in "
                "`elastic:`, which starts its ranks anew at each change, put hydroslurm.Run around "
                "a loop of your own, or leave `elastic:` out of the job spec"
            )
        return super().__new__(cls)

    _keep_epochs: int | None = None
    """How many checkpoints of kind ``epoch`` stay, which only a job makes; None: all of them."""

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
        del elastic  # made an ElasticRun of this, which knows
        oversights.require_place()
        environ = os.environ if environ is None else environ
        allocation = Allocation.from_environ(environ)
        self._cadence = Cadence.of(every_steps, every_s, environ)
        self.dir = run_directory(directory, environ)
        if directory is None:  # a script makes the same runs, in the same order, in each attempt
            run_folders.warn_of_doubt(self.dir)
            self.dir = finished.next_unfinished(self.dir).claim()
        finished.require_unfinished(self.dir)
        self._folder = FolderWatch(self.dir.root)
        self._step = 0
        self._epoch = 0
        self._generation = int(environ.get(GENERATION_ENV) or 0)
        self._begins_anew = not resume and not (allocation and allocation.restart_count)
        self._has_begun = self._is_closed = False
        self._resumed_unasked: bool | None = None
        self._watch = LoopWatch()
        self._model = model
        self._objects = Objects()
        self._cursor = Cursor()
        self._first_step = FirstStep()
        self._gradients = Gradients(self._objects.by_name)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        present = {name: thing for name, thing in named.items() if thing is not None}
        for name, thing in [*present.items(), *(extra or {}).items()]:
            self._add(name, thing)
        self._saves = Saves()
        self._last_save_s = time.monotonic()
        self._fence = fence_of(self.dir, allocation)
        self._controller, self._installed_here = self._install(environ)
        self._world = World.from_environ(environ)
        self._rank_group = RankGroup(self._controller)
        self._contents = Contents()
        self._bucket_orders = BucketOrders(
            self._objects.as_given, world_size=self._rank_group.world_size
        )
        self._store = CheckpointStore(
            self.dir.checkpoints, peers=self._rank_group.peers, fence=self._fence
        )
        with contextlib.ExitStack() as undo:
            if self._installed_here:
                undo.callback(installation.uninstall)
            if loader is not None:
                self._use(loader)
            self._attempt = CurrentAttempt(
                self.dir,
                self._controller,
                limits=limits_of(limits, environ),
                fence=self._fence,
                allocation=allocation,
                at_least=least_number(environ, allocation),
            )
            self._saver = self._make_saver(keep=keep, on_save_error=on_save_error)
            self._stopping = self._take_over_stops(allocation, environ)
            undo.pop_all()
        oversights.opened(self, self._controller)

    @property
    def generation(self) -> int:
        """How often the members of an elastic run have changed, from 1; 0 for all others."""
        return self._generation

    def _install(self, environ: Mapping[str, str]) -> tuple[Controller, bool]:
        """The controller of this process, and whether it was installed for this run."""
        return controller_for(self.dir, environ)

    def _make_saver(self, *, keep: int, on_save_error: Literal["warn", "fail"]) -> Saver:
        return Saver(
            self._store,
            keep=keep,
            keep_epochs=self._keep_epochs,
            on_save_error=on_save_error,
            exempt=self._controller.exempt,
            tell=SaveRecorder(self._controller),
            room=functools.partial(memory.room, ranks_here=self._world.local_world_size),
        )

    def _take_over_stops(
        self, allocation: Allocation | None, environ: Mapping[str, str]
    ) -> Stopping:
        stop_handler = StopHandler(
            allocation,
            self._controller,
            environ=environ,
            fence=self._fence,
            reads_ahead=self._rank_group.rank == 0,
        )
        stopping = Stopping(
            self._rank_group, attempt=self._attempt, saver=self._saver, stop_handler=stop_handler
        )
        self._controller.claim_stops(stopping.note_request)
        return stopping

    def _use(self, loader: Any) -> None:
        rank_group = self._rank_group
        self._cursor.use(loader, rank=rank_group.rank, world_size=rank_group.world_size)

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
        if not self._has_begun:
            self._begin_unasked("the run is to be finished", may_load=False)
        self._saver.wait()
        self._cursor.restore_rng()  # for what follows, where there was nothing left to train
        self._count_step_left_early()
        self._rank_group.exchange("finish", self._step)
        if not self._is_saved():
            try:
                self.save()
            except SaveFailed as error:
                self._log_once(f"{error}. A restart trains on from there")
        self._attempt.record(EventKind.RUN_FINISHED)
        with self._leaving_when_stale():
            self._rank_group.decide("finish", self._write_finished)
        self._attempt.record_end("finished")
        self._leave()

    def close(self) -> None:
        """Wait for a save in flight and restore the signal handlers; no other cleanup is needed."""
        self._is_closed = True
        oversights.closed(self)
        self._stopping.stand_down()
        self._watch.close()
        self._first_step.close()
        try:
            self._saver.close()
        finally:
            if installation.is_installed():
                self._controller.release_stops()
                if self._installed_here:
                    installation.uninstall()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        elif not isinstance(error, ExitForRequeue):
            if isinstance(error, Exception):
                self._leave_if_cut_short(error)
            if self._rank_group.rank == 0:
                with contextlib.suppress(StaleAttempt):  # the newer one writes the ledger
                    self._attempt.end("error", step=self._step)
            self._attempt.record_end("error")
            self.close()

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _leave_if_cut_short(self, error: Exception) -> None:
        """A rank that died in the middle of a stop makes the collectives of the others fail. That
        is no error of the program: within the grace its status would end the job.

        Raises:
            ExitForRequeue: as of a stop that nothing could be saved at.
        """
        request = self._controller.stop_request
        if request is None or self._attempt.number is None:
            return
        broken = self._rank_group.broken()
        if broken is None:
            return
        warning(f"while the ranks were about to stop: {type(error).__name__}: {error}")
        raise self._stopping.leave_unsaved(broken, request, step=self._step) from error

    def _others_have_ended(self) -> bool:
        """Asked as this process ends: whether those that count have ended well."""
        return True

    def _is_saved(self) -> bool:
        """Whether the last step is, or is not to be."""
        return self._step == (self._saver.durable_step or 0)

    def _rest_is_redone(self) -> bool:
        """Whether a restart repeats what follows the training, until a process has done it."""
        return True

    def _write_finished(self) -> None:
        self._fence.check("the end of the run")
        self._attempt.end("finished", step=self._step)
        if self._rest_is_redone():
            others = self._others_have_ended
            finished.at_good_end(self.dir, step=self._step, fence=self._fence, others=others)
        else:
            finished.write(self.dir, step=self._step)
