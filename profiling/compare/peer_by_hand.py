"""The peers whose loop is written by hand: ``peer_by_hand.py PEER ...`` and ``arguments()``.

bare           knows nothing of preemption. `scontrol suspend` freezes it where it is, and a
               requeue goes on with the last epoch that it saved
hydrojobsche   as its README asks for: the model is wrapped, SIGUSR1 pauses and SIGUSR2 goes on.
               It saves nothing at a preemption, so that the script's own epochs count
hydroslurm     a Run around the loop, which saves once per epoch too
submitit       stock, as its docs/checkpointing.md asks for: a callable with ``checkpoint``,
               submitted with its AutoExecutor, to a NODE and to begin WHEN; prints the job's id
"""

from __future__ import annotations

import sys

from digits import ByHand, arguments, train_in_a_run

if __name__ == "__main__":
    config = arguments()
    if sys.argv[1] == "bare":
        ByHand(config)()
    elif sys.argv[1] == "hydrojobsche":
        from incumbent import Incumbent

        ByHand(config, Incumbent)()
    elif sys.argv[1] == "hydroslurm":
        train_in_a_run(config)
    else:
        import submitit

        executor = submitit.AutoExecutor(config.folder / "submitit", cluster="slurm")
        executor.update_parameters(
            timeout_min=60,
            slurm_partition="low",
            slurm_nodelist=sys.argv[2],
            slurm_additional_parameters={"begin": sys.argv[3]},
        )
        print(executor.submit(ByHand(config)).job_id)
