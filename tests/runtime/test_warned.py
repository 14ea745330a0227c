"""SIGUSR1 of a job's --signal, in a process whose Slurm cannot be read at first."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from processes import child

WAITING = """
import torch, hydroslurm
told = hydroslurm.receive_suspend_command()
print("ready")
while not hydroslurm.receive_suspend_command():
    torch.ones(1) + 1
print("stop")
"""
SCONTROL = """#!/bin/bash
# Fake scontrol: the first description of the job is none; then it ends in a hundred seconds.
case "$*" in
*"batch_script"*) printf '#!/bin/sh\\n#SBATCH --signal=USR1@90\\n' ;;
*"show job"*) if mkdir "$0.asked" 2>/dev/null; then echo nonsense; else cat "$0.job"; fi ;;
esac
"""


def test_slurm_is_asked_again_whether_a_signal_warns_of_the_time_limit(tmp_path: Path) -> None:
    """Taken for a person's pause, it would park the rank until its time limit kills it."""
    recorded = Path(__file__).parents[1] / "slurm/recorded/22.05/stops/asked.txt"
    job = recorded.read_text().replace("JobId=5 ", "JobId=1 ")
    ends = int(time.time()) + 100
    (tmp_path / "scontrol.job").write_text(job.replace("EndTime=1795271471", f"EndTime={ends}"))
    for name, text in (("scontrol", SCONTROL), ("sacct", "#!/bin/sh\necho sbatch job.sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "HYDROSLURM_RUN_DIR": str(tmp_path / "run"),
    }
    with child(WAITING, tmp_path, environ=environ) as rank:
        rank.expect("ready")
        os.kill(rank.pid, signal.SIGUSR1)
        rank.expect("hydroslurm: SIGUSR1 is the job's --signal, no pause or resume: its time limit")
        rank.expect("stop")
