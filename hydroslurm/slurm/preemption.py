"""Which of Slurm's settings decides what a preemption does: partition, QOS or cluster. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hydroslurm.slurm.config import Config
from hydroslurm.slurm.values import Partition, Qos


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
    """The settings that hold, each with where it stands. As in :class:`SitePolicy`."""

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
    """``GANG,SUSPEND`` -> PAUSE. GANG, WITHIN and PRIORITY say nothing about what is done."""
    words = mode.upper().split(",")
    return next((_ACTIONS[word] for word in words if word in _ACTIONS), PreemptAction.NEVER)
