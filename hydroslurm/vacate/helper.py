"""The process that calls CUDA's checkpoint API for a rank.

Why another process: the API locks the process it is called for, so that this would call into a
driver that it has locked itself; NVIDIA names a controlling process as its use, and every known
user has one. It stays, because attaching to the driver takes seconds. A call that hangs hangs here,
and is left behind by killing this process.

One line of JSON asks and one answers: ``["lock", PID, TIMEOUT_MS]`` -> ``["ok", ""]``. It ends with
its input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

_IGNORED = ("SIGTSTP", "SIGTERM", "SIGINT", "SIGHUP", "SIGURG", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""The rank decides when this ends, and a job step's signals go to all of its processes."""

AT_WORK = "at work"
"""The state of a process that is on its way to another, where the bindings have no word for it."""


class Refused(Exception):
    """The driver's answer to a call is an error; its name."""


class CudaApi:
    """CUDA's checkpoint API in ``cuda-bindings``."""

    def __init__(self) -> None:
        """Raises Refused or ImportError where this node cannot."""
        from cuda.bindings import driver

        self._driver: Any = driver
        self._call("cuInit", 0)  # restoring wants it in the caller

    def lock(self, pid: int, timeout_ms: int) -> None:
        arguments = self._driver.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        self._call("cuCheckpointProcessLock", pid, arguments)

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int) -> None:
        self._call("cuCheckpointProcessRestore", pid, None)

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    def state(self, pid: int) -> str:
        try:
            (found,) = self._call("cuCheckpointProcessGetState", pid)
        except (
            ValueError
        ):  # of a driver newer than the bindings: those that came later are on the way
            return AT_WORK
        return str(found.name).removeprefix("CU_PROCESS_STATE_").lower()

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        function = getattr(self._driver, name, None)
        if function is None:
            raise Refused(f"cuda-bindings has no {name}; wanted 12.8 or newer")
        try:
            result, *rest = function(*arguments)
        except RuntimeError as error:  # the installed driver is older than the bindings
            raise Refused(f"{name}: {error}") from error
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise Refused(f"{name}: {result.name}")
        return tuple(rest)


def serve(make: Callable[[], Any], *, source: TextIO, out: TextIO) -> None:
    """Answer until the input ends. The first line says whether the API is there at all."""

    def answer(word: str, text: str) -> None:
        out.write(json.dumps([word, text]) + "\n")
        out.flush()

    try:
        api = make()
    except Exception as error:  # a library that is damaged raises anything
        answer("unable", f"{type(error).__name__}: {error}")
        return
    answer("ready", "")
    for line in source:
        verb, pid, *rest = json.loads(line)
        try:
            answer("ok", getattr(api, verb)(pid, *rest) or "")
        except Refused as error:
            answer("refused", str(error))


def main() -> None:
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    # the driver prints to stdout what is not for the rank
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(CudaApi, source=sys.stdin, out=out)


if __name__ == "__main__":
    main()
