#!/bin/bash
# A rank below NVIDIA's nsys: each rank of each life writes a report of its own into the run folder, where
# `hydroslurm report RUN_FOLDER` finds it.
#
#   srun --preempt sbatch/nsys_profile.sh python train.py              a rank per task: what is meant to be used
#   srun sbatch/nsys_profile.sh torchrun --nproc-per-node=8 train.py   one report for all ranks of the node
#
# Written are <run folder>/profile/rank-<SLURM_PROCID>-restart-<SLURM_RESTART_COUNT>.nsys-rep: over requeues none replaces
# another. The run folder is $HYDROSLURM_RUN_DIR, else hydroslurm-runs/JOBID in the folder that the job was submitted from.
#
#   NSYS_TRACE=cuda,nvtx,osrt   what is traced; by default nvtx, and cuda where there is an NVIDIA driver
#   NSYS_OPTIONS="--duration=60"   more options for `nsys profile`
#   HYDROSLURM_NVTX=steps,operators   ranges for each training step and each operator too
#
# Without nsys the command runs as it is. Each report holds the environment of the rank, secrets too: `nsys export` shows it.
#
# Also possible, and what is different then (nsys 2022.4, Slurm 22.05):
#   srun --preempt nsys profile ... python train.py   pauses by `scontrol suspend` are recorded under proctrack/linuxproc. But
#       nsys dies of SIGUSR1 and SIGUSR2 and leaves no report; at SIGTERM it stops recording, before the stop, and leaves with
#       status 0 whatever the rank's; and under proctrack/cgroup the rank hears of no signal at all.
#   nsys profile srun ... python train.py   the ranks are slurmd's children, not nsys's. Those on the node of srun are recorded
#       nevertheless, in one report with pauses and stops: srun hands nsys's environment on. Those on other nodes are not, and
#       run as they would without.
set -euo pipefail

if [ $# = 0 ]; then
    echo "usage: ${0##*/} COMMAND [ARGUMENT ...]" >&2
    exit 2
fi
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=${PYTHON:-$(command -v python3 || command -v python)}
# setup.sh puts nsys beside the Python of .venv
nsys=$(command -v nsys || PATH=$(dirname "$python") command -v nsys) || {
    echo "${0##*/}: no nsys on PATH; running without" >&2
    exec "$@"
}

if [ -z "${NSYS_TRACE:-}" ]; then
    NSYS_TRACE=nvtx
    if [ -e /proc/driver/nvidia/version ]; then NSYS_TRACE=cuda,nvtx,osrt; fi
fi
run=${HYDROSLURM_RUN_DIR:-${SLURM_SUBMIT_DIR:-$PWD}/hydroslurm-runs/${SLURM_JOB_ID:-local-$$}}
(umask 077 && mkdir -p "$run/profile") # as hydroslurm makes it: for the owner only
report=$run/profile/rank-${SLURM_PROCID:-${RANK:-0}}-restart-${SLURM_RESTART_COUNT:-0}

# --sample, --cpuctxsw: neither is needed, and both want rights that a job seldom has
# --kill=none, --wait=primary: the end of the rank ends the recording, never the reverse
# shellcheck disable=SC2086  # several options in one variable
exec "$python" "$here/nsys_task.py" "$nsys" profile --trace="$NSYS_TRACE" --sample=none --cpuctxsw=none \
    --kill=none --wait=primary --force-overwrite=true --output="$report" ${NSYS_OPTIONS:-} -- "$@"
