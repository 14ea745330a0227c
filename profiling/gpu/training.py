"""The trainings that the parts pause, vacate and stop.

They say what they do in lines of JSON on stdout. ``loop`` trains twice from one seed, first
undisturbed, and says the hash of the weights after each; between its steps it says where it is, so
that the part can pause the second training wherever it likes. ``run`` trains with a
:class:`hydroslurm.Run`, is stopped by SIGTERM and goes on when it is started again.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import TESTS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DRY_ENV = "HYDROSLURM_GPU_DRY"
"""Environment variable of our own: as far as it goes without a device."""
DRY = bool(os.environ.get(DRY_ENV))
DEVICE = torch.device("cpu" if DRY else "cuda")
DTYPE = torch.bfloat16
GIB = 2**30
SEGMENT_S = 0.12
"""What is trained between two places where a pause may come."""
COLLECTIVES = "gloo" if DRY else "nccl"


@dataclass(frozen=True)
class Size:
    """How large a transformer and its batch are."""

    width: int
    layers: int
    batch: int
    sequence: int


SIZES = {
    "large": Size(width=1280, layers=20, batch=8, sequence=512),  # 0.4 billion parameters
    "small": Size(width=512, layers=4, batch=8, sequence=256),  # 13 million: launches are its cost
    "tiny": Size(width=64, layers=2, batch=4, sequence=32),
}


def size_for(wanted: str) -> Size:
    """The largest that fits beside others on this device."""
    if DRY:
        return SIZES["tiny"]
    free_bytes, _ = torch.cuda.mem_get_info()
    return SIZES[wanted if free_bytes > 14 * GIB else "small"]


def deterministic() -> None:
    """Same bits from run to run; CUBLAS_WORKSPACE_CONFIG is set by the driver of the parts."""
    torch.use_deterministic_algorithms(True)  # with warn_only attention's backward would not be
    # filling what is about to be overwritten costs time and changes nothing here
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if DRY:
        torch.set_num_threads(1)


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def release() -> None:
    """Give back what trainings held that are gone; they refer to themselves."""
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()


def say(**line: Any) -> None:
    """The first key is what the part waits for."""
    print(json.dumps(line), flush=True)


def network(size: Size, *, dropout: float, norm_first: bool = False) -> nn.Sequential:
    """A transformer whose last layer has 256 outputs."""
    layer = nn.TransformerEncoderLayer(
        size.width,
        size.width // 64,
        4 * size.width,
        dropout=dropout,
        batch_first=True,
        norm_first=norm_first,
    )
    encoder = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Linear(size.width, 256))


def digest(parameters: Any) -> str:
    """A hash of all weights, bit by bit."""
    state = hashlib.sha256()
    for parameter in parameters:
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        raw = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(raw.numpy().tobytes())
    return state.hexdigest()[:16]


class Training:
    """A bf16 transformer and one step of its training; the same seed gives the same bits.

    Args:
        variant: ``eager``, ``graphs`` (the whole step in one CUDA graph), ``compile``, or
            ``workers`` (batches of a DataLoader with two workers and pinned memory).
    """

    def __init__(self, size: Size, variant: str = "eager") -> None:
        torch.manual_seed(0)
        width, shape = size.width, (size.batch, size.sequence)
        with torch.device(DEVICE):
            self.model = network(size, dropout=0.0, norm_first=True).to(DTYPE)
            self.data = torch.randn(*shape, width, dtype=DTYPE)
            self.target = torch.randint(0, 256, shape)
        captures = variant == "graphs" and not DRY
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, foreach=True, capturable=captures
        )
        self.step: Callable[[], None] = self._step
        if variant == "compile":
            self.model.compile(backend="eager" if DRY else "inductor")
        elif variant == "workers":
            self.step = self._with_workers()
        elif captures:
            self.step = self._captured()

    def _step(self) -> None:
        self.optimizer.zero_grad()
        scores = self.model(self.data).flatten(0, 1).float()
        nn.functional.cross_entropy(scores, self.target.flatten()).backward()
        self.optimizer.step()

    def _captured(self) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()

        def step() -> None:
            graph.replay()
            self.data.mul_(0.999)  # between two replays there is an operator

        return step

    def _with_workers(self) -> Callable[[], None]:
        rows = TensorDataset(self.data.cpu().repeat(64, 1, 1))
        batch = len(self.data)
        loader = DataLoader(rows, batch, num_workers=2, pin_memory=not DRY, drop_last=True)

        batches = itertools.chain.from_iterable(itertools.repeat(loader))

        def step() -> None:
            self.data.copy_(next(batches)[0], non_blocking=True)
            self._step()

        return step


def steps_per_segment(size: Size, variant: str) -> int:
    """How many steps take :data:`SEGMENT_S`; compiles, warms up, and leaves nothing behind."""
    training, took_s = Training(size, variant), []
    for number in range(8):
        began_s = time.perf_counter()
        training.step()
        synchronize()
        if number > 2:
            took_s.append(time.perf_counter() - began_s)
    del training
    release()
    return max(2, round(SEGMENT_S / statistics.median(took_s)))


def loop(
    *, run: str, size: str, variant: str = "eager", pauses: int, fake: str = "", go: bool = False
) -> None:
    """Train with hydroslurm installed and nothing else.

    Args:
        pauses: places between the segments of the second training, each said as ``at``.
        fake: a folder for the tests' model of CUDA's checkpoint API, which then takes its place.
        go: wait for a line before the second training.
    """
    import hydroslurm

    deterministic()
    controller = hydroslurm.install(run_dir=run)
    if fake:
        from coordination.crew import use_model

        model = TESTS / "vacate/model.py"
        Path(fake, "faults.json").write_text("[]")
        use_model([str(model), fake])
    chosen = size_for(size)
    segment = steps_per_segment(chosen, variant)
    say(ready=os.getpid(), steps=segment * (pauses + 1))

    def train(*, disturbed: bool) -> str:
        training = Training(chosen, variant)
        for number in range(1, segment * (pauses + 1) + 1):
            controller.step = number
            training.step()
            if disturbed and number % segment == 0 and number <= segment * pauses:
                synchronize()
                say(at=number)
        weights = digest(training.model.parameters())
        del training
        release()
        return weights

    say(undisturbed=train(disturbed=False))
    if go:
        sys.stdin.readline()
    say(disturbed=train(disturbed=True))
    sys.stdin.readline()  # a resume may be on its way: nobody signals a process that is gone
    hydroslurm.uninstall()


def run(*, run: str, ranks: str = "", steps: int, every: int) -> None:
    """Train with a Run: dropout, a generator of its own, fp16 and a scaler, or one rank of
    ``ddp`` or ``fsdp2`` in bf16.

    Args:
        every: steps between two periodic saves.
    """
    import hydroslurm

    deterministic()
    torch.manual_seed(0)
    size = Size(768, 6, 8, 256) if not DRY and not ranks else size_for("small")
    with torch.device(DEVICE):
        net = network(size, dropout=0.1)
    if ranks:  # one; the variables that torchrun sets are the part's
        torch.distributed.init_process_group(COLLECTIVES)
    model = _parallel(net, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaled = not ranks and not DRY
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=3)
    rows = torch.randn(steps * size.batch, size.sequence, size.width)
    targets = torch.randint(0, 256, (len(rows), size.sequence))
    data, noise = TensorDataset(rows, targets), torch.Generator(DEVICE).manual_seed(5)
    loader = DataLoader(
        data, size.batch, shuffle=True, num_workers=0 if DRY else 2, pin_memory=not DRY
    )
    with hydroslurm.Run(
        model=model,
        optimizer=optimizer,
        **({} if ranks else {"scaler": scaler}),
        loader=loader,
        directory=run,
        every_steps=every,
        every_s=0,
    ) as training:
        training.register("noise", noise)
        synchronize()
        began_s = time.perf_counter()
        training.resume()
        synchronize()
        load_s = time.perf_counter() - began_s
        say(ready=os.getpid(), from_step=training.step, load_s=load_s)
        for rows, targets in training.batches(epochs=1):
            optimizer.zero_grad()
            x = rows.to(DEVICE, non_blocking=True)
            x = x + 0.1 * torch.randn(x.shape, device=DEVICE, generator=noise)
            with torch.autocast(DEVICE.type, torch.float16 if scaled else DTYPE):
                scores = model(x).flatten(0, 1)
            wanted = targets.to(DEVICE).flatten()
            loss = nn.functional.cross_entropy(scores.float(), wanted)
            if ranks:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            # long enough to be stopped in the middle, and for a save before the next one
            time.sleep(0.05 if DRY or ranks else 0.1)
            say(step=training.step, loss=loss.item().hex())
        if not ranks:
            say(pinned_copy_s=_pinned_copy_s(model, optimizer))
        say(weights=digest(model.parameters()), scale=scaler.get_scale())
    if ranks:
        torch.distributed.destroy_process_group()


def _parallel(net: nn.Module, ranks: str) -> nn.Module:
    if ranks == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if ranks == "fsdp2":
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:  # torch 2.4 and 2.5
            from torch.distributed._composable.fsdp import fully_shard
        mesh = torch.distributed.device_mesh.init_device_mesh(DEVICE.type, (1,))
        return fully_shard(net, mesh=mesh)
    return net


def _pinned_copy_s(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Copying what a save copies into pinned memory that is there already, median of five."""
    moments = [v for one in optimizer.state.values() for v in one.values()]
    tensors = [p.detach() for p in model.parameters()]
    tensors += [one for one in moments if torch.is_tensor(one) and one.dim()]
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=not DRY) for t in tensors]
    took_s = []
    for _ in range(5):
        synchronize()
        began_s = time.perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        synchronize()
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


def main() -> None:
    """``loop`` or ``run``, and its arguments as JSON."""
    {"loop": loop, "run": run}[sys.argv[1]](**json.loads(sys.argv[2]))
