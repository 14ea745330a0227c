"""Jobs: from YAML or a script to running ranks.

    spec/         what a user asks for
    plan          what that is on Slurm: nodes, tasks, what each task runs (pure)
    submission    submission.json: what sbatch was asked for
    images, task  what each task of the job step does before it becomes its program
    supervisor/   in the batch script: attempts, exit policy, conditions
    launch/       batch scripts, executor, sbatch, what a rank runs first
    control/      of submitted jobs: state, output, a shell, pause, resume and requeue
    agent/        torchrun between Slurm and the ranks (imports none of the above)

Imports go from the bottom of this list to the top, never back.
"""
