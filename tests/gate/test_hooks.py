"""The module-hook gate: real signals to real processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import wait_until
from torch import nn
from zygote import forked

from hydroslurm.core.events import EventKind
from hydroslurm.errors import InstallError
from hydroslurm.gate.hooks import HooksGate
from hydroslurm.gate.protocol import Action, Cause, GateEvent, GateState, Phase, SignalRule

PAUSE = SignalRule(signo=signal.SIGUSR1, action=Action.PAUSE, causes=Cause.USER)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))


class Trainer:
    """A thread that trains until it is told to end."""

    def __init__(self) -> None:
        self.model = _model()
        self.steps = 0
        self._end = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        data = torch.ones(4, 8)
        while not self._end:
            self.model(data).sum().backward()
            self.steps += 1

    def end(self) -> None:
        self._end = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def gate() -> Iterator[HooksGate]:
    mine = HooksGate()
    yield mine
    mine.stop()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    mine = Trainer()
    wait_until(lambda: mine.steps > 3, "the trainer begins")
    yield mine
    mine.end()


def _until(gate: HooksGate, kind: EventKind) -> list[GateEvent]:
    """The events up to and including one of the kind."""
    seen: list[GateEvent] = []

    def found() -> bool:
        seen.extend(gate.wait_events(0.05))
        return any(event.kind is kind for event in seen)

    wait_until(found, kind.name)
    return seen


def test_a_stop_opens_for_good(gate: HooksGate, trainer: Trainer) -> None:
    """A stop wins over the pause in force and over every later one. Off the main thread a table of
    signals is refused with the reason, an empty one is not."""
    handler = signal.getsignal(signal.SIGUSR1)  # an earlier Run of this process leaves one
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(InstallError, match="main thread"):
            pool.submit(gate.start, [PAUSE]).result()
        assert signal.getsignal(signal.SIGUSR1) is handler
        pool.submit(gate.start, []).result()
    gate.request(Action.PAUSE, Cause.USER)
    _until(gate, EventKind.PARKED)
    before = trainer.steps
    gate.request(Action.STOP, Cause(0))
    gate.request(Action.PAUSE, Cause.USER)
    _until(gate, EventKind.FIRST_OPERATOR_RELEASED)
    wait_until(lambda: trainer.steps > before + 3, "steps after the stop")
    assert gate.status().state is GateState.STOPPING
    assert not gate.status().armed


def test_exempt_threads_pass_and_are_counted(gate: HooksGate) -> None:
    """A saver inside exempt() runs modules during a pause; the pause says how many hooks passed."""
    gate.start([])
    gate.request(Action.PAUSE, Cause.API)
    _until(gate, EventKind.GATE_CLOSED)
    with gate.exempt():
        _model()(torch.ones(1, 8))
    assert gate.status().passed >= 4
    gate.request(Action.RESUME, Cause.API)
    assert _until(gate, EventKind.RESUMED)[-1].passed >= 4


def test_it_parks_inside_a_backward(gate: HooksGate) -> None:
    """A pause that is asked for during a long backward is held at the next module in it."""

    gate.start([])
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    out = model(torch.ones(2, 4, requires_grad=True))
    # asked for from inside the backward, by the gradient's own hook
    out.register_hook(lambda _: gate.request(Action.PAUSE, Cause.API))
    out.register_hook(lambda _: wait_until(lambda: gate.status().armed, "the gate is closed"))
    thread = threading.Thread(target=out.sum().backward)
    thread.start()
    events = _until(gate, EventKind.PARKED)
    held = next(event for event in events if event.kind is EventKind.FIRST_OPERATOR_HELD)
    assert (held.phase, held.text) == (Phase.BACKWARD, "Linear")
    assert thread.is_alive()
    gate.request(Action.RESUME, Cause.API)
    _until(gate, EventKind.RESUMED)
    thread.join(30)
    assert not thread.is_alive()


def test_a_suspend_and_a_resume_within_one_operator_end_in_running(tmp_path: Path) -> None:
    """TSTP then CONT, both while the main thread is in C with the GIL held, leave the rank running.

    CPython would call the handlers by number, CONT first.
    """
    code = """
        import ctypes, functools, os, signal, torch
        from hydroslurm.gate.hooks import HooksGate
        from hydroslurm.gate.protocol import *
        os.setsid()
        gate = HooksGate()
        gate.start([SignalRule(signo=signal.SIGTSTP, action=Action.PAUSE, causes=Cause.SLURM),
                    SignalRule(signo=signal.SIGCONT, action=Action.RESUME, causes=Cause.SLURM)])
        # map() over a C function that keeps the GIL: no Python handler can run between the two
        kill = functools.partial(ctypes.PyDLL(None).kill, os.getpid())
        list(map(kill, (int(signal.SIGTSTP), int(signal.SIGCONT))))
        kinds = []
        while "SIGNAL_RECEIVED" not in kinds:
            kinds += [event.kind.name for event in gate.wait_events(1)]
        torch.nn.Linear(1, 1)(torch.ones(1, 1))
        print("ran", gate.status().state.name, flush=True)
        gate.stop()
    """
    with forked(code, tmp_path) as rank:
        assert rank.expect("ran") == "RUNNING"
        assert rank.wait() == 0


def test_stop_lets_a_held_thread_go_and_removes_every_hook(trainer: Trainer) -> None:
    """After stop() nothing is held and no module carries a hook of ours."""
    gate = HooksGate(model=trainer.model)
    gate.start([])
    gate.request(Action.PAUSE, Cause.API)
    _until(gate, EventKind.PARKED)
    before = trainer.steps
    gate.stop()
    wait_until(lambda: trainer.steps > before, "a step after stop()")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
    assert gate.status().state is GateState.RUNNING
