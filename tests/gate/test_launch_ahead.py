"""A bound on launches asks torch for streams and events of the device in use; how far ahead they
may be is tested with a device that takes its time (tests/native/test_launch_ahead.cpp)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hydroslurm.errors import UsageError
from hydroslurm.gate.build import compile_library
from hydroslurm.gate.library import installed_torch
from hydroslurm.runtime.device import launch_ahead_from

SCRIPT = """
import ctypes, sys, threading, torch
device = ctypes.CDLL(sys.argv[1])
from hydroslurm.errors import InstallError
from hydroslurm.gate.native_gate import NativeGate
gate = NativeGate()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
def train(steps):
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
train(1)
assert device.device_recorded() == device.device_asked() == 0, "asked before there was a bound"
try:
    gate.bound_launches(0.01, device_type=1)
except InstallError as error:
    print(error)
gate.bound_launches(0.001, device_type=20)
train(50)
seen = gate.launches()
assert seen.bound_ns == 1_000_000
assert seen.events == device.device_recorded() > 10, seen.events
assert seen.waits > 0 and seen.waited_ns > 0
thread = threading.Thread(target=train, args=(20,))
thread.start(); thread.join()
assert device.device_recorded() > seen.events
device.device_break(1)  # training goes on with a device that takes no events
train(20)
device.device_break(0)
gate.bound_launches(0)
before = device.device_recorded(), device.device_asked()
train(20)
assert before == (device.device_recorded(), device.device_asked())
print("good")
"""


def test_torchs_events_are_recorded_and_asked_for(
    tmp_path: Path, native_compiler: list[str]
) -> None:
    """On the stream of the thread, in forward and backward; never before there is a bound, nor
    after. A device that torch does not have is refused; one that fails ends no training."""
    source = Path(__file__).with_name("launch_device.cpp")
    target = tmp_path / "device.so"
    compile_library(native_compiler, target, torch=installed_torch(), sources=[source])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(target)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["launches are not bounded: No such device", "good"]


def test_the_variable_is_milliseconds() -> None:
    """Off where it is not set, or 0; a bad one is refused with what was seen and what is wanted."""
    assert launch_ahead_from({}) is None
    for text, bound_s in (("", None), ("0", None), ("20", 0.02), (" 1e2 ", 0.1)):
        assert launch_ahead_from({"HYDROSLURM_LAUNCH_AHEAD_MS": text}) == bound_s
    for text in ("-1", "20ms", "nan", "0.01", "1e9"):
        with pytest.raises(UsageError, match=f"{text}.*0.1 to 10000.*0 for no bound"):
            launch_ahead_from({"HYDROSLURM_LAUNCH_AHEAD_MS": text})
