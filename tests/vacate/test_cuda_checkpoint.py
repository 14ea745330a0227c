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
from vacate.model import FAULTS, STEPS, state_of

from hydroslurm.core.garbage import without_gc
from hydroslurm.vacate.communicators import Communicators
from hydroslurm.vacate.cuda_checkpoint import CudaCheckpoint
from hydroslurm.vacate.helper import CudaApi, Refused, serve
from hydroslurm.vacate.policy import DeviceState, why_not_here
from hydroslurm.vacate.round import Limits, VacateRound

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


QUICK = [("lock", "refuse"), ("lock", "hang"), ("checkpoint", "fail"), ("checkpoint", "late")]
QUICK += [("checkpoint", "die"), ("restore", "hang"), ("restore", "fail"), ("unlock", "late")]


@pytest.mark.parametrize(
    ("call", "how"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.long)
        for one in itertools.product(STEPS, FAULTS)
    ],
)
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


def test_a_helper_that_is_not_there(backend: Make) -> None:
    """One that died between two pauses is replaced by the next question, and is no reason to
    refuse. A program that is missing, and one that ends at once, are refusals that say so."""
    one = backend(("state", 2, "die"))
    assert [one.refusal(), one.refusal()] == ["", ""]
    assert VacateRound(one, topic="t", limits=SHORT).vacate().done
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


CALLS = {one: f"cuCheckpointProcess{one.title()}" for one in STEPS}
CALLS["state"] = "cuCheckpointProcessGetState"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``cuda.bindings.driver`` as the helper uses it: every call returns a tuple. ``calls`` is what
    was called, and ``result`` what is returned."""
    success = SimpleNamespace(name="CUDA_SUCCESS")
    made = SimpleNamespace(calls=[], result=success)

    def call(name: str) -> Callable[..., tuple[object, ...]]:
        def record(*arguments: object) -> tuple[object, ...]:
            made.calls.append((name, *arguments))
            state = SimpleNamespace(name="CU_PROCESS_STATE_LOCKED")
            return (made.result, state) if name.endswith("GetState") else (made.result,)

        return record

    for name in CALLS.values():
        setattr(made, name, call(name))
    made.cuInit = lambda _: (success,)
    made.CUresult = SimpleNamespace(CUDA_SUCCESS=success)
    made.CUcheckpointLockArgs = lambda: SimpleNamespace(timeoutMs=0)
    package = SimpleNamespace(driver=made)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=package))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    return made


@pytest.mark.parametrize("result", ["CUDA_SUCCESS", "CUDA_ERROR_NOT_SUPPORTED"])
def test_the_api_is_called_with_the_pid(result: str, driver: SimpleNamespace) -> None:
    """Each word becomes the call of its name, for the process that was named; an error becomes a
    refusal with the driver's own word."""
    if result != "CUDA_SUCCESS":
        driver.result = SimpleNamespace(name=result)
    asked: list[list[object]] = [[one, 7] for one in CALLS]
    asked[0].append(250)
    source = io.StringIO("".join(json.dumps(one) + "\n" for one in asked))
    out = io.StringIO()
    serve(CudaApi, source=source, out=out)
    ready, *answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert ready == ["ready", ""]
    assert [call[:2] for call in driver.calls] == [(name, 7) for name in CALLS.values()]
    assert driver.calls[0][2].timeoutMs == 250
    if result == "CUDA_SUCCESS":
        assert answers == [["ok", ""]] * 4 + [["ok", "locked"]]
    else:
        assert {word for word, _ in answers} == {"refused"}
        assert all(result in text for _, text in answers)


def test_what_is_too_old(driver: SimpleNamespace, tmp_path: Path) -> None:
    """A call that cuda-bindings lacks is a refusal that names the release that has it. The kernel
    module's own version tells, without CUDA; a new one is not refused."""
    del driver.cuCheckpointProcessCheckpoint
    with pytest.raises(Refused, match=r"12\.8"):
        CudaApi().checkpoint(1)
    version = tmp_path / "version"
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Mon Jan 1\nGCC version: 12.2.0\n"
    assert "no NVIDIA driver" in why_not_here(driver=version)
    version.write_text(line.format("550.54.14"))
    assert "550.54.14" in why_not_here(driver=version)
    version.write_text(line.format("580.65.06"))
    assert why_not_here(driver=version) == ""


class _Group:
    """A ProcessGroupNCCL of several ranks, which says no to some calls."""

    def __init__(self, said: list[str], fails: str = "") -> None:
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


@pytest.mark.parametrize(
    ("fault", "fails", "away", "back", "said"),
    [
        ((), "", True, "", ["suspend", "resume"]),
        # the lock fails: they are resumed at once
        (("lock", 0, "refuse"), "", False, "", ["suspend", "resume"]),
        # the unlock is answered late
        (("unlock", 0, "late"), "", True, "", ["suspend", "resume"]),
        # the rank trains on, and is told; the others come back all the same
        (
            (),
            "resume",
            True,
            "next collective fails: NCCL says no to resume",
            ["suspend", "resume"],
        ),
        # a plain pause
        ((), "suspend", False, "", ["suspend"]),
    ],
)
def test_communicators_are_suspended_and_resumed(
    backend: Make,
    groups: list[object],
    fault: tuple[str, int, str],
    fails: str,
    away: bool,
    back: str,
    said: list[str],
) -> None:
    """Each of NCCL's is suspended before the lock and resumed after the unlock."""
    first, second = list[str](), list[str]()
    groups += [_Group(first), _Group(second, fails)]
    one = VacateRound(backend(*([fault] if fault else [])), topic="t", limits=SHORT)
    with without_gc():  # a save that ends meanwhile
        gone = one.vacate()
    assert (gone.done, gone.lost) == (away, False)
    assert ("NCCL says no to suspend" in gone.reason) == (fails == "suspend")
    if away:
        assert first == second == ["suspend"]
        assert not gc.isenabled()  # what it would free, it would free by calling CUDA
        returned = one.restore(pytest.fail)
        assert returned.done
        assert back in returned.reason
    assert (first, second) == (["suspend", "resume"], said)
    assert gc.isenabled()


def test_communicators_in_the_way(groups: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be suspended is a refusal that names the release that can; multicast memory,
    with which a checkpoint never ends, one that says how to do without."""
    module = "hydroslurm.vacate.communicators"
    groups.append(_Group([]))
    assert Communicators(environ={}).refusal() == ""
    monkeypatch.setattr(f"{module}._capability", lambda: (9, 0))
    assert "NCCL_NVLS_ENABLE=0" in Communicators(environ={}).refusal()
    assert Communicators(environ={"NCCL_NVLS_ENABLE": "0"}).refusal() == ""
    monkeypatch.setattr(f"{module}._nccl_version", lambda: (2, 28, 9))
    assert "NCCL 2.28.9 cannot suspend them; wanted 2.29.7" in Communicators().refusal()
    groups.append(SimpleNamespace())
    assert "this torch cannot suspend them" in Communicators().refusal()
