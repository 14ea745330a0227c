"""install() is all or nothing, and uninstall() leaves the process as it was."""

from __future__ import annotations

import copy
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from zygote import forked

import hydroslurm
from hydroslurm.core import registry
from hydroslurm.errors import (
    AckTimeout,
    AlreadyInstalled,
    InstallError,
    NotInstalled,
    TorchMissing,
    UsageError,
)  # fmt: skip
from hydroslurm.gate import GateKind
from hydroslurm.gate.protocol import GateState
from hydroslurm.runtime import install as installation


def _caught() -> int:
    """The set of signals that this process catches, from the kernel."""
    return int(Path("/proc/self/status").read_text().partition("SigCgt:")[2].split()[0], 16)


def _catches(signo: int) -> bool:
    return bool(_caught() >> (signo - 1) & 1)


@pytest.fixture(autouse=True)
def _clean():
    yield
    if hydroslurm.is_installed():
        hydroslurm.uninstall()


with_both_gates = pytest.mark.parametrize("gate", ["native", "hooks"])


@with_both_gates
def test_uninstall_leaves_the_process_as_it_was(gate: GateKind) -> None:
    """The kernel's view of caught signals is as it was, and nobody finds the process any more. The
    plan may name other signals, which alone are listened to."""
    before, base = _caught(), registry.folder(os.environ)
    plan = hydroslurm.SignalPlan(user_pause=signal.SIGRTMIN + 1, user_resume=signal.SIGRTMIN + 2)
    shown = signal.getsignal(signal.SIGUSR1)  # of a Run that this process has had, it may be ours
    for signals, pausing in ((None, signal.SIGUSR1), (plan, signal.SIGRTMIN + 1)):
        hydroslurm.install(gate=gate, signals=signals)
        assert _catches(pausing)
        assert _catches(signal.SIGTSTP)
        entry = registry.find(base, os.getpid())
        assert entry is not None
        assert entry.signals["user_pause"] == pausing
        assert (signals is None) or signal.getsignal(signal.SIGUSR1) is shown
        assert hydroslurm.uninstall() == 0
        assert _caught() == before
        assert list(base.iterdir()) == []


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


def test_what_comes_twice_or_too_early_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installs without an uninstall between, anything before install(), a missing torch, and
    what is no model: an error that says what to use instead."""
    before = _caught()
    with pytest.raises(NotInstalled, match=r"hydroslurm\.install\(\)"):
        hydroslurm.controller()
    with pytest.raises(NotInstalled, match="od_execution_wrapper"):
        hydroslurm.uninstall()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        with pytest.raises(TorchMissing, match=r"torch>=2\.4"):
            hydroslurm.install()
    assert _caught() == before
    engine = hydroslurm.od_execution_wrapper(torch.nn.Linear(2, 2))
    with pytest.raises(AlreadyInstalled, match=r"hydroslurm\.controller\(\)"):
        hydroslurm.install()
    with pytest.raises(UsageError, match="wrapped already"):
        hydroslurm.od_execution_wrapper(engine)
    with pytest.raises(UsageError, match=r"torch\.nn\.Module"):
        hydroslurm.od_execution_wrapper("model")
    with pytest.raises(UsageError, match="run_dir"):
        hydroslurm.od_execution_wrapper(torch.nn.Linear(2, 2), run_dir="x")
    assert hydroslurm.od_execution_wrapper(torch.nn.Linear(2, 2)).controller is engine.controller


def test_a_failed_install_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last step fails, handlers and the spawn shield are taken back."""
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


def _operate(work: Callable[[], object], step: Callable[[], object]) -> None:
    """Work in another thread, for as long as it takes this one steps."""
    with ThreadPoolExecutor(1) as pool:
        operating = pool.submit(work)
        while not operating.done():
            step()
        operating.result()


def test_an_engine_pauses_and_resumes_from_another_thread() -> None:
    """engine.pause(wait_s) returns when the training thread is parked, resume when it runs. One
    that never reaches an operator is reported as parking, with the causes in force. The native gate
    needs no main thread to be installed."""
    with ThreadPoolExecutor(1) as pool:
        controller = pool.submit(hydroslurm.install, gate="native").result()
    assert _catches(signal.SIGUSR1)
    engine, data = hydroslurm.od_execution_wrapper(torch.nn.Linear(8, 8)), torch.randn(4, 8)

    def operate() -> None:
        engine.pause(wait_s=10)
        assert controller.state is GateState.PARKED
        engine.resume(wait_s=10)
        assert controller.state is GateState.RUNNING

    def in_vain() -> None:
        with pytest.raises(AckTimeout, match=r"parking.*api"):
            controller.pause(wait_s=0.2)
        controller.resume()

    _operate(operate, lambda: engine(data))
    _operate(in_vain, lambda: sum(range(1000)))  # pure Python: busy, and no operator in sight


def test_an_engine_is_the_model_for_everything_else() -> None:
    """Parameters, state_dict, attributes and moves go to the module; moves return the engine."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout())
    engine, data = hydroslurm.od_execution_wrapper(module), torch.randn(5, 3)
    assert all(p is q for p, q in zip(engine.parameters(), module.parameters(), strict=True))
    assert engine.state_dict().keys() == module.state_dict().keys()
    assert engine.eval() is engine
    assert not module.training
    assert torch.equal(engine(data), module(data))
    assert torch.equal(engine.forward(data), module.forward(data))
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
            if sys.argv[1] == "native":
                assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
            os._exit(7)
        print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print("parent", hydroslurm.controller().state.name)
    """
    with forked(code, tmp_path, gate) as parent:
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
    with forked(code, tmp_path, gate) as program:
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
        "gate.wait_events", "_handle", "journal.log.append", "journal.status.note",
        "journal.status.write", "journal.status.wait_s", "_recorder.record", "_guard.check",
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
