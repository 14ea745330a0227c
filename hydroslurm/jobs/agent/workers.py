"""The workers of one node, the requests that each of them is still owed, and how they end.

A request is forwarded by its meaning, and only to a process that has announced that it listens. One
that is still importing would die of the signal: it is owed the latest request of each kind until it
listens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hydroslurm.core import registry
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.exitcodes import CANCELLED, MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.core.proc import catches, children_of
from hydroslurm.core.status import RankStatus, read_status, status_of

Meaning = Literal["slurm_pause", "slurm_resume", "user_pause", "user_resume", "stop", "warning"]
MEANINGS: tuple[Meaning, ...] = (
    "slurm_pause", "slurm_resume", "user_pause", "user_resume", "stop", "warning",
)  # fmt: skip
"""Those of a SignalPlan that an agent forwards."""

PATIENCE_S = 10.0
"""After so long a worker without a handler for SIGTERM gets it all the same: it is a program that
saves nothing, or it hangs in its imports. Less than any useful grace time, more than an import
takes."""

_ENDS: Mapping[Meaning, Meaning] = {
    "slurm_resume": "slurm_pause",
    "user_resume": "user_pause",
}


@dataclass
class Worker:
    """One process that torchrun has started.

    Attributes:
        pid: that torchrun knows; the rank itself may be a child of it.
        entry: what the rank has announced; None until then.
        owed: requests that it has not received yet -> since when, by the clock
            of :class:`Workers`.
    """

    local_rank: int
    pid: int
    entry: registry.Entry | None = None
    owed: dict[Meaning, float] = field(default_factory=dict)

    @property
    def rank_pid(self) -> int:
        """That of the rank, as far as it has announced itself."""
        return self.pid if self.entry is None else self.entry.pid


class Workers:
    """All workers of this node. Any thread."""

    def __init__(self, base: Path | None) -> None:
        """``base``: the registry's folder; without one (None) only a stop can be forwarded."""
        self._base = base
        self._standing: list[Meaning] = []
        self._clock = AwakeClock()
        self._lock = threading.RLock()
        self.all: tuple[Worker, ...] = ()

    @property
    def owe(self) -> bool:
        """Whether any worker is still owed a request."""
        return any(worker.owed for worker in self.all)

    def start(self, pids: Mapping[int, int]) -> None:
        """Replace the workers by new ones, local rank -> pid. They are owed a stop, and a pause
        that nobody has ended."""
        with self._lock:
            self.all = tuple(Worker(local_rank, pid) for local_rank, pid in sorted(pids.items()))
            now_s = self._clock.now_s()
            for worker in self.all:
                worker.owed.update(dict.fromkeys(self._standing, now_s))

    def ask(self, meaning: Meaning) -> None:
        """Forward a request, to each worker as soon as it listens."""
        ended = _ENDS.get(meaning)
        with self._lock:
            self._standing = [each for each in self._standing if each not in (ended, meaning)]
            if ended is None:
                self._standing.append(meaning)
            now_s = self._clock.now_s()
            for worker in self.all:
                if ended is not None:
                    worker.owed.pop(ended, None)
                if ended is None or worker.entry is not None:
                    worker.owed.pop(meaning, None)
                    worker.owed[meaning] = now_s
            self.look()

    def stop(self) -> None:
        """Stop the workers running now; those started later are not affected."""
        with self._lock:
            standing = list(self._standing)
            self.ask("stop")
            self._standing = standing

    def look(self) -> None:
        """Find workers that have announced themselves, and deliver what they are owed."""
        with self._lock:
            now_s = self._clock.now_s()
            for worker in self.all:
                if worker.entry is None:
                    worker.entry = self._announced(worker.pid)
                for meaning, since_s in list(worker.owed.items()):
                    if _give(worker, meaning, waited_s=now_s - since_s):
                        del worker.owed[meaning]

    def kill_listeners(self) -> None:
        """Kill those that would take torchrun's SIGTERM for a stop of the job: they would save,
        have the job requeued and exit, where only a restart is meant."""
        self.look()
        for worker in self.all:
            if worker.entry is not None:
                send_group(worker.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill them all."""
        for worker in self.all:
            send_group(worker.pid, signal.SIGKILL)

    def statuses(self) -> list[RankStatus | None]:
        """What each of them has told; None for one that has told nothing."""
        return [_status_of(worker) for worker in self.all]

    def are_stopping(self, local_ranks: Collection[int]) -> bool:
        """Whether one of these has announced that it is stopping."""
        found = (_status_of(each) for each in self.all if each.local_rank in local_ranks)
        return any(status is not None and status.state == "stopping" for status in found)

    def _announced(self, pid: int) -> registry.Entry | None:
        """The entry of the process, or of its nearest descendant (below a shell script)."""
        if self._base is None:
            return None
        found = (registry.find(self._base, each) for each in family(pid))
        return next((entry for entry in found if entry is not None), None)


def _status_of(worker: Worker) -> RankStatus | None:
    if worker.entry is None:
        return None
    state = read_status(status_of(Path(worker.entry.events)))
    # the file is that of the rank, and an earlier attempt may have been the last to write
    return state if state is not None and state.pid == worker.entry.pid else None


def _give(worker: Worker, meaning: Meaning, *, waited_s: float) -> bool:
    """Signal the worker if that is harmless; returns whether the request is settled."""
    entry = worker.entry
    if entry is not None:
        signo = entry.signals.get(meaning)
        if signo is None:
            return True
        if signo == signal.SIGCONT or _listens(entry.pid, signo):
            send(entry.pid, signo)
            return True
    if meaning != "stop":
        return False
    if entry is None and _listens(worker.pid, signal.SIGTERM):
        return send(worker.pid, signal.SIGTERM) or True
    if waited_s > PATIENCE_S:
        send_group(worker.pid, signal.SIGTERM)
        return True
    return False


def family(pid: int) -> Iterator[int]:
    """The process and all its descendants, parents first."""
    yield pid
    for child in children_of(pid):
        yield from family(child)


def _listens(pid: int, signo: int) -> bool:
    """Whether the process lives, and has a handler for the signal."""
    with contextlib.suppress(OSError):
        return catches(pid, signo)
    return False


def send(pid: int, signo: int) -> bool:
    """Signal one process; False when it is gone."""
    try:
        os.kill(pid, signo)
    except ProcessLookupError:
        return False
    return True


def send_group(pid: int, signo: int) -> None:
    """Signal the process, or its whole group if it leads one, as torchrun's workers do."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signo)
        else:
            os.kill(pid, signo)


def exit_codes(pcontext: Any) -> dict[int, int | None]:
    """The exit code of each local rank's worker, negative for a signal; None: it lives. Does not
    reap them: torch waits for them too.

    Args:
        pcontext: torch's, of the workers of this node.
    """
    return {rank: _exit_code(pcontext, rank, pid) for rank, pid in pcontext.pids().items()}


def _exit_code(pcontext: Any, local_rank: int, pid: int) -> int | None:
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torch was first
        handler = getattr(pcontext, "subprocess_handlers", {}).get(local_rank)
        return 0 if handler is None else handler.proc.returncode
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


ON_PURPOSE = (MUST_NOT_RUN_AGAIN, CANCELLED, RUN_AGAIN)
"""The most binding first: a cancelled job must not be requeued because one of its ranks wants
it."""
_KILLED_BY_TERM = -int(signal.SIGTERM)


def are_leaving(codes: Iterable[int | None], *, stop_asked: bool, others_leave: bool) -> bool:
    """Whether workers of a node live that leave by themselves, and are waited for: not those that
    cannot go on without one that has failed.

    Args:
        codes: exit code of each as Python reports it, negative for a signal; None: it lives.
        stop_asked: this agent was asked to stop.
        others_leave: those that live are known to be stopping, or may still be about to.
    """
    all_codes = list(codes)
    if None not in all_codes:
        return False
    ended = [code for code in all_codes if code]
    if stop_asked:
        return bool(ended)
    return others_leave and any(_on_purpose(code, stop_asked=False) for code in ended)


def node_status(codes: Iterable[int], *, stop_asked: bool) -> int | None:
    """The status of a node whose workers have all ended; None leaves it to torchrun.

    What was saved stays saved even if another worker crashed while exiting. A worker that SIGTERM
    killed was not ready to save: it counts as ended by a stop only if no other says more.
    """
    ended = set(codes)
    for code in ON_PURPOSE:
        if code in ended:
            return code
    if stop_asked and _KILLED_BY_TERM in ended and not any(code > 0 for code in ended):
        return CANCELLED
    return None


def failure_status(codes: Collection[int], *, stop_asked: bool) -> int | None:
    """The status of a node whose first workers to fail, at once as far as we can tell, had these
    exit codes; None if none has failed.

    Torchrun always exits with 1. Here 128 + N stands for a signal, as in a shell, so that a restart
    policy can tell a killed worker from one that crashed. The greatest code wins: Python exits with
    1 after any exception, also one about a peer that was killed.
    """
    failed = [code for code in codes if code and not _on_purpose(code, stop_asked=stop_asked)]
    return max((128 - code if code < 0 else code for code in failed), default=None)


def _on_purpose(code: int, *, stop_asked: bool) -> bool:
    return code in ON_PURPOSE or (stop_asked and code == _KILLED_BY_TERM)


def what_is_missing(script: str, *, is_program: bool, is_module: bool) -> tuple[int, str] | None:
    """The status of a node without its script or program, as if srun had started it directly, and
    one line about it: 2 (as Python) for a missing script, 127 for a missing program, 126 for one
    that cannot be run. None if it is there.

    A module is not looked for: that would import its parents.

    Args:
        script: torchrun's ``training_script``.
        is_program: started as it is (``--no-python``); without a slash, from the PATH.
        is_module: ``-m``.
    """
    host, path = socket.gethostname(), Path(script)
    if is_module or (shutil.which(script) is not None if is_program else path.exists()):
        return None
    if is_program:
        place = path.absolute() if os.sep in script else f"{script!r} on the PATH"
        return 126 if os.sep in script and path.exists() else 127, (
            f"there is no program {place} that can be run on {host}; give a path that all nodes "
            "see, chmod +x it, or omit --no-python for a Python script"
        )
    return 2, (
        f"there is no script {path.absolute()} on {host}; give a path that all nodes see, or start "
        "in its folder (srun --chdir). torchrun's options go before the script, its own after it"
    )
