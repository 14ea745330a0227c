"""The client over pyslurm, for release 25.11 and later.

Only this module imports pyslurm, when a client is made: without a slurm.conf, or with one that it
cannot read, ``import pyslurm`` ends the process.

What was read in the source of pyslurm 25.11.2 and is met here:

- Its calls hold the GIL until libslurm has an answer or gives up (MessageTimeout, once or twice),
  so ``RetryPolicy.call_timeout_s`` does not bound them. So none is repeated: what libslurm cannot
  ask is left to the programs.
- ``Job.time_limit`` is in minutes and None for unlimited; ``Partition.max_time`` likewise.
- ``Job.exit_code`` has lost 128 when it was 128 or more, as ``values.Job`` says for all backends.
- libslurm reads slurm.conf when pyslurm is imported and keeps it, whatever SLURM_CONF becomes:
  ``open_client`` lets no client for another one be made.
- ``Config.preempt_parameters`` and ``auth_info`` are taken apart already, into a dict and a list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hydroslurm.errors import NoSuchJob, NotPermitted, WrongJobState
from hydroslurm.slurm import text
from hydroslurm.slurm.commands import SlurmClient
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.programs import RetryPolicy, checked_job_id, refusal
from hydroslurm.slurm.text import job_of_fields, minutes_s, number
from hydroslurm.slurm.values import Job, Partition

Result = TypeVar("Result")

CONFIG_NAMES: Mapping[str, str] = {
    "AccountingStorageType": "accounting_storage_type",
    "AuthInfo": "auth_info",
    "ClusterName": "cluster_name",
    "JobFileAppend": "job_file_append",
    "JobRequeue": "job_requeue",
    "KillWait": "kill_wait_time",
    "MaxBatchRequeue": "max_batch_requeue",
    "MessageTimeout": "message_timeout",
    "OverTimeLimit": "over_time_limit",
    "MpiDefault": "mpi_default",
    "PreemptExemptTime": "preempt_exempt_time",
    "PreemptMode": "preempt_mode",
    "PreemptParameters": "preempt_parameters",
    "PreemptType": "preempt_type",
    "ProctrackType": "proctrack_type",
    "RequeueExit": "requeue_exit",
    "SLURM_VERSION": "version",
    "SchedulerParameters": "scheduler_parameters",
    "SlurmctldParameters": "slurmctld_parameters",
}
"""Slurm's name -> pyslurm's, for what ``config()`` tells with this backend."""


failure = ""
"""Why libslurm is not asked any more in this process, whatever the client; empty while it is."""


def give_up(why: str) -> None:
    """Leave everything to Slurm's programs from now on, and say so in one line."""
    global failure
    if not failure:
        failure = why
        logging.getLogger("hydroslurm").warning(
            f"hydroslurm: {why}; Slurm's programs are used instead "
            "(HYDROSLURM_SLURM_BACKEND=commands does not try pyslurm)"
        )


class PyslurmClient(SlurmClient):
    """A :class:`~hydroslurm.slurm.commands.SlurmClient` that asks libslurm where pyslurm can.

    Left to the programs: ``history`` (pyslurm.db gives the last start of a job only, sacct -D all),
    ``qoses`` (it would hold a connection to slurmdbd open for one question), what pyslurm has no
    call for, and whatever changes a job: to libslurm a job is a number, and that of an array is
    also the number of one of its elements.
    """

    backend = "pyslurm"

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        retry_policy: RetryPolicy | None = None,
        why: str = "pyslurm: asked for by the caller",
        module: Any = None,
    ) -> None:
        """Import pyslurm.

        Args:
            environ: of the programs.
            module: stands in for pyslurm; None imports it.
        """
        super().__init__(environ, retry_policy=retry_policy, why=why)
        if module is None:
            import pyslurm

            module = pyslurm
        self._pyslurm = module

    def job(self, job_id: int) -> Job:
        checked_job_id(job_id)
        job = self._call(
            f"load job {job_id}", lambda: job_of_pyslurm(self._pyslurm.Job.load(job_id))
        )
        if job is None or job.job_id != job_id:  # of an array it gave another
            return super().job(job_id)
        return job

    def partitions(self) -> tuple[Partition, ...]:
        found = self._call(
            "load partitions",
            lambda: tuple(
                partition_of_pyslurm(p) for p in self._pyslurm.Partitions.load().values()
            ),
        )
        return super().partitions() if found is None else found

    def config(self) -> Config:
        found = self._call(
            "load configuration",
            lambda: config_of_pyslurm(self._pyslurm.slurmctld.Config.load()),
        )
        return super().config() if found is None else found

    def _all_jobs(self, user: str | None) -> tuple[Job, ...]:
        found = self._call(
            "load jobs",
            lambda: tuple(job_of_pyslurm(each) for each in self._pyslurm.Jobs.load().values()),
        )
        return super()._all_jobs(user) if found is None else found

    def _call(self, doing: str, call: Callable[[], Result]) -> Result | None:
        """None: libslurm cannot ask this controller, or pyslurm has other names than we know."""
        if failure:
            return None
        doing = f"pyslurm: {doing}"
        try:
            return call()
        except self._pyslurm.RPCError as error:
            answer = refusal(str(error), doing=doing)
            if isinstance(answer, NoSuchJob | NotPermitted | WrongJobState):
                raise answer from error
            give_up(f"{doing}: {error}")
        except (AttributeError, TypeError, ValueError) as error:
            give_up(f"{doing}: {error} (written for pyslurm 25.11)")
        self.backend, self.why = "commands", f"commands: {failure}"
        return None


def job_of_pyslurm(job: Any) -> Job:
    """``pyslurm.Job`` -> Job."""
    state, flags = text.parse_state(job.state)
    array_id = number(job.array_id)
    # 0 is a task's number, and is also what pyslurm makes None of: "not in an array" is told by
    # array_id
    task = (number(job.array_task_id) or _first_task(job)) if array_id else None
    het_id = number(getattr(job, "heterogeneous_id", None)) or None
    read = job_of_fields(
        "pyslurm",
        lambda name, _: getattr(job, name, None) if name == "qos" else getattr(job, name),
        state=state,
        flags=flags,
        exit_code=job.exit_code,
        array_job_id=array_id,
        array_task_id=task,
        array_tasks=str(job.array_tasks_waiting or "") if array_id and task is None else "",
        het_job_id=het_id,
        het_component=number(getattr(job, "heterogeneous_offset", None)) if het_id else None,
        gres=text.join_gres(_gres_of_pyslurm(job)),
    )
    return replace(read, std_err=read.std_err or read.std_out)


def partition_of_pyslurm(partition: Any) -> Partition:
    """``pyslurm.Partition`` -> Partition."""
    return Partition(
        name=partition.name,
        state=partition.state,
        priority_tier=number(partition.priority_tier) or 0,
        preempt_mode=partition.preempt_mode or "OFF",
        grace_time_s=number(partition.preemption_grace_time) or 0,
        nodes=text.expand_nodes(partition.nodes or ""),
        max_time_s=minutes_s(partition.max_time),
        is_default=bool(partition.is_default),
    )


def config_of_pyslurm(config: Any) -> Config:
    """``pyslurm.slurmctld.Config`` -> Config, in the words of ``scontrol show config``."""
    entries = {name: _as_text(getattr(config, field)) for name, field in CONFIG_NAMES.items()}
    cgroup = getattr(config, "cgroup_config", None)
    children = getattr(cgroup, "signal_children_processes", None)
    if children is not None:
        entries["SignalChildrenProcesses"] = "yes" if children else "no"
    return Config(entries)


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


def _gres_of_pyslurm(job: Any) -> list[str]:
    """``{"gpu:tesla": 2}`` as Slurm's text. Only ``--gres`` is told; the name is deprecated."""
    per_node = getattr(job, "gres_per_node", None) or {}
    return [f"gres:{name}:{count}" for name, count in per_node.items()]


def _first_task(job: Any) -> int | None:
    """Task 0, which pyslurm does not tell from "no number"; None for tasks not started."""
    return None if job.array_tasks_waiting else 0
