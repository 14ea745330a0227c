"""A pause's handler closes the gate, and the next operator arms it: at whatever instruction the
signal comes, also while the interrupted thread holds torch's own mutex."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hydroslurm.core.events import EventKind
from hydroslurm.errors import NoCompiler
from hydroslurm.gate.compiler import find_compiler
from hydroslurm.gate.native_gate import NativeGate
from hydroslurm.gate.protocol import Action, Cause, GateEvent, GateState, SignalRule

RULES = (
    SignalRule(signal.SIGUSR1, Action.PAUSE, Cause.USER),
    SignalRule(signal.SIGUSR2, Action.RESUME, Cause.USER),
)
HELD = (EventKind.FIRST_OPERATOR_HELD, EventKind.LATE_OPERATOR_HELD)
LIMIT_S = 60.0
NEVER = 1 << 40
LOCKED_WITHIN = 300
"""Instructions of a rebuild that are all tried: it has torch's mutex from the 110th to the 169th
(torch 2.13), and the test of the mutex sees to it that it has taken it. Then every 37th is."""


@pytest.fixture
def gate() -> Iterator[NativeGate]:
    made = NativeGate()
    made.start(RULES)
    yield made
    made.stop()
    made.wait_events(0)


class Helper:
    """Resumes this process each time it is held, and keeps what the gate reported."""

    def __init__(self, gate: NativeGate) -> None:
        self.gate = gate
        self.events: list[GateEvent] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._resume_when_held)

    def __enter__(self) -> Helper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.gate.wake()
        self._thread.join()

    def count(self, *kinds: EventKind) -> int:
        return sum(event.kind in kinds for event in self.events)

    def _resume_when_held(self) -> None:
        while not self._end.is_set():
            new = self.gate.wait_events(1.0)
            self.events += new
            if any(event.kind in HELD for event in new):
                os.kill(os.getpid(), signal.SIGUSR2)


def _operators_until(helper: Helper, n: int) -> None:
    """Issue operators until this thread has been held for the n-th time, and the gate is open."""
    x = torch.zeros(1)
    deadline = time.monotonic() + LIMIT_S
    while helper.count(*HELD) < n:
        x.add_(1)
        assert time.monotonic() < deadline, f"not held; saw {helper.events[-5:]}"
    while helper.gate.status().state is not GateState.RUNNING:
        time.sleep(0.0001)


@pytest.fixture(scope="module")
def step_through(tmp_path_factory: pytest.TempPathFactory) -> ctypes._CFuncPtr:
    if platform.machine() != "x86_64":
        pytest.skip("single steps are taken with the trap flag of x86-64")
    try:
        compiler = find_compiler(os.environ)
    except NoCompiler as error:
        pytest.skip(str(error))
    target = tmp_path_factory.mktemp("step") / "single_step.so"
    source = Path(__file__).with_name("single_step.cpp")
    flags = ("-O1", "-mno-red-zone", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
    subprocess.run([*compiler, *flags, str(source), "-o", str(target)], check=True, timeout=LIMIT_S)
    function = ctypes.CDLL(str(target)).step_through
    pointers = (ctypes.c_void_p, ctypes.c_void_p)
    function.argtypes = (*pointers, ctypes.c_long, ctypes.c_int, ctypes.c_void_p)
    function.restype = ctypes.c_long
    return function


def _symbol(name: str) -> ctypes._CFuncPtr:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return getattr(library, name)  # type: ignore[no-any-return]


def _rebuild() -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """What autograd does twice per node: at::set_record_function_tls_() with the thread's own. It
    copies the list of callbacks under torch's mutex and rebuilds the thread's cache."""
    get = _symbol("_ZN2at24get_record_function_tls_Ev")
    get.restype = ctypes.c_void_p
    function = _symbol("_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE")
    return ctypes.cast(function, ctypes.c_void_p), ctypes.c_void_p(get())


def test_operator_that_is_held_arms(gate: NativeGate) -> None:
    """In a thread at work, the operator that is held has armed the gate itself: nothing waits for
    the watcher."""
    with Helper(gate) as helper:
        for n in range(1, 21):
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            _operators_until(helper, n)
    closed = [event for event in helper.events if event.kind is EventKind.GATE_CLOSED]
    main = threading.main_thread().native_id
    assert any(event.tid == main for event in closed)
    assert not gate.status().armed


def test_pause_at_every_instruction_of_a_rebuild(
    gate: NativeGate, step_through: ctypes._CFuncPtr
) -> None:
    """Wherever in it a pause's signal comes, the rebuild ends, and the next operator is held."""
    rebuild = _rebuild()
    step_through(*rebuild, NEVER, 0, None)  # the first time the loader binds what it calls
    length = step_through(*rebuild, NEVER, 0, None)
    assert length > LOCKED_WITHIN
    places = [*range(1, LOCKED_WITHIN), *range(LOCKED_WITHIN, length, 37)]
    with Helper(gate) as helper:
        for n, place in enumerate(places, 1):
            assert step_through(*rebuild, place, signal.SIGUSR1, None) == place
            _operators_until(helper, n)
    assert helper.count(*HELD) == len(places)


def test_torchs_mutex_cannot_be_taken_there(step_through: ctypes._CFuncPtr) -> None:
    """The steps above do reach what the mutex guards: a call that takes it, as arming in the
    handler would, never returns from one of them."""
    rebuild = _rebuild()
    takes_mutex = ctypes.cast(_symbol("_ZN2at18hasGlobalCallbacksEv"), ctypes.c_void_p)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        step_through(*rebuild, LOCKED_WITHIN, 0, takes_mutex)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGALRM
