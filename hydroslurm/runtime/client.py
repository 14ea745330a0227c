"""Pause and resume a process of this machine by its pid.

    hydroslurm.send_signal(1234, "pause")

A signal whose default action is to kill is never sent to a process that does not listen to it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from hydroslurm.core import proc, registry
from hydroslurm.core.ack import (
    Answer,
    judge_pause,
    judge_resume,
    judge_vacate,
    wait_for_answers,
)
from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.signals import signal_name
from hydroslurm.core.status import NEVER, RankStatus, read_status, status_of
from hydroslurm.errors import AckTimeout, TargetError, UsageError
from hydroslurm.gate.signals import SignalPlan, is_ours_alone
from hydroslurm.vacate.request import ask_to_vacate

Verb = Literal["pause", "resume"]
_POLL_S = 0.05


def send_signal(pid: int, action: str, *, environ: Mapping[str, str] | None = None) -> None:
    """Ask a process to pause or to resume, and return at once.

    Args:
        pid: a process in which hydroslurm is installed.
        action: ``pause`` or ``resume``.
        environ: instead of ``os.environ``.

    Raises:
        UsageError: another action.
        TargetError: no such process, not ours, or it does not handle the signal, which would have
            killed it or meant something else to it.
    """
    entry = _entry(pid, environ)
    _send(pid, _signal_for(action, entry), entry)


def pause(
    pid: int,
    *,
    timeout_s: float = 10.0,
    vacate: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Answer:
    """Pause a process and wait until it reports that it is parked.

    Args:
        vacate: have it move its device memory to the host as well, and wait for that.

    Raises:
        TargetError: as :func:`send_signal`; or the process keeps no events, so it could not answer
            (it was not signalled).
        AckTimeout: it was signalled and did not answer in time.
    """
    return _ask(pid, "pause", timeout_s, environ, vacate=vacate)


def resume(
    pid: int, *, timeout_s: float = 10.0, environ: Mapping[str, str] | None = None
) -> Answer:
    """Undo :func:`pause` and wait until the process runs; raises as that does."""
    return _ask(pid, "resume", timeout_s, environ)


def _ask(
    pid: int,
    verb: Verb,
    timeout_s: float,
    environ: Mapping[str, str] | None,
    *,
    vacate: bool = False,
) -> Answer:
    entry = _entry(pid, environ)
    if entry is None:
        _listens(pid, 1)  # or there is no such process
        raise TargetError(
            f"process {pid} has not announced itself to this user: hydroslurm is not installed in "
            "it, or it runs as another user or on another machine. It was not signalled. Of a "
            f"Slurm job give the id: hydroslurm {verb} JOB"
        )
    path = status_of(Path(entry.events))
    before = read_status(path)
    if before is None or before.pid != pid:  # it has only just been installed
        before = RankStatus(entry.rank, "running", NEVER, pid=pid)
    if vacate:
        try:
            ask_to_vacate(Path(entry.events), number=time.time_ns())
        except OSError as error:
            raise TargetError(
                f"the process was left alone: it cannot be asked to vacate: {error}"
            ) from error
    _send(pid, _signal_for(verb, entry), entry)
    answers = wait_for_answers(
        {entry.rank: (path, before)},
        judge_resume if verb == "resume" else judge_vacate if vacate else judge_pause,
        timeout_s=timeout_s,
    )
    if entry.rank not in answers:
        raise AckTimeout(
            f"process {pid} was signalled and did not answer within {timeout_s:g} s. It may be "
            "inside one long operator "
            f"(it parks when that ends), stopped, or unable to write {path}"
        )
    return answers[entry.rank]


def is_starting(pid: int, *, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a process is a Python of ours that has not announced itself, and may still do so."""
    try:
        program = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # none, or somebody else's
        return False
    return program.startswith("python") and _entry(pid, environ) is None


def wait_for_start(pid: int, *, timeout_s: float, environ: Mapping[str, str] | None = None) -> None:
    """Wait, at most ``timeout_s``, until a process has announced itself or has ended."""
    until_mono_s = time.monotonic() + timeout_s
    while is_starting(pid, environ=environ) and time.monotonic() < until_mono_s:
        time.sleep(_POLL_S)


def _entry(pid: int, environ: Mapping[str, str] | None) -> registry.Entry | None:
    """What a process has announced, where we or its own environment would have it do so: a job's
    TMPDIR is not that of a shell."""
    ours = os.environ if environ is None else environ
    theirs: dict[str, str] = {}
    with contextlib.suppress(OSError):
        theirs = proc.environ_of(pid)
    bases = dict.fromkeys((registry.folder(ours), *registry.places(ours), *registry.places(theirs)))
    return next((entry for base in bases if (entry := registry.find(base, pid))), None)


def _signal_for(action: str, entry: registry.Entry | None) -> int:
    if action not in ("pause", "resume"):
        raise UsageError(f"action {action!r} is not known; use 'pause' or 'resume'")
    name = f"user_{action}"
    signals = entry.signals if entry else vars(SignalPlan())
    number = signals.get(name)
    if number is None:
        raise TargetError(
            f"process {entry.pid if entry else '?'} was installed without a {name} signal; use its "
            "API"
        )
    return int(number)


def _send(pid: int, signo: int, entry: registry.Entry | None) -> None:
    if pid <= 0:
        raise UsageError(f"pid {pid} is not a process; give the positive id of one")
    if not _listens(pid, signo):
        raise TargetError(
            f"process {pid} does not listen to {signal_name(signo)}, which would kill it; it was "
            "not signalled. "
            "Call hydroslurm.install() in it, or start it with `hydroslurm submit`"
        )
    if entry is None or _is_replaced(entry, signo):
        why = "has not announced itself to this user" if entry is None else "had it replaced since"
        raise TargetError(
            f"process {pid} has a handler for {signal_name(signo)} that is not hydroslurm's (it "
            f"{why}). What that does is not known: Lightning saves and requeues. It was not "
            f"signalled. If you know better: kill -{signo} {pid}"
        )
    try:
        os.kill(pid, signo)
    except ProcessLookupError:
        raise TargetError(f"there is no process {pid}") from None
    except PermissionError:
        raise TargetError(
            f"process {pid} belongs to another user; only its owner and root may signal it"
        ) from None


def _listens(pid: int, signo: int) -> bool:
    """Whether the process has a handler for a signal.

    Raises:
        TargetError: no such process.
    """
    try:
        return proc.catches(pid, signo)
    except OSError:
        raise TargetError(f"there is no process {pid}") from None


def _is_replaced(entry: registry.Entry, signo: int) -> bool:
    """Whether the process has reported another handler over ours."""
    replaced = False
    try:
        kinds = (EventKind.INSTALLED, EventKind.HANDLER_REPLACED)
        for event in read_events(Path(entry.events), kinds=kinds):
            if event.pid != entry.pid:
                continue
            of_signal = event.data.get("signal") == signal_name(signo)
            if event.kind is EventKind.INSTALLED:
                replaced = False
            elif event.kind is EventKind.HANDLER_REPLACED and of_signal:
                replaced = not is_ours_alone(event.data)
    except OSError:  # kept from writing: the mask is all that is known
        return False
    return replaced
