"""Why Slurm stops a job, until when its processes live, and the requeue.

Loaded inside of a job only. Slurm is asked while the training thread is still on its way to the
safe point. Without an answer the worst is assumed: little time, and a job that is to continue.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import CANCELLED, FAILED, MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.core.fence import Fence, process_began_epoch_s
from hydroslurm.core.signals import signal_name
from hydroslurm.core.threads import thread
from hydroslurm.errors import HydroslurmError, RunFolderError, StaleAttempt, WrongJobState
from hydroslurm.gate.marks import Range
from hydroslurm.runtime.controller import Controller, StopRequest
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import SlurmClient, open_client
from hydroslurm.slurm.policy import Policies, SitePolicy, StopReason
from hydroslurm.slurm.programs import RetryPolicy
from hydroslurm.slurm.run_folders import others_of_job, wait_until_saved
from hydroslurm.slurm.stops import (
    IN_GRACE,
    Stop,
    ask_why,
    requested_warnings,
    requeue,
    why_stopped,
)
from hydroslurm.slurm.values import Job
from hydroslurm.training.attempts import Ending, StopPlan
from hydroslurm.training.rank_group import notice, warning

ANSWER_S = 2.0
"""How long a save waits for Slurm to say why; waiting longer would eat into the grace."""
ASSUMED_GRACE_S = 25.0
"""Assumed when the site's policy is unknown: KillWait's default of 30 s less a margin."""
LEAST_GRACE_S = 4.0
"""What slurmd leaves between SIGTERM and SIGKILL whatever KillWait says, and a margin."""
REQUEUE_S = 2.0
"""What the call of scontrol needs at the end of the grace."""
SPREAD_S = 5.0
"""The settings are read at a random moment within this time after the start, so that the tasks of
an array do not all ask slurmctld in the same second."""
STALE_AFTER_S = 1.0
"""After a save that took this long, Slurm is asked for the reason again before the requeue."""
_ENDINGS: dict[StopReason, Ending] = {
    StopReason.PREEMPTED: "preempted",
    StopReason.TIME_LIMIT: "time_limit",
    StopReason.CANCELLED: "cancelled",
    StopReason.REQUEUED: "requeued",
}


def _ends_a_failure(request: StopRequest, stop: Stop) -> bool:
    """Whether a SIGTERM that came when ranks were lost is due to their loss.

    When a task fails, srun with --kill-on-bad-exit sends SIGCONT, SIGTERM and, KillWait later,
    SIGKILL to all others (seen on 22.05.8 and 25.11.7), and from 26.05 on mpi/pmix does so whatever
    srun was told (SIG_TERM_KILL in its source). The job is still running, so Slurm has no reason to
    give. Treated as a stop, the job would be requeued and fail again, forever.
    """
    return stop.reason is StopReason.ASKED and request.signal == "SIGTERM"


class JobStop:
    """Finds out what a stop means for one job, and requeues it.

    :meth:`note_request` may be called from any thread; the rest belongs to the training thread.
    """

    def __init__(
        self,
        allocation: Allocation,
        controller: Controller,
        *,
        environ: Mapping[str, str],
        fence: Fence | None = None,
    ) -> None:
        """``fence``: of the run's folder; an attempt that does not hold it requeues nothing."""
        self._fence = fence
        self._began_epoch_s = process_began_epoch_s()
        self._allocation = allocation
        self._controller = controller
        self._environ = dict(environ)
        self._policies: Policies | None = None
        self._stop: Stop | None = None
        self._answered = threading.Event()
        self._answered_mono_s = 0.0
        self._heard = threading.Event()
        self._request: StopRequest | None = None
        self._asking: threading.Thread | None = None

    def ask(self) -> None:
        """Read the settings now, and ask for the reason once a stop is requested; in a thread."""
        if self._asking is None:
            self._asking = thread(self._find_out, name="hydroslurm-policy")
            self._asking.start()

    def note_request(self, request: StopRequest) -> None:
        """Start to find out why a stop was requested. Returns at once; the first request counts."""
        if self._request is None:
            self._request = request
        self._heard.set()

    def certain_mono_s(self, request: StopRequest) -> float:
        """Until when this process survives whatever Slurm will answer (``time.monotonic()``)."""
        sure_s = LEAST_GRACE_S if self._policies is None else self._policies.kill_after_s
        return request.mono_ns / 1e9 + sure_s

    def end_mono_s(self) -> float:
        """When this process is killed, as far as Slurm has said so (``time.monotonic()``); infinite
        where it lets the job go on, or does not answer. Waits for its answer."""
        self.ask()
        self._answered.wait()
        stop, request = self._stop, self._request
        if stop is None or request is None or self._policy is None:
            return math.inf
        return math.inf if stop.reason is StopReason.UNKNOWN else self._deadline(request, stop)

    def deadline_mono_s(self, request: StopRequest) -> float:
        """As :meth:`end_mono_s`, of any stop; waits at most ``ANSWER_S``."""
        self.ask()
        stop = self._stop if self._answered.wait(ANSWER_S) else None
        return math.inf if stop is None else self._deadline(request, stop)

    def plan(self, request: StopRequest, *, ranks_gone: bool = False) -> StopPlan:
        """Decide what this stop means; waits at most ``ANSWER_S`` for Slurm.

        Args:
            ranks_gone: some ranks have died, or do not answer.
        """
        self.ask()
        since = request.message
        is_answered, stop = self._answered.wait(ANSWER_S), self._stop
        if stop is None:
            what = "could not be asked why"
            if not is_answered:
                what = f"did not say why within {ANSWER_S:g} s"
            message = (
                f"{since}; Slurm {what}, so the run counts on {ASSUMED_GRACE_S:g} s from the "
                "signal on, saves, and is requeued unless it turns out to be cancelled"
            )
            return StopPlan("asked", self._assumed_deadline(request), True, RUN_AGAIN, message)
        if ranks_gone and _ends_a_failure(request, stop):
            message = (
                f"{since}: a rank failed, and srun (--kill-on-bad-exit) or PMIx ends the others; "
                "the job is not requeued for that"
            )
            return StopPlan("error", self._deadline(request, stop), False, FAILED, message)
        return StopPlan(
            ending=_ENDINGS.get(stop.reason, "asked"),
            deadline_mono_s=self._deadline(request, stop),
            requeue=stop.reason.requeue,
            exit_code=stop.reason.exit_code,
            message=f"{since}: {stop.message}",
        )

    def requeue(self, plan: StopPlan) -> int:
        """Requeue the job where the plan wants it. Returns the status to exit with.

        Never raises: the state is saved, and the exit status tells the batch script the rest.
        """
        if not plan.requeue:
            return plan.exit_code
        self._wait_for_neighbours(self._allocation, plan.deadline_mono_s)
        stop = self._stop_now()
        if stop is not None and stop.reason is StopReason.CANCELLED:
            notice("the job was cancelled meanwhile: it is saved, and not requeued")
            return CANCELLED
        job_id = self._allocation.job_id
        begin_ns = time.monotonic_ns()
        try:
            self._check_fence()
            self._controller.record(EventKind.REQUEUE_ASKED, {"job_id": job_id})
            with self._controller.marks.range(Range.REQUEUEING, self._controller.step or 0):
                job = self._requeue(self._allocation, plan.deadline_mono_s, stop)
        except HydroslurmError as error:
            self._controller.record(EventKind.REQUEUE_FAILED, {"reason": str(error)})
            warning(self._cannot_requeue(error))
            if isinstance(error, StaleAttempt):
                return MUST_NOT_RUN_AGAIN
        else:
            took_us = (time.monotonic_ns() - begin_ns) / 1e3
            self._controller.record(EventKind.REQUEUED, {"job_id": job_id, "requeue_us": took_us})
            notice(f"job {job.id} is requeued and resumes later")
        return plan.exit_code

    # --- with Slurm
    # --------------------------------------------------------------------------------------------

    def _client(self, retry_policy: RetryPolicy) -> SlurmClient:
        return open_client(environ=self._environ, retry_policy=retry_policy)

    def _find_out(self) -> None:
        """Read the settings at the start, while there is time; ask for the reason at a stop."""
        job_id = self._allocation.job_id
        try:
            client = self._client(IN_GRACE)
            if not self._heard.wait(random.uniform(0.0, SPREAD_S)):
                self._policies = Policies.read(client)  # unknown means a short grace
                self._heard.wait()
            stop = self._named(self._warned_early(client, ask_why(client, job_id)))
            if self._policies is None:
                self._policies = Policies.read(client)
            self._stop = stop
            self._controller.record(
                EventKind.STOP_REASON, {"reason": stop.reason.value, "message": stop.message}
            )
        except HydroslurmError as error:
            self._controller.record(
                EventKind.STOP_REASON, {"reason": "unknown", "message": str(error)}
            )
        finally:
            self._answered_mono_s = time.monotonic()
            self._answered.set()

    @property
    def _policy(self) -> SitePolicy | None:
        """What the site does to this job; None while it or the job is not known, or for a partition
        that this user may not see."""
        job = None if self._stop is None else self._stop.job
        return None if job is None or self._policies is None else self._policies.of(job)

    def _stop_now(self) -> Stop | None:
        """The stop as Slurm has it now: a person may have cancelled the job since the first answer.
        Slurm requeues a cancelled job while its processes are alive (measured), which would undo
        the cancellation. A job that was in the queue again already is not asked about twice."""
        stop = self._stop
        is_fresh = time.monotonic() - self._answered_mono_s < STALE_AFTER_S
        if stop is not None and (is_fresh or stop.pending_again):
            return stop
        try:
            client = self._client(IN_GRACE)
        except HydroslurmError:
            return None
        return ask_why(client, self._allocation.job_id, history_within_s=0.5)

    def _warned_early(self, client: SlurmClient, stop: Stop) -> Stop:
        """The stop, if the job has asked Slurm for its signal so long before the time limit."""
        job = stop.job
        if stop.reason is not StopReason.ASKED or stop.to_end_s is None or job is None:
            return stop
        for asked in requested_warnings(client, job, self._environ):
            if self._is_by(asked.signo):
                why = why_stopped(job, now_epoch_s=time.time(), warning_s=asked.before_s)
                return replace(why, job=job)
        return stop

    def _is_by(self, signo: int | None) -> bool:
        """Whether this signal asked for the stop."""
        request = self._request
        return request is not None and signo is not None and request.signal == signal_name(signo)

    def _named(self, stop: Stop) -> Stop:
        """Name the command behind a SIGURG that came too early to be the warning."""
        if stop.reason is not StopReason.ASKED or not self._is_by(self._controller.plan.warning):
            return stop
        message = "asked to save and go back into the queue, as `hydroslurm requeue` does"
        return replace(stop, message=message)

    def _check_fence(self) -> None:
        if self._fence is not None:
            with contextlib.suppress(OSError):  # Slurm checks the restart count, too
                self._fence.check("the requeue")

    def _wait_for_neighbours(self, allocation: Allocation, deadline_mono_s: float) -> None:
        """A requeue would kill the other trainings of the job while they save."""
        with contextlib.suppress(RunFolderError):
            if neighbours := others_of_job(self._environ):
                self._controller.record(EventKind.REQUEUE_ASKED, {"job_id": allocation.job_id})
                wait_until_saved(
                    neighbours,
                    restart_count=allocation.restart_count,
                    until_mono_s=deadline_mono_s - REQUEUE_S,
                )

    def _requeue(self, allocation: Allocation, deadline_mono_s: float, stop: Stop | None) -> Job:
        left_s = max(5.0, deadline_mono_s - time.monotonic())
        retry_policy = RetryPolicy(give_up_after_s=min(left_s, 120.0))
        client = self._client(retry_policy)
        return requeue(
            client,
            allocation,
            began_epoch_s=self._began_epoch_s,
            job=None if stop is None else stop.job,
            policies=self._policies,
        )

    def _cannot_requeue(self, error: Exception) -> str:
        if isinstance(error, StaleAttempt):
            return str(error)
        if not isinstance(error, WrongJobState):
            return (
                f"the job could not be requeued: {error}. Leaving with status {RUN_AGAIN}, which "
                "`hydroslurm batch -- srun ...` turns into a requeue"
            )
        job, policy = None if self._stop is None else self._stop.job, self._policy
        if job is not None and job.is_batch is False:
            return (
                "saved. This allocation was made by srun or salloc, which Slurm cannot requeue: "
                "run the same command again, with the same directory, to go on"
            )
        known = policy is not None and not policy.may_requeue
        why = policy.requeue_why if policy is not None and known else str(error)
        return f"saved, but Slurm will not start the job again ({why}). Submit it again to go on"

    def _deadline(self, request: StopRequest, stop: Stop) -> float:
        policy = self._policy
        if policy is None:
            return self._assumed_deadline(request)
        return request.mono_ns / 1e9 + stop.time_left_s(policy.kill_after_s)

    def _assumed_deadline(self, request: StopRequest) -> float:
        return request.mono_ns / 1e9 + ASSUMED_GRACE_S
