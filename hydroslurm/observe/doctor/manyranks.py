"""Risks of jobs with several ranks, each with the setting that prevents it. Pure."""

from __future__ import annotations

from hydroslurm.observe.doctor.facts import Facts, Finding, Severity

AGENT_FIX = "srun --ntasks-per-node=1 --kill-on-bad-exit=1 hydroslurm agent -- TORCHRUN_ARGUMENTS"


def launcher_is_a_task(facts: Facts) -> Finding | None:
    """Signals to all processes also reach torchrun; ``risks.ranks_out_of_reach`` is about those
    that do not."""
    launcher = facts.script.launcher if facts.script else ""
    if not launcher or not facts.config.signals_children:
        return None
    text = (
        f"{launcher} starts the ranks and gets every signal that they get. SIGUSR1 and SIGUSR2 "
        "(hydroslurm pause) kill it. At SIGTERM it terminates the ranks itself, with SIGKILL 30 s "
        "later; and when the first rank has saved and exited, it kills those that are still "
        "saving, and restarts them all if it has restarts left."
    )
    return Finding("launcher", Severity.RISK, f"{launcher} gets the signals", text, AGENT_FIX)


def ranks_outlive_a_failure(facts: Facts) -> Finding | None:
    """By default srun waits for all tasks, even when one has failed."""
    script = facts.script
    if script is None or not script.outlives_ranks or script.tasks < 2:
        return None
    if facts.config.get("KillOnBadExit", "0") == "1":
        return None
    text = (
        "srun without --kill-on-bad-exit: when a rank dies, the others wait for it in a "
        "collective (10 to 30 minutes by torch's defaults) and keep the nodes. If it dies before "
        "the rendezvous, they wait even longer."
    )
    fix = "srun --kill-on-bad-exit=1 (slurm.conf: KillOnBadExit=1 makes it the default)"
    return Finding("bad_exit", Severity.RISK, "ranks wait for one that died", text, fix)


def dead_node_is_no_requeue(facts: Facts) -> Finding | None:
    """Seen on 22.05.8; tests/integration/elastic/test_fixed_size.py has all three ways."""
    script = facts.script
    if script is None or not script.outlives_nodes or script.tasks < 2:
        return None
    text = (
        "sbatch --no-kill: when a node dies, Slurm does not requeue the job. It kills the ranks on "
        "the other nodes, and the job fails; if srun has --no-kill, too, they wait for the dead "
        "one in a collective (10 to 30 minutes by torch's defaults) and keep the nodes."
    )
    fix = (
        "no --no-kill: Slurm then requeues the job, and it goes on from its newest checkpoint; or "
        "an elastic job (docs/elastic.md), whose other nodes train on"
    )
    return Finding("no_kill", Severity.RISK, "a dead node ends the job", text, fix)


def failure_looks_like_a_stop(facts: Facts) -> Finding | None:
    """From 26.05 on, mpi/pmix sends SIG_TERM_KILL; earlier releases send SIGKILL."""
    if facts.tasks < 2 or facts.config.version < (26, 5):
        return None
    asked = facts.script.mpi if facts.script else ""
    default = facts.config.get("MpiDefault", "")
    if not (asked or default).startswith("pmix"):
        return None
    where = "srun --mpi=pmix" if asked else f"MpiDefault={default}"
    text = (
        f"{where}: when a rank fails, Slurm {_release(facts)} sends SIGTERM to all others, as in a "
        "preemption, and SIGKILL after KillWait. hydroslurm.Run asks Slurm, recognizes the failure "
        "and does not requeue; other code that saves at SIGTERM may not."
    )
    fix = "srun --mpi=none: torch needs no PMI"
    return Finding("pmix", Severity.NOTE, "a failed rank sends SIGTERM", text, fix)


def port_of_an_earlier_attempt(facts: Facts) -> Finding | None:
    """A rendezvous port that stays the same in every attempt."""
    script = facts.script
    if script is None or not script.fixed_port or not facts.policy.may_requeue:
        return None
    text = (
        f"The rendezvous port is fixed ({script.fixed_port}), and the job may be requeued: a rank "
        "of the new attempt may connect to one of the previous attempt that is still running, or "
        "to another job on the same node, or find the port in use."
    )
    fix = (
        "no MASTER_PORT in the script: hydroslurm.set_torch_environment() in the ranks, or "
        "hydroslurm agent without --rdzv-endpoint, derives it from job id and restart count"
    )
    return Finding("port", Severity.RISK, "the port of earlier attempts", text, fix)


def how_ranks_prove_themselves(facts: Facts) -> Finding | None:
    """Ranks connect only with a shared key; see ``docs/security.md``."""
    if facts.tasks < 2 or facts.no_munge is None:
        return None
    given = "srun --preempt, job specs and hydroslurm agent give the ranks a key"
    if not facts.no_munge:
        text = f"{given}; with plain srun they use MUNGE, which works on this machine."
        return Finding("ranks_key", Severity.OK, "ranks authenticate each other", text)
    text = (
        f"{given}. With plain srun they would use MUNGE, which does not work on this machine "
        f"({facts.no_munge}); then the key is a file in the run folder, which all nodes must be "
        "able to see. Without a key the ranks do not connect: each pauses and stops on its own."
    )
    fix = "srun --preempt; or export HYDROSLURM_STEP_KEY=$(openssl rand -hex 32) before srun"
    return Finding("ranks_key", Severity.NOTE, "no MUNGE for the ranks' key", text, fix)


def _release(facts: Facts) -> str:
    year, month, *_ = facts.config.version
    return f"{year}.{month:02d}"
