"""What passes between processes: cluster.json, for whoever comes later, and a caller's request."""

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
"""What a caller says down its pipe before it closes it, when the cluster shall outlive it."""


@dataclass(frozen=True)
class Running:
    """What runs in a cluster's folder.

    Attributes:
        up: False while it is being started.
        temporary: the folder goes with the cluster.
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
        """Put it in its place in one go."""
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
        """What the folder says; None when it says nothing.

        Raises:
            ClusterError: the file is not one of ours.
            UntrustedFile: others could have written it, who would choose what is signalled, removed
                and run for us.
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
    """One cluster, wanted by one process.

    Attributes:
        detach: it outlives the process that asks, once that has said so.
        temporary: the folder goes with the cluster.
        path: where to look for programs.
        caller_pid: whose end is the end of the cluster.
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
