"""Map the queue and the priority of a T9k manifest to this Slurm, by the site's tables and the
user's.

    queues:                     # in config.yaml
      default: {partition: gpu}
      batch: {}                 # the default partition
    priorities:
      80: {qos: high}
      50: {}                    # like any other job
      10: {nice: 1000}

A queue that is in no table is the partition of that name. A user cannot set a priority in Slurm; a
QOS may raise it, and nice lowers it. Only the site knows which of them a number from 0 to 100
should map to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import SpecError
from hydroslurm.jobs.spec.fields import Part, SlurmWord
from hydroslurm.jobs.spec.sections import Nice
from hydroslurm.jobs.spec.source import path_text, read_source

SITE = Path("/etc/hydroslurm/config.yaml")


class Queue(Part):
    """One row of the table of queues: the value for ``scheduler.partition``."""

    partition: SlurmWord | None = None


class Priority(Part):
    """One row of the table of priorities: the values for ``scheduler.qos`` and
    ``scheduler.nice``."""

    qos: SlurmWord | None = None
    nice: Nice | None = None


class _Config(Part):
    queues: dict[str, Queue] = Field(default_factory=dict)
    priorities: dict[str, Priority] = Field(default_factory=dict)


@dataclass(frozen=True)
class SiteTables:
    """The tables.

    Attributes:
        queues, priorities: a queue, a priority as the manifest spells it -> its row.
        places: the files that are read, the user's first; they need not exist.
    """

    queues: Mapping[str, Queue]
    priorities: Mapping[str, Priority]
    places: tuple[Path, ...]

    def where(self) -> str:
        """The files, for messages."""
        return " or ".join(map(str, self.places))


def read_site_tables(environ: Mapping[str, str], *, site: Path = SITE) -> SiteTables:
    """Read the site's tables and the user's, whose rows take precedence.

    Args:
        environ: XDG_CONFIG_HOME, HOME.

    Raises:
        SpecError: a file is not a valid configuration.
        UntrustedFile: other users could have written it.
    """
    home = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
    # the XDG Base Directory Specification: relative paths must be ignored
    own = [Path(home) / "hydroslurm/config.yaml"] if home.startswith("/") else []
    queues: dict[str, Queue] = {}
    priorities: dict[str, Priority] = {}
    for path in (site, *own):
        if path.exists():
            check_trusted(path, what="the configuration")
            config = _read(path)
            queues |= config.queues
            priorities |= config.priorities
    return SiteTables(queues, priorities, (*own, site))


def _read(path: Path) -> _Config:
    source = read_source(path)
    try:
        return _Config.model_validate({} if source.value is None else source.value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = f"{path}:{source.line_of(first['loc'])}: {path_text(first['loc'])}"
        raise SpecError(
            f"{where}: {first['msg']}; wanted tables such as "
            "queues: {default: {partition: gpu}}, priorities: {80: {qos: high}, 10: {nice: 1000}}"
        ) from None
