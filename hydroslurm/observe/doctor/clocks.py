"""Which clocks go on while a job is suspended, and what each does when it has run out. Pure.

A stopped process's clocks go on: CLOCK_MONOTONIC and CLOCK_REALTIME count the seconds between
SIGSTOP and SIGCONT. What matters is who looks at them afterwards, and for what. Ranks that
hydroslurm has parked have no collective in flight, so that the time-outs of collectives measure
nothing; the others here are not of collectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from hydroslurm.observe.doctor.facts import Facts, Finding, Severity
from hydroslurm.slurm.config import PreemptAction

NCCL_TIMEOUT_S = 600
GLOO_TIMEOUT_S = 1800
NCCL_HEARTBEAT_S = 480
"""TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, when it is not set."""
KEEP_ALIVE_S, KEEP_ALIVE_ATTEMPTS = 5, 3
"""Of torch's c10d rendezvous, when --rdzv-conf does not say."""
STORE_READ_S = 60
"""read_timeout of the c10d rendezvous: what its store's clients wait for an answer."""
_MARGIN_S = 60


def suspend_not_known(facts: Facts) -> Finding | None:
    """Without a length nothing can be said of the clocks."""
    if facts.suspend_s is not None or facts.policy.action is not PreemptAction.PAUSE:
        return None
    if facts.tasks < 2:
        return None
    text = (
        "A job of several ranks may be suspended here, and some timeouts of torch and NCCL keep "
        "running meanwhile. How long a suspend lasts is not known."
    )
    fix = "hydroslurm doctor --suspend-s SECONDS: the longest suspend to survive"
    return Finding("clocks", Severity.NOTE, "length of a suspend not known", text, fix)


def collectives(facts: Facts) -> Finding | None:
    """The time-out of a process group."""
    suspend_s = facts.suspend_s
    if suspend_s is None or suspend_s < NCCL_TIMEOUT_S:
        return None
    handling = _settings(facts).get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    after = (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 would then leave the ranks hanging forever"
        if handling == "0"
        else "it would then end the rank a moment after SIGCONT"
    )
    text = (
        f"{suspend_s:g} s are more than a collective may take ({NCCL_TIMEOUT_S} s with NCCL, "
        f"{GLOO_TIMEOUT_S} s with gloo, unless init_process_group(timeout=) says otherwise). Ranks "
        "that hydroslurm has parked have none in flight, so this timeout does not run. It does run "
        "for a rank that was not parked within the suspend grace (its event says that collectives "
        f"were in flight), or that waits in init_process_group or new_group; {after}."
    )
    fix = f"init_process_group(timeout=timedelta(seconds={_ample(suspend_s)})) for these cases"
    return Finding("clock_collectives", Severity.NOTE, "longer than a collective", text, fix)


def nccl_heartbeat(facts: Facts) -> Finding | None:
    """The thread that watches NCCL's watchdog."""
    settings = _settings(facts)
    limit_s = _seconds(settings, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", NCCL_HEARTBEAT_S)
    suspend_s = facts.suspend_s
    if suspend_s is None or suspend_s < limit_s:
        return None
    if settings.get("TORCH_NCCL_ENABLE_MONITORING") == "0":
        return None
    text = (
        f"With NCCL a thread of torch's looks every TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={limit_s:g} s "
        f"whether the watchdog has moved. That clock goes on for the {suspend_s:g} s, also with "
        "nothing in flight. The rank is aborted if the watchdog did not move between the last "
        "look and the SIGSTOP, a tenth of a second: seldom, but of many ranks one is enough. Gloo "
        "has no such thread."
    )
    fix = f"export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={_ample(suspend_s)}"
    return Finding("clock_nccl", Severity.RISK, "NCCL's heartbeat is shorter", text, fix)


def rendezvous(facts: Facts) -> Finding | None:
    """torchrun's keep-alive between the nodes."""
    script, suspend_s = facts.script, facts.suspend_s
    if script is None or suspend_s is None or not (script.launcher or script.has_agent):
        return None
    settings = script.settings
    interval_s = _seconds(settings, "keep_alive_interval", KEEP_ALIVE_S)
    limit_s = interval_s * _seconds(settings, "keep_alive_max_attempt", KEEP_ALIVE_ATTEMPTS)
    if suspend_s < limit_s:
        return None
    if script.has_agent:
        text = (
            f"The nodes take each other for dead after {limit_s:g} s without a heartbeat. "
            "`hydroslurm agent` does not count the time in which it was stopped."
        )
        return Finding("clock_rendezvous", Severity.OK, "the rendezvous is patient", text)
    text = (
        f"After {limit_s:g} s without a heartbeat (keep_alive_interval * keep_alive_max_attempt) "
        "torchrun's nodes take each other for dead, and forget themselves too. The ranks go on, "
        "but one that fails later is not started again: the job ends at join_timeout."
    )
    attempts = math.ceil(_ample(suspend_s) / max(interval_s, 1))
    fix = f"{_AGENT_WORDS}; or --rdzv-conf keep_alive_max_attempt={attempts}"
    return Finding("clock_rendezvous", Severity.RISK, "no restart after a suspend", text, fix)


def store(facts: Facts) -> Finding | None:
    """Who waits in a store while it is stopped."""
    suspend_s = facts.suspend_s
    if suspend_s is None or suspend_s < STORE_READ_S or facts.tasks < 2:
        return None
    text = (
        "A TCPStore itself has no clock that a suspend could run out, and idle connections stay. "
        "A rank or an agent that is stopped while it waits for an answer may find its time-out "
        f"over ({STORE_READ_S} s for torchrun's rendezvous, the process group's for a rank): ranks "
        "that are starting, that make a new group, or an agent whose job is suspended while the "
        "nodes still meet (join_timeout, 600 s)."
    )
    title = "a suspend during the start may end it"
    fix = "--rdzv-conf read_timeout=SECONDS,join_timeout=SECONDS for starts that are suspended"
    return Finding("clock_store", Severity.NOTE, title, text, fix)


_AGENT_WORDS = "hydroslurm agent in the place of torchrun"


def _settings(facts: Facts) -> Mapping[str, str]:
    return facts.script.settings if facts.script else {}


def _seconds(settings: Mapping[str, str], name: str, default_s: float) -> float:
    try:
        return float(settings.get(name, default_s))
    except ValueError:
        return default_s


def _ample(suspend_s: float) -> int:
    return math.ceil(suspend_s) + _MARGIN_S
