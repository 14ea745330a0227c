"""Run one of Slurm's programs: checked arguments, a clean environment, a time-out, a checked
answer; what their error messages mean, and how long to retry while the controller is away.

Both backends get the messages of ``slurm_strerror``: the programs print them, pyslurm raises them.
Source: src/common/slurm_errno.c in 22.05.8 and 25.11.7.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal as signals
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
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
from hydroslurm.slurm.config import why_unconfigured

# Variables that change what is printed, or what is acted upon: SCANCEL_USER in somebody's profile
# would turn "cancel job 5" into "cancel job 5 if it is that user's".
_AMBIENT = re.compile(
    r"(SQUEUE|SCONTROL|SCANCEL|SACCT|SINFO)_|SLURM_(TIME_FORMAT|JSON|YAML|DEBUG_FLAGS)$"
)
_COMPLAINT = re.compile(r"\b(error|fatal)\b")

_MEANT_FOR_RANKS = frozenset(
    {signals.SIGTERM, signals.SIGUSR1, signals.SIGUSR2, signals.SIGTSTP, signals.SIGURG}
)


@dataclass(frozen=True)
class Programs:
    """Slurm's programs as found in one environment. Creating the value does not touch the disk."""

    environ: Mapping[str, str]

    def child_environ(self) -> dict[str, str]:
        """English messages, times as epoch seconds, all elements of an array that waits, none of
        the user's format settings."""
        kept = {name: value for name, value in self.environ.items() if not _AMBIENT.match(name)}
        return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

    def run(self, program: str, *arguments: str, timeout_s: float, silent: bool = False) -> str:
        """Run it and return what it printed.

        Args:
            silent: it prints nothing on success. Then an error on stderr is a failure whatever the
                exit status: ``scancel 99`` of an unknown job exits with 0.

        Raises:
            SlurmMissing: no such program, or SLURM_CONF names no file, for which Slurm's programs
                would look again and again for a minute.
            SlurmTimeout: it was killed after ``timeout_s``.
            SlurmError: as :func:`refusal` maps its message.
        """
        command = [self._find(program), *arguments]
        doing = " ".join([program, *arguments])
        try:
            done = _run_apart(command, self.child_environ(), timeout_s)
        except subprocess.TimeoutExpired as error:
            raise SlurmTimeout(
                f"{doing}: no answer within {timeout_s:g} s, so it was ended. Whether Slurm acted "
                "on it is not known; is slurmctld overloaded? Look at `sdiag`"
            ) from error
        except OSError as error:
            raise SlurmMissing(f"{doing}: {command[0]} cannot be run ({error.strerror})") from error
        out, complaint = done.stdout, done.stderr
        if done.returncode != 0:
            if is_unconfigured(complaint):
                raise SlurmMissing(f"{doing}: {why_unconfigured(self.environ)}")
            message = complaint.strip() or out.strip() or f"exit status {done.returncode}"
            raise refusal(message, doing=doing)
        if silent and (_COMPLAINT.search(complaint) or meaning(complaint)):
            raise refusal(complaint, doing=doing)
        return out

    def _find(self, program: str) -> str:
        check_conf(self.environ)
        path = self.environ.get("PATH", "")
        found = shutil.which(program, path=path)
        if not found:
            raise SlurmMissing(
                f"no program {program} on PATH ({path or 'which is empty'}). Run where Slurm is "
                "installed, or use `hydroslurm cluster up`, which brings one up to try things on"
            )
        return found


def check_conf(environ: Mapping[str, str]) -> None:
    """Refuse a SLURM_CONF that names no file, for which Slurm's programs would look for a minute.

    Raises:
        SlurmMissing: it does.
    """
    conf = environ.get("SLURM_CONF")
    if conf and not Path(conf).is_file():
        raise SlurmMissing(f"SLURM_CONF names {conf}, which is no file; unset it or correct it")


SBATCH_TIMEOUT_S = 120.0
_SUBMITTED = re.compile(r"Submitted batch job (\d+)")
_NOT_PASSED_ON = (
    "SBATCH_WAIT", "SLURM_ARRAY_", "SLURM_STEP", "SLURM_RESTART_COUNT", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID",
)  # fmt: skip
"""Starts of the names of variables that sbatch must not see: to wait for the end of the job, and
what a process is that submits a job from within a job. The new job would inherit it, and take
itself for that task, element or restart (seen on 22.05.8)."""


def sbatch(
    script: Path, *options: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Submit a batch script with the environment of this process, unlike :meth:`Programs.run`: the
    job gets it. The exit status is the caller's to check.

    Args:
        options: before the script; they win over its own.
        environ: another environment.

    Raises:
        SlurmMissing: there is no sbatch, or Slurm is not configured here.
        SlurmTimeout: it did not answer; Slurm may have the job.
    """
    environ = os.environ if environ is None else environ
    check_conf(environ)
    try:
        of_job = {name: environ[name] for name in environ if not name.startswith(_NOT_PASSED_ON)}
        done = _run_apart(["sbatch", *options, str(script)], of_job, SBATCH_TIMEOUT_S)
    except OSError as error:
        raise SlurmMissing(
            f"sbatch cannot be run ({error.strerror}), so there is no Slurm to submit to from "
            "here. Log in to a submit host, or try a private one (hydroslurm cluster up)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmTimeout(f"no answer within {SBATCH_TIMEOUT_S:g} s") from error
    if done.returncode != 0 and is_unconfigured(done.stderr):
        raise SlurmMissing(why_unconfigured(environ))
    return done


def submitted(text: str) -> int | None:
    """The job id in sbatch's output, independent of its exit status; None if there is none."""
    found = _SUBMITTED.search(text)
    return None if found is None else int(found[1])


def _run_apart(
    command: list[str], environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """subprocess.run for a child that ignores the signals meant for the ranks of its job.

    Under proctrack/linuxproc every process of a job step gets them, and the second SIGTERM of a
    preemption comes some 20 ms after the first: it used to kill the very scontrol that was asking
    for the requeue. The child inherits the blocked mask through exec; this process only blocks it
    while starting the child.
    """
    before = signals.pthread_sigmask(signals.SIG_BLOCK, _MEANT_FOR_RANKS)
    try:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    finally:
        signals.pthread_sigmask(signals.SIG_SETMASK, before)
    with process:
        try:
            out, complaint = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    # names and paths are bytes on Linux; one that is no UTF-8 must not hide all other jobs
    texts = [each.decode(errors="replace") for each in (out, complaint)]
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def checked_job_id(job_id: int) -> int:
    """The id itself.

    Raises:
        UsageError: not a positive number.
    """
    # it becomes a word of a command line: "1,2" or "-a" would mean something else there
    if isinstance(job_id, bool) or not isinstance(job_id, int) or job_id < 1:
        raise UsageError(f"not a job id: {job_id!r}; wanted a positive number, 123")
    return job_id


# in order: the first that is found counts. A missing slurm.conf also fails to reach the controller.
_MEANINGS: tuple[tuple[type[SlurmError], tuple[str, ...]], ...] = (
    (
        SlurmMissing,
        (
            "Could not establish a configuration source",
            "Unable to process configuration file",
            "failed to fetch config",
        ),
    ),
    (
        ControllerUnreachable,
        (
            "Unable to contact slurm controller",
            "Communication connection failure",
            "Message send failure",
            "Message receive failure",
            "Socket timed out",
            "Zero Bytes were transmitted",
            "Connection refused",
            "Connection timed out",
            "Connection reset",
            "No route to host",
            "Network is unreachable",
            "in standby mode",
            "Rate limit exceeded",
            "Unable to connect to database",
            "failed to send persistent connection init message",
            # munged is restarted now and then; a key that differs will still be reported in the end
            "Protocol authentication error",
            "Munge encode failed",
        ),
    ),
    (NoSuchJob, ("Invalid job id specified", "Invalid job array specification")),
    # "Invalid user id" is what holding another user's job gives on 22.05
    (NotPermitted, ("Access/permission denied", "Invalid user id", "Operation not permitted")),
    (
        WrongJobState,
        (
            "Job is pending execution",
            "Job/step already completing or completed",
            "Job has already finished",
            "Job is not running",
            "Job is not pending nor running",
            "Job is not suspended",
            "Job is not finished",
            "Job is no longer pending execution",
            "Job is current suspended",
            "Job is in held state",
            "Job can not be altered now",
            "Job script not specified",
            "Only batch jobs are accepted",
            "Requested operation is presently disabled",
            "Job step is suspended",
            "Job step not running",
        ),
    ),
)

ALREADY_PENDING = "Job is pending execution"

# scontrol of 22.05 says this for "no such job" and for "the controller is away" alike
_SAYS_NOTHING = ("Unexpected message received", "Unspecified error")

_NEVER_ARRIVED = re.compile(
    r"connect failure|connection failure|Connection refused|No route to host"
)

_HINTS: dict[type[SlurmError], str] = {
    SlurmMissing: "set SLURM_CONF to this cluster's slurm.conf, or run where Slurm is configured",
    NoSuchJob: "ended jobs stay known for MinJobAge only; look at `sacct -D -j ID`",
    NotPermitted: "only the owner, operators and administrators may; suspend is for the last two",
    WrongJobState: "look at `scontrol show job ID`",
    ControllerUnreachable: "look at `scontrol ping`",
}


def meaning(sentence: str) -> type[SlurmError] | None:
    """The error class for a message of Slurm's; None if it is unknown."""
    lowered = sentence.lower()
    for error, phrases in _MEANINGS:
        if any(phrase.lower() in lowered for phrase in phrases):
            return error
    return None


def is_unconfigured(sentence: str) -> bool:
    """Whether a program has found no slurm.conf, and no controller by DNS that it could get it
    from. It says so in four lines."""
    return "DNS SRV lookup failed" in sentence


def refusal(sentence: str, *, doing: str) -> SlurmError:
    """The error to raise: what was being done, Slurm's message, and what to do next."""
    message = " / ".join(line.strip() for line in sentence.splitlines() if line.strip())[:500]
    error = meaning(sentence) or SlurmError
    hint = f"; {_HINTS[error]}" if error in _HINTS else ""
    return error(f"{doing}: {message or 'no reason given'}{hint}")


def says_nothing(error: SlurmError) -> bool:
    """Whether Slurm's message fits several causes, so that one has to ask further."""
    return type(error) is SlurmError and any(words in str(error) for words in _SAYS_NOTHING)


Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Time-outs and retries, with the clock, sleep and random source that tests replace.

    Attributes:
        call_timeout_s: for one call. Slurm's programs give up on an absent controller after 9 to
            18 s (twice MessageTimeout), so less than 20 s hides the reason.
        give_up_after_s: no retry starts later than this after the first call.
        first_delay_s, longest_delay_s: the delay before the first retry, which doubles each time,
            and its maximum. Each delay is drawn from its upper half, so that ranks spread out.
        monotonic, sleep, uniform: the clock (s), the sleep (s) and the random source.
    """

    call_timeout_s: float = 30.0
    give_up_after_s: float = 60.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 10.0
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def retry(
        self,
        call: Callable[[], Result],
        *,
        may_repeat: bool = True,
    ) -> Result:
        """Call until it does not raise ControllerUnreachable.

        Args:
            may_repeat: False for a request that must not be made twice: it is repeated only if
                it cannot have reached the controller.

        Raises:
            ControllerUnreachable: the last one, with the number of attempts and the time spent.
        """
        begin = self.monotonic()
        delay_s = self.first_delay_s
        attempts = 0
        while True:
            attempts += 1
            try:
                return call()
            except ControllerUnreachable as error:
                pause_s = self.uniform(delay_s / 2, delay_s)
                spent_s = self.monotonic() - begin
                arrived = not _NEVER_ARRIVED.search(str(error))
                if (arrived and not may_repeat) or spent_s + pause_s > self.give_up_after_s:
                    raise ControllerUnreachable(
                        f"{error} (attempts: {attempts}, in {spent_s:.1f} s)"
                    ) from error
            self.sleep(pause_s)
            delay_s = min(2 * delay_s, self.longest_delay_s)
