"""``hydroslurm agent``: torch's elastic agent as a task of srun's that hands signals on.

Under proctrack/cgroup only the direct tasks of srun get Slurm's signals, and below torchrun these
are not the ranks. Stock torchrun dies of SIGUSR1, and of SIGTERM after 30 s. This agent keeps
torchrun's arguments and its restarts, passes pause, resume and stop on to its workers, and leaves
with one status for the node when they have left.

Start at :func:`hydroslurm.jobs.agent.node.run_agent`. Only ``elastic`` imports torch at its top, so
that signals are kept from the first moment on, while torch is still being imported.
"""
