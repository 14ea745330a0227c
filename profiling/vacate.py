"""How much memory a vacate frees, how fast, and whether the training goes on with the same bits.

A training process vacates by both ways that this machine can (`arena`, `cuda-checkpoint`), asked
from this process as `hydroslurm pause --vacate` does, again and again between its steps. Its
weights' hash at the end is compared with that of a run which nobody disturbed.

Without a GPU the arena holds the tensors in the host's memory: what is resident of them is read
from /proc/PID/smaps before and while they are away, and the rates are ratios to a memcpy of as many
bytes in the same process. On a GPU it is a transformer in bf16 of 0.4 billion parameters, and the
largest that fits; what is used is what the device says, before, while and after, and while it is
away another process allocates half of it; the rates are also ratios to copies from and to pinned
memory. Each variant is a run of its own: CUDA graphs whose output the training reads, expandable
segments, torch.compile, pinned workers, `ddp` with two ranks (NCCL, a device for each; gloo
without). What cannot be measured leaves its reason under `refused` or `failed`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import (
    EventTail,
    finish,
    parser,
    scratch,
)  # first: it makes the tests' modules importable
from processes import resident_bytes

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.runtime import client
from hydroslurm.vacate.arena import FLOOR_BYTES
from hydroslurm.vacate.cuda_checkpoint import why_not_here
from hydroslurm.vacate.policy import VACATE_BY_ENV, VACATE_ENV, VacateBy

VARIANTS = ("eager", "graphs", "compile", "expandable", "workers", "ddp")
DDP_RANKS = 2
WAYS = {"arena": "arena", "checkpoint": "cuda-checkpoint"}
LIMIT_S = 300.0
GIB = 2**30


# --- the training, in a process of its own


def train(run: str, size: str, variant: str, cycles: int, *, pauses: bool) -> None:
    """Three steps before each pause; waits for a line before it goes on. Of several ranks the first
    talks, and the others wait for its file: not in a collective that it has not come to yet."""
    import hydroslurm

    hydroslurm.install(run_dir=run)
    on_gpu, first = torch.cuda.is_available(), True
    if variant == "ddp":
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
        first = torch.distributed.get_rank() == 0
    step, model = (_on_gpu if on_gpu else _on_cpu)(size, variant)
    if first:
        tell = {"ready": True, "pid": os.getpid(), "memcpy_bytes_per_s": _copy_rate(model)}
        print(json.dumps(tell | (_link_rates() if on_gpu else {})), flush=True)
    for cycle in range(cycles):
        for _ in range(3):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        goes_on = Path(run, f"cycle-{cycle}-is-over")
        while pauses and not first and not goes_on.exists():
            time.sleep(0.01)
        if pauses and first:
            held = [one for p in model.parameters() for one in (p, p.grad) if one is not None]
            at = [one.data_ptr() for one in held if one.nbytes >= FLOOR_BYTES]
            print(json.dumps({"at": at}), flush=True)
            sys.stdin.readline()
            goes_on.touch()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if first:
        print(json.dumps({"hash": digest.hexdigest()}), flush=True)
    if variant == "ddp":
        torch.distributed.destroy_process_group()


def _on_cpu(size: str, variant: str) -> tuple[Any, torch.nn.Module]:
    assert size == "usual"
    assert variant in ("eager", "ddp")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(768, 768), torch.nn.GELU())]
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    if variant == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
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
    # filling what is about to be overwritten costs time and changes nothing here
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    free_bytes, _ = torch.cuda.mem_get_info()
    chosen = gpu_check.size_for(free_bytes)
    if size == "largest":  # 12 bytes a parameter with gradients and AdamW, activations of a fifth
        layer_bytes = 12 * 12 * 4096**2
        layers = max(1, int(0.7 * free_bytes / layer_bytes))
        chosen = gpu_check.Size(width=4096, layers=layers, batch=1, sequence=256)
    training = gpu_check.Training(chosen)
    if variant == "compile":
        training.model.compile()
    if variant == "ddp":
        training.model = torch.nn.parallel.DistributedDataParallel(training.model)  # type: ignore[assignment]
    if variant == "graphs":
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(3):
                training.model(training.data)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            scores = training.model(training.data)

        def step() -> None:
            graph.replay()
            training.data[..., : scores.shape[-1]].copy_(scores)  # so that the hash depends on it
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


def _link_rates() -> dict[str, float]:
    """Bytes per second from the device to pinned memory, and back."""
    device = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    rates = {}
    for name, source, target in (("to_host", device, host), ("to_device", host, device)):
        took_s = []
        for _ in range(5):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            took_s.append(time.perf_counter() - began_s)
        rates[f"{name}_bytes_per_s"] = GIB / statistics.median(took_s)
    return rates


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


@contextlib.contextmanager
def _started(way: str, run: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A training; `options` are those of train(). It is gone after the block, whatever happens."""
    environ = {**os.environ, VACATE_BY_ENV: WAYS[way]}
    program = [sys.executable]
    _, variant, *_ = options
    if variant == "expandable":
        environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if variant == "ddp":  # a request names one rank: all of them vacate at each pause
        environ |= {VACATE_ENV: "always", "NCCL_NVLS_ENABLE": "0"}
        program += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={DDP_RANKS}"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*program, __file__, "--train", str(run), *options],
        stdin=pipe,
        stdout=pipe,
        text=True,
        env=environ,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30.0 if sys.exc_info()[0] is None else 0.1)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def measure(way: str, folder: Path, *, size: str, variant: str, cycles: int) -> dict[str, Any]:
    """One undisturbed run, and one that is vacated in each of its cycles."""
    options = (size, variant, str(cycles))
    with _started(way, folder / "undisturbed", *options) as process:
        wanted = _told(process)["hash"]
    falls, used, why = [], [], ""
    with _started(way, folder / "run", *options, "pauses") as process:
        assert process.stdin is not None
        rates = _line(process)
        told = EventTail(RunDir(folder / "run").rank_events(0))
        for _ in range(cycles):
            at = _line(process)["at"]
            before_bytes = _used_bytes(rates["pid"], at)
            freed_bytes, refused = _vacated(rates["pid"], told if variant == "ddp" else None)
            if freed_bytes:
                while_bytes = _used_bytes(rates["pid"], at)
                falls.append(1 - while_bytes / before_bytes)
                _use_what_is_free(freed_bytes // 2)
            why = why or refused
            assert client.resume(rates["pid"], timeout_s=LIMIT_S).done
            if freed_bytes:
                used.append((before_bytes, while_bytes, _used_bytes(rates["pid"], at)))
            process.stdin.write("go on\n")
            process.stdin.flush()
        found = _told(process)["hash"]
    if not falls:
        return {"refused": why}
    events = list(read_events(RunDir(folder / "run").rank_events(0)))
    result = {
        "cycles": len(falls),
        "bits_equal": found == wanted,
        "rss_fall_ratio": min(falls),
    }
    moves = ((EventKind.VACATED, "free", "to_host"), (EventKind.RESTORED, "return", "to_device"))
    for kind, name, link in moves:
        seen = [one.data for one in events if one.kind is kind]
        rate = statistics.median(one["moved_bytes"] / one["moved_s"] for one in seen)
        result[f"{name}_s"] = statistics.median(one["moved_s"] for one in seen)
        result[f"{name}_gb_per_s"] = rate / 1e9
        result[f"{name}_ratio_to_memcpy"] = rate / rates["memcpy_bytes_per_s"]
        if f"{link}_bytes_per_s" in rates:
            result[f"{name}_ratio_to_link"] = rate / rates[f"{link}_bytes_per_s"]
    if torch.cuda.is_available():
        for name, row in zip(("before", "while", "after"), zip(*used, strict=True), strict=True):
            result[f"used_{name}_gb"] = statistics.median(row) / 1e9
    return result


def _vacated(pid: int, events: EventTail | None) -> tuple[int, str]:
    """Ask for a pause that vacates: bytes, or why not. With events, every pause does, and they
    tell: one that asks this rank alone would be another vacate than that of the others."""
    if events is None:
        answer = client.pause(pid, vacate=True, timeout_s=LIMIT_S)
        return int(answer.vacated_bytes or 0), "" if answer.done else answer.message
    client.pause(pid, timeout_s=LIMIT_S)
    data = events.until(EventKind.VACATED, EventKind.NOT_VACATED, limit_s=LIMIT_S).data
    return int(data["moved_bytes"]), str(data.get("reason", ""))


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
    if torch.cuda.is_available() and size_bytes:
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
    # without it cuBLAS refuses what is to be deterministic; each training inherits it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    on_gpu = torch.cuda.is_available()
    cycles = chosen.cycles or (3 if chosen.quick else 10 if on_gpu else 50)
    sizes = ("usual", "largest") if on_gpu and not chosen.quick else ("usual",)
    several = torch.cuda.device_count() >= DDP_RANKS
    usual = [one for one in VARIANTS if one != "ddp" or several]
    variants = chosen.variant or (usual if on_gpu else ["eager"])
    ways = ["arena"] if why_not_here() else list(WAYS)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "none"}
    for way in ways:
        for size in sizes:
            for variant in variants if size == "usual" else ("eager",):
                with scratch("vacate", chosen) as folder:
                    try:
                        seen = measure(way, folder, size=size, variant=variant, cycles=cycles)
                    except (Exception, SystemExit) as error:  # the others are measured all the same
                        seen = {"failed": f"{type(error).__name__}: {error}"[:500]}
                # the plainest has the plain names
                named = [way] * (way != "arena") + [size] * (size != "usual")
                end = "".join(f"_{one}" for one in (*named, *[variant] * (variant != "eager")))
                result |= {f"{key}{end}": value for key, value in seen.items()}
    result |= step_ratio(pairs=2 if chosen.quick else 60)
    finish(chosen, "Vacates", result)


if __name__ == "__main__":
    main()
