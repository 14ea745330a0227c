"""TensorBoard beside the ranks: a child of the supervisor that ends with it, however that happens,
and so with the job. Its address is written into the run folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hydroslurm.core.decoding import decode
from hydroslurm.core.files import open_regular, read_regular, write_atomically
from hydroslurm.core.proc import die_with, module_command
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.threads import thread
from hydroslurm.jobs.plan import TensorBoardPlan

_ADDRESS = re.compile(rb"TensorBoard \S+ at http://(\[[0-9a-f:]+\]|[^\s/:]+):(\d+)/")
_POLL_S = 0.1


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


@contextlib.contextmanager
def tensorboard(
    wanted: TensorBoardPlan | None, run: RunDir, *, log: Callable[[str], None]
) -> Iterator[None]:
    """Run TensorBoard inside the block, if it is wanted. The ranks do not wait for it: it announces
    its address once it has one. Its failures are logged, never raised. Main thread only.
    """
    run.tensorboard_json.unlink(missing_ok=True)
    begin = run.tensorboard_log.stat().st_size if run.tensorboard_log.exists() else 0
    child = None if wanted is None else _start(wanted, run, log)
    if child is None:
        yield
        return
    is_stopping = threading.Event()
    arguments = child, run, begin, is_stopping, log
    watcher = thread(_watch, *arguments, name="hydroslurm-tensorboard")
    watcher.start()
    try:
        yield
    finally:
        is_stopping.set()
        # it keeps nothing; asked kindly it may take seconds, of a grace that has few
        child.kill()
        child.wait()
        watcher.join()


def _start(
    wanted: TensorBoardPlan, run: RunDir, log: Callable[[str], None]
) -> subprocess.Popen[bytes] | None:
    """Start it. Its log directory is made where it is missing."""
    logdir = Path(wanted.log_directory)
    try:
        logdir.mkdir(parents=True, exist_ok=True)
        handle = open_regular(run.tensorboard_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(handle, "ab", buffering=0) as output:
            return subprocess.Popen(
                [
                    *module_command(sys.executable, "tensorboard.main"),
                    f"--logdir={logdir}", f"--host={wanted.host}", f"--port={wanted.port}",
                ],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                preexec_fn=partial(die_with, os.getpid()),
            )  # fmt: skip
    except OSError as error:
        log(f"TensorBoard could not be started: {error}. The job runs without")
        return None


def _watch(
    child: subprocess.Popen[bytes],
    run: RunDir,
    begin: int,
    is_stopping: threading.Event,
    log: Callable[[str], None],
) -> None:
    """Announce its address once it answers, and withdraw it when it has ended. ``begin``: where its
    output begins in the log."""
    address = None
    while child.poll() is None:
        found = None if address else _ADDRESS.search(run.tensorboard_log.read_bytes()[begin:])
        if found is not None:
            address = Address(socket.gethostname(), found[1].decode(), int(found[2]), child.pid)
            write_atomically(run.tensorboard_json, json.dumps(vars(address)) + "\n")
            log(f"TensorBoard answers at {address.url} on {address.node}")
        is_stopping.wait(_POLL_S if address is None else 1.0)
    run.tensorboard_json.unlink(missing_ok=True)
    if not is_stopping.is_set():
        log(
            f"TensorBoard ended with status {child.returncode}; {run.tensorboard_log} says why. If "
            "it is not installed: pip install tensorboard. The job runs on"
        )


def read_address(path: Path) -> Address | None:
    """The address of the running TensorBoard, if there is one."""
    try:
        return decode(Address, read_regular(path, limit_bytes=1 << 16))
    except (OSError, ValueError):
        return None
