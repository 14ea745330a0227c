"""The client over scontrol, squeue, sacct and scancel."""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

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
from hydroslurm.slurm import refusals, sacct_text, sacctmgr_text, scontrol_text, squeue_json
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.programs import Programs
from hydroslurm.slurm.retry import Patience
from hydroslurm.slurm.values import Job, JobState, Partition, Qos

Result = TypeVar("Result")


class CommandClient:
    """As :class:`hydroslurm.slurm.client.SlurmClient` says."""

    backend = "commands"

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        patience: Patience | None = None,
        why: str = "commands: asked for by the caller",
    ) -> None:
        """``environ`` is all that the programs see; ``os.environ`` is not read."""
        self.why = why
        self._programs = Programs(dict(environ))
        self._patience = patience or Patience()

    def job(self, job_id: int) -> Job:
        output = self._ask("scontrol", "show", "job", str(checked_job_id(job_id)))
        for job in scontrol_text.read_jobs(output):
            if job.job_id == job_id:
                return job
        raise NoSuchJob(f"scontrol show job {job_id}: slurmctld described other jobs only")

    def jobs(
        self, *, user: str | None = None, ids: Collection[int] | None = None
    ) -> tuple[Job, ...]:
        if ids is not None and not ids:
            return ()
        wanted = None if ids is None else frozenset(checked_job_id(i) for i in ids)
        return tuple(
            job
            for job in self._all_jobs(user)
            if (user is None or job.user == user)
            and (wanted is None or job.job_id in wanted or job.array_job_id in wanted)
        )

    def history(self, job_id: int) -> tuple[Job, ...]:
        columns = ",".join(sacct_text.FIELDS)
        options = ("-D", "-X", "-P", "-n", f"--delimiter={sacct_text.DELIMITER}", "-o", columns)
        output = self._ask("sacct", *options, "-j", str(checked_job_id(job_id)))
        lives = tuple(job for job in sacct_text.read_lives(output) if job.job_id == job_id)
        if not lives:
            raise NoSuchJob(
                f"sacct -D -j {job_id}: accounting has nothing on it. Records arrive a moment "
                "late, and a cluster without slurmdbd keeps none"
            )
        return lives

    def submit_line(self, job_id: int) -> str:
        options = ("-X", "-P", "-n", "-o", "SubmitLine")
        return self._ask("sacct", *options, "-j", str(checked_job_id(job_id))).rstrip("\n")

    def partitions(self) -> tuple[Partition, ...]:
        return scontrol_text.read_partitions(self._ask("scontrol", "-a", "-o", "show", "partition"))

    def qoses(self) -> tuple[Qos, ...] | None:
        columns = f"format={','.join(sacctmgr_text.FIELDS)}"
        timeout_s = self._patience.call_timeout_s
        try:
            # one attempt: without slurmdbd it would be refused for as long as one asks
            output = self._programs.run(
                "sacctmgr", "-n", "-P", "show", "qos", columns, timeout_s=timeout_s
            )
        except SlurmError:
            return None
        return sacctmgr_text.read_qoses(output)

    def batch_script(self, job_id: int) -> str | None:
        try:
            script = self._ask(
                "scontrol", "write", "batch_script", str(checked_job_id(job_id)), "-"
            )
        except (NotPermitted, NoSuchJob, WrongJobState):
            return None
        return script or None

    def config(self) -> Config:
        return scontrol_text.read_config(self._ask("scontrol", "show", "config"))

    def suspend(self, job_id: int) -> None:
        self._act(job_id, "scontrol", "suspend", str(job_id))

    def resume(self, job_id: int) -> None:
        self._act(job_id, "scontrol", "resume", str(job_id))

    def requeue(self, job_id: int) -> None:
        self._act(job_id, "scontrol", "requeue", str(job_id), pending_is_success=True)

    def requeue_hold(self, job_id: int) -> None:
        try:
            self._act(job_id, "scontrol", "requeuehold", str(job_id))
        except WrongJobState as error:
            if refusals.ALREADY_PENDING not in str(error):
                raise
            self.hold(job_id)

    def signal(
        self,
        job_id: int,
        signal: str | int | signals.Signals,
        *,
        step: int | None = None,
        batch: bool = False,
        full: bool = False,
    ) -> None:
        number = signal_number(signal)
        if (step is not None) + batch + full > 1:
            raise UsageError("only one of step=, batch= and full= can be asked for")
        options = ["--batch"] if batch else ["--full"] if full else []
        target = str(job_id) if step is None else f"{job_id}.{step}"
        # scancel repeats a signal to a waiting or suspended job for a minute and a half, and then
        # signals the next life of a requeued one
        check_signallable(self.job(job_id), number)
        self._act(
            job_id,
            "scancel",
            f"--signal={number}",
            *options,
            target,
            # what may have been heard is not said again: a second USR1 could be a second pause
            may_repeat=refusals.never_arrived,
        )

    def cancel(self, job_id: int) -> None:
        # scancel says nothing of an id that does not exist, and exits with 0
        self.job(job_id)
        self._act(job_id, "scancel", str(job_id))

    def hold(self, job_id: int) -> None:
        self._act(job_id, "scontrol", "hold", str(job_id))

    def release(self, job_id: int) -> None:
        self._act(job_id, "scontrol", "release", str(job_id))

    def set_requeue(self, job_id: int, *, allowed: bool) -> None:
        self._act(job_id, "scontrol", "update", f"JobId={job_id}", f"Requeue={int(allowed)}")

    def node_address(self, name: str) -> str:
        return scontrol_text.read_node_address(self._ask("scontrol", "-o", "show", "node", name))

    def _all_jobs(self, user: str | None) -> tuple[Job, ...]:
        # JSON first: exact, and no comment can pass for a record. 22.05 pays no heed to --user with
        # it, later releases ask slurmctld for less; what comes is filtered again. Not every Slurm
        # is built with JSON, and 22.05 answers with an empty list and "Unspecified error" when the
        # controller is away, so whatever goes wrong is asked again through scontrol, which names
        # causes.
        chosen = [] if user is None else [f"--user={user}"]
        try:
            timeout_s = self._patience.call_timeout_s
            return squeue_json.read_jobs(
                self._programs.run("squeue", "--json", "--states=all", *chosen, timeout_s=timeout_s)
            )
        except (SlurmMissing, SlurmTimeout):
            raise
        except SlurmError:
            return scontrol_text.read_jobs(self._ask("scontrol", "-a", "show", "job"))

    def _ask(self, program: str, *arguments: str) -> str:
        timeout_s = self._patience.call_timeout_s
        return self._patience.retry(
            lambda: self._programs.run(program, *arguments, timeout_s=timeout_s)
        )

    def _act(
        self,
        job_id: int,
        program: str,
        *arguments: str,
        pending_is_success: bool = False,
        may_repeat: Callable[[ControllerUnreachable], bool] = lambda _: True,
    ) -> None:
        """Run a program that changes something, and find out why if it does not say why not."""
        checked_job_id(job_id)

        def once() -> None:
            timeout_s = self._patience.call_timeout_s
            try:
                self._programs.run(program, *arguments, timeout_s=timeout_s, silent=True)
            except WrongJobState as error:
                if not (pending_is_success and refusals.ALREADY_PENDING in str(error)):
                    raise
            except SlurmTimeout as error:
                # with MessageTimeout=30 scontrol itself looks for an absent controller for 58 s.
                # What is harmless twice is asked again
                if pending_is_success:
                    raise ControllerUnreachable(str(error)) from error
                raise
            except SlurmError as error:
                if not refusals.says_nothing(error):
                    raise
                # raises NoSuchJob or ControllerUnreachable when that was the cause
                self._programs.run("scontrol", "show", "job", str(job_id), timeout_s=timeout_s)
                raise

        self._patience.retry(once, may_repeat=may_repeat)


def check_signallable(job: Job, number: int) -> None:
    """Let pass what has processes that can get the signal.

    Raises:
        WrongJobState: it has ended, waits, or is suspended (when nothing but SIGKILL gets through).
    """
    suspended = job.state is JobState.SUSPENDED and number != signals.SIGKILL
    if job.state.has_ended or job.state.is_waiting or suspended:
        raise WrongJobState(
            f"job {job.job_id} is {job.state.value} and cannot be signalled; it has to be RUNNING"
        )


def signal_number(signal: str | int | signals.Signals) -> int:
    """``"USR1"``, ``"SIGUSR1"``, ``10`` or ``signal.SIGUSR1`` -> 10.

    Raises:
        UsageError: no such signal on Linux.
    """
    try:
        if isinstance(signal, str):
            name = signal.upper()
            return signals.Signals[name if name.startswith("SIG") else f"SIG{name}"].value
        if signal in signals.valid_signals():  # real-time ones have numbers only
            return int(signal)
        return signals.Signals(signal).value
    except (KeyError, ValueError) as error:
        raise UsageError(f"no signal {signal!r}; wanted a name such as USR1 or TERM") from error


def checked_job_id(job_id: int) -> int:
    """The id itself.

    Raises:
        UsageError: not a positive number.
    """
    # it becomes a word of a command line: "1,2" or "-a" would mean something else there
    if isinstance(job_id, bool) or not isinstance(job_id, int) or job_id < 1:
        raise UsageError(f"not a job id: {job_id!r}; wanted a positive number, 123")
    return job_id
