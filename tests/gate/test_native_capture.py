"""CUDA graph capture on a machine without CUDA: a fake driver and a fake device guard of torch's.

What is real: the gate's own probe, torch's registry of device guards, and autograd's device
threads, which torch starts as soon as some device is registered. What only a GPU can show is that
the real driver answers as its documentation says.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from processes import child

from hydroslurm.gate.build import find_compiler
from hydroslurm.gate.library import installed_torch
from hydroslurm.gate.native_gate import NativeGate

DRIVER = r"""
#include <atomic>
#include <cstdint>
// what cuda.h says of these two: 0 is success, 906 is CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
static std::atomic<int> has_context{1}, error{0}, status{0}, asked{0};
extern "C" int cuCtxGetCurrent(void **context) {
    *context = has_context ? reinterpret_cast<void *>(1) : nullptr;
    return 0;
}
extern "C" int cuStreamIsCapturing(void *stream, int *out) {
    ++asked;
    *out = stream == reinterpret_cast<void *>(0x5000 + 7) ? status.load() : 0;
    return error;
}
extern "C" void fake_set(int context, int new_error, int new_status) {
    has_context = context, error = new_error, status = new_status;
}
extern "C" int fake_asked() { return asked; }
"""

GUARD = r"""
#include <atomic>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static std::atomic<int> streams_asked{0};
struct Guard final : impl::DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    Device exchangeDevice(Device) const override { return getDevice(); }
    Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
    void setDevice(Device) const override {}
    void uncheckedSetDevice(Device) const noexcept override {}
    Stream getStream(Device d) const noexcept override {
        ++streams_asked;
        return Stream(Stream::UNSAFE, d, 7);
    }
    Stream exchangeStream(Stream s) const noexcept override { return s; }
    DeviceIndex deviceCount() const noexcept override { return 1; }
    void *getStreamNativeHandle(const Stream s) const override {
        return reinterpret_cast<void *>(0x5000 + s.id());
    }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
extern "C" int fake_streams_asked() { return streams_asked; }
"""

PROGRAM = """
    import ctypes, os, sys, threading, time
    import torch
    torch.set_num_threads(1)
    driver, guard = (ctypes.CDLL(path) for path in sys.argv[1:])
    from hydroslurm.gate.native_gate import NativeGate
    from hydroslurm.gate.protocol import Action, Cause, GateState
    gate = NativeGate()
    gate.start(())
    done = False

    def wait_for(condition):
        while not condition(gate.status()):
            time.sleep(0.001)

    def script():
        global done
        for name, error, status in (("active", 0, 1), ("invalidated", 0, 2), ("implicit", 906, 0)):
            driver.fake_set(1, error, status)
            gate.request(Action.PAUSE, Cause.API)
            wait_for(lambda s: s.capturing == 1)
            through = count
            while count < through + 20:
                time.sleep(0.001)
            now = gate.status()
            print(name, now.held, now.state.name)
            driver.fake_set(1, 0, 0)
            wait_for(lambda s: s.state is GateState.PARKED and s.held == 1)
            held_at = count
            gate.request(Action.RESUME, Cause.API)
            wait_for(lambda s: s.state is GateState.RUNNING)
            # a thread that has not woken yet stays held at the next pause, and is not asked
            while count == held_at:
                time.sleep(0.001)
        driver.fake_set(0, 0, 1)
        asked = guard.fake_streams_asked()
        gate.request(Action.PAUSE, Cause.API)
        wait_for(lambda s: s.state is GateState.PARKED and s.held == 1)
        print("no-context", guard.fake_streams_asked() - asked, gate.status().quiet)
        gate.request(Action.RESUME, Cause.API)
        done = True

    count = 0
    torch.ones(2, requires_grad=True).sum().backward()
    def autograd_threads():
        names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
        return sum(name.startswith("pt_autograd_") for name in names)

    while not autograd_threads():  # each names itself, some time after it was started
        time.sleep(0.001)
    print("autograd", autograd_threads())
    thread = threading.Thread(target=script)
    thread.start()
    while not done:
        torch.ones(4).add_(1)
        count += 1
    thread.join()
    gate.stop()
"""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Paths of the fake driver and of the library that registers the fake guard."""
    NativeGate()  # built here, not in the child
    folder, torch = tmp_path_factory.mktemp("fakes"), installed_torch()
    compiler = [*find_compiler(os.environ), "-std=c++17", "-shared", "-fPIC", "-w"]
    with_torch = ["-isystem", str(torch.root / "include"), f"-L{torch.root / 'lib'}", "-lc10"]
    for name, source in (("libcuda.so.1", DRIVER), ("libguard.so", GUARD)):
        code = folder / f"{name}.cpp"
        code.write_text(source)
        command = [*compiler, str(code), "-o", str(folder / name), f"-Wl,-soname,{name}"]
        subprocess.run([*command, *with_torch], check=True, timeout=120)
    return [str(folder / "libcuda.so.1"), str(folder / "libguard.so")]


def test_capture_is_let_through(tmp_path: Path, fakes: list[str]) -> None:
    """A thread whose stream captures, or whose capture was broken, passes and is counted, and is
    held right after; a thread without a context is held, and torch is not asked for a stream, which
    would initialise CUDA. Autograd's idle device threads count as quiet."""
    with child(PROGRAM, tmp_path, *fakes) as rank:
        assert int(rank.expect("autograd")) >= 1
        assert rank.expect("active") == "0 PARKING"
        assert rank.expect("invalidated") == "0 PARKING"
        assert rank.expect("implicit") == "0 PARKING"
        streams_asked, quiet = rank.expect("no-context").split()
        assert streams_asked == "0"
        assert int(quiet) >= 1
        assert rank.wait() == 0
