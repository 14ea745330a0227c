"""Jobs: from YAML or a script to running ranks.

    spec/         what a user asks for
    plan          what that is on Slurm: nodes, tasks, what each task runs (pure); submission.json
    images, task  what each task of the job step does before it becomes its program
    supervisor/   in the batch script: attempts, exit policy, conditions
    launch/       batch scripts, executor, sbatch, what a rank runs first
    requests      to submitted jobs: pause, resume and requeue
    attached      a command beside a rank
    agent/        torchrun between Slurm and the ranks (imports none of the above)

Imports go from the bottom of this list to the top, never back.
"""
