"""The supervisor of one job: attempt after attempt, until the job ends or has to leave its nodes.

It runs in the batch script, on the job's first node. All its state is in the run folder: when it is
killed, the script starts it again, and it goes on with the running job step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType

from hydroslurm.coordination.world import LOOPBACK
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.exitcodes import CANCELLED, MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.core.fence import process_began_epoch_s
from hydroslurm.core.files import new_lines
from hydroslurm.core.rundir import ATTEMPT_ENV, RunDir
from hydroslurm.errors import RunFolderError, SlurmError, StaleAttempt
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.supervisor.attempts import (
    ActiveTime,
    Attempt,
    Attempts,
    Ending,
    condition_reason,
    count_preemptions,
    count_restarts,
    ending_of,
    failures,
    last_recorded,
    recorded_stop_reason,
    was_requeued_by_ranks,
    was_stop_requested,
)
from hydroslurm.jobs.supervisor.bad_nodes import blamed, cause_in, check_job, leave
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
    decide_exit,
    step_cannot_start,
    within_limits,
)
from hydroslurm.jobs.supervisor.job_step import (
    RunningStep,
    TaskExits,
    after_srun,
    srun_command,
    start_step,
    step_variables,
)
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.policy import StopReason
from hydroslurm.slurm.stops import Stop, ask_why, check_newest, requeue
from hydroslurm.slurm.values import Job

PEERS_S = 10.0
"""How long the other replicas get to end by themselves when one has failed, or the master has
succeeded: they may still be writing."""
SAVE_S = 120.0
"""How long ranks that were told to save may take; Slurm may end them sooner."""
STEP_WITHIN_S = 90.0
"""How long srun may wait for its job step: the step before it may take KillWait plus
UnkillableStepTimeout to end, 30 s and 60 s by default."""
LONGEST_DELAY_S = 10.0
"""The n-th restart waits n seconds, at most this: a job that always fails at once must not do so a
hundred times a minute."""
TICK_S = 0.1
_LOG_BYTES = 1 << 16
"""Of a task's log that is searched for a fault of its node."""


@dataclass(frozen=True)
class Outcome:
    """How a supervisor ended: the exit status of the batch script, and a message."""

    status: int
    message: str


@dataclass
class Supervisor:
    """Supervises one allocation of the job. Main thread only."""

    run: RunDir
    plan: Plan
    client: SlurmClient
    allocation: Allocation
    environ: Mapping[str, str]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._attempts = Attempts(self.run.starts_jsonl)
        self._active = ActiveTime(self.run.active_json)
        self._stop_requested = False
        self._printed_bytes = self._log_bytes()
        self._began_epoch_s = process_began_epoch_s()

    def supervise(self) -> Outcome:
        """Run the job until it ends, or has to leave its nodes."""
        known = final_condition(read_conditions(self.run.conditions_jsonl))
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
        preemptions = count_preemptions(self._attempts.all())
        limit = self.plan.limits.preemption_limit
        if limit is not None and preemptions > limit:
            message = f"preempted {preemptions} times; preemptionLimit is {limit}"
            self._add_condition("Failed", "PreemptionLimitExceeded", message)
            return Outcome(MUST_NOT_RUN_AGAIN, message)
        while True:
            outcome = self._attempt()
            if outcome is not None:
                return outcome
            if self._stop_requested and (stop := self._why_stopped()).ends_job:
                return self._leave(None, stop, saved=False)

    # --- one attempt

    def _attempt(self) -> Outcome | None:
        """Run one attempt; None if another is to follow."""
        adopted = self._adopt()
        if adopted is None and (outcome := self._preflight()) is not None:
            return outcome
        attempt, step, exits = adopted or self._begin()
        earlier_restarts = count_restarts(self._attempts.all())
        while True:
            decision = self._watch(step, exits, earlier_restarts)
            asked = None
            if decision.action is Action.SUCCEED:
                self._check_newest()
            else:
                asked = self._why_ended(attempt)
            if decision.action is not Action.LEAVE or self._was_requested(asked, attempt):
                break
            saved = (task for task, status in exits.statuses.items() if status == RUN_AGAIN)
            exits.unrequested = frozenset(saved)
        stop = None if asked is None or not asked.ends_job else asked
        if decision.action is Action.REQUEUE:
            step.end()
            return self._leave(attempt, stop, saved=False, instead=decision)
        if decision.action is Action.LEAVE or stop is not None:
            step.wait(SAVE_S)
            return self._leave(attempt, stop, saved=decision.action is Action.LEAVE)
        decision = within_limits(
            decision,
            self.plan.limits,
            earlier_restarts=earlier_restarts,
            is_over_deadline=self._is_over_deadline(),
        )
        if not decision.is_final:
            self._end_within(step, PEERS_S)  # which other nodes fail meanwhile tells whose fault
            decision = self._with_nodes(decision, exits)  # it is
        self._attempts.end(attempt, ending_of(decision), decision=decision)
        if decision.is_final:
            return self._conclude(decision, step)
        self._add_condition("Restarting", decision.reason, decision.message)
        if bad := blamed(failures(self._attempts.all())):
            limit = self.plan.limits.max_excluded_nodes
            why_not = leave(bad, self.run, self.client, self.allocation, most=limit)
            if not why_not:
                return Outcome(RUN_AGAIN, f"the job leaves {', '.join(bad)}")
            self.log(f"the job stays on {', '.join(bad)}: {why_not}")
        self._delay_restart(earlier_restarts + decision.counts if decision.status != 0 else 0)
        return None

    def _decided_before(self) -> Outcome | None:
        """Finish what a supervisor had decided before it was killed."""
        for attempt in reversed(self._attempts.all()):
            if attempt.decision is not None and attempt.decision.is_final:
                return self._conclude(attempt.decision, self._step_of(attempt))
        return None

    def _conclude(self, decision: ExitDecision, step: RunningStep | None) -> Outcome:
        """Apply cleanPolicy, and record how the job has ended."""
        clean_policy = self.plan.limits.clean_policy
        if step is not None:
            patience_s = float("inf") if clean_policy == "None" else PEERS_S
            self._end_within(step, 0.0 if decision.reason == DEADLINE_EXCEEDED else patience_s)
        if clean_policy == "All":
            shutil.rmtree(self.run.scratch, ignore_errors=True)
        failed = decision.action is Action.FAIL
        kind: ConditionType = "Failed" if failed else "Succeeded"
        self._add_condition(kind, decision.reason, decision.message)
        return Outcome(MUST_NOT_RUN_AGAIN if failed else 0, decision.message)

    def _adopt(self) -> tuple[Attempt, RunningStep, TaskExits] | None:
        """Go on with the attempt of a supervisor that was killed in this allocation."""
        for attempt in reversed(self._attempts.all()):
            if attempt.ending is None and attempt.restart_count == self.allocation.restart_count:
                step = self._step_of(attempt)
                exits = TaskExits(self.run.srun_log(attempt.number))
                if step is None:
                    # killed before it recorded srun's pid: the step may run, but without a handle
                    self._kill_step(exits)
                    self._attempts.end(attempt, Ending.PREEMPTED)
                    continue
                self.log(f"goes on with attempt {attempt.number}, whose supervisor was killed")
                return attempt, step, exits
        return None

    def _step_of(self, attempt: Attempt) -> RunningStep | None:
        """Its job step, if that is of this allocation."""
        pid, started = attempt.srun_pid, attempt.srun_started
        is_here = attempt.restart_count == self.allocation.restart_count
        return RunningStep(pid, started) if pid and started is not None and is_here else None

    def _begin(self) -> tuple[Attempt, RunningStep, TaskExits]:
        attempt = self._attempts.begin(
            self.allocation.restart_count, after=last_recorded(self.run.attempts_jsonl)
        )
        self._printed_bytes = self._log_bytes()
        log = self.run.srun_log(attempt.number)
        command = srun_command(self.plan, self.run)
        step = start_step(command, environ=self._step_environ(attempt), log=log)
        self._attempts.started(attempt, srun_pid=step.pid, srun_started=step.started)
        self._add_condition(
            "Running", "Started", f"attempt {attempt.number} on {len(self.plan.tasks)} tasks"
        )
        return attempt, step, TaskExits(log)

    def _step_environ(self, attempt: Attempt) -> dict[str, str]:
        nodes = self.allocation.nodes
        address = nodes[0]
        if len(nodes) == 1:
            address = LOOPBACK
        else:
            with contextlib.suppress(SlurmError):  # at most sites its name resolves, too
                address = self.client.node_address(nodes[0])
        made = step_variables(
            self.run, self.plan, nodes=nodes, address=address, environ=self.environ
        )
        return {**self.environ, **made, ATTEMPT_ENV: str(attempt.number)}

    def _watch(self, step: RunningStep, exits: TaskExits, earlier_restarts: int) -> ExitDecision:
        """Wait until something is decided, or nothing is left to wait for."""
        while True:
            has_ended = (
                step.has_ended()
            )  # before look(), which then finds all that srun has printed
            exits.look()
            decision = decide_exit(
                self.plan,
                exits.statuses,
                earlier_restarts=earlier_restarts,
                unrequested=exits.unrequested,
            )
            if decision.action is not Action.WAIT:
                return decision
            if has_ended:
                decision = after_srun(self.plan, step, exits, earlier_restarts=earlier_restarts)
                if decision.reason == SRUN_KILLED:
                    self._kill_step(exits)
                return decision
            if exits.waited_s > STEP_WITHIN_S:
                return step_cannot_start(exits.waits or "", exits.waited_s)
            self._active.tick()
            if self._is_over_deadline():
                self._forbid_requeue()
                return ExitDecision(Action.FAIL, reason=DEADLINE_EXCEEDED)
            time.sleep(TICK_S)

    def _kill_step(self, exits: TaskExits) -> None:
        """Kill what is left of a job step whose srun is gone. By its step id: 22.05's scancel takes
        SIGKILL for a whole job as an order to cancel it."""
        exits.look()
        if exits.step_id is not None:
            with contextlib.suppress(SlurmError):
                job = self.client.job(self.allocation.job_id)
                self.client.signal(job, signal.SIGKILL, step=exits.step_id)

    # --- its nodes

    def _preflight(self) -> Outcome | None:
        """Check the nodes before an attempt; None if it may begin."""
        if self.plan.preflight is None:
            return None
        status, message = check_job(
            self.plan.preflight, self.run, self.client, self.allocation,
            folder=self.plan.tasks[0].working_directory,
            most=self.plan.limits.max_excluded_nodes,
        )  # fmt: skip
        if status == 0 and self._stop_requested and (stop := self._why_stopped()).ends_job:
            return self._leave(None, stop, saved=False)
        return Outcome(status, message) if status else None

    def _with_nodes(self, decision: ExitDecision, exits: TaskExits) -> ExitDecision:
        """Note where tasks have failed by themselves, and what they say of their nodes."""
        exits.look()
        causes: dict[str, str] = {}
        size_bytes = self._log_bytes()
        for task, status in exits.statuses.items():
            if status not in (0, RUN_AGAIN, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
                node = self.allocation.nodes[self.plan.tasks[task].node]
                log = self.run.task_log(task)
                end_bytes = size_bytes.get(log.name, 0) - _LOG_BYTES
                lines, _ = new_lines(log, max(end_bytes, self._printed_bytes.get(log.name, 0)))
                causes[node] = causes.get(node) or cause_in(lines)
        plain = [node for node, cause in causes.items() if cause]
        if len(plain) == 1:
            return replace(decision, failed_on=(plain[0],), cause=causes[plain[0]])
        is_alone = len(self.allocation.nodes) == 1
        return replace(decision, failed_on=() if is_alone else tuple(causes))

    def _log_bytes(self) -> dict[str, int]:
        """How much the tasks have printed until now, by the names of their logs."""
        return {one.name: one.stat().st_size for one in os.scandir(self.run.logs)}

    # --- with Slurm

    def _why_ended(self, attempt: Attempt) -> Stop:
        """Why the ranks of an attempt have left; they may have written down all that Slurm knows.

        Raises:
            StaleAttempt: as :meth:`_check_newest`.
        """
        if was_requeued_by_ranks(self.run.events, attempt):
            message = "a rank has saved and had the job requeued"
            return Stop(StopReason.REQUEUED, message, pending_again=True)
        stop = self._why_stopped()
        if stop.job is not None:
            check_newest(stop.job, self.allocation, began_epoch_s=self._began_epoch_s)
        return stop

    def _why_stopped(self) -> Stop:
        return ask_why(
            self.client,
            self.allocation.job_id,
            warning_s=float(self.plan.warning_s),
        )

    def _was_requested(self, stop: Stop | None, attempt: Attempt) -> bool:
        """Whether Slurm, a person or another rank may have requested this stop. If Slurm does not
        answer, it may have been Slurm."""
        if self._stop_requested or stop is None or stop.reason is not StopReason.ASKED:
            return True
        return was_stop_requested(self.run.events, since_epoch_ns=attempt.began_epoch_ns)

    def _leave(
        self,
        attempt: Attempt | None,
        stop: Stop | None,
        *,
        saved: bool,
        instead: ExitDecision | None = None,
    ) -> Outcome:
        """Requeue the job, unless a person or its time limit has ended it.

        Args:
            attempt: the one that was interrupted; None between two.
            stop: Slurm's reason; None if a rank requested the stop.
            saved: whether a rank reports that it has saved.
            instead: this supervisor's own reason to leave.
        """
        reason = None if stop is None else stop.reason
        message = "a rank has saved and left" if instead is None else instead.message
        message = message if stop is None else stop.message
        if reason is StopReason.CANCELLED:
            self._end_attempt(attempt, Ending.CANCELLED)
            self._add_condition("Failed", "Cancelled", message)
            return Outcome(CANCELLED, message)
        if reason is StopReason.TIME_LIMIT and not saved:
            self._end_attempt(attempt, Ending.TIME_LIMIT)
            message = f"{message}, and nothing was saved to resume from"
            self._add_condition("Failed", "TimeLimit", message)
            return Outcome(MUST_NOT_RUN_AGAIN, message)
        if attempt is not None and instead is None and reason in (None, StopReason.REQUEUED):
            reason, message = recorded_stop_reason(self.run.events, attempt) or (reason, message)
        is_limit = reason is StopReason.TIME_LIMIT
        self._end_attempt(attempt, Ending.TIME_LIMIT if is_limit else Ending.PREEMPTED)
        shown = condition_reason(reason) if reason or instead is None else instead.reason
        self._add_condition("Preempted", shown, message)
        try:
            if stop is None or not stop.pending_again:
                requeue(self.client, self.allocation, began_epoch_s=self._began_epoch_s)
        except SlurmError as error:
            # the batch script tries again for status 75
            self.log(f"the job could not be requeued: {error}")
        return Outcome(RUN_AGAIN, message)

    def _end_attempt(self, attempt: Attempt | None, ending: Ending) -> None:
        """On a full disk it has no end, as if this process had been killed: the job is requeued."""
        if attempt is not None:
            with self._logging_full_disk():
                self._attempts.end(attempt, ending)

    def _end_lost_attempts(self) -> None:
        """End the attempts of earlier allocations that have no end: Slurm took their nodes away."""
        for attempt in self._attempts.all():
            if attempt.ending is None and attempt.restart_count < self.allocation.restart_count:
                self._attempts.end(attempt, Ending.PREEMPTED)
                reason, why = recorded_stop_reason(self.run.events, attempt) or (None, "")
                message = f"attempt {attempt.number} was ended by Slurm{f': {why}' if why else ''}"
                self._add_condition("Preempted", condition_reason(reason), message)

    def _check_newest(self) -> Job | None:
        """Make sure that this allocation is still the job's current one: what follows acts on the
        job, so a supervisor of a dead attempt would hit the living one. None: Slurm is away.

        Raises:
            StaleAttempt: it is not.
        """
        try:
            job = self.client.job(self.allocation.job_id)
        except SlurmError:
            return None
        check_newest(job, self.allocation, began_epoch_s=self._began_epoch_s)
        return job

    def _forbid_requeue(self) -> None:
        """Keep ranks that save at SIGTERM from having the job restarted."""
        with contextlib.suppress(SlurmError):
            if (job := self._check_newest()) is not None:
                self.client.set_requeue(job, allowed=False)

    # --- the end of a step

    def _end_within(self, step: RunningStep, patience_s: float) -> None:
        """Let tasks end by themselves; then end them."""
        clock = AwakeClock()
        until_s = clock.now_s() + patience_s
        while not step.has_ended() and clock.now_s() < until_s and not self._is_over_deadline():
            self._active.tick()
            time.sleep(TICK_S)
        if not step.has_ended():
            step.end()

    def _is_over_deadline(self) -> bool:
        limit_s = self.plan.limits.active_deadline_seconds
        return limit_s is not None and self._active.tick() >= limit_s

    def _delay_restart(self, failures: int) -> None:
        until_s = time.monotonic() + min(max(1.0, failures), LONGEST_DELAY_S)
        while time.monotonic() < until_s and not self._stop_requested:
            self._active.tick()
            time.sleep(TICK_S)

    # --- recording

    def _add_condition(self, kind: ConditionType, reason: str, message: str) -> None:
        with self._logging_full_disk():
            add_condition(
                self.run.conditions_jsonl,
                kind,
                reason=reason,
                message=message,
                restart_count=self.allocation.restart_count,
            )
        self.log(f"{kind}: {message}")

    @contextlib.contextmanager
    def _logging_full_disk(self) -> Iterator[None]:
        """What is only told must not keep a job from its requeue."""
        try:
            yield
        except RunFolderError as error:
            self.log(str(error))

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Survive SIGTERM: the ranks get it too, and the supervisor waits for what they do."""

        def note(_signo: int, _frame: FrameType | None) -> None:
            self._stop_requested = True

        before = {one: signal.signal(one, note) for one in (signal.SIGTERM, signal.SIGURG)}
        try:
            yield
        finally:
            for signo, handler in before.items():
                signal.signal(signo, handler)
