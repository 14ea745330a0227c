"""The heartbeat of a running rank: one small file with its step, rewritten every few seconds.

Steps are not logged as events, so between two saves the event log does not show any progress. The
first rank's controller thread wakes up now and then and overwrites one line. The training loop pays
nothing: it only sets an attribute.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydroslurm.core.dates import by_date_of_now, clocks
from hydroslurm.core.files import open_regular, parse_json

HEARTBEAT_ENV = "HYDROSLURM_HEARTBEAT_S"
"""Seconds between two lines; 0 for none."""

DEFAULT_EVERY_S = 10.0
LEAST_EVERY_S = 0.1
_LINE_BYTES = 256
"""A line is padded to this and written with one call: what is read is one line or the other."""


@dataclass(frozen=True)
class Heartbeat:
    """What the first rank last said of its progress.

    Attributes:
        step: the training step.
        epoch_ns: when this was written, CLOCK_REALTIME.
        since_epoch_ns: when the step was first seen to be this one; late by one interval at the
            most.
        steps_per_s: over the latest interval in which the step changed; None before.
        every_s: the next one is due so much later.
        restart_count: how often the job had been requeued.
        pid: of the rank.
        mono_ns: when this was written, CLOCK_MONOTONIC; 0 where that was not told.
    """

    step: int
    epoch_ns: int
    since_epoch_ns: int
    steps_per_s: float | None
    every_s: float
    restart_count: int
    pid: int
    mono_ns: int = 0

    def dated_now(self, host: str) -> Heartbeat:
        """The same, of a rank on this host, with the date that this host has now."""
        if not self.mono_ns:
            return self
        epoch_ns = by_date_of_now(self.mono_ns, self.epoch_ns, host)
        since_epoch_ns = self.since_epoch_ns + epoch_ns - self.epoch_ns
        return replace(self, epoch_ns=epoch_ns, since_epoch_ns=since_epoch_ns)


def interval_s(environ: Mapping[str, str]) -> float:
    """Read HYDROSLURM_HEARTBEAT_S (0: never); the default where it is no number, which must not end
    a training."""
    try:
        asked_s = float(environ.get(HEARTBEAT_ENV) or DEFAULT_EVERY_S)
    except ValueError:
        return DEFAULT_EVERY_S
    if asked_s != asked_s:
        return DEFAULT_EVERY_S
    return max(asked_s, LEAST_EVERY_S) if asked_s > 0 else 0.0


class HeartbeatWriter:
    """Writes the heartbeat of one rank. One thread. What fails is tried again when the next line is
    due, silently: the event log, which lies beside it, tells of a disk that cannot be written."""

    def __init__(self, path: Path | None, *, every_s: float, restart_count: int) -> None:
        """``path=None`` or ``every_s=0`` writes nothing."""
        self._path = path if every_s > 0 else None
        self._every_s = every_s
        self._restart_count = restart_count
        self._fd: int | None = None
        self._due_mono_s = time.monotonic() + every_s
        self._seen: tuple[int, float] | None = None
        self._steps_per_s: float | None = None

    def wait_s(self) -> float | None:
        """How long until the next line is due; None for never."""
        if self._path is None:
            return None
        return max(0.0, self._due_mono_s - time.monotonic())

    def beat(self, step: int | None) -> None:
        """Write the step, if it is time to and there is one."""
        now_mono_s = time.monotonic()
        if self._path is None or now_mono_s < self._due_mono_s:
            return
        self._due_mono_s = now_mono_s + self._every_s
        if step is None:
            return
        now_mono_ns, now_epoch_ns = clocks()
        if self._seen is None:
            self._seen = step, now_mono_s
        elif step != self._seen[0]:
            self._steps_per_s = max(0.0, (step - self._seen[0]) / (now_mono_s - self._seen[1]))
            self._seen = step, now_mono_s
        heartbeat = Heartbeat(
            step,
            now_epoch_ns,
            now_epoch_ns - round((now_mono_s - self._seen[1]) * 1e9),
            self._steps_per_s,
            self._every_s,
            self._restart_count,
            os.getpid(),
            now_mono_ns,
        )
        self._write(json.dumps(asdict(heartbeat)))

    def close(self) -> None:
        self._path = None
        self._close_file()

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, line: str) -> None:
        assert self._path is not None
        try:
            if self._fd is None:
                self._fd = open_regular(self._path, os.O_WRONLY | os.O_CREAT)
            os.pwrite(self._fd, line.ljust(_LINE_BYTES - 1).encode() + b"\n", 0)
        except OSError:
            self._close_file()


def read_heartbeat(path: Path) -> Heartbeat | None:
    """The heartbeat in a file; None when there is none that can be read."""
    try:
        fd = open_regular(path)
        try:
            row = parse_json(os.pread(fd, _LINE_BYTES, 0))
        finally:
            os.close(fd)
        return Heartbeat(
            step=_integer(row, "step"),
            epoch_ns=_integer(row, "epoch_ns"),
            since_epoch_ns=_integer(row, "since_epoch_ns"),
            steps_per_s=None if row["steps_per_s"] is None else _number(row, "steps_per_s"),
            every_s=_number(row, "every_s"),
            restart_count=_integer(row, "restart_count"),
            pid=_integer(row, "pid"),
            mono_ns=_integer(row, "mono_ns") if "mono_ns" in row else 0,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _integer(row: Mapping[str, object], name: str) -> int:
    value = row[name]
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}")
    return value


def _number(row: Mapping[str, object], name: str) -> float:
    value = row[name]
    if type(value) not in (int, float) or not 0 <= value < 1e12:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}")
    return float(value)  # type: ignore[arg-type]
