"""Talking to Slurm: the only package that runs Slurm programs or imports pyslurm.

Start at :func:`hydroslurm.slurm.client.open_client`; inside a job, at
:class:`hydroslurm.slurm.allocation.Allocation`, which asks nobody and reads variables only.
"""
