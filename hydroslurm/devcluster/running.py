"""What processes tell each other: cluster.json, for later ones, and a caller's request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from hydroslurm.core.files import write_atomically
from hydroslurm.devcluster.layout import Layout
from hydroslurm.devcluster.processes import ProcessId
from hydroslurm.devcluster.spec import ClusterSpec
from hydroslurm.errors import ClusterError

T = TypeVar("T")


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
    version: Literal[2] = 2

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
            return from_json(cls, layout.cluster_json.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
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


def to_json(value: Running | Request) -> str:
    """Encode as one line; names of files may hold bytes that are no text."""
    return json.dumps(msgspec.to_builtins(value, enc_hook=str))


def from_json(kind: type[T], text: str) -> T:
    """Decode what :func:`to_json` has made; raises ValueError."""

    def decoded(wanted: Any, value: Any) -> Any:
        return wanted(value)

    return msgspec.convert(json.loads(text), kind, dec_hook=decoded)
