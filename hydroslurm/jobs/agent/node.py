"""One node, from torchrun's arguments to its exit status: the agent's signals and its workers."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hydroslurm.coordination.network import set_master_addr
from hydroslurm.coordination.rendezvous import step_key
from hydroslurm.coordination.world import key_from
from hydroslurm.core import registry
from hydroslurm.core.events import Event, EventKind, EventLog, clocks
from hydroslurm.core.exitcodes import CANCELLED
from hydroslurm.core.rundir import ELASTIC_ENV, RunDir, variables_of
from hydroslurm.core.signals import signal_name
from hydroslurm.core.threads import thread
from hydroslurm.elastic.folder import ElasticFolder, member_name
from hydroslurm.errors import HydroslurmError, RanksError, RunFolderError
from hydroslurm.gate.signals import SignalPlan
from hydroslurm.jobs.agent.rendezvous import agents, find_rendezvous
from hydroslurm.jobs.agent.workers import MEANINGS, Meaning, Workers
from hydroslurm.slurm import run_folders
from hydroslurm.slurm.allocation import Allocation

_POLL_S = 0.01
"""Between two looks for workers that listen, while one is owed a request."""


class Departed(BaseException):
    """This agent leaves, with this exit status: a stop was requested while there was no worker to
    forward it to, or it is a member of an elastic run that goes.

    Not an Exception, because torch catches those on the way.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class SignalPipe:
    """Keeps signals from killing or stopping this process, and reports which ones came.

    Python's C handler writes the number at once, even while the main thread is inside a long call
    into torch. Open and close it in the main thread; only one other thread may :meth:`wait`.
    """

    def __init__(self, signals: Iterable[int], *, stops: Iterable[int] = ()) -> None:
        """``stops``: those that end an :meth:`interruptible` block."""
        self._signals = frozenset(signals)
        self._stops = frozenset(stops)
        self._interruptible = False
        self._before: dict[int, Any] = {}
        self._read_fd = self._write_fd = self._wakeup_before = -1

    def open(self) -> None:
        """Install the handlers; a second call takes back signals that somebody else took since."""
        if self._read_fd < 0:
            self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signo in self._signals:
            before = signal.signal(signo, self._arrived)
            self._before.setdefault(signo, before)
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, self._signals
        )  # blocked until now: autoload.hold

    def close(self, *, to_exit: bool = False) -> None:
        """Restore the previous handlers, and end :meth:`wait`.

        Args:
            to_exit: ignore the signals instead. Slurm sends SIGTERM twice, and srun once more when
                the first task has failed: it would kill a process that is about to exit with a
                status of its own.
        """
        for signo, before in self._before.items():
            kept = signal.SIG_DFL if before is None else before
            signal.signal(signo, signal.SIG_IGN if to_exit else kept)
        self._before.clear()
        if self._write_fd >= 0:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._write_fd)
            self._write_fd = -1

    def wait(self, timeout_s: float | None) -> list[int] | None:
        """The signals that came, in order; empty after ``timeout_s``, None after :meth:`close`."""
        watch = select.poll()  # select() cannot look at descriptors above 1023
        watch.register(self._read_fd, select.POLLIN)
        if not watch.poll(None if timeout_s is None else max(0.0, timeout_s * 1e3)):
            return []
        data = os.read(self._read_fd, 4096)
        if not data:
            os.close(self._read_fd)
            return None
        return [signo for signo in data if signo in self._signals]

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a stop that arrives inside the block end it.

        Raises:
            Departed: in the main thread, from the handler.
        """
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _arrived(self, signo: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._interruptible and signo in self._stops:
            raise Departed(CANCELLED)


class Node:
    """Receives signals in a thread of its own and forwards them to the workers.

    Attributes:
        stop_asked: set by the first SIGTERM or SIGURG; nothing is started from then on.
        stop_reason: the name of that signal.
        workers: those that there are now.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """
        Raises:
            UsageError: bad HYDROSLURM_SIGNALS, or a SLURM_* value that Slurm never gives.
        """
        plan = SignalPlan().with_environment(environ)
        # the others of an elastic run go on without a node that is suspended
        plan = replace(plan, suspend_stops=bool(environ.get(ELASTIC_ENV)))
        numbers = {meaning: getattr(plan, meaning) for meaning in MEANINGS}
        self._meanings: dict[int, Meaning] = {
            signo: "stop" if signo in plan.stopping() and meaning == "slurm_pause" else meaning
            for meaning, signo in numbers.items()
            if signo is not None
        }
        self.signal_pipe = SignalPipe(self._meanings, stops=plan.stopping())
        self.log = NodeLog(environ)
        self.stop_asked = threading.Event()
        self.stop_reason = ""
        self.workers = Workers(_registry(environ, self.log))
        self._on_suspend: Callable[[bool], None] = lambda _: None

    @property
    def signals(self) -> frozenset[int]:
        """Those that this node handles itself."""
        return frozenset(self._meanings)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the block, after which the process is to exit. Main thread only."""
        self.signal_pipe.open()
        listener = thread(self._listen, name="hydroslurm-node")
        listener.start()
        try:
            yield
        finally:
            self.signal_pipe.close(to_exit=True)
            listener.join(5.0)
            self.log.close()

    def on_suspend(self, callback: Callable[[bool], None]) -> None:
        """Call it with True when Slurm is about to stop this process, with False when it goes
        on."""
        self._on_suspend = callback

    def started(self, number: int, pids: Mapping[int, int]) -> None:
        """Take over new workers, local rank -> pid."""
        self.log.settle(number)
        self.workers.start(pids)
        self.signal_pipe.open()  # torch may have replaced a handler when it started them
        self.log.record(
            EventKind.WORKERS_STARTED, {"pids": {str(rank): pid for rank, pid in pids.items()}}
        )
        self.log.info(f"{len(pids)} workers started")

    def _listen(self) -> None:
        while True:
            arrived = self.signal_pipe.wait(_POLL_S if self.workers.owe else None)
            if arrived is None:
                return
            acts: list[Callable[[], None]] = [partial(self._take, signo) for signo in arrived]
            for act in (*acts, self.workers.look):
                try:
                    act()
                except Exception:  # without this thread no signal reaches the workers
                    LOGGER.exception("a signal could not be passed on")

    def _take(self, signo: int) -> None:
        meaning = self._meanings[signo]
        if meaning in ("stop", "warning"):
            self.stop_reason = self.stop_reason or signal_name(signo)
            self.stop_asked.set()
        # SIGTSTP is followed by SIGSTOP, which must not cut a call to torch's store in two
        self._on_suspend(meaning == "slurm_pause")
        self.workers.ask(meaning)
        count, owed = len(self.workers.all), self.workers.owe
        wanting = ", some of which do not listen yet" if owed else ""
        self.log.info(f"{signal_name(signo)} passed on to {count} workers{wanting}")
        self.log.record(
            EventKind.SIGNAL_PASSED_ON,
            {"signal": signal_name(signo), "meaning": meaning, "workers": count, "owed": owed},
        )


def _registry(environ: Mapping[str, str], log: NodeLog) -> Path | None:
    try:
        return registry.folder(environ)
    except HydroslurmError as error:
        log.warning(f"{error}; signals cannot be forwarded to the workers")
        return None


LOGGER = logging.getLogger("hydroslurm.jobs.agent")


class NodeLog:
    """The events and the log of one node. The file is opened once the node has its number: that of
    its Slurm task, else that of the rendezvous."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.run = self._run_folder(environ)
        self._allocation = Allocation.from_environ(environ)
        self._log: EventLog | None = None
        self._early: list[tuple[EventKind, dict[str, object]]] = []
        self._member = ""
        if environ.get(ELASTIC_ENV):
            self._member = member_name(environ)
        self.number: int | None = None
        if self._allocation is not None and self._allocation.step_id is not None:
            self.settle(self._allocation.rank)

    def _run_folder(self, environ: Mapping[str, str]) -> RunDir | None:
        try:
            run = run_folders.from_environment(environ)
            return run and run.claim()
        except RunFolderError as error:
            LOGGER.warning("%s. The agent writes no events", error)
            return None

    def settle(self, number: int) -> None:
        """Set the node's number; the first one counts."""
        if self.number is not None:
            return
        self.number = number
        self._log = EventLog(self.run.agent_events(number) if self.run else None)
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

    def info(self, text: str) -> None:
        """Log one line."""
        LOGGER.info("%s: %s", self._name, text)

    def warning(self, text: str) -> None:
        """Log one line that somebody should read."""
        LOGGER.warning("%s: %s", self._name, text)

    @property
    def _name(self) -> str:
        """A member keeps its name, and has another number in each generation."""
        if self._member:
            return f"member {self._member}"
        return f"node {'?' if self.number is None else self.number}"

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def run_agent(arguments: Sequence[str], *, environ: MutableMapping[str, str]) -> int:
    """Start workers as torchrun would, and forward Slurm's signals to them.

    Args:
        arguments: torchrun's. The tasks of a job step that name no rendezvous meet at a store of
            the first task.
        environ: SLURM_*, HYDROSLURM_*; MASTER_ADDR is set in it if the first node's name does not
            resolve. Torch reads ``os.environ`` itself.

    Returns:
        The exit status of the node: 0; 75, 93 or 143 as in :mod:`hydroslurm.core.exitcodes` if the
        workers have left on purpose; 2, 126 or 127 if there is no such script or program; else that
        of the first worker that failed, 128 + N if a signal killed it.

    Raises:
        SystemExit: wrong arguments; torchrun has printed what is wrong.
        UsageError: a variable has an impossible value.
    """
    node = Node(environ)
    if node.log.run is not None:  # the workers have a command line of their own
        environ.update(variables_of(node.log.run.root, environ))
    with node.listening():
        key = _shared_key(environ, node)
        where = find_rendezvous(environ, key=key)
        # takes seconds, during which a signal must not kill us
        from hydroslurm.jobs.agent import elastic

        status: int | None = None
        try:
            place = environ.get(ELASTIC_ENV)
            run = ElasticFolder(run=Path(place).absolute()) if place else None
            status = elastic.launch(list(arguments), node=node, where=where, key=key, run=run)
        finally:
            node.log.record(EventKind.AGENT_LEFT, {"status": status})
        node.log.info(f"leaves with status {status}")
        return status


def _shared_key(environ: MutableMapping[str, str], node: Node) -> bytes | None:
    """The key that the agents share; None for a single agent, and if there is none: the workers
    then look for one themselves and report what is missing. Also sets where the agents meet."""
    key, world = key_from(environ), agents(environ)
    if world is None:
        return key
    try:
        world = set_master_addr(world, environ)
        return key or step_key(world, environ, stop=node.stop_asked.is_set)
    except RanksError as error:
        if not node.stop_asked.is_set():
            node.log.warning(str(error))
        return key
