"""What may go wrong with jobs of several ranks, each with the line that would change it. Pure."""

from __future__ import annotations

from hydroslurm.observe.doctor.facts import Facts, Finding, Severity

AGENT_FIX = "srun --ntasks-per-node=1 --kill-on-bad-exit=1 hydroslurm agent -- TORCHRUN_ARGUMENTS"


def launcher_is_a_task(facts: Facts) -> Finding | None:
    """Where signals reach all processes, they reach torchrun too. See ``risks.ranks_out_of_reach``
    for where they do not."""
    launcher = facts.script.launcher if facts.script else ""
    if not launcher or not facts.policy.signals_children:
        return None
    text = (
        f"The ranks are started by {launcher}, which gets every signal that they get, and dies of "
        "SIGUSR1 and SIGUSR2 (hydroslurm pause). SIGTERM makes it end the ranks itself, with "
        "SIGKILL 30 s later; and when the first rank has saved and left, it ends those that are "
        "still saving, and starts all of them again where restarts are left."
    )
    return Finding("launcher", Severity.RISK, f"{launcher} gets the signals", text, AGENT_FIX)


def ranks_outlive_a_failure(facts: Facts) -> Finding | None:
    """srun waits for all tasks, whatever becomes of one."""
    script = facts.script
    if script is None or not script.outlives_ranks or script.tasks < 2:
        return None
    if facts.config.get("KillOnBadExit", "0") == "1":
        return None
    text = (
        "srun without --kill-on-bad-exit: when a rank dies, the others wait for it in a "
        "collective, 10 to 30 minutes by torch's defaults, and keep the nodes meanwhile. For a "
        "rank that dies before it has joined the others they wait even longer."
    )
    fix = "srun --kill-on-bad-exit=1 (slurm.conf: KillOnBadExit=1 makes it the default)"
    return Finding("bad_exit", Severity.RISK, "a dead rank leaves the others waiting", text, fix)


def failure_looks_like_a_stop(facts: Facts) -> Finding | None:
    """Of 26.05 and later: mpi/pmix sends SIG_TERM_KILL, and before it sent SIGKILL."""
    if facts.tasks < 2 or facts.config.version < (26, 5):
        return None
    asked = facts.script.mpi if facts.script else ""
    default = facts.config.get("MpiDefault", "")
    if not (asked or default).startswith("pmix"):
        return None
    where = "srun --mpi=pmix" if asked else f"MpiDefault={default}"
    text = (
        f"{where}: when a rank fails, Slurm {_release(facts)} sends SIGTERM to all others, as a "
        "preemption does, and SIGKILL KillWait later. A Run asks Slurm, recognizes the failure "
        "and requeues nothing; other code that saves at SIGTERM may not."
    )
    fix = "srun --mpi=none: torch needs no PMI"
    return Finding("pmix", Severity.NOTE, "a failed rank sends SIGTERM", text, fix)


def port_of_an_earlier_attempt(facts: Facts) -> Finding | None:
    """Find a rendezvous port that is the same in every attempt of a job."""
    script = facts.script
    if script is None or not script.fixed_port or not facts.policy.may_requeue:
        return None
    text = (
        f"The rendezvous port is fixed ({script.fixed_port}), and the job may be requeued: a rank "
        "of the new attempt may connect to one of the previous attempt that has not ended yet, or "
        "to another job on the same node, or find the port still taken."
    )
    fix = (
        "no MASTER_PORT in the script: hydroslurm.set_torch_environment() in the ranks, or "
        "hydroslurm agent without --rdzv-endpoint, take the job id and the restart count into it"
    )
    return Finding("port", Severity.RISK, "a port of earlier attempts", text, fix)


def how_ranks_prove_themselves(facts: Facts) -> Finding | None:
    """Ranks connect only with a key that they share; see ``docs/security.md``."""
    if facts.tasks < 2 or facts.no_munge is None:
        return None
    given = "srun --preempt, job specs and hydroslurm agent give the ranks a key of their own"
    if not facts.no_munge:
        text = f"{given}; MUNGE, which answers on this machine, gives one to those of plain srun."
        return Finding("ranks_key", Severity.OK, "ranks prove who they are", text)
    text = (
        f"{given}. Those of plain srun would take theirs from MUNGE, which does not answer on this "
        f"machine ({facts.no_munge}); what is left is a file in the run folder, which all nodes "
        "have to see. Without a key each rank pauses and stops on its own."
    )
    fix = "srun --preempt; or export HYDROSLURM_STEP_KEY=$(openssl rand -hex 32) before srun"
    return Finding("ranks_key", Severity.NOTE, "no MUNGE for the ranks' key", text, fix)


def _release(facts: Facts) -> str:
    year, month, *_ = facts.config.version
    return f"{year}.{month:02d}"
