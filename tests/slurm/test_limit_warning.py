"""What a job has asked Slurm to send before its time limit, and whether a signal is that."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hydroslurm.errors import NoSuchJob
from hydroslurm.slurm.policy import StopReason
from hydroslurm.slurm.stops import LimitWarning, requested_warnings, why_warned
from hydroslurm.slurm.values import Job, JobState

SCRIPT = "#!/bin/bash\n#SBATCH --signal=USR1@90 --requeue\nsrun python a.py --signal=HUP@1\n"


def _slurm(
    *,
    script: str | None = SCRIPT,
    command: str | None = "sbatch job.sh",
    to_end_s: float = 100.0,
    state: JobState = JobState.RUNNING,
    preempted: bool = False,
) -> Any:
    """Stands in for a client whose Slurm knows one job."""
    now = int(time.time())
    preempt_epoch_s = now if preempted else None
    job = Job(
        job_id=1, state=state, end_epoch_s=int(now + to_end_s), preempt_epoch_s=preempt_epoch_s
    )

    def submit_line(_: Job) -> str:
        if command is None:
            raise NoSuchJob("job 1 is not recorded")
        return command

    return SimpleNamespace(
        job=lambda _: job, batch_script=lambda _: script, submit_line=submit_line
    )


UNKNOWN = LimitWarning("", 120)


@pytest.mark.parametrize(
    ("command", "variable", "script", "wanted"),
    [
        ("sbatch job.sh", "", SCRIPT, (LimitWarning("USR1", 90),)),
        ("sbatch --signal=B:SIGUSR2@60 job.sh", "", SCRIPT, (LimitWarning("SIGUSR2", 60, True),)),
        ("sbatch --signal URG@9 job.sh", "TERM@3", SCRIPT, (LimitWarning("URG", 9),)),
        ("sbatch job.sh", "TERM", SCRIPT, (LimitWarning("TERM", 60),)),
        ("sbatch --wrap srun it's", "", "#!/bin/sh\nsrun\n", ()),
        (None, "", SCRIPT, (LimitWarning("USR1", 90), UNKNOWN)),
        (None, "", None, (UNKNOWN,)),
        ("sbatch job.sh", "", None, (UNKNOWN,)),
        ("", "", "#!/bin/sh\nsrun\n", (UNKNOWN,)),
    ],
)
def test_it_is_read_as_sbatch_reads_it(
    command: str | None, variable: str, script: str | None, wanted: tuple[LimitWarning, ...]
) -> None:
    """The command line, else the variable, else the script; unknown is not the same as none."""
    client = _slurm(command=command, script=script)
    assert requested_warnings(client, client.job(1), {"SBATCH_SIGNAL": variable}) == wanted


NO_ACCOUNTING: dict[str, Any] = {"command": None, "script": "#!/bin/sh\n"}


@pytest.mark.parametrize(
    ("signo", "known", "by_slurm", "reason"),
    [
        (signal.SIGUSR1, {}, True, StopReason.TIME_LIMIT),
        (signal.SIGUSR1, {}, False, StopReason.TIME_LIMIT),  # a trap's, for B:
        (signal.SIGUSR2, {}, True, None),
        (signal.SIGUSR1, {"to_end_s": 145.0}, True, StopReason.TIME_LIMIT),  # a minute early
        (signal.SIGUSR1, {"to_end_s": 170.0}, True, None),
        (signal.SIGUSR1, {"state": JobState.SUSPENDED}, True, None),
        (signal.SIGUSR1, {"to_end_s": 5e3, "preempted": True}, True, StopReason.PREEMPTED),
        (signal.SIGUSR1, {"script": "#!/bin/sh\n"}, True, None),
        (signal.SIGUSR2, NO_ACCOUNTING, True, StopReason.TIME_LIMIT),
        (signal.SIGUSR2, NO_ACCOUNTING, False, None),
        (signal.SIGUSR2, {**NO_ACCOUNTING, "to_end_s": 200.0}, True, None),
    ],
)
def test_the_signal_of_a_pause_is_the_warning_near_the_limit_only(
    signo: int,
    known: dict[str, Any],
    by_slurm: bool,
    reason: StopReason | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the job has asked for, and when it comes, tell it from a person's."""
    monkeypatch.setattr("hydroslurm.slurm.client.open_client", lambda **_: _slurm(**known))
    sender_pid = 0 if by_slurm else os.getpid()
    stop = why_warned(1, signo, sender_pid=sender_pid, environ={})
    assert (stop and stop.reason) is reason
