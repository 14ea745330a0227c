"""What processes tell each other: cluster.json, for later ones, and a caller's request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydroslurm.core.files import write_atomically
from hydroslurm.devcluster.layout import Layout
from hydroslurm.devcluster.processes import ProcessId
from hydroslurm.devcluster.spec import ClusterSpec
from hydroslurm.errors import ClusterError

_VERSION = 1

STAY = b"stay\n"
"""Sent by a caller before it closes its pipe, so that the cluster outlives it."""


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

    def write(self, layout: Layout) -> None:
        """Write cluster.json atomically."""
        row = {
            "version": _VERSION,
            "spec": self.spec.to_dict(),
            "up": self.up,
            "temporary": self.temporary,
            "link": str(self.link),
            "supervisor": vars(self.supervisor),
            "daemons": {name: vars(process) for name, process in self.daemons},
        }
        write_atomically(layout.cluster_json, json.dumps(row, indent=1) + "\n", mode=0o666)

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
            return cls(
                spec=ClusterSpec.from_dict(row["spec"]),
                up=row["up"],
                temporary=row["temporary"],
                link=Path(row["link"]),
                supervisor=ProcessId(**row["supervisor"]),
                daemons=tuple((name, ProcessId(**p)) for name, p in row["daemons"].items()),
            )
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
        detach: the cluster may outlive the caller.
        temporary: remove the folder with the cluster.
        path: where to look for programs.
        caller_pid: the process with which the cluster ends.
    """

    spec: ClusterSpec
    root: Path
    detach: bool
    temporary: bool
    path: str
    caller_pid: int

    def to_line(self) -> bytes:
        row = {**vars(self), "spec": self.spec.to_dict(), "root": str(self.root)}
        return json.dumps(row).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Request:
        row: dict[str, Any] = json.loads(line)
        return cls(**{**row, "spec": ClusterSpec.from_dict(row["spec"]), "root": Path(row["root"])})
