"""slurm.conf as a frozen value, and which of its settings, a partition's and a QOS's decide what a
preemption does. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from hydroslurm.slurm.values import Partition, Qos


@dataclass(frozen=True, eq=False)
class Config(Mapping[str, str]):
    """slurm.conf as the controller has it: Slurm's names -> text, empty for Slurm's (null).

    The pyslurm backend provides only the names in ``pyslurm_backend.CONFIG_NAMES``.
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
        """Seconds between SIGTERM and SIGKILL when a job is ended."""
        return self._seconds("KillWait", 30)

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

    def _seconds(self, name: str, default: int) -> int:
        found = re.match(r"\d+", self.get(name, ""))
        return int(found[0]) if found else default


class PreemptAction(str, Enum):
    """What a preemption does to a job."""

    NEVER = "never"
    PAUSE = "pause"
    REQUEUE = "requeue"
    CANCEL = "cancel"


_ACTIONS = {
    "SUSPEND": PreemptAction.PAUSE,
    "REQUEUE": PreemptAction.REQUEUE,
    "CANCEL": PreemptAction.CANCEL,
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The settings that apply, each with where it is set. See :class:`SitePolicy`."""

    action: PreemptAction
    action_why: str
    grace_s: int = 0
    grace_why: str = ""
    preemptors: tuple[str, ...] | None = None
    unknown: tuple[str, ...] = ()


def rule_for(
    config: Config,
    partition: Partition,
    *,
    partitions: tuple[Partition, ...],
    qos: str,
    qoses: tuple[Qos, ...] | None,
) -> Rule:
    """The rule for the jobs of a partition and a QOS, as the preempt plugins choose it."""
    if config.preempt_type == "preempt/partition_prio":
        return _by_partition(config, partition, partitions)
    if config.preempt_type == "preempt/qos":
        return _by_qos(config, qos, qoses)
    shown = config.preempt_type or "(none)"
    return Rule(
        action=PreemptAction.NEVER, action_why=f"PreemptType={shown} of slurm.conf", preemptors=()
    )


def _by_partition(config: Config, partition: Partition, partitions: tuple[Partition, ...]) -> Rule:
    name = partition.name
    grace_why = f"GraceTime={partition.grace_time_s} of partition {name}"
    # scontrol and pyslurm print the cluster's mode for a partition without one of its own
    action = _action(partition.preempt_mode)
    why = f"PreemptMode={partition.preempt_mode} of partition {name}"
    if _action(config.preempt_mode) is PreemptAction.NEVER:
        action, why = PreemptAction.NEVER, f"PreemptMode={config.preempt_mode} of slurm.conf"
    preemptors = tuple(
        other.name
        for other in partitions
        if other.priority_tier > partition.priority_tier and set(other.nodes) & set(partition.nodes)
    )
    if partitions and not preemptors:
        action = PreemptAction.NEVER
        why = (
            f"no partition with a higher PriorityTier than {name}'s {partition.priority_tier} "
            "shares its nodes"
        )
    return Rule(
        action=action,
        action_why=why,
        grace_s=partition.grace_time_s,
        grace_why=grace_why,
        preemptors=preemptors if partitions else None,
    )


def _by_qos(config: Config, qos: str, qoses: tuple[Qos, ...] | None) -> Rule:
    cluster = f"PreemptMode={config.preempt_mode} of slurm.conf"
    if _action(config.preempt_mode) is PreemptAction.NEVER:
        return Rule(action=PreemptAction.NEVER, action_why=cluster, preemptors=())
    found = next((each for each in qoses or () if each.name == qos), None)
    if found is None:
        why = "accounting could not be asked" if qoses is None else "there is no such QOS"
        return Rule(
            action=_action(config.preempt_mode),
            action_why=cluster,
            grace_why=f"the GraceTime of QOS {qos or '(none)'} is not known, so none is counted on",
            unknown=(f"PreemptMode and GraceTime of QOS {qos or '(none)'}: {why}",),
        )
    own = f"PreemptMode={found.preempt_mode} of QOS {qos}"
    preemptors = tuple(each.name for each in qoses or () if qos in each.preempts)
    nobody = f"no QOS has {qos} in its Preempt list"
    return Rule(
        action=_action(found.preempt_mode or config.preempt_mode)
        if preemptors
        else PreemptAction.NEVER,
        action_why=(own if found.preempt_mode else cluster) if preemptors else nobody,
        grace_s=found.grace_time_s,
        grace_why=f"GraceTime={found.grace_time_s} of QOS {qos}",
        preemptors=preemptors,
    )


def _action(mode: str) -> PreemptAction:
    """``GANG,SUSPEND`` -> PAUSE. GANG, WITHIN and PRIORITY are not actions."""
    parts = mode.upper().split(",")
    return next((_ACTIONS[part] for part in parts if part in _ACTIONS), PreemptAction.NEVER)
