"""Stopping at a safe point, which all ranks have reached together.

All ranks must do the same, within what is left of the shortest grace: is there time to ask Slurm
first, what can still be saved, is the job requeued. So each question is answered once, for all
ranks, before any rank acts on the answer. And no rank exits before the job is requeued, because
srun kills the other ranks when the first one exits with a status other than 0.

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
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from hydroslurm.checkpoint.deadline import SAFETY
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import (
    MUST_NOT_RUN_AGAIN,
    RUN_AGAIN,
    ExitForRequeue,
    end_process,
)
from hydroslurm.core.fence import Fence
from hydroslurm.core.rundir import GENERATION_ENV
from hydroslurm.core.status import read_status
from hydroslurm.core.threads import thread
from hydroslurm.errors import (
    CoordinatorLost,
    RanksError,
    RunFolderError,
    SaveFailed,
    StaleAttempt,
)
from hydroslurm.runtime.controller import Controller, StopRequest
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.attempts import CurrentAttempt, StopPlan
from hydroslurm.training.rank_group import RankGroup, notice, warning

if TYPE_CHECKING:
    from hydroslurm.training.requeue import JobStop

SAY_S = 10.0
"""A stop that waits this long is reported, with the place where the training is."""
LEAD_S = 4.0
"""How long before the end the process leaves, for the requeue; at most a third of the grace."""
AWAKE_S = 2.0
"""As long as a training has to come to a safe point that was stopped until its time was over."""
_TOPIC = "run/overdue"


@dataclass(frozen=True)
class SaveWindow:
    """Until when all ranks may save.

    Attributes:
        deadline_mono_s: on this rank's ``time.monotonic()``.
        plan: what the stop means; None while the save need not wait for Slurm's answer.
    """

    deadline_mono_s: float
    plan: StopPlan | None


class StopHandler:
    """What a stop means for these ranks: one of them asks Slurm, and all do the same.

    :meth:`note_request` may be called from any thread; the rest belongs to the training thread.
    """

    def __init__(
        self,
        allocation: Allocation | None,
        controller: Controller,
        rank_group: RankGroup,
        *,
        environ: Mapping[str, str],
        fence: Fence | None = None,
    ) -> None:
        """``fence``: of the run's folder; an attempt that does not hold it requeues nothing."""
        self._rank_group = rank_group
        self._is_member = bool(environ.get(GENERATION_ENV))
        self._request: StopRequest | None = None
        self._job: JobStop | None = None
        if allocation is not None:  # loaded now: at a stop there is little time
            from hydroslurm.training.requeue import JobStop

            self._job = JobStop(allocation, controller, environ=environ, fence=fence)
            if rank_group.rank == 0:  # another one asks only when it has to decide in its place
                self._job.ask()

    def note_request(self, request: StopRequest) -> None:
        """Start to find out why a stop was requested. Returns at once; the first request counts."""
        if self._request is None:
            self._request = request
        if self._job is not None:
            self._job.note_request(request)

    def certain_mono_s(self) -> float:
        """Until when this process survives whatever Slurm will answer (``time.monotonic()``);
        infinite where nothing will kill it."""
        assert self._request is not None, "certain_mono_s() before note_request()"
        return math.inf if self._job is None else self._job.certain_mono_s(self._request)

    def end_mono_s(self) -> float:
        """When this process is killed, as far as Slurm has said so (``time.monotonic()``); infinite
        where it lets the job go on, or does not answer. Waits for its answer."""
        return math.inf if self._job is None or self._is_member else self._job.end_mono_s()

    def agree(self, *, ranks_gone: bool = False) -> StopPlan:
        """Have one rank ask Slurm what the stop means, for all; as :meth:`plan`.

        Raises:
            AgreementFailed, CoordinatorLost: the answer cannot reach all ranks.
        """

        def ask() -> dict[str, Any]:
            plan = self.plan(ranks_gone=ranks_gone)
            # a duration: monotonic clocks of two nodes have nothing in common
            left_s = plan.deadline_mono_s - time.monotonic()
            return {**asdict(plan), "deadline_mono_s": _to_json(left_s)}

        agreed = dict(self._rank_group.decide("plan", ask))
        left_s = _from_json(agreed.pop("deadline_mono_s"))
        return StopPlan(**agreed, deadline_mono_s=time.monotonic() + left_s)

    def plan(self, *, ranks_gone: bool = False) -> StopPlan:
        """Decide what this stop means; waits a moment for Slurm's answer.

        Args:
            ranks_gone: some ranks have died, or do not answer.
        """
        request, job = self._request, self._job
        assert request is not None, "plan() before note_request()"
        plan = self.plan_unasked()
        if plan is None:
            assert job is not None
            return job.plan(request, ranks_gone=ranks_gone)
        return plan if job is None else replace(plan, deadline_mono_s=job.deadline_mono_s(request))

    def plan_unasked(self) -> StopPlan | None:
        """What a stop means that Slurm need not be asked about, as there is no deadline; None for
        all others. A member's ranks are started anew whatever the reason is."""
        if self._request is None or not (self._is_member or self._job is None):
            return None
        message = f"{self._request.message}, outside of a job: run the same command again to go on"
        if self._is_member:
            message = f"{self._request.message}: the members of this elastic run change"
        return StopPlan("asked", math.inf, False, RUN_AGAIN, message)

    def exit(self, plan: StopPlan, *, before: Callable[[], None] | None = None) -> ExitForRequeue:
        """Have one rank requeue the job, and all ranks exit with one status.

        Args:
            before: called on the rank that requeues the job, before it does.
        """

        def leave() -> int:
            try:
                if before is not None:
                    before()
            except StaleAttempt as error:
                warning(str(error))
                return MUST_NOT_RUN_AGAIN
            except (RunFolderError, OSError) as error:  # a full disk must not cost the requeue
                warning(f"the end of this attempt cannot be recorded: {error}")
            return self.requeue(plan)

        try:
            code = int(self._rank_group.decide("exit", leave))
        except RanksError:  # the first rank, if it is alive, acts for the job
            code = leave() if self._rank_group.rank == 0 else plan.exit_code
        self._rank_group.part()
        return ExitForRequeue(code)

    def requeue(self, plan: StopPlan) -> int:
        """Requeue the job where the plan wants it. Returns the status to exit with.

        Never raises: the state is saved, and the exit status tells the batch script the rest.
        """
        return plan.exit_code if self._job is None else self._job.requeue(plan)


class Stopping:
    """How one run stops: :meth:`agree_on_window`, then the Run saves, then :meth:`leave`."""

    def __init__(
        self,
        rank_group: RankGroup,
        *,
        attempt: CurrentAttempt,
        saver: Saver,
        stop_handler: StopHandler,
    ) -> None:
        self._rank_group = rank_group
        self._attempt = attempt
        self._saver = saver
        self._stop_handler = stop_handler
        self._lock = threading.Lock()
        self._over = threading.Event()

    def note_request(self, request: StopRequest) -> None:
        """A stop was requested. Returns at once; called once, in the controller's thread."""
        self._stop_handler.note_request(request)
        watch = self._lead if self._rank_group.rank == 0 else self._follow
        thread(watch, request, name="hydroslurm-overdue").start()

    def stand_down(self) -> None:
        """The training leaves by itself, or is over. Does not return where this process is just
        being ended."""
        self._over.set()
        with self._lock:
            pass

    def agree_on_window(self, request: StopRequest, *, step: int) -> SaveWindow:
        """Agree on how long the save may take. A save that will be in time whatever Slurm answers
        does not wait for the answer.

        Raises:
            RanksError: a rank died just now, or the ranks are at different steps.
        """
        self.stand_down()
        waited_us = (time.monotonic_ns() - request.mono_ns) / 1e3
        self._attempt.record(EventKind.SAFE_POINT, waited_us=waited_us)
        # the controller's thread passes it on too, but may not have come to it yet
        self._stop_handler.note_request(request)
        now_s = time.monotonic()
        # only the first rank reads the site's policy, and its answer holds for all
        is_first = self._rank_group.rank == 0
        certain_mono_s = self._stop_handler.certain_mono_s() if is_first else math.inf
        mine = {
            "step": step,
            "certain_s": _to_json(certain_mono_s - now_s),
            "needs_s": SAFETY * self._saver.expect_s(),
        }
        values = self._rank_group.exchange("stop", mine)
        _require_one_step({rank: int(value["step"]) for rank, value in values.items()})
        certain_s = min(_from_json(value["certain_s"]) for value in values.values())
        if max(float(value["needs_s"]) for value in values.values()) < certain_s:
            return SaveWindow(now_s + certain_s, None)
        plan = self._stop_handler.agree()
        return SaveWindow(plan.deadline_mono_s, plan)

    def leave(self, window: SaveWindow, saved: str, *, step: int) -> ExitForRequeue:
        """Have the job requeued after the save; return the exit for the caller to raise.

        Args:
            saved: how the save went, for the log.

        Raises:
            RanksError: a rank died just now.
        """
        plan = window.plan or self._stop_handler.plan_unasked() or self._stop_handler.agree()
        if not self._saver.is_durable and not self._saver.wait(timeout_s=0.0):
            # the disk is slower than it was when the save was estimated
            self._saver.wait(timeout_s=max(0.0, plan.deadline_mono_s - time.monotonic()))
            saved += f"; newest committed step: {self._saver.durable_step}"
        if self._rank_group.rank == 0:
            log = notice if self._saver.durable_step == step else warning
            log(f"{plan.message}; {saved}")
        leaving = self._exit(plan, step=step)
        # Keep the signals: Slurm sends SIGTERM again, and this process has not exited yet. Failures
        # were logged above; all that matters now is the exit status.
        with contextlib.suppress(SaveFailed, StaleAttempt):
            self._saver.close()
        return leaving

    def leave_to_others(self, reason: str, *, is_replaced: bool) -> ExitForRequeue:
        """Leave an elastic run, whose other members have the state; return the exit.

        Args:
            is_replaced: the coordinator submits another member; this one's job is not requeued.
        """
        self.stand_down()
        plan = self._stop_handler.agree()
        if is_replaced:
            plan = replace(plan, requeue=False)
        notice(f"{plan.message}; {reason}")
        self._saver.give_up()
        return self._stop_handler.exit(plan)

    def leave_unsaved(
        self, error: RanksError, request: StopRequest | None, *, step: int
    ) -> ExitForRequeue:
        """Leave without saving, because ranks are gone and a state without theirs is incomplete.

        Leaving within the grace lets the job resume from its newest checkpoint, or fail where the
        death of a rank is the reason for the stop.
        """
        self.stand_down()
        self._attempt.record(EventKind.AGREEMENT_FAILED, what="stop", message=str(error))
        request = request or _now()
        self._stop_handler.note_request(request)
        self._saver.give_up()
        newest = self._saver.durable_step
        kept = "no checkpoint is committed yet" if newest is None else f"step {newest} is committed"
        try:
            plan = self._stop_handler.agree(ranks_gone=True)
        except RanksError:  # no rank can be reached: the first one decides for the job
            plan = StopPlan("asked", math.inf, False, RUN_AGAIN, request.message)
            if self._rank_group.rank == 0:
                plan = self._stop_handler.plan(ranks_gone=True)
        if _logs_for_all(self._rank_group, error):
            warning(f"{plan.message}; {error}: step {step} cannot be saved, {kept}")
        return self._exit(plan, step=step)

    def _exit(self, plan: StopPlan, *, step: int) -> ExitForRequeue:
        end = functools.partial(self._attempt.end, plan.ending, step=step)
        leaving = self._stop_handler.exit(plan, before=end)
        self._attempt.record_end(plan.ending)
        return leaving

    # --- a stop that the training does not come to
    # --------------------------------------------------------------------------------------------

    def _lead(self, request: StopRequest) -> None:
        end_mono_s = self._stop_handler.end_mono_s()
        begin_mono_s = request.mono_ns / 1e9
        due_mono_s = end_mono_s - min(LEAD_S, (end_mono_s - begin_mono_s) / 3)
        say_mono_s = begin_mono_s + SAY_S
        if say_mono_s < due_mono_s:
            if self._is_over_by(say_mono_s):
                return
            warning(
                f"{request.message} {SAY_S:g} s ago, and the training has not come to a safe point "
                f"since: {whereabouts()}{self._not_reached()}. It stops at the next one"
            )
        if self._is_over_by(due_mono_s):
            return
        with self._lock:
            if not self._over.is_set():
                self._leave_now(request)

    def _follow(self, request: StopRequest) -> None:
        with contextlib.suppress(RanksError):  # the first rank leaves otherwise, or has died
            statuses = self._rank_group.peers.agree(_TOPIC, None)
            with self._lock:
                if not self._over.is_set():
                    self._note_place(request)
                    end_process(int(statuses[0] or RUN_AGAIN))

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

    def _leave_now(self, request: StopRequest) -> None:
        """Leave with all ranks, now. Whatever fails here, the process ends."""
        status = RUN_AGAIN
        try:
            plan = self._stop_handler.plan()
            newest, step = self._saver.durable_step, self._attempt.step
            kept = "no checkpoint" if newest is None else f"step {newest}"
            warning(
                f"{plan.message}; the training has not come to a safe point in "
                f"{self._note_place(request):.0f} s: {whereabouts()}{self._not_reached()}. It is "
                f"ended there, in front of SIGKILL; {kept} is committed, and step {step} was the "
                "last one"
            )
            with contextlib.suppress(Exception):  # a newer attempt has the folder; or a full disk
                self._attempt.end(plan.ending, step=step)
            self._attempt.record_end(plan.ending)
            status = self._stop_handler.requeue(plan) or RUN_AGAIN
            if self._rank_group.world_size > 1:
                self._rank_group.peers.agree(_TOPIC, status, timeout_s=1.0)
        except Exception as error:
            warning(f"while leaving: {type(error).__name__}: {error}")
        finally:
            end_process(status)

    def _not_reached(self) -> str:
        """Name the ranks that have not heard of the stop: their network is broken, or they hang."""
        run, ranks = self._attempt.run, range(self._rank_group.world_size)
        found = [(rank, read_status(run.rank_status(rank))) for rank in ranks]
        silent = [f"{rank} on {one.host}" for rank, one in found if one and one.state == "running"]
        return f"; the stop has not reached rank {', '.join(silent[:8])}" if silent else ""

    def _note_place(self, request: StopRequest) -> float:
        """Write down where the training is; returns for how long it was waited for, in seconds."""
        waited_s = time.monotonic() - request.mono_ns / 1e9
        message = f"no safe point in {waited_s:.1f} s: {whereabouts()}"
        self._attempt.record(EventKind.AGREEMENT_FAILED, what="stop", message=message)
        return waited_s


def _to_json(seconds: float) -> float | None:
    """JSON has no infinity."""
    return None if math.isinf(seconds) else seconds


def _from_json(seconds: float | None) -> float:
    """As :func:`_to_json` has written it."""
    return math.inf if seconds is None else float(seconds)


def _logs_for_all(rank_group: RankGroup, error: RanksError) -> bool:
    """Whether this rank is the first of the remaining ones; without a coordinator none knows."""
    if isinstance(error, CoordinatorLost):
        return True
    missing = getattr(error, "missing", ())
    return rank_group.rank == min(set(range(rank_group.world_size)).difference(missing), default=0)


def _now() -> StopRequest:
    return StopRequest(None, 0, time.monotonic_ns(), time.time_ns())


def _require_one_step(steps: dict[int, int]) -> None:
    """Refuse to stop at different steps, which ranks do that call safe points unequally often.

    Raises:
        RanksError: they are at different steps, so their state is inconsistent.
    """
    if len(set(steps.values())) > 1:
        listed = ", ".join(f"rank {rank}: {step}" for rank, step in steps.items())
        raise RanksError(
            f"the ranks are at different steps ({listed}): some have called safe_point() or "
            "check_stop() more often than others, and all ranks have to come to the same ones"
        )


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
