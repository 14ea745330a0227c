"""Jobs while they run: one answer of Slurm's for all of them, beside what is appended to their run
folders."""
