"""CUDA's checkpoint API (driver 570 and newer), which needs no change to the training. It moves all
device memory of a process, its context included.

The calls are made by a helper process, see :mod:`hydroslurm.vacate.helper`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.garbage import let_collect, stop_collector
from hydroslurm.core.proc import module_command
from hydroslurm.errors import VacateError
from hydroslurm.vacate.communicators import Communicators
from hydroslurm.vacate.helper import AT_WORK
from hydroslurm.vacate.policy import DeviceState

HELPER = module_command(sys.executable, "hydroslurm.vacate.helper")
START_S = 30.0
"""Attaching to the driver takes seconds, on a node of eight devices ten."""
USUAL_BYTES_PER_S = 4e9
"""As reported for this API on PCIe 5; what is measured here replaces it."""
CONTEXT_BYTES = 700_000_000
"""Of one device's context, which torch does not count."""
_SLICE_S = 0.25
_AT_WORK = ("checkpointing", "restoring", AT_WORK)


class CudaCheckpoint:
    """Moves the device memory of this process.

    The calls block for at most their time-out, and raise
    :class:`~hydroslurm.errors.VacateError` when they fail or take longer; :meth:`state` then says
    where the memory is. The caller issues no operator meanwhile.

    Args:
        used_bytes: how much device memory this process uses.
        devices: how many devices.
        communicators: NCCL's of this process.
        command: the helper.

    Attributes:
        bytes_per_s: how fast memory moves to the host: as measured in this process, else usually.
    """

    def __init__(
        self,
        *,
        used_bytes: Callable[[], int],
        devices: int,
        communicators: Communicators,
        command: Sequence[str] = HELPER,
    ) -> None:
        self._used_bytes = used_bytes
        self._devices = devices
        self._communicators = communicators
        self._command = tuple(command)
        self._pid = os.getpid()
        self._helper: _Helper | None = None
        self._locked_bytes: int | None = None
        self.bytes_per_s = USUAL_BYTES_PER_S

    def device_bytes(self) -> int:
        """How much memory would be moved; the host needs as much."""
        # of a locked process as it was before: to ask torch is to call CUDA, which answers after
        # the unlock, and this thread is the one that unlocks
        if self._locked_bytes is not None:
            return self._locked_bytes
        return self._used_bytes() + CONTEXT_BYTES * self._devices

    def refusal(self) -> str:
        """Why this process cannot be vacated; empty if it can."""
        if reason := self._communicators.refusal():
            return reason
        known = self._helper is not None
        try:
            self._ask("state", START_S)
        except _Silent as error:  # one that has died since the last pause is replaced
            return self.refusal() if known else str(error)
        except VacateError as error:
            return str(error)
        return ""

    def lock(self, timeout_s: float) -> None:
        """RUNNING -> LOCKED."""
        self._communicators.suspend()
        self._begin_locked()
        # the driver's own time-out leaves the process RUNNING; ours only ends the wait for it
        try:
            self._ask("lock", timeout_s + 1.0, int(timeout_s * 1000))
        except VacateError:
            if self.state(timeout_s) is DeviceState.RUNNING:  # else unlock() does it
                self._end_locked()
                self._communicators.resume()
            raise

    def _begin_locked(self) -> None:
        """No thread of this process may call CUDA from now on: it would wait with the interpreter's
        lock, which whoever is to unlock needs. The collector could, with a graph or a tensor."""
        if self._locked_bytes is None:
            self._locked_bytes = self.device_bytes()
            stop_collector()

    def _end_locked(self) -> None:
        if self._locked_bytes is not None:
            self._locked_bytes = None
            let_collect()

    def checkpoint(self, timeout_s: float) -> int:
        """LOCKED -> CHECKPOINTED; returns the bytes that are free now."""
        moved_bytes = self.device_bytes()
        began_s = time.monotonic()
        self._ask("checkpoint", timeout_s)
        self.bytes_per_s = moved_bytes / max(time.monotonic() - began_s, 1e-3)
        return moved_bytes

    def restore(self, timeout_s: float) -> None:
        """CHECKPOINTED -> LOCKED. Where the device is full, it fails and stays CHECKPOINTED."""
        self._ask("restore", timeout_s)

    def unlock(self, timeout_s: float) -> None:
        """LOCKED -> RUNNING."""
        try:
            self._ask("unlock", timeout_s)
        except VacateError:
            if self.state(timeout_s) is not DeviceState.RUNNING:  # else it came late, and well
                raise
        self._end_locked()
        self._communicators.resume()

    def state(self, timeout_s: float) -> DeviceState:
        """Where the memory is; UNKNOWN where nobody answers in time. Raises nothing. A helper that
        hangs is replaced by another, which asks again."""
        clock = AwakeClock(timeout_s)
        until_s = clock.now_s() + timeout_s
        while True:
            try:
                word = self._ask("state", timeout_s)
            except VacateError:
                return DeviceState.UNKNOWN
            if word not in _AT_WORK:  # still, for the one before
                known = {one.value for one in DeviceState}
                return DeviceState(word) if word in known else DeviceState.UNKNOWN
            if clock.now_s() >= until_s:
                return DeviceState.UNKNOWN
            time.sleep(_SLICE_S)

    def close(self) -> None:
        """End the helper."""
        self._end_helper()
        self._end_locked()

    def _end_helper(self) -> None:
        if self._helper is not None:
            self._helper.end()
            self._helper = None

    def _ask(self, verb: str, timeout_s: float, *more: int) -> str:
        if self._helper is None:
            self._helper = _Helper(self._command)
        try:
            return self._helper.ask([verb, self._pid, *more], timeout_s=timeout_s)
        except _Silent as error:
            self._end_helper()  # the next call has one that answers
            raise _Silent(f"CUDA's {verb} {error}") from error


class _Silent(VacateError):
    """The helper did not answer, or is gone."""


class _Helper:
    """One helper process."""

    def __init__(self, command: Sequence[str]) -> None:
        environ = {**os.environ, "HYDROSLURM_PREEMPT": "off"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
                bufsize=0,
            )
        except OSError as error:
            raise VacateError(f"the helper cannot be started: {error}") from error
        self._rest = b""
        self._ready = False

    def ask(self, question: Sequence[object], *, timeout_s: float) -> str:
        if not self._ready:
            self._expect("ready", timeout_s=START_S)
            self._ready = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except OSError as error:
            raise _Silent(f"found no helper any more: {error}") from error
        return self._expect("ok", timeout_s=timeout_s)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, at work for a device
            self._process.wait(timeout=5.0)

    def _expect(self, wanted: str, *, timeout_s: float) -> str:
        line = self._line(timeout_s)
        try:
            word, text = json.loads(line)
        except ValueError as error:
            raise _Silent(f"was answered {line[:80]!r}") from error
        if word == "unable":
            raise _Silent(f"cannot be called here ({text}); pip install 'hydroslurm[gpu]'")
        if word != wanted:
            raise VacateError(f"CUDA refused: {text}")
        return str(text)

    def _line(self, timeout_s: float) -> bytes:
        """The next line. Time in which this process was itself stopped does not count."""
        assert self._process.stdout is not None
        clock = AwakeClock(_SLICE_S)
        until_s = clock.now_s() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], _SLICE_S)
            if ready:
                data = os.read(self._process.stdout.fileno(), 65536)
                if not data:
                    raise _Silent("ended the helper: it died, or could not be started")
                self._rest += data
            elif clock.now_s() >= until_s:
                raise _Silent(f"did not answer within {timeout_s:g} s")
        line, _, self._rest = self._rest.partition(b"\n")
        return line
