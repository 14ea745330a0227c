"""What is asked of NVTX, and what happens where no tool listens. What nsys records of it is tested
in tests/integration/nsys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hydroslurm.errors import UsageError
from hydroslurm.gate.compiler import NVTX_HEADER, installed_torch, nvtx_headers
from hydroslurm.gate.marks import NO_RANGE, Emit, Marks, NvtxMarks, Range


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (None, Emit.EVENTS),
        ("", Emit.EVENTS),
        ("on", Emit.EVENTS),
        ("off", Emit.NOTHING),
        ("steps", Emit.EVENTS | Emit.STEPS),
        ("Operators, STEPS,steps", Emit.EVENTS | Emit.STEPS | Emit.OPERATORS),
    ],
)
def test_what_the_variable_asks_for(said: str | None, meant: Emit) -> None:
    """Nothing said is the marks of pauses, stops and saves; steps and operators come on top."""
    assert Emit.from_environ({} if said is None else {"HYDROSLURM_NVTX": said}) == meant


@pytest.mark.parametrize("said", ["off,steps", "kernels", "1"])
def test_a_word_that_means_nothing(said: str) -> None:
    """The error names what was seen and what is wanted."""
    with pytest.raises(UsageError, match=rf"HYDROSLURM_NVTX='{said}'.*wanted `off`"):
        Emit.from_environ({"HYDROSLURM_NVTX": said})


def test_without_a_library_nothing_is_emitted() -> None:
    """Every call is there and does nothing."""
    marks = Marks()
    marks.start(Emit.EVENTS, signals=[10])
    assert marks.emitting == Emit.NOTHING
    assert marks.begin(Range.SAVING, 1) == NO_RANGE
    with marks.range(Range.REQUEUEING, 1):
        marks.end_once({}, 3)
    marks.stop()


class RecordingDomain:
    """Stands for a domain of the package ``nvtx`` that a tool listens to."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self.open: dict[int, str] = {}

    def mark(self, *, message: str, payload: int) -> None:
        self.seen.append(("mark", message, 0 if message == "clock" else payload))

    def start_range(self, *, message: str, payload: int) -> int:
        number = len(self.seen)
        self.open[number] = message
        self.seen.append(("begin", message, payload))
        return number

    def end_range(self, number: int) -> None:
        self.seen.append(("end", self.open.pop(number), 0))


def test_without_the_native_gate_saves_and_steps_are_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package nvtx emits the ranges that are begun from Python, under the same names."""
    import nvtx

    domain = RecordingDomain()
    monkeypatch.setattr(nvtx, "get_domain", lambda name: {"hydroslurm": domain}[name])
    marks = NvtxMarks()
    with marks.range(Range.SAVING, 1):
        pass
    assert domain.seen == []
    marks.start(Emit.EVENTS | Emit.OPERATORS, signals=[10, 12])
    assert marks.emitting == Emit.EVENTS
    with marks.range(Range.SAVING, 7):
        pass
    marks.stop()
    assert marks.begin(Range.STEP, 8) == NO_RANGE
    assert domain.seen == [("mark", "clock", 0), ("begin", "saving", 7), ("end", "saving", 0)]


def test_the_headers_come_with_the_package(tmp_path: Path) -> None:
    """hydroslurm depends on NVIDIA's headers, so that its gate can emit marks wherever it is
    built."""
    torch = installed_torch()
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


def test_without_a_tool_nothing_is_emitted() -> None:
    """Steps and operators were asked for and nobody listens; pauses work as ever."""
    environ = {**os.environ, "HYDROSLURM_NVTX": "operators,steps"}
    environ.pop("NVTX_INJECTION64_PATH", None)
    done = subprocess.run(
        [sys.executable, "-c", NO_TOOL], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "left\n", done.stderr
