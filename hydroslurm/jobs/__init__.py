"""Jobs: from YAML or a script to running ranks.

    spec/         what a user asks for
    plan          what that is on Slurm: nodes, tasks, what each task runs (pure)
    submission    submission.json: what was asked of sbatch
    images, task  what each task of the job step does before its program runs
    supervisor/   in the batch script: attempts, exit policy, conditions
    launch/       script text, executor, sbatch
    control/      afterwards: state, output, a shell, pause, resume and requeue
    agent/        torchrun between Slurm and the ranks (knows none of the above)

Imports go from the bottom of this list to the top, never back.
"""
