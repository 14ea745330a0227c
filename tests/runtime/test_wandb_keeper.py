"""Programs that Slurm's signals for the rank must not reach: they end with the rank, and not
before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import child, descendants, has_ended, wait_until

from hydroslurm.runtime import wandb_keeper
from hydroslurm.runtime.children import wandb_shielded

CORE = textwrap.dedent(
    f"""\
    #!{sys.executable}
    import os, sys, time

    # as wandb-core: dies of SIGTERM, and ends when its parent is not the process that it was told
    parent = int(sys.argv[sys.argv.index("--pid") + 1])
    with open("started.part", "w") as started:
        print(os.getpid(), parent, os.getppid(), file=started)
    os.rename("started.part", "started")
    while os.getppid() == parent and not os.path.exists("end"):
        time.sleep(0.02)
    sys.exit(7)
    """
)
RANK = """
import os, subprocess, sys
from hydroslurm.runtime.children import wandb_shielded
with wandb_shielded({15}):
    subprocess.Popen([sys.argv[1], "--pid", str(os.getpid())])
print("ready")
sys.stdin.read()
"""


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program of that name, and its folder as the current one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "wandb-core"
    path.write_text(CORE)
    path.chmod(0o755)
    yield path
    (tmp_path / "end").touch()


def started() -> tuple[int, int, int]:
    """Its pid, the parent that it was told, and the one it has."""
    wait_until(Path("started").exists, "its start")
    pid, told, has = map(int, Path("started").read_text().split())
    return pid, told, has


def test_a_signal_for_all_below_the_rank_does_not_reach_it(core: Path) -> None:
    """Whoever has started it sees it end when it does, with its exit status; another program is
    started as ever."""
    with wandb_shielded({signal.SIGTERM}):
        program = subprocess.Popen([core, "--pid", str(os.getpid())])
        other = subprocess.Popen(["sleep", "100"])
    pid, told, has = started()
    assert told == has != os.getpid()
    assert pid not in descendants(os.getpid())
    assert program.args == [core, "--pid", str(os.getpid())]
    for one in (program.pid, *descendants(program.pid), other.pid):
        os.kill(one, signal.SIGTERM)
    assert other.wait(60) == -signal.SIGTERM
    assert program.poll() is None
    Path("end").touch()
    assert program.wait(60) == 7
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_it_ends_with_the_rank(core: Path, tmp_path: Path) -> None:
    """Killed with all below it, the rank leaves nobody behind."""
    with child(RANK, tmp_path, str(core)) as rank:
        rank.expect("ready")
        pid, keeper, _ = started()
        for one in (rank.pid, *descendants(rank.pid)):
            os.kill(one, signal.SIGKILL)
        wait_until(lambda: has_ended(pid) and has_ended(keeper), "the end of both")


def test_a_kernel_without_pidfd_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked once in a while."""
    monkeypatch.delattr(os, "pidfd_open")
    first, second = (subprocess.Popen(["sleep", "100"]) for _ in range(2))
    second.kill()
    second.wait()
    wandb_keeper._wait_for_either(first.pid, second.pid)
    assert first.poll() is None
    first.kill()
    wandb_keeper._wait_for_either(first.pid, os.getpid())
    assert first.wait() == -signal.SIGKILL
