"""``hydroslurm prove``: does a script that is stopped again and again train the same bits as one
that is left alone? Knows PyTorch and processes; nothing of ``Run``, checkpoints or frameworks, so
that it judges all of them alike."""
