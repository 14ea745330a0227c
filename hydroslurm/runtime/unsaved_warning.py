"""One line of warning for a script that would lose work: it trains where jobs are preempted, and
nothing in it saves when the job is stopped.

The first rank of a job checks, once per job, with one question to slurmctld, and two more where
nobody on the node has asked them lately. It waits until
there is an optimizer, and a while longer: a script with a ``Run`` makes that next, and one that has
neither will train. So the training loop may have begun by then, but not for long. Nothing waits for
slurmctld's answer: the thread is a daemon, issues no operator and holds nothing.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hydroslurm.errors import HydroslurmError, UsageError

if TYPE_CHECKING:
    from hydroslurm.core.rundir import RunDir
    from hydroslurm.runtime.controller import Controller
    from hydroslurm.slurm.policy import SitePolicy

CHECK_S = 2.0
"""How often to check for an optimizer."""
FIRST_S, SPREAD_S = 10.0, 5.0
"""How long to wait for a Run after that; the jobs of an array must not all ask in one second."""
ANSWER_S = 10.0

_had_saver = False
"""Something in this process has saved, and is gone."""


class UnsavedWarning:
    """Of one installation; ends with it, or once the warning was printed."""

    def __init__(
        self, controller: Controller, run: RunDir, job_id: int, environ: Mapping[str, str]
    ) -> None:
        self._controller = controller
        self._run = run
        self._job_id = job_id
        self._environ = dict(environ)
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="hydroslurm-unsaved-warning", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """At once; an answer that is still to come is dropped."""
        global _had_saver
        _had_saver = _had_saver or self._controller.had_saver
        self._ended.set()

    def _watch(self) -> None:
        while not has_optimizer():
            if self._ended.wait(CHECK_S) or self._is_settled():
                return
        if self._ended.wait(FIRST_S + random.uniform(0.0, SPREAD_S)) or self._is_settled():
            return
        # Slurm's programs are missing in a container, slurmctld is busy: not worth a message
        with contextlib.suppress(HydroslurmError, UsageError, OSError):
            policy = self._policy() if self._is_first() else None
            message = None if policy is None else what_is_lost(policy, self._job_id)
            if message is not None and not self._ended.is_set() and not self._is_settled():
                sys.stderr.write(f"hydroslurm: {message}\n")
                sys.stderr.flush()

    def _policy(self) -> SitePolicy | None:
        from hydroslurm.slurm.client import open_client  # every start would pay for it
        from hydroslurm.slurm.policies import Policies
        from hydroslurm.slurm.refusals import RetryPolicy

        retry_policy = RetryPolicy(call_timeout_s=ANSWER_S, give_up_after_s=0.0)
        client = open_client(environ=self._environ, retry_policy=retry_policy)
        return Policies.read(client).of(client.job(self._job_id))

    def _is_settled(self) -> bool:
        return _had_saver or self._controller.had_saver or handles_sigterm()

    def _is_first(self) -> bool:
        """Whether no other job step and no earlier attempt of this job has checked."""
        mark = self._run.told(self._job_id)
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


def what_is_lost(policy: SitePolicy, job_id: int) -> str | None:
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
