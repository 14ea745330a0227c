"""Everything that needs a GPU to be known, in one command of a few minutes.

The gate is built and self-tested against this machine's torch. Then, on a bf16 transformer of
hundreds of millions of parameters (scaled to the memory that is free): overhead while nothing is
paused, latencies of pause, drain and resume from another process's kill(), the seconds that it
takes to vacate the device and to fill it again, the bits of the weights with and without pauses,
memory before and after. Without a GPU it says so and ends with exit status 0.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import (
    EventTail,
    bare,
    finish,
    installed,
    median_ratio,
    options,
    p50_p99,
    time_interleaved,
)
from torch import nn

import hydroslurm
from hydroslurm.core.ack import Answer
from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.runtime import client

LIMIT_S = 60.0
PAUSING_S = 75.0
OVERHEAD_S = 75.0
BITS_S = 12.0
GIB = 2**30

# sends one signal per line of input and answers with CLOCK_MONOTONIC taken just before it
SENDER = """
import os, sys, time
for line in sys.stdin:
    signo, pid = map(int, line.split())
    now = time.monotonic_ns()
    os.kill(pid, signo)
    print(now, flush=True)
"""


@dataclass(frozen=True)
class Size:
    """How large the model and its batch are."""

    width: int
    layers: int
    batch: int
    sequence: int


def size_for(free_bytes: int) -> Size:
    """The largest of three that fits: 8 bytes per parameter in bf16, and the activations."""
    if free_bytes > 14 * GIB:
        return Size(width=1280, layers=20, batch=8, sequence=512)  # 0.4 billion parameters
    if free_bytes > 7 * GIB:
        return Size(width=1024, layers=16, batch=4, sequence=512)  # 0.2 billion
    return Size(width=768, layers=6, batch=2, sequence=256)


class Training:
    """A bf16 transformer on the GPU, and one step of its training; the same seed gives the same
    bits."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            size.width,
            size.width // 64,
            4 * size.width,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        encoder = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.model = nn.Sequential(encoder, nn.Linear(size.width, 256)).to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        shape = (size.batch, size.sequence)
        self.data = torch.randn(*shape, size.width, device="cuda", dtype=torch.bfloat16)
        self.target = torch.randint(0, 256, shape, device="cuda")

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def step(self) -> None:
        self.optimizer.zero_grad()
        scores = self.model(self.data).flatten(0, 1).float()
        torch.autograd.backward(nn.functional.cross_entropy(scores, self.target.flatten()))
        self.optimizer.step()

    def finished_step(self) -> None:
        """A step, and the wait until the GPU has done it: what a step really costs."""
        self.step()
        torch.cuda.synchronize()

    def digest(self) -> str:
        """A hash of all weights, bit by bit."""
        torch.cuda.synchronize()
        state = hashlib.sha256()
        for parameter in self.model.parameters():
            state.update(parameter.detach().cpu().view(torch.int16).numpy().tobytes())
        return state.hexdigest()[:16]


def overhead(training: Training, run_dir: Path, *, rounds: int) -> dict[str, float]:
    """Time per step that has finished on the GPU, installed and not paused / bare."""
    seen = time_interleaved(
        training.finished_step,
        {
            "bare": lambda: bare(run_dir),
            "installed": lambda: installed(run_dir),
            "again": lambda: bare(run_dir),
        },
        rounds=rounds,
        segment_s=0.5,
        limit_s=OVERHEAD_S,
    )
    return {
        "ratio_installed": median_ratio(seen, "installed", "bare"),
        "ratio_bare_again": median_ratio(seen, "again", "bare"),
        "step_ms": 1e3 * statistics.median(seen["bare"]),
    }


class Pauser:
    """Pauses this process from another one, while the main thread trains."""

    def __init__(self, run_dir: Path, *, count: int) -> None:
        self.seen: list[dict[str, float]] = []
        self.drained: list[bool] = []
        self.error: BaseException | None = None
        self._count = count
        self._events = EventTail(RunDir(run_dir).rank_events(0))
        self._thread = threading.Thread(target=self._run, name="pauser", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        # this thread belongs to the measurement: it must not count as one that trains
        with hydroslurm.controller().exempt(), _sender() as kill:
            try:
                deadline = time.monotonic() + PAUSING_S
                while len(self.seen) < self._count and time.monotonic() < deadline:
                    self._pause(kill)
            except BaseException as error:
                self.error = error
                os.kill(os.getpid(), signal.SIGUSR2)  # or the main thread would be held for ever

    def _pause(self, kill: Callable[[int], int]) -> None:
        until = self._events.until
        time.sleep(random.uniform(0.02, 0.2))
        sent_ns = kill(signal.SIGUSR1)
        closed = until(EventKind.GATE_CLOSED, limit_s=LIMIT_S)
        parked = until(EventKind.PARKED, limit_s=LIMIT_S)
        drained = until(EventKind.DRAINED, EventKind.NOT_DRAINED, limit_s=LIMIT_S)
        time.sleep(0.02)
        resume_ns = kill(signal.SIGUSR2)
        resumed = until(EventKind.RESUMED, limit_s=LIMIT_S)
        self.drained.append(drained.kind is EventKind.DRAINED)
        figures = {
            "pause_to_closed_us": (closed.mono_ns - sent_ns) / 1e3,
            "pause_to_parked_us": (parked.mono_ns - sent_ns) / 1e3,
            "pause_to_drained_ms": (drained.mono_ns - sent_ns) / 1e6,
            "resume_to_open_us": (resumed.mono_ns - resume_ns) / 1e3,
        }
        if resumed.data["held"]:  # a thread that was waiting for the device is quiet, not held
            released = until(EventKind.FIRST_OPERATOR_RELEASED, limit_s=LIMIT_S)
            figures["resume_us"] = (released.mono_ns - resume_ns) / 1e3
        self.seen.append(figures)


@contextlib.contextmanager
def _sender() -> Iterator[Callable[[int], int]]:
    """A process that signals us; what it makes returns CLOCK_MONOTONIC just before the kill()."""
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    orders, answers = sender.stdin, sender.stdout
    assert orders is not None
    assert answers is not None

    def kill(signo: int) -> int:
        orders.write(f"{signo:d} {os.getpid()}\n")
        orders.flush()
        return int(answers.readline())

    try:
        yield kill
    finally:
        sender.kill()
        sender.communicate()


def latencies(training: Training, run_dir: Path, *, count: int) -> dict[str, Any]:
    """Pause again and again while the steps run as they do in training: unsynchronised."""
    with installed(run_dir):
        pauser = Pauser(run_dir, count=count)
        pauser.start()
        while pauser.running:
            training.step()
        torch.cuda.synchronize()
    if pauser.error is not None:
        raise pauser.error
    result: dict[str, Any] = {
        "pauses": len(pauser.seen),
        "drained": sum(pauser.drained) / len(pauser.drained),
    }
    for name in sorted({name for one in pauser.seen for name in one}):
        result |= p50_p99(name, [one[name] for one in pauser.seen if name in one])
    return result


def vacates(training: Training, run_dir: Path, *, count: int) -> dict[str, Any]:
    """Free the device and fill it again, while the steps run as they do in training. A device that
    cannot be vacated is no failure here: the reason is part of the result."""
    answers: list[Answer] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            for _ in range(count):
                answers.append(client.pause(os.getpid(), vacate=True, timeout_s=LIMIT_S))
                client.resume(os.getpid(), timeout_s=LIMIT_S)
        except Exception as error:  # told in the main thread
            errors.append(error)

    with installed(run_dir):
        asking = threading.Thread(target=ask)
        asking.start()
        while asking.is_alive():
            training.step()
        torch.cuda.synchronize()
    if errors:
        raise errors[0]
    refused = next((one.message for one in answers if not one.done), None)
    result: dict[str, Any] = {"vacates": len(answers), "vacate_refused": refused}
    for kind, name in ((EventKind.VACATED, "vacate_s"), (EventKind.RESTORED, "restore_s")):
        seen = [one.data for one in read_events(RunDir(run_dir).rank_events(0), kinds=[kind])]
        if seen:
            result[name] = statistics.median(one[name] for one in seen)
            rates = [one["moved_bytes"] / one["moved_s"] / 1e9 for one in seen]
            result[name.replace("_s", "_gb_per_s")] = statistics.median(rates)
    return result


def same_bits(size: Size, run_dir: Path, *, steps: int, pauses: int) -> dict[str, Any]:
    """Train twice from the same seed, once with pauses; are the weights the same?

    A third run without pauses shows whether this GPU gives the same bits at all.
    """
    digests, count = [], 0
    for paused in (False, False, True):
        training = Training(size)
        if not paused:
            for _ in range(steps):
                training.step()
            digests.append(training.digest())
        else:
            with installed(run_dir):
                pauser = Pauser(run_dir, count=pauses)
                pauser.start()
                for _ in range(steps):
                    training.step()
                digests.append(training.digest())
                while pauser.running:  # its last pauses hold whatever thread issues something
                    torch.ones(1, device="cuda").add_(1)
                    time.sleep(0.001)
            count = len(pauser.seen)
            if pauser.error is not None:
                raise pauser.error
        del training
        _empty_cache()
    return {
        "bit_identical_with_pauses": digests[0] == digests[2],
        "bit_identical_without_pauses": digests[0] == digests[1],
        "pauses_in_bit_test": count,
        "steps_in_bit_test": steps,
    }


def _empty_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def memory() -> dict[str, float]:
    """Of the device as a whole, and of torch's allocator."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        "device_used_gib": (total_bytes - free_bytes) / GIB,
        "allocated_gib": torch.cuda.memory_allocated() / GIB,
        "reserved_gib": torch.cuda.memory_reserved() / GIB,
    }


def check(folder: Path, *, quick: bool) -> dict[str, Any]:
    """The whole check, on a machine that has a GPU."""
    from hydroslurm.gate import build
    from hydroslurm.gate.native_gate import NativeGate

    begin = time.monotonic()
    gate = NativeGate()
    built_s = time.monotonic() - begin
    if gate.path.exists():  # one that could not be cached was tested while it was built
        build.self_test_in_child(gate.path)
    size = size_for(torch.cuda.mem_get_info()[0])
    training = Training(size)
    for _ in range(3):
        training.finished_step()
    with gate.trace(0) as trace:
        training.finished_step()
    before = memory()
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "gate_ready_s": built_s,
        "parameters": training.parameters,
        "gate_points_per_step": trace.count,
        **overhead(training, folder / "overhead", rounds=3 if quick else 30),
        **latencies(training, folder / "latency", count=3 if quick else 100),
        **vacates(training, folder / "vacates", count=1 if quick else 5),
    }
    after = memory()
    del training
    _empty_cache()
    result |= {f"memory_before_{name}": value for name, value in before.items()}
    result |= {f"memory_after_{name}": value for name, value in after.items()}
    steps = 5 if quick else max(5, min(100, round(1e3 * BITS_S / result["step_ms"])))
    return result | same_bits(size, folder / "bits", steps=steps, pauses=1 if quick else 10)


def main() -> None:
    chosen = options("What only a GPU can show; under five minutes.")
    title = "GPU check"
    if not torch.cuda.is_available():
        if not chosen.json:
            print("no CUDA device that this torch can use; nothing to check here")
        finish(chosen, title, {"gpu": None})
        return
    random.seed(0)
    torch.use_deterministic_algorithms(True)  # with warn_only attention's backward would not be
    # filling what is about to be overwritten costs time and changes nothing here
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        result = check(Path(name), quick=chosen.quick)
    finish(chosen, title, result | {"took_s": time.monotonic() - begin})


if __name__ == "__main__":
    # before CUDA is initialised: without it cuBLAS may choose other sums from run to run
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main()
