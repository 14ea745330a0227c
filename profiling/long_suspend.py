"""Suspended for ten times the time-out of the collectives, on a real Slurm: who goes on?

Jobs of four ranks on four nodes of a dev cluster, with DistributedDataParallel and with FSDP2, are
suspended by `scontrol suspend` in the middle of training, again and again. The time-out is 3 s, a
suspend 30 s. The same training without hydroslurm is suspended beside them in the same way. A job
that goes on is suspended again; one that does not is replaced by a new one.

A round has `continued` when all ranks have trained on after it. `in_flight_ranks` counts the ranks
that were held with a collective on its way, over all rounds with hydroslurm.

The ranks are this script, too: ``long_suspend.py with|without ddp|fsdp FOLDER TIMEOUT_S``.
"""

from __future__ import annotations

import datetime
import functools
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from attempts import AttemptLog, read_attempts
from harness import Slurm, finish, options, scratch
from processes import free_port, wait_until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import ClusterSpec, DevCluster

LIMIT_S = 120.0
FIRST_STEPS = 20
STEPS_AFTER = 5
"""So many more on each rank, and it has trained on."""
WIDTH = 64
LOADING_S = 0.04
"""Each step of each rank waits at most so long for its data: else the ranks of several jobs on a
few cores would wait for one another until their collectives' time-out."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    ranks: int
    rounds: int
    timeout_s: float
    suspended_s: float


FULL = Plan(ranks=4, rounds=10, timeout_s=3.0, suspended_s=30.0)
QUICK = Plan(ranks=2, rounds=1, timeout_s=2.0, suspended_s=6.0)


Round = tuple[bool, int]
"""Of one suspend: whether all ranks have trained on, and how many were held with a collective under
way."""


class SuspendedJob:
    """One job, from its submission to its end.

    Args:
        place: of the folders of such jobs.
        kind: ``with`` or ``without``, and ``ddp`` or ``fsdp``.
    """

    def __init__(
        self,
        cluster: DevCluster,
        place: Path,
        kind: tuple[str, str],
        name: str,
        *,
        plan: Plan,
        nodes: Sequence[str],
    ) -> None:
        folder = place / name
        folder.mkdir(parents=True)
        self._folder, self._plan = folder, plan
        self._run = RunDir(folder / "run")
        environ = {
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "HYDROSLURM_RUN_DIR": str(self._run.root),
        }
        self._slurm = Slurm(cluster, folder, environ)
        where = (f"-N{plan.ranks}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}")
        rank = f"{sys.executable} {__file__} {' '.join(kind)} {folder} {plan.timeout_s}"
        self._id = self._slurm.submit(
            "--partition=low", "--no-requeue", *where, "--output=job.log",
            "--wrap", f"exec srun --kill-on-bad-exit=1 {rank}",
        )  # fmt: skip
        self._is_trained(FIRST_STEPS)

    def suspend(self) -> Round:
        """Suspend it for so long as is planned, and see what becomes of it."""
        asked_ns = time.monotonic_ns()
        self._slurm.run("scontrol", "suspend", self._id)
        time.sleep(self._plan.suspended_s)
        steps = self._steps()
        self._slurm.run("scontrol", "resume", self._id)
        return self._is_trained(max(steps) + STEPS_AFTER), self._in_flight(asked_ns)

    def end(self) -> None:
        self._slurm.cancel(self._id)

    def _is_trained(self, steps: int) -> bool:
        """Wait until all ranks have made so many steps; whether they have before the job ended."""

        def decided() -> bool:
            return min(self._steps()) >= steps or self._is_over()

        def what() -> str:
            log = (self._folder / "job.log").read_text()[-4000:]
            return f"{steps} steps of job {self._id}, at {self._steps()}; it wrote:\n{log}"

        wait_until(decided, what, limit_s=LIMIT_S)
        return min(self._steps()) >= steps

    def _steps(self) -> list[int]:
        folders = [self._folder / f"rank-{rank}" for rank in range(self._plan.ranks)]
        attempts = [read_attempts(folder) for folder in folders]
        return [of_rank[-1].step if of_rank else 0 for of_rank in attempts]

    def _is_over(self) -> bool:
        command = self._slurm.start("squeue", "-h", "-j", self._id, "-o", "%T")
        state, _ = command.communicate()
        return state.strip() not in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")

    def _in_flight(self, after_ns: int) -> int:
        """How many ranks were held after this moment with a collective on its way."""
        paths = [self._run.rank_events(rank) for rank in range(self._plan.ranks)]
        return sum(
            event.kind in (EventKind.ALL_PARKED, EventKind.AGREEMENT_FAILED)
            and event.mono_ns > after_ns
            and bool(event.data["in_flight"])
            for path in paths
            if path.exists()
            for event in read_events(path)
        )


def suspend_again_and_again(start: Callable[[str], SuspendedJob], rounds: int) -> list[Round]:
    """All rounds of one kind of job, each of which has a name."""
    seen: list[Round] = []
    while len(seen) < rounds:
        job = start(f"job-{len(seen)}")
        try:
            while len(seen) < rounds:
                time.sleep(0.5)
                seen.append(job.suspend())
                if not seen[-1][0]:
                    break
        finally:
            job.end()
    return seen


def measure(folder: Path, plan: Plan) -> dict[tuple[str, str], list[Round]]:
    """All kinds of jobs side by side, each on nodes of its own."""
    half = -(-plan.rounds // 2)
    rounds = {
        ("with", "ddp"): plan.rounds,
        ("with", "fsdp"): plan.rounds,
        ("without", "ddp"): half,
        ("without", "fsdp"): plan.rounds - half,
    }
    spec = ClusterSpec(nodes=plan.ranks * len(rounds), profile="pause")
    with DevCluster.up(spec) as cluster, ThreadPoolExecutor() as pool:
        names = iter(spec.node_names)
        running = {}
        for kind, count in rounds.items():
            nodes = [next(names) for _ in range(plan.ranks)]
            place = folder / "-".join(kind)
            start = functools.partial(SuspendedJob, cluster, place, kind, plan=plan, nodes=nodes)
            running[kind] = pool.submit(suspend_again_and_again, start, count)
        return {kind: one.result() for kind, one in running.items()}


def figures(rounds: dict[tuple[str, str], list[Round]]) -> dict[str, int]:
    ddp, fsdp = rounds["with", "ddp"], rounds["with", "fsdp"]
    theirs = [*rounds["without", "ddp"], *rounds["without", "fsdp"]]
    return {
        "continued_ddp": sum(continued for continued, _ in ddp),
        "continued_fsdp": sum(continued for continued, _ in fsdp),
        "rounds_without": len(theirs),
        "continued_without": sum(continued for continued, _ in theirs),
        "in_flight_ranks": sum(in_flight for _, in_flight in [*ddp, *fsdp]),
    }


def be_rank(way: str, how: str, folder: Path, timeout_s: float) -> None:
    """Train until the job is cancelled; ``without`` is torch alone."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    # the time-out of the process group, which is short, is also that of its making
    (folder / f"ready-{rank}").touch()
    wait_until(lambda: len(list(folder.glob("ready-*"))) == size, "torch in all ranks")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.Adam(model.parameters())
    data, number = torch.randn(8, WIDTH), 0
    attempt = AttemptLog(folder / f"rank-{rank}", 0)
    if way == "with":
        import hydroslurm

        run = hydroslurm.Run(
            model=model, optimizer=optimizer, directory=folder / "run", every_steps=0, every_s=0
        )
        run.resume()
    while True:
        time.sleep(random.uniform(0, LOADING_S))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        number += 1
        if way == "with":
            run.step = number
            run.safe_point()
        attempt.made(number)


def main() -> None:
    chosen = options("Suspends longer than the time-out of collectives.")
    plan = QUICK if chosen.quick else FULL
    with scratch("long-suspend") as folder:
        rounds = measure(folder, plan)
    title = f"long suspend: {plan.suspended_s:g} s, time-out of collectives {plan.timeout_s:g} s"
    finish(chosen, title, figures(rounds))


if __name__ == "__main__":
    if sys.argv[1:2] in (["with"], ["without"]):
        be_rank(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
