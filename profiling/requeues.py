"""A training on a real Slurm that is stopped and requeued, and what each stop took.

Both clocks of the events count: a dev cluster is one machine, so that the monotonic clocks of two
attempts are the same one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import harness  # noqa: F401 - makes the tests importable
from processes import wait_until
from progress import AttemptSpan, read_progress

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster
from hydroslurm.jobs.launch.batch_script import RequeueScript, requeue_script

JOB = Path(__file__).with_name("requeued_job.py")
LIMIT_S = 180.0
NODE = "n1"

Way = Literal["urgent", "requeue"]
"""An urgent job that wants the node, or an operator's ``scontrol requeue``."""


@dataclass(frozen=True)
class Stop:
    """One stop, from the handler of the signal in one attempt to the first step of the next.

    Attributes:
        to_safe_point_ms: from the signal's handler to the end of the step that was being made.
        asking_ms: from there to the begin of the save: what asking Slurm why holds it up.
        staging_ms: the copy into host memory, which a write by the training thread would not need.
        to_durable_ms: from the handler to the commit; None when this step was never committed.
        durable_to_requeued_ms: from the commit until Slurm had said that the job is in the queue.
        requeued_to_eligible_s: Slurm's own wait, from its answer on.
        eligible_to_first_step_ms: the scheduler, the start of Python and torch, the load, one step.
        steps_lost: made in the attempt that was stopped and not in what the next one began with.
        state_bytes: that were committed.
    """

    to_safe_point_ms: float | None
    asking_ms: float | None
    staging_ms: float | None
    to_durable_ms: float | None
    durable_to_requeued_ms: float | None
    requeued_to_eligible_s: float | None
    eligible_to_first_step_ms: float
    steps_lost: int
    state_bytes: int | None


class RequeuedTraining:
    """requeued_job.py as a batch job in partition ``low``, with the batch script of hydroslurm.

    The run is ``folder/run``; it keeps two checkpoints of stops, so that no more than three times
    ``state_bytes`` are on the disk at once.
    """

    def __init__(self, cluster: DevCluster, folder: Path, *, state_bytes: int) -> None:
        self.cluster = cluster
        self.folder = folder
        self.run = RunDir(folder / "run")
        self.attempt = 1
        folder.mkdir(parents=True)
        script = folder / "job.sbatch"
        script.write_text(requeue_script(RequeueScript(command=f'"$PYTHON" -u {JOB} "$@"')))
        arguments = [str(script), str(state_bytes), str(folder / "progress")]
        self.job_id = self._slurm("sbatch", "--parsable", f"--nodelist={NODE}", *arguments)
        self._wait_for_first_step()

    def stop(self, way: Way, *, meanwhile: Callable[[], object] | None = None) -> Stop:
        """Stop the job, and wait until the next attempt has made a step.

        Args:
            meanwhile: called when the stopped attempt has left.
        """
        urgent = None
        if way == "requeue":
            self._slurm("scontrol", "requeue", self.job_id)
        else:
            options = ("--partition=urgent", f"--nodelist={NODE}", "--exclusive", "--time=1")
            urgent = self._start("srun", *options, "true")
        if meanwhile is not None:
            gone = ("RUNNING", "COMPLETING")
            wait_until(lambda: not self._state().startswith(gone), "its end", limit_s=LIMIT_S)
            meanwhile()
        self.attempt += 1
        self._wait_for_first_step()
        if urgent is not None:
            _finished(urgent)
        return self._seen()

    def cancel(self) -> None:
        """End the job at once: a save for this stop would help nobody."""
        self._slurm("scancel", "--signal=KILL", "--full", self.job_id)
        self._slurm("scancel", self.job_id)

    def progress(self) -> list[AttemptSpan]:
        return read_progress(self.folder / "progress")

    def _seen(self) -> Stop:
        """What the two attempts around the last stop wrote."""
        events = list(read_events(self.run.rank_events(0)))
        began = [at for at, e in enumerate(events) if e.kind is EventKind.ATTEMPT_BEGAN]
        before, after = events[began[-2] : began[-1]], events[began[-1] :]
        stop = _first(before, EventKind.STOP_REQUESTED)
        safe = _first(before, EventKind.SAFE_POINT)
        staged = _last(before, EventKind.SAVE_STAGED)
        durable = _durable_of(before, safe)
        requeued = _first(before, EventKind.REQUEUED)
        first_step = _first(after, EventKind.FIRST_STEP)
        assert first_step is not None, "stop() waits for it"
        eligible_s = self._eligible_epoch_s()
        attempts = self.progress()
        return Stop(
            to_safe_point_ms=_between_ms(stop, safe),
            asking_ms=_between_ms(safe, _first(before, EventKind.SAVE_STARTED)),
            staging_ms=None if staged is None else 1e3 * staged.data["seconds"],
            to_durable_ms=_between_ms(stop, durable),
            durable_to_requeued_ms=_between_ms(durable, requeued),
            requeued_to_eligible_s=(
                None if requeued is None else eligible_s - requeued.epoch_ns / 1e9
            ),
            eligible_to_first_step_ms=first_step.epoch_ns / 1e6 - eligible_s * 1e3,
            steps_lost=attempts[-2].end - attempts[-1].begin,
            state_bytes=None if durable is None else durable.data["state_bytes"],
        )

    def _eligible_epoch_s(self) -> int:
        """Slurm gives it in whole seconds, and compares it with a clock of whole seconds."""
        return int(self._field("EligibleTime"))

    def _state(self) -> str:
        return self._field("JobState")

    def _field(self, name: str) -> str:
        shown = self._slurm("scontrol", "show", "job", "--oneliner", self.job_id)
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return fields[name]

    def _wait_for_first_step(self) -> None:
        """Until this attempt has made a step."""

        def stepped() -> bool:
            path = self.run.rank_events(0)
            return path.exists() and any(
                event.kind is EventKind.FIRST_STEP and event.data["attempt"] == self.attempt
                for event in read_events(path)
            )

        def what() -> str:
            logs = "".join(path.read_text() for path in self.folder.glob("*.out"))
            return f"the first step of attempt {self.attempt}. The job wrote:\n{logs}"

        wait_until(stepped, what, limit_s=LIMIT_S)

    def _slurm(self, *command: str) -> str:
        return _finished(self._start(*command)).strip()

    def _start(self, *command: str) -> subprocess.Popen[str]:
        mine = {
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "HYDROSLURM_RUN_DIR": str(self.run.root),
            "SLURM_TIME_FORMAT": "%s",  # epoch seconds, of scontrol too
        }
        return subprocess.Popen(
            command,
            env={**self.cluster.child_environ(), **mine},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def disk_mb_per_s(folder: Path, size_bytes: int) -> float:
    """A plain write + fsync of so many bytes."""
    path = folder / "plain"
    piece = os.urandom(8 << 20)
    begin = time.perf_counter()
    with path.open("xb", buffering=0) as file:
        for start in range(0, size_bytes, len(piece)):
            file.write(piece[: size_bytes - start])
        os.fsync(file.fileno())
    took_s = time.perf_counter() - begin
    path.unlink()
    return size_bytes / took_s / 1e6


def _durable_of(events: Sequence[Event], safe: Event | None) -> Event | None:
    """The commit of the step that the stop came to."""
    for event in events:
        here = safe is not None and event.data.get("checkpoint_step") == safe.step
        if event.kind is EventKind.SAVE_COMMITTED and here:
            return event
    return None


def _first(events: Sequence[Event], kind: EventKind) -> Event | None:
    return next((event for event in events if event.kind is kind), None)


def _last(events: Sequence[Event], kind: EventKind) -> Event | None:
    return _first(events[::-1], kind)


def _between_ms(begin: Event | None, end: Event | None) -> float | None:
    if begin is None or end is None:
        return None
    return (end.mono_ns - begin.mono_ns) / 1e6


def _finished(command: subprocess.Popen[str]) -> str:
    out, said = command.communicate(timeout=LIMIT_S)
    if command.returncode != 0:
        words = " ".join(map(str, command.args)) if isinstance(command.args, (list, tuple)) else ""
        raise RuntimeError(f"`{words}` ended with {command.returncode}: {said.strip()}")
    return out
