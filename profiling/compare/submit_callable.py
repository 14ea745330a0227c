"""Submit the training of peer_submitit.py with submitit's AutoExecutor, and print its job id:
``submit_callable.py FOLDER EPOCHS NODE [--begin=WHEN]``."""

from __future__ import annotations

import sys
from pathlib import Path

import submitit
from digits_training import config
from peer_submitit import Training


def main() -> None:
    folder, epochs, node, *begin = sys.argv[1:]
    executor = submitit.AutoExecutor(Path(folder) / "submitit", cluster="slurm")
    more = dict(option.lstrip("-").split("=", 1) for option in begin)
    executor.update_parameters(
        timeout_min=60,
        slurm_partition="low",
        slurm_nodelist=node,
        slurm_additional_parameters=more,
    )
    print(executor.submit(Training(config(Path(folder), int(epochs)))).job_id)


if __name__ == "__main__":
    main()
