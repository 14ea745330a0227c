"""The entry point for talking to Slurm: all requests, by scontrol, squeue, sacct and scancel, or by
pyslurm where it works.

    client = open_client()
    client.job(123).state
    client.why                # "commands: pyslurm is not installed"
"""

from __future__ import annotations

import importlib.util
import os
import signal as signals
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hydroslurm.core.jobid import JobId
from hydroslurm.core.signals import signal_number
from hydroslurm.errors import (
    ControllerUnreachable,
    NoSuchJob,
    NotPermitted,
    SlurmError,
    SlurmMissing,
    SlurmTimeout,
    UsageError,
    WrongJobState,
)
from hydroslurm.slurm import listings, scontrol_text
from hydroslurm.slurm.config import Config, find_slurm_conf
from hydroslurm.slurm.programs import (
    ALREADY_PENDING,
    Programs,
    RetryPolicy,
    checked_job_id,
    says_nothing,
)
from hydroslurm.slurm.values import Element, Job, JobState, Partition, Qos

if TYPE_CHECKING:  # nearly no machine has it
    from hydroslurm.slurm.libslurm import Libslurm

__all__ = [
    "BACKEND_ENV",
    "Config",
    "Job",
    "JobState",
    "Partition",
    "Qos",
    "RetryPolicy",
    "SlurmClient",
    "open_client",
]

BACKEND_ENV = "HYDROSLURM_SLURM_BACKEND"
"""Environment variable that chooses the backend: ``commands`` or ``pyslurm``."""


def open_client(
    prefer: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    retry_policy: RetryPolicy | None = None,
) -> SlurmClient:
    """Choose a backend: pyslurm if it works, else Slurm's own programs.

    Where pyslurm is installed, a child process makes one request with it first. If that fails, or
    a request later on, this process uses the programs from then on, and a line of the log says so.

    Args:
        prefer: ``"commands"`` or ``"pyslurm"``; None: HYDROSLURM_SLURM_BACKEND, else what works.
        environ: for the programs, most of all SLURM_CONF and PATH; None: a copy of this process's.
            pyslurm reads this process's own, so another SLURM_CONF rules it out.
        retry_policy: time-outs and retries.

    Raises:
        UsageError: no such backend.
        SlurmMissing: pyslurm was asked for and cannot be used; the message says why.
    """
    environ = dict(os.environ if environ is None else environ)
    retry_policy = retry_policy or RetryPolicy()
    source = "asked for by the caller"
    if prefer is None and environ.get(BACKEND_ENV):
        prefer, source = environ[BACKEND_ENV], f"asked for by {BACKEND_ENV}"
    if prefer not in (None, "commands", "pyslurm"):
        raise UsageError(
            f"no Slurm backend {prefer!r} ({source}); there are 'commands' and 'pyslurm'"
        )
    if prefer == "commands":
        return SlurmClient(environ, retry_policy=retry_policy, why=f"commands: {source}")
    if importlib.util.find_spec("pyslurm") is None:
        obstacle = "pyslurm is not installed"
    else:
        from hydroslurm.slurm import libslurm

        timeout_s = retry_policy.call_timeout_s
        obstacle = libslurm.obstacle(environ, timeout_s=timeout_s, say=prefer is None)
        if not obstacle:
            reason = source if prefer else f"it answers, and {find_slurm_conf(environ)} exists"
            return SlurmClient(
                environ,
                retry_policy=retry_policy,
                why=f"pyslurm: {reason}",
                libslurm=libslurm.Libslurm(),
            )
    if prefer == "pyslurm":
        raise SlurmMissing(f"the pyslurm backend was {source}, but {obstacle}")
    return SlurmClient(environ, retry_policy=retry_policy, why=f"commands: {obstacle}")


class SlurmClient:
    """All requests to Slurm. Every call may raise, besides what it documents:

    - SlurmMissing: no Slurm here.
    - ControllerUnreachable: slurmctld is away, and the retries are used up.
    - SlurmTimeout: a call took too long; Slurm may have acted on it or not.
    - NoSuchJob: slurmctld does not know the job (it forgets ended ones after MinJobAge).
    - NotPermitted: this user may not do that.
    - UnreadableOutput: the answer has a form that no known release has.

    Calls block. They are thread-safe, but not to be made from a signal handler. What changes a job
    takes it as Slurm has described it, and acts on ``Job.id``: the number that a process or a file
    knows may be that of a whole array, whose other elements are other people's work.

    Attributes:
        backend: ``commands`` or ``pyslurm``.
        why: one line: which backend this is, and why it was chosen.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        retry_policy: RetryPolicy | None = None,
        why: str = "commands: asked for by the caller",
        libslurm: Libslurm | None = None,
    ) -> None:
        """
        Args:
            environ: all that the programs see; ``os.environ`` is not read.
            libslurm: is asked first; None asks the programs only.
        """
        self._why = why
        self._libslurm = libslurm
        self._programs = Programs(dict(environ))
        self._retry_policy = retry_policy or RetryPolicy()

    @property
    def backend(self) -> str:
        return "commands" if self._libslurm is None or self._libslurm.failure else "pyslurm"

    @property
    def why(self) -> str:
        failure = "" if self._libslurm is None else self._libslurm.failure
        return f"commands: {failure}" if failure else self._why

    def job(self, job_id: int) -> Job:
        """Describe the job whose processes have this number as SLURM_JOB_ID. For ids that people
        write use :meth:`jobs_of`."""
        checked_job_id(job_id)
        if self._libslurm is not None and (found := self._libslurm.job(job_id)) is not None:
            return found
        # outside of a federation --local only saves the question whether there is one; a process
        # of the job itself is where it runs in any case
        local = ["--local"] if self._programs.environ.get("SLURM_JOB_ID") == str(job_id) else []
        output = self._ask("scontrol", *local, "show", "job", str(job_id))
        for job in scontrol_text.read_jobs(output):
            if job.job_id == job_id:
                return job
        raise NoSuchJob(f"scontrol show job {job_id}: slurmctld described other jobs only")

    def jobs_of(self, job_id: JobId) -> tuple[Job, ...]:
        """Describe the job that an id names, or the elements of an array; of those that wait
        together one record tells, of no others than the id names."""
        try:
            output = self._ask("scontrol", "show", "job", str(job_id.number))
        except NoSuchJob:
            raise NoSuchJob(f"there is no job {job_id}") from None
        found = [
            replace(job, array_task_id=both.task, array_tasks=both.tasks)
            if (both := job_id.common(job.id)) is not None
            else job
            for job in scontrol_text.read_jobs(output)
            if job.is_named(job_id)
        ]
        if not found:
            raise NoSuchJob(f"slurmctld knows a job {job_id.number}, but no {job_id} (any more)")
        # the components of a heterogeneous job are one job, by its leader's number
        own = [job for job in found if job.job_id == job_id.number and job.array_job_id is None]
        return tuple(own or found)

    def jobs(
        self, *, user: str | None = None, ids: Collection[JobId] | None = None
    ) -> tuple[Job, ...]:
        """Describe the jobs that slurmctld knows, ended ones included, in one request.

        Args:
            user: only this user's.
            ids: only these jobs, and the elements of these arrays. Unknown ones are ignored.
        """
        if ids is not None and not ids:
            return ()
        return tuple(
            job
            for job in self._all_jobs(user)
            if (user is None or job.user == user)
            and (ids is None or any(job.is_named(one) for one in ids))
        )

    def elements(self, *, user: str, name: str) -> tuple[Element, ...]:
        """The elements of this user's job arrays of that name, those included that slurmctld still
        remembers after their end, in one request."""
        options = ("--array", "--noheader", "--states=all", f"--user={user}", f"--name={name}")
        return listings.read_elements(
            self._ask("squeue", *options, f"--format={listings.ELEMENT_FORMAT}")
        )

    def cancel_elements(self, names: Collection[str]) -> None:
        """Cancel elements of arrays; success for elements that have already ended."""
        for name in names:
            if JobId.parse(name).task is None:
                raise UsageError(f"not an element of an array: {name!r}; wanted 123_4")
        if names:
            self._run("scancel", "--quiet", *sorted(names))

    def history(self, job_id: JobId) -> tuple[Job, ...]:
        """Every start of a job, or of all elements of an array, according to accounting, oldest
        first; a requeue adds one.

        Raises:
            NoSuchJob: accounting has no record of it (yet: records arrive a moment late).
        """
        columns = ",".join(listings.SACCT_FIELDS)
        options = ("-D", "-X", "-P", "-n", f"--delimiter={listings.DELIMITER}", "-o", columns)
        output = self._ask("sacct", *options, "-j", str(JobId(job_id.number, job_id.task)))
        attempts = tuple(job for job in listings.read_attempts(output) if job.is_named(job_id))
        if not attempts:
            raise NoSuchJob(
                f"sacct -D -j {job_id}: accounting has no record of it. Records arrive a moment "
                "late, and a cluster without slurmdbd keeps none"
            )
        return attempts

    def submit_line(self, job: Job) -> str:
        """The command line of the submission, from accounting; empty if it has none."""
        options = ("-X", "-P", "-n", "-o", "SubmitLine")
        return self._ask("sacct", *options, "-j", job.id.argument).rstrip("\n")

    def partitions(self) -> tuple[Partition, ...]:
        """Describe all partitions, hidden ones included."""
        if self._libslurm is not None and (found := self._libslurm.partitions()) is not None:
            return found
        return scontrol_text.read_partitions(self._ask("scontrol", "-a", "-o", "show", "partition"))

    def pending_jobs(self, partition: str, *, without_user: str) -> int:
        """How many jobs of other users wait in a partition; an array that waits counts once."""
        waiting = self._ask(
            "squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--format=%u"
        )
        users = [line.strip() for line in waiting.splitlines() if line.strip()]
        return sum(user != without_user for user in users)

    def qoses(self) -> tuple[Qos, ...] | None:
        """Describe all qualities of service; None when accounting is away or there is none."""
        columns = f"format={','.join(listings.QOS_FIELDS)}"
        try:
            # no retries: without slurmdbd every try is refused
            output = self._run("sacctmgr", "-n", "-P", "show", "qos", columns)
        except SlurmError:
            return None
        return listings.read_qoses(output)

    def batch_script(self, job: Job) -> str | None:
        """The batch script as submitted; None if there is none, or it is another user's."""
        try:
            # by its own number: scontrol of 22.05 reads no other here
            script = self._ask("scontrol", "write", "batch_script", str(job.job_id), "-")
        except (NotPermitted, NoSuchJob, WrongJobState):
            return None
        return script or None

    def config(self) -> Config:
        """The controller's configuration."""
        if self._libslurm is not None and (found := self._libslurm.config()) is not None:
            return found
        return scontrol_text.read_config(self._ask("scontrol", "show", "config"))

    def suspend(self, job: Job) -> None:
        """Send SIGTSTP to a running job, then SIGSTOP; success if it is already suspended.

        Raises:
            WrongJobState: it does not run.
        """
        self._act(job, "scontrol", "suspend", job.id.leader)

    def resume(self, job: Job) -> None:
        """Continue a suspended job.

        Raises:
            WrongJobState: it is not suspended.
        """
        self._act(job, "scontrol", "resume", job.id.leader)

    def requeue(self, job: Job) -> None:
        """End a batch job and put it back into the queue; success if it is already pending.

        An ended batch job is started again. "Requeued by this call" and "already requeued" look the
        same: what matters is that the job will run again.

        Raises:
            WrongJobState: not a batch job, or submitted with --no-requeue.
        """
        self._act(job, "scontrol", "requeue", job.id.leader, pending_is_success=True)

    def signal(
        self,
        job: Job,
        signal: str | int | signals.Signals,
        *,
        step: int | None = None,
    ) -> None:
        """Send a signal to the job steps of a running job.

        Args:
            job: as slurmctld has just described it.
            signal: ``"USR1"``, ``"SIGUSR1"``, ``10`` or ``signal.SIGUSR1``.
            step: only this job step; Slurm does not report one that does not exist.

        Raises:
            WrongJobState: the job does not run, or is suspended.
            UsageError: no such signal.
        """
        number = signal_number(signal)
        # scancel repeats a signal to a waiting or suspended job for a minute and a half, and then
        # signals the next attempt of a requeued one
        _check_signallable(job, number)
        target = job.id.argument if step is None else f"{job.id.argument}.{step}"
        # what may have arrived is not repeated: a second USR1 could be a second pause
        self._act(job, "scancel", f"--signal={number}", target, may_repeat=False)

    def cancel(self, job: Job) -> None:
        """Cancel a job; success if it has already ended."""
        self._act(job, "scancel", job.id.argument)

    def set_requeue(self, job: Job, *, allowed: bool) -> None:
        """Set whether Slurm may requeue a job; its owner may change that while it runs.

        Raises:
            WrongJobState: it has ended.
        """
        target = f"JobId={job.id.leader}"
        self._act(job, "scontrol", "update", target, f"Requeue={int(allowed)}")

    def exclude_nodes(self, job: Job, names: str) -> None:
        """Replace the list of nodes on which a job must not start.

        Raises:
            WrongJobState: it does not wait.
        """
        target = f"JobId={job.id.leader}"
        self._act(job, "scontrol", "update", target, f"ExcNodeList={names}")

    def node_address(self, name: str) -> str:
        """The host name or address of a node, which Slurm knows even if the node's name does not
        resolve.

        Raises:
            SlurmError: there is no such node.
        """
        return scontrol_text.read_node_address(self._ask("scontrol", "-o", "show", "node", name))

    def _all_jobs(self, user: str | None) -> tuple[Job, ...]:
        if self._libslurm is not None and (found := self._libslurm.jobs()) is not None:
            return found
        # JSON first: it is exact, and no comment can pass for a record. 22.05 ignores --user with
        # it, so the answer is filtered again. Not every Slurm is built with JSON, and 22.05 answers
        # with an empty list and "Unspecified error" while the controller is away: whatever fails is
        # asked again by scontrol, which names causes.
        chosen = [] if user is None else [f"--user={user}"]
        try:
            return listings.read_jobs(self._run("squeue", "--json", "--states=all", *chosen))
        except (SlurmMissing, SlurmTimeout):
            raise
        except SlurmError:
            return scontrol_text.read_jobs(self._ask("scontrol", "-a", "show", "job"))

    def _ask(self, program: str, *arguments: str) -> str:
        return self._retry_policy.retry(lambda: self._run(program, *arguments))

    def _run(self, program: str, *arguments: str, silent: bool = False) -> str:
        timeout_s = self._retry_policy.call_timeout_s
        return self._programs.run(program, *arguments, timeout_s=timeout_s, silent=silent)

    def _act(
        self,
        job: Job,
        program: str,
        *arguments: str,
        pending_is_success: bool = False,
        may_repeat: bool = True,
    ) -> None:
        """Run a program that changes something; if it fails without a reason, find out the
        reason."""

        def once() -> None:
            try:
                self._run(program, *arguments, silent=True)
            except WrongJobState as error:
                if not (pending_is_success and ALREADY_PENDING in str(error)):
                    raise
            except SlurmTimeout as error:
                # with MessageTimeout=30 scontrol itself looks for an absent controller for 58 s; a
                # request that is harmless twice is repeated
                if pending_is_success:
                    raise ControllerUnreachable(str(error)) from error
                raise
            except SlurmError as error:
                if not says_nothing(error):
                    raise
                # raises NoSuchJob or ControllerUnreachable when that was the cause
                self._run("scontrol", "show", "job", str(job.id.number))
                raise

        self._retry_policy.retry(once, may_repeat=may_repeat)


def _check_signallable(job: Job, number: int) -> None:
    """Check that a job has processes that can get the signal.

    Raises:
        WrongJobState: it has ended, waits, or is suspended (only SIGKILL reaches it then).
    """
    suspended = job.state is JobState.SUSPENDED and number != signals.SIGKILL
    if job.state.has_ended or job.state.is_waiting or suspended:
        raise WrongJobState(
            f"job {job.id} is {job.state.value} and cannot be signalled; it has to be RUNNING"
        )
