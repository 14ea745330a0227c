"""Ctrl-Z in a real terminal, with a real shell that does job control, and without one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from kit.terminal import Open

from hydroslurm.gate.native_gate import NativeGate

PROGRAM = """
import signal, threading
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
print("<READY>", flush=True)
while True:
    torch.ones(8, 8) @ torch.ones(8, 8)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    NativeGate()  # built here, not in the child
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_ctrl_z_gives_the_shell_back_and_fg_continues(script: Path, terminal: Open) -> None:
    """Ctrl-Z closes the gate and then really stops the rank, parked or not after half a second, so
    that the shell comes back; fg continues it, and so again; bg does, too."""
    there = terminal(os.environ)

    def told(word: str, times: int = 1) -> None:
        there.until(lambda: there.history().count(word) >= times, f"{word} {times} times")

    there.type([sys.executable, "-u", str(script)])
    told("<READY>")
    for number, go_on in enumerate(("fg", "fg", "bg"), 1):
        there.press("C-z")
        told("Stopped", number)
        there.type(["expr", "40", "+", str(number)])
        told(f"\n{40 + number}\n")
        there.type([go_on])
        for word in ("<GATE_CLOSED>", "<TERMINAL_STOP>", "<RESUMED>"):  # in any order
            told(word, number)
    there.type(["kill", "-KILL", "%1"])
    there.type(["wait"])
    there.type(["expr", "50", "+", "0"])
    told("\n50\n")  # it is gone; whether bash says so depends on whether wait came first


def test_ctrl_z_without_a_shell_is_ignored(script: Path, terminal: Open) -> None:
    """In an orphaned process group nobody could continue the rank: the kernel ignores Ctrl-Z there,
    and so does the gate."""
    there = terminal(os.environ, sys.executable, "-u", str(script))
    there.until(lambda: "<READY>" in there.text(), "the rank")
    there.press("C-z")
    for word in ("<TERMINAL_STOP_IGNORED>", "<SIGNAL_RECEIVED>"):
        there.until(lambda word=word: word in there.text(), word)
    assert "GATE_CLOSED" not in there.text()
