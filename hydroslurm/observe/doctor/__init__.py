"""Site diagnosis: what happens to a job here, in plain words, and which setting would change it.

:func:`hydroslurm.observe.doctor.gather.gather` asks Slurm for the facts;
:func:`hydroslurm.observe.doctor.findings.diagnose` turns them into findings.
"""
