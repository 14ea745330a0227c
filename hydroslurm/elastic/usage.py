"""Utilization of a rank's node, as fractions: the CPUs it may use, memory, GPU."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hydroslurm.core.memory import room

GPU_EVERY_S = 5.0
"""An NVML query takes milliseconds, and a beat is sent every second."""


class Usage:
    """Utilization since the last reading. Figures that cannot be read are left out."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._ticks: tuple[int, int] | None = None
        self._gpu_due_s = 0.0
        self._gpu: float | None = None

    def read(self) -> dict[str, float]:
        """Return ``cpu``: of the CPUs this process may run on. ``memory``: of the tightest limit of
        its cgroups or the node, without page cache. ``gpu``: of torch's current device."""
        readings = {"cpu": self._cpu(), "memory": self._memory(), "gpu": self._device()}
        return {name: round(value, 4) for name, value in readings.items() if value is not None}

    def _cpu(self) -> float | None:
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        busy = total = 0
        try:
            lines = (self._root / "proc/stat").read_text().splitlines()
            for name, *counts in (line.split() for line in lines if line.startswith("cpu")):
                if name in allowed:
                    ticks = [int(count) for count in counts[:8]]  # user time already includes guest
                    total += sum(ticks)
                    busy += sum(ticks) - ticks[3] - ticks[4]  # idle, iowait
        except (OSError, ValueError, IndexError):
            return None
        before, self._ticks = self._ticks, (busy, total)
        if before is None or total <= before[1]:
            return None
        return min(1.0, max(0.0, (busy - before[0]) / (total - before[1])))

    def _memory(self) -> float | None:
        tightest = room(root=self._root)
        return tightest.used_bytes / tightest.limit_bytes or None  # 0 means it was unreadable

    def _device(self) -> float | None:
        torch = sys.modules.get("torch")  # do not import it for this
        if torch is None or time.monotonic() < self._gpu_due_s:
            return self._gpu
        self._gpu_due_s = time.monotonic() + GPU_EVERY_S
        try:
            ours = torch.cuda.is_initialized()  # querying an unused device would initialize it
            self._gpu = torch.cuda.utilization() / 100 if ours else None
        except Exception:  # no NVML, no permission, a lost device: the error types vary
            self._gpu, self._gpu_due_s = None, float("inf")
        return self._gpu
