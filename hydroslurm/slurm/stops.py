"""Why a job was stopped, or warned of its time limit, asked of Slurm and never guessed from the
signal; and its requeue.

What Slurm 22.05.8 shows while a rank is still alive:

    preempted, in its grace   RUNNING, PreemptTime set, EndTime moved to the end of the grace
    time limit over           COMPLETING, Reason=TimeLimit
    scancel                   COMPLETING, EndTime now
    requeued                  COMPLETING, Restarts + 1, EndTime unknown or a time limit away
    a user's signal           RUNNING, unchanged

"Requeued" is by an operator, by gang scheduling, or at the end of a grace. slurmctld does not tell
which any more, but accounting does: PREEMPTED or REQUEUED. A rank does the same in all cases, so it
does not ask: if a thousand jobs are preempted without grace, a thousand would, at one moment.
Accounting is asked who cancelled, and whether that was a preemption after all.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.core.jobid import JobId
from hydroslurm.core.signals import signal_number
from hydroslurm.errors import SlurmError, StaleAttempt, UsageError
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.policy import WARNING_EARLY_S, Policies, StopReason
from hydroslurm.slurm.programs import RetryPolicy
from hydroslurm.slurm.values import Job, JobState

if TYPE_CHECKING:  # a training outside of a job needs no client
    from hydroslurm.slurm.client import SlurmClient

IN_GRACE = RetryPolicy(
    call_timeout_s=5.0, give_up_after_s=1.5, first_delay_s=0.1, longest_delay_s=0.5
)
"""For questions within the grace, where every second is taken from the save."""
USUAL_WARNING_S = 120.0
"""An earlier warning of the time limit is recognized only if ``warning_s`` is given."""


@dataclass(frozen=True)
class Stop:
    """Why the job was stopped, and what is known of the time left.

    Attributes:
        message: one sentence for a person.
        to_end_s: seconds from the first signal to the job's EndTime, which a preemption with grace
            moves to the end of the grace; 0.0 if only KillWait is left. None for a user's signal to
            a job without an end: nothing will kill it.
        pending_again: Slurm has already put the job back into the queue.
        needs_history: accounting may know better, but was not asked or has not answered.
        job: as slurmctld described it; None if it could not be asked.
    """

    reason: StopReason
    message: str
    _: KW_ONLY
    to_end_s: float | None = 0.0
    pending_again: bool = False
    needs_history: bool = False
    job: Job | None = None

    @property
    def ends_job(self) -> bool:
        """Whether Slurm itself ends this start of the job. One that runs on, without a preemption
        in progress, it does not stop: a time limit that is near ends nothing yet."""
        if self.reason in (StopReason.ASKED, StopReason.UNKNOWN):
            return False
        return not (self.reason is StopReason.TIME_LIMIT and (self.to_end_s or 0.0) > 1.0)

    def time_left_s(self, kill_after_s: float) -> float:
        """The least time from the first signal to SIGKILL; infinite if none follows.

        Args:
            kill_after_s: as :attr:`SitePolicy.kill_after_s`.
        """
        return math.inf if self.to_end_s is None else max(0.0, self.to_end_s + kill_after_s)


def ask_why(
    client: SlurmClient,
    job_id: int,
    *,
    warning_s: float | None = None,
    history_within_s: float = 1.0,
) -> Stop:
    """Ask Slurm why this job was just told to stop. A Slurm error gives UNKNOWN, never raises.

    Args:
        client: with :data:`IN_GRACE` as its retry policy; another one may use up the grace.
        warning_s: the T of ``--signal=X@T``, if known.
        history_within_s: how long to wait for accounting, which is asked only where slurmctld's
            answer is ambiguous.
    """
    asked_epoch_s = time.time()
    try:
        job = client.job(job_id)
    except SlurmError as error:
        message = f"Slurm could not be asked why: {error}"
        return Stop(StopReason.UNKNOWN, message)
    stop = why_stopped(job, now_epoch_s=asked_epoch_s, warning_s=warning_s)
    deadline_s = time.monotonic() + history_within_s
    while stop.needs_history:
        attempt = _last_attempt(client, job.id)
        if attempt is not None:
            stop = why_stopped(job, now_epoch_s=asked_epoch_s, attempt=attempt, warning_s=warning_s)
        if not stop.needs_history or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    return replace(stop, job=job)


def why_stopped(
    job: Job, *, now_epoch_s: float, attempt: Job | None = None, warning_s: float | None = None
) -> Stop:
    """Derive the reason from Slurm's answers. Pure.

    Args:
        job: as slurmctld described it after the signal.
        now_epoch_s: when that was; taken as the time of the signal.
        attempt: the job's last attempt according to accounting; None if unknown.
        warning_s: the T of ``--signal=X@T``, if known.
    """
    to_end_s = None if job.end_epoch_s is None else job.end_epoch_s - now_epoch_s
    if job.state in (JobState.RUNNING, JobState.SUSPENDED):
        return _why_running(job, to_end_s, warning_s)
    # the processes are being killed: the state beneath COMPLETING tells why
    told = {job.state, *(JobState[word] for word in job.flags if word in JobState.__members__)}
    if attempt is not None:
        told.add(attempt.state)
    if JobState.CANCELLED in told:
        by_uid = attempt.cancelled_by_uid if attempt else None
        who = "" if by_uid is None else f" by user id {by_uid}"
        return Stop(StopReason.CANCELLED, f"cancelled{who}")
    if JobState.PREEMPTED in told or job.preempt_epoch_s is not None:
        # a job cancelled within its grace has a PreemptTime as well
        pending = is_pending(job)
        doubtful = attempt is None and not pending
        return Stop(
            StopReason.PREEMPTED, "preempted", pending_again=pending, needs_history=doubtful
        )
    if job.reason == "TimeLimit" or {JobState.TIMEOUT, JobState.DEADLINE} & told:
        return Stop(StopReason.TIME_LIMIT, "its time limit is over")
    if {JobState.NODE_FAIL, JobState.BOOT_FAIL} & told or job.reason == "NodeDown":
        pending = is_pending(job)
        return Stop(StopReason.NODE_FAILING, "a node of the job failed", pending_again=pending)
    if is_pending(job):
        by_hand = JobState.REQUEUED in told and attempt is not None
        message = "requeued by hand" if by_hand else "requeued, by hand or by a preemption"
        return Stop(StopReason.REQUEUED, message, pending_again=True)
    message = "it is being ended and is not requeued: cancelled, or its batch script has ended"
    return Stop(StopReason.CANCELLED, message, needs_history=attempt is None)


def _why_running(job: Job, to_end_s: float | None, warning_s: float | None) -> Stop:
    if job.preempt_epoch_s is not None:
        # no EndTime: the grace is unknown
        left_s = 0.0 if to_end_s is None else to_end_s
        message = f"preempted, with a grace that ends in {left_s:.0f} s"
        return Stop(StopReason.PREEMPTED, message, to_end_s=left_s)
    near_s = (USUAL_WARNING_S if warning_s is None else warning_s) + WARNING_EARLY_S
    if to_end_s is not None and to_end_s <= near_s:
        message = f"its time limit ends it in {max(0.0, to_end_s):.0f} s"
        return Stop(StopReason.TIME_LIMIT, message, to_end_s=to_end_s)
    message = (
        "Slurm names no cause: the job is not preempted, and its time limit is not near. A person, "
        "a program or the end of another task may have sent it"
    )
    return Stop(StopReason.ASKED, message, to_end_s=to_end_s)


def is_pending(job: Job) -> bool:
    """Whether the job has been put back into the queue.

    While its processes are being killed it shows COMPLETING, and its times tell: a requeued job has
    the EndTime of its next attempt, a whole time limit after a start, or none; for an ended job it
    is when it ended. (The restart count would need its previous value.)"""
    if job.state.is_waiting or "PENDING" in job.flags:
        return True
    if job.state is not JobState.COMPLETING:
        return False
    if job.end_epoch_s is None or job.start_epoch_s is None:
        return True
    limit_s = job.time_limit_s
    return limit_s is not None and job.end_epoch_s - job.start_epoch_s >= limit_s


def _last_attempt(client: SlurmClient, job_id: JobId) -> Job | None:
    """The attempt that has just ended, according to accounting; None if not recorded yet."""
    try:
        attempts = client.history(job_id)
    except SlurmError:
        return None
    # the record of a new attempt may still say PENDING although it has a start
    started = [attempt for attempt in attempts if attempt.start_epoch_s is not None]
    if not started or started[-1].state in (JobState.RUNNING, JobState.PENDING):
        return None
    return started[-1]


# --- requeueing a job from inside


def requeue(
    client: SlurmClient,
    allocation: Allocation,
    *,
    began_epoch_s: float,
    job: Job | None = None,
    policies: Policies | None = None,
) -> Job:
    """Requeue the job, unless it is already pending; return it as it was before.

    A job in its grace is left to Slurm where our request would start it once too often, until Slurm
    would hold it (tests/slurm/test_leaving_in_grace.py).

    Args:
        allocation: in which this process runs; only the one that is current for Slurm may ask.
        began_epoch_s: when this process was started.
        job: as slurmctld has just described it, where it was asked anyway.
        policies: the site's settings; read where they are needed.

    This could only hit the wrong attempt if somebody else's requeue and a whole start of the job
    happened between the check and the request.

    Raises:
        StaleAttempt: Slurm has started it again since; nothing was done.
        SlurmError: as of ``SlurmClient.requeue``.
    """
    if job is None:
        job = client.job(allocation.job_id)
    check_newest(job, allocation, began_epoch_s=began_epoch_s)
    is_again = job.restart_count > allocation.restart_count and is_pending(job)
    if not is_again and not _is_left_to_slurm(client, job, policies):
        client.requeue(job)
    return job


def _is_left_to_slurm(client: SlurmClient, job: Job, policies: Policies | None) -> bool:
    if job.state is not JobState.RUNNING or job.preempt_epoch_s is None:
        return False
    policies = policies or Policies.read(client)
    policy = None if policies is None else policies.of(job)
    return policy is not None and job.restart_count < policy.left_to_slurm


def check_newest(job: Job, allocation: Allocation, *, began_epoch_s: float) -> None:
    """Compare a start of a job with what Slurm says about the job. Pure.

    A process of a dead attempt, on a node that did not respond for a while, may get its SIGTERM
    when the job already runs again, and ``scontrol requeue`` takes a job id, so it would end the
    living attempt. While a requeued attempt is being ended, Slurm already counts the next restart;
    the job is pending then. A count of 0 may be a lost variable (``srun --export=NONE``,
    containers): a process that began after the newest start belongs to no older one.

    Raises:
        StaleAttempt: the start is over, and the job runs, or ran, without it.
    """
    is_older = job.restart_count > allocation.restart_count and not is_pending(job)
    if is_older and (job.start_epoch_s is None or began_epoch_s < job.start_epoch_s):
        raise StaleAttempt(
            f"job {job.id} is not requeued: Slurm has started it {job.restart_count} times "
            f"again (it is {job.state.value}), and this process is of its restart "
            f"{allocation.restart_count}. The attempt that runs is left alone"
        )


DEFAULT_WARNING_S = 60
"""Slurm's, for ``--signal=USR1`` without ``@``."""

_PATIENCE = RetryPolicy(call_timeout_s=10.0, give_up_after_s=10.0)
_SIGNAL = re.compile(r"(?:(?P<who>[BR]+):)?(?P<name>\w+)(?:@(?P<seconds>\d+))?")


@dataclass(frozen=True)
class LimitWarning:
    """What ``--signal`` asks for.

    Attributes:
        signal: as written, ``USR1``, ``SIGUSR1`` or ``10``; empty where Slurm does not tell.
        before_s: how long before the time limit; Slurm may send it up to a minute earlier.
        batch_shell_only: ``B:``, it is not sent to job steps.
    """

    signal: str
    before_s: int
    batch_shell_only: bool = False

    @classmethod
    def parse(cls, option: str) -> LimitWarning | None:
        """The value of ``--signal``; None for text that is none."""
        match = _SIGNAL.fullmatch(option)
        if match is None:
            return None
        seconds = int(match["seconds"] or DEFAULT_WARNING_S)
        return cls(match["name"], seconds, "B" in (match["who"] or ""))

    @property
    def signo(self) -> int | None:
        """None where it is not known."""
        with contextlib.suppress(UsageError):
            return signal_number(self.signal)
        return None


def requested_warnings(
    client: SlurmClient, job: Job, environ: Mapping[str, str]
) -> tuple[LimitWarning, ...]:
    """What a job has asked for, as sbatch reads it: its command line, SBATCH_SIGNAL, the script.

    Returns:
        At most one where Slurm knows the command line and the script; else also one without a
        signal.

    Raises:
        SlurmError: Slurm could not be asked.
    """
    command = ""
    with contextlib.suppress(SlurmError):  # no accounting
        command = client.submit_line(job)
    script = client.batch_script(job)
    options = (
        _options_of(_words(command)).get("signal", ""),
        environ.get("SBATCH_SIGNAL", ""),
        script_options(script or "").get("signal", ""),
    )
    told = [one for option in options if (one := LimitWarning.parse(option))][:1]
    is_told = bool(command) and (script is not None or job.is_batch is False)
    return (*told, *(() if is_told else (LimitWarning("", int(USUAL_WARNING_S)),)))


def why_warned(
    job_id: int, signo: int, *, sender_pid: int, environ: Mapping[str, str]
) -> Stop | None:
    """Why Slurm has sent a running job the signal of its ``--signal``: the time limit is near, or
    it is preempted (``send_user_signal``). None: a person or program sent it, to pause or resume.

    Raises:
        SlurmError: Slurm could not be asked.
    """
    from hydroslurm.slurm.client import open_client

    client = open_client(environ=environ, retry_policy=_PATIENCE)
    now_epoch_s = time.time()
    job = client.job(job_id)
    if job.state is not JobState.RUNNING or job.end_epoch_s is None:
        return None
    for warning in requested_warnings(client, job, environ):
        if warning.signo == signo or (not warning.signal and _is_slurm(sender_pid)):
            stop = why_stopped(job, now_epoch_s=now_epoch_s, warning_s=warning.before_s)
            return None if stop.reason is StopReason.ASKED else stop
    return None


def _is_slurm(pid: int) -> bool:
    """Unless another program is known to have this pid."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("slurm")
    except OSError:
        return True


def script_options(text: str) -> dict[str, str]:
    """The ``#SBATCH`` options of a batch script, which Slurm reads up to the first command."""
    options: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            options |= _options_of(_words(line.removeprefix("#SBATCH")))
    return options


def _options_of(words: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            options[name] = value or following
        elif word == "-k":
            options["no-kill"] = ""
        elif word.startswith(("-n", "-N")):
            options[{"-n": "ntasks", "-N": "nodes"}[word[:2]]] = word[2:] or following
    return options


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an unbalanced quote: Slurm will complain
        return line.split()
