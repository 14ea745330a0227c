"""Where this node's slurm.conf is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_PLACES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/usr/local/etc/slurm.conf",
    "/usr/local/etc/slurm/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    # where slurmd keeps the configuration that it fetched ("configless")
    "/run/slurm/conf/slurm.conf",
    "/var/spool/slurmd/conf-cache/slurm.conf",
    "/var/spool/slurm/d/conf-cache/slurm.conf",
)


def find_slurm_conf(environ: Mapping[str, str]) -> Path | None:
    """``SLURM_CONF``, or else the usual places; None where there is no such file."""
    named = environ.get("SLURM_CONF")
    places = (named,) if named else _PLACES
    return next((Path(place) for place in places if Path(place).is_file()), None)
