"""What an agent writes down: events of its own in the run folder, and lines in its log."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

from hydroslurm.core.dates import clocks
from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.slurm import jobfolder
from hydroslurm.slurm.allocation import Allocation

LOGGER = logging.getLogger("hydroslurm.jobs.agent")


class NodeLog:
    """The log of one node. The file is opened when the node has its number: Slurm's of the task,
    else that of the rendezvous."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._run = self._run_folder(environ)
        self._allocation = Allocation.from_environ(environ)
        self._log: EventLog | None = None
        self._early: list[tuple[EventKind, dict[str, object]]] = []
        self.number: int | None = None
        if self._allocation is not None and self._allocation.step_id is not None:
            self.settle(self._allocation.rank)

    def _run_folder(self, environ: Mapping[str, str]) -> RunDir | None:
        run = jobfolder.from_environment(environ)
        try:
            return run and run.claim()
        except RunFolderError as error:
            LOGGER.warning("%s. The agent writes no events", error)
            return None

    def settle(self, number: int) -> None:
        """Give the node its number; the first one stays."""
        if self.number is not None:
            return
        self.number = number
        self._log = EventLog(self._run.agent_events(number) if self._run else None)
        early, self._early = self._early, []
        for kind, data in early:
            self.record(kind, data)

    def record(self, kind: EventKind, data: dict[str, object]) -> None:
        """Write one event."""
        if self._log is None or self.number is None:
            self._early.append((kind, data))
            return
        mono_ns, epoch_ns = clocks()
        allocation = self._allocation
        self._log.append(
            Event(
                kind=kind,
                mono_ns=mono_ns,
                epoch_ns=epoch_ns,
                rank=self.number,
                job_id=allocation.job_id if allocation else None,
                restart_count=allocation.restart_count if allocation else 0,
                pid=os.getpid(),
                host=socket.gethostname(),
                data=data,
            )
        )

    def say(self, text: str, *, warning: bool = False) -> None:
        """One line for people."""
        level = logging.WARNING if warning else logging.INFO
        LOGGER.log(level, "node %s: %s", "?" if self.number is None else self.number, text)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
