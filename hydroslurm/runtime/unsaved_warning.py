"""Warn a script that would lose work: it trains where preemption stops jobs, and saves nothing when
that happens.

The first rank of a job checks, once per job, when an optimizer has changed parameters several
times: a script with a ``Run`` makes it before, however long it imports. The check asks slurmctld in
a daemon thread that issues no operator and holds nothing, so nothing waits for the answer.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hydroslurm.core.threads import say, thread
from hydroslurm.errors import HydroslurmError, UsageError

if TYPE_CHECKING:
    from hydroslurm.core.jobid import JobId
    from hydroslurm.core.rundir import RunDir
    from hydroslurm.runtime.controller import Controller
    from hydroslurm.slurm.policy import SitePolicy

CHECK_S = 2.0
"""How often to check for updates."""
UPDATES = 3
"""Checks that have to find parameters changed: initializing and loading changes them, too."""
QUIET = 30
"""Consecutive checks in which an optimizer changed nothing and no module was imported: such a
script is not on its way to making a Run."""
SPREAD_S = 5.0
"""The jobs of an array must not all ask in one second."""
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
        training = Training()
        while training.updates < UPDATES and training.quiet < QUIET:
            if is_over(CHECK_S):
                return
            training.look()
        if is_over(random.uniform(0.0, SPREAD_S)):
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
    from hydroslurm.slurm.programs import RetryPolicy

    retry_policy = RetryPolicy(call_timeout_s=ANSWER_S, give_up_after_s=0.0)
    client = open_client(environ=environ, retry_policy=retry_policy)
    job = client.job(job_id)
    policies = Policies.read(client)
    policy = None if policies is None else policies.of(job)
    return None if policy is None else what_is_lost(policy, job.id)


def _is_first(run: RunDir, job_id: int) -> bool:
    """Whether no other job step and no earlier attempt of this job has checked."""
    mark = run.told(job_id)
    with contextlib.suppress(FileExistsError):
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600, exist_ok=False)
        return True
    return False


class Training:
    """Whether a script trains: its optimizers, and how often a look found their parameters changed.

    Attributes:
        updates: of the looks at which a tensor's version was another than at the look before.
        quiet: of the last looks, in a row, those at which nothing was another, nor any module new.
    """

    def __init__(self) -> None:
        self.updates = self.quiet = 0
        self._modules = 0
        self._optimizers: list[weakref.ref[Any]] = []
        self._versions: list[int] = []

    def look(self) -> None:
        """Look once; only the first that finds an optimizer goes over all objects."""
        if not any(known() for known in self._optimizers):
            self._optimizers = [weakref.ref(one) for one in _optimizers()]
        alive = [one for known in self._optimizers if (one := known()) is not None]
        groups = [group for one in alive for group in list(one.param_groups)]
        versions = [tensor._version for group in groups for tensor in list(group["params"])]
        is_same = bool(versions) and versions == self._versions
        if self._versions and not is_same:
            self.updates += 1
        self.quiet = self.quiet + 1 if is_same and len(sys.modules) == self._modules else 0
        self._versions, self._modules = versions, len(sys.modules)


def _optimizers() -> list[Any]:
    """The instances of torch's class. None is looked for before torch has marked a class at its
    first instance."""
    module = sys.modules.get("torch.optim.optimizer")
    if module is None:
        return []
    classes = [module.Optimizer]
    for one in classes:
        classes += one.__subclasses__()
    if not any(getattr(one.step, "hooked", False) for one in classes):
        return []
    # instances refer to their class. gc.get_objects() would hold every object for a moment, also a
    # tuple that another thread is making, which then ends with a SystemError
    found = gc.get_referrers(*classes)
    return [one for one in found if issubclass(type(one), module.Optimizer)]


def handles_sigterm() -> bool:
    """Whether the script has a handler of its own, which may save. submitit's does not: it ignores
    SIGTERM; nor does ours (:func:`autoload.leave`)."""
    shown = signal.getsignal(signal.SIGTERM)
    handler = getattr(shown, "before", shown)
    module = str(getattr(handler, "__module__", ""))
    return callable(handler) and module.partition(".")[0] not in ("submitit", "hydroslurm")


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
