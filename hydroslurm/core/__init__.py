"""What every other room stands on: files, events, the run folder, a rank's state on disk.

Knows nothing of Slurm or of torch.
"""
