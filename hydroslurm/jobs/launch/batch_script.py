"""The batch scripts of jobs that save, stop and are requeued. Pure: values in, text out.

:func:`requeue_script` generates ``sbatch/requeue.sbatch`` by default, ``sbatch/multi-node.sbatch``
for :data:`MULTI_NODE` and ``sbatch/torchrun.sbatch`` for :data:`TORCHRUN`; a test compares them.
``hydroslurm submit`` and the executor put :func:`requeue_lines` into submitit's script.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN
from hydroslurm.errors import UsageError


@dataclass(frozen=True)
class RequeueScript:
    """The parameters of a script.

    Attributes:
        command: what srun starts: part of a shell command, may use ``"$PYTHON"`` and ``"$@"``.
        job_name, partition: for sbatch.
        time_min: the time limit of each attempt.
        warning_s: how long before the time limit the ranks are warned. Slurm may warn up to 60 s
            early, never late.
        cpus_per_task: for sbatch and, because of 22.05 to 23.02, for srun.
        nodes, tasks_per_node: how many ranks, and where. ``nodes`` may change between attempts
            (``scontrol update JobId=... NumNodes=...`` while the job waits).
        file, example: the path of the script and what it runs, for the comment at its top.
        remarks: more lines there.
    """

    command: str = '"$PYTHON" -u examples/train_run.py "$@"'
    job_name: str = "requeueable"
    partition: str = "low"
    time_min: int = 30
    warning_s: int = 120
    cpus_per_task: int = 1
    nodes: int = 1
    tasks_per_node: int = 1
    file: str = "sbatch/requeue.sbatch"
    example: str = "train_run.py"
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("time_min", "warning_s", "cpus_per_task", "nodes", "tasks_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r}: wanted a whole number, 1 or more")
        if self.warning_s >= 60 * self.time_min:
            raise UsageError(
                f"a warning {self.warning_s} s before a limit of {self.time_min} min would come at "
                "the start; choose a longer time_min or a shorter warning_s"
            )


MULTI_NODE = RequeueScript(
    command='"$PYTHON" -u examples/train_ddp.py "$@"',
    job_name="multi-node",
    nodes=4,
    file="sbatch/multi-node.sbatch",
    example="train_ddp.py",
)
"""One rank on each of four nodes."""
TORCHRUN = RequeueScript(
    command='"$PYTHON" -m hydroslurm.cli agent -- --nproc-per-node="${RANKS_PER_NODE:-2}" \\\n'
    '    examples/train_ddp.py "$@"',
    job_name="torchrun",
    nodes=2,
    cpus_per_task=2,
    file="sbatch/torchrun.sbatch",
    example="train_ddp.py",
    remarks=(
        "One task per node starts RANKS_PER_NODE ranks (default: 2) as torchrun does. With a plain",
        "`srun torchrun` no rank would get pauses and warnings, and torchrun would die of some;",
        "`hydroslurm agent` takes the same options and forwards the signals.",
    ),
)
"""Two ranks of torchrun's on each of two nodes."""


def requeue_script(script: RequeueScript | None = None) -> str:
    """The whole batch script."""
    script = script or RequeueScript()
    return (
        _HEAD.format(
            job_name=script.job_name,
            partition=script.partition,
            cpus_per_task=script.cpus_per_task,
            alone=f"sbatch {script.file}",
            with_options=f"sbatch {script.file} --epochs 30",
            example=script.example,
            several=_remarks(script) + _several(script),
            size=_size(script),
            hours=script.time_min // 60,
            minutes=script.time_min % 60,
            warning_s=script.warning_s,
        )
        + _BODY.replace("@SRUN@", _srun(script)).replace("@COMMAND@", script.command)
        + "\n".join(requeue_lines())
        + "\n"
    )


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
    reason. Before each try the script checks that this is still Slurm's current attempt, so that it
    cannot end the one that replaced it.
    """
    return textwrap.dedent(f"""\
        case "$status:$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null)" in
        {RUN_AGAIN}:*JobState=COMPLETING*Reason=TimeLimit*) again=1 ;;
        {RUN_AGAIN}:*JobState=COMPLETING*) again= ;; # cancelled or already requeued
        {RUN_AGAIN}:*) again=1 ;;
        {CANCELLED}:*JobState=RUNNING*PreemptTime=None*) again= ;; # a rank failed
        {CANCELLED}:*JobState=RUNNING*) again=1 ;;
        *) again= ;;
        esac
        if [ -n "$again" ]; then
            for pause in 1 2 4 8 16; do
                case "$(scontrol show job "$SLURM_JOB_ID" 2>&1)" in
                *" Restarts=${{SLURM_RESTART_COUNT:-0}} "*)
                    answer=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) && break ;;
                *" Restarts="*) break ;; # already requeued, or replaced
                *) answer="scontrol does not say how often the job was restarted" ;;
                esac
                case "$answer" in *pending*) break ;; esac # already requeued
                echo "$answer"
                # --no-requeue: no try will succeed, and an urgent job waits for these nodes
                case "$answer" in *"presently disabled"*) break ;; esac
                sleep "$pause"
            done
        fi
        exit "$status"
        """).splitlines()


def _is_one_rank(script: RequeueScript) -> bool:
    return script.nodes == script.tasks_per_node == 1


def _remarks(script: RequeueScript) -> str:
    lines = ("", *script.remarks) if script.remarks else ()
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _several(script: RequeueScript) -> str:
    """What to know before running several ranks; empty for one."""
    if _is_one_rank(script):
        return ""
    tasks = "" if script.tasks_per_node == 1 else f" NumTasks={script.tasks_per_node}*N"
    return (
        "#\n"
        "# Call sbatch in a folder that all nodes share. While the job waits in the queue, the\n"
        "# number of nodes can be changed for the next attempt:\n"
        f"#   scontrol update JobId=JOBID NumNodes=N{tasks}\n"
    )


def _size(script: RequeueScript) -> str:
    if _is_one_rank(script):
        return "#SBATCH --ntasks=1\n"
    # --ntasks-per-node only where it is needed: Slurm 22.05 makes a fixed number of tasks of it at
    # the submission, and `scontrol update NumNodes=` alone then changes nothing
    lines = f"#SBATCH --nodes={script.nodes}\n"
    if script.tasks_per_node > 1:
        lines += f"#SBATCH --ntasks-per-node={script.tasks_per_node}\n"
    return lines


def _srun(script: RequeueScript) -> str:
    """srun and its options. It names the number of tasks: with --cpus-per-task alone srun 22.05
    starts one per processor of the job, and SLURM_NTASKS is still that of the submission if the
    number of nodes has changed since."""
    common = 'srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \\\n'
    if _is_one_rank(script):
        return common
    if script.tasks_per_node == 1:
        return common + '    --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\\n'
    per_node = script.tasks_per_node
    tasks = f'--ntasks="$((SLURM_JOB_NUM_NODES * {per_node}))" --ntasks-per-node={per_node}'
    return common + f'    --nodes="$SLURM_JOB_NUM_NODES" {tasks} \\\n'


_HEAD = """\
#!/bin/bash
# A training that saves and exits when it must, is requeued, and resumes bit for bit.
#
#   {alone:<46} from the top of the repository
#   {with_options:<46} options for {example}
#
# It stops at a preemption, at the warning before its time limit, and at `scontrol requeue`.
#   hydroslurm doctor JOBID                        how long it has to save here: is that enough?
#   hydroslurm status JOBID
#   hydroslurm checkpoint ls hydroslurm-runs/JOBID
{several}#
# Generated by hydroslurm.jobs.launch.batch_script; a test compares the two.

#SBATCH --job-name={job_name}
# A partition whose jobs are requeued for urgent ones: see partitions-requeue.conf.
#SBATCH --partition={partition}
{size}#SBATCH --cpus-per-task={cpus_per_task}
# For each attempt; a run may have many.
#SBATCH --time={hours:02d}:{minutes:02d}:00
# SIGURG to the ranks, so many seconds before the limit: it means "save and exit", and harms no
# process that does not handle it. Slurm may send it up to 60 s early. No "B:", which would signal
# this shell only.
#SBATCH --signal=URG@{warning_s}
#SBATCH --requeue
# Otherwise the second attempt would truncate the log of the first.
#SBATCH --open-mode=append
#SBATCH --output={job_name}-%j.out

"""

_BODY = """\
set -uo pipefail

# Checkpoints, attempts and events go to hydroslurm-runs/JOBID in the folder where you called
# sbatch; a requeue keeps the job id. For another folder, which all nodes must be able to write:
#   export HYDROSLURM_RUN_DIR=/some/shared/folder
cd "$SLURM_SUBMIT_DIR" || exit 1
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi

# bash runs a trap only between two commands, so srun goes to the background, and a signal
# interrupts `wait`. Without the trap SIGTERM would end this shell at once, while the ranks are
# still saving. It is not forwarded: the ranks get their own, and srun would turn it into SIGKILL.
trap 'echo "batch shell: SIGTERM; the ranks are saving"' TERM
@SRUN@    @COMMAND@ &
ranks=$!
while :; do
    wait "$ranks"
    status=$?
    # above 128: a signal interrupted `wait`, unless srun itself exited with such a status
    if [ "$status" -le 128 ] || ! kill -0 "$ranks" 2>/dev/null; then break; fi
done

"""
