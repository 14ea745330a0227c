"""Jobs that were submitted: their state, their output, a shell beside a rank, and requests to them.

Nothing here submits or starts a job; it reads what the run folder, the ranks and Slurm know.
"""
