"""The only module that knows about devices: drain them, and bound what is launched on them.

A parked rank issues nothing more, but what it launched still runs. Draining waits until every CUDA
device that this process has used is idle. It is done from a thread of its own, which gives up the
GIL while it waits, and it is bounded: a device whose queue holds a collective that waits for a peer
never becomes idle, and is reported as such.

CUDA takes about a thousand kernels in advance. With a bound (``HYDROSLURM_LAUNCH_AHEAD_MS``) the
device is idle soon after the rank is parked: after about the bound, a slice of it and one kernel.
See :doc:`vacating`; the native part is ``launch_ahead.cpp``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.threads import say, thread
from hydroslurm.errors import InstallError, UsageError
from hydroslurm.gate.native_gate import NativeGate

DRAIN_LIMIT_S = 10.0
"""How long a pause waits for busy devices before it says that they do not drain."""


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


def drain(*, exempt: Callable[[], object]) -> Drain | None:
    """Wait, at most ``DRAIN_LIMIT_S``, until all used devices are idle; None where this process has
    used none.

    cudaDeviceSynchronize cannot be interrupted or given a time-out, so it is called in a thread,
    which is left behind if the time is over. It ends by itself once the device is idle after the
    resume.

    Args:
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
    until_s = clock.now_s() + DRAIN_LIMIT_S
    while not (in_time := finished.wait(min(1.0, max(0.0, until_s - clock.now_s())))):
        if clock.now_s() >= until_s:
            break
    reason = failures[0] if failures else ""
    if not in_time:
        reason = f"still busy after {DRAIN_LIMIT_S:g} s; a collective in flight may wait for a peer"
    return Drain(devices, in_time and not failures, time.monotonic() - start, reason)


if TYPE_CHECKING:
    from hydroslurm.gate import Gate

LAUNCH_AHEAD_ENV = "HYDROSLURM_LAUNCH_AHEAD_MS"
LEAST_MS, MOST_MS = 0.1, 10_000.0
_CUDA = 1
"""``c10::DeviceType::CUDA``, which ROCm's torch uses as well."""


def launch_ahead_from(environ: Mapping[str, str]) -> float | None:
    """The bound in seconds; None where the variable is not set, or 0.

    Raises:
        UsageError: it is no number of milliseconds between 0.1 and 10000.
    """
    text = environ.get(LAUNCH_AHEAD_ENV, "").strip()
    try:
        value_ms = float(text or 0)
    except ValueError:
        value_ms = float("nan")
    if value_ms == 0:
        return None
    if not LEAST_MS <= value_ms <= MOST_MS:
        raise UsageError(
            f"{LAUNCH_AHEAD_ENV}={text[:60]!r}; wanted how many milliseconds of work may be queued "
            f"on the device, {LEAST_MS:g} to {MOST_MS:g} (20 is a good choice), or 0 for no bound"
        )
    return value_ms / 1e3


class LaunchAhead:
    """The bound of one installation; nothing is done, and nothing costs, where there is none.

    Attributes:
        bound_s: None for no bound.
    """

    def __init__(self, gate: Gate, bound_s: float | None) -> None:
        self._gate = gate if bound_s is not None and isinstance(gate, NativeGate) else None
        self.bound_s = bound_s if self._gate is not None else None
        if bound_s is not None and self._gate is None:
            say(f"{LAUNCH_AHEAD_ENV} needs the native gate: launches are not bounded")

    def start(self) -> None:
        """Bound the launches, from the moment on when the process comes to use its device."""
        # calls back when CUDA is initialised, at once where it has been: to ask it for its streams
        # before would initialise it
        if self._gate is not None:
            sys.modules["torch"].cuda._lazy_call(self._bound)

    def end(self) -> dict[str, Any]:
        """Take the bound back; what it has done, for an event: nothing where there was none."""
        gate, self._gate = self._gate, None
        if gate is None:
            return {}
        seen = gate.launches()
        gate.bound_launches(0.0)
        waited = {"waits": seen.waits, "waited_s": seen.waited_ns / 1e9}
        return {"launch_ahead": {"events": seen.events, **waited}}

    def _bound(self) -> None:
        if self._gate is None:  # it has ended
            return
        try:
            self._gate.bound_launches(self.bound_s or 0.0, device_type=_CUDA)
        except InstallError as error:  # it is raised in the middle of CUDA's initialisation
            say(f"{LAUNCH_AHEAD_ENV}: {error}")
