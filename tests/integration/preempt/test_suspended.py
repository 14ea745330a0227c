"""A script that nobody wrote for hydroslurm, suspended again and again on a real Slurm."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import wait_until
from stories import Stories, stories

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster
from hydroslurm.runtime import client

pytestmark = pytest.mark.slurm

SCRIPT = Path(__file__).with_name("another_style.py")
TRAIN = [sys.executable, "-u", str(SCRIPT), "--epochs", "6"]
SHORT = [*TRAIN[:-1], "4"]
SUSPENDS = 4
LIMIT_S = 120.0
ENDS_WITHIN_S = 600.0


@dataclass(frozen=True)
class Ending:
    """What became of one way to run the script.

    Attributes:
        said: what its ranks printed, one text for each job step.
        events: of all its ranks.
        errors: of srun and of Python.
    """

    said: tuple[str, ...]
    events: tuple[Event, ...] = ()
    errors: str = ""

    @property
    def learnt(self) -> list[list[str]]:
        """The loss and the hash after each epoch, of each rank."""
        return [_epochs(said) for said in self.said]

    def held(self, *, rank: int = 0) -> int:
        """In how many pauses the rank was held at an operator: at once, or, when it waited for its
        data just then, as soon as it came to one."""
        return sum(
            event.kind is EventKind.RESUMED and event.rank == rank and event.data["held"] == 1
            for event in self.events
        )

    @property
    def pids(self) -> set[int]:
        """Of all processes that have become ranks."""
        return {event.pid for event in self.events}

    @property
    def trained_pids(self) -> set[int]:
        """Of those that trained, as they said themselves."""
        lines = [line for said in self.said for line in said.splitlines()]
        return {int(line.split()[1]) for line in lines if line.startswith("pid ")}


def _epochs(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("epoch")]


class Job:
    """A running job in a folder of its own, to which its files and its run folder go."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        folder.mkdir()
        names = ("PYTHONPATH",)  # the rest of this process's environment is not the user's
        kept = {name: value for name, value in os.environ.items() if name not in names}
        self.environ = cluster.child_environ({**kept, "XDG_RUNTIME_DIR": str(folder)})

    def start(self, *argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            argv,
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def said(self, step: str) -> str:
        path = self.folder / step
        return path.read_text() if path.exists() else ""

    def number(self) -> str:
        """Its job id, once Slurm has given it one."""
        wait_until(self._listed, "the job in squeue", limit_s=LIMIT_S)
        return self._listed()

    def _listed(self) -> str:
        asked = ["squeue", "-h", "-n", self.folder.name, "-o", "%i"]
        return self.cluster.run(asked).stdout.strip()

    def events(self, job_id: str) -> list[Event]:
        run = RunDir(self.folder / "hydroslurm-runs" / job_id)
        return [one for path in run.rank_event_files().values() for one in read_events(path)]

    def suspend(self, job_id: str, *logs: str, epoch: int, pauses: int) -> None:
        """Suspend it, in that epoch of each of these ranks at the earliest; wait until its first
        rank has parked for this many times and Slurm has stopped it; resume it."""

        def seen(kind: EventKind) -> list[Event]:
            return [e for e in self.events(job_id) if e.kind is kind and e.rank == 0]

        for log in logs:
            wait_until(lambda log=log: len(_epochs(self.said(log))) >= epoch, log, limit_s=LIMIT_S)
        self.cluster.run(["scontrol", "suspend", job_id])
        wait_until(lambda: len(seen(EventKind.PARKED)) == pauses, "parked", limit_s=LIMIT_S)
        pid = seen(EventKind.PARKED)[-1].pid
        wait_until(lambda: _state(pid) == "T", "Slurm's SIGSTOP", limit_s=LIMIT_S)
        self.cluster.run(["scontrol", "resume", job_id])
        wait_until(lambda: len(seen(EventKind.RESUMED)) == pauses, "resumed", limit_s=LIMIT_S)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _finish(process: subprocess.Popen[str]) -> str:
    """Wait for a good end; what it wrote to stderr."""
    out, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + errors
    return errors


def _left_alone(cluster: DevCluster, folder: Path) -> Ending:
    """Without the option; Python says what it imports."""
    job = Job(cluster, folder)
    python = [TRAIN[0], "-X", "importtime", *TRAIN[1:]]
    srun = job.start("srun", "-J", folder.name, "-o", "out", "-e", "err", *python)
    _finish(srun)
    assert not (folder / "hydroslurm-runs").exists()
    return Ending((job.said("out"),), errors=job.said("err"))


def _under_srun(cluster: DevCluster, folder: Path) -> Ending:
    """``srun --preempt``, suspended again and again."""
    job = Job(cluster, folder)
    srun = job.start("srun", "--preempt", "-J", folder.name, "-o", "out", "-e", "err", *TRAIN)
    job_id = job.number()
    for number in range(SUSPENDS):
        job.suspend(job_id, "out", epoch=number + 1, pauses=number + 1)
    _finish(srun)
    return Ending((job.said("out"),), tuple(job.events(job_id)), job.said("err"))


def _under_sbatch(cluster: DevCluster, folder: Path) -> Ending:
    """``sbatch --preempt``, with a job step of one rank and then one of two; each suspended
    twice."""
    job = Job(cluster, folder)
    train = " ".join(SHORT)
    (folder / "job.sh").write_text(
        "#!/bin/bash\nset -e\n"
        f"srun -n1 -o first -e first.err {train}\n"
        f"srun -n2 -o second-%t -e second-%t.err {train}\n"
    )
    options = ["--preempt", "-n2", "--parsable", "-o", "batch", "-J", folder.name]
    sbatch = job.start("sbatch", *options, "--wait", "job.sh")
    job_id = job.number()
    first, second = ("first",), ("second-0", "second-1")
    for number, logs in enumerate([first, first, second, second]):
        job.suspend(job_id, *logs, epoch=1 + number % 2, pauses=number + 1)
    _finish(sbatch)
    said = tuple(job.said(step) for step in ("first", "second-0", "second-1"))
    errors = "".join(job.said(f"{step}.err") for step in ("first", "second-0", "second-1"))
    return Ending(said, tuple(job.events(job_id)), errors + job.said("batch"))


WAYS = {"left-alone": _left_alone, "srun": _under_srun, "sbatch": _under_sbatch}


@pytest.fixture(scope="module")
def endings(
    pause_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stories[Ending]]:
    """All ways at once: most of their time Slurm waits."""
    folder = tmp_path_factory.mktemp("suspended")
    told = {name: functools.partial(way, pause_cluster) for name, way in WAYS.items()}
    with stories(told, folder, clusters=(pause_cluster,), at_a_time=len(told)) as under_way:
        yield under_way


def test_suspended_again_and_again_under_srun(endings: Stories[Ending]) -> None:
    """It parks between operators each time, and learns bit for bit what it learns left alone. No
    other process of it is a rank: DataLoader workers are not."""
    ending = endings.result("srun", ENDS_WITHIN_S)
    assert ending.held() == SUSPENDS
    assert ending.pids == ending.trained_pids
    assert len(ending.learnt[0]) == 6
    assert ending.learnt == endings.result("left-alone", ENDS_WITHIN_S).learnt


def test_the_option_of_sbatch_reaches_the_sruns_inside(
    endings: Stories[Ending],
) -> None:
    """Each rank of both job steps parks, and learns the same."""
    ending = endings.result("sbatch", ENDS_WITHIN_S)
    assert ending.held() == 4
    assert ending.held(rank=1) == 2
    assert len(ending.trained_pids) == 3
    assert ending.pids == ending.trained_pids
    alone = endings.result("left-alone", ENDS_WITHIN_S).learnt[0]
    assert ending.learnt == [alone[:4]] * 3


def test_without_the_option_there_is_nothing_of_ours(
    endings: Stories[Ending],
) -> None:
    """A job that does not ask for it imports no module of ours."""
    errors = endings.result("left-alone", ENDS_WITHIN_S).errors
    assert "torch.autograd" in errors
    assert "hydroslurm" not in errors


def test_nobody_is_told_anything(endings: Stories[Ending]) -> None:
    """Where all is well, nothing of ours is printed."""
    for name in ("srun", "sbatch"):
        assert "hydroslurm" not in endings.result(name, ENDS_WITHIN_S).errors


def test_hydroslurm_run_does_the_same_without_slurm(
    endings: Stories[Ending], tmp_path: Path
) -> None:
    """Paused and resumed by its pid, which is that of the command, it learns the same."""
    argv = [sys.executable, "-m", "hydroslurm.cli", "run", "--", *SHORT]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == f"pid {training.pid}\n"
        epochs = []
        for _ in range(3):
            epochs.append(training.stdout.readline())
            assert client.pause(training.pid, timeout_s=LIMIT_S).done
            assert client.resume(training.pid, timeout_s=LIMIT_S).done
        epochs.append(training.stdout.read())
    assert training.returncode == 0
    assert _epochs("".join(epochs)) == endings.result("left-alone", ENDS_WITHIN_S).learnt[0][:4]
