"""Child programs that are forked from a process which has torch or a framework loaded: 3 to 10 s of
processor time less for each. A :func:`forked` child is a :class:`processes.Child` without the start
of its interpreter, :func:`ran` is :func:`processes.captured` without it. Tests of that start, of
what is inherited over an exec, or of another environment of the dynamic linker, need a fresh one.

Each worker of the suite has one such process for each set of frameworks, from the first child that
wants it. It has no other Python thread when it forks, which it checks: a lock that another thread
holds would be held in the child for ever.

Run as a program this file is that process. It gets a line of JSON and three file descriptors for
each child, and tells the child's pid and, later, how it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import queue
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from forkedranks import die_with_parent
from processes import Child, descendants

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
    """Our end.

    Args:
        loads: the modules that it imports besides torch and this package.
    """

    def __init__(self, loads: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno()), *loads],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # what a test asks of its child would begin in this process
                env={k: v for k, v in os.environ.items() if not k.startswith("HYDROSLURM_")},
            )
        self._socket = ours
        self._new: queue.SimpleQueue[_Forked] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.process.kill)

    def fork(self, order: Mapping[str, Any], fds: Sequence[int]) -> _Forked:
        """A child with these as its standard input, output and error."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            return self._new.get(timeout=120)

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


_zygotes: dict[tuple[str, ...], _Zygote] = {}


def processor_s() -> float:
    """What these processes and their children have used until now: nobody has waited for them."""
    ticks = 0
    for one in _zygotes.values():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{one.process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, stat[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _zygote(*loads: str) -> _Zygote:
    if loads not in _zygotes or _zygotes[loads].process.poll() is not None:
        _zygotes[loads] = _Zygote(loads)
    return _zygotes[loads]


class ForkedChild(Child):
    """A program under test that has torch loaded when it begins."""

    def _start(
        self, script: Path, arguments: tuple[str, ...], environ: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        order = {"argv": [str(script), *arguments], "environ": dict(environ)}
        stdin, their_stdin = os.pipe()[::-1]
        stdout, their_stdout = os.pipe()
        child = _zygote().fork(order, [their_stdin, their_stdout, their_stdout])
        for fd in (their_stdin, their_stdout):
            os.close(fd)
        child.stdin, child.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        return cast("subprocess.Popen[str]", child)


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


@contextlib.contextmanager
def forked_program(
    program: Path, folder: Path, *arguments: str, environ: Mapping[str, str] | None = None
) -> Iterator[ForkedChild]:
    """As :func:`forked`, of a file of these tests, which may import from their folder."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"runpy.run_path({str(program)!r}, run_name='__main__')"
    )
    with forked(code, folder, *arguments, environ=environ) as started:
        yield started


def ran(
    argv: Sequence[str | Path], *, loads: Sequence[str] = (), timeout: float = 500.0
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, whatever that is, in a fork that has these modules loaded."""
    order = {"argv": list(map(str, argv)), "environ": dict(os.environ)}
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        with Path(os.devnull).open() as nothing:
            fds = [nothing.fileno(), stdout.fileno(), stderr.fileno()]
            child = _zygote(*loads).fork(order, fds)
        try:
            status = child.wait(timeout)
        finally:
            if child.poll() is None:
                for pid in (*descendants(child.pid), child.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
        for stream in (stdout, stderr):
            stream.seek(0)
        return subprocess.CompletedProcess(argv, status, stdout.read(), stderr.read())


# --- the process with torch
# --------------------------------------------------------------------------------------------------


def serve(control: socket.socket, loads: Sequence[str]) -> dict[str, Any] | None:
    """Fork children until the other side is gone, and return None; in a child, its order."""
    import torch

    import hydroslurm.training.run  # noqa: F401 - loaded before the fork

    torch.optim.Adam([torch.ones(1)])  # imports most of what torch has
    for name in loads:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
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
        data, fds, _, _ = socket.recv_fds(control, MOST_BYTES, 3)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            control.close()
            for fd in pids:
                os.close(fd)
            for standard, fd in enumerate(fds):
                os.dup2(fd, standard)
                os.close(fd)
            return dict(json.loads(data))
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": pid}).encode())
        pids[os.pidfd_open(pid)] = pid


def be(order: dict[str, Any]) -> None:
    """The program, as ``python -u`` would run it, to the end of the interpreter. What torch has
    for the end of the process behind that would touch 70 MB, which takes 0.2 s."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = cast(io.BufferedWriter, io.FileIO(fd, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = order["argv"]
    folder = str(Path(sys.argv[0]).parent)
    os.chdir(folder)
    sys.path[:1] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    die_with_parent()
    asked = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    if asked is not None:
        be(asked)
