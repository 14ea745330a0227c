"""Which job steps of a job hear a pause by signal, and why the others are left alone.

``scancel --signal`` reaches every process of a job step (under proctrack/linuxproc) or each of its
tasks, and SIGUSR1 kills whoever does not know it, or means something else to them: Lightning saves
and requeues. So it goes only to steps whose ranks have written down that they take it, and behind
whom nobody would die of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.signals import signal_name
from hydroslurm.gate.signals import is_ours_alone

Verb = Literal["pause", "resume"]


@dataclass
class _Step:
    """All that is known of one job step.

    Attributes:
        ranks: how each announced itself, by the key of its file.
        tasks: that have come so far, ended ones too.
        replaced: per rank the signals that others have a handler for.
    """

    ranks: dict[Hashable, Event] = field(default_factory=dict)
    tasks: set[int] = field(default_factory=set)
    replaced: dict[Hashable, set[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Listeners:
    """Whom a signal may be sent to.

    Attributes:
        signals: job step -> the number of the signal that its ranks take.
        ranks: the files' keys of those that will hear it.
        refusals: of each other step why it is left alone.
    """

    signals: Mapping[int, int]
    ranks: frozenset[Hashable]
    refusals: tuple[str, ...]


def listeners(files: Mapping[Any, Path], verb: Verb, *, restart_count: int) -> Listeners:
    """Read who has announced itself in the present attempt, in files under any names. Who wrote a
    file that cannot be read is not among them."""
    signals: dict[int, int] = {}
    ranks: set[Hashable] = set()
    refusals: list[str] = []
    for step_id, step in _steps(files, restart_count).items():
        reason = _why_not(step_id, step, verb)
        if reason:
            refusals.append(reason)
            continue
        signals[step_id] = _asked_by(next(iter(step.ranks.values())))[verb]
        ranks |= step.ranks.keys()
    return Listeners(signals, frozenset(ranks), tuple(refusals))


_BATCH = -1
"""In the place of a step, for what runs in the batch script."""


def _steps(files: Mapping[Any, Path], restart_count: int) -> dict[int, _Step]:
    steps: dict[int, _Step] = {}
    for key, path in files.items():
        of_pid: dict[tuple[str, int], _Step] = {}
        with contextlib.suppress(OSError):
            for event in read_events(path):
                if event.restart_count == restart_count:
                    _take(steps, of_pid, key, event)
    return {step_id: step for step_id, step in steps.items() if step.ranks}


def _take(
    steps: dict[int, _Step], of_pid: dict[tuple[str, int], _Step], key: Hashable, event: Event
) -> None:
    process = event.host, event.pid
    if event.kind is EventKind.INSTALLED:
        step_id = event.data.get("step_id")
        step = steps.setdefault(_BATCH if step_id is None else int(step_id), _Step())
        of_pid[process] = step
        step.ranks[key], step.replaced[key] = event, set()
        step.tasks.add(event.data.get("task", event.rank))
        return
    step = of_pid.get(process, _Step())
    known = step.ranks.get(key)
    if known is None or (known.host, known.pid) != process:
        return
    if event.kind is EventKind.HANDLER_REPLACED:
        of_others = {str(event.data.get("signal"))}
        step.replaced[key] -= of_others
        if not is_ours_alone(event.data):
            step.replaced[key] |= of_others
    elif event.kind is EventKind.UNINSTALLED:
        del step.ranks[key]


def _asked_by(announced: Event) -> Mapping[str, int]:
    """Verb -> the number of the signal that the rank takes for it."""
    asked_by: Mapping[str, int] = announced.data.get("asked_by", {})
    return asked_by


def _why_not(step_id: int, step: _Step, verb: Verb) -> str:
    """Empty where the signal harms nobody and every rank takes it."""
    if step_id == _BATCH:
        return (
            "its ranks run in the batch script without srun, where a signal would reach the batch "
            "shell too; start them with srun"
        )
    reasons = (_of_rank(key, step, verb) for key in step.ranks)
    reason = next(filter(None, reasons), "") or _of_signals(step, verb) or _of_tasks(step)
    return f"step {step_id}: {reason}" if reason else ""


def _of_rank(key: Hashable, step: _Step, verb: Verb) -> str:
    told = step.ranks[key]
    who = f"rank {told.rank} (pid {told.pid} on {told.host})"
    number = _asked_by(told).get(verb)
    if number is None:
        return f"{who} takes no signal for a {verb}: HYDROSLURM_SIGNALS, or it was ignored before"
    name = signal_name(number)
    if name in step.replaced[key]:
        return (
            f"{who} has another handler for {name} than hydroslurm's. What that does is not known: "
            "Lightning saves and requeues. Choose another signal, "
            f"HYDROSLURM_SIGNALS=user_{verb}=..., or have the library leave this one alone"
        )
    if deaf := told.data.get("deaf"):
        return (
            f"{name} would kill {', '.join(deaf)}, above {who}; start the script with "
            "srun itself, `exec` in the wrapper, or `hydroslurm agent` in the place of torchrun"
        )
    return ""


def _of_signals(step: _Step, verb: Verb) -> str:
    numbers = {_asked_by(told)[verb] for told in step.ranks.values()}
    if len(numbers) == 1:
        return ""
    names = ", ".join(sorted(map(signal_name, numbers)))
    return f"its ranks take different signals for a {verb} ({names})"


def _of_tasks(step: _Step) -> str:
    told = [one.data for one in step.ranks.values()]
    tasks = max((one.get("step_tasks", 0) for one in told), default=0)
    if len(step.tasks) >= tasks or all(one.get("held") for one in told):
        return ""
    return (
        f"{len(step.tasks)} of its {tasks} tasks have announced themselves, and the signal would "
        "kill the others. They may still be starting: try again. `srun --preempt` and "
        "HYDROSLURM_PREEMPT=pause protect tasks that start; helpers belong into a job step of "
        "their own"
    )
