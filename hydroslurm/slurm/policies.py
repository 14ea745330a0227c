"""The settings that decide what this site does to its jobs: asked once for all jobs, and by one
process for all of this user's on a node.

A thousand jobs that start at once would ask for the same three answers a thousand times. Who has
asked leaves them in a file of the user's own folder on the node, where the next one finds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydroslurm.core import registry
from hydroslurm.core.files import open_regular, parse_json, read_regular, write_atomically
from hydroslurm.core.trust import is_trusted
from hydroslurm.errors import RunFolderError, SlurmError, UnreadableOutput, UsageError
from hydroslurm.slurm.client import BACKEND_ENV, Config, SlurmClient
from hydroslurm.slurm.policy import SitePolicy, find_partition, kill_after_s, site_policy
from hydroslurm.slurm.text import compress_nodes, expand_nodes
from hydroslurm.slurm.values import Job, Partition, Qos

LIFE_S = 300.0
"""An answer is as old as this at most when it is used. A job uses what it has read at its start for
days, so that this makes nothing worse."""
PATIENCE_S = 5.0
"""Longer than three answers take, unless slurmctld is in trouble."""
_FORMAT = 1
_LIMIT_BYTES = 16 << 20


class Policies:
    """The site's settings at the moment they were read."""

    def __init__(
        self, config: Config, partitions: tuple[Partition, ...], qoses: tuple[Qos, ...] | None
    ) -> None:
        self._config = config
        self._partitions = partitions
        self._qoses = qoses
        self._known: dict[tuple[object, ...], SitePolicy | None] = {}

    @classmethod
    def read(cls, client: SlurmClient) -> Policies:
        """Two requests to slurmctld, and one to slurmdbd where QOS decide.

        Raises:
            SlurmError: Slurm could not be asked.
        """
        config = client.config()
        qoses = client.qoses() if config.preempt_type == "preempt/qos" else None
        return cls(config, client.partitions(), qoses)

    @property
    def kill_after_s(self) -> float:
        """As :attr:`SitePolicy.kill_after_s`, which is the same for all jobs."""
        return kill_after_s(self._config.kill_wait_s)

    @property
    def is_complete(self) -> bool:
        """False where QOS decide, and accounting was away."""
        return self._config.preempt_type != "preempt/qos" or self._qoses is not None

    def of(self, job: Job) -> SitePolicy | None:
        """None for a job of a partition that is new since then."""
        kind = (job.partition, job.qos, job.is_batch, job.may_requeue)
        if kind not in self._known:
            self._known[kind] = self._policy(job)
        return self._known[kind]

    def _policy(self, job: Job) -> SitePolicy | None:
        try:
            return site_policy(
                self._config,
                find_partition(self._partitions, job.partition),
                partitions=self._partitions,
                qoses=self._qoses,
                job=replace(job, comment=""),
            )
        except UsageError:
            return None

    def to_json(self) -> str:
        """The content of the file that a node's processes share."""
        qoses = None if self._qoses is None else [asdict(one) for one in self._qoses]
        partitions = [
            {**asdict(one), "nodes": compress_nodes(one.nodes)} for one in self._partitions
        ]
        row = {"v": _FORMAT, "config": dict(self._config), "partitions": partitions, "qoses": qoses}
        return json.dumps(row)

    @classmethod
    def from_json(cls, text: bytes) -> Policies:
        """Read it back.

        Raises:
            ValueError: it is not what :meth:`to_json` of this version makes.
        """
        try:
            row = parse_json(text)
            if row["v"] != _FORMAT:
                raise ValueError(f"format {row['v']!r}, wanted {_FORMAT}")
            partitions = tuple(_partition(one) for one in row["partitions"])
            qoses = None if row["qoses"] is None else tuple(map(_qos, row["qoses"]))
            return cls(Config(dict(row["config"])), partitions, qoses)
        except (KeyError, TypeError, AttributeError, UnreadableOutput) as error:
            raise ValueError(str(error)) from None


def _partition(row: Mapping[str, Any]) -> Partition:
    return Partition(**{**row, "nodes": expand_nodes(row["nodes"])})


def _qos(row: Mapping[str, Any]) -> Qos:
    return Qos(**{**row, "preempts": tuple(row["preempts"])})


def read_policies(client: SlurmClient) -> Policies | None:
    """As :meth:`Policies.read`; None where Slurm could not be asked."""
    try:
        return Policies.read(client)
    except SlurmError:
        return None


def shared_policies(
    client: SlurmClient, environ: Mapping[str, str], *, patience_s: float = PATIENCE_S
) -> Policies:
    """What a process of this user on this node has read within ``LIFE_S``, else what Slurm answers
    now; of several that need it at once one asks.

    Believed is only a file that nobody but this user and root can have written: who could put
    another KillWait there would have saves begin too late.

    Args:
        patience_s: how long another process of this node is left to ask for all.

    Raises:
        SlurmError: Slurm could not be asked.
    """
    try:
        folder = registry.folder(environ)
    except RunFolderError:  # no place of our own on this node
        return Policies.read(client)
    # a node may serve several clusters, and the backends do not tell the same settings
    names = ("SLURM_CONF", "SLURM_CLUSTER_NAME", BACKEND_ENV)
    which = "\0".join(environ.get(name, "") for name in names)
    path = folder / f"slurm-{hashlib.sha256(which.encode()).hexdigest()[:16]}.json"
    known = _recent(path)
    if known is not None:
        return known
    with _alone(path.with_suffix(".lock"), patience_s=patience_s):
        known = _recent(path)
        if known is not None:
            return known
        read = Policies.read(client)
        if read.is_complete:
            with contextlib.suppress(OSError):
                write_atomically(path, read.to_json())
        return read


def _recent(path: Path) -> Policies | None:
    try:
        age_s = time.time() - path.lstat().st_mtime
        if not 0 <= age_s < LIFE_S or not is_trusted(path):
            return None
        return Policies.from_json(read_regular(path, limit_bytes=_LIMIT_BYTES))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _alone(path: Path, *, patience_s: float) -> Iterator[None]:
    """Hold a lock that other processes of this user on this node wait for, but not for long: who
    holds it may be stopped."""
    try:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        yield
        return
    try:
        until_s = time.monotonic() + patience_s
        while time.monotonic() < until_s:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)
