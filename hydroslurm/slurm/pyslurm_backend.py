"""The client over pyslurm, for release 25.11 and later.

Only ``open_client`` imports this module, and only this module imports pyslurm, when a client is
made: without a slurm.conf, or with one that it cannot read, ``import pyslurm`` ends the process.

What was read in the source of pyslurm 25.11.2 and is met here:

- Its calls hold the GIL until libslurm has an answer or gives up (MessageTimeout, once or twice),
  so
  ``Patience.call_timeout_s`` does not bound them; the retries are ours.
- ``cancel`` and ``send_signal`` pass over "already done", and cancel over an unknown id too; the
  job is looked
  up first, so that both backends raise alike.
- ``Job.time_limit`` is in minutes and None for unlimited; ``Partition.max_time`` likewise.
- ``Job.exit_code`` has lost 128 when it was 128 or more.
- ``Config.preempt_parameters`` and ``auth_info`` are taken apart already, into a dict and a list.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from hydroslurm.errors import (
    ControllerUnreachable,
    SlurmError,
    UnreadableOutput,
    UsageError,
    WrongJobState,
)
from hydroslurm.slurm import refusals, text
from hydroslurm.slurm.commands import (
    CommandClient,
    check_signallable,
    checked_job_id,
    signal_number,
)
from hydroslurm.slurm.patience import Patience
from hydroslurm.slurm.values import Config, Job, Partition

Result = TypeVar("Result")

CONFIG_NAMES: Mapping[str, str] = {
    "AuthInfo": "auth_info",
    "ClusterName": "cluster_name",
    "JobRequeue": "job_requeue",
    "KillWait": "kill_wait_time",
    "MessageTimeout": "message_timeout",
    "PreemptMode": "preempt_mode",
    "PreemptParameters": "preempt_parameters",
    "PreemptType": "preempt_type",
    "ProctrackType": "proctrack_type",
    "RequeueExit": "requeue_exit",
    "SLURM_VERSION": "version",
}
"""Slurm's name -> pyslurm's, for what ``config()`` tells with this backend."""


class PyslurmClient:
    """As :class:`hydroslurm.slurm.client.SlurmClient` says."""

    backend = "pyslurm"

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        patience: Patience | None = None,
        why: str = "pyslurm: asked for by the caller",
        module: Any = None,
    ) -> None:
        """Import pyslurm.

        Args:
            environ: for ``history``, which asks sacct.
            module: stands in for pyslurm; None imports it.
        """
        if module is None:
            import pyslurm

            module = pyslurm
        self.why = why
        self._pyslurm = module
        self._patience = patience or Patience()
        self._commands = CommandClient(environ, patience=self._patience)

    def job(self, job_id: int) -> Job:
        checked_job_id(job_id)
        return self._ask(
            f"load job {job_id}", lambda: job_of_pyslurm(self._pyslurm.Job.load(job_id))
        )

    def jobs(
        self, *, user: str | None = None, ids: Collection[int] | None = None
    ) -> tuple[Job, ...]:
        if ids is not None and not ids:
            return ()
        wanted = None if ids is None else frozenset(checked_job_id(i) for i in ids)
        known = self._ask(
            "load jobs",
            lambda: [job_of_pyslurm(each) for each in self._pyslurm.Jobs.load().values()],
        )
        return tuple(
            job
            for job in known
            if (user is None or job.user == user)
            and (wanted is None or job.job_id in wanted or job.array_job_id in wanted)
        )

    def history(self, job_id: int) -> tuple[Job, ...]:
        # pyslurm.db tells the last life of a job only; sacct -D tells all
        return self._commands.history(job_id)

    def partitions(self) -> tuple[Partition, ...]:
        return self._ask(
            "load partitions",
            lambda: tuple(
                partition_of_pyslurm(p) for p in self._pyslurm.Partitions.load().values()
            ),
        )

    def config(self) -> Config:
        return self._ask(
            "load configuration",
            lambda: config_of_pyslurm(self._pyslurm.slurmctld.Config.load()),
        )

    def suspend(self, job_id: int) -> None:
        self._act(job_id, "suspend", lambda job: job.suspend())

    def resume(self, job_id: int) -> None:
        self._act(job_id, "resume", lambda job: job.unsuspend())

    def requeue(self, job_id: int) -> None:
        try:
            self._act(job_id, "requeue", lambda job: job.requeue())
        except WrongJobState as error:
            if refusals.ALREADY_PENDING not in str(error):
                raise

    def requeue_hold(self, job_id: int) -> None:
        try:
            self._act(job_id, "requeue and hold", lambda job: job.requeue(hold=True))
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
        if step is not None:
            # pyslurm.JobStep.send_signal exists, but needs the step to be loaded first; scancel
            # takes "12.0"
            self._commands.signal(job_id, number, step=step)
            return
        check_signallable(self.job(job_id), number)
        steps = "batch" if batch else "all" if full else "children"
        self._act(
            job_id,
            f"signal {number}",
            lambda job: job.send_signal(number, steps=steps),
            may_repeat=refusals.never_arrived,
        )

    def cancel(self, job_id: int) -> None:
        if not self.job(job_id).state.has_ended:
            self._act(job_id, "cancel", lambda job: job.cancel())

    def hold(self, job_id: int) -> None:
        self._act(job_id, "hold", lambda job: job.hold())

    def release(self, job_id: int) -> None:
        self._act(job_id, "release", lambda job: job.release())

    def _act(
        self,
        job_id: int,
        verb: str,
        call: Callable[[Any], None],
        *,
        may_repeat: Callable[[ControllerUnreachable], bool] = lambda _: True,
    ) -> None:
        checked_job_id(job_id)
        doing = f"{verb} job {job_id}"
        try:
            self._ask(doing, lambda: call(self._pyslurm.Job(job_id)), may_repeat=may_repeat)
        except SlurmError as error:
            if refusals.says_nothing(error):
                self.job(job_id)  # raises NoSuchJob when that was the cause: suspend says only "-1"
            raise

    def _ask(
        self,
        doing: str,
        call: Callable[[], Result],
        *,
        may_repeat: Callable[[ControllerUnreachable], bool] = lambda _: True,
    ) -> Result:
        def once() -> Result:
            try:
                return call()
            except self._pyslurm.RPCError as error:
                raise refusals.refusal(str(error), doing=f"pyslurm: {doing}") from error
            except (AttributeError, TypeError) as error:
                raise UnreadableOutput(
                    f"pyslurm: {doing}: {error}. This backend knows pyslurm 25.11; "
                    "HYDROSLURM_SLURM_BACKEND=commands does without it"
                ) from error

        return self._patience.retry(once, may_repeat=may_repeat)


def job_of_pyslurm(job: Any) -> Job:
    """``pyslurm.Job`` -> Job."""
    state, flags = text.parse_state(job.state)
    array_id = _number(job.array_id)
    return Job(
        job_id=job.id,
        state=state,
        flags=flags,
        name=job.name or "",
        user=job.user_name or "",
        partition=job.partition or "",
        reason=(job.state_reason or "").replace(" ", "_"),
        nodes=text.expand_nodes(job.allocated_nodes or ""),
        n_nodes=_number(job.num_nodes),
        n_tasks=_number(job.ntasks),
        n_cpus=_number(job.cpus),
        submit_epoch_s=_number(job.submit_time),
        eligible_epoch_s=_number(job.eligible_time),
        start_epoch_s=_number(job.start_time),
        end_epoch_s=_number(job.end_time),
        time_limit_s=_minutes_s(job.time_limit),
        restart_count=job.requeue_count or 0,
        preempt_epoch_s=_number(job.preempt_time),
        suspend_epoch_s=_number(job.suspend_time),
        pre_suspend_s=job.pre_suspension_time or 0,
        work_dir=job.working_directory or "",
        std_out=job.standard_output or "",
        std_err=job.standard_error or "",
        comment=job.comment or "",
        exit_code=job.exit_code,
        exit_signal=job.exit_code_signal,
        array_job_id=array_id,
        # 0 is a task's number, and is also what pyslurm makes None of: "not in an array" is told by
        # array_id
        array_task_id=(_number(job.array_task_id) or _first_task(job)) if array_id else None,
        is_batch=job.is_batch_job,
        may_requeue=job.is_requeueable,
        memory_per_node_bytes=_megabytes(job.memory_per_node),
        memory_per_cpu_bytes=_megabytes(job.memory_per_cpu),
    )


def partition_of_pyslurm(partition: Any) -> Partition:
    """``pyslurm.Partition`` -> Partition."""
    return Partition(
        name=partition.name,
        state=partition.state,
        priority_tier=_number(partition.priority_tier) or 0,
        preempt_mode=partition.preempt_mode or "OFF",
        grace_time_s=_number(partition.preemption_grace_time) or 0,
        nodes=text.expand_nodes(partition.nodes or ""),
        max_time_s=_minutes_s(partition.max_time),
        is_default=bool(partition.is_default),
    )


def config_of_pyslurm(config: Any) -> Config:
    """``pyslurm.slurmctld.Config`` -> Config, in the words of ``scontrol show config``."""
    return Config({name: _as_text(getattr(config, field)) for name, field in CONFIG_NAMES.items()})


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, Mapping):
        return ",".join(key if v is True else f"{key}={v}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return ",".join(str(each) for each in value)
    return str(value)


def _number(value: Any) -> int | None:
    """None for nothing and for pyslurm's "UNLIMITED"."""
    return value if isinstance(value, int) else None


def _minutes_s(value: Any) -> int | None:
    minutes = _number(value)
    return None if minutes is None else minutes * 60


def _megabytes(value: Any) -> int | None:
    number = _number(value)
    return number * 2**20 if number else None


def _first_task(job: Any) -> int | None:
    """Task 0, which pyslurm does not tell from "no number"; None for tasks not started."""
    return None if job.array_tasks_waiting else 0
