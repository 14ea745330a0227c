"""Ctrl-Z in a real terminal, with a real shell that does job control, and without one."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hydroslurm.gate.native_gate import NativeGate

LIMIT_S = 60.0

PROGRAM = """
import os, signal, threading
import torch
from hydroslurm.gate.native_gate import NativeGate
from hydroslurm.gate.protocol import Action, Cause, SignalRule

torch.set_num_threads(1)
gate = NativeGate()
gate.start((
    SignalRule(signal.SIGTSTP, Action.PAUSE, Cause.SLURM),
    SignalRule(signal.SIGCONT, Action.RESUME, Cause.SLURM | Cause.TERMINAL),
))
def tell():
    while True:
        for event in gate.wait_events(None):
            print(f"<{event.kind.name}>", flush=True)
threading.Thread(target=tell, daemon=True).start()
print(f"<ready {os.getpid()}>", flush=True)
while True:
    torch.ones(8, 8) @ torch.ones(8, 8)
"""


class Terminal:
    """The master end of a pseudo-terminal and the process that leads its session."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(folder)
                os.environ["PS1"] = "$ "
                os.execv(argv[0], argv)
            finally:
                os._exit(127)
        self.seen = ""
        self.used = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, text: str) -> None:
        """Read on until the text comes; what was read up to its end is used up."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.fd, 4096).decode(errors="replace")
        before, found, self.seen = self.seen.partition(text)
        self.used += before + found

    def expect_rank(self) -> int:
        """The rank's process id, once it is ready."""
        self.expect("<ready ")
        self.expect(">")
        return int(self.used.rpartition("<ready ")[2].rstrip(">"))

    def close(self) -> None:
        """Ends the whole session: a rank that a failed test leaves behind would run for ever."""
        for pid in members(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


def members(session: int) -> list[int]:
    """The processes of a session, its leader among them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, ProcessLookupError):
            if os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
    return found


SHELL = ["/bin/bash", "--norc", "--noediting", "-i"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    NativeGate()  # built here, not in the child
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def test_ctrl_z_gives_the_shell_back_and_fg_continues(script: Path) -> None:
    """Ctrl-Z parks the rank and then really stops it, so that the shell comes back; fg continues
    it; and so again."""
    with contextlib.closing(Terminal(SHELL, script.parent)) as tty:
        tty.type(f"{sys.executable} -u {script}\n")
        tty.expect_rank()
        for _ in range(2):
            tty.type("\x1a")
            tty.expect("Stopped")
            tty.type("echo shell-$((40 + 2))\n")
            tty.expect("shell-42")
            tty.type("fg\n")
            tty.expect("<RESUMED>")
        for told in ("<PARKED>", "<TERMINAL_STOP>", "<RESUMED>"):
            assert tty.used.count(told) == 2  # before the stop or, as likely, after it
        tty.type("\x1a")
        tty.expect("Stopped")
        tty.type("bg\n")
        tty.expect("<RESUMED>")
        tty.type("kill -KILL %1; wait; echo go''ne\n")
        tty.expect("gone")


def test_ctrl_z_without_a_shell_is_ignored(script: Path) -> None:
    """In an orphaned process group nobody could continue the rank: the kernel ignores Ctrl-Z there,
    and so does the gate."""
    with contextlib.closing(Terminal([sys.executable, "-u", str(script)], script.parent)) as tty:
        tty.expect_rank()
        tty.type("\x1a")
        tty.expect("<TERMINAL_STOP_IGNORED>")
        tty.expect("<SIGNAL_RECEIVED>")
        assert "GATE_CLOSED" not in tty.seen
