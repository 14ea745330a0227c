"""Suspended for ten times the time-out of the collectives, on a real Slurm: who goes on?

Jobs of four ranks on four nodes of a dev cluster, with DistributedDataParallel and with FSDP2, are
suspended by `scontrol suspend` in the middle of training, again and again. The time-out is 3 s, a
suspend 30 s. The same script without hydroslurm (suspended_ranks.py) is suspended beside them in
the same way. A job that goes on is suspended again; one that does not is replaced by a new one.

A round has `continued` when all ranks have trained on after it. `in_flight_ranks` counts the ranks
that were held with a collective on its way, over all rounds with hydroslurm.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import finish, options, scratch
from progress import read_progress

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import ClusterSpec, DevCluster

JOB = Path(__file__).with_name("suspended_ranks.py")
LIMIT_S = 120.0
FIRST_STEPS = 20
STEPS_AFTER = 5
"""So many more on each rank, and it has trained on."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    ranks: int
    rounds: int
    timeout_s: float
    suspended_s: float


FULL = Plan(ranks=4, rounds=10, timeout_s=3.0, suspended_s=30.0)
QUICK = Plan(ranks=2, rounds=1, timeout_s=2.0, suspended_s=6.0)


@dataclass(frozen=True)
class Kind:
    """One sort of job, and how many rounds it is suspended."""

    way: str
    how: str
    rounds: int


@dataclass(frozen=True)
class Round:
    """One suspend."""

    kind: Kind
    continued: bool
    in_flight_ranks: int


class SuspendedJob:
    """One job, from its submission to its end."""

    def __init__(
        self, cluster: DevCluster, folder: Path, kind: Kind, *, plan: Plan, nodes: Sequence[str]
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._kind = kind
        self._plan = plan
        folder.mkdir(parents=True)
        self._log = folder / "job.log"
        self._run = RunDir(folder / "run")
        self._id = self._submit(nodes)
        self._wait_until_trained(FIRST_STEPS)

    def suspend(self) -> Round:
        """Suspend it for so long as is planned, and see what becomes of it."""
        asked_ns = time.monotonic_ns()
        self._cluster.run(["scontrol", "suspend", self._id])
        time.sleep(self._plan.suspended_s)
        steps = self._steps()
        self._cluster.run(["scontrol", "resume", self._id])
        trained = self._wait_until_trained(max(steps) + STEPS_AFTER)
        parked = self._events(EventKind.ALL_PARKED, after_ns=asked_ns)
        failed = self._events(EventKind.AGREEMENT_FAILED, after_ns=asked_ns)
        in_flight = sum(bool(event.data["in_flight"]) for event in [*parked, *failed])
        return Round(self._kind, trained, in_flight)

    def end(self) -> None:
        """At once: nothing of it is wanted."""
        for choice in (["--signal=KILL", "--full"], []):
            self._cluster.run(["scancel", *choice, self._id], check=False)

    def _submit(self, nodes: Sequence[str]) -> str:
        kind, plan = self._kind, self._plan
        command = f"{sys.executable} {JOB} {kind.way} {kind.how} {self._folder} {plan.timeout_s}"
        script = self._folder / "job.sh"
        script.write_text(
            "#!/bin/sh\n"
            "export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo MASTER_ADDR=127.0.0.1\n"
            f"export MASTER_PORT={_free_port()} HYDROSLURM_RUN_DIR={self._run.root}\n"
            f"exec srun --kill-on-bad-exit=1 {command}\n"
        )
        where = [f"--nodes={plan.ranks}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"]
        words = ["sbatch", "--parsable", "--partition=low", "--no-requeue", *where]
        files = [f"--chdir={self._folder}", f"--output={self._log}"]
        done = self._cluster.run([*words, *files, str(script)])
        return done.stdout.split(";")[0].strip()

    def _wait_until_trained(self, steps: int) -> bool:
        """Until all ranks have made so many steps; whether they have before the job ended.

        Raises:
            TimeoutError: neither of both came.
        """
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if min(self._steps()) >= steps:
                return True
            state = self._state()
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED"):
                return False
            time.sleep(0.2)
        raise TimeoutError(
            f"ranks of job {self._id} at steps {self._steps()}, wanted {steps}; "
            f"it wrote:\n{self._log.read_text()[-4000:]}"
        )

    def _steps(self) -> list[int]:
        folders = [self._folder / f"rank-{rank}" for rank in range(self._plan.ranks)]
        attempts = [read_progress(folder) for folder in folders]
        return [of_rank[-1].end if of_rank else 0 for of_rank in attempts]

    def _state(self) -> str:
        listed = self._cluster.run(["squeue", "-h", "-j", self._id, "-o", "%T"], check=False)
        return listed.stdout.strip() or "GONE"

    def _events(self, kind: EventKind, *, after_ns: int) -> list[Event]:
        """Of all ranks, the ones of this kind and after this moment."""
        paths = [self._run.rank_events(rank) for rank in range(self._plan.ranks)]
        return [
            event
            for path in paths
            if path.exists()
            for event in read_events(path)
            if event.kind is kind and event.mono_ns > after_ns
        ]


def suspend_again_and_again(
    cluster: DevCluster, folder: Path, kind: Kind, *, plan: Plan, nodes: Sequence[str]
) -> list[Round]:
    """All rounds of one kind of job."""
    rounds: list[Round] = []
    while len(rounds) < kind.rounds:
        job = SuspendedJob(
            cluster, folder / f"{kind.way}-{kind.how}-{len(rounds)}", kind, plan=plan, nodes=nodes
        )
        try:
            while len(rounds) < kind.rounds:
                time.sleep(0.5)
                rounds.append(job.suspend())
                if not rounds[-1].continued:
                    break
        finally:
            job.end()
    return rounds


def measure(folder: Path, plan: Plan) -> list[Round]:
    """All kinds of jobs side by side, each on nodes of its own."""
    half = -(-plan.rounds // 2)
    kinds = [
        Kind("with", "ddp", plan.rounds),
        Kind("with", "fsdp", plan.rounds),
        Kind("without", "ddp", half),
        Kind("without", "fsdp", plan.rounds - half),
    ]
    kinds = [kind for kind in kinds if kind.rounds]
    spec = ClusterSpec(nodes=plan.ranks * len(kinds), profile="pause")
    with DevCluster.up(spec) as cluster, ThreadPoolExecutor() as pool:
        names = iter(spec.node_names)
        running = [
            pool.submit(
                suspend_again_and_again,
                cluster,
                folder,
                kind,
                plan=plan,
                nodes=[next(names) for _ in range(plan.ranks)],
            )
            for kind in kinds
        ]
        return [round_ for one in running for round_ in one.result()]


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    ours = [one for one in rounds if one.kind.way == "with"]
    theirs = [one for one in rounds if one.kind.way == "without"]
    return {
        "continued_ddp": sum(one.continued for one in ours if one.kind.how == "ddp"),
        "continued_fsdp": sum(one.continued for one in ours if one.kind.how == "fsdp"),
        "rounds_without": len(theirs),
        "continued_without": sum(one.continued for one in theirs),
        "in_flight_ranks": sum(one.in_flight_ranks for one in ours),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    chosen = options("Suspends longer than the time-out of collectives.")
    plan = QUICK if chosen.quick else FULL
    with scratch("long-suspend", chosen) as folder:
        rounds = measure(folder, plan)
    finish(
        chosen,
        f"long suspend: {plan.suspended_s:g} s, collectives time out after {plan.timeout_s:g} s",
        figures(rounds),
    )


if __name__ == "__main__":
    main()
