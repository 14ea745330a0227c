"""What Slurm makes of a job that leaves inside the grace of its preemption: by release, by what it
leaves with, and by PreemptMode. :mod:`hydroslurm.slurm.stops` acts on this table; two trainings
show that each then runs exactly once more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from clusters import require_slurm
from processes import captured, wait_until

from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.programs import find_programs, search_path
from hydroslurm.slurm.spank.build import slurm_release

pytestmark = [pytest.mark.slurm, pytest.mark.slurms]

LEAVE = {"exit 0": "exit 0", "exit 75": "exit 75", "exit 1": "exit 1"}
REQUEUE = {
    "requeue, exit 75": "scontrol requeue $SLURM_JOB_ID; exit 75",
    "requeue, stay": "scontrol requeue $SLURM_JOB_ID; sleep 60",
}
WAYS = {**LEAVE, **REQUEUE, "training": ""}
MODES = {"REQUEUE": "low", "CANCEL": "cancel"}
"""PreemptMode -> its partition."""
JOBS = [(mode, way) for mode in MODES for way in WAYS]
TWO_CALLS = Path(__file__).parents[2] / "tests" / "recorded" / "train_two_calls.py"

ATTEMPT = """\
#!/bin/bash
echo begin >>{log}
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then sleep 1; exit 0; fi
trap 'echo left >>{log}; trap "" TERM; {leave}' TERM
while :; do sleep 0.1; done
"""
TRAINING = """\
#!/bin/bash
echo begin >>{log}
exec {python} {script} --epochs 8 --batch-size 16 --think-s 0.02 --out {log}.json
"""
BATCH = """\
#!/bin/bash
trap '' TERM
exec {verb} srun --quiet {attempt}
"""


def release() -> tuple[int, int]:
    return slurm_release(find_programs(search_path(os.environ.get("PATH")))["sinfo"], os.environ)


def expected_attempts(mode: str, way: str) -> int:
    """How often such a job is started, by what was measured on 22.05.8, 24.11.5 and 26.05.5."""
    if way == "training":
        return 2
    if way in REQUEUE:
        # GRACE_PREEMPT stays set over a requeue, and the next end is taken for that of the grace
        again = (24, 5) <= release() < (26, 5) and mode == "REQUEUE"
        return 3 if again else 2
    return 2 if mode == "REQUEUE" and release() >= (24, 5) else 1


def _partitions(jobs: list[tuple[str, str]]) -> str:
    """Of each PreemptMode one whose jobs get a grace of 60 s, and one that preempts them all."""
    nodes = ",".join(f"n{number}" for number in range(1, len(jobs) + 1))
    common = f"Nodes={nodes} MaxTime=INFINITE DefaultTime=01:00:00 State=UP PriorityTier"
    return f"""PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low {common}=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=cancel {common}=1 PreemptMode=CANCEL GraceTime=60
PartitionName=urgent {common}=10 PreemptMode=OFF
"""


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], int]:
    return started(JOBS, tmp_path_factory.mktemp("grace"))


def started(
    jobs: list[tuple[str, str]], base: Path, *, settings: str = ""
) -> dict[tuple[str, str], int]:
    """How often each job was started: all are preempted at once, and watched to their last end, or
    until Slurm holds them."""
    require_slurm()
    spec = ClusterSpec(
        nodes=len(jobs), cpus_per_node=1, kill_wait_s=10, partitions=settings + _partitions(jobs)
    )
    with DevCluster.up(spec) as cluster:
        environ = cluster.child_environ({**os.environ, "OMP_NUM_THREADS": "1"})

        def slurm(*words: str) -> str:
            done = captured(words, env=environ, cwd=base, timeout=120)
            assert done.returncode == 0, done.stderr
            return done.stdout

        logs = {job: base / f"{job[0]}-{job[1]}".replace(" ", "-") for job in jobs}
        for number, ((mode, way), log) in enumerate(logs.items(), 1):
            fields = {"log": log, "leave": WAYS[way], "python": sys.executable, "script": TWO_CALLS}
            attempt, batch = log.with_suffix(".attempt"), log.with_suffix(".sbatch")
            attempt.write_text((TRAINING if way == "training" else ATTEMPT).format(**fields))
            attempt.chmod(0o755)
            verb = "hydroslurm batch --" if way == "training" else ""
            batch.write_text(BATCH.format(verb=verb, attempt=attempt))
            where = (f"--partition={MODES[mode]}", f"--nodelist=n{number}", f"--output={log}.out")
            slurm("sbatch", *where, "--requeue", "--open-mode=append", str(batch))
        trainings = [Path(f"{log}.out") for (_, way), log in logs.items() if way == "training"]
        wait_until(lambda: all(log.exists() for log in logs.values()), "all jobs run")
        wait_until(lambda: all(map(_has_begun, trainings)), "the trainings have begun")
        for number in range(1, len(jobs) + 1):
            words = ("--partition=urgent", f"--nodelist=n{number}", "--output=/dev/null")
            slurm("sbatch", *words, "--wrap=sleep 3")
        wait_until(
            lambda: all("held" in line for line in slurm("squeue", "-h", "-o%r").splitlines()),
            lambda: f"the last job ends; left:\n{slurm('squeue')}",
            limit_s=300,
        )
        return {job: log.read_text().count("begin") for job, log in logs.items()}


def _has_begun(output: Path) -> bool:
    return output.exists() and "begins at step" in output.read_text()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_a_job_that_leaves_in_its_grace_is_started(
    attempts: dict[tuple[str, str], int], mode: str, way: str
) -> None:
    assert attempts[mode, way] == expected_attempts(mode, way)


def test_a_training_is_not_held(tmp_path: Path) -> None:
    """Slurm counts what leaves as a failed launch; with MaxBatchRequeue=1 it holds such a job at
    its first preemption, as by default at its fifth. A training asks for its requeue before."""
    if release() < (24, 5):
        pytest.skip("Slurm requeues what leaves since 24.05")
    held, training = ("REQUEUE", "exit 75"), ("REQUEUE", "training")
    starts = started([held, training], tmp_path, settings="MaxBatchRequeue=1\n")
    assert starts[held] == 1
    assert starts[training] == 2
