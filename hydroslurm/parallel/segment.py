"""The memory that the ranks of one node share, and the connections that hand it over.

The first rank of a node makes a memfd: memory without a name, which is gone with the last process
that has it, however that ends. It sends the descriptor through a unix socket (an abstract one:
again no file), and only to processes of its own user, which the kernel vouches for; they look at
its user in the same way. Nobody else can open it: not by a name, for it has none, and not through
``/proc/PID/fd``, which the kernel keeps for the user. Its size is sealed, so that no rank can
take the memory away below another.

The connections stay open: by them, and by a descriptor of the process at the other end where the
kernel gives one, each rank learns of the death of the first one, which learns of every other's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hydroslurm.errors import ReductionFailed

_PAGE = 4096
_FAILED, _TEXT, _TEXT_BYTES, _ENTERED = 0, 64, 1024, 2048
_WORDS, _WORD_BYTES, _WORDS_PER_SLOT = _PAGE, 64, 4
MOST_LOCAL_RANKS = (_PAGE - _ENTERED) // 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_RETRY_S = 0.02


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
        return self._first + self.slots * (self.ranks + 2) * self.area_bytes

    @property
    def _first(self) -> int:
        words = self.slots * _WORDS_PER_SLOT * _WORD_BYTES
        return _WORDS + -(-words // _PAGE) * _PAGE

    @property
    def words(self) -> int:
        return self.slots * _WORDS_PER_SLOT

    def word(self, slot: int, which: int) -> int:
        """Where a counter of a slot is: ARRIVED, SUMMED, READY or TAKEN."""
        return _WORDS + (slot * _WORDS_PER_SLOT + which) * _WORD_BYTES

    def area(self, slot: int, which: int) -> int:
        """Where a piece is: that of a local rank, or :attr:`node_sum` or :attr:`result`."""
        return self._first + (slot * (self.ranks + 2) + which) * self.area_bytes

    @property
    def node_sum(self) -> int:
        return self.ranks

    @property
    def result(self) -> int:
        return self.ranks + 1


ARRIVED, SUMMED, READY, TAKEN = range(_WORDS_PER_SLOT)


@dataclass
class Segment:
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
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        for local_rank, connection in self.peers.items():
            pid = _credentials(connection)[0]
            with contextlib.suppress(OSError):  # of another container, or before Linux 5.3
                self._processes[local_rank] = os.pidfd_open(pid)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A view of the memory. Issues no operator."""
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    @property
    def failed(self) -> int:
        """The address of the word that is not 0 once the node has failed."""
        return self.address + _FAILED

    @property
    def words(self) -> int:
        """The address of the counters, which are 64 bytes apart."""
        return self.address + _WORDS

    def write_failure(self, text: str) -> None:
        """Leave a reason for the others, unless there is one; before they are woken."""
        if not self.memory[_TEXT]:
            words = text.encode()[: _TEXT_BYTES - 1]
            self.memory[_TEXT : _TEXT + len(words)] = words

    def read_failure(self) -> str:
        text = self.memory[_TEXT : _TEXT + _TEXT_BYTES].split(b"\0")[0]
        return text.decode(errors="replace")

    def note_entered(self, local_rank: int, number: int) -> None:
        """A rank has brought so many pieces; only for what is said when one is missing."""
        struct.pack_into("=I", self.memory, _ENTERED + 4 * local_rank, number & 0xFFFFFFFF)

    def behind(self, number: int) -> list[int]:
        """The local ranks that have brought fewer pieces."""
        told = struct.unpack_from(f"={self.layout.ranks}I", self.memory, _ENTERED)
        return [rank for rank, seen in enumerate(told) if seen < number & 0xFFFFFFFF]

    def dead(self) -> list[int]:
        """The local ranks that have ended, as far as this one can see."""
        poll = select.poll()
        of: dict[int, int] = {}
        for local_rank, connection in self.peers.items():
            of[connection.fileno()] = local_rank
        for local_rank, process in self._processes.items():
            of[process] = local_rank
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
        OSError: there is no such socket to be had.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(f"\0{name}")
        listener.listen(max(1, layout.ranks))
    except BaseException:
        listener.close()
        raise
    return listener


def offer(listener: socket.socket, layout: Layout, *, timeout_s: float) -> Segment:
    """Make the memory, and hand it to the other ranks of this node and to nobody else.

    Raises:
        ReductionFailed: they did not all come in time, or there is no such memory to be had.
    """
    deadline = time.monotonic() + timeout_s
    peers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo, _closing(_make(layout)) as descriptor:
        undo.callback(_close_all, peers)
        while len(peers) < layout.ranks - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = sorted({*range(1, layout.ranks)} - peers.keys())
                raise ReductionFailed(
                    f"local ranks {missing} did not ask for the node's memory in {timeout_s:g} s"
                ) from None
            if _credentials(connection)[1] != os.getuid():
                connection.close()
                continue
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            told = connection.recv(4)
            number = struct.unpack("=I", told)[0] if len(told) == 4 else 0
            if not 0 < number < layout.ranks or number in peers:
                connection.close()
                continue
            peers[number] = connection
            socket.send_fds(connection, [b"memory"], [descriptor])
        segment = Segment(layout, mmap.mmap(descriptor, layout.size_bytes), peers)
        undo.pop_all()
        return segment


def take(name: str, layout: Layout, local_rank: int, *, timeout_s: float) -> Segment:
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
        with _closing(descriptors[0]) as descriptor:
            found = os.fstat(descriptor)
            if found.st_size != layout.size_bytes or not stat.S_ISREG(found.st_mode):
                raise ReductionFailed(
                    f"the node's memory has {found.st_size} bytes, wanted {layout.size_bytes}"
                )
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ReductionFailed("the node's memory could be cut off: its size is not sealed")
            return Segment(layout, mmap.mmap(descriptor, layout.size_bytes), {0: connection})
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise ReductionFailed(
                f"the node's memory could not be had from its first rank: {error}. Can the ranks "
                "of this node reach each other (one network namespace)?"
            ) from error
        raise


def _make(layout: Layout) -> int:
    try:
        descriptor = os.memfd_create("hydroslurm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ReductionFailed(f"no shared memory is to be had: {error}") from error
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, layout.size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise ReductionFailed(
            f"{layout.size_bytes} bytes of shared memory are not to be had: {error}"
        ) from error
    return descriptor


def _close_all(connections: Mapping[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, from the kernel."""
    size = ctypes.sizeof(ctypes.c_int) * 3
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", packed)
    return pid, uid
