"""The job that suspend_latency.py suspends: `suspended_job.py RUN_FOLDER` trains until it is
cancelled."""

from __future__ import annotations

import sys

import torch
from steps import mlp

import hydroslurm


def main() -> None:
    torch.set_num_threads(1)
    training = mlp()
    controller = hydroslurm.install(run_dir=sys.argv[1])
    step = 0
    while True:
        training.step()
        step += 1
        controller.step = step


if __name__ == "__main__":
    main()
