"""From what a user wants to run to a running job: submitit -> srun -> one process per rank."""
