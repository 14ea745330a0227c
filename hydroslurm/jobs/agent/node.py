"""One node, from torchrun's arguments to its exit status: the agent's signals, its workers, and the
one state that it reports."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

from hydroslurm.coordination.address import set_master_addr
from hydroslurm.coordination.rendezvous import step_key
from hydroslurm.coordination.secret import key_from
from hydroslurm.core import registry
from hydroslurm.core.dates import clocks
from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import HydroslurmError, RanksError, RunFolderError
from hydroslurm.gate.signals import SignalPlan, signal_name
from hydroslurm.jobs.agent import nodestate
from hydroslurm.jobs.agent.rendezvous import agents, find_rendezvous
from hydroslurm.jobs.agent.signal_pipe import SignalPipe
from hydroslurm.jobs.agent.workers import MEANINGS, Meaning, Workers
from hydroslurm.slurm import run_folders
from hydroslurm.slurm.allocation import Allocation

ANSWER_S = 10.0
"""After so long without an answer of all workers the state is reported as it is."""
_POLL_S = 0.01


class Node:
    """Hears signals in a thread of its own and hands them on.

    Attributes:
        stop_asked: set by the first SIGTERM or SIGURG; nothing is started from then on.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """
        Raises:
            UsageError: bad HYDROSLURM_SIGNALS, or SLURM_* of a value that Slurm never gives.
        """
        plan = SignalPlan().with_environment(environ)
        numbers = {meaning: getattr(plan, meaning) for meaning in MEANINGS}
        self._meanings: dict[int, Meaning] = {
            signo: meaning for meaning, signo in numbers.items() if signo is not None
        }
        self.signal_pipe = SignalPipe(self._meanings, stops=plan.stopping())
        self.log = NodeLog(environ)
        self.stop_asked = threading.Event()
        self._workers = Workers(_registry(environ, self.log))
        self._lock = threading.Lock()
        self._watched: tuple[Meaning, int, int] | None = None
        self._on_suspend: Callable[[bool], None] = lambda _: None

    @property
    def signals(self) -> frozenset[int]:
        """Those that this node takes for itself."""
        return frozenset(self._meanings)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Keep signals for the length of a block, behind which the process is to exit; in the main
        thread."""
        self.signal_pipe.open()
        thread = threading.Thread(target=self._hear, name="hydroslurm-node", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.signal_pipe.close(to_exit=True)
            thread.join(5.0)
            self.log.close()

    def on_suspend(self, tell: Callable[[bool], None]) -> None:
        """Have it told when Slurm is about to stop this process (True), and when it goes on."""
        self._on_suspend = tell

    def started(self, number: int, pids: Mapping[int, int]) -> None:
        """New workers run, local rank -> pid."""
        with self._lock:
            self.log.settle(number)
            self._workers.start(pids)
        self.signal_pipe.open()  # torch may have taken a signal over when it started them
        self.log.record(
            EventKind.WORKERS_STARTED, {"pids": {str(rank): pid for rank, pid in pids.items()}}
        )
        self.log.say(f"{len(pids)} workers started")

    def look(self) -> None:
        """Give the workers what they are owed, where they listen by now."""
        with self._lock:
            self._workers.look()

    def is_stopping(self, local_ranks: Collection[int]) -> bool:
        """Whether one of these workers has said that it is on its way out."""
        with self._lock:
            asked = [each for each in self._workers.all if each.local_rank in local_ranks]
        return "stopping" in nodestate.read(asked).counts

    def kill_listeners(self) -> None:
        """See :meth:`Workers.kill_listeners`."""
        with self._lock:
            self._workers.look()
            self._workers.kill_listeners()

    def _hear(self) -> None:
        while True:
            arrived = self.signal_pipe.wait(None if self._watched is None else _POLL_S)
            if arrived is None:
                return
            for signo in arrived:
                self._take(signo)
            self._report()

    def _take(self, signo: int) -> None:
        meaning = self._meanings[signo]
        arrived_mono_ns, arrived_epoch_ns = time.monotonic_ns(), time.time_ns()
        if meaning in ("stop", "warning"):
            self.stop_asked.set()
        # a TSTP is followed by SIGSTOP, which nothing of torch's should be in the middle of
        self._on_suspend(meaning == "slurm_pause")
        with self._lock:
            self._workers.ask(meaning)
            count, owed = len(self._workers.all), self._workers.owe
        self._watched = (meaning, arrived_mono_ns, arrived_epoch_ns)
        self.log.record(
            EventKind.SIGNAL_PASSED_ON,
            {"signal": signal_name(signo), "meaning": meaning, "workers": count, "owed": owed},
        )

    def _report(self) -> None:
        """One event and one line, when all have answered or the time is over."""
        if self._watched is None:
            return
        meaning, since_mono_ns, since_epoch_ns = self._watched
        with self._lock:
            self._workers.look()
            state = nodestate.read(self._workers.all)
        answered = bool(state.counts) and state.answers(meaning)
        if not answered and time.monotonic_ns() - since_mono_ns < ANSWER_S * 1e9:
            return
        self._watched = None
        took_us = max(0, state.since_epoch_ns - since_epoch_ns) / 1e3 if answered else None
        self.log.record(
            EventKind.NODE_STATE,
            {
                "state": state.name,
                "counts": dict(state.counts),
                "held_for": list(state.held_for),
                "asked": meaning,
                "answered": answered,
                "took_us": took_us,
            },
        )
        wanted = "" if answered else f"; asked for {meaning} {ANSWER_S:g} s ago"
        self.log.say(f"{state.name}: {state.message()}{wanted}", warning=not answered)


def _registry(environ: Mapping[str, str], log: NodeLog) -> Path | None:
    try:
        return registry.folder(environ)
    except HydroslurmError as error:
        log.say(f"{error}; signals cannot be handed on to the workers", warning=True)
        return None


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
        run = run_folders.from_environment(environ)
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


def run_agent(arguments: Sequence[str], *, environ: MutableMapping[str, str]) -> int:
    """Start workers as torchrun would, and hand Slurm's signals on to them.

    Args:
        arguments: torchrun's. In a job step of several tasks that name no rendezvous, the tasks
            meet at a store of the first one.
        environ: SLURM_*, HYDROSLURM_*; MASTER_ADDR is set in it where the first node's name does
            not resolve. Torch reads ``os.environ`` itself.

    Returns:
        The status of the node: 0; 75, 93 or 143 as in :mod:`hydroslurm.core.exitcodes` when the
        workers have left on purpose; 2, 126 or 127 when there is no such script or program; else
        that of the first worker that failed, 128 + N where a signal killed it.

    Raises:
        SystemExit: wrong arguments; torchrun has printed what is wrong.
        UsageError: a variable has a value that it never has.
    """
    node = Node(environ)
    with node.listening():
        key = _shared_key(environ, node)
        where = find_rendezvous(environ, key=key)
        # seconds, in which a signal must not kill already
        from hydroslurm.jobs.agent import elastic

        status: int | None = None
        try:
            status = elastic.launch(list(arguments), node=node, where=where, key=key)
        finally:
            node.log.record(EventKind.AGENT_LEFT, {"status": status})
        node.log.say(f"leaves with status {status}")
        return status


def _shared_key(environ: MutableMapping[str, str], node: Node) -> bytes | None:
    """The key of the agents; None for a single one, and where they have none: their workers then
    look for one themselves, and say what is missing. Where they meet is settled on the way."""
    key, world = key_from(environ), agents(environ)
    if world is None:
        return key
    try:
        world = set_master_addr(world, environ)
        return key or step_key(world, environ, stop=node.stop_asked.is_set)
    except RanksError as error:
        if not node.stop_asked.is_set():
            node.log.say(str(error), warning=True)
        return key
