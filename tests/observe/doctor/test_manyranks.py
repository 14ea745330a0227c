"""The judgement on jobs of several ranks, and on long suspends; settings made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hydroslurm.errors import UsageError
from hydroslurm.observe.doctor.facts import Facts, Finding, Severity
from hydroslurm.observe.doctor.findings import diagnose
from hydroslurm.observe.doctor.gather import read_file
from hydroslurm.observe.doctor.script import ScriptOptions, read_script
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.limit_warning import LimitWarning
from hydroslurm.slurm.policy import site_policy
from hydroslurm.slurm.values import Partition

URGENT = Partition(name="urgent", priority_tier=10, nodes=("n1",))
SCRIPT = ScriptOptions(warning=LimitWarning("URG", 120), appends=True, tasks=4)


def _facts(
    script: ScriptOptions | None = SCRIPT,
    *,
    suspend_s: float | None = None,
    mode: str = "REQUEUE",
    **settings: str,
) -> Facts:
    gang = {"PreemptMode": "GANG,SUSPEND"} if mode == "SUSPEND" else {}
    config = Config(
        {
            "SLURM_VERSION": "22.05.8",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "KillWait": "30 sec",
            "ProctrackType": "proctrack/linuxproc",
            **gang,
            **settings,
        }
    )
    low = Partition(name="low", preempt_mode=mode, grace_time_s=60, nodes=("n1",))
    policy = site_policy(config, low, partitions=(low, URGENT))
    return Facts(config=config, policy=policy, partition=low, script=script, suspend_s=suspend_s)


def _found(facts: Facts) -> dict[str, Finding]:
    return {finding.key: finding for finding in diagnose(facts)}


TORCHRUN = replace(SCRIPT, launcher="torchrun")
AGENT = replace(SCRIPT, has_agent=True)


@pytest.mark.parametrize(
    ("facts", "key", "severity", "fix"),
    [
        (_facts(TORCHRUN), "launcher", Severity.RISK, "hydroslurm agent --"),
        (
            _facts(TORCHRUN, ProctrackType="proctrack/cgroup"),
            "reach",
            Severity.LOSS,
            "hydroslurm agent --",
        ),
        (
            _facts(replace(SCRIPT, outlives_ranks=True)),
            "bad_exit",
            Severity.RISK,
            "--kill-on-bad-exit=1",
        ),
        (
            _facts(replace(SCRIPT, outlives_nodes=True)),
            "no_kill",
            Severity.RISK,
            "no --no-kill",
        ),
        (
            _facts(replace(SCRIPT, fixed_port="29500")),
            "port",
            Severity.RISK,
            "set_torch_environment",
        ),
        (
            _facts(SLURM_VERSION="26.05.3", MpiDefault="pmix_v4"),
            "pmix",
            Severity.NOTE,
            "--mpi=none",
        ),
        (
            _facts(replace(SCRIPT, mpi="pmix"), SLURM_VERSION="26.11.0", MpiDefault="none"),
            "pmix",
            Severity.NOTE,
            "--mpi=none",
        ),
        (_facts(mode="SUSPEND"), "clocks", Severity.NOTE, "--suspend-s"),
        (_facts(suspend_s=700), "clock_collectives", Severity.NOTE, "timedelta(seconds=760)"),
        (
            _facts(suspend_s=500),
            "clock_nccl",
            Severity.RISK,
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=560",
        ),
        (
            _facts(TORCHRUN, suspend_s=20),
            "clock_rendezvous",
            Severity.RISK,
            "keep_alive_max_attempt=16",
        ),
        (_facts(AGENT, suspend_s=20), "clock_rendezvous", Severity.OK, ""),
        (_facts(suspend_s=61), "clock_store", Severity.NOTE, "read_timeout"),
    ],
)
def test_what_is_risky(facts: Facts, key: str, severity: Severity, fix: str) -> None:
    """Each risk of several ranks is found, with what would change it."""
    finding = _found(facts)[key]
    assert finding.severity is severity
    assert fix in finding.fix
    assert finding.explanation.endswith(".")


@pytest.mark.parametrize(
    ("facts", "key"),
    [
        (_facts(TORCHRUN, ProctrackType="proctrack/cgroup"), "launcher"),
        (_facts(AGENT), "launcher"),
        (_facts(replace(SCRIPT, outlives_ranks=True, tasks=1)), "bad_exit"),
        (_facts(replace(SCRIPT, outlives_ranks=True), KillOnBadExit="1"), "bad_exit"),
        (_facts(), "no_kill"),
        (_facts(replace(SCRIPT, outlives_nodes=True, tasks=1)), "no_kill"),
        (_facts(replace(SCRIPT, fixed_port="29500"), JobRequeue="0"), "port"),
        (_facts(SLURM_VERSION="25.11.7", MpiDefault="pmix"), "pmix"),
        (_facts(SLURM_VERSION="26.05.3", MpiDefault="none"), "pmix"),
        (_facts(replace(SCRIPT, tasks=1), SLURM_VERSION="26.05.3", MpiDefault="pmix"), "pmix"),
        (_facts(replace(SCRIPT, mpi="other"), SLURM_VERSION="26.05.3", MpiDefault="pmix"), "pmix"),
        (_facts(), "clocks"),
        (_facts(mode="SUSPEND", suspend_s=5), "clocks"),
        (_facts(replace(SCRIPT, tasks=1), mode="SUSPEND"), "clocks"),
        (_facts(suspend_s=599), "clock_collectives"),
        (_facts(suspend_s=479), "clock_nccl"),
        (_facts(TORCHRUN, suspend_s=14), "clock_rendezvous"),
        (_facts(suspend_s=3600), "clock_rendezvous"),
        (_facts(suspend_s=59), "clock_store"),
        *(
            (_facts(replace(SCRIPT, settings=settings), suspend_s=900), "clock_nccl")
            for settings in (
                {"TORCH_NCCL_ENABLE_MONITORING": "0"},
                {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800"},
            )
        ),
    ],
)
def test_what_is_not_said(facts: Facts, key: str) -> None:
    """Where a thing does no harm, nothing is said of it."""
    assert key not in _found(facts)


def test_errors_that_are_not_handled() -> None:
    """With TORCH_NCCL_ASYNC_ERROR_HANDLING=0 a collective that ran out hangs instead."""
    script = replace(SCRIPT, settings={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    words = _found(_facts(script, suspend_s=700))["clock_collectives"].explanation
    assert "hanging forever" in words


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("#SBATCH --nodes=2 --ntasks-per-node=4", ScriptOptions(tasks=8)),
        ("#SBATCH -N2\n#SBATCH -n 6", ScriptOptions(tasks=6)),
        ("#SBATCH -N 2-4", ScriptOptions(tasks=2)),
        ("#SBATCH --no-kill --nodes=2", ScriptOptions(tasks=2, outlives_nodes=True)),
        ("#SBATCH -k\n#SBATCH -N2", ScriptOptions(tasks=2, outlives_nodes=True)),
        ("#SBATCH --no-kill=off", ScriptOptions()),
        ("  srun python a.py", ScriptOptions(outlives_ranks=True)),
        ("srun -K1 python a.py", ScriptOptions()),
        ("srun -K0 python a.py", ScriptOptions(outlives_ranks=True)),
        ("srun --kill-on-bad-exit=0 python a.py", ScriptOptions(outlives_ranks=True)),
        ("srun --unbuffered \\\n  --kill-on-bad-exit python a.py", ScriptOptions()),
        ("srun -K hydroslurm agent -- --nproc-per-node=8 a.py", ScriptOptions(has_agent=True)),
        (
            "export SLURM_KILL_BAD_EXIT=1\nsrun python a.py",
            ScriptOptions(settings={"SLURM_KILL_BAD_EXIT": "1"}),
        ),
        ("srun -K --mpi=pmix_v4 python a.py", ScriptOptions(mpi="pmix")),
        ("srun -K --mpi none python a.py", ScriptOptions(mpi="other")),
        ("export MASTER_PORT=29500", ScriptOptions(fixed_port="29500")),
        ("export MASTER_PORT=$((20000 + SLURM_JOB_ID % 1000))", ScriptOptions()),
        (
            "srun -K torchrun --rdzv-endpoint=$HOST:29400 a.py",
            ScriptOptions(launcher="torchrun", fixed_port="29400"),
        ),
        ("srun -K torchrun --rdzv-endpoint=$HOST:0 a.py", ScriptOptions(launcher="torchrun")),
        (
            "torchrun --rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=9 a.py",
            ScriptOptions(
                launcher="torchrun",
                settings={"keep_alive_interval": "1", "keep_alive_max_attempt": "9"},
            ),
        ),
        (
            "export TORCH_NCCL_ENABLE_MONITORING=0 # why",
            ScriptOptions(settings={"TORCH_NCCL_ENABLE_MONITORING": "0"}),
        ),
    ],
)
def test_batch_script(line: str, expected: ScriptOptions) -> None:
    """How many tasks there are, who starts them, and what is set for them."""
    assert read_script(f"#!/bin/bash\n{line}\n") == expected


def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    """A wrong --script is a usage error that names it."""
    with pytest.raises(UsageError, match=r"nothing\.sbatch"):
        read_file(tmp_path / "nothing.sbatch")


def test_how_ranks_get_their_key() -> None:
    """With MUNGE it is well; without it the reason is told, and what helps; one rank needs none."""
    facts = _facts()
    assert "ranks_key" not in _found(facts)
    assert _found(replace(facts, no_munge=""))["ranks_key"].severity is Severity.OK
    found = _found(replace(facts, no_munge="Failed to access socket"))["ranks_key"]
    assert found.severity is Severity.NOTE
    assert "Failed to access socket" in found.explanation
    assert "srun --preempt" in found.fix
    alone = replace(_facts(replace(SCRIPT, tasks=1)), no_munge="none")
    assert "ranks_key" not in _found(alone)
