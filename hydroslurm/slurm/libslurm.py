"""What libslurm is asked, through pyslurm of release 25.11 and later, and whether it can be.

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
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hydroslurm.errors import NoSuchJob, NotPermitted, WrongJobState
from hydroslurm.slurm import text
from hydroslurm.slurm.config import Config, find_slurm_conf
from hydroslurm.slurm.programs import refusal
from hydroslurm.slurm.text import job_of_fields, minutes_s, number
from hydroslurm.slurm.values import Job, Partition

Result = TypeVar("Result")

_PROBE_TIMEOUT_S = 10.0

_failure = ""
"""Why libslurm is not asked any more in this process, whatever the client; empty while it is."""

_bound_conf: str | None = None
"""The slurm.conf that libslurm of this process has read: it reads one when pyslurm is imported, and
asks that cluster from then on, whatever SLURM_CONF becomes (seen on 25.11.7)."""


def obstacle(environ: Mapping[str, str], *, timeout_s: float, say: bool) -> str:
    """Why pyslurm cannot be used, empty when it can; then this process asks that cluster only. Does
    not import it.

    Args:
        timeout_s: for the request that a child process makes first.
        say: a request that fails is worth a line of the log: pyslurm was not asked for.
    """
    global _bound_conf
    found = _obstacle_here(environ)
    if not found and _bound_conf is None:
        found = _probe(min(_PROBE_TIMEOUT_S, timeout_s))
        if found and say:
            _give_up(found)
    if not found:
        _bound_conf = _conf_name(environ)
    return found


def _obstacle_here(environ: Mapping[str, str]) -> str:
    if environ.get("SLURM_CONF") != os.environ.get("SLURM_CONF"):
        return "pyslurm cannot be given another SLURM_CONF than this process has"
    wanted = _conf_name(environ)
    if wanted is None:
        return "there is no slurm.conf, without which importing pyslurm ends the process"
    if _bound_conf is not None and wanted != _bound_conf:
        return (
            f"pyslurm in this process goes on asking the cluster of {_bound_conf}, which it read "
            f"first; a process of its own can use it for {wanted}"
        )
    if _bound_conf is None and "pyslurm" in sys.modules:
        return (
            "something else has imported pyslurm in this process, and which slurm.conf it read is "
            "not known; call open_client() before that"
        )
    return _failure


def _conf_name(environ: Mapping[str, str]) -> str | None:
    """The canonical path of the slurm.conf."""
    conf = find_slurm_conf(environ)
    return None if conf is None else os.path.realpath(conf)


def _probe(timeout_s: float) -> str:
    """Why a request of pyslurm's fails; empty if one succeeds. In a child: pyslurm calls exit() for
    a slurm.conf that it cannot read, and fails for another release of libslurm. A controller older
    than libslurm refuses every request: "Protocol authentication error".
    """
    code = (
        "import sys; sys.path[:1] == [''] and sys.path.pop(0); "  # not a module of the user's
        "import pyslurm; pyslurm.Jobs, pyslurm.Partitions; pyslurm.slurmctld.Config.load()"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pyslurm got no answer within {timeout_s:g} s"
    except OSError as error:
        return f"pyslurm could not be tried ({error})"
    if done.returncode == 0:
        return ""
    message = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
    return f"pyslurm does not work here ({message[-1][:200]})"


def _give_up(why: str) -> None:
    """Leave everything to Slurm's programs from now on, and say so in one line."""
    global _failure
    if not _failure:
        _failure = why
        logging.getLogger("hydroslurm").warning(
            f"hydroslurm: {why}; Slurm's programs are used instead "
            "(HYDROSLURM_SLURM_BACKEND=commands does not try pyslurm)"
        )


class Libslurm:
    """The four questions that are put to libslurm where pyslurm can. Each answer is None where it
    cannot: the programs are asked then.

    Left to the programs: ``history`` (pyslurm.db gives the last start of a job only, sacct -D all),
    ``qoses`` (it would hold a connection to slurmdbd open for one question), what pyslurm has no
    call for, and whatever changes a job: to libslurm a job is a number, and that of an array is
    also the number of one of its elements.
    """

    def __init__(self, module: Any = None) -> None:
        """Import pyslurm; ``module`` stands in for it."""
        if module is None:
            import pyslurm

            module = pyslurm
        self._pyslurm = module

    @property
    def failure(self) -> str:
        """Why libslurm is not asked any more; empty while it is."""
        return _failure

    def job(self, job_id: int) -> Job | None:
        def load() -> Job | None:
            job = job_of_pyslurm(self._pyslurm.Job.load(job_id))
            return job if job.job_id == job_id else None  # of an array it gave another

        return self._call(f"load job {job_id}", load)

    def partitions(self) -> tuple[Partition, ...] | None:
        return self._call(
            "load partitions",
            lambda: tuple(map(partition_of_pyslurm, self._pyslurm.Partitions.load().values())),
        )

    def config(self) -> Config | None:
        return self._call(
            "load configuration",
            lambda: config_of_pyslurm(self._pyslurm.slurmctld.Config.load()),
        )

    def jobs(self) -> tuple[Job, ...] | None:
        return self._call(
            "load jobs", lambda: tuple(map(job_of_pyslurm, self._pyslurm.Jobs.load().values()))
        )

    def _call(self, doing: str, call: Callable[[], Result]) -> Result | None:
        """None: libslurm cannot ask this controller, or pyslurm has other names than we know."""
        if _failure:
            return None
        doing = f"pyslurm: {doing}"
        try:
            return call()
        except self._pyslurm.RPCError as error:
            answer = refusal(str(error), doing=doing)
            if isinstance(answer, NoSuchJob | NotPermitted | WrongJobState):
                raise answer from error
            _give_up(f"{doing}: {error}")
        except (AttributeError, TypeError, ValueError) as error:
            _give_up(f"{doing}: {error} (written for pyslurm 25.11)")
        return None


def job_of_pyslurm(job: Any) -> Job:
    """``pyslurm.Job`` -> Job."""
    state, flags = text.parse_state(job.state)
    array_id = number(job.array_id)
    # 0 is a task's number, and is also what pyslurm makes None of: "not in an array" is told by
    # array_id, and "not started" by the tasks that wait
    first = None if job.array_tasks_waiting else 0
    task = (number(job.array_task_id) or first) if array_id else None
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
