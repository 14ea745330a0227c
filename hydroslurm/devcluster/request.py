"""What a caller asks its supervisor for: one line of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydroslurm.devcluster.spec import ClusterSpec


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
