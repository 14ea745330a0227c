"""install() is all or nothing, and uninstall() leaves the process as it was."""

from __future__ import annotations

import copy
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from processes import child

import hydroslurm
from hydroslurm.core import registry
from hydroslurm.errors import (
    AckTimeout,
    AlreadyInstalled,
    InstallError,
    NotInstalled,
    TorchMissing,
    UsageError,
)
from hydroslurm.gate import GateKind
from hydroslurm.gate.protocol import GateState


def _caught() -> int:
    """The set of signals that this process catches, from the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return int(line.split()[1], 16)
    raise AssertionError("no SigCgt in /proc/self/status")


def _catches(signo: int) -> bool:
    return bool(_caught() >> (signo - 1) & 1)


@pytest.fixture(autouse=True)
def _clean():
    yield
    if hydroslurm.is_installed():
        hydroslurm.uninstall()


with_both_gates = pytest.mark.parametrize("gate", ["native", "hooks"])


@with_both_gates
def test_uninstall_restores_every_handler(gate: GateKind) -> None:
    """The kernel's view of caught signals is the same before install and after uninstall."""
    before = _caught()
    hydroslurm.install(gate=gate)
    assert _catches(signal.SIGUSR1)
    assert _catches(signal.SIGTSTP)
    assert hydroslurm.uninstall() == 0
    assert _caught() == before


def test_a_handler_that_replaced_ours_is_left_alone() -> None:
    """uninstall() does not take away what the user installed after us, and says how many there
    were."""
    mine: list[int] = []
    before = signal.getsignal(signal.SIGUSR2)
    hydroslurm.install()
    try:
        signal.signal(signal.SIGUSR2, lambda signo, _: mine.append(signo))
        assert hydroslurm.uninstall() == 1
        signal.raise_signal(signal.SIGUSR2)
        assert mine == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_second_install_is_refused() -> None:
    """Two installs without an uninstall between are an error that says what to use instead."""
    hydroslurm.install()
    with pytest.raises(AlreadyInstalled, match=r"hydroslurm\.controller\(\)"):
        hydroslurm.install()
    assert hydroslurm.is_installed()


def test_nothing_installed_is_said_clearly() -> None:
    """controller() and uninstall() before install() name the way in."""
    with pytest.raises(NotInstalled, match=r"hydroslurm\.install\(\)"):
        hydroslurm.controller()
    with pytest.raises(NotInstalled, match="od_execution_wrapper"):
        hydroslurm.uninstall()


def test_a_failed_install_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last step fails, handlers and the spawn shield are taken back."""
    import multiprocessing.util

    from hydroslurm.runtime import install as installation

    before, spawn = _caught(), multiprocessing.util.spawnv_passfds

    def fail(*_: object) -> None:
        raise InstallError("no")

    with monkeypatch.context() as patched:
        patched.setattr(installation, "_announce", fail)
        with pytest.raises(InstallError):
            hydroslurm.install()
    assert _caught() == before
    assert multiprocessing.util.spawnv_passfds is spawn
    assert not hydroslurm.is_installed()
    hydroslurm.install()


def test_without_torch_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing torch is named, and nothing is half installed."""
    before = _caught()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TorchMissing, match=r"torch>=2\.4"):
        hydroslurm.install()
    assert _caught() == before


def test_install_from_another_thread_works() -> None:
    """The native gate needs no main thread to be installed."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            hydroslurm.install(gate="native")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert hydroslurm.is_installed()
    assert _catches(signal.SIGUSR1)


def test_the_process_can_be_found_and_is_gone_after() -> None:
    """install() announces the process, uninstall() withdraws it."""
    import os

    hydroslurm.install()
    base = registry.folder(os.environ)
    entry = registry.find(base, os.getpid())
    assert entry is not None
    assert entry.signals["user_pause"] == signal.SIGUSR1
    hydroslurm.uninstall()
    assert list(base.iterdir()) == []


def test_signals_can_be_chosen() -> None:
    """Another plan listens to its own signals only."""
    plan = hydroslurm.SignalPlan(user_pause=signal.SIGRTMIN + 1, user_resume=signal.SIGRTMIN + 2)
    before = signal.getsignal(signal.SIGUSR1)  # of a Run that this process has had, it may be ours
    hydroslurm.install(signals=plan)
    assert _catches(signal.SIGRTMIN + 1)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_an_engine_pauses_and_resumes_from_another_thread() -> None:
    """engine.pause(wait_s) returns when the training thread is parked, resume when it runs."""
    engine = hydroslurm.od_execution_wrapper(torch.nn.Linear(8, 8))
    data = torch.randn(4, 8)
    stop = threading.Event()
    states: list[GateState] = []

    def operate() -> None:
        try:
            engine.pause(wait_s=10)
            states.append(engine.controller.state)
            engine.resume(wait_s=10)
            states.append(engine.controller.state)
        finally:
            stop.set()

    helper = threading.Thread(target=operate)
    helper.start()
    while not stop.is_set():
        engine(data)
    helper.join()
    assert states == [GateState.PARKED, GateState.RUNNING]


def test_pause_that_does_not_park_in_time_says_what_is_going_on() -> None:
    """A rank that never reaches an operator is reported as parking, with the causes in force."""
    running = hydroslurm.install()
    errors: list[AckTimeout] = []

    def operate() -> None:
        try:
            running.pause(wait_s=0.2)
        except AckTimeout as error:
            errors.append(error)
        running.resume()

    helper = threading.Thread(target=operate)
    helper.start()
    while helper.is_alive():
        sum(range(1000))  # pure Python: busy, and no operator in sight
    assert len(errors) == 1
    assert "parking" in str(errors[0])
    assert "api" in str(errors[0])


def test_an_engine_is_the_model_for_everything_else() -> None:
    """Parameters, state_dict, attributes and moves go to the module; moves return the engine."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout())
    engine = hydroslurm.od_execution_wrapper(module)
    data = torch.randn(5, 3)
    assert isinstance(engine.module, torch.nn.Module)
    assert [p is q for p, q in zip(engine.parameters(), module.parameters(), strict=True)] == [
        True,
        True,
    ]
    assert engine.state_dict().keys() == module.state_dict().keys()
    assert engine.eval() is engine
    assert not module.training
    assert torch.equal(engine(data), module(data))
    assert torch.equal(engine.forward(data), module.forward(data))
    assert engine.train() is engine
    assert module.training
    assert engine.to(torch.float64) is engine
    assert next(module.parameters()).dtype is torch.float64
    engine.note = "kept by the module"
    assert module.note == "kept by the module"
    del engine.note
    assert not hasattr(module, "note")
    assert "Linear" in repr(engine)
    assert "state_dict" in dir(engine)
    with pytest.raises(AttributeError, match="no_such"):
        _ = engine.no_such
    assert isinstance(copy.deepcopy(engine.module), torch.nn.Sequential)


def test_wrapping_wrongly_is_explained() -> None:
    """An optimizer, an engine, or options that come too late are refused with the reason."""
    engine = hydroslurm.od_execution_wrapper(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="wrapped already"):
        hydroslurm.od_execution_wrapper(engine)
    with pytest.raises(UsageError, match=r"torch\.nn\.Module"):
        hydroslurm.od_execution_wrapper("model")
    with pytest.raises(UsageError, match="run_dir"):
        hydroslurm.od_execution_wrapper(torch.nn.Linear(2, 2), run_dir="x")
    second = hydroslurm.od_execution_wrapper(torch.nn.Linear(2, 2))
    assert second.controller is engine.controller


@with_both_gates
def test_a_forked_child_is_not_installed_and_may_install(gate: GateKind, tmp_path: Path) -> None:
    """After fork the child says so, is not paused with its parent, and can become pausable
    itself."""
    code = """
        import os, signal, sys, torch, hydroslurm
        hydroslurm.install(gate=sys.argv[1])
        torch.ones(2)
        pid = os.fork()
        if pid == 0:
            assert not hydroslurm.is_installed()
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTSTP)
            torch.nn.Linear(1, 1)(torch.ones(2, 1))
            hydroslurm.install(gate=sys.argv[1])
            hydroslurm.controller().pause()
            while not hydroslurm.controller().status().causes:
                pass
            hydroslurm.controller().resume()
            hydroslurm.uninstall()
            os._exit(7)
        print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print("parent", hydroslurm.controller().state.name)
    """
    with child(code, tmp_path, gate) as parent:
        assert parent.expect("status") == "7", str(parent)
        assert parent.expect("parent") == "RUNNING"


@with_both_gates
def test_signals_ignored_at_start_stay_ignored(gate: GateKind, tmp_path: Path) -> None:
    """Under nohup-like starts the signal is left alone and listed, unless it is asked for."""
    code = """
        import os, signal, sys, hydroslurm
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        first = hydroslurm.install(gate=sys.argv[1])
        os.kill(os.getpid(), signal.SIGUSR1)
        print("skipped", sorted(first.skipped))
        print("causes", int(first.status().causes))
        hydroslurm.uninstall()
        plan = hydroslurm.SignalPlan(even_if_ignored=True)
        second = hydroslurm.install(signals=plan, gate=sys.argv[1])
        print("then", "SIGUSR1" in second.skipped)
    """
    with child(code, tmp_path, gate) as program:
        assert "SIGUSR1" in program.expect("skipped")
        assert program.expect("causes") == "0"
        assert program.expect("then") == "False"


def _fails(*_: object, **__: object) -> None:
    """With an error that cannot even be printed."""

    class Error(SystemExit):
        def __str__(self) -> str:
            raise ZeroDivisionError

    raise Error


@pytest.mark.parametrize(
    "at",
    [
        "gate.wait_events", "_handle", "_log.append", "_status.note", "_status.write",
        "_status.wait_s", "_recorder.record", "_guard.check",
        "_children.stop_again", "output.check", "_call_stop", "vacating.on_causes",
    ],
)  # fmt: skip
def test_whatever_fails_in_the_controller_a_claimed_stop_is_heard(
    at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each thing that its thread does fails, again and again; so does a listener that was first."""
    heard = threading.Event()
    with hydroslurm.installed(run_dir=tmp_path) as controller:
        controller.claim_stops(_fails)
        controller.claim_stops(lambda _: heard.set())
        *way, name = at.split(".")
        target = controller
        for step in way:
            target = getattr(target, step)
        monkeypatch.setattr(target, name, _fails)
        signal.raise_signal(signal.SIGTERM)
        assert heard.wait(30)
        assert controller.stop_request is not None
        monkeypatch.undo()
