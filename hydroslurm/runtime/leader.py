"""The rank's side of pausing its children: it tells them to park, and knows which of them do not.

A child that multiprocessing has made and that uses torch has a gate of its own
(:mod:`hydroslurm.runtime.follower`) and a connection to its rank. Once the rank is parked it tells
its children to park too, not before: to reach a collective with the other ranks it may need what
they make. Children that have no gate and keep using a processor are named in an event.
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

_MESSAGE = struct.Struct("<Q")
CHECK_S = 1.0
"""How long after parking a rank first checks which of its children use a processor. Each further
check comes after twice as long, for it has to read all processes of the machine."""
_LONGEST_CHECK_S = 30.0
_BUSY = 0.25
"""Share of a processor. A worker that fills its queue is mostly done before the second check."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _address(pid: int, started: int) -> bytes:
    """Where a rank listens for its children: in the abstract namespace, for paths may be too long.
    Anybody can connect there, or listen there first: both sides ask the kernel who is at the other
    end."""
    return f"\0hydroslurm-{pid}-{started}".encode()


class Link:
    """One end of the connection between a rank and a child of it.

    A message is the number of the pause that the child is to be in, or that it is in; 0 for none.
    Both sides send one whenever that changes. A forked child closes its copy, so that the other end
    notices when this process is gone.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        """``connection``: one that exists; default: a new socket."""
        self._socket = connection or socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _open_links.add(self)

    def listen(self) -> None:
        """Become the listener of this process. Raises OSError."""
        pid = os.getpid()
        self._socket.bind(_address(pid, registry.start_ticks(pid) or 0))
        self._socket.listen(128)

    def accept(self) -> Link | None:
        """A child that connects; None for anybody else's process."""
        try:
            link = Link(self._socket.accept()[0])
        except OSError:
            return None
        if link.peer()[1] != os.getuid():
            link.close()
            return None
        link._socket.setblocking(False)
        return link

    def connect(self, pid: int, started: int) -> bool:
        """Connect to the rank of this process id and start time; False if nobody listens there, or
        somebody else does."""
        with contextlib.suppress(OSError):
            self._socket.connect(_address(pid, started))
            return self.peer() == (pid, os.getuid())
        return False

    def peer(self) -> tuple[int, int]:
        """The process id and the user id at the other end, as the kernel knows them."""
        pid, uid, _ = struct.unpack(
            "3i",
            self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")),
        )
        return pid, uid

    def send(self, pause: int) -> None:
        with contextlib.suppress(OSError):  # the other end is gone, which is received; or is full
            self._socket.send(_MESSAGE.pack(pause))

    def receive(self) -> int | None:
        """The message that has arrived; None: the other end is gone."""
        try:
            data = self._socket.recv(_MESSAGE.size)
        except OSError:
            return None
        return _MESSAGE.unpack(data)[0] if len(data) == _MESSAGE.size else None

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


_open_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _close_all() -> None:
    for link in list(_open_links):
        link.close()


os.register_at_fork(after_in_child=_close_all)


class Children:
    """Tells the children that follow this process when to park, and knows which of them do not.

    A thread of its own owns the connections. What it knows is replaced as a whole, so the
    controller's thread needs no lock.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake``: called in the thread when a child has parked, or is gone."""
        self._wake = wake
        self._pause = 0
        self._leaving = False
        self._parked_by_pid: Mapping[int, bool] = {}
        self._thread: threading.Thread | None = None
        self._checked_mono_s = 0.0
        self._check_after_s = CHECK_S
        self._checks = 0
        self._uses: Mapping[int, _Use] = {}
        self._busy: frozenset[int] = frozenset()
        self._reported: tuple[list[int], list[int]] | None = None

    def start(self) -> None:
        """Listen. Raises OSError if that is impossible: children then keep running during a pause,
        and are named."""
        listener = Link()
        try:
            listener.listen()
            self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            listener.close()
            raise
        self._thread = threading.Thread(
            target=self._serve, args=(listener,), name="hydroslurm-children", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Let them go, and disconnect."""
        if self._thread is not None:
            self._leaving = True
            os.eventfd_write(self._wakeup_fd, 1)
            self._thread.join()
            os.close(self._wakeup_fd)
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
        return max(0.0, self._checked_mono_s + self._check_after_s - time.monotonic())

    def hold(self, pause: int) -> None:
        """This process is parked, in the pause of that number."""
        if pause != self._pause:
            self._checked_mono_s, self._check_after_s = time.monotonic(), CHECK_S
            self._checks, self._uses, self._busy = 0, {}, frozenset()
            self._reported = None if self._parked_by_pid else ([], [])
            self._announce(pause)

    def release(self) -> None:
        """This process runs again."""
        if self._pause:
            self._announce(0)

    def news(self) -> dict[str, object] | None:
        """Which children are parked and which keep running, if that has changed since the last
        call: once all that have a gate are parked, and whenever the others were checked."""
        if not self._pause:
            return None
        followers = self._parked_by_pid
        parked = {pid for pid, is_parked in followers.items() if is_parked}
        if self.wait_s == 0.0:
            self._check_processors()
        if len(parked) < len(followers) and self._checks < 2:
            return None  # they may be inside long operators
        report = sorted(parked), sorted((self._busy | followers.keys()) - parked)
        if report == self._reported:
            return None
        self._reported = report
        return {"parked_pids": report[0], "running_pids": report[1]}

    def _check_processors(self) -> None:
        uses, now_mono_s = _uses_below(os.getpid()), time.monotonic()
        most = (now_mono_s - self._checked_mono_s) * _TICKS_PER_S
        self._busy = frozenset(
            pid for pid, use in uses.items() if use.goes_on(self._uses.get(pid, use), most)
        )
        self._check_after_s = min(2 * self._check_after_s, _LONGEST_CHECK_S)
        self._checks += 1
        self._checked_mono_s, self._uses = now_mono_s, uses

    def _announce(self, pause: int) -> None:
        self._pause = pause
        if self._thread is not None:
            os.eventfd_write(self._wakeup_fd, 1)

    # --- the thread

    def _serve(self, listener: Link) -> None:
        links: dict[int, Link] = {}
        parked: dict[int, bool] = {}
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        poller.register(self._wakeup_fd, select.POLLIN)
        while not self._leaving:
            for fd, _ in poller.poll():
                if fd == self._wakeup_fd:
                    os.eventfd_read(self._wakeup_fd)
                    parked = dict.fromkeys(links, False)
                    for link in links.values():
                        link.send(self._pause)
                elif fd == listener.fileno():
                    new = listener.accept()
                    if new is not None:
                        new.send(self._pause)
                        links[new.fileno()], parked[new.fileno()] = new, False
                        poller.register(new, select.POLLIN)
                elif (pause := links[fd].receive()) is None:
                    poller.unregister(fd)
                    links.pop(fd).close()
                    del parked[fd]
                else:
                    parked[fd] = 0 < pause == self._pause
            now = {links[fd].peer()[0]: is_parked for fd, is_parked in parked.items()}
            if now != self._parked_by_pid:
                self._parked_by_pid = now
                self._wake()
        for link in (listener, *links.values()):
            link.close()


class _Use(NamedTuple):
    """A process's use of the processors: clock ticks so far, and whether it wants one now."""

    ticks: int
    is_runnable: bool

    def goes_on(self, before: _Use, most: float) -> bool:
        """``most``: ticks that one processor could have given it since. Where many processes want
        one, that is no measure, but each of them is found runnable."""
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
