"""slurm.conf: where this node has it, and as a frozen value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from hydroslurm.slurm import text

_PLACES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/usr/local/etc/slurm.conf",
    "/usr/local/etc/slurm/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    # where slurmd keeps the configuration that it fetched ("configless")
    "/run/slurm/conf/slurm.conf",
    "/var/spool/slurmd/conf-cache/slurm.conf",
    "/var/spool/slurm/d/conf-cache/slurm.conf",
)


def find_slurm_conf(environ: Mapping[str, str]) -> Path | None:
    """``SLURM_CONF``, or else the usual places; None where there is no such file."""
    named = environ.get("SLURM_CONF")
    places = (named,) if named else _PLACES
    return next((Path(place) for place in places if Path(place).is_file()), None)


def why_unconfigured(environ: Mapping[str, str]) -> str:
    """What to say where Slurm's programs find neither a slurm.conf nor a controller that has it."""
    if (conf := find_slurm_conf(environ)) is not None:
        return f"Slurm's programs do not find {conf}, which is there: export SLURM_CONF={conf}"
    return (
        "Slurm is not configured on this machine: there is no slurm.conf, and DNS names no "
        "controller. Run on a login node, or set SLURM_CONF to this cluster's slurm.conf"
    )


@dataclass(frozen=True, eq=False)
class Config(Mapping[str, str]):
    """slurm.conf as the controller has it: Slurm's names -> text, empty for Slurm's (null).

    The pyslurm backend provides only the names in ``libslurm.CONFIG_NAMES``.
    """

    entries: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", MappingProxyType(dict(self.entries)))

    def __getitem__(self, name: str) -> str:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def version(self) -> tuple[int, ...]:
        """The controller's release, (22, 5, 8); (0,) if unknown."""
        return tuple(
            int(part) for part in re.findall(r"\d+", self.get("SLURM_VERSION", "")[:12])
        ) or (0,)

    @property
    def cluster_name(self) -> str:
        return self.get("ClusterName", "")

    @property
    def preempt_mode(self) -> str:
        """Cluster-wide, as Slurm prints it: ``GANG,SUSPEND``, ``REQUEUE``, ``OFF`` ..."""
        return self.get("PreemptMode", "OFF")

    @property
    def suspend_grace_time_s(self) -> int:
        """Seconds between SIGTSTP and SIGSTOP of a suspend.

        Slurm 23.11 and later read suspend_grace_time in PreemptParameters; earlier ones always wait
        2 s (hard-coded in slurmstepd), which is the default too.
        """
        found = re.search(r"suspend_grace_time=(\d+)", self.get("PreemptParameters", ""), re.I)
        return int(found[1]) if found else 2

    @property
    def kill_wait_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL when a job is ended, as slurmd applies it: at least
        5 (_rpc_terminate_job in req.c)."""
        found = re.match(r"\d+", self.get("KillWait", ""))
        return max(5, int(found[0])) if found else 30

    @property
    def cred_expire_s(self) -> int:
        """Lifetime of a credential; a requeued job waits one second longer before it starts."""
        found = re.search(r"cred_expire=(\d+)", self.get("AuthInfo", ""))
        return int(found[1]) if found else 120

    @property
    def proctrack_type(self) -> str:
        """With ``proctrack/cgroup`` signals reach only srun's tasks, else every process."""
        return self.get("ProctrackType", "")

    @property
    def signals_children(self) -> bool:
        """Whether a signal to a job step reaches all its processes, not only srun's tasks.

        Newer releases report SignalChildrenProcesses of cgroup.conf.
        """
        if self.get("SignalChildrenProcesses", "").lower() == "yes":
            return True
        return self.proctrack_type != "proctrack/cgroup"

    @property
    def preempt_type(self) -> str:
        """``preempt/partition_prio``, ``preempt/qos``; empty or ``preempt/none`` for neither."""
        return self.get("PreemptType", "")

    @property
    def gang(self) -> bool:
        """Whether gang scheduling preempts; it ignores GraceTime."""
        return "GANG" in self.preempt_mode.upper().split(",")

    @property
    def send_user_signal(self) -> bool:
        """Whether a preempted job gets its ``--signal`` instead of the first SIGTERM.

        An option of PreemptParameters since 23.02, of SlurmctldParameters in 22.05.
        """
        newer = self.get("PreemptParameters", "").lower().split(",")
        older = self.get("SlurmctldParameters", "").lower().split(",")
        return "send_user_signal" in newer or "preempt_send_user_signal" in older

    @property
    def exempt_s(self) -> int:
        """How long each start of a job is safe from preemption (PreemptExemptTime).

        pyslurm tells seconds, scontrol D-HH:MM:SS.
        """
        time = self.get("PreemptExemptTime", "")
        return int(time) if time.isdecimal() else text.parse_duration_s(time) or 0

    @property
    def most_requeues(self) -> int:
        """How often Slurm retries to start a job before it holds it (MaxBatchRequeue)."""
        return int(self.get("MaxBatchRequeue", "") or 5)

    @property
    def allows_expedited(self) -> bool:
        """Whether ``--requeue=expedite`` is accepted; 25.11 and newer know it."""
        options = self.get("SlurmctldParameters", "").lower().split(",")
        return "enable_expedited_requeue" in options

    @property
    def job_requeue(self) -> bool:
        """Whether a batch job with neither --requeue nor --no-requeue may be requeued."""
        return self.get("JobRequeue", "1") != "0"

    @property
    def requeue_wait_s(self) -> int:
        """How long a requeued job waits at least before it starts again.

        The lifetime of a credential plus one second; since 25.11 requeue_delay in
        SchedulerParameters, if given (batch_requeue_fini in job_mgr.c).
        """
        found = re.search(r"requeue_delay=(\d+)", self.get("SchedulerParameters", ""))
        waits_s = int(found[1]) if found and self.version >= (25, 11) else self.cred_expire_s
        return waits_s + 1

    @property
    def has_accounting(self) -> bool:
        """Whether there is a slurmdbd, which sacct and QOS need."""
        return self.get("AccountingStorageType", "").endswith("/slurmdbd")

    @property
    def appends_output(self) -> bool:
        """Whether a requeued job's output is appended without --open-mode."""
        return self.get("JobFileAppend", "0") != "0"
