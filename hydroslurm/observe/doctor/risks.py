"""Risks, each with the setting that prevents it. Pure; see ``findings``."""

from __future__ import annotations

import signal

from hydroslurm.core.signals import signal_name
from hydroslurm.gate.signals import SIGNALS_ENV
from hydroslurm.observe.doctor.facts import Facts, Finding, Severity
from hydroslurm.slurm.policy import WARNING_EARLY_S, PreemptAction
from hydroslurm.vacate.cuda_checkpoint import USUAL_BYTES_PER_S
from hydroslurm.vacate.policy import fitting_bytes, gb

REQUEUE_FIX = "sbatch: --requeue (slurm.conf: JobRequeue=1 makes it the default)"
USUAL_REQUEUES = 5
"""Default of MaxBatchRequeue."""
PATIENT_WAIT_S = 10
"""A shorter wait before a restart is not worth mentioning."""
MEMORY_USED = 0.9
"""The share of a memory limit that a run uses, copies included (see ``core.memory``)."""


def short_grace(facts: Facts) -> Finding | None:
    """GraceTime is 0 by default; then a preemption leaves only KillWait."""
    policy = facts.policy
    if not facts.is_preempted_to_stop or policy.gang or policy.grace_s:
        return None
    text = (
        f"{policy.grace_why or 'GraceTime=0'}: a preemption leaves "
        f"{policy.kill_after_s:.1f} s from SIGTERM to SIGKILL, which is KillWait."
    )
    where = "the QOS" if "QOS" in policy.grace_why else f"PartitionName={facts.partition.name} ..."
    fix = f"slurm.conf: {where} GraceTime=120"
    return Finding("grace", Severity.NOTE, "no grace before a preemption", text, fix)


def gang_ignores_grace(facts: Facts) -> Finding | None:
    policy = facts.policy
    if not facts.is_preempted_to_stop or not policy.gang:
        return None
    text = (
        "Gang scheduling (PreemptMode=...,GANG) requeues jobs itself and ignores GraceTime: there "
        f"are only {policy.kill_after_s:.1f} s."
    )
    severity = Severity.RISK if policy.grace_s else Severity.NOTE
    fix = "slurm.conf: PreemptMode=REQUEUE without GANG, or a longer KillWait"
    return Finding("gang", severity, "gang scheduling ignores GraceTime", text, fix)


def no_requeue(facts: Facts) -> Finding | None:
    policy = facts.policy
    if policy.may_requeue:
        return None
    if facts.job is not None and facts.job.is_batch is False:
        text = (
            "The allocation was made by srun or salloc, which Slurm never requeues. Checkpoints "
            "are kept: the same command resumes from them."
        )
        return Finding("requeue", Severity.NOTE, "not requeued", text, "submit it with sbatch")
    text = f"Slurm will not restart the job after a stop: {policy.requeue_why}."
    return Finding("requeue", Severity.RISK, "not requeued", text, REQUEUE_FIX)


def expedited_is_held(facts: Facts) -> Finding | None:
    """Seen on 25.11.7: a batch script's exit with 1 or 75 leaves the job in REQUEUE_HOLD; after
    scontrol requeue the status is ignored, and the job runs again at once."""
    if facts.script is None or not facts.script.is_expedited:
        return None
    if not facts.config.allows_expedited:
        text = "Slurm refuses --requeue=expedite here: enable_expedited_requeue is not set."
        fix = "sbatch: --requeue"
        if facts.config.version >= (25, 11):
            fix += "; or slurm.conf: SlurmctldParameters=...,enable_expedited_requeue"
        return Finding("expedite", Severity.RISK, "--requeue=expedite is refused", text, fix)
    text = (
        "--requeue=expedite: if the batch script exits with a status other than 0, the job is "
        "requeued and held until its owner releases it. A stopped job is not held: hydroslurm runs "
        "scontrol requeue before the script ends, and the job restarts at once. A failed run is "
        "held; so is one whose ranks saved but could not reach Slurm and exited with 75, unless "
        "the script itself requeues it."
    )
    fix = "sbatch: --requeue; or scontrol release JOBID, and hydroslurm batch -- srun ..."
    return Finding("expedite", Severity.NOTE, "failed jobs are requeued and held", text, fix)


def few_requeues(facts: Facts) -> Finding | None:
    """Seen on 24.11.5 and 26.05.5 with 1 and 2: RequeueExit and scontrol requeue do not count; an
    exit within the grace of a preemption does."""
    most = facts.config.most_requeues
    if not facts.policy.may_requeue or most >= USUAL_REQUEUES:
        return None
    text = (
        f"MaxBatchRequeue={most}: Slurm holds a job once its prolog or launch failed that often. "
        "From 24.05 on it also counts preemptions in whose grace a script exits by itself; ranks "
        "of hydroslurm run scontrol requeue before, which does not count."
    )
    fix = f"slurm.conf: MaxBatchRequeue={USUAL_REQUEUES}; scontrol release JOBID"
    return Finding("max_requeue", Severity.NOTE, "held after failed starts", text, fix)


def memory_shrinks(facts: Facts) -> Finding | None:
    """``sbatch --mem-update=MARGIN@DELAY`` of 26.05."""
    shrinks = facts.script.shrinks_memory if facts.script else ""
    if not shrinks:
        return None
    margin, _, delay = shrinks.partition("@")
    text = (
        f"--mem-update={shrinks}: once in each attempt, {delay} after its start, Slurm lowers the "
        f"memory limit to what the job uses then and {margin} % of that. A copy of the state for "
        "a periodic save, or a GPU's memory that a pause moves to the host, may need more: then "
        "the kernel kills the job."
    )
    fix = "sbatch: no --mem-update, or a margin with room for the state (100@DELAY)"
    return Finding("mem_update", Severity.RISK, "the memory limit shrinks", text, fix)


def no_warning(facts: Facts) -> Finding | None:
    """Without --signal the time limit means SIGTERM, then SIGKILL after KillWait."""
    script = facts.script
    if not facts.has_time_limit or (facts.job is not None and facts.job.is_batch is False):
        return None
    fix = "sbatch: --signal=URG@120 (without B:)"
    if script is None:
        text = "Whether the job asks for a warning before its time limit is not known."
        return Finding("warning", Severity.NOTE, "time-limit warning not known", text, fix)
    warning = script.warning
    if warning is None:
        text = (
            "No --signal in the batch script: the time limit comes without warning and leaves "
            f"{facts.policy.kill_after_s:.1f} s to save. (Options on sbatch's command line cannot "
            "be seen.)"
        )
        return Finding("warning", Severity.RISK, "no warning before the time limit", text, fix)
    fix = f"sbatch: --signal=URG@{warning.before_s} (without B:)"
    if warning.batch_shell_only:
        text = (
            "--signal=B:... is sent to the batch shell only. The ranks get what a trap of the "
            "script sends them, and otherwise the time limit's SIGTERM. `hydroslurm batch -- srun "
            "...` passes it on."
        )
        return Finding("warning", Severity.RISK, "the warning reaches no rank", text, fix)
    name = "signal" if warning.signo is None else signal_name(warning.signo)
    if not script.saves_at_warning:
        text = (
            f"--signal={warning.signal}: {name} does not make the ranks save. Unless the script "
            "handles it, its default action is what happens, and most signals end a program."
        )
        fix += f", or export {SIGNALS_ENV}=warning={warning.signal}"
        if warning.signo == signal.SIGINT:
            fix += ",interrupt=none"
        return Finding("warning", Severity.RISK, "the warning saves nothing", text, fix)
    if warning.signo in (signal.SIGUSR1, signal.SIGUSR2):
        text = (
            f"{name} pauses or resumes a rank. In the last {warning.before_s + WARNING_EARLY_S} s "
            "before the time limit it means save and leave."
        )
        title = f"{name} warns of the time limit"
        return Finding("warning", Severity.NOTE, title, text, fix)
    return None


def ranks_out_of_reach(facts: Facts) -> Finding | None:
    """proctrack/cgroup: signals reach the tasks of srun, not their children."""
    if facts.config.signals_children:
        return None
    launcher = facts.script.launcher if facts.script else ""
    if facts.script and facts.script.has_agent and not launcher:
        return None
    fix = (
        "start the ranks with srun (--ntasks-per-node=GPUS, no torchrun), or with `srun hydroslurm "
        "agent -- TORCHRUN_ARGUMENTS`, or cgroup.conf: SignalChildrenProcesses=yes, if this "
        "Slurm has it"
    )
    reach = "Under proctrack/cgroup a signal reaches only the tasks of srun, not their children."
    if launcher:
        text = f"{reach} {launcher} starts this job's ranks, so no signal reaches them."
        return Finding("reach", Severity.LOSS, "signals reach no rank", text, fix)
    text = f"{reach} They reach `srun python`, but not the workers of `srun torchrun`."
    return Finding("reach", Severity.NOTE, "signals reach srun's tasks only", text, fix)


def gres_stays_taken(facts: Facts) -> Finding | None:
    if facts.policy.action is not PreemptAction.PAUSE:
        return None
    gres = facts.job.gres if facts.job else ""
    if facts.job is not None and not gres:
        return None
    text = (
        "A suspended job keeps its generic resources: a preempting job that requests GPUs with "
        "--gres or --gpus cannot start on them."
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
        "A suspended job gets no signal but SIGKILL: if it is cancelled or requeued while "
        "paused, it ends without saving; if requeued, it is also held."
    )
    fix = "save periodically (every_s); scontrol resume before scontrol requeue"
    return Finding("paused", Severity.NOTE, "nothing can be saved while paused", text, fix)


def no_memory_for_copies(facts: Facts) -> Finding | None:
    """Assumes that the state is also in host memory, as on CPUs; GPUs leave more room."""
    has_bytes, save = facts.memory_per_node_bytes, facts.save
    if has_bytes is None or save is None or save.state_bytes is None or facts.job is None:
        return None
    copy_bytes = save.state_bytes // (facts.job.n_nodes or 1)
    if 2 * copy_bytes <= MEMORY_USED * has_bytes:
        return None
    text = (
        f"The job has {has_bytes / 1e6:,.0f} MB on each node, and its state takes "
        f"{copy_bytes / 1e6:,.0f} MB of that. If a copy does not fit as well, the run says so "
        "when it starts, and training waits until each periodic save is written."
    )
    fix = f"sbatch: --mem={-(-(has_bytes + copy_bytes) // 2**20)}M, which adds room for a copy"
    return Finding("memory", Severity.NOTE, "little memory for copies of the state", text, fix)


def long_requeue_wait(facts: Facts) -> Finding | None:
    wait_s = facts.config.requeue_wait_s
    if not facts.policy.may_requeue or wait_s <= PATIENT_WAIT_S:
        return None
    text = f"A requeued job waits {wait_s} s before it can restart, even on an idle cluster."
    fix = "slurm.conf: AuthInfo=...,cred_expire=5, then restart slurmctld"
    if facts.config.version >= (25, 11):
        fix = "slurm.conf: SchedulerParameters=...,requeue_delay=5"
    return Finding("wait", Severity.NOTE, f"{wait_s} s between attempts", text, fix)


def logs_cut_off(facts: Facts) -> Finding | None:
    script = facts.script
    if script is None or script.appends or facts.config.appends_output:
        return None
    if not facts.policy.may_requeue:
        return None
    text = "No --open-mode=append in the batch script: each requeue overwrites the output file."
    fix = "sbatch: --open-mode=append (slurm.conf: JobFileAppend=1 makes it the default)"
    return Finding("logs", Severity.NOTE, "logs of earlier attempts are lost", text, fix)


def no_accounting(facts: Facts) -> Finding | None:
    if facts.config.has_accounting:
        return None
    kind = facts.config.get("AccountingStorageType", "") or "not set"
    text = (
        f"AccountingStorageType is {kind}: submitit cannot track its jobs without sacct, and a "
        "preemption without grace looks the same as an operator's requeue."
    )
    fix = "slurm.conf: AccountingStorageType=accounting_storage/slurmdbd"
    return Finding("accounting", Severity.NOTE, "no slurmdbd", text, fix)


def signal_instead_of_term(facts: Facts) -> Finding | None:
    if not facts.is_preempted_to_stop or not facts.config.send_user_signal:
        return None
    text = (
        "send_user_signal is set: a preempted job with --signal gets that signal first, and "
        "SIGTERM only at the end of its grace period."
    )
    return Finding("user_signal", Severity.OK, "preemption sends its --signal", text)


def something_unknown(facts: Facts) -> Finding | None:
    if not facts.policy.unknown:
        return None
    text = f"Could not be read: {'; '.join(facts.policy.unknown)}. The worst case is assumed."
    return Finding("unknown", Severity.NOTE, "some settings could not be read", text)


def run_folder(facts: Facts) -> Finding | None:
    """Who can change the state that a job resumes from."""
    if facts.untrusted:
        title = "the run folder is not used"
        return Finding("run_folder", Severity.RISK, title, f"Jobs refuse it: {facts.untrusted}.")
    if not facts.shared:
        return None
    text = (
        "The run folder is inside a shared folder. Jobs run there and trust only files owned by "
        "you or root, but whoever can write to a parent folder can rename or swap your run "
        f"folders. Seen: {facts.shared}."
    )
    title = "others can swap the run folder"
    return Finding(
        "run_folder", Severity.NOTE, title, text, "use a folder that only you can write to"
    )


def vacates_in_time(facts: Facts) -> Finding | None:
    """How much device memory fits between SIGTSTP and SIGSTOP, for jobs that have devices or whose
    run has vacated."""
    job, measured = facts.job, facts.vacate
    if measured is None and (job is None or not job.gres):
        return None
    grace_s = facts.config.suspend_grace_time_s
    rate = measured.bytes_per_s if measured else USUAL_BYTES_PER_S
    source = measured.source if measured else "as usual for CUDA's checkpoint API; not measured"
    fits_bytes = fitting_bytes(rate, grace_s=grace_s)
    text = (
        f"A pause with --preempt=vacate, or of hydroslurm pause --vacate, moves the device memory "
        f"to the host. Slurm stops a suspended process {grace_s} s after its SIGTSTP: at "
        f"{gb(rate)}/s ({source}) {gb(fits_bytes)} per rank fit into that. A rank with more parks "
        "only, and says so."
    )
    if facts.no_vacate:
        text += f" This very node cannot vacate: {facts.no_vacate}."
    text += _host_memory(facts)
    if measured is None or measured.device_bytes <= fits_bytes:
        return Finding("vacate", Severity.NOTE, f"{gb(fits_bytes)} fit into a suspend", text)
    wanted_s = int(measured.device_bytes / rate) + 2
    fix = f"slurm.conf: PreemptParameters=suspend_grace_time={wanted_s} (Slurm 23.11 and newer)"
    title = f"{gb(measured.device_bytes)} do not fit into a suspend"
    return Finding("vacate", Severity.RISK, title, text, fix)


def _host_memory(facts: Facts) -> str:
    """Describe what bounds the copy, if Slurm says so."""
    text = ""
    if facts.config.get("ConstrainRAMSpace", "").lower() == "no":
        text = (
            " Slurm does not bound this job's memory (cgroup.conf: ConstrainRAMSpace=no): the copy "
            "may take what the job that gets the GPU needs on the host."
        )
    measured, asked_bytes = facts.vacate, facts.memory_per_node_bytes
    if measured is not None and asked_bytes is not None and asked_bytes < measured.device_bytes:
        text += (
            f" The job asks for {gb(asked_bytes)} per node, and a rank's copy alone takes "
            f"{gb(measured.device_bytes)}: it refuses to vacate. Ask for more (--mem)."
        )
    return text
