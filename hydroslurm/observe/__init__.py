"""All that is known of jobs, from Slurm, their run folders and their ranks; nothing here acts on
one."""
