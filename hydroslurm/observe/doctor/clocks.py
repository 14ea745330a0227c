"""Which timeouts keep running while a job is suspended, and what happens when they expire. Pure.

CLOCK_MONOTONIC and CLOCK_REALTIME count the seconds between SIGSTOP and SIGCONT. What matters is
which timeouts are checked afterwards. Ranks that hydroslurm has parked have no collective in
flight, so timeouts of collectives cannot expire; the others here are not about collectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from hydroslurm.observe.doctor.facts import Facts, Finding, Severity
from hydroslurm.slurm.policy import PreemptAction

NCCL_TIMEOUT_S = 600
GLOO_TIMEOUT_S = 1800
NCCL_HEARTBEAT_S = 480
"""TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, when it is not set."""
KEEP_ALIVE_S, KEEP_ALIVE_ATTEMPTS = 5, 3
"""Defaults of torch's c10d rendezvous (--rdzv-conf)."""
STORE_READ_S = 60
"""read_timeout of the c10d rendezvous: how long clients of its store wait for an answer."""
_MARGIN_S = 60


def suspend_not_known(facts: Facts) -> Finding | None:
    """Without the length of a suspend nothing can be said about timeouts."""
    if facts.suspend_s is not None or facts.policy.action is not PreemptAction.PAUSE:
        return None
    if facts.tasks < 2:
        return None
    text = (
        "A job of several ranks may be suspended here, and some timeouts of torch and NCCL keep "
        "running meanwhile. How long a suspend lasts is not known."
    )
    fix = "hydroslurm doctor --suspend-s SECONDS: the longest suspend to survive"
    return Finding("clocks", Severity.NOTE, "length of suspends not known", text, fix)


def collectives(facts: Facts) -> Finding | None:
    """The timeout of a process group."""
    suspend_s = facts.suspend_s
    if suspend_s is None or suspend_s < NCCL_TIMEOUT_S:
        return None
    handling = _settings(facts).get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    after = (
        "with TORCH_NCCL_ASYNC_ERROR_HANDLING=0 the ranks would be left hanging forever"
        if handling == "0"
        else "the rank would be aborted right after SIGCONT"
    )
    text = (
        f"{suspend_s:g} s is more than a collective may take ({NCCL_TIMEOUT_S} s with NCCL, "
        f"{GLOO_TIMEOUT_S} s with gloo, unless init_process_group(timeout=) is given). Ranks that "
        "hydroslurm has parked have no collective of gloo or NCCL in flight, so this timeout does "
        "not run. It does "
        "for a rank that was not parked within the suspend grace (its event says that collectives "
        f"were in flight) or is waiting in init_process_group or new_group; {after}."
    )
    fix = f"init_process_group(timeout=timedelta(seconds={_ample(suspend_s)})) for such cases"
    return Finding("clock_collectives", Severity.NOTE, "a suspend outlasts collectives", text, fix)


def nccl_heartbeat(facts: Facts) -> Finding | None:
    """The thread that monitors NCCL's watchdog."""
    settings = _settings(facts)
    limit_s = _seconds(settings, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", NCCL_HEARTBEAT_S)
    suspend_s = facts.suspend_s
    if suspend_s is None or suspend_s < limit_s:
        return None
    if settings.get("TORCH_NCCL_ENABLE_MONITORING") == "0":
        return None
    text = (
        f"With NCCL, torch checks every TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={limit_s:g} s whether its "
        f"watchdog has made progress. This timeout keeps running during the {suspend_s:g} s, even "
        "with nothing in flight. The rank is aborted if the watchdog made no progress between the "
        "last check and the SIGSTOP, within a tenth of a second: rare, but one of many ranks is "
        "enough. Gloo has no such check."
    )
    fix = f"export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={_ample(suspend_s)}"
    return Finding("clock_nccl", Severity.RISK, "a suspend outlasts NCCL's heartbeat", text, fix)


def rendezvous(facts: Facts) -> Finding | None:
    """torchrun's keep-alive between nodes."""
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
            f"Nodes consider each other dead after {limit_s:g} s without a heartbeat. `hydroslurm "
            "agent` does not count the time for which it was stopped."
        )
        return Finding("clock_rendezvous", Severity.OK, "the rendezvous survives a suspend", text)
    text = (
        f"After {limit_s:g} s without a heartbeat (keep_alive_interval * keep_alive_max_attempt) "
        "torchrun's nodes consider each other dead, themselves included. The ranks keep running, "
        "but if one fails later it is not restarted: the job ends at join_timeout."
    )
    attempts = math.ceil(_ample(suspend_s) / max(interval_s, 1))
    fix = f"{_AGENT_WORDS}; or --rdzv-conf keep_alive_max_attempt={attempts}"
    return Finding("clock_rendezvous", Severity.RISK, "no restart after a suspend", text, fix)


def store(facts: Facts) -> Finding | None:
    """Clients that wait for a store while it is stopped."""
    suspend_s = facts.suspend_s
    if suspend_s is None or suspend_s < STORE_READ_S or facts.tasks < 2:
        return None
    text = (
        "A TCPStore has no timeout of its own, and idle connections stay open. But a rank or an "
        "agent that is suspended while it waits for an answer may time out ("
        f"{STORE_READ_S} s in torchrun's rendezvous, the process group's timeout in a rank): ranks "
        "that are starting or creating a group, and agents during the rendezvous (join_timeout, "
        "600 s)."
    )
    title = "a suspend may break a starting job"
    fix = "--rdzv-conf read_timeout=SECONDS,join_timeout=SECONDS if starting jobs are suspended"
    return Finding("clock_store", Severity.NOTE, title, text, fix)


_AGENT_WORDS = "hydroslurm agent instead of torchrun"


def _settings(facts: Facts) -> Mapping[str, str]:
    return facts.script.settings if facts.script else {}


def _seconds(settings: Mapping[str, str], name: str, default_s: float) -> float:
    try:
        return float(settings.get(name, default_s))
    except ValueError:
        return default_s


def _ample(suspend_s: float) -> int:
    return math.ceil(suspend_s) + _MARGIN_S
