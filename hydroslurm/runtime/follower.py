"""The child's side: a process that trains below a rank parks when the rank says so.

Which children: those that multiprocessing makes (``mp.spawn``, ``Process``, ``Pool``), forked or
spawned, and that use torch. Not DataLoader workers: their queues fill up and they stop by
themselves, and a rank may need them on its way to a collective. Such a child has no rank, handles
no signal and is never asked to save. It runs again when its rank is gone, has uninstalled, or
stops.

The environment names the rank (:data:`hydroslurm.runtime.autoload.BELOW_ENV`), its address follows
from that, and the kernel confirms who listens there. A child that becomes a rank of its own
(``hydroslurm.install()``) stops following.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.util
import os
import select
import sys
import threading
import time
from typing import TYPE_CHECKING

from hydroslurm.core import registry
from hydroslurm.core.events import EventKind
from hydroslurm.gate.protocol import Action, Cause
from hydroslurm.runtime import autoload, child_signals
from hydroslurm.runtime.leader import Link

if TYPE_CHECKING:
    from hydroslurm.gate.native_gate import NativeGate

_RETRY_S = 1.0
_OF_DATA_LOADERS = ("torch.utils.data.", "torchdata.", child_signals.__name__)
"""Modules of what a DataLoader worker runs: its loop, or our guard around that."""


class _Bootstrap:
    """What multiprocessing keeps, and calls in each process that it has made."""

    registered = False

    def run(self) -> None:
        target = getattr(multiprocessing.current_process(), "_target", None)
        if getattr(target, "__module__", "").startswith(_OF_DATA_LOADERS):
            return
        if "torch" in sys.modules:
            follow()
        else:
            autoload.after_torch(follow)


_bootstrap = _Bootstrap()
_follower: Follower | None = None


def prepare() -> None:
    """Make each process that multiprocessing makes of this one from now on follow the rank above
    it; this one too, if multiprocessing is about to make it."""
    if not _bootstrap.registered:
        multiprocessing.util.register_after_fork(_bootstrap, _Bootstrap.run)
        # a spawned process has the hook, but nothing calls it there
        multiprocessing.context.SpawnProcess._after_fork = _bootstrap.run  # type: ignore[attr-defined]
        _bootstrap.registered = True


def follow() -> None:
    """Give this process a gate that the rank above it opens and closes. Does nothing if there is no
    such rank; a failure is one line on stderr."""
    global _follower
    rank = autoload.rank_above(os.environ)
    if rank is None or (_follower is not None and _follower.pid == os.getpid()):
        return
    link = _connect(rank)
    if link is None:  # its gate is one that we could not have too
        return
    try:
        _follower = Follower(rank, link)
    except Exception as error:
        autoload.say_not_paused(error)


def leave() -> None:
    """Stop following: this process becomes a rank."""
    global _follower
    if _follower is not None and _follower.pid == os.getpid():
        _follower.stop()
    _follower = None


class Follower:
    """A started gate, and the thread that opens and closes it as the rank says."""

    def __init__(self, rank: autoload.RankAbove, link: Link) -> None:
        """Raises GateError or InstallError if this process can have no gate."""
        from hydroslurm.gate.native_gate import NativeGate

        self.pid = os.getpid()
        self._rank = rank
        self._gate: NativeGate = NativeGate()
        self._gate.start([])
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._loop, args=(link,), name="hydroslurm-follower", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._gate.wake()
        self._thread.join()
        self._gate.stop()

    def _loop(self, link: Link | None) -> None:
        with self._gate.exempt():
            while not self._ended.is_set():
                if link is not None:
                    try:
                        self._obey(link)
                    finally:
                        link.close()
                        link = None
                        self._gate.request(Action.RESUME, Cause.PEERS)
                elif registry.start_ticks(self._rank.pid) != self._rank.started:
                    return
                if not self._ended.wait(_RETRY_S):  # it may install again
                    link = _connect(self._rank)

    def _obey(self, link: Link) -> None:
        """Until the connection ends."""
        poller = select.poll()
        poller.register(link, select.POLLIN)
        poller.register(self._gate.fileno(), select.POLLIN)
        pause, asked_ns, parked = 0, 0, False
        while not self._ended.is_set():
            ready = {fd for fd, _ in poller.poll()}
            answers = False
            if link.fileno() in ready:
                message = link.receive()
                if message is None:
                    return
                pause = message
                parked = answers = parked and pause > 0
                if not parked:
                    asked_ns = time.monotonic_ns()
                    self._gate.request(Action.PAUSE if pause else Action.RESUME, Cause.PEERS)
            for event in self._gate.wait_events(0):
                # one of the pause before may still be in the queue
                if event.kind is EventKind.PARKED and pause and event.value_ns >= asked_ns:
                    parked = answers = True
            if answers:
                link.send(pause)


def _connect(rank: autoload.RankAbove) -> Link | None:
    """None: nobody listens there, or somebody else."""
    link = Link()
    if link.connect(rank.pid, rank.started):
        return link
    link.close()
    return None
