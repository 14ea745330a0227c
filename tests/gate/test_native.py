"""The native gate against real torch, in this process: who is held where, and nothing changes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from hydroslurm.core.events import EventKind
from hydroslurm.errors import InstallError
from hydroslurm.gate.native_gate import NativeGate
from hydroslurm.gate.protocol import (
    Action,
    Cause,
    GateEvent,
    Phase,
    SignalRule,
)

T = TypeVar("T")
LIMIT_S = 30.0
RULES = (
    SignalRule(signal.SIGUSR1, Action.PAUSE, Cause.USER),
    SignalRule(signal.SIGUSR2, Action.RESUME, Cause.USER),
)


class Rank:
    """A started gate, and every event that it has reported."""

    def __init__(self, gate: NativeGate) -> None:
        self.gate = gate
        self.events: list[GateEvent] = []

    def pause(self) -> None:
        self.gate.request(Action.PAUSE, Cause.API)

    def resume(self) -> None:
        self.gate.request(Action.RESUME, Cause.API)

    def until(self, kind: EventKind, n: int = 1) -> GateEvent:
        """The n-th event of a kind, waited for. Every wait is bounded: a hang must not be ours."""
        deadline = time.monotonic() + LIMIT_S
        while len(found := [event for event in self.events if event.kind is kind]) < n:
            self.events += self.gate.wait_events(1.0)
            assert time.monotonic() < deadline, f"no {kind.name}; saw {self.events}"
        return found[n - 1]

    def drive(self, work: Callable[[], object], script: Callable[[], T]) -> T:
        """Do work in this, the main, thread for as long as a script runs in another."""

        def scripted() -> T:
            try:
                return script()
            finally:
                self.resume()

        with ThreadPoolExecutor(1) as pool:
            running: Future[T] = pool.submit(scripted)
            while not running.done():
                work()
            return running.result()


@pytest.fixture(scope="module")
def gate() -> NativeGate:
    torch.set_num_threads(1)
    return NativeGate()


@pytest.fixture
def rank(gate: NativeGate) -> Iterator[Rank]:
    gate.start(RULES)
    yield Rank(gate)
    gate.stop()
    gate.wait_events(0)


def _small_step() -> None:
    x = torch.ones(8, 8, requires_grad=True)
    (x @ x).relu().sum().backward()


class PythonNode(torch.autograd.Function):
    """A node of the graph that is written in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grad[0:8].detach()


X = torch.ones(8, 8, requires_grad=True)


@pytest.mark.parametrize(
    "work",
    [
        lambda: X[1:3],
        lambda: X.tolist(),
        lambda: PythonNode.apply(X).sum().backward(),  # type: ignore[no-untyped-call]
    ],
    ids=["slice", "tolist", "python-node"],
)
def test_gil_is_given_up(rank: Rank, work: Callable[[], object]) -> None:
    """An operator that is reached with the GIL held parks without hanging other Python threads."""

    def script() -> int:
        for n in range(1, 21):
            rank.pause()
            rank.until(EventKind.PARKED, n)  # which needs the GIL, as all that this thread does
            rank.resume()
            rank.until(EventKind.RESUMED, n)
        return sum(event.held for event in rank.events if event.kind is EventKind.PARKED)

    assert rank.drive(work, script) >= 15


def test_python_threads_are_held_and_exempt_ones_pass(rank: Rank) -> None:
    """A user's thread is held like the main one; within exempt() it passes and is counted."""
    counts = {"user": 0, "saver": 0}
    end = threading.Event()

    def user() -> None:
        while not end.is_set():
            torch.ones(2).add_(1)
            counts["user"] += 1

    def saver() -> None:
        with rank.gate.exempt():
            while not end.is_set():
                torch.ones(2).add_(1)
                counts["saver"] += 1

    threads = [threading.Thread(target=user), threading.Thread(target=saver)]

    def script() -> None:
        for thread in threads:
            thread.start()
        while not (counts["user"] and counts["saver"]):
            threading.Event().wait(0.001)
        rank.pause()
        rank.until(EventKind.PARKED)
        while rank.gate.status().held < 2:  # nobody knew of this thread before its first hold
            threading.Event().wait(0.001)
        user_at, saver_at = counts["user"], counts["saver"]
        while counts["saver"] < saver_at + 100:
            threading.Event().wait(0.001)
        assert counts["user"] == user_at
        rank.resume()
        assert rank.until(EventKind.RESUMED).passed >= 100
        rank.pause()
        parked = rank.until(EventKind.PARKED, 2)
        assert parked.held + parked.quiet == 2
        end.set()

    try:
        rank.drive(_small_step, script)
    finally:
        end.set()
        for thread in threads:
            thread.join(LIMIT_S)


def test_operators_of_one_step_are_many(gate: NativeGate) -> None:
    """A trace counts and names every operator, and tells backward from forward; it holds nobody."""
    model = torch.nn.Linear(4, 4)
    loss = model(torch.ones(2, 4)).relu().sum()
    with gate.trace(1000) as forward:
        model(torch.ones(2, 4)).relu().sum()
    with gate.trace(1000) as backward:
        torch.autograd.backward(loss)
    names = [one.name for one in forward.operators]
    assert {"aten::linear", "aten::addmm", "aten::relu", "aten::sum"} <= set(names)
    assert forward.count == len(names)
    assert {one.phase for one in forward.operators} == {Phase.FORWARD}
    inside = {one.name: one.phase for one in backward.operators}
    assert inside["ReluBackward0"] is Phase.BACKWARD
    assert inside["aten::threshold_backward"] is Phase.BACKWARD
    assert {one.tid for one in backward.operators} == {threading.get_native_id()}


def test_cleared_callbacks_are_noticed(rank: Rank) -> None:
    """When somebody clears torch's callbacks during a pause, ours comes back, and that is told."""

    def script() -> None:
        rank.pause()
        rank.until(EventKind.PARKED)
        torch._C._autograd._clear_callbacks()  # type: ignore[attr-defined]
        rank.until(EventKind.CALLBACK_LOST)
        assert rank.gate.status().armed

    rank.drive(_small_step, script)


def test_profiler_and_gate_coexist(rank: Rank) -> None:
    """torch's own profiler, which uses the same mechanism, works through a pause."""

    def script() -> None:
        rank.pause()
        rank.until(EventKind.PARKED)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rank.drive(_small_step, script)
    assert "aten::mm" in {row.key for row in profile.key_averages()}


def test_what_is_refused(gate: NativeGate) -> None:
    """A table that cannot be installed, with the signal's number, and nothing runs; numbers of
    collectives that are none, and whatever is asked of a gate that does not run."""
    twice = (RULES[0], SignalRule(signal.SIGUSR1, Action.RESUME, Cause.USER))
    with pytest.raises(InstallError, match=f"signal {signal.SIGUSR1:d}: Invalid argument"):
        gate.start(twice)
    with pytest.raises(InstallError, match=f"signal {signal.SIGKILL:d}"):
        gate.start((SignalRule(signal.SIGKILL, Action.PAUSE, Cause.USER),))
    for ask in (lambda: gate.request(Action.PAUSE, Cause.API), lambda: gate.let_through(1)):
        with pytest.raises(InstallError, match="not started"):
            ask()
    gate.start([])
    for n in (-1, 1 << 40, 1 << 70, -(1 << 70)):
        with pytest.raises(InstallError, match=str(n)):
            gate.let_through(n)
    assert gate.stop() == 0
