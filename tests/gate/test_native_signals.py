"""The native gate in processes of its own: real signals, children, collectives, exits."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest
from processes import Child, wait_until
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


def pause(rank: Child) -> None:
    rank.signal(signal.SIGUSR1)
    rank.expect("PARKED")


def resume(rank: Child) -> None:
    rank.signal(signal.SIGUSR2)
    rank.expect("FIRST_OPERATOR_RELEASED")


def said(rank: Child, start: str, n: int = 1) -> None:
    """Wait for the n-th such line, wherever it stands: two threads of the child write."""
    wait_until(
        lambda: sum(line.startswith(start) for line in rank.lines) >= n, f"{start} in {rank}"
    )


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
            resume(rank)
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


def test_python_handler_runs_while_parked(tmp_path: Path) -> None:
    """A stop signal opens the gate, so that a Python handler that was there before us runs in a
    main thread that was parked; a pause signal calls the old handler, too."""
    code = """
    class Leave(BaseException):
        pass
    def leave(signo, frame):
        raise Leave
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGUSR1, lambda signo, frame: print("old", signo))
    start()
    print("ready")
    try:
        while True:
            step()
    except Leave:
        print("left")
        sys.stdin.readline()
    """
    with forked(program(code), tmp_path) as rank:
        rank.expect("ready")
        pause(rank)
        resume(rank)
        said(rank, "old")
        pause(rank)
        rank.signal(signal.SIGTERM)
        said(rank, "left")
        said(rank, "STOP_REQUESTED")
        said(rank, "RESUMED", 2)


GLOO = """
import torch.distributed as dist
n = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=n, world_size=2)
start()
print("ready")
parts = [torch.zeros(4096) for _ in range(2)]
for round in range(3):
    sys.stdin.readline()
    work = dist.all_gather(parts, torch.full((4096,), float(n + 1)), async_op=True)
    print("issued")
    if n == 1:
        work.wait()
        print("gathered", float(sum(part.sum() for part in parts)))
    else:
        while "go on" not in sys.stdin.readline():
            pass
        step()
        work.wait()
        print("gathered", float(sum(part.sum() for part in parts)))
sys.stdin.readline()
"""


def test_collective_in_flight_ends_while_held(tmp_path: Path) -> None:
    """gloo's own threads pass: with one rank held at an operator, the all_gather that it issued
    before ends for its peer."""
    store = str(tmp_path / "store")
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    code = program(GLOO)
    with forked(code, folders[0], "0", store) as zero, forked(code, folders[1], "1", store) as one:
        zero.expect("ready")
        one.expect("ready")
        for n in range(1, 4):
            zero.say("issue")
            zero.expect("issued")
            pause(zero)  # quiet: it waits for a line
            zero.say("go on")
            zero.expect("LATE_OPERATOR_HELD")
            one.say("issue")
            assert one.expect("gathered") == str(4096.0 * 3)
            assert sum(line.startswith("FIRST_OPERATOR_RELEASED") for line in zero.lines) == n - 1
            resume(zero)
            said(zero, f"gathered {4096.0 * 3}", n)


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
