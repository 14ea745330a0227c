"""What a bound on launches (HYDROSLURM_LAUNCH_AHEAD_MS) costs, and how soon the device is idle.

On a GPU: a bf16 transformer's steps per second with each bound against none, in turns, and how long
the device is busy after the last launch. Without one the same of a simulated device, whose streams
are threads that take their time (tests/native/fake_device.h), with kernels of 30 us to 1.5 ms; the
line says which. Each figure's key ends with its bound in milliseconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import PROFILING, TESTS, finish, options

from hydroslurm.gate.compiler import SOURCES, find_compiler, source_files

BOUNDS_MS = (1, 5, 20, 50)
LAUNCH_US = 5


def simulated(folder: Path, *, rounds: int, steps: int) -> dict[str, Any]:
    """Medians over rounds of all bounds in turns; the base is a round without one."""
    native = TESTS / "native"
    core = [one for one in source_files() if one.suffix == ".cpp" and one.name != "torch_gate.cpp"]
    sources = [PROFILING / "launch_ahead.cpp", native / "harness.cpp", *core]
    program = folder / "launch_ahead"
    command = [*find_compiler(os.environ), "-std=c++17", "-O2", "-pthread"]
    command += [f"-I{SOURCES}", f"-I{native}", *map(str, sources), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True, timeout=300)

    def run(bound_ms: int) -> dict[str, float]:
        environ = {
            "BOUND_NS": str(bound_ms * 1_000_000),
            "LAUNCH_NS": str(LAUNCH_US * 1000),
            "STEPS": str(steps),
        }
        done = subprocess.run(
            [str(program), "simulated"],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        return dict(json.loads(done.stdout))

    ratios: dict[int, list[float]] = {bound_ms: [] for bound_ms in BOUNDS_MS}
    queued: dict[int, list[float]] = {bound_ms: [] for bound_ms in (0, *BOUNDS_MS)}
    for _ in range(rounds):
        base = run(0)
        queued[0].append(base["most_queued_ns"] / 1e6)
        for bound_ms in BOUNDS_MS:
            seen = run(bound_ms)
            ratios[bound_ms].append(base["took_ns"] / seen["took_ns"])
            queued[bound_ms].append(seen["most_queued_ns"] / 1e6)
    return {
        "device": "simulated",
        **{f"throughput_ratio_{ms}": statistics.median(ratios[ms]) for ms in BOUNDS_MS},
        **{f"most_queued_ms_{ms}": max(seen) for ms, seen in queued.items()},
    }


def on_gpu(*, rounds: int, steps: int) -> dict[str, Any]:
    """As :func:`simulated`; of what is queued there is only the time that it takes to drain."""
    from gpu_check import Training, size_for

    from hydroslurm.gate.native_gate import NativeGate

    gate = NativeGate()
    training = Training(size_for(torch.cuda.mem_get_info()[0]))
    for _ in range(5):
        training.step()
    seen: dict[int, list[tuple[float, float]]] = {ms: [] for ms in (0, *BOUNDS_MS)}
    for _ in range(rounds):
        for bound_ms, rows in seen.items():
            gate.bound_launches(bound_ms / 1e3)
            training.step()
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(steps):
                training.step()
            launched_s = time.perf_counter()
            torch.cuda.synchronize()
            now_s = time.perf_counter()
            rows.append((now_s - began_s, now_s - launched_s))
    gate.bound_launches(0.0)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for bound_ms, rows in seen.items():
        if bound_ms:
            pairs = zip(seen[0], rows, strict=True)
            ratio = statistics.median(base[0] / bounded[0] for base, bounded in pairs)
            result[f"throughput_ratio_{bound_ms}"] = ratio
        result[f"drain_ms_{bound_ms}"] = 1e3 * statistics.median(drain for _, drain in rows)
    return result


def main() -> None:
    chosen = options(__doc__)
    if torch.cuda.is_available():
        result = on_gpu(rounds=3 if chosen.quick else 15, steps=5 if chosen.quick else 20)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = simulated(
                Path(folder), rounds=1 if chosen.quick else 7, steps=20 if chosen.quick else 100
            )
    finish(chosen, "Launches that may be ahead of the device", result)


if __name__ == "__main__":
    main()
