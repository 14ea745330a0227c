"""What a job is: :class:`~hydroslurm.jobs.spec.job.TrainingJob`, read from and written as YAML."""
