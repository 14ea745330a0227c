"""``hydroslurm agent``: torch's elastic agent as an srun task that forwards signals.

Under proctrack/cgroup only srun's direct tasks get Slurm's signals, and below torchrun these are
not the ranks. Stock torchrun dies of SIGUSR1, and of SIGTERM after 30 s. This agent keeps
torchrun's arguments and restarts, forwards pause, resume and stop to its workers, and exits with
one status for the node once they have left.

Start at :func:`hydroslurm.jobs.agent.node.run_agent`. Only ``elastic`` imports torch at its top, so
that signals are kept from the first moment on, while torch is still being imported.
"""
