"""What a rank tells the processes below it when it is paused, and what it knows of them.

A process that multiprocessing has made and that uses torch has a gate of its own
(:mod:`hydroslurm.runtime.following`) and is connected to its rank. Once the rank is parked it tells
them to park, before it goes on to let them go: to come to a collective with the other ranks it may
need what they make. Whoever has no gate and goes on using the processor is named.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from hydroslurm.core import registry

WORD = struct.Struct("<Q")
"""A message between a rank and a child of it: the number of the pause to be in, or that is kept; 0
for none. Both say so whenever it changes."""
LOOK_S = 1.0
"""After how long a parked rank looks what its children have used. The next look, twice as late,
tells which of them go on; and so on, for it has to look at all processes of the machine."""
_LOOK_MOST_S = 30.0
_BUSY = 0.25
"""Share of a processor. A worker that fills its queue is mostly done before the second look."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def address(pid: int, started: int) -> bytes:
    """Where a rank hears its children: in the abstract namespace, for paths may be too long.
    Anybody can connect there, or sit there first: both sides ask the kernel who the other one is.
    """
    return f"\0hydroslurm-{pid}-{started}".encode()


_unshared: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def unshared(link: socket.socket) -> socket.socket:
    """Have it closed in forked children: who is at its other end is to hear when we are gone."""
    _unshared.add(link)
    return link


def _close_unshared() -> None:
    for link in list(_unshared):
        link.close()


os.register_at_fork(after_in_child=_close_unshared)


def peer_of(link: socket.socket) -> tuple[int, int]:
    """The process id and the user id at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack(
        "3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid, uid


class Children:
    """Tells the children that follow this process when to stand still, and knows which do not.

    A thread of its own has the connections; what it knows is replaced as a whole, so that the
    controller's thread needs no lock.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake``: called in the thread when a child has parked, or is gone."""
        self._wake = wake
        self._pause = 0
        self._leaving = False
        self._parked_by_pid: Mapping[int, bool] = {}
        self._thread: threading.Thread | None = None
        self._looked_mono_s = 0.0
        self._look_after_s = LOOK_S
        self._looks = 0
        self._uses: Mapping[int, _Use] = {}
        self._busy: frozenset[int] = frozenset()
        self._told: tuple[list[int], list[int]] | None = None

    def start(self) -> None:
        """Listen. Raises OSError where that cannot be: they then go on during a pause, and are
        named."""
        pid = os.getpid()
        listener = unshared(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            listener.bind(address(pid, registry.start_ticks(pid) or 0))
            listener.listen(128)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            listener.close()
            raise
        self._thread = threading.Thread(
            target=self._serve, args=(listener,), name="hydroslurm-children", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Let them go, and hear no more of them."""
        if self._thread is not None:
            self._leaving = True
            os.eventfd_write(self._bell, 1)
            self._thread.join()
            os.close(self._bell)
            self._thread = None

    @property
    def following(self) -> int:
        """How many children have a gate."""
        return len(self._parked_by_pid)

    @property
    def wait_s(self) -> float | None:
        """How soon :meth:`news` is worth a call; None: nothing is paused."""
        if not self._pause:
            return None
        return max(0.0, self._looked_mono_s + self._look_after_s - time.monotonic())

    def hold(self, pause: int) -> None:
        """This process is parked, for the pause of that number."""
        if pause != self._pause:
            self._looked_mono_s, self._look_after_s = time.monotonic(), LOOK_S
            self._looks, self._uses, self._busy = 0, {}, frozenset()
            self._told = None if self._parked_by_pid else ([], [])
            self._tell(pause)

    def release(self) -> None:
        """This process goes on."""
        if self._pause:
            self._tell(0)

    def news(self) -> dict[str, object] | None:
        """Who stands still and who does not, where that has changed since it was asked last: once
        all have parked that have a gate, and whenever it was time to look at the others."""
        if not self._pause:
            return None
        followers = self._parked_by_pid
        parked = {pid for pid, is_parked in followers.items() if is_parked}
        if self.wait_s == 0.0:
            self._look()
        if len(parked) < len(followers) and self._looks < 2:
            return None  # they may be inside long operators
        told = sorted(parked), sorted((self._busy | followers.keys()) - parked)
        if told == self._told:
            return None
        self._told = told
        return {"parked_pids": told[0], "running_pids": told[1]}

    def _look(self) -> None:
        uses, now_mono_s = _uses_below(os.getpid()), time.monotonic()
        most = (now_mono_s - self._looked_mono_s) * _TICKS_PER_S
        self._busy = frozenset(
            pid for pid, use in uses.items() if use.goes_on(self._uses.get(pid, use), most)
        )
        self._look_after_s = min(2 * self._look_after_s, _LOOK_MOST_S)
        self._looks += 1
        self._looked_mono_s, self._uses = now_mono_s, uses

    def _tell(self, pause: int) -> None:
        self._pause = pause
        if self._thread is not None:
            os.eventfd_write(self._bell, 1)

    # --- the thread
    # --------------------------------------------------------------------------------------------

    def _serve(self, listener: socket.socket) -> None:
        links: dict[int, socket.socket] = {}
        parked: dict[int, bool] = {}
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        poller.register(self._bell, select.POLLIN)
        while not self._leaving:
            for fd, _ in poller.poll():
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                    parked = dict.fromkeys(links, False)
                    for link in links.values():
                        self._send(link)
                elif fd == listener.fileno():
                    new = self._accept(listener)
                    if new is not None:
                        links[new.fileno()], parked[new.fileno()] = new, False
                        poller.register(new, select.POLLIN)
                elif (pause := heard(links[fd])) is None:
                    poller.unregister(fd)
                    links.pop(fd).close()
                    del parked[fd]
                else:
                    parked[fd] = 0 < pause == self._pause
            now = {peer_of(links[fd])[0]: is_parked for fd, is_parked in parked.items()}
            if now != self._parked_by_pid:
                self._parked_by_pid = now
                self._wake()
        for link in (listener, *links.values()):
            link.close()

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        try:
            link, _ = listener.accept()
        except OSError:
            return None
        if peer_of(link)[1] != os.getuid():
            link.close()
            return None
        unshared(link).setblocking(False)
        self._send(link)
        return link

    def _send(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is gone, which is heard; or reads nothing
            link.send(WORD.pack(self._pause))


def heard(link: socket.socket) -> int | None:
    """The message that is there; None: who is at the other end has gone."""
    try:
        data = link.recv(WORD.size)
    except OSError:
        return None
    return WORD.unpack(data)[0] if len(data) == WORD.size else None


class _Use(NamedTuple):
    """What a process has of the processors: clock ticks so far, and whether it wants one now."""

    ticks: int
    is_runnable: bool

    def goes_on(self, before: _Use, most: float) -> bool:
        """``most``: what one processor could have given it since; where many want it, that is no
        measure."""
        used = self.ticks - before.ticks
        return used >= _BUSY * most or (used > 0 and self.is_runnable and before.is_runnable)


def _uses_below(top: int) -> dict[int, _Use]:
    """Of every process below one."""
    parents: dict[int, int] = {}
    uses: dict[int, _Use] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        uses[pid] = _Use(int(fields[11]) + int(fields[12]), fields[0] == "R")
    below = {top}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {pid: uses[pid] for pid in below - {top}}
