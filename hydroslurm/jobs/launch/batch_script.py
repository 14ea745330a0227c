"""The end of the batch scripts of jobs that save, stop and are requeued. Pure.

``sbatch/*.sbatch`` end with :func:`requeue_lines`, as a test sees to; ``hydroslurm submit`` and the
executor put them into the scripts that they write.
"""

from __future__ import annotations

import textwrap

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN


def in_option_line(text: str) -> str:
    """Escape a text that submitit puts into an ``#SBATCH`` line: submitit quotes for a shell, but
    sbatch takes a backslash for an escape even between single quotes. Seen on Slurm 22.05.8."""
    return text.replace("\\", "\\\\")


def requeue_lines() -> list[str]:
    """Shell lines for the end of a batch script: turn srun's status in ``$status`` into a requeue,
    or into the status of the job.

    Normally a rank requests the requeue itself. Status 75 means that it saved but could not: its
    container has no scontrol, or the controller did not answer. 143 means that SIGTERM killed a
    rank before its Run existed, during the imports; within a grace time Slurm 22.05 would then
    count the job as failed. Without a PreemptTime another rank has failed, and srun ended the rest
    with SIGTERM. A cancelled job must not be requeued, which Slurm would do while its processes
    live: it is COMPLETING, like a requeued one and one whose time is over, and only the last has a
    reason. Slurm 24.05 to 25.11 requeue what leaves in its grace where PreemptMode is REQUEUE; one
    more request would start the job once too often, see ``policy.left_to_slurm``. Before each try
    the script checks that this is still Slurm's current attempt, so that it cannot end the one that
    replaced it. Which element of an array this is, Slurm says: the variables may be those of an
    array whose element has submitted this job.
    """
    return textwrap.dedent(f"""\
        # by this number scontrol shows, and would requeue, all elements of an array; its own record
        # of one line says which element this is. SIGNALING: it runs, and a signal is on its way
        show() {{
            scontrol -o show job "$SLURM_JOB_ID" 2>&1 | grep "^JobId=$SLURM_JOB_ID " |
                sed 's/ JobState=SIGNALING / JobState=RUNNING /' || :
        }}
        record=$(show)
        case "$status:$record" in
        {RUN_AGAIN}:*JobState=COMPLETING*Reason=TimeLimit*) again=1 ;;
        {RUN_AGAIN}:*JobState=COMPLETING*) again= ;; # cancelled or already requeued
        {RUN_AGAIN}:*) again=1 ;;
        {CANCELLED}:*JobState=RUNNING*PreemptTime=None*) again= ;; # a rank failed
        {CANCELLED}:*JobState=RUNNING*) again=1 ;;
        *) again= ;;
        esac
        case "$again:$record" in
        1:*JobState=RUNNING*PreemptTime=None*) ;;
        1:*JobState=RUNNING*PreemptTime=*)
            case "$(scontrol --version):$(scontrol show partition "$SLURM_JOB_PARTITION")" in
            *" 24.02."*) ;;
            *" 24."*PreemptMode=REQUEUE*|*" 25."*PreemptMode=REQUEUE*)
                # Slurm does it, but would hold the job at the fifth time (MaxBatchRequeue)
                if [ "${{SLURM_RESTART_COUNT:-0}}" -lt 3 ]; then again=; fi ;;
            esac ;;
        esac
        if [ -n "$again" ]; then
            for pause in 1 2 4 8 16; do
                job=$SLURM_JOB_ID
                case "$record" in "JobId=$job ArrayJobId="*)
                    array=${{record#*ArrayJobId=}} task=${{record#*ArrayTaskId=}}
                    job=${{array%% *}}_${{task%% *}} ;;
                esac
                case "$record" in
                *" Restarts=${{SLURM_RESTART_COUNT:-0}} "*)
                    answer=$(scontrol requeue "$job" 2>&1) && break ;;
                *" Restarts="*) break ;; # already requeued, or replaced
                *) answer="scontrol does not say how often the job was restarted" ;;
                esac
                case "$answer" in *pending*) break ;; esac # already requeued
                echo "$answer"
                # --no-requeue: no try will succeed, and an urgent job waits for these nodes
                case "$answer" in *"presently disabled"*) break ;; esac
                sleep "$pause"
                record=$(show)
            done
        fi
        exit "$status"
        """).splitlines()
