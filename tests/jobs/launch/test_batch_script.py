"""The batch script of a requeueable job: what it says, and what its last lines do."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydroslurm.errors import UsageError
from hydroslurm.jobs.launch.batch_script import (
    MULTI_NODE,
    TORCHRUN,
    RequeueScript,
    requeue_lines,
    requeue_script,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "script", [RequeueScript(), MULTI_NODE, TORCHRUN], ids=lambda script: script.file
)
def test_the_file_in_sbatch_is_the_generated_one(script: RequeueScript) -> None:
    """It is never edited by hand, and names itself and the example that it runs."""
    text = (ROOT / script.file).read_text()
    assert text == requeue_script(script)
    assert f"#   sbatch {script.file} --epochs 30 " in text
    assert f"examples/{script.example} " in script.command
    assert (ROOT / "examples" / script.example).exists()
    shell = subprocess.run(["bash", "-n", ROOT / script.file], timeout=60, check=False)
    assert shell.returncode == 0


def test_several_ranks() -> None:
    """srun is told nodes and tasks, from what this attempt has been given, not from what was asked
    for when the job was submitted."""
    one_each = requeue_script(MULTI_NODE).splitlines()
    assert "#SBATCH --nodes=4" in one_each
    assert not any(line.startswith("#SBATCH --ntasks") for line in one_each)
    assert '    --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\' in one_each
    two_each = requeue_script(replace(MULTI_NODE, tasks_per_node=2)).splitlines()
    assert "#SBATCH --ntasks-per-node=2" in two_each
    assert "#   scontrol update JobId=JOBID NumNodes=N NumTasks=2*N" in two_each
    (line,) = [line for line in two_each if "SLURM_JOB_NUM_NODES" in line]
    assert '--ntasks="$((SLURM_JOB_NUM_NODES * 2))" --ntasks-per-node=2' in line


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
        ({"nodes": 0}, "nodes=0"),
        ({"tasks_per_node": 2.0}, "tasks_per_node=2.0"),
    ],
)
def test_values_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    """A warning that is longer than the limit, or no time at all."""
    with pytest.raises(UsageError, match=words):
        RequeueScript(**options)


SCONTROL = """#!/bin/bash
# Fake scontrol: writes down what it was asked; "show" prints $STATE, "requeue" prints $ANSWER and
# fails when that is not empty, $TIMES times.
echo "$*" >> "$CALLS"
state="JobId=7 JobState=$STATE Requeue=1 Restarts=$RESTARTS BatchFlag=1"
if [ "$1" = show ]; then echo "$state"; exit 0; fi
n=$(grep -c requeue "$CALLS")
if [ -n "$ANSWER" ] && [ "$n" -le "${TIMES:-99}" ]; then echo "$ANSWER" >&2; exit 1; fi
"""


@pytest.mark.parametrize(
    ("status", "state", "restarts", "answer", "requeues"),
    [
        (75, "RUNNING", 0, "", 1),
        (75, "RUNNING", 0, "Job is pending execution", 1),
        (75, "RUNNING", 0, "Unable to contact slurm controller", 2),
        (75, "RUNNING", 0, "Requested operation is presently disabled for job 7", 1),
        (75, "RUNNING", 1, "", 0),
        (75, "COMPLETING Reason=TimeLimit", 1, "", 0),
        (143, "RUNNING", 0, "", 1),
        (143, "RUNNING", 10, "", 0),
        (143, "COMPLETING", 0, "", 0),
        (0, "RUNNING", 0, "", 0),
        (1, "RUNNING", 0, "", 0),
        (93, "RUNNING", 0, "", 0),
    ],
)
def test_the_status_of_the_ranks_becomes_a_requeue(
    status: int, state: str, restarts: int, answer: str, requeues: int, tmp_path: Path
) -> None:
    """75 asks for a requeue until it is granted, was before, or never will be; 143 only inside a
    grace; an attempt that Slurm has replaced never; the status itself is kept."""
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
            "RESTARTS": str(restarts),
            "ANSWER": answer,
            "TIMES": "1",
        },
        timeout=60,
        check=False,
    )
    assert done.returncode == status
    assert calls.read_text().count("requeue 7") == requeues
