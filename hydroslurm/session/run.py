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
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from hydroslurm import rundir
from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.outcome import Saved
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, State
from hydroslurm.checkpoint.tiers import Found, Tier, newest_over
from hydroslurm.data.position import LoaderPosition, position_of
from hydroslurm.errors import RunEnded, UsageError
from hydroslurm.events import EventKind
from hydroslurm.rundir import RunDir
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller, StopRequest
from hydroslurm.session import finished
from hydroslurm.session.leaving import Departure, Leaver, Orders
from hydroslurm.session.lives import Ending, Ledger, Limits, check_limits
from hydroslurm.session.notice import notice
from hydroslurm.session.objects import Objects
from hydroslurm.session.recording import record_save
from hydroslurm.slurm.allocation import Allocation

DEFAULT_EVERY_S = 600.0
"""Seconds between two periodic saves when nothing was said: what a crash may cost."""


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
        self._allocation = Allocation.from_environ(environ)
        _require_one_rank(self._allocation, environ)
        self._every_steps, self._every_s = _cadence(every_steps, every_s)
        self.dir = _directory(directory, environ)
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
        self._limits = limits or Limits()
        self._ledger = Ledger(self.dir.lives_jsonl)
        self._life: int | None = None
        self._in_epoch = False
        self._accumulate, self._handed_out = 1, 0
        self._to_restore: Mapping[str, Any] | None = None
        self._last_save_s = time.monotonic()
        self._first_step_done = False
        self._durable = CheckpointStore(self.dir.checkpoints)
        self._fast = None if fast_directory is None else _fast_store(fast_directory, self.dir)
        self._controller, self._installed_here = _controller(self.dir, environ)
        with contextlib.ExitStack() as undo:
            if self._installed_here:
                undo.callback(installation.uninstall)
            self._position: LoaderPosition | None = None
            if loader is not None:
                # workers get the stop signals too, and torch would take their death for an error
                self._position = position_of(loader, shield=self._controller.plan.stopping())
            self._saver = Saver(
                self._durable,
                fast=self._fast,
                keep=keep,
                on_save_error=on_save_error,
                exempt=self._controller.exempt,
                tell=lambda event: record_save(self._controller, event),
            )
            self._leaver = Leaver(self._allocation, self._controller, environ=environ)
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
        if self._life is not None:
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
        if self._life is not None:
            raise UsageError("resume() was called already; a run goes on once")
        if (done := finished.read(self.dir)) is not None:
            notice(f"this run has finished at step {done.step}; nothing to do ({self.dir.root})")
            self.close()
            raise Departure.finished()
        found = self._newest()
        step = found.checkpoint.manifest.step if found else 0
        self._begin_life(step)
        if found is None:
            notice(f"a new run, step 0 ({self.dir.root})")
            return False
        state = found.store.load(found.checkpoint, verify=False)  # it has just been
        if found.tier is Tier.DURABLE:
            self._saver.continues_from(found.checkpoint)
        self._apply(state, source=str(found.checkpoint.path))
        notice(f"life {self._life} goes on from step {self.step} ({found.checkpoint.path})")
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
        if self._position is None:
            raise UsageError("batches() needs a loader; give one to Run(loader=...)")
        if accumulate < 1 or epochs < 0:
            raise UsageError(
                f"batches(epochs={epochs}, accumulate={accumulate}): wanted epochs of 0 or more, "
                "accumulate of 1 or more"
            )
        if self._life is None:
            self.resume()
        while self.epoch < epochs:
            self.check_stop()
            yield from self._left_of_epoch(self._position, accumulate)
            self.epoch += 1
            self._in_epoch = False
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
        """
        self._controller.step = self.step
        if not self._first_step_done:
            self._first_step_done = True
            self._controller.record(EventKind.FIRST_STEP, {"life": self._life})
            self._saver.reserve(self._state())  # now that the optimizer has its state
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
        self._controller.record(EventKind.RUN_FINISHED, {"life": self._life})
        self._end_life("finished")
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
            self._end_life("error")
            self.close()

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _stop(self, request: StopRequest) -> None:
        self._controller.record(
            EventKind.SAFE_POINT,
            {"life": self._life, "waited_us": (time.monotonic_ns() - request.mono_ns) / 1e3},
        )
        orders = self._leaver.orders()
        notice(f"{orders.words}; {self._save_by(orders)}")
        self._end_life(orders.ending, step=self._completed_step())
        departure = self._leaver.depart(orders)
        # the signals stay ours: Slurm sends SIGTERM again, and this process is still leaving
        self._saver.close()
        raise departure

    def _save_by(self, orders: Orders) -> str:
        """Save for a stop; what came of it, in words."""
        return self._saver.save_by(
            self._state,
            step=self._completed_step(),
            epoch=self.epoch,
            deadline_mono_s=orders.deadline_mono_s,
            meta={"why": orders.ending},
        ).reason

    def _newest(self) -> Found | None:
        return newest_over(durable=self._durable, fast=self._fast)

    def _state(self) -> State:
        loaded = self._to_restore
        if loaded is not None and self._completed_step() == loaded["counters"]["step"]:
            # nothing was drawn or read since: this very state, with its position in the data
            return State(shared=self._objects.states(), own=loaded)
        own: dict[str, Any] = {
            "rng": rng.capture(),
            "counters": {"step": self._completed_step(), "epoch": self.epoch},
        }
        if self._position is not None and self._in_epoch:
            own["data"] = self._position.state_dict()
        return State(shared=self._objects.states(), own=own)

    def _apply(self, state: State, *, source: str) -> None:
        self._objects.load(state.shared, source=source)
        counters = state.own["counters"]
        self.step, self.epoch = counters["step"], counters["epoch"]
        self._to_restore = state.own
        if self._position is None:
            self._restore_rng()

    def _left_of_epoch(self, position: LoaderPosition, accumulate: int) -> Iterator[Any]:
        """The batches that are left of this epoch, a safe point behind each step."""
        self._accumulate = accumulate
        for batch in self._open_epoch(position):
            self._handed_out += 1
            yield batch
            if self._handed_out == accumulate:
                self._complete_step()
        if self._handed_out:  # the last step of an epoch may have fewer batches
            self._complete_step()

    def _complete_step(self) -> None:
        self._handed_out = 0
        self.step += 1
        self.safe_point()

    def _completed_step(self) -> int:
        """The number of steps that the state stands for. In the body of a loop over batches() the
        batch that was handed out counts already in its position, so it must be trained by now."""
        if self._handed_out in (0, self._accumulate):
            return self.step + bool(self._handed_out)
        raise UsageError(
            f"{self._handed_out} of the {self._accumulate} batches of step {self.step + 1} have "
            "been handed out: a save between them would lose their gradients. Save behind the last"
        )

    def _open_epoch(self, position: LoaderPosition) -> Iterator[Any]:
        """The batches that are left of this epoch."""
        data = (self._to_restore or {}).get("data")
        if data is None:
            self._restore_rng()  # saved between two epochs: a new iterator is still to draw from it
            batches = position.begin_epoch(self.epoch)
        else:
            batches = position.resume_epoch(data)
            self._restore_rng()  # saved within one, after its iterator had drawn
        self._in_epoch = True
        return batches

    def _restore_rng(self) -> None:
        if self._to_restore is not None:
            rng.restore(self._to_restore["rng"])
            self._to_restore = None

    def _is_due(self) -> bool:
        if self._every_steps and self.step % self._every_steps == 0:
            return True
        return bool(self._every_s) and time.monotonic() - self._last_save_s >= self._every_s

    def _begin_life(self, step: int) -> None:
        allocation = self._allocation
        try:
            check_limits(self._ledger.lives(), self._limits, step=step)
        except RunEnded as error:
            notice(str(error))
            self.close()
            raise Departure.must_not_run_again() from error
        self._life = self._ledger.begin(
            step,
            now_epoch_ns=time.time_ns(),
            job_id=allocation.job_id if allocation else None,
            restart_count=allocation.restart_count if allocation else 0,
        )
        self._controller.step = step
        self._controller.record(EventKind.LIFE_BEGAN, {"life": self._life, "step": step})

    def _end_life(self, ending: Ending, *, step: int | None = None) -> None:
        if self._life is None:
            return
        self._controller.record(EventKind.LIFE_ENDED, {"life": self._life, "ending": ending})
        step = self.step if step is None else step
        self._ledger.end(self._life, ending, step=step, now_epoch_ns=time.time_ns())


def _require_one_rank(allocation: Allocation | None, environ: Mapping[str, str]) -> None:
    world = environ.get("WORLD_SIZE", "")
    size = int(world) if world.isdecimal() else allocation.world_size if allocation else 1
    if size > 1:
        raise UsageError(
            f"this job has {size} ranks, and Run saves one so far: ranks do not agree on a common "
            "step yet. Start one task (srun --ntasks=1), or pause only (hydroslurm.install())"
        )


def _cadence(every_steps: int | None, every_s: float | None) -> tuple[int, float]:
    for name, value in (("every_steps", every_steps), ("every_s", every_s)):
        if value is not None and value < 0:
            raise UsageError(f"{name}={value}: wanted 0 (never) or more")
    if every_steps is None and every_s is None:
        return 0, DEFAULT_EVERY_S
    return every_steps or 0, every_s or 0.0


def _directory(given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> RunDir:
    if given is not None:
        return RunDir(Path(given).absolute())
    found = rundir.from_environment(environ)
    if found is None:
        raise UsageError(
            "this process is in no Slurm job, so that there is no run folder to save into; give "
            'one: Run(directory="runs/my-run")'
        )
    return RunDir(found.root.absolute())


def _fast_store(given: str | os.PathLike[str], run: RunDir) -> CheckpointStore:
    """A folder of its own for each run below the one that was given: /dev/shm is everybody's."""
    name = hashlib.sha256(str(run.root).encode()).hexdigest()[:16]
    return CheckpointStore(Path(given).absolute() / f"hydroslurm-{name}")


def _controller(run: RunDir, environ: Mapping[str, str]) -> tuple[Controller, bool]:
    if installation.is_installed():
        return installation.controller(), False
    folder = rundir.from_environment(environ) or run
    return installation.install(run_dir=folder.root, environ=environ), True
