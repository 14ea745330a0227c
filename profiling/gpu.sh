#!/usr/bin/env bash
# Everything that only a GPU can show, in at most eight minutes, from a bare checkout.
#
#   profiling/gpu.sh                 on a machine with one GPU; nothing else may use it meanwhile
#   profiling/gpu.sh --dry           the same parts as far as a CPU goes, in two minutes or so
#   profiling/gpu.sh --only vacate   one part, or several (again --only)
#
#   OUT=DIR        where results.jsonl, table.txt and log.txt go (build/gpu)
#   PYTHON=PATH    a Python that has torch (python3). What it lacks besides is installed for this run
#                  from profiling/gpu_wheels, which gpu_wheels.sh fills on a machine with a network.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
work=$(mktemp -d "${TMPDIR:-/tmp}/hydroslurm-gpu-XXXXXX")
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
"$PYTHON" "$root/profiling/gpu/prepare.py" "$work/site"
export PYTHONPATH="$work/site:$root:$root/profiling:$root/profiling/gpu${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" "$root/profiling/gpu/drive.py" --out "${OUT:-$root/build/gpu}" --work "$work" "$@"
