"""The native gate in processes of its own: real signals, children, collectives, exits."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest
from zygote import forked

from hydroslurm.gate.native_gate import NativeGate

PRELUDE = """
import os, signal, sys, threading, time
import torch
from hydroslurm.gate.native_gate import NativeGate
from hydroslurm.gate.protocol import Action, Cause, SignalRule

def print(*words):  # whole lines, from several threads
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

torch.set_num_threads(1)
RULES = (
    SignalRule(signal.SIGTSTP, Action.PAUSE, Cause.SLURM),
    SignalRule(signal.SIGCONT, Action.RESUME, Cause.SLURM | Cause.TERMINAL),
    SignalRule(signal.SIGUSR1, Action.PAUSE, Cause.USER),
    SignalRule(signal.SIGUSR2, Action.RESUME, Cause.USER),
    SignalRule(signal.SIGTERM, Action.STOP, only_if_handled=True),
)
gate = NativeGate()

def tell():
    while True:
        for event in gate.wait_events(None):
            print(event.kind.name, event.signo, event.phase.name, event.text)

def start(rules=RULES):
    outcome = gate.start(rules)
    threading.Thread(target=tell, daemon=True).start()
    return outcome

def step():
    x = torch.ones(16, 16, requires_grad=True)
    (x @ x).relu().sum().backward()
"""


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """Build once, here and not in a child that a test waits for."""
    NativeGate()


def program(code: str) -> str:
    return PRELUDE + textwrap.dedent(code)


BACKWARD = """
start()
torch.manual_seed(0)
weights = [(torch.randn(384, 384) / 16).requires_grad_() for _ in range(8)]
x = torch.randn(384, 384)
def loss(n):
    out = x
    for i in range(n):
        out = torch.tanh(out @ weights[i % 8])
    return out
started = time.monotonic()
loss(20).sum().backward()
n = max(40, int(20 * 1.5 / (time.monotonic() - started)))  # a backward of a second or more
for weight in weights:
    weight.grad = None
out = loss(n)
out.register_hook(lambda grad: print("inside", n))
out.sum().backward()
paused = [weight.grad.clone() for weight in weights]
assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in paused)
for weight in weights:
    weight.grad = None
loss(n).sum().backward()
print("same", all(torch.equal(a, w.grad) for a, w in zip(paused, weights)))
"""


def test_parks_inside_a_long_backward(tmp_path: Path) -> None:
    """SIGUSR1 during one long C++ backward parks the rank inside it, three times over; the
    gradients have the bits of a backward that was never paused."""
    with forked(program(BACKWARD), tmp_path) as rank:
        rank.expect("inside")
        for _ in range(3):
            rank.signal(signal.SIGUSR1)
            assert " BACKWARD " in rank.expect("FIRST_OPERATOR_HELD")
            rank.expect("PARKED")
            rank.signal(signal.SIGUSR2)
            rank.expect("FIRST_OPERATOR_RELEASED")
        assert rank.expect("same") == "True"
        assert rank.wait() == 0


def test_no_handler_of_ours_interrupts_another(tmp_path: Path) -> None:
    """A resume right behind its pause would else be answered first, and the rank stay paused."""
    code = """
    from hydroslurm.gate import handlers
    start()
    gate.claim(Action.STOP)
    for rule in RULES:
        mask = int.from_bytes(handlers._read(rule.signo).raw[8:16], sys.byteorder)
        print(all(mask >> other.signo - 1 & 1 for other in RULES))
    print("read")
    """
    with forked(program(code), tmp_path) as rank:
        rank.expect("read")
        assert [line for line in rank.lines if line in ("True", "False")] == ["True"] * 5


def test_exit_while_a_daemon_thread_is_held(tmp_path: Path) -> None:
    """An interpreter that ends while the gate is closed and holds a daemon thread ends cleanly.
    (One that runs is another matter: torch itself aborts when such a thread comes back to Python.)
    """
    code = """
    start()
    def user():
        while True:
            torch.ones(4)[1:2].add_(1)
    threading.Thread(target=user, daemon=True).start()
    gate.request(Action.PAUSE, Cause.API)
    while not gate.status().held:
        time.sleep(0.001)
    sys.exit(5)
    """
    with forked(program(code), tmp_path) as rank:
        assert rank.wait() == 5, str(rank)


def test_forked_children_of_a_pausing_rank_run(tmp_path: Path) -> None:
    """Children that are forked while the gate opens and closes issue operators at once, take the
    inherited callback away with their first one, and can have a gate of their own: none of them
    finds a lock taken."""
    code = """
    start()
    end = False
    def pauses():
        while not end:
            gate.request(Action.PAUSE, Cause.API)
            gate.request(Action.RESUME, Cause.API)
        gate.request(Action.PAUSE, Cause.API)
    def fork():
        pid = os.fork()
        if pid == 0:
            step()
            with gate.trace(0) as trace:
                step()
            assert trace.count > 5 and not gate.status().armed
            gate.start(())
            gate.request(Action.PAUSE, Cause.API)
            while not gate.status().closed_mono_ns:
                time.sleep(0.001)
            os._exit(gate.stop())
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    thread = threading.Thread(target=pauses)
    thread.start()
    for _ in range(40):
        fork()
    end = True
    thread.join()
    while not gate.status().armed:
        time.sleep(0.001)
    fork()
    print("closed", gate.status().closed_mono_ns > 0)
    """
    with forked(program(code), tmp_path) as rank:
        for _ in range(41):
            assert rank.expect("child") == "0"
        assert rank.expect("closed") == "True"
