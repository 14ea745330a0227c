"""What a preemption does here, how much time each stop leaves, and whether a save fits. Pure.

Each check is a small function that returns a finding, or None if it has nothing to say;
``diagnose`` runs them all, in the order of the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hydroslurm.observe.doctor import clocks, manyranks, risks
from hydroslurm.observe.doctor.facts import Facts, Finding, Saver, Severity
from hydroslurm.slurm.policy import PreemptAction, StopReason

VERSION = 1
"""Raised when a field is removed or changes meaning; adding fields is always allowed."""

COMFORT = 2.0
"""A save is safe if it takes at most the time left divided by this: the current step must finish
first, and a busy file system is slower than when measured."""

_WANTED = "the state must be saved and committed within"


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings on these facts, in the order of the report."""
    checks: tuple[Callable[[Facts], Finding | None], ...] = (
        _preemption,
        _save_fits,
        _cadence,
        risks.short_grace,
        risks.gang_ignores_grace,
        risks.no_requeue,
        risks.expedited_is_held,
        risks.few_requeues,
        risks.no_warning,
        risks.ranks_out_of_reach,
        manyranks.launcher_is_a_task,
        manyranks.ranks_outlive_a_failure,
        manyranks.dead_node_is_no_requeue,
        manyranks.failure_looks_like_a_stop,
        manyranks.port_of_an_earlier_attempt,
        manyranks.how_ranks_prove_themselves,
        risks.gres_stays_taken,
        risks.vacates_in_time,
        risks.stopped_while_paused,
        clocks.suspend_not_known,
        clocks.collectives,
        clocks.nccl_heartbeat,
        clocks.rendezvous,
        clocks.store,
        risks.no_memory_for_copies,
        risks.memory_shrinks,
        risks.long_requeue_wait,
        risks.logs_cut_off,
        risks.no_accounting,
        risks.run_folder,
        risks.signal_instead_of_term,
        risks.something_unknown,
    )
    results = (check(facts) for check in checks)
    return tuple(finding for finding in results if finding is not None)


def work_would_be_lost(findings: tuple[Finding, ...]) -> bool:
    """Whether any finding means that training steps would be lost."""
    return any(finding.severity is Severity.LOSS for finding in findings)


def as_json(facts: Facts, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """Return plain values for JSON; an unlimited time is null."""
    policy = facts.policy
    return {
        "version": VERSION,
        "cluster": facts.config.cluster_name,
        "slurm": facts.config.get("SLURM_VERSION", ""),
        "job_id": facts.job.job_id if facts.job else None,
        "partition": facts.partition.name,
        "qos": facts.qos or None,
        "policy": {
            "action": policy.action.value,
            "gang": policy.gang,
            "grace_s": policy.grace_s,
            "kill_wait_s": policy.kill_wait_s,
            "preempt_exempt_s": policy.exempt_s,
            "suspend_grace_s": facts.config.suspend_grace_time_s,
            "may_requeue": policy.may_requeue,
            "requeue_wait_s": facts.config.requeue_wait_s,
            "send_user_signal": facts.config.send_user_signal,
        },
        "time_left": [
            {
                "kind": reason.value,
                "seconds": left.seconds if math.isfinite(left.seconds) else None,
                "why": left.why,
            }
            for reason, left in facts.stops()
        ],
        "saver": facts.saver.value,
        "save": asdict(facts.save) if facts.save else None,
        "findings": [{**asdict(f), "severity": f.severity.value} for f in findings],
        "work_would_be_lost": work_would_be_lost(findings),
    }


def _preemption(facts: Facts) -> Finding:
    policy = facts.policy
    who = f" by jobs of {', '.join(policy.preemptors)}" if policy.preemptors else ""
    because = f" ({policy.action_why})"
    if policy.exempt_s:
        because += f", not in the first {policy.exempt_s} s of an attempt (PreemptExemptTime)"
    if policy.action is PreemptAction.NEVER:
        text = f"No job is preempted here{because}."
        return Finding("preemption", Severity.OK, "never preempted", text)
    if policy.action is PreemptAction.PAUSE:
        text = (
            f"A preemption{who} pauses the job in place{because}: SIGTSTP, "
            f"{facts.config.suspend_grace_time_s} s to park, SIGSTOP, and SIGCONT when the other "
            "job ends. Nothing is saved or lost; the job keeps its memory."
        )
        return Finding("preemption", Severity.OK, "paused in place", text)
    if facts.saver in _NO_SAVER:
        return _without_run(facts, f"A preemption{who}", because)
    if policy.action is PreemptAction.REQUEUE:
        text = (
            f"A preemption{who} stops and requeues the job{because}. It restarts at least "
            f"{facts.config.requeue_wait_s} s later, {_FROM[facts.saver]}."
        )
        return Finding("preemption", Severity.OK, "stopped and requeued", text)
    ends = f"A preemption{who} ends the job{because}. "
    if policy.may_requeue:
        text = (
            f"{ends}It comes back only if hydroslurm.Run (or go_suspend) requeues it before its "
            "processes end; a job that is killed earlier is gone."
        )
        fix = f"slurm.conf: PartitionName={facts.partition.name} ... PreemptMode=REQUEUE"
        return Finding("preemption", Severity.RISK, "cancelled", text, fix)
    text = f"{ends}Checkpoints are kept, but the job has to be submitted again."
    return Finding("preemption", Severity.RISK, "ended for good", text, risks.REQUEUE_FIX)


_NO_SAVER = {
    Saver.NO_RUN: "Its ranks have not created a hydroslurm.Run yet",
    Saver.NOBODY: "None of its ranks has reported: hydroslurm is not used in it, or not imported "
    "yet",
}
_FROM = {
    Saver.RUN: "from its last checkpoint",
    Saver.TWO_CALLS: "from what it saves before go_suspend",
    Saver.UNKNOWN: "from its last checkpoint if the script uses hydroslurm.Run. Other scripts "
    "start from what they saved themselves; one that exits at the first SIGTERM of the grace "
    "period has failed, and its job is not requeued",
}


def _without_run(facts: Facts, preemption: str, because: str) -> Finding:
    """Nothing requeues the job, and only the script itself may save at SIGTERM."""
    policy = facts.policy
    lost = "Unless the script itself saves at SIGTERM, everything since its last save is lost."
    fix = "hydroslurm.Run in the training script"
    if policy.action is PreemptAction.REQUEUE and (policy.gang or not policy.grace_s):
        text = (
            f"{_NO_SAVER[facts.saver]}. {preemption} stops and requeues the job{because}; "
            f"it restarts at least {facts.config.requeue_wait_s} s later, from what the script "
            f"saved itself or from the beginning. {lost}"
        )
        return Finding("preemption", Severity.RISK, "requeued, nothing is saved", text, fix)
    how = f"{preemption} ends the job{because}"
    if policy.action is PreemptAction.REQUEUE:
        how = (
            f"{preemption} sends SIGTERM {policy.grace_s} s before the requeue{because}. If the "
            "ranks exit on it, the job has FAILED, and is not requeued"
        )
        exits = facts.config.get("RequeueExit", "")
        if exits[:1].isdigit():
            how += f" (except with the exit codes in RequeueExit={exits})"
    text = f"{_NO_SAVER[facts.saver]}. {how}. {lost}"
    return Finding("preemption", Severity.RISK, "ended, nothing is saved", text, fix)


def _save_fits(facts: Facts) -> Finding:
    """Compare a save with the shortest stop: first of those by Slurm itself, then of all."""
    own = {StopReason.PREEMPTED, StopReason.TIME_LIMIT}
    if facts.script is None:
        own.discard(StopReason.TIME_LIMIT)  # it may ask for a warning; we cannot see
    stops = [stop for stop in facts.stops() if stop[0] is not StopReason.NODE_FAILING]
    left = min((left for _, left in stops), key=lambda left: left.seconds)
    least = f"{left.seconds:.1f} s ({left.why})"
    if facts.save is None:
        text = f"How long a save takes is not known; {_WANTED} {least}."
        fix = "hydroslurm doctor --run RUN_FOLDER, or --save-s SECONDS"
        return Finding("save", Severity.NOTE, "save time not known", text, fix)
    save_s = facts.save.save_s
    took = f"A save takes {save_s:.1f} s ({facts.save.source})"
    own_s = min((left.seconds for reason, left in stops if reason in own), default=math.inf)
    if save_s > own_s:
        text = f"{took}; {_WANTED} {least}. All steps since the last periodic save would be lost."
        return Finding("save", Severity.LOSS, "a save does not fit", text, save_fix(facts))
    if save_s * COMFORT > left.seconds:
        text = f"{took}, and {_WANTED} {least}. The current step has to finish first."
        return Finding("save", Severity.RISK, "a save barely fits", text, save_fix(facts))
    text = f"{took}, and every stop leaves at least {least}."
    return Finding("save", Severity.OK, "a save fits", text)


def _cadence(facts: Facts) -> Finding | None:
    cadence = facts.save.cadence if facts.save else None
    if cadence is None or not (cadence.stall_s and cadence.every_s):
        return None
    return Finding("cadence", Severity.OK, "how often to save", f"{cadence.reason()}.")


def save_fix(facts: Facts) -> str:
    """Return the settings that give a save the time it needs."""
    assert facts.save is not None
    wanted_s = max(30, math.ceil(facts.save.save_s * COMFORT) + 1)
    lines = [f"slurm.conf: KillWait={wanted_s}"]
    if facts.is_preempted_to_stop and not facts.policy.gang:
        lines.append(
            f"or PartitionName={facts.partition.name} ... GraceTime={wanted_s} for preemptions"
        )
    if facts.has_time_limit:
        lines.append(f"and sbatch: --signal=URG@{wanted_s} for the time limit")
    lines.append("or save more often (every_s), to a faster disk first")
    return "; ".join(lines)


LABELS = {
    StopReason.PREEMPTED: "preempted",
    StopReason.TIME_LIMIT: "time limit",
    StopReason.CANCELLED: "scancel",
    StopReason.REQUEUED: "scontrol requeue",
    StopReason.NODE_FAILING: "node failure",
}
"""Each reason of a stop, in words."""
