"""Faults on the way between a node of ``ClusterSpec(network=True)`` and all others.

Not every kernel has ``sch_netem``, so that a thread of the test stands between the node's cable and
the bridge, in place of the port: frames come in by a packet socket and go on through a TAP device,
late or not at all. Both keep the virtio header, so that large segments stay whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hydroslurm.devcluster import DevCluster

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP_WITH_HEADER = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_OFFLOADS = 1 | 2 | 4 | 8  # checksums, and segments of TCP over IPv4 and IPv6
_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING, _ALL = 263, 15, 23, 3
_FRAME_BYTES = 1 << 17


@dataclass(frozen=True)
class Fault:
    """What befalls frames: ``delay_s`` each way, ``loss`` a probability; ``ways``: which ones."""

    delay_s: float = 0.0
    loss: float = 0.0
    ways: frozenset[str] = frozenset({"to", "from"})


CUT = Fault(loss=1.0)
DEAF = Fault(loss=1.0, ways=frozenset({"to"}))
"""The node hears nobody, and is heard."""
MUTE = Fault(loss=1.0, ways=frozenset({"from"}))
SLOW = Fault(delay_s=2.0)
LOSSY = Fault(loss=0.05)


@contextlib.contextmanager
def broken(
    cluster: DevCluster, node: str, fault: Fault, since: bytes = b""
) -> Iterator[threading.Event]:
    """A fault on one node's network during the block, from the first frame on that contains
    ``since``: the event is set by then."""
    number = cluster.spec.node_names.index(node)
    cable, bridge = cluster.spec.cables[number], cluster.spec.bridge
    tap = f"{cable}t"
    ends = _packet_socket(cable), _tap(tap)
    begun, stop = threading.Event(), threading.Event()
    relay = threading.Thread(target=_relay, args=(*ends, fault, since, begun, stop), name=tap)
    try:
        # without ARP: else this machine would answer for its own address on the loose cable
        _ip(f"link set {cable} nomaster arp off")
        _ip(f"link set {tap} master {bridge} up")
        relay.start()
        yield begun
    finally:
        stop.set()
        relay.join()
        for end in ends:
            os.close(end)
        _ip(f"link set {cable} master {bridge} arp on")


T = TypeVar("T")


def on_node(cluster: DevCluster, node: str, call: Callable[[], T]) -> T:
    """Call it in a thread that has the node's network; threads that it starts have it, too."""
    cable = cluster.spec.cables[cluster.spec.node_names.index(node)]

    def called() -> T:
        with Path(f"/run/netns/{cable}").open() as space:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(space.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        return call()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(called).result()


def _relay(
    cable: int,
    tap: int,
    fault: Fault,
    since: bytes,
    begun: threading.Event,
    stop: threading.Event,
) -> None:
    dice = random.Random(0)
    waiting: deque[tuple[float, int, bytes]] = deque()
    while not stop.is_set():
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
        for end in select.select([cable, tap], [], [], min(left_s, 0.05))[0]:
            frame = os.read(end, _FRAME_BYTES)
            way, other = ("from", tap) if end == cable else ("to", cable)
            if since in frame:
                begun.set()
            affected = begun.is_set() and way in fault.ways
            if not (affected and dice.random() < fault.loss):
                waiting.append((time.monotonic() + fault.delay_s * affected, other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, other, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # the other end is down
                os.write(other, frame)


def _packet_socket(interface: str) -> int:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    made.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    made.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    made.bind((interface, _ALL))
    return made.detach()


def _tap(name: str) -> int:
    """A TAP device, which is gone with the descriptor."""
    made = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(made, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITH_HEADER))
    fcntl.ioctl(made, _TUNSETOFFLOAD, _OFFLOADS)
    return made


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)
