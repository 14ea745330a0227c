"""A process reads from its variables where in which job it is."""

from __future__ import annotations

import pytest

from hydroslurm.errors import UsageError
from hydroslurm.slurm.allocation import Allocation

# what Slurm 22.05.8 sets for a rank of `srun` in a requeued task of an array
RANK = {
    "SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "0",
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NAME": "sweep", "SLURM_JOB_PARTITION": "low",
    "SLURM_SUBMIT_DIR": "/home/ada", "SLURM_CLUSTER_NAME": "probe",
}  # fmt: skip


def test_a_rank() -> None:
    """A task of srun knows its rank, its world (of the step, not of the job) and its nodes."""
    assert Allocation.from_environ(RANK) == Allocation(
        job_id=15,
        step_id=0,
        rank=3,
        local_rank=1,
        world_size=4,
        node_rank=1,
        nodes=("n1", "n2"),
        restart_count=2,
        submit_dir="/home/ada",
        cluster_name="probe",
    )


@pytest.mark.parametrize("step_id", [None, "-5", "4294967291"])
def test_batch_shell_is_a_world_of_its_own(step_id: str | None) -> None:
    """sbatch sets SLURM_NTASKS and SLURM_PROCID for the batch shell, and since 26.05 a
    SLURM_STEP_ID that is no step's, as salloc does for its shell: one process all the same. A first
    attempt has no restart count."""
    names = [name for name in RANK if not name.startswith(("SLURM_STEP", "SLURM_RESTART"))]
    batch = {name: RANK[name] for name in names}
    if step_id is not None:
        batch["SLURM_STEP_ID"] = step_id
    allocation = Allocation.from_environ(batch)
    assert allocation is not None
    assert (allocation.step_id, allocation.rank, allocation.world_size) == (None, 0, 1)
    assert allocation.nodes == ("n1", "n2", "n3", "n4")
    assert allocation.restart_count == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_JOB_ID", "0"),
        ("SLURM_JOB_ID", "15_0"),
        ("SLURM_PROCID", "-1"),
        ("SLURM_PROCID", "٣"),
        ("SLURM_PROCID", "4"),
        ("SLURM_STEP_ID", "batch"),
        ("SLURM_STEP_NODELIST", "n[1-"),
    ],
)
def test_bad_values_are_named(name: str, value: str) -> None:
    """A value that Slurm never sets is refused, and the message names the variable."""
    with pytest.raises(UsageError, match=name):
        Allocation.from_environ(RANK | {name: value})
