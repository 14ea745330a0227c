"""What is asked of NVTX, and what happens where no tool listens. What nsys records of it is tested
in tests/integration/nsys."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import ANY, MagicMock, call

import pytest
from zygote import forked

from hydroslurm.errors import UsageError
from hydroslurm.gate.library import NVTX_HEADER, installed_torch, nvtx_headers
from hydroslurm.gate.marks import NO_RANGE, Emit, NvtxMarks, Range


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (None, Emit.EVENTS),
        ("", Emit.EVENTS),
        ("off", Emit.NOTHING),
        ("steps", Emit.EVENTS | Emit.STEPS),
        ("Operators, STEPS,steps", Emit.EVENTS | Emit.STEPS | Emit.OPERATORS),
    ],
)
def test_what_the_variable_asks_for(said: str | None, meant: Emit) -> None:
    """Nothing said is the marks of pauses, stops and saves; steps and operators come on top."""
    assert Emit.from_environ({} if said is None else {"HYDROSLURM_NVTX": said}) == meant
    for word in ("off,steps", "kernels", "1"):
        with pytest.raises(UsageError, match=rf"HYDROSLURM_NVTX='{word}'.*wanted `off`"):
            Emit.from_environ({"HYDROSLURM_NVTX": word})


def test_without_the_native_gate_saves_and_steps_are_marked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package nvtx emits the ranges that are begun from Python, under the same names. NVIDIA's
    headers come with it."""
    import nvtx

    domain = MagicMock()
    domain.start_range.return_value = 5
    monkeypatch.setattr(nvtx, "get_domain", lambda name: {"hydroslurm": domain}[name])
    marks = NvtxMarks()
    with marks.range(Range.SAVING, 1):
        pass
    assert domain.mock_calls == []
    marks.start(Emit.EVENTS | Emit.OPERATORS, signals=[10, 12])
    assert marks.emitting == Emit.EVENTS
    with marks.range(Range.SAVING, 7):
        pass
    marks.stop()
    assert marks.begin(Range.STEP, 8) == NO_RANGE
    began = call.start_range(message="saving", payload=7)
    clock, *others = domain.mock_calls
    assert clock == call.mark(message="clock", payload=ANY)
    assert others == [began, call.end_range(5)]
    torch = installed_torch()  # the native gate emits marks wherever it is built
    assert torch.nvtx is not None
    assert (torch.nvtx / NVTX_HEADER).is_file()
    assert nvtx_headers({"CUDA_HOME": str(tmp_path)}) == torch.nvtx


NO_TOOL = """
import torch
import hydroslurm
from hydroslurm.gate.marks import Emit, NO_RANGE, Range
controller = hydroslurm.install(gate="native", alone=True)
assert controller.marks.emitting is Emit.NOTHING, controller.marks.emitting
assert controller.marks.begin(Range.SAVING, 7) == NO_RANGE
controller.pause()
controller.resume()
torch.ones(3).sum()
hydroslurm.uninstall()
print("left")
"""


def test_without_a_tool_nothing_is_emitted(tmp_path: Path) -> None:
    """Steps and operators were asked for and nobody listens; pauses work as ever."""
    with forked(NO_TOOL, tmp_path, environ={"HYDROSLURM_NVTX": "operators,steps"}) as program:
        program.expect("left")
