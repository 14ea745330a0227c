"""Running jobs: one answer from Slurm for all of them, and the files of their run folders."""
