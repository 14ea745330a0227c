"""``Run``: the loop that a user writes around their training, made to survive.

    run = hydroslurm.Run(model=model, optimizer=optimizer, loader=loader, directory="runs/a")
    for batch in run.batches(epochs=10):
        ...

Safe points lie between two steps. There, and only there, is the state consistent: periodic saves
begin there, and a stop is obeyed there. Nothing is exchanged, synchronised or asked for at a safe
point as long as nobody wants anything: two attribute reads and, with ``every_s``, a clock.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

from hydroslurm.checkpoint.deadline import SAFETY
from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, State
from hydroslurm.checkpoint.tiers import Found, Tier, newest_over
from hydroslurm.errors import RunEnded, SaveFailed, UsageError
from hydroslurm.events import EventKind
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import StopRequest
from hydroslurm.session import finished
from hydroslurm.session.arguments import (
    Cadence,
    controller_for,
    fast_store,
    require_one_rank,
    run_directory,
)
from hydroslurm.session.cursor import Cursor
from hydroslurm.session.leaving import Departure, Leaver
from hydroslurm.session.life import Life
from hydroslurm.session.lives import Limits
from hydroslurm.session.notice import notice
from hydroslurm.session.objects import Objects, require_savable
from hydroslurm.session.recording import record_save
from hydroslurm.slurm.allocation import Allocation


class Run:
    """One training over all its lives: saved, stopped, requeued and continued.

    Takes SIGTERM and the warning signal over (see :meth:`Controller.claim_stops`); both mean: go on
    to the next safe point, save, and leave. Installs pausing where that was not done yet.

    One per process, used from the main thread. As a context manager it also writes the marker that
    lets a restart of a finished run leave at once.

    Args:
        model, optimizer, scheduler, scaler: what is saved under these names; all optional.
        loader: what :meth:`batches` iterates: a DataLoader, torchdata's StatefulDataLoader, or any
            iterable (see :func:`hydroslurm.data.position.position_of`).
        directory: where the run keeps its checkpoints, lives and marker, on a file system that all
            nodes share; default: the run folder of this job (``hydroslurm-runs/JOBID``).
        every_steps, every_s: save so often while training, in the background; every 600 s when
            neither is given, never when both are 0.
        keep: how many periodic checkpoints stay, at least 2. Two of stops stay besides.
        extra: more objects by name, each with ``state_dict`` and ``load_state_dict``.
        fast_directory: a local folder (/dev/shm, NVMe) that is written first; each run makes one
            of its own in it. It survives the process, and a requeue to the same node, not the node.
        on_save_error: ``warn`` goes on when a periodic save fails, ``fail`` raises SaveFailed at
            the next safe point.
        limits: how often the run may be started again.

    Attributes:
        step: training steps completed. Settable, for loops that do not use :meth:`batches`.
        epoch: the epoch that is being trained, from 0.

    Raises:
        UsageError: a wrong argument; several ranks; no directory outside of a job.
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
        fast_directory: str | os.PathLike[str] | None = None,
        on_save_error: Literal["warn", "fail"] = "warn",
        limits: Limits | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        allocation = Allocation.from_environ(environ)
        require_one_rank(allocation, environ)
        self._cadence = Cadence.of(every_steps, every_s)
        self.dir = run_directory(directory, environ)
        self.step = 0
        self.epoch = 0
        self._objects = Objects()
        for name, thing in {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
        }.items():
            if thing is not None:
                self._objects.add(name, thing)
        for name, thing in (extra or {}).items():
            self._objects.add(name, thing)
        self._cursor = Cursor()
        self._last_save_s = time.monotonic()
        self._durable = CheckpointStore(self.dir.checkpoints)
        self._fast = fast_store(fast_directory, self.dir)
        self._controller, self._installed_here = controller_for(self.dir, environ)
        with contextlib.ExitStack() as undo:
            if self._installed_here:
                undo.callback(installation.uninstall)
            if loader is not None:
                self._cursor.use(loader, shield=self._controller.plan.stopping())
            self._life = Life(
                self.dir, self._controller, limits=limits or Limits(), allocation=allocation
            )
            self._saver = Saver(
                self._durable,
                fast=self._fast,
                keep=keep,
                on_save_error=on_save_error,
                exempt=self._controller.exempt,
                tell=lambda event: record_save(self._controller, event),
            )
            self._leaver = Leaver(allocation, self._controller, environ=environ)
            self._controller.claim_stops(self._leaver.hear)
            undo.pop_all()

    # --- registering and going on
    # --------------------------------------------------------------------------------------------

    def register(self, name: str, thing: Any) -> None:
        """Save one more object; before :meth:`resume`.

        Raises:
            UsageError: the run has begun, the name is taken, or it is not an object with
                ``state_dict`` and ``load_state_dict``.
        """
        if self._life.number is not None:
            raise UsageError(f"register({name!r}) comes too late: the run has been resumed already")
        self._objects.add(name, thing)

    def resume(self) -> bool:
        """Go on from the newest committed checkpoint; False when there is none.

        A run that has finished leaves with status 0 here; one that must not go on (a limit is
        spent, or lives pass without progress) with 93. Called by :meth:`batches` when it was not
        called before.

        Raises:
            StateMismatch: the checkpoint belongs to other objects; names the keys.
            UsageError: called twice.
        """
        if self._life.number is not None:
            raise UsageError("resume() was called already; a run goes on once")
        if (done := finished.read(self.dir)) is not None:
            notice(f"this run has finished at step {done.step}; nothing to do ({self.dir.root})")
            self.close()
            raise Departure.finished()
        found = self._newest()
        try:
            self._life.begin(found.checkpoint.step if found else 0)
        except RunEnded as error:
            notice(str(error))
            self.close()
            raise Departure.must_not_run_again() from error
        if found is None:
            notice(f"a new run, step 0 ({self.dir.root})")
            return False
        state = found.store.load(found.checkpoint, verify=False)  # it has just been
        if found.tier is Tier.DURABLE:
            self._saver.continues_from(found.checkpoint)
        self._apply(state, source=str(found.checkpoint.path))
        notice(f"life {self._life.number} goes on from step {self.step} ({found.checkpoint.path})")
        return True

    # --- the loop
    # --------------------------------------------------------------------------------------------

    def batches(self, *, epochs: int, accumulate: int = 1) -> Iterator[Any]:
        """Yield the batches that are left of ``epochs`` epochs; one is one step.

        A safe point lies behind each. Leaving the loop early leaves the run where it is.

        Args:
            accumulate: safe points only behind every so many batches, which are then one step:
                gradients that are being accumulated are not saved.
        """
        if self._cursor.position is None:
            raise UsageError("batches() needs a loader; give one to Run(loader=...)")
        if accumulate < 1 or epochs < 0:
            raise UsageError(
                f"batches(epochs={epochs}, accumulate={accumulate}): wanted epochs of 0 or more, "
                "accumulate of 1 or more"
            )
        if self._life.number is None:
            self.resume()
        while self.epoch < epochs:
            self.check_stop()
            yield from self._left_of_epoch(accumulate)
            self.epoch += 1
            self._cursor.in_epoch = False
        self._saver.wait()
        if self.step != self._saver.durable_step:
            self.save()

    def safe_point(self) -> None:
        """Say that a step is complete and the state consistent: save if it is time to, and leave if
        a stop was asked for. :meth:`batches` calls it; a loop of one's own does, once per step.

        In the body of a loop over :meth:`batches` call it, :meth:`check_stop` and :meth:`save` only
        when the batch has been trained: it counts as used from the moment it was handed out.

        Raises:
            SystemExit: the run was saved and leaves (75, or 143 when it was cancelled).
            SaveFailed: an earlier save failed, with ``on_save_error="fail"``.
            UnsavableState: at the first step of a life; the state holds something that could be
                saved by pickling only.
        """
        if self._life.note_step(self.step):
            state = self._state()  # now that the optimizer has its own
            require_savable(state)
            self._saver.reserve(state)
        self.check_stop()
        self._saver.poll()
        if self._is_due():
            self._last_save_s = time.monotonic()
            step = self._completed_step()
            self._saver.start(self._state(), step=step, epoch=self.epoch, kind="periodic")

    def check_stop(self) -> None:
        """Leave if a stop was asked for: for long evaluations, which a stop would else wait for.

        Raises:
            SystemExit: as :meth:`safe_point`.
        """
        if self._controller.stop_request is not None:
            self._stop(self._controller.stop_request)

    @property
    def stop_requested(self) -> bool:
        """Whether the next safe point will be the last."""
        return self._controller.stop_request is not None

    def request_stop(self) -> None:
        """Ask for a stop from inside the program: save, requeue, leave at the next safe point."""
        self._controller.request_stop()

    def save(self, *, kind: str = "manual") -> Saved:
        """Save now, and come back when it is committed on the durable tier.

        Raises:
            SaveFailed: it is not; what was committed before is whole.
            UnsavableState: the state holds something that cannot be saved.
        """
        step = self._completed_step()
        saved = self._saver.save(self._state(), step=step, epoch=self.epoch, kind=kind)
        self._last_save_s = time.monotonic()
        return saved

    # --- the end
    # --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the marker that makes a restart leave at once, and close."""
        self._saver.wait()
        self._life.record(EventKind.RUN_FINISHED)
        self._life.end("finished", step=self.step)
        finished.write(self.dir, step=self.step)
        self.close()

    def close(self) -> None:
        """Wait for a save in flight and give the signals back. Nothing else is needed."""
        self._saver.close()
        if installation.is_installed():
            self._controller.release_stops()
            if self._installed_here:
                installation.uninstall()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        elif not isinstance(error, Departure):
            self._life.end("error", step=self.step)
            self.close()

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _stop(self, request: StopRequest) -> None:
        waited_us = (time.monotonic_ns() - request.mono_ns) / 1e3
        self._life.record(EventKind.SAFE_POINT, waited_us=waited_us)
        self._leaver.hear(request)  # the controller's thread may be about to
        certain_s = self._leaver.certain_mono_s()
        if time.monotonic() + SAFETY * self._saver.estimate().durable.seconds < certain_s:
            saved = self._save_by(certain_s)  # in time whatever Slurm answers: do not wait for it
            orders = self._leaver.orders()
        else:
            orders = self._leaver.orders()
            saved = self._save_by(orders.deadline_mono_s)
        step = self._completed_step()
        late = self._saver.durable_step != step and not self._saver.wait(timeout_s=0.0)
        if late:  # the disk is slower than it was
            self._saver.wait(timeout_s=max(0.0, orders.deadline_mono_s - time.monotonic()))
            saved += f"; newest committed step: {self._saver.durable_step}"
        notice(f"{orders.words}; {saved}")
        self._life.end(orders.ending, step=step)
        departure = self._leaver.depart(orders)
        # the signals stay ours: Slurm sends SIGTERM again, and this process is still leaving
        with contextlib.suppress(SaveFailed):  # told above; what matters now is the status
            self._saver.close()
        raise departure

    def _save_by(self, deadline_mono_s: float) -> str:
        """Save for a stop; what came of it, in words."""
        return self._saver.save_by(
            self._state,
            step=self._completed_step(),
            epoch=self.epoch,
            deadline_mono_s=deadline_mono_s,
        ).reason

    def _newest(self) -> Found | None:
        return newest_over(durable=self._durable, fast=self._fast)

    def _state(self) -> State:
        own = self._cursor.state(step=self._completed_step(), epoch=self.epoch)
        return State(shared=self._objects.states(), own=own)

    def _apply(self, state: State, *, source: str) -> None:
        self._objects.load(state.shared, source=source)
        counters = state.own["counters"]
        self.step, self.epoch = counters["step"], counters["epoch"]
        self._cursor.load(state.own)

    def _left_of_epoch(self, accumulate: int) -> Iterator[Any]:
        """The batches that are left of this epoch, a safe point behind each step."""
        for batch in self._cursor.batches(self.epoch, accumulate=accumulate):
            yield batch
            if self._cursor.step_is_full:
                self._complete_step()
        if self._cursor.step_has_begun:  # the last step of an epoch may have fewer batches
            self._complete_step()

    def _complete_step(self) -> None:
        self._cursor.count_step()
        self.step += 1
        self.safe_point()

    def _completed_step(self) -> int:
        return self._cursor.completed(self.step)

    def _is_due(self) -> bool:
        return self._cadence.is_due(self.step, self._last_save_s)
