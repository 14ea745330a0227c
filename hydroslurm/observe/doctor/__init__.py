"""What this site does to a job, in plain words, and which line of a file would change it.

Start at :func:`hydroslurm.observe.doctor.gather.gather`, which asks, and go on with
:func:`hydroslurm.observe.doctor.findings.diagnose`, which judges and asks nobody.
"""
