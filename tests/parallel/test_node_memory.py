"""The memory of a node: who gets it, and what it is."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator

import pytest

from hydroslurm.errors import ReductionFailed
from hydroslurm.parallel.node_memory import Layout, NodeMemory, listen, offer, take

LAYOUT = Layout(ranks=2, slots=2, area_bytes=4096)


Shared = tuple[str, list[NodeMemory]]


@pytest.fixture
def shared() -> Iterator[Shared]:
    """The name, and the first rank's side, in a thread: its memory is in the list once it has been
    handed out."""
    name, made = f"test-{secrets.token_hex(8)}", list[NodeMemory]()
    with listen(name, LAYOUT) as listener:
        thread = threading.Thread(target=lambda: made.append(offer(listener, LAYOUT, timeout_s=30)))
        thread.start()
        yield name, made
        thread.join()
    for one in made:
        one.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_gets_nothing(shared: Shared) -> None:
    """A stranger who knows the socket's name is hung up on, and the right rank is still served."""
    name, made = shared
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(OSError):
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(20)
                stranger.connect(f"\0{name}")
                with contextlib.suppress(OSError):
                    stranger.sendall(b"\1\0\0\0")
                data, descriptors = b"", []
                with contextlib.suppress(ConnectionError):
                    data, descriptors, _, _ = socket.recv_fds(stranger, 16, 1)
                status = 0 if (data, descriptors) == (b"", []) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not made
    take(name, LAYOUT, 1, timeout_s=30).close()


def test_ranks_that_do_not_fit(shared: Shared) -> None:
    """One that expects another layout says so. When one does not ask, the first names it, and does
    not wait for ever."""
    with pytest.raises(ReductionFailed, match=r"has .* bytes, wanted"):
        take(shared[0], Layout(ranks=2, slots=3, area_bytes=4096), 1, timeout_s=30)
    with (
        listen(f"{shared[0]}-alone", LAYOUT) as listener,
        pytest.raises(ReductionFailed, match=r"local ranks \[1\] did not ask"),
    ):
        offer(listener, LAYOUT, timeout_s=0.05)
