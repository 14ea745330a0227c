"""A diagnosis for programs. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from hydroslurm.observe.doctor.facts import Facts
from hydroslurm.observe.doctor.finding import Finding
from hydroslurm.observe.doctor.findings import work_would_be_lost

VERSION = 1
"""Raised when a name goes or changes its meaning; new names may come at any time."""


def as_json(facts: Facts, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """Plain values. A time without an end is null."""
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
            "suspend_grace_s": policy.suspend_grace_s,
            "may_requeue": policy.may_requeue,
            "requeue_wait_s": policy.requeue_wait_s,
            "send_user_signal": policy.send_user_signal,
        },
        "time_left": [
            {
                "kind": kind.value,
                "seconds": left.seconds if math.isfinite(left.seconds) else None,
                "why": left.why,
            }
            for kind, left in facts.stops()
        ],
        "saver": facts.saver.value,
        "save": asdict(facts.save) if facts.save else None,
        "findings": [{**asdict(each), "severity": each.severity.value} for each in findings],
        "work_would_be_lost": work_would_be_lost(findings),
    }
