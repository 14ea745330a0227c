"""A child that trains stands still with its rank: it has a gate of its own, and does what the rank
says.

Which children: those that multiprocessing makes (``mp.spawn``, ``Process``, ``Pool``), forked or
spawned, and that use torch; not DataLoader workers, whose queues fill up and stop by themselves,
and which a rank may need on its way to a collective. Such a child has no rank, listens to no signal
and is never asked to save. It runs when its rank is gone, has uninstalled, or stops.

The rank's number is in the environment (:data:`hydroslurm.runtime.below.BELOW_ENV`), where it
listens follows from that, and the kernel says that it is the one. A child that becomes a rank of
its own (``hydroslurm.install()``) follows no more.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import multiprocessing.util
import os
import select
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from hydroslurm.core import registry
from hydroslurm.core.events import EventKind
from hydroslurm.gate.protocol import Action, Cause
from hydroslurm.runtime import autoload, below, workers
from hydroslurm.runtime.followers import WORD, address, heard, peer_of, unshared

if TYPE_CHECKING:
    from hydroslurm.gate.native_gate import NativeGate

_RETRY_S = 1.0
_OF_DATA_LOADERS = ("torch.utils.data.", "torchdata.", workers.__name__)
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
_following: Following | None = None


def prepare() -> None:
    """Have each process that multiprocessing makes of this one from now on follow the rank above
    it; this one too, where multiprocessing is about to make it."""
    if not _bootstrap.registered:
        multiprocessing.util.register_after_fork(_bootstrap, _Bootstrap.run)
        # a spawned one has the place for it, and calls nobody there
        multiprocessing.context.SpawnProcess._after_fork = _bootstrap.run  # type: ignore[attr-defined]
        _bootstrap.registered = True


def follow() -> None:
    """Give this process a gate, and have the rank above it hold that. Does nothing where there is
    no such rank; a failure is one line on stderr."""
    global _following
    above = below.above(os.environ)
    if above is None or (_following is not None and _following.pid == os.getpid()):
        return
    link = _connect(above)
    if link is None:  # it has no gate that we could have too
        return
    try:
        _following = Following(above, link)
    except Exception as error:
        autoload.say(f"process {os.getpid()} goes on when its rank is paused: {error}")


def leave() -> None:
    """Follow no more: this process becomes a rank."""
    global _following
    if _following is not None and _following.pid == os.getpid():
        _following.stop()
    _following = None


class Following:
    """A started gate, and the thread that opens and closes it as the rank says."""

    def __init__(self, above: below.Above, link: socket.socket) -> None:
        """Raises GateError or InstallError where this process can have no gate."""
        from hydroslurm.gate.native_gate import NativeGate

        self.pid = os.getpid()
        self._above = above
        self._gate: NativeGate = NativeGate()
        self._gate.start([])
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._loop, args=(link,), name="hydroslurm-following", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._gate.wake()
        self._thread.join()
        self._gate.stop()

    def _loop(self, link: socket.socket | None) -> None:
        with self._gate.exempt():
            while not self._ended.is_set():
                if link is not None:
                    try:
                        self._obey(link)
                    finally:
                        link.close()
                        link = None
                        self._gate.request(Action.RESUME, Cause.PEERS)
                elif registry.start_ticks(self._above.pid) != self._above.started:
                    return
                if not self._ended.wait(_RETRY_S):  # it may install again
                    link = _connect(self._above)

    def _obey(self, link: socket.socket) -> None:
        """Until the connection ends."""
        poller = select.poll()
        poller.register(link, select.POLLIN)
        poller.register(self._gate.fileno(), select.POLLIN)
        pause, asked_ns, parked = 0, 0, False
        while not self._ended.is_set():
            ready = {fd for fd, _ in poller.poll()}
            answers = False
            if link.fileno() in ready:
                word = heard(link)
                if word is None:
                    return
                pause = word
                parked = answers = parked and pause > 0
                if not parked:
                    asked_ns = time.monotonic_ns()
                    self._gate.request(Action.PAUSE if pause else Action.RESUME, Cause.PEERS)
            for event in self._gate.wait_events(0):
                # one of the pause before may still be in the queue
                if event.kind is EventKind.PARKED and pause and event.value_ns >= asked_ns:
                    parked = answers = True
            if answers:
                with contextlib.suppress(OSError):  # the rank is gone, which is heard next
                    link.send(WORD.pack(pause))


def _connect(above: below.Above) -> socket.socket | None:
    """None: nobody listens there, or somebody else."""
    link = unshared(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        link.connect(address(above.pid, above.started))
        if peer_of(link) == (above.pid, os.getuid()):
            return link
    except OSError:
        pass
    link.close()
    return None
