"""Signals that others take while hydroslurm is installed: real handlers, real signals."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child, wait_until
from zygote import forked

from hydroslurm.errors import TargetError
from hydroslurm.runtime import client

LIBRARY = """
import os, signal

FREE = signal.getsignal(signal.SIGUSR2)
saved, called = {}, []

def save():  # as Lightning's _SignalConnector does, before and after each fit
    for signo in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        saved[signo] = signal.getsignal(signo)

def restore():
    for signo, handler in saved.items():
        if handler is not None:
            signal.signal(signo, handler)

def take(signo):
    old = signal.getsignal(signo)
    def and_ours(signo, frame):
        called.append(signo)
        old(signo, frame)
    return signal.signal(signo, and_ours)
"""

PROGRAM = """
import asyncio, faulthandler, multiprocessing, os, queue, signal, sys, threading, time
import library
import torch
import hydroslurm

def print(*words):  # whole lines, from several threads
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
controller = hydroslurm.install(run_dir="run", gate="native")
loop = asyncio.new_event_loop()
shown = [signal.getsignal(signo) for signo in controller.plan.pausing()]

passes_on = False
def on_purpose(signo, frame):
    print("on purpose")
    if passes_on:
        before(signo, frame)

def nothing(n):
    return os.kill(os.getpid(), signal.SIGUSR1) or n

acts = queue.SimpleQueue()
def listen():  # not through sys.stdin: a forked worker closes that, whose lock would be taken
    for line in open(0, closefd=False):
        acts.put(line)
threading.Thread(target=listen, daemon=True).start()
print("ready")
while True:
    time.sleep(0.002)
    model(torch.ones(4))
    if not acts.empty():
        line = acts.get()
        if line == "end\\n":
            break
        exec(line)
        print("did", line.strip())
"""


class Rank:
    """A child that trains, and does in its main thread what it is told."""

    def __init__(self, process: Child, folder: Path) -> None:
        self.process, self.folder, self.heard = process, folder, 0
        process.expect("ready")

    def do(self, line: str) -> None:
        self.process.say(line)
        self.process.expect("did")

    def asks(self, expression: str) -> str:
        self.process.say(f"print('answer', {expression})")
        answer: str = self.process.expect("answer")
        self.process.expect("did")
        return answer

    def events(self, kind: str) -> list[dict[str, object]]:
        lines = (self.folder / "run/events/rank-00000.jsonl").read_text().splitlines()
        read = [json.loads(line) for line in lines]
        return [event["data"] for event in read if event["kind"] == kind]

    def pauses(self, signo: int = signal.SIGUSR1) -> None:
        """Paused by a signal, and continued by one."""
        before = len(self.events("parked"))
        self.process.signal(signo)
        wait_until(lambda: len(self.events("parked")) > before, f"parked: {self.process}")
        self.process.signal(signal.SIGUSR2 if signo == signal.SIGUSR1 else signal.SIGCONT)
        wait_until(lambda: len(self.events("resumed")) > before, f"resumed: {self.process}")

    def hears(self, words: str) -> str:
        """The next line of hydroslurm's; it says this. Some of its looks come early here."""
        if self.heard:
            self.do("controller.gate.check_handlers()")
        wait_until(lambda: len(self.said()) > self.heard, f"{words}: {self.process}")
        line = self.said()[self.heard]
        self.heard += 1
        assert words in line
        self.asks("'the main thread has come by'")
        return line

    def said(self) -> list[str]:
        return [line for line in self.process.lines if line.startswith("hydroslurm: ")]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    (tmp_path / "library.py").write_text(LIBRARY)
    with forked(PROGRAM, tmp_path) as process:
        yield Rank(process, tmp_path)


def test_signals_that_others_take_pause_all_the_same(rank: Rank) -> None:
    """Python shows handlers that lead to ours, also when they were saved and restored; whoever
    takes a signal is named in one line, and loses it; what is in Python is called after ours."""
    assert rank.asks("list(map(callable, shown))") == str([True] * 4)
    assert rank.asks("signal.getsignal(signal.SIGINT) is signal.default_int_handler") == "True"

    rank.do("library.save()")
    rank.do("library.restore(); os.kill(os.getpid(), signal.SIGUSR1); library.restore()")
    wait_until(lambda: rank.events("parked"), "a signal that came at once")
    rank.process.signal(signal.SIGUSR2)
    wait_until(lambda: rank.events("resumed"), "and the one that ends it")
    rank.pauses(signal.SIGTSTP)

    rank.do("loop.add_signal_handler(signal.SIGUSR1, lambda: print('loop heard'))")
    assert "asyncio" in rank.hears("SIGUSR1")
    rank.pauses()
    rank.do("loop.call_later(0.2, loop.stop); loop.run_forever()")
    assert "loop heard" in rank.process.lines
    rank.do("loop.remove_signal_handler(signal.SIGUSR1)")
    rank.hears("SIGUSR1 was given its default action")
    rank.pauses()
    assert rank.asks("callable(signal.getsignal(signal.SIGUSR1))") == "True"

    rank.do("library.take(signal.SIGUSR1)")
    assert "library.py" in rank.hears("SIGUSR1 was given to take.<locals>.and_ours() of library")
    closes = int(rank.asks("controller.status().closes"))
    rank.pauses()
    assert rank.asks("controller.status().closes") == str(closes + 1)
    assert rank.asks("library.called") == f"[{signal.SIGUSR1:d}]"
    with pytest.raises(TargetError, match="replaced since"):
        client.pause(rank.process.pid)

    rank.do("signal.signal(signal.SIGUSR2, library.FREE)")
    rank.pauses()  # a look at its start: what ends it must not kill
    rank.hears("SIGUSR2 was given its default action")

    rank.do("faulthandler.register(signal.SIGUSR1, chain=False)")
    rank.hears("SIGUSR1 was given to C code in ")
    rank.pauses()
    rank.do("faulthandler.unregister(signal.SIGUSR1)")
    rank.pauses()

    rank.do("pool = multiprocessing.get_context('fork').Pool(1)")
    assert rank.asks("pool.map(nothing, [1, 2])") == "[1, 2]"
    rank.do("pool.terminate()")

    rank.do("before = signal.signal(signal.SIGUSR1, on_purpose)")
    rank.hears("SIGUSR1 was given to on_purpose()")
    rank.pauses()
    rank.process.expect("on purpose")
    assert rank.events("handler_replaced")[-1]["still_called"] is True
    rank.do("passes_on = True")
    rank.pauses()
    rank.process.expect("on purpose")
    rank.do("signal.signal(signal.SIGUSR1, before)")
    rank.do("controller.gate.check_handlers()")
    wait_until(lambda: "and_ours" in str(rank.events("handler_replaced")[-1]["by"]), "it is back")
    rank.do("signal.signal(signal.SIGUSR1, on_purpose)")
    rank.pauses()
    rank.process.expect("on purpose")

    rank.do("controller.claim_stops()")
    rank.do("library.take(signal.SIGTERM)")
    rank.hears("SIGTERM was given to take.<locals>.and_ours() of library")
    rank.process.signal(signal.SIGTERM)
    wait_until(lambda: rank.events("stop_requested"), "a stop that a library had taken")
    assert rank.asks("signal.SIGTERM in library.called") == "False"
    assert len(rank.said()) == rank.heard
    rank.process.say("end")
    assert rank.process.wait() == 0, str(rank.process)


AFTER = """
import os, signal, sys
import hydroslurm
from hydroslurm.gate.handlers import ShownHandler

def mine(signo, frame):
    print("mine", signal.Signals(signo).name, flush=True)

signal.signal(signal.SIGUSR2, mine)
controller = hydroslurm.install(run_dir="run", gate="native")
controller.claim_stops()
chosen = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGURG)
saved = {signo: signal.getsignal(signo) for signo in chosen}
assert all(isinstance(handler, ShownHandler) for handler in saved.values()), saved
controller.release_stops()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
os.kill(os.getpid(), signal.SIGUSR2)
hydroslurm.uninstall()
now = [signal.getsignal(signo) for signo in chosen]
assert now == [signal.SIG_DFL, mine, signal.SIG_DFL, signal.SIG_DFL], now
for signo, handler in saved.items():
    signal.signal(signo, handler)
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR2)
print("alive", flush=True)
hydroslurm.install(run_dir="run", gate="native")
hydroslurm.uninstall()
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
assert signal.getsignal(signal.SIGUSR2) is mine
signal.signal(signal.SIGTERM, saved[signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_what_was_shown_before_comes_back(tmp_path: Path) -> None:
    """uninstall() shows again what Python showed; our handlers, restored after that by somebody,
    call what was there before: a pause kills nobody, and SIGTERM ends the process."""
    with forked(AFTER, tmp_path) as program:
        assert program.wait() == -signal.SIGTERM, str(program)
        assert program.lines == ["mine SIGUSR2", "mine SIGUSR2", "alive"]


CHAINED = """
import faulthandler, json, os, signal
from pathlib import Path
import hydroslurm

hydroslurm.install(run_dir="first", gate="native")
with open("stacks", "w") as stacks:
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False, chain=True)
    hydroslurm.uninstall()  # as a framework's fit does; faulthandler has our address
    hydroslurm.install(run_dir="run", gate="native")
    for count in (1, 2, 3):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert open("stacks").read().count("most recent call first") == count
hydroslurm.uninstall()
events = [json.loads(line) for line in Path("run/events/rank-00000.jsonl").open()]
received = [one["data"] for one in events if one["kind"] == "signal_received"]
for name in ("SIGUSR1", "SIGUSR2"):
    assert sum(one["count"] for one in received if one["signal"] == name) == 3, received
print("alive", flush=True)
"""


def test_a_handler_that_raises_what_it_was_given_is_called_once(tmp_path: Path) -> None:
    """faulthandler chains by putting back the handler that it found and raising the signal again.
    If that handler is ours, and ours calls faulthandler's, they do not call each other for ever."""
    with forked(CHAINED, tmp_path) as program:
        assert program.wait() == 0, str(program)
        assert program.lines == ["alive"]
