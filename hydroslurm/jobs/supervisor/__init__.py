"""What runs beside the ranks of a TrainingJob, in its batch script: starts them, restarts them when
they fail, and records how the job ended."""

CLEAN = "--clean"
"""Before the run folder, on the command line of :mod:`~hydroslurm.jobs.supervisor.main`: be the
janitor."""
