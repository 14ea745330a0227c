"""Real child processes that talk in lines: the parent waits for a word, never for a while."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 120.0
_STARTS = 3
_START_S = 0.1
"""What a Python with a few modules takes to start and end on a quiet machine of today."""


def patience(seconds: float) -> float:
    """What a limit of so many seconds is on this machine: more where it is slow, or busy."""
    return seconds * _slowness()


@functools.cache
def _slowness() -> float:
    """How much longer this machine takes for a piece of work than a quiet one; at least 1."""
    began = time.monotonic()
    for _ in range(_STARTS):
        work = "import asyncio, decimal, email.message, json, logging.config"
        subprocess.run([sys.executable, "-I", "-c", work], check=True)
    return max(1.0, (time.monotonic() - began) / (_STARTS * _START_S))


class Child:
    """A Python program under test; its output is read line by line."""

    stderr: int | None = subprocess.STDOUT

    def __init__(
        self,
        code: str,
        folder: Path,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        script = folder / "program.py"
        script.write_text(textwrap.dedent(code))
        self._prefix = prefix
        self.process = self._start(script, arguments, {**os.environ, **(environ or {})})
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._pump, daemon=True)
        self._reader.start()

    def _start(
        self, script: Path, arguments: tuple[str, ...], environ: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._prefix, sys.executable, "-u", str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            cwd=script.parent,
            env=environ,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def expect(self, start: str, *, limit_s: float = LIMIT_S) -> str:
        """The rest of the next line that starts so; fails with all output when it does not come."""
        limit_s = patience(limit_s)
        deadline = time.monotonic() + limit_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line {start!r} in {limit_s} s; saw:\n{self}") from None
            if line is None:
                raise AssertionError(f"ended before a line {start!r}; saw:\n{self}")
            if line.startswith(start):
                return line.removeprefix(start).strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def signal(self, signo: int) -> None:
        os.kill(self.pid, signo)

    def wait(self, *, limit_s: float = LIMIT_S) -> int:
        return self.process.wait(patience(limit_s))

    def end(self, *, limit_s: float = LIMIT_S) -> int:
        """Wait for the end of the program and of its output; its exit status."""
        status = self.wait(limit_s=limit_s)
        self._reader.join(patience(limit_s))
        return status

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def _pump(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed, while an orphan has the other end
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def close(self) -> None:
        below = descendants(self.pid) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        for pid in below:  # one that lives on holds our end of its output open for ever
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def descendants(pid: int) -> list[int]:
    """The processes below one, at any depth."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for one in map(int, path.read_text().split()):
                found += [one, *descendants(one)]
    return found


@contextlib.contextmanager
def child(
    code: str,
    folder: Path,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    prefix: tuple[str, ...] = (),
) -> Iterator[Child]:
    """A :class:`Child` that is gone after the block."""
    started = Child(code, folder, *arguments, environ=environ, prefix=prefix)
    try:
        yield started
    finally:
        started.close()


def wait_until(
    condition: Callable[[], object], what: str | Callable[[], str], *, limit_s: float = LIMIT_S
) -> None:
    """Look again and again until something holds; ``what`` is said when it does not come."""
    began, measured = time.monotonic(), False
    while True:
        looked = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        if now >= began + patience(limit_s) and not measured:
            _slowness.cache_clear()  # it may be busier than it was
            measured = True
        if now >= began + patience(limit_s):
            raise AssertionError(
                f"not within {patience(limit_s)} s: {what() if callable(what) else what}"
            )
        # looks that ask Slurm, or read much, would take the processor from what is waited for
        time.sleep(min(max(0.005, 9 * (now - looked)), 0.2))


def captured(
    argv: Sequence[str | Path], *, timeout: float, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever that is; what it writes is text. ``more``: ``cwd``,
    ``env`` and ``input``, as :func:`subprocess.run` has them."""
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=patience(timeout), check=False, **more
    )


def text_of(path: Path) -> str:
    """What is in a file; nothing where there is none yet."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""


def free_port() -> int:
    """Nobody listens at it, and it is below those that the kernel gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


def stat_of(pid: int) -> list[str]:
    """What /proc tells of a process behind its name: its state is first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_s(pid: int) -> float:
    """The processor time that it has used."""
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def has_ended(pid: int) -> bool:
    """Gone, or waiting for its parent to notice."""
    try:
        return stat_of(pid)[0] in "ZX"
    except OSError:
        return True


def is_stopped(pid: int) -> bool:
    """Whether a suspended process is held by more than itself: by SIGSTOP."""
    return stat_of(pid)[0] == "T"
