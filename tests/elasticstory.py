"""Elastic runs of real processes on this machine: a real coordinator, members that train with gloo,
real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processes import LIMIT_S, wait_until
from zygote import ForkedChild

from hydroslurm.core.rundir import ELASTIC_ENV
from hydroslurm.elastic.coordinator import Coordinator, start
from hydroslurm.elastic.folder import MEMBER_ENV, CoordinatorOptions, ElasticFolder
from hydroslurm.elastic.roster import Size, Timing

if TYPE_CHECKING:
    from typing_extensions import Self

COORDINATOR = """
import contextlib, sys
from pathlib import Path
from hydroslurm.elastic.coordinator import start
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import StaleAttempt

coordinator = start(ElasticFolder(run=Path(sys.argv[1])))
with contextlib.suppress(StaleAttempt):
    if not coordinator.membership.finished:
        coordinator.run()
sys.exit(coordinator.membership.gave_up or 0)
"""
"""What the batch script of a job runs, without its members in Slurm."""
SAMPLES = 480
BATCH = 4

BEGIN = """
    import json, os, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    import hydroslurm
    from hydroslurm.data import ResumableSampler

    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    samples = torch.Generator().manual_seed(7)
    xs = torch.randn(options["samples"], 8, generator=samples)
    data = TensorDataset(xs, xs.sum(1, keepdim=True), torch.arange(len(xs)))
"""
"""Of each training here: a linear function to learn, whose samples know their number."""

START = (
    BEGIN
    + """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
)
TRAIN = (
    START
    + """
    torch.manual_seed(options.get("seed", 0))
    rest = [] if options.get("plain") else [nn.BatchNorm1d(16), nn.Dropout(0.1)]
    net = nn.Sequential(nn.Linear(8, 16), *rest, nn.ReLU(), nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    loader = DataLoader(data, batch_size=options["batch"], sampler=ResumableSampler(data))
    with hydroslurm.Run(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader,
        every_s=0, elastic=True,
    ) as run:
        for x, y, ids in run.batches(epochs=options["epochs"]):
            step = run.step
            print("BEGUN " + json.dumps({
                "step": step, "epoch": run.epoch, "generation": run.generation,
                "ids": ids.tolist(), "at_s": time.monotonic(),
            }))
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            print("STEP " + json.dumps({
                "step": step, "epoch": run.epoch,
                "generation": run.generation, "size": dist.get_world_size(),
                "rank": dist.get_rank(),
                "ids": ids.tolist(), "loss": loss.item(), "at_s": time.monotonic(),
            }))
            hurries = os.path.exists(options.get("hurry", ""))
            time.sleep(0.0 if hurries else options.get("step_s", 0.02))
    weights = sum(value.detach().double().sum() for value in net.parameters())
    print("DONE", json.dumps({
        "step": run.step, "weights": weights.item(), "lr": scheduler.get_last_lr()[0],
        "trained": int(getattr(net[1], "num_batches_tracked", 0)),
    }))
"""
)
"""Says what it begins, too. Where ranks are killed at any moment that is what counts their samples:
one that is killed behind the sum of the gradients has trained its own, the others count the step,
and it has said nothing behind it; one that has said nothing before it cannot have taken part. A
line is one text and so one write, which a kill does not cut in two."""


def write_options(folder: ElasticFolder, **options: Any) -> None:
    """Those of an elastic run, its sizes and times among them."""
    sizes = {one.name: options.pop(one.name) for one in fields(Size) if one.name in options}
    sizes.setdefault("wanted", sizes["max"])
    times = {one.name: options.pop(one.name) for one in fields(Timing) if one.name in options}
    options |= {"size": Size(**sizes), "timing": Timing(**times)}
    folder.write_options(CoordinatorOptions(**options))


def formed(folder: ElasticFolder, *names: str, **options: Any) -> Coordinator:
    """A coordinator in this process; these members have come, and train."""
    folder.write_options(CoordinatorOptions(**options))
    one = start(folder)
    for name in names:
        rank, now_s = (name, 0), time.monotonic()
        new: Any = {"local_size": 1, "node": "n1", "generation": 0, "holding": False}
        one.act(one.membership.join(rank, **new, now_s=now_s))
        one.act(one.membership.ready(rank, now_s))
    assert one.membership.change is not None
    number = one.membership.change.number
    for name in names:
        one.act(one.membership.formed((name, 0), number, True, 0.0, time.monotonic()))
    return one


class ElasticStory:
    """One elastic run, in a folder; its processes are gone after the block."""

    def __init__(self, folder: Path, *, program: str = TRAIN, **size: float) -> None:
        self.root = folder
        self.folder = ElasticFolder(run=folder / "run")
        self.folder.root.mkdir(parents=True, mode=0o700)
        (folder / "run").chmod(0o700)
        write_options(self.folder, **{"max": 4, "gather_s": 2.0, **size})
        self.members: dict[str, ForkedChild] = {}
        self.former: list[ForkedChild] = []
        """Of a name that was started again."""
        self.coordinator: subprocess.Popen[str] | None = None
        self._program = program
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """One more coordinator; waits until it says where it is."""
        before = self.folder.read(self.folder.coordinator_json)
        self.coordinator = subprocess.Popen(
            [sys.executable, "-c", COORDINATOR, str(self.folder.run)],
            text=True,
        )
        wait_until(
            lambda: self.folder.read(self.folder.coordinator_json) not in (None, before),
            "the coordinator",
        )

    def start(
        self,
        name: str,
        *,
        environ: Mapping[str, str] | None = None,
        local: tuple[int, int] | None = None,
        **options: Any,
    ) -> Any:
        """Start a member; its output is ``story.members[name]``. ``local``: only this one of so
        many ranks of it, whose output is at ``a.1`` for the second of ``a``."""
        member = name
        if local is not None:
            name = f"{name}.{local[0]}"
            ranks = {"LOCAL_RANK": str(local[0]), "LOCAL_WORLD_SIZE": str(local[1])}
            environ = {**(environ or {}), **ranks}
        folder = self.root / f"{name}-{len(list(self.root.glob(f'{name}-*')))}"
        folder.mkdir()
        if (before := self.members.get(name)) is not None:
            before.close()
            self.former.append(before)
        told = {"samples": SAMPLES, "batch": BATCH, "epochs": 2, **options}
        self.members[name] = ForkedChild(
            self._program,
            folder,
            json.dumps(told),
            environ={
                ELASTIC_ENV: str(self.folder.run),
                MEMBER_ENV: member,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                **(environ or {}),
            },
        )
        return self.members[name]

    def start_all(self, names: str, *more: Any, **options: Any) -> None:
        """A member for each letter."""
        for name in names:
            self.start(name, *more, **options)

    def signal(self, name: str, signo: int) -> None:
        os.kill(self.members[name].pid, signo)

    def kill_coordinator(self) -> None:
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.folder.ledger() if one["kind"] == kind]

    def wait_for(self, kind: str, times: int = 1) -> dict[str, Any]:
        wait_until(lambda: len(self.entries(kind)) >= times, lambda: f"{times} {kind}\n{self}")
        return self.entries(kind)[times - 1]

    def wait_for_step(self, name: str, *, size: int, times: int = 3) -> None:
        """Until a member has trained so many steps in a world of this size."""
        wait_until(
            lambda: sum(one["size"] == size for one in self.steps(name)) >= times,
            lambda: f"{name} to train with {size}\n{self}",
        )

    def steps(self, name: str) -> list[dict[str, Any]]:
        return steps_of(self.members[name])

    def all_steps(self, word: str = "STEP") -> list[list[dict[str, Any]]]:
        """Of all members that ever were; ``word``: BEGUN, of steps that may have been dropped."""
        return [steps_of(child, word) for child in (*self.members.values(), *self.former)]

    def ended(self, name: str, *, limit_s: float = LIMIT_S) -> int:
        """The exit status of a member, waited for."""
        try:
            return self.members[name].wait(limit_s=limit_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{name} does not end\n{self}") from error

    def done(self, name: str) -> dict[str, Any]:
        """Wait for the member's end, which must be a good one; what it has said then."""
        child = self.members[name]
        status = child.wait()
        wait_until(lambda: any(line.startswith("DONE ") for line in child.lines), f"{name}\n{self}")
        assert status == 0, str(self)
        return dict(json.loads(child.expect("DONE ")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for child in self.members.values():
            child.close()
        if self.coordinator is not None:
            if self.coordinator.poll() is None:
                self.coordinator.send_signal(signal.SIGKILL)
            self.coordinator.wait()

    def __str__(self) -> str:
        said = "\n".join(
            f"--- {name}\n"
            + "\n".join(
                line for line in child.lines if line[:5] not in ("STEP ", "BEGUN", "SHARD")
            )[-3000:]
            for name, child in self.members.items()
        )
        ledger = "\n".join(json.dumps(one) for one in self.folder.ledger())
        return f"{said}\n--- ledger\n{ledger}"


def goes_on(story: ElasticStory, name: str, *, steps: int = 2) -> None:
    """Until a member has trained so many more."""
    before = len(story.steps(name))
    wait_until(lambda: len(story.steps(name)) > before + steps, lambda: f"{name} to go on\n{story}")


def steps_of(child: ForkedChild, word: str = "STEP") -> list[dict[str, Any]]:
    """The steps that it has said it trains."""
    told = [line.partition(" ") for line in child.lines]
    return [json.loads(rest) for kind, _, rest in told if kind == word]


def times_seen(*logs: list[dict[str, Any]]) -> dict[int, Counter[int]]:
    """Epoch -> sample -> how often it was trained on; of a step that was dropped and repeated, the
    ranks of the generation that has completed it count."""
    newest: dict[int, int] = {}
    for log in logs:
        for one in log:
            newest[one["step"]] = max(newest.get(one["step"], 0), one["generation"])
    seen: dict[int, Counter[int]] = {}
    for log in logs:
        for one in log:
            if one["generation"] == newest[one["step"]]:
                seen.setdefault(one["epoch"], Counter()).update(one["ids"])
    return seen


def mean_losses(story: ElasticStory) -> dict[int, float]:
    """Step -> the mean loss of its samples, of the ranks that have completed it. A step in which a
    rank was killed before it could say its loss is left out."""
    newest: dict[int, int] = {}
    begun: Counter[tuple[int, int]] = Counter()
    ended: Counter[tuple[int, int]] = Counter()
    sums: defaultdict[tuple[int, int], float] = defaultdict(float)
    for one in (one for log in story.all_steps("BEGUN") for one in log):
        begun[one["step"], one["generation"]] += len(one["ids"])
    for one in (one for log in story.all_steps() for one in log):
        step, generation = one["step"], one["generation"]
        newest[step] = max(newest.get(step, 0), generation)
        sums[step, generation] += one["loss"] * len(one["ids"])
        ended[step, generation] += len(one["ids"])
    whole = [one for one in newest.items() if ended[one] == begun[one]]
    return {step: sums[step, generation] / ended[step, generation] for step, generation in whole}


HASH_OF_WEIGHTS = (
    "hashlib.sha256(\n"
    "        b''.join(one.detach().numpy().tobytes() for one in net.parameters())\n"
    "    ).hexdigest()"
)
"""In a script."""

# --- steps in shards, for sums in a fixed order

SAMPLES_IN_SHARDS = 230
"""19 steps of 3 shards of 4 in an epoch, and one of 2 samples, in which the third rank has none."""

IN_SHARDS = (
    TRAIN.replace("import json,", "import hashlib, random, numpy, json,")
    .replace("nn.BatchNorm1d(16), nn.Dropout(0.1)", "nn.LayerNorm(16), nn.Dropout(0.3)")
    .replace(
        "data = TensorDataset(xs, xs.sum(1, keepdim=True), torch.arange(len(xs)))",
        """class Noisy(TensorDataset):
        def __getitem__(self, index):
            x, y, number = super().__getitem__(index)
            return x + 0.1 * torch.randn(8) + random.random() + numpy.random.rand(), y, number
    data = Noisy(xs, xs.sum(1, keepdim=True), torch.arange(len(xs)))""",
    )
    .replace(
        """for x, y, ids in run.batches(epochs=options["epochs"]):
            step = run.step
            print("BEGUN " + json.dumps({
                "step": step, "epoch": run.epoch, "generation": run.generation,
                "ids": ids.tolist(), "at_s": time.monotonic(),
            }))
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
""",
        """for batch in run.batches(epochs=options["epochs"]):
            step, losses, seen = run.step, {}, []
            optimizer.zero_grad()
            scale = torch.rand(())
            for x, y, ids in run.shards(batch):
                loss = nn.functional.mse_loss(model(x), y) * (scale + random.random())
                loss.backward()
                print("SHARD " + json.dumps({
                    "step": step, "generation": run.generation,
                    "losses": {int(ids[0]): loss.item()},
                }))
                losses[int(ids[0])] = loss.item()
                seen += ids.tolist()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
""",
    )
    .replace(
        '"ids": ids.tolist(), "loss": loss.item(),',
        '"ids": seen, "losses": losses, "scale": scale.item(),',
    )
    .replace(
        "weights = sum(value.detach().double().sum() for value in net.parameters())",
        f"weights = {HASH_OF_WEIGHTS}",
    )
    .replace("weights.item()", "weights")
)


def losses(story: ElasticStory) -> dict[tuple[int, str], float]:
    """Of each step and shard, as they were at last; told before the sum, as BEGUN is."""
    newest: dict[tuple[int, str], tuple[int, float]] = {}
    for log in story.all_steps("SHARD"):
        for one in log:
            for shard, loss in one["losses"].items():
                key = one["step"], shard
                newest[key] = max(newest.get(key, (0, 0.0)), (one["generation"], loss))
    return {key: loss for key, (_, loss) in newest.items()}
