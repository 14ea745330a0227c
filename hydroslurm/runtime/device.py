"""The only module that knows about devices: drain them.

A parked rank issues nothing more, but what it launched still runs. Draining waits until every CUDA
device that this process has used is idle. It is done from a thread of its own, which gives up the
GIL while it waits, and it is bounded: a device whose queue holds a collective that waits for a peer
never becomes idle, and is reported as such.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.threads import thread


@dataclass(frozen=True)
class Drain:
    """What became of draining.

    Attributes:
        devices: indices of the CUDA devices that this process has a context on.
        drained: all of them are idle.
        took_s: from the start until all were idle, or until we stopped waiting.
        reason: why not drained; empty when drained.
    """

    devices: tuple[int, ...]
    drained: bool
    took_s: float
    reason: str = ""


def used_devices() -> tuple[int, ...]:
    """CUDA devices on which this process has a context. Never initialises CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return ()
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return (torch.cuda.current_device(),)
    return tuple(index for index in range(torch.cuda.device_count()) if has_context(index))


def reserved_bytes() -> int:
    """What torch's allocator holds of the used devices; other libraries' memory comes on top."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    return sum(int(torch.cuda.memory_reserved(index)) for index in used_devices())


def drain(*, limit_s: float, exempt: Callable[[], object]) -> Drain | None:
    """Wait until all used devices are idle; None where this process has used none.

    cudaDeviceSynchronize cannot be interrupted or given a time-out, so it is called in a thread,
    which is left behind if the time is over. It ends by itself once the device is idle after the
    resume.

    Args:
        limit_s: how long to wait for the devices.
        exempt: makes a context manager in which the calling thread is never held at the gate.
    """
    devices = used_devices()
    if not devices:
        return None
    start = time.monotonic()
    failures: list[str] = []
    finished = threading.Event()

    def synchronise() -> None:
        torch = sys.modules["torch"]  # `import` could wait for a lock that a parked thread holds
        try:
            with exempt():  # type: ignore[attr-defined]
                for index in devices:
                    torch.cuda.synchronize(index)
        except Exception as error:  # a sick device must not take the rank down; it is reported
            failures.append(f"{type(error).__name__}: {error}")
        finished.set()

    thread(synchronise, name="hydroslurm-sync").start()
    clock = AwakeClock()  # Slurm's SIGSTOP may come meanwhile
    until_s = clock.now_s() + limit_s
    while not (in_time := finished.wait(min(1.0, max(0.0, until_s - clock.now_s())))):
        if clock.now_s() >= until_s:
            break
    reason = failures[0] if failures else ""
    if not in_time:
        reason = f"still busy after {limit_s:g} s; a collective in flight may wait for a peer"
    return Drain(devices, in_time and not failures, time.monotonic() - start, reason)
