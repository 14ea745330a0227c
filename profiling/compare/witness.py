"""Write down which signals reach this job step, and when: ``witness.py FILE``.

Started by a training as its child, it gets what the training gets (proctrack/linuxproc signals
every process of a job step), and dies with it. A line each: ``signal NUMBER NS``, CLOCK_MONOTONIC.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
WATCHED = {
    signal.SIGTSTP,
    signal.SIGCONT,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGURG,
}


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
    while os.getppid() != 1:
        seen = signal.sigwaitinfo(WATCHED).si_signo
        os.write(file, f"signal {seen} {time.monotonic_ns()}\n".encode())


if __name__ == "__main__":
    main()
