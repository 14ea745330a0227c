"""How far the launches of this process may be ahead of its device: ``HYDROSLURM_LAUNCH_AHEAD_MS``.

A paused rank launches nothing more, but what it has launched still runs, and CUDA takes about a
thousand kernels in advance. With a bound the device is idle soon after the rank is parked: after
about the bound, a slice of it and one kernel. See :doc:`vacating`; the native part is
``launch_ahead.cpp``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hydroslurm.errors import InstallError, UsageError
from hydroslurm.gate.native_gate import NativeGate

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

    def __init__(self, gate: Gate, bound_s: float | None, *, warn: Callable[[str], None]) -> None:
        """``warn``: tells a person."""
        self._gate = gate if bound_s is not None and isinstance(gate, NativeGate) else None
        self.bound_s = bound_s if self._gate is not None else None
        self._warn = warn
        if bound_s is not None and self._gate is None:
            warn(f"{LAUNCH_AHEAD_ENV} needs the native gate: launches are not bounded")

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
            self._warn(f"{LAUNCH_AHEAD_ENV}: {error}")
