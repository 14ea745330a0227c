"""The batch scripts of jobs that stop, save and are requeued. Pure: values in, text out.

``sbatch/requeue.sbatch`` is what :func:`requeue_script` gives for its defaults,
``sbatch/multi-node.sbatch`` for :data:`MULTI_NODE` and ``sbatch/torchrun.sbatch`` for
:data:`TORCHRUN`; a test compares them. ``hydroslurm submit`` and
the executor use :func:`requeue_lines` in submitit's script.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN
from hydroslurm.errors import UsageError


@dataclass(frozen=True)
class RequeueScript:
    """What differs between two such scripts.

    Attributes:
        command: what srun starts: words of a shell command, ``"$PYTHON"`` and ``"$@"`` allowed.
        job_name, partition: for sbatch.
        time_min: the time limit of each attempt.
        warning_s: how long before the time limit the ranks are warned. Slurm may be up to 60 s
            early, never late.
        cpus_per_task: for sbatch and, because of 22.05 to 23.02, for srun.
        nodes, tasks_per_node: how many ranks, and where. An attempt may have other ``nodes``
            (``scontrol update JobId=... NumNodes=...`` while the job waits).
        file, example: where the script lies and what it runs, for the words at its top.
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
                raise UsageError(f"{name}={value!r}: wanted a whole number of 1 or more")
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
        "One task on each node, which starts the ranks as torchrun does: RANKS_PER_NODE of them, 2",
        "by default. `srun torchrun` in its place would get pauses and warnings that no rank hears",
        "of, and die of some; `hydroslurm agent` takes the same options and hands them on.",
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
    """A text as submitit is to be given it for a line of ``#SBATCH``: it quotes for a shell, but
    sbatch reads a backslash as an escape between single quotes, too. Seen on Slurm 22.05.8."""
    return text.replace("\\", "\\\\")


def requeue_lines() -> list[str]:
    """Shell lines for the end of a batch script: the status of srun in ``$status`` becomes a
    requeue, or the status of the job.

    A rank asks for the requeue itself. Status 75 says that it saved and could not ask: scontrol is
    missing in its container, or the controller did not answer. 143 says that SIGTERM killed a rank
    before its Run was there, while it was importing; inside a grace Slurm 22.05 would then take the
    job for failed. Without a PreemptTime it is another rank's failure: srun ends the rest with
    SIGTERM for it. A cancelled job must not be requeued (Slurm would do it, as long as its
    processes live): it is COMPLETING, as is one that has been requeued or whose time is over, and
    only the last of them has a reason. Before each try Slurm is asked whether this is still the
    attempt that it knows of: the script of one that it has replaced must not end the next one.
    """
    return textwrap.dedent(f"""\
        case "$status:$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null)" in
        {RUN_AGAIN}:*JobState=COMPLETING*Reason=TimeLimit*) again=1 ;;
        {RUN_AGAIN}:*JobState=COMPLETING*) again= ;; # cancelled, or requeued already
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
                *" Restarts="*) break ;; # requeued already, or replaced
                *) answer="scontrol does not say how often the job was restarted" ;;
                esac
                case "$answer" in *pending*) break ;; esac # requeued already
                echo "$answer"
                # --no-requeue: no try will be granted, and an urgent job waits for these nodes
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
    """What somebody who runs several ranks has to know before; nothing for one."""
    if _is_one_rank(script):
        return ""
    tasks = "" if script.tasks_per_node == 1 else f" NumTasks={script.tasks_per_node}*N"
    return (
        "#\n"
        "# The folder that you call sbatch in must be one that all nodes share. The number of\n"
        "# nodes may change from attempt to attempt, while the job waits in the queue:\n"
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
    """srun and its options. The number of tasks is said: with --cpus-per-task alone srun 22.05
    starts one for each processor that the job has, and SLURM_NTASKS is still that of the submission
    when the number of nodes was changed since."""
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
# A training that saves and leaves when it must, is requeued, and goes on where it was, bit for bit.
#
#   {alone:<46} from the top of the repository
#   {with_options:<46} options for {example}
#
# It is stopped by a preemption, by the warning before its time limit, and by `scontrol requeue`.
#   hydroslurm doctor JOBID                        how long it has to save here: is that enough?
#   hydroslurm status JOBID
#   hydroslurm checkpoint ls hydroslurm-runs/JOBID
{several}#
# Made by hydroslurm.jobs.launch.batch_script; a test compares the two.

#SBATCH --job-name={job_name}
# A partition whose jobs are requeued for urgent ones: see partitions-requeue.conf.
#SBATCH --partition={partition}
{size}#SBATCH --cpus-per-task={cpus_per_task}
# Of each attempt. The run may have many.
#SBATCH --time={hours:02d}:{minutes:02d}:00
# SIGURG so many seconds before the limit, to the ranks: it means "save and leave", and harms no
# process that does not know it. Slurm may send it up to 60 s early. No "B:", which would reach this
# shell only.
#SBATCH --signal=URG@{warning_s}
#SBATCH --requeue
# Or the second attempt would empty the log of the first.
#SBATCH --open-mode=append
#SBATCH --output={job_name}-%j.out

"""

_BODY = """\
set -uo pipefail

# Checkpoints, attempts and events go to hydroslurm-runs/JOBID in the folder where you called
# sbatch; a requeue keeps the job id. For another place, which every node must be able to write:
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
@SRUN@    @COMMAND@ &
ranks=$!
while :; do
    wait "$ranks"
    status=$?
    # more than 128: a signal interrupted `wait`, unless srun itself has ended with such a status
    if [ "$status" -le 128 ] || ! kill -0 "$ranks" 2>/dev/null; then break; fi
done

"""
