"""The supervisor of one job: attempt after attempt, until the job ends or has to leave its nodes.

It runs in the batch script, on the job's first node, and holds nothing that is not in the run
folder: when it is killed, the script starts it again and it goes on with the job step that runs.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

from hydroslurm.core.exitcodes import CANCELLED, MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.core.fence import process_began_epoch_s
from hydroslurm.core.rundir import ATTEMPT_ENV, RunDir
from hydroslurm.errors import SlurmError, StaleAttempt
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.supervisor.attempts import (
    ActiveTime,
    Attempt,
    Attempts,
    Ending,
    ending_of,
    last_recorded,
)
from hydroslurm.jobs.supervisor.conditions import (
    ConditionType,
    add_condition,
    final_condition,
    read_conditions,
)
from hydroslurm.jobs.supervisor.exit_policy import (
    DEADLINE_EXCEEDED,
    SRUN_KILLED,
    Action,
    ExitDecision,
    FinalDecision,
    decide_exit,
    decide_job,
    step_cannot_start,
    unrequested_exit,
)
from hydroslurm.jobs.supervisor.job_step import (
    RunningStep,
    after_srun,
    python_of,
    srun_command,
    start_step,
    step_variables,
)
from hydroslurm.jobs.supervisor.stop_requests import (
    condition_reason,
    is_by_slurm,
    recorded_stop_reason,
    was_stop_requested,
)
from hydroslurm.jobs.supervisor.task_exits import TaskExits
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.restarts import Start, check_newest, requeue
from hydroslurm.slurm.stops import Stop, StopReason, ask_why

PEERS_S = 10.0
"""How long the others may take to end by themselves when one replica has failed, or the master has
succeeded: they may still be writing."""
SAVE_S = 120.0
"""How long ranks that were told to save may take; Slurm ends them before where it must."""
STEP_WITHIN_S = 90.0
"""How long srun may wait for its job step: one that is being ended has KillWait and
UnkillableStepTimeout, 30 s and 60 s by default."""
LONGEST_DELAY_S = 10.0
"""Before the n-th restart it waits n seconds, and at most so many: what fails at once and always is
not to fail a hundred times a minute."""
TICK_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """how this supervisor has left: the status of the batch script, and a message."""

    status: int
    message: str


class Supervisor:
    """Of one allocation of the job; used from the main thread."""

    def __init__(
        self,
        run: RunDir,
        job: TrainingJob,
        plan: Plan,
        *,
        client: SlurmClient,
        allocation: Allocation,
        environ: Mapping[str, str],
        log: Callable[[str], None],
    ) -> None:
        self._run = run
        self._job = job
        self._plan = plan
        self._client = client
        self._allocation = allocation
        self._environ = environ
        self._log = log
        self._attempts = Attempts(run.attempts)
        self._active = ActiveTime(run.active_json)
        self._stop_requested = False
        self._start = Start(
            job_id=allocation.job_id,
            restart_count=allocation.restart_count,
            began_epoch_s=process_began_epoch_s(),
        )

    def supervise(self) -> Outcome:
        """Run the job until it ends, or has to leave its nodes."""
        known = final_condition(read_conditions(self._run.conditions_jsonl))
        if known is not None:
            status = MUST_NOT_RUN_AGAIN if known.is_failure else 0
            return Outcome(status, f"{known.type} already: {known.message}")
        with self._listening():
            try:
                self._end_lost_attempts()
                return self._decided_before() or self._run_attempts()
            except StaleAttempt as error:
                return Outcome(MUST_NOT_RUN_AGAIN, str(error))
            finally:
                self._active.write()

    def _run_attempts(self) -> Outcome:
        preemptions, limit = self._attempts.preemptions(), self._job.run_policy.preemption_limit
        if limit is not None and preemptions > limit:
            message = f"preempted {preemptions} times, with preemptionLimit {limit}"
            self._add_condition("Failed", "PreemptionLimitExceeded", message)
            return Outcome(MUST_NOT_RUN_AGAIN, message)
        while True:
            outcome = self._attempt()
            if outcome is not None:
                return outcome
            if self._stop_requested and (stop := self._why()) is not None:
                return self._leave(None, stop, saved=False)

    # --- one attempt

    def _attempt(self) -> Outcome | None:
        """One start of all replicas; None when another is to follow."""
        attempt, step, ends = self._adopted() or self._begun()
        decision = self._watch(step, ends)
        self._check_newest()
        told = None if decision.action is Action.SUCCEED else self._ask()
        stop = None if told is None or not is_by_slurm(told) else told
        if decision.action is Action.REQUEUE:
            step.end()
            return self._leave(attempt, stop, saved=False, instead=decision)
        if decision.action is Action.LEAVE and not self._was_asked(told, attempt):
            decision = unrequested_exit(self._plan, decision)
        if decision.action is Action.LEAVE or stop is not None:
            step.wait(time.monotonic() + SAVE_S)
            return self._leave(attempt, stop, saved=decision.action is Action.LEAVE)
        final_decision = decide_job(
            decision,
            self._job.run_policy,
            earlier_restarts=self._attempts.restarts(),
            is_over_deadline=self._is_over_deadline(),
        )
        attempt = self._attempts.end(
            attempt,
            ending_of(decision, final_decision),
            replica=decision.replica,
            status=decision.status,
            final_decision=final_decision,
        )
        if final_decision is not None:
            return self._conclude(final_decision, step)
        self._see_out(step, PEERS_S)
        self._add_condition("Restarting", decision.reason, decision.message)
        self._pause_between(self._attempts.restarts() if decision.status != 0 else 0)
        return None

    def _decided_before(self) -> Outcome | None:
        """A supervisor that was killed had decided, and not come to the end of it."""
        for attempt in reversed(self._attempts.all()):
            if attempt.final_decision is not None:
                return self._conclude(attempt.final_decision, self._step_of(attempt))
        return None

    def _conclude(self, final_decision: FinalDecision, step: RunningStep | None) -> Outcome:
        """Carry cleanPolicy out, and say how the job has ended."""
        clean_policy = self._job.run_policy.clean_policy
        if step is not None:
            patience_s = float("inf") if clean_policy == "None" else PEERS_S
            self._see_out(step, 0.0 if final_decision.reason == DEADLINE_EXCEEDED else patience_s)
        if clean_policy == "All":
            shutil.rmtree(self._run.scratch, ignore_errors=True)
        self._add_condition(
            "Failed" if final_decision.failed else "Succeeded",
            final_decision.reason,
            final_decision.message,
        )
        return Outcome(MUST_NOT_RUN_AGAIN if final_decision.failed else 0, final_decision.message)

    def _adopted(self) -> tuple[Attempt, RunningStep, TaskExits] | None:
        """The attempt of a supervisor that was killed in this allocation."""
        for attempt in reversed(self._attempts.all()):
            if attempt.ending is None and attempt.restart_count == self._allocation.restart_count:
                step = self._step_of(attempt)
                ends = TaskExits(self._run.srun_log(attempt.number))
                if step is None:
                    # killed between the two: the step may run, but nobody knows its process
                    self._end_step(ends)
                    self._attempts.end(attempt, Ending.PREEMPTED)
                    continue
                self._log(f"goes on with attempt {attempt.number}, whose supervisor was killed")
                return attempt, step, ends
        return None

    def _step_of(self, attempt: Attempt) -> RunningStep | None:
        """Its job step, if it runs in this allocation."""
        pid, started = attempt.srun_pid, attempt.srun_started
        if (
            pid is None
            or started is None
            or attempt.restart_count != self._allocation.restart_count
        ):
            return None
        return RunningStep(pid, started)

    def _begun(self) -> tuple[Attempt, RunningStep, TaskExits]:
        attempt = self._attempts.begin(
            self._allocation.restart_count, after=last_recorded(self._run.attempts_jsonl)
        )
        log = self._run.srun_log(attempt.number)
        command = srun_command(
            self._plan, plan_file=self._run.plan_json, logs=self._run.logs, python=python_of()
        )
        step = start_step(command, environ=self._step_environ(attempt), log=log)
        attempt = self._attempts.started(attempt, srun_pid=step.pid, srun_started=step.started)
        self._add_condition(
            "Running", "Started", f"attempt {attempt.number} on {len(self._plan.tasks)} tasks"
        )
        return attempt, step, TaskExits(log)

    def _step_environ(self, attempt: Attempt) -> dict[str, str]:
        nodes = self._allocation.nodes
        address = nodes[0]
        with contextlib.suppress(SlurmError):  # most sites can look its name up
            address = self._client.node_address(nodes[0])
        made = step_variables(self._run, self._job, self._plan, nodes=nodes, address=address)
        return {**self._environ, **made, ATTEMPT_ENV: str(attempt.number)}

    def _watch(self, step: RunningStep, ends: TaskExits) -> ExitDecision:
        """Until something is decided, or there is nothing to wait for."""
        while True:
            over = step.has_ended()  # first: what it said before it ended is in the file then
            ends.look()
            decision = decide_exit(self._plan, ends.statuses, ends.order)
            if decision.action is not Action.WAIT:
                return decision
            if over:
                decision = after_srun(self._plan, step, ends)
                if decision.reason == SRUN_KILLED:
                    self._end_step(ends)
                return decision
            if ends.waited_s > STEP_WITHIN_S:
                return step_cannot_start(ends.waits or "", ends.waited_s)
            self._active.tick()
            if self._is_over_deadline():
                self._forbid_requeue()
                return ExitDecision(Action.FAIL, reason=DEADLINE_EXCEEDED)
            time.sleep(TICK_S)

    def _end_step(self, ends: TaskExits) -> None:
        """End what is left of a job step without its srun. By its number: 22.05's scancel takes
        SIGKILL for a job as an order to cancel it."""
        ends.look()
        if ends.step_id is not None:
            job_id = self._allocation.job_id
            with contextlib.suppress(SlurmError):
                self._client.signal(job_id, signal.SIGKILL, step=ends.step_id)

    # --- with Slurm

    def _why(self) -> Stop | None:
        """Whether Slurm has stopped the job; None when what happened had reasons of its own."""
        stop = self._ask()
        return stop if is_by_slurm(stop) else None

    def _ask(self) -> Stop:
        return ask_why(
            self._client,
            self._allocation.job_id,
            warning_s=float(self._job.preemption.warning_seconds),
        )

    def _was_asked(self, stop: Stop | None, attempt: Attempt) -> bool:
        """Whether anybody may have wanted this stop: Slurm, a person, another rank. Where Slurm
        does not answer, it may have been Slurm."""
        if self._stop_requested or stop is None or stop.reason is not StopReason.ASKED:
            return True
        return was_stop_requested(self._run.events, since_epoch_ns=attempt.began_epoch_ns)

    def _leave(
        self,
        attempt: Attempt | None,
        stop: Stop | None,
        *,
        saved: bool,
        instead: ExitDecision | None = None,
    ) -> Outcome:
        """The job is to go on later, or was ended by a person or its time limit.

        Args:
            attempt: the one that was interrupted; None between two.
            stop: Slurm's reason; None when a rank asked for it.
            saved: whether a rank says that it has.
            instead: what this supervisor itself has found to leave for.
        """
        reason = None if stop is None else stop.reason
        message = "a rank has saved and left" if instead is None else instead.message
        message = message if stop is None else stop.message
        if reason is StopReason.CANCELLED:
            self._end(attempt, Ending.CANCELLED)
            self._add_condition("Failed", "Cancelled", message)
            return Outcome(CANCELLED, message)
        if reason is StopReason.TIME_LIMIT and not saved:
            self._end(attempt, Ending.TIME_LIMIT)
            message = f"{message}, and nothing was saved that could go on"
            self._add_condition("Failed", "TimeLimit", message)
            return Outcome(MUST_NOT_RUN_AGAIN, message)
        if attempt is not None and instead is None and reason in (None, StopReason.REQUEUED):
            reason, message = recorded_stop_reason(self._run.events, attempt) or (reason, message)
        is_limit = reason is StopReason.TIME_LIMIT
        self._end(attempt, Ending.TIME_LIMIT if is_limit else Ending.PREEMPTED)
        word = condition_reason(reason) if reason or instead is None else instead.reason
        self._add_condition("Preempted", word, message)
        try:
            requeue(self._client, self._start)
        except SlurmError as error:
            # the batch script tries again for status 75
            self._log(f"the job could not be requeued: {error}")
        return Outcome(RUN_AGAIN, message)

    def _end(self, attempt: Attempt | None, ending: Ending) -> None:
        if attempt is not None:
            self._attempts.end(attempt, ending)

    def _end_lost_attempts(self) -> None:
        """End the attempts of earlier allocations that have no end: Slurm took their nodes away."""
        for attempt in self._attempts.all():
            if attempt.ending is None and attempt.restart_count < self._allocation.restart_count:
                self._attempts.end(attempt, Ending.PREEMPTED)
                known = recorded_stop_reason(self._run.events, attempt)
                message = f"attempt {attempt.number} was ended by Slurm" + (
                    f": {known[1]}" if known else ""
                )
                self._add_condition(
                    "Preempted", condition_reason(known[0] if known else None), message
                )

    def _check_newest(self) -> None:
        """What is written and asked for from here on is the job's, by its id alone: a supervisor of
        a dead attempt must not do it to the living one.

        Raises:
            StaleAttempt: this is one.
        """
        with contextlib.suppress(SlurmError):
            check_newest(self._client.job(self._allocation.job_id), self._start)

    def _forbid_requeue(self) -> None:
        """Ranks that save at a SIGTERM would have the job started again."""
        self._check_newest()
        with contextlib.suppress(SlurmError):
            self._client.set_requeue(self._allocation.job_id, allowed=False)

    # --- the end of a step

    def _see_out(self, step: RunningStep, patience_s: float) -> None:
        """Wait for tasks that end by themselves; then end them."""
        until_s = time.monotonic() + patience_s
        while not step.has_ended() and time.monotonic() < until_s and not self._is_over_deadline():
            self._active.tick()
            time.sleep(TICK_S)
        if not step.has_ended():
            step.end()

    def _is_over_deadline(self) -> bool:
        limit_s = self._job.run_policy.active_deadline_seconds
        return limit_s is not None and self._active.tick() >= limit_s

    def _pause_between(self, failures: int) -> None:
        until_s = time.monotonic() + min(max(1.0, failures), LONGEST_DELAY_S)
        while time.monotonic() < until_s and not self._stop_requested:
            self._active.tick()
            time.sleep(TICK_S)

    # --- recording

    def _add_condition(self, kind: ConditionType, reason: str, message: str) -> None:
        add_condition(
            self._run.conditions_jsonl,
            kind,
            reason=reason,
            message=message,
            restart_count=self._allocation.restart_count,
        )
        self._log(f"{kind}: {message}")

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """A SIGTERM ends nothing here: the ranks have it too, and what they do of it counts."""

        def note(_signo: int, _frame: FrameType | None) -> None:
            self._stop_requested = True

        before = {one: signal.signal(one, note) for one in (signal.SIGTERM, signal.SIGURG)}
        try:
            yield
        finally:
            for signo, handler in before.items():
                signal.signal(signo, handler)
