"""What processes tell each other: cluster.json, for later ones, and a caller's request."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydroslurm.core.files import write_atomically
from hydroslurm.devcluster.layout import Layout
from hydroslurm.devcluster.processes import ProcessId
from hydroslurm.devcluster.spec import ClusterSpec
from hydroslurm.errors import ClusterError

_VERSION = 2


@dataclass(frozen=True)
class Running:
    """The cluster that runs in a folder.

    Attributes:
        up: False while it is being started.
        temporary: the folder is removed with the cluster.
        link: the short name of the folder.
        supervisor: the process that owns all others.
        daemons: name -> process.
    """

    spec: ClusterSpec
    up: bool
    temporary: bool
    link: Path
    supervisor: ProcessId
    daemons: tuple[tuple[str, ProcessId], ...] = ()
    version: int = _VERSION

    def write(self, layout: Layout) -> None:
        """Write cluster.json atomically."""
        write_atomically(layout.cluster_json, to_json(self) + "\n", mode=0o666)

    @classmethod
    def read(cls, layout: Layout) -> Running | None:
        """Read cluster.json; None if there is none.

        Raises:
            ClusterError: the file is not one of ours.
            UntrustedFile: others could have written it; it decides what we signal, remove and run.
        """
        layout.check()
        try:
            row = json.loads(layout.cluster_json.read_text())
            if row["version"] != _VERSION:
                raise ValueError(f"version {row['version']}, not {_VERSION}")
            row["spec"], row["link"] = _spec(row["spec"]), Path(row["link"])
            row["supervisor"] = ProcessId(**row["supervisor"])
            row["daemons"] = tuple((name, ProcessId(**one)) for name, one in row["daemons"])
            return cls(**row)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(
                f"{layout.cluster_json} cannot be read ({error}); it was made by another release. "
                "End that cluster with the release that started it, or remove the file"
            ) from error


@dataclass(frozen=True)
class Request:
    """A caller's request for a cluster.

    Attributes:
        detach: the cluster outlives the caller, once it is up.
        temporary: remove the folder with the cluster.
        path: where to look for programs.
        caller: the process with which the cluster ends.
    """

    spec: ClusterSpec
    root: Path
    detach: bool
    temporary: bool
    path: str
    caller: ProcessId

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Decode what :func:`to_json` has made."""
        row = json.loads(text)
        row["spec"], row["root"] = _spec(row["spec"]), Path(row["root"])
        return cls(**{**row, "caller": ProcessId(**row["caller"])})


def to_json(value: Running | Request) -> str:
    """Encode as one line; names of files may hold bytes that are no text."""
    return json.dumps(asdict(value), default=str)


def _spec(row: dict[str, Any]) -> ClusterSpec:
    directory = row["directory"]
    return ClusterSpec(**{**row, "directory": None if directory is None else Path(directory)})
