"""``hydroslurm prove``: does a script train the same bits when it is stopped repeatedly? Knows only
PyTorch and processes, nothing of ``Run``, checkpoints or frameworks, so it judges all alike."""
