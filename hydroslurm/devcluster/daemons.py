"""One daemon of a dev cluster: started, watched, and asked what it said last."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.devcluster.layout import Layout
from hydroslurm.devcluster.processes import ProcessId, die_with_parent
from hydroslurm.errors import ClusterError

_TAIL_LINES = 12


@dataclass(frozen=True)
class Daemon:
    """A daemon in the foreground, as a child of the supervisor.

    Attributes:
        log: all that it says, quoted when it dies.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def id(self) -> ProcessId | None:
        return ProcessId.of(self.process.pid)

    def check(self) -> None:
        """Make sure that it runs.

        Raises:
            ClusterError: it has ended; the message has its own last log lines.
        """
        status = self.process.poll()
        if status is not None:
            raise ClusterError(
                f"{self.name} ended while the cluster was starting, {_ending(status)}. "
                f"{self.tail_words()}"
            )

    def tail_words(self) -> str:
        """Its last log lines, with their origin."""
        lines = "".join(f"\n  {line}" for line in tail(self.log))
        return f"The last lines of {self.log}:{lines or ' (it is empty)'}"


def start(
    name: str,
    argv: Sequence[str],
    *,
    layout: Layout,
    environ: Mapping[str, str],
    own_log: bool = False,
) -> Daemon:
    """Start a daemon that stays in the foreground.

    It dies with the supervisor, however that ends. Call it from the supervisor's main thread only:
    the kernel ties a child's life to the thread that forked it.

    Args:
        own_log: it writes its log file itself; stdout and stderr go beside it.
    """
    log = layout.console(name) if own_log else layout.log(name)
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=layout.root,
            env=dict(environ),
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
    return Daemon(name, process, log)


def reap(daemons: Sequence[Daemon]) -> None:
    """Collect every child that has ended, the orphans that this process inherited included."""
    known = {daemon.process.pid: daemon for daemon in daemons}
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if ended.si_pid in known:
            known[ended.si_pid].process.poll()
        else:
            os.waitpid(ended.si_pid, os.WNOHANG)


def tail(log: Path) -> list[str]:
    """The last lines of a log file, none when it cannot be read."""
    try:
        with log.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, _TAIL_LINES)]
    except OSError:
        return []


def _ending(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"by signal {-status}"
