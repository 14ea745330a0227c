"""Child programs that are forked from a process which has torch loaded: 3 s of processor time less
for each. A :func:`forked` child is what a :class:`processes.Child` is, but for the start of its
interpreter: for tests of that, of what is inherited over an exec, or of another environment of the
dynamic linker, it is the wrong one.

Run as a program this file is that process. It gets a line of JSON and the two ends of pipes for
each child, and tells the child's pid and, later, how it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import queue
import runpy
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from forkedranks import die_with_parent
from processes import Child

MOST_BYTES = 1 << 17


class _Forked:
    """What Child needs of a Popen."""

    stdin: io.TextIOWrapper
    stdout: io.TextIOWrapper

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"the forked child {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signo: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signo)

    def kill(self) -> None:
        self.send_signal(9)


class _Zygote:
    """Our end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        self._new: queue.SimpleQueue[_Forked] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.process.kill)

    def fork(self, order: Mapping[str, Any]) -> _Forked:
        stdin, their_stdin = os.pipe()[::-1]
        stdout, their_stdout = os.pipe()
        with self._lock:
            fds = [their_stdin, their_stdout]
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            for fd in fds:
                os.close(fd)
            child = self._new.get(timeout=120)
        child.stdin, child.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        return child

    def _listen(self) -> None:
        children: dict[int, _Forked] = {}
        while data := self._socket.recv(MOST_BYTES):
            told = json.loads(data)
            if "ended" in told:
                child = children.pop(told["pid"])
                child.returncode = told["ended"]
                child.ended.set()
            else:
                child = children[told["pid"]] = _Forked(told["pid"])
                self._new.put(child)


_zygotes: list[_Zygote] = []


class ForkedChild(Child):
    """A program under test that has torch loaded when it begins."""

    def _start(
        self, script: Path, arguments: tuple[str, ...], environ: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        if not _zygotes or _zygotes[0].process.poll() is not None:
            _zygotes[:] = [_Zygote()]
        order = {"argv": [str(script), *arguments], "environ": dict(environ)}
        return cast("subprocess.Popen[str]", _zygotes[0].fork(order))


@contextlib.contextmanager
def forked(
    code: str, folder: Path, *arguments: str, environ: Mapping[str, str] | None = None
) -> Iterator[ForkedChild]:
    """As :func:`processes.child`, forked."""
    started = ForkedChild(code, folder, *arguments, environ=environ)
    try:
        yield started
    finally:
        started.close()


# --- the process with torch
# --------------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork children until the other side is gone, and return None; in a child, its order."""
    import torch

    import hydroslurm.training.run  # noqa: F401 - loaded before the fork

    torch.optim.Adam([torch.ones(1)])  # imports most of what torch has
    pids: dict[int, int] = {}
    while True:
        ready = select.select([control, *pids], [], [])[0]
        for pidfd in (one for one in ready if one is not control):
            pid = pids.pop(pidfd)
            os.close(pidfd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            control.send(json.dumps({"pid": pid, "ended": status}).encode())
        if control not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, MOST_BYTES, 2)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            control.close()
            for fd in pids:
                os.close(fd)
            for fd, standard in ((fds[0], 0), (fds[1], 1), (fds[1], 2)):
                os.dup2(fd, standard)
            for fd in fds:
                os.close(fd)
            return dict(json.loads(data))
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": pid}).encode())
        pids[os.pidfd_open(pid)] = pid


def be(order: dict[str, Any]) -> None:
    """The program, as ``python -u`` would run it, to the end of the interpreter."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = cast(io.BufferedWriter, io.FileIO(fd, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = order["argv"]
    folder = str(Path(sys.argv[0]).parent)
    os.chdir(folder)
    sys.path[0] = folder
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    die_with_parent()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        be(asked)
