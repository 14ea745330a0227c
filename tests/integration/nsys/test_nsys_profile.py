"""sbatch/nsys_profile.sh: the command below nsys is what it would be without it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from processes import captured, child

from hydroslurm.gate import open_gate

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


def test_where_nsys_does_not_start_the_command_runs_without(
    tmp_path: Path, bare_path: Path
) -> None:
    """A profile is no reason to lose a job: it is said what is missing. Where nsys fails before the
    command has begun, as several that start at once do, it is tried again, and then left away."""
    command = ("sh", "-c", "echo trained; exit 75")
    done = profiled(tmp_path, bare_path, *command)
    assert (done.stdout, done.returncode) == ("trained\n", 75)
    assert done.stderr == "nsys_profile.sh: no nsys on PATH; running without\n"
    nsys = bare_path / "nsys"
    nsys.write_text('#!/bin/sh\necho "started" >>tries\nexit 1\n')
    nsys.chmod(0o755)
    done = profiled(tmp_path, bare_path, *command)
    assert (done.stdout, done.returncode) == ("trained\n", 75)
    assert "nsys does not start; running without" in done.stderr
    assert (tmp_path / "tries").read_text() == "started\n" * 4


def test_the_line_of_hydrojobsche(nsys: str, tmp_path: Path) -> None:
    """``nsys profile python train.py``, where the script pauses and resumes itself by signals and
    marks both: the report has its marks and our pause, and no GPU is needed. There are no samples:
    where it may take none, nsys 2022.4 often waits for its sampler forever at the end."""
    open_gate("native")  # builds it, without nsys in the compiler
    script = tmp_path / "train.py"
    script.write_text(
        "import os, threading, time, torch\n"
        "from hydroslurm import nvtx_mark, od_execution_wrapper, send_signal\n"
        "model, done = od_execution_wrapper(torch.nn.Linear(2, 2)), threading.Event()\n"
        "def notify():\n"
        "    for action, state in ('pause', 'PARKED'), ('resume', 'RUNNING'):\n"
        "        nvtx_mark(f'script: {action}')\n"
        "        send_signal(os.getpid(), action)\n"
        "        while model.controller.state.name != state:\n"
        "            time.sleep(0.001)\n"
        "    done.set()\n"
        "threading.Thread(target=notify).start()\n"
        "while not done.is_set():\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
    )
    report = tmp_path / "report"
    profile = [nsys, "profile", f"--output={report}", "--trace=nvtx"]
    profile += ["--sample=none", "--cpuctxsw=none", sys.executable, str(script)]
    traced = captured(profile, cwd=tmp_path, timeout=100)
    assert traced.returncode == 0, traced.stderr
    exported = [nsys, "export", "--type=sqlite", f"--output={report}.sqlite", f"{report}.nsys-rep"]
    assert captured(exported, cwd=tmp_path, timeout=100).returncode == 0
    with contextlib.closing(sqlite3.connect(f"{report}.sqlite")) as tables:
        events = tables.execute(
            "SELECT coalesce(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON textId = id"
        )
        names = {name for (name,) in events}
    assert {"script: pause", "script: resume", "pausing"} <= names


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
