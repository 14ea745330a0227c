"""Where this machine's Slurm reads plugstack.conf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hydroslurm.errors import SlurmError, SlurmMissing
from hydroslurm.slurm.client import find_slurm_conf, open_client


def plugstack_of(environ: Mapping[str, str]) -> Path:
    """What PlugStackConfig says, else the file beside slurm.conf.

    Raises:
        SlurmMissing: there is no slurm.conf here.
    """
    try:
        named = open_client(environ=environ).config().get("PlugStackConfig")
    except SlurmError:  # slurmctld need not be up for this
        named = None
    if named and named != "(null)":
        return Path(named)
    conf = find_slurm_conf(environ)
    if conf is None:
        raise SlurmMissing("no slurm.conf on this machine; name the file with --plugstack")
    return conf.parent / "plugstack.conf"
