"""One node: its agent's signals, its workers, and the one state that it reports."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from hydroslurm.core import registry
from hydroslurm.core.events import EventKind
from hydroslurm.errors import HydroslurmError
from hydroslurm.gate.signals import SignalPlan, signal_name
from hydroslurm.jobs.agent import nodestate
from hydroslurm.jobs.agent.nodelog import NodeLog
from hydroslurm.jobs.agent.signal_pipe import Mailbox
from hydroslurm.jobs.agent.workers import MEANINGS, Meaning, Workers

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
        self.mailbox = Mailbox(self._meanings, stops=plan.stopping())
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
        self.mailbox.open()
        thread = threading.Thread(target=self._hear, name="hydroslurm-node", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.mailbox.close(to_exit=True)
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
        self.mailbox.open()  # torch may have taken a signal over when it started them
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
            arrived = self.mailbox.wait(None if self._watched is None else _POLL_S)
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
        self.log.say(f"{state.name}: {state.words()}{wanted}", warning=not answered)


def _registry(environ: Mapping[str, str], log: NodeLog) -> Path | None:
    try:
        return registry.folder(environ)
    except HydroslurmError as error:
        log.say(f"{error}; signals cannot be handed on to the workers", warning=True)
        return None
