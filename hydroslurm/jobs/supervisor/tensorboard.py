"""TensorBoard beside the ranks: a child of the supervisor that ends with it, however that happens,
and so with the job. Its address is written into the run folder."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydroslurm.core.files import open_regular, parse_json, read_regular, write_atomically
from hydroslurm.core.module_command import module_command
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.threads import thread
from hydroslurm.jobs.plan import TensorBoardPlan

MISSING = (
    f"there is no TensorBoard: {sys.executable} has no package tensorboard (pip install "
    "tensorboard). The job runs without"
)
_ADDRESS = re.compile(rb"TensorBoard \S+ at http://(\[[0-9a-f:]+\]|[^\s/:]+):(\d+)/")
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Address:
    """The address of a TensorBoard.

    Attributes:
        node: the machine that it runs on.
        host: the address that it has bound there.
        port: TCP.
        pid: of the process.
    """

    node: str
    host: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        """As seen from its own node; from elsewhere only if it binds more than loopback."""
        host = self.node if self.host in ("0.0.0.0", "[::]") else self.host
        return f"http://{host}:{self.port}/"

    @property
    def tunnel(self) -> str | None:
        """The command that makes it reachable from elsewhere, if it binds loopback only."""
        if not (self.host.startswith("127.") or self.host in ("localhost", "[::1]")):
            return None
        return f"ssh -N -L {self.port}:{self.host}:{self.port} {self.node}"


def is_there() -> bool:
    """Whether this Python has TensorBoard."""
    return importlib.util.find_spec("tensorboard") is not None


@contextlib.contextmanager
def tensorboard(
    wanted: TensorBoardPlan | None, run: RunDir, *, log: Callable[[str], None]
) -> Iterator[None]:
    """Run TensorBoard inside the block, if it is wanted. The ranks do not wait for it: it announces
    its address once it has one. Its failures are logged, never raised. Main thread only.
    """
    run.tensorboard_json.unlink(missing_ok=True)
    if wanted is None:
        yield
        return
    if not is_there():
        log(MISSING)
        run.tensorboard_log.write_text(f"{MISSING}\n")
        yield
        return
    board = Board(wanted, run, log=log)
    try:
        board.start()
        yield
    finally:
        board.stop()


class Board:
    """One TensorBoard process."""

    def __init__(self, wanted: TensorBoardPlan, run: RunDir, *, log: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._run = run
        self._log = log
        self._is_stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        """Start it. Its log directory is made where it is missing."""
        logdir = Path(self._wanted.log_directory)
        log = self._run.tensorboard_log
        try:
            logdir.mkdir(parents=True, exist_ok=True)
            begin = log.stat().st_size if log.exists() else 0
            handle = open_regular(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with os.fdopen(handle, "ab", buffering=0) as output:
                self._child = subprocess.Popen(
                    [
                        *module_command(sys.executable, "tensorboard.main"),
                        f"--logdir={logdir}", f"--host={self._wanted.host}",
                        f"--port={self._wanted.port}",
                    ],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    preexec_fn=partial(_die_with, os.getpid()),
                )  # fmt: skip
        except OSError as error:
            self._log(f"TensorBoard could not be started: {error}. The job runs without")
            return
        self._watcher = thread(self._watch, begin, name="hydroslurm-tensorboard")
        self._watcher.start()

    def stop(self) -> None:
        """End it and take its address back."""
        self._is_stopping.set()
        if self._child is not None:
            # it keeps nothing; asked kindly it may take seconds, of a grace that has few
            self._child.kill()
            self._child.wait()
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self, begin: int) -> None:
        """Announce its address once it answers, and withdraw it when it has ended."""
        assert self._child is not None
        log = self._run.tensorboard_log
        address = None
        while self._child.poll() is None:
            if address is None:
                found = _ADDRESS.search(log.read_bytes()[begin:])
                if found is not None:
                    address = self._announce(found[1].decode(), int(found[2]))
            self._is_stopping.wait(_POLL_S if address is None else 1.0)
        self._run.tensorboard_json.unlink(missing_ok=True)
        if not self._is_stopping.is_set():
            self._log(
                f"TensorBoard ended with status {self._child.returncode}; {log} says why. The job "
                "runs on"
            )

    def _announce(self, host: str, port: int) -> Address:
        assert self._child is not None
        address = Address(socket.gethostname(), host, port, self._child.pid)
        write_atomically(self._run.tensorboard_json, json.dumps(vars(address)) + "\n")
        self._log(f"TensorBoard answers at {address.url} on {address.node}")
        return address


def read_address(path: Path) -> Address | None:
    """The address of the running TensorBoard, if there is one."""
    try:
        row: dict[str, Any] = parse_json(read_regular(path, limit_bytes=1 << 16))
        return Address(str(row["node"]), str(row["host"]), int(row["port"]), int(row["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it has ended before
        os._exit(1)
