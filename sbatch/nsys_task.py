"""Runs a command below nsys so that a job's signals reach the command, and never nsys.

    nsys_task.py NSYS profile ... -- COMMAND ...         called by nsys_profile.sh

What Slurm sends to a task is meant for the rank. nsys 2022.4 dies of SIGUSR1 and SIGUSR2 and
leaves no report; SIGTERM makes it end the rank before that has saved. And where Slurm signals its
direct children only (proctrack/cgroup), the rank below nsys hears of nothing. So the task is this
process. It blocks the signals, which nsys inherits with all its helpers and does not undo; hands
on what it gets, unless Slurm signals every process of the job step (proctrack/linuxproc); and the
command runs below a second start of this file, which unblocks them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

HANDED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGURG,
    signal.SIGTSTP,
    signal.SIGCONT,
)
TARGET = "--target"
STARTS = 4
"""nsys 2022.4 fails now and then when several start at once on a node ("sem_open"), before the
command has begun: so it may be tried again. A rank is never lost for its profile."""


def main(argv: list[str]) -> int:
    """The status of the command: nsys leaves with it."""
    cut = argv.index("--")
    command = argv[cut + 1 :]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*HANDED_ON, signal.SIGCHLD})
    # ignored, as it is by default, it would not be waited for
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signals = Signals()
    for _ in range(STARTS):
        with tempfile.TemporaryDirectory(prefix="nsys-task-") as folder:
            signals.pid_file = Path(folder, "pid")
            shim = [sys.executable, "-I", "-S", __file__, TARGET, str(signals.pid_file)]
            words = ",".join(str(int(s)) for s in mask)
            nsys = subprocess.Popen([*argv[:cut], *shim, words, *command])
            while nsys.poll() is None:
                signals.hand_on()
            if signals.pid_file.exists():
                return nsys.returncode if nsys.returncode >= 0 else 128 - nsys.returncode
    print("nsys_task: nsys does not start; running without", file=sys.stderr, flush=True)
    for signo in signals.waiting:
        os.kill(os.getpid(), signo)
    become(mask, command)
    return 127


class Signals:
    """What this process gets, and the command has not got by itself."""

    def __init__(self) -> None:
        self.pid_file = Path()
        self.waiting: list[int] = []
        self._config = ""
        self._scontrol: subprocess.Popen[str] | None = None
        if "SLURM_JOB_ID" in os.environ and shutil.which("scontrol"):
            self._scontrol = subprocess.Popen(  # the answer is read when it is needed
                ["scontrol", "show", "config"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def hand_on(self) -> None:
        """Wait for a signal, SIGCHLD among them, and send what waits to the command if it runs."""
        wanted = {*HANDED_ON, signal.SIGCHLD}
        limit_s = 0.05 if self.waiting else 3600
        info = signal.sigtimedwait(wanted, limit_s)
        pid = self._command_pid()
        if info is None or info.si_signo == signal.SIGCHLD:
            pass
        elif pid is None or not self._everybody_got_it(info.si_pid):
            self.waiting.append(info.si_signo)
        if pid is not None:
            for signo in self.waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signo)
            self.waiting.clear()

    def _command_pid(self) -> int | None:
        """None: it has not begun yet."""
        try:
            return int(self.pid_file.read_text())
        except (OSError, ValueError):
            return None

    def _everybody_got_it(self, sender_pid: int) -> bool:
        """False also while nobody knows: twice is better than never."""
        try:
            sender = Path(f"/proc/{sender_pid}/comm").read_text().strip()
        except OSError:
            return False
        if sender != "slurmstepd":
            return False
        if self._scontrol is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._config, _ = self._scontrol.communicate(timeout=1)
                self._scontrol = None
        return re.search(r"^ProctrackType *= proctrack/linuxproc$", self._config, re.M) is not None


def become(mask: Iterable[int], command: list[str]) -> None:
    """The command in this process's place, with the signals that the task was started with."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"nsys_task: {command[0]}: {error.strerror}")


def begin_command(pid_file: str, mask: str, command: list[str]) -> None:
    made = Path(f"{pid_file}.new")
    made.write_text(str(os.getpid()))
    made.rename(pid_file)
    become([int(s) for s in mask.split(",") if s], command)


if __name__ == "__main__":
    if sys.argv[1] == TARGET:
        begin_command(sys.argv[2], sys.argv[3], sys.argv[4:])
    sys.exit(main(sys.argv[1:]))
