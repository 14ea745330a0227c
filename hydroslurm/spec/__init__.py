"""What a job is: :class:`~hydroslurm.spec.job.TrainingJob`, read from YAML and written back."""
