"""What may go wrong, each with the line that would change it. Pure; see ``findings``."""

from __future__ import annotations

from hydroslurm.observe.doctor.facts import Facts, Finding, Severity
from hydroslurm.slurm.config import PreemptAction

REQUEUE_FIX = "sbatch: --requeue (slurm.conf: JobRequeue=1 makes it the default)"
PATIENT_WAIT_S = 10
"""A wait before a restart that nobody would complain of."""
MEMORY_USED = 0.9
"""The part of a memory limit that a run uses for copies (see ``checkpoint.memory``)."""


def short_grace(facts: Facts) -> Finding | None:
    """GraceTime is 0 by default, and then a preemption leaves KillWait only."""
    policy = facts.policy
    if not facts.is_preempted_to_stop or policy.gang or policy.grace_s:
        return None
    text = (
        f"{policy.grace_why or 'GraceTime=0'}: from the first SIGTERM of a preemption there are "
        f"{policy.kill_after_s:.1f} s, which is KillWait, and no more."
    )
    where = "the QOS" if "QOS" in policy.grace_why else f"PartitionName={facts.partition.name} ..."
    fix = f"slurm.conf: {where} GraceTime=120"
    return Finding("grace", Severity.NOTE, "no grace before a preemption", text, fix)


def gang_ignores_grace(facts: Facts) -> Finding | None:
    policy = facts.policy
    if not facts.is_preempted_to_stop or not policy.gang:
        return None
    text = (
        "Gang scheduling (PreemptMode=...,GANG) requeues by itself and pays no heed to GraceTime: "
        f"{policy.kill_after_s:.1f} s are all."
    )
    severity = Severity.RISK if policy.grace_s else Severity.NOTE
    fix = "slurm.conf: PreemptMode=REQUEUE without GANG, or a longer KillWait"
    return Finding("gang", severity, "gang scheduling: GraceTime does not count", text, fix)


def no_requeue(facts: Facts) -> Finding | None:
    policy = facts.policy
    if policy.may_requeue:
        return None
    if policy.is_batch is False:
        text = (
            "The allocation was made by srun or salloc, which Slurm never requeues. What was saved "
            "stays: the same command resumes from there."
        )
        return Finding("requeue", Severity.NOTE, "not requeued", text, "submit it with sbatch")
    text = f"Slurm will not start the job again after a stop: {policy.requeue_why}."
    return Finding("requeue", Severity.RISK, "not requeued", text, REQUEUE_FIX)


def expedited_is_held(facts: Facts) -> Finding | None:
    """Seen on 25.11.7: a batch script that exits with 1 or 75 leaves the job in REQUEUE_HOLD; after
    scontrol requeue the status does not count, and the job runs again at once."""
    if facts.script is None or not facts.script.is_expedited:
        return None
    text = (
        "--requeue=expedite: a batch script that ends with a status other than 0 is requeued and "
        "held, until its owner releases it. A stop is not: hydroslurm asks for scontrol requeue "
        "before the script ends, and the job runs again without a wait. A failed run is; and so is "
        "a rank that saved, could not reach Slurm and left with 75, unless the script itself asks."
    )
    fix = "sbatch: --requeue; or scontrol release JOBID, and the end of sbatch/requeue.sbatch"
    return Finding("expedite", Severity.NOTE, "failures are requeued, held", text, fix)


def no_warning(facts: Facts) -> Finding | None:
    """A time limit without --signal comes as SIGTERM, with KillWait behind it."""
    script = facts.script
    if not facts.has_time_limit or (facts.job is not None and facts.job.is_batch is False):
        return None
    fix = "sbatch: --signal=URG@120 (without B:)"
    if script is None:
        text = "Whether the job asks for a warning before its time limit cannot be seen from here."
        return Finding("warning", Severity.NOTE, "time-limit warning not known", text, fix)
    if not script.warning:
        text = (
            "No --signal in the batch script: the time limit comes unannounced, with "
            f"{facts.policy.kill_after_s:.1f} s to save. (An option on sbatch's command line "
            "cannot be seen.)"
        )
        return Finding("warning", Severity.RISK, "no warning before the time limit", text, fix)
    if script.batch_shell_only:
        text = "--signal=B:... is sent to the batch shell and to none of the ranks."
        return Finding("warning", Severity.RISK, "the warning reaches no rank", text, fix)
    return None


def ranks_out_of_reach(facts: Facts) -> Finding | None:
    """proctrack/cgroup: signals reach what srun started, and not what that started."""
    if facts.policy.signals_children:
        return None
    launcher = facts.script.launcher if facts.script else ""
    if facts.script and facts.script.has_agent and not launcher:
        return None
    fix = (
        "start the ranks with srun (--ntasks-per-node=GPUS, no torchrun), or with `srun hydroslurm "
        "agent -- TORCHRUN_ARGUMENTS`, or cgroup.conf: SignalChildrenProcesses=yes, where this "
        "Slurm knows it"
    )
    reach = "Under proctrack/cgroup a signal reaches the tasks that srun started and nothing below."
    if launcher:
        text = f"{reach} This job's ranks are started by {launcher}: no stop request reaches them."
        return Finding("reach", Severity.LOSS, "no rank hears a signal", text, fix)
    text = f"{reach} `srun python` is reached, the workers of `srun torchrun` are not."
    return Finding("reach", Severity.NOTE, "signals reach srun's tasks only", text, fix)


def gres_stays_taken(facts: Facts) -> Finding | None:
    if facts.policy.action is not PreemptAction.PAUSE:
        return None
    gres = facts.job.gres if facts.job else ""
    if facts.job is not None and not gres:
        return None
    text = (
        "A suspended job keeps its generic resources: a preemptor that asks for a GPU with --gres "
        "or --gpus does not start on this job's."
    )
    fix = (
        f"slurm.conf: PartitionName={facts.partition.name} ... PreemptMode=REQUEUE, or "
        "GresTypes=shard, or one allocation and srun --overlap"
    )
    if gres:
        title = f"paused, it keeps {gres}"
        return Finding("gres", Severity.RISK, title, text, fix)
    return Finding("gres", Severity.NOTE, "a paused job keeps its GPUs", text, fix)


def stopped_while_paused(facts: Facts) -> Finding | None:
    if facts.policy.action is not PreemptAction.PAUSE:
        return None
    text = (
        "A suspended job gets no signal but SIGKILL: one that is cancelled or requeued while it is "
        "paused ends without saving, and a requeue leaves it held."
    )
    fix = "save periodically (every_s); scontrol resume before scontrol requeue"
    return Finding("paused", Severity.NOTE, "nothing can be saved while paused", text, fix)


def no_memory_for_copies(facts: Facts) -> Finding | None:
    """A training on CPUs holds the state itself as well; one on GPUs has more room than that."""
    has_bytes, save = facts.memory_per_node_bytes, facts.save
    if has_bytes is None or save is None or save.state_bytes is None or facts.job is None:
        return None
    copy_bytes = save.state_bytes // (facts.job.n_nodes or 1)
    if 2 * copy_bytes <= MEMORY_USED * has_bytes:
        return None
    text = (
        f"The job has {has_bytes / 1e6:,.0f} MB on each node, and its state takes "
        f"{copy_bytes / 1e6:,.0f} MB of that. Where a copy of it does not fit beside the training, "
        "the run says so at its start, and each periodic save holds the training up until it is "
        "written."
    )
    fix = f"sbatch: --mem={-(-(has_bytes + copy_bytes) // 2**20)}M, which is a copy's size more"
    return Finding("memory", Severity.NOTE, "little memory for copies of the state", text, fix)


def long_requeue_wait(facts: Facts) -> Finding | None:
    wait_s = facts.policy.requeue_wait_s
    if not facts.policy.may_requeue or wait_s <= PATIENT_WAIT_S:
        return None
    text = f"A requeued job waits {wait_s} s before it may start again, even on an idle cluster."
    fix = "slurm.conf: AuthInfo=...,cred_expire=5 and a restart of slurmctld"
    if facts.config.version >= (25, 11):
        fix = "slurm.conf: SchedulerParameters=...,requeue_delay=5"
    return Finding("wait", Severity.NOTE, f"{wait_s} s between two attempts", text, fix)


def logs_cut_off(facts: Facts) -> Finding | None:
    script = facts.script
    if script is None or script.appends or facts.config.appends_output:
        return None
    if not facts.policy.may_requeue:
        return None
    text = "No --open-mode=append in the batch script: each requeue empties the output file."
    fix = "sbatch: --open-mode=append (slurm.conf: JobFileAppend=1 makes it the default)"
    return Finding("logs", Severity.NOTE, "logs of earlier attempts are lost", text, fix)


def no_accounting(facts: Facts) -> Finding | None:
    if facts.config.has_accounting:
        return None
    kind = facts.config.get("AccountingStorageType", "") or "not set"
    text = (
        f"AccountingStorageType is {kind}: submitit cannot watch its jobs without sacct, and a "
        "preemption without grace cannot be told from an operator's requeue."
    )
    fix = "slurm.conf: AccountingStorageType=accounting_storage/slurmdbd"
    return Finding("accounting", Severity.NOTE, "no slurmdbd", text, fix)


def signal_instead_of_term(facts: Facts) -> Finding | None:
    if not facts.is_preempted_to_stop or not facts.policy.send_user_signal:
        return None
    text = (
        "send_user_signal is set: a preempted job that asks for --signal gets that signal first, "
        "and SIGTERM only at the end of its grace."
    )
    return Finding("user_signal", Severity.OK, "preempted by its --signal", text)


def something_unknown(facts: Facts) -> Finding | None:
    if not facts.policy.unknown:
        return None
    text = f"Could not be read: {'; '.join(facts.policy.unknown)}. The worst case is assumed."
    return Finding("unknown", Severity.NOTE, "some settings could not be read", text)


def run_folder(facts: Facts) -> Finding | None:
    """Whose word a job takes for what it has trained so far."""
    if facts.untrusted:
        title = "the run folder is not used"
        return Finding("run_folder", Severity.RISK, title, f"A job refuses it: {facts.untrusted}.")
    if not facts.shared:
        return None
    text = (
        "The run folder lies in a folder that people share. A job runs there and believes only "
        "files of its own user or of root, but whoever may write above it can move run folders "
        f"of yours to other names. Seen: {facts.shared}."
    )
    title = "others can exchange the run folder"
    return Finding("run_folder", Severity.NOTE, title, text, "a folder that only you can write")
