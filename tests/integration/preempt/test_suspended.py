"""A script that nobody wrote for hydroslurm, suspended again and again on a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import is_stopped, patience, wait_until

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

SCRIPT = Path(__file__).with_name("another_style.py")
EPOCHS = 6
SUSPENDS = 4
LIMIT_S = 120.0


class Job:
    """The script below srun, in a folder of its own, to which its files and its run folder go."""

    def __init__(self, cluster: DevCluster, folder: Path, *srun: str) -> None:
        folder.mkdir()
        self.cluster, self.folder = cluster, folder
        names = ("PYTHONPATH",)  # the rest of this process's environment is not the user's
        kept = {name: value for name, value in os.environ.items() if name not in names}
        options = ("-J", folder.name, "-o", "out", "-e", "err", *srun)
        self.process = subprocess.Popen(
            ["srun", *options, sys.executable, "-u", SCRIPT, "--epochs", str(EPOCHS)],
            cwd=folder,
            env=cluster.child_environ({**kept, "XDG_RUNTIME_DIR": str(folder)}),
        )

    def finish(self) -> Job:
        """Wait for its good end."""
        assert self.process.wait(patience(LIMIT_S)) == 0, self.said("err")
        return self

    def said(self, stream: str = "out") -> str:
        path = self.folder / stream
        return path.read_text() if path.exists() else ""

    @property
    def learnt(self) -> list[str]:
        """The loss and the hash after each epoch."""
        return epochs(self.said())

    def events(self, *kinds: EventKind) -> list[Event]:
        """Of all its ranks, if there are any."""
        for folder in self.folder.glob("hydroslurm-runs/*"):
            files = RunDir(folder).rank_event_files().values()
            found = [one for path in files for one in read_events(path)]
            return [one for one in found if not kinds or one.kind in kinds]
        return []

    def suspend(self, *, epoch: int) -> None:
        """In that epoch at the earliest; resume it once it has parked and Slurm has stopped it."""
        wait_until(lambda: len(self.learnt) >= epoch, f"epoch {epoch}", limit_s=LIMIT_S)
        parked = self._scontrol("suspend", EventKind.PARKED)
        wait_until(lambda: is_stopped(parked.pid), "Slurm's SIGSTOP", limit_s=LIMIT_S)
        self._scontrol("resume", EventKind.RESUMED)

    def _scontrol(self, verb: str, kind: EventKind) -> Event:
        """What the rank writes down because of it."""
        listed = ["squeue", "-h", "-n", self.folder.name, "-o", "%i"]
        before = len(self.events(kind))
        self.cluster.run(["scontrol", verb, self.cluster.run(listed).stdout.strip()])
        wait_until(lambda: len(self.events(kind)) > before, kind.value, limit_s=LIMIT_S)
        return self.events(kind)[-1]


def epochs(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("epoch")]


@pytest.fixture(scope="module")
def alone(pause_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Under way without the option."""
    folder = tmp_path_factory.mktemp("suspended") / "left-alone"
    job = Job(pause_cluster, folder)
    yield job
    job.process.kill()


def test_suspended_again_and_again_under_srun(
    alone: Job, pause_cluster: DevCluster, tmp_path: Path
) -> None:
    """It parks between operators each time, and learns bit for bit what it learns left alone. No
    other process of it is a rank: DataLoader workers are not. Nothing of ours is printed."""
    job = Job(pause_cluster, tmp_path / "suspended", "--preempt")
    for number in range(SUSPENDS):
        job.suspend(epoch=number + 1)
    job.finish()
    # held at once, or, when it waited for its data just then, as soon as it came to an operator
    assert [event.data["held"] for event in job.events(EventKind.RESUMED)] == [1] * SUSPENDS
    (pid,) = {event.pid for event in job.events()}
    assert f"pid {pid}\n" in job.said()
    assert len(job.learnt) == EPOCHS
    assert job.learnt == alone.finish().learnt
    assert "hydroslurm" not in job.said("err")
