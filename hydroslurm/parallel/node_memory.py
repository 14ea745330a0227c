"""The memory that the ranks of one node share, and the connections that hand it over.

The first rank of a node makes a memfd: memory without a name, which is gone with the last process
that has it, however that ends. It sends the descriptor through a unix socket (an abstract one:
again no file), and only to processes of its own user, which the kernel vouches for; they look at
its user in the same way. Nobody else can open it: not by a name, for it has none, and not through
``/proc/PID/fd``, which the kernel keeps for the user. Its size is sealed, so that no rank can
take the memory away below another.

The connections stay open: by them, and by a descriptor of the process at the other end where the
kernel gives one, each rank learns of the death of the first one, which learns of every other's.

The ranks wait for each other at semaphores of the C library in that memory, one for each rank that
waits; they also order what was written before a post and is read after the wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO, Any

import torch

from hydroslurm.errors import ReductionFailed

ARRIVED, SUMMED, READY, TAKEN = range(4)
"""What a rank waits for in a slot."""
MOST_LOCAL_RANKS = 512
_PAGE, _TEXT_BYTES, _ENTERED = 4096, 1024, 2048
_SEMAPHORES, _SEMAPHORE_BYTES = _PAGE, 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Layout:
    """How the memory is divided. The same on all ranks of a node.

    Attributes:
        ranks: of this node.
        slots: how many pieces can be under way at once.
        area_bytes: room for one piece of one rank.
    """

    ranks: int
    slots: int
    area_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.area(self.slots, 0)

    @property
    def semaphores(self) -> int:
        return self.slots * 4 * self.ranks

    def semaphore(self, slot: int, which: int, rank: int) -> int:
        """Where a rank waits for ARRIVED, SUMMED, READY or TAKEN of a slot."""
        return _SEMAPHORES + ((slot * 4 + which) * self.ranks + rank) * _SEMAPHORE_BYTES

    def area(self, slot: int, which: int) -> int:
        """Where a piece is: that of a local rank, or :attr:`node_sum` or :attr:`result`."""
        first = _SEMAPHORES + -(-self.semaphores * _SEMAPHORE_BYTES // _PAGE) * _PAGE
        return first + (slot * (self.ranks + 2) + which) * self.area_bytes

    @property
    def node_sum(self) -> int:
        return self.ranks

    @property
    def result(self) -> int:
        return self.ranks + 1


@dataclass
class NodeMemory:
    """The memory, as one rank has it.

    Attributes:
        address: of its first byte.
        peers: local rank -> the connection; the first rank has all others, the others the first.
    """

    layout: Layout
    memory: mmap.mmap
    peers: dict[int, socket.socket]
    address: int = 0
    _processes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        for local_rank, connection in self.peers.items():
            pid = _credentials(connection)[0]
            with contextlib.suppress(OSError):  # of another container, or before Linux 5.3
                self._processes[local_rank] = os.pidfd_open(pid)

    def piece(self, slot: int, which: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements of an area, as :meth:`Layout.area` names it; a view."""
        offset = self.layout.area(slot, which)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def post(self, slot: int, which: int, ranks: Iterable[int]) -> None:
        """Tell these local ranks."""
        for rank in ranks:
            _libc().sem_post(self.address + self.layout.semaphore(slot, which, rank))

    def wait(self, slot: int, which: int, local_rank: int, *, limit_s: float) -> bool:
        """Wait for one post to this rank; False: none came in that time."""
        # on a wall clock, as nothing else is everywhere: one that is set back delays the False only
        until = time.clock_gettime(time.CLOCK_REALTIME) + limit_s
        limit = _Timespec(int(until), int(until % 1 * 1e9))
        word = self.address + self.layout.semaphore(slot, which, local_rank)
        if _libc().sem_timedwait(word, ctypes.byref(limit)) == 0:
            return True
        assert ctypes.get_errno() in (errno.ETIMEDOUT, errno.EINTR)
        return False

    def write_failure(self, text: str) -> None:
        """Leave a reason for the others, unless there is one."""
        if not self.memory[0]:
            words = text.encode()[: _TEXT_BYTES - 1]
            self.memory[: len(words)] = words

    def read_failure(self) -> str:
        """Why the node has failed; empty if it has not."""
        return self.memory[:_TEXT_BYTES].split(b"\0")[0].decode(errors="replace")

    def note_entered(self, local_rank: int, number: int) -> None:
        """A rank has brought so many pieces; only for what is said when one is missing."""
        struct.pack_into("=I", self.memory, _ENTERED + 4 * local_rank, number & 0xFFFFFFFF)

    def behind(self, number: int) -> list[int]:
        """The local ranks that have brought fewer pieces."""
        told = struct.unpack_from(f"={self.layout.ranks}I", self.memory, _ENTERED)
        return [rank for rank, seen in enumerate(told) if seen < number & 0xFFFFFFFF]

    def dead(self) -> list[int]:
        """The local ranks that have ended, as far as this one can see."""
        of = {connection.fileno(): rank for rank, connection in self.peers.items()}
        of |= {process: rank for rank, process in self._processes.items()}
        poll = select.poll()
        for descriptor in of:
            poll.register(descriptor, select.POLLIN)  # nobody ever writes: readable is the end
        return sorted({of[descriptor] for descriptor, _ in poll.poll(0)})

    def close(self) -> None:
        for connection in self.peers.values():
            connection.close()
        for process in self._processes.values():
            os.close(process)
        self.peers, self._processes = {}, {}


def listen(name: str, layout: Layout) -> socket.socket:
    """Where the other ranks of a node get the memory.

    Raises:
        OSError: the socket cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(f"\0{name}")
        listener.listen(max(1, layout.ranks))
    except BaseException:
        listener.close()
        raise
    return listener


def offer(listener: socket.socket, layout: Layout, *, timeout_s: float) -> NodeMemory:
    """Make the memory, and hand it to the other ranks of this node and to nobody else.

    Raises:
        ReductionFailed: they did not all come in time, or the memory cannot be made.
    """
    deadline = time.monotonic() + timeout_s
    peers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo, _make(layout) as file:
        memory = NodeMemory(layout, mmap.mmap(file.fileno(), layout.size_bytes), {})
        for number in range(layout.semaphores):
            word = memory.address + _SEMAPHORES + number * _SEMAPHORE_BYTES
            _libc().sem_init(word, 1, 0)
        while len(peers) < layout.ranks - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = sorted({*range(1, layout.ranks)} - peers.keys())
                raise ReductionFailed(
                    f"local ranks {missing} did not ask for the node's memory in {timeout_s:g} s"
                ) from None
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            is_ours = _credentials(connection)[1] == os.getuid()
            told = connection.recv(4) if is_ours else b""
            number = struct.unpack("=I", told)[0] if len(told) == 4 else 0
            if not 0 < number < layout.ranks or number in peers:
                connection.close()
                continue
            peers[number] = undo.enter_context(connection)
            socket.send_fds(connection, [b"memory"], [file.fileno()])
        undo.pop_all()
    return NodeMemory(layout, memory.memory, peers)


def take(name: str, layout: Layout, local_rank: int, *, timeout_s: float) -> NodeMemory:
    """Get the memory from the first rank of this node.

    Raises:
        ReductionFailed: it did not come in time, or is not what this rank expects.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{name}")
        if _credentials(connection)[1] != os.getuid():
            raise ReductionFailed("another user answers in the place of this node's first rank")
        connection.sendall(struct.pack("=I", local_rank))
        _, descriptors, _, _ = socket.recv_fds(connection, 16, 1)
        if not descriptors:
            raise ReductionFailed("the first rank of this node handed out no memory")
        with os.fdopen(descriptors[0], "rb+", buffering=0) as file:
            found = os.fstat(file.fileno())
            if found.st_size != layout.size_bytes or not stat.S_ISREG(found.st_mode):
                raise ReductionFailed(
                    f"the node's memory has {found.st_size} bytes, wanted {layout.size_bytes}"
                )
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ReductionFailed("the node's memory could be cut off: its size is not sealed")
            return NodeMemory(layout, mmap.mmap(file.fileno(), layout.size_bytes), {0: connection})
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise ReductionFailed(
                f"the first rank of this node did not hand out its memory: {error}. Can the ranks "
                "of this node reach each other (one network namespace)?"
            ) from error
        raise


def _make(layout: Layout) -> IO[bytes]:
    try:
        descriptor = os.memfd_create("hydroslurm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        file = os.fdopen(descriptor, "rb+", buffering=0)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, layout.size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        raise ReductionFailed(
            f"{layout.size_bytes} bytes of shared memory cannot be made: {error}"
        ) from error
    return file


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, from the kernel."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", packed)
    return pid, uid


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


@functools.cache
def _libc() -> Any:
    """The C library's semaphores. Each call gives up the GIL while it runs."""
    library = ctypes.CDLL(None, use_errno=True)
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    library.sem_post.argtypes = [ctypes.c_void_p]
    library.sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]
    return library
