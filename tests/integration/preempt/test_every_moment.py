"""Pause and resume from the first to the last moment of a process that was started preemptible."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from processes import captured, child, descendants, wait_until

from hydroslurm.core import registry
from hydroslurm.core.status import read_status
from hydroslurm.devcluster import DevCluster
from hydroslurm.jobs.plan import Plan, Step, TaskPlan
from hydroslurm.runtime import client

RANK = Path(__file__).with_name("at_every_moment.py")
RUN = (sys.executable, "-m", "hydroslurm.cli", "run", "--")
# what stands before Python: a shell that becomes it
START = """#!{shell}
echo $$ > {folder}/pid
: > {folder}/starting
while [ ! -e {folder}/starting-go ]; do sleep 0.05; done
export PYTHONPATH="{folder}:$PYTHONPATH"
exec {python} "$@"
"""
# sitecustomize.py: stands in the middle of the import of torch, whoever imports it
IMPORT = """
import importlib.abc, os, sys, time

class InTheMiddle(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname == "torch.nn":
            sys.meta_path.remove(self)
            open({folder!r} + "/importing", "w").close()
            while not os.path.exists({folder!r} + "/importing-go"):
                time.sleep(0.01)

sys.meta_path.insert(0, InTheMiddle())
"""


class Rank:
    """The process that is signalled.

    Attributes:
        words: its command line.
        send: how it gets a signal.
        ended: why it cannot come to another moment; None as long as it may.
        status: waits for its end; the exit status that somebody who started it sees.
    """

    def __init__(self, folder: Path, *, shell: str = "/bin/bash") -> None:
        self.folder = folder
        start = folder / "start"
        start.write_text(START.format(shell=shell, folder=folder, python=sys.executable))
        start.chmod(0o755)
        (folder / "sitecustomize.py").write_text(IMPORT.format(folder=str(folder)))
        self.words = (str(start), str(RANK), str(folder))
        self.send: Callable[[signal.Signals], None] = lambda signo: os.kill(self.pid, signo)
        self.status: Callable[[], int] = lambda: -1
        self.ended: Callable[[], object] = lambda: None

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    def reach(self, moment: str) -> None:
        """Until it stands there."""
        path = self.folder / moment
        wait_until(lambda: path.exists() or self.ended(), f"{moment}: {self.log()}")
        assert path.exists(), f"ended before {moment}: {self.ended()}\n{self.log()}"

    def go(self, moment: str) -> None:
        (self.folder / f"{moment}-go").touch()

    def is_parked(self) -> bool:
        states = [read_status(path) for path in self.folder.rglob("events/rank-00000.json")]
        return any(state is not None and state.state == "parked" for state in states)

    def wait_parked(self, parked: bool) -> None:
        word = "parked" if parked else "running"
        wait_until(lambda: self.is_parked() is parked or self.ended(), f"{word}\n{self.log()}")
        assert self.is_parked() is parked, f"not {word}: {self.ended()}\n{self.log()}"

    def waits(self, signo: signal.Signals) -> bool:
        """Whether the signal has arrived and is held."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except FileNotFoundError:
            pytest.fail(f"killed by {signo.name}\n{self.log()}")
        (pending,) = (line.split()[1] for line in lines if line.startswith("ShdPnd:"))
        return bool(int(pending, 16) >> (signo - 1) & 1)

    def log(self) -> str:
        files = [p for p in self.folder.rglob("*") if p.suffix in (".out", ".err", ".log")]
        return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in files)


def pause_at_every_moment(rank: Rank) -> None:
    """The same for all that start a rank."""
    for moment in ("starting", "importing"):
        rank.reach(moment)
        rank.send(signal.SIGUSR1)
        wait_until(lambda: rank.waits(signal.SIGUSR1), f"SIGUSR1 while {moment}")
        rank.go(moment)
    # what came before it was installed is in force since
    rank.wait_parked(True)
    rank.send(signal.SIGUSR2)
    rank.wait_parked(False)
    for moment in ("between", "evaluating"):
        rank.reach(moment)
        rank.send(signal.SIGUSR1)
        rank.wait_parked(True)
        rank.send(signal.SIGUSR2)
        rank.wait_parked(False)
        rank.go(moment)
    signal_from(rank, "joining")
    assert rank.status() == 0, rank.log()
    assert len(list(rank.folder.rglob("finished.json"))) == 1


def signal_from(rank: Rank, first: str) -> None:
    """Signal it at each moment from one on, wherever it cannot be paused any more."""
    last = ("evaluating", "joining", "leaving", "finalizing")
    for moment in last[last.index(first) :]:
        rank.reach(moment)
        rank.send(signal.SIGUSR1)
        rank.send(signal.SIGUSR2)
        os.kill(rank.pid, signal.SIGUSR1)  # at once
        os.kill(rank.pid, signal.SIGUSR2)
        rank.go(moment)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


@contextmanager
def running(rank: Rank, *argv: str, environ: dict[str, str]) -> Iterator[None]:
    """A program that has the status of the rank."""
    with (rank.folder / "program.log").open("wb") as log:
        program = subprocess.Popen(
            argv, env=environ, cwd=rank.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    rank.status = lambda: program.wait(120)
    rank.ended = lambda: None if program.poll() is None else f"status {program.returncode}"
    try:
        yield
    finally:
        program.kill()
        program.wait(10)


def test_a_shell_that_empties_its_mask(tmp_path: Path) -> None:
    """dash does when it waits for a command. It lives, what it waits for lives, and the Python that
    it becomes is pausable."""
    rank = Rank(tmp_path, shell="/bin/sh")
    environ = {**os.environ, "HYDROSLURM_RUN_DIR": str(tmp_path / "run")}
    with running(rank, *RUN, *rank.words, environ=environ):
        rank.reach("starting")
        for pid in (rank.pid, *descendants(rank.pid)):
            with suppress(ProcessLookupError):  # a child that has ended since
                os.kill(pid, signal.SIGUSR1)
        rank.go("starting")
        rank.reach("importing")
        rank.send(signal.SIGUSR1)
        rank.go("importing")
        rank.wait_parked(True)
        rank.send(signal.SIGUSR2)
        rank.wait_parked(False)
        rank.reach("between")


IN_A_THREAD = """
import os, signal, threading

thread = threading.Thread(target=lambda: __import__("torch"))
thread.start()
thread.join()
import torch, hydroslurm
while not os.path.exists("go"):
    torch.ones(2) + 1
hydroslurm.uninstall()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGUSR1)
print("alive")
"""


def test_torch_imported_by_a_thread(tmp_path: Path) -> None:
    """The main thread goes on holding the signals, and the rank is pausable all the same; after
    uninstall() it does not die of them."""
    with child(IN_A_THREAD, tmp_path, prefix=RUN) as program:
        wait_until(lambda: registry.find(registry.folder(os.environ), program.pid), "installed")
        assert client.pause(program.pid, timeout_s=60).done
        assert client.resume(program.pid, timeout_s=60).done
        (tmp_path / "go").touch()
        program.expect("alive")
        assert program.wait() == 0


@pytest.mark.parametrize(("said", "held"), [("pause", True), ("off", False)])
def test_the_wrapper_of_a_task(tmp_path: Path, said: str, held: bool) -> None:
    """What it becomes has the pauses blocked and ignored, and an init step before it too; a task
    that is not to be preemptible finds them as ever."""
    argv = ("grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")
    environ, init = (("HYDROSLURM_PREEMPT", said),), (Step("first", argv),)
    task = TaskPlan("worker-0", 0, argv, environ, str(tmp_path), init=init)
    plan = tmp_path / "plan.json"
    plan.write_text(Plan(1, 1, None, 0, (task,)).dumps())
    asked = {**os.environ, "HYDROSLURM_PREEMPT": "pause", "SLURM_PROCID": "0"}
    command = [sys.executable, "-m", "hydroslurm.jobs.task", plan]
    done = captured(command, env=asked, timeout=120)
    masks = [int(line.split()[1], 16) for line in done.stdout.splitlines()]
    both = 1 << (signal.SIGUSR1 - 1) | 1 << (signal.SIGUSR2 - 1)
    assert [mask & both for mask in masks] == [both if held else 0] * 4, done.stdout


def test_hydroslurm_run(rank: Rank) -> None:
    """Behind `hydroslurm run`, without a Slurm."""
    environ = {**os.environ, "HYDROSLURM_RUN_DIR": str(rank.folder / "run")}
    with running(rank, *RUN, *rank.words, environ=environ):
        pause_at_every_moment(rank)


@contextmanager
def below_srun(rank: Rank, cluster: DevCluster, *words: str, **environ: str) -> Iterator[None]:
    """With srun's options, and the program that they end with; signalled as its owner would."""
    name = rank.folder.name

    def send(signo: signal.Signals) -> None:
        job = cluster.run(["squeue", "-h", "-n", name, "-o", "%i"]).stdout.strip()
        cluster.run(["scancel", f"--signal={signo.name[3:]}", job], check=False)

    rank.send = send
    environ = {**os.environ, **environ, "HYDROSLURM_RUN_DIR": str(rank.folder / "run")}
    argv = ("srun", "-J", name, "-n1", *words)
    with running(rank, *argv, environ=cluster.child_environ(environ)):
        yield


@pytest.mark.slurm
def test_srun_preempt(rank: Rank, pause_cluster: DevCluster) -> None:
    """Behind `srun --preempt`: also before the first line of Python. Here with the other gate."""
    with below_srun(rank, pause_cluster, "--preempt", *rank.words, HYDROSLURM_GATE="hooks"):
        pause_at_every_moment(rank)


@pytest.mark.slurm
def test_plain_srun(rank: Rank, pause_cluster: DevCluster) -> None:
    """Nobody has asked for it but the script, by its Run: behind that no pause kills it."""
    with below_srun(rank, pause_cluster, *rank.words):
        for moment in ("starting", "importing", "between"):
            rank.reach(moment)
            rank.go(moment)
        signal_from(rank, "evaluating")
        assert rank.status() == 0, rank.log()
    assert len(list(rank.folder.rglob("finished.json"))) == 1


@pytest.mark.slurm
@pytest.mark.long
def test_agent(rank: Rank, pause_cluster: DevCluster) -> None:
    """A worker of `hydroslurm agent`, which asks for it where nobody else has."""
    agent = [sys.executable, "-m", "hydroslurm.cli", "agent", "--"]
    agent += ["--standalone", "--nproc-per-node=1", "--max-restarts=0", "--no-python"]
    with below_srun(rank, pause_cluster, *agent, *rank.words):
        pause_at_every_moment(rank)
