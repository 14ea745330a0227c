"""``--preempt`` for srun, sbatch and salloc of a stock Slurm: a SPANK plugin, its installation."""
