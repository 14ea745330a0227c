"""A model of CUDA's checkpoint API: its states, its errors, and a driver that hangs. Pure but for
the file that keeps the states, as a driver does while the processes that ask it come and go.

Run as a program it is a helper: ``python model.py FOLDER``. In the folder:

    <pid>        the state of that process, a word of cuda.h in lower case; running if missing
    faults.json  [[CALL, NTH, HOW], ...]: the nth such call, from 1, over all processes, goes wrong.
                 refuse  an error, and nothing has changed
                 fail    an error, and the process is FAILED
                 late    it has worked, and the answer never comes
                 hang    nothing happens, and the answer never comes
                 die     the helper dies in it, before it has done anything
    calls        CALL PID for each call, in order
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from hydroslurm.vacate.helper import Refused, serve

STEPS = {
    "lock": ("running", "locked"),
    "checkpoint": ("locked", "checkpointed"),
    "restore": ("checkpointed", "locked"),
    "unlock": ("locked", "running"),
}
FAULTS = ("refuse", "fail", "late", "hang", "die")


class Model:
    """The API over the states in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def lock(self, pid: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self._step("lock", pid)

    def checkpoint(self, pid: int) -> None:
        self._step("checkpoint", pid)

    def restore(self, pid: int) -> None:
        self._step("restore", pid)

    def unlock(self, pid: int) -> None:
        self._step("unlock", pid)

    def state(self, pid: int) -> str:
        self._fault("state", pid)
        return state_of(self._folder, pid)

    def _step(self, call: str, pid: int) -> None:
        before, after = STEPS[call]
        how = self._fault(call, pid)
        if state_of(self._folder, pid) != before:
            raise Refused("CUDA_ERROR_ILLEGAL_STATE")
        (self._folder / str(pid)).write_text(after)
        if how == "late":
            _hang()

    def _fault(self, call: str, pid: int) -> str:
        calls = self._folder / "calls"
        with calls.open("a") as file:
            file.write(f"{call} {pid}\n")
        number = sum(line.startswith(f"{call} ") for line in calls.read_text().splitlines())
        faults = json.loads((self._folder / "faults.json").read_text())
        how = next((h for c, nth, h in faults if c == call and nth in (number, 0)), "")
        if how == "hang":
            _hang()
        if how == "die":
            os._exit(3)
        if how in ("refuse", "fail"):
            if how == "fail":
                (self._folder / str(pid)).write_text("failed")
            raise Refused(f"CUDA_ERROR_UNKNOWN in {call}")
        return str(how)


def state_of(folder: Path, pid: int) -> str:
    """Where the model has that process's memory."""
    try:
        return (folder / str(pid)).read_text()
    except FileNotFoundError:
        return "running"


def _hang() -> None:
    while True:
        time.sleep(60)


if __name__ == "__main__":
    for name in ("SIGTSTP", "SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    serve(lambda: Model(Path(sys.argv[1])), source=sys.stdin, out=sys.stdout)
