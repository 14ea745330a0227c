"""The batch script of a requeueable job: what it says, and what its last lines do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hydroslurm.errors import UsageError
from hydroslurm.launch.batchscript import RequeueScript, requeue_lines, requeue_script

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_in_sbatch_is_the_generated_one() -> None:
    """sbatch/requeue.sbatch is never edited by hand."""
    assert (ROOT / "sbatch" / "requeue.sbatch").read_text() == requeue_script()


def test_values_reach_the_script() -> None:
    """Every field stands where Slurm reads it."""
    text = requeue_script(
        RequeueScript(
            command="python train.py",
            job_name="big",
            partition="spot",
            time_min=150,
            warning_s=300,
            cpus_per_task=8,
        )
    )
    for line in (
        "#SBATCH --job-name=big",
        "#SBATCH --partition=spot",
        "#SBATCH --time=02:30:00",
        "#SBATCH --signal=URG@300",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --open-mode=append",
        "    python train.py &",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"time_min": 0}, "time_min=0"),
        ({"warning_s": 1800, "time_min": 30}, "at the start"),
        ({"cpus_per_task": True}, "cpus_per_task=True"),
    ],
)
def test_values_that_make_no_sense_are_refused(options: dict[str, int], words: str) -> None:
    """A warning that is longer than the limit, or no time at all."""
    with pytest.raises(UsageError, match=words):
        RequeueScript(**options)  # type: ignore[arg-type]


SCONTROL = """#!/bin/bash
# Fake scontrol: writes down what it was asked; "show" prints $STATE, "requeue" prints $ANSWER and
# fails when that is not empty, $TIMES times.
echo "$*" >> "$CALLS"
if [ "$1" = show ]; then echo "JobId=7 JobState=$STATE"; exit 0; fi
n=$(grep -c requeue "$CALLS")
if [ -n "$ANSWER" ] && [ "$n" -le "${TIMES:-99}" ]; then echo "$ANSWER" >&2; exit 1; fi
"""


@pytest.mark.parametrize(
    ("status", "state", "answer", "requeues"),
    [
        (75, "RUNNING", "", 1),
        (75, "RUNNING", "Job is pending execution", 1),
        (75, "RUNNING", "Unable to contact slurm controller", 2),
        (143, "RUNNING", "", 1),
        (143, "COMPLETING", "", 0),
        (0, "RUNNING", "", 0),
        (1, "RUNNING", "", 0),
        (93, "RUNNING", "", 0),
    ],
)
def test_the_status_of_the_ranks_becomes_a_requeue(
    status: int, state: str, answer: str, requeues: int, tmp_path: Path
) -> None:
    """75 asks for a requeue until it is granted or was before; 143 only inside a grace; the status
    itself is kept."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()
    script = "\n".join(["set -uo pipefail", f"status={status}", *requeue_lines()])
    done = subprocess.run(
        ["bash", "-c", script],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "CALLS": str(calls),
            "STATE": state,
            "ANSWER": answer,
            "TIMES": "1",
        },
        timeout=60,
        check=False,
    )
    assert done.returncode == status
    assert calls.read_text().count("requeue 7") == requeues
