"""A stop that the training does not come to.

A stop takes effect at a safe point. A loader that stalls, a download before the first step or a
collective whose other side hangs never comes to one, and SIGKILL would end the attempt without a
word: it would count as a failure, and a job that has reached its time limit would not come back.
So, shortly before Slurm kills this process, a thread leaves in the place of the training: with the
reason recorded, the job requeued, and the newest checkpoint as all there is.

The ranks leave together. The first one knows the deadline and has the job requeued; the others wait
for it in an agreement, for srun kills the rest when the first of them exits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType

from hydroslurm.checkpoint.saver import Saver
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.threads import thread
from hydroslurm.errors import RanksError
from hydroslurm.runtime.controller import StopRequest
from hydroslurm.training.attempts import CurrentAttempt
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.reporting import warning
from hydroslurm.training.requeue import StopHandler

SAY_S = 10.0
"""A stop that waits this long is reported, with the place where the training is."""
LEAD_S = 4.0
"""How long before the end the process leaves, for the requeue; at most a third of the grace."""
AWAKE_S = 2.0
"""As long as a training has to come to a safe point that was stopped until its time was over."""
_TOPIC = "run/overdue"


@dataclass(eq=False)
class Overdue:
    """Of one run. :meth:`note_request` begins it, :meth:`stand_down` ends it."""

    rank_group: RankGroup
    attempt: CurrentAttempt
    saver: Saver
    stop_handler: StopHandler
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)

    def note_request(self, request: StopRequest) -> None:
        """A stop was requested. Returns at once; called once, in the controller's thread."""
        watch = self._lead if self.rank_group.rank == 0 else self._follow
        thread(watch, request, name="hydroslurm-overdue").start()

    def stand_down(self) -> None:
        """The training has come to its safe point, or the run is closed. Does not return where this
        process is just being ended."""
        self._over.set()
        with self._lock:
            pass

    def _lead(self, request: StopRequest) -> None:
        end_mono_s = self.stop_handler.end_mono_s()
        begin_mono_s = request.mono_ns / 1e9
        due_mono_s = end_mono_s - min(LEAD_S, (end_mono_s - begin_mono_s) / 3)
        say_mono_s = begin_mono_s + SAY_S
        if say_mono_s < due_mono_s:
            if self._is_over_by(say_mono_s):
                return
            warning(
                f"{request.message} {SAY_S:g} s ago, and the training has not come to a safe point "
                f"since: {whereabouts()}. It stops at the next one"
            )
        if self._is_over_by(due_mono_s):
            return
        with self._lock:
            if not self._over.is_set():
                self._leave(request)

    def _follow(self, request: StopRequest) -> None:
        with contextlib.suppress(RanksError):  # the first rank leaves otherwise, or has died
            statuses = self.rank_group.peers.agree(_TOPIC, None)
            with self._lock:
                if not self._over.is_set():
                    self._record(request)
                    _end_process(int(statuses[0] or RUN_AGAIN))

    def _is_over_by(self, mono_s: float) -> bool:
        """Whether there is nothing to watch any more, at this moment at the latest."""
        clock = AwakeClock()
        while (left_s := mono_s - time.monotonic()) > 0:
            if self._over.wait(min(left_s, 1.0)):
                return True
            clock.now_s()
        # the moment is Slurm's, so that no time is discounted; but a training that was stopped with
        # this thread has come to nothing meanwhile, and may need a moment now
        return self._over.wait(AWAKE_S) if clock.absences else self._over.is_set()

    def _leave(self, request: StopRequest) -> None:
        """Leave with all ranks, now. Whatever fails here, the process ends."""
        status = RUN_AGAIN
        try:
            plan = self.stop_handler.plan()
            newest, step = self.saver.durable_step, self.attempt.step
            kept = "no checkpoint" if newest is None else f"step {newest}"
            warning(
                f"{plan.message}; the training has not come to a safe point in "
                f"{self._record(request):.0f} s: {whereabouts()}. It is ended there, in front of "
                f"SIGKILL; {kept} is committed, and step {step} was the last one"
            )
            with contextlib.suppress(Exception):  # a newer attempt has the folder; or a full disk
                self.attempt.end(plan.ending, step=step)
            self.attempt.record_end(plan.ending)
            status = int(self.stop_handler.requeue(plan).code or RUN_AGAIN)
            if self.rank_group.world_size > 1:
                self.rank_group.peers.agree(_TOPIC, status, timeout_s=1.0)
        except Exception as error:
            warning(f"while leaving: {type(error).__name__}: {error}")
        finally:
            _end_process(status)

    def _record(self, request: StopRequest) -> float:
        """Write down where the training is; returns for how long it was waited for, in seconds."""
        waited_s = time.monotonic() - request.mono_ns / 1e9
        message = f"no safe point in {waited_s:.1f} s: {whereabouts()}"
        self.attempt.record(EventKind.AGREEMENT_FAILED, what="stop", message=message)
        return waited_s


def whereabouts() -> str:
    """Where the main thread is, in words: the innermost function, and the line of the script."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its thread has ended"
    at: FrameType | None = frame
    while at is not None and at.f_globals.get("__name__") != "__main__":
        at = at.f_back
    from_script = "" if at in (None, frame) else f", called from {_place(at)}"
    return f"it is in {_place(frame)}{from_script}"


def _place(frame: FrameType | None) -> str:
    assert frame is not None
    code = frame.f_code
    return f"{code.co_name} ({code.co_filename}:{frame.f_lineno})"


def _end_process(status: int) -> None:
    """End this process from another thread than its main one, and the workers that it has started:
    they may hang, too."""
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():
            child.kill()
    os._exit(status)
