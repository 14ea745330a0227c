"""What this site does to a job, in plain words, and which line of which file would change it.

:func:`hydroslurm.observe.doctor.gather.gather` asks Slurm for the facts;
:func:`hydroslurm.observe.doctor.findings.diagnose` turns them into findings.
"""
