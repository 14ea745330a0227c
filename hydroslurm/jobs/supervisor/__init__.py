"""What runs beside the ranks of a TrainingJob, in its batch script: starts them, starts them again
when they fail, and says in the end how it went."""
