"""The checkpoint API's helper and its client, against a model of the API that errs and hangs."""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hydroslurm.vacate.communicators import Communicators
from hydroslurm.vacate.cuda_checkpoint import (
    CONTEXT_BYTES,
    CudaCheckpoint,
    DeviceState,
    why_not_here,
)
from hydroslurm.vacate.helper import CudaApi, Refused, serve
from hydroslurm.vacate.round import Limits, VacateRound

sys.path.insert(0, str(Path(__file__).parent))
from model import FAULTS, STEPS, state_of

SHORT = Limits(
    lock_s=0.3, state_s=5.0, move_s=0.3, floor_bytes_per_s=1e12, agree_s=5.0, retry_s=0.01
)
BYTES = 1000
Make = Callable[..., CudaCheckpoint]


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Make]:
    """Makes the backend of this process, with a model that errs as told. torch's numbers cannot be
    had while the process is locked: to ask is to call CUDA, which waits for the unlock."""
    made = []

    def used_bytes() -> int:
        assert _here(tmp_path) == "running"
        return BYTES

    def make(*faults: tuple[str, int, str]) -> CudaCheckpoint:
        (tmp_path / "faults.json").write_text(json.dumps(faults))
        one = CudaCheckpoint(
            used_bytes=used_bytes,
            devices=1,
            communicators=Communicators(environ={}),
            command=[sys.executable, str(Path(__file__).parent / "model.py"), str(tmp_path)],
        )
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def _here(folder: Path) -> str:
    return state_of(folder, os.getpid())


def test_there_and_back(backend: Make, tmp_path: Path) -> None:
    """A vacate ends CHECKPOINTED with the bytes told, and a return RUNNING."""
    one = VacateRound(backend(), topic="t", limits=SHORT)
    away = one.vacate()
    assert (away.done, away.moved_bytes) == (True, BYTES + CONTEXT_BYTES)
    assert _here(tmp_path) == "checkpointed"
    assert not gc.isenabled()  # what it would free, it would free by calling CUDA
    back = one.restore(pytest.fail)
    assert gc.isenabled()
    assert back.done
    assert not back.reason
    assert _here(tmp_path) == "running"


@pytest.mark.parametrize(("call", "how"), [*itertools.product(STEPS, FAULTS)])
def test_whatever_goes_wrong_is_told_as_it_is(
    call: str, how: str, backend: Make, tmp_path: Path
) -> None:
    """Each call errs in each way, once: what is said of the device is where it is. Only a FAILED
    one is lost; everything else ends RUNNING, also where a helper had to be left behind."""
    waits: list[str] = []
    one = VacateRound(backend((call, 1, how)), topic="t", limits=SHORT)
    away = one.vacate()
    if away.done:
        assert call not in ("lock", "checkpoint")
        assert _here(tmp_path) == "checkpointed"
        back = one.restore(waits.append)
        assert back.lost == (how == "fail")
        assert back.done != back.lost
        lost = back.lost
    else:
        assert call in ("lock", "checkpoint")
        assert away.reason
        lost = away.lost
    assert lost == (how == "fail"), away.reason
    assert _here(tmp_path) == ("failed" if how == "fail" else "running")


def test_a_driver_that_answers_nothing_any_more(backend: Make, tmp_path: Path) -> None:
    """Every checkpoint hangs and every question about the state, too: the device is told to be
    lost, with its state unknown, after bounded time."""
    limits = Limits(lock_s=0.3, state_s=0.5, move_s=0.3, floor_bytes_per_s=1e12)
    away = VacateRound(
        backend(("checkpoint", 0, "hang"), ("state", 0, "hang")), topic="t", limits=limits
    ).vacate()
    assert away.lost
    assert "unknown" in away.reason


def test_a_helper_that_died_between_two_pauses(backend: Make, tmp_path: Path) -> None:
    """It is replaced by the next question, and is no reason to refuse."""
    one = backend(("state", 2, "die"))
    assert one.refusal() == ""
    assert one.refusal() == ""
    assert VacateRound(one, topic="t", limits=SHORT).vacate().done


def test_no_helper_at_all() -> None:
    """A program that is missing, and one that ends at once, are refusals that say so."""
    for command, said in ((["/nonexistent/helper"], "cannot be started"), (["true"], "died")):
        one = CudaCheckpoint(
            used_bytes=lambda: 1, devices=1, communicators=Communicators(), command=command
        )
        assert said in one.refusal()
        assert one.state(1.0) is DeviceState.UNKNOWN
        one.close()


def test_the_real_helper_on_a_node_without_a_driver() -> None:
    """It starts, cannot reach CUDA, and says so in one line; the process that asks imports nothing
    of CUDA."""
    if not why_not_here():
        pytest.skip("this node has a driver; profiling/gpu.sh uses it")
    code = (
        "import sys, hydroslurm.vacate.cuda_checkpoint as c, hydroslurm.vacate.communicators as n\n"
        "one = c.CudaCheckpoint(used_bytes=int, devices=1, communicators=n.Communicators())\n"
        "print(one.refusal()); print([m for m in sys.modules if m.split('.')[0] == 'cuda'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    said, modules = done.stdout.splitlines()
    assert "cannot be called here" in said
    assert modules == "[]"


class _Driver(SimpleNamespace):
    """``cuda.bindings.driver`` as the helper uses it: every call returns a tuple."""


def _driver(calls: list[object], result: str = "CUDA_SUCCESS") -> _Driver:
    success = SimpleNamespace(name="CUDA_SUCCESS")
    returned = success if result == "CUDA_SUCCESS" else SimpleNamespace(name=result)

    def call(name: str) -> Callable[..., tuple[object, ...]]:
        def record(*arguments: object) -> tuple[object, ...]:
            calls.append((name, *arguments))
            if name == "cuInit":
                return (success,)
            state = SimpleNamespace(name="CU_PROCESS_STATE_LOCKED")
            return (returned, state) if name.endswith("GetState") else (returned,)

        return record

    names = ["cuInit", *(f"cuCheckpointProcess{one}" for one in _CALLS)]
    made = _Driver(**{name: call(name) for name in names})
    made.CUresult = SimpleNamespace(CUDA_SUCCESS=success)
    made.CUcheckpointLockArgs = lambda: SimpleNamespace(timeoutMs=0)
    return made


_CALLS = ("Lock", "Checkpoint", "Restore", "Unlock", "GetState")


@pytest.mark.parametrize("result", ["CUDA_SUCCESS", "CUDA_ERROR_NOT_SUPPORTED"])
def test_the_api_is_called_with_the_pid(result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word becomes the call of its name, for the process that was named; an error becomes a
    refusal with the driver's own word."""
    calls: list[object] = []
    package = SimpleNamespace(driver=_driver(calls, result))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=package))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    asked = [["lock", 7, 250], ["checkpoint", 7], ["restore", 7], ["unlock", 7], ["state", 7]]
    source = io.StringIO("".join(json.dumps(one) + "\n" for one in asked))
    out = io.StringIO()
    serve(CudaApi, source=source, out=out)
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert answers[0] == ["ready", ""]
    assert calls[0] == ("cuInit", 0)
    assert [call[:2] for call in calls[1:]] == [(f"cuCheckpointProcess{one}", 7) for one in _CALLS]
    assert calls[1][2].timeoutMs == 250
    if result == "CUDA_SUCCESS":
        assert answers[1:] == [["ok", ""]] * 4 + [["ok", "locked"]]
    else:
        assert {word for word, _ in answers[1:]} == {"refused"}
        assert all(result in text for _, text in answers[1:])


def test_bindings_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that cuda-bindings lacks is a refusal that names the release that has it."""
    calls: list[object] = []
    driver = _driver(calls)
    del driver.cuCheckpointProcessCheckpoint
    package = SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=package))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    with pytest.raises(Refused, match=r"12\.8"):
        CudaApi().checkpoint(1)


def test_drivers_that_are_too_old(tmp_path: Path) -> None:
    """The kernel module's own version tells, without CUDA; a new one is not refused."""
    version = tmp_path / "version"
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Mon Jan 1\nGCC version: 12.2.0\n"
    assert "no NVIDIA driver" in why_not_here(driver=version)
    version.write_text(line.format("550.54.14"))
    assert "550.54.14" in why_not_here(driver=version)
    version.write_text(line.format("580.65.06"))
    assert why_not_here(driver=version) == ""


class _Group:
    """A ProcessGroupNCCL of several ranks."""

    def __init__(self, said: list[str], *, fails: str = "") -> None:
        self._said, self._fails = said, fails

    def size(self) -> int:
        return 4

    def suspend(self) -> None:
        self._do("suspend")

    def resume(self) -> None:
        self._do("resume")

    def _do(self, verb: str) -> None:
        self._said.append(verb)
        if verb == self._fails:
            raise RuntimeError(f"NCCL says no to {verb}")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What this process is made to have of NCCL's, on a device without NVLS."""
    found: list[object] = []
    module = "hydroslurm.vacate.communicators"
    monkeypatch.setattr(f"{module}._backends", lambda: found)
    monkeypatch.setattr(f"{module}._nccl_version", lambda: (2, 29, 7))
    monkeypatch.setattr(f"{module}._capability", lambda: (8, 0))
    return found


def test_communicators_are_suspended_and_resumed(backend: Make, groups: list[object]) -> None:
    """Each of NCCL's is suspended before the lock and resumed after the unlock; where the lock
    fails they are resumed at once, and where the unlock is answered late, too."""
    said: list[str] = []
    groups.append(_Group(said))
    assert backend().refusal() == ""
    one = VacateRound(backend(), topic="t", limits=SHORT)
    assert one.vacate().done
    assert said == ["suspend"]
    assert one.restore(pytest.fail).done
    assert said == ["suspend", "resume"]
    assert not VacateRound(backend(("lock", 0, "refuse")), topic="t", limits=SHORT).vacate().done
    assert said == ["suspend", "resume"] * 2
    late = VacateRound(backend(("unlock", 0, "late")), topic="t", limits=SHORT)
    assert late.vacate().done
    assert late.restore(pytest.fail).done
    assert said == ["suspend", "resume"] * 3
    assert gc.isenabled()


def test_a_communicator_that_does_not_come_back(backend: Make, groups: list[object]) -> None:
    """The memory is back and the rank trains on, so that it is told: its next collective fails.
    The others come back all the same. One that cannot be suspended makes it a plain pause."""
    said: list[str] = []
    groups += [_Group(said), _Group(said, fails="resume")]
    one = VacateRound(backend(), topic="t", limits=SHORT)
    assert one.vacate().done
    back = one.restore(pytest.fail)
    assert back.done
    assert "next collective fails: NCCL says no to resume" in back.reason
    assert said == ["suspend"] * 2 + ["resume"] * 2
    groups[1] = _Group(said, fails="suspend")
    away = VacateRound(backend(), topic="t", limits=SHORT).vacate()
    assert (away.done, away.lost) == (False, False)
    assert "NCCL says no to suspend" in away.reason
    assert said[-3:] == ["suspend", "suspend", "resume"]


def test_communicators_in_the_way(groups: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be suspended is a refusal that names the release that can; multicast memory,
    with which a checkpoint never ends, one that says how to do without."""
    groups.append(_Group([]))
    assert Communicators(environ={}).refusal() == ""
    monkeypatch.setattr("hydroslurm.vacate.communicators._capability", lambda: (9, 0))
    assert "NCCL_NVLS_ENABLE=0" in Communicators(environ={}).refusal()
    assert Communicators(environ={"NCCL_NVLS_ENABLE": "0"}).refusal() == ""
    monkeypatch.setattr("hydroslurm.vacate.communicators._nccl_version", lambda: (2, 28, 9))
    assert "NCCL 2.28.9 cannot suspend them; wanted 2.29.7" in Communicators().refusal()
    groups.append(SimpleNamespace())
    assert "this torch cannot suspend them" in Communicators().refusal()
