"""How much memory a vacate frees, how fast, and whether the training goes on with the same bits.

A training process vacates by both ways that this machine can (`arena`, `cuda-checkpoint`), asked
from this process as `hydroslurm pause --vacate` does, again and again between its steps. Its
weights' hash at the end is compared with that of a run which nobody disturbed.

Without a GPU the arena holds the tensors in the host's memory: what is resident of them is read
from /proc/PID/smaps before and while they are away, and the rates are ratios to a memcpy of as many
bytes in the same process. On a GPU it is a transformer in bf16 of 0.4 billion parameters, and the
largest that fits; what is used is what the device says, while another process allocates half of
what was freed. `--variant` adds CUDA graphs, torch.compile, expandable segments or pinned workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness import finish, parser, scratch  # first: it makes the tests' modules importable
from processes import resident_bytes

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.runtime import client
from hydroslurm.vacate.arena import FLOOR_BYTES
from hydroslurm.vacate.cuda_checkpoint import why_not_here
from hydroslurm.vacate.policy import VACATE_BY_ENV, VacateBy

VARIANTS = ("eager", "graphs", "compile", "expandable", "workers")
WAYS = {"arena": "arena", "checkpoint": "cuda-checkpoint"}
LIMIT_S = 300.0
GIB = 2**30


# --- the training, in a process of its own


def train(run: str, size: str, variant: str, cycles: int, *, pauses: bool) -> None:
    """Three steps before each pause; waits for a line before it goes on."""
    import hydroslurm

    hydroslurm.install(run_dir=run)
    step, model = (_on_gpu if torch.cuda.is_available() else _on_cpu)(size, variant)
    copy = _copy_rate(model)
    print(json.dumps({"ready": True, "memcpy_bytes_per_s": copy}), flush=True)
    for _ in range(cycles):
        for _ in range(3):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if pauses:
            held = [one for p in model.parameters() for one in (p, p.grad) if one is not None]
            at = [one.data_ptr() for one in held if one.nbytes >= FLOOR_BYTES]
            print(json.dumps({"at": at}), flush=True)
            sys.stdin.readline()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    print(json.dumps({"hash": digest.hexdigest()}), flush=True)


def _on_cpu(size: str, variant: str) -> tuple[Any, torch.nn.Module]:
    assert (size, variant) == ("usual", "eager")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(768, 768), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(16, 768)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step, model


def _on_gpu(size: str, variant: str) -> tuple[Any, torch.nn.Module]:
    import gpu_check

    torch.use_deterministic_algorithms(True)
    free_bytes, _ = torch.cuda.mem_get_info()
    chosen = gpu_check.size_for(free_bytes)
    if size == "largest":  # 12 bytes a parameter with gradients and AdamW, activations of a fifth
        layer_bytes = 12 * 12 * 4096**2
        layers = max(1, int(0.7 * free_bytes / layer_bytes))
        chosen = gpu_check.Size(width=4096, layers=layers, batch=1, sequence=256)
    training = gpu_check.Training(chosen)
    if variant == "compile":
        training.model.compile()
    if variant == "graphs":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                training.model(training.data)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            training.model(training.data)

        def step() -> None:
            graph.replay()
            training.step()

        return step, training.model
    if variant == "workers":
        data = torch.utils.data.TensorDataset(training.data.cpu().repeat(64, 1, 1))
        loader = torch.utils.data.DataLoader(
            data, batch_size=len(training.data), num_workers=2, pin_memory=True
        )
        batches = iter(loader)

        def step_with_workers() -> None:
            training.data.copy_(next(batches)[0], non_blocking=True)
            training.step()

        return step_with_workers, training.model
    return training.step, training.model


def _copy_rate(model: torch.nn.Module) -> float:
    """Bytes per second that one thread copies from one tensor to another, both there already."""
    size_bytes = sum(one.nbytes for one in model.parameters())
    source = torch.ones(min(size_bytes, GIB), dtype=torch.uint8)
    target = torch.ones_like(source)
    took_s = []
    for _ in range(9):
        began_s = time.perf_counter()
        target.copy_(source)
        took_s.append(time.perf_counter() - began_s)
    return source.nbytes / statistics.median(took_s)


def steps(size: str, variant: str) -> None:
    """So many steps as each line that is read asks for; answers with the seconds that they took."""
    import hydroslurm

    hydroslurm.install()
    step, _ = (_on_gpu if torch.cuda.is_available() else _on_cpu)(size, variant)
    for _ in range(5):
        step()
    for line in sys.stdin:
        began_s = time.perf_counter()
        for _ in range(int(line)):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(json.dumps({"took_s": time.perf_counter() - began_s}), flush=True)


# --- the process that asks for the pauses


def step_ratio(*, pairs: int, steps: int = 10) -> dict[str, float]:
    """What a step takes with the arena, as a ratio to torch's own allocator: two processes take
    turns of so many steps, in an order that alternates, and each pair gives one ratio."""
    pipe = subprocess.PIPE
    started = []
    for way in (VacateBy.ARENA, VacateBy.CUDA_CHECKPOINT):
        environ = {**os.environ, VACATE_BY_ENV: way.value}
        command = [sys.executable, __file__, "--steps", "usual", "eager"]
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ))
    try:
        ratios = []
        for number in range(pairs + 1):
            took_s = {}
            for process in started if number % 2 else reversed(started):
                assert process.stdin is not None
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
                took_s[process] = _line(process)["took_s"]
            if number:  # the first is to warm up
                ratios.append(took_s[started[0]] / took_s[started[1]])
    finally:
        for process in started:
            with process:
                process.kill()
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"arena_step_ratio": middle, "arena_step_ratio_p25": low, "arena_step_ratio_p75": high}


def measure(way: str, folder: Path, *, size: str, variant: str, cycles: int) -> dict[str, Any]:
    """One undisturbed run, and one that is vacated in each of its cycles."""
    environ = dict(os.environ)
    environ["HYDROSLURM_VACATE_BY"] = WAYS[way]
    environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if variant == "expandable":
        environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

    def start(run: Path, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--train", str(run), size, variant, str(cycles)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*command, *options], stdin=pipe, stdout=pipe, text=True, env=environ
        )

    with start(folder / "undisturbed") as process:
        wanted = _told(process)["hash"]
    falls, why = [], ""
    with start(folder / "run", "pauses") as process:
        assert process.stdin is not None
        rate = _line(process)["memcpy_bytes_per_s"]
        for _ in range(cycles):
            at = _line(process)["at"]
            before_bytes = _used_bytes(process.pid, at)
            answer = client.pause(process.pid, vacate=True, timeout_s=LIMIT_S)
            if answer.done:
                falls.append(1 - _used_bytes(process.pid, at) / before_bytes)
                _use_what_is_free(int(answer.vacated_bytes or 0) // 2)
            else:
                why = why or answer.message
            assert client.resume(process.pid, timeout_s=LIMIT_S).done
            process.stdin.write("go on\n")
            process.stdin.flush()
        found = _told(process)["hash"]
    events = list(read_events(RunDir(folder / "run").rank_events(0)))
    moved = {
        kind: [one.data["moved_bytes"] / one.data["moved_s"] for one in events if one.kind is kind]
        for kind in (EventKind.VACATED, EventKind.RESTORED)
    }
    if not falls:
        return {"refused": why}
    free, back = (statistics.median(moved[kind]) for kind in moved)
    return {
        "cycles": len(falls),
        "bits_equal": found == wanted,
        "rss_fall_ratio": min(falls),
        "free_gb_per_s": free / 1e9,
        "return_gb_per_s": back / 1e9,
        "free_ratio_to_memcpy": free / rate,
        "return_ratio_to_memcpy": back / rate,
    }


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"the training ended with {process.wait()}")
    return dict(json.loads(line))


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    while "hash" not in (told := _line(process)):
        pass
    return told


def _used_bytes(pid: int, addresses: list[int]) -> int:
    """On a device what all processes use of it; else what is resident of the mappings that hold
    these addresses, which have all that the training has allocated."""
    if torch.cuda.is_available():
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return total_bytes - free_bytes
    return resident_bytes(pid, addresses)


def _use_what_is_free(size_bytes: int) -> None:
    """Another process has the device meanwhile: this one."""
    if torch.cuda.is_available():
        torch.full((size_bytes,), 7, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        run, size, variant, cycles, *pauses = sys.argv[2:]
        train(run, size, variant, int(cycles), pauses=bool(pauses))
        return
    if sys.argv[1:2] == ["--steps"]:
        steps(*sys.argv[2:])
        return
    made = parser(__doc__, directory=True)
    made.add_argument("--variant", choices=VARIANTS, action="append")
    made.add_argument("--cycles", type=int, help="default: 50, and 10 on a GPU")
    chosen = made.parse_args()
    on_gpu = torch.cuda.is_available()
    cycles = chosen.cycles or (3 if chosen.quick else 10 if on_gpu else 50)
    sizes = ("usual", "largest") if on_gpu and not chosen.quick else ("usual",)
    variants = chosen.variant or (VARIANTS if on_gpu else ("eager",))
    ways = ["arena"] if why_not_here() else list(WAYS)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "none"}
    for way in ways:
        for size in sizes:
            for variant in variants if size == "usual" else ("eager",):
                with scratch("vacate", chosen) as folder:
                    seen = measure(way, folder, size=size, variant=variant, cycles=cycles)
                # the plainest has the plain names
                named = [way] * (way != "arena") + [size] * (size != "usual")
                end = "".join(f"_{one}" for one in (*named, *[variant] * (variant != "eager")))
                result |= {f"{key}{end}": value for key, value in seen.items()}
    result |= step_ratio(pairs=2 if chosen.quick else 60)
    finish(chosen, "Vacates", result)


if __name__ == "__main__":
    main()
