"""The job of an elastic run's coordinator: it keeps as many members in Slurm as are wanted."""
