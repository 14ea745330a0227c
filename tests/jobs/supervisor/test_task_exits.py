"""How tasks have ended, from srun's own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.jobs.supervisor.job_step import task_ends

RECORDED = Path(__file__).parent / "srun-22.05.8.txt"


def test_a_recorded_step() -> None:
    """Six tasks: one well, two with a status, three by signals; one of those by our own SIGTERM to
    srun."""
    ends = [end for line in RECORDED.read_text().splitlines() for end in task_ends(line)]
    assert ends == [(1, 3), (5, 3), (2, 143), (3, 139), (0, 0), (4, 137)]


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("srun: error: n[1-2]: tasks 0-1,3: Exited with exit code 1", [(0, 1), (1, 1), (3, 1)]),
        ("srun: error: gpu-01: task 7: Segmentation fault (core dumped)", [(7, 139)]),
        ("srun: error: n1: task 0: Out Of Memory", [(0, 137)]),
        ("srun: error: n1: task 0: User defined signal 1", [(0, 138)]),
        ("srun: launch/slurm: _task_finish: n1: task 0: Completed", [(0, 0)]),
        ("srun: n1: tasks 0-2: Completed", [(0, 0), (1, 0), (2, 0)]),
        ("srun: error: Unable to create step for job 5: Job/step already completing", []),
        ("srun: launching StepId=13.0 on host n1, 2 tasks: [0-1]", []),
        ("what a task prints: n1: task 0: Killed", []),
    ],
)
def test_lines(line: str, ends: list[tuple[int, int]]) -> None:
    """Each form, and what is none."""
    assert list(task_ends(line)) == ends
