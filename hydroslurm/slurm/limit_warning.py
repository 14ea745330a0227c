"""The warning before its time limit that a job has asked Slurm for, with ``--signal``."""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.signals import signal_number
from hydroslurm.errors import SlurmError, UsageError
from hydroslurm.slurm.client import SlurmClient, open_client
from hydroslurm.slurm.policy import StopReason
from hydroslurm.slurm.programs import RetryPolicy
from hydroslurm.slurm.stops import USUAL_WARNING_S, Stop, why_stopped
from hydroslurm.slurm.values import Job, JobState

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
