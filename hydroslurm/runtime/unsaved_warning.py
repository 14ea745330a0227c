"""One line of warning for a script that would lose work: it trains where jobs are preempted, and
nothing in it saves when the job is stopped.

The first rank of a job checks, once per job, after the script has an optimizer and had some time
for the ``Run`` that a script with one makes next. The check asks slurmctld in a daemon thread that
issues no operator and holds nothing, so nothing waits for the answer.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hydroslurm.core.threads import say, thread
from hydroslurm.errors import HydroslurmError, UsageError

if TYPE_CHECKING:
    from hydroslurm.core.jobid import JobId
    from hydroslurm.core.rundir import RunDir
    from hydroslurm.runtime.controller import Controller
    from hydroslurm.slurm.policy import SitePolicy

CHECK_S = 2.0
"""How often to check for an optimizer."""
FIRST_S, SPREAD_S = 10.0, 5.0
"""How long to wait for a Run after that; the jobs of an array must not all ask in one second."""
ANSWER_S = 10.0


def watch(
    controller: Controller, run: RunDir, job_id: int, environ: Mapping[str, str]
) -> Callable[[], None]:
    """Start the check; returns what ends it at once."""
    ended = threading.Event()
    environ = dict(environ)

    def is_over(after_s: float) -> bool:
        return ended.wait(after_s) or controller.had_saver or handles_sigterm()

    def check() -> None:
        while not has_optimizer():
            if is_over(CHECK_S):
                return
        if is_over(FIRST_S + random.uniform(0.0, SPREAD_S)):
            return
        # Slurm's programs are missing in a container, slurmctld is busy: not worth a message
        with contextlib.suppress(HydroslurmError, UsageError, OSError):
            message = _what_is_lost(job_id, environ) if _is_first(run, job_id) else None
            if message is not None and not is_over(0.0):
                say(message)

    thread(check, name="hydroslurm-unsaved-warning").start()
    return ended.set


def _what_is_lost(job_id: int, environ: Mapping[str, str]) -> str | None:
    from hydroslurm.slurm.client import open_client  # every start would pay for it
    from hydroslurm.slurm.policy import Policies
    from hydroslurm.slurm.refusals import RetryPolicy

    retry_policy = RetryPolicy(call_timeout_s=ANSWER_S, give_up_after_s=0.0)
    client = open_client(environ=environ, retry_policy=retry_policy)
    job = client.job(job_id)
    policy = Policies.read(client).of(job)
    return None if policy is None else what_is_lost(policy, job.id)


def _is_first(run: RunDir, job_id: int) -> bool:
    """Whether no other job step and no earlier attempt of this job has checked."""
    mark = run.told(job_id)
    with contextlib.suppress(FileExistsError):
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600, exist_ok=False)
        return True
    return False


def has_optimizer() -> bool:
    """Whether an optimizer was made in this process: torch marks a class at its first."""
    module = sys.modules.get("torch.optim.optimizer")
    classes = [] if module is None else [module.Optimizer]
    while classes:
        one = classes.pop()
        if getattr(one.step, "hooked", False):
            return True
        classes += one.__subclasses__()
    return False


def handles_sigterm() -> bool:
    """Whether the script has a handler of its own, which may save. submitit's does not: it ignores
    SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    module = str(getattr(handler, "__module__", ""))
    return callable(handler) and module.partition(".")[0] != "submitit"


def what_is_lost(policy: SitePolicy, job_id: JobId) -> str | None:
    """A sentence on what a preemption costs a job in which nothing saves; None if preemption does
    not stop it."""
    how = {"requeue": "stops this job and requeues it", "cancel": "ends this job for good"}
    if policy.action.value not in how:
        return None
    return (
        f"a preemption {how[policy.action.value]} ({policy.action_why}), and nobody in it saves: "
        "no hydroslurm.Run and no receive_suspend_command() so far. What the script has not saved "
        "by itself is lost then. Train in a hydroslurm.Run, or use receive_suspend_command() and "
        f"go_suspend(); hydroslurm doctor {job_id} says more"
    )
