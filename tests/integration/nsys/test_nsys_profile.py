"""sbatch/nsys_profile.sh: the command below nsys is what it would be without it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import captured, child

SCRIPT = str(Path(__file__).resolve().parents[3] / "sbatch" / "nsys_profile.sh")


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """The only folder of PATH: what the script needs, and no nsys."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "sh", "dirname", "readlink", "mkdir"):
        (folder / name).symlink_to(shutil.which(name) or "/nowhere")
    (folder / "python").symlink_to(sys.executable)
    return folder


def profiled(folder: Path, path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [SCRIPT, *command],
        cwd=folder,
        env={"PATH": str(path), "PYTHON": str(path / "python")},
        timeout=60,
    )


def test_without_nsys_the_command_runs_as_it_is(tmp_path: Path, bare_path: Path) -> None:
    """A profile is no reason to lose a job; it is said what is missing."""
    done = profiled(tmp_path, bare_path, "sh", "-c", "echo trained; exit 75")
    assert (done.stdout, done.returncode) == ("trained\n", 75)
    assert done.stderr == "nsys_profile.sh: no nsys on PATH; running without\n"


def test_where_nsys_does_not_start_the_command_runs_without(
    tmp_path: Path, bare_path: Path
) -> None:
    """nsys fails before the command has begun, as several that start at once do: it is tried again,
    and then left away."""
    nsys = bare_path / "nsys"
    nsys.write_text('#!/bin/sh\necho "started" >>tries\nexit 1\n')
    nsys.chmod(0o755)
    done = profiled(tmp_path, bare_path, "sh", "-c", "echo trained; exit 75")
    assert (done.stdout, done.returncode) == ("trained\n", 75)
    assert "nsys does not start; running without" in done.stderr
    assert (tmp_path / "tries").read_text() == "started\n" * 4


def test_signals_reach_the_command_and_not_nsys(nsys: str, tmp_path: Path) -> None:
    """A real nsys, and signals to the task alone, as under proctrack/cgroup: each is heard,
    the status of the command is kept, and there is a report."""
    code = """
        import signal, sys
        def heard(number, frame):
            print("heard", signal.Signals(number).name, flush=True)
            if number == signal.SIGTERM:
                sys.exit(75)
        for name in ("USR1", "USR2", "TSTP", "CONT", "URG", "TERM"):
            signal.signal(getattr(signal, f"SIG{name}"), heard)
        print("ready", flush=True)
        while True:
            signal.pause()
    """
    environ = {"HYDROSLURM_RUN_DIR": str(tmp_path / "run"), "PYTHON": sys.executable}
    environ |= {"PATH": f"{Path(nsys).parent}:{os.environ['PATH']}", "SLURM_PROCID": "3"}
    with child(code, tmp_path, environ=environ, prefix=(SCRIPT,)) as task:
        task.expect("ready")
        for name in ("SIGUSR1", "SIGUSR2", "SIGURG", "SIGTSTP", "SIGCONT", "SIGTERM"):
            task.signal(getattr(signal, name))
            task.expect(f"heard {name}")
        assert task.wait() == 75
    assert (tmp_path / "run" / "profile" / "rank-3-restart-0.nsys-rep").stat().st_size > 0
