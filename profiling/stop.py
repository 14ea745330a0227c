"""Real requeues: what a stop takes from SIGTERM to the commit, and from the queue to the next step.

A training on dev clusters of its own is stopped in three ways, each several times:

    grace     an urgent job, where Slurm gives a grace (PreemptMode=REQUEUE, GraceTime): the rank
              itself asks for the requeue
    gang      an urgent job under gang scheduling, where Slurm requeues at once and kills after
              KillWait
    requeue   `scontrol requeue` by an operator, also killed after KillWait

The clock of a stop starts in the handler of SIGTERM. `eligible_to_first_step_ms` has the scheduler,
the start of Python and torch, the load of the checkpoint, and one step in it. Both clocks of the
events count: a dev cluster is one machine, so the monotonic clocks of two attempts are the same.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attempts import read_attempts
from harness import PROFILING, Slurm, finish, finished, options, p50_p99, scratch
from processes import wait_until
from sbatchfiles import requeue_script

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.spec import Profile

Way = Literal["urgent", "requeue"]
"""An urgent job that wants the node, or an operator's ``scontrol requeue``."""

WAYS: dict[Profile, tuple[Way, ...]] = {
    "requeue": ("requeue", "urgent"),
    "gang-requeue": ("urgent",),
}
JOB = PROFILING / "requeued_job.py"
LIMIT_S = 180.0
NODE = "n1"
SEED = 1


@dataclass(frozen=True)
class Stop:
    """One stop, from the handler of the signal in one attempt to the first step of the next.

    Attributes:
        to_durable_ms: from the handler to the commit; None when this step was never committed.
        steps_lost: made in the attempt that was stopped and not in what the next one began with.
    """

    to_durable_ms: float | None
    eligible_to_first_step_ms: float
    steps_lost: int


class RequeuedTraining:
    """requeued_job.py as a batch job in partition ``low``, with the batch script of hydroslurm.

    The run is ``folder/run``; it keeps two checkpoints of stops, so that no more than three times
    ``state_bytes`` are on the disk at once.
    """

    def __init__(self, cluster: DevCluster, folder: Path, *, state_bytes: int) -> None:
        self._folder = folder
        self._run = RunDir(folder / "run")
        self._attempt = 1
        folder.mkdir(parents=True)
        environ = {
            "HYDROSLURM_RUN_DIR": str(self._run.root),
            "SLURM_TIME_FORMAT": "%s",  # epoch seconds, of scontrol too
        }
        self._slurm = Slurm(cluster, folder, environ)
        script = folder / "job.sbatch"
        script.write_text(requeue_script(f'python3 -u {JOB} "$@"'))
        arguments = [str(script), str(state_bytes), str(folder / "attempts")]
        self._job_id = self._slurm.submit(f"--nodelist={NODE}", *arguments)
        self._wait_for_first_step()

    def stop(self, way: Way) -> Stop:
        """Train on for a moment, so that the stop comes anywhere within a step; stop the job, and
        wait until the next attempt has made a step."""
        time.sleep(random.Random(f"{SEED}-{self._attempt}").uniform(0.2, 0.7))
        if way == "requeue":
            command = self._slurm.start("scontrol", "requeue", self._job_id)
        else:
            command = self._slurm.send_urgent_job(NODE)
        self._attempt += 1
        self._wait_for_first_step()
        finished(command)
        return self._seen()

    def cancel(self) -> None:
        self._slurm.cancel(self._job_id)

    def _seen(self) -> Stop:
        """What the two attempts around the last stop wrote."""
        events = list(read_events(self._run.rank_events(0)))
        began = [at for at, e in enumerate(events) if e.kind is EventKind.ATTEMPT_BEGAN]
        before, after = events[began[-2] : began[-1]], events[began[-1] :]
        asked, safe = _first(before, EventKind.STOP_REQUESTED), _first(before, EventKind.SAFE_POINT)
        committed = [e for e in before if e.kind is EventKind.SAVE_COMMITTED]
        durable = [e for e in committed if safe and e.data.get("checkpoint_step") == safe.step]
        first_step = _first(after, EventKind.FIRST_STEP)
        assert first_step is not None, "stop() waits for it"
        # Slurm gives it in whole seconds, and compares it with a clock of whole seconds
        eligible_s = int(self._field("EligibleTime"))
        attempts = read_attempts(self._folder / "attempts")
        return Stop(
            to_durable_ms=(durable[0].mono_ns - asked.mono_ns) / 1e6 if durable and asked else None,
            eligible_to_first_step_ms=first_step.epoch_ns / 1e6 - eligible_s * 1e3,
            steps_lost=attempts[-2].step - attempts[-1].begin,
        )

    def _field(self, name: str) -> str:
        shown = self._slurm.run("scontrol", "show", "job", "--oneliner", self._job_id)
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return fields[name]

    def _wait_for_first_step(self) -> None:
        """Until this attempt has made a step."""

        def stepped() -> bool:
            path = self._run.rank_events(0)
            return path.exists() and any(
                event.kind is EventKind.FIRST_STEP and event.data["attempt"] == self._attempt
                for event in read_events(path)
            )

        def what() -> str:
            logs = "".join(path.read_text() for path in self._folder.glob("*.out"))
            return f"the first step of attempt {self._attempt}. The job wrote:\n{logs}"

        wait_until(stepped, what, limit_s=LIMIT_S)


def _first(events: Sequence[Event], kind: EventKind) -> Event | None:
    return next((event for event in events if event.kind is kind), None)


def stops_of(
    profile: Profile, folder: Path, ways: Sequence[Way], *, state_bytes: int, kill_wait_s: int
) -> list[Stop]:
    """One training on a cluster of its own, stopped in each of these ways in turn."""
    spec = ClusterSpec(nodes=1, profile=profile, kill_wait_s=kill_wait_s)
    with DevCluster.up(spec) as cluster:
        training = RequeuedTraining(cluster, folder / profile, state_bytes=state_bytes)
        stops = [training.stop(way) for way in ways]
        training.cancel()
        return stops


def figures(stops: Sequence[Stop]) -> dict[str, Any]:
    durable_ms = [stop.to_durable_ms for stop in stops if stop.to_durable_ms is not None]
    return {
        "stops": len(stops),
        "committed": sum(stop.to_durable_ms is not None and not stop.steps_lost for stop in stops),
        "steps_lost": sum(stop.steps_lost for stop in stops),
        **p50_p99("sigterm_to_durable_ms", durable_ms),
        **p50_p99("eligible_to_first_step_ms", [stop.eligible_to_first_step_ms for stop in stops]),
    }


def main() -> None:
    chosen = options("What a stop and a requeue take on a real Slurm.")
    count, state_bytes = (1, 5_000_000) if chosen.quick else (4, 50_000_000)
    stops: list[Stop] = []
    with scratch("stop") as folder:
        for profile, ways in [*WAYS.items()][: 1 if chosen.quick else None]:
            turns = [way for way in ways[: 1 if chosen.quick else None] for _ in range(count)]
            stops += stops_of(profile, folder, turns, state_bytes=state_bytes, kill_wait_s=30)
    finish(chosen, "stop: SIGTERM -> durable, eligible -> first step", figures(stops))


if __name__ == "__main__":
    main()
