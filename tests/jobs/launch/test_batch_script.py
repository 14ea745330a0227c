"""The end of the batch scripts of requeueable jobs: where it stands, and what it does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from sbatchfiles import SBATCH

from hydroslurm.jobs.launch.batch_script import requeue_lines


@pytest.mark.parametrize("name", ["requeue", "multi-node", "torchrun"])
def test_the_scripts_in_sbatch_end_with_these_lines(name: str) -> None:
    """Each names itself and the example that it runs, and bash can read it."""
    path = SBATCH / f"{name}.sbatch"
    text = path.read_text()
    assert text.endswith("\ndone\n\n" + "\n".join(requeue_lines()) + "\n")
    example = "train_run.py" if name == "requeue" else "train_ddp.py"
    assert f"#   sbatch sbatch/{name}.sbatch --epochs 30 " in text
    assert f'examples/{example} "$@" &' in text
    assert (SBATCH.parent / "examples" / example).exists()
    shell = subprocess.run(["bash", "-n", path], timeout=60, check=False)
    assert shell.returncode == 0


SCONTROL = """#!/bin/bash
# Fake scontrol: writes down what it was asked; "show" prints $STATE of job 7, which is an element
# of $ARRAY if that is not empty, and another state of its neighbours; "requeue" prints $ANSWER and
# fails when that is not empty, $TIMES times.
echo "$*" >> "$CALLS"
if [ "$1" = --version ]; then echo "slurm-wlm $VERSION"; exit 0; fi
if [ "$1 $2" = "show partition" ]; then echo "PartitionName=$3 PreemptMode=$MODE"; exit 0; fi
if [ "$2" = show ]; then
    others="JobState=COMPLETING Requeue=1 Restarts=3 PreemptTime=1 BatchFlag=1"
    [ -z "$ARRAY" ] || echo "JobId=5 ArrayJobId=$ARRAY ArrayTaskId=1 JobName=a $others"
    own=${ARRAY:+ArrayJobId=$ARRAY ArrayTaskId=3 }
    echo "JobId=7 ${own}JobName=a JobState=$STATE Requeue=1 Restarts=$RESTARTS BatchFlag=1"
    [ -z "$ARRAY" ] || echo "JobId=6 ArrayJobId=$ARRAY ArrayTaskId=2 JobName=a $others"
    exit 0
fi
n=$(grep -c requeue "$CALLS")
if [ -n "$ANSWER" ] && [ "$n" -le "${TIMES:-99}" ]; then echo "$ANSWER" >&2; exit 1; fi
"""


def requeues_of(tmp_path: Path, status: int, **slurm: str) -> list[str]:
    """Run the lines after ranks that ended with a status, and tell what they had requeued."""
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
            "SLURM_JOB_PARTITION": "low",
            "SLURM_ARRAY_JOB_ID": "2",  # of the array whose element has submitted this job
            "SLURM_ARRAY_TASK_ID": "1",
            "CALLS": str(calls),
            "TIMES": "1",
            **slurm,
        },
        timeout=60,
        check=False,
    )
    assert done.returncode == status
    return [line for line in calls.read_text().splitlines() if line.startswith("requeue")]


@pytest.mark.parametrize("array", ["", "7"])
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
    status: int, state: str, restarts: int, answer: str, requeues: int, array: str, tmp_path: Path
) -> None:
    """75 asks for a requeue until it is granted, was before, or never will be; 143 only inside a
    grace; an attempt that Slurm has replaced never; the status itself is kept. Of the element of an
    array that has the array's number its own record counts, and it alone is requeued."""
    asked = requeues_of(
        tmp_path, status, ARRAY=array, STATE=state, RESTARTS=str(restarts), ANSWER=answer
    )
    assert asked == ["requeue 7_3" if array else "requeue 7"] * requeues


@pytest.mark.parametrize("status", [75, 143])
@pytest.mark.parametrize(
    ("version", "mode", "restarts", "requeues"),
    [
        ("22.05.8", "REQUEUE", "0", 1),
        ("24.02.1", "REQUEUE", "0", 1),
        ("24.11.5", "REQUEUE", "0", 0),
        ("25.11.7", "REQUEUE", "2", 0),
        ("25.11.7", "REQUEUE", "3", 1),
        ("24.11.5", "CANCEL", "0", 1),
        ("26.05.5", "REQUEUE", "0", 1),
    ],
)
def test_what_slurm_requeues_by_itself_is_left_to_it(
    tmp_path: Path, status: int, version: str, mode: str, restarts: str, requeues: int
) -> None:
    """Until it would hold the job instead."""
    state = "RUNNING PreemptTime=2026-11-26T20:03:08"
    told = {"STATE": state, "RESTARTS": restarts, "VERSION": version, "MODE": mode}
    asked = requeues_of(tmp_path, status, **told, ARRAY="", ANSWER="", SLURM_RESTART_COUNT=restarts)
    assert asked == ["requeue 7"] * requeues
