"""The batch scripts of jobs that stop, save and are requeued. Pure: values in, text out.

``sbatch/requeue.sbatch`` is what :func:`requeue_script` gives for its defaults; a test compares the
two. ``hydroslurm submit`` and the executor use :func:`requeue_lines` in submitit's script.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from hydroslurm.errors import UsageError
from hydroslurm.exitcodes import CANCELLED, RUN_AGAIN


@dataclass(frozen=True)
class RequeueScript:
    """What differs between two such scripts.

    Attributes:
        command: what srun starts: words of a shell command, ``"$PYTHON"`` and ``"$@"`` allowed.
        job_name, partition: for sbatch.
        time_min: the time limit of one life.
        warning_s: how long before the time limit the ranks are warned. Slurm may be up to 60 s
            early, never late.
        cpus_per_task: for sbatch and, because of 22.05 to 23.02, for srun.
    """

    command: str = '"$PYTHON" -u examples/train_run.py "$@"'
    job_name: str = "requeueable"
    partition: str = "low"
    time_min: int = 30
    warning_s: int = 120
    cpus_per_task: int = 1

    def __post_init__(self) -> None:
        for name, least in (("time_min", 1), ("warning_s", 1), ("cpus_per_task", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}={value!r}: wanted a whole number of {least} or more")
        if self.warning_s >= 60 * self.time_min:
            raise UsageError(
                f"a warning {self.warning_s} s before a limit of {self.time_min} min would come at "
                "the start; choose a longer time_min or a shorter warning_s"
            )


def requeue_script(script: RequeueScript | None = None) -> str:
    """The whole batch script."""
    script = script or RequeueScript()
    return (
        _HEAD.format(
            job_name=script.job_name,
            partition=script.partition,
            cpus_per_task=script.cpus_per_task,
            hours=script.time_min // 60,
            minutes=script.time_min % 60,
            warning_s=script.warning_s,
        )
        + _BODY.replace("@COMMAND@", script.command)
        + "\n".join(requeue_lines())
        + "\n"
    )


def requeue_lines() -> list[str]:
    """Shell lines for the end of a batch script: the status of srun in ``$status`` becomes a
    requeue, or the status of the job.

    A rank asks for the requeue itself. Status 75 says that it saved and could not ask: scontrol is
    missing in its container, or the controller did not answer. 143 says that SIGTERM killed a rank
    before its Run was there, while it was importing; inside a grace Slurm 22.05 would then take the
    job for failed. A cancelled job must not be requeued (Slurm would do it, as long as its
    processes live), and it is not RUNNING any more.
    """
    return textwrap.dedent(f"""\
        if [ "$status" -eq {RUN_AGAIN} ] || {{
            [ "$status" -eq {CANCELLED} ] &&
                scontrol show job "$SLURM_JOB_ID" 2>/dev/null | grep -q JobState=RUNNING
        }}; then
            for pause in 1 2 4 8 16; do
                answer=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) && break
                case "$answer" in *pending*) break ;; esac # requeued already
                echo "$answer"
                sleep "$pause"
            done
        fi
        exit "$status"
        """).splitlines()


_HEAD = """\
#!/bin/bash
# A training that saves and leaves when it must, is requeued, and goes on where it was, bit for bit.
#
#   sbatch sbatch/requeue.sbatch                   from the top of the repository
#   sbatch sbatch/requeue.sbatch --epochs 30       options for train_run.py
#
# It is stopped by a preemption, by the warning before its time limit, and by `scontrol requeue`.
#   hydroslurm doctor JOBID                        how long it has to save here: is that enough?
#   hydroslurm status JOBID
#   hydroslurm checkpoint ls hydroslurm-runs/JOBID
#
# Made by hydroslurm.launch.batchscript; a test compares the two.

#SBATCH --job-name={job_name}
# A partition whose jobs are requeued for urgent ones: see partitions-requeue.conf.
#SBATCH --partition={partition}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={cpus_per_task}
# Of one life. The run may have many.
#SBATCH --time={hours:02d}:{minutes:02d}:00
# SIGURG so many seconds before the limit, to the ranks: it means "save and leave", and harms no
# process that does not know it. Slurm may send it up to 60 s early. No "B:", which would reach this
# shell only.
#SBATCH --signal=URG@{warning_s}
#SBATCH --requeue
# Or the second life would empty the log of the first.
#SBATCH --open-mode=append
#SBATCH --output={job_name}-%j.out

"""

_BODY = """\
set -uo pipefail

# Checkpoints, lives and events go to hydroslurm-runs/JOBID below the folder that you called sbatch
# in; a requeue keeps the job id. Another place, which every node must be able to write:
#   export HYDROSLURM_RUN_DIR=/some/shared/folder
cd "$SLURM_SUBMIT_DIR" || exit 1
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi

# bash runs a trap only between two commands, so srun goes to the background, and `wait` is what a
# signal interrupts. Without the trap SIGTERM would end this shell at once, while the ranks are
# still saving. It is not handed on: the ranks get their own, and srun would make a SIGKILL of it.
trap 'echo "batch shell: SIGTERM; the ranks are saving"' TERM
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \\
    @COMMAND@ &
ranks=$!
while :; do
    wait "$ranks"
    status=$?
    # more than 128: a signal interrupted `wait`, unless srun itself has ended with such a status
    if [ "$status" -le 128 ] || ! kill -0 "$ranks" 2>/dev/null; then break; fi
done

"""
